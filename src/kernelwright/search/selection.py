"""Chooses which screened candidates the judge takes: the best few, and what looks too good to be true."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kernelwright.records import Evaluation
from kernelwright.records.screened import Screened

JUDGED = 3
"""Screened candidates that the judge takes by default."""
TOO_GOOD = 3.0
"""Estimate, in multiples of the next best, above which a candidate is judged beside the best few. Our choice."""
_TRIED = 3
"""Candidates that may be judged for each one wanted: those that the judge rejects do not count."""


def ranked(screened: Sequence[Screened]) -> list[Screened]:
    """Candidates that were right and timed, highest estimate first; the later of two looks at one counts."""
    latest = {one.candidate_sha256: one for one in screened}
    timed = [one for one in latest.values() if one.correct and one.estimate is not None]
    return sorted(timed, key=lambda one: -(one.estimate or 0.0))


def too_good(order: Sequence[Screened]) -> set[str]:
    """Hashes of those beyond the roofline, and of all above a gap of `TOO_GOOD` in the ranking."""
    found = {one.candidate_sha256 for one in order if one.is_beyond_roofline}
    for place, (better, worse) in enumerate(itertools.pairwise(order)):
        if (better.estimate or 0.0) > TOO_GOOD * (worse.estimate or 0.0) and (better.estimate or 0.0) > 1.0:
            found |= {one.candidate_sha256 for one in order[: place + 1]}
    return found


def next_to_judge(screened: Sequence[Screened], judged: Mapping[str, Evaluation], count: int) -> list[Screened]:
    """Candidates that the judge should take now, best first; none once it has seen enough.

    Args:
        screened: Estimates of one task's candidates.
        judged: Verdicts so far, by the candidate's hash.
        count: Candidates to judge; those rejected are replaced by the next best.
    """
    order = ranked(screened)
    suspects = too_good(order)
    plausible = [one for one in order if (one.estimate or 0.0) * (1.0 + (one.spread or 0.0)) > 1.0]
    # Where one that looked too good is good, slower ones have lost.
    won = [found.speedup or 0.0 for sha256, found in judged.items() if sha256 in suspects and found.is_improvement]
    groups = [
        [one for one in plausible if one.candidate_sha256 in suspects],
        [one for one in plausible if one.candidate_sha256 not in suspects and (one.estimate or 0.0) > max(won, default=0.0)],
    ]
    chosen = [one for group in groups for one in _first(group, judged, count)]
    left = [one for one in chosen if one.candidate_sha256 not in judged]
    return sorted(left, key=lambda one: -(one.estimate or 0.0))


def _first(group: Sequence[Screened], judged: Mapping[str, Evaluation], count: int) -> list[Screened]:
    """The first `count` of a group; the next one replaces each that the judge rejected."""
    found: list[Screened] = []
    wanted = count
    for one in group[: _TRIED * count]:
        if wanted == 0:
            break
        verdict = judged.get(one.candidate_sha256)
        wanted -= verdict is None or verdict.accepted
        found.append(one)
    return found
