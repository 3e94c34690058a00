"""Every folder of published results either is a run, of which a page is written, or is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kernelwright import cli
from kernelwright.records import unpacked
from tests.quick import exhaustive_but

RESULTS = Path(__file__).parents[2] / "results"
SCHEDULES = RESULTS / "sass-h200"
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir())


def report(capsys, folder, page):
    status = cli.main(["report", str(folder), "--out", str(page)])
    said = capsys.readouterr().err.strip()
    assert status in (0, 2), said
    assert (said == "") if status == 0 else (said.startswith("error: Wanted a run directory") and "\n" not in said)
    return status, said


SLOW = (
    "contrastive-h200",
    "kernelbench-h200",
    "2026-11-22-null-coverage-3-cpu",
    "2026-11-23-split-race-h200",
    "2026-11-24-short-calls-h200",
    "2026-11-26-search-h100",
    "2026-11-27-whole-pages-h200",
    "2026-11-23-contrastive-spared-h200",
    "2026-11-22-honest-programs-h200",
    "2026-11-22-cuda-l1-h200",
    "2026-11-22-judge-throughput-3-h200",
    "2026-11-26-agreement-h100",
    "2026-11-26-contrastive-device-bound-fourth-h100",
)
"""Folders of kinds that others stand for, with more records."""


@pytest.mark.parametrize(
    "folder",
    exhaustive_but(FOLDERS, *(path for path in FOLDERS if path.name not in SLOW)),
    ids=lambda path: path.name,
)
def test_a_published_folder_is_reported_or_refused(tmp_path, capsys, folder):
    records = {path.parent for name in ("evaluations", "schedules", "screened") for path in folder.rglob(f"{name}.jsonl*")}
    status, said = report(capsys, folder, tmp_path / "page.html")
    assert status == (0 if folder in records else 2)
    if records and folder not in records:
        named = Path(said.partition("such as ")[2].rstrip("."))
        assert named in records
    # Of a campaign with a run for each agent on each kernel, some.
    for run in sorted(records)[:: max(1, len(records) // 8)]:
        assert report(capsys, run, tmp_path / "page.html")[0] == 0, run


def test_the_page_of_a_published_winner_shows_its_moves_and_its_search(tmp_path, capsys):
    run = SCHEDULES / "sgemm" / "sweeps"
    assert report(capsys, run, tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    winner = json.loads(unpacked(run / "winner.json"))
    assert f"{winner['moved']} instructions stand elsewhere" in page
    assert page.count("<summary>Block ") == len(winner["blocks"]) > 0
    assert "<polyline" in page


@pytest.mark.parametrize(("left", "found"), [(None, "found neither"), ("[]", "found no winner in it")])
def test_a_winner_that_is_missing_is_said_in_one_line(tmp_path, capsys, left, found):
    run = shutil.copytree(SCHEDULES / "sgemm" / "sweeps", tmp_path / "run")
    (run / "winner.json.xz").unlink()
    if left is not None:
        (run / "winner.json").write_text(left)
    assert cli.main(["report", str(run)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: Wanted winner.json, packed or not, in ")
    assert found in said
    assert "\n" not in said
    assert not (run / "report.html").exists()


def test_schedules_without_the_rest_of_a_run_are_no_finished_run(tmp_path, capsys):
    (tmp_path / "schedules.jsonl").write_text("")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "found no summary.json of one" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text("{}")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "found no config.json of one" in capsys.readouterr().err


SAID_ELSEWHERE = {"sass-h200": RESULTS.parent / "docs" / "assembly-game.md"}
"""Pages that say it in place of a folder's README."""


def scored_runs(folder):
    return sorted({path.parent for name in ("evaluations", "confirmations") for path in folder.rglob(f"{name}.jsonl*")})


FEW = 4
"""Runs of a folder that `make test` scores again."""


@pytest.mark.parametrize(
    ("folder", "most"),
    [
        *(pytest.param(one, FEW, id=f"{one.name}-few") for one in FOLDERS if one.name not in SLOW),
        *(
            pytest.param(one, None, id=f"{one.name}-all", marks=pytest.mark.exhaustive)
            for one in FOLDERS
            if one.name in SLOW or len(scored_runs(one)) > FEW
        ),
    ],
)
def test_a_published_folder_gives_its_numbers_again_or_says_that_it_cannot(capsys, folder, most):
    runs = scored_runs(folder)
    runs = runs[:: -(-len(runs) // (most or len(runs) or 1)) or 1]
    found = {run: cli.main(["rescore", str(run)]) for run in runs}
    said = capsys.readouterr()
    assert [run for run, status in found.items() if status not in (0, 2)] == [], said.out
    if 2 in found.values():
        page = SAID_ELSEWHERE.get(folder.name, folder / "README.md").read_text(encoding="utf-8")
        assert "cannot be scored again" in page, said.err
