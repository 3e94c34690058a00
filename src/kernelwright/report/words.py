"""Puts findings into sentences for people. Reasons and labels have their words in `records.reasons`."""

from __future__ import annotations

from kernelwright.records import Evaluation


def near_miss(evaluation: Evaluation) -> str:
    """Sentence on how far a near miss falls short and how to settle it; empty for anything else."""
    if not evaluation.is_near_miss:
        return ""
    wanted = 1.0 + (evaluation.noise_floor or 0.0)
    processes = evaluation.processes_to_settle
    settle = "more processes than can be asked for would be needed; quiet the machine"
    if processes is not None:
        settle = f"--processes {processes} is likely to settle it"
    return f"the lower end {evaluation.speedup_low:.3f} is not above {wanted:.3f}, 1 + the noise floor; {settle}"
