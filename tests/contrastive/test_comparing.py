"""Arms with several seeds: their ratio with intervals over tasks and seeds, and what their right answers use."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.answers import rewrites_in
from kernelwright.contrastive.held_out import HeldOutResult, HeldOutTask, compared, techniques_used
from kernelwright.contrastive.prompts import contrastive_prompt
from kernelwright.contrastive.samples import Origin, Rollout, RolloutLog, Sample
from kernelwright.models.chat import Completion, Sampling
from kernelwright.records import RunDirectory, Verdict
from tests.contrastive.toys import toy_task


def result_of(speedups, first=()):
    return HeldOutResult(
        model="x",
        tasks=tuple(
            HeldOutTask(task=str(n), task_sha256=str(n), answers=2, correct=1, hacks=0, speedup=speedup, first=first)
            for n, speedup in enumerate(speedups)
        ),
    )


def test_a_ratio_is_over_tasks_and_seeds_and_so_is_its_interval():
    tasks = [1.0, 2.0, 4.0, 8.0] * 10
    vanilla = [result_of(tasks), result_of(tasks)]
    told = compared(vanilla, [result_of([2 * one for one in tasks], (4.0,)), result_of([2 * one for one in tasks], (4.0,))])
    assert (told["tasks"], told["seeds"]) == (40, 2)
    assert [told[key] for key in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([2.0] * 3), (
        "each draw has one set of tasks"
    )
    assert told["speedup_vanilla_grpo_low"] < 2**1.5 < told["speedup_vanilla_grpo_high"]
    assert told["worth_ratio"] == pytest.approx(2.0), "one answer of two is right, and worth 4"
    apart = compared(vanilla, [result_of(tasks), result_of([4 * one for one in tasks])])
    assert apart["ratio"] == pytest.approx(2.0)
    assert (apart["ratio_low"], apart["ratio_high"]) == (pytest.approx(1.0), pytest.approx(4.0)), "seeds differ"
    with pytest.raises(ValueError, match="same tasks"):
        compared(vanilla, [result_of(tasks[:3])])


@pytest.mark.parametrize(
    ("line", "tags"),
    [
        ("y = y @ m.mean(dim=1, keepdim=True)", ("reduce-before-product",)),
        ("y = y.mean(dim=0) @ m", ("reduce-before-product",)),
        ("y = a @ (b @ c)", ("reordered-product",)),
        ("y = F.silu(y)", ("library-activation",)),
        ("y = a[:, None] * b", ("broadcast",)),
        ("y = x[:, index]", ("indexing",)),
        ("y = torch.cumsum(y, dim=1)", ("scan",)),
        ("y = F.rms_norm(y, y.shape[1:], eps=1e-5)", ("library-norm",)),
        ("y = (y @ m).mean(dim=1)", ("operators",)),
    ],
)
def test_answers_that_do_less_work_are_recognised(line, tags):
    assert rewrites_in(line) == tags


def test_the_share_of_right_answers_that_use_a_technique_is_counted(tmp_path):
    task = toy_task("even", "amber")
    made = []
    for arm, line, verdict in (
        ("sft", "y = x", Verdict.ACCEPTED),
        ("sft", "y = F.silu(x)", Verdict.REJECTED),
        ("vanilla-grpo-seed-1", "y = F.silu(x)", Verdict.ACCEPTED),
        ("vanilla-grpo-seed-1", "y = x", Verdict.ACCEPTED),
    ):
        text = (
            f"## Code Implementation\n\n```python\nclass ModelNew(Model):\n    def forward(self, x):\n        {line}\n```\n"
        )
        answer = Completion(text=text, prompt_tokens=0, completion_tokens=1, finish_reason="stop")
        origin = Origin(stage="held-out", model=f"base:{arm}", sampling=Sampling(), form="subclass")
        prompt = contrastive_prompt(task, (), device="cpu", form="subclass")
        sample = Sample(task=task, prompt=prompt, completion=answer, step=0, sample=0)
        sample.parse(origin.form, origin.model)
        rollout = Rollout.of(sample, origin)
        made.append(rollout.model_copy(update={"verdict": verdict}))
    RolloutLog(tmp_path).append(made)
    assert techniques_used(RunDirectory(tmp_path)) == {
        "sft": {"operators": 1.0},
        "vanilla-grpo-seed-1": {"library-activation": 0.5, "operators": 0.5},
    }
