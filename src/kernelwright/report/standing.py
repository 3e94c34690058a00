"""Says where each task of a suite stands: its winner, its best baseline, its roofline, and why there is no winner."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from markupsafe import Markup

from kernelwright.records import Evaluation, RunDirectory
from kernelwright.records.screened import JUDGED, Screened, confirmed_best, next_to_confirm, next_to_judge, ranked
from kernelwright.report import charts
from kernelwright.report.rows import ACCEPTED, BASELINE_POLICY, IMPROVEMENT, EvaluationRow, drawable
from kernelwright.report.table import BEST, CANDIDATE, REFERENCE, TaskResult

CUT_SHORT = "cut_short.json"
"""File of a run with the hashes of the tasks whose first look was cut short."""


class TaskOutcome(StrEnum):
    """How far the work on a task came."""

    WINNER = "winner"
    """Its candidate is verified: accepted, and confirmed where it was searched for."""
    NONE = "no-winner"
    """All that was asked for was done, and the reference stands."""
    SCREENED = "screened-only"
    """The judge still owes verdicts on what was screened: there are estimates and no result."""
    UNTOUCHED = "untouched"
    """Nothing was screened or judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """How a winner stands against the baselines that were measured beside it."""

    baselines: dict[str, float]
    """Speedup of each over eager; without those that failed."""
    best: str
    """The fastest of them that keeps a drop-in's contract; `eager` where none is faster."""
    speedup: float
    """Of the winner over that baseline, by paired calls where both were timed in the same processes."""
    low: float
    high: float
    """Ends of its 95 % interval."""
    is_ahead: bool
    """Whether the whole interval lies above 1."""

    def __str__(self) -> str:
        others = ", ".join(f"{name} {speedup:.3f}x" for name, speedup in self.baselines.items())
        return (
            f"Baselines over eager: {others or 'none measured'}. Over the best of them, {self.best}, this is "
            f"{self.speedup:.3f}x ({self.low:.3f} to {self.high:.3f})."
        )


def beside_of(line: Mapping[str, Any]) -> Beside | None:
    """From one task's line of `table.json`; None without a winner, or where baselines that were asked for are missing."""
    if line["vs_best_baseline_interval"] is None or not line["baselines_measured"]:
        return None
    low, high = line["vs_best_baseline_interval"]
    return Beside(
        baselines=line["baselines"],
        best=line["best_baseline"],
        speedup=line["vs_best_baseline"],
        low=low,
        high=high,
        is_ahead=line["ahead"],
    )


def standings(run: RunDirectory, results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """One line for each task, for programs: `docs/record-format.md` describes the keys."""
    config = run.read_json("config.json") or {}
    own: defaultdict[str, list[Evaluation]] = defaultdict(list)
    measured = set()
    for one in run.evaluations():
        if one.policy == BASELINE_POLICY:
            measured.add(one.task)
        else:
            own[one.task].append(one)
    screened: defaultdict[str, list[Screened]] = defaultdict(list)
    for estimate in run.screened():
        screened[estimate.task].append(estimate)
    searched, cut_short = bool(config.get("policy")), set(run.read_json(CUT_SHORT) or ())
    asks_for_others = bool(set(config.get("baselines") or ()) - {REFERENCE})
    lines = []
    for result in results:
        if searched:
            state = _searched(screened[result.task], own[result.task], config.get("judge") or JUDGED, cut_short)
        else:
            state = _judged(result)
        estimates = ranked(screened[result.task])
        has_baselines = result.task in measured or not asks_for_others
        lines.append(
            _line(result, *state)
            | {
                "screened": len(screened[result.task]),
                "judged": len(own[result.task]),
                "baselines_measured": has_baselines,
                "ahead": has_baselines and result.is_ahead(BEST) and state[0] is TaskOutcome.WINNER,
                "estimate": estimates[0].estimate if estimates else None,
                "roofline": _shares(result, screened[result.task]),
            }
        )
    return lines


def _line(result: TaskResult, outcome: TaskOutcome, reason: str) -> dict[str, Any]:
    found = result.evaluation if outcome is TaskOutcome.WINNER else None
    best = result.best
    return {
        "task": result.task,
        "level": result.level,
        "outcome": outcome.value,
        "reason": reason,
        "speedup": found.speedup if found else None,
        "low": found.speedup_low if found else None,
        "high": found.speedup_high if found else None,
        "techniques": list(found.techniques) if found else [],
        "candidate_sha256": found.candidate_sha256 if found else None,
        "reference_us": result.baselines_us().get(REFERENCE),
        "baselines": {name: result.gain(name) for name in result.latencies_us if name != REFERENCE},
        "best_baseline": best,
        "best_baseline_speedup": result.gain(best),
        "best_baseline_interval": result.intervals.get(best),
        "vs_best_baseline": result.speedup(BEST) if found else None,
        "vs_best_baseline_interval": result.interval(BEST) if found else None,
    }


def _judged(result: TaskResult) -> tuple[TaskOutcome, str]:
    """TaskOutcome for a task whose candidate came with the suite or from the user."""
    found = result.evaluation
    if found is None:
        if CANDIDATE in result.failed:
            return TaskOutcome.NONE, "the task or the machine failed"
        return (TaskOutcome.UNTOUCHED, "not judged yet") if result.has_candidate else (TaskOutcome.NONE, "no candidate")
    if not found.accepted:
        return TaskOutcome.NONE, f"rejected: {found.reason}"
    return (TaskOutcome.WINNER, "") if found.speedup is not None else (TaskOutcome.NONE, "not timed")


def _searched(
    screened: Sequence[Screened], own: Sequence[Evaluation], count: int, cut_short: Set[str] = frozenset()
) -> tuple[TaskOutcome, str]:
    """TaskOutcome for a task that was searched, and the reason where it has no winner."""
    if confirmed_best(own) is not None:
        return TaskOutcome.WINNER, ""
    judged = {one.candidate_sha256: one for one in own if not one.confirms}
    confirmed = {one.candidate_sha256: one for one in own if one.confirms}
    if not screened and not own:
        return TaskOutcome.UNTOUCHED, "nothing was screened"
    if next_to_judge(screened, confirmed | judged, count) is not None:
        return TaskOutcome.SCREENED, "a verdict is owed"
    if next_to_confirm(judged, confirmed) is not None:
        return TaskOutcome.SCREENED, "a confirmation is owed"
    if any(one.task_sha256 in cut_short for one in screened):
        return TaskOutcome.SCREENED, "its first look was cut short"
    if confirmed:
        return TaskOutcome.NONE, "no improvement held when it was measured again"
    return TaskOutcome.NONE, _why_none(screened, judged)


def _why_none(screened: Sequence[Screened], judged: Mapping[str, Evaluation]) -> str:
    accepted = [one for one in judged.values() if one.accepted]
    if accepted:
        timed = [(one.speedup, one.speedup_low) for one in accepted if one.speedup is not None]
        if not timed:
            return f"{len(accepted)} accepted, not timed"
        speedup, low = max(timed, key=lambda both: both[0])
        return f"{len(accepted)} judged, none an improvement: at best {speedup:.2f} from {low:.2f}"
    if judged:
        return "rejected: " + _counted(one.reason for one in judged.values())
    order = ranked(screened)
    if order:
        return f"{len(order)} right when screened, none faster: at best {order[0].estimate:.2f}"
    return "none right when screened: " + _counted(one.reason for one in screened)


def _counted(reasons: Iterable[Any]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in Counter(map(str, reasons)).most_common())


def _shares(result: TaskResult, screened: Sequence[Screened]) -> dict[str, float | None] | None:
    """The roofline's two times, and the longer one's share of the reference's and the winner's; None if unknown.

    The times are those of moving inputs and outputs once, and of the operations, which older runs did not record.
    """
    known = [one.least_us for one in screened if one.least_us]
    if not known:
        return None
    least_us, found = median(known), result.evaluation
    counted = [one.operations_us for one in screened if one.operations_us is not None]
    operations_us = median(counted) if counted else None
    roofline_us = max(least_us, operations_us or 0.0)
    reference_us = result.baselines_us().get(REFERENCE)
    winner_us = found.paired_us if found is not None and found.accepted else None
    return {
        "least_us": least_us,
        "operations_us": operations_us,
        "reference": roofline_us / reference_us if reference_us else None,
        "winner": roofline_us / winner_us if winner_us else None,
    }


def task_table(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The lines for people, by the title of the column; without the share of the roofline where no task has one."""
    with_roofline = any(line["roofline"] for line in lines)
    return [_cells(line, with_roofline) for line in lines]


def roofline_scatter(lines: Sequence[Mapping[str, Any]], rows: Sequence[EvaluationRow]) -> Markup | None:
    """The decided tasks by their distance from the roofline, each linked with its winner; None where none is known.

    Args:
        lines: Tasks in `table.json` that have a `roofline`.
        rows: Evaluations of the page.
    """
    anchors = {
        (row.evaluation.task, row.evaluation.candidate_sha256): row.anchor
        for row in rows
        if row.superseded_by is None and not row.is_baseline
    }
    points = []
    for line in lines:
        won, share = line["outcome"] == TaskOutcome.WINNER, drawable(line["roofline"]["reference"])
        speedup = drawable(line["speedup"]) if won else 1.0
        if share is None or speedup is None or line["outcome"] not in (TaskOutcome.WINNER, TaskOutcome.NONE):
            continue
        gain = _with_interval(speedup, (line["low"], line["high"])) if won else f"no winner, {line['reason']}"
        anchor = anchors.get((line["task"], line["candidate_sha256"]), "")
        state = IMPROVEMENT if won else ACCEPTED
        points.append(charts.RooflinePoint(anchor, state, f"{line['task']}: {gain}", 1.0 / share, speedup))
    return charts.speedups_against_roofline(points) if points else None


def _cells(line: Mapping[str, Any], with_roofline: bool) -> dict[str, str]:
    won = line["outcome"] == TaskOutcome.WINNER
    over_eager = _with_interval(line["speedup"], (line["low"], line["high"]))
    over_best = _with_interval(line["vs_best_baseline"], line["vs_best_baseline_interval"])
    if not line["baselines_measured"]:
        over_best = "-"
    best = f"{line['best_baseline']} {line['best_baseline_speedup']:.2f}x" if line["reference_us"] else "-"
    cells = {
        "Task": line["task"],
        "Eager, us": f"{line['reference_us']:,.{0 if line['reference_us'] >= 100 else 1}f}" if line["reference_us"] else "-",
        "Best baseline": best if line["baselines_measured"] else "not measured yet",
        "Winner over eager": over_eager,
        "Winner over best baseline": over_best,
        "Certainly ahead": "yes" if line["ahead"] else "no",
    }
    if with_roofline:
        share = (line["roofline"] or {}).get("winner" if won else "reference")
        cells["Of the roofline"] = f"{100 * share:.0f} %" if share else "-"
    why = line["reason"]
    if line["outcome"] == TaskOutcome.SCREENED and line["estimate"]:
        why += f"; estimated at {line['estimate']:.2f}x, which is no result"
    return cells | {"Winner, or why none": ", ".join(map(_plain, line["techniques"])) or why or "the candidate"}


def _with_interval(speedup: float | None, interval: Sequence[float | None] | None) -> str:
    if speedup is None:
        return "-"
    low, high = interval or (None, None)
    return f"{speedup:.2f}x" + (f" ({low:.2f} to {high:.2f})" if low and high else "")


def _plain(name: str) -> str:
    """A name that a policy chose, without what would break a table or a terminal."""
    return "".join(character if character.isprintable() and character != "|" else " " for character in name)


def render_tasks(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table of tasks as Markdown; nothing of none."""
    rows = task_table(lines)
    if not rows:
        return ""
    texts = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in texts)
    ahead = sum(bool(line["ahead"]) for line in lines)
    return (
        f"{text}\n\nThe winner is certainly ahead of the best baseline that was measured on {ahead} of {len(rows)} "
        f"task{'s' * (len(rows) != 1)}: it is an improvement, and its interval over that baseline is above 1.\n"
    )
