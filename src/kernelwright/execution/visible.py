"""Has a process see one GPU of several."""

from __future__ import annotations

import os


def see_one_gpu(device: str) -> str:
    """Have this process and all it forks see one GPU only, so that no candidate can borrow another; its name in here."""
    if not device.startswith("cuda:"):
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = int(device.removeprefix("cuda:"))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return "cuda:0"
