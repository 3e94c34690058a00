"""recipes/cuda_l1.py from top to bottom on the toy world, and the campaign that runs it in slices."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from kernelwright.contrastive.held_out import TaskSplit
from kernelwright.contrastive.samplers import CONTRASTIVE
from kernelwright.errors import UsageError
from tests.contrastive.toys import ToyJudge, toy_context, toy_tasks

ROOT = Path(__file__).parents[2]
SPLIT = TaskSplit(tuple(toy_tasks(("amber", "beryl", "coral"))), tuple(toy_tasks(("opal",))))
CHANGES = (
    *(f'{stage}.model.dtype="float32"' for stage in ("sft", "self-supervised", "contrastive")),
    *(f"{stage}.sampling.max_tokens=64" for stage in ("self-supervised", "contrastive", "held-out")),
    'sft.augmentation.teachers=["toy"]',
    "sft.model.lora={rank=4, alpha=8}",
    "sft.optimiser.max_length=200",
    "self-supervised.optimiser.max_length=200",
    "sft.optimiser.epochs=1",
    "sft.optimiser.learning_rate=1e-2",
    "self-supervised.rounds=1",
    "contrastive.steps=1",
    "contrastive.grpo.groups=2",
    "contrastive.checker.kind='none'",
)


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recipe_module():
    return module_at(ROOT / "recipes" / "cuda_l1.py")


@pytest.mark.exhaustive
def test_the_recipe_runs_from_the_first_example_to_the_table(tiny_base, tmp_path, recipe_module, capsys):
    judge = ToyJudge()
    stops = iter([False] * 6 + [True])

    class Contexts:
        """The same toy judge for all parts."""

        def __init__(self, out_of_time):
            self.context = toy_context(judge, out_of_time=out_of_time)

        def of(self, section, checker):
            return self.context

    in_time = Contexts(lambda: False)
    tables = recipe_module.tables_of(ROOT / "recipes", CHANGES)
    late = recipe_module.Recipe(str(tiny_base), tmp_path, tables, Contexts(lambda: next(stops, True)), SPLIT)
    assert not recipe_module.run_recipe(late)
    recipe = recipe_module.Recipe(str(tiny_base), tmp_path, tables, in_time, SPLIT)
    assert recipe_module.run_recipe(recipe)
    told = recipe.summarise()
    wanted = {
        "correct_zero_shot",
        "correct_after_sft",
        "correct_after_self_supervised",
        "speedup_sft",
        "speedup_self_supervised",
        "speedup_evolutionary",
        "speedup_vanilla_grpo",
        "speedup_contrastive_random",
        "speedup_contrastive_bucket",
        "speedup_contrastive_island",
        "speedup_contrastive",
    }
    assert wanted <= set(told)
    assert {key for key in wanted if key.startswith("speedup")} <= set(told["intervals"])
    assert told["held_out_tasks"] == 2
    assert set(told["contrastive_sampler_chosen_by"]) == set(CONTRASTIVE)
    assert json.loads((tmp_path / "summary.json").read_text()) == told
    rows = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert len(rows) == len(recipe_module.MEASURED)
    assert any("contrastive-bucket" in row and "3.12" in row for row in rows)
    count = judge.count
    assert recipe_module.run_recipe(recipe)  # everything is there: nothing is judged, sampled or trained again
    assert judge.count == count

    campaign = module_at(ROOT / "benchmarks" / "contrastive_export.py")
    campaign.export(tmp_path, tmp_path.parent / "exported")
    again = recipe_module.Recipe(str(tiny_base), tmp_path.parent / "exported", tables, in_time, SPLIT)
    assert again.summarise() == told
    assert not list((tmp_path.parent / "exported").rglob("optimizer.pt"))
    assert "speedup" not in capsys.readouterr().out


@pytest.mark.exhaustive
def test_an_exported_arm_goes_on_where_it_was_without_its_optimiser(tiny_base, tmp_path):
    from kernelwright.contrastive.reinforcement import train_contrastive
    from kernelwright.contrastive.samples import RolloutLog
    from kernelwright.contrastive.settings import stage_from
    from kernelwright.records import RunDirectory

    values = {
        "model": {"base": str(tiny_base), "dtype": "float32", "lora": {"rank": 4}},
        "sampling": {"max_tokens": 32},
        "grpo": {"groups": 2},
        "optimiser": {"micro_batch": 8},
        "steps": 3,
    }
    work = tmp_path / "work"
    calls = iter([False, True])
    late = toy_context(ToyJudge(), out_of_time=lambda: next(calls, True))
    config = stage_from("contrastive", values)
    cut = train_contrastive(config, SPLIT, RunDirectory(work / "contrastive-bucket"), late)
    assert (cut.finished, cut.steps) == (False, 1)
    campaign = module_at(ROOT / "benchmarks" / "contrastive_export.py")

    def moved():
        campaign.export(work, tmp_path / "out")
        shutil.rmtree(work)
        shutil.copytree(tmp_path / "out", work)

    moved()
    (checkpoint,) = (work / "contrastive-bucket" / "checkpoints").iterdir()
    assert not (checkpoint / "optimizer.pt").exists()
    going_on = toy_context(ToyJudge())
    longer = stage_from("contrastive", values | {"steps": 4})
    result = train_contrastive(longer, SPLIT, RunDirectory(work / "contrastive-bucket"), going_on)
    assert (result.finished, result.steps) == (True, 4)
    kept = {e.candidate_sha256 for e in RunDirectory(work / "contrastive-bucket").evaluations()}
    moved()
    assert {e.candidate_sha256 for e in RunDirectory(work / "contrastive-bucket").evaluations()} == kept
    assert len(list(work.rglob("adapter_model.safetensors"))) == 1
    longest = stage_from("contrastive", values | {"steps": 5})
    result = train_contrastive(longest, SPLIT, RunDirectory(work / "contrastive-bucket"), going_on)
    assert (result.finished, result.steps) == (True, 5)
    steps = [rollout.step for rollout in RolloutLog(work / "contrastive-bucket").rollouts()]
    assert steps == sorted(steps)
    assert [steps.count(step) for step in range(5)] == [16] * 5


def test_arms_and_ablations_of_every_seed_are_parts(recipe_module):
    tables = recipe_module.tables_of(ROOT / "recipes" / "device_bound", [])
    recipe = recipe_module.Recipe("base", ROOT, tables, None, seeds=2, ablations=True)
    parts = set(recipe.steps())
    assert {"train:vanilla-grpo-seed-1", "train:contrastive-bucket-seed-1", "measure:vanilla-grpo-seed-1"} <= parts
    assert {
        f"measure:contrastive-bucket{seed}-{how}" for seed in ("", "-seed-1") for how in ("shuffled", "one-level")
    } <= parts
    assert campaign_ablations() == tuple(recipe_module.ABLATIONS)
    for folder in ("device_bound", "device_bound/trial"):
        tables = recipe_module.tables_of(ROOT / "recipes" / folder, [])
        recipe_module.Recipe("tiny-random", ROOT, tables, None).require([])
        assert tables["contrastive"]["reward"]["baseline"] == tables["held-out"]["baseline"] == "best"


def campaign_ablations():
    text = (ROOT / "benchmarks" / "contrastive_campaign.py").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("ABLATIONS = "))
    return ast.literal_eval(line.removeprefix("ABLATIONS = "))


def test_changes_reach_the_settings_they_name(recipe_module):
    tables = recipe_module.tables_of(ROOT / "recipes", ["contrastive.grpo.groups=3", 'sft.tasks.suites=["builtin"]'])
    assert tables["contrastive"]["grpo"]["groups"] == 3
    assert tables["sft"]["tasks"]["suites"] == ["builtin"]
    with pytest.raises(UsageError, match="train:sft"):
        recipe_module.chosen_steps(recipe_module.Recipe("base", ROOT, tables, None), ["train:everything"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--only", "train:everything"], "Wanted parts among"),
        (["--set", "foo"], "Wanted --set STAGE.KEY=VALUE"),
        (["--set", "contrastiv.steps=1"], "Wanted --set STAGE.KEY=VALUE"),
        (["--set", "contrastive.steps.x=1"], "Wanted --set STAGE.KEY=VALUE"),
        (["--set", "contrastive.steps=many"], "Wanted a TOML value"),
        (["--set", "contrastive.step=1"], "found `step`; did you mean `steps`?"),
        (["--set", "held-out.sample=1"], "found `sample`; did you mean `samples`?"),
    ],
)
def test_a_wrong_argument_is_one_line_before_anything_is_judged(recipe_module, tmp_path, capsys, wrong, said):
    arguments = ["--base", "nothing", "--out", f"{tmp_path}/out", "--only", "augment:sft"]
    assert recipe_module.main([*arguments, *wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there_is_told_before_anything_is_judged(recipe_module, tmp_path, capsys):
    base = f"{tmp_path}/nothing"
    assert recipe_module.main(["--base", base, "--out", f"{tmp_path}/out"]) == 2
    assert base in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    recipe = recipe_module.Recipe(base, tmp_path, recipe_module.tables_of(ROOT / "recipes", []), None)
    recipe.require(["augment:sft"])  # which needs no model


def test_exports_add_up(tmp_path):
    from kernelwright.contrastive.prompts import whole_source
    from kernelwright.records import Candidate, RunDirectory
    from tests.contrastive.toys import toy_code, toy_evaluation, toy_task

    campaign = module_at(ROOT / "benchmarks" / "contrastive_export.py")
    task = toy_task("even", "amber")
    work, out = tmp_path / "work", tmp_path / "out"
    for way in range(3):
        candidate = Candidate(source=whole_source(task, toy_code(way), "subclass"))
        RunDirectory(work / "arm").append(toy_evaluation(task, candidate))
        campaign.export(work, out)
        campaign.export(work, out)
        assert len(list(RunDirectory(out / "arm").evaluations())) == way + 1
        assert [path.name for path in (out / "arm").iterdir()] == ["evaluations.jsonl.gz"]
        if way == 1:  # the next slice runs on another machine
            shutil.rmtree(work)
            shutil.copytree(out, work)
