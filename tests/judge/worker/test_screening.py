"""The harness of a screening process, driven in this process."""

from __future__ import annotations

import itertools
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils import flop_counter

from kernelwright.judge import Settings
from kernelwright.judge.worker import screening
from kernelwright.judge.worker.inspection import global_state
from kernelwright.judge.worker.screening import ScreeningHarness, product_dtype
from kernelwright.records import Task

SOURCE = """
import threading
import torch

class Model(torch.nn.Module):
    threads = set()
    def forward(self, x):
        type(self).threads.add(threading.get_ident())
        return x * 2

def get_inputs():
    return [torch.randn(64)]

def get_init_inputs():
    return []
"""


def made_in(tmp_path, source: str = SOURCE) -> ScreeningHarness:
    """One that holds the task of this text."""
    config = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "strict_fp32": False,
        "arenas": {},
        "private": str(tmp_path),
    }
    made = ScreeningHarness(config, [])
    task = Task(id="double", source=source)
    made.op_task({"task": task.model_dump_json(), "settings": Settings.quick().model_dump_json()})
    made.op_truth({})
    return made


@pytest.fixture
def harness(tmp_path) -> ScreeningHarness:
    return made_in(tmp_path)


@pytest.mark.parametrize("own_thread", [False, True])
def test_a_candidate_runs_in_a_thread_of_its_own_where_it_wants_one(
    own_thread: bool, tmp_path, simulated_gpu, monkeypatch
) -> None:
    monkeypatch.setattr(screening, "wants_own_thread", lambda source, device: own_thread)
    harness = made_in(tmp_path)
    used = []
    for _ in range(2):
        assert harness.op_build({"source": SOURCE.replace("Model(", "ModelNew(")}) == {}
        harness.op_call({})
        assert harness.op_check({}) == {}
        assert harness.op_time({})["pairs"] >= screening.PAIRS_MIN
        used.append(sys.modules[harness.config["role"]].ModelNew.threads)
        assert harness.op_next({})["clean"]
    here = {threading.get_ident()}
    assert type(harness.facts.oracle.model).threads == here
    assert all((threads == here) != own_thread and len(threads) == 1 for threads in used)


@pytest.mark.parametrize("buffer", [False, True])
def test_each_candidate_that_counts_its_calls_is_timed_beside_a_reference_that_has_counted_as_many(buffer, tmp_path) -> None:
    counts = "register_buffer('calls', torch.tensor(0))" if buffer else "__dict__['calls'] = 0"
    init = f"\n    def __init__(self):\n        super().__init__()\n        self.{counts}"
    source = SOURCE.replace("    threads = set()", init).replace(
        "type(self).threads.add(threading.get_ident())", "self.calls += 1"
    )
    source = source.replace("x * 2", "x * self.calls")
    harness = made_in(tmp_path, source)
    for _ in range(2):
        assert harness.op_build({"source": source.replace("Model(", "ModelNew(")}) == {}
        harness.op_call({})
        assert harness.op_check({}) == {}
        assert int(harness.model.calls) == int(harness.reference.calls) == 3
        harness.op_time({})
        assert int(harness.model.calls) == int(harness.reference.calls) > 3
        assert harness.op_next({})["clean"]


class SharedDevice:
    """A clock whose first event waited until the host had launched all: it has seen the kernels alone."""

    def ready(self) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def settle(self) -> None: ...

    def elapsed_us(self) -> float:
        return 14.0


@pytest.mark.parametrize(("launches_us", "wanted"), [(80, 80.0), (5, 14.0)])
def test_a_call_takes_no_less_than_its_launches(launches_us: int, wanted: float, harness, monkeypatch) -> None:
    harness.op_build({"source": SOURCE.replace("Model(", "ModelNew(")})
    steps = itertools.count(0, 1000 * launches_us)
    monkeypatch.setattr(screening.time, "perf_counter_ns", lambda: next(steps))
    harness.clock = SharedDevice()
    assert harness.call_us(harness.model, harness.timed[0], 1) == wanted
    assert harness.call_us(harness.model, harness.timed[0], 2) == max(launches_us, 14.0) / 2


def test_what_others_take_of_the_device_does_not_count_as_the_reference_s(harness) -> None:
    """Half of the reference's calls are interrupted, as the longer call is more often."""
    harness.op_build({"source": SOURCE.replace("Model(", "ModelNew(")})
    interrupted = itertools.cycle([0.0, 4000.0])

    def call_us(model, inputs, calls):
        return 50.0 if model is harness.model else 100.0 + next(interrupted)

    harness.call_us = call_us
    found = harness.op_time({})
    assert (found["estimate"], found["reference_us"], found["candidate_us"]) == (2.0, 100.0, 50.0)


@pytest.mark.parametrize(
    ("source", "device", "wanted"),
    [
        ("torch.backends.cudnn.benchmark = True", "cuda", True),
        ("torch.backends.cudnn.benchmark = True", "cpu", False),
        ("x * 2", "cuda", False),
    ],
)
def test_only_what_speaks_of_cudnn_on_a_gpu_wants_a_thread(source: str, device: str, wanted: bool) -> None:
    assert screening.wants_own_thread(source, torch.device(device)) is wanted


PRODUCT = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 32, dtype=torch.DTYPE)
    def forward(self, x):
        return self.layer(x)

def get_inputs():
    return [torch.randn(16, 64, dtype=torch.DTYPE)]

def get_init_inputs():
    return []
"""


def settings_of_products() -> tuple[object, ...]:
    """Those that the worker compares around a candidate, and those behind them."""
    backends = torch.backends
    precisions = backends.fp32_precision, backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision
    return global_state(), backends.cuda.matmul.allow_tf32, *precisions


@pytest.fixture
def products(monkeypatch) -> list[tuple[torch.dtype, bool]]:
    """Type of each measured product, and whether TF32 was allowed in it."""
    made, mm = [], torch.mm

    def seen(one, other, **changes):
        made.append((one.dtype, torch.backends.cuda.matmul.allow_tf32))
        assert one.shape == other.shape == (64, 64)
        return mm(one, other, **changes)

    monkeypatch.setattr(screening, "_PRODUCT_SIDE", 64)
    monkeypatch.setattr(screening.torch, "mm", seen)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_operations_take_the_time_of_a_product_in_the_task_s_own_type(dtype, tmp_path, products) -> None:
    harness = made_in(tmp_path, PRODUCT.replace("DTYPE", str(dtype).removeprefix("torch.")))
    harness.clock = SharedDevice()
    before = settings_of_products()
    operations_us = harness.operations_us(harness.posed[0])
    assert operations_us == pytest.approx(14.0 * (2 * 16 * 64 * 32) / (2 * 64**3))
    assert products == 5 * [(dtype, True)], "TF32 is allowed for all, and changes nothing for half precision"
    assert settings_of_products() == before


def test_truth_on_a_gpu_tells_the_times_of_bytes_and_of_operations(tmp_path, monkeypatch) -> None:
    harness = made_in(tmp_path, PRODUCT.replace("DTYPE", "float32"))
    # What comes after the flush asks for the kind of device alone.
    monkeypatch.setattr(screening, "CacheFlush", lambda *_: setattr(harness, "device", SimpleNamespace(type="cuda")))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(harness, "bytes_per_us", lambda: 4.0)
    monkeypatch.setattr(harness, "operations_per_us", lambda dtype: 8.0)
    found = harness.op_truth({})
    assert found["least_us"] == 4 * (16 * 64 + 16 * 32) / 4.0
    assert found["operations_us"] == 2 * 16 * 64 * 32 / 8.0
    assert found["reference_us"] > 0.0


@pytest.mark.parametrize(("writes_us", "reads_us"), [(80.0, 60.0), (50.0, 70.0)])
def test_the_memorys_speed_is_that_of_the_faster_of_writing_and_reading(harness, writes_us, reads_us) -> None:
    seen = []

    def fastest_us(work):
        changed = work(7)
        seen.append("read" if changed.numel() == 1 else "write")
        return writes_us if seen[-1] == "write" else reads_us

    harness.fastest_us = fastest_us
    assert harness.bytes_per_us(4096) == 4096 / min(writes_us, reads_us)
    assert sorted(seen) == ["read", "write"]


@pytest.mark.parametrize("chosen", ["highest", "high", "medium", None])
def test_the_rate_of_products_leaves_every_setting_as_it_was(chosen, harness, products) -> None:
    flags = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    kept = torch.get_float32_matmul_precision(), [one.fp32_precision for one in flags]
    try:
        torch.set_float32_matmul_precision(chosen or "highest")
        if chosen is None:
            flags[0].fp32_precision = "none"  # as in a new process, where nobody has chosen
        before = settings_of_products()
        harness.operations_per_us(torch.float32)
        assert products == 5 * [(torch.float32, True)]
        assert settings_of_products() == before
    finally:
        torch.set_float32_matmul_precision(kept[0])
        for one, precision in zip(flags, kept[1], strict=True):
            one.fp32_precision = precision


def test_without_products_there_is_nothing_to_time_and_without_a_rate_no_time(tmp_path, harness, products) -> None:
    assert harness.operations_us(harness.posed[0]) == 0.0
    double = made_in(tmp_path, PRODUCT.replace("DTYPE", "float64"))
    assert double.operations_us(double.posed[0]) is None
    assert not products


def test_an_operator_that_the_counter_cannot_run_is_no_failure_of_the_task(tmp_path, monkeypatch, products) -> None:
    harness = made_in(tmp_path, PRODUCT.replace("DTYPE", "float32"))

    def fails(*given, **more):
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.addmm, fails)
    assert harness.operations_us(harness.posed[0]) is None
    assert not products


def test_memory_that_runs_out_where_operators_are_counted_is_no_operator_that_cannot_run(tmp_path) -> None:
    harness = made_in(tmp_path, PRODUCT.replace("DTYPE", "float32"))
    full = torch.OutOfMemoryError("CUDA error: out of memory")
    harness.reference = lambda *_: (_ for _ in ()).throw(full)
    with pytest.raises(RuntimeError, match="out of memory"):
        harness.operations_us(harness.posed[0])


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        (["float32"], torch.float32),
        (["float32", "int64"], torch.float32),
        (["float32", "bfloat16"], torch.bfloat16),
        (["float32", "float64"], torch.float32),
        (["float64"], None),
        (["complex64"], None),
        (["float8_e4m3fn", "float16"], None),
        (["int64", "bool"], None),
        ([], None),
    ],
)
def test_mixed_types_take_the_rate_of_the_narrowest(dtypes, wanted) -> None:
    assert product_dtype([torch.empty(1, dtype=getattr(torch, name)) for name in dtypes]) is wanted
