"""The kernels of `helion_trial.py` in Helion's tile language; needs Helion to be imported."""

# ruff: noqa: D103 - a kernel is known by its task
from __future__ import annotations

import math

import helion
import helion.language as hl
import torch


@helion.kernel
def softmax(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        out[rows, :] = torch.softmax(x[rows, :], dim=1)
    return out


@helion.kernel
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        row = x[rows, :]
        variance, mean = torch.var_mean(row, dim=1, keepdim=True, correction=0)
        out[rows, :] = (row - mean) * torch.rsqrt(variance + 1e-5) * weight[None, :] + bias[None, :]
    return out


@helion.kernel
def rms_norm(x: torch.Tensor) -> torch.Tensor:
    n, _, s = x.size()
    out = torch.empty_like(x)
    for image, points in hl.tile([n, s]):
        columns = x[image, :, points]
        out[image, :, points] = columns / torch.sqrt(torch.mean(columns * columns, dim=1, keepdim=True) + 1e-5)
    return out


@helion.kernel
def middle_sum(x: torch.Tensor) -> torch.Tensor:
    n, _, s = x.size()
    out = torch.empty([n, 1, s], dtype=x.dtype, device=x.device)
    for image, points in hl.tile([n, s]):
        out[image, 0, points] = torch.sum(x[image, :, points], dim=1)
    return out


@helion.kernel
def middle_max(x: torch.Tensor) -> torch.Tensor:
    n, _, s = x.size()
    out = torch.empty([n, s], dtype=x.dtype, device=x.device)
    for image, points in hl.tile([n, s]):
        out[image, points] = torch.amax(x[image, :, points], dim=1)
    return out


@helion.kernel
def middle_argmax(x: torch.Tensor) -> torch.Tensor:
    n, _, s = x.size()
    out = torch.empty([n, s], dtype=torch.int64, device=x.device)
    for image, points in hl.tile([n, s]):
        out[image, points] = torch.argmax(x[image, :, points], dim=1)
    return out


@helion.kernel
def cumsum(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        out[rows, :] = torch.cumsum(x[rows, :], dim=1)
    return out


@helion.kernel
def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    m, n = x.size()
    flat = x.view(-1)
    losses = torch.empty([m], dtype=x.dtype, device=x.device)
    for rows in hl.tile(m):
        row = x[rows, :]
        largest = torch.amax(row, dim=1)
        total = torch.sum(torch.exp(row - largest[:, None]), dim=1)
        chosen = hl.load(flat, [rows.index * n + target[rows]])
        losses[rows] = largest + torch.log(total) - chosen
    return losses.mean()


def _activated(value: torch.Tensor) -> torch.Tensor:
    value = torch.tanh(torch.sigmoid(value) * value)
    return torch.clamp(0.5 * value * (1.0 + torch.erf(value * 0.7071067811865476)), -1.0, 1.0)


@helion.kernel(dot_precision="tf32x3")
def product_tf32x3(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
    out = torch.empty([x.size(0), weight.size(0)], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile(out.size()):
        total = hl.zeros([rows, columns], dtype=torch.float32)
        for depth in hl.tile(x.size(1)):
            total = hl.dot(x[rows, depth], weight[columns, depth].T, acc=total)
        out[rows, columns] = _activated(total + bias[columns] + add[columns])
    return out


@helion.kernel(dot_precision="ieee")
def product_ieee(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
    out = torch.empty([x.size(0), weight.size(0)], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile(out.size()):
        total = hl.zeros([rows, columns], dtype=torch.float32)
        for depth in hl.tile(x.size(1)):
            total = hl.dot(x[rows, depth], weight[columns, depth].T, acc=total)
        out[rows, columns] = _activated(total + bias[columns] + add[columns])
    return out


@helion.kernel
def new_gelu(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size()):
        value = x[tile]
        out[tile] = 0.5 * value * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (value + 0.044715 * value * value * value)))
    return out


@helion.kernel
def instance_norm(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        row = x[rows, :]
        variance, mean = torch.var_mean(row, dim=1, keepdim=True, correction=0)
        out[rows, :] = (row - mean) * torch.rsqrt(variance + 1e-5)
    return out


@helion.kernel
def average_pool(x: torch.Tensor) -> torch.Tensor:
    n, h, w = x.size()
    out = torch.empty([n, h // 3, w // 3], dtype=x.dtype, device=x.device)
    for image, down, across in hl.tile(out.size()):
        total = hl.zeros([image, down, across], dtype=torch.float32)
        for i in hl.static_range(3):
            for j in hl.static_range(3):
                total += x[image, down.index * 3 + i, across.index * 3 + j]
        out[image, down, across] = total * (1.0 / 9.0)
    return out
