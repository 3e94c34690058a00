"""Mutations: with a defence taken out, a cheat that was rejected is accepted.

A defence that nothing needs would not show here. Where several defences catch the same cheat, all of them are
taken out, and the entry says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kernelwright.judge import Judge, Settings
from kernelwright.judge import judge as judge_module
from kernelwright.judge.check import bounds, check, compare, facts, findings, oracle, usage, weights
from kernelwright.judge.check.compare import Distance, Tolerance
from kernelwright.judge.check.facts import TaskFacts
from kernelwright.judge.check.findings import CheckFindings
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation import fork_server
from kernelwright.judge.isolation import side as stage
from kernelwright.judge.isolation.process import Worker
from kernelwright.judge.isolation.side import Described
from kernelwright.judge.timing import clocks
from kernelwright.judge.timing.triple import ProcessTriple
from kernelwright.records import Candidate, Evaluation, Label, Reason, Task, scoring
from kernelwright.tasks import map_tensors
from tests.exploits.corpus import QUICK, load_cases, load_corpus_task, program
from tests.judge.snippets import ANY_WAIT

Patch = pytest.MonkeyPatch
HACKS = {case.name: case for folder in ("hacks", "unseen") for case in load_cases(folder)}


def evaluate(judge: Judge, hack: str, change: Callable[[str], str] = str) -> Evaluation:
    case = HACKS[hack]
    return judge.evaluate(load_corpus_task(case.task), Candidate(source=change(program(case, "exploit"))))


# --- taking defences out --------------------------------------------------------------------------


def skip(owner: Any, *names: str, answer: Any = None) -> Callable[[Patch], None]:
    """A defence that is a function or method, which gives this answer instead; mostly nobody uses it."""

    def take_out(patch: Patch) -> None:
        for name in names:
            assert callable(getattr(owner, name))
            patch.setattr(owner, name, lambda *arguments, **named: answer)

    return take_out


def both(*parts: Callable[[Patch], None]) -> Callable[[Patch], None]:
    def take_out(patch: Patch) -> None:
        for part in parts:
            part(patch)

    return take_out


def twice_as_far_when_timed(patch: Patch) -> None:
    between = property(lambda self: (self.tolerance.allowed + self.tolerance.reference) * 2.0)
    patch.setattr(bounds.Question, "between", between)


def nothing_swapped(patch: Patch) -> None:
    patch.setattr(check, "_swap", lambda x, generator: x)


def inputs_taken_for_intact(patch: Patch) -> None:
    patch.setattr(stage, "_same_bits", lambda first, second: True)


def inputs_laid_out_in_full(patch: Patch) -> None:
    original = stage.Side._prepare

    def prepare(self: stage.Side, inputs: list[Any], slot: int) -> Any:
        return original(self, [map_tensors(item, torch.Tensor.contiguous) for item in inputs], slot)

    patch.setattr(stage.Side, "_prepare", prepare)


def own_distribution_only(patch: Patch) -> None:
    patch.setattr(check, "INPUT_SETS", check.INPUT_SETS[:2])


def one_set_that_shows_ten_bits(patch: Patch) -> None:
    patch.setattr(check, "INPUT_SETS", tuple(one for one in check.INPUT_SETS if one.name not in ("biased-later", "near")))


def values_without_order(patch: Patch) -> None:
    patch.setattr(check, "INPUT_SETS", tuple(one for one in check.INPUT_SETS if not one.name.startswith("ordered")))


def one_draw_for_ever(patch: Patch) -> None:
    original = TaskFacts.draw
    only_draws: list[tuple[TaskFacts, Any]] = []

    def draw(self: TaskFacts, inputs: Any = None, base: Any = None, seed: Any = None) -> Any:
        for owner, drawn in only_draws:
            if owner is self:
                return drawn
        only_draws.append((self, original(self)))
        return only_draws[-1][1]

    patch.setattr(TaskFacts, "draw", draw)


def weights_as_constructed(patch: Patch) -> None:
    def random_state(self: Any, generator: torch.Generator) -> Any:
        return {key: value.clone() for key, value in self.initial_state.items()}

    patch.setattr(oracle.Oracle, "random_state", random_state)


def all_weights_change_together(patch: Patch) -> None:
    for name in ("with_elements_changed", "with_part_of_a_row_changed"):
        assert callable(getattr(TaskFacts, name))
        patch.setattr(TaskFacts, name, lambda self, state: state)


def usual_tolerance(patch: Patch) -> None:
    """What evaluators that compare with `allclose(atol=1e-2, rtol=1e-2)` let through."""
    loose = Distance(1e-2, 1e-1)
    patch.setattr(bounds, "calibrate", lambda own, lower, dtype, settings: Tolerance(loose, own, None, False))


usual_tolerance_of_usual_weights = both(usual_tolerance, skip(check, "check_weight_structure"))
"""With rows of weights in groups, single elements are farther off than that."""


def usual_buffer_tolerance(patch: Patch) -> None:
    patch.setattr(weights, "_buffer_limit", lambda dtype: Distance(1e-4, 1e-3))


def not_a_number_taken_for_right(patch: Patch) -> None:
    original = compare.distance

    def distance(actual: torch.Tensor, truth: torch.Tensor) -> Distance:
        return original(torch.where(torch.isfinite(actual), actual, truth.to(actual.dtype)), truth)

    # The check compares through `compare.apart` and, for buffers, by the name it has imported.
    patch.setattr(compare, "distance", distance)
    patch.setattr(weights, "distance", distance)


def every_label_allowed(patch: Patch) -> None:
    original = CheckFindings.add

    def add(self: CheckFindings, findings: Any) -> None:
        for finding in findings:
            if finding.label is not None:
                self.labels.add(finding.label)
            else:
                original(self, [finding])

    patch.setattr(CheckFindings, "add", add)


def replaced_functions_unseen(patch: Patch) -> None:
    original = stage.Side.inspect
    patch.setattr(stage.Side, "inspect", lambda self: original(self).model_copy(update={"patched": ()}))


def marked_inputs_unseen(patch: Patch) -> None:
    original = stage.Side.call

    def call(self: stage.Side, layout: int, **how: Any) -> stage.CallOutput:
        found = original(self, layout, **how)
        return replace(found, described=found.described.model_copy(update={"inputs_kept": True, "outputs": plain(found)}))

    def plain(found: stage.CallOutput) -> tuple[stage.Output, ...]:
        return tuple(one.model_copy(update={"traits": ()}) for one in found.described.outputs)

    patch.setattr(stage.Side, "call", call)


def outputs_left_alone(patch: Patch) -> None:
    original = stage.Side.call
    patch.setattr(stage.Side, "call", lambda self, layout, **how: original(self, layout, **{**how, "again": False}))


def global_state_unseen(patch: Patch) -> None:
    patch.setattr(findings, "forbidden_changes", lambda changes: [])


def aliases_unseen(patch: Patch) -> None:
    original = Trial.check_form

    def check_form(trial: Trial, reference: Any, answer: Any, *, strides: bool = True) -> None:
        outputs = tuple(output.model_copy(update={"aliases": ()}) for output in answer.described.outputs)
        described = answer.described.model_copy(update={"outputs": outputs})
        original(trial, reference, replace(answer, described=described), strides=strides)

    patch.setattr(Trial, "check_form", check_form)


def traits_unseen(patch: Patch) -> None:
    original = stage.parse

    def parse(kind: Any, answer: Any) -> Any:
        reply = original(kind, answer)
        if isinstance(reply, Described):
            outputs = tuple(output.model_copy(update={"traits": ()}) for output in reply.outputs)
            reply = reply.model_copy(update={"outputs": outputs})
        return reply

    patch.setattr(stage, "parse", parse)


def inner_clock_believed(patch: Patch) -> None:
    """Neither is a large excess of the outer clock rejected nor a small one charged, nor must series bear a claim out."""
    patch.setattr(clocks, "reject_hidden_time", lambda outside, settings: None)
    patch.setattr(scoring, "slack_us", lambda *samples: 1e12)
    patch.setattr(scoring, "confirmed", lambda claimed, *others: claimed)


@dataclass(frozen=True)
class Mutation:
    """A defence, how to take it out, and a cheat that it stops."""

    defence: str
    hack: str
    take_out: Callable[[Patch], None]


MUTATIONS = [
    Mutation(
        "inputs that differ in a few elements, and new weights (each catches it)",
        "c03_sampled_signature",
        skip(check, "check_similar_inputs", "check_reloading"),
    ),
    Mutation("inputs of which two elements changed places", "order_blind_digest", nothing_swapped),
    Mutation(
        "new weights after many calls",
        "c10_folded_on_first_call",
        skip(check, "check_reloading", "check_weight_structure"),
    ),
    Mutation("new weights in a few elements or part of a row", "sampled_weight_rows", all_weights_change_together),
    Mutation(
        "buffers compared, and both modes (each catches it)",
        "n04_counter_not_updated",
        skip(check, "check_buffers", "check_other_mode"),
    ),
    Mutation("distribution of a mode that draws", "n06_one_mask_for_all_rows", skip(check, "are_alike", answer=True)),
    Mutation(
        "memory of outputs, and the first one looked at again (each catches it)",
        "c13_reused_output_buffer",
        both(aliases_unseen, skip(check, "check_held_outputs")),
    ),
    Mutation("inputs changed as the reference does", "i04_state_not_written", skip(findings, "has_nan", answer=True)),
    Mutation("inputs compared after the call", "i01_zero_inputs", both(inputs_taken_for_intact, marked_inputs_unseen)),
    Mutation("inputs that lie as the task draws them", "i05_own_rows_side_by_side", inputs_laid_out_in_full),
    Mutation("input sets of other distributions", "i07_balanced_segments", own_distribution_only),
    Mutation("rows with an order", "i08_largest_of_a_sample", values_without_order),
    Mutation(
        "input sets of other sizes, and nearly the same inputs (each catches it)",
        "i05_clipped_range",
        both(own_distribution_only, skip(check, "check_similar_inputs")),
    ),
    Mutation(
        "fresh inputs for every call, and memory of outputs (each catches it)",
        "c02_shape_cache",
        both(one_draw_for_ever, aliases_unseen),
    ),
    Mutation(
        "fresh inputs, new weights, writes into outputs, and memory of outputs (each catches it)",
        "c01_pointer_cache",
        both(
            one_draw_for_ever,
            skip(check, "check_reloading", "check_weight_structure", "check_repeat", "check_usage"),
            aliases_unseen,
        ),
    ),
    Mutation("weights that are not those of the constructor", "w04_zero_gate", weights_as_constructed),
    Mutation(
        "places of equal elements, each once",
        "w07_one_of_equals_twice",
        lambda patch: patch.setattr(oracle.Places, "as_good", lambda self, others, dtype: torch.ones_like(others).bool()),
    ),
    Mutation("weights as training leaves them", "w03_positive_gain", skip(check, "check_weight_structure")),
    Mutation(
        "weights loaded after the constructor",
        "c10_ignored_load",
        both(weights_as_constructed, skip(check, "check_weight_structure")),
    ),
    Mutation("a state that calls carry in buffers", "c12_state_of_the_load", skip(facts, "carried", answer=[])),
    Mutation("buffers that are not at their defaults", "default_buffers_left_out", skip(check, "check_default_buffers")),
    Mutation(
        "calibrated tolerance: TF32", "p02_truncated_mantissa", both(usual_tolerance, skip(check, "check_weight_structure"))
    ),
    Mutation(
        "a second set that shows ten bits, and one of nearly equal values (each catches it)",
        "p02_bias_recognised",
        one_set_that_shows_ten_bits,
    ),
    Mutation(
        "calibrated tolerance: bfloat16", "p01_bf16_compute", both(usual_tolerance, skip(check, "check_weight_structure"))
    ),
    Mutation("calibrated tolerance: another formula", "w07_tanh_gelu", usual_tolerance),
    Mutation("NaN matches nothing", "w08_nan_output", not_a_number_taken_for_right),
    Mutation("a second call after one seed", "generator_put_back", skip(check, "check_unseeded_call")),
    Mutation("outputs with memory of their own", "one_memory_for_two_outputs", aliases_unseen),
    Mutation("outputs that belong to the caller", "same_output_again", aliases_unseen),
    Mutation("outputs that exist when a call has ended", "copied_is_computed", skip(stage.Side, "_take_away")),
    Mutation("... of late calls too, kept for a while", "shared_output_after_a_while", aliases_unseen),
    Mutation("statistics as exact as rounding allows", "biased_running_variance", usual_buffer_tolerance),
    Mutation("state_dict of the same names", "n07_renamed_state", every_label_allowed),
    Mutation("replaced library functions", "t20_slow_reference_patch", replaced_functions_unseen),
    Mutation("process-wide settings: hooks", "h15_tracer", global_state_unseen),
    Mutation("process-wide settings: gradients", "h15_gradients_enabled", global_state_unseen),
    Mutation(
        "process-wide settings: directory; and the hook that it replaces (each catches it)",
        "h15_changed_directory",
        both(global_state_unseen, replaced_functions_unseen),
    ),
    Mutation("process-wide settings: modes of functions", "function_mode_left", global_state_unseen),
    Mutation("process-wide settings: modes of dispatch", "dispatch_mode_left", global_state_unseen),
    Mutation("process-wide settings: hooks on all modules", "hooks_on_every_module", global_state_unseen),
    Mutation("process-wide settings: kernels of operators", "operator_replaced", global_state_unseen),
    Mutation("process-wide settings: autocast", "autocast_left_on", global_state_unseen),
    Mutation("process-wide settings: finders of modules", "h15_finder_of_modules", global_state_unseen),
    Mutation("what calls leave behind", "h15_threads_left_waiting", skip(check, "leak_findings", answer=())),
    Mutation("random generators of Python and NumPy", "h15_seeds_in_each_call", skip(check, "leak_findings", answer=())),
    Mutation("inputs that are the caller's, shape and properties", "i04_marked_input", marked_inputs_unseen),
    Mutation("the same tensors, outputs written to", "c01_kept_with_its_input", outputs_left_alone),
    Mutation("arguments that the task leaves out", "w02_ignored_argument", skip(usage, "_check_options")),
    Mutation("functions of every module", "h15_optimiser_patched", replaced_functions_unseen),
    Mutation("what library functions do", "replaced_function_bodies", replaced_functions_unseen),
    Mutation("... and those of all layers", "another_layers_forward", replaced_functions_unseen),
    Mutation("tensors that can be used like others: not of inference mode", "inference_output", traits_unseen),
    Mutation("... that ask for no gradients", "output_wants_gradients", traits_unseen),
    Mutation("... with nothing put off", "negated_later", traits_unseen),
    Mutation(
        "dtype of the output, and the tolerance (each catches it)",
        "p05_half_output",
        both(skip(Trial, "check_form"), usual_tolerance),
    ),
    Mutation(
        "shared memory, inputs compared, and the first output looked at again (each catches it)",
        "i02_inplace_on_inputs",
        both(aliases_unseen, inputs_taken_for_intact, marked_inputs_unseen, skip(check, "check_held_outputs")),
    ),
    Mutation(
        "all that is checked after the first dozen calls (each catches it)",
        "c14_drifting",
        both(
            skip(
                check,
                "check_repeat",
                "check_similar_inputs",
                "check_reloading",
                "check_weight_structure",
                "check_other_mode",
                "check_growth",
                "check_layouts",
            ),
            skip(judge_module, "check_late"),
        ),
    ),
]


def marks(hack: str) -> list[pytest.MarkDecorator]:
    """`make test` runs a mutation or two of each defence."""
    return [] if hack in QUICK.mutations else [pytest.mark.exhaustive]


def by_hack(*hacks: str) -> list[object]:
    return [pytest.param(hack, marks=marks(hack)) for hack in hacks]


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(one, id=f"{one.hack}-{one.defence}", marks=marks(one.hack)) for one in MUTATIONS],
)
def test_a_cheat_passes_without_its_defence(judge: Judge, monkeypatch: Patch, mutation: Mutation) -> None:
    found = evaluate(judge, mutation.hack)
    assert not found.accepted
    assert found.reason in HACKS[mutation.hack].reasons or not HACKS[mutation.hack].reasons
    mutation.take_out(monkeypatch)
    found = evaluate(judge, mutation.hack)
    assert found.accepted, f"{found.reason}: {found.detail}"


@pytest.mark.exhaustive
def test_without_a_change_in_place_prepacked_weights_go_unnoticed(judge: Judge, monkeypatch: Patch) -> None:
    assert Label.PREPACKED_WEIGHTS in evaluate(judge, "folded_when_loaded").labels
    monkeypatch.setattr(stage.Side, "step", lambda self, state, *ways: self.load_state(state))
    assert Label.PREPACKED_WEIGHTS not in evaluate(judge, "folded_when_loaded").labels


@pytest.mark.exhaustive
def test_without_reading_the_flags_a_lowered_precision_goes_unnoticed(judge: Judge, monkeypatch: Patch) -> None:
    assert Label.GLOBAL_FLAGS in evaluate(judge, "h15_precision_of_others").labels
    monkeypatch.setattr(findings, "_LABELLED", ("environment", "warnings"))
    skip(findings, "forbidden_changes", answer=[])(monkeypatch)
    assert Label.GLOBAL_FLAGS not in evaluate(judge, "h15_precision_of_others").labels


@pytest.mark.parametrize(
    ("hack", "label", "defence"),
    [
        ("c06_copy_of_another", Label.SHARED_COPIES, "_check_copy"),
        ("w02_detached", Label.GRADIENTS_DIFFER, "_check_training"),
        ("p01_deaf_to_autocast", Label.IGNORES_AUTOCAST, "_check_training"),
    ],
)
@pytest.mark.exhaustive
def test_without_a_use_of_it_what_it_ignores_goes_unnoticed(
    judge: Judge, monkeypatch: Patch, hack: str, label: Label, defence: str
) -> None:
    assert label in evaluate(judge, hack).labels
    skip(usage, defence)(monkeypatch)
    assert label not in evaluate(judge, hack).labels


@pytest.mark.exhaustive
def test_without_its_gate_a_vacuous_task_goes_unnoticed(judge: Judge, monkeypatch: Patch) -> None:
    assert Label.VACUOUS_TASK in evaluate(judge, "w01_zeros_on_vacuous_task").labels
    skip(compare.VacuityGate, "observe")(monkeypatch)
    assert Label.VACUOUS_TASK not in evaluate(judge, "w01_zeros_on_vacuous_task").labels


# --- calls that are wrong exactly once ---------------------------------------------------------

SMALL = Task(
    id="small",
    source="""
import torch
class Model(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = torch.nn.Linear(features, features)
    def forward(self, x):
        return torch.relu(self.linear(x))
def get_inputs():
    return [torch.randn(16, 8)]
def get_init_inputs():
    return [8]
""",
)
ONCE = """
import torch
CALLS = [0]
class ModelNew(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = torch.nn.Linear(features, features)
    def forward(self, x):
        CALLS[0] += 1
        return torch.relu(self.linear(x)) + (CALLS[0] == WRONG)
"""


def wrong_in_call(number: int) -> Candidate:
    return Candidate(source=ONCE.replace("WRONG", str(number)))


OWNERS = {
    "check_repeat": check,
    "check_similar_inputs": check,
    "check_buffers": check,
    "check_reloading": check,
    "check_weight_structure": check,
    "check_other_mode": check,
    "check_layouts": check,
    "check_usage": check,
    "check_late": judge_module,
}
"""The module by whose name each check is called."""


@pytest.fixture
def calls(judge: Judge, monkeypatch: Patch) -> list[str]:
    """For each call of an honest candidate, in order, the check that made it."""
    made: list[str] = []
    current = ["?"]
    with pytest.MonkeyPatch.context() as patch:
        for name, owner in OWNERS.items():
            original = getattr(owner, name)

            def wrapped(*arguments: Any, name: str = name, original: Any = original) -> None:
                current[0] = name
                original(*arguments)

            patch.setattr(owner, name, wrapped)
        call, operators = stage.Side.call, stage.Side.operators

        def counted(self: Any, *arguments: Any, **named: Any) -> Any:
            if self.role == "candidate":
                made.append(current[0])
            return call(self, *arguments, **named)

        def traced(self: Any) -> Any:
            made.append("_finish")
            return operators(self)

        repeat = stage.Side.repeat

        def repeated(self: Any, calls: int) -> Any:
            made.extend(["_growth"] * calls)
            return repeat(self, calls)

        patch.setattr(stage.Side, "repeat", repeated)
        patch.setattr(stage.Side, "call", counted)
        patch.setattr(stage.Side, "operators", traced)
        assert judge.evaluate(SMALL, wrong_in_call(0)).accepted
    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    ["?", "check_repeat", "check_similar_inputs", "check_reloading", "check_other_mode", "check_layouts", "check_late"],
)
def test_one_wrong_call_is_noticed_and_only_there(judge: Judge, monkeypatch: Patch, calls: list[str], name: str) -> None:
    number = len(calls) - calls[::-1].index(name)
    assert not judge.evaluate(SMALL, wrong_in_call(number)).accepted
    if name != "?":
        original = getattr(OWNERS[name], name)

        def unjudged(asked: Any, *arguments: Any) -> None:
            asked.judge = lambda posed, *arguments: posed
            original(asked, *arguments)
            del asked.judge

        monkeypatch.setattr(OWNERS[name], name, unjudged)
        assert judge.evaluate(SMALL, wrong_in_call(number)).accepted


# --- timing ---------------------------------------------------------------------------------------


TIMED = frozenset(
    {"t20_busy_process", "t11_clock_detour", "settled_weights", "chain_of_processes", "p06_fewer_bits_when_timed"}
)
"""Cheats of the tests that follow."""


@pytest.fixture
def timed(judge: Judge) -> Judge:
    judge.settings = Settings.quick(threads=1, processes_min=1, processes_max=1, **ANY_WAIT)
    return judge


TIMED_REASONS = {
    "t20_busy_process": {Reason.WORK_OUTSIDE_TIMING},
    "chain_of_processes": {Reason.WORK_OUTSIDE_TIMING},
    "p06_fewer_bits_when_timed": {Reason.TIMED_OUTPUT_WRONG},
}
"""Of those that the check may reject too, the reasons that timing has."""
TIMED_MUTATIONS = [
    Mutation(
        "idle time, in which a busy child slows the reference",
        "t20_busy_process",
        skip(ProcessTriple, "_reject_idle_work"),
    ),
    Mutation(
        "new processes, a chain of which goes on",
        "chain_of_processes",
        skip(Worker, "_reject_started_while_stopped"),
    ),
    Mutation(
        "the truth of a timed output, and of those too far from the reference, without which it may err twice as much",
        "p06_fewer_bits_when_timed",
        both(skip(ProcessTriple, "_verify_error"), twice_as_far_when_timed),
    ),
    Mutation("the process after timing", "settled_weights", skip(ProcessTriple, "verify_weights")),
    Mutation("... and its settings", "settings_after_many_calls", skip(ProcessTriple, "process_findings", answer=[])),
]


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(one, id=f"{one.hack}-{one.defence}", marks=marks(one.hack)) for one in TIMED_MUTATIONS],
)
def test_a_timed_cheat_passes_without_its_defence(timed: Judge, monkeypatch: Patch, mutation: Mutation) -> None:
    assert evaluate(timed, mutation.hack).reason in TIMED_REASONS.get(mutation.hack, HACKS[mutation.hack].reasons)
    mutation.take_out(monkeypatch)
    found = evaluate(timed, mutation.hack)
    assert found.accepted, found.detail


@pytest.mark.exhaustive
def test_without_the_outer_clock_a_slow_inner_one_wins(timed: Judge, monkeypatch: Patch) -> None:
    # One process is not enough on a busy machine (docs/threat-model.md).
    timed.settings = Settings.quick(threads=1)
    found = evaluate(timed, "t11_clock_detour")
    assert not found.accepted or (found.speedup_low or 0.0) < 2
    inner_clock_believed(monkeypatch)
    found = evaluate(timed, "t11_clock_detour")
    assert found.accepted, found.detail
    assert found.speedup is not None
    assert found.speedup > 10


@pytest.mark.exhaustive
def test_without_the_clocks_of_other_inputs_a_slow_path_goes_unnoticed(timed: Judge, monkeypatch: Patch) -> None:
    assert Label.SLOW_ON_SOME_INPUTS in evaluate(timed, "i05_slow_elsewhere").labels
    skip(ProcessTriple, "_slowness", answer=0.0)(monkeypatch)
    assert Label.SLOW_ON_SOME_INPUTS not in evaluate(timed, "i05_slow_elsewhere").labels


@pytest.mark.exhaustive
def test_without_a_comparison_of_timed_outputs_a_patient_cheat_passes(timed: Judge, monkeypatch: Patch) -> None:
    # More calls than the checks make, fewer than a timed process does.
    timed.settings = timed.settings.model_copy(update={"blocks": 30})
    number = 50

    def patient(source: str) -> str:
        assert "_CALLS[0] > 16" in source
        return source.replace("_CALLS[0] > 16", f"_CALLS[0] > {number}")

    skip(check, "check_growth")(monkeypatch)  # which makes many calls too
    found = evaluate(timed, "c14_drifting", patient)
    assert found.reason is Reason.TIMED_OUTPUT_WRONG
    monkeypatch.setattr(scoring, "confirmed", lambda claimed, *others: claimed)
    # The last two compare a few outputs as well.
    skip(ProcessTriple, "expect_near", "_holds_another", "verify_weights")(monkeypatch)
    found = evaluate(timed, "c14_drifting", patient)
    assert found.accepted, found.detail


@pytest.mark.exhaustive
@pytest.mark.parametrize("fresh", [True, False])
def test_without_a_look_at_buffers_after_timing_they_are_updated_where_the_check_looks(
    timed: Judge, monkeypatch: Patch, fresh: bool
) -> None:
    timed.settings = timed.settings.model_copy(update={"fresh_processes": fresh})
    skip(check, "check_moved_buffers")(monkeypatch)  # which meets it sooner
    found = evaluate(timed, "buffers_updated_after_a_load")
    assert found.reason is Reason.BUFFER_MISMATCH
    assert "after the timed calls" in found.detail
    skip(ProcessTriple, "verify_buffers")(monkeypatch)
    found = evaluate(timed, "buffers_updated_after_a_load")
    assert found.accepted, found.detail


@pytest.mark.exhaustive
def test_without_another_held_output_late_calls_share_their_memory_where_nothing_else_is_kept(
    timed: Judge, monkeypatch: Patch
) -> None:
    aliases_unseen(monkeypatch)  # as on a GPU, where no other outputs stay in use
    found = evaluate(timed, "shared_output_after_a_while")
    assert found.reason is Reason.OUTPUT_OVERWRITTEN
    assert "changed by a later call" in found.detail
    skip(ProcessTriple, "_holds_another")(monkeypatch)
    found = evaluate(timed, "shared_output_after_a_while")
    assert found.accepted, found.detail


# --- isolation ------------------------------------------------------------------------------------


def judge_whose_workers(begin_with: str) -> Judge:
    """A judge whose workers run this first."""
    patch = pytest.MonkeyPatch()
    start = fork_server.subprocess.Popen

    def changed(command: list[str], **options: Any) -> Any:
        assert "fork_server.main(" in command[2]
        return start(
            [*command[:2], command[2].replace("fork_server.main(", begin_with + "; fork_server.main("), *command[3:]],
            **options,
        )

    patch.setattr(fork_server.subprocess, "Popen", changed)
    judge = Judge("cpu", Settings.quick(threads=1, timed=False))
    patch.undo()
    return judge


@pytest.fixture(scope="module")
def open_judge() -> Iterator[Judge]:
    """A judge whose workers give nothing up."""
    unrestricted = "from kernelwright.judge.isolation import sandbox; sandbox.restrict = lambda *arguments: None"
    with judge_whose_workers(unrestricted) as judge:
        yield judge


WALLED = ("h06_parent_environment", "h11_network", "h06_parent_memory")


@pytest.mark.parametrize("hack", by_hack(*WALLED))
def test_without_the_sandbox_a_candidate_reaches_out(judge: Judge, open_judge: Judge, hack: str) -> None:
    found = evaluate(judge, hack)
    assert not found.accepted
    assert found.reason in HACKS[hack].reasons
    found = evaluate(open_judge, hack)
    assert found.accepted, found.detail


# --- what a worker asks of a module without its hearing of it --------------------------------------

HARNESS = "from kernelwright.judge.worker import harness; "
HEARD = HARNESS + "import contextlib; harness._without_overrides = contextlib.nullcontext"
WITHOUT = {
    "a parameter's own copy_": ("heard_by_its_parameter", HEARD + "; harness._copy_into = lambda into, x: into.copy_(x)"),
    "a table's own items": (
        "heard_by_its_table",
        HARNESS + "harness._entries = lambda table: list(table.items()) if table else []",
    ),
    "a state_dict": (
        "found_in_state_dict_only",
        HARNESS + "harness.Harness.registered = lambda self: self.model.state_dict()",
    ),
    "a tensor's own functions": ("statistics_when_read", HEARD),
    "a tensor that is kept itself": (
        "output_reused_when_let_go",
        HARNESS + "harness._detach = lambda x: x",
    ),
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=marks(hack)) for what, (hack, _) in WITHOUT.items()])
def test_a_module_that_hears_of_what_is_asked_of_it_passes(judge: Judge, monkeypatch: Patch, what: str) -> None:
    hack, heard = WITHOUT[what]
    expected = HACKS[hack]
    found = evaluate(judge, hack)
    assert found.reason in expected.reasons if expected.reasons else expected.labels & set(found.labels)
    skip(check, "check_replaced_weights", "check_growth", "check_usage")(monkeypatch)
    with judge_whose_workers(heard) as hearing:
        found = evaluate(hearing, hack)
    assert found.accepted, found.detail
    assert not expected.labels & set(found.labels)


MUTATED = frozenset(one.hack for one in MUTATIONS) | {hack for hack, _ in WITHOUT.values()} | {*WALLED} | TIMED
"""Cheats that some test here lets pass."""
