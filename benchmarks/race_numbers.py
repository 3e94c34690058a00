"""Computes the numbers of searched suites: the line of each task, and the sums of a group of runs."""

from __future__ import annotations

import functools
import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from kernelwright.records import Contract, Evaluation, RunDirectory
from kernelwright.records.decisions import BASELINE_POLICY, JUDGED, TaskRecords, TaskStatus, confirmed_best
from kernelwright.records.screened import Screened
from kernelwright.records.tables import BenchEntry, task_results, task_status
from kernelwright.rewrites.wrappers import WRAPPERS

THEIRS = "cuda-l1"
"""Policy of the kernels that CUDA-L1 released."""
GROUPS = {
    "": "CUDA-L1's shapes",
    "h100_": "CUDA-L1's shapes on an H100",
    "today_": "today's shapes",
    "robust_": "robust-kbench",
    "modules_": "modules of networks",
    "modules_bf16_": "modules of networks in bfloat16",
    "other_": "other suites",
}
"""Groups of runs that are summed up together: prefix of their keys, and their name."""
ON_EITHER = ("", "h100_")
"""Groups of the same tasks on two kinds of GPU."""
SUITES = {"kernelbench": "today_", "robust-kbench": "robust_", "modules": "modules_", "modules-bf16": "modules_bf16_"}
"""Groups of the suites that have one each, on whichever GPU."""
Line = dict[str, Any]


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return round(math.exp(sum(logs) / len(logs)), 4) if logs else None


def middle(values: Iterable[float]) -> float | None:
    """Median; None of nothing."""
    found = list(values)
    return round(median(found), 4) if found else None


class Run(RunDirectory):
    """A run directory, or a published one whose estimates are packed without sources and hashes of tasks."""

    def screened(self) -> Iterable[Screened]:  # type: ignore[override]
        """Every estimate."""
        packed = self.path / "estimates.jsonl.gz"
        if not packed.exists():
            yield from super().screened()
            return
        hashes = {one.task: one.task_sha256 for one in self.evaluations()}
        for text in gzip.decompress(packed.read_bytes()).decode().splitlines():
            found = json.loads(text)
            yield Screened(task_sha256=hashes.get(found["task"], ""), **found)

    @property
    def gpu(self) -> str:
        """Name of its GPU; nothing without one."""
        gpus = (self.read_json("environment.json") or {}).get("gpu") or [{}]
        return str(gpus[0].get("name") or "")

    @property
    def searches(self) -> bool:
        """True where a policy proposed the candidates; a run of given candidates searches nothing."""
        return bool((self.read_json("config.json") or {}).get("policy"))

    @property
    def group(self) -> str:
        """Prefix of its keys: that of its suite, and for CUDA-L1's shapes of its GPU."""
        suite = (self.read_json("config.json") or {}).get("suite")
        if suite == THEIRS:
            return "h100_" if "H100" in self.gpu else ""
        return SUITES.get(str(suite), "other_")

    def latest(self) -> dict[str, str]:
        """Date and time of each task's latest evaluation."""
        found: dict[str, str] = {}
        for one in self.evaluations():
            found[one.task] = max(found.get(one.task, ""), one.started)
        return found

    @functools.cached_property
    def dated(self) -> list[tuple[str, Line]]:
        """Date and time of each task's latest evaluation, and where it stands; read once, since several sums ask."""
        latest = self.latest()
        return [(latest.get(line["task"], ""), line) for line in self.lines()]

    def lines(self) -> list[Line]:
        """Status of each task."""
        own: dict[str, list[Evaluation]] = defaultdict(list)
        hashes = {}
        for one in self.evaluations():
            hashes[one.task] = one.task_sha256
            if one.policy not in (BASELINE_POLICY, THEIRS):
                own[one.task].append(one)
        entries = []
        for task in self.read_json("tasks.json") or [{"id": name} for name in self.read_json("config.json")["tasks"]]:
            name, winner = task["id"], confirmed_best(own[task["id"]])
            level = re.search(r"level(\d+)", name)
            sha256 = winner.candidate_sha256 if winner else None
            entries.append(BenchEntry(name, hashes.get(name, ""), int(level[1]) if level else None, sha256))
        found = task_status(self, task_results(self, entries, self.read_json("errors.json") or {}))
        return [line | {"run": self.path.name, "gpu": self.gpu} for line in found]

    def open_tasks(self) -> set[str]:
        """Tasks of which the judge would still take a candidate, once more or for the first time."""
        looks: dict[str, list[Screened]] = defaultdict(list)
        first: dict[str, dict[str, Evaluation]] = defaultdict(dict)
        confirmed: dict[str, dict[str, Evaluation]] = defaultdict(dict)
        for look in self.screened():
            looks[look.task].append(look)
        for one in self.evaluations():
            if one.policy != BASELINE_POLICY:
                (confirmed if one.confirms else first)[one.task][one.candidate_sha256] = one
        count = (self.read_json("config.json") or {}).get("judge") or JUDGED
        return {
            task
            for task, found in looks.items()
            if TaskRecords(found, judged=first[task], confirmed=confirmed[task]).pending(count)
        }

    def carried(self, winners: Mapping[str, str]) -> Iterable[Evaluation]:
        """Evaluations of other GPUs' winners in a run that searches nothing, by task and hash of the winner."""
        if not self.searches:
            yield from (one for one in self.evaluations() if winners.get(one.task) == one.candidate_sha256)

    def released(self) -> dict[str, float | None]:
        """Speedup over eager of CUDA-L1's own kernel by task; None where it does not keep KernelBench's contract."""
        found: dict[str, float | None] = {}
        for one in self.evaluations():
            if one.policy == THEIRS:
                kept = one.contracts[Contract.KERNELBENCH].kept if one.contracts else one.accepted
                if not kept or one.speedup is not None:
                    found[one.task] = one.speedup if kept else None
        return found


def is_counted(line: Line) -> bool:
    """True where a task is decided and its baselines are measured."""
    return line["outcome"] in (TaskStatus.WINNER, TaskStatus.NONE) and line["baselines_measured"]


def ours(line: Line) -> float:
    """Speedup over eager of what the user gets: the winner, or the reference."""
    return line["speedup"] or 1.0


def against_best(line: Line) -> float:
    """Speedup of the user's code over the best baseline; 1 where the winner is that baseline."""
    return line["vs_best_baseline"] if line["speedup"] else 1.0 / line["best_baseline_speedup"]


def only_wraps(line: Line) -> bool:
    """True where the winner is the reference behind torch.compile, a CUDA graph or settings: no rewrite, no kernel."""
    return bool(line["speedup"]) and WRAPPERS.keys() >= set(line["techniques"])


def is_behind(line: Line) -> bool:
    """True where the best baseline is certainly faster than the user's code."""
    if line["speedup"]:
        interval = line["vs_best_baseline_interval"]
        return interval is not None and interval[1] < 1.0
    known = line["best_baseline_interval"]
    return known is not None and known[0] > 1.0


def against_theirs(line: Line, theirs: float | None) -> float:
    """Speedup of the user's code over CUDA-L1's kernel for the task. Where theirs fails its user takes the best baseline."""
    return ours(line) / theirs if theirs else against_best(line)


def part(lines: Sequence[Line], released: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    """Numbers of some tasks; CUDA-L1's kernels by the kind of GPU that measured them."""
    counted = [line for line in lines if is_counted(line)]
    won = [line for line in counted if line["speedup"]]
    behind = sum(map(is_behind, counted))
    ahead = sum(line["ahead"] for line in counted)
    measured = [line for line in lines if line["baselines_measured"]]
    compiled = [line for line in counted if "compile" in line["baselines"]]
    theirs = {name: speedup for kernels in released.values() for name, speedup in kernels.items()}
    beside = [against_theirs(line, theirs[line["task"]]) for line in counted if line["task"] in theirs]
    alike = [
        against_theirs(line, kernels[line["task"]])
        for line in counted
        if line["task"] in (kernels := released.get(line["gpu"], {}))
    ]
    undecided = [line for line in lines if line["outcome"] == TaskStatus.SCREENED and line["estimate"]]
    shares = [line["roofline"]["winner"] for line in won if line["roofline"] and line["roofline"]["winner"]]
    return {
        "asked": len(lines),
        "tasks": len(counted),
        "screened_only": sum(line["outcome"] == TaskStatus.SCREENED for line in lines),
        "untouched": sum(line["outcome"] == TaskStatus.UNTOUCHED for line in lines),
        "verified": len(won),
        "verified_not_below_best_baseline": sum(line["vs_best_baseline"] >= 1.0 for line in won),
        "geomean_vs_eager": geomean(map(ours, counted)),
        "geomean_vs_compile": geomean(ours(line) / line["baselines"]["compile"] for line in compiled),
        "geomean_vs_best_baseline": geomean(map(against_best, counted)),
        "geomean_vs_best_baseline_filled": geomean(line["vs_best_baseline"] or 1.0 for line in counted),
        "geomean_best_baseline_vs_eager": geomean(line["best_baseline_speedup"] for line in counted),
        "floor_tasks": len(measured),
        "floor_vs_eager": geomean(map(ours, measured)),
        "floor_vs_best_baseline": geomean(map(against_best, measured)),
        "median_vs_eager": middle(map(ours, counted)),
        "median_vs_best_baseline": middle(map(against_best, counted)),
        "ahead_of_best_baseline": ahead,
        "ahead_by_wrapper_alone": sum(line["ahead"] and only_wraps(line) for line in counted),
        "geomean_vs_best_baseline_own_code": geomean(
            min(against_best(line), 1.0) if only_wraps(line) else against_best(line) for line in counted
        ),
        "within_noise_of_best_baseline": len(counted) - ahead - behind,
        "behind_best_baseline": behind,
        "geomean_vs_cuda_l1": geomean(beside),
        "tasks_vs_cuda_l1": len(beside),
        "geomean_vs_cuda_l1_same_gpu": geomean(alike),
        "tasks_vs_cuda_l1_same_gpu": len(alike),
        "median_roofline_share": middle(shares),
        # May be fooled, and taken beside other work: no result, only what the judge still has to look at.
        "screened_only_estimates": geomean(line["estimate"] for line in undecided),
    }


def with_levels(lines: Sequence[Line], released: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    """Numbers of all tasks and of each level."""
    levels = sorted({line["level"] for line in lines if line["level"]})
    by_level = {f"level{level}": part([one for one in lines if one["level"] == level], released) for level in levels}
    return part(lines, released) | {"levels": by_level}


def later_by_task(runs: Iterable[Run]) -> list[Line]:
    """One line for each task: of several runs the later one that decides it, without a choice by what they measured.

    A run is later by its latest evaluation of the task, or else by its place in the order given: one that went on with other
    tasks is no later for this one. Of a task that no run decides the line that got furthest stays; of equal ones that whose
    baselines are measured, or else the later.
    """
    found: dict[str, Line] = {}
    order = list(TaskStatus)

    def missing(line: Line) -> tuple[int, bool]:
        """Distance of a line from being decided."""
        return order.index(line["outcome"]), not line["baselines_measured"]

    dated = [one for run in runs for one in run.dated]
    for _, line in sorted(dated, key=lambda one: one[0]):
        known = found.get(line["task"])
        if known is None or is_counted(line) or (not is_counted(known) and missing(line) <= missing(known)):
            found[line["task"]] = line
    return [found[task] for task in dict.fromkeys(line["task"] for _, line in dated)]


def once_on_either(runs: Iterable[Run]) -> list[Line]:
    """One line for each of CUDA-L1's tasks, whichever kind of GPU decided it."""
    return later_by_task(run for run in runs if run.searches and run.group in ON_EITHER)


def summary_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Numbers of all groups, and the lines of their tasks."""
    summary: dict[str, Any] = {}
    released: dict[str, dict[str, float | None]] = defaultdict(dict)
    for run in runs:
        released[run.gpu] |= run.released()
    searched = [run for run in runs if run.searches]
    for group in GROUPS:
        chosen = [run for run in searched if run.group == group]
        if chosen:
            lines = later_by_task(chosen)
            summary |= {f"{group}{key}": value for key, value in with_levels(lines, released).items()}
            summary |= {f"{group}runs": [run.path.name for run in chosen], f"{group}rows": lines}
    pairs = on_both(summary)
    if pairs:
        lines = once_on_either(searched)
        summary["each_once"] = with_levels(lines, released) | {
            "h100_tasks": sum(is_counted(line) and line["run"] in summary["h100_runs"] for line in lines)
        }
        summary["h100_carried"] = {
            "tasks": len(pairs),
            "geomean_vs_best_baseline": geomean(against_best(first) for first, _ in pairs),
            "h100_geomean_vs_best_baseline": geomean(against_best(second) for _, second in pairs),
            "winners_on_both": sum(bool(first["speedup"] and second["speedup"]) for first, second in pairs),
            "winners_alike": sum(is_alike(first, second) for first, second in pairs),
        }
        if lines := carried_lines(summary, runs):
            summary["h100_carried_winners"] = carried_part(lines) | {"rows": lines}
    return summary


def on_both(summary: Mapping[str, Any]) -> list[tuple[Line, Line]]:
    """Lines of the tasks that are decided on the first GPU and on an H100."""
    others = {line["task"]: line for line in summary.get("h100_rows", []) if is_counted(line)}
    rows = [line for line in summary.get("rows", []) if is_counted(line)]
    return [(line, others[line["task"]]) for line in rows if line["task"] in others]


def is_alike(first: Line, second: Line) -> bool:
    """True where both winners are made by the same techniques; their knobs may differ."""
    return bool(first["speedup"] and second["speedup"]) and first["techniques"] == second["techniques"]


def carried_lines(summary: Mapping[str, Any], runs: Iterable[Run]) -> list[Line]:
    """Numbers of the first GPU's winners on an H100, task by task, with those that the H100 found for itself."""
    first = {line["task"]: line for line in summary["rows"] if line["speedup"]}
    own = {line["task"]: line for line in summary["h100_rows"] if line["speedup"] and is_counted(line)}
    hashes = {task: line["candidate_sha256"] for task, line in first.items()}
    judged = {one.task: one for run in runs if run.group == "h100_" for one in run.carried(hashes)}
    return [
        {
            "task": task,
            "speedup": first[task]["speedup"],
            "verdict": one.verdict,
            "reason": one.reason,
            "h100_speedup": one.speedup if one.accepted else None,
            "h100_interval": [one.speedup_low, one.speedup_high] if one.accepted else None,
            "h100_is_improvement": one.is_improvement,
            "h100_own": own[task]["speedup"] if task in own else None,
            "h100_own_interval": [own[task]["low"], own[task]["high"]] if task in own else None,
        }
        for task, one in judged.items()
    ]


def carried_part(lines: Sequence[Line]) -> dict[str, Any]:
    """Sums of `carried_lines`: what a winner keeps, and where a search on the GPU itself is certainly better or worse."""
    timed = [line for line in lines if line["h100_speedup"]]
    both = [line for line in timed if line["h100_own"]]
    return {
        "tasks": len(lines),
        "accepted": len(timed),
        "ahead_of_eager": sum(line["h100_is_improvement"] for line in timed),
        "geomean_vs_eager": geomean(line["speedup"] for line in timed),
        "h100_geomean_vs_eager": geomean(line["h100_speedup"] for line in timed),
        "searched_too": len(both),
        "own_over_carried": geomean(line["h100_own"] / line["h100_speedup"] for line in both),
        "own_certainly_ahead": sum(line["h100_own_interval"][0] > line["h100_interval"][1] for line in both),
        "own_certainly_behind": sum(line["h100_own_interval"][1] < line["h100_interval"][0] for line in both),
    }
