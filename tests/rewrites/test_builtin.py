"""The built-in policy: what it proposes, in which order, and that a resumed run proposes the same."""

from __future__ import annotations

import ast

import pytest

from kernelwright.records import Candidate, Evaluation, Task, Verdict
from kernelwright.records.policy import Context
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.rules import RULES, Rule
from tests.rewrites.samples import compare, task_text

SUM = task_text("return torch.tanh(self.f(a).sum(1)) * 1.0 + 2", "torch.randn(4096, 6)", "self.f = nn.Linear(6, 8)")
CONVOLUTION = task_text(
    "return torch.relu(self.f(a)) + 1", "torch.randn(2, 4, 16, 16)", "self.f = nn.ConvTranspose2d(4, 5, 3)"
)
UNTRACEABLE = task_text("return a * 2 if a.sum() > 0 else a", "torch.randn(4, 6)")


def context(source: str, history: tuple[Evaluation, ...] = (), device: str = "cpu") -> Context:
    return Context(task=Task(id="sample", source=source), device=device, history=history, seed=0)


def evaluated(candidate: Candidate, speedup: float | None) -> Evaluation:
    """A record of a candidate: accepted with this speedup, or rejected."""
    verdict = Verdict.REJECTED if speedup is None else Verdict.ACCEPTED
    return Evaluation(
        task="sample",
        task_sha256="",
        candidate_sha256=candidate.sha256,
        verdict=verdict,
        speedup=speedup,
        speedup_low=speedup,
        policy=candidate.policy,
        techniques=candidate.techniques,
        source=candidate.source,
    )


def test_the_first_proposal_has_every_rule_that_applies() -> None:
    first, second = BuiltinPolicy().propose(context(SUM), 2)
    assert first.techniques == ("remove-noops", "push-reduction-through-product")
    assert "fuse-chains-cpp" in second.techniques
    assert first.policy == "builtin"
    compare(SUM, first.source, 1e-5)


def test_a_plan_is_made_of_distinct_python_modules_with_named_techniques() -> None:
    for device in ("cpu", "cuda"):
        found = BuiltinPolicy().propose(context(CONVOLUTION, device=device), 100)
        assert len({candidate.sha256 for candidate in found}) == len(found) > 2
        for candidate in found:
            assert candidate.techniques
            names = [node.name for node in ast.walk(ast.parse(candidate.source)) if isinstance(node, ast.ClassDef)]
            assert "ModelNew" in names
        techniques = {name for candidate in found for name in candidate.techniques}
        assert "flip-transposed-convolution" in techniques
        assert ("cuda-graph" in techniques) == ("channels-last" in techniques) == (device == "cuda")


def test_a_resumed_run_goes_on_where_it_was() -> None:
    policy = BuiltinPolicy()
    whole = policy.propose(context(SUM), 100)
    history: tuple[Evaluation, ...] = ()
    stepwise: list[Candidate] = []
    while len(stepwise) < len(whole):
        # A new policy for every step: nothing may live in its memory.
        candidate = BuiltinPolicy().propose(context(SUM, history), 1)[0]
        stepwise.append(candidate)
        history += (evaluated(candidate, None),)
    assert stepwise == whole
    assert policy.propose(context(SUM, history), 1) == []


def test_an_improvement_is_built_on() -> None:
    policy = BuiltinPolicy()
    plan = policy.propose(context(CONVOLUTION), 100)
    best = next(item for item in plan if item.techniques == ("flip-transposed-convolution",))
    history = tuple(evaluated(item, 2.0 if item is best else 0.9) for item in plan)
    derived = policy.propose(context(CONVOLUTION, history), 100)
    assert derived
    assert all(item.parent == best.sha256 for item in derived)
    assert {
        ("flip-transposed-convolution", "compile"),
        ("flip-transposed-convolution", "fuse-chains-cpp"),
    } <= {item.techniques for item in derived}
    assert BuiltinPolicy().propose(context(CONVOLUTION, history), 100) == derived


def test_without_a_graph_only_wrappers_are_proposed_and_the_reason_is_told() -> None:
    found = BuiltinPolicy().propose(context(UNTRACEABLE, device="cuda"), 100)
    assert {item.techniques for item in found} >= {("cuda-graph",), ("compile",)}
    assert all(item.note.startswith("No operator graph:") for item in found)


def test_a_rule_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(editor: object) -> int:
        raise ValueError("no such thing")

    rules = tuple(Rule(name=rule.name, apply=broken) if rule.name == "remove-noops" else rule for rule in RULES)
    monkeypatch.setattr("kernelwright.rewrites.builtin.RULES", rules)
    first = BuiltinPolicy().propose(context(SUM), 1)[0]
    assert first.techniques == ("merge-constants", "push-reduction-through-product")
    assert "rule remove-noops: ValueError: no such thing" in first.note
