"""Judges torch.compile of a user's own model: which is right, eager or compiled?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from kernelwright.judge import Judge
from kernelwright.judge.judge import Progress
from kernelwright.records import Candidate, Evaluation, Label, Task
from kernelwright.records.decisions import interval_in_words
from kernelwright.rewrites.wrappers import COMPILE_MODES, compiled_source

_WITHOUT_TRUTH = ("own-other-mode", "own-mode-again")
"""Input sets in which the model may draw random numbers, so that its own answer stands for the truth."""
_EXPECTED = frozenset({Label.WRAPPER_ONLY, Label.LIBRARY_CALL, Label.CUDA_GRAPH, Label.NOT_RETIMED})
"""Labels that say nothing new of torch.compile."""


@dataclass(frozen=True, slots=True)
class ModeVerdict:
    """Verdict on what one mode of torch.compile makes of a model."""

    mode: str
    """One of `COMPILE_MODES`."""
    evaluation: Evaluation

    @property
    def errors(self) -> dict[str, dict[str, Any]]:
        """Relative errors (root mean square) against float64 by input set: of `eager`, `compiled`, and what is `allowed`."""
        checks = self.evaluation.checks
        if Label.STOCHASTIC_TASK in self.evaluation.labels or "truth" in checks:
            return {}
        return {
            name: {key: found[where]["rms"] for key, where in _ERRORS.items()}
            for name, found in checks.get("sets", {}).items()
            if name not in _WITHOUT_TRUTH
        }

    def findings(self) -> Iterator[tuple[str, str]]:
        """Findings, one line each: kind and words."""
        found, errors = self.evaluation, self.errors
        yield "verdict", str(found.verdict)
        missing = dict(found.checks.get("missing", {}))
        if found.reason is not None:
            missing.setdefault(found.reason.value, found.detail.partition("\nTo change: ")[0])
        for reason, detail in missing.items():
            yield "deviation", f"{reason}: {detail}"
        if not errors:
            yield "error", "none against float64: there is no such truth of this model, eager's answer stands for it"
        else:
            eager, compiled = (median(_number(one[who]) for one in errors.values()) for who in ("eager", "compiled"))
            nearer = sum(_number(one["compiled"]) < _number(one["eager"]) for one in errors.values())
            farther = sum(_number(one["compiled"]) > _number(one["eager"]) for one in errors.values())
            yield (
                "error",
                (
                    f"{compiled:.2e} against float64, eager's {eager:.2e} (medians of {len(errors)} input sets); "
                    f"nearer than eager on {nearer}, farther on {farther}"
                ),
            )
            name, worst = max(
                errors.items(), key=lambda item: _number(item[1]["compiled"]) / max(item[1]["allowed"], 1e-300)
            )
            yield (
                "nearest",
                (
                    f"to its limit on `{name}`: {_number(worst['compiled']):.2e}, eager's {_number(worst['eager']):.2e}, "
                    f"allowed {_number(worst['allowed']):.2e}"
                ),
            )
        if found.speedup is not None:
            yield "speedup", interval_in_words(found)
        for label in found.labels:
            if label not in _EXPECTED:
                yield "label", f"{label}: {label.meaning}"
        for name, why in found.checks.get("skipped", {}).items():
            yield "left out", f"`{name}`: {why}"


_ERRORS = {"eager": "reference", "compiled": "error", "allowed": "allowed"}
"""Names of the errors of one input set, and the keys of a record that they are stored under."""


def _number(stored: float | None) -> float:
    """An error of a record, which holds None for infinity."""
    return float("inf") if stored is None else stored


def judge_modes(judge: Judge, task: Task) -> Iterator[ModeVerdict]:
    """Judge what each mode of torch.compile makes of a task's own model. `reduce-overhead` is another one on a GPU alone.

    Raises:
        TaskError, InfrastructureError: as `Judge.evaluate`.
    """
    tell = judge.progress
    for mode in COMPILE_MODES:
        if mode == "reduce-overhead" and judge.device.type == "cpu":
            continue
        judge.progress = partial(_tell, tell, mode)
        candidate = Candidate(source=compiled_source(task, mode), policy="torch.compile", techniques=(mode,))
        yield ModeVerdict(mode, judge.evaluate(task, candidate))
    judge.progress = tell


def _tell(progress: Progress, mode: str, text: str) -> None:
    progress(f"{mode}: {text}")
