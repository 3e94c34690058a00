"""A GPU that endless kernels keep from others; needs one."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from kernelwright.errors import CrowdedError
from kernelwright.judge import Judge, Settings
from kernelwright.judge.isolation.gate import DeviceGate
from kernelwright.records import Reason
from tests.judge.snippets import RELU, candidate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FOREVER = """
import triton
import triton.language as tl
@triton.jit
def forever(flag, out):
    while tl.load(flag, volatile=True) == 0:
        tl.store(out, 1.0)
"""
CALL = """
flag = torch.zeros(1, dtype=torch.int32, device=x.device)
forever[(1,)](flag, x)
torch.cuda.synchronize()
return torch.relu(self.linear(x))
"""
BUSY = """
import torch
x = torch.ones(8192, 8192, device="cuda")
torch.cuda.synchronize()
print("busy", flush=True)
while True:
    x @ x
    torch.cuda.synchronize()
"""


def test_a_gpu_at_work_for_another_process_is_told_from_one_at_rest():
    gate = DeviceGate(torch.device("cuda", 0))
    assert gate.rests_within(10.0)
    busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        assert busy.stdout.readline() == "busy\n"
        assert not any(gate.is_quiet() for _ in range(5))
    finally:
        busy.kill()
        busy.wait()
    assert gate.rests_within(10.0)


def test_a_kernel_that_never_ends_is_ended_when_another_one_is_timed_and_alone_as_well(monkeypatch):
    events, began = [], threading.Event()
    aside = DeviceGate.stand_aside

    def stand_aside(self, file, worker):
        if not worker.is_trusted and threading.current_thread() is evaluating:
            began.set()
        return aside(self, file, worker)

    monkeypatch.setattr(DeviceGate, "stand_aside", stand_aside)
    long = Settings.quick(threads=1, unstoppable_limit_s=1.0, stall_limit_s=3600.0, build_limit_s=3600.0)
    with Judge("cuda", long) as first, Judge("cuda", Settings.quick(threads=1)) as second:

        def evaluate():
            with pytest.raises(CrowdedError) as caught:
                first.evaluate(RELU, candidate(CALL, top=FOREVER), alone=False)
            events.append(str(caught.value))

        evaluating = threading.Thread(target=evaluate)
        evaluating.start()
        began.wait()
        found = second.evaluate(RELU, candidate())
        assert found.speedup is not None, (found.reason, found.detail)
        events.append("timed")
        evaluating.join()
        assert events[1] == "timed"
        assert "work on the GPU went on for 1 s after its process had been stopped" in events[0]
        short = long.model_copy(update={"stall_limit_s": 10.0})
        found = first.evaluate(RELU, candidate(CALL, top=FOREVER), settings=short, alone=True)
    assert found.reason is Reason.RUN_TIMEOUT
    assert "no progress within 10 s" in found.detail
