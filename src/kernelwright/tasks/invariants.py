"""Finds what all draws of a task's inputs share: sorted rows, a symmetric matrix, the form of a mask.

An input set that keeps these invariants may reject a candidate. One that breaks them only shows what it relies on.
"""

from __future__ import annotations

from collections.abc import Callable
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


def is_inexact(tensor: torch.Tensor) -> bool:
    """True where the numbers of a tensor are rounded: floating or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """The shape, strides and dtype of a tensor, without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@dataclass(frozen=True, slots=True, eq=False)
class TensorForm:
    """Properties of one input by which input sets are chosen."""

    outline: torch.Tensor
    is_plain: bool = True
    """True for a tensor of a usual type. Others stay as drawn in the sets that look at values."""
    invariants: frozenset[Invariant] = frozenset()
    is_sparse: bool = False
    """True where some elements are zero, and not all."""

    @property
    def shape(self) -> torch.Size:
        """Its sizes, as rows."""
        return as_rows(self.outline).shape

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        return self.outline.dtype

    @classmethod
    def of(cls, one: torch.Tensor, other: torch.Tensor) -> TensorForm:
        """The form of an input of which these are two draws."""
        drawn = outline(one)
        if one.dtype not in _PLAIN or one.shape != other.shape:
            return cls(drawn, is_plain=False)
        one, other = as_rows(one), as_rows(other)
        found = {invariant for invariant, holds in _HOLD.items() if _holds(holds, one) and _holds(holds, other)}
        is_rated = is_inexact(one) or (_is_binary(one) and _is_binary(other))
        is_sparse = is_rated and all(_SPARSE < 1 - int(x.count_nonzero()) / max(1, x.numel()) < 1 for x in (one, other))
        if is_sparse and torch.equal(one == 0, other == 0):
            found.add(Invariant.ZEROS)
        return cls(drawn, invariants=frozenset(found), is_sparse=is_sparse)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """A view whose last dimension is longer than one, if any is."""
    while x.dim() > 1 and x.shape[-1] == 1:
        x = x[..., 0]
    return x


def restored(x: torch.Tensor, invariants: frozenset[Invariant]) -> torch.Tensor:
    """The tensor with the order and the symmetry that its task gives it, after a variation."""
    if Invariant.SYMMETRIC in invariants:
        x = x.tril() + x.tril(-1).mH
    return x.sort(dim=-1).values if Invariant.SORTED in invariants else x


_PLAIN = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
_STEPS, _FEW, _SPARSE = 16, 4, 0.01
"""Pairs of neighbours that do not rise by chance, elements of a row that have a form, and share of zeros. Our choice."""


def _holds(holds: Callable[[torch.Tensor], bool], x: torch.Tensor) -> bool:
    """Ask a few rows first: most tensors are large and have no form."""
    if not x.dim() or not x.numel():
        return False
    return (holds is _is_symmetric or not x.is_contiguous() or holds(x.view(-1, x.shape[-1])[:_STEPS])) and holds(x)


def _is_integer(x: torch.Tensor) -> bool:
    return not is_inexact(x) and x.dtype != torch.bool


def _is_binary(x: torch.Tensor) -> bool:
    return x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all())


def _is_sorted(x: torch.Tensor) -> bool:
    if x.is_complex() or x.dtype == torch.bool or x.shape[-1] < _FEW:
        return False
    if bool((x[..., 1:] > x[..., :-1]).all()):
        return True
    rises = bool((x[..., 1:] >= x[..., :-1]).all() and (x[..., 0] < x[..., -1]).any())
    return rises and x.numel() - x.shape[:-1].numel() >= _STEPS


def _is_symmetric(x: torch.Tensor) -> bool:
    if not is_inexact(x) or x.dim() < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < _FEW:
        return False
    pairs = ((x[..., :1, :], x.mH[..., :1, :]), (x, x.mH))  # a row first, again
    limit = 16 * torch.finfo(x.dtype).eps
    near = all(bool((part - other).abs().amax() <= limit * part.abs().amax()) for part, other in pairs)
    return near and bool(x.tril(-1).any())


def _has_no_value_twice(x: torch.Tensor) -> bool:
    if not _is_integer(x) or x.shape[-1] < _FEW:
        return False
    ranked = x.sort(dim=-1).values
    is_dense = bool((ranked[..., -1] - ranked[..., 0] < 2 * x.shape[-1]).all())
    return bool((ranked[..., 1:] > ranked[..., :-1]).all()) and (is_dense or torch.equal(ranked, x))


def _is_prefix_mask(x: torch.Tensor) -> bool:
    if x.is_complex() or x.shape[-1] < _FEW:
        return False
    falls, rises = x[..., 1:] < x[..., :-1], x[..., 1:] > x[..., :-1]
    has_one_step = bool(((falls | rises).sum(-1) <= 1).all()) and bool(falls.any()) != bool(rises.any())
    return has_one_step and bool(((x == x.amin()) | (x == x.amax())).all())


_HOLD: dict[Invariant, Callable[[torch.Tensor], bool]] = {
    Invariant.SORTED: _is_sorted,
    Invariant.SYMMETRIC: _is_symmetric,
    Invariant.PERMUTATION: _has_no_value_twice,
    Invariant.PREFIX_MASK: _is_prefix_mask,
    Invariant.ONE_HOT: lambda x: x.shape[-1] >= _FEW and int(x.count_nonzero(dim=-1).max()) == 1,
    Invariant.LEAST_INTEGER: lambda x: _is_integer(x) and int(x.min()) > 1,
}
