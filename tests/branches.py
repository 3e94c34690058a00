"""Compares the branches of the judge's trusted code that no test took with the list of those that none can take.

    python tests/branches.py

Reads what pytest-cov has measured (`.coverage`) and `uncovered_branches.toml`. Ends with status 1 when less than 95 % of the
branches were taken, when one that was not taken is not listed, or when the list names a line that is gone.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LISTED = Path(__file__).with_name("uncovered_branches.toml")
LEAST = 0.95


def untaken(report: Mapping[str, Any], root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Each branch that was not taken, as the list names it: its file, its line of code and the one after it or `exit`."""
    for file, measured in sorted(report["files"].items()):
        lines = (root / file).read_text(encoding="utf-8").splitlines()
        for start, end in measured["missing_branches"]:
            yield file, f"{lines[start - 1].strip()} -> {lines[end - 1].strip() if end > 0 else 'exit'}"


def taken_share(report: Mapping[str, Any]) -> float:
    totals = report["totals"]
    return float(totals["covered_branches"] / totals["num_branches"])


def faults(report: Mapping[str, Any], listed: Sequence[Mapping[str, Any]], root: Path = ROOT) -> list[str]:
    """What is wrong with a measurement or with the list, one line each."""
    found = []
    known = {(item["file"], branch) for item in listed for branch in item["branches"]}
    for file, branch in untaken(report, root):
        if (file, branch) not in known:
            found.append(f"no test takes, and the list does not name: {file}: {branch}")
    for file, branch in sorted(known):
        place = root / file
        text = place.read_text(encoding="utf-8") if place.is_file() else ""
        if branch.partition(" -> ")[0] not in text:
            found.append(f"the list names a line that is gone: {file}: {branch}")
    if taken_share(report) < LEAST:
        found.append(f"tests take {taken_share(report):.1%} of the branches; wanted {LEAST:.0%}")
    return found


def main() -> int:
    """Print what is wrong and the share of branches taken; return the exit status."""
    import coverage

    measured = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        measured.json_report(outfile=f"{folder}/report.json")
        report = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))
    found = faults(report, tomllib.loads(LISTED.read_text(encoding="utf-8"))["uncovered"])
    print("\n".join([*found, f"{taken_share(report):.1%} of the branches of the judge's trusted code are taken"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
