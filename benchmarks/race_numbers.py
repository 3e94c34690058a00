"""Computes the numbers of searched suites from their runs: the line of each task, and of each released kernel."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kernelwright.records import Contract, Evaluation, RunDirectory
from kernelwright.records.decisions import BASELINE_POLICY, JUDGED, TaskRecords, TaskStatus, confirmed_best
from kernelwright.records.intervals import ratio_interval
from kernelwright.records.models import Precision
from kernelwright.records.scoring import log_ratios
from kernelwright.records.screened import Screened
from kernelwright.records.tables import REFERENCE, BenchEntry, task_results, task_status
from kernelwright.rewrites.wrappers import WRAPPERS

THEIRS = "cuda-l1"
"""Policy of the kernels that CUDA-L1 released, and the suite of its tasks."""
SUITES = {
    THEIRS: "CUDA-L1's shapes",
    "kernelbench": "today's shapes",
    "robust-kbench": "robust-kbench",
    "modules": "modules in float32",
    "modules-bf16": "modules in bfloat16",
}
"""Searched suites, and their names on a page."""
STOCK = ("compile", "reduce-overhead-fresh", "max-autotune-fresh", "cudagraph-fresh", "cudnn", "channels-last")
"""The stock baselines beside eager. Each keeps the contract of a drop-in: no later call overwrites its output."""
TRIPLES = 3
"""Least number of process triples of an evaluation whose A/A interval counts."""
Line = dict[str, Any]


class Run(RunDirectory):
    """A run directory, and what its records say of each task."""

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """What was asked for."""
        return self.read_json("config.json") or {}

    @property
    def gpu(self) -> str:
        """Name of its GPU; nothing without one."""
        gpus = (self.read_json("environment.json") or {}).get("gpu") or [{}]
        return str(gpus[0].get("name") or "")

    @property
    def searches(self) -> bool:
        """True where a policy proposed the candidates; a run of given candidates searches nothing."""
        return bool(self.config.get("policy"))

    @functools.cached_property
    def own(self) -> Mapping[str, Sequence[Evaluation]]:
        """Evaluations of candidates, by task."""
        found = defaultdict(list)
        for one in self.evaluations():
            if one.policy not in (BASELINE_POLICY, THEIRS):
                found[one.task].append(one)
        return found

    @functools.cached_property
    def span(self) -> tuple[str, str]:
        """Date and time of the first and the last evaluation; empty without one."""
        times = sorted(one.started for one in self.evaluations())
        return (times[0], times[-1]) if times else ("", "")

    @functools.cached_property
    def dated(self) -> list[tuple[str, Line]]:
        """Date and time of each task's latest evaluation, and where it stands."""
        latest: dict[str, str] = {}
        hashes = {}
        for one in self.evaluations():
            latest[one.task] = max(latest.get(one.task, ""), one.started)
            hashes[one.task] = one.task_sha256
        entries = []
        winners = {}
        for task in self.read_json("tasks.json") or [{"id": name} for name in self.config["tasks"]]:
            name = task["id"]
            winner = winners[name] = confirmed_best(self.own.get(name, ()))
            level = re.search(r"level(\d+)", name)
            sha256 = winner.candidate_sha256 if winner else None
            entries.append(BenchEntry(name, hashes.get(name, ""), int(level[1]) if level else None, sha256))
        results = task_results(self, entries, self.read_json("errors.json") or {})
        found = []
        for line, result in zip(task_status(self, results), results, strict=True):
            winner = winners[line["task"]] if line["speedup"] else None
            same = [one for one in self.own[line["task"]] if winner and one.candidate_sha256 == winner.candidate_sha256]
            more = {"run": self.path.name, "gpu": self.gpu, "beside": sorted(winner.versus) if winner else []}
            more |= {"evaluations": len(same), "intervals": result.intervals}
            found.append((latest.get(line["task"], ""), line | more))
        return found

    def open_tasks(self) -> set[str]:
        """Tasks of which the judge would still take a candidate, once more or for the first time."""
        looks: dict[str, list[Screened]] = defaultdict(list)
        for look in self.screened():
            looks[look.task].append(look)
        count = self.config.get("judge") or JUDGED
        return {task for task, found in looks.items() if TaskRecords.of([*found, *self.own.get(task, ())]).pending(count)}


def is_counted(line: Line) -> bool:
    """True where a task is decided and its baselines are measured."""
    return line["outcome"] in (TaskStatus.WINNER, TaskStatus.NONE) and line["baselines_measured"]


def ours(line: Line) -> float:
    """Speedup over eager of what the user gets: the winner of a decided task, or the reference."""
    return (line["speedup"] or 1.0) if is_counted(line) else 1.0


def against_best(line: Line) -> float:
    """Speedup of the user's code over the best stock baseline."""
    if is_counted(line) and line["speedup"]:
        return float(line["vs_best_baseline"])
    return 1.0 / (line["best_baseline_speedup"] or 1.0)


def only_wraps(line: Line) -> bool:
    """True where the winner is the reference behind torch.compile, a CUDA graph or settings: no rewrite, no kernel."""
    return bool(line["speedup"]) and WRAPPERS.keys() >= set(line["techniques"])


def is_behind(line: Line) -> bool:
    """True where the best stock baseline is certainly faster than what the user gets from a decided task."""
    if line["speedup"]:
        interval = line["vs_best_baseline_interval"]
        return interval is not None and interval[1] < 1.0
    known = line["best_baseline_interval"]
    return known is not None and known[0] > 1.0


def against_theirs(line: Line, theirs: float | None) -> float:
    """Speedup of the user's code over CUDA-L1's kernel for the task. Where theirs fails its user takes the best baseline."""
    return ours(line) / theirs if theirs else against_best(line)


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


def with_best(line: Line, measured: Sequence[Line]) -> Line:
    """A line with the best stock baseline: the fastest that any run measured for the task on the same kind of GPU.

    Where that is another run's, the ratio is a quotient of two speedups over eager.
    """
    gains = {
        name: (gain, other) for other in measured for name, gain in other["baselines"].items() if name in STOCK and gain
    }
    for other in measured:
        gains |= {
            name: (gain, other)
            for name, gain in other["baselines"].items()
            if gain and name in gains and gain > gains[name][0]
        }
    name, (gain, other) = max(gains.items(), key=lambda one: one[1][0], default=(REFERENCE, (1.0, line)))
    found = line | {"missing": [stock for stock in STOCK if stock not in gains]}
    if gain <= (line["best_baseline_speedup"] or 1.0):
        return found
    interval = other["intervals"].get(name)
    ends = interval or (gain, gain)
    found |= {"best_baseline": name, "best_baseline_speedup": gain, "best_baseline_interval": interval, "beside": []}
    if line["speedup"]:
        versus = (line["low"] / ends[1], line["high"] / ends[0])
        found |= {"vs_best_baseline": line["speedup"] / gain, "vs_best_baseline_interval": versus}
        found["ahead"] = bool(line["ahead"]) and versus[0] > 1.0
    return found


def suite_rows(runs: Sequence[Run]) -> list[Line]:
    """The line of each task of a suite: its last decision, against the best stock baseline, and what came before."""
    lines = [line for run in runs for _, line in run.dated]
    rows = []
    for last in later_by_task(runs):
        here = [line for line in lines if line["task"] == last["task"]]
        alike = [line for line in here if line["gpu"] == last["gpu"]]
        decisions = sorted(
            (when, line["run"])
            for run in runs
            for when, line in run.dated
            if line["task"] == last["task"] and is_counted(line)
        )
        first = next((line for line in here if decisions and line["run"] == decisions[0][1]), last)
        row = with_best(last, alike)
        row |= {"searches": sum(line["screened"] > 0 for line in here), "decisions": len(decisions)}
        row["first_vs_best"] = against_best(with_best(first, [line for line in here if line["gpu"] == first["gpu"]]))
        rows.append({key: value for key, value in row.items() if key != "intervals"})
    return rows


def released_rows(runs: Iterable[Run]) -> list[Line]:
    """The last evaluation of each of CUDA-L1's own kernels that was judged under both contracts."""
    found = {}
    for run in runs:
        for one in run.evaluations():
            if one.policy == THEIRS and one.contracts:
                kept = {str(contract): one.contracts[contract].kept for contract in Contract}
                found[one.task] = {
                    **{"task": one.task, "run": run.path.name, "gpu": run.gpu, "reason": one.reason, "kept": kept},
                    **{"speedup": one.speedup, "low": one.speedup_low, "high": one.speedup_high},
                    "is_improvement": one.is_improvement,
                }
    return list(found.values())


def carried_rows(rows: Sequence[Line], runs: Sequence[Run]) -> list[Line]:
    """An H200's winners that an H100 judged from the same text."""
    of_hash = {
        (line["task"], line["candidate_sha256"]): line
        for run in runs
        if run.searches and "H200" in run.gpu
        for _, line in run.dated
        if line["speedup"]
    }
    found = {}
    for run in runs:
        if not run.searches and "H100" in run.gpu:
            for one in run.evaluations():
                first = of_hash.get((one.task, one.candidate_sha256))
                if first:
                    found[one.task] = {
                        **{"task": one.task, "run": run.path.name, "h200": first["speedup"], "reason": one.reason},
                        **{"h100": one.speedup if one.accepted else None, "is_improvement": one.is_improvement},
                    }
    return list(found.values())


def repeated(runs: Iterable[Run]) -> dict[str, float]:
    """How far two measurements of the same text in two runs on one kind of GPU lie apart."""
    found: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for run in runs:
        for one in run.evaluations():
            if (
                one.policy != BASELINE_POLICY
                and one.accepted
                and one.speedup
                and Precision.of(one.checks) is Precision.DEFAULT
            ):
                found[run.gpu, one.task_sha256, one.candidate_sha256][run.path.name] = one.speedup
    apart = [max(speedups.values()) / min(speedups.values()) - 1.0 for speedups in found.values() if len(speedups) > 1]
    return {"texts": len(apart), "median": float(np.median(apart)), "ninth_decile": float(np.quantile(apart, 0.9))}


def references_alike(runs: Iterable[Run]) -> dict[str, int]:
    """How often the interval of the reference against its second process holds 1."""
    held = []
    for run in runs:
        for one in run.evaluations():
            processes = log_ratios(one.blocks, null=True) if all(block.null_us for block in one.blocks) else []
            if len(processes) >= TRIPLES and all(processes):
                held.append(not ratio_interval(processes).is_decided)
    return {"evaluations": len(held), "share": sum(held) / len(held)}


def run_row(run: Run) -> Line:
    """Where and when a run was made, and what came of it."""
    environment = run.read_json("environment.json") or {}
    gpus, packages = environment.get("gpu") or [{}], environment.get("packages") or {}
    lines = [line for _, line in run.dated] if run.searches else []
    counted = [line for line in lines if is_counted(line)]
    kinds = Counter(
        THEIRS if one.policy == THEIRS else BASELINE_POLICY if one.policy == BASELINE_POLICY else "own"
        for one in run.evaluations()
    )
    return {
        **{"run": run.path.name, "suite": run.config.get("suite"), "searches": run.searches, "gpu": run.gpu},
        **{"gpus": len(run.config.get("devices") or [0]), "driver": gpus[0].get("driver_version")},
        **{"torch": packages.get("torch"), "triton": packages.get("triton")},
        **{"commit": str(environment.get("commit"))[:8], "began": run.span[0], "ended": run.span[1]},
        **{"asked": len(run.config["tasks"]), "baselines": run.config.get("baselines"), "evaluations": dict(kinds)},
        **{"estimates": sum(1 for _ in run.screened()), "decided": len(counted)},
        "winners": sum(bool(line["speedup"]) for line in counted),
    }


def names_of(runs: Iterable[Run]) -> dict[str, str]:
    """Operators of KernelBench's tasks, from the names of their files, by level and number."""
    names = {}
    for run in runs:
        for task in run.read_json("tasks.json") or ():
            file = re.search(r"(level\d+)/(\d+)_([^/]+)\.py$", task.get("origin") or "")
            if file:
                names[f"{file[1]}/{file[2]}"] = " ".join(file[3].replace("_", " ").split())
    return names


def summary_of(runs: Sequence[Run]) -> dict[str, Any]:
    """All numbers, from records alone. Of equal records a later run's count."""
    runs = sorted(runs, key=lambda run: (run.span, run.path.name))
    searched = [run for run in runs if run.searches]
    rows = {name: suite_rows([run for run in searched if run.config.get("suite") == name]) for name in SUITES}
    return {
        "runs": [run_row(run) for run in runs],
        "names": names_of(runs),
        "suites": rows,
        "released": released_rows(runs),
        "carried": carried_rows(rows[THEIRS], runs),
        "repeated": repeated(runs),
        "references_alike": references_alike(runs),
    }
