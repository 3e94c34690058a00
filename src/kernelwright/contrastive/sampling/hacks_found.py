"""Writes the cheats that training found to a folder, each once, for people to read."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from kernelwright.contrastive.hacks.structure import identity
from kernelwright.contrastive.rollouts import RolloutLog
from kernelwright.contrastive.sampling.metrics import CHEATING
from kernelwright.records import Evaluation, RunDirectory


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
