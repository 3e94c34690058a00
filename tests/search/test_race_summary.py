"""A race's summary follows from run directories: what is certain, what is within noise, and what is not decided."""

from __future__ import annotations

import gzip
import importlib
import json

import pytest

from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.records.screened import screened_of
from kernelwright.report.rescore import rescore
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.search.bench import write_tasks
from kernelwright.search.bench_summary import summarise
from kernelwright.tasks.entries import Suite, SuiteEntry
from tests.samples import TASK, accepted, rejected

LEVELS = {"level1/1": 1, "level1/2": 1, "level2/1": 2, "level2/2": 2, "level2/3": 2}
TASKS = {name: Task(id=f"kernelbench/{name}", source=f"{TASK.source}# {name}\n") for name in LEVELS}
WINNERS = {"level1/1": (2.0, 1.2), "level1/2": (1.3, 1.3)}
"""Speedups over eager of the confirmed winner and of torch.compile."""


@pytest.fixture
def race_summary(script):
    return script("race_summary")


@pytest.fixture
def run(tmp_path):
    """A race that was cut short: one task ahead, one within noise, one behind, one only screened, one untouched."""
    made = RunDirectory(tmp_path / "race")
    config = {"kind": "bench", "suite": "kernelbench", "tasks": [task.id for task in TASKS.values()], "policy": "builtin"}
    made.write_json("config.json", {**config, "judge": 1})

    def add(name, speedup, source, **changes):
        task = TASKS[name]
        found = {
            "task": task.id,
            "task_sha256": task.sha256,
            "reference_us": 100.0,
            "policy": "builtin",
            "techniques": ("t",),
        }
        made.append(accepted(speedup, source, **(found | changes)))

    def look(name, source, estimate):
        made.append(screened_of(TASKS[name], Candidate(source=source), correct=True, estimate=estimate, least_us=10.0))

    for name, (speedup, compiled) in WINNERS.items():
        look(name, "won", speedup)
        for confirms in (False, True):
            add(name, speedup, "won", confirms=confirms)
        add(name, compiled, "compile", policy=BASELINE_POLICY, techniques=("compile",))
        add(name, 9.0, "cudagraph", policy=BASELINE_POLICY, techniques=("cudagraph",))
    look("level2/1", "lost", 1.1)
    add("level2/1", 0.98, "lost")
    add("level2/1", 1.5, "compile", policy=BASELINE_POLICY, techniques=("compile",))
    look("level2/2", "unsure", 1.8)
    won = {name: Candidate(source="won", policy="builtin") for name in WINNERS}
    suite = Suite("kernelbench", tuple(SuiteEntry(task, won.get(name), LEVELS[name]) for name, task in TASKS.items()))
    write_tasks(made, suite)
    summarise(made, suite, {})
    return made


def test_each_decided_task_is_ahead_within_noise_or_behind(race_summary, run, capsys):
    race_summary.main([str(run.path)])
    found = json.loads((run.path / "summary.json").read_text())
    counts = {"asked": 5, "tasks": 3, "screened_only": 1, "untouched": 1, "verified": 2}
    counts |= {f"{where}_best_baseline": 1 for where in ("ahead_of", "within_noise_of", "behind")}
    assert {key: found[f"today_{key}"] for key in counts} == counts
    assert found["today_geomean_vs_eager"] == pytest.approx(2.6 ** (1 / 3), abs=1e-4)
    # The baseline cudagraph overwrites its outputs, so it is not the best one.
    assert found["today_geomean_vs_best_baseline"] == pytest.approx((2.0 / 1.2 / 1.5) ** (1 / 3), abs=1e-4)
    assert (found["today_median_vs_eager"], found["today_median_vs_best_baseline"]) == (1.3, 1.0)
    assert found["today_levels"]["level2"]["behind_best_baseline"] == 1
    roofline = {"least_us": 10.0, "operations_us": None, "reference": 0.1, "winner": pytest.approx(0.2)}
    assert found["today_rows"][0]["roofline"] == roofline
    assert "| certainly ahead of the best baseline | 1 | 1 | 0 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("techniques", "alone", "own"),
    [(["compile-cuda-graph"], 1, (1.0 / 1.5) ** (1 / 3)), (["t", "cuda-graph"], 0, (2.0 / 1.2 / 1.5) ** (1 / 3))],
)
def test_winners_that_only_wrap_the_reference_are_told_apart(race_summary, run, techniques, alone, own):
    lines = [line | {"techniques": techniques} for line in race_summary.Run(run.path).lines()]
    found = importlib.import_module("race_numbers").part(lines, {})
    assert (found["ahead_of_best_baseline"], found["ahead_by_wrapper_alone"]) == (1, alone)
    assert found["geomean_vs_best_baseline_own_code"] == pytest.approx(own, abs=1e-4)


def test_a_race_is_published_and_its_copy_says_the_same(race_summary, run, tmp_path):
    out, page = tmp_path / "results" / "race-h200", tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    for _ in range(2):
        race_summary.main([str(run.path), "--out", str(out), "--page", str(page)])
    text = page.read_text()
    assert text.count("## Today's shapes") == 1
    assert "**2 of 5 tasks are not decided.**" in text
    assert "| kernelbench/level1/1 | 100 | 2.00 (1.90 to 2.10) | 1.20, compile | 1.67 (1.51 to 1.84) | 20 % | t |" in text
    readme = (out / "README.md").read_text()
    assert (readme.count("](race)"), text.count("race-h200/race)")) == (1, 0)
    assert "](../results/race-h200/README.md#todays-shapes)" in text
    assert [part.count("### Not decided") for part in (readme, text)] == [1, 0]
    found = json.loads((out / "summary.json").read_text())
    assert rescore(RunDirectory(out / "race")).differences == []
    sources = {one.task: one.source for one in RunDirectory(out / "race").screened()}
    assert sources == {f"kernelbench/{name}": "" for name in (*WINNERS, "level2/1")} | {"kernelbench/level2/2": "unsure"}
    race_summary.main([str(out / "race"), "--out", str(tmp_path / "again"), "--without-sources", "race"])
    assert json.loads((tmp_path / "again" / "summary.json").read_text()) == found
    assert not any(one.source for one in RunDirectory(tmp_path / "again" / "race").screened())
    # Records of an earlier version lack a field.
    packed = out / "race" / "screened.jsonl.gz"
    older = gzip.decompress(packed.read_bytes()).replace(b'"operations_us":null,', b"")
    packed.write_bytes(gzip.compress(older, mtime=0))
    kept = {path.name: path.read_bytes() for path in (out / "race").iterdir()}
    race_summary.main([str(out / "race"), "--out", str(out)])
    assert {path.name: path.read_bytes() for path in (out / "race").iterdir()} == kept, "its own copy is an input too"


def copy_of(run, target):
    """Another run with the same records."""
    other = RunDirectory(target)
    for path in run.path.iterdir():
        (other.path / path.name).parent.mkdir(exist_ok=True)
        (other.path / path.name).write_bytes(path.read_bytes())
    return other


def rewrite(run, change):
    """Replace its verdicts by what `change` makes of them; those of which it makes nothing are left out."""
    kept = [changed for one in run.evaluations() if (changed := change(one)) is not None]
    run.evaluations_path.write_text("".join(f"{one.model_dump_json()}\n" for one in kept))


def test_of_two_runs_a_task_has_the_one_that_got_further(race_summary, run, tmp_path):
    other = RunDirectory(tmp_path / "earlier")
    other.write_json("config.json", run.read_json("config.json"))
    race_summary.main([str(other.path), str(run.path), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (found["today_asked"], found["today_tasks"], found["today_runs"]) == (5, 3, ["earlier", "race"])


def test_a_task_that_no_run_decides_keeps_its_baselines(race_summary, run, tmp_path):
    """Without them it would leave the mean in which undecided tasks count as the reference."""
    run.write_json("config.json", run.read_json("config.json") | {"baselines": ["eager", "compile"]})
    earlier, task = copy_of(run, tmp_path / "earlier"), TASKS["level2/2"]
    known = {"task": task.id, "task_sha256": task.sha256, "policy": BASELINE_POLICY, "techniques": ("compile",)}
    earlier.append(accepted(1.5, "compile", **known))
    race_summary.main([str(earlier.path), str(run.path), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    runs = {row["task"]: row["run"] for row in found["today_rows"]}
    assert (runs["kernelbench/level2/2"], runs["kernelbench/level1/1"]) == ("earlier", "race")
    assert (found["today_tasks"], found["today_floor_tasks"]) == (3, 4)

    for one, gpu in ((earlier, "H200"), (run, "H100 80GB HBM3")):
        one.write_json("config.json", one.read_json("config.json") | {"suite": "cuda-l1"})
        one.write_json("environment.json", {"gpu": [{"name": f"NVIDIA {gpu}"}]})
    race_summary.main([str(earlier.path), str(run.path), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["each_once"]
    assert (found["tasks"], found["h100_tasks"], found["floor_tasks"]) == (3, 3, 4)


@pytest.mark.parametrize("dates", [("2026-11-25T10:00:00+00:00", "2026-11-24T10:00:00+00:00"), ("", "")])
def test_of_two_runs_the_later_one_decides_a_task_even_if_it_was_slower(race_summary, run, tmp_path, dates):
    slower = copy_of(run, tmp_path / "slower")

    def made_worse(one):
        """There level1/1 has 1.5 in place of 2.0, and level1/2 is not decided."""
        if one.policy != BASELINE_POLICY and one.task.endswith("level1/2"):
            return None
        changes = {"started": dates[0]}
        if one.policy != BASELINE_POLICY and one.task.endswith("level1/1"):
            changes |= {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}
        return one.model_copy(update=changes)

    rewrite(slower, made_worse)
    rewrite(run, lambda one: one.model_copy(update={"started": dates[1]}))
    # By its dates `slower` is the later one; without dates by the order given.
    given = [slower, run] if dates[0] else [run, slower]
    race_summary.main([*(str(one.path) for one in given), "--out", str(tmp_path / "out")])
    rows = {row["task"]: row for row in json.loads((tmp_path / "out" / "summary.json").read_text())["today_rows"]}
    assert (rows["kernelbench/level1/1"]["run"], rows["kernelbench/level1/1"]["speedup"]) == ("slower", 1.5)
    assert rows["kernelbench/level1/2"]["run"] == "race", "the later run does not decide it"

    for one, gpu in ((slower, "H200"), (run, "H100 80GB HBM3")):
        one.write_json("config.json", one.read_json("config.json") | {"suite": "cuda-l1"})
        one.write_json("environment.json", {"gpu": [{"name": f"NVIDIA {gpu}"}]})
    race_summary.main([*(str(one.path) for one in given), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["each_once"]
    assert (found["tasks"], found["h100_tasks"]) == (3, 1), "that of the later run, of whichever GPU"


def test_a_run_that_went_on_with_one_task_is_no_later_for_another(race_summary, run, tmp_path):
    other = copy_of(run, tmp_path / "other")
    rewrite(other, lambda one: one.model_copy(update={"started": "2026-11-25T10:00:00+00:00"}))
    went_on = {"kernelbench/level1/2": "2026-11-26T10:00:00+00:00"}
    rewrite(run, lambda one: one.model_copy(update={"started": went_on.get(one.task, "2026-11-24T10:00:00+00:00")}))
    race_summary.main([str(other.path), str(run.path), "--out", str(tmp_path / "out")])
    rows = {row["task"]: row for row in json.loads((tmp_path / "out" / "summary.json").read_text())["today_rows"]}
    assert [rows[f"kernelbench/level1/{number}"]["run"] for number in (1, 2)] == ["other", "race"]


def test_each_suite_has_numbers_and_a_section_of_its_own(race_summary, run, tmp_path):
    runs = {}
    for suite, group in {
        "cuda-l1": "h100_", "kernelbench": "today_", "robust-kbench": "robust_", "modules": "modules_", "mine": "other_",
    }.items():  # fmt: skip
        other = runs[group] = copy_of(run, tmp_path / suite)
        other.write_json("config.json", run.read_json("config.json") | {"suite": suite})
        commit = {"commit": f"{len(runs)}" * 40}
        other.write_json("environment.json", commit | {"gpu": [{"name": "NVIDIA H100 80GB HBM3", "driver_version": "5"}]})
    race_summary.main([*(str(one.path) for one in runs.values()), "--out", str(tmp_path / "out")])
    found, text = (json.loads((tmp_path / "out" / "summary.json").read_text()), (tmp_path / "out" / "README.md").read_text())
    for place, (group, one) in enumerate(runs.items(), 1):
        assert (found[f"{group}runs"], found[f"{group}tasks"]) == ([one.path.name], 3)
        assert (
            f"NVIDIA H100 80GB HBM3 (driver 5, torch None, Triton None), commit {str(place) * 7}: [{one.path.name}]" in text
        )
    assert "tasks" not in found, "no run of CUDA-L1's shapes on another GPU"
    assert "each_once" not in found


def test_what_an_h100_found_for_itself_is_told_beside_the_first_gpu(race_summary, run, tmp_path):
    config = run.read_json("config.json") | {"suite": "cuda-l1"}
    run.write_json("config.json", config)
    other = copy_of(run, tmp_path / "on-another-card")
    other.write_json("environment.json", {"gpu": [{"name": "NVIDIA H100 80GB HBM3"}]})
    # There another technique won level1/2, and level2/1 is not decided.
    kept = []
    for one in run.evaluations():
        if one.task.endswith("level1/2") and one.policy != BASELINE_POLICY:
            one = one.model_copy(update={"techniques": ("another",)})
        kept += [] if one.task.endswith("level2/1") and one.policy != BASELINE_POLICY else [one]
    other.evaluations_path.write_text("".join(f"{one.model_dump_json()}\n" for one in kept))
    page = tmp_path / "page.md"
    race_summary.main([str(run.path), str(other.path), "--out", str(tmp_path / "out"), "--page", str(page)])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    once, told = summary["each_once"], summary["h100_carried"]
    assert (once["asked"], once["tasks"], once["h100_tasks"]) == (5, 3, 2), "level2/1 is decided on the first GPU alone"
    assert once["geomean_vs_best_baseline"] == summary["geomean_vs_best_baseline"]
    assert {key: told[key] for key in ("tasks", "winners_on_both", "winners_alike")} == {
        "tasks": 2, "winners_on_both": 2, "winners_alike": 1,
    }  # fmt: skip
    assert told["geomean_vs_best_baseline"] == pytest.approx((2.0 / 1.2) ** 0.5, abs=1e-4)
    assert "| kernelbench/level1/2 | 1.00 | 1.00 | another | no |" in (tmp_path / "out" / "README.md").read_text()
    assert page.read_text().count("| kernelbench/level1/2 |") == 1, "a task of both is told once"


def test_what_another_gpus_winners_give_on_an_h100_is_told(race_summary, script, run, tmp_path):
    config = run.read_json("config.json") | {"suite": "cuda-l1"}
    run.write_json("config.json", config)
    h100 = {"gpu": [{"name": "NVIDIA H100 80GB HBM3"}]}
    other, carried = copy_of(run, tmp_path / "on-another-card"), RunDirectory(tmp_path / "carried")
    carried.write_json("config.json", {key: value for key, value in config.items() if key != "policy"})
    for one in (other, carried):
        one.write_json("environment.json", h100)
    script("race_winners").main([str(run.path), "--out", str(tmp_path / "winners.jsonl")])
    sources = [json.loads(line) for line in (tmp_path / "winners.jsonl").read_text().splitlines()]
    assert sources == [{"task": f"kernelbench/{name}", "source": "won"} for name in WINNERS]
    tasks = [TASKS[name] for name in (*WINNERS, "level2/1")]
    judged = [{"task": task.id, "task_sha256": task.sha256, "policy": ""} for task in tasks]
    carried.append(accepted(1.5, "won", **judged[0]))
    carried.append(rejected(source="won", **judged[1]))
    carried.append(accepted(1.7, "another text", **judged[0]))
    carried.append(accepted(1.7, "won", **judged[2]))
    race_summary.main([*(str(one.path) for one in (run, other, carried)), "--out", str(tmp_path / "out")])
    told = json.loads((tmp_path / "out" / "summary.json").read_text())["h100_carried_winners"]
    counts = {"tasks": 2, "accepted": 1, "ahead_of_eager": 1, "searched_too": 1, "own_certainly_ahead": 1}
    assert {key: told[key] for key in counts} == counts
    assert (told["geomean_vs_eager"], told["h100_geomean_vs_eager"]) == (2.0, 1.5)
    assert told["own_over_carried"] == pytest.approx(2.0 / 1.5, abs=1e-4)
    assert "| kernelbench/level1/2 | 1.30 | wrong-output | 1.30 |" in (tmp_path / "out" / "README.md").read_text()


def test_cuda_l1s_kernels_are_told_apart_by_the_gpu_that_measured_them(race_summary, run, tmp_path):
    config = run.read_json("config.json") | {"suite": "cuda-l1"}
    run.write_json("config.json", config)
    h100 = {"gpu": [{"name": "NVIDIA H100 80GB HBM3"}]}
    other, kernels = copy_of(run, tmp_path / "on-another-card"), RunDirectory(tmp_path / "kernels")
    kernels.write_json("config.json", {key: value for key, value in config.items() if key != "policy"})
    for one in (other, kernels):
        one.write_json("environment.json", h100)
    task = TASKS["level1/1"]
    kernels.append(accepted(1.6, "theirs", task=task.id, task_sha256=task.sha256, policy="cuda-l1"))
    race_summary.main([*map(str, (run.path, other.path, kernels.path)), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (found["tasks_vs_cuda_l1"], found["geomean_vs_cuda_l1"]) == (1, 1.25)
    assert (found["tasks_vs_cuda_l1_same_gpu"], found["geomean_vs_cuda_l1_same_gpu"]) == (0, None)
    assert (found["h100_tasks_vs_cuda_l1_same_gpu"], found["h100_geomean_vs_cuda_l1_same_gpu"]) == (1, 1.25)
    assert found["each_once"]["tasks_vs_cuda_l1_same_gpu"] == 1, "the H100's line counts there"


def test_runs_that_cannot_be_summed_up_are_refused(race_summary, run, tmp_path, capsys):
    out = ["--out", tmp_path / "out"]
    for arguments in (
        [run.path, tmp_path / "b"],
        [run.path, run.path, *out],
        [run.path, *out, "--without-sources", "b"],
        [tmp_path / "empty"],
    ):
        with pytest.raises(SystemExit):
            race_summary.main([*map(str, arguments)])
    assert "wanted a run of `kernelwright bench --policy`" in capsys.readouterr().err
