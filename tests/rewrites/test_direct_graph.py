"""Wrappers with a CUDA graph, on a driver and a capture of our own, which need no GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernelwright.records.screened import screened_of
from kernelwright.rewrites import wrappers
from kernelwright.rewrites.builtin import BuiltinPolicy
from tests.rewrites.samples import apply_rules, context, proposed, task_text

REFERENCE = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x, y):\n        return torch.relu(x) + y\n"
MEMCPY, KERNEL = 1, 0


class Graph:
    """What was captured: copies by address, and other operators with their results."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[Any] = []

    def instantiate(self) -> None:
        pass

    def raw_cuda_graph(self) -> int:
        return 1

    raw_cuda_graph_exec = raw_cuda_graph

    def replay(self) -> None:
        for node in self.nodes:
            if isinstance(node, list):
                source, destination, size = node
                ctypes.memmove(destination, source, size)
            else:
                operator, arguments, named, result = node
                result.copy_(operator(*arguments, **named))


class Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and all(torch.empty_like(one).stride() == one.stride() for one in args[:2]):
            self.graph.nodes.append([args[1].data_ptr(), args[0].data_ptr(), args[0].nbytes])
        elif "empty" not in str(func) and not func.is_view:
            self.graph.nodes.append((func, args, kwargs or {}, result))
        return result


class Driver:
    """The calls of libcuda that the wrapper makes."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.graph, self.changes = refuses, Graph(True), 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        count._obj.value = len(self.graph.nodes)
        for index in range(len(self.graph.nodes) if nodes else 0):
            nodes[index] = index + 1
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        copies = isinstance(self.graph.nodes[node.value - 1], list) and self.refuses != "type"
        kind._obj.value = MEMCPY if copies else KERNEL
        return 0

    def cuGraphMemcpyNodeGetParams(self, node: Any, words: Any) -> int:
        words[6], words[17], words[22] = self.graph.nodes[node.value - 1]
        return 0

    def cuGraphExecMemcpyNodeSetParams(self, graph: Any, node: Any, words: Any, context: Any) -> int:
        if self.refuses == "set":
            return 1
        self.graph.nodes[node.value - 1] = [words[6], words[17], words[22]]
        self.changes += 1
        return 0


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, Driver]]]:
    """Captures a module's `forward` as the wrapper does."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    def record(
        forward: Callable[..., Any], inputs: list[torch.Tensor], refuses: str = "", name: str = "direct-cuda-graph"
    ) -> tuple[Any, Driver]:
        driver = Driver(refuses)

        @contextlib.contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            driver.graph = graph
            with Capture(graph):
                yield

        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        space: dict[str, Any] = {}
        exec(wrappers.wrap(REFERENCE, name, (name,)), space)
        return space["_Recording"](torch.nn.Identity(), forward, inputs), driver

    return record


def inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 7, generator=generator), torch.randn(7, generator=generator)]


@pytest.mark.parametrize(("refuses", "changes"), [("", 3), ("type", 0), ("set", 0)])
def test_each_call_reads_its_inputs_and_writes_to_fresh_memory(recorded, refuses, changes):
    """Where the driver refuses, by copies around the graph."""
    recording, driver = recorded(lambda x, y: torch.relu(x) + y, inputs(0), refuses)
    answers, before = [], driver.changes
    for seed in (1, 2, 1):
        given = inputs(seed)
        answers.append((recording.replay(given), torch.relu(given[0]) + given[1]))
        assert all(torch.equal(one, other) for one, other in zip(given, inputs(seed), strict=True))
    assert all(torch.equal(found, wanted) for found, wanted in answers)
    assert len({found.data_ptr() for found, _ in answers}) == 3
    assert driver.changes - before == 3 * changes


def test_nested_outputs_and_negated_views(recorded):
    recording, _ = recorded(lambda x, y: {"sum": x + y, "count": 3, "more": (x * 2,)}, inputs(0))
    x, y = inputs(1)
    answer = recording.replay([torch._neg_view(x), y])
    assert torch.equal(answer["sum"], y - x)
    assert answer["count"] == 3
    assert torch.equal(answer["more"][0], -2 * x)


@pytest.mark.parametrize("name", ["cuda-graph", "direct-cuda-graph"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda x, y: (x * y)[:, 2:5],
        lambda x, y: ((x * y).t(), {"row": (x + y)[1:2, 1:].expand(4, 6), "plain": x - y}, (x + y)[2, 3]),
        lambda x, y: [(x * y).unfold(1, 3, 1), (x + y)[:0], (x * y)[:, :1]],
    ],
    ids=["a view of something larger", "nested, transposed and expanded", "overlapping, empty and of size 1"],
)
def test_copies_of_outputs_have_the_strides_of_the_outputs(recorded, name, forward):
    recording, _ = recorded(forward, inputs(0), name=name)
    first = tree_leaves(recording.replay(inputs(1)))
    later = tree_leaves(recording.replay(inputs(2)))
    for seed, found in ((1, first), (2, later)):
        for have, want in zip(found, tree_leaves(forward(*inputs(seed))), strict=True):
            assert have.stride() == want.stride()
            assert torch.equal(have, want)


@pytest.mark.parametrize(("latency_us", "fires"), [(40.0, True), (4000.0, False)])
def test_short_calls_with_a_graph_that_looks_good_are_tried_with_direct_copies(latency_us, fires):
    task = task_text("return torch.tanh(a * 2)", "N(64, 64)")
    policy, given = BuiltinPolicy(), context(task)
    first = policy.propose(given, 100)
    assert not any("direct" in name for one in first for name in one.techniques)
    looks = tuple(
        screened_of(given.task, one, correct=True, estimate=estimate, candidate_us=latency_us)
        for one in first
        for estimate in (1.5 if one.techniques[-1] == "cuda-graph" else 0.9,)
    )
    more = policy.propose(replace(given, screened=looks), 100)
    direct = [one for one in more if one.techniques[-1] == "direct-cuda-graph"]
    assert len(direct) == (2 if fires else 0)
    for one in direct:
        assert one.parent in {look.candidate_sha256 for look in looks}
        compile(one.source, "candidate", "exec")


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("name", ["cuda-graph", "direct-cuda-graph", "compile-cudnn-cuda-graph"])
def test_what_rewritten_code_leaves_to_the_reference_is_not_captured(name: str) -> None:
    """The reference may do what a graph cannot hold, such as a copy from the CPU."""
    done = apply_rules(task_text("return (a * 1.0).exp()", "N(6, 4)"), "remove-noops", captured=True)
    space: dict[str, Any] = {}
    exec(wrappers.wrap(done.source, name, (name,)), space)
    captured: list[torch.Size] = []

    class Recording:
        addresses = 0

        def __init__(self, module: Any, forward: Any, inputs: Any) -> None:
            captured.append(inputs[0].shape)
            self.replay = lambda inputs: inputs[0]

        def places(self) -> int:
            return 0

    space |= {"_Recording": Recording, "_beside": lambda work, *arguments: work(*arguments)}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "compile", lambda function, **options: function)
        model = space["ModelNew"]()
        usual, other = (torch.randn(shape).as_subclass(OnGpu) for shape in ((6, 4), (4, 6)))
        assert model(usual) is usual
        assert model(usual) is usual
        assert model.last_path == "optimized"
        torch.testing.assert_close(model(other.t()), other.t().exp())
        assert model.last_path == "reference"
        torch.testing.assert_close(model(other), other.exp())
    assert captured == [(6, 4)]


def test_every_proposal_with_a_graph_around_rewritten_code_tells_the_graph_what_it_is_for() -> None:
    task = task_text("return torch.tanh((a * 1.0).exp() + 1)", "N(64, 64)")
    found = [one for one in proposed(task) if "class Rewritten(" in one.source]
    graphs = {one.techniques for one in found if one.techniques[-1] in wrappers.WITH_GRAPH}
    assert graphs
    for one in found:
        rewritten, _, wrapper = one.source.partition("class ModelNew(")
        asked, told = f"self.{wrappers.GUARD}(*inputs)" in wrapper, f"def {wrappers.GUARD}(" in rewritten
        assert told == asked == (one.techniques in graphs)


def test_a_call_that_replays_no_graph_says_so_once() -> None:
    names: dict[str, Any] = {}
    exec(wrappers.wrap(REFERENCE, "cuda-graph", ("cuda-graph",)), names)
    model, inputs = names["ModelNew"](), (torch.ones(2), torch.ones(2))
    for enabled, why in ((True, "gradients are enabled"), (False, "an input is no tensor on a GPU")):
        model.__dict__.pop("_has_warned_of_graph", None)
        with torch.set_grad_enabled(enabled), pytest.warns(UserWarning, match=why) as warned:
            assert [model(*inputs).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
        assert len(warned) == 1
        assert model.last_path == "reference"
