"""netvlad: soft cluster assignment, two skinny products, two normalisations; bound by memory and launches."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, POINTS, FEATURES, CLUSTERS = 8, 512, 128, 32


class Model(nn.Module):
    """Residuals to learned cluster centres, summed by soft assignment."""

    def __init__(self, features: int, clusters: int) -> None:
        super().__init__()
        self.assign = nn.Parameter(torch.randn(features, clusters) / features**0.5)
        self.norm = nn.BatchNorm1d(clusters)
        self.centres = nn.Parameter(0.1 * torch.randn(1, features, clusters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, points, features = x.shape
        flat = x.reshape(-1, features)
        weights = torch.softmax(2.0 * self.norm(flat @ self.assign), dim=1).view(batch, points, -1)
        mass = torch.sum(weights, dim=1, keepdim=True)
        vlad = torch.matmul(x.transpose(1, 2), weights) - mass * self.centres
        vlad = F.normalize(vlad, dim=1)
        return F.normalize(vlad.reshape(batch, -1), dim=1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, POINTS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, CLUSTERS]
