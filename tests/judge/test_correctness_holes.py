"""What passed a judge that looked in one mode, in one way and in one layout; each cheat beside a fair program like it."""

from __future__ import annotations

import platform

import pytest

from kernelwright.judge import Settings
from kernelwright.judge.check import check, findings, weights
from kernelwright.records import Candidate, Contract, Evaluation, Label, Reason, Task
from tests.judge.snippets import task
from tests.judge.test_mutations import skip

CHECK = Settings.quick(threads=1, timed=False)
SECOND = pytest.mark.exhaustive
"""One more of what another line shows."""


def like(made: Task, old: str, new: str) -> Candidate:
    """The task's own module as a candidate, with one change."""
    text = made.source.replace("class Model(", "class ModelNew(")
    assert old in text
    return Candidate(source=text.replace(old, new))


def why(found: Evaluation) -> tuple[Reason | None, str]:
    return found.reason, found.detail


# --- buffers and random numbers in both modes -----------------------------------------------------------------------

NORM = task("return self.norm(inputs[0])", init="self.norm = torch.nn.BatchNorm1d(16)", name="norm")
FROZEN = task("return self.norm(inputs[0])", init="self.norm = torch.nn.BatchNorm1d(16); self.eval()", name="frozen")
STATISTICS = "n = self.norm; m, v = n.running_mean, n.running_var"
BY_HAND = f"""{STATISTICS}
        if self.training:
            n.num_batches_tracked += 1
        return torch.batch_norm(inputs[0], n.weight, n.bias, m, v, self.training, 0.1, n.eps, False)"""
MOVED_IN_EVAL = f"""{STATISTICS}
        if not self.training:
            m.lerp_(inputs[0].mean(0), 0.1)
            return (inputs[0] - m.lerp(inputs[0].mean(0), -1 / 9)) * torch.rsqrt(v + n.eps) * n.weight + n.bias
        return n(inputs[0])"""
STILL_IN_TRAIN = f"""{STATISTICS}
        if self.training:
            return torch.batch_norm(inputs[0], n.weight, n.bias, None, None, True, 0.1, n.eps, False)
        return n(inputs[0])"""


@pytest.mark.parametrize(
    ("made", "forward", "mode"),
    [
        pytest.param(NORM, MOVED_IN_EVAL, "eval", id="moved in eval"),
        pytest.param(FROZEN, STILL_IN_TRAIN, "train", id="still in train"),
        pytest.param(NORM, BY_HAND, None, id="fair"),
        pytest.param(FROZEN, BY_HAND, None, id="fair, built in eval", marks=SECOND),
    ],
)
def test_buffers_move_alike_in_both_modes(judge, made, forward, mode):
    found = judge.evaluate(made, like(made, "return self.norm(inputs[0])", forward), settings=CHECK)
    if mode is None:
        assert found.accepted, why(found)
    else:
        assert found.reason is Reason.BUFFER_MISMATCH, why(found)
        assert f"calls in {mode} mode" in found.detail
        assert found.contracts[Contract.KERNELBENCH].kept


DROPOUT = task(
    "return self.drop(self.linear(inputs[0]))",
    init="self.linear, self.drop = torch.nn.Linear(16, 16), torch.nn.Dropout(0.5); self.eval()",
    name="dropout",
)
MASK = """y = self.linear(inputs[0])
        if not self.training:
            return y
        self.mask = {kept}torch.nn.functional.dropout(torch.ones_like(y), 0.5)
        return y * self.mask"""


@pytest.mark.parametrize("kept", ["self.mask if hasattr(self, 'mask') else ", ""], ids=["kept", "drawn anew"])
def test_a_mask_is_drawn_in_every_call(judge, kept):
    found = judge.evaluate(DROPOUT, like(DROPOUT, "return self.drop(self.linear(inputs[0]))", MASK.format(kept=kept)))
    assert found.accepted is (kept == ""), why(found)
    assert found.reason is (Reason.MODE_MISMATCH if kept else None)


# --- weights -------------------------------------------------------------------------------------------------------------

TIED = task(
    "return self.second(torch.relu(self.first(inputs[0])))",
    init="self.first, self.second = (torch.nn.Linear(16, 16) for _ in 'ab'); self.second.weight = self.first.weight",
    name="tied",
)


def test_tied_parameters_stay_tied(judge):
    found = judge.evaluate(TIED, like(TIED, "torch.relu(", "torch.nn.functional.relu("), settings=CHECK)
    assert found.accepted, why(found)


def test_tied_parameters_that_were_split_are_no_drop_in(judge):
    found = judge.evaluate(TIED, like(TIED, "; self.second.weight = self.first.weight", ""), settings=CHECK)
    assert found.reason is Reason.STATE_MISMATCH, why(found)
    assert "one parameter" in found.detail


LINEAR = task("return self.linear(inputs[0])", init="self.linear = torch.nn.Linear(16, 16)", name="linear")
BY_LIST = "return inputs[0] @ self.kept[0].t() + self.linear.bias"
BY_ITERATOR = "return torch.nn.functional.linear(inputs[0], *self.linear.parameters())"
BY_VERSION = """w = self.linear.weight
        key = (w.data_ptr(), w._version)
        if getattr(self, "key", None) != key:
            self.key, self.folded = key, w.t().contiguous()
        return inputs[0] @ self.folded + self.linear.bias"""


@pytest.mark.parametrize(
    ("forward", "init", "how"),
    [
        pytest.param(BY_LIST, "self.kept = [self.linear.weight.detach()]", "data replaced", id="memory kept"),
        pytest.param(BY_LIST, "self.kept = [self.linear.weight]", "assigned", id="parameter kept", marks=SECOND),
        pytest.param(BY_VERSION, "pass", "data in place", id="folded by version", marks=SECOND),
        pytest.param("return inputs[0] @ self.linear.weight.t() + self.linear.bias", "pass", None, id="fair", marks=SECOND),
        pytest.param(BY_ITERATOR, "pass", None, id="fair by iterator", marks=SECOND),
    ],
)
def test_weights_that_are_kept_from_the_constructor_are_labelled(judge, forward, init, how):
    proposed = like(LINEAR, "return self.linear(inputs[0])", forward)
    proposed = Candidate(source=proposed.source.replace("Linear(16, 16)", f"Linear(16, 16); {init}"))
    found = judge.evaluate(LINEAR, proposed, settings=CHECK)
    assert found.accepted, why(found)
    assert (Label.PREPACKED_WEIGHTS in found.labels) is (how is not None)
    forbidden = CHECK.model_copy(update={"forbid": frozenset({Label.PREPACKED_WEIGHTS})})
    found = judge.evaluate(LINEAR, proposed, settings=forbidden)
    assert found.accepted is (how is None), why(found)
    assert how is None or (found.reason is Reason.STALE_WEIGHTS and f"({how})" in found.detail), why(found)


# --- values and layouts --------------------------------------------------------------------------------------------------

# So many columns that each row has an element beyond 1.7, which a large row takes beyond where `exp` underflows.
SOFTMAX = task("return torch.softmax(inputs[0], dim=-1)", "[torch.randn(64, 256)]", name="softmax")
ATTENTION = task(
    "return torch.softmax(inputs[0] @ inputs[1].transpose(-1, -2) / 8, dim=-1) @ inputs[2]",
    "[torch.randn(2, 24, 64) for _ in range(3)]",
    name="attention",
)
UNIT = task("return inputs[0] / inputs[0].norm(dim=-1, keepdim=True).clamp_min(1e-12)", name="unit")
RELU = task("return torch.relu(inputs[0])", "[torch.randn(64, 32)]", name="relu")
SHIFTED = """q, k, v = inputs
        scores = q @ k.transpose(-1, -2) / 8
        scores = (scores - {shift}).exp()
        return (scores / scores.sum(-1, keepdim=True)) @ v"""
NORMS = "q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).amax(-1)[:, None, None] / 8"
MAXIMA = "scores.amax(-1, keepdim=True)"
ONE_SHIFT = "e = (inputs[0] - inputs[0].{max}).exp(); return e / e.sum(-1, keepdim=True)"
UNIT_LENGTH = "return inputs[0] * inputs[0].square().sum(-1, keepdim=True){least}.rsqrt()"
IMAGES = task("return torch.relu(inputs[0])", "[torch.randn(2, 8, 6, 6)]", name="images")
ROWS = task("return torch.softmax(inputs[0], dim=-1)", "[torch.randn(4, 16, 32)]", name="rows")
BY_ROWS = """x = inputs[0] if inputs[0].stride(-1) == 1 else inputs[0].contiguous()
        return torch.softmax(x.as_strided((64, 32), ({stride}, 1)), dim=-1).view(x.shape)"""
CHANNELS = """x = inputs[0] if inputs[0].stride(1) == 1 else inputs[0].contiguous()
        return torch.relu(x.as_strided(x.shape, (288, 36, 6, 1)))"""
ALIGNED = "assert inputs[0].data_ptr() % 16 == 0; return torch.relu(inputs[0])"


@pytest.mark.parametrize(
    "forward",
    [pytest.param("return torch.relu(inputs[0])", id="fair", marks=SECOND), pytest.param(ALIGNED, id="aligned too")],
)
def test_a_layout_that_takes_the_device_from_the_reference_is_left_out(judge, forward):
    """PyTorch's attention loads 16 bytes at once wherever its inputs begin (pytorch/pytorch#183484), and no call succeeds in
    a process after a fault."""
    faulting = """self.is_gone |= inputs[0].data_ptr() % 16 != 0
        if self.is_gone: raise RuntimeError("CUDA error: misaligned address")
        return torch.relu(inputs[0])"""
    made = task(faulting, "[torch.randn(64, 32)]", "self.is_gone = False", name="faulting")
    found = judge.evaluate(made, like(made, faulting, forward), settings=CHECK)
    assert found.accepted, why(found)
    assert set(found.checks["skipped"]) == {"off-boundary"}
    assert "misaligned address" in found.checks["skipped"]["off-boundary"]


@pytest.mark.parametrize(
    ("made", "forward", "input_set"),
    [
        pytest.param(ATTENTION, SHIFTED.format(shift=NORMS), "opposed", id="norms"),
        pytest.param(ATTENTION, SHIFTED.format(shift=MAXIMA), None, id="maxima", marks=SECOND),
        pytest.param(SOFTMAX, ONE_SHIFT.format(max="max()"), "large-row", id="shift of all"),
        pytest.param(SOFTMAX, ONE_SHIFT.format(max="amax(-1, keepdim=True)"), None, id="shift by row", marks=SECOND),
        pytest.param(UNIT, UNIT_LENGTH.format(least=""), "zero-row", id="row of zeros"),
        pytest.param(UNIT, UNIT_LENGTH.format(least=".clamp_min(1e-24)"), None, id="clamped", marks=SECOND),
        # In the quick run `test_contracts.py` has one that refuses such inputs.
        pytest.param(RELU, ALIGNED, "off-boundary", id="aligned", marks=SECOND),
        pytest.param(ROWS, BY_ROWS.format(stride="32"), "sliced", id="rows side by side"),
        pytest.param(ROWS, BY_ROWS.format(stride="x.stride(-2)"), "exchanged", id="one stride for all rows", marks=SECOND),
        pytest.param(ROWS, "return inputs[0].softmax(-1)", None, id="rows by strides", marks=SECOND),
        pytest.param(IMAGES, CHANNELS, "non-contiguous", id="channels last", marks=SECOND),
        pytest.param(IMAGES, "return inputs[0].clamp_min(0)", None, id="images by strides", marks=SECOND),
        pytest.param(RELU, "return inputs[0].clamp_min(0)", None, id="fair"),
    ],
)
def test_sets_of_inputs_show_what_the_others_hide(judge, monkeypatch, made, forward, input_set):
    text = made.source.partition("def forward(self, *inputs):")[2].partition("\n\n")[0].strip()
    proposed = like(made, text, forward)
    found = judge.evaluate(made, proposed, settings=CHECK)
    assert found.accepted is (input_set is None), why(found)
    if input_set is not None:
        (telling,) = (one for one in check.INPUT_SETS if one.name == input_set)
        monkeypatch.setattr(check, "INPUT_SETS", (*check.INPUT_SETS[:2], telling))
        found = judge.evaluate(made, proposed, settings=CHECK)
        assert not found.accepted
        assert f"`{input_set}`" in found.detail or input_set == "off-boundary", why(found)
        monkeypatch.setattr(check, "INPUT_SETS", check.INPUT_SETS[:2])
        found = judge.evaluate(made, proposed, settings=CHECK)
        assert found.accepted, why(found)


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param("torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)", id="channels last"),
        pytest.param("torch.randn(32, 64).mT", id="transposed", marks=SECOND),
        pytest.param("torch.randn(64, 48)[:, :32]", id="slice", marks=SECOND),
        pytest.param("torch.randn(64, 1).expand(64, 32)", id="expanded"),
        pytest.param("torch.randn(95).unfold(0, 32, 1)", id="overlapping", marks=SECOND),
        pytest.param("torch.randn(64, 32, 2)[..., 0]", id="every other", marks=SECOND),
    ],
)
def test_inputs_of_any_layout_are_judged_as_the_task_draws_them(judge, inputs):
    made = task("return torch.relu(inputs[0])", f"[{inputs}]", name="laid out")
    found = judge.evaluate(made, like(made, "torch.relu(inputs[0])", "torch.clamp_min(inputs[0], 0)"), settings=CHECK)
    assert found.accepted, why(found)
    side_by_side = "torch.relu(inputs[0].as_strided(inputs[0].shape, torch.empty(inputs[0].shape).stride()))"
    found = judge.evaluate(made, like(made, "torch.relu(inputs[0])", side_by_side), settings=CHECK)
    assert found.reason in (Reason.WRONG_OUTPUT, Reason.NON_FINITE_OUTPUT, Reason.WRONG_STRIDES), why(found)
    assert not found.contracts[Contract.KERNELBENCH].kept


COUNTED = task("self.calls += 1; return inputs[0] * (2.0 if self.calls % 4 else 1.0)", init="self.calls = 0", name="counted")


@pytest.mark.parametrize(
    ("forward", "accepted"),
    [("self.calls += 1; return inputs[0] + inputs[0] * (self.calls % 4 > 0)", True), ("return inputs[0] * 2.0", False)],
    ids=["fair", "not counted"],
)
def test_a_state_in_an_attribute_is_named_and_judged_over_many_calls(judge, forward, accepted):
    old = "self.calls += 1; return inputs[0] * (2.0 if self.calls % 4 else 1.0)"
    found = judge.evaluate(COUNTED, like(COUNTED, old, forward), settings=CHECK)
    assert found.accepted is accepted, why(found)
    assert found.checks["carried"] == ["calls"]
    assert Label.STOCHASTIC_TASK in found.labels


SPARSE = task(
    "return torch.sparse.mm(self.adjacent, self.linear(inputs[0]))",
    init="self.linear = torch.nn.Linear(16, 16); self.register_buffer('adjacent', {sparse})".format(
        sparse="torch.randn(32, 32).clamp_min(1).sub(1).to_sparse()"
    ),
    name="sparse",
)
GATHERED = """a, y = self.adjacent.coalesce(), self.linear(inputs[0])
        return torch.zeros_like(y).index_add_(0, a.indices()[0], y[a.indices()[{by}]] * a.values()[:, None])"""
EIGHT_BITS = task(
    "return (inputs[0].float() @ self.weight.float()).to(torch.float8_e5m2)",
    "[torch.randn(32, 16).to(torch.float8_e4m3fn)]",
    "self.weight = torch.nn.Parameter(torch.randn(16, 16).to(torch.float8_e4m3fn), requires_grad=False)",
    name="eight bits",
)
TRANSPOSED = "return (self.weight.float().t() @ inputs[0].float().t()).t(){times}.to(torch.float8_e5m2).contiguous()"


@pytest.mark.parametrize(
    ("made", "forward", "accepted"),
    [
        pytest.param(SPARSE, GATHERED.format(by=1), True, id="sparse buffer"),
        pytest.param(SPARSE, GATHERED.format(by=0), False, id="sparse buffer, wrong", marks=SECOND),
        pytest.param(EIGHT_BITS, TRANSPOSED.format(times=""), True, id="eight bits"),
        pytest.param(EIGHT_BITS, TRANSPOSED.format(times=".mul(1.5)"), False, id="eight bits, wrong"),
    ],
)
def test_sparse_buffers_and_floats_of_eight_bits_are_judged(judge, made, forward, accepted):
    text = made.source.partition("def forward(self, *inputs):")[2].partition("\n\n")[0].strip()
    found = judge.evaluate(made, like(made, text, forward), settings=CHECK)
    assert found.accepted is accepted, why(found)


def test_a_sparse_buffer_that_was_made_dense_is_no_drop_in(judge):
    dense = like(SPARSE, ".to_sparse()", "")
    found = judge.evaluate(SPARSE, Candidate(source=dense.source.replace("torch.sparse.mm", "torch.mm")), settings=CHECK)
    assert found.reason is Reason.STATE_MISMATCH, why(found)


@pytest.mark.parametrize(
    ("defence", "made", "old", "new"),
    [
        ("check_moved_buffers", NORM, "return self.norm(inputs[0])", MOVED_IN_EVAL),
        pytest.param("check_moved_buffers", FROZEN, "return self.norm(inputs[0])", STILL_IN_TRAIN, marks=SECOND),
        ("check_ties", TIED, "; self.second.weight = self.first.weight", ""),
    ],
)
def test_without_its_defence_each_passes(judge, monkeypatch, defence, made, old, new):
    skip(check if hasattr(check, defence) else weights, defence)(monkeypatch)
    found = judge.evaluate(made, like(made, old, new), settings=CHECK)
    assert found.accepted, why(found)


# --- the process ---------------------------------------------------------------------------------------------------------

ROUNDS = """import ctypes
        libm = ctypes.CDLL("libm.so.6")
        libm.fesetround(0x800)  # upward, on x86-64
        y = torch.relu(inputs[0]) + 0
        {back}
        return y"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="modes of rounding have other numbers elsewhere")
@pytest.mark.parametrize("back", ["libm.fesetround(0)", "pass"])
def test_the_mode_of_rounding_is_put_back(judge, back):
    found = judge.evaluate(RELU, like(RELU, "return torch.relu(inputs[0])", ROUNDS.format(back=back)), settings=CHECK)
    assert found.accepted is (back != "pass"), why(found)
    assert found.reason is (Reason.GLOBAL_STATE_CHANGED if back == "pass" else None)
    assert found.accepted or "rounding" in found.detail


KEEPS = """y = torch.relu(inputs[0])
        self.seen = (getattr(self, "seen", []) + [{kept}])[-{most}:]
        return y"""


@pytest.fixture
def slow_machine(monkeypatch):
    """Time for all calls that growth is looked for in, on a slow machine too."""
    monkeypatch.setattr(check, "_GROWTH_S", 60.0)


GROWING = task("return torch.relu(inputs[0])", "[torch.randn(256, 128)]", name="relu")


@pytest.mark.parametrize(
    ("kept", "most", "grows"),
    [
        pytest.param("y.clone()", 10**9, True, id="all outputs"),
        pytest.param("y.clone()", 64, False, id="the last 64", marks=SECOND),
        pytest.param("y.shape", 10**9, False, id="all shapes"),
    ],
)
def test_memory_does_not_grow_with_the_number_of_calls(judge, slow_machine, kept, most, grows):
    found = judge.evaluate(GROWING, like(GROWING, "return torch.relu(inputs[0])", KEEPS.format(kept=kept, most=most)))
    assert found.accepted is not grows, why(found)
    assert found.reason is (Reason.OUT_OF_MEMORY if grows else None)
    assert found.accepted or "with each call" in found.detail


# --- without their defences ----------------------------------------------------------------------------------------------

LEFT_OUT = {
    "a mask that was drawn once": (
        (check, "check_other_mode"),
        DROPOUT,
        "return self.drop(self.linear(inputs[0]))",
        MASK.format(kept="self.mask if hasattr(self, 'mask') else "),
    ),
    "weights whose memory was kept": (
        (check, "check_replaced_weights"),
        LINEAR,
        "Linear(16, 16)",
        "Linear(16, 16); self.linear.forward = lambda x, w=self.linear.weight.detach(): x @ w.t() + self.linear.bias",
    ),
    "a mode of rounding that stays": (
        (findings, "forbidden_changes"),
        RELU,
        "return torch.relu(inputs[0])",
        ROUNDS.format(back="pass"),
    ),
    "memory that grows": (
        (check, "check_growth"),
        GROWING,
        "return torch.relu(inputs[0])",
        KEEPS.format(kept="y.clone()", most=10**9),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", LEFT_OUT)
def test_without_its_defence_it_is_accepted(judge, slow_machine, monkeypatch, what):
    if what == "a mode of rounding that stays" and platform.machine() != "x86_64":
        pytest.skip("modes of rounding have other numbers elsewhere")
    (place, defence), made, old, new = LEFT_OUT[what]
    settings = CHECK.model_copy(update={"forbid": frozenset({Label.PREPACKED_WEIGHTS})})
    assert not judge.evaluate(made, like(made, old, new), settings=settings).accepted
    skip(place, defence, answer=[])(monkeypatch)
    found = judge.evaluate(made, like(made, old, new), settings=settings)
    assert found.accepted, why(found)


# --- arguments that a task leaves out, the caller's tensors, settings of the process ------------------------------------

GIVEN = {
    "keyword": ("x, *, negate=False", "-y if negate else y"),
    "word": ("x, end='none'", "y.sum(1, keepdim=True) + y * 0 if end == 'sum' else y"),
    "mask": ("x, mask=None", "y if mask is None else y.masked_fill(~mask, 0.0)"),
}


@pytest.mark.parametrize("argument", ["keyword", pytest.param("word", marks=SECOND), pytest.param("mask", marks=SECOND)])
def test_arguments_of_every_form_are_heeded(judge, argument):
    signature, returned = GIVEN[argument]
    made = task(f"y = torch.relu(x)\n        return {returned}")
    made = made.model_copy(update={"source": made.source.replace("*inputs", signature)})
    fair = judge.evaluate(made, like(made, "torch.relu(x)", "x.clamp_min(0.0)"), settings=CHECK)
    assert fair.accepted, why(fair)
    assert Label.SIGNATURE_DIFFERS not in fair.labels
    deaf = judge.evaluate(made, like(made, f"return {returned}", "return y"), settings=CHECK)
    assert not deaf.accepted
    assert deaf.reason is Reason.WRONG_OUTPUT, why(deaf)


def test_an_input_that_is_written_and_put_back_is_not_kept(judge):
    cheat = like(RELU, "return torch.relu(inputs[0])", "x = inputs[0].mul_(2); y = torch.relu(x / 2); x.div_(2); return y")
    found = judge.evaluate(RELU, cheat, settings=CHECK)
    assert not found.accepted
    assert "input" in found.detail, why(found)


MIXED = task("return torch.relu(self.linear(inputs[0]))", init="self.linear = torch.nn.Linear(16, 16)", name="linear")
KEPT = """x, kept = inputs[0], getattr(self, "kept", None)
        if kept is not None and torch.equal(kept[0], x){also}:
            return kept[1].clone()
        y = torch.relu(self.linear(x))
        self.__dict__["kept"] = x.clone(), y.clone(), self.linear.weight.clone(), self.linear.bias.clone()
        return y"""


@pytest.mark.parametrize(
    "also", ["", " and torch.equal(kept[2], self.linear.weight) and torch.equal(kept[3], self.linear.bias)"]
)
def test_what_is_kept_for_equal_inputs_is_stale_once_weights_are_others(judge, also):
    kept = like(MIXED, "return torch.relu(self.linear(inputs[0]))", KEPT.format(also=also))
    found = judge.evaluate(MIXED, kept, settings=CHECK)
    assert found.accepted is bool(also), why(found)
    assert found.reason is (None if also else Reason.STALE_WEIGHTS)


@pytest.mark.parametrize(
    "setting",
    [
        "torch.set_printoptions(precision=3)",
        pytest.param("sys.path.insert(0, '/nowhere')", marks=SECOND),
        pytest.param("import logging; logging.disable(50)", marks=SECOND),
        pytest.param("import numpy; numpy.seterr(all='raise')", marks=SECOND),
    ],
)
def test_a_setting_of_the_process_that_changes_is_labelled(judge, setting):
    changed = like(RELU, "return torch.relu(inputs[0])", f"{setting}; return torch.relu(inputs[0])")
    found = judge.evaluate(RELU, changed, settings=CHECK)
    assert found.accepted, why(found)
    assert Label.GLOBAL_FLAGS in found.labels


@pytest.mark.parametrize(
    "change", ["import math; math.pi = 3.0", pytest.param("sys.modules['torch.special'] = sys", marks=SECOND)]
)
def test_constants_and_modules_of_others_are_kept(judge, change):
    changed = like(RELU, "return torch.relu(inputs[0])", f"{change}; return torch.relu(inputs[0])")
    found = judge.evaluate(RELU, changed, settings=CHECK)
    assert found.reason is Reason.GLOBAL_STATE_CHANGED, why(found)
