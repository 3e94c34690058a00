"""Defines the one rule of an improvement, for modules and for schedules of machine code.

Asked through `Evaluation.is_improvement` and `Confirmation.is_improvement`; `rescore` computes it again.
"""

from __future__ import annotations


def clears_noise_floor(speedup_low: float | None, noise_floor: float | None) -> bool:
    """True when the lower end of a speedup's interval is above 1 + the noise floor.

    `speedup_low` is None where nothing was timed, `noise_floor` where no A/A comparison was made.
    """
    return speedup_low is not None and speedup_low > 1.0 + (noise_floor or 0.0)
