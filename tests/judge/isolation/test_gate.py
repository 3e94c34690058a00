"""The device for one, or for those who measure nothing."""

from __future__ import annotations

import fcntl
import threading
from types import SimpleNamespace

import pytest
import torch

from kernelwright.judge.isolation import gate as gate_module
from kernelwright.judge.isolation.gate import DeviceGate, DeviceMemory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_lock(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def entered(way_in, *, while_held) -> bool:
    """Whether another evaluation gets in while `while_held` holds the device."""
    inside, leave = threading.Event(), threading.Event()

    def enter():
        with way_in:
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
    assert entered(DeviceGate(CPU)(shared=second), while_held=DeviceGate(CPU)(shared=first)) is together


@pytest.mark.parametrize(
    ("first", "second", "together"), [(False, False, True), (False, True, False), (True, False, False), (True, True, False)]
)
def test_one_may_have_the_memory_alone(first, second, together):
    memory = DeviceMemory(CPU)
    assert entered(memory(alone=second), while_held=memory(alone=first)) is together


@pytest.mark.parametrize("kind", [DeviceGate, DeviceMemory])
def test_who_comes_after_one_that_waits_to_be_alone_waits_too(kind, monkeypatch):
    monkeypatch.setattr(gate_module, "_PATIENCE_S", 60.0)
    turns, order = kind(CPU), []

    def enter(alone):
        return turns(alone=alone) if kind is DeviceMemory else turns(shared=not alone)

    def use(name, alone):
        with enter(alone):
            order.append(name)

    waiting = threading.Thread(target=use, args=("alone", True))
    later = threading.Thread(target=use, args=("later", False))
    with enter(False):
        waiting.start()
        while not is_locked(turns._turn):
            pass
        later.start()
        later.join(0.2)
        assert order == []
    waiting.join()
    later.join()
    assert order == ["alone", "later"]


def is_locked(path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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


def test_one_that_waits_for_long_to_measure_lets_others_in_meanwhile(monkeypatch):
    monkeypatch.setattr(gate_module, "_PATIENCE_S", 0.0)
    order = []

    def measure():
        with DeviceGate(CPU)():
            order.append("alone")

    waiting = threading.Thread(target=measure)
    with DeviceGate(CPU)(shared=True):  # compiles, say
        waiting.start()
        for _ in range(3):
            with DeviceGate(CPU)(shared=True):
                order.append("later")
    waiting.join()
    assert order == ["later", "later", "later", "alone"]


def test_time_in_front_of_the_gate_is_counted():
    gate = DeviceGate(CPU)
    with gate(shared=True):
        pass
    once_s = gate.waited_s
    assert once_s > 0
    with gate():
        pass
    assert gate.waited_s > once_s


def test_the_lock_of_a_gpu_is_named_after_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    assert DeviceGate(torch.device("cuda", 0))._path.name == "kernelwright-gpu-1-2.lock"
    assert DeviceGate(CPU)._path.name == "kernelwright-cpu.lock"


@pytest.mark.parametrize("looks", [[True, False], [True, False, True], [True, False, True, False]])
def test_one_whose_patience_is_over_gets_in_whenever_nobody_is(monkeypatch, looks):
    """It does not sleep out the time for which it lets others in."""
    gate, kept_out = DeviceGate(CPU), []

    def locked(file):
        kept_out.append(is_locked(gate._turn))
        return len(kept_out) == len(looks)

    monkeypatch.setattr(gate_module, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(gate_module, "_locked", locked)
    monkeypatch.setattr(gate_module.time, "sleep", lambda seconds: pytest.fail("it slept"))
    with gate():
        pass
    assert kept_out == looks
