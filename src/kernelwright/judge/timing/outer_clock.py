"""What the parent's clock, which no candidate can reach, says of the clock in the candidate's process.

Single requests are noisy; series of calls under one request, *audits*, are what decides. The harness costs the reference and
the candidate the same, so that what a candidate's calls take beyond it is time that its own clock has not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import numpy as np

from kernelwright.judge.check.trial import RejectionError
from kernelwright.judge.settings import Settings
from kernelwright.records import Reason
from kernelwright.records.intervals import Interval, upper_bound


@dataclass(frozen=True, slots=True)
class Outside:
    """Time per call that the outer clock saw beyond the inner one, of (candidate, reference), in microseconds."""

    latency_us: float
    single: tuple[list[float], list[float]]
    series: tuple[list[float], list[float]]
    charge_us: float
    """What was added to each call of the candidate."""
    log_ratios: list[float]
    """log(reference / candidate) of each pair of series by the outer clock alone, the reference's harness taken off."""


def confirmed(claimed: Interval, by_series: Interval, hidden_share: float) -> Interval:
    """What the inner clock claims, as far as the outer one, which no candidate can reach, bears it out.

    Args:
        claimed: By the inner clock, charges included.
        by_series: By the outer clock alone. Of short calls it knows little; where it contradicts the claim it prevails.
        hidden_share: What may be missing from the candidate's latency, as a share of it: the interval reaches down to
            what the speedup would be then.
    """
    estimate = min(claimed.estimate, by_series.high)
    low = claimed.low / (1 + hidden_share) if estimate == claimed.estimate else min(claimed.low, by_series.low)
    return Interval(estimate, min(low, estimate), max(min(claimed.high, by_series.high), estimate))


def hidden_us(outside: list[Outside]) -> float:
    """What a candidate's calls may take that neither its own clock nor a charge has seen: a bound, with 95 % confidence.

    The harness costs both sides the same, so that in a series, whose parts differ less than whole calls do, the
    candidate's time outside its clock should be the reference's.
    """
    unexplained = [[mine - median(one.series[1]) - one.charge_us for mine in one.series[0]] for one in outside]
    return max(0.0, upper_bound(unexplained))


def reject_hidden_time(outside: list[Outside], settings: Settings) -> None:
    """Over all processes together: a busy machine disturbs one of them, a candidate that hides time hides it in all."""
    latency_us = median(one.latency_us for one in outside)
    for kind, limit_us in (("single", settings.excess_limit_us), ("series", settings.audit_limit_us)):
        candidate, reference = ([value for one in outside for value in getattr(one, kind)[side]] for side in (0, 1))
        if certain_excess(candidate, reference) > max(limit_us, settings.excess_limit * latency_us):
            raise RejectionError(
                Reason.CLOCK_DISAGREEMENT,
                f"the parent's clock sees {median(candidate) - median(reference):.1f} us a call ({kind}) that the "
                f"candidate's own clock does not; the reference takes {latency_us:.1f} us",
            )


def certain_excess(candidate: list[float], reference: list[float]) -> float:
    """How far the candidate's lower quartile lies above the reference's upper one: what a busy machine, which
    disturbs some calls of either, cannot explain."""
    return float(np.quantile(candidate, 0.25) - np.quantile(reference, 0.75))


def slack_us(*samples: list[float]) -> float:
    """Twice the standard error of the difference of medians: what chance alone explains."""
    total = 0.0
    for sample in samples:
        values = np.asarray(sample)
        spread = 1.4826 * float(np.median(np.abs(values - np.median(values))))
        total += (1.2533 * spread) ** 2 / len(values)
    return 2 * math.sqrt(total)
