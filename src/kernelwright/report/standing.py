"""Says where each task of a suite stands: its winner, its best baseline, its roofline, and why there is no winner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from markupsafe import Markup

from kernelwright.records import Evaluation, RunDirectory
from kernelwright.records.decisions import (
    BASELINE_POLICY,
    CUT_SHORT,
    JUDGED,
    BaselineComparison,
    TaskRecords,
    TaskStatus,
    ranked,
)
from kernelwright.records.screened import Screened
from kernelwright.report import charts
from kernelwright.report.rows import ACCEPTED, IMPROVEMENT, EvaluationRow, drawable
from kernelwright.report.table import BEST, CANDIDATE, REFERENCE, TaskResult


def beside_of(line: Mapping[str, Any]) -> BaselineComparison | None:
    """From one task's line of `table.json`; None without a winner, or where baselines that were asked for are missing."""
    if line["vs_best_baseline_interval"] is None or not line["baselines_measured"]:
        return None
    low, high = line["vs_best_baseline_interval"]
    return BaselineComparison(
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
            looks = screened[result.task]
            is_cut_short = any(look.task_sha256 in cut_short for look in looks)
            records = TaskRecords.of([*looks, *own[result.task]])
            state = records.status(config.get("judge") or JUDGED, cut_short=is_cut_short)
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
                "ahead": has_baselines and result.is_ahead(BEST) and state[0] is TaskStatus.WINNER,
                "estimate": estimates[0].estimate if estimates else None,
                "roofline": _shares(result, screened[result.task]),
            }
        )
    return lines


def _line(result: TaskResult, outcome: TaskStatus, reason: str) -> dict[str, Any]:
    found = result.evaluation if outcome is TaskStatus.WINNER else None
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


def _judged(result: TaskResult) -> tuple[TaskStatus, str]:
    """TaskStatus for a task whose candidate came with the suite or from the user."""
    found = result.evaluation
    if found is None:
        if CANDIDATE in result.failed:
            return TaskStatus.NONE, "the task or the machine failed"
        return (TaskStatus.UNTOUCHED, "not judged yet") if result.has_candidate else (TaskStatus.NONE, "no candidate")
    if not found.accepted:
        return TaskStatus.NONE, f"rejected: {found.reason}"
    return (TaskStatus.WINNER, "") if found.speedup is not None else (TaskStatus.NONE, "not timed")


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
        won, share = line["outcome"] == TaskStatus.WINNER, drawable(line["roofline"]["reference"])
        speedup = drawable(line["speedup"]) if won else 1.0
        if share is None or speedup is None or line["outcome"] not in (TaskStatus.WINNER, TaskStatus.NONE):
            continue
        gain = _with_interval(speedup, (line["low"], line["high"])) if won else f"no winner, {line['reason']}"
        anchor = anchors.get((line["task"], line["candidate_sha256"]), "")
        state = IMPROVEMENT if won else ACCEPTED
        points.append(charts.RooflinePoint(anchor, state, f"{line['task']}: {gain}", 1.0 / share, speedup))
    return charts.speedups_against_roofline(points) if points else None


def _cells(line: Mapping[str, Any], with_roofline: bool) -> dict[str, str]:
    won = line["outcome"] == TaskStatus.WINNER
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
    if line["outcome"] == TaskStatus.SCREENED and line["estimate"]:
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
