"""Defines input sets: the task's own distribution, and variations of it that catch what it would let through.

Every variation maps zero to zero, so that a structure made of zeros (triangular, banded, masked) survives it, and order and
symmetry are restored after it, unless it is there to break one. A set on which the reference itself raises or is not finite
lies outside the task's domain and is left out by the judge.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelwright.tasks.invariants import Invariant, TensorForm, as_rows, is_inexact, restored

Variation = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
PART = 1 << 26
"""Elements that are varied, compared or rounded at once. Our choice."""
_COLUMN_MAX = 1 << 16
"""Longest vector that is laid out as a column, which takes twice its memory. Our choice."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats by the number of dimensions."""


@dataclass(frozen=True, slots=True)
class InputSet:
    """A named way to draw inputs."""

    name: str
    vary: Variation
    catches: str
    integers: bool = False
    """True for a variation of integer tensors rather than floating ones."""
    truths: bool = False
    """True for a variation of booleans too, where all of a tensor are alike."""
    layout: bool = False
    """True for a change of where elements lie in memory and of nothing else, of tensors of every type."""
    untimed: bool = False
    """True for a set that does not come up between timed calls: compilers work anew for each layout."""
    opposed: bool = False
    """True where every second tensor is negated: for inputs with two tensors or more."""
    of: str = ""
    """Kind of inputs that are varied, for a set of the check alone: see `TensorForm.kinds`. By default by type."""
    one: bool = False
    """True where one of them alone is varied, by lot."""
    operators: str = ""
    """Pattern of the operators of references that the set is for; their names are known where there is a float64 truth."""
    breaks: Invariant | None = None
    """Invariant of the task's own draws that is not kept. A candidate that is wrong then only relies on it."""

    @property
    def timed(self) -> bool:
        """True for a set that comes up between timed calls as well."""
        return not self.of and not self.untimed

    @property
    def late(self) -> bool:
        """True for a set that a contract may leave out, which comes after the others."""
        return self.layout or self.breaks is not None

    def apply(self, inputs: list[Any], generator: torch.Generator, forms: Sequence[TensorForm] = ()) -> list[Any]:
        """The inputs with every tensor varied that the variation is for; the others and scalars stay as drawn.

        Args:
            forms: Forms of the tensors by the task's own draws, in reading order; by default by this one.
        """
        if self.layout:
            return [map_tensors(item, lambda tensor: self.vary(tensor, generator)) for item in inputs]
        left, signs = iter(forms), itertools.cycle((False, self.opposed))
        sizes = torch.tensor(
            [float(one.outline.numel()) if self.varies(one) else 0.0 for one in forms], device=generator.device
        )
        alone = forms[int(torch.multinomial(sizes, 1, generator=generator))] if self.one and bool(sizes.any()) else None

        def vary(tensor: torch.Tensor) -> torch.Tensor:
            form = next(left, None) or TensorForm.of(tensor, tensor)
            return (
                tensor if not self.varies(form) or alone not in (None, form) else self._vary(tensor, generator, form, signs)
            )

        return [map_tensors(item, vary) for item in inputs]

    def fits(self, forms: Sequence[TensorForm], operators: str = "") -> bool:
        """True where the set may show something of a task.

        Args:
            forms: Forms of its inputs.
            operators: Names of the operators that its reference runs, each after a space.
        """
        if self.layout:
            tensors, generator = [form.outline for form in forms], torch.Generator()
            return any(_places(self.vary(tensor, generator)) != _places(tensor) for tensor in tensors)
        return sum(map(self.varies, forms)) > self.opposed and re.search(self.operators, operators) is not None

    def varies(self, form: TensorForm) -> bool:
        """True for an input that the variation is for."""
        if self.of or self.layout:
            return self.layout or self.of in form.kinds
        return is_inexact(form.outline) != self.integers or (self.truths and form.outline.dtype == torch.bool)

    def _vary(self, x: torch.Tensor, generator: torch.Generator, form: TensorForm, signs: Iterator[bool]) -> torch.Tensor:
        if self.truths and x.dtype == torch.bool and not x.all() and x.any():
            return (
                x  # a mask that was built, such as a triangle, may be what the task is about; one of all ones stands for any
            )
        drawn = computable(as_rows(x) if self.of else x)
        varied = self.vary(drawn, generator)
        if varied is drawn:
            return x
        varied = -varied if next(signs) else varied
        varied = varied if self.breaks else restored(as_rows(varied), form.invariants)
        return laid_as(varied.to(x.dtype).reshape(x.shape), x)


def _places(x: torch.Tensor) -> list[int]:
    """Offset of a tensor in its memory, and strides of its dimensions that are longer than 1."""
    return [int(x.storage_offset()), *(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)]


def _span(x: torch.Tensor) -> int:
    """Elements of memory from the first of a tensor to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def laid_as(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that lies in memory as another one of its shape; in full where elements of that one share memory."""
    if _span(like) < like.numel() or x.stride() == like.stride():
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def once(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor without the repetitions of another one's expanded dimensions: into those nothing can be written."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        x = x.narrow(dim, 0, 1) if stride == 0 and size > 1 else x
    return x


def copied(x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A copy that lies in memory as its original does."""
    memory = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)
    once(memory, x).copy_(once(x, x))
    return memory


def computable(x: torch.Tensor) -> torch.Tensor:
    """A tensor with whose type PyTorch computes: floats of eight bits become float32."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def map_tensors(item: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested lists, tuples and dicts with every tensor changed; anything else stays as it is."""
    if isinstance(item, torch.Tensor):
        return change(item)
    if isinstance(item, list | tuple):
        return type(item)(map_tensors(part, change) for part in item)
    if isinstance(item, dict):
        kind = type(item) if type(item).__init__ is dict.__init__ else dict  # a `defaultdict` wants more
        return kind((key, map_tensors(part, change)) for key, part in item.items())
    return item


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    """Views along the first dimension, of `PART` elements or of one row: copies of a whole tensor would fill a GPU."""
    if x.numel() <= PART:
        return [x]
    count = max(1, PART * x.shape[0] // x.numel())
    return [x[begin : begin + count] for begin in range(0, x.shape[0], count)]


def by_parts(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A changed copy of the same dtype, whose parts take temporary memory one after another."""
    changed = torch.empty_like(x)
    for part, target in zip(parts(x), parts(changed), strict=True):
        target.copy_(change(part))
    return changed


def has_nan(tensors: Iterable[torch.Tensor]) -> bool:
    """True where any of them has a NaN. By parts: answers for a whole tensor take a quarter of its memory in float32."""
    return any(bool(torch.stack([part.isnan().any() for part in parts(x)]).any()) for x in tensors if x.is_floating_point())


def size_of(x: torch.Tensor, *, finite: bool = False) -> torch.Tensor:
    """Root of the mean square of a tensor with elements, in float64, by parts.

    Args:
        finite: Infinity and NaN count as zero.
    """
    counted = (torch.where(part.isfinite(), part, 0.0) if finite else part for part in parts(x))
    return (torch.stack([part.abs().double().square_().sum() for part in counted]).sum() / x.numel()).sqrt()


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)


_KEPT_BITS = {torch.float64: 20, torch.float32: 7}
"""Mantissa bits that `_biased` keeps; three of other types. The precisions below keep these bits or three more."""


def _biased(x: torch.Tensor, generator: torch.Generator, first: float = 1.0) -> torch.Tensor:
    """Below the first bits of each mantissa come random remainders that lower precisions round towards zero, so that a long
    sum does not average their errors away. Elements in a row, a twentieth to a third, stay as drawn: a sample of them does
    not give the set away. With `first` 0 they are the first ones.
    """
    if x.is_complex():
        return torch.view_as_complex(_biased(torch.view_as_real(x.resolve_conj()), generator, first))
    unit = 2.0 ** -(_KEPT_BITS.get(x.dtype, 3) + 1)
    length, place = torch.rand(2, generator=generator, device=x.device).tolist()
    kept = int(x.numel() * (0.05 + 0.3 * length))
    begin = int((x.numel() - kept) * first * place)

    def moved(part: torch.Tensor) -> torch.Tensor:
        nonlocal begin
        mantissa, exponent = torch.frexp(part)
        # A little less than half of a unit, and of an eighth of it: both precisions below round towards zero.
        eighths = (_random(part, generator) * 2).floor_().add_(_random(part, generator), alpha=0.19).add_(2.3)
        mantissa = mantissa.abs_().div_(unit).floor_().add_(eighths / 8).copysign_(part)
        found = torch.where(torch.isfinite(part) & (part != 0), mantissa.mul_(unit).ldexp_(exponent), part).contiguous()
        chosen = slice(max(0, begin), max(0, begin + kept))
        found.view(-1)[chosen] = part.reshape(-1)[chosen]
        begin -= part.numel()
        return found

    return by_parts(x, moved)


def _mixed_scale(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Scale rows by powers of two from 2^-6 to 2^6."""
    if x.dim() == 0:
        return x
    exponents = torch.rand((*x.shape[:-1], 1), generator=generator, device=x.device) * 12 - 6
    return x * torch.exp2(exponents.round()).to(x.dtype)


def _outliers(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One element in 500 is 50 times larger: a result extrapolated from a sample misses them."""
    return by_parts(x, lambda part: torch.where(_random(part, generator) < 0.002, part * 50, part))


def _shuffled_sign(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return by_parts(x, lambda part: torch.where(_random(part, generator) < 0.5, part, -part))


def _one_row(x: torch.Tensor, generator: torch.Generator, factor: float) -> torch.Tensor:
    """Scale one row of several."""
    rows = x.shape[:-1].numel() if x.dim() else 0
    if rows < 2 or not x.numel():
        return x
    chosen = int(torch.randint(rows, (), generator=generator, device=x.device))
    scale = torch.ones(rows, dtype=x.dtype, device=x.device)
    scale[chosen] = factor
    return x * scale.view(*x.shape[:-1], 1)


def _around_one_vector(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """All rows point nearly the same way, four times as long."""
    if not x.numel():
        return x
    size = 4 * size_of(x)
    return by_parts(x, lambda part: torch.where(part != 0, (size + part / 4).to(part.dtype), part))


def _off_boundary(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same values and strides, one element off in memory."""
    if not x.numel() or _span(x) < x.numel():
        return x
    memory = torch.empty(_span(x) + 1, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, x.stride(), 1).copy_(x)


def _permuted_storage(x: torch.Tensor, *order: int) -> torch.Tensor:
    """The same values laid out in memory with the dimensions in another order, which is its own inverse."""
    return x.permute(order).contiguous().permute(order)


def _transposed_storage(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Channels of images and volumes lie last in memory; other tensors have their last two dimensions swapped there. A
    tensor that is not contiguous becomes contiguous."""
    if x.dim() < 2 or not x.is_contiguous():
        return x.contiguous()
    if x.dim() in CHANNELS_LAST:
        return x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    return _permuted_storage(x, *range(x.dim() - 2), x.dim() - 1, x.dim() - 2)


def _exchanged_storage(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """All dimensions but the last are in reverse order in memory."""
    return _permuted_storage(x, *reversed(range(x.dim() - 1)), x.dim() - 1) if x.dim() > 2 else x


def _sliced(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A slice of wider rows. A vector is a column."""
    if x.dim() < 2:
        return torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0] if x.dim() and len(x) <= _COLUMN_MAX else x
    memory = torch.empty((*x.shape[:-1], x.shape[-1] + 1), dtype=x.dtype, device=x.device)
    return memory[..., :-1].copy_(x)


def _in_groups(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each row nearly equals one of four, or by lot one for all: it differs by the square root of the rounding unit."""
    if not x.dim() or not x.numel():
        return x
    groups = 1 + 3 * int(torch.randint(2, (), generator=generator, device=x.device))
    first = torch.randint(len(x), (groups,), generator=generator, device=x.device)
    group = torch.randint(groups, (len(x),), generator=generator, device=x.device)
    return torch.lerp(x[first[group]], x, torch.finfo(x.dtype).eps ** 0.5)


def _skewed(x: torch.Tensor, generator: torch.Generator, share: float = 0.9) -> torch.Tensor:
    """Nine in ten integers become one value that was drawn. A tensor without repeated values, such as a permutation,
    stays as it is."""
    if x.dtype == torch.bool or x.numel() < 2 or torch.unique(x).numel() == x.numel():
        return x
    index = int(torch.randint(x.numel(), (1,), generator=generator, device=x.device))
    return torch.where(_random(x, generator) < share, x.reshape(-1)[index], x)


def _at_one_end(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """All integers lie at one end of the range that was drawn, below zero or above."""
    low, high = int(x.min()), int(x.max())
    some = torch.randint(max(1, (high - low) // 64), x.shape, generator=generator, device=x.device)
    below = low < 0 and bool(torch.randint(2, (), generator=generator, device=x.device))
    return (some + low if below else high - some).to(x.dtype)


def _other_segments(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other rising rows between the same ends: row pointers, or numbers of segments. Half of them are four numbers, so that
    some segments are long."""
    first, last = x[..., :1], x[..., -1:]
    drawn, chosen = _random(x, generator).double(), torch.randint(8, x.shape, generator=generator, device=x.device)
    drawn = torch.where(chosen < 4, drawn[..., :4].gather(-1, chosen.clamp_max(3)), drawn)
    found = (first + drawn * (last - first + 1)).to(x.dtype).minimum(last).sort(dim=-1).values
    return torch.cat([first, found[..., 1:-1], last], dim=-1)


def _far(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """All elements stand on an offset of so many times their size that half of the digits are left for them."""
    offset = float(size_of(x, finite=True)) / torch.finfo(x.dtype).eps ** 0.5
    return by_parts(x, lambda part: torch.where(part != 0, part + offset, part))


def _near(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rows nearly coincide, those of all tensors of as many columns: they differ by a part in 2^7 to 2^14, in each column
    another."""
    seeded = torch.Generator(x.device).manual_seed(generator.initial_seed())
    columns, size = x.shape[-1:], 2.0 ** round(float(size_of(x, finite=True).clamp_min(1e-30).log2()))
    centre = torch.randn(columns, generator=seeded, device=x.device) * size
    centre = (centre.abs() if bool(x.amin() >= 0) else centre).to(x.dtype)
    spread = torch.exp2(-torch.randint(7, 15, columns, generator=seeded, device=x.device).float()).to(x.dtype)
    return by_parts(x, lambda part: torch.where(part != 0, centre + part * spread, part))


def _ordered(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each row rises or falls, in one run or up to 256 interleaved ones, by elements, by steps or by clusters."""
    greatest = torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).max

    def arranged(part: torch.Tensor) -> torch.Tensor:
        def lot(*values: int) -> torch.Tensor:
            # Dealt, so that among many rows each value comes equally often.
            rows, deck = part[..., 0].numel(), torch.tensor(values, device=x.device)
            deck = deck[torch.randperm(len(values), generator=generator, device=x.device)]
            order = torch.randperm(rows, generator=generator, device=x.device) % len(values)
            return deck[order].view(*part.shape[:-1], 1)

        counted = (part != 0) | (not x.is_floating_point() and bool(part.amax() > 1))  # a mask keeps its zeros
        ranked = part.masked_fill(~counted, greatest).sort(dim=-1).values
        rank, count = counted.cumsum(-1) - 1, counted.sum(-1, keepdim=True)
        runs, step = lot(1, 1, 1, 2, 2, 3, 4, 8, 16, 32, 64, 128, 256), lot(1, 1, 1, 4, 16, 64)
        rank = rank % runs * ((count + runs - 1) // runs) + rank // runs
        rank = torch.where(lot(0, 1) == 1, count - 1 - rank, rank) // step * step
        rank = torch.minimum(rank, count - 1).clamp_min_(0)
        found, centre = ranked.gather(-1, rank), ranked.gather(-1, rank // 128 * 128)
        near = torch.add(centre, found - centre, alpha=2.0**-12) if x.is_floating_point() else found
        return torch.where(counted, torch.where((lot(0, 0, 1) == 1) & near.isfinite(), near, found), part)

    return by_parts(x, arranged)


def _ordered_across(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same along another dimension than the last, rather a long one."""
    lengths = torch.tensor(x.shape[:-1], dtype=torch.float32, device=x.device)
    dim = int(torch.multinomial(lengths, 1, generator=generator))
    return _ordered(x.transpose(dim, -1).contiguous(), generator).transpose(dim, -1).contiguous()


def _filled(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Half of a row's zeros or more become other elements."""

    def filled(part: torch.Tensor) -> torch.Tensor:
        if not len(others := part[part != 0]):
            return part
        share = torch.rand((*part.shape[:-1], 1), generator=generator, device=x.device).mul_(0.5).add_(0.5)
        chosen = torch.randint(len(others), part.shape, generator=generator, device=x.device)
        return torch.where((part == 0) & (_random(part, generator) < share), others[chosen], part)

    return by_parts(x, filled)


def _missing(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One element in sixteen is NaN, of those that are not zero."""
    return x.masked_fill((x != 0) & (_random(x, generator) < 1 / 16), torch.nan)


def _at_least(size: float, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """16 times as large, a vector or a number at least of this size: its slope, its gain or the logit of its memory."""
    return x * max(16.0, size / max(1e-3, float(size_of(x)))) if x.dim() < 2 and x.numel() else x * 16


def _pruned(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A sixteenth as large, one element of a matrix or vector in sixteen and one row in sixteen zero."""
    if x.numel() < 2:
        return x / 16
    kept = (_random(x, generator) > 1 / 16) & (_random(x[..., :1], generator) > 1 / 16)
    return x / 16 * kept


def _holes(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each row of a mask is padded from the left, or has holes."""
    is_flipped = torch.rand((*x.shape[:-1], 1), generator=generator, device=x.device) < 0.5
    return torch.where(is_flipped, x.flip(-1), x.gather(-1, _random(x, generator).argsort(dim=-1)))


_CHOOSING = r" (_?unique|arg|a?m(ax|in)(?!imum)|sort|topk|kth|(nan)?median|mode|_?cumm|search|bucket|hist|quantile)"
_LOOKING_FOR_NAN = r" (nan|is(nan|inf)|ne(?![a-z]))"
_PERIODIC = r" (sin|cos|tan|fmod|remainder|floor|round|trunc|frac|polar)(?![a-z])"
_LOOKS_NOTHING_UP = r"^(?!.* (gather|scatter|embedding|index_select|index_add|take))"
_HAS_NO_POINTERS = r"^(?!.* \w*(segment|bag|sparse|repeat_interleave))"
"""Integers that a reference takes for places in memory stay in range: one beyond takes a GPU away from everybody."""
_BREAKING: dict[Invariant, tuple[Variation, str]] = {
    Invariant.SORTED: (lambda x, g: x[..., torch.randperm(x.shape[-1], generator=g, device=x.device)], _HAS_NO_POINTERS),
    Invariant.SYMMETRIC: (lambda x, g: x.tril() + x.triu(1) * 0.5, ""),
    Invariant.PERMUTATION: (lambda x, g: x[..., (_random(x, g).view(-1)[: x.shape[-1]] * x.shape[-1]).long()], ""),
    Invariant.PREFIX_MASK: (_holes, ""),
    Invariant.ONE_HOT: (lambda x, g: x * 0.5 + x.roll(1, -1) * 0.5 if is_inexact(x) else x.maximum(x.roll(1, -1)), ""),
    Invariant.ZEROS: (_filled, ""),
    Invariant.LEAST_INTEGER: (lambda x, g: (_random(x, g) * x.amin()).clamp_min_(1).to(x.dtype), _LOOKS_NOTHING_UP),
}
"""Variation that breaks each invariant, and pattern of the operators of references for which it is safe."""


INPUT_SETS: tuple[InputSet, ...] = (
    InputSet("own", lambda x, g: x, "anything wrong on the task's own distribution"),
    InputSet("own-again", lambda x, g: x, "results kept from an earlier call"),
    InputSet("biased", _biased, "lower precision whose errors a long sum averages away"),
    InputSet("biased-later", lambda x, g: _biased(x, g, 0.0), "the same where the first elements tell that set"),
    InputSet("negative", lambda x, g: -x, "relying on the sign of the inputs"),
    InputSet("signs", _shuffled_sign, "errors hidden by sums of one sign; lower precision"),
    InputSet(
        "zero-one", lambda x, g: by_parts(x, lambda part: (_random(part, g) < 0.5) & (part != 0)), "wrong integer arithmetic"
    ),
    InputSet("constant", lambda x, g: by_parts(x, lambda part: (part != 0) * 0.75), "relying on randomness"),
    InputSet("large", lambda x, g: x * 4096, "half precision's range"),
    InputSet("small", lambda x, g: x / 4096, "absolute tolerances, epsilon terms"),
    InputSet("mixed-scale", _mixed_scale, "errors hidden under large rows"),
    InputSet("outliers", _outliers, "extrapolating from a sample"),
    InputSet("zero-row", lambda x, g: _one_row(x, g, 0.0), "dividing by a row's size"),
    InputSet("large-row", lambda x, g: _one_row(x, g, 64.0), "one shift or scale for all rows"),
    InputSet("opposed", _around_one_vector, "bounds in place of maxima, as norms of queries and keys", opposed=True),
    InputSet("skewed-integers", _skewed, "assuming that indices are spread evenly", integers=True),
    InputSet("alike-integers", functools.partial(_skewed, share=2.0), "counters of few bits", of="integers"),
    InputSet("large-integers", _at_one_end, "integer products in floating point", of="integers"),
    InputSet("other-segments", _other_segments, "segments alike", of="segments", breaks=Invariant.PERMUTATION),
    InputSet("far", _far, "differences of large numbers, as in variances", of="real", one=True, operators=" "),
    InputSet("near", _near, "differences of large numbers, as in distances", of="many rows", operators=" "),
    InputSet("ordered", _ordered, "choosing from samples of a row", of="rows", operators=_CHOOSING),
    InputSet("ordered-across", _ordered_across, "choosing from samples of a column", of="columns", operators=_CHOOSING),
    InputSet("missing", _missing, "values taken to be there", of="real", operators=_LOOKING_FOR_NAN),
    InputSet("vast", lambda x, g: x * 2.0**20, "range reduction of small arguments", of="real", operators=_PERIODIC),
    InputSet("filled", _filled, "room for as many elements as are not zero when drawn", of="sparse"),
    InputSet("non-contiguous", _transposed_storage, "relying on the memory layout", layout=True),
    InputSet("sliced", _sliced, "rows taken to lie side by side", layout=True, untimed=True),
    InputSet("exchanged", _exchanged_storage, "one stride for all rows", layout=True, untimed=True),
    InputSet("off-boundary", _off_boundary, "loading vectors where memory is not aligned for them", layout=True),
    *(
        InputSet(f"not-{invariant}", vary, "relying on what all draws share", of=invariant, operators=safe, breaks=invariant)
        for invariant, (vary, safe) in _BREAKING.items()
    ),
)
"""In order of use; the first must not be left out."""

WEIGHT_SETS: tuple[InputSet, ...] = (
    InputSet("weights-signs", _shuffled_sign, "scales taken to be positive"),
    InputSet("weights-4-times", lambda x, g: x * 4, "bounds that only first weights keep"),
    InputSet("weights-16-times", functools.partial(_at_least, 4.0), "logits, slopes and memories taken to be small"),
    InputSet("weights-sixteenth", _pruned, "temperatures and gains taken to be near their start, and none to be zero"),
    InputSet("weights-in-groups", _in_groups, "rows taken to be far from one another"),
)
"""Variations of parameters, which training leaves unlike those that a constructor draws."""
