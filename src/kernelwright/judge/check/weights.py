"""Checks that a module uses the weights it holds now, and keeps its buffers as the reference keeps its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kernelwright.judge.check.compare import LEGAL_ERRORS, Distance, distance, farthest
from kernelwright.judge.check.examiner import Examiner
from kernelwright.judge.check.facts import TaskFacts, secret_seed
from kernelwright.judge.check.findings import CheckFinding, RejectionError
from kernelwright.judge.check.oracle import Inputs, OutOfDomainError, State
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.records import Label, Reason
from kernelwright.tasks import INPUT_SETS, WEIGHT_SETS, InputSet
from kernelwright.tasks.input_sets import computable


def check_buffers(examiner: Examiner) -> None:
    """After the same call from the same state, both modules must have moved to the same state."""
    trial, facts = examiner.trial, examiner.trial.facts
    if not facts.oracle.initial_state or not trial.reloads_state:
        return
    inputs = facts.draw()
    reference, candidate = _states_after(examiner, [(inputs, facts.call_seed())])
    rounding: dict[str, Distance] | None = None
    for key, wanted in reference.items():
        is_parameter = key in facts.oracle.parameter_names
        limit = Distance(0.0, 0.0) if is_parameter else _buffer_limit(wanted.dtype)
        found = distance(candidate[key], wanted.double() if wanted.is_floating_point() else wanted)
        if found.within(limit):
            continue
        if not is_parameter and wanted.is_floating_point():
            if rounding is None:
                with trial.gate(shared=True):
                    rounding = _rounding_of_buffers(examiner, inputs, reference)
            if found.within(limit + rounding.get(key, limit)):
                continue
        what = "parameter" if is_parameter else "buffer"
        detail = f"{what} `{key}` differs from the reference's after one call"
        trial.findings.add([CheckFinding.lacking(Reason.BUFFER_MISMATCH, detail)])


_SEVERAL = 3


def check_moved_buffers(examiner: Examiner, mode: str, draws: bool) -> None:
    """Several calls in the present mode must move both modules' buffers alike, or leave them alone."""
    trial, facts = examiner.trial, examiner.trial.facts
    if not facts.has_buffers or not trial.reloads_state:
        return
    calls = [(facts.draw(), secret_seed() if draws else None) for _ in range(_SEVERAL)]
    when = f"after {_SEVERAL} calls in {mode} mode"
    trial.findings.add(moved_buffer_findings(facts, *_states_after(examiner, calls), when))


def _states_after(examiner: Examiner, calls: Sequence[tuple[list[Any], int | None]]) -> tuple[State, State]:
    """States of the reference and the candidate after these calls, from the same weights."""
    states = []
    with examiner.trial.gate(shared=True):
        for side in examiner.sides:
            side.load_state(examiner.trial.facts.weights)
            for inputs, seed in calls:
                examiner.call(side, inputs, slot=0, seed=seed)
            states.append(side.read_state())
    return states[0], states[1]


def moved_buffer_findings(facts: TaskFacts, wanted: State, found: State, when: str) -> list[CheckFinding]:
    """Deviations of buffers that have not moved from the task's weights as the reference's have (`wanted`)."""
    return [
        CheckFinding.lacking(Reason.BUFFER_MISMATCH, f"buffer `{key}` differs from the reference's {when}")
        for key in sorted(wanted.keys() - facts.oracle.parameter_names)
        if not buffer_has_kept_up(found[key], wanted[key], facts.weights[key])
    ]


def _rounding_of_buffers(examiner: Examiner, inputs: list[Any], found: State) -> dict[str, Distance]:
    """Distance at which two legal ways of rounding may leave a buffer, such as statistics of a convolution's output: by the
    reference's own distance from the float64 truth, and that of TF32 where PyTorch may use it, as in `Bounds.permitted`."""
    trial, facts, oracle = examiner.trial, examiner.trial.facts, examiner.trial.facts.oracle
    if not examiner.bounds.has_float64:
        return {}
    states = [found]
    try:
        if trial.lets_cudnn_use_tf32:
            oracle.with_tf32(inputs, facts.weights, training=oracle.training, products=trial.settings.tf32_products)
            states.append(oracle.state_after())
        oracle.truth(inputs, facts.weights, training=oracle.training)
    except OutOfDomainError:
        return {}
    truth = oracle.state_after()
    return {
        key: farthest([distance(state[key], value) for state in states]) * LEGAL_ERRORS
        for key, value in truth.items()
        if value.is_floating_point()
    }


def check_reloading(examiner: Examiner) -> None:
    """New weights after many calls: what was folded or cached from the old ones is now stale."""
    facts = examiner.trial.facts
    weights, inputs = facts.new_weights(), facts.drawing()[1]
    # Each from the one before: a cache that samples elements is renewed when it meets a changed one, and not otherwise.
    states = {"own-reloaded": weights}
    states["own-slightly-reloaded"] = facts.with_elements_changed(weights)
    states["own-row-reloaded"] = facts.with_part_of_a_row_changed(states["own-slightly-reloaded"])
    again = states["own-row-again"] = facts.with_part_of_a_row_changed(states["own-row-reloaded"])
    for name, state in states.items():
        examiner.load(state)
        _ask_with_weights(examiner, state, name, inputs)  # the same ones: what was kept for them is stale
    # As an optimiser would: code that folds weights when they are loaded hears nothing of it. First some, then the
    # others, since there may be an optimiser for some only: a module that watches one parameter misses either.
    stepped = again
    for chosen in facts.two_parts():
        stepped = stepped | {key: weights[key] for key in chosen}
        _ask_after_step(examiner, stepped, chosen, "in place")
    check_ties(examiner)
    examiner.load(facts.weights)


def check_weight_structure(examiner: Examiner, allowed: Distance) -> None:
    """Weights as training may leave them. A set on which the reference itself errs by several times what is `allowed` on
    usual weights is left out: a recurrent network may become chaotic."""
    facts = examiner.trial.facts
    for weights in WEIGHT_SETS if examiner.bounds.has_float64 else ():
        state = facts.varied_weights(weights)
        examiner.load(state)
        own = replace(weights, vary=INPUT_SETS[0].vary)
        with examiner.trial.findings.skipping(own.name):
            examiner.ask(own, slot=0, state=state, usable=allowed * LEGAL_ERRORS)
        examiner.tolerances.pop(own, None)  # timed calls have other weights
    examiner.load(facts.weights)


def _ask_after_step(examiner: Examiner, state: State, names: set[str], how: str) -> None:
    for side in examiner.sides:
        side.step(state, names, how)
    try:
        _ask_with_weights(examiner, state, "own-stepped")
    except RejectionError as rejection:
        if _right_now(examiner, state):
            raise  # wrong once, and not because of the weights
        detail = f"after a change of parameters ({how}): {rejection.detail}"
        examiner.trial.findings.remark(Label.PREPACKED_WEIGHTS, detail)


def check_ties(examiner: Examiner) -> None:
    """A tied parameter, which has several names, must change under all of them when it changes under one."""
    facts = examiner.trial.facts
    if not (tied := [sorted(names) for names in facts.oracle.owners() if len(names) > 1]):
        return
    state = facts.new_weights()
    examiner.candidate.step(state, {names[0] for names in tied})
    found = examiner.candidate.read_state()
    for names in tied:
        if apart := [name for name in names if not torch.equal(found[name], state[name])]:
            detail = f"`{names[0]}` and `{apart[0]}` are one parameter of the reference, and two of the candidate"
            examiner.trial.findings.add([CheckFinding.lacking(Reason.STATE_MISMATCH, detail)])


_REPLACED = ("data in place", "data replaced", "assigned")


def check_replaced_weights(examiner: Examiner) -> None:
    """Parameters that are changed past their versions, or whose memory is another's: nothing may be asked after this, since
    a module that keeps the old memory stays wrong."""
    facts, findings = examiner.trial.facts, examiner.trial.findings
    for how in _REPLACED:
        if Label.PREPACKED_WEIGHTS in findings.labels:
            return
        try:
            _ask_after_step(examiner, facts.new_weights(), facts.oracle.parameter_names, how)
        except WorkerError as failure:
            if failure.reason is not Reason.RUNTIME_ERROR:
                raise
            findings.remark(Label.PREPACKED_WEIGHTS, f"after a change of parameters ({how}): {failure.detail}")


def check_default_buffers(examiner: Examiner) -> None:
    """Other values in buffers that hold a default, such as a mean of 0: a module may ignore them and be right by default."""
    facts = examiner.trial.facts
    if not (other := facts.oracle.other_defaults(facts.generator)):
        return
    state = {**facts.weights, **other}
    examiner.load(state)
    with examiner.trial.findings.skipping("own-buffers"):
        _ask_with_weights(examiner, state, "own-buffers")
    examiner.load(facts.weights)


def _right_now(examiner: Examiner, state: State) -> bool:
    try:
        _ask_with_weights(examiner, state, "own-stepped-again")
    except RejectionError:
        return False
    return True


def _ask_with_weights(examiner: Examiner, state: State, name: str, base: Inputs | None = None) -> None:
    own = InputSet(name, INPUT_SETS[0].vary, "weights folded or cached")
    examiner.ask(own, slot=0, state=state, base=base, reason=Reason.STALE_WEIGHTS)


def _buffer_limit(dtype: torch.dtype) -> Distance:
    """Tolerance of a statistic after one call. A variance with n for n - 1 would be off by a tenth of 1/n."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return Distance(0.0, 0.0)
    eps = torch.finfo(dtype).eps
    return Distance(32 * eps, 256 * eps) if eps < 1e-4 else Distance(2 * eps, 8 * eps)


_KEPT_UP = Distance(0.03, math.inf, 0.05)
"""Distance from the reference's buffer allowed after many calls, as a share of its change: more than convolutions in TF32
leave, less than missed calls do. Some integers may differ, since rounding decides them. Our choice."""


def buffer_has_kept_up(found: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor) -> bool:
    """True if many calls moved the candidate's buffer (`found`) as they moved the reference's (`wanted`), from `before`."""
    if not wanted.is_floating_point():
        return distance(found, wanted).within(_KEPT_UP)
    wanted, before = computable(wanted), computable(before)
    if not torch.isfinite(wanted).all():
        return True  # as some input left it, which says nothing of the calls after that
    moved, size = (float(x.double().square().mean().sqrt()) if x.numel() else 0.0 for x in (wanted - before, wanted))
    error = float((found.double() - wanted.double()).square().mean().sqrt()) if wanted.numel() else 0.0
    return error <= _KEPT_UP.rms * moved + LEGAL_ERRORS * _buffer_limit(wanted.dtype).rms * size  # a NaN is not
