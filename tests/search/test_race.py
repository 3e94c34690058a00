"""A race of slices keeps its records whatever happens, and goes on from what was packed."""

from __future__ import annotations

import json
import sys
import tarfile

import pytest

COMMAND = """import json, pathlib, sys
arguments = sys.argv[1:]
out, part = (pathlib.Path(arguments[arguments.index(name) + 1]) for name in ("--out", "--slice"))
out.mkdir(exist_ok=True)
(out / "report.html").write_text("a page")
with (out / "evaluations.jsonl").open("a") as records:
    print(json.dumps(arguments), file=records)
print("searching", part, file=sys.stderr)
print("{}")
while str(part) == "2/3":
    pass
sys.exit(3 if str(part) == "3/3" else 0)
"""


@pytest.fixture
def race(monkeypatch, tmp_path, script):
    module = script("race")
    (tmp_path / "command.py").write_text(COMMAND)
    monkeypatch.setattr(module, "COMMAND", (sys.executable, str(tmp_path / "command.py")))
    monkeypatch.setattr(module, "LEAST_S", 0.0)
    monkeypatch.setattr(module, "OVERTIME_S", 0.0)

    def run(*arguments, seconds=60.0, work="work"):
        common = ["--suite", "cuda-l1", "--path", "h100.json", "--seconds", str(seconds)]
        module.main([*common, "--work", str(tmp_path / work), "--pack", str(tmp_path / "packed"), *arguments])
        return tmp_path / work

    return run


def commands_of(folder):
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def test_each_slice_is_a_run_directory_and_an_archive(race, tmp_path, capsys):
    work = race("--slices", "1/3,3/3", "--kernels", "--budget", "7")
    (search,), (kernels,) = commands_of(work / "cuda-l1-1of3"), commands_of(work / "cuda-l1-1of3-kernels")
    assert search[:4] == ["bench", "cuda-l1", "--slice", "1/3"]
    assert search[search.index("--policy") + 1] == "builtin"
    assert search[search.index("--budget") + 1] == "7"
    assert 0 < float(search[search.index("--minutes") + 1]) <= 1
    assert kernels[kernels.index("--contract") + 1] == "kernelbench"
    assert "--policy" not in kernels
    with tarfile.open(tmp_path / "packed" / "cuda-l1-1of3.tar.gz") as archive:
        assert archive.getnames() == ["cuda-l1-1of3/evaluations.jsonl", "cuda-l1-1of3.json", "cuda-l1-1of3.log"]
    assert len(list((tmp_path / "packed").iterdir())) == 4
    assert "cuda-l1-3of3: status 3" in capsys.readouterr().out


def test_what_outlives_its_time_is_killed_and_packed_and_goes_on_elsewhere(race, tmp_path, capsys):
    race("--slices", "2/3,1/3", "--every", "0.1", seconds=2.0)
    assert "cuda-l1-2of3: killed at the end of the time\n  searching 2/3" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "packed").iterdir()] == ["cuda-l1-2of3.tar.gz"], (
        "no time was left for the other"
    )
    elsewhere = race("--slices", "1/3", "--earlier", *map(str, (tmp_path / "packed").glob("*.gz")), work="elsewhere")
    assert len(commands_of(elsewhere / "cuda-l1-2of3")) == 1
    assert len(commands_of(elsewhere / "cuda-l1-1of3")) == 1


def test_a_directory_that_is_there_is_not_replaced_by_an_archive(race, tmp_path):
    work = race("--slices", "1/3")
    race("--slices", "1/3", "--earlier", str(tmp_path / "packed" / "cuda-l1-1of3.tar.gz"))
    assert len(commands_of(work / "cuda-l1-1of3")) == 2


def test_some_tasks_of_a_slice_have_a_directory_of_their_own(race):
    work = race("--slices", "1/3", "--only", "level2/50,level2/58")
    (search,) = commands_of(work / "cuda-l1-1of3-only")
    assert search[search.index("--only") + 1] == "level2/50,level2/58"
    assert not (work / "cuda-l1-1of3").exists()
