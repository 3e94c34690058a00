"""Resolves the names of devices, and reads clocks, temperature, load and free memory; it sets nothing."""

from __future__ import annotations

import os
import re

import pynvml
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


_AMPLE_SHARE = 1 / 5
"""Share of a GPU's memory that evaluations should find free. With all processes kept, 11 of an H100's 79 GiB were
left, and tasks did not fit. With a third as the limit next to none was kept, and starts took 36 s of an evaluation
instead of 13 (`docs/log.md`). Our choice."""
_SCARCE_SHARE = 1 / 20
"""The same for processes of the reference. Every evaluation takes them, and the memory that a job is said to take has their
contexts in it. Races of large tasks leave less than a fifth free for half of the time. Our choice."""


def has_room_for(kind: str, device: torch.device) -> bool:
    """True where a GPU has enough left for a process of a kind (`WorkerSpec.kept_as`) that only waits."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes >= (_SCARCE_SHARE if kind == "reference" else _AMPLE_SHARE) * total_bytes


def device_state(device: torch.device) -> dict[str, float | str]:
    """Return the driver's report on the GPU, or the load average of the processor; empty where nothing can be read.

    The library, not nvidia-smi: starting that takes a lock of the driver which everybody else's allocations wait for.
    """
    if device.type != "cuda":
        return {"load_average": " ".join(f"{value:.2f}" for value in os.getloadavg())}
    try:
        pynvml.nvmlInit()
        # By its name: processes may number GPUs differently.
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return {
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
            "temperature_c": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "utilization_pct": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "clock_event_reasons": f"{pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu):#018x}",
        }
    except pynvml.NVMLError:
        return {}
