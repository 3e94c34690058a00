"""Adapters as int8, and a campaign that goes on from what was published of it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch

from kernelwright.contrastive.rollouts import RolloutLog
from kernelwright.contrastive.stages import supervised
from kernelwright.contrastive.teaching.augmentation import augment
from kernelwright.errors import UsageError
from tests.contrastive.stages.test_recipe import CHANGES, ROOT, SPLIT, module_at
from tests.contrastive.stages.toys import ToyJudge, ToyTeacher, toy_context

ARMS = ["vanilla-grpo", "contrastive-bucket"]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def adapter(seed):
    drawn = torch.Generator().manual_seed(seed)
    shapes = {"a.lora_A.weight": (4, 96), "a.lora_B.weight": (64, 4), "b.lora_A.weight": (4, 32)}
    return {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}


def test_an_arm_is_packed_as_its_change_and_loses_a_hundredth_of_it():
    from contrastive_weights import error_of, packed_adapter, restored_adapter

    stage_2 = adapter(0)
    arm = {name: weight + 0.05 * adapter(1)[name] for name, weight in stage_2.items()}
    since = packed_adapter(stage_2)
    packed = packed_adapter(arm, since)
    found = restored_adapter(packed, since)
    assert error_of(restored_adapter(since), stage_2) < 0.01
    assert error_of(found, arm) < 0.001
    assert error_of(found, arm, stage_2) < 0.01
    assert error_of(restored_adapter(packed_adapter(arm)), arm, stage_2) > 0.05, "which is why the change is packed"
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    weights = sum(weight.numel() for weight in arm.values())
    assert len(packed) < 1.5 * weights + 1000
    # Packing what was restored changes nothing more.
    assert error_of(restored_adapter(packed_adapter(restored_adapter(since))), restored_adapter(since)) < 1e-6


def test_what_an_arm_changed_since_must_be_there():
    from contrastive_weights import error_of, packed_adapter, restored_adapter

    since, other = packed_adapter(adapter(0)), packed_adapter(adapter(2))
    packed = packed_adapter(adapter(1), since)
    for wrong in (None, other):
        with pytest.raises(UsageError, match="since which this one changed"):
            restored_adapter(packed, wrong)
    # An adapter of another rank has no change, and one of zeros no scale.
    wider = {name: torch.cat([weight, 0 * weight]) for name, weight in adapter(1).items()}
    assert error_of(restored_adapter(packed_adapter(wider, since)), wider) < 0.01


def save_adapter(path, weights):
    from contrastive_export import WEIGHTS
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    save_file(weights, path / WEIGHTS)
    (path / "adapter_config.json").write_text("{}")


def test_stage_2_and_four_arms_of_rank_8_fit_into_an_export(tmp_path, monkeypatch, capsys):
    """As large as an adapter of Qwen2.5-Coder-1.5B, on a scale of 1 to 100."""
    import contrastive_export as export
    from contrastive_weights import error_of
    from safetensors.torch import load_file

    monkeypatch.setattr(export, "PIECE_BYTES", export.PIECE_BYTES // 100)
    work = tmp_path / "work"
    arms = [f"{arm}{seed}" for seed in ("", "-seed-1") for arm in ARMS]
    for number, name in enumerate(("self-supervised", *arms, "sft")):
        last = "checkpoints/checkpoint-8" if name == arms[-1] else "final"
        save_adapter(work / name / last, {"a.lora_A.weight": torch.rand(8, 9_232_384 // 800) + number})
        (work / name / last / "contrastive.json").write_text("{}")
    (work / ".half").mkdir()
    (work / ".half" / export.WEIGHTS).write_bytes(b"not whole yet")
    export.packed(work, tmp_path / "out")
    assert "left out of the export: sft/final/" in capsys.readouterr().out
    export.unpack(tmp_path / "out", tmp_path / "back")
    kept = sorted((tmp_path / "back").rglob(export.WEIGHTS))
    assert {path.relative_to(tmp_path / "back").parts[0] for path in kept} == {"self-supervised", *arms}
    for path in kept:
        assert error_of(load_file(path), load_file(work / path.relative_to(tmp_path / "back"))) < 0.01


def in_process(module, recipe, monkeypatch, campaign):
    """Has a campaign do its parts in this process, and returns a list of those it asked for."""
    asked = []

    def wait(self, lanes):
        for part in (part for lane in lanes for part in lane):
            if self._may_start(part):
                asked.append(part.names)
                module.run_recipe(recipe, part.names)
        return True

    monkeypatch.setattr(campaign.Campaign, "_wait", wait)
    return asked


@pytest.mark.exhaustive
def test_a_published_campaign_goes_on_at_its_step_and_trains_nothing_again(tiny_base, tmp_path, monkeypatch):
    monkeypatch.setattr(supervised, "augment", lambda *given: augment(*given, make=lambda *named: ToyTeacher()))
    import contrastive_campaign
    from contrastive_publish import publish, publish_weights
    from contrastive_restart import restart
    from contrastive_weights import error_of
    from safetensors.torch import load_file

    module = module_at(ROOT / "recipes" / "cuda_l1.py")
    tables = module.tables_of(ROOT / "recipes", [*CHANGES, "contrastive.steps=3", "contrastive.save_steps=1"])
    calls = iter([False, True])

    def recipe(work, out_of_time=lambda: False):
        context = toy_context(ToyJudge(), out_of_time=out_of_time)
        return module.Recipe(str(tiny_base), work, tables, lambda *_: contextlib.nullcontext(context), SPLIT)

    first, published, work = tmp_path / "first", tmp_path / "published", tmp_path / "work"
    assert module.run_recipe(recipe(first), ["train:sft", "train:self-supervised", "train:vanilla-grpo"])
    assert not module.run_recipe(recipe(first, lambda: next(calls, True)), ["train:contrastive-bucket"])
    (checkpoint,) = (first / "contrastive-bucket" / "checkpoints").glob("checkpoint-*")
    done = int(checkpoint.name.rpartition("-")[2])
    publish(first, published)
    publish_weights(first, published)
    restart(published, work)
    assert not (work / "sft" / "final").exists()
    for name in ("self-supervised/final", "vanilla-grpo/final", f"contrastive-bucket/checkpoints/{checkpoint.name}"):
        weights = (Path(name) / "adapter_model.safetensors").as_posix()
        assert error_of(load_file(work / weights), load_file(first / weights)) < 0.01
    before = {path: path.read_bytes() for path in work.rglob("*.safetensors") if "final" in path.parts}

    asked = in_process(module, recipe(work), monkeypatch, contrastive_campaign)
    words = ["--base", str(tiny_base), "--work", str(work), "--export", str(tmp_path / "out"), "--arms", *ARMS]
    words += ["--arms-first", "--equal-steps", "--gpus", "0", "--time-limit", "1000", "--measured", "self-supervised"]
    assert contrastive_campaign.main(words) == 0
    assert asked == [
        ("train:contrastive-bucket",),
        ("measure:vanilla-grpo",),
        ("measure:contrastive-bucket",),
        ("measure:self-supervised",),
        ("summary",),
    ]
    assert {path: path.read_bytes() for path in before} == before, "nothing that was trained is trained again"
    steps = [rollout.step for rollout in RolloutLog(work / "contrastive-bucket").rollouts()]
    assert steps == sorted(steps)
    assert [steps.count(step) for step in range(3)] == [16] * 3
    logged = [json.loads(line)["step"] for line in (work / "contrastive-bucket" / "metrics.jsonl").read_text().splitlines()]
    assert logged == [step for step in (1, 2, 3) for _ in range(done)]
    summary = json.loads((work / "summary.json").read_text())
    assert {"speedup_vanilla_grpo", "speedup_contrastive_bucket", "speedup_self_supervised"} <= set(summary)
    assert "restarted" not in {path.name for path in work.iterdir()}
