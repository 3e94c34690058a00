"""Renders tables: the statistics of a run and where each task stands, as Markdown and as cells for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelwright.records import Contract
from kernelwright.records.decisions import TaskStatus
from kernelwright.records.tables import (
    ABOVE,
    BEST,
    FAST_P,
    REFERENCE,
    UNSOLVED_SPEEDUP,
    BaselineRow,
    Statistics,
    TableRow,
    Tally,
)

_SECONDS = {"strict": "TF32 off", "tf32_products": "TF32 products"}
"""Columns of second judgements in another precision, by their fields of a row."""


def render_markdown(
    rows: Sequence[TableRow],
    counts: Tally | None = None,
    baselines: Sequence[BaselineRow] = (),
    *,
    searched: bool = False,
) -> str:
    """The tables as Markdown, that of the candidates once for each variant, terms explained; the tally first.

    In a run that searched, a task's candidate is its confirmed winner.
    """
    parts = [] if counts is None else [_render_tally(counts, "confirmed winner" if searched else "candidate")]
    if counts is None or counts.without_candidate < counts.tasks:
        parts += [
            "Speedups of the solved tasks; unsolved ones are left out:",
            _render_rows(rows, filled=False),
            f"Speedups of all tasks; unsolved ones count as {_times(UNSOLVED_SPEEDUP)}:",
            _render_rows(rows, filled=True),
            f"`{BEST}` is the fastest baseline of each task whose outputs the next call leaves alone. fast_p is the share "
            "of all tasks that are solved and more than p times as fast. Ahead counts tasks whose candidate is certainly "
            "faster: an improvement whose interval over the baseline lies above 1. Where a baseline was timed in the same "
            "processes as the candidate, that interval is of paired calls; elsewhere it is as wide as the candidate's and "
            "the baseline's together. Counts and fast_p are the same in both tables. Columns with a contract's name count "
            "the candidates that keep it; success is by the contract that decides.",
        ]
    if baselines:
        parts += [f"The baselines themselves against {REFERENCE}, where they run:", _render_baselines(baselines)]
    return "\n\n".join(parts) + "\n"


def _render_baselines(rows: Sequence[BaselineRow]) -> str:
    heads = ["Baseline", "Tasks", "Mean", "Max", "75 %", "50 %", "25 %", "Geomean"]
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    lines += [_line([row.baseline, str(row.ran), *map(_times, _numbers(row.speedups))]) for row in rows]
    return "\n".join(lines)


def _numbers(of: Statistics) -> tuple[float | None, ...]:
    return (of.mean, of.largest, of.p75, of.p50, of.p25, of.geomean)


def _render_rows(rows: Sequence[TableRow], *, filled: bool) -> str:
    heads = ["Level", "Baseline", "Mean", "Max", "75 %", "50 %", "25 %", "Geomean"]
    heads += [f"fast_{p:g}" for p in FAST_P]
    heads += ["Success", f">{ABOVE:g}x", "Ahead"]
    has_contracts = any(row.contracts is not None for row in rows)
    if has_contracts:
        heads += [contract.value for contract in Contract]
    seconds = [name for name in _SECONDS if not filled and any(getattr(row, name) is not None for row in rows)]
    for name in seconds:
        heads += [f"Geomean, {_SECONDS[name]}", f"Success, {_SECONDS[name]}"]
    lines = [_line(heads), _line(["---", "---", *["---:"] * (len(heads) - 2)])]
    for row in rows:
        numbers = _numbers(row.filled if filled else row.solved)
        cells = ["all" if row.level is None else str(row.level), row.baseline, *map(_times, numbers)]
        cells += [f"{100.0 * share:.1f} %" for share in row.fast_p.values()]
        cells += [f"{row.success}/{row.tasks}", f"{row.above}/{row.tasks}", f"{row.ahead}/{row.tasks}"]
        if has_contracts:
            cells += ["-" if row.contracts is None else f"{row.contracts[contract]}/{row.tasks}" for contract in Contract]
        for found in (getattr(row, name) for name in seconds):
            cells += ["-", "-"] if found is None else [_times(found.geomean), f"{found.count}/{row.tasks}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _render_tally(counts: Tally, candidate: str) -> str:
    tasks = f"{counts.tasks} task{'s' * (counts.tasks != 1)}, {counts.without_candidate} without a {candidate}"
    if counts.failed:
        tasks += f", {counts.failed} failed (a fault of the task or of the machine, not of the candidate)"
    if counts.pending:
        tasks += f", {counts.pending} not judged yet"
    if counts.without_candidate == counts.tasks:
        return f"{tasks}."
    judged = f"{candidate}s judged" if counts.failed or counts.pending else f"{candidate}s"
    lines = [
        f"{tasks}. Of the {judged} {counts.built} build, "
        f"{counts.accepted} are accepted and {sum(counts.rejected.values())} rejected; {counts.clean} of the accepted are "
        f"clean drop-ins. {counts.improved} are improvements: the lower end of their interval clears the noise floor."
    ]
    if counts.baselines_failed:
        lines.append(f"Of {counts.baselines_failed} tasks a baseline failed by a fault of the task or of the machine.")
    if counts.rejected:
        lines.append("Rejected for " + _counted(counts.rejected) + ".")
    if counts.labels:
        lines.append("Labels of the accepted: " + _counted(counts.labels) + ".")
    return "\n\n".join(lines)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _times(speedup: float | None) -> str:
    """Three figures, as CUDA-L1 prints them."""
    if speedup is None:
        return "-"
    decimals = 3 if speedup < 1.0 else 2 if speedup < 10.0 else 1 if speedup < 100.0 else 0
    return f"{speedup:.{decimals}f}x"


def task_table(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The lines for people, by the title of the column; without the share of the roofline where no task has one."""
    with_roofline = any(line["roofline"] for line in lines)
    return [_cells(line, with_roofline) for line in lines]


def _cells(line: Mapping[str, Any], with_roofline: bool) -> dict[str, str]:
    won = line["outcome"] == TaskStatus.WINNER
    over_eager = with_interval(line["speedup"], (line["low"], line["high"]))
    over_best = with_interval(line["vs_best_baseline"], line["vs_best_baseline_interval"])
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


def with_interval(speedup: float | None, interval: Sequence[float | None] | None) -> str:
    """A speedup such as `1.62x (1.59 to 1.65)`; `-` without one."""
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
