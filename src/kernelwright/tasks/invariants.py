"""Finds what all draws of a task's inputs share: sorted rows, a symmetric matrix, the form of a mask.

An input set that keeps these invariants may reject a candidate. One that breaks them only shows what it relies on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Invariant(StrEnum):
    """Property of an input that every draw has. Rows lie along the last dimension that is longer than one."""

    SORTED = "sorted"
    SYMMETRIC = "symmetric"
    """Equal to the conjugate transpose, up to rounding."""
    PERMUTATION = "permutation"
    """Integers of which none comes twice in a row: those of a permutation, or rising pointers."""
    PREFIX_MASK = "prefix-mask"
    """Rows of one value and then another, such as those of a mask for padding."""
    ONE_HOT = "one-hot"
    """At most one element of a row that is not zero."""
    ZEROS = "zeros"
    """Zeros in the same places, as of a triangle."""
    LEAST_INTEGER = "least-integer"
    """Integers of two or more, such as lengths."""


_PLAIN = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
"""Types that PyTorch compares and sorts. Inputs of others are of no kind."""
_STEPS, _FEW, _ROW, _SPARSE = 16, 4, 8, 0.01
"""Neighbours that do not rise by chance, elements of a row that have a form or an order, share of zeros. Our choice."""


def is_inexact(tensor: torch.Tensor) -> bool:
    """True where the numbers of a tensor are rounded: floating or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """The shape, strides and dtype of a tensor, without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """A view whose last dimension is longer than one, if any is."""
    while x.dim() > 1 and x.shape[-1] == 1:
        x = x[..., 0]
    return x


@dataclass(frozen=True, slots=True, eq=False)
class TensorForm:
    """Properties of one input by which input sets are chosen."""

    outline: torch.Tensor
    invariants: frozenset[Invariant] = frozenset()
    kinds: frozenset[str] = frozenset()
    """The ways to vary it: an invariant to be broken, or one of the words below."""

    @classmethod
    def of(cls, one: torch.Tensor, other: torch.Tensor) -> TensorForm:
        """The form of an input of which these are two draws."""
        drawn, (one, other) = outline(one), map(as_rows, (one, other))
        if one.dtype not in _PLAIN or one.shape != other.shape or not one.dim() or not one.numel():
            return cls(drawn)
        found = _invariants(one) & _invariants(other)
        is_rated = is_inexact(one) or all(bool(((x == 0) | (x == 1)).all()) for x in (one, other))
        has_zeros = is_rated and all(_SPARSE < 1 - int(x.count_nonzero()) / x.numel() < 1 for x in (one, other))
        if has_zeros and torch.equal(one == 0, other == 0):
            found.add(Invariant.ZEROS)
        is_integer = not is_inexact(one) and one.dtype != torch.bool
        is_real, (*outer, columns) = one.is_floating_point(), one.shape
        is_ordered = is_real or (is_integer and Invariant.PERMUTATION not in found)
        kinds = {
            "real": is_real,
            "rows": is_ordered and columns >= _ROW,
            "columns": is_ordered and max(outer, default=0) >= _ROW,
            "many rows": is_real and columns >= _ROW and one.numel() >= _ROW * columns,
            "integers": is_integer and Invariant.PERMUTATION not in found,
            "segments": is_integer and Invariant.SORTED in found,
            "sparse": has_zeros and found.isdisjoint({Invariant.ZEROS, Invariant.PREFIX_MASK, Invariant.ONE_HOT}),
        }
        # Rising integers without repeats may be pointers, which point anywhere in another order.
        are_pointers = found >= {Invariant.SORTED, Invariant.PERMUTATION}
        words = {word for word, holds in kinds.items() if holds}
        return cls(drawn, frozenset(found), frozenset(words if are_pointers else words | found))


def restored(x: torch.Tensor, invariants: frozenset[Invariant]) -> torch.Tensor:
    """The tensor with the order and the symmetry that its task gives it, after a variation."""
    if Invariant.SYMMETRIC in invariants:
        x = x.tril() + x.tril(-1).mH
    return x.sort(dim=-1).values if Invariant.SORTED in invariants else x


def _invariants(x: torch.Tensor) -> set[Invariant]:
    """Invariants of one draw. A few rows are asked first: most tensors are large and have no form."""
    found = set[Invariant]()
    if not x.is_contiguous() or _of_rows(x.view(-1, x.shape[-1])[:_STEPS]):
        found = _of_rows(x)
    if is_inexact(x) and x.dim() > 1 and x.shape[-1] == x.shape[-2] >= _FEW:
        pairs = ((x[..., :1, :], x.mH[..., :1, :]), (x, x.mH))
        limit = 16 * torch.finfo(x.dtype).eps
        near = all(bool((part - other).abs().amax() <= limit * part.abs().amax()) for part, other in pairs)
        found |= {Invariant.SYMMETRIC} if near and bool(x.tril(-1).any()) else set()
    return found


def _of_rows(x: torch.Tensor) -> set[Invariant]:
    is_integer = not is_inexact(x) and x.dtype != torch.bool
    found = {Invariant.LEAST_INTEGER} if is_integer and int(x.amin()) > 1 else set[Invariant]()
    if x.shape[-1] < _FEW:
        return found
    if int(x.count_nonzero(dim=-1).max()) == 1:
        found.add(Invariant.ONE_HOT)
    if x.is_complex():
        return found
    up, down = x[..., 1:] > x[..., :-1], x[..., 1:] < x[..., :-1]
    rises, falls = bool(up.any()), bool(down.any())
    if x.dtype != torch.bool and not falls and ((rises and up.numel() >= _STEPS) or bool(up.all())):
        found.add(Invariant.SORTED)
    if rises != falls and int((up | down).sum(-1).max()) == 1 and bool(((x == x.amin()) | (x == x.amax())).all()):
        found.add(Invariant.PREFIX_MASK)
    ranked = x.sort(dim=-1).values if is_integer else x[..., :1]
    if is_integer and bool((ranked[..., 1:] > ranked[..., :-1]).all()):
        is_dense = bool((ranked[..., -1] - ranked[..., 0] < 2 * x.shape[-1]).all())
        found |= {Invariant.PERMUTATION} if is_dense or Invariant.SORTED in found else set()
    return found
