"""Poses input sets to the reference and the candidate, and judges the candidate's answers by the truth."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelwright.errors import TaskError, listed
from kernelwright.judge.check.bounds import Bounds, Question
from kernelwright.judge.check.compare import Distance, VacuityGate, apart
from kernelwright.judge.check.facts import secret_seed
from kernelwright.judge.check.findings import RejectionError
from kernelwright.judge.check.oracle import Inputs, OutOfDomainError, State, tensors_of
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.isolation.side import CallOutput, Side
from kernelwright.records import Label, Reason
from kernelwright.tasks import INPUT_SETS, InputSet

_LOST = 0.5
"""Relative error of the reference above which any answer may be right, as of large squares over their sum. Our choice."""

_ORDERED = frozenset({"ordered", "ordered-across", "far", "near"})
"""Input sets in which the roundings of a long sum may all have one direction. Others tell precisions."""
_NEAR = 4.0
"""Distance, in what is allowed, within which an answer is right for the weights that a module was built with. Our choice."""


@dataclass(frozen=True, slots=True)
class PosedQuestion:
    """One input set with everything known about its answer."""

    set: InputSet
    question: Question
    reference: CallOutput
    seed: int | None


class Examiner:
    """Asks both sides the same questions."""

    def __init__(self, trial: Trial, reference: Side, candidate: Side) -> None:
        self.trial = trial
        self.reference = reference
        self.candidate = candidate
        self.sides = reference, candidate
        self.bounds = Bounds(trial)
        self.tolerances: dict[InputSet, Distance] = {}
        """Distance between candidate and reference that each input set allows."""
        self.vacuity = VacuityGate(trial.facts.output_dtypes)
        self.earlier: Question | None = None
        """The question before, to recognise an answer to that one."""

    def load(self, state: State) -> None:
        """Load weights into both sides."""
        for side in self.sides:
            side.load_state(state)

    def ask(
        self,
        inputs: InputSet,
        *,
        slot: int,
        state: State | None = None,
        training: bool | None = None,
        draws: bool | None = None,
        base: Inputs | None = None,
        hold: bool = False,
        reason: Reason | None = None,
        usable: Distance | None = None,
    ) -> PosedQuestion:
        """Pose a question to both sides and judge the candidate's answer.

        Args:
            inputs: Variation of the inputs.
            slot: Place of the inputs in the workers' memory.
            state: State of both modules; the trial's by default.
            training: Mode of both modules; the one they were built in by default.
            draws: Whether the reference draws random numbers in this mode; as in its own by default.
            base: Inputs to vary; None draws new ones.
            hold: Whether the workers keep the outputs.
            reason: Reason to reject a wrong answer for; None diagnoses.
            usable: Error of the reference (rms) above which the set is left out. Such a set tells no precisions: lower ones
                are computed only for an answer that is about to be rejected.

        Raises:
            RejectionError, WorkerError: the candidate's answer is wrong, or there is none.
            OutOfDomainError: the reference has no usable answer.
        """
        facts = self.trial.facts
        state = self.trial.state if state is None else state
        training = facts.oracle.training if training is None else training
        with self.trial.gate(shared=True):
            drawn, again = facts.drawing(inputs, base)
            if facts.stochastic if draws is None else draws:
                # A float64 truth would be of other random draws, and so far away that everything would be allowed.
                seed, truth = secret_seed(), None
            else:
                # Before the reference is called: where there is no truth, its answer stands for it.
                seed, truth = None, self.bounds.truth(drawn, state, training)
            theirs = functools.partial(self.reference_answer, inputs, drawn, slot=slot, seed=seed, hold=hold)
            mine = functools.partial(self.call, self.candidate, drawn, slot=slot, seed=seed, hold=hold)
            answer: CallOutput | None = None
            if facts.stateful or (inputs is INPUT_SETS[0] and not facts.shapes.is_large):
                # At once: the first call takes long, and a state that is kept must be that of equally many calls, also where
                # the reference's answer turns out to be of no use.
                with ThreadPoolExecutor(1) as thread:
                    called = [thread.submit(mine)]
                    reference = theirs()
                answer = called.pop().result()  # as in `pairs.start_sides`
            else:
                reference = theirs()
            question = self.bounds.around(drawn, state, training, truth, reference.outputs, precise=usable is None)
            question = replace(question, orders_terms=inputs.name in _ORDERED)
            own = question.tolerance.reference
            if (inputs in INPUT_SETS[2:] and own.rms > _LOST) or not (
                usable is None or own.without("worst", "differing").within(usable)
            ):
                raise OutOfDomainError("the reference's own answer is lost to rounding or overflow")
            self.tolerances[inputs] = question.between
            self.vacuity.observe(question.truth, tensors_of(drawn), question.tolerance.allowed)
            answer = answer or mine()
            try:
                posed = self.judge(PosedQuestion(inputs, question, reference, seed), answer, reason)
            except RejectionError as rejection:
                if reason or seed or inputs in INPUT_SETS[:2] or self._reference_repeats(question, drawn, slot):
                    raise
                raise OutOfDomainError("the reference is as far from its own answer when it is asked again") from rejection
        # It is kept without what is large and can be computed again.
        kept = replace(posed.question, inputs=again, truth=[] if question.has_float64 else question.truth)
        posed = replace(posed, question=kept)
        if reason is None:
            self.earlier = posed.question
        return posed

    def _reference_repeats(self, question: Question, drawn: list[Any], slot: int) -> bool:
        """True if the reference meets the limit once more, without a state that the first time may have moved."""
        if self.trial.facts.stateful or self.trial.facts.has_buffers:
            return True
        again = self.call(self.reference, drawn, slot=slot, seed=None)
        return apart(again.outputs, self.bounds.whole(question).truth).within(question.between)

    def reference_answer(self, inputs: InputSet, drawn: list[Any], **how: Any) -> CallOutput:
        """The reference's answer to inputs that were drawn for a set; see `call`."""
        try:
            found = self.call(self.reference, drawn, **how)
        except TaskError as error:
            if inputs is INPUT_SETS[0] or self.reference.worker.ended:
                raise
            raise OutOfDomainError(str(error)) from error
        if found.described.strange:
            raise TaskError(
                f"Wanted plain tensors, numbers, lists, tuples or dicts from the reference's forward; "
                f"found {listed(found.described.strange, 3)}. Make it plain, as by tuple(...) or .clone()."
            )
        return found

    def call(self, side: Side, inputs: list[Any], *, slot: int, seed: int | None, hold: bool = False) -> CallOutput:
        """One call of one side on inputs in a slot."""
        answer = side.call(side.place(inputs, slot), seed=seed, hold=hold)
        if self.trial.facts.shapes.is_large and side is self.reference:  # the candidate must not see that it is checked
            side.release_idle()  # a truth of large tensors needs the memory
        return answer

    def judge(self, posed: PosedQuestion, answer: CallOutput, reason: Reason | None = None) -> PosedQuestion:
        """Reject an answer of another form or too far from the truth; returns the question with the tolerance it needed."""
        findings, name = self.trial.findings, posed.set.name
        self.trial.check_form(posed.reference, answer, strides=not posed.set.layout)
        question = self.bounds.whole(posed.question)
        found = apart(answer.outputs, question.truth)
        question = self.bounds.widened(question, found, answer.outputs)
        if not found.within(question.tolerance.allowed):
            question = self.bounds.where_decided(question, answer.outputs)
            found = apart(answer.outputs, question.truth)
        posed = replace(posed, question=question)
        self.tolerances[posed.set] = question.between
        allowed = question.tolerance.allowed
        findings.checks.setdefault("sets", {})[name] = {
            "error": found.to_json(),
            "allowed": allowed.to_json(),
            "reference": question.tolerance.reference.to_json(),
            "calibrated": question.tolerance.calibrated,
        }
        if found.within(allowed):
            if question.uses_tf32:
                where = "products or cuDNN" if self.trial.settings.tf32_products else "cuDNN"
                findings.remark(Label.TF32, f"its error on `{name}` is that of {where} in TF32: {found}")
            return posed
        which, index = _worst_output(found, allowed)
        detail = f"on input set `{name}`: error{which} {found.of(index)}; allowed {allowed.of(index)}"
        raise RejectionError(reason or self._diagnose(posed, answer, found), detail)

    def _diagnose(self, posed: PosedQuestion, answer: CallOutput, found: Distance) -> Reason:
        allowed, lower = posed.question.tolerance.allowed, posed.question.tolerance.lower
        if any(
            bool((~torch.isfinite(output) & torch.isfinite(truth)).any())
            for output, truth in zip(answer.outputs, posed.question.truth, strict=True)
            if truth.is_floating_point()
        ):
            return Reason.NON_FINITE_OUTPUT
        earlier = self.earlier
        if earlier is not None and apart(answer.outputs, self.bounds.whole(earlier).truth).within(allowed):
            return Reason.STALE_OUTPUT
        integers_are_right = found.without("rms", "worst").within(allowed)
        if lower is not None and found.rms <= 8 * lower.rms and found.rms < 0.02 and integers_are_right:
            return Reason.PRECISION_DOWNGRADE
        # An answer that is as near with the present weights lacks precision.
        if earlier is None and not found.within(allowed * _NEAR) and self._right_with_first_weights(posed):
            return Reason.STALE_WEIGHTS
        return Reason.WRONG_OUTPUT

    def _right_with_first_weights(self, posed: PosedQuestion) -> bool:
        """True if it is right once the module holds the weights again which it was built with. It may have captured some
        of them and not others, so that its answer with new ones is right for neither."""
        oracle = self.trial.facts.oracle
        if not self.trial.reloads_state or not self.bounds.has_float64 or not oracle.parameter_names:
            return False
        try:
            truth = oracle.truth(posed.question.inputs(), oracle.initial_state, training=oracle.training)
            self.candidate.load_state(oracle.initial_state)
            answer = self.call(self.candidate, posed.question.inputs(), slot=0, seed=None)
        except (OutOfDomainError, WorkerError):
            return False
        return apart(answer.outputs, truth).within(posed.question.tolerance.allowed * _NEAR)


def _worst_output(found: Distance, allowed: Distance) -> tuple[str, int]:
    """Names the farthest of the outputs that are too far, where there are several."""
    far = found.each
    if not far:
        return "", 0
    index = max(range(len(far)), key=lambda at: (not far[at].within(allowed.of(at)), far[at].rms, far[at].differing))
    return f" of output {index + 1} of {len(far)}", index
