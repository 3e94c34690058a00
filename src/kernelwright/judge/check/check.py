"""Is the candidate right? On many inputs, with other weights, in both modes, and as a well-behaved drop-in.

The order matters: cheap and telling checks first, so that most wrong candidates cost a second.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelwright.errors import TaskError
from kernelwright.judge.check.bounds import Bounds, Question
from kernelwright.judge.check.compare import (
    LEGAL_ERRORS,
    Distance,
    Tolerance,
    VacuityGate,
    apart,
    distance,
    farthest,
)
from kernelwright.judge.check.guard import dynamic_labels, forbidden_changes
from kernelwright.judge.check.oracle import OutOfDomainError, State, tensors_of
from kernelwright.judge.check.subject import RejectionError, Subject, some_of
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.isolation.replies import Output
from kernelwright.judge.isolation.side import Answer, Side
from kernelwright.records import Label, Reason
from kernelwright.tasks import INPUT_SETS, InputSet


@dataclass(frozen=True, slots=True)
class _Posed:
    """One input set with everything known about its answer."""

    set: InputSet
    question: Question
    reference: Answer
    seed: int | None

    @property
    def inputs(self) -> list[Any]:
        return self.question.inputs

    @property
    def truth(self) -> list[torch.Tensor]:
        return self.question.truth

    @property
    def tolerance(self) -> Tolerance:
        return self.question.tolerance

    @property
    def name(self) -> str:
        return self.set.name


_LOST = 0.5
"""Where the reference itself is off by so much, as one that squares large inputs and divides by their sum, any answer may
be: nothing is asked of a candidate's there, nor whether it overflows in the same place. Our choice."""


class Checker:
    """Runs the checks of one candidate against one reference worker."""

    def __init__(self, subject: Subject, reference: Side, candidate: Side) -> None:
        self._subject = subject
        self._reference = reference
        self._candidate = candidate
        self._oracle = subject.oracle
        self._gate = VacuityGate()
        self._earlier_truth: list[torch.Tensor] | None = None
        self.bounds = Bounds(subject, lambda: reference.operators(layout=0))

    def run(self) -> None:
        """All checks, in order.

        Raises:
            RejectionError, WorkerError: the candidate failed one.
            TaskError: the reference did.
        """
        subject = self._subject
        if subject.stochastic:
            why = "keeps a state between calls" if subject.stateful else "draws random numbers in forward"
            subject.label(Label.STOCHASTIC_TASK, f"the reference {why}")
        training = self._oracle.training
        if not subject.reloads_state and self._oracle.initial_state:
            # It was given new weights before it was known that the candidate keeps those it was built with.
            self._reference.load_state(self._oracle.initial_state)
        try:
            first = self._pose_and_judge(INPUT_SETS[0], slot=0, state=subject.state, training=training, hold=True)
        except OutOfDomainError as error:
            raise TaskError(
                f"Wanted a reference that works on its own inputs for {subject.live.task.id}; {error}."
            ) from error
        subject.timed_tolerance = first.question.between
        # The second set reuses the first one's memory: same pointer, other values.
        second = self._pose_and_judge(INPUT_SETS[1], slot=0, state=subject.state, training=training, hold=True)
        if not subject.settings.thorough:
            self._held_outputs(first, second)
            self._finish()
            return
        for index, inputs in enumerate(INPUT_SETS[2:]):
            self._optional(inputs, slot=(index + 1) % 2, training=training)
        self._repeat(first)
        if subject.stochastic:
            self._without_new_seed()
        self._nearly_same(first, training)
        self._check_buffers(training)
        if subject.reloads_state and self._oracle.parameter_names:
            self._reload(training)
        if subject.reloads_state:
            self._reload_defaults(training)
        self._other_mode(training)
        self._held_outputs(first, second)
        self._finish()

    def late(self) -> None:
        """One more fresh input after everything else, timing included: age must not change the answer."""
        subject = self._subject
        for side in (self._reference, self._candidate):
            if subject.reloads_state and self._oracle.initial_state:
                side.load_state(subject.weights)
        own = InputSet("own-late", INPUT_SETS[0].vary, "drifting with age")
        with subject.gate(shared=True):
            posed = self._pose(own, slot=0, state=self._present_state(), training=self._oracle.training)
            answer = self._call(self._candidate, posed.inputs, slot=0, seed=posed.seed)
        self._judge(posed, answer)

    def _pose_and_judge(
        self,
        inputs: InputSet,
        *,
        slot: int,
        state: State,
        training: bool,
        hold: bool = False,
        drawn: list[Any] | None = None,
    ) -> _Posed:
        with self._subject.gate(shared=True):
            posed = self._pose(inputs, slot=slot, state=state, training=training, base=drawn, hold=hold)
            answer = self._call(self._candidate, posed.inputs, slot=slot, seed=posed.seed, hold=hold)
            posed = self._judge(posed, answer)
            self._earlier_truth = posed.truth
            return posed

    def _optional(self, inputs: InputSet, *, slot: int, training: bool) -> None:
        try:
            self._pose_and_judge(inputs, slot=slot, state=self._subject.state, training=training)
        except OutOfDomainError as error:
            self._subject.checks.setdefault("skipped", {})[inputs.name] = str(error)

    def _pose(
        self,
        inputs: InputSet,
        *,
        slot: int,
        state: State,
        training: bool,
        base: list[Any] | None = None,
        hold: bool = False,
    ) -> _Posed:
        """Draw inputs (or vary those of `base`), find the truth, run the reference and set the tolerance."""
        subject = self._subject
        drawn, seed = subject.draw(inputs, base), subject.call_seed()
        # Before the reference is called: where there is none, its answer stands for it.
        truth = self.bounds.truth(drawn, state, training)
        try:
            reference = self._call(self._reference, drawn, slot=slot, seed=seed, hold=hold)
        except TaskError as error:
            if inputs is INPUT_SETS[0]:
                raise
            raise OutOfDomainError(str(error)) from error
        if reference.described.strange:
            raise TaskError(
                f"Wanted plain tensors, numbers, lists, tuples or dicts from the reference's forward; "
                f"found {', '.join(reference.described.strange[:3])}. Make it plain, as by tuple(...) or .clone()."
            )
        question = self.bounds.around(drawn, state, training, truth, reference.outputs)
        if inputs in INPUT_SETS[2:] and question.tolerance.reference.rms > _LOST:
            raise OutOfDomainError("the reference's own answer is lost to rounding or overflow")
        subject.tolerances[inputs] = question.between
        self._gate.observe(question.truth, tensors_of(drawn), question.tolerance.allowed)
        return _Posed(inputs, question, reference, seed)

    def _call(self, side: Side, inputs: list[Any], *, slot: int, seed: int | None, hold: bool = False) -> Answer:
        return side.call(side.place(inputs, slot), seed=seed, hold=hold)

    def _judge(self, posed: _Posed, answer: Answer, reason: Reason | None = None) -> _Posed:
        """Reject unless the answer is a drop-in for the reference's and near enough to the truth.

        Returns the question with the tolerance that was needed.
        """
        check_form(self._subject, posed.reference, answer, strides=posed.name != "non-contiguous")
        found = apart(answer.outputs, posed.truth)
        question = self.bounds.widened(posed.question, found)
        if question is not posed.question:
            posed = replace(posed, question=question)
            self._subject.tolerances[posed.set] = question.between
        self._subject.checks.setdefault("sets", {})[posed.name] = {
            "error": found.to_json(),
            "allowed": posed.tolerance.allowed.to_json(),
            "reference": posed.tolerance.reference.to_json(),
            "calibrated": posed.tolerance.calibrated,
        }
        if found.within(posed.tolerance.allowed):
            if posed.question.uses_tf32:
                self._subject.label(Label.TF32, f"its error on `{posed.name}` is that of cuDNN in TF32: {found}")
            return posed
        which, index = _worst_output(found, posed.tolerance.allowed)
        allowed = posed.tolerance.allowed.of(index)
        detail = f"on input set `{posed.name}`: error{which} {found.of(index)}; allowed {allowed}"
        raise RejectionError(reason or self._diagnose(posed, answer, found), detail)

    def _diagnose(self, posed: _Posed, answer: Answer, found: Distance) -> Reason:
        pairs = list(zip(answer.outputs, posed.truth, strict=True))
        if any(
            bool((~torch.isfinite(output) & torch.isfinite(truth)).any())
            for output, truth in pairs
            if truth.is_floating_point()
        ):
            return Reason.NON_FINITE_OUTPUT
        earlier = self._earlier_truth
        if earlier is not None and apart(answer.outputs, earlier).within(posed.tolerance.allowed):
            return Reason.STALE_OUTPUT
        lower = posed.tolerance.lower
        integers_are_right = found.without("rms", "worst").within(posed.tolerance.allowed)
        if lower is not None and found.rms <= 8 * lower.rms and found.rms < 0.02 and integers_are_right:
            return Reason.PRECISION_DOWNGRADE
        if self._earlier_truth is None and self._right_with_first_weights(posed):
            return Reason.STALE_WEIGHTS
        return Reason.WRONG_OUTPUT

    def _right_with_first_weights(self, posed: _Posed) -> bool:
        """Whether the answer is that of the weights which the module was built with."""
        if not self._subject.reloads_state or not self.bounds.has_float64 or not self._oracle.parameter_names:
            return False
        try:
            truth = self._oracle.truth(posed.inputs, self._oracle.initial_state, training=self._oracle.training)
            answer = self._call(self._candidate, posed.inputs, slot=0, seed=None)
        except (OutOfDomainError, WorkerError):
            return False
        return apart(answer.outputs, truth).within(posed.tolerance.allowed * 4.0)

    def _repeat(self, first: _Posed) -> None:
        """The first inputs again, elsewhere in memory: neither a cache by pointer nor chance may decide."""
        if self._has_batch_state():
            return  # outputs may depend on buffers that earlier calls moved; the reload check covers this case
        with self._subject.gate(shared=True):
            if self._subject.stateful:
                now = self._call(self._reference, first.inputs, slot=1, seed=first.seed)
                question = first.question
                question = self.bounds.around(question.inputs, question.state, question.training, None, now.outputs)
                first = replace(first, question=question, reference=now)
            answer = self._call(self._candidate, first.inputs, slot=1, seed=first.seed)
        self._judge(first, answer, Reason.NONDETERMINISTIC)

    def _without_new_seed(self) -> None:
        """A second call that nobody seeds anew: the first must have left the generator where the reference leaves it."""
        subject, inputs, seed = self._subject, self._subject.draw(), self._subject.call_seed()
        allowed = subject.tolerances[INPUT_SETS[0]]
        answers = []
        with subject.gate(shared=True):
            for side in (self._reference, self._candidate):
                for given in (seed, None):
                    answer = self._call(side, inputs, slot=0, seed=given)
                answers.append(answer)
        found = apart(answers[1].outputs, answers[0].outputs)
        if not found.within(allowed):
            detail = f"in a second call after one seed the output is {found} from the reference's; allowed {allowed}"
            raise RejectionError(Reason.WRONG_OUTPUT, detail)

    def _nearly_same(self, first: _Posed, training: bool) -> None:
        """Inputs that differ from earlier ones in the places of two elements, in a few, and in one: to a cache that sums or
        samples them they are the same."""
        self._earlier_truth = first.truth
        for name, vary, kept in (
            ("two-swapped", _swap, "a sum"),  # first: `first` was the latest call
            ("few-changed", functools.partial(_change, 0.02), "a sample"),
            ("one-changed", functools.partial(_change, 0.0), "a sample"),
        ):
            changed = InputSet(name, vary, f"caches keyed by {kept}", truths=True)
            try:
                self._pose_and_judge(changed, slot=1, state=self._subject.state, training=training, drawn=first.inputs)
            except OutOfDomainError as error:
                self._subject.checks.setdefault("skipped", {})[changed.name] = str(error)

    def _has_batch_state(self) -> bool:
        return any(key not in self._oracle.parameter_names for key in self._oracle.initial_state)

    def _present_state(self) -> State:
        """What both modules hold now. Statistics that could not be loaded anew have moved with every call."""
        if self._subject.reloads_state or not self._has_batch_state():
            return self._subject.state
        return self._reference.read_state()

    def _check_buffers(self, training: bool) -> None:
        """After the same call from the same state, both modules must have moved to the same state."""
        subject = self._subject
        if not self._oracle.initial_state or not subject.reloads_state:
            return
        inputs, seed = subject.draw(), subject.call_seed()
        states = []
        with subject.gate(shared=True):
            for side in (self._reference, self._candidate):
                side.load_state(subject.weights)
                self._call(side, inputs, slot=0, seed=seed)
                states.append(side.read_state())
        rounding: dict[str, Distance] | None = None
        for key, wanted in states[0].items():
            is_parameter = key in self._oracle.parameter_names
            limit = Distance(0.0, 0.0) if is_parameter else _buffer_limit(wanted.dtype)
            if distance(states[1][key], wanted.double() if wanted.is_floating_point() else wanted).within(limit):
                continue
            if not is_parameter and wanted.is_floating_point():
                if rounding is None:
                    with subject.gate(shared=True):
                        rounding = self._rounding_of_buffers(inputs, states[0], training)
                if distance(states[1][key], wanted.double()).within(limit + rounding.get(key, limit)):
                    continue
            what = "parameter" if is_parameter else "buffer"
            raise RejectionError(Reason.BUFFER_MISMATCH, f"{what} `{key}` differs from the reference's after one call")

    def _rounding_of_buffers(self, inputs: list[Any], found: State, training: bool) -> dict[str, Distance]:
        """How far apart two legal ways of rounding may leave a buffer: statistics of what comes out of convolutions are as
        exact as those are. By the reference's own distance from the float64 truth, and by that of convolutions in TF32 where
        PyTorch may use it, as `Bounds.permitted` has it for outputs."""
        subject, oracle = self._subject, self._oracle
        if not self.bounds.has_float64:
            return {}
        states = [found]
        try:
            if subject.lets_cudnn_use_tf32:
                oracle.with_tf32_in_cudnn(inputs, subject.weights, training=training)
                states.append(oracle.state_after())
            oracle.truth(inputs, subject.weights, training=training)
        except OutOfDomainError:
            return {}
        truth = oracle.state_after()
        return {
            key: farthest([distance(state[key], value) for state in states]) * LEGAL_ERRORS
            for key, value in truth.items()
            if value.is_floating_point()
        }

    def _reload(self, training: bool) -> None:
        """New weights after many calls: what was folded or cached from the old ones is now stale."""
        weights = self._subject.new_weights()
        # Each from the one before: a cache that samples elements is renewed when it meets a changed one, and not otherwise.
        states = {"own-reloaded": weights}
        states["own-slightly-reloaded"] = self._subject.with_elements_changed(weights)
        states["own-row-reloaded"] = self._subject.with_part_of_a_row_changed(states["own-slightly-reloaded"])
        again = states["own-row-again"] = self._subject.with_part_of_a_row_changed(states["own-row-reloaded"])
        for name, state in states.items():
            self._load(state)
            self._judge_weights(state, name, training)
        # As an optimiser would: code that folds weights when they are loaded hears nothing of it. First some, then the
        # others, since there may be an optimiser for some only: who watches one parameter misses either.
        stepped = again
        for chosen in self._subject.two_parts():
            stepped = stepped | {key: weights[key] for key in chosen}
            for side in (self._reference, self._candidate):
                side.step(stepped, chosen)
            try:
                self._judge_weights(stepped, "own-stepped", training)
            except RejectionError as rejection:
                if self._right_now(stepped, training):
                    raise  # wrong once, and not because of the weights
                self._subject.label(Label.PREPACKED_WEIGHTS, f"after a change of parameters in place: {rejection.detail}")
        self._load(self._subject.weights)

    def _reload_defaults(self, training: bool) -> None:
        """Buffers that hold a default, such as a mean of 0: who leaves them out is right until others are loaded."""
        state = self._subject.with_defaults_changed(self._subject.weights)
        if state is None:
            return
        self._load(state)
        try:
            self._judge_weights(state, "own-buffers", training)
        except OutOfDomainError as error:
            self._subject.checks.setdefault("skipped", {})["own-buffers"] = str(error)
        self._load(self._subject.weights)

    def _load(self, state: State) -> None:
        for side in (self._reference, self._candidate):
            side.load_state(state)

    def _right_now(self, state: State, training: bool) -> bool:
        try:
            self._judge_weights(state, "own-stepped-again", training)
        except RejectionError:
            return False
        return True

    def _judge_weights(self, state: State, name: str, training: bool) -> None:
        own = InputSet(name, INPUT_SETS[0].vary, "weights folded or cached")
        with self._subject.gate(shared=True):
            posed = self._pose(own, slot=0, state=state, training=training)
            answer = self._call(self._candidate, posed.inputs, slot=0, seed=posed.seed)
        self._judge(posed, answer, Reason.STALE_WEIGHTS)

    def _other_mode(self, training: bool) -> None:
        """The mode the module was not built in, and back."""
        for mode, name in ((not training, "own-other-mode"), (training, "own-mode-again")):
            for side in (self._reference, self._candidate):
                if side.set_mode(training=mode) != mode:
                    raise RejectionError(Reason.MODE_MISMATCH, f"train({mode}) left the module with training={not mode}")
                if self._subject.reloads_state and self._oracle.initial_state:
                    side.load_state(self._subject.weights)
            own = InputSet(name, INPUT_SETS[0].vary, "work skipped in one mode")
            try:
                with self._drawing_as_in(mode):
                    self._pose_and_judge(own, slot=1, state=self._present_state(), training=mode)
            except OutOfDomainError as error:
                self._subject.checks.setdefault("skipped", {})[name] = str(error)

    @contextlib.contextmanager
    def _drawing_as_in(self, training: bool) -> Iterator[None]:
        """Where the other mode alone draws random numbers, as dropout does: both sides get one seed, and no float64 truth
        is asked for, which would be of other draws and so far away that everything is allowed."""
        subject, bounds = self._subject, self.bounds
        before = subject.stochastic, bounds.has_float64
        if not subject.stochastic and training != self._oracle.training and subject.draws_in(training):
            subject.stochastic, bounds.has_float64 = True, False
        try:
            yield
        finally:
            subject.stochastic, bounds.has_float64 = before

    def _held_outputs(self, *held: _Posed) -> None:
        """The first outputs, after all the calls since: nobody may have written to them."""
        self._subject.output_follows_input = any(
            "input" in output.aliases for posed in held for output in posed.reference.described.outputs
        )
        self._reference.release()
        if self._subject.output_follows_input:
            self._candidate.release()
            return  # the reference itself returns views of its inputs, which later calls overwrite
        outputs = [held_output(self._subject, self._candidate, index) for index in range(len(held))]
        self._candidate.release()
        pairs = zip(outputs, held, strict=True)
        if not all(now is None or apart(now, posed.truth).within(posed.tolerance.allowed) for now, posed in pairs):
            overwritten(self._subject)

    def _finish(self) -> None:
        subject = self._subject
        check_process(subject, self._candidate)
        operators = self._candidate.operators(layout=0)
        if subject.stateful:
            self._reference.operators(layout=0)  # that was a call, which one side alone may not have
        subject.checks["operators"] = operators
        if operators:
            subject.label(Label.LIBRARY_CALL, f"it runs {', '.join(operators[:5])}")
        if self._gate.passing:
            subject.label(Label.VACUOUS_TASK, f"these pass every input set: {', '.join(self._gate.passing)}")
            subject.checks["vacuous"] = list(self._gate.passing)
        if not self.bounds.is_calibrated and self.bounds.float_dtype is not None:
            subject.label(Label.UNCALIBRATED_PRECISION, "no input set tells this precision from the next lower one")


def _worst_output(found: Distance, allowed: Distance) -> tuple[str, int]:
    """Names the farthest of the outputs that are too far, where there are several."""
    far = found.each
    if not far:
        return "", 0
    index = max(range(len(far)), key=lambda at: (not far[at].within(allowed.of(at)), far[at].rms, far[at].differing))
    return f" of output {index + 1} of {len(far)}", index


def _buffer_limit(dtype: torch.dtype) -> Distance:
    """Of a statistic after one call. A variance with n in the place of n - 1 is off by a tenth of 1/n."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return Distance(0.0, 0.0)
    eps = torch.finfo(dtype).eps
    return Distance(32 * eps, 256 * eps) if eps < 1e-4 else Distance(2 * eps, 8 * eps)


_KEPT_UP = Distance(0.03, math.inf, 0.05)
"""How far a buffer may be from the reference's after many calls, as a share of what those moved it by: more than many
convolutions in TF32 leave, less than missed calls do. Of integers, how many may differ, since rounding decides some. Our
choice."""


def buffer_has_kept_up(found: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a buffer was moved by many calls as the reference's was.

    Args:
        found: The candidate's buffer, after them.
        wanted: The reference's.
        before: Both, before them.
    """
    if not wanted.is_floating_point():
        return distance(found, wanted).within(_KEPT_UP)
    if not torch.isfinite(wanted).all():
        return True  # as some input left it, which says nothing of the calls after that
    moved, size = (float(x.double().square().mean().sqrt()) if x.numel() else 0.0 for x in (wanted - before, wanted))
    error = float((found.double() - wanted.double()).square().mean().sqrt()) if wanted.numel() else 0.0
    return error <= _KEPT_UP.rms * moved + LEGAL_ERRORS * _buffer_limit(wanted.dtype).rms * size  # a NaN is not


def _change(share: float, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move a share of the elements, or just one when it is 0, by several times the tensor's size; of booleans, turn them.

    Zeros among other elements stay, as in all input sets: a triangular matrix may be what the task is about.
    """
    if x.numel() == 0:
        return x
    movable = x != 0
    if x.dtype == torch.bool or not movable.any():
        movable = torch.ones_like(movable)
    if share == 0:
        draws = torch.rand(x.shape, generator=generator, device=x.device).masked_fill_(~movable, -1.0)
        chosen = torch.zeros_like(movable)
        chosen.view(-1)[draws.argmax()] = True
    else:
        chosen = some_of(x, share, generator) & movable
    if x.dtype == torch.bool:
        return x ^ chosen
    size = x.abs().double().square().mean().sqrt()
    # What is all zero, such as an initial state, says nothing of its size; it must be seen beside others.
    size = torch.where(size == 0, 1.0, size.clamp_min(1e-3)).to(x.dtype)
    return torch.where(chosen, x + 6 * size, x)


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


def overwritten(subject: Subject, detail: str = "the first call's output was changed by a later call") -> None:
    """Calls share the memory of their outputs: legal to say so of a CUDA graph's static buffer, a rejection otherwise."""
    if Label.CUDA_GRAPH not in subject.labels:
        raise RejectionError(Reason.OUTPUT_OVERWRITTEN, detail)
    subject.label(Label.ALIASED_OUTPUT, detail)


def held_output(subject: Subject, candidate: Side, index: int) -> list[torch.Tensor] | None:
    """The output of an earlier call as it is now; None where it is legal that nobody can look at it any more, as one that
    torch.compile's CUDA graphs have overwritten."""
    try:
        return candidate.recopy(index)
    except WorkerError as failure:
        if failure.reason is not Reason.RUNTIME_ERROR:
            raise
        overwritten(subject, f"an earlier output cannot be read after later calls: {failure.detail}")
        return None


def check_process(subject: Subject, candidate: Side) -> None:
    """Reject or label what a candidate has done to its process and its mode."""
    seen = candidate.inspect()
    changes = forbidden_changes(seen.before, seen.after)
    changes += [f"{name} was replaced" for name in seen.patched]
    if changes:
        raise RejectionError(Reason.GLOBAL_STATE_CHANGED, "; ".join(changes))
    if seen.training != subject.oracle.training:
        raise RejectionError(Reason.MODE_MISMATCH, f"after the calls the module has training={seen.training}")
    for label in sorted(dynamic_labels(seen.before, seen.after)):
        subject.label(label, "a process-wide setting was changed")


def check_form(subject: Subject, reference: Answer, answer: Answer, *, strides: bool = True) -> None:
    """Reject an answer whose outputs have another form than the reference's, or that changed its inputs.

    Strides count where the inputs are laid out as the task draws them; an operator that lets its output follow an
    unusual layout promises nothing.
    """
    wanted, found = reference.described, answer.described
    if found.strange:
        raise RejectionError(Reason.WRONG_TYPE, f"returned {', '.join(found.strange[:3])}; wanted plain torch.Tensor")
    alike = _same_structure(found.skeleton, wanted.skeleton, _of_numbers(subject))
    if not alike or len(found.outputs) != len(wanted.outputs):
        raise RejectionError(
            Reason.WRONG_TYPE, f"returned the structure {str(found.skeleton)[:200]}; wanted {wanted.skeleton}"
        )
    for mine, theirs in zip(found.outputs, wanted.outputs, strict=True):
        for name, reason in (("shape", Reason.WRONG_SHAPE), ("dtype", Reason.WRONG_DTYPE), ("device", Reason.WRONG_DEVICE)):
            if getattr(mine, name) != getattr(theirs, name):
                raise RejectionError(reason, f"returned {name} {getattr(mine, name)}; wanted {getattr(theirs, name)}")
        if set(mine.traits) - set(theirs.traits):
            raise RejectionError(Reason.WRONG_TYPE, f"returned a tensor that is {' and '.join(mine.traits)}")
        if strides and not _strides_equal(mine, theirs):
            subject.label(Label.STRIDES_DIFFER, f"returned strides {mine.stride}; wanted {theirs.stride}")
        extra = set(mine.aliases) - set(theirs.aliases)
        subject.reuses_output |= "earlier output" in theirs.aliases
        if theirs.aliases or subject.reuses_output:
            extra.discard("earlier output")  # memory of its input or state, or kept by the reference as well
        if extra == {"earlier output"}:
            overwritten(subject, "an output lies where an earlier one does, which the caller still has")
        elif extra:
            raise RejectionError(
                Reason.OUTPUT_ALIASES, f"an output shares memory with the call's {' and '.join(sorted(extra))}"
            )
    if not answer.inputs_intact and reference.inputs_intact:
        raise RejectionError(Reason.INPUT_MUTATED, "the call changed its inputs")


_NUMBERS_DIFFER = 1e-5
"""What a Python float among outputs may be off as a share of itself, since a sum in another order is: less than TF32 leaves
of most. Our choice."""


def _of_numbers(subject: Subject) -> float:
    rounded = [torch.finfo(dtype).eps for dtype in subject.output_dtypes if dtype.is_floating_point]
    return max([_NUMBERS_DIFFER, *(2 * eps for eps in rounded)])


def _same_structure(mine: Any, theirs: Any, allowed: float) -> bool:
    """Whether two skeletons are equal, numbers by their type too, and floats as far as rounding allows."""
    if type(mine) is not type(theirs):
        return False
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_same_structure(mine[key], theirs[key], allowed) for key in theirs)
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(_same_structure(*pair, allowed) for pair in zip(mine, theirs, strict=True))
    if isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=allowed) or (math.isnan(mine) and math.isnan(theirs))
    return bool(mine == theirs)


def _strides_equal(mine: Output, theirs: Output) -> bool:
    """Strides of dimensions of size 1 address nothing."""
    if len(mine.stride) != len(theirs.stride):
        return False
    return 0 in theirs.shape or all(
        size == 1 or a == b for size, a, b in zip(theirs.shape, mine.stride, theirs.stride, strict=True)
    )
