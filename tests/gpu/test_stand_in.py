"""Real cubins through the whole path on the CUDA driver's stand-in: parameters, leaks, turns, and a backend of the game."""

from __future__ import annotations

import ctypes
import json
import random
import struct
import threading
from collections import Counter
from itertools import groupby

import pytest

from kernelwright.assembly.backends import GpuBackend, Status
from kernelwright.gpu import disassemble
from kernelwright.gpu.launch_spec import TensorArgument
from kernelwright.gpu.launcher import TURNS_VARIABLE, packed_arguments
from kernelwright.gpu.target import load_target
from kernelwright.judge.schedules import ContainedLauncher, Plan
from kernelwright.sass import ANY_MOVE, Schedule, load
from tests.gpu import stand_in
from tests.gpu.fakes import SPEC, who_samples_when

pytestmark = [pytest.mark.toolchain, pytest.mark.skipif(stand_in.COMPILER is None, reason="needs a C compiler")]
_PARAMETER_ATTRIBUTE, _SIZED_FORMAT = 0x17, 4


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return stand_in.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def log(library, monkeypatch, tmp_path):
    monkeypatch.setenv(stand_in.VARIABLE, str(library))
    monkeypatch.setenv("FAKE_CUDA_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def parameter_sizes(cubin, entry):
    """Sizes of a kernel's parameters in bytes, in order, as its cubin states them."""
    table, count, names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HH", cubin, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * i) for i in range(count)]
    begin_names = headers[names][4]
    sizes, wanted = {}, f".nv.info.{entry}".encode()
    for name, _, _, _, begin, size, *_ in headers:
        if not cubin[begin_names + name :].startswith(wanted + b"\0"):
            continue
        at = begin
        while at < begin + size:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == _SIZED_FORMAT:
                if attribute == _PARAMETER_ATTRIBUTE:
                    _, ordinal, _, flags = struct.unpack_from("<IHHI", cubin, at)
                    sizes[ordinal] = flags >> 18
                at += value
    return [sizes[ordinal] for ordinal in range(len(sizes))]


@pytest.mark.parametrize(
    "name", ["corpus:row_sum", "corpus:rmsnorm", "corpus:attention_wgmma", "benchmarks/sass_kernels.py:int8_gemm"]
)
def test_arguments_have_the_number_and_sizes_of_the_kernels_parameters(name, request):
    target = load_target(name.replace("benchmarks", str(request.config.rootpath / "benchmarks")), 90)
    pointers = {tensor.name: 16 for tensor in target.spec.tensors}
    given = [ctypes.sizeof(value) for value in packed_arguments(target.spec, pointers).values]
    assert given == parameter_sizes(target.cubin, target.spec.entry)


def test_schedules_of_a_real_kernel_are_measured_and_nothing_leaks(log, row_sum):
    small = row_sum.spec.model_copy(
        update={"arguments": tuple(
            a.model_copy(update={"shape": tuple(min(n, 64) for n in a.shape)}) if isinstance(a, TensorArgument) else a
            for a in row_sum.spec.arguments
        )}
    )  # fmt: skip
    from dataclasses import replace

    target = replace(row_sum, spec=small)
    program = load(target.cubin, disassemble)
    schedule = Schedule(program.kernel(target.spec.entry))
    rng = random.Random(0)
    plan, again = Plan(coarse=2, fine=3), Plan(coarse=5, fine=5, rounds=4)
    verdicts = {}
    with GpuBackend(program, target, check_all=True, factory=stand_in.stand_in, plan=plan, again=again) as backend:
        for _ in range(30):
            schedule.play(ANY_MOVE.draw(schedule, rng))
            verdict = backend.measure(schedule)
            verdicts[id(verdict)] = verdict
            assert verdict.status is Status.MEASURED, verdict
            assert verdict.checked
            # The stand-in's times are within one percent of each other and have no noise.
            assert 0.99 < verdict.speedup < 1.01
        measured = backend.counts[Status.MEASURED]
        assert backend.control().noise_floor == pytest.approx(0.0, abs=1e-6)
    (line,) = [json.loads(text) for text in log.read_text().splitlines()]
    seemed_best = sum(verdict.blocks == again.coarse for verdict in verdicts.values())
    assert seemed_best > 0
    # The original, four copies for each of the control's five and for each schedule's times, one for its outputs, and
    # four in each round for what seemed better than the best so far.
    assert line["loads"] == 1 + 4 * 5 + (4 + 1) * measured + 4 * again.rounds * seemed_best
    assert (line["modules"], line["functions"]) == (1, 1)


def test_processes_that_share_a_gpu_take_turns(tmp_path, monkeypatch):
    monkeypatch.setenv(TURNS_VARIABLE, str(tmp_path / "turns"))
    monkeypatch.setenv("FAKE_LAUNCHER_SAMPLES", str(tmp_path / "samples"))
    children = [ContainedLauncher(SPEC, b"original", who_samples_when) for _ in range(2)]
    plan = Plan(coarse=10, fine=10)
    for child in children:
        child.ready()
    (tmp_path / "samples").write_text("")

    def ask(child):
        for _ in range(20):
            child.time(b"same", plan)

    threads = [threading.Thread(target=ask, args=(child,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        child.close()
    samples = (tmp_path / "samples").read_text().split()
    # One launch ahead of each copy and four samples of each block belong together.
    runs = [len(list(run)) for _, run in groupby(samples)]
    assert all(length % (4 + 4 * plan.coarse) == 0 for length in runs)
    assert set(Counter(samples).values()) == {20 * (4 + 4 * plan.coarse)}
