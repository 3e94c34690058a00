from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.contrastive.context import claim
from kernelwright.contrastive.settings import (
    HeldOutConfig,
    read_stage,
    stage_from,
)
from kernelwright.errors import ConfigError, UsageError
from kernelwright.records import RunDirectory

RECIPES = Path(__file__).parents[2] / "recipes"
MODEL = {"base": "somewhere/model"}


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("sft", "sft"),
        ("self-supervised", "self_supervised"),
        ("contrastive", "contrastive"),
        ("contrastive", "vanilla_grpo"),
        ("contrastive", "evolutionary"),
    ],
)
def test_the_recipes_are_configurations_that_the_judge_takes_too(stage, name):
    config = read_stage(stage, RECIPES / f"{name}.toml")
    assert config.judge.judge_settings().processes_min == 1
    assert config.judge.confirming_settings().processes_min > 1


@pytest.mark.parametrize("stage", ["sft", "self-supervised", "contrastive"])
def test_the_recipes_for_five_minutes_need_no_gpu_and_no_download(stage):
    config = read_stage(stage, RECIPES / "five_minutes" / f"{stage.replace('-', '_')}.toml", "models/mine")
    assert (config.judge.device, config.model.base, config.model.tuning) == ("cpu", "models/mine", "full")


def test_the_special_cases_of_the_third_stage_differ_from_it_in_what_they_are_named_for_alone():
    contrastive, vanilla, evolutionary = (
        read_stage("contrastive", RECIPES / f"{name}.toml") for name in ("contrastive", "vanilla_grpo", "evolutionary")
    )
    assert vanilla.exemplars.sampler == "none"
    assert vanilla.model_copy(update={"exemplars": contrastive.exemplars}) == contrastive
    assert not evolutionary.update
    assert evolutionary.model_copy(update={"update": True}) == contrastive


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": {}}, "`optimizer`; did you mean `optimiser`"),
        ({"grpo": {"group_sise": 4}}, "grpo.group_sise"),
        ({"grpo": {"group_size": 1}}, "grpo.group_size"),
        ({"exemplars": {"sampler": "best"}}, "exemplars.sampler"),
        ({"optimiser": {"micro_batch": 5}}, "does not divide 32 rollouts"),
        ({"model": {}}, "a model to train"),
        ({"model": {"bas": "tiny-random"}}, "`model.bas`; did you mean `base`"),
    ],
)
def test_a_setting_that_cannot_be_names_itself(changes, said):
    with pytest.raises(ConfigError, match=said):
        stage_from("contrastive", {"model": MODEL} | changes)


@pytest.mark.parametrize(
    ("stage", "bounds", "said"),
    [
        ("sft", {"augmentation": {"slowest": 1.1, "fastest": 3.0}}, "slowest and fastest bound speedups"),
        ("sft", {"augmentation": {"fastest": 3.0}}, "fastest bound speedups"),
        ("self-supervised", {"slowest": 1.1}, "slowest bound speedups"),
    ],
)
def test_a_bound_of_speedups_needs_them_measured(stage, bounds, said):
    with pytest.raises(ConfigError, match=said):
        stage_from(stage, {"model": MODEL} | bounds)
    timed = {"augmentation": bounds["augmentation"] | {"timed": True}} if stage == "sft" else bounds | {"timed": True}
    assert stage_from(stage, {"model": MODEL} | timed)


def test_an_unknown_setting_of_the_judge_is_named():
    config = stage_from("sft", {"model": MODEL, "judge": {"settings": {"block": 3}}})
    with pytest.raises(ConfigError, match=r"`block`; did you mean `blocks`"):
        config.judge.judge_settings()


def test_rounds_must_share_the_samples_evenly():
    with pytest.raises(ValueError, match="does not divide"):
        HeldOutConfig(samples=8, rounds=3)


def test_a_run_directory_knows_its_configuration_but_lets_it_be_taken_further(tmp_path):
    def claimed(**values):
        changes = {"model": MODEL, "steps": 3, "grpo": {"beta": 0.01}} | values
        return claim(RunDirectory(tmp_path), "contrastive", stage_from("contrastive", changes), "cpu")

    assert claimed()
    (tmp_path / "rollouts.jsonl").touch()  # something was found out, so the directory is somebody's
    assert not claimed(steps=9, seconds=60.0, judge={"per_device": 3, "shared": "elsewhere/judged.sqlite"})
    assert not claimed(model={"base": "elsewhere/model"})
    with pytest.raises(UsageError, match="another `config`"):
        claimed(grpo={"beta": 0.02})
    with pytest.raises(UsageError, match="another `config`"):
        claimed(model={"base": "somewhere/other"})
