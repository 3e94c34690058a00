"""What is right on random numbers alone, beside a fair program like it: one set finds it, and without it passes."""

from __future__ import annotations

import pytest

from kernelwright.judge import Settings
from kernelwright.judge.check import check
from kernelwright.records import Candidate, Label, Reason
from kernelwright.tasks.invariants import Invariant
from tests.judge.snippets import task
from tests.judge.test_correctness_holes import like, why

CHECK = Settings.quick(threads=1, timed=False)
SECOND = pytest.mark.exhaustive
"""One more of what another line shows."""


def made(forward: str, inputs: str) -> tuple[str, str]:
    return forward, inputs


LARGEST = made("return inputs[0].topk(8, dim=1).values", "[torch.randn(128, 1024)]")
SHORTLIST = """x = inputs[0]
        floor = x[:, ::8].topk(16, dim=1).values[:, -1:]
        kept = (x >= floor) & ((x >= floor).cumsum(1) <= 512)
        return x.masked_fill(~kept, -torch.inf).topk(8, dim=1).values"""
BY_SORTING = "return inputs[0].sort(dim=1, descending=True).values[:, :8].contiguous()"

COLUMNS = made("return inputs[0].amax(1)", "[torch.randn(2, 512, 24)]")
BY_MAX = "return inputs[0].max(1).values"
PREDICTED = """x = inputs[0]
        bound = x[:, ::4].amax(1, keepdim=True)
        above = (x >= bound) & ((x >= bound).cumsum(1) <= 64)
        return x.masked_fill(~above, -torch.inf).amax(1)"""

SPREAD = made("return inputs[0].var(dim=1)", "[torch.randn(64, 512)]")
ONE_PASS = "x = inputs[0]; return (x.square().mean(1) - x.mean(1).square()) * (512 / 511)"
TWO_PASSES = "x = inputs[0]; return (x - x.mean(1, keepdim=True)).square().sum(1) / 511"

DISTANCES = made("a, b = inputs; return (a[:, None] - b).square().sum(-1)", "[torch.randn(40, 32), torch.randn(64, 32)]")
BY_PRODUCTS = "a, b = inputs; return a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.t()"
BY_COLUMNS = "a, b = inputs; return sum((a[:, None, k] - b[:, k]).square() for k in range(32))"

WAVE = made("return torch.sin(inputs[0])", "[torch.randn(64, 256)]")
SHORT_REDUCTION = """x = inputs[0]
        k = torch.round(x / torch.pi)
        r = (x - k * 3.140625) - k * 0.0009670257568359375
        r = (r - k * 6.2771141529083251953e-07) - k * 1.2154201256553420762e-10
        return torch.where(k.remainder(2) == 1, -torch.sin(r), torch.sin(r))"""
BY_COSINE = "return torch.sin(inputs[0].double()).float()"

COUNTS = made(
    "return torch.zeros(64, dtype=torch.int64).index_add(0, inputs[0], torch.ones_like(inputs[0]))",
    "[torch.randint(0, 64, (70000,))]",
)
SHORT_COUNTERS = "return torch.bincount(inputs[0], minlength=64).clamp_max(65535)"
LONG_COUNTERS = "return torch.bincount(inputs[0], minlength=64)"

PRODUCT = made(
    "return inputs[0].int() @ inputs[1].int()",
    "[torch.randint(-128, 128, (16, 1280), dtype=torch.int8), torch.randint(-128, 128, (1280, 32), dtype=torch.int8)]",
)
IN_FLOAT = "return (inputs[0].float() @ inputs[1].float()).int()"
IN_DOUBLE = "return (inputs[0].double() @ inputs[1].double()).int()"

SPARSE = made("return inputs[0] @ inputs[1]", "[torch.randn(64, 256) * (torch.rand(64, 256) < 0.05), torch.randn(256, 16)]")
ROOM = """a, b = inputs
        most, places = a.abs().topk({room}, dim=1)
        return (a.gather(1, places)[..., None] * b[places]).sum(1)"""

SEGMENTS = made(
    "x, ids = inputs; return x.new_zeros(64, 8).index_add(0, ids, x)",
    "[torch.randn(2048, 8), (torch.arange(2048) * 64 // 2048 + torch.randint(0, 2, (2048,))).clamp_max(63).sort().values]",
)
BALANCED = """x, ids = inputs
        count = torch.bincount(ids, minlength=64)
        places = (count.cumsum(0) - count)[:, None] + torch.arange({room})
        wanted = torch.arange({room}) < count[:, None]
        return (x[places.clamp_max(2047)] * wanted[..., None]).sum(1)"""

COMMON = made(
    "return inputs[0].mode(1).values", "[torch.where(torch.rand(128, 1024) < 0.3, 1, torch.randint(1, 9, (128, 1024)))]"
)
OF_A_PART = "return inputs[0][:, :512].mode(1).values"
BY_COUNTING = "return torch.nn.functional.one_hot(inputs[0], 9).sum(1).argmax(1)"

KNOWN = made("return inputs[0].nanmean(1)", "[torch.randn(64, 256)]")
ALL_KNOWN = "return inputs[0].mean(1)"
BY_MASK = "x = inputs[0]; known = x == x; return torch.where(known, x, 0.0).sum(1) / known.sum(1)"

ALIKE = {"alike-integers", "large-integers"}


@pytest.mark.parametrize(
    ("made", "cheat", "fair", "sets"),
    [
        pytest.param(LARGEST, SHORTLIST, BY_SORTING, {"ordered"}, id="the largest by a sample"),
        pytest.param(
            COLUMNS, PREDICTED, BY_MAX, {"ordered", "ordered-across", "near"}, id="columns", marks=SECOND
        ),
        pytest.param(SPREAD, ONE_PASS, TWO_PASSES, {"far"}, id="variance in one pass"),
        pytest.param(DISTANCES, BY_PRODUCTS, BY_COLUMNS, {"near"}, id="distances by products", marks=SECOND),
        pytest.param(WAVE, SHORT_REDUCTION, BY_COSINE, {"vast"}, id="range reduction", marks=SECOND),
        pytest.param(COUNTS, SHORT_COUNTERS, LONG_COUNTERS, ALIKE, id="counters", marks=SECOND),
        pytest.param(PRODUCT, IN_FLOAT, IN_DOUBLE, {"large-integers"}, id="integer products", marks=SECOND),
        pytest.param(SPARSE, ROOM.format(room=48), ROOM.format(room=256), {"filled"}, id="room for non-zeros", marks=SECOND),
        pytest.param(COMMON, OF_A_PART, BY_COUNTING, {"ordered"}, id="the most frequent of a part", marks=SECOND),
        pytest.param(KNOWN, ALL_KNOWN, BY_MASK, {"missing"}, id="no values missing", marks=SECOND),
        pytest.param(
            SEGMENTS, BALANCED.format(room=64), BALANCED.format(room=2048),
            ALIKE | {"other-segments", "skewed-integers"}, id="segments", marks=SECOND,
        ),
    ],
)  # fmt: skip
def test_structure_shows_what_is_right_on_random_numbers_alone(judge, monkeypatch, made, cheat, fair, sets):
    forward, inputs = made
    own = task(forward, inputs)
    found = judge.evaluate(own, like(own, forward, fair), settings=CHECK)
    assert found.accepted, why(found)
    found = judge.evaluate(own, like(own, forward, cheat), settings=CHECK)
    assert found.reason in (Reason.WRONG_OUTPUT, Reason.PRECISION_DOWNGRADE, Reason.NON_FINITE_OUTPUT), why(found)
    assert any(f"`{name}`" in found.detail for name in sets), why(found)
    monkeypatch.setattr(check, "INPUT_SETS", tuple(one for one in check.INPUT_SETS if one.name not in sets))
    found = judge.evaluate(own, like(own, forward, cheat), settings=CHECK)
    assert found.accepted, why(found)


EDGES = made("x, edges = inputs; return torch.bucketize(x, edges)", "[torch.randn(64, 32), torch.randn(20).sort().values]")
FACTOR = made(
    "return torch.linalg.cholesky(inputs[0]).contiguous()",
    "[(lambda x: x @ x.mT / 64 + torch.eye(32))(torch.randn(4, 32, 64))]",
)
ADDED = made("x, i, v = inputs; return x.index_add(0, i, v)", "[torch.randn(64, 8), torch.randperm(64), torch.randn(64, 8)]")
ASSIGNED = "x, i, v = inputs; out = x.clone(); out[i] += v; return out"
MEANS = made(
    "x, mask = inputs; return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
    "[torch.randn(16, 32, 8), torch.arange(32) < torch.randint(1, 32, (16, 1))]",
)
BY_LENGTH = "x, mask = inputs; return torch.stack([row[:n].mean(0) for row, n in zip(x, mask.sum(1))])"
ROWS = made(
    "return inputs[0] @ inputs[1]",
    "[torch.nn.functional.one_hot(torch.randint(0, 32, (64,)), 32).float(), torch.randn(32, 8)]",
)
GATHERED = "x, w = inputs; i = x.abs().argmax(1, keepdim=True); return x.gather(1, i) * w[i[:, 0]]"
LOWER = made("return inputs[0] @ inputs[1]", "[torch.randn(32, 32).tril(), torch.randn(32, 8)]")
LONG = made(
    "x, n = inputs; return (x * (torch.arange(64) < n[:, None])).sum(1)",
    "[torch.randn(32, 64), torch.randint(32, 65, (32,))]",
)
FROM_HALF = "x, n = inputs; return x[:, :32].sum(1) + (x[:, 32:] * (torch.arange(32, 64) < n[:, None])).sum(1)"
RELYING = {
    Invariant.SORTED: (EDGES, "x, edges = inputs; return (x[..., None] > edges).sum(-1)"),
    Invariant.SYMMETRIC: (FACTOR, "return torch.linalg.cholesky(inputs[0], upper=True).mT.contiguous()"),
    Invariant.PERMUTATION: (ADDED, ASSIGNED),
    Invariant.PREFIX_MASK: (MEANS, BY_LENGTH),
    Invariant.ONE_HOT: (ROWS, GATHERED),
    Invariant.ZEROS: (LOWER, "return inputs[0].tril() @ inputs[1]"),
    Invariant.LEAST_INTEGER: (LONG, FROM_HALF),
}
"""For each invariant a task whose draws have it, and a program that is right on those alone."""


@pytest.mark.parametrize(
    "invariant",
    [pytest.param(one, marks=[] if one in (Invariant.SORTED, Invariant.SYMMETRIC) else SECOND) for one in Invariant],
)
def test_what_relies_on_the_form_of_the_tasks_own_inputs_is_labelled(judge, monkeypatch, invariant):
    (forward, inputs), relying = RELYING[invariant]
    label = Label(f"relies-on-{invariant}")
    own = task(forward, inputs)
    found = judge.evaluate(own, like(own, forward, relying), settings=CHECK)
    assert found.accepted, why(found)
    assert label in found.labels
    assert label not in judge.evaluate(own, like(own, forward, forward), settings=CHECK).labels
    forbidden = judge.evaluate(own, like(own, forward, relying), settings=CHECK.model_copy(update={"forbid": {label}}))
    assert forbidden.reason is Reason.FORBIDDEN_LABEL, why(forbidden)
    monkeypatch.setattr(check, "INPUT_SETS", tuple(one for one in check.INPUT_SETS if one.breaks is not invariant))
    assert label not in judge.evaluate(own, like(own, forward, relying), settings=CHECK).labels


@pytest.mark.parametrize("ends", ["raise ValueError(n)", pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", marks=SECOND)])
def test_a_candidate_that_refuses_another_form_or_dies_of_it_goes_on_in_a_new_process(judge, ends):
    forward, inputs = LONG
    own = task(forward, inputs)
    refusing = f"x, n = inputs\n        if n.min() < 32: {ends}\n        return (x * (torch.arange(64) < n[:, None])).sum(1)"
    found = judge.evaluate(own, like(own, forward, refusing), settings=CHECK)
    assert found.accepted, why(found)
    assert Label.RELIES_ON_LEAST_INTEGER in found.labels


def test_a_set_that_can_show_nothing_is_not_drawn(judge):
    forward, inputs = PRODUCT
    own = task(forward, inputs)
    found = judge.evaluate(own, Candidate(source=like(own, forward, forward).source), settings=CHECK)
    drawn = found.checks["sets"].keys() - {"two-swapped", "few-changed", "one-changed", "own-other-mode", "own-mode-again"}
    values = {one.name for one in check.INPUT_SETS[2:] if not one.layout}
    assert drawn & values == {"skewed-integers", "alike-integers", "large-integers"}
