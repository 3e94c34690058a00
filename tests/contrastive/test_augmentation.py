from __future__ import annotations

import pytest

from kernelwright.contrastive.answers import parse_answer
from kernelwright.contrastive.fitting import answer_text, read_examples
from kernelwright.contrastive.held_out import TaskSplit
from kernelwright.contrastive.prompts import contrastive_prompt, whole_source
from kernelwright.contrastive.settings import PromptSection, stage_from
from kernelwright.contrastive.supervised import augment, train_supervised
from kernelwright.contrastive.teachers import ChatTeacher, copied_forward, graphed, shortened, teacher_named
from kernelwright.errors import ConfigError
from kernelwright.models.chat import ChatModel, Completion, Sampling
from kernelwright.models.transcript import Recorded, Transcript
from kernelwright.records import Candidate, RunDirectory, Task, sha256_of
from kernelwright.records.policy import Context
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.tasks.generated import family_tasks
from kernelwright.tasks.suites import builtin_task
from tests.contrastive.toys import ToyJudge, toy_code, toy_context, toy_evaluation, toy_tasks
from tests.quick import exhaustive_but

SMALL = Task(
    id="small-sum",
    source='''"""gemm+reduce: every output of the product is summed away; bound by compute."""

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES = 32, 48, 64


class Model(nn.Module):
    """Linear layer, then the sum over its features."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sum(self.linear(x), dim=1, keepdim=True)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int]:
    return [IN_FEATURES, OUT_FEATURES]
''',
)


def config(**augmentation):
    return stage_from("sft", {"model": {"base": "unused"}, "augmentation": {"teachers": ["toy"], **augmentation}})


def toy_augment(tmp_path, judge, tasks, **augmentation):
    return augment(config(**augmentation), tasks, RunDirectory(tmp_path), toy_context(judge))


def test_a_teacher_that_does_not_exist_is_named_with_those_that_do():
    for name in ("toy", "api"):
        with pytest.raises(ConfigError, match=rf"found '{name}'. Known are builtin and templates; .*augmentation.models"):
            teacher_named(name, "subclass", 500, 4)


def test_where_no_teacher_was_right_that_is_said_and_not_that_examples_are_long(tmp_path):
    context = toy_context(ToyJudge())
    split = TaskSplit(tuple(toy_tasks()), ())
    with pytest.raises(ConfigError, match=r"Wanted correct variations .* found none.*evaluations\.jsonl"):
        train_supervised(config(teachers=[]), split, RunDirectory(tmp_path), context)


def test_a_teacher_stops_at_its_successes_or_its_attempts(tmp_path):
    tasks = toy_tasks(("amber",))
    examples = toy_augment(tmp_path / "a", ToyJudge(), tasks, successes=2, attempts=20)
    by_task = {task.id: [example for example in examples if example.task == task.id] for task in tasks}
    assert {name: len(found) for name, found in by_task.items()} == {"toy-even-amber": 2, "toy-odd-amber": 2}
    judge = ToyJudge()
    assert len(toy_augment(tmp_path / "b", judge, tasks, successes=9, attempts=3)) == 3
    assert judge.count == 6


def test_only_variations_between_the_slowest_and_the_fastest_are_learnt(tmp_path):
    tasks = toy_tasks(("amber",))
    every = toy_augment(tmp_path / "a", ToyJudge(), tasks, successes=8, attempts=8, timed=True)
    some = toy_augment(tmp_path / "b", ToyJudge(), tasks, successes=8, attempts=8, timed=True, slowest=1.3, fastest=1.9)
    speedups = sorted(example.speedup for example in every)
    assert speedups[0] < 1.3
    assert speedups[-1] > 1.9
    assert sorted(example.speedup for example in some) == [each for each in speedups if 1.3 <= each <= 1.9] != []


def test_every_example_says_where_it_comes_from(tmp_path):
    judge = ToyJudge()
    examples = toy_augment(tmp_path, judge, toy_tasks(("amber", "coral")), successes=3, timed=True)
    lines = {e.candidate_sha256: e for e in RunDirectory(tmp_path).evaluations()}
    for example in examples:
        evaluation = lines[example.candidate_sha256]
        assert evaluation.accepted
        assert example.evaluation_sha256 == sha256_of(evaluation.model_dump_json())
        assert (example.teacher, example.techniques, example.speedup) == ("toy-teacher", ("toy",), evaluation.speedup)
        answer = parse_answer(example.answer)
        assert answer.analysis
        assert answer.design
        task = next(task for task in toy_tasks(("amber", "coral")) if task.id == example.task)
        assert whole_source(task, answer.source, "subclass").strip() == evaluation.source.strip()
    assert read_examples(tmp_path / "examples.jsonl") == examples


def test_prompts_with_exemplars_show_only_what_is_slower_than_the_answer(tmp_path):
    tasks = toy_tasks(("amber", "coral", "flint"))
    examples = toy_augment(tmp_path, ToyJudge(), tasks, successes=4, attempts=20, timed=True, exemplars_share=1.0)
    shown = 0
    for example in examples:
        scores = [float(part.split(")")[0]) for part in example.prompt[-1].content.split("(score ")[1:]]
        assert all(score < example.speedup for score in scores)
        shown += bool(scores)
    assert shown > len(examples) / 2


class Sayer(ChatModel):
    """A chat model that says the same things again and again."""

    name = "sayer"

    def __init__(self, *texts):
        self._texts = texts

    def sample(self, prompts, *, count, sampling):
        return [
            [Completion(text=self._texts[n % len(self._texts)], prompt_tokens=1, completion_tokens=1) for n in range(count)]
            for _ in prompts
        ]


def test_a_language_model_teaches_too(tmp_path):
    texts = ("I cannot.", f"```python\n{toy_code(2)}```", f"```python\n{toy_code(4)}```")
    model = Recorded(Sayer(*texts), Transcript(tmp_path / "transcript.jsonl"))
    teacher = ChatTeacher(model, PromptSection(), Sampling())
    task = toy_tasks(("amber",))[0]
    context = Context(task=task, device="cpu", history=(), seed=0)
    proposed = teacher.propose(context, 3)
    assert [candidate.source.strip()[-1] for candidate in proposed] == ["2", "4"]
    assert "I cannot." in (tmp_path / "transcript.jsonl").read_text()


@pytest.mark.parametrize(
    "name", exhaustive_but(["linear_sum", "lenet_style_net", "matmul_chain_order"], "linear_sum", "matmul_chain_order")
)
def test_shortened_candidates_still_define_the_whole_module(name):
    task = builtin_task(name)
    proposed = teacher_named("builtin", "subclass", 4000, 4).propose(
        Context(task=task, device="cuda", history=(), seed=0), 4
    )
    assert proposed
    for candidate in proposed:
        assert candidate.source.startswith(task.source.rstrip())
        assert '"""' not in candidate.source.removeprefix(task.source.rstrip())
        compile(candidate.source, name, "exec")


def test_a_copy_of_the_reference_and_its_graph_are_python():
    for task in (builtin_task("residual_block"), family_tasks(1)[0]):
        copy = copied_forward(task)
        assert "def forward(self" in copy
        replayed = graphed(copy)
        assert "self.compute(*static)" in replayed
        compile(whole_source(task, replayed, "subclass"), task.id, "exec")


def test_shortening_leaves_out_the_fall_back(tmp_path):
    (candidate, *_) = BuiltinPolicy().propose(Context(task=SMALL, device="cpu", history=(), seed=0), 1)
    assert "super().forward(x)" in candidate.source
    assert "super().forward" not in shortened(SMALL, candidate.source)


@pytest.mark.exhaustive
def test_the_real_judge_filters_what_the_built_in_teacher_writes(tmp_path, local_executor):
    """One small pass through processes, checks and sandbox; not timed, since correctness is the filter."""
    settings = {"teachers": ["builtin", "templates"], "successes": 1, "attempts": 1}
    context = toy_context(local_executor)
    examples = augment(config(**settings), [SMALL], RunDirectory(tmp_path), context)
    assert {(example.teacher, example.techniques) for example in examples} == {
        ("builtin", ("push-reduction-through-product",)),
        ("templates", ("copy-of-reference",)),
    }
    assert all("class ModelNew(Model)" in example.answer and "class Model(" not in example.answer for example in examples)
    assert all(example.speedup is None for example in examples)


def test_answers_are_true_about_what_they_were_shown():
    task = toy_tasks(("amber",))[0]
    source = whole_source(task, toy_code(4), "subclass")
    evaluation = toy_evaluation(task, Candidate(source=source, techniques=("fold-bias",)))
    text = answer_text(task, contrastive_prompt(task, (), device="cpu", form="subclass"), evaluation, "subclass")
    assert "The reference: toy even amber." in text
    assert "Fold bias." in text
