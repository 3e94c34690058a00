"""The benchmark over CUDA-L1's release goes on from a published folder, whose records have no sources; fakes judge."""

from __future__ import annotations

import gzip
import json
import shutil
from importlib.metadata import version
from typing import ClassVar

import pytest

from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.records import Evaluation, Reason, RunDirectory, Verdict
from tests.samples import BarePool

LEVELS = {1: 6, 2: 4, 3: 4}
"""How many tasks of each; the last of level 3 has no candidate."""
BASELINES = ("compile", "max-autotune")


class Pool(BarePool):
    """A `JudgePool` whose findings come from nowhere; it ends, as after a deadline, when it has done `most` of a kind."""

    judged: ClassVar[list[str]] = []
    rotated: ClassVar[list[str]] = []
    most = 100
    fails: ClassVar[set[str]] = set()
    crowded: ClassVar[set[str]] = set()
    speedup = 2.0

    def __init__(self, devices, settings, per_device=1, cores=None):
        pass

    def evaluate(self, jobs, stop=None):
        for job in (job for job, _ in zip(jobs, range(self.most), strict=False)):
            self.judged.append(job.task.id)
            yield job, self.failure(job.task) or self.found(job.task, job.candidate)

    def rotate(self, rotations, stop=None):
        for one in (one for one, _ in zip(rotations, range(self.most), strict=False)):
            self.rotated.append(one.task.id)
            yield one, self.failure(one.task) or [self.found(one.task, baseline) for baseline in one.baselines]

    def failure(self, task):
        return InfrastructureError("a full GPU") if task.id in self.fails else None

    def found(self, task, candidate):
        crowded = task.id in self.crowded
        return Evaluation(
            task=task.id,
            task_sha256=task.sha256,
            candidate_sha256=candidate.sha256,
            verdict=Verdict.REJECTED if crowded else Verdict.ACCEPTED,
            reason=Reason.OUT_OF_MEMORY if crowded else None,
            speedup=None if crowded else self.speedup,
            reference_us=None if crowded else 100.0,
            policy=candidate.policy,
            techniques=candidate.techniques,
            source=candidate.source,
            checks={"strict_fp32": False},
            started=f"at {self.speedup}",
        )


@pytest.fixture
def benchmark(monkeypatch, script):
    fresh = {"judged": [], "rotated": [], "most": 100, "fails": set(), "crowded": set(), "speedup": 2.0}
    for name, value in fresh.items():
        monkeypatch.setattr(Pool, name, value)
    monkeypatch.setattr("kernelwright.search.bench.JudgePool", Pool)
    return script("cuda_l1_release")


@pytest.fixture
def release(tmp_path):
    return write_release(tmp_path / "h100.json", "secret kernel")


def write_release(path, kernel):
    rows = [
        {
            "level_id": level,
            "task_id": number,
            "ref_code": f"class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n# {level} {number}\n",
            "custom_code": None if (level, number) == (3, 4) else f"class ModelNew: ...  # {kernel} {level} {number}",
        }
        for level, count in LEVELS.items()
        for number in range(1, count + 1)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def published(benchmark, release, tmp_path):
    """Six of thirteen candidates and six of fourteen rotations, one of each an error; the run itself is gone."""
    Pool.most = 6
    _, failed, crowded, *_ = tasks_of(benchmark, release)
    Pool.fails, Pool.crowded = {failed}, {crowded}
    go_on(benchmark, release, tmp_path / "gone", "--seconds", "0", "--publish", tmp_path / "published")
    shutil.rmtree(tmp_path / "gone")
    Pool.most, Pool.fails, Pool.crowded, Pool.speedup = 100, set(), set(), 3.0
    Pool.judged.clear()
    Pool.rotated.clear()
    return tmp_path / "published"


def tasks_of(benchmark, release):
    entries = benchmark.load_suite("cuda-l1", path=release).entries
    return [entry.task.id for entry in sorted(entries, key=benchmark._turn)]


def go_on(benchmark, release, run, *words):
    benchmark.main([str(release), str(run), "--device", "cpu", "--baselines", ",".join(BASELINES), *map(str, words)])


def records_of(folder):
    return list(RunDirectory(folder).evaluations())


def test_a_run_goes_on_from_its_published_folder_and_judges_nothing_twice(benchmark, release, published, tmp_path, capsys):
    tasks = tasks_of(benchmark, release)
    failed, crowded = tasks[1], tasks[2]
    before, kept = records_of(published), tmp_path / "kept"
    assert b"secret" not in gzip.decompress((published / "evaluations.jsonl.gz").read_bytes())
    assert sorted({found.task for found in before}) == sorted(set(tasks[:6]) - {failed})
    capsys.readouterr()

    go_on(benchmark, release, tmp_path / "run", "--published", published, "--publish", kept)
    # What had failed, after the rest; and once more what others may have been to blame for.
    assert Pool.judged == [*tasks[6:13], failed, crowded]
    assert Pool.rotated == [*tasks[6:14], failed, crowded]
    after = records_of(kept)
    assert after[: len(before)] == before
    of_task = {task: [found.started for found in after if found.task == task] for task in tasks}
    assert of_task[tasks[0]] == ["at 2.0"] * 3, "the first part's records are the first part's"
    assert of_task[failed] == of_task[tasks[6]] == ["at 3.0"] * 3
    assert of_task[crowded] == ["at 2.0"] * 3 + ["at 3.0"] * 3
    assert sorted(path.name for path in kept.iterdir()) == sorted([*benchmark.PLAIN, "evaluations.jsonl.gz"])
    assert b"secret" not in gzip.decompress((kept / "evaluations.jsonl.gz").read_bytes())
    assert RunDirectory(kept).read_json("errors.json") == {}
    calls = RunDirectory(kept).read_json("calls.json")
    assert [call["published"] for call in calls] == [None, "published"]
    for name in ("config.json", "environment.json"):
        assert (kept / name).read_bytes() == (published / name).read_bytes(), "of the machine on which it began"
    covered = RunDirectory(kept).read_json("coverage.json")
    assert (covered["judged"], covered["candidates"]) == (13, 13)
    assert len(RunDirectory(tmp_path / "run").read_json("tasks.json")) == 14

    Pool.judged.clear()
    Pool.rotated.clear()
    first = (kept / "evaluations.jsonl.gz").read_bytes()
    go_on(benchmark, release, tmp_path / "run", "--published", published)
    go_on(benchmark, release, tmp_path / "run", "--only-publish", "--publish", kept)
    assert Pool.judged == Pool.rotated == [], "the same command again goes on from the run, not from the folder"
    assert (kept / "evaluations.jsonl.gz").read_bytes() == first


def test_what_is_left_is_said_of_each_level_before_it_is_begun(benchmark, release, published, tmp_path, capsys):
    tasks = tasks_of(benchmark, release)
    # Both levels have no task without a candidate, so that what is left is as many rotations as candidates.
    left = {level: sum(f"level{level}" in task for task in (tasks[1], *tasks[6:])) for level in (1, 2)}
    errors = {level: int(f"level{level}" in tasks[1]) for level in (1, 2)}
    capsys.readouterr()
    go_on(benchmark, release, tmp_path / "run", "--published", published)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Left to do, after commit ")
    assert f" on cpu with torch {version('torch')}:" in said[0]
    assert said[1:6] == [
        *(
            f"level {level}: {left[level]} of {LEVELS[level]} candidates ({errors[level]} after an error), "
            f"{left[level]} of {LEVELS[level]} rotations of baselines ({errors[level]} after an error)"
            for level in (1, 2)
        ),
        "level 3: 3 of 3 candidates (0 after an error), 4 of 4 rotations of baselines (0 after an error)",
        "all: 8 of 13 candidates (1 after an error), 9 of 14 rotations of baselines (1 after an error)",
        "once more, others may be to blame: 1 candidates, 1 rotations of baselines",
    ]
    assert "candidate: " in said[6], "and then it begins"


@pytest.mark.exhaustive
def test_each_level_has_its_share_early_when_asked(benchmark, release, tmp_path):
    go_on(benchmark, release, tmp_path / "fixed")
    assert all("level3" not in task for task in Pool.judged[:10])
    Pool.judged.clear()
    Pool.rotated.clear()
    go_on(benchmark, release, tmp_path / "shares", "--order", "shares")
    fixed = tasks_of(benchmark, release)
    for done, size in ((Pool.judged, {1: 6, 2: 4, 3: 3}), (Pool.rotated, LEVELS)):
        assert len(done) == sum(size.values())
        for level, count in size.items():
            mine = [task for task in fixed if f"level{level}" in task and task in done]
            assert [task for task in done if task in mine] == mine, "within a level the order is the suite's"
            for first in range(1, len(done) + 1):
                assert abs(sum(task in mine for task in done[:first]) - first * count / len(done)) <= 1
    configs = [RunDirectory(tmp_path / name).read_json("config.json") for name in ("fixed", "shares")]
    assert configs[0] == configs[1], "so that a run may go on in another order"


@pytest.mark.exhaustive
def test_a_run_goes_on_in_another_order(benchmark, release, published, tmp_path):
    go_on(benchmark, release, tmp_path / "run", "--published", published, "--order", "shares")
    tasks = tasks_of(benchmark, release)
    assert sorted(Pool.judged) == sorted([*tasks[6:13], tasks[1], tasks[2]])
    assert any("level3" in task for task in Pool.judged[:3])


@pytest.mark.exhaustive
def test_no_more_is_done_than_the_tasks_that_are_named(benchmark, release, published, tmp_path):
    tasks = tasks_of(benchmark, release)
    wanted = [tasks[8], tasks[1]]
    go_on(benchmark, release, tmp_path / "run", "--published", published, "--only", *wanted)
    assert sorted(Pool.judged) == sorted(wanted)
    assert set(Pool.rotated) <= set(wanted)
    assert RunDirectory(tmp_path / "run").read_json("calls.json")[-1]["only"] == wanted
    Pool.judged.clear()
    go_on(benchmark, release, tmp_path / "run")
    assert not set(Pool.judged) & set(wanted)
    assert len(Pool.judged) > 2


def test_a_name_that_is_no_task_of_the_release_is_refused(benchmark, release, tmp_path):
    with pytest.raises(UsageError, match="such as cuda-l1/level2/34; found level2/34"):
        go_on(benchmark, release, tmp_path / "run", "--only", "level2/34")


def other_settings(benchmark, published, monkeypatch):
    monkeypatch.setattr(benchmark, "SETTINGS", benchmark.SETTINGS.model_copy(update={"blocks": 8}))


def other_version(benchmark, published, monkeypatch):
    monkeypatch.setattr("kernelwright.search.bench.__version__", "99.0")


def other_release(benchmark, published, monkeypatch):
    write_release(published.parent / "h100.json", "another kernel")


def no_evaluations(benchmark, published, monkeypatch):
    (published / "evaluations.jsonl.gz").unlink()


def no_run(benchmark, published, monkeypatch):
    (published / "config.json").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_settings, r"another `settings` \(blocks: 6, now 8\)"),
        pytest.param(other_version, r'another `kernelwright` \(".*", now "99.0"\)', marks=pytest.mark.exhaustive),
        (other_release, "5 of its 15 evaluations are of other tasks or candidates"),
        pytest.param(no_evaluations, "found no evaluations there", marks=pytest.mark.exhaustive),
        (no_run, r"found no config\.json there"),
    ],
)
def test_what_is_published_of_another_judge_or_release_is_refused(
    benchmark, release, published, tmp_path, monkeypatch, change, words
):
    change(benchmark, published, monkeypatch)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UsageError, match=words):
        go_on(benchmark, release, tmp_path / "run", "--published", published)
    assert Pool.judged == []
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing was begun"


def test_a_directory_of_another_run_is_neither_filled_nor_written_to(benchmark, release, published, tmp_path, monkeypatch):
    run = tmp_path / "run"
    Pool.most = 1
    go_on(benchmark, release, run, "--seconds", "0")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(UsageError, match="lacks 15 of its 15 evaluations"):
        go_on(benchmark, release, run, "--published", published)
    other_settings(benchmark, published, monkeypatch)
    with pytest.raises(UsageError, match="another `settings`"):
        go_on(benchmark, release, run)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_run_directory_is_made_whole_or_not_at_all(benchmark, release, published, tmp_path, monkeypatch):
    def torn(run, suite):
        raise InfrastructureError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "write_tasks", torn)
        with pytest.raises(InfrastructureError, match="no space left"):
            go_on(benchmark, release, tmp_path / "run", "--published", published)
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob(".published-*"))
    go_on(benchmark, release, tmp_path / "run", "--published", published, "--only-publish", "--publish", tmp_path / "kept")
    assert records_of(tmp_path / "kept") == records_of(published)
