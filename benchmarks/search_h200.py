"""How fast the search is on one GPU, and whether screening finds what judging all would have found.

    python3 benchmarks/search_h200.py --out DIR --seconds 340 --commit "$(git rev-parse HEAD)"
    python3 benchmarks/search_h200.py --out DIR --suite cuda-l1 --path h100.json --seconds 340 --commit SHA
    python3 benchmarks/search_h200.py --out /tmp/dry --device cpu --tasks diag_matmul,row_softmax --seconds 200

Phases, each of which goes on where the last run in the same directory stopped:

- `optimize`: the command `kernelwright optimize` on one layer, from its start to the confirmed winner;
- `screen`: all proposals of the built-in policy for every task;
- `judge`: up to three of each task in turn, and the winner once more where its one measurement does not stand;
- `harness`: KernelBench's own evaluation of the same candidates, a process for each, one after another; it needs
  `--kernelbench`, a copy of its repository of which `src/kernelbench` is enough;
- `agree`: on some tasks every candidate that screening called right, so that the winners can be compared.

A search of a whole suite by the command is `race.py`. Every record is on disk when it is made, and `summary.json` is
rewritten after it: a run that is killed keeps all. On a CPU the numbers show that the script runs to its end, and nothing
else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import KernelwrightError
from kernelwright.execution.local import Job, JudgePool
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Evaluation, RunDirectory, Task
from kernelwright.records.compiling import Compiles, compiles
from kernelwright.records.screened import JUDGED, Screened, is_clear, is_named, next_to_confirm, next_to_judge, ranked
from kernelwright.search.schedule import first_of_two
from kernelwright.search.searchers import ScreenJob, Searchers
from kernelwright.tasks.suites import load_suite

PHASES = ("optimize", "screen", "judge", "harness", "agree")
SHARES = {"optimize": 0.5, "screen": 0.5, "judge": 0.5, "harness": 0.3, "agree": 1.0}
"""Share of the time that is left which a phase may take."""
HARNESS = Path(__file__).with_name("kernelbench_harness.py")
HARNESS_LIMIT_S = 180.0
"""KernelBench's own limit for a candidate."""
ENDING_S = 8.0
"""Time kept for ending the processes, seconds."""
STARTED_S = 0.1
"""Seconds of the phase `task` above which a candidate has waited for its process to start."""
NEAR = 0.97
"""Speedup of the winner by screening, in multiples of the best judged one, from which both are alike."""
LAYER = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features_in, features_out):
        super().__init__()
        self.gemm = nn.Linear(features_in, features_out)

    def forward(self, x):
        return nn.functional.leaky_relu(self.gemm(x) * 2.0, 0.1)


def get_inputs():
    return [torch.randn(128, 1024)]


def get_init_inputs():
    return [1024, 512]
"""


class Campaign:
    """Keeps the records of all phases and their summary.

    Args:
        run: The directory.
        tasks: In the order of the suite.
        device: Resolved name.
        options: Of the command line.
    """

    def __init__(self, run: RunDirectory, tasks: Sequence[Task], device: str, options: argparse.Namespace) -> None:
        self.run, self.tasks, self.device, self.options = run, tasks, device, options
        self.settings = Settings() if device != "cpu" else Settings.quick(build_limit_s=120.0)
        self.screened: dict[str, list[Screened]] = {task.sha256: [] for task in tasks}
        self.judged: dict[str, dict[str, Evaluation]] = {task.sha256: {} for task in tasks}
        self.confirmed: dict[str, dict[str, Evaluation]] = {task.sha256: {} for task in tasks}
        for one in run.screened():
            if one.task_sha256 in self.screened:
                self.screened[one.task_sha256].append(one)
        for found in run.evaluations():
            if found.task_sha256 in self.judged:
                self._kept(found)
        self.state: dict[str, Any] = {"phase_s": {}, "counts": {}, "done": [], "errors": {}, "optimize": [], "harness": {}}
        self.state |= run.read_json("state.json") or {}
        self.over = threading.Event()
        self._keeping = threading.Lock()
        self._latest_s = 0.0

    def _kept(self, found: Evaluation) -> None:
        (self.confirmed if found.confirms else self.judged)[found.task_sha256][found.candidate_sha256] = found

    def keep(self, record: Screened | Evaluation, phase: str, began_s: float) -> None:
        """Record an estimate or a verdict; nothing once the time is over."""
        with self._keeping:
            if self.over.is_set():
                return
            self.run.append(record)
            if isinstance(record, Screened):
                self.screened[record.task_sha256].append(record)
                told = f"screened {record.correct} {record.estimate} {record.reason or ''}"
            else:
                self._kept(record)
                told = f"{record.verdict} {record.speedup} {record.reason or ''} {'confirms' if record.confirms else ''}"
            print(f"{record.task} {', '.join(record.techniques)}: {told}", flush=True)
            self.state["counts"][phase] = self.state["counts"].get(phase, 0) + 1
            self._spend(phase, began_s)

    def fail(self, task: Task, phase: str, error: KernelwrightError) -> None:
        """Note an error of a task or of the machine."""
        with self._keeping:
            if not self.over.is_set():
                self.state["errors"][f"{task.id} {phase}"] = str(error)
                print(f"{task.id} {phase}: {error}", flush=True)

    def _spend(self, phase: str, began_s: float) -> None:
        """Count the time since the phase began, or since it was last counted."""
        now_s = time.monotonic()
        since_s = max(began_s, self._latest_s)
        self.state["phase_s"][phase] = self.state["phase_s"].get(phase, 0.0) + now_s - since_s
        self._latest_s = now_s
        self.run.write_json("state.json", self.state)
        self.run.write_json("summary.json", self.summary())

    def summary(self) -> dict[str, Any]:
        """All numbers, computed from the records and the phases' times."""

        def per_minute(phase: str) -> float | None:
            seconds = self.state["phase_s"].get(phase)
            return round(60 * self.state["counts"].get(phase, 0) / seconds, 1) if seconds else None

        agreeing = [one for one in map(self._agreement, self.tasks) if one is not None]
        best = [row["judged"] for row in (self._row(task) for task in self.tasks) if row["judged"]]
        runs = self.state["optimize"]
        return {
            "commit": self.options.commit,
            "device": self.device,
            "tasks": len(self.tasks),
            "optimize_s": runs[-1]["seconds"] if runs else None,
            "optimize_runs": runs,
            "screened": sum(map(len, self.screened.values())),
            "screened_right": sum(one.correct for found in self.screened.values() for one in found),
            "screened_tasks": len(self.state["done"]),
            "screened_per_minute": per_minute("screen"),
            "judged": sum(map(len, self.judged.values())),
            "confirmed": sum(one.is_improvement for found in self.confirmed.values() for one in found.values()),
            "judged_per_minute": per_minute("judge"),
            "kernelbench_harness_per_minute": per_minute("harness"),
            "kernelbench_harness_right": sum(one.get("correct", False) for one in self.state["harness"].values()),
            "phase_s": self.state["phase_s"],
            "search_minutes": round(sum(self.state["phase_s"].get(name, 0.0) for name in ("screen", "judge")) / 60, 2),
            "geomean_judged": math.exp(sum(map(math.log, best)) / len(best)) if best else None,
            "screen_agreement": {
                "tasks": len(agreeing),
                "agree": sum(one["agrees"] for one in agreeing),
                "first_replaced": sum(one["rejected_before"] > 0 for one in agreeing),
                "first_apart_from_best": sum(one["apart"] for one in agreeing),
                "best_of_three_agree": sum(one["best_of_three_agrees"] for one in agreeing),
                "rule_agree": sum(one["rule_agrees"] for one in agreeing),
                "rule_without_winner": sum(one["by_rule"] is None for one in agreeing),
                "rule_judged": sum(one["judged_by_rule"] for one in agreeing),
                "each": agreeing,
            },
            "screened_reasons": Counter(
                str(one.reason) for found in self.screened.values() for one in found if one.reason is not None
            ),
            "judged_reasons": Counter(
                str(one.reason) for found in self.judged.values() for one in found.values() if one.reason is not None
            ),
            "spent_s": {
                kind.name.lower(): self._spent_s([one for one in self._every if compiles(one.source) is kind])
                for kind in Compiles
            },
            "errors": self.state["errors"],
            "rows": [self._row(task) for task in self.tasks],
        }

    @property
    def _every(self) -> list[Screened]:
        return [one for several in self.screened.values() for one in several]

    def _spent_s(self, found: list[Screened]) -> dict[str, float]:
        """Number of candidates, how often one had to wait for its process to start, and mean seconds by phase."""
        total = Counter[str]()
        for one in found:
            total.update(one.spent_s)
        started = sum(one.spent_s.get("task", 0.0) > STARTED_S for one in found)
        means = {name: round(seconds / len(found), 4) for name, seconds in total.items()}
        return {"count": len(found), "started": started, **means}

    def _row(self, task: Task) -> dict[str, Any]:
        order = ranked(self.screened[task.sha256])
        accepted = [one.speedup for one in self.judged[task.sha256].values() if one.accepted and one.speedup]
        held = [one.speedup for one in self.confirmed[task.sha256].values() if one.is_improvement and one.speedup]
        return {
            "task": task.id,
            "screened": len(self.screened[task.sha256]),
            "estimate": order[0].estimate if order else None,
            "technique": ", ".join(order[0].techniques) if order else None,
            "judged": max(accepted, default=None),
            "confirmed": max(held, default=None),
        }

    def _agreement(self, task: Task) -> dict[str, Any] | None:
        """How fast screening's first, the best of its first three and the winner by the search's rule are beside the best
        of all; None while not all are judged. Without a winner the user keeps the reference, whose speedup is 1."""
        screened = self.screened[task.sha256]
        order = ranked(screened)
        judged = (
            self.confirmed[task.sha256] | self.judged[task.sha256]
        )  # what screening names may have one verdict, which stands
        if task.sha256 not in self.state["done"] or not order or any(one.candidate_sha256 not in judged for one in order):
            return None
        verdicts = [judged[one.candidate_sha256] for one in order]
        right = [one for one in verdicts if one.accepted]
        if not right:
            return None
        # Of those that the judge accepts: what it rejects is replaced by the next best estimate.
        first, best = right[0], max(right, key=_speedup)
        of_three = max(map(_speedup, right[:JUDGED]))
        taken = taken_by_rule(screened, judged)
        by_rule = max((_speedup(one) for one in taken if one.accepted), default=None)
        wanted = NEAR * _speedup(best)
        return {
            "task": task.id,
            "chosen": _speedup(first),
            "best": _speedup(best),
            "of": len(right),
            "agrees": _speedup(first) >= wanted,
            "rejected_before": verdicts.index(first),
            "apart": is_certainly_slower(first, best),
            "best_of_three": of_three,
            "best_of_three_agrees": of_three >= wanted,
            "judged_by_rule": len(taken),
            "by_rule": by_rule,
            "rule_agrees": (1.0 if by_rule is None else by_rule) >= wanted,
        }

    # --- phases ---------------------------------------------------------------------------------------------------

    def optimize(self, limit_s: float) -> None:
        """Run the command on one layer, once."""
        if self.state["optimize"]:
            return
        began_s = time.monotonic()
        path = self.run.path / "layer.py"
        path.write_text(LAYER, encoding="utf-8")
        folder = self.run.path / f"optimize-{int(time.time())}"
        command = [sys.executable, "-m", "kernelwright", "optimize", str(path), "--device", self.options.device]
        command += ["--budget", "16", "--judge", "3", "--out", str(folder), "--json"]
        log = self.run.path / "optimize.log"
        try:
            with log.open("w") as errors:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=errors, timeout=limit_s, check=False, text=True
                )
        except subprocess.TimeoutExpired:
            self.state["errors"]["optimize"] = f"not done within {limit_s:.0f} s"
            print(log.read_text()[-3000:], flush=True)
            return
        seconds = round(time.monotonic() - began_s, 2)
        print(log.read_text()[-4000:], f"\noptimize: {seconds} s, status {done.returncode}", flush=True)
        if done.returncode:
            self.state["errors"]["optimize"] = log.read_text()[-2000:]
            return
        result = json.loads(done.stdout)
        best = result["best"] or {}
        entry = {name: result[name] for name in ("evaluations", "screened")}
        entry |= {"seconds": seconds, "speedup": best.get("speedup"), "speedup_low": best.get("speedup_low")}
        self.state["optimize"].append(entry)
        self._spend("optimize", began_s)

    def screen(self, limit_s: float) -> None:
        """Screen the proposals for all tasks."""
        owed = [task for task in self.tasks if task.sha256 not in self.state["done"]]
        if not owed:
            return
        began_s = time.monotonic()
        jobs = [ScreenJob(task, self.options.budget, tuple(self.screened[task.sha256])) for task in owed]
        searchers = Searchers([self.device], self.settings, self.options.searchers)

        def work() -> None:
            for job, found in searchers.screen(jobs, self.over.is_set):
                if isinstance(found, Screened):
                    self.keep(found, "screen", began_s)
                elif isinstance(found, KernelwrightError):
                    self.fail(job.task, "screen", found)
                elif not self.over.is_set():
                    self.state["done"].append(job.task.sha256)

        self._within(limit_s, "screen", began_s, work, searchers.close)

    def judge(self, limit_s: float) -> None:
        """Judge the best three of each task and measure the winner again."""
        self._judge(limit_s, "judge", self._best_of)

    def agree(self, limit_s: float) -> None:
        """Judge every candidate of some tasks that screening called right."""
        able = [task for task in self.tasks if task.sha256 in self.state["done"]]
        able = [task for task in able if len(ranked(self.screened[task.sha256])) > 2]
        count = min(self.options.agreement, len(able))
        some = [able[index * len(able) // count] for index in range(count)]

        def all_of(task: Task) -> list[Job]:
            if task not in some:
                return []
            order = ranked(self.screened[task.sha256])
            known = self.confirmed[task.sha256] | self.judged[task.sha256]
            owed = [one for one in order if one.candidate_sha256 not in known]
            return [Job(task, one.candidate(), first_of_two(self.settings)) for one in owed]

        self._judge(limit_s, "agree", all_of)

    def harness(self, limit_s: float) -> None:
        """Evaluate candidates with KernelBench's own code, one of each task in turn."""
        if self.options.kernelbench is None:
            return
        began_s = time.monotonic()
        turns = itertools.zip_longest(*(ranked(self.screened[task.sha256]) for task in self.tasks))
        owed = [one for turn in turns for one in turn if one is not None]
        sources = {task.sha256: task.source for task in self.tasks}
        files = [self.run.path / name for name in ("harness-task.py", "harness-candidate.py")]
        for one in owed:
            left_s = limit_s - (time.monotonic() - began_s)
            key = f"{one.task} {one.candidate_sha256}"
            if key in self.state["harness"]:
                continue
            if left_s < ENDING_S:
                return
            for path, text in zip(files, (sources[one.task_sha256], one.source), strict=True):
                path.write_text(text, encoding="utf-8")
            command = [sys.executable, str(HARNESS), str(self.options.kernelbench), *map(str, files)]
            start_s = time.monotonic()
            try:
                done = subprocess.run(
                    command, capture_output=True, timeout=min(HARNESS_LIMIT_S, left_s), check=False, text=True
                )
            except subprocess.TimeoutExpired:
                if left_s < HARNESS_LIMIT_S:
                    return
                told: dict[str, Any] = {"error": "its limit of time"}
            else:
                told = {"error": done.stderr[-500:]} if done.returncode else json.loads(done.stdout.splitlines()[-1])
            self.state["harness"][key] = told | {"seconds": round(time.monotonic() - start_s, 2)}
            print(f"harness: {one.task} {', '.join(one.techniques)}: {self.state['harness'][key]}", flush=True)
            self.state["counts"]["harness"] = len(self.state["harness"])
            self._spend("harness", began_s)

    def _best_of(self, task: Task) -> list[Job]:
        if task.sha256 not in self.state["done"]:
            return []
        judged, confirmed = self.judged[task.sha256], self.confirmed[task.sha256]
        screened = self.screened[task.sha256]
        if (chosen := next_to_judge(screened, confirmed | judged, JUDGED)) is not None:
            named = is_named(chosen.candidate_sha256, screened, judged)
            return [Job(task, chosen.candidate(), self.settings if named else first_of_two(self.settings))]
        winner = next_to_confirm(judged, confirmed)
        return [Job(task, winner.candidate())] if winner is not None else []

    def _judge(self, limit_s: float, phase: str, owed_of: Callable[[Task], list[Job]]) -> None:
        """Judge what tasks are owed, until none is owed anything: a verdict may ask for another."""
        began_s = time.monotonic()
        pool = JudgePool([self.device], self.settings, self.options.judges)
        at_work: set[tuple[str, str]] = set()
        failed: set[str] = set()

        def owed() -> Iterator[Job | None]:
            while True:
                idle = True
                for task in self.tasks:
                    for job in owed_of(task) if task.sha256 not in failed else ():
                        key = task.sha256, job.candidate.sha256
                        if key not in at_work:
                            idle = False
                            at_work.add(key)
                            yield job
                if idle and not at_work:
                    return
                if idle:
                    yield None

        def work() -> None:
            for job, found in pool.evaluate(owed(), self.over.is_set):
                at_work.discard((job.task.sha256, job.candidate.sha256))
                if isinstance(found, KernelwrightError):
                    failed.add(job.task.sha256)
                    self.fail(job.task, phase, found)
                    continue
                sha256, judged = job.candidate.sha256, self.judged[job.task.sha256]
                stands = is_named(sha256, self.screened[job.task.sha256], judged) and is_clear(found)
                self.keep(found.model_copy(update={"confirms": stands or sha256 in judged}), phase, began_s)

        self._within(limit_s, phase, began_s, work, lambda: pool.close(at_once=True))

    def _within(self, limit_s: float, phase: str, began_s: float, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Do work for so long at most; then end its processes, and nothing that they still say is kept."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(max(0.0, limit_s))
        with self._keeping:
            self.over.set()
            if self.state["counts"].get(phase):
                self._spend(phase, began_s)
        end()
        thread.join(ENDING_S)
        self.over.clear()
        self.run.write_json("state.json", self.state)


def taken_by_rule(screened: Sequence[Screened], judged: Mapping[str, Evaluation]) -> list[Evaluation]:
    """The verdicts that a search would have asked for, in its order, of those on all candidates of one task."""
    known: dict[str, Evaluation] = {}
    while (chosen := next_to_judge(screened, known, JUDGED)) is not None:
        known[chosen.candidate_sha256] = judged[chosen.candidate_sha256]
    return list(known.values())


def is_certainly_slower(one: Evaluation, other: Evaluation) -> bool:
    """Whether two intervals do not overlap, and the first one lies below."""
    return (one.speedup_high or 0.0) < (other.speedup_low or 0.0)


def _speedup(one: Evaluation) -> float:
    return one.speedup or 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run or go on, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the run directory")
    parser.add_argument("--seconds", type=float, default=340.0, help="end after this long, whatever is left")
    parser.add_argument("--commit", default="", help="commit of the checkout, for the record")
    parser.add_argument("--device", default="cuda", help="`cuda`, `cuda:N`, or `cpu` to try out the script")
    parser.add_argument("--suite", default="builtin", help="`builtin`, `kernelbench` or `cuda-l1`")
    parser.add_argument("--path", type=Path, help="of the suite: a checkout, or a JSON lines file of CUDA-L1's release")
    parser.add_argument("--tasks", default="", help="ids, with commas between; all by default")
    parser.add_argument("--phases", default=",".join(PHASES), help="of " + ", ".join(SHARES))
    parser.add_argument("--budget", type=int, default=24, help="proposals for a task")
    parser.add_argument("--searchers", type=int, help="tasks that are screened at once")
    parser.add_argument("--judges", type=int, default=6, help="judges at once")
    parser.add_argument("--kernelbench", type=Path, help="copy of KernelBench's repository, for the phase `harness`")
    parser.add_argument("--agreement", type=int, default=20, help="tasks of which all candidates are judged")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + options.seconds
    if options.commit:
        os.environ["KERNELWRIGHT_COMMIT"] = options.commit
    device = devices_of(options.device)[0]
    wanted = set(filter(None, options.tasks.split(",")))
    entries = load_suite(options.suite, path=options.path).entries
    tasks = [entry.task for entry in entries if not wanted or entry.task.id in wanted]
    if unknown := wanted - {task.id for task in tasks}:
        parser.error(f"no tasks of the suite {options.suite}: {', '.join(sorted(unknown))}")
    run = RunDirectory(options.out)
    config = {"kind": "search campaign", "suite": options.suite, "tasks": [task.id for task in tasks], "device": device}
    run.claim(config | {"commit": options.commit}, same=tuple(config), device=device)
    run.write_json("tasks.json", [task.model_dump(mode="json") for task in tasks])
    here = Campaign(run, tasks, device, options)
    for phase in options.phases.split(","):
        left_s = end_s - time.monotonic() - ENDING_S
        if left_s > ENDING_S:
            print(f"{phase}: {left_s:.0f} s left", flush=True)
            getattr(here, phase)(left_s * (SHARES[phase] if phase != options.phases.split(",")[-1] else 1.0))
    summary = here.summary()
    run.write_json("summary.json", summary)
    print(json.dumps({name: value for name, value in summary.items() if name != "rows"}, indent=1), flush=True)


if __name__ == "__main__":
    main()
