"""Measures how far an output is from the truth; `calibrate` is the formula of the tolerance, which `bounds.Bounds` applies.

The truth is float64. The limit is calibrated on every input set by two errors: the reference's own, and the one
that the next lower precision would make, so that a candidate may sum in another order but not compute in less.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from kernelwright.judge.settings import Settings
from kernelwright.tasks import is_inexact
from kernelwright.tasks.input_sets import by_parts, parts

TF32_MANTISSA_BITS = 10
_LOWER_MANTISSA_BITS = {"float64": (23,), "float32": (TF32_MANTISSA_BITS, 7), "float16": (3,), "bfloat16": (3,)}
"""Explicit mantissa bits of the precisions below: float32; TF32 and then bfloat16; fp8 e4m3."""
LEGAL_ERRORS = 4.0
"""Distance allowed between two results, in errors of legal rounding: each has one, and twice the other's. Our choice."""


_TOGETHER = 1 << 22
"""Elements of several calls that are compared at once. Our choice."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Relative distance of one output from another, 0 where equal; for several outputs, the largest numbers."""

    rms: float
    """Root mean square of the error over that of the truth."""
    worst: float
    """Largest error over the size of its element and its row, which is along the last dimension of more than one element."""
    differing: float = 0.0
    """Share of the elements that differ, of integers and booleans, which have no other distance."""
    each: tuple[Distance, ...] = ()
    """Distance of each output where there are several: each has its own limit."""

    def __str__(self) -> str:
        text = f"{self.rms:.2e} rms, {self.worst:.2e} worst" if math.isfinite(self.rms) else "infinitely far"
        return f"{text}, {self.differing:.2%} of the integers differ" if self.differing else text

    def within(self, other: Distance) -> bool:
        """True if no number exceeds the other's, of any output. NaN always fails."""
        count = len(self.each) or len(other.each)
        if count:
            return all(self.of(index).within(other.of(index)) for index in range(count))
        return self.rms <= other.rms and self.worst <= other.worst and self.differing <= other.differing

    def __add__(self, other: Distance) -> Distance:
        return combined(lambda a, b: Distance(a.rms + b.rms, a.worst + b.worst, a.differing + b.differing), self, other)

    def __mul__(self, factor: float) -> Distance:
        return combined(lambda one: Distance(one.rms * factor, one.worst * factor, one.differing * factor), self)

    def without(self, *numbers: str) -> Distance:
        """The same distance with these numbers 0 in every output."""
        return combined(lambda one: replace(one, **dict.fromkeys(numbers, 0.0)), self)

    def of(self, index: int) -> Distance:
        """Distance of one output."""
        return self.each[index] if self.each else self

    def to_json(self) -> dict[str, float | None]:
        """A JSON object, with None for infinity, which JSON lacks."""
        numbers = {"rms": self.rms, "worst": self.worst, "differing": self.differing}
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def of_outputs(distances: Sequence[Distance]) -> Distance:
    """One distance for all outputs of a call."""
    rms, worst, differing = (
        max((getattr(d, name) for d in distances), default=0.0) for name in ("rms", "worst", "differing")
    )
    return Distance(rms, worst, differing, tuple(distances) if len(distances) > 1 else ())


def combined(rule: Callable[..., Distance], *distances: Distance) -> Distance:
    """Apply a rule to distances, output by output where there are several."""
    count = max((len(one.each) for one in distances), default=0)
    if not count:
        return rule(*distances)
    return of_outputs([rule(*(one.of(index) for one in distances)) for index in range(count)])


INFINITELY_FAR = Distance(math.inf, math.inf)


def distance(actual: torch.Tensor, truth: torch.Tensor) -> Distance:
    """Distance of `actual` from `truth`, which has the same shape and no NaN.

    Of integers and booleans it is counted how many differ. Infinities must be equal and then count as no error. NaN is
    infinitely far.
    """
    if truth.numel() == 0:
        return Distance(0.0, 0.0)
    if not is_inexact(truth):
        return Distance(0.0, 0.0, float((actual.to(truth.dtype) != truth).double().mean()))
    if truth.is_complex():
        return distance(*(torch.view_as_real(part.to(torch.complex128).resolve_conj()) for part in (actual, truth)))
    # One answer for all: to wait for a GPU that many processes share takes longer than the arithmetic.
    return _found(actual, truth, *torch.stack(_relative(actual, truth)).tolist())


def distances(actual: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> list[Distance]:
    """Distance of each tensor from its own truth, of one shape; those of small real tensors by one question for all."""
    first = truth[0]
    together = len(truth) > 1 and 0 < first.numel() * len(truth) <= _TOGETHER
    if not (together and first.dim() and first.is_floating_point()):
        return [*map(distance, actual, truth)]
    found = torch.stack(_relative(torch.stack([*actual]), torch.stack([*truth]), each=True), dim=1).tolist()
    return [_found(mine, theirs, *numbers) for mine, theirs, numbers in zip(actual, truth, found, strict=True)]


def _found(actual: torch.Tensor, truth: torch.Tensor, rms: float, worst: float, size: float) -> Distance:
    """The distance by the numbers of `_relative`."""
    if not math.isfinite(size):
        infinite = torch.isinf(truth)
        if infinite.any():
            if not torch.equal(actual[infinite].double(), truth[infinite].double()):
                return INFINITELY_FAR
            rms, worst, _ = torch.stack(
                _relative(actual.masked_fill(infinite, 0.0), truth.masked_fill(infinite, 0.0))
            ).tolist()
    return INFINITELY_FAR if math.isnan(rms) or math.isnan(worst) else Distance(rms, worst)


def _relative(
    found: torch.Tensor, expected: torch.Tensor, *, each: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two numbers of a `Distance` and the root mean square of what was expected, where the tensors are. In place where
    a tensor is ours: this is most of what a judge computes itself. With `each`, those of each entry of the first dimension.
    """
    first = int(each)
    elements = expected.numel() // (len(expected) if each else 1)
    along = max((index for index, length in enumerate(expected.shape) if length > 1 and index > first), default=first)
    every, column = tuple(range(first, expected.dim())), (-1, *[1] * (expected.dim() - 1)) if each else ()
    pairs = list(zip(parts(found), parts(expected), strict=True))
    if along > first:
        rows = [theirs.double().square().mean(dim=along, keepdim=True) for _, theirs in pairs]
        size = (torch.stack([row.sum(every) for row in rows]).sum(0) * (expected.shape[along] / elements)).sqrt()
        rows = [row.sqrt_() for row in rows]
    else:  # a row is all there is
        size = (torch.stack([theirs.double().square().sum(every) for _, theirs in pairs]).sum(0) / elements).sqrt()
        rows = [size.view(column)] * len(pairs)
    # Where nothing but zeros is wanted there is no size: then both numbers are the error itself.
    scale, least = torch.where(size > 0, size, 1.0), torch.where(size > 0, 1e-3 * size, 1.0).view(column)
    sums, largest = [], []
    for (mine, theirs), row in zip(pairs, rows, strict=True):
        exact = theirs.double()
        error = (mine.double() - exact).abs_()
        largest.append((error / exact.abs().add_(row).add_(least)).amax(every))
        sums.append(error.square_().sum(every))
    return (torch.stack(sums).sum(0) / elements).sqrt() / scale, torch.stack(largest).amax(0), size


def farthest(distances: Sequence[Distance]) -> Distance:
    """The larger of each number over several answers, output by output."""
    return combined(lambda *some: replace(of_outputs(some), each=()), *distances)


def apart(outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Distance:
    """Distance of one call's outputs from another's, output by output."""
    return calls_apart([outputs], [wanted])[0]


def calls_apart(calls: Sequence[Sequence[torch.Tensor]], wanted: Sequence[Sequence[torch.Tensor]]) -> list[Distance]:
    """Distance of the outputs of each of several calls from those of another call."""
    by_output = [zip(*outputs, strict=True) for outputs in (calls, wanted)]
    found = [*itertools.starmap(distances, zip(*by_output, strict=True))]
    return [of_outputs([one[call] for one in found]) for call in range(len(calls))]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limit of one input set, and the errors it was derived from."""

    allowed: Distance
    reference: Distance
    lower: Distance | None
    """Error of the next lower precision, where it is known."""
    calibrated: bool
    """True if the next lower precision would be rejected, by every output that is rounded."""
    calibrated_outputs: frozenset[int] = frozenset()
    """Indices of the outputs that would reject it."""
    passed_over: int = 0
    """Number of lower precisions that are too near the reference to be told from it."""


def unit_of(dtype: torch.dtype) -> float:
    """Distance of 1 from the next larger number; an eighth of it for eight bits, of which several units are everything."""
    eps = torch.finfo(dtype).eps
    return eps / 8 if eps > 0.1 else eps


def calibrate(reference: Distance, lower: Iterable[Distance], dtype: torch.dtype, settings: Settings) -> Tolerance:
    """The tolerance of one output on one input set, from the reference's distance and those of lower precisions.

    The latter come from the highest down. The first that is clearly worse than the reference is the next lower one: a
    reference that uses TF32 itself is compared with bfloat16.
    """
    eps = unit_of(dtype) if dtype.is_floating_point or dtype.is_complex else 0.0
    floor = Distance(settings.error_floor_eps * eps, 4 * settings.error_floor_eps * eps)
    ratio = settings.error_ratio
    rms, worst = max(floor.rms, ratio * reference.rms), max(floor.worst, ratio * reference.worst)
    for passed_over, candidate in enumerate(lower):
        limit = settings.lower_precision_share * candidate.rms
        if limit > 2 * reference.rms and limit > floor.rms:
            between = Distance(math.sqrt(reference.rms * candidate.rms), math.sqrt(reference.worst * candidate.worst))
            allowed = Distance(min(max(rms, between.rms), limit), max(worst, between.worst))
            return Tolerance(allowed, reference, candidate, calibrated=True, passed_over=passed_over)
    return Tolerance(Distance(rms, worst), reference, None, calibrated=False)


def unit_of_sums(dtype: torch.dtype) -> float:
    """Unit roundoff with which PyTorch sums terms of a dtype."""
    return min(torch.finfo(dtype).eps if dtype.is_floating_point else 1.0, torch.finfo(torch.float32).eps) / 2


def lower_precisions(dtype: torch.dtype) -> tuple[int, ...]:
    """Mantissa bits of the precisions below a dtype, highest first."""
    return _LOWER_MANTISSA_BITS.get(str(dtype).removeprefix("torch."), ())


def round_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a floating tensor to `bits` explicit mantissa bits, ties to even; the exponent range stays.

    What is subnormal in float64, where fewer bits are explicit, keeps fewer.
    """
    return by_parts(x, functools.partial(_without_bits, 52 - bits))


def _without_bits(dropped: int, part: torch.Tensor) -> torch.Tensor:
    """A part in float64 whose last `dropped` mantissa bits are rounded away."""
    wide = part.double()
    pattern = wide.view(torch.int64)
    # Just less than half of what is kept, and a bit more where the kept part is odd; a carry ends in the exponent.
    summed = (pattern >> dropped).bitwise_and_(1).add_(pattern).add_((1 << (dropped - 1)) - 1)
    return torch.where(wide.isnan(), wide, summed.bitwise_and_(-1 << dropped).view(torch.float64))


def trivial_outputs(truth: torch.Tensor, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of the right shape that need no computation."""
    made = {"zeros": truth.new_zeros(()).expand(truth.shape), "ones": truth.new_ones(()).expand(truth.shape)}
    if truth.is_floating_point() and truth.numel() > 1:
        made["mean"] = truth.mean().expand(truth.shape)
    if truth.dim() > 1 and truth.shape[0] > 1:
        made["first-row"] = truth[:1].expand(truth.shape)
    for tensor in inputs:
        if tensor.shape == truth.shape:
            made.setdefault("input-copy", tensor)
    return made


class VacuityGate:
    """Finds trivial outputs that would pass every input set: such a task's check proves little."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        self._dtypes = dtypes
        self._sets = 0
        self._passing: set[str] = set()
        self._earlier: list[torch.Tensor] = []

    def observe(self, truth: list[torch.Tensor], inputs: Sequence[torch.Tensor], allowed: Distance) -> None:
        """Try every trivial output on one more input set."""
        tried = [trivial_outputs(tensor, inputs) for tensor in truth]
        for made, other in zip(tried, self._earlier, strict=False):  # which may be none
            made["other-output"] = other
        passing: set[str] = set()
        for name in set.intersection(*(set(made) for made in tried)) if tried else ():
            if self._has_passed_all(name) and apart([made[name] for made in tried], truth).within(allowed):
                passing.add(name)
        # Integers that nothing settles, such as indices of equal elements, may go unchecked beside other outputs.
        integers = [index for index, t in enumerate(truth) if not is_inexact(t)]
        for index in integers if len(truth) > 1 else ():
            for trivial, output in tried[index].items():
                name = f"{trivial} for output {index}"
                if self._has_passed_all(name) and distance(output, truth[index]).within(allowed.of(index)):
                    passing.add(name)
        self._passing, self._earlier = passing, []
        # As a candidate returns it, and no longer than it can pass: it may be most of what a GPU holds.
        if not self._sets or any(name.startswith("other-output") for name in passing):
            pairs = zip(truth, self._dtypes, strict=True)
            self._earlier = [one if one.is_complex() else one.to(kind) for one, kind in pairs]
        self._sets += 1

    def _has_passed_all(self, name: str) -> bool:
        # The other input's output cannot be tried on the first.
        return name in self._passing or self._sets == name.startswith("other-output")

    @property
    def passing(self) -> tuple[str, ...]:
        """Names of the trivial outputs that passed every set."""
        return tuple(sorted(self._passing))
