"""Computes every published number of a run again from its raw timings, and says which differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from enum import StrEnum
from typing import Any

from kernelwright.records import Evaluation, RunDirectory, read_objects
from kernelwright.records.decisions import OVERWRITING
from kernelwright.records.improvement import clears_noise_floor
from kernelwright.records.scoring import score, score_ratios
from kernelwright.records.tables import ENTRIES, BenchEntry, table_json, task_results

TOLERANCE = 1e-6
"""Relative difference that other versions of numpy and libm may make; our choice."""
CONFIRMATIONS = "confirmations.jsonl"
_NUMBERS = ("speedup", "speedup_low", "speedup_high", "noise_floor", "reference_us", "candidate_us")
_FIRST_SCORED = "2026-11-23"
_CONFIRMED = ("speedup", "low", "high", "noise_floor", "is_improvement")
_OLD_NAMES = {"is_gain": "is_improvement"}
"""Fields of confirmations that were written under another name before 2026-11-24."""

_BY_RULES = re.compile(r"tasks\[\d+\]\.(outcome|reason)")
"""Words of a table for pending work: they follow from the rules that it had then, and are no numbers."""


class RescoreState(StrEnum):
    """Outcome of scoring a run again."""

    SAME = "same"
    DIFFERS = "differs"
    TOO_OLD = "too-old"
    """Part of it lacks what its numbers need; nothing else differs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that does not follow from the records."""

    where: str
    """File, and the place in it."""
    name: str
    recorded: Any
    computed: Any


@dataclass(slots=True)
class Rescore:
    """Result of scoring a run again."""

    scored: int = 0
    """Numbers that were computed again."""
    differences: list[Difference] = field(default_factory=list)
    too_old: list[str] = field(default_factory=list)
    """Places that cannot be scored again, each with the reason."""

    @property
    def state(self) -> RescoreState:
        """Outcome of all: a difference outweighs what cannot be computed."""
        if self.differences:
            return RescoreState.DIFFERS
        return RescoreState.TOO_OLD if self.too_old else RescoreState.SAME

    def compare(self, where: str, recorded: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
        """Note each number that differs."""
        for name, found in computed.items():
            self.scored += 1
            if not _same(recorded.get(name), found):
                self.differences.append(Difference(where, name, recorded.get(name), found))

    def to_json(self) -> dict[str, Any]:
        """The object of `rescore --json`."""
        return {
            "state": self.state.value,
            "scored": self.scored,
            "differences": [asdict(one) for one in self.differences],
            "too_old": self.too_old,
        }


def rescore(run: RunDirectory) -> Rescore:
    """Compute every published number of a run again: of evaluations, confirmed schedules, the table and the summary.

    Raises:
        UsageError: a file of the run cannot be read.
    """
    result = Rescore()
    for number, evaluation in enumerate(run.evaluations(), start=1):
        _evaluation(result, f"evaluations.jsonl, record {number} ({evaluation.task})", evaluation)
    _confirmations(result, run)
    _table(result, run)
    return result


def _evaluation(result: Rescore, where: str, evaluation: Evaluation) -> None:
    recorded: dict[str, Any] = {name: getattr(evaluation, name) for name in _NUMBERS}
    if not evaluation.blocks and evaluation.scoring is None and not any(value is not None for value in recorded.values()):
        return  # rejected, or never timed: there is no number
    if not evaluation.accepted:
        result.differences.append(Difference(where, "speedup", evaluation.speedup, None))
        return
    if evaluation.scoring is None:
        result.too_old.append(f"{where}: written before {_FIRST_SCORED}, without the outer clock's series")
        return
    try:
        found = score(evaluation.blocks, evaluation.series, evaluation.scoring)
    except (ValueError, ZeroDivisionError) as error:
        result.differences.append(Difference(where, "speedup", evaluation.speedup, f"cannot be computed: {error}"))
        return
    computed: dict[str, Any] = dict(found.numbers)
    recorded |= {f"versus {name}": ratio for name, ratio in evaluation.versus.items()}
    computed |= {f"versus {name}": ratio for name, ratio in computed.pop("versus").items()}
    computed |= {name: None for name in recorded if name not in computed}
    computed["is_improvement"] = evaluation.accepted and clears_noise_floor(found.speedup.low, found.noise_floor)
    recorded["is_improvement"] = evaluation.is_improvement
    result.compare(where, recorded, computed)
    pairs = zip(evaluation.blocks, found.blocks, strict=True)
    for index, (block, again) in enumerate(pairs):
        result.compare(f"{where}, block {index}", {"candidate_us": block.candidate_us}, {"candidate_us": again.candidate_us})


def _confirmations(result: Rescore, run: RunDirectory) -> None:
    """Schedules that fresh processes have timed, and the summary's best; a model's costs have no processes."""
    by_digest: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(map(_renamed, read_objects(run.path / CONFIRMATIONS)), start=1):
        where = f"{CONFIRMATIONS}, record {number}"
        by_digest[str(line.get("digest"))] = line
        if not line.get("processes") or line.get("speedup") is None:
            continue
        if not line.get("log_ratios"):
            result.too_old.append(f"{where}: written before {_FIRST_SCORED}, without its ratios")
            continue
        try:
            interval, floor = score_ratios(line["log_ratios"], line["null_log_ratios"])
        except (KeyError, TypeError, ValueError) as error:
            result.differences.append(Difference(where, "speedup", line["speedup"], f"cannot be computed: {error!r}"))
            continue
        improves = line.get("wrong") is None and clears_noise_floor(interval.low, floor)
        result.compare(where, line, dict(zip(_CONFIRMED, (*astuple(interval), floor, improves), strict=True)))
    summary = run.read_json("summary.json")
    best = summary.get("best") if isinstance(summary, dict) else None
    if isinstance(best, dict) and best.get("digest") in by_digest:
        confirmed = by_digest[best["digest"]]
        result.compare("summary.json, best", _renamed(best), {name: confirmed.get(name) for name in _CONFIRMED})


def _renamed(confirmation: Mapping[str, Any]) -> dict[str, Any]:
    return {_OLD_NAMES.get(name, name): value for name, value in confirmation.items()}


def _table(result: Rescore, run: RunDirectory) -> None:
    table = run.read_json("table.json")
    if not isinstance(table, dict):
        return
    entries = run.read_json(ENTRIES)
    if entries is None:
        result.too_old.append(f"table.json: written before {_FIRST_SCORED}, without {ENTRIES}")
        return
    # Tables of before 2026-11-24 count every baseline as the best where it was the fastest, and have no lines of tasks.
    never_best = OVERWRITING if "tasks" in table else frozenset[str]()
    results = task_results(run, [BenchEntry(**entry) for entry in entries], run.read_json("errors.json") or {}, never_best)
    recorded, computed = dict(_leaves(table)), dict(_leaves(table_json(run, results)))
    recorded, computed = (
        {name: value for name, value in leaves.items() if not _BY_RULES.fullmatch(name)} for leaves in (recorded, computed)
    )
    if "tasks" not in table:
        computed = {name: value for name, value in computed.items() if name in recorded}
    result.compare("table.json", recorded, computed)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of a JSON value, by its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _same(recorded: Any, computed: Any) -> bool:
    if isinstance(recorded, list | tuple) and isinstance(computed, list | tuple):
        return len(recorded) == len(computed) and all(map(_same, recorded, computed))
    if isinstance(recorded, bool) or isinstance(computed, bool):
        return recorded is computed
    if isinstance(recorded, int | float) and isinstance(computed, int | float):
        return math.isclose(recorded, computed, rel_tol=TOLERANCE, abs_tol=1e-12)
    return bool(recorded == computed)
