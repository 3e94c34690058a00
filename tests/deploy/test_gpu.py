"""The same path on a real GPU: run with `pytest tests/deploy/test_gpu.py` on a machine that has one."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import kernelwright
from kernelwright import sass
from kernelwright.assembly.backends import GpuBackend, Status
from kernelwright.deploy.cache import TunedCache
from kernelwright.deploy.capture import capture_launches
from kernelwright.deploy.compose import TunedLaunch, capture_candidate, compose
from kernelwright.deploy.deploy import Winner, deploy
from kernelwright.deploy.inductor import tunable_torch_compile, tuned_torch_compile
from kernelwright.errors import DeviceError
from kernelwright.gpu import disassemble
from kernelwright.gpu.driver import gpu_identity
from kernelwright.gpu.launch_spec import ScalarArgument, TensorArgument
from kernelwright.gpu.launcher import TURNS_VARIABLE, CudaLauncher
from kernelwright.gpu.target import corpus_specs, load_target
from kernelwright.gpu.triton_spec import TritonSpec
from kernelwright.judge.schedules import (
    ContainedLauncher,
    Plan,
    ScheduleFailedError,
    ScheduleFailure,
    confirm,
)
from kernelwright.records import Candidate, Task
from kernelwright.sass.identity import code_of
from tests.deploy import kernels
from tests.deploy.test_compose import CANDIDATE, TASK
from tests.sass.support import retuned


def the_gpu():
    try:
        return gpu_identity()
    except DeviceError:
        return None


GPU = the_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPU is None, reason="needs an NVIDIA GPU")]
N = 1 << 20


def taken_for_a_gain(target, tuned):
    """A real re-measurement whose interval is raised, so that deploying can be tested without an improvement."""
    (found,) = confirm(target, [tuned], processes=2, plan=Plan.steady(10), check_seeds=2)
    return dataclasses.replace(found, speedup=1.5, low=1.4, high=1.6, noise_floor=0.0)


@pytest.mark.parametrize("name", sorted(corpus_specs()))
def test_every_kernel_of_the_corpus_runs_repeats_itself_and_survives_legal_moves(name):
    target = load_target(f"corpus:{name}", GPU.architecture)
    with ContainedLauncher(target.spec, target.cubin) as child:
        assert child.ready().original_us > 1
        assert child.compare(retuned(target.cubin), [1, 2, 3]) is None
        # Equal code twice: whatever differs is noise.
        ratios = child.time(target.cubin, Plan(coarse=20, fine=20)).ratios
        assert 0.9 < np.median(ratios) < 1.1


def test_outputs_are_what_numpy_says():
    target = load_target("corpus:row_sum", GPU.architecture)
    launcher = CudaLauncher(target.spec)
    (found,) = launcher.outputs(launcher.load(target.cubin), 5)
    from kernelwright.gpu.launcher import initial_contents

    given = next(tensor for tensor in target.spec.tensors if tensor.role == "input")
    rows = np.frombuffer(initial_contents(given, 5), np.float32).reshape(given.shape)
    assert np.allclose(np.frombuffer(found, np.float32), rows.sum(axis=1), rtol=1e-4, atol=1e-2)


def misbehaving(mode):
    arguments = [
        TensorArgument(name="x_ptr", dtype="fp32", shape=(N,)),
        TensorArgument(name="y_ptr", dtype="fp32", shape=(N,), role="output"),
        ScalarArgument(name="n", value=N),
    ]
    spec = TritonSpec(kernels.misbehaves, arguments, (N // 1024,), {"MODE": mode, "BLOCK": 1024})
    return spec.build("misbehaves", GPU.architecture if GPU else 90)


def test_faults_hangs_and_wrong_outputs_are_contained_and_named():
    right = misbehaving(0)
    with ContainedLauncher(right.spec, right.cubin, limit_s=10) as child:
        assert child.compare(misbehaving(1).cubin, [1]) is not None
        for mode, failure in ((2, ScheduleFailure.FAULT), (3, ScheduleFailure.HANG)):
            with pytest.raises(ScheduleFailedError) as failed:
                child.compare(misbehaving(mode).cubin, [1])
            assert failed.value.failure is failure
            assert failure is not ScheduleFailure.FAULT or failed.value.detail == "CUDA_ERROR_ILLEGAL_ADDRESS"
            assert child.compare(right.cubin, [1, 2]) is None
        damaged = bytearray(right.cubin)
        damaged[:4] = b"none"
        with pytest.raises(ScheduleFailedError, match="CUDA_ERROR"):
            child.compare(bytes(damaged), [1])
        assert child.restarts == 3


def test_the_backend_measures_legal_schedules():
    target = load_target("corpus:gemm_leakyrelu", GPU.architecture)
    program = sass.load(target.cubin, disassemble)
    schedule = sass.Schedule(program.kernel())
    rng = random.Random(0)
    with GpuBackend(program, target, check_all=True) as backend:
        assert backend.control().original_us > 1
        for _ in range(20):
            move = sass.ANY_MOVE.draw(schedule, rng)
            if move is not None:
                schedule.play(move)
            verdict = backend.measure(schedule)
            assert verdict.status is Status.MEASURED, verdict
            assert 0.5 < verdict.speedup < 2.0


def short_target():
    arguments = [
        TensorArgument(name="x_ptr", dtype="fp32", shape=(4096,)),
        TensorArgument(name="y_ptr", dtype="fp32", shape=(4096,), role="inout"),
        ScalarArgument(name="n", value=4096),
        ScalarArgument(name="factor", type="fp32", value=3.0),
    ]
    return TritonSpec(kernels.scale, arguments, (4,), {"BLOCK": 1024}).build("short", GPU.architecture)


def test_a_kernel_shorter_than_a_launch_costs_the_host_is_told_apart_from_the_host():
    target = short_target()
    launcher = CudaLauncher(target.spec)
    handle = launcher.load(target.cubin)
    samples = [launcher.sample_us(handle, 16) for _ in range(50)]
    print("held back", launcher._hold, "samples", min(samples), np.median(samples), max(samples))
    assert np.median(samples) < 5
    assert np.quantile(samples, 0.9) < 1.3 * np.median(samples)


def test_processes_that_share_the_gpu_all_get_their_turns(tmp_path, monkeypatch):
    target = load_target("corpus:gemm_leakyrelu", GPU.architecture)
    plan = Plan.steady(40)
    monkeypatch.setenv(TURNS_VARIABLE, str(tmp_path / "turns"))
    children = [ContainedLauncher(target.spec, target.cubin) for _ in range(4)]
    try:
        with ThreadPoolExecutor(len(children)) as pool:
            found = [samples for _ in range(5) for samples in pool.map(lambda c: c.time(target.cubin, plan), children)]
    finally:
        for child in children:
            child.close()
    assert [len(samples.ratios) for samples in found] == [plan.fine] * 20
    assert all(0.5 < ratio < 2.0 for samples in found for ratio in samples.ratios)


def launch_and_check(function):
    x, y = torch.randn(N, device="cuda"), torch.zeros(N, device="cuda")
    kernel = function[(N // 1024,)](x, y, N, 3.0, BLOCK=1024)
    assert torch.equal(y, x * 3.0)
    return kernel


def scale_target():
    arguments = [
        TensorArgument(name="x_ptr", dtype="fp32", shape=(N,)),
        TensorArgument(name="y_ptr", dtype="fp32", shape=(N,), role="inout"),
        ScalarArgument(name="n", value=N),
        ScalarArgument(name="factor", type="fp32", value=3.0),
    ]
    return TritonSpec(kernels.scale, arguments, (N // 1024,), {"BLOCK": 1024}).build("scale", GPU.architecture)


def test_a_deployed_kernel_runs_under_the_decorator(tmp_path, caplog):
    cache, target = TunedCache(tmp_path), scale_target()
    done = deploy(Winner(target, retuned(target.cubin)), cache, remeasure=taken_for_a_gain)
    assert done.refusal is None, done
    # Without the mark, so that the comparison on the first launch's arguments is made.
    for mark in cache.root.rglob("verified-*.json"):
        mark.unlink()
    function = kernelwright.jit(kernels.scale, cache=cache)
    launch_and_check(function)
    assert code_of(launch_and_check(function).asm["cubin"]) == code_of(retuned(target.cubin))
    assert cache.is_verified(done.entry, gpu_identity())
    assert caplog.records == []
    graph = torch.cuda.CUDAGraph()
    x, y = torch.randn(N, device="cuda"), torch.zeros(N, device="cuda")
    with torch.cuda.graph(graph):
        function[(N // 1024,)](x, y, N, 3.0, BLOCK=1024)
    graph.replay()
    assert torch.equal(y, x * 3.0)


def test_torch_compiles_kernels_are_captured_deployed_and_used(tmp_path, caplog):
    def model(x):
        return torch.nn.functional.gelu(x * 2 + 1)

    def compiled():
        torch._dynamo.reset()
        return torch.compile(model)

    x = torch.randn(1 << 18, device="cuda")
    with tunable_torch_compile():
        fast = compiled()
        fast(x)
        with capture_launches() as captured:
            fast(torch.randn_like(x))
    targets = [launch.target for launch in captured.launches if launch.target]
    assert targets, [launch.reason for launch in captured.launches]
    cache = TunedCache(tmp_path)
    for target in targets:
        done = deploy(Winner(target, retuned(target.cubin)), cache, remeasure=taken_for_a_gain)
        assert done.refusal is None, done
    with tuned_torch_compile(cache):
        fast = compiled()
        with capture_launches() as captured:
            fast(x)
            found = fast(x)
    assert torch.allclose(found, model(x), atol=1e-5)
    assert [code_of(launch.target.cubin) for launch in captured.launches] == [code_of(retuned(t.cubin)) for t in targets]


def test_a_composed_candidate_runs_its_tuned_code():
    launches = capture_candidate(Task(id=TASK.id, source=TASK.source), Candidate(source=CANDIDATE.source))
    tuned = [retuned(launch.target.cubin) for launch in launches]
    kernels = [
        TunedLaunch(launch, cubin, taken_for_a_gain(launch.target, cubin))
        for launch, cubin in zip(launches, tuned, strict=True)
    ]
    composed = compose(CANDIDATE, kernels)
    assert composed is not None, [kernel.refusal for kernel in kernels]
    again = capture_candidate(TASK, composed)
    assert [code_of(launch.target.cubin) for launch in again] == [*map(code_of, tuned)]
