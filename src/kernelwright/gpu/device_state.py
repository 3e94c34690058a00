"""Reads clocks, temperature, load and free memory of a device; it sets nothing."""

from __future__ import annotations

import os

import pynvml
import torch

_AMPLE_SHARE = 1 / 5
"""Share of a GPU's memory that evaluations should find free. Where all processes were kept, 11 of an H100's 79 GiB were
left, and tasks did not fit. Where they were kept only while a third was free, next to none was, and starts took 36 s of an
evaluation in place of 13 (`docs/log.md`). Our choice."""
_SCARCE_SHARE = 1 / 20
"""The same for processes of the reference. Every evaluation takes them, and the memory that a job is said to take has their
contexts in it. Races of large tasks leave less than a fifth free for half of the time. Our choice."""


def has_room_for(kind: str, device: torch.device) -> bool:
    """Whether a GPU has enough left for a process of a kind (`WorkerSpec.kept_as`) that only waits."""
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
