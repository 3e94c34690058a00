"""Replays published records through the decisions of a search, one record at a time.

Published estimates may lack their source. `Records` gives each of these a text that names the same compiler, and a hash
that fits the text, so that every decision has what it had in the run.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelwright.execution.work import Baselines, Evaluate, Screen, Work
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.decisions import (
    JUDGED,
    TaskRecords,
    confirmed_best,
    gain_per_second,
    headroom,
    is_top_ranked,
    judging_bytes,
    needs_no_rerun,
    next_of,
    next_to_confirm,
    next_to_judge,
)
from kernelwright.records.lines import sha256_of
from kernelwright.records.screened import Compiles, Screened
from kernelwright.records.tables import BenchEntry, task_results, task_status
from kernelwright.records.variants import variants
from kernelwright.search.engine import SearchPlan, TaskState, next_step, settings_for
from kernelwright.search.suite import searched_state
from kernelwright.tasks.entries import Suite, SuiteEntry

Record = Screened | Evaluation
PREFIXES = 6
"""Prefixes of each run at which the whole suite is asked what comes next."""
ASKED = 4
"""Pieces of work of each kind that are asked for at a prefix."""


class Records:
    """Records of a published run in the order in which they were made."""

    def __init__(self, folder: Path) -> None:
        run = RunDirectory(folder)
        self.config: dict[str, Any] = run.read_json("config.json") or {}
        self.exhausted: list[str] = run.read_json("exhausted.json") or []
        evaluations, screened = list(run.evaluations()), list(run.screened())
        tasks = [Task.model_validate(one) for one in run.read_json("tasks.json") or []]
        if not tasks:
            tasks = [Task(id=self.config["task"], source=self.config["task_source"])]
        self.tasks = {task.sha256: task for task in tasks}
        sources = {one.candidate_sha256: one.source for one in evaluations if one.source}
        looks = [_with_source(one, sources.get(one.candidate_sha256, one.source)) for one in screened]
        made: list[Record] = [*looks, *evaluations]
        self.made = sorted((one for one in made if one.task_sha256 in self.tasks), key=_ended)

    def write_prefix(self, folder: Path, count: int) -> RunDirectory:
        """A run directory that holds the first `count` records."""
        run = RunDirectory(folder)
        run.write_json("config.json", self.config)
        run.write_json("exhausted.json", self.exhausted if count == len(self.made) else [])
        for name, kind in (("screened.jsonl", Screened), ("evaluations.jsonl", Evaluation)):
            lines = [one.model_dump_json() for one in self.made[:count] if isinstance(one, kind)]
            run.write_text(name, "".join(line + "\n" for line in lines))
        return run

    @property
    def prefixes(self) -> list[int]:
        """Lengths of the prefixes at which the whole suite is asked."""
        return sorted({len(self.made) * number // PREFIXES for number in range(PREFIXES + 1)})


def _with_source(look: Screened, source: str) -> Screened:
    if not source:
        compiler = ""
        if any("max-autotune" in name for name in look.techniques):
            compiler = "torch.compile max-autotune"
        elif any("compile" in name for name in look.techniques):
            compiler = "torch.compile"
        source = f"# {look.candidate_sha256} {compiler}\n"
        look = look.model_copy(update={"parent": None})  # without its text it has no knobs to compare
    return look.model_copy(update={"source": source, "candidate_sha256": sha256_of(source)})


def _ended(record: Record) -> tuple[str, float, str]:
    return record.started, record.elapsed_s, record.candidate_sha256


def short(value: object) -> str:
    """Eight digits of a hash of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _id(record: Record | Candidate | None) -> str | None:
    if record is None:
        return None
    return (record.sha256 if isinstance(record, Candidate) else record.candidate_sha256)[:8]


@dataclass
class TaskReplay:
    """Decisions on one task, asked after each of its records."""

    task: Task
    budget: int
    count: int
    proposals: list[Candidate]
    """Candidates of the task in the order in which they were screened."""
    state: TaskRecords = field(default_factory=TaskRecords)

    def add(self, record: Record) -> None:
        """Take in one record."""
        self.state.add(record)
        if isinstance(record, Screened):
            limit, tunes = self.state.next_round(self.budget, True)
            if len(self.state.screened) >= limit:
                self.state.end_round(limit, tunes)

    def decisions(self) -> dict[str, Any]:
        """What follows from the records so far."""
        state, looks = self.state, self.state.screened
        judged, confirmed = state.judged, state.confirmed
        seen = {one.candidate_sha256 for one in looks}
        waiting = [one for one in self.proposals if one.sha256 not in seen]
        chosen = next_to_judge(looks, {**confirmed, **judged}, self.count)
        status, reason = state.status(self.count)
        near, settling = state.near_miss_to_settle, state.settle()
        return {
            "judge": _id(chosen),
            "named": chosen is not None and is_top_ranked(chosen.candidate_sha256, looks, judged),
            "confirm": _id(next_to_confirm(judged, confirmed)),
            "pending": _id(state.pending(self.count)),
            "clear": [needs_no_rerun(one) for one in state.own],
            "best": _id(confirmed_best(confirmed.values())),
            "near": _id(near),
            "settling": settings_for(settling, Settings()).model_dump(mode="json") if settling else None,
            "best_baseline": state.best_baseline,
            "fallback": _id(TaskState(self.task, state).fallback),
            "round": state.next_round(self.budget, True),
            "settled": state.is_settled,
            "screened": [state.is_screened(self.budget, True), state.is_screened(self.budget, False)],
            "worth": [round(headroom(looks), 6), round(gain_per_second(looks), 6), judging_bytes(looks)],
            "next": _id(next_of(waiting, [], looks, {*Compiles})),
            "status": str(status),
            "reason": reason,
        }


def task_lines(records: Records) -> Iterator[str]:
    """One line after each record, `TASK HASH` of all decisions on its task, and one line for each task in the end."""
    budget, count = records.config.get("budget") or 24, records.config.get("judge") or JUDGED
    looked: defaultdict[str, list[Candidate]] = defaultdict(list)
    for one in records.made:
        if isinstance(one, Screened):
            looked[one.task_sha256].append(one.candidate())
    replays = {name: TaskReplay(task, budget, count, looked[name]) for name, task in records.tasks.items()}
    for record in records.made:
        replay = replays[record.task_sha256]
        replay.add(record)
        yield f"{replay.task.id} {short(replay.decisions())}"
    for replay in replays.values():
        knobs = variants(replay.state.screened, {one.candidate_sha256 for one in replay.state.screened}, 4)
        end = replay.decisions() | {"variants": [_id(one) for one in knobs]}
        shown = {name: end[name] for name in ("judge", "confirm", "best", "near", "fallback", "status", "reason")}
        yield f"{replay.task.id} {short(end)} {json.dumps(shown)}"


def suite_lines(records: Records, folder: Path) -> Iterator[str]:
    """Work that a suite's search would begin at some prefixes, and how its tasks stand there."""
    suite = Suite(records.config.get("suite", "one"), tuple(map(SuiteEntry, records.tasks.values())))
    count = records.config.get("judge") or JUDGED
    baselines = records.config.get("baselines") or []
    for length in records.prefixes:
        run = records.write_prefix(folder / str(length), length)
        for minutes in (None, 1e6):
            yield f"{length} {minutes and 'limited'} {json.dumps(_work_of(run, suite, records, baselines, count, minutes))}"
        yield f"{length} ends {json.dumps(_ends(run, suite))}"


def _work_of(
    run: RunDirectory, suite: Suite, records: Records, baselines: Sequence[str], count: int, minutes: float | None
) -> dict[str, Any]:
    """The next pieces of work of each kind, in turn, where none is at work: screening, judging while the baselines are
    still measured and after that, and baselines."""
    config = records.config
    plan = SearchPlan(
        settings=Settings.model_validate(config.get("settings", {})),
        device="cuda:0",
        policy=_Named(),
        budget=config.get("budget") or 24,
        judged=count,
        limit_s=minutes,
    )
    found: dict[str, Any] = {}
    for name, kind in (
        ("screen", Screen),
        ("judge-beside-baselines", Evaluate),
        ("judge-after", Evaluate),
        ("baselines", Baselines),
    ):
        state = searched_state(run, suite, baselines, plan)
        state.judging_begins, state.slots, state.free = True, {kind: 64}, {kind: 64}
        for task in state.tasks:
            task.is_stopped = kind is not Screen
            task.baselines = () if name == "judge-after" else task.baselines
        found[name] = []
        while len(found[name]) < ASKED and (step := next_step(state)) is not None:
            step.task.running.append(step)
            found[name].append(_row(step.work))
    return found


class _Named:
    name, look = "builtin", "screened"

    def propose(self, context: Any, count: int) -> list[Candidate]:
        return []


def _row(work: Work) -> list[Any]:
    if isinstance(work, Screen):
        return [work.task.id, work.budget, work.tunes, len(work.earlier)]
    if isinstance(work, Baselines):
        return [work.task.id, [each.techniques[0] for each in work.baselines], work.memory_bytes]
    changed = work.settings.model_dump(include={"until_certain", "processes_min", "processes_max", "audits"})
    alongside = [_id(one) for one in work.alongside]
    return [work.task.id, _id(work.candidate), alongside, list(changed.values()), work.memory_bytes]


def _ends(run: RunDirectory, suite: Suite) -> dict[str, Any]:
    """How the tasks stand, by a hash, what is handed out, what came nearest, and what the policy is told."""
    winners = {
        entry.task.id: best
        for entry in suite.entries
        if (best := confirmed_best(one for one in run.evaluations() if one.task_sha256 == entry.task.sha256))
    }
    entries = [
        BenchEntry(
            entry.task.id, entry.task.sha256, None, best.candidate_sha256 if (best := winners.get(entry.task.id)) else None
        )
        for entry in suite.entries
    ]
    records = [
        TaskRecords.of(one for one in run.evaluations() if one.task_sha256 == entry.task.sha256) for entry in suite.entries
    ]
    lines = task_status(run, task_results(run, entries, {}))
    return {
        "lines": short(lines),
        "status": {
            name: sum(line["outcome"] == name for line in lines) for name in sorted({one["outcome"] for one in lines})
        },
        "handed_out": [line["task"] for line in lines if line["ahead"]],
        "near": [_id(one.nearest_miss) for one in records],
        "history": short([[_id(found) for found in one.history] for one in records]),
    }
