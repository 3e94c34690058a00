"""Each script of `benchmarks/` runs: its help, and in small what a page or a campaign needs of it."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kernelwright.contrastive.evaluations import SharedEvaluations
from kernelwright.contrastive.prompts import whole_source
from kernelwright.errors import UsageError
from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.records.screened import screened_of
from kernelwright.rewrites.order import Place, read_order
from kernelwright.rewrites.tracing import trace
from tests.contrastive.toys import toy_code, toy_evaluation, toy_task
from tests.gpu import stand_in
from tests.rewrites.samples import task_text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
RACES = ROOT / "results" / "kernelbench-h200"
SMALL_RACE = RACES / "today-pages-5-h200"
COMMANDS = sorted(path.name for path in FOLDER.glob("*.py") if "def main(" in path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _one_another(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_every_script_has_its_sentence():
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(FOLDER.glob("*.py")) if f"`{path.name}`" not in told] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed(name, set_arguments, capsys):
    set_arguments("--help")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert end.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out


# --- searched suites ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "printed"),
    [
        ("screen_agreement", [str(SMALL_RACE)], '"screen_agreement"'),
        ("race_winners", [str(SMALL_RACE), "--out", "winners.jsonl"], "winners in winners.jsonl"),
    ],
)
def test_a_published_run_is_read(name, arguments, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    importlib.import_module(name).main(arguments)
    assert printed in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_summary_of_all_searches_is_what_the_records_say():
    from make_pages import SUMMARY, summary_text

    assert SUMMARY.read_text(encoding="utf-8") == summary_text()


def pages_of_numbers():
    """The pages that `make pages` writes, with no mark left over and no block of another."""
    from make_pages import PAGES, stored, written

    return {str(path.relative_to(ROOT)): (path.read_text(encoding="utf-8"), written(path, stored())) for path in PAGES}


def test_every_number_on_a_page_is_what_the_summaries_say():
    found = pages_of_numbers()
    assert [name for name, (is_there, should_be) in found.items() if is_there != should_be] == []
    for text, _ in found.values():
        assert text.count("<!-- numbers: begin ") == text.count("<!-- numbers: end ") > 0


HEADLINES = ("README.md", *(f"docs/{name}.md" for name in ("results", "kernelbench", "cuda-l1-release", "training")))


@pytest.mark.parametrize("name", HEADLINES)
def test_no_gain_stands_outside_a_block(name):
    from make_pages import BLOCK

    left = BLOCK.sub("", (ROOT / name).read_text(encoding="utf-8"))
    assert re.findall(r".*\d\.\d+ ?(?:x\b|%|\u00d7).*", left) == []


def test_a_run_is_published_without_sources_of_what_was_only_screened(tmp_path):
    from make_pages import publish
    from race_numbers import Run

    copy = Run(tmp_path / SMALL_RACE.name)
    publish(Run(SMALL_RACE), copy.path)
    assert list(copy.evaluations()) == list(Run(SMALL_RACE).evaluations())
    assert copy.dated == Run(SMALL_RACE).dated


COMMAND = """import json, pathlib, sys
arguments = sys.argv[1:]
out = pathlib.Path(arguments[arguments.index("--out") + 1])
out.mkdir(exist_ok=True)
with (out / "evaluations.jsonl").open("a") as records:
    print(json.dumps(arguments), file=records)
while out.name == "endless":
    pass
"""


def test_a_plan_of_searches_is_run_within_its_time_packed_and_goes_on(tmp_path, monkeypatch, capsys):
    import race

    (tmp_path / "command.py").write_text(COMMAND)
    monkeypatch.setattr(race, "COMMAND", (sys.executable, str(tmp_path / "command.py")))
    monkeypatch.setattr(race, "LEAST_S", 0.0)
    monkeypatch.setattr(race, "OVERTIME_S", 0.0)

    def run(work, *steps):
        (tmp_path / "plan.json").write_text(json.dumps({"0": steps}))
        folders = ["--work", str(tmp_path / work), "--pack", str(tmp_path / "packed"), "--device", "cpu"]
        race.main([str(tmp_path / "plan.json"), "--seconds", "3", *folders])
        return capsys.readouterr().out

    search = {"name": "search", "arguments": ["builtin", "--policy", "builtin"], "share": 0.9}
    endless = {"name": "endless", "arguments": ["builtin"], "share": 0.5}
    assert "endless: killed at the end of the time" in run("work", search, endless)
    (asked,) = [json.loads(line) for line in (tmp_path / "work" / "search" / "evaluations.jsonl").read_text().splitlines()]
    assert asked[:2] == ["bench", "builtin"]
    assert 0 < float(asked[asked.index("--minutes") + 1]) <= 0.05
    with tarfile.open(tmp_path / "packed" / "search.tar.gz") as archive:
        assert "search/evaluations.jsonl" in archive.getnames()
    assert "search: status 0" in run("elsewhere", search | {"earlier": str(tmp_path / "packed" / "search.tar.gz")})
    assert len((tmp_path / "elsewhere" / "search" / "evaluations.jsonl").read_text().splitlines()) == 2


@pytest.mark.exhaustive
def test_coverage_of_intervals_is_simulated(tmp_path, set_arguments):
    import interval_coverage

    set_arguments(tmp_path, "--runs", "20", "--scored-runs", "2", "--workers", "1")
    interval_coverage.main()
    assert json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.exhaustive
def test_how_busy_the_judge_keeps_a_device_is_measured(tmp_path, set_arguments):
    import judge_throughput

    options = ["--device", "cpu", "--tiny", "--evaluations", "6", "--seconds", "0.5", "--per-device", "1"]
    set_arguments(tmp_path, *options)
    judge_throughput.main()
    assert 0 < json.loads((tmp_path / "summary.json").read_text())["share_of_timing_alone"] < 1


# --- contrastive training -------------------------------------------------------------------------------------------

RECIPE = """
import json, os, pathlib, sys
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
only = words[words.index("--only") + 1 :]
with (out / "asked.jsonl").open("a") as file:
    file.write(json.dumps({"only": only, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}) + chr(10))
for part in only:
    kind, _, name = part.partition(":")
    if kind == "augment":
        (out / "sft").mkdir(exist_ok=True)
        (out / "sft" / "examples.jsonl").touch()
    elif kind == "train":
        (out / name / "final").mkdir(parents=True)
        (out / name / "final" / "adapter_config.json").touch()
    elif kind == "measure":
        (out / "held-out" / "results").mkdir(parents=True, exist_ok=True)
        (out / "held-out" / "results" / f"{name}.json").write_text("{}")
    else:
        (out / "summary.json").write_text("{}")
"""
"""Stands for recipes/cuda_l1.py and leaves marks."""


def test_a_campaign_does_every_part_once_and_goes_on_elsewhere_from_its_export(tmp_path, monkeypatch):
    import contrastive_campaign as campaign

    (tmp_path / "recipe.py").write_text(RECIPE)
    monkeypatch.setattr(campaign, "RECIPE", tmp_path / "recipe.py")
    monkeypatch.setattr(campaign, "POLL_S", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(work, *more):
        words = ["--base", "model", "--work", str(tmp_path / work), "--export", str(tmp_path / f"{work}-export"), *more]
        assert campaign.main([*words, "--gpus", "4", "--time-limit", "1000", "--reserve", "300"]) == 0
        return [json.loads(line) for line in (tmp_path / work / "asked.jsonl").read_text().splitlines()]

    calls = run("work")
    assert calls[0] == {"only": ["augment:sft"], "gpus": "0,1,2,3"}
    assert ["train:sft", "train:self-supervised", "measure:self-supervised"] in [call["only"] for call in calls]
    trained = {
        call["only"][0]: call["gpus"] for call in calls if call["only"][0] in {f"train:{arm}" for arm in campaign.ARMS}
    }
    assert sorted(trained.values()) == ["0", "1", "2", "3"]
    assert calls[-1]["only"] == ["summary"]
    assert [call["only"] for call in run("elsewhere", "--resume", str(tmp_path / "work-export"))[len(calls) :]] == [
        ["summary"]
    ]


def test_measurements_are_exported_and_published_without_weights(tmp_path):
    import contrastive_export
    from contrastive_publish import publish

    task, work = toy_task("even", "amber"), tmp_path / "work"
    candidate = Candidate(source=whole_source(task, toy_code(0), "subclass"))
    evaluation = toy_evaluation(task, candidate)
    RunDirectory(work / "sft").append(evaluation)
    SharedEvaluations(work / "judged.sqlite", "first", None).add(evaluation)
    (work / "sft" / "final").mkdir()
    save_file({"weight": torch.ones(2)}, work / "sft" / "final" / contrastive_export.WEIGHTS)
    (work / "summary.json").write_text("{}")
    contrastive_export.packed(work, tmp_path / "out")
    contrastive_export.unpack(tmp_path / "out", tmp_path / "back")
    assert SharedEvaluations(tmp_path / "back" / "judged.sqlite", "first", None).find(task, candidate) == evaluation
    publish(work, tmp_path / "published")
    published = {str(path.relative_to(tmp_path / "published")) for path in (tmp_path / "published").rglob("*.*")}
    assert published == {"summary.json", "sft/evaluations.jsonl.xz"}
    assert list(RunDirectory(tmp_path / "published" / "sft").evaluations()) == [evaluation]


def test_an_adapter_is_packed_as_its_change_and_loses_a_hundredth_of_it():
    from contrastive_weights import error_of, packed_adapter, restored_adapter

    stage_2 = {"a.lora_A.weight": torch.randn(4, 96), "b.lora_B.weight": torch.randn(64, 4)}
    arm = {name: weight + 0.05 * torch.randn_like(weight) for name, weight in stage_2.items()}
    since = packed_adapter(stage_2)
    packed = packed_adapter(arm, since)
    assert error_of(restored_adapter(packed, since), arm, stage_2) < 0.01
    assert len(packed) < 1.5 * sum(weight.numel() for weight in arm.values()) + 1000


# --- machine code ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.toolchain
def test_a_machine_code_campaign_in_small_and_its_published_folder(tmp_path, set_arguments, monkeypatch):
    import sass_campaign
    from sass_publish import publish

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    options = ["--backend", "simulated-issue", "--agents", "greedy,random", "--budget", "30", "--kernels", "rope"]
    set_arguments(tmp_path / "out", *options, "--side-by-side", "2", "--minutes", "5")
    sass_campaign.main()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["kernels"], summary["schedules_run"], summary["wrong_outputs"], summary["failed"]) == (1, 60, 0, [])
    assert summary["per_kernel"]["rope"]["why_not_deployed"] == "simulated"
    publish(tmp_path / "out", tmp_path / "published")
    assert (tmp_path / "published" / "rope" / "greedy" / "schedules.jsonl.xz").exists()


@pytest.mark.exhaustive
@pytest.mark.toolchain
@pytest.mark.skipif(stand_in.COMPILER is None, reason="needs a C compiler")
def test_legal_schedules_are_executed_and_wrong_outputs_counted(tmp_path, monkeypatch):
    import sass_execute
    import sass_prepare

    monkeypatch.setenv(stand_in.VARIABLE, str(stand_in.build(tmp_path)))
    sass_prepare.prepare(tmp_path / "kernels", ["softmax"])
    options = {"seconds": 100.0, "slice_size": 10, "launcher_on": stand_in.stand_in_on}
    found = sass_execute.execute(tmp_path / "kernels", tmp_path / "right", schedules=10, **options)
    assert (found["schedules"], found["wrong"], found["faults"], found["broken"]) == (10, 0, 0, {})
    monkeypatch.setenv("FAKE_CUDA_WRONG_AT", "9")
    found = sass_execute.execute(tmp_path / "kernels", tmp_path / "wrong", schedules=10, **options)
    assert (found["wrong"], found["faults"], found["bad"][0]["kernel"]) == (1, 0, "softmax")


# --- the order of proposals -------------------------------------------------------------------------------------------


def test_an_order_is_learnt_from_runs(tmp_path, capsys):
    learn_order = importlib.import_module("learn_order")
    run = RunDirectory(tmp_path / "run")
    texts = {
        "product": task_text("return self.f(a)", "torch.randn(64, 6)", "self.f = nn.Linear(6, 8)"),
        "sum": task_text("return a.sum(1)", "torch.randn(64, 6)"),
    }
    tasks = [Task(id=name, source=text) for name, text in texts.items()]
    run.write_json("tasks.json", [task.model_dump(mode="json") for task in tasks])
    looks = {("graph",): 1.5, ("slow",): 0.7}
    for task in tasks:
        for number, (names, estimate) in enumerate(looks.items()):
            candidate = Candidate(source=f"# {number}", policy="builtin", techniques=names)
            run.append(screened_of(task, candidate, correct=True, estimate=estimate))
    out = tmp_path / "order.json"
    assert learn_order.main([str(run.path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 tasks, 4 candidates, 2 families")
    for order in ("as they were looked at", "at random", "learnt, family left out"):
        assert order in said
    learnt = read_order(out)
    place = Place.of(trace(tasks[0]))
    assert place.operators == frozenset({"linear"})
    assert learnt.gain(["graph"], place) > 0 > learnt.gain(["slow"], place)
    assert json.loads(out.read_text()) == learnt.weights
    (tmp_path / "empty").mkdir()
    assert learn_order.main([str(tmp_path / "empty"), "--out", str(out)]) == UsageError.exit_status
    assert "Wanted the run of a search with its tasks" in capsys.readouterr().err
