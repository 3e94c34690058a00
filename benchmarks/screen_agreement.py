"""Measures how often screening's first candidate is the judge's best one, over published searches.

    python benchmarks/screen_agreement.py results/kernelbench-h200/cuda-l1-fifth-*  # and others
    python benchmarks/screen_agreement.py RUN_DIR... --each

A task counts where the judge accepted two or more candidates that screening had called right. Screening's first is the one
of them with the best estimate. Its speedup over eager, as a share of the best one's, is the ratio; both are first verdicts,
one measurement for each. They agree from `NEAR` on. Where their two intervals do not
overlap, the difference is more than noise.

The judge of a search takes a second candidate only where its estimate is clearly above what the first one measured. So these
are the tasks on which screening had erred, and no sample of all tasks.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from race_numbers import THEIRS, Run

from kernelwright.records import Evaluation
from kernelwright.records.decisions import BASELINE_POLICY, ranked
from kernelwright.records.screened import Screened

NEAR = 0.97
"""Speedup of screening's first, in multiples of the best judged one, from which both are alike."""


def is_certainly_slower(one: Evaluation, other: Evaluation) -> bool:
    """True where two intervals do not overlap, and the first one lies below."""
    return (one.speedup_high or 0.0) < (other.speedup_low or 0.0)


@dataclass(frozen=True, slots=True)
class Compared:
    """Screening's first candidate of one task beside the best of those that the judge accepted."""

    run: str
    task: str
    judged: int
    """Number of accepted candidates that screening had called right."""
    ratio: float
    """Speedup of screening's first / speedup of the best; 1 where they are the same."""
    is_certain: bool
    """True where the two intervals do not overlap."""

    @property
    def agrees(self) -> bool:
        """True where screening's first is about as fast as the best."""
        return self.ratio >= NEAR


def compared(run: Run) -> list[Compared]:
    """Every task of a run on which the judge accepted two candidates or more."""
    looks: dict[str, list[Screened]] = defaultdict(list)
    for look in run.screened():
        looks[look.task].append(look)
    verdicts: dict[str, dict[str, Evaluation]] = defaultdict(dict)
    # The first verdict on a candidate counts before its confirmation, which only winners have.
    for one in sorted(run.evaluations(), key=lambda one: not one.confirms):
        if one.policy not in (BASELINE_POLICY, THEIRS) and one.accepted and one.speedup is not None:
            verdicts[one.task][one.candidate_sha256] = one
    found = []
    for task, by_candidate in verdicts.items():
        order = [
            by_candidate[look.candidate_sha256] for look in ranked(looks[task]) if look.candidate_sha256 in by_candidate
        ]
        if len(order) > 1:
            first, best = order[0], max(order, key=lambda one: one.speedup or 0.0)
            ratio = (first.speedup or 0.0) / (best.speedup or 1.0)
            found.append(Compared(run.path.name, task, len(order), ratio, is_certainly_slower(first, best)))
    return found


def summary_of(found: Sequence[Compared]) -> dict[str, Any]:
    """Counts and the distribution of the ratio, over all tasks and over those where the difference is more than noise."""

    def spread(some: Iterable[Compared]) -> dict[str, Any]:
        ratios = [one.ratio for one in some]
        told = {"median": round(median(ratios), 3), "worst": round(min(ratios), 3)} if ratios else {}
        return {"tasks": len(ratios), **told}

    return {
        "screen_agreement": [sum(one.agrees for one in found), len(found)],
        "ratio": spread(found),
        "ratio_beyond_noise": spread(one for one in found if one.is_certain),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--each", action="store_true", help="print every task too")
    options = parser.parse_args(arguments)
    found = [one for path in options.runs for one in compared(Run(path))]
    if options.each:
        for one in sorted(found, key=lambda one: one.ratio):
            certain = "beyond noise" if one.is_certain else ""
            print(f"{one.ratio:.3f}  {one.run}  {one.task}  of {one.judged}  {certain}".rstrip())
    print(json.dumps(summary_of(found), indent=1))


if __name__ == "__main__":
    main()
