"""Names of devices, on a machine with two GPUs and on one with none."""

from __future__ import annotations

import pytest
import torch

from kernelwright.errors import DeviceError
from kernelwright.gpu.devices import devices_of, resolve_device


def test_devices_by_name(set_gpus):
    set_gpus(0)
    assert resolve_device("cpu") == resolve_device("auto") == torch.device("cpu")
    with pytest.raises(DeviceError, match="finds none"):
        resolve_device("cuda")
    with pytest.raises(DeviceError, match="`tpu`"):
        resolve_device("tpu")
    with pytest.raises(DeviceError, match="cuda:N"):
        resolve_device("cuda:99999999999999999999")
    set_gpus(2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="2 GPUs"):
        resolve_device("cuda:2")


def test_all_visible_gpus_are_meant_unless_one_is_named(set_gpus):
    set_gpus(2)
    assert devices_of("cuda") == devices_of("auto") == ["cuda:0", "cuda:1"]
    assert devices_of("cuda:1") == ["cuda:1"]
    assert devices_of("cpu") == ["cpu"]
    set_gpus(0)
    assert devices_of("auto") == ["cpu"]
