"""The built-in policy: what it proposes, in which order, and that a resumed run proposes the same."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import torch

from kernelwright.execution.executor import LocalExecutor
from kernelwright.execution.work import Evaluate, run_all
from kernelwright.records import Candidate, Evaluation, Reason, Task, Verdict
from kernelwright.records.screened import screened_of
from kernelwright.rewrites import emit, wrappers
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.rules import RULES, Rule
from kernelwright.rewrites.tracing import load
from tests.quick import exhaustive_but
from tests.rewrites.samples import PLAIN, compare, context, proposed, task_text

SUM = task_text("return torch.tanh(self.f(a).sum(1)) * 1.0 + 2", "N(4096, 6)", "self.f = nn.Linear(6, 8)")
CONVOLUTION = task_text("return torch.relu(self.f(a)) + 1", "N(2, 4, 16, 16)", "self.f = nn.ConvTranspose2d(4, 5, 3)")
VOLUME_AND_PLANE = "self.f = nn.Conv3d(4, 5, 3)\nself.g = nn.Conv2d(5, 3, 2)"
UNTRACEABLE = task_text("return a * 2 if a.sum() > 0 else a", "N(4, 6)")


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
        passes=candidate.passes,
        source=candidate.source,
    )


def test_the_first_proposal_has_every_rule_that_applies() -> None:
    first, second = proposed(SUM, 2, device="cpu")
    assert first.techniques == ("remove-noops", "push-reduction-through-product")
    assert "fuse-chains-cpp" in second.techniques
    assert first.policy == "builtin"
    compare(SUM, first.source, 1e-5)


def test_a_plan_is_made_of_distinct_python_modules_with_named_techniques() -> None:
    for device in ("cpu", "cuda"):
        found = proposed(CONVOLUTION, device=device)
        assert len({candidate.sha256 for candidate in found}) == len(found) > 2
        for candidate in found:
            assert candidate.techniques
            names = [node.name for node in ast.walk(ast.parse(candidate.source)) if isinstance(node, ast.ClassDef)]
            assert "ModelNew" in names
        techniques = {name for candidate in found for name in candidate.techniques}
        assert "flip-transposed-convolution" in techniques
        assert ("cuda-graph" in techniques) == ("channels-last-cuda-graph" in techniques) == (device == "cuda")


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_candidates_have_no_import_from_the_future_but_the_tasks_own(future: str) -> None:
    """KernelBench's harness puts statements before a candidate, where such an import is an error."""
    task = future + task_text("return torch.tanh(self.f(a) * 2) @ a.mT", "N(256, 256)", "self.f = nn.Linear(256, 256)")
    found = proposed(task)
    assert {"cuda-graph", "fuse-chains-triton"} <= {name for one in found for name in one.techniques}
    for one in found:
        assert one.source.count("from __future__") == bool(future)
        compile(one.source if future else "import os\n" + one.source, "candidate", "exec")


def test_chains_are_proposed_once_where_no_operator_alone_is_a_kernel() -> None:
    task = task_text("return torch.tanh(a * 2)", "N(64, 64)")
    found = proposed(task, order=PLAIN)
    assert [one.techniques for one in found if any("fuse" in name for name in one.techniques)] == [
        ("fuse-chains-triton",),
        ("fuse-chains-triton", "cuda-graph"),
    ]


def test_a_device_among_arguments_is_that_of_the_inputs() -> None:
    source = task_text("return torch.tanh(a * 1.0) * b.to(a.device, torch.float64)", "N(6), torch.ones(6).int()")
    first = proposed(source, 1, device="cpu")[0]
    assert "b.to(a.device, torch.float64)" in first.source
    compare(source, first.source, 1e-5)


@pytest.mark.exhaustive
def test_a_resumed_run_goes_on_where_it_was() -> None:
    policy = BuiltinPolicy()
    whole = policy.propose(context(SUM, device="cpu"), 100)
    history: tuple[Evaluation, ...] = ()
    stepwise: list[Candidate] = []
    while len(stepwise) < len(whole):
        # A new policy for every step: nothing may live in its memory.
        candidate = BuiltinPolicy().propose(context(SUM, history, "cpu"), 1)[0]
        stepwise.append(candidate)
        history += (evaluated(candidate, None),)
    assert stepwise == whole
    assert policy.propose(context(SUM, history, "cpu"), 1) == []


def test_an_improvement_is_built_on() -> None:
    policy = BuiltinPolicy()
    plan = policy.propose(context(CONVOLUTION, device="cpu"), 100)
    best = next(item for item in plan if item.techniques == ("flip-transposed-convolution",))
    history = tuple(evaluated(item, 2.0 if item is best else 0.9) for item in plan)
    derived = policy.propose(context(CONVOLUTION, history, "cpu"), 100)
    assert derived
    assert all(item.parent == best.sha256 for item in derived)
    assert {
        ("flip-transposed-convolution", "compile"),
        ("flip-transposed-convolution", "fuse-chains-cpp"),
    } <= {item.techniques for item in derived}
    assert BuiltinPolicy().propose(context(CONVOLUTION, history, "cpu"), 100) == derived


@pytest.mark.parametrize(
    ("shape", "layer", "wanted"),
    exhaustive_but(
        [
            ("2, 4, 8, 8", "nn.Conv2d(4, 5, 3)", {*wrappers.WITH_CONVOLUTIONS, wrappers.CHANNELS_LAST}),
            ("2, 4, 8, 8", "nn.ConvTranspose2d(4, 5, 3)", {*wrappers.WITH_CONVOLUTIONS, wrappers.CHANNELS_LAST}),
            ("2, 4, 8", "nn.Conv1d(4, 5, 3)", {*wrappers.WITH_CONVOLUTIONS}),
            ("2, 4, 5, 6, 7", "nn.Conv3d(4, 5, 3)", {*wrappers.WITH_CONVOLUTIONS}),
            ("2, 4", "nn.Linear(4, 5)", set()),
        ],
        ("2, 4, 8, 8", "nn.Conv2d(4, 5, 3)", {*wrappers.WITH_CONVOLUTIONS, wrappers.CHANNELS_LAST}),
        ("2, 4, 8", "nn.Conv1d(4, 5, 3)", {*wrappers.WITH_CONVOLUTIONS}),
        ("2, 4", "nn.Linear(4, 5)", set()),
    ),
)
def test_wrappers_of_convolutions_are_proposed_where_they_apply(shape: str, layer: str, wanted: set[str]) -> None:
    task = task_text("return self.f(a)", f"N({shape})", f"self.f = {layer}")
    found = {name for one in proposed(task) for name in one.techniques}
    assert found & {*wrappers.WITH_CONVOLUTIONS, wrappers.CHANNELS_LAST} == wanted


@pytest.mark.parametrize(
    ("estimate", "latency_us", "fires"), [(1.2, 50.0, False), (1.2, 5000.0, True), (0.5, 5000.0, False), (None, None, True)]
)
def test_a_wrapper_without_its_graph_is_tried_where_the_graph_failed_or_the_call_is_long(
    estimate: float | None, latency_us: float | None, fires: bool
) -> None:
    task = task_text("return self.f(a) * 1 + 0", "N(2, 4, 8, 8)", "self.f = nn.Conv2d(4, 5, 3)")
    given, policy = context(task), BuiltinPolicy()
    first = policy.propose(given, 100)
    later = {("remove-noops", "compile"), ("remove-noops", "cudnn-benchmark")}
    assert not later & {one.techniques for one in first}
    assert {("compile",), ("cudnn-benchmark",)} <= {one.techniques for one in first}
    found = {"correct": estimate is not None, "estimate": estimate, "candidate_us": latency_us}
    plain = {"correct": True, "estimate": 1.0}
    looks = tuple(screened_of(given.task, one, **(found if "graph" in one.techniques[-1] else plain)) for one in first)
    more = {one.techniques for one in policy.propose(replace(given, screened=looks), 100)}
    assert later & more == (later if fires else set())


@pytest.mark.parametrize("large", [False, True])
def test_a_graph_comes_last_where_its_copies_are_large(large: bool) -> None:
    sizes = "64, 8, 256, 256" if large else "4, 8, 64, 64"
    task = task_text("return torch.sigmoid(self.f(a)) * 2", f"N({sizes})", "self.f = nn.Conv2d(8, 16, 3)")
    found = [one.techniques for one in proposed(task)]
    captured = [not wrappers.WITH_GRAPH.isdisjoint(one) for one in found]
    first = captured.index(True)
    assert any(captured)
    assert all(captured[first:]) == large
    compiled = {("compile",), ("compile-cudnn",), ("fuse-chains-triton", "cudnn-benchmark")}
    assert (compiled <= set(found[:first])) == large


def test_channels_last_leaves_tensors_of_other_ranks_alone() -> None:
    task = task_text("return self.g(self.f(a).mean(4)).sum() + self.f(a)", "N(2, 4, 5, 6, 7)", VOLUME_AND_PLANE)
    module = load(wrappers.baseline_source(Task(id="sample", source=task), "channels-last"), "candidate")
    plain, wrapped = module.Model(), module.ModelNew()
    wrapped.load_state_dict(plain.state_dict())
    volume = torch.randn(2, 4, 5, 6, 7)
    torch.testing.assert_close(wrapped(volume), plain(volume))
    assert wrapped.g.weight.is_contiguous(memory_format=torch.channels_last)
    assert wrapped.f.weight.is_contiguous()


def test_without_a_graph_only_wrappers_are_proposed_and_the_reason_is_told() -> None:
    found = proposed(UNTRACEABLE)
    assert {item.techniques for item in found} >= {("cuda-graph",), ("compile",)}
    assert all(item.note.startswith("No operator graph:") for item in found)


def test_where_a_call_leaves_a_state_for_the_next_nothing_with_a_graph_is_proposed() -> None:
    """A replay reads the state where the captured call did, and printed operators would drop what the call leaves."""
    forward = "self.h = torch.tanh(self.f(torch.cat([a, self.h], 1))) * 1.0\nreturn self.h"
    task = task_text(forward, "N(4, 6)", "self.f = nn.Linear(11, 5)\nself.h = torch.zeros(4, 5)")
    found = proposed(task)
    assert [one.techniques for one in found] == [("compile",)]
    assert "keeps a state between calls in h" in found[0].note


@pytest.mark.parametrize(("rows", "fits"), [("view(2, 64)", False), ("flatten(1)", True), ("mean((2, 3)).view(2, 4)", True)])
def test_channels_last_is_not_proposed_where_a_view_refuses_the_layout(rows: str, fits: bool) -> None:
    task = task_text(f"return torch.relu(self.f(a)).{rows} + 1", "N(2, 3, 6, 6)", "self.f = nn.Conv2d(3, 4, 3)")
    found = proposed(task)
    assert (("channels-last-cuda-graph",) in {one.techniques for one in found}) == fits
    module = load(wrappers.baseline_source(Task(id="sample", source=task), "channels-last"), "candidate")
    if fits:
        module.ModelNew()(torch.randn(2, 3, 6, 6))
    else:
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            module.ModelNew()(torch.randn(2, 3, 6, 6))


@pytest.mark.parametrize(("batch", "erratic"), exhaustive_but([(2, True), (3, False)], (2, True)))
def test_where_batch_norms_over_two_values_follow_one_another_only_the_references_kernels_are_proposed(
    batch: int, erratic: bool
) -> None:
    """Any other rounding turns the signs that these norms give, and running statistics with them."""
    layers = ", ".join(["nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()"] * 3)
    task = task_text("return self.f(a) * 1.0", f"N({batch}, 4, 1, 1)", f"self.f = nn.Sequential({layers})")
    found = proposed(task)
    assert ({one.techniques for one in found} == {("cuda-graph",)}) == erratic


def test_a_rule_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(editor: object) -> int:
        raise ValueError("no such thing")

    rules = tuple(Rule(name=rule.name, apply=broken) if rule.name == "remove-noops" else rule for rule in RULES)
    monkeypatch.setattr("kernelwright.rewrites.passes.RULES", rules)
    first = proposed(SUM, 1, device="cpu")[0]
    assert first.techniques == ("merge-constants", "push-reduction-through-product")
    assert "rule remove-noops: ValueError: no such thing" in first.note


@pytest.mark.parametrize(("layer", "draws"), [("nn.Dropout(0.3)", True), ("nn.Dropout(0.0)", False), ("nn.ReLU()", False)])
def test_torch_compile_draws_what_eager_draws_where_a_task_has_dropout(layer: str, draws: bool) -> None:
    """Inductor has random numbers of its own, so that each such candidate was another function in training mode."""
    task = task_text("return self.g(self.f(a)) + a", "N(4, 8)", f"self.f = nn.Linear(8, 8)\nself.g = {layer}")
    found = proposed(task)
    compiled = {one.techniques[-1]: one.source for one in found if one.techniques[-1].startswith("compile")}
    assert {"compile", "compile-cuda-graph", "compile-max-autotune"} <= set(compiled)
    assert {"fallback_random" in source for source in compiled.values()} == {draws}
    tuned = "coordinate_descent_tuning" if draws else 'mode="max-autotune-no-cudagraphs"'
    assert tuned in compiled["compile-max-autotune"]


def test_options_for_a_task_that_draws_are_those_of_the_mode_they_replace() -> None:
    listed = torch._inductor.list_mode_options()  # type: ignore[attr-defined]
    for plain, drawing in wrappers.DRAWING.items():
        mode = plain.partition('"')[2].rstrip('"') or "default"
        options = ast.literal_eval(drawing.removeprefix(", options="))
        assert options == listed[mode] | {"fallback_random": True}


@pytest.mark.exhaustive
def test_a_compiled_candidate_with_dropout_is_accepted_in_both_modes(local_executor: LocalExecutor) -> None:
    layers = "self.f = nn.Linear(8, 8)\nself.g = nn.Dropout(0.3)"
    task = Task(id="dropout", source=task_text("return self.g(self.f(a)) + a", "N(4, 8)", layers))
    verdicts = []
    for draws in (True, False):
        candidate = Candidate(source=wrappers.wrap(task.source, "compile", ("compile",), draws), policy="builtin")
        (result,) = run_all(local_executor, [Evaluate(task, candidate)])
        found = result.outcome
        assert isinstance(found, Evaluation)
        verdicts.append((found.verdict, found.reason))
    assert verdicts == [(Verdict.ACCEPTED, None), (Verdict.REJECTED, Reason.WRONG_OUTPUT)]


@pytest.mark.parametrize(
    ("statements", "wanted"),
    [
        ("self.h = self.h.to(x.device)\n        self.c = self.h.to(x.device)", 2),
        ('"""Say something."""\n        self.h = self.h.to(x.device)', 1),
        ("y = x + 1\n        self.h = self.h.to(x.device)", 0),
        ("self.h = self.h.to(x.device) + 1", 0),
        ("self.h = self.h.to(torch.device('cpu'))", 0),
        ("if self.training:\n            self.h = self.h.to(x.device)", 0),
    ],
)
def test_rewritten_code_moves_attributes_to_the_device_as_the_reference_does(statements: str, wanted: int) -> None:
    source = f"class Model(nn.Module):\n    def forward(self, x):\n        {statements}\n        return x + self.h\n"
    assert len(emit.moved_attributes(source)) == wanted
