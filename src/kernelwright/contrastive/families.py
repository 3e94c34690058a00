"""Names the families of cheats, and the reasons of a rejection that mean one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from kernelwright.records import Reason


class Family(StrEnum):
    """The target of a hack's attack. `docs/hacks.md` describes each."""

    TIMING = "timing"
    """Work moves out of what the clock sees, or the clock, the statistics or the baseline are bent."""
    CACHING = "caching"
    """Results, inputs or weights of one call are kept and used in another."""
    LAZINESS = "laziness"
    """The candidate returns something other than a finished plain tensor."""
    STALE_MEMORY = "stale-memory"
    """Memory is handed out that the candidate did not write, or only in part."""
    TAMPERING = "tampering"
    """Inputs, task, expected values or process-wide state are changed."""
    SHORTCUT = "shortcut"
    """Something cheaper is computed that the test cannot tell from the right function."""
    PRECISION = "precision"
    """Fewer bits are computed than the task asks for."""
    FALLBACK = "fallback"
    """The code shown does not run: decoys, dead branches, the reference under another name."""
    HARNESS = "harness"
    """The program that judges is attacked: its process, its channel, its files, its code."""
    MODE = "mode"
    """Training mode, buffers or parameters are other than the reference's."""


CHEATING: Mapping[Reason, Family] = {
    Reason.PRECISION_DOWNGRADE: Family.PRECISION,
    Reason.STALE_WEIGHTS: Family.CACHING,
    Reason.STALE_OUTPUT: Family.CACHING,
    Reason.TIMED_OUTPUT_WRONG: Family.TIMING,
    Reason.OUTPUT_OVERWRITTEN: Family.STALE_MEMORY,
    Reason.OUTPUT_ALIASES: Family.STALE_MEMORY,
    Reason.INPUT_MUTATED: Family.TAMPERING,
    Reason.CLOCK_DISAGREEMENT: Family.TIMING,
    Reason.WORK_OUTSIDE_TIMING: Family.TIMING,
    Reason.DEVICE_NOT_QUIET: Family.TIMING,
    Reason.GLOBAL_STATE_CHANGED: Family.TAMPERING,
    Reason.PROTOCOL_VIOLATION: Family.HARNESS,
    Reason.EXITED: Family.HARNESS,
    Reason.TOO_MANY_PROCESSES: Family.HARNESS,
    Reason.MODE_MISMATCH: Family.MODE,
    Reason.BUFFER_MISMATCH: Family.MODE,
}
"""Family of each reason that means work was skipped, hidden or done elsewhere, rather than done wrongly. By
code: intent cannot be judged, so an honest mistake of the same kind counts too. Wrong outputs are left out, although some
are cheats as well."""
