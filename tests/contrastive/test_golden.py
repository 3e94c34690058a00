"""All three stages on the toy world, their two special cases and the evaluation: what one seed gives stays the same.

`KERNELWRIGHT_WRITE_GOLDEN=1` writes `tests/golden/training.json` anew, for a change that is meant.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kernelwright.contrastive.context import ModelAccess
from kernelwright.contrastive.hacks import HackDatabase, StructuralChecker
from kernelwright.contrastive.held_out import TaskSplit, evaluate_held_out
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.reinforcement import train_contrastive
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.contrastive.settings import HeldOutConfig, PromptSection, stage_from
from kernelwright.contrastive.supervised import train_self_supervised, train_supervised
from kernelwright.contrastive.trained_model import load_for_training
from kernelwright.judge import Settings
from kernelwright.records import RunDirectory
from tests.contrastive.toys import HELD_OUT_NAMES, ToyJudge, ToyScreens, toy_context, toy_tasks

GOLDEN = Path(__file__).parents[1] / "golden" / "training.json"
SPLIT = TaskSplit(tuple(toy_tasks(("amber", "beryl", "coral"))), tuple(toy_tasks(HELD_OUT_NAMES[:2])))
TIMES = ("grpo/step_time",)
SAMPLING = {"max_tokens": 64}
FITTING = {"micro_batch": 8, "max_length": 200}


class Noisy(ToyJudge):
    """Finds another speedup the second time, as a clock does."""

    def outcome(self, work):
        found, factor = super().outcome(work), 1.3 if "way = 4" in work.candidate.source else 1.02
        told = {name: getattr(found, name) and getattr(found, name) * factor for name in ("speedup", "speedup_low")}
        return found.model_copy(update=told)


def context():
    return toy_context(
        ToyJudge(),
        confirmers=Noisy(),
        settings=Settings.quick(),
        verifier=Noisy(),
        checker=StructuralChecker(HackDatabase()),
        screens=ToyScreens(1.05),
    )


def stage(kind, base, **values):
    model = {"base": str(base), "dtype": "float32", **values.pop("model", {"tuning": "full"})}
    return stage_from(kind, {"model": model, **values})


def short(value):
    return value[:12] if isinstance(value, str) else value


def facts(path):
    """Everything that a run directory says, without times; weights by their sums."""
    import torch
    from safetensors.torch import load_file

    files = sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())
    weights = {
        str(found.relative_to(path)): {
            "sum": sum(value.double().sum().item() for value in load_file(found).values()),
            "norm": torch.stack([value.double().norm() for value in load_file(found).values()]).norm().item(),
        }
        for found in sorted(path.rglob("*.safetensors"))
    }
    last = MetricsLog(path).read()[-16:]
    metrics = [{name: value for name, value in line.items() if name not in TIMES} for line in last]
    kept = (
        "prompt_sha256",
        "candidate_sha256",
        "verdict",
        "reason",
        "estimate",
        "reward",
        "smoothed",
        "baseline",
        "failure",
    )
    told = [{name: getattr(one, name) for name in kept} for one in RolloutLog(path).rollouts()]
    rollouts = [{name: short(value) for name, value in one.items() if value is not None} for one in told]
    examples = [json.loads(line) for found in sorted(path.rglob("examples.jsonl")) for line in found.open()]
    return {
        "files": [name for name in files if not name.startswith(("tensorboard", "exemplars.sqlite-"))],
        "weights": weights,
        "metrics": metrics,
        "rollouts": json.loads(json.dumps(rollouts)),
        "examples": [[short(one["candidate_sha256"]), one["teacher"]] for one in examples],
        "evaluations": [[short(one.candidate_sha256), one.confirms, one.policy] for one in RunDirectory(path).evaluations()],
        "state": RunDirectory(path).read_json("state.json") and sorted(RunDirectory(path).read_json("state.json")),
    }


def campaign(base, out):
    """The facts of each stage by name."""
    names = ("sft", "self-supervised", "bucket", "vanilla", "evolved", "held-out")
    runs = {name: RunDirectory(out / name) for name in names}
    first = stage(
        "sft",
        base,
        augmentation={"teachers": ["toy"], "successes": 4, "exemplars_share": 0.5, "timed": True},
        optimiser={"learning_rate": 5e-3, "epochs": 70, **FITTING},
        save_steps=5,
    )
    schooled = train_supervised(first, SPLIT, runs["sft"], context()).final
    second = stage(
        "self-supervised",
        schooled,
        model={"lora": {"rank": 4}},
        rounds=2,
        tasks_per_round=4,
        samples_per_task=6,
        timed=True,
        sampling=SAMPLING,
        exemplars={"sampler": "bucket", "seeds": [str(out / "sft")]},
        exemplars_share=0.5,
        rehearsal=0.5,
        rehearse=str(out / "sft"),
        optimiser={"learning_rate": 1e-3, **FITTING},
    )
    adapter = train_self_supervised(second, SPLIT, runs["self-supervised"], context()).final
    shared = {"model": {"lora": {"rank": 4}, "adapter": adapter}, "sampling": SAMPLING, "save_steps": 1}
    bucket = stage(
        "contrastive",
        schooled,
        **shared,
        steps=3,
        exemplars={"sampler": "bucket", "seeds": [str(out / "self-supervised")]},
        exemplars_share=0.7,
        reward={"copies": "floor", "suspicious_speedup": 1.5, "baseline": "best"},
        grpo={"group_size": 6, "groups": 4, "minibatches": 2, "iterations": 2, "spare_shared_lines": True},
        optimiser={"learning_rate": 1e-3, "micro_batch": 6},
    )
    train_contrastive(bucket, SPLIT, runs["bucket"], context())
    vanilla = stage(
        "contrastive",
        schooled,
        **shared,
        steps=2,
        exemplars={"sampler": "none"},
        reward={"name": "log", "floor": -2.0, "screened_share": 0.6, "smoothing": False},
        grpo={"group_size": 6, "groups": 2, "scale_rewards": "batch", "mask_truncated": True},
        optimiser={"learning_rate": 1e-3, "micro_batch": 6},
    )
    train_contrastive(vanilla, SPLIT, runs["vanilla"], context())
    evolved = stage(
        "contrastive",
        schooled,
        **shared,
        steps=2,
        update=False,
        exemplars={"sampler": "island", "seeds": [str(out / "self-supervised")]},
        grpo={"group_size": 4, "groups": 2},
    )
    train_contrastive(evolved, SPLIT, runs["evolved"], context())
    model, tokenizer = load_for_training(bucket.model, 0)
    config = HeldOutConfig.model_validate(
        {"samples": 4, "rounds": 2, "exemplars": {"sampler": "random"}, "sampling": SAMPLING, "baseline": "best"}
    )
    chat = ModelAccess().sampler(model, tokenizer, "toy", 16)
    result = evaluate_held_out("toy", chat, SPLIT.held_out, config, PromptSection(), runs["held-out"], context())
    return {name: facts(run.path) for name, run in runs.items()} | {"result": result.model_dump(mode="json")}


def near(wanted):
    """Another processor rounds otherwise."""
    match wanted:
        case float():
            return pytest.approx(wanted, rel=1e-3, abs=1e-5)
        case dict():
            return {name: near(value) for name, value in wanted.items()}
        case list():
            return [near(value) for value in wanted]
    return wanted


def test_one_seed_gives_the_same_prompts_rewards_metrics_and_adapters(tiny_base, tmp_path):
    found = json.loads(json.dumps(campaign(tiny_base, tmp_path)))
    if os.environ.get("KERNELWRIGHT_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")
    wanted = json.loads(GOLDEN.read_text())
    assert found.keys() == wanted.keys()
    for name, part in wanted.items():
        for kind, value in part.items():
            assert found[name][kind] == near(value), (name, kind)
