"""Uses a candidate as a program does: with each argument that the reference takes, copied, trained, and under autocast.

A silently wrong answer where an argument is given makes it no drop-in. Deviations in copies, gradients and autocast are
labels. An error that it raises says so itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kernelwright.errors import listed
from kernelwright.judge.check.examiner import Examiner
from kernelwright.judge.check.facts import secret_seed
from kernelwright.judge.check.findings import CheckFinding, RejectionError
from kernelwright.judge.check.oracle import State
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.isolation.side import LARGE_BYTES, Use
from kernelwright.records import Label, Reason
from kernelwright.tasks import INPUT_SETS, InputSet

_OTHER_GRADIENT = 0.1
"""Distance of projections, in the gradient's norm, from which on it is another gradient. Our choice."""
_RENEWED = (Reason.RUNTIME_ERROR, Reason.CRASHED, Reason.OUT_OF_MEMORY, Reason.RUN_TIMEOUT)
"""Failures after which a use is given up, and the candidate gets another process."""


def check_usage(examiner: Examiner) -> None:
    """All uses, in a process in which nothing is compiled for them. Raises as `Examiner.ask`."""
    trial, facts = examiner.trial, examiner.trial.facts
    if facts.stateful or facts.shapes.is_large or (facts.has_buffers and not trial.reloads_state):
        return  # only one side would be called, or memory is short
    candidate = examiner.candidate
    try:
        candidate.run_eagerly(True)
        _check_options(examiner)
        if trial.reloads_state and facts.oracle.parameter_names and facts.shapes.state_bytes <= LARGE_BYTES:
            _check_copy(examiner)
        _check_training(examiner)
        candidate.run_eagerly(False)
        # Memory that it keeps for its outputs may ask for gradients from now on.
        now = candidate.call(candidate.place(facts.draw(), slot=0), seed=facts.call_seed())
        marked = any(output.traits for output in now.described.outputs)
    except WorkerError as failure:
        if failure.reason not in _RENEWED:
            raise
        marked = True
    if marked:
        for side in examiner.sides:
            trial.renew(side)
    if trial.reloads_state and facts.oracle.initial_state:
        examiner.load(facts.weights)


def _check_options(examiner: Examiner) -> None:
    facts = examiner.trial.facts
    for name, values in facts.options.items():

        def given(values: list[Any] = values) -> list[Any]:
            return [*facts.draw(), *values]

        inputs = InputSet(f"own-with-{name}", INPUT_SETS[0].vary, "arguments that are taken and ignored")
        try:
            with examiner.trial.findings.skipping(inputs.name):
                examiner.ask(inputs, slot=0, base=given)
        except RejectionError as failure:
            detail = f"where `{name}` is given: {failure.reason}: {failure.detail}"
            examiner.trial.findings.add([CheckFinding.lacking(Reason.WRONG_OUTPUT, detail)])
        except WorkerError as failure:
            if failure.reason is not Reason.RUNTIME_ERROR or "CUDA error" in failure.detail:
                raise
        examiner.tolerances.pop(inputs, None)  # timed calls do not give it


def _check_copy(examiner: Examiner) -> None:
    """Other weights in a deep copy: it must compute with those, and the module still with its own."""
    trial, facts = examiner.trial, examiner.trial.facts
    other = facts.new_weights()
    try:
        examiner.candidate.copy()
    except WorkerError as failure:
        if failure.reason is not Reason.RUNTIME_ERROR:
            raise
        return  # as PyTorch says of a graph, and Python of a module
    examiner.load(other)
    copied = _right(examiner, "own-copied", other)
    examiner.candidate.copy()
    examiner.reference.load_state(facts.weights)
    if not (copied and _right(examiner, "own-beside-copy", facts.weights)):
        trial.findings.remark(Label.SHARED_COPIES, "a deep copy was loaded with other weights")


def _right(examiner: Examiner, name: str, state: State) -> bool:
    inputs = InputSet(name, INPUT_SETS[0].vary, "copies that share weights")
    try:
        with examiner.trial.findings.skipping(name):
            examiner.ask(inputs, slot=0, state=state, reason=Reason.STALE_WEIGHTS)
    except RejectionError:
        return False
    return True


def _check_training(examiner: Examiner) -> None:
    trial, facts = examiner.trial, examiner.trial.facts
    inputs, seed = facts.draw(), secret_seed()
    with ThreadPoolExecutor(1) as thread:  # the first training step of a process loads many kernels
        answer = [thread.submit(examiner.candidate.use, inputs, seed)]
        wanted = Use.model_validate(facts.oracle.used(inputs, trial.state, training=facts.oracle.training, seed=seed))
    found = answer.pop().result()  # as in `pairs.start_sides`
    if wanted.gradients is not None and found.gradients is not None:
        moving = {name: one for name, one in wanted.gradients.items() if one is not None and one[0] > 0}
        if not trial.reloads_state:
            moving = {name: one for name, one in moving.items() if name in found.gradients}
        answered = {name: one for name in moving if (one := found.gradients.get(name)) is not None}
        if lost := sorted(moving.keys() - answered.keys()):
            trial.findings.remark(Label.GRADIENTS_DIFFER, f"none reaches {listed(lost)}")
        other = [] if facts.stochastic else [name for name, one in answered.items() if not _alike(one, moving[name])]
        if other:
            trial.findings.remark(Label.GRADIENTS_DIFFER, f"another one reaches {listed(other)}")
    if None not in (wanted.autocast, found.autocast) and found.autocast != wanted.autocast:
        detail = f"under autocast its outputs are {listed(found.autocast or ())}; wanted {listed(wanted.autocast or ())}"
        trial.findings.remark(Label.IGNORES_AUTOCAST, detail)


def _alike(found: tuple[float, float], wanted: tuple[float, float]) -> bool:
    """True if two gradients are about the same, by norm and projection."""
    return all(abs(one - other) <= _OTHER_GRADIENT * wanted[0] for one, other in zip(found, wanted, strict=True))
