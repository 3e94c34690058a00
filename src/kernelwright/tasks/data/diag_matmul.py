"""gemm: a diagonal matrix is built and multiplied in full; bound by compute, memory would do."""

import torch
from torch import nn

N, M = 1024, 1024


class Model(nn.Module):
    """Product of a diagonal matrix, given by its diagonal, and a dense matrix."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.diag(a) @ b


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(N), torch.randn(N, M)]


def get_init_inputs() -> list[int]:
    return []
