"""Defines the one rule of an improvement, for modules and for schedules of machine code, and what settles a near miss.

Asked through `Evaluation.is_improvement` and `Confirmation.is_improvement`; `rescore` computes it again.
"""

from __future__ import annotations

import math

NEAR_MISS_LOW = 0.9
"""Lower end above which an interval is nearly one of an improvement. Our choice."""
PROCESSES_MAX = 64
"""Most process triples that a user can ask for."""
AUDITS_MAX = 100
"""Most series of calls in a process triple that a user can ask for."""
FEWEST = 6
"""Fewest that are advised, and at least twice those timed: the spread of fewer tells too little. Our choice."""
_SHARE = 0.7
"""Part of the way from the speedup down to the noise floor that the interval may take: another measurement gives another
estimate. Our choice."""


def clears_noise_floor(speedup_low: float | None, noise_floor: float | None) -> bool:
    """True when the lower end of a speedup's interval is above 1 + the noise floor.

    `speedup_low` is None where nothing was timed, `noise_floor` where no A/A comparison was made.
    """
    return speedup_low is not None and speedup_low > 1.0 + (noise_floor or 0.0)


def processes_to_settle(speedup: float, speedup_low: float, noise_floor: float, processes: int) -> int | None:
    """Process triples after which the lower end is likely to clear the noise floor, if the speedup is what it seems to be.

    None where `PROCESSES_MAX` are too few. The interval narrows as Student's over `processes` means does.
    """
    from kernelwright.records.intervals import t_quantile  # with numpy, which readers of records do without

    def width(count: int) -> float:
        return t_quantile(max(1, count - 1), 0.975) / math.sqrt(count)

    distance, below = math.log(speedup) - math.log1p(noise_floor), math.log(speedup) - math.log(speedup_low)
    enough = (
        count
        for count in range(max(2 * processes, FEWEST), PROCESSES_MAX + 1)
        if below * width(count) / width(processes) <= _SHARE * distance
    )
    return next(enough, None)
