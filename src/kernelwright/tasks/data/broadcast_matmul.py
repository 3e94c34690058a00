"""gemm-extreme: every row is multiplied sixteen times; bound by compute done over again."""

import torch
from torch import nn

ROWS, COPIES, K, N = 64, 16, 512, 256


class Model(nn.Module):
    """Rows repeated along a new axis, then multiplied by one matrix."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows, k = x.shape
        repeated = x.unsqueeze(1).expand(rows, self.copies, k)
        return torch.matmul(repeated, w)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(ROWS, K), torch.randn(K, N)]


def get_init_inputs() -> list[int]:
    return [COPIES]
