"""Reads clocks, temperature and load of the device before and after timing; it sets nothing."""

from __future__ import annotations

import os

import pynvml
import torch


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
