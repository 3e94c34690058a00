"""Recipes: how a record stores one, how a search builds on it in another process, and how a technique is added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from kernelwright.records import Candidate, Evaluation, Task, Verdict
from kernelwright.records.policy import Context
from kernelwright.rewrites.builtin import BuiltinPolicy, first_recipes
from kernelwright.rewrites.graph import Editor, aten
from kernelwright.rewrites.passes import PASSES, FusionPass, ProductPass, RulesPass, WrapperPass, stored_recipe
from kernelwright.rewrites.recipes import Draft, Recipe, RecipePass, TaskContext
from tests.rewrites.samples import compare, task_text

TASK = Task(
    id="sample",
    source=task_text("return torch.tanh(self.f(a).sum(1)) * 1.0 + 2", "N(4096, 6)", "self.f = nn.Linear(6, 8)"),
)


@dataclass(frozen=True, slots=True)
class SigmoidPass(RecipePass):
    """`tanh(x)` as `2 sigmoid(2 x) - 1`."""

    name: ClassVar[str] = "tanh-by-sigmoid"
    rank: ClassVar[int] = 35

    @classmethod
    def first(cls, task: TaskContext) -> Iterator[Recipe]:
        yield Recipe((RulesPass.always(), cls()))

    def apply(self, draft: Draft) -> bool:
        count = 0
        for graph in draft.operators():
            editor = Editor(graph.graph, graph.mode)
            for node in editor.nodes(aten.tanh):
                half = editor.call(node, aten.sigmoid.default, editor.call(node, aten.mul.Tensor, node.args[0], 2.0))
                double = editor.call(node, aten.mul.Tensor, half, 2.0)
                editor.replace(node, editor.call(node, aten.sub.Tensor, double, 1.0))
                count += 1
        return bool(count) and draft.record(self, "tanh-by-sigmoid")


def won(candidate: Candidate) -> Evaluation:
    return Evaluation(
        task="sample",
        task_sha256=TASK.sha256,
        candidate_sha256=candidate.sha256,
        verdict=Verdict.ACCEPTED,
        speedup=2.0,
        speedup_low=2.0,
        policy=candidate.policy,
        techniques=candidate.techniques,
        passes=candidate.passes,
        source=candidate.source,
    )


def proposals(*history: Evaluation, device: str = "cpu") -> list[Candidate]:
    return BuiltinPolicy().propose(Context(task=TASK, device=device, history=history, seed=0), 100)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_stored_recipe_makes_its_candidate_again(device: str) -> None:
    context = TaskContext.open(TASK, device)
    found = proposals(device=device)
    assert found
    for candidate in found:
        stored = Candidate.model_validate_json(candidate.model_dump_json())
        assert stored == candidate
        built = context.build(stored_recipe(stored.passes))
        assert built is not None
        assert (built.source, built.techniques) == (candidate.source, candidate.techniques)


def test_what_a_record_stores_is_what_took_effect() -> None:
    recipe = Recipe((RulesPass.always(), FusionPass(single=True), WrapperPass("compile")))
    built = TaskContext.open(TASK, "cpu").build(recipe)
    assert built is not None
    assert built.techniques == ("remove-noops", "push-reduction-through-product", "fuse-chains-cpp", "compile")
    rules, fusion, wrapper = built.effect.stored
    assert rules == ("rules", {"names": ["remove-noops", "push-reduction-through-product"]})
    assert fusion[1]["single"] is False
    assert wrapper == ("wrapper", {"kind": "compile"})


def test_a_winner_is_built_on_where_its_record_has_passes() -> None:
    best = next(candidate for candidate in proposals() if candidate.techniques[-1] == "fuse-chains-cpp")
    assert {candidate.parent for candidate in proposals(won(best))} == {None, best.sha256}
    assert {candidate.parent for candidate in proposals(won(best).model_copy(update={"passes": ()}))} == {None}


def test_a_recipe_has_one_pass_of_a_class_in_the_order_of_their_ranks() -> None:
    recipe = Recipe((RulesPass.always(), WrapperPass("compile"))).plus(FusionPass(), WrapperPass("cuda-graph"))
    assert [step.name for step in recipe.passes] == ["rules", "fusion", "wrapper"]
    assert recipe.get(WrapperPass) == WrapperPass("cuda-graph")
    assert recipe.get(ProductPass) is None
    assert [kind.rank for kind in PASSES] == sorted({kind.rank for kind in PASSES})
    assert stored_recipe((("a pass of a later version", {"knob": 1}), *recipe.stored)) == recipe


def test_a_technique_is_one_class_and_a_name_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("passes", "builtin"):
        monkeypatch.setattr(f"kernelwright.rewrites.{module}.PASSES", (*PASSES, SigmoidPass))
    context = TaskContext.open(TASK, "cpu")
    assert next(first_recipes(context)).passes[-1] == SigmoidPass()
    first = proposals()[0]
    assert first.techniques[-1] == "tanh-by-sigmoid"
    assert first.passes[-1] == ("tanh-by-sigmoid", {})
    compare(TASK.source, first.source, 1e-5)
    derived = proposals(won(first))
    assert any(candidate.techniques[-2:] == ("tanh-by-sigmoid", "compile") for candidate in derived)
