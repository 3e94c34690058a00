"""Finds the devices that a user's name for them stands for."""

from __future__ import annotations

import re

import torch

from kernelwright.errors import DeviceError


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is there.

    Raises:
        DeviceError: a GPU was asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise DeviceError(f"Wanted a device auto, cpu, cuda or cuda:N; found `{name}`.")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(
                "Wanted a CUDA device; torch finds none on this machine. Choose `cpu`, or see `kernelwright doctor`."
            )
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise DeviceError(f"Wanted {name}; this machine has {torch.cuda.device_count()} GPUs, counted from 0.")
        return torch.device("cuda", index)
    return torch.device("cpu")


def devices_of(name: str) -> list[str]:
    """Every device that a name stands for: `cuda`, and `auto` where there are GPUs, mean all visible ones.

    Raises:
        DeviceError: as `resolve_device`.
    """
    resolved = resolve_device(name)
    if resolved.type == "cuda" and ":" not in name:
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [str(resolved)]
