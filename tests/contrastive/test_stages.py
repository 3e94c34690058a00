"""The three stages one after the other on a tiny model and a toy task family, and each of them killed in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from kernelwright.contrastive.context import ModelAccess
from kernelwright.contrastive.evaluations import Deadline
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.fitting import Optimiser, read_examples, save_final
from kernelwright.contrastive.held_out import TaskSplit, evaluate_held_out
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.reinforcement import StepClock, tasks_asked, train_contrastive
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.contrastive.settings import (
    ContrastiveConfig,
    ExemplarSection,
    HeldOutConfig,
    ModelSection,
    OptimiserSection,
    PromptSection,
    SamplingSection,
    SelfSupervisedConfig,
    stage_from,
)
from kernelwright.contrastive.supervised import rehearsed, tasks_of_round, train_self_supervised, train_supervised
from kernelwright.contrastive.trained_model import load_for_training
from kernelwright.errors import ConfigError, InfrastructureError
from kernelwright.records import RunDirectory, Task
from tests.contrastive.toys import HELD_OUT_NAMES, ToyJudge, judged_twice, toy_context, toy_tasks

ROOT = Path(__file__).parents[2]
SPLIT = TaskSplit(tuple(toy_tasks()), tuple(toy_tasks(HELD_OUT_NAMES)))
SAMPLING = {"max_tokens": 64}


def sft_config(base, epochs=30, **model):
    return stage_from(
        "sft",
        {
            "model": {"base": str(base), "dtype": "float32", "tuning": "full", **model},
            "augmentation": {"teachers": ["toy"], "successes": 4, "exemplars_share": 0.5, "timed": True},
            "optimiser": {"learning_rate": 5e-3, "micro_batch": 16, "epochs": epochs, "max_length": 200},
            "save_steps": 5,
        },
    )


def self_supervised_config(base, rounds=3, **model):
    return stage_from(
        "self-supervised",
        {
            "model": {"base": str(base), "dtype": "float32", "tuning": "full", **model},
            "rounds": rounds,
            "tasks_per_round": 16,
            "samples_per_task": 8,
            "sampling": SAMPLING,
            "optimiser": {"learning_rate": 1e-3, "micro_batch": 16, "max_length": 200},
        },
    )


def contrastive_config(
    base,
    steps=16,
    sampler="bucket",
    update=True,
    save_steps=4,
    sixteen=False,
    rest=(),
    minibatches=1,
    **model,
):
    return stage_from(
        "contrastive",
        {
            **dict(rest),
            "model": {"base": str(base), "dtype": "float32", "tuning": "full", **model},
            "steps": steps,
            "update": update,
            "exemplars": {"sampler": sampler},
            "sampling": SAMPLING,
            "optimiser": {"learning_rate": 5e-4, "micro_batch": 32 // minibatches},
            "grpo": {"group_size": 16 if sixteen else 8, "groups": 4, "minibatches": minibatches},
            "save_steps": save_steps,
        },
    )


def measured(name, base, run, **protocol):
    """Mean reward of sixteen answers to each held-out task, with the same seed for every model, and the whole result."""
    model, tokenizer = load_for_training(ModelSection(base=str(base), dtype="float32", tuning="full"), 0)
    result = evaluate_held_out(
        name,
        ModelAccess().sampler(model, tokenizer, name, 64),
        SPLIT.held_out,
        HeldOutConfig(samples=16, sampling=SamplingSection(max_tokens=64), **protocol),
        PromptSection(),
        run,
        toy_context(ToyJudge()),
    )
    rewards = [item.reward for item in RolloutLog(run.path).rollouts() if item.model == name]
    assert len(rewards) == 16 * len(SPLIT.held_out)
    return sum(rewards) / len(rewards), result


def school(base, folder, epochs):
    return train_supervised(sft_config(base, epochs), SPLIT, RunDirectory(folder), toy_context(ToyJudge())).final


@pytest.fixture(scope="session")
def schooled(tiny_base, tmp_path_factory):
    """A tiny model that has been through the first stage, so that there is something to judge."""
    return school(tiny_base, tmp_path_factory.mktemp("schooled"), 25)


@pytest.fixture(scope="session")
def beginner(tiny_base, tmp_path_factory):
    """The same after a third of it: some of its answers are right."""
    return school(tiny_base, tmp_path_factory.mktemp("beginner"), 10)


@pytest.mark.exhaustive
def test_every_stage_earns_more_on_held_out_tasks_than_what_it_began_with(tiny_base, schooled, tmp_path):
    """Seen: 0.00, 0.66 and 0.82 without exemplars, 0.59 and 0.89 with them; the margins are about half."""
    context = toy_context(ToyJudge())
    held_out = RunDirectory(tmp_path / "held-out")
    before, zero_shot = measured("zero-shot", tiny_base, held_out)
    assert before < 0.1
    assert zero_shot.correct() < 0.5

    school = Path(schooled).parent
    examples = read_examples(school / "examples.jsonl")
    assert all(example.teacher == "toy-teacher" and example.speedup for example in examples)
    assert len({(example.task, example.candidate_sha256) for example in examples}) == len(examples)
    after_first, _ = measured("sft", schooled, held_out)
    assert after_first > before + 0.35

    second = train_self_supervised(self_supervised_config(schooled), SPLIT, RunDirectory(tmp_path / "self"), context)
    after_second, result = measured("self-supervised", second.final, held_out)
    assert after_second > after_first + 0.1
    assert result.correct() >= 0.8

    contrast = {"rounds": 2, "exemplars": ExemplarSection(sampler="bucket")}
    before_third, _ = measured("before-contrastive", second.final, held_out, **contrast)
    config = contrastive_config(second.final, sixteen=True)
    third = train_contrastive(config, SPLIT, RunDirectory(tmp_path / "rl"), context)
    after_third, _ = measured("contrastive", third.final, held_out, **contrast)
    assert after_third > before_third + 0.15

    steps = MetricsLog(tmp_path / "rl").read()
    assert {"contrastive/success_rate", "contrastive/hack_rate", "contrastive/reward_mean", "grpo/kl"} <= set().union(*steps)
    assert list((tmp_path / "rl" / "tensorboard").iterdir())
    rollouts = list(RolloutLog(tmp_path / "rl").rollouts())
    assert len(rollouts) == config.steps * 64
    assert any(rollout.exemplars for rollout in rollouts)
    assert all(judged_twice(path) == [] for path in (school, tmp_path / "self", tmp_path / "rl"))


def killed_at(count, run_stage):
    """Run a stage in a process that kill -9 ends before it judges one candidate more than `count`."""

    def before_each(number):
        if number == count:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            run_stage(ToyJudge(before_each))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it came to its end before it could be killed"
    assert os.WTERMSIG(status) == signal.SIGKILL


STAGES = {
    "sft": (train_supervised, lambda base: sft_config(base, epochs=1), 40),
    "self-supervised": (train_self_supervised, lambda base: self_supervised_config(base, rounds=2), 3),
    "contrastive": (train_contrastive, lambda base: contrastive_config(base, steps=3, save_steps=1), 5),
    "evolutionary": (train_contrastive, lambda base: contrastive_config(base, steps=3, update=False), 5),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_while_judging_goes_on_and_judges_nothing_twice(stage, schooled, tmp_path):
    train, config, kill_at = STAGES[stage]
    run = RunDirectory(tmp_path / "run")
    killed_at(kill_at, lambda judge: train(config(schooled), SPLIT, run, toy_context(judge)))
    kept = len(list(run.evaluations()))
    assert kept == kill_at
    judge = ToyJudge()
    result = train(config(schooled), SPLIT, run, toy_context(judge))
    assert result.finished
    assert judged_twice(run.path) == []
    assert len(list(run.evaluations())) == kept + judge.count
    rollouts = [(item.step, item.prompt_sha256, item.sample, item.completion) for item in RolloutLog(run.path).rollouts()]
    assert len(rollouts) == len(set(rollouts))
    count = judge.count
    assert train(config(schooled), SPLIT, run, toy_context(judge)).finished
    assert judge.count == count


def test_some_of_the_teachers_examples_are_learnt_again_beside_successes():
    taught = [f"example {number}" for number in range(8)]
    half = rehearsed(taught, 0.5, 6, random.Random(0))
    assert len(half) == len(set(half)) == 3
    assert half == rehearsed(taught, 0.5, 6, random.Random(0))
    assert rehearsed(taught, 0.0, 6, random.Random(0)) == []
    assert sorted(rehearsed(taught, 1e6, 6, random.Random(0))) == taught


def test_rehearsal_needs_examples(schooled, tmp_path):
    config = self_supervised_config(schooled, rounds=1)
    config = config.model_copy(update={"rehearsal": 0.5, "rehearse": tmp_path / "none-there"})
    with pytest.raises(ConfigError, match=r"rehearse = .*none-there; found none"):
        train_self_supervised(config, SPLIT, RunDirectory(tmp_path / "run"), toy_context(ToyJudge()))


@pytest.mark.exhaustive
def test_a_round_learns_no_answer_that_gains_too_little(schooled, tmp_path):
    learnt = {}
    for name, slowest in (("any", None), ("fast", 1.3)):
        config = self_supervised_config(schooled, rounds=1).model_copy(update={"timed": True, "slowest": slowest})
        train_self_supervised(config, SPLIT, RunDirectory(tmp_path / name), toy_context(ToyJudge()))
        examples = read_examples(tmp_path / name / "rounds" / "000" / "examples.jsonl")
        assert all(example.teacher != "toy-teacher" for example in examples)
        learnt[name] = sorted(example.speedup for example in examples)
    assert learnt["any"][0] < 1.3
    assert learnt["fast"] == [speedup for speedup in learnt["any"] if speedup >= 1.3] != []


@pytest.mark.exhaustive
def test_an_adapter_s_training_goes_on_from_its_checkpoint_and_keeps_its_reference(schooled, tmp_path):
    """LoRA on an adapter: a checkpoint brings back the trained one; the KL's reference stays what the stage began with."""
    import torch
    from safetensors.torch import load_file

    lora = {"tuning": "lora", "lora": {"rank": 4}}
    first = RunDirectory(tmp_path / "first")
    done = train_self_supervised(self_supervised_config(schooled, rounds=1, **lora), SPLIT, first, toy_context(ToyJudge()))
    config = contrastive_config(schooled, steps=3, save_steps=1, adapter=done.final, **lora)
    run = RunDirectory(tmp_path / "run")
    calls = iter(range(100))
    cut = train_contrastive(config, SPLIT, run, toy_context(ToyJudge(), out_of_time=lambda: next(calls) >= 2))
    assert (cut.finished, cut.steps) == (False, 2)
    at_cut = load_file(run.path / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors")
    started = load_file(f"{done.final}/adapter_model.safetensors")
    moved = [name for name in at_cut if not torch.equal(at_cut[name], started[name])]
    assert moved
    state = json.loads((run.path / "checkpoints" / "checkpoint-2" / "contrastive.json").read_text())
    assert state["smoother"]["seen"] == 64
    result = train_contrastive(config, SPLIT, run, toy_context(ToyJudge()))
    assert (result.finished, result.steps) == (True, 3)
    final = load_file(f"{result.final}/adapter_model.safetensors")
    from_cut = sum((final[name] - at_cut[name]).square().sum().item() for name in final)
    from_start = sum((final[name] - started[name]).square().sum().item() for name in final)
    # One step away from the checkpoint, three from the start: it went on from the one and not from the other.
    assert 0 < from_cut < 0.7 * from_start
    assert not list((tmp_path / "run" / "final").glob("ref*"))


@pytest.mark.exhaustive
def test_the_stage_shows_exemplars_in_the_share_that_is_asked_for(schooled, tmp_path):
    """With none of the prompts it asks what vanilla GRPO asks, though there are exemplars after the first step."""
    run = RunDirectory(tmp_path)
    config = contrastive_config(schooled, steps=6, update=False, rest={"exemplars_share": 0.0})
    assert train_contrastive(config, SPLIT, run, toy_context(ToyJudge())).finished
    exemplars = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    assert any(exemplars.exemplars(task.sha256, device="cpu") for task in SPLIT.train)
    assert not any(rollout.exemplars for rollout in RolloutLog(tmp_path).rollouts())


def test_vanilla_grpo_shows_no_exemplars(beginner, tmp_path):
    run = RunDirectory(tmp_path)
    config = contrastive_config(beginner, steps=2, sampler="none")
    assert train_contrastive(config, SPLIT, run, toy_context(ToyJudge())).finished
    rollouts = list(RolloutLog(tmp_path).rollouts())
    assert len(rollouts) == 64
    assert not any(rollout.exemplars for rollout in rollouts)
    groups = {}
    for rollout in rollouts:
        groups.setdefault((rollout.step, rollout.task), set()).add(rollout.prompt_sha256)
    assert all(len(prompts) == 1 for prompts in groups.values())


def test_supervised_steps_go_on_from_the_checkpoint(tiny_base, tmp_path):
    run = RunDirectory(tmp_path)
    asked = []

    def late():
        if (run.path / "examples.jsonl").exists():
            asked.append(1)
        return len(asked) > 7

    cut = train_supervised(sft_config(tiny_base, epochs=4), SPLIT, run, toy_context(ToyJudge(), out_of_time=late))
    assert not cut.finished
    assert not (run.path / "final").exists()
    done = train_supervised(sft_config(tiny_base, epochs=4), SPLIT, run, toy_context(ToyJudge()))
    assert done.finished
    # What has finished says the same again.
    context = toy_context(ToyJudge())
    assert train_supervised(sft_config(tiny_base, epochs=4), SPLIT, run, context) == done
    steps = [line["step"] for line in MetricsLog(run.path).read() if "sft/loss" in line]
    assert steps == list(range(1, 4 * 4 + 1))
    assert not (run.path / "checkpoints").exists()


@pytest.mark.exhaustive
def test_several_updates_learn_from_each_batch_and_a_cut_comes_between_batches(schooled, tmp_path):
    run = RunDirectory(tmp_path)
    config = contrastive_config(schooled, steps=3, save_steps=1, minibatches=2)
    calls = iter([False] * 2)  # before it begins, and after the first batch
    late = toy_context(ToyJudge(), out_of_time=lambda: next(calls, True))
    cut = train_contrastive(config, SPLIT, run, late)
    assert (cut.finished, cut.steps) == (False, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "checkpoint-4"
    result = train_contrastive(config, SPLIT, run, toy_context(ToyJudge()))
    assert (result.finished, result.steps) == (True, 3)
    steps = [rollout.step for rollout in RolloutLog(tmp_path).rollouts()]
    assert [steps.count(step) for step in range(4)] == [32, 32, 32, 0]
    assert sum("grpo/loss" in line for line in MetricsLog(tmp_path).read()) == 6


def test_the_learning_rate_rises_over_the_warm_up_and_ratios_can_be_bounded_on_both_sides(beginner, tmp_path):
    config = contrastive_config(beginner, steps=1, minibatches=4)
    config = config.model_copy(
        update={
            "optimiser": config.optimiser.model_copy(update={"warmup_steps": 2}),
            "grpo": config.grpo.model_copy(update={"delta": 4.0, "scale_rewards": "batch"}),
        }
    )
    assert train_contrastive(config, SPLIT, RunDirectory(tmp_path), toy_context(ToyJudge())).finished
    rates = [line["grpo/learning_rate"] for line in MetricsLog(tmp_path).read() if "grpo/learning_rate" in line]
    assert rates == pytest.approx([0.0, 2.5e-4, 5e-4, 5e-4])


class Poisoned:
    """Loads a model of which one gradient is not a number in the given updates: a kernel at fault, as seen on a GPU."""

    def __init__(self, updates):
        self.updates = updates
        self.seen = []

    def __call__(self, section, seed):
        model, tokenizer = load_for_training(section, seed)
        weight = next(model.parameters())

        def poison(gradient):
            self.seen.append(weight.detach().clone())
            return gradient * float("nan") if len(self.seen) in self.updates else gradient

        weight.register_hook(poison)
        return model, tokenizer


@pytest.fixture
def norms(monkeypatch):
    """How often the norm of gradients was computed."""
    computed, norm = [], torch._foreach_norm

    def counted(*given, **named):
        computed.append(1)
        return norm(*given, **named)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    return computed


def test_the_gradients_norm_is_computed_once_an_update_and_of_all_that_the_update_learns_from(tiny_base, tmp_path, norms):
    said, load = [], Poisoned({4})  # the second half of the second batch
    context = toy_context(ToyJudge(), load=load, log=said.append)
    config = sft_config(tiny_base, epochs=1)
    config = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"micro_batch": 8})})
    train_supervised(config, SPLIT, RunDirectory(tmp_path), context)
    updates = sum("sft/loss" in line for line in MetricsLog(tmp_path).read())
    assert len(load.seen) > updates >= 3, "an update has several parts"
    assert [line for line in said if "left out" in line] == ["update 2 is left out: its gradient is not finite"]
    assert len(norms) == updates


def test_gradients_are_clipped_and_those_that_are_not_finite_left_out_each_update_anew():
    model, said = torch.nn.Linear(2, 1, bias=False), []
    optimiser = Optimiser(model, OptimiserSection(learning_rate=0.1, max_grad_norm=1.0), 100, said.append)

    def update(*gradient):
        before = model.weight.detach().clone()
        model.weight.grad = torch.tensor([gradient])
        told = optimiser.step()
        assert model.weight.grad is None
        return told["grad_norm"], not torch.equal(model.weight, before)

    assert update(3.0, 4.0) == (5.0, True)
    assert update(float("inf"), 4.0)[1] is False
    assert update(float("nan"), 4.0)[1] is False
    assert update(3.0, 4.0) == (5.0, True)
    # So long that its norm is no number: clipped to nothing, which an optimiser with momentum would act upon.
    assert update(3e38, 3e38)[1] is False
    assert optimiser.skipped == len(said) == 3
    assert optimiser.done == 5


@pytest.mark.exhaustive
def test_updates_left_out_are_counted_on_from_the_checkpoint(tiny_base, tmp_path):
    run = RunDirectory(tmp_path)

    def trained(updates, steps=1000):
        load = Poisoned(updates)
        context = toy_context(ToyJudge(), load=load, out_of_time=lambda: len(load.seen) >= steps)
        return train_supervised(sft_config(tiny_base, epochs=4), SPLIT, run, context).finished

    assert not trained({2, 3}, steps=4)
    assert not trained({2}, steps=3)
    # As a version wrote it that did not count on: it begins with none.
    path = tmp_path / "checkpoints" / "checkpoint-7" / "contrastive.json"
    state = json.loads(path.read_text())
    assert state.pop("skipped") == 3
    path.write_text(json.dumps(state))
    assert not trained({1}, steps=2)
    assert trained({2})
    counted = [line["sft/skipped_updates"] for line in MetricsLog(tmp_path).read() if "sft/loss" in line]
    assert counted == [0, 1, 2, 2, 2, 3, 3, 1, 1, 1, *[2] * 6]


def test_a_model_whose_gradients_stay_no_numbers_is_not_saved(tiny_base, tmp_path):
    context = toy_context(ToyJudge(), load=Poisoned(range(2, 1000)))
    with pytest.raises(InfrastructureError, match=r"finite gradients; found none in 5 updates .* the last of them update 6"):
        train_supervised(sft_config(tiny_base, epochs=4), SPLIT, RunDirectory(tmp_path), context)
    assert not (tmp_path / "final").exists()


def test_weights_that_are_no_numbers_are_not_saved(tiny_base, tmp_path):
    model, tokenizer = load_for_training(ModelSection(base=str(tiny_base), dtype="float32", tuning="full"), 0)
    with torch.no_grad():
        list(model.parameters())[1].fill_(float("nan"))
    with pytest.raises(InfrastructureError, match="found weights that are not finite"):
        save_final(model, tokenizer, tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_a_stage_whose_time_is_spent_has_ended(beginner, tmp_path):
    run = RunDirectory(tmp_path)
    judge = ToyJudge()
    config = contrastive_config(beginner, steps=50, rest={"seconds": 0.01})
    result = train_contrastive(config, SPLIT, run, toy_context(judge))
    assert (result.finished, result.steps) == (True, 1)
    assert (tmp_path / "final").is_dir()
    count = judge.count
    assert train_contrastive(config, SPLIT, run, toy_context(judge)) == result
    assert judge.count == count
    # With more time it goes on where it was.
    longer = contrastive_config(beginner, steps=2, rest={"seconds": 1000.0})
    assert train_contrastive(longer, SPLIT, run, toy_context(judge)).steps == 2


def test_a_step_that_the_deadline_would_cut_off_is_not_begun(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = StepClock(Deadline(100.0), limit_s=None, spent_s=0.0)
    stopped = {}
    for end in [30.0, 60.0, 85.0]:
        now[0] = end
        clock.tick()
        stopped[end] = clock.stopped
    assert stopped == {30.0: False, 60.0: False, 85.0: True}
    assert not clock.spent
    assert clock.spent_s == 85.0


def test_the_tasks_that_stage_3_asks_are_those_that_stage_2_asked_first():
    tasks = [Task(id=f"task-{number}", source=f"# {number}") for number in range(40)]
    few = ContrastiveConfig.model_validate({"model": {"base": "tiny-random"}, "task_count": 8, "seed": 3})
    asked = tasks_asked(tasks, few)
    before = SelfSupervisedConfig.model_validate({"model": {"base": "tiny-random"}, "tasks_per_round": 8, "seed": 3})
    assert [task.id for task in asked] == [task.id for task in tasks_of_round(tasks, before, 0)]
    assert tasks_asked(tasks, few.model_copy(update={"task_count": None})) == tasks
    assert len(tasks_asked(tasks[:5], few)) == 5
