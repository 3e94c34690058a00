"""Published records, replayed: each decision of a search is what it was when the golden files were written.

A file has the decisions on each task after each record, as hashes, and those on the whole suite at a few prefixes. To write
them anew after a deliberate change: `KERNELWRIGHT_WRITE_GOLDEN=1 python -m pytest tests/search/test_decisions_golden.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.quick import exhaustive_but
from tests.search.replay import Records, suite_lines, task_lines

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "decisions"
RUNS = exhaustive_but(
    [
        "2026-11-25-search-h200/optimize",
        "kernelbench-h200/cuda-l1-near-4-h200",
        "kernelbench-h200/cuda-l1-recurrent-h100",
        "kernelbench-h200/cuda-l1-six-h200",
        "kernelbench-h200/modules-bf16-small-h200",
        "kernelbench-h200/modules-rotary-h200",
        "kernelbench-h200/robust-kbench-h200",
        "kernelbench-h200/robust-kbench-left-h200",
        "kernelbench-h200/robust-kbench-six-h200",
        "kernelbench-h200/today-brief-h200",
        "kernelbench-h200/today-large-h200",
        "kernelbench-h200/today-left-3-h200",
        "kernelbench-h200/today-pages-2-h200",
    ],
    "2026-11-25-search-h200/optimize",
    "kernelbench-h200/cuda-l1-recurrent-h100",
    "kernelbench-h200/cuda-l1-six-h200",
    "kernelbench-h200/robust-kbench-six-h200",
    "kernelbench-h200/today-brief-h200",
    "kernelbench-h200/today-pages-2-h200",
)


@pytest.mark.parametrize("name", RUNS)
def test_decisions_follow_from_published_records_as_before(name: str, tmp_path: Path) -> None:
    records = Records(ROOT / "results" / name)
    text = "\n".join([*task_lines(records), *suite_lines(records, tmp_path), ""])
    path = GOLDEN / f"{name.replace('/', '-')}.txt"
    if os.environ.get("KERNELWRIGHT_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
