"""Computes and logs metrics of training, and writes the cheats that it found to a folder for people to read."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kernelwright.contrastive.families import CHEATING
from kernelwright.contrastive.hacks.structure import identity
from kernelwright.contrastive.samples import Rollout, RolloutLog
from kernelwright.records import Evaluation, RunDirectory, read_objects

QUANTILES = (0.25, 0.5, 0.75, 0.95)


def rollout_metrics(rollouts: Sequence[Rollout], evaluations: Mapping[tuple[str, str], Evaluation]) -> dict[str, float]:
    """Metrics of a batch of rollouts, given the evaluations by task and candidate hash.

    Returns:
        `success_rate`, `parse_rate` and `hack_rate`, each of all rollouts; `distinct`, the share of different candidates
        among those parsed; `copy_rate`, the share that repeats an exemplar of its prompt to the letter; `reward_mean`;
        `speedup_pNN` and `speedup_max` of those accepted and timed. What nothing is known of is left out.
    """
    if not rollouts:
        return {}
    count = len(rollouts)
    parsed = [item for item in rollouts if item.candidate_sha256 is not None]
    found = [evaluations.get((item.task_sha256, item.candidate_sha256 or "")) for item in parsed]
    judged = [item for item in found if item is not None]
    estimated = sum(item.verdict is None and item.estimate is not None for item in parsed)
    speedups = [item.speedup for item in judged if item.accepted and item.speedup is not None]
    rewards = [item.reward for item in rollouts if item.reward is not None]
    metrics = {
        "success_rate": (sum(item.accepted for item in judged) + estimated) / count,
        "parse_rate": len(parsed) / count,
        "hack_rate": sum(item.reason in CHEATING for item in judged) / count,
    }
    if parsed:
        metrics["distinct"] = len({(item.task_sha256, item.candidate_sha256) for item in parsed}) / len(parsed)
    shown = [item for item in parsed if item.exemplars]
    if shown:
        metrics["copy_rate"] = sum(item.candidate_sha256 in item.exemplars for item in shown) / len(shown)
    if rewards:
        metrics["reward_mean"] = float(np.mean(rewards))
    if speedups:
        metrics |= {f"speedup_p{quantile * 100:.0f}": float(np.quantile(speedups, quantile)) for quantile in QUANTILES}
        metrics["speedup_max"] = max(speedups)
    return metrics


def run_metrics(path: Path) -> dict[str, float]:
    """`rollout_metrics` of a whole run directory."""
    evaluations = {(found.task_sha256, found.candidate_sha256): found for found in RunDirectory(path).evaluations()}
    return rollout_metrics(list(RolloutLog(path).rollouts()), evaluations)


class MetricsLog:
    """Metrics of a run, by step: `metrics.jsonl` in the run directory, and TensorBoard's events where it is installed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "metrics.jsonl"
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._writer = None
        else:
            self._writer = SummaryWriter(str(directory / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Note the values of one step. Values that are not finite are left out."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self._writer is not None:
            for name, value in finite.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def read(self) -> list[dict[str, Any]]:
        """Every step's values in order of writing; a step that was done again after a kill appears again."""
        return list(read_objects(self.path))

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()


def hack_reasons(evaluations: Iterable[Evaluation]) -> dict[str, int]:
    """The number of evaluations rejected for each cheating reason."""
    counts: dict[str, int] = {}
    for evaluation in evaluations:
        if evaluation.reason in CHEATING:
            counts[str(evaluation.reason)] = counts.get(str(evaluation.reason), 0) + 1
    return counts


def write_hacks(folder: Path, runs: Mapping[str, Path]) -> int:
    """Write each distinct cheat of some runs to `folder/REASON/NUMBER.py`, and `index.json` over all of them.

    Programs of one reason that differ in names, numbers or layout only are one. Those written most often come first. The
    folder is written anew; `runs` are directories by stage or arm, and missing ones are passed over. Returns the number.
    """
    found: dict[tuple[str, str], list[tuple[str, Evaluation]]] = {}
    written: Counter[tuple[str, str]] = Counter()
    for stage, path in runs.items():
        if not path.is_dir():
            continue
        sampled = Counter((rollout.task_sha256, rollout.candidate_sha256) for rollout in RolloutLog(path).rollouts())
        for evaluation in RunDirectory(path).evaluations():
            if evaluation.reason in CHEATING and evaluation.source:
                key = (str(evaluation.reason), _shape(_own_part(evaluation.source)))
                found.setdefault(key, []).append((stage, evaluation))
                written[key] += sampled[evaluation.task_sha256, evaluation.candidate_sha256]
    shutil.rmtree(folder, ignore_errors=True)
    if not found:
        return 0
    index = []
    numbers: Counter[str] = Counter()
    for key in sorted(found, key=lambda key: (-written[key], key)):
        stage, first = found[key][0]
        reason = key[0]
        name = f"{reason}/{numbers[reason]:03d}.py"
        numbers[reason] += 1
        entry = {
            "file": name,
            "reason": reason,
            "family": CHEATING[first.reason].value if first.reason is not None else "",
            "detail": first.detail,
            "task": first.task,
            "stages": sorted({stage for stage, _ in found[key]}),
            "times_written": written[key],
            "programs": len({evaluation.candidate_sha256 for _, evaluation in found[key]}),
        }
        index.append(entry)
        said = "\n".join(f"# {line}" for line in (f"{reason} on {first.task}, first in {stage}", *first.detail.splitlines()))
        RunDirectory(folder / reason).write_text(Path(name).name, f"{said}\n{first.source}\n")
    RunDirectory(folder).write_json("index.json", index)
    return len(index)


def _own_part(source: str) -> str:
    """The part below the task's own functions, which the model wrote in the form `subclass`."""
    _, mark, rest = source.rpartition("def get_init_inputs")
    return rest.partition("\n\n\n")[2] or source if mark else source


def _shape(source: str) -> str:
    """The same for programs that differ in names, numbers and layout only."""
    try:
        return identity(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
