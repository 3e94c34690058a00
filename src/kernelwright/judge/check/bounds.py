"""Finds the truth for given inputs and the distance allowed from it, for checks and timing."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelwright.judge.check.compare import (
    INFINITELY_FAR,
    LEGAL_ERRORS,
    Distance,
    Tolerance,
    apart,
    calibrate,
    combined,
    distance,
    farthest,
    lower_precisions,
    of_outputs,
    unit_of,
    unit_of_sums,
)
from kernelwright.judge.check.oracle import (
    NAMING,
    Inputs,
    NamedPlaces,
    OtherSums,
    OutOfDomainError,
    Outputs,
    State,
    tensors_of,
)
from kernelwright.judge.check.trial import Trial
from kernelwright.tasks import INPUT_SETS, has_nan, is_inexact

_FLOAT32_BITS = 23
_DISTURBANCES = 2
"""Random directions in which a question is moved to see what rounding does to its answer."""
_DRAWS_OF_CHOICES, _OF_A_CHOICE = 24, 4.0
"""Sums in another order that a reference which chooses elements is asked for, and how many times as far as is allowed an
element must move to be one that was chosen otherwise. Our choice."""


@dataclass(frozen=True, slots=True)
class Question:
    """Inputs, their truth and its tolerance."""

    inputs: Inputs
    state: State
    training: bool
    truth: Outputs
    tolerance: Tolerance
    has_float64: bool
    """True if the truth is float64's; otherwise the reference's answer stands for it."""
    uses_tf32: bool = False
    """True if the tolerance is that of TF32 where PyTorch may use it."""
    orders_terms: bool = False
    """True if terms of sums come in order or all nearly alike, so that their roundings do not average out."""

    @property
    def between(self) -> Distance:
        """Allowed distance between candidate and reference, for inputs like these; where lower precisions are told, less
        than the next one is off. A larger distance is held to the truth."""
        sums, lower = self.tolerance.allowed + self.tolerance.reference, self.tolerance.lower or Distance(0.0, 0.0)
        return combined(lambda one, told: replace(one * 2.0, rms=one.rms * (1 if told.rms else 2)), sums, lower)

    def allowing(self, distance: Distance) -> Question:
        """The same question with another limit."""
        return replace(self, tolerance=replace(self.tolerance, allowed=distance))


class Bounds:
    """Truths and tolerances of one task."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._oracle = trial.facts.oracle
        self._has_answered = False
        self._is_rebuilt = False
        """True if the float64 module was built anew, since its first one did not run."""
        self.has_float64 = not trial.facts.stochastic
        """True if the module runs in float64 and gives there what it gives in its own precision."""
        self.has_tf32: bool | None = None
        """True if the reference runs what PyTorch may do in TF32; None while it is not known."""
        self._calibrated = Counter[int]()
        """Number of input sets that told the task's precision from the next lower one, by output."""
        self.names = ""
        """Names of the operators that the first truth ran, each after a space."""
        self.told = dict[int, tuple[int, float]]()
        """By output: lower precisions that were passed over, as a negative number, and the error of the next one, on the set
        that shows it best."""
        self._asked_biased = False

    @property
    def is_calibrated(self) -> bool:
        """True if some inputs told the task's precision from the next lower one, in every output that is rounded."""
        return all(self._calibrated[index] for index in self._rounded)

    @property
    def _rounded(self) -> list[int]:
        """Outputs with elements that are rounded."""
        pairs = zip(self._trial.facts.output_dtypes, self._trial.facts.shapes.outputs, strict=True)
        return [index for index, (dtype, spec) in enumerate(pairs) if dtype.is_floating_point and 0 not in spec.shape]

    def truth(self, drawn: list[Any], state: State, training: bool) -> Outputs | None:
        """Outputs in float64; None where the module does not run in it or draws random numbers.

        Raises:
            OutOfDomainError: it runs in float64, but not on these inputs.
        """
        if not self.has_float64:
            return None
        try:
            sums = None if self.names else OtherSums()
            found = self._oracle.truth(drawn, state, training=training, mode=sums)
            self.names = self.names if sums is None else "".join(f" {name}" for name in sorted(sums.names))
        except OutOfDomainError as error:
            if self._has_answered or "NaN" in str(error):
                raise
            if not self._is_rebuilt:
                self._is_rebuilt = True
                self._oracle.build_anew()
                return self.truth(drawn, state, training)
            # The very first set: this module does not run in float64 at all.
            self.has_float64 = False
            self._trial.findings.checks["truth"] = f"reference: {error}"
            return None
        self._has_answered = True
        return found

    def whole(self, question: Question) -> Question:
        """The question with its inputs and its truth at hand."""
        inputs = question.inputs()
        truth = question.truth or self._oracle.truth(inputs, question.state, training=question.training)
        return replace(question, inputs=lambda: inputs, truth=truth)

    def around(
        self,
        drawn: list[Any],
        state: State,
        training: bool,
        truth: Outputs | None,
        outputs: Outputs,
        *,
        precise: bool = True,
    ) -> Question:
        """Set the tolerance for the reference's `outputs`, a list that is emptied: a large task needs their memory. Without
        `precise`, lower precisions do not count.

        Raises:
            OutOfDomainError: the reference's answer is of no use here.
        """
        trial = self._trial
        if has_nan(outputs):
            raise OutOfDomainError("the reference gives NaN in its own precision")
        if truth is not None and [output.shape for output in truth] != [output.shape for output in outputs]:
            # A view of the bits, say, has another shape in float64.
            self.has_float64 = False
            trial.findings.checks["truth"] = "reference: its output has another shape in float64"
            truth = None
        exact = truth is not None
        if truth is None:
            truth = [output.double() if output.is_floating_point() else output for output in outputs]
        own = apart(outputs, truth)
        outputs.clear()
        if not math.isfinite(own.rms) or own.differing > 0.5:
            raise OutOfDomainError("the reference's infinities or integers are not those of float64")
        # No float64 truth to calibrate with: the reference stands for it, and error is judged by rounding alone.
        loose = of_outputs([_loose(dtype) for dtype in trial.facts.output_dtypes])
        question = Question(lambda: drawn, state, training, truth, Tolerance(loose, own, None, calibrated=False), exact)
        if not exact:
            return question
        if torch.float64 in trial.facts.output_dtypes:
            # The truth has no more digits than the reference, whose error it does not show: that of rounding stands for it.
            own = farthest([own, self._moved(question, torch.finfo(torch.float64).eps).without("differing")])
        tolerance = self._calibrate(own, self._lower(question) if precise else ())
        if not all(map(is_inexact, truth)):
            allowed = combined(
                lambda old, found: replace(old, differing=min(1.0, 4 * found.differing)), tolerance.allowed, own
            )
            tolerance = replace(tolerance, allowed=allowed)
        self._calibrated.update(tolerance.calibrated_outputs)
        return replace(question, tolerance=tolerance)

    def _reordered(self, question: Question) -> Distance:
        """Error of each output that other sums explain, of its terms in another order or in tiles, below what shows lower
        precision on some set."""
        dtypes, share = self._trial.facts.output_dtypes, self._trial.settings.lower_precision_share
        unit = min(unit_of_sums(dtype) for dtype in dtypes)
        try:
            # Tiles leave single elements beside large ones far off, and few of them.
            tiled = self._effect(question, mode=OtherSums(unit, tiles=True)).without("rms")
            moved = farthest([self._effect(question, mode=OtherSums(unit, series=question.orders_terms)), tiled])
        except OutOfDomainError:
            moved = Distance(0.0, 0.0)
        lower = question.tolerance.lower or Distance(0.0, 0.0)  # of these very inputs, whose terms may cancel
        most = [
            share * max(self.told[index][1], lower.of(index).rms) if index in self.told else math.inf
            for index in range(len(dtypes))
        ]
        found = [replace(moved.of(index), rms=min(moved.of(index).rms, limit)) for index, limit in enumerate(most)]
        return of_outputs([replace(one, worst=max(one.worst, 4 * one.rms)) for one in found])

    def _effect(self, question: Question, **how: Any) -> Distance:
        """Distance from the truth that fewer bits, noise or other sums leave; see `Oracle.truth`."""
        return apart(
            self._oracle.truth(question.inputs(), question.state, training=question.training, **how), question.truth
        )

    def permitted(self, question: Question) -> Question:
        """The question with a tolerance for TF32, where PyTorch lets the reference use it: layout or a library's choice
        decides whether it does, and the candidate is not to blame."""
        usable = question.has_float64 and self.float_dtype is torch.float32 and self._trial.lets_cudnn_use_tf32
        if not usable or self.has_tf32 is False:
            return question
        mode, products = question.training, self._trial.settings.tf32_products
        try:
            outputs = self._oracle.with_tf32(question.inputs(), question.state, training=mode, products=products)
        except OutOfDomainError:
            return question
        self.has_tf32 = outputs is not None
        if outputs is None:
            return question
        wider = self._recalibrated(question, apart(outputs, question.truth))
        allowed = combined(_never_narrower, question.tolerance.allowed, wider.allowed)
        return replace(question, tolerance=replace(wider, allowed=allowed), uses_tf32=True)

    def summed_otherwise(self, question: Question) -> Question:
        """The question with a tolerance for the same sums in another order.

        The reference's own error may be far below what a good program makes: a tree of sums over a million elements, against
        block sums that are added as they come. The errors of lower precisions average away there as well. Where some set,
        such as `biased`, shows those errors whole, the others need not.
        """
        if not question.has_float64:
            return question
        limits = [question.tolerance.allowed, *self.norms_summed_otherwise(question)]
        self.ask_biased(question)
        limits.append(self._reordered(question))
        return question.allowing(combined(_never_narrower, *limits))

    def norms_summed_otherwise(self, question: Question) -> list[Distance]:
        """Limit for normalisations that sum as fused ones do, and PyTorch's own with channels last in memory; none where the
        reference has no such norm.

        Where channels are all but constant, as on constant and on small inputs, those sums lose thirty to a thousand times
        as much, which no input set of the task's own kind shows. So this is for sets on which nothing else rests: the
        precision of every output must have been told from the next lower one on another set, which a candidate in that
        precision does not pass.
        """
        told = question.tolerance.calibrated_outputs
        if not all(self._calibrated[index] > (index in told) for index in self._rounded):
            return []
        try:
            outputs = self._oracle.with_other_sums_in_norms(question.inputs(), question.state, training=question.training)
        except OutOfDomainError:
            return []
        error = INFINITELY_FAR if outputs is None else apart(outputs, question.truth)
        if not math.isfinite(error.rms):
            return []
        wider = self._recalibrated(question, error)
        # Where nothing lower is clearly worse: what two legal results may be apart, and not what sums in any order may.
        calibrated, legal = wider.calibrated_outputs, error * LEGAL_ERRORS
        every = range(len(question.truth))
        return [of_outputs([(wider.allowed if index in calibrated else legal).of(index) for index in every])]

    def ask_biased(self, question: Question) -> None:
        """Learn of which outputs the set `biased` tells precisions, from the reference alone; once."""
        if self._asked_biased:
            return
        self._asked_biased = True
        biased = next(one for one in INPUT_SETS if one.name == "biased")
        inputs, training = self._trial.facts.draw(biased, question.inputs), question.training
        try:
            truth = self.truth(inputs, question.state, training)
            outputs = self._oracle.own_precision(inputs, question.state, training=training, seed=0)
            self.around(inputs, question.state, training, truth, outputs)
        except OutOfDomainError:
            return

    def conditioned(self, question: Question) -> Question:
        """The question with a tolerance for single elements that takes the task's condition into account: what rounding the
        inputs does to an element is no error of an algorithm. A Fourier transform of a constant is exactly 0 by one
        algorithm and rounding by another. The mean error over all elements keeps its limit: where a task is discontinuous,
        this one says nothing.
        """
        dtype = self.float_dtype
        if dtype is None or not question.has_float64:
            return question
        try:
            rounding = farthest([self._effect(question, noise=torch.finfo(dtype).eps) for _ in range(_DISTURBANCES)])
            lower = [
                (bits, farthest([emulated, self._effect(question, noise=2.0**-bits)]))
                for bits, emulated in self._lower(question)
            ]
        except OutOfDomainError:
            return question
        if not math.isfinite(rounding.rms):
            return question
        before = question.tolerance
        wider = self._calibrate(farthest([before.reference, rounding]), lower)
        return question.allowing(
            combined(lambda old, new: replace(old, worst=max(old.worst, new.worst)), before.allowed, wider.allowed)
        )

    def settles(self, drawn: list[Any], wanted: Outputs, outputs: Outputs, state: State | None = None) -> bool | None:
        """True if a candidate's outputs, beside the reference's (`wanted`), are right by the truth of these very inputs.

        None where there is no truth. The distance allowed between two answers is known from other inputs. Where few elements
        of an output are not zero, or most of it cancels, one draw is worse conditioned than another.
        """
        training, state = self._trial.facts.oracle.training, self._trial.state if state is None else state
        try:
            if (truth := self.truth(drawn, state, training)) is None:
                return None
            question = self.around(drawn, state, training, truth, [*wanted])
        except OutOfDomainError:
            return None
        found = apart(outputs, question.truth)
        return found.within(self.widened(question, found, outputs).tolerance.allowed)

    def widened(self, question: Question, found: Distance, outputs: Outputs) -> Question:
        """The question with the tolerance that an answer so far from the truth may claim. `outputs` count for integers only.

        Each costs runs of the reference, so none is asked for before the answer is about to be rejected.
        """
        if not found.within(question.tolerance.allowed) and question.has_float64 and question.tolerance.lower is None:
            wider = self._calibrate(question.tolerance.reference, self._lower(question))  # where only errors have counted
            question = question.allowing(combined(_never_narrower, question.tolerance.allowed, wider.allowed))
        if not found.within(question.tolerance.allowed):
            question = self.permitted(question)
        if not found.within(question.tolerance.allowed):
            question = self.summed_otherwise(question)
        if not found.without("rms", "worst").within(question.tolerance.allowed) and question.has_float64:
            question = self.named_otherwise(question, outputs)
        allowed, others = question.tolerance.allowed, found.without("worst")
        if not found.within(allowed) and others.within(allowed) and math.isfinite(found.worst):
            question = self.conditioned(question)  # single elements are all that is too far
        return question

    @property
    def float_dtype(self) -> torch.dtype | None:
        """Dtype of the first output that has a rounding error; None where all are integers."""
        return next((dtype for dtype in self._trial.facts.output_dtypes if dtype.is_floating_point), None)

    def _calibrate(self, reference: Distance, lower: Iterable[tuple[int, Distance]]) -> Tolerance:
        """The tolerance of every output, by its own dtype and its own error.

        `lower` gives mantissa bits and errors of lower precisions, from the highest down.
        """
        dtypes, settings = self._trial.facts.output_dtypes, self._trial.settings
        # Each costs a run in float64, and serves all outputs.
        shared = itertools.tee(lower, len(dtypes))
        found = [
            calibrate(reference.of(index), _errors_below(dtype, errors, index), dtype, settings)
            for index, (dtype, errors) in enumerate(zip(dtypes, shared, strict=True))
        ]
        lowers = [one.lower for one in found if one.lower is not None]
        for index, one in enumerate(found):
            if one.lower is not None:
                self.told[index] = max(self.told.get(index, (-one.passed_over, 0.0)), (-one.passed_over, one.lower.rms))
        return Tolerance(
            of_outputs([one.allowed for one in found]),
            reference,
            of_outputs([one.lower or Distance(0.0, 0.0) for one in found]) if lowers else None,
            calibrated=all(one.calibrated for one, dtype in zip(found, dtypes, strict=True) if dtype.is_floating_point)
            and bool(lowers),
            calibrated_outputs=frozenset(index for index, one in enumerate(found) if one.calibrated),
        )

    def _recalibrated(self, question: Question, error: Distance) -> Tolerance:
        """The tolerance for a reference that may have this error too."""
        return self._calibrate(farthest([question.tolerance.reference, error]), self._lower(question))

    def _lower(self, question: Question) -> Iterator[tuple[int, Distance]]:
        """Mantissa bits and errors of lower precisions, highest first, each computed only when asked for."""
        precisions = {bits for dtype in self._trial.facts.output_dtypes for bits in lower_precisions(dtype)}
        for bits in sorted(precisions, reverse=True):
            try:
                error = self._effect(question, mantissa_bits=bits)
            except OutOfDomainError:
                return
            if bits == _FLOAT32_BITS:
                # Inputs that were drawn in float32 lose nothing when they are rounded to it.
                error = farthest([error, self._moved(question, 2.0**-bits)])
            yield bits, error

    def _moved(self, question: Question, noise: float) -> Distance:
        """Change of the outputs when inputs and weights change by a share of themselves; 0 outside the domain."""
        try:
            moved = self._effect(question, noise=noise)
        except OutOfDomainError:
            return Distance(0.0, 0.0)
        return moved if math.isfinite(moved.rms) and math.isfinite(moved.worst) else Distance(0.0, 0.0)

    def where_decided(self, question: Question, outputs: Outputs) -> Question:
        """The question with an answer's own elements for those that rounding decides: among elements that a reference
        chooses, sums in another order may choose others."""
        if not question.has_float64 or NAMING.isdisjoint(self.names.split()):
            return question
        unit, truth = min(map(unit_of_sums, self._trial.facts.output_dtypes)), list(question.truth)
        for _ in range(_DRAWS_OF_CHOICES):
            sums = OtherSums(unit, series=question.orders_terms)
            moved = self._oracle.truth(question.inputs(), question.state, training=question.training, mode=sums)
            for index, (mine, exact, other) in enumerate(zip(outputs, question.truth, moved, strict=True)):
                if exact.is_floating_point() and exact.dim():
                    size = exact.abs() + exact.square().mean(-1, keepdim=True).sqrt()
                    far = (other - exact).abs() > _OF_A_CHOICE * question.tolerance.allowed.of(index).rms * size
                    truth[index] = torch.where(far, mine.to(exact.dtype), truth[index])
        return replace(question, truth=truth)

    def named_otherwise(self, question: Question, outputs: Outputs) -> Question:
        """The question with a tolerance for integers that name other elements than the truth's, which equal those."""
        named = NamedPlaces()
        self._oracle.truth(question.inputs(), question.state, training=question.training, mode=named)
        dtype = next((one.dtype for one in tensors_of(question.inputs()) if one.is_floating_point()), torch.float32)
        shares = []
        for index, (mine, truth) in enumerate(zip(outputs, question.truth, strict=True)):
            exact = [one for one in named.chosen if torch.equal(one.places, truth)]
            if exact:
                shares.append(distance(torch.where(exact[0].as_good(mine, dtype), mine, truth), truth))
            elif is_inexact(truth) or all(one.promises for one in named.chosen):
                shares.append(Distance(0.0, 0.0))
            else:  # made of such places: each disturbance tosses a coin for a tie, and few of them may miss most ties
                moved = [self._moved(question, torch.finfo(dtype).eps).of(index) for _ in range(4 * _DISTURBANCES)]
                shares.append(farthest(moved) * 4.0)
        wider = question.tolerance.allowed + of_outputs(shares).without("rms", "worst")
        return question.allowing(combined(lambda one: replace(one, differing=min(1.0, one.differing)), wider))


def _never_narrower(old: Distance, *new: Distance) -> Distance:
    """The widest of several limits of one output, number by number; of integers the first one."""
    return replace(farthest([old, *new]), differing=old.differing)


def _errors_below(dtype: torch.dtype, errors: Iterable[tuple[int, Distance]], index: int) -> Iterator[Distance]:
    """Errors of one output in the precisions below its dtype, among `errors` by mantissa bits."""
    wanted = lower_precisions(dtype)
    for bits, error in errors if wanted else ():
        if bits in wanted:
            yield error.of(index)
        if bits <= wanted[-1]:
            return


def _loose(dtype: torch.dtype) -> Distance:
    """Tolerance of an output where there is no float64 truth."""
    if not dtype.is_floating_point:
        return Distance(0.0, 0.0)
    eps = unit_of(dtype)
    # Of 16 bits, 64 eps would be half of all there is.
    return Distance(64 * eps, 4096 * eps) if eps < 1e-4 else Distance(8 * eps, 64 * eps)
