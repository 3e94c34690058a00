"""Computes the numbers of an evaluation from its raw timings; the judge and `rescore` both call `score`.

Two clocks watch each call of a candidate. The inner one runs in the candidate's process and excludes the harness; the
outer one is the judge's, out of the candidate's reach. Time that the outer clock sees beyond the inner one is the
harness's cost, which the trusted reference shows. A candidate's excess over that is charged to it, and an interval claims
no more than the outer clock alone bears out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from kernelwright.records.intervals import MISS_PROBABILITY, Interval, noise_floor, ratio_interval, t_quantile, upper_bound
from kernelwright.records.models import Candidate, Evaluation, Scoring, TimingBlock, TimingSeries, Verdict

_SERIES_SHARE = 0.9
"""A single call takes at least this share of a call in a series; our choice."""
_LEAST_SHARE = 0.01
"""Share of the reference's latency that a clock's noise may leave of a fast candidate's; our choice."""
_PRECISIONS = {"strict_fp32", "tf32_products"}
_HIDDEN_CONFIDENCE = 0.99
"""Confidence of Student's bound of hidden time: who hides time tries often. Our choice."""


@dataclass(frozen=True, slots=True)
class Score:
    """Speedup of one evaluation, and the timings it was computed from."""

    speedup: Interval
    noise_floor: float | None
    """95 % bound of |A/A ratio - 1|; None where no second reference was measured."""
    reference_us: float
    """Median latency of one call of the reference, microseconds."""
    candidate_us: float
    """Median charged latency of one call of the candidate, microseconds."""
    blocks: tuple[TimingBlock, ...]
    """Timed calls, the candidate's charged."""
    series: tuple[TimingSeries, ...]
    scoring: Scoring
    versus: dict[str, Interval] = field(default_factory=dict)
    """Latency of each that was timed beside the candidate / the candidate's."""

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers under their names in an evaluation."""
        return {
            "speedup": self.speedup.estimate,
            "speedup_low": self.speedup.low,
            "speedup_high": self.speedup.high,
            "noise_floor": self.noise_floor,
            "reference_us": self.reference_us,
            "candidate_us": self.candidate_us,
            "versus": {name: astuple(ratio) for name, ratio in self.versus.items()},
        }

    @property
    def recorded(self) -> dict[str, Any]:
        """The numbers and what they follow from, under their names in an evaluation."""
        return {**self.numbers, "blocks": self.blocks, "series": self.series, "scoring": self.scoring}


@dataclass(frozen=True, slots=True)
class Charge:
    """Time that one process triple's clocks add to a candidate's own, microseconds a call."""

    audited_us: float
    """Time outside the inner clock of the candidate's calls in series, beyond the reference's."""
    slack_us: float
    """Part of that which chance explains."""
    least_us: float
    """Least latency of a single call that the series bear out."""

    @property
    def charged_us(self) -> float:
        """Time added to each call."""
        return max(0.0, self.audited_us - self.slack_us)

    def apply(self, claimed_us: Iterable[float]) -> tuple[float, ...]:
        """Charged latencies of single calls, rounded as records are."""
        return whole_ns(max(claim + self.charged_us, self.least_us) for claim in claimed_us)


def score(blocks: Sequence[TimingBlock], series: Sequence[TimingSeries], scoring: Scoring) -> Score:
    """The numbers of an evaluation.

    The candidate's charged latencies are computed anew where its claims are there. There are no series where the inner
    clock is believed.

    Raises:
        ValueError: there are no blocks, or a process has series and no blocks.
    """
    charges = {one.process: charge_of(_of(blocks, one.process), one) for one in series}
    charged = tuple(_charged(block, charges.get(block.process)) for block in blocks)
    candidate_us = median(value for block in charged for value in block.candidate_us)
    nulls = log_ratios(charged, null=True) if any(block.null_us for block in charged) else []
    speedup, floor = score_ratios(log_ratios(charged), nulls, scoring.miss_probability)
    claimed, versus = speedup, dict[str, Interval]()
    if charges:
        alone = [_log_ratios_by_outer_clock(_of(blocks, one.process), one) for one in series]
        hidden_share = hidden_us(series, [charges[one.process] for one in series]) / candidate_us
        speedup = confirmed(speedup, ratio_interval(alone, miss_probability=scoring.miss_probability), hidden_share)
    for name in dict.fromkeys(name for block in charged for name in block.alongside_us):
        ratios = log_ratios([block for block in charged if name in block.alongside_us], alongside=name)
        ratio = ratio_interval(ratios, miss_probability=scoring.miss_probability)
        versus[name] = lowered_alike(ratio, claimed, speedup)
    return Score(
        speedup=speedup,
        noise_floor=floor,
        reference_us=median(value for block in charged for value in block.reference_us),
        candidate_us=candidate_us,
        blocks=charged,
        series=tuple(series),
        scoring=scoring,
        versus=versus,
    )


def alongside_record(found: Evaluation, baseline: Candidate) -> Evaluation | None:
    """The record, over eager, of a stock configuration that was timed beside a candidate; None where it was not measured."""
    name = baseline.name_alongside
    sides = [block for block in found.blocks if name in block.alongside_us]
    failed = found.checks.get("alongside", {}).get(name)
    if failed is not None:
        outcome = {"verdict": Verdict.REJECTED, "reason": failed["reason"], "detail": failed["detail"]}
    elif sides and found.scoring is not None:
        timed = [
            block.model_copy(update={"candidate_us": block.alongside_us[name], "claimed_us": (), "alongside_us": {}})
            for block in sides
        ]
        outcome = {"verdict": Verdict.ACCEPTED, **score(timed, (), found.scoring).recorded}
    else:
        return None
    return Evaluation(
        **found.model_dump(include={"task", "task_sha256", "contract", "device", "started"}),
        **baseline.model_dump(include={"policy", "techniques", "source"}),
        candidate_sha256=baseline.sha256,
        checks={key: found.checks[key] for key in _PRECISIONS & found.checks.keys()} | {"alongside": found.candidate_sha256},
        **outcome,
    )


def score_ratios(
    ratios: Sequence[Sequence[float]], nulls: Sequence[Sequence[float]], miss_probability: float = MISS_PROBABILITY
) -> tuple[Interval, float | None]:
    """Interval and noise floor of modules and of schedules alike.

    Args:
        ratios: Log ratio of each pair of calls, for each fresh process.
        nulls: The same of the reference against itself; none where that was not measured.
        miss_probability: As for `ratio_interval`.
    """
    return ratio_interval(ratios, miss_probability=miss_probability), noise_floor(nulls) if nulls else None


def whole_ns(values_us: Iterable[float]) -> tuple[float, ...]:
    """Microseconds rounded to nanoseconds, at least one, since ratios are taken: what is scored is what is recorded."""
    return tuple(max(0.001, round(value, 3)) for value in values_us)


def charge_of(blocks: Sequence[TimingBlock], series: TimingSeries) -> Charge:
    """Time that the clocks of one process triple add to the candidate's claims."""
    latency_us = _latency_us(blocks)
    mine, theirs = outside_us(series)
    slack = slack_us(mine, theirs)
    own_us = median(theirs)
    # A lie told in single calls only: they cannot be much faster than the same calls in a series, which the outer
    # clock sees and which run with warmer caches. Where calls in a series take longer all the same, the reference's
    # do so too; and only what is certain counts.
    series_us = float(np.quantile(series.reference_outer_us, 0.75)) - own_us
    claimed_us = float(np.quantile(series.candidate_outer_us, 0.25)) - own_us - slack
    share = min(1.0, latency_us / max(series_us, _LEAST_SHARE * latency_us))
    return Charge(median(mine) - own_us, slack, _SERIES_SHARE * max(0.0, claimed_us) * share)


def outside_us(series: TimingSeries) -> tuple[list[float], list[float]]:
    """Time per call that the outer clock saw beyond the inner one, in each series of (candidate, reference)."""
    return (
        [outer - inner for outer, inner in zip(series.candidate_outer_us, series.candidate_inner_us, strict=True)],
        [outer - inner for outer, inner in zip(series.reference_outer_us, series.reference_inner_us, strict=True)],
    )


def log_ratios(blocks: Sequence[TimingBlock], *, null: bool = False, alongside: str | None = None) -> list[list[float]]:
    """Per process, log(reference latency / candidate latency) of every pair of calls that shared an input.

    `null` takes the second reference in the candidate's place, `alongside` what has that name in the reference's.
    """
    processes: dict[int, list[float]] = {}
    for block in blocks:
        base, other = (
            block.reference_us if alongside is None else block.alongside_us[alongside],
            block.null_us if null else block.candidate_us,
        )
        processes.setdefault(block.process, []).extend(
            math.log(mine) - math.log(theirs) for mine, theirs in zip(base, other, strict=True)
        )
    return list(processes.values())


def confirmed(claimed: Interval, by_series: Interval, hidden_share: float) -> Interval:
    """The inner clock's interval, as far as the outer clock, which no candidate can reach, bears it out.

    Args:
        claimed: Interval by the inner clock, charges included.
        by_series: Interval by the outer clock alone. It is vague for short calls; where it contradicts the claim it wins.
        hidden_share: Share of the candidate's latency that may be missing from it: the interval reaches down to the
            speedup in that case.
    """
    estimate = min(claimed.estimate, by_series.high)
    low = claimed.low / (1 + hidden_share) if estimate == claimed.estimate else min(claimed.low, by_series.low)
    # Only a contradiction lowers the upper end: to take the lower of two upper ends would miss twice as often.
    high = by_series.high if by_series.high < claimed.low else claimed.high
    return Interval(estimate, min(low, estimate), max(high, estimate))


def lowered_alike(ratio: Interval, claimed: Interval, final: Interval) -> Interval:
    """A candidate's ratio to what was timed in its final, lowered as the outer clock lowered its claim over eager."""
    estimate = ratio.estimate * final.estimate / claimed.estimate
    low, high = ratio.low * final.low / claimed.low, ratio.high * min(1.0, final.high / claimed.high)
    return Interval(estimate, min(low, estimate), max(high, estimate))


def hidden_us(processes: Sequence[TimingSeries], charges: Sequence[Charge]) -> float:
    """Bound of the time in a candidate's calls that neither its own clock nor a charge has seen, microseconds.

    The harness costs both sides the same, so that in a series, whose parts differ less than whole calls do, the
    candidate's time outside its clock should be the reference's. The bound is the higher of the processes' bootstrap and
    Student's over all series: a bootstrap of three series missed time that was hidden in 12 of 100 runs.
    """
    unexplained = []
    for series, charge in zip(processes, charges, strict=True):
        mine, theirs = outside_us(series)
        unexplained.append([value - median(theirs) - charge.charged_us for value in mine])
    pooled = [value for values in unexplained for value in values]
    by_chance = t_quantile(max(1, len(pooled) - 1), _HIDDEN_CONFIDENCE) * _median_error(pooled)
    return max(0.0, upper_bound(unexplained), median(pooled) + by_chance)


def slack_us(*samples: list[float]) -> float:
    """Twice the standard error of the difference of medians, which chance alone explains."""
    return 2 * math.hypot(*(_median_error(sample) for sample in samples))


def _median_error(values: Sequence[float]) -> float:
    """Standard error of a median, from the median distance, both as for normal noise."""
    spread = 1.4826 * float(np.median(np.abs(np.asarray(values) - median(values))))
    return 1.2533 * spread / math.sqrt(len(values))


def _log_ratios_by_outer_clock(blocks: Sequence[TimingBlock], series: TimingSeries) -> list[float]:
    """log(reference / candidate) of each pair of series, the reference's harness taken off both."""
    own_us, least_us = median(outside_us(series)[1]), _LEAST_SHARE * _latency_us(blocks)
    return [
        math.log(max(theirs - own_us, least_us)) - math.log(max(mine - own_us, least_us))
        for theirs, mine in zip(series.reference_outer_us, series.candidate_outer_us, strict=True)
    ]


def _charged(block: TimingBlock, charge: Charge | None) -> TimingBlock:
    if charge is None or not block.claimed_us:
        return block
    return block.model_copy(update={"candidate_us": charge.apply(block.claimed_us)})


def _latency_us(blocks: Sequence[TimingBlock]) -> float:
    return median(value for block in blocks for value in block.reference_us)


def _of(blocks: Sequence[TimingBlock], process: int) -> list[TimingBlock]:
    return [block for block in blocks if block.process == process]
