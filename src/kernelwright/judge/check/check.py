"""Checks whether a candidate is right: on many inputs, with other weights, in both modes, and as a well-behaved drop-in.

The order matters: cheap and telling checks come first, so that most wrong candidates cost a second.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelwright.errors import TaskError, listed
from kernelwright.judge.check.bounds import Bounds
from kernelwright.judge.check.compare import Distance, apart
from kernelwright.judge.check.draws import CALLS, are_alike, sampled
from kernelwright.judge.check.examiner import Examiner, PosedQuestion
from kernelwright.judge.check.facts import secret_seed, some_of
from kernelwright.judge.check.findings import CheckFinding, RejectionError, held_findings, leak_findings
from kernelwright.judge.check.oracle import OutOfDomainError, Outputs, State
from kernelwright.judge.check.usage import check_usage
from kernelwright.judge.check.weights import (
    check_buffers,
    check_default_buffers,
    check_moved_buffers,
    check_reloading,
    check_replaced_weights,
    check_weight_structure,
)
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.isolation.side import Side
from kernelwright.records import Label, Reason
from kernelwright.tasks import INPUT_SETS, InputSet
from kernelwright.tasks.input_sets import size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Results of a check that the candidate has passed, as timing needs them."""

    bounds: Bounds
    tolerances: Mapping[InputSet, Distance]
    """Distance between candidate and reference that each input set allows."""
    timed_tolerance: Distance
    """The same for the task's own inputs, which are timed."""
    output_follows_input: bool
    """True if later calls overwrite the reference's outputs: views of its inputs, or one tensor that it returns again."""


def check_candidate(examiner: Examiner, promising: Callable[[], None] = lambda: None) -> CheckResult:
    """All checks before timing, in order. `promising` is called once most wrong candidates would have been rejected.

    Raises:
        RejectionError, WorkerError: the candidate failed one.
        TaskError: the reference did.
    """
    trial, facts = examiner.trial, examiner.trial.facts
    if facts.stochastic:
        held = f" in {listed(facts.carried)}" if facts.carried else ""
        why = f"keeps a state between calls{held}" if facts.stateful else "draws random numbers in forward"
        trial.findings.checks["carried"] = list(facts.carried)
        trial.findings.remark(Label.STOCHASTIC_TASK, f"the reference {why}")
    if not trial.reloads_state and facts.oracle.initial_state:
        # It was given new weights before it was known that the candidate keeps those it was built with.
        examiner.reference.load_state(facts.oracle.initial_state)
    try:
        first = examiner.ask(INPUT_SETS[0], slot=0, hold=True)
    except OutOfDomainError as error:
        raise TaskError(f"Wanted a reference that works on its own inputs for {facts.live.task.id}; {error}.") from error
    # The second set reuses the first one's memory: same pointer, other values.
    second = examiner.ask(INPUT_SETS[1], slot=0, hold=True)
    follows = any("input" in output.aliases for posed in (first, second) for output in posed.reference.described.outputs)
    if trial.findings.reference_reuses_output:
        truth, allowed = examiner.bounds.whole(first.question).truth, first.question.tolerance.allowed
        follows |= not apart(examiner.reference.recopy(0), truth).within(allowed)
    examiner.reference.release()  # by now it has shown whether it reuses memory, and nobody reads its outputs again
    if trial.settings.thorough:
        fitting = [one for one in INPUT_SETS[2:] if not one.late and one.fits(facts.forms, examiner.bounds.names)]
        for index, inputs in enumerate(fitting):
            with trial.findings.skipping(inputs.name):
                examiner.ask(inputs, slot=(index + 1) % 2)
        check_repeat(examiner, first)
        if facts.stochastic:
            check_unseeded_call(examiner)
        check_similar_inputs(examiner, first)
        check_buffers(examiner)
        if trial.reloads_state and facts.oracle.parameter_names:
            check_reloading(examiner)
            check_weight_structure(examiner, first.question.tolerance.allowed)
        if trial.reloads_state:
            check_default_buffers(examiner)
        promising()
        if Reason.MODE_MISMATCH not in trial.findings.missing:
            check_other_mode(examiner)
    check_held_outputs(examiner, (first, second), follows)
    _label_whole_check(examiner)
    if trial.settings.thorough:
        check_growth(examiner)
        check_layouts(examiner)
        check_usage(examiner)
    return CheckResult(
        bounds=examiner.bounds,
        tolerances={inputs: allowed for inputs, allowed in examiner.tolerances.items() if inputs.timed},
        timed_tolerance=first.question.between,
        output_follows_input=follows,
    )


_GROWN_BYTES = 8 << 20
_GROWTH_S, _GROWTH_CALLS_MAX, _GROWTHS = 0.03, 4096, 3
"""Memory that a module takes which keeps every output, time and calls for that, and how often running. Our choice."""
_LEFT_SHARE = 0.25
"""Share of calls that leave something behind which is not chance. Our choice."""


def check_growth(examiner: Examiner) -> None:
    """Many calls must not take more and more memory, nor leave anything else behind; half an output a call is too little to
    be seen. Nor may each draw from the program's random generators, or seed them."""
    trial, side, output_bytes = examiner.trial, examiner.candidate, examiner.trial.facts.shapes.output_bytes
    if trial.facts.stateful or (trial.facts.has_buffers and not trial.reloads_state):
        return  # only one side would be called
    calls = max(4, math.ceil(_GROWN_BYTES / output_bytes))
    start_s = time.perf_counter()
    side.repeat(4)
    weighs = calls <= _GROWTH_CALLS_MAX and (time.perf_counter() - start_s) * calls / 4 <= _GROWTH_S
    calls = calls if weighs else 1
    grown = _left_behind(side, calls)
    limits = dict.fromkeys(grown, max(1.0, calls * _LEFT_SHARE)) | {"draws": _GROWTHS}
    limits["bytes of memory"] = calls * output_bytes / 2 if weighs else math.inf
    if over := [kind for kind in grown if grown[kind] >= limits[kind]]:
        own = _left_behind(examiner.reference, calls)
        trial.findings.add(leak_findings({kind: grown[kind] for kind in over if own[kind] < grown[kind] / 2}, calls))
    if not weighs:
        return
    if trial.reloads_state and trial.facts.has_buffers:
        examiner.load(trial.facts.weights)
    examiner.ask(InputSet("own-after-many", INPUT_SETS[0].vary, "counting calls"), slot=0, reason=Reason.TIMED_OUTPUT_WRONG)


def _left_behind(side: Side, calls: int) -> dict[str, int]:
    """Amounts that so many calls of a side take and keep, by kind; and how often of `_GROWTHS` they moved generators."""
    seen = []
    for _ in range(_GROWTHS + 1):
        side.repeat(calls)  # the first time, what is kept of the latest calls fills up
        seen.append(side.held())
    pairs = [(before.held, after.held) for before, after in itertools.pairwise(seen)]
    grown = {kind: min(after[kind] - before[kind] for before, after in pairs) for kind in seen[0].held}
    return grown | {"draws": sum(one.moved for one in seen[1:])}


def check_layouts(examiner: Examiner) -> None:
    """Inputs that lie otherwise in memory, or lack what all of the task's own share; last, since a kernel that was not
    written for them may end its process.

    Timing leaves out those that a candidate need not take under the contract `kernelbench`.
    """
    trial, forms = examiner.trial, examiner.trial.facts.forms
    for inputs in (one for one in INPUT_SETS if one.late and one.fits(forms, examiner.bounds.names)):
        try:
            with trial.findings.skipping(inputs.name):
                examiner.ask(inputs, slot=1, state=_present_state(examiner))
            # A kernel of PyTorch's own that memory is not aligned for takes the device away from the reference's process.
            broken = "CUDA error" in trial.findings.checks.get("skipped", {}).get(inputs.name, "")
        except (RejectionError, WorkerError) as failure:
            excused = CheckFinding.excused(failure, Reason.LAYOUT_DEPENDENT, Label.CONTIGUOUS_ONLY)
            relies = any(inputs.breaks in form.invariants for form in forms if inputs.varies(form))
            if excused is None or not (inputs.layout or relies):
                raise
            relying = () if inputs.layout else (CheckFinding.remark(Label(f"relies-on-{inputs.breaks}"), failure.detail),)
            trial.findings.add(relying or [excused])
            examiner.tolerances.pop(inputs, None)
            broken = isinstance(failure, WorkerError)
        if broken:
            for side in examiner.sides:  # both, since they may keep a state
                trial.renew(side)


def check_late(examiner: Examiner) -> None:
    """One more fresh input after everything else, timing included: age must not change the answer."""
    trial = examiner.trial
    if trial.reloads_state and trial.facts.oracle.initial_state:
        examiner.load(trial.facts.weights)
    with trial.findings.skipping("own-late"):
        examiner.ask(InputSet("own-late", INPUT_SETS[0].vary, "drifting with age"), slot=0, state=_present_state(examiner))
    if trial.reloads_state and trial.facts.oracle.parameter_names:
        check_replaced_weights(examiner)


def check_repeat(examiner: Examiner, first: PosedQuestion) -> None:
    """The first inputs again, elsewhere in memory: neither a cache by pointer nor chance may decide. Then the same tensors
    once more, after their caller has written into what was returned for them."""
    if examiner.trial.facts.has_buffers:
        return  # outputs may depend on buffers that earlier calls moved; `check_reloading` covers this case
    first = replace(first, question=examiner.bounds.whole(first.question))
    with examiner.trial.gate(shared=True):
        if examiner.trial.facts.stateful:
            now = examiner.call(examiner.reference, first.question.inputs(), slot=1, seed=first.seed)
            question = first.question
            question = examiner.bounds.around(question.inputs(), question.state, question.training, None, now.outputs)
            first = replace(first, question=question, reference=now)
        layout = examiner.candidate.place(first.question.inputs(), slot=1)
        answer = examiner.candidate.call(layout, seed=first.seed)
    examiner.judge(first, answer, Reason.NONDETERMINISTIC)
    shared = any(output.aliases for call in (first.reference, answer) for output in call.described.outputs)
    if not (shared or examiner.trial.facts.stateful):
        with examiner.trial.gate(shared=True):
            examiner.candidate.place(first.question.inputs(), slot=1)
            answer = examiner.candidate.call(layout, seed=first.seed, again=True)
        examiner.judge(first, answer, Reason.STALE_OUTPUT)


def check_similar_inputs(examiner: Examiner, first: PosedQuestion) -> None:
    """Inputs that differ from the first ones in the places of two elements, in a few elements, and in one.

    A cache that is keyed by a digest confuses them.
    """
    examiner.earlier = first.question
    for name, vary, kept in (
        ("two-swapped", _swap, "a sum"),  # first: `first` was the latest call
        ("few-changed", functools.partial(_change, 0.02), "a sample"),
        ("one-changed", functools.partial(_change, 0.0), "a sample"),
    ):
        with examiner.trial.findings.skipping(name):
            examiner.ask(InputSet(name, vary, f"caches keyed by {kept}", truths=True), slot=1, base=first.question.inputs)


def _change(share: float, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move a share of the elements, or just one when it is 0, by several times the tensor's size; of booleans, turn them.

    Zeros among other elements stay, as in all input sets: a triangular matrix may be what the task is about.
    """
    if x.numel() == 0:
        return x
    movable = (x != 0).contiguous()
    if x.dtype == torch.bool or not movable.any():
        movable = torch.ones_like(movable)
    if share == 0:
        place = torch.rand(x.shape, generator=generator, device=x.device).masked_fill_(~movable, -1.0).argmax()
        chosen = torch.zeros_like(movable)
        chosen.view(-1)[place] = True
    else:
        chosen = some_of(x, share, generator) & movable
    if x.dtype == torch.bool:
        return x ^ chosen
    size = size_of(x)
    # What is all zero, such as an initial state, says nothing of its size; it must be seen beside others.
    size = torch.where(size == 0, 1.0, size.clamp_min(1e-3)).to(x.dtype)
    return torch.add(x, chosen, alpha=6 * size.item())


_SWAP_TRIES = 4096
"""Places among which two are looked for to swap: a list of all places of a large input takes more memory than the input."""


def _swap(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Let two elements that differ change places, neither of them zero: a triangle stays one."""
    if x.numel() < 2:
        return x
    tried = torch.randint(x.numel(), (_SWAP_TRIES,), generator=generator, device=x.device)
    found = x.reshape(-1)[tried]
    places = tried[found != 0]
    others = tried[(found != 0) & (found != found[found != 0][:1])] if len(places) else places
    if not len(others):
        return x
    first, second = places[0], others[0]
    swapped = x.clone(memory_format=torch.contiguous_format).view(-1)
    swapped[first], swapped[second] = x.reshape(-1)[second], x.reshape(-1)[first]
    return swapped.view(x.shape)


def check_unseeded_call(examiner: Examiner) -> None:
    """A second call without a new seed: the first must have left the generator where the reference leaves it."""
    facts, allowed = examiner.trial.facts, examiner.tolerances[INPUT_SETS[0]]
    inputs, seed = facts.draw(), facts.call_seed()
    answers = []
    with examiner.trial.gate(shared=True):
        for side in examiner.sides:
            examiner.call(side, inputs, slot=0, seed=seed)
            answers.append(examiner.call(side, inputs, slot=0, seed=None))
    found = apart(answers[1].outputs, answers[0].outputs)
    if not found.within(allowed):
        detail = f"in a second call after one seed the output is {found} from the reference's; allowed {allowed}"
        raise RejectionError(Reason.WRONG_OUTPUT, detail)


def check_other_mode(examiner: Examiner) -> None:
    """The mode the module was not built in, and back. Nothing of it is asked by the contract `kernelbench`."""
    trial, training = examiner.trial, examiner.trial.facts.oracle.training
    try:
        _ask_in_both_modes(examiner)
    except (RejectionError, WorkerError) as failure:
        if (excused := CheckFinding.excused(failure, Reason.MODE_MISMATCH)) is None:
            raise
        trial.findings.add([excused])
        for side in examiner.sides:
            side.set_mode(training=training)
            if trial.reloads_state and trial.facts.oracle.initial_state:
                side.load_state(trial.facts.weights)


def _ask_in_both_modes(examiner: Examiner) -> None:
    trial, oracle = examiner.trial, examiner.trial.facts.oracle
    for mode, name in ((not oracle.training, "own-other-mode"), (oracle.training, "own-mode-again")):
        with trial.findings.skipping(name, Label.MODE_UNCHECKED):
            _switch(examiner, mode)
            own = InputSet(name, INPUT_SETS[0].vary, "work skipped in one mode")
            # The other mode alone may draw random numbers, as dropout does.
            draws = trial.facts.stochastic or (mode != oracle.training and trial.facts.draws_in(mode, trial.state))
            try:
                for _ in range(2 if draws else 1):  # random numbers that were drawn once may have been kept
                    examiner.ask(own, slot=1, state=_present_state(examiner), training=mode, draws=draws)
                check_moved_buffers(examiner, "train" if mode else "eval", draws)
            except RejectionError as rejection:
                if not draws or trial.facts.stochastic or rejection.reason is not Reason.WRONG_OUTPUT:
                    raise
                _check_drawn_otherwise(examiner, rejection)


def _switch(examiner: Examiner, mode: bool) -> None:
    """Put both sides into a mode, with the task's weights. The reference may refuse one, or stay in its own."""
    trial = examiner.trial
    try:
        wanted = examiner.reference.set_mode(training=mode)
    except TaskError as error:
        raise OutOfDomainError(str(error)) from error
    if (found := examiner.candidate.set_mode(training=mode)) != wanted:
        raise RejectionError(Reason.MODE_MISMATCH, f"train({mode}) left the module with training={found}")
    if wanted != mode:
        raise OutOfDomainError(f"train({mode}) leaves the reference with training={wanted}")
    if trial.reloads_state and trial.facts.oracle.initial_state:
        examiner.load(trial.facts.weights)


def _check_drawn_otherwise(examiner: Examiner, rejection: RejectionError) -> None:
    """Accept other random numbers than the reference's with a label, where outputs and buffers are distributed alike.

    A CUDA graph may run another kernel of attention, and torch.compile draws its own numbers. Each side is asked
    twice, since chance may make calls unlike.
    """
    facts, places = examiner.trial.facts, secret_seed()
    inputs, theirs = facts.draw(), list[list[Outputs]]()
    rounding = max([2 * torch.finfo(kind).eps for kind in facts.output_dtypes if kind.is_floating_point], default=0.0)
    for _ in range(2):
        theirs.append(_samples(examiner, examiner.reference, inputs, places))
        if are_alike(_samples(examiner, examiner.candidate, inputs, places), theirs[-1], rounding):
            examiner.trial.findings.remark(Label.OTHER_DRAWS, f"{rejection.detail}; over many seeds it is distributed alike")
            return
    if not are_alike(theirs[0], theirs[1], rounding):
        again = _samples(examiner, examiner.reference, inputs, places)
        if not are_alike(again, theirs[0], rounding):
            raise OutOfDomainError("the reference cannot be told from itself")
    raise RejectionError(rejection.reason, f"{rejection.detail}; over many seeds it is distributed otherwise, too")


def _samples(examiner: Examiner, side: Side, inputs: list[Any], places: int) -> list[Outputs]:
    """Elements of what calls of a side return and of the buffers that they leave, each call with a seed of its own."""
    trial, facts, found = examiner.trial, examiner.trial.facts, list[Outputs]()
    loads = trial.reloads_state and facts.has_buffers
    with trial.gate(shared=True):
        for _ in range(CALLS):
            if loads:
                side.load_state(facts.weights)
            outputs = examiner.call(side, inputs, slot=1, seed=secret_seed()).outputs
            state = side.read_state() if loads else {}
            buffers = [state[key] for key in sorted(state.keys() - facts.oracle.parameter_names)]
            found.append(sampled([*outputs, *buffers], places))
    return found


def check_held_outputs(examiner: Examiner, held: tuple[PosedQuestion, ...], output_follows_input: bool) -> None:
    """The first outputs, after all the calls since: no call may have written to them."""
    findings = examiner.trial.findings
    if output_follows_input:
        examiner.candidate.release()
        return  # later calls overwrite what the reference returns, too
    with examiner.trial.gate(shared=True):
        for index, posed in enumerate(held):
            truth, allowed = examiner.bounds.whole(posed.question).truth, posed.question.tolerance.allowed
            findings.add(held_findings(examiner.candidate, index, truth, allowed, findings.labels))
    examiner.candidate.release()


def _label_whole_check(examiner: Examiner) -> None:
    facts, findings, bounds = examiner.trial.facts, examiner.trial.findings, examiner.bounds
    findings.add(examiner.trial.process_findings(*examiner.sides))
    operators = examiner.candidate.operators()
    if facts.stateful:
        examiner.reference.operators()  # that was a call, which one side alone may not have
    findings.checks["operators"] = operators
    if operators:
        findings.remark(Label.LIBRARY_CALL, f"it runs {', '.join(operators[:5])}")
    if vacuous := examiner.vacuity.passing:
        findings.remark(Label.VACUOUS_TASK, f"these pass every input set: {', '.join(vacuous)}")
        findings.checks["vacuous"] = list(vacuous)
    if not bounds.is_calibrated and bounds.float_dtype is not None:
        findings.remark(Label.UNCALIBRATED_PRECISION, "no input set tells this precision from the next lower one")


def _present_state(examiner: Examiner) -> State:
    """State of both modules now. Statistics that could not be loaded anew have moved with every call."""
    if examiner.trial.reloads_state or not examiner.trial.facts.has_buffers:
        return examiner.trial.state
    return examiner.reference.read_state()
