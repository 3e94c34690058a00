"""The device for one, or for those who measure nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from kernelwright.evaluation.gate import DeviceGate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_lock(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def entered(gate: DeviceGate, *, shared: bool, while_held) -> bool:
    """Whether another evaluation gets in while `while_held` holds the device."""
    inside, leave = threading.Event(), threading.Event()

    def enter():
        with gate(shared=shared):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=enter)
    with while_held:
        thread.start()
        got_in = inside.wait(0.2)
    assert inside.wait(10), "it gets in once the other has left"
    leave.set()
    thread.join()
    return got_in


@pytest.mark.parametrize(
    ("first", "second", "together"), [(False, False, False), (False, True, False), (True, False, False), (True, True, True)]
)
def test_only_those_who_measure_nothing_are_in_together(first, second, together):
    assert entered(DeviceGate(CPU), shared=second, while_held=DeviceGate(CPU)(shared=first)) is together


def test_what_was_held_alone_is_counted():
    gate = DeviceGate(CPU)
    with gate(shared=True):
        pass
    assert gate.held_s == 0.0
    with pytest.raises(ValueError), gate():
        raise ValueError
    once_s = gate.held_s
    assert once_s > 0
    with gate():
        pass
    assert gate.held_s > once_s


def test_the_lock_of_a_gpu_is_named_after_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    assert DeviceGate(torch.device("cuda", 0))._path.name == "kernelwright-gpu-1-2.lock"
    assert DeviceGate(CPU)._path.name == "kernelwright-cpu.lock"
