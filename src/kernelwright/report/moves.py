"""Writes a run of the assembly game as one HTML file that needs no network and runs no script.

Everything shown comes from the run directory's JSON files through Jinja's auto-escaping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import UsageError
from kernelwright.records import RunDirectory, read_objects
from kernelwright.report import charts
from kernelwright.report.page import asset, fill, flattened, write_page

KIND = "sass optimize"
"""`kind` in the `config.json` of such a run."""
_INSTRUCTION_BYTES = 16
_FLIPS = 7
_CURVE = "Best speedup seen by each agent against the number of schedules it has measured."
_MOST_POINTS = 400


def write_moves_report(run: RunDirectory, target: Path) -> Path:
    """Write the page of an assembly run to `target` in one step, and return `target`.

    Raises:
        UsageError: the run has no summary yet, a JSON file is missing or broken, or `target` cannot be written.
    """
    return write_page(render_moves(run), target)


def render_moves(run: RunDirectory) -> str:
    """Return the page of an assembly run as text.

    Raises:
        UsageError: the run has no summary yet, or a JSON file is missing or broken.
    """
    config, summary = run.read_json("config.json"), run.read_json("summary.json")
    if not isinstance(config, dict) or not isinstance(summary, dict):
        missing = "config.json" if isinstance(summary, dict) else "summary.json"
        raise UsageError(f"Wanted a finished run in {run.path}, found no {missing} of one. Run it to its end first.")
    if summary.get("kind") != KIND:
        raise UsageError(
            f"Wanted the summary of an assembly run in {run.path}/summary.json, found something else. Run it again."
        )
    environment = run.read_json("environment.json") or {}
    winner = run.read_json("winner.json") if summary.get("best") else None
    if summary.get("best") and not isinstance(winner, dict):
        raise UsageError(
            f"Wanted winner.json, packed or not, in {run.path}, since its summary.json names a confirmed improvement; "
            f"found {'neither' if winner is None else 'no winner in it'}. Put the file back, or run the search again."
        )
    lines = {agent: _best_so_far(points) for agent, points in _points(run.path / "schedules.jsonl").items()}
    return fill(
        "assembly.html.j2",
        style=asset("page.css"),
        filters={"times": _times, "interval": _interval, "share": _share, "sentence": _sentence},
        config=config,
        summary=summary,
        winner=None if winner is None else _with_pairs(winner),
        lessons=_with_losses(winner),
        open_block=_first_to_see(winner),
        curve=charts.curves(list(lines.values()), _CURVE, "schedules", 1.0, "×")
        if any(len(line) > 1 for line in lines.values())
        else None,
        lines=list(lines),
        facts=_facts(environment, summary),
        record=[*flattened(config), *flattened(environment)],
    )


def _points(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return for each agent the relative cost of every schedule by its number."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in read_objects(path):
        points = found.setdefault(str(entry.get("agent")), [])
        if entry.get("cost") and entry.get("baseline"):
            points.append((int(entry["number"]), float(entry["baseline"]) / float(entry["cost"])))
    return found


def _best_so_far(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    best, line = 1.0, [(0, 1.0)]
    for number, speedup in points:
        if speedup > best:
            line += [(number, best), (number, speedup)]
            best = speedup
    if points:
        line.append((points[-1][0], best))
    step = max(1, math.ceil(len(line) / _MOST_POINTS))
    return [*line[:-1:step], line[-1]]


def _with_pairs(winner: dict[str, Any]) -> dict[str, Any]:
    """Return the winner with each block's lines as (before, after), and addresses instead of slots."""
    blocks = []
    for block in winner.get("blocks") or []:
        sides = [
            [{"recontrolled": False, **line, "address": f"{line['slot'] * _INSTRUCTION_BYTES:04x}"} for line in block[side]]
            for side in ("before", "after")
        ]
        blocks.append({**block, "pairs": list(zip(*sides, strict=True))})
    return {**winner, "blocks": blocks}


def _first_to_see(winner: dict[str, Any] | None) -> int | None:
    """Return the number of the changed block that is shown opened: the first inside a loop, or else the first."""
    blocks = winner["blocks"] if winner else []
    return next((b["block"] for b in [*(b for b in blocks if b["in_loop"]), *blocks]), None)


def _with_losses(winner: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the lessons with what is lost without each, the largest loss first."""
    if winner is None:
        return []
    full = winner["verdict"]["speedup"]
    found = []
    for lesson in winner.get("lessons") or []:
        without = lesson["without"]["speedup"]
        loss = None if without is None else full / without - 1.0
        found.append({**lesson, "loss": loss})
    return sorted(found, key=lambda lesson: -math.inf if lesson["loss"] is None else -lesson["loss"])


def _sentence(change: dict[str, Any]) -> str:
    """Say what one change is, before the instruction's text."""
    at = f"{change['from_slot'] * _INSTRUCTION_BYTES:04x}"
    if change["kind"] == "move":
        return f"{change['direction']} from {at}:"
    if change["kind"] == "stall":
        return f"{change['amount']} more cycles of stall at {at}:"
    if change["kind"] == "yield":
        return f"yield flipped at {at}:"
    if change["kind"] == "scoreboard":
        return f"other scoreboard {'of its sources ' if change['amount'] > _FLIPS else ''}at {at}:"
    if change["kind"] == "hint":
        return f"cache hint {change['hint']} at {at}:"
    return f"reuse of operand {'abc'[change['amount']]} flipped at {at}:"


def _facts(environment: dict[str, Any], summary: dict[str, Any]) -> list[tuple[str, str]]:
    gpu = (summary.get("measured_on") or {}).get("gpu") or {}
    packages = environment.get("packages") or {}
    facts = {
        "GPU": gpu.get("name"),
        "CUDA of the driver": gpu.get("driver"),
        "Triton": packages.get("triton"),
        "commit": environment.get("commit"),
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}×"


def _interval(found: dict[str, Any]) -> str:
    low, high = found.get("low"), found.get("high")
    return "" if low is None or high is None else f"[{low:.4f}, {high:.4f}]"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
