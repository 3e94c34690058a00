"""One side of a comparison: whose failure is whose, and what lies on the device before a worker is asked."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import kernelwright.judge.isolation.side as stage_module
from kernelwright.errors import DeviceError, TaskError
from kernelwright.judge import Settings
from kernelwright.judge.isolation.process import CallClocks, WorkerError, WorkerSpec
from kernelwright.judge.isolation.side import Side, TaskShapes
from kernelwright.judge.worker.arena import SharedArena, TensorSpec
from kernelwright.records import Reason

CPU = torch.device("cpu")
INPUTS = [torch.ones(3)]
STATE = {"weight": torch.full((2,), 5.0)}


def side(tmp_path, request, *, device="cpu", role="reference", alone=False, **limits):
    """Of a worker that answers with `request(op)`, its arenas in this process."""

    def start(spec, settings):
        arenas = {name: SharedArena(CPU, size) for name, size in spec.arena_bytes.items()}
        clocks = CallClocks(0.0, 0.0, 0.0)
        return SimpleNamespace(exchange=lambda op, timeout_s, **fields: (request(op), clocks), arenas=arenas)

    shapes = TaskShapes.measure(INPUTS, [torch.zeros(4)], STATE)
    spec = WorkerSpec(
        role=role,
        source="",
        class_name="Model",
        device=device,
        directory=tmp_path,
        build=tmp_path,
        arena_bytes=shapes.arena_bytes,
        gate=SimpleNamespace(alone=alone),
    )
    return Side(SimpleNamespace(start=start), Settings.quick(threads=1, **limits), shapes, spec)


@pytest.mark.parametrize(
    ("role", "device", "reason", "kind"),
    [
        ("reference", "cuda:0", Reason.OUT_OF_MEMORY, DeviceError),
        ("reference", "cpu", Reason.OUT_OF_MEMORY, TaskError),
        ("reference", "cuda:0", Reason.CRASHED, TaskError),
        ("candidate", "cuda:0", Reason.OUT_OF_MEMORY, WorkerError),
    ],
)
def test_a_failure_is_the_candidates_the_tasks_or_the_devices(tmp_path, simulated_gpu, role, device, reason, kind):
    def fail(op):
        raise WorkerError(reason, "so it went")

    with pytest.raises(kind, match="so it went") as caught:
        side(tmp_path, fail, device=device, role=role).release()
    assert type(caught.value) is kind
    assert kind is not DeviceError or "fewer judges" in str(caught.value)


ANSWER = {"skeleton": None, "strange": [], "outputs": []}


@pytest.mark.parametrize(
    ("act", "op"),
    [
        (lambda one: one.load_state(STATE), "load_state"),
        (lambda one: one.step(STATE, {"weight"}), "step"),
        (lambda one: one.read_state(), "save_state"),
        (lambda one: one.call(one.place(INPUTS, 0)), "call"),
        (lambda one: one.series([INPUTS, INPUTS], [None, None]), "series"),
        (lambda one: one.recopy(0), "recopy"),
    ],
    ids=["load_state", "step", "read_state", "call", "series", "recopy"],
)
@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_what_was_written_is_on_the_device_before_the_worker_is_asked(tmp_path, simulated_gpu, act, op, device):
    order = simulated_gpu.asked

    def answer(asked):
        order.append(asked)
        return ANSWER | {"answers": [ANSWER] * 2}

    act(side(tmp_path, answer, device=device))
    assert op in order
    for at, asked in enumerate(order):
        if device != "cpu" and asked != "synchronize":
            assert order[:at][-1:] == ["synchronize"], f"before `{asked}`"


def test_outputs_are_a_copy_unless_nobody_reads_them_after_the_next_call(tmp_path):
    one = side(tmp_path, lambda op: ANSWER)
    memory = one.worker.arenas["outputs"].memory
    (kept,) = one.call(one.place(INPUTS, 0)).outputs
    one.is_read_in_place = True
    (there,) = one.call(one.place(INPUTS, 0)).outputs
    memory.zero_()
    assert kept.isnan().all()
    assert not there.any()
    one.is_read = False
    assert one.call(one.place(INPUTS, 0)).outputs == []


@pytest.mark.parametrize("large", [False, True])
def test_what_lay_in_the_slots_of_a_large_task_is_let_go_of(tmp_path, set_large_bytes, large):
    set_large_bytes(0 if large else 1 << 30)
    one = side(tmp_path, lambda op: ANSWER | {"answers": [ANSWER] * 2})
    one.call(one.place(INPUTS, 0))
    assert bool(one.placed) is not large
    one.series([INPUTS, INPUTS], [None, None])
    assert bool(one.placed) is not large


def test_the_latest_call_is_repeated_before_new_inputs_are_there_and_its_idle_time_counted(tmp_path):
    asked, others = [], [[torch.full((4,), value)] for value in (1.0, 2.0, 3.0)]
    one = side(tmp_path, lambda op: ANSWER | {"answers": [ANSWER] * 2})
    clocks = CallClocks(1.0, 2.0, 4.0)

    def lying():
        memory = one.worker.arenas["inputs"].memory.view(torch.float32)
        return {value for value in (1.0, 2.0, 3.0) if (memory == value).any()}

    answers = one.worker.exchange

    def exchange(op, limit, **fields):
        if op == "call":
            asked.append((op, fields["seed"], lying()))
            return ANSWER, clocks
        if op == "repeat":
            asked.append((op, fields["seed"], fields["calls"], lying()))
            return {}, CallClocks(0.0, 9.0, 100.0)
        return answers(op, limit, **fields)

    one.worker.exchange = exchange

    def flush():
        return asked.append("flush") or 0.0

    assert one.timed_call(others[0], 0, flush, seed=7, repeats=3).clocks.idle_us == 4.0
    assert asked == ["flush", ("call", 7, {1.0})], "there is nothing to repeat yet"
    asked.clear()
    assert one.timed_call(others[1], 0, flush, seed=8, repeats=3).clocks.idle_us == 104.0
    (what, seed, calls, seen), *after = asked
    assert (what, seed, calls, seen) == ("repeat", 7, 3, {1.0}), "new inputs are not there yet"
    assert after[0] == "flush"
    assert 2.0 in after[1][2]
    assert one.timed_call(others[2], 0, flush, seed=9, repeats=0).clocks.idle_us == 4.0
    asked.clear()
    one.series([INPUTS, INPUTS], [None, None])
    one.timed_call(others[0], 0, flush, seed=1, repeats=3)
    assert [entry[0] for entry in asked] == ["f", "call"], "inputs of the latest call may be gone"


def test_the_latency_of_the_latest_timed_call_is_remembered_and_of_no_other(tmp_path):
    one = side(tmp_path, lambda op: ANSWER | {"answers": [ANSWER] * 2})
    takes_us = iter([70.0, 50.0, 9000.0, 30.0])
    answers = one.worker.exchange

    def exchange(op, limit, **fields):
        return (ANSWER, CallClocks(next(takes_us), 1e6, 0.0)) if op == "call" else answers(op, limit, **fields)

    one.worker.exchange = exchange
    one.call(one.place(INPUTS, slot=0))
    assert one.latency_us == math.inf, "a first call compiles"
    one.timed_call(INPUTS, 0, lambda: 0.0, seed=None, repeats=0)
    one.call(one.place(INPUTS, slot=0))
    one.series([INPUTS, INPUTS], [None, None])
    assert one.latency_us == 50.0
    one.timed_call(INPUTS, 0, lambda: 0.0, seed=None, repeats=0)
    assert one.latency_us == 30.0


def test_what_is_large_gets_room_for_one_output_and_two_sets_of_inputs(tmp_path, few_for_a_series):
    small = side(tmp_path, lambda op: ANSWER)
    few_for_a_series()
    large = side(tmp_path, lambda op: ANSWER | {"answers": [ANSWER]})
    sizes = [{name: arena.size_bytes for name, arena in one.worker.arenas.items()} for one in (small, large)]
    assert sizes[0]["outputs"] == sizes[1]["outputs"] * stage_module.SERIES_CALLS_MAX
    assert sizes[1]["inputs"] == stage_module.SLOTS * sizes[0]["inputs"] // stage_module.SERIES_CALLS_MAX
    for slot in range(stage_module.SLOTS):
        large.call(large.place(INPUTS, slot))
    assert len(large.series([INPUTS], [None])[0]) == 1


LAID_OUT = [
    pytest.param(torch.randn(4, 6).mT, id="transposed"),
    pytest.param(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), id="channels last"),
    pytest.param(torch.randn(4, 9)[:, 1:6], id="slice"),
    pytest.param(torch.randn(6, 4)[:, 1], id="column"),
    pytest.param(torch.arange(24).view(4, 6)[:, ::2], id="integers"),
    pytest.param(torch.randn(1, 6).expand(4, 6), id="expanded"),
    pytest.param(torch.randn(4, 1, 8)[:, :, :6].expand(4, 3, 6), id="slice, expanded"),
    pytest.param(torch.randn(9).unfold(0, 4, 1), id="overlapping"),
    pytest.param(torch.randn(4, 6).to(torch.float8_e5m2).mT, id="eight bits"),
]


@pytest.mark.parametrize("x", LAID_OUT)
def test_inputs_lie_in_a_workers_memory_as_the_task_draws_them(tmp_path, monkeypatch, x):
    monkeypatch.setitem(globals(), "INPUTS", [x])
    one = side(tmp_path, lambda op: ANSWER)
    sent = []
    exchange = one.worker.exchange
    one.worker.exchange = lambda op, limit, **fields: sent.append(fields) or exchange(op, limit, **fields)
    layout = one.place([x], slot=1)
    spec = TensorSpec.from_json(sent[0]["specs"][0])
    seen = spec.view(one.worker.arenas["inputs"].memory)
    assert seen.stride() == x.stride()
    assert torch.equal(seen.double(), x.double())
    assert one.call(layout).inputs_intact
    line = seen.as_strided((spec.span_bytes // x.element_size(),), (1,))
    between = torch.isnan(line.double()) if x.is_floating_point() else line == 0
    assert int(between.sum()) >= len(line) - x.numel(), "what lies between the elements tells nothing"
    one.worker.arenas["inputs"].memory[spec.offset_bytes] ^= 64
    assert not one.call(layout).inputs_intact


def test_a_draw_that_lies_in_more_memory_than_the_first_is_laid_out_in_full(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "INPUTS", [torch.randn(4, 6)])
    one = side(tmp_path, lambda op: ANSWER)
    x = torch.randn(4, 600)[:, ::100]
    assert one.call(one.place([x], slot=0)).inputs_intact
    ((view, _),) = one.placed[0]
    assert view.is_contiguous()
    assert torch.equal(view, x)


def large_side(tmp_path, monkeypatch, inputs):
    """Of a task that is taken for a large one."""
    monkeypatch.setattr(stage_module, "SERIES_BYTES_MAX", 1)
    monkeypatch.setattr(stage_module, "LARGE_BYTES", 1)
    monkeypatch.setitem(globals(), "INPUTS", inputs)
    return side(tmp_path, lambda op: ANSWER)


def test_slots_of_a_large_task_overlap_and_have_other_addresses(tmp_path, monkeypatch):
    x = torch.randn(1 << 18)
    one = large_side(tmp_path, monkeypatch, [x])
    assert x.nbytes <= one.worker.arenas["inputs"].size_bytes < 1.2 * x.nbytes
    views = []
    for slot in range(stage_module.SLOTS):
        layout = one.place([x], slot)
        assert [*one.placed] == [slot], "the other is not there any more"
        views += [view for view, tensor in one.placed[slot] if tensor is x]
        one.call(layout)
        assert not one.placed, "the judge's own copy is let go of"
    first, second = views
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(second, x)
    assert not torch.equal(first, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("slot", [0, 1])
def test_whoever_reads_another_slot_of_a_large_task_gets_nothing_right(tmp_path, monkeypatch, dtype, slot):
    """Not even a maximum, a minimum, or either of them that takes no notice of NaN."""
    x = torch.randn(1 << 18).to(dtype)
    one = large_side(tmp_path, monkeypatch, [x])
    one.place([x], 1 - slot)
    stale = next(view for view, tensor in one.placed[1 - slot] if tensor is x)
    one.call(one.place([x], slot))
    assert stale.sum().isnan()
    numbers = stale[~stale.isnan()]
    assert numbers.max() > 1e4 > x.max()
    assert numbers.min() < -1e4 < x.min()


def test_what_a_call_writes_beside_the_inputs_of_a_large_task_is_seen(tmp_path, monkeypatch):
    x = torch.randn(1 << 18)
    one = large_side(tmp_path, monkeypatch, [x])
    memory = one.worker.arenas["inputs"].memory
    for slot, place in ((0, -1), (1, 0), (0, 5000), (1, 200000)):
        assert one.call(one.place([x], slot)).inputs_intact
        layout = one.place([x], slot)
        memory[place] ^= 1
        assert not one.call(layout).inputs_intact


def test_the_latest_call_is_the_one_whose_operators_are_asked_for(tmp_path, monkeypatch):
    x, asked = torch.ones(1 << 18), []
    one = large_side(tmp_path, monkeypatch, [x])
    exchange = one.worker.exchange
    one.worker.exchange = lambda op, timeout_s, **fields: asked.append((op, fields)) or (
        ({"operators": []}, CallClocks(0.0, 0.0, 0.0)) if op == "trace" else exchange(op, timeout_s, **fields)
    )
    for slot in (0, 1, 0):
        layout = one.place([x], slot)
        one.call(layout)
        one.operators()
        assert asked[-1] == ("trace", {"layout": layout}), "the others do not lie there any more"


@pytest.mark.parametrize(
    ("role", "alone", "seconds"), [("candidate", True, 25.0), ("candidate", False, 10.0), ("reference", True, 10.0)]
)
def test_a_candidate_that_others_wait_for_has_little_more_time_than_it_has_needed(tmp_path, role, alone, seconds):
    limit_s = 100.0 if alone and role == "candidate" else 5.0
    one = side(tmp_path, lambda op: ANSWER, role=role, alone=alone, run_limit_s=limit_s)
    assert one.limit_s() == 60.0, "compilers work in the first call"
    one.call(one.place(INPUTS, 0))
    one.calls_us = [1e6, 500.0]
    assert one.limit_s(calls=2) == seconds
    waits = role == "candidate" and alone
    assert one.limit_s(other_us=7e6) == (75.0 if waits else 5.0), "the reference took as long for these inputs"
