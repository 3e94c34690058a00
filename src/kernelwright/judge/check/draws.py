"""Tells whether two modules that draw other random numbers draw from one distribution, by a permutation test.

It is exact whatever the outputs depend on: were the calls of both exchangeable, any other division of all calls into two
halves would be as likely to look this unlike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_TINY = torch.finfo(torch.float64).tiny
CALLS = 24
"""Calls of each module. Our choice."""
_DIVISIONS, _AS_UNLIKE = 4096, 4
"""Divisions that are tried, and how many must be as unlike for the calls to pass as alike. Our choice."""
_ELEMENTS = 1 << 16
"""Most elements of each output that are compared, at random places. Our choice."""


def sampled(outputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Elements of each output at random places, the same for each call with this seed."""
    found = []
    for output in outputs:
        flat = torch.view_as_real(output).flatten() if output.is_complex() else output.flatten()
        places = torch.randint(
            max(1, len(flat)), (min(_ELEMENTS, len(flat)),), generator=torch.Generator().manual_seed(seed)
        )
        found.append(flat[places.to(flat.device)].double().nan_to_num(posinf=0.0, neginf=0.0))
    return found


def are_alike(mine: Sequence[Sequence[torch.Tensor]], theirs: Sequence[Sequence[torch.Tensor]], rounding: float) -> bool:
    """True if outputs of calls with different seeds are distributed alike: by their mean, by their variance, and by their
    covariance, which tells a mask for each element from one that rows share.

    Args:
        mine: What was `sampled` of each call of one module.
        theirs: The same of the other, which is right.
        rounding: Relative difference that rounding explains.
    """
    columns = [torch.stack(outputs) for outputs in zip(*mine, *theirs, strict=True)]
    # Each output counts as much as any other, however many elements it has.
    units = [column[len(mine) :].square().sum(1).mean().sqrt().clamp_min(_TINY) * len(columns) ** 0.5 for column in columns]
    points = torch.cat([column / unit for column, unit in zip(columns, units, strict=True)], dim=1)
    squared = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square().cpu()
    first = torch.zeros(len(points), dtype=torch.float64)
    first[: len(mine)] = 1.0
    unlike = _unlikeness(squared, torch.stack([first, *(first[torch.randperm(len(first))] for _ in range(_DIVISIONS))]))
    significant = (unlike[1:] >= unlike[0] * (1 - 1e-9)).sum(dim=0) < _AS_UNLIKE
    return not (significant & (unlike[0] > rounding**2)).any()


def _unlikeness(squared: torch.Tensor, divisions: torch.Tensor) -> torch.Tensor:
    """Distances of means, variances and covariances between the halves of each division, from squared distances of calls."""
    other = 1.0 - divisions
    pairs = divisions.sum(1) * (divisions.sum(1) - 1), other.sum(1) * (other.sum(1) - 1)
    (mine, theirs), (mine_again, theirs_again) = (
        [((half @ powers) * half).sum(1) / count for half, count in zip((divisions, other), pairs, strict=True)]
        for powers in (squared, squared.square())
    )
    between = ((divisions @ squared) * other).sum(1) / (divisions.sum(1) * other.sum(1))
    widths = [(square - mean.square()).clamp_min(0).sqrt() for square, mean in ((mine_again, mine), (theirs_again, theirs))]
    return torch.stack([between - (mine + theirs) / 2, (mine - theirs).abs() / 2, (widths[0] - widths[1]).abs()], dim=1)
