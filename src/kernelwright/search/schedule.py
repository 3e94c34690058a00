"""Settings of the judge for each extent of a measurement, and the state of a task in a search over a suite."""

from __future__ import annotations

from dataclasses import dataclass

from kernelwright.judge import Settings
from kernelwright.records import Task
from kernelwright.records.decisions import SCHEDULE, Effort, MeasurementPlan, TaskRecords, judging_bytes
from kernelwright.records.improvement import AUDITS_MAX


def settings_for(measurement: MeasurementPlan, settings: Settings) -> Settings:
    """The judge's settings for a measurement, from those of the run."""
    match measurement.effort:
        case Effort.FIRST_OF_TWO:
            return settings.model_copy(update={"until_certain": True})
        case Effort.EARLY:
            least = max(settings.processes_min, min(SCHEDULE.least_to_stand, settings.processes_max))
            return settings.model_copy(update={"until_certain": True, "processes_min": least})
        case Effort.SETTLING:
            audits = min(AUDITS_MAX, SCHEDULE.settling_series * settings.audits)
            count = measurement.processes
            return settings.model_copy(update={"processes_min": count, "processes_max": count, "audits": audits})
        case Effort.FULL:
            return settings


@dataclass(slots=True, kw_only=True)
class TaskState(TaskRecords):
    """State of one task in a search over a suite."""

    task: Task
    at_work: bool = False
    """True while it is being screened."""

    @property
    def judging_bytes(self) -> int:
        """GPU memory that the judge may take for it."""
        return judging_bytes(self.screened)
