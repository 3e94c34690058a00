"""A model's equal layers are searched once: one for all, and then the whole with what was found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kernelwright
from kernelwright.errors import DeviceError
from kernelwright.execution.work import Evaluate, Screen
from kernelwright.records import Candidate, Evaluation
from kernelwright.records.policy import Context
from kernelwright.records.screened import Screened, screened_of
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.passes import EQUAL_LAYERS, FusionPass, RulesPass, stored_recipe
from kernelwright.rewrites.recipes import Recipe, SearchedBlock, TaskContext
from kernelwright.search.in_memory import ModelResult
from kernelwright.tasks.in_memory import Inputs, ModelCall, candidate_of, folder_on_path, task_of, tried
from kernelwright.tasks.in_memory.repeated import EqualModules, equal_modules
from tests.executors import FakeExecutor
from tests.quick import exhaustive_but
from tests.samples import accepted

WIDTH = 8
X = torch.linspace(-2, 2, 256 * WIDTH).sin().reshape(256, WIDTH)


class Layer(nn.Module):
    def __init__(self, scale: float = 0.5, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(width), nn.Linear(width, width), scale
        self.register_buffer("shift", torch.randn(width), persistent=False)

    def forward(self, x: torch.Tensor, tables: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None) -> Any:
        y = torch.relu(self.linear(self.norm(x)) * 1.0 + self.shift) * self.scale * tables[0] + tables[1]
        return x + (y if mask is None else y * mask)


class Stack(nn.Module):
    """Layers of a model, those of `odd` with something else about them."""

    def __init__(self, depth: int = 4, odd: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(0.25 if odd == "scale" and place == 1 else 0.5) for place in range(depth))
        self.last, self.odd = nn.Linear(WIDTH, 4), odd
        if odd == "shared":
            self.layers = nn.ModuleList([self.layers[0]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = torch.ones(WIDTH), torch.zeros(WIDTH)
        for place, layer in enumerate([*self.layers] * (4 if self.odd == "shared" else 1)):
            mask = torch.ones(WIDTH) if self.odd == "mask" and place == 1 else None
            x = layer(x, tables, mask=mask)
        return self.last(x)


class TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(3)
        )
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide, layer in zip(self.wide, self.layers, strict=True):
            x = layer(wide(x), (torch.ones(WIDTH), torch.zeros(WIDTH)))
        return x


def found_in(model: nn.Module, **inputs: Any) -> list[EqualModules]:
    (call,) = tried(model.eval(), [Inputs(**(inputs or {"x": X}))])
    return equal_modules(model, call.examples[0])


def test_equal_layers_are_found() -> None:
    (layers,) = found_in(Stack())
    assert layers.paths == tuple(f"layers.{place}" for place in range(4))
    assert layers.calls == 4
    assert repr(layers.inputs) == "(float32[256, 8], [float32[8], float32[8]], mask=None)"
    (layer,) = found_in(Stack(odd="shared"))
    assert (layer.paths, layer.calls) == (("layers.0",), 4)
    assert [one.paths[0] for one in found_in(TwoKinds())] == ["wide.0", "layers.0"]


@pytest.mark.parametrize("odd", ["scale", "mask"])
def test_layers_that_compute_something_else_or_are_called_otherwise_are_left_out(odd: str) -> None:
    assert [one.paths for one in found_in(Stack(odd=odd))] == [("layers.0", "layers.2", "layers.3")]
    assert found_in(Stack(3, odd=odd)) == [], "two are too few"


class Cached(Stack):
    """Layers that write into an object of their model's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cached.Cache()
        for layer in self.layers:
            x = layer(x, (torch.ones(WIDTH), torch.zeros(WIDTH)), mask=cache)
        return x

    class Cache:
        def __rmul__(self, y: torch.Tensor) -> torch.Tensor:
            return y


def test_layers_that_no_task_can_call_are_left_to_the_whole(tmp_path: Path) -> None:
    search, heard = Search(tmp_path, alone=3.0, whole=1.5, judged=0.9), list[str]()
    search(Cached(), on_event=lambda event: heard.append(str(event)))
    assert [what for what in search.tasks if what[0] == "Screen"] == [("Screen", "Cached")]
    assert heard[0].startswith("no layer is searched for all: Wanted layers that take tensors and plain data")
    assert heard[0].endswith("Layer takes a Cache. Where the model can do without, as by use_cache=False, call it so.")


def asked(work: Screen, looks: list[Screened]) -> Context:
    return Context(task=work.task, device="cpu", history=(), seed=0, screened=tuple(looks))


class Search:
    """A search in which a layer alone and the whole gain what they are said to, by the technique that says it last."""

    def __init__(self, folder: Path, alone: float, whole: float, judged: float) -> None:
        self.folder, self.alone, self.whole, self.judged = folder, alone, whole, judged

    def __call__(self, model: nn.Module, **options: Any) -> ModelResult:
        self.executor = FakeExecutor(self.find)
        given = {"out": self.folder, "budget": 8, "judged": 1, "evaluator": self.executor, **options}
        return kernelwright.optimize(model.eval(), X, **given)

    def find(self, work: Screen | Evaluate) -> Any:
        return self.looks(work) if isinstance(work, Screen) else self.verdict(work)

    def looks(self, work: Screen) -> Iterator[Screened | None]:
        assert work.policy is not None
        gain = self.alone if work.task.id == "Layer" else self.whole
        looks = [*work.earlier]
        while proposed := work.policy.propose(asked(work, looks), work.budget - len(looks)):
            for one in proposed:
                carried = EQUAL_LAYERS in one.techniques or gain == self.alone
                estimate = gain * (1 - 0.01 * len(looks)) if carried else 1.0
                looks.append(screened_of(work.task, one, correct=True, estimate=estimate, spread=0.0))
                yield looks[-1]
        yield None

    def verdict(self, work: Evaluate) -> Evaluation:
        one, task = work.candidate, work.task
        fields = one.model_dump(include={"policy", "techniques", "passes", "parent"})
        return accepted(self.judged, one.source, task=task.id, task_sha256=task.sha256, **fields)

    @property
    def tasks(self) -> list[tuple[str, str]]:
        return [(type(work).__name__, work.task.id) for work in self.executor.submitted]


@pytest.mark.parametrize("depth", exhaustive_but([4, 12], 12))
def test_one_layer_is_searched_and_the_whole_is_judged_once(depth: int, tmp_path: Path) -> None:
    model, search = Stack(depth), Search(tmp_path, alone=3.0, whole=2.0, judged=2.0)
    result = search(model)
    assert search.tasks == [("Screen", "Layer"), ("Screen", "Stack"), ("Evaluate", "Stack")]
    (found,) = result.searches.values()
    ((block,),) = result.blocks.values()
    assert (block.search.screened, found.screened, found.evaluations) == (8, 5, 1)
    assert f"{depth} equal " in str(result)
    assert "8 screened on one for all: about 3.00x alone, which makes " in str(result)
    assert block.in_the_whole == pytest.approx(1 / (1 - block.share + block.share / 3))
    assert block.in_the_whole < block.bound
    assert found.best is not None
    assert found.best.techniques[0] == EQUAL_LAYERS
    assert found.best.source.count("def _part_") == 1
    with torch.no_grad():
        torch.testing.assert_close(result.module(X), model(X))
    assert result.module.last_path == "optimized"
    again = Search(tmp_path, alone=3.0, whole=2.0, judged=2.0)
    (found,) = again(model).searches.values()
    assert (found.screened, found.evaluations) == (5, 1), "all of it is on record"


def test_a_layer_that_wins_alone_and_loses_in_the_whole_is_not_handed_out(tmp_path: Path) -> None:
    model, search = Stack(), Search(tmp_path, alone=3.0, whole=1.5, judged=0.9)
    result = search(model)
    assert ("Evaluate", "Stack") in search.tasks
    assert ("Evaluate", "Layer") not in search.tasks
    assert result.module is model


class NoRoom(Search):
    def find(self, work: Screen | Evaluate) -> Any:
        if work.task.id == "Layer":
            raise DeviceError("Wanted to screen candidates of Layer; out-of-memory: all of it.")
        return super().find(work)


def test_a_layer_that_cannot_be_screened_leaves_the_search_to_the_whole(tmp_path: Path) -> None:
    search, heard = NoRoom(tmp_path, alone=3.0, whole=1.5, judged=2.0), list[str]()
    assert not search(Stack(), on_event=lambda event: heard.append(str(event))).blocks["(float32[256, 8])"]
    assert ("Evaluate", "Layer") not in search.tasks
    assert "no layer is searched for all: Wanted to screen candidates of Layer; out-of-memory: all of it." in heard


LOAD = """
import torch, kernelwright
from tests.search.test_blocks import Stack, X
model = Stack().eval()
faster = kernelwright.load(model, {folder!r})
with torch.no_grad():
    torch.testing.assert_close(faster(X), model(X))
print(faster.last_path)
"""


@pytest.mark.exhaustive
def test_what_was_found_is_saved_and_loaded_in_another_process(tmp_path: Path) -> None:
    Search(tmp_path / "run", alone=3.0, whole=2.0, judged=2.0)(Stack()).save(tmp_path / "saved")
    text = LOAD.format(folder=str(tmp_path / "saved"))
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["optimized"]


RULES = Recipe((RulesPass.always(),))


def blocks_of(model: nn.Module, inputs: dict[str, Any], folder: Path, *recipes: Recipe) -> list[SearchedBlock]:
    found = []
    for one in found_in(model, **inputs):
        (call,) = tried(one.module, [one.inputs], alone=True)
        task = task_of(one.module, call, folder)
        found.append(SearchedBlock(task, one, recipes, ("compile",)))
    return found


def proposed(
    model: nn.Module, inputs: dict[str, Any], folder: Path, device: str, *recipes: Recipe
) -> tuple[ModelCall, TaskContext, list[Candidate], list[Candidate]]:
    """A call, its task, and what is proposed for it at first and then."""
    (call,) = tried(model.eval(), [Inputs(**inputs)])
    task, blocks = task_of(model, call, folder), blocks_of(model, inputs, folder, *recipes)
    with folder_on_path(folder):
        policy, given = BuiltinPolicy(blocks=blocks), Context(task=task, device=device, history=(), seed=0)
        first = policy.propose(given, 100)
        looks = tuple(screened_of(task, one, correct=False) for one in first)
        return call, TaskContext.open(task, device, blocks), first, policy.propose(replace(given, screened=looks), 100)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_several_kinds_have_recipes_of_their_own_and_a_record_makes_the_candidate_again(tmp_path: Path, device: str) -> None:
    fused = RULES.plus(FusionPass(single=True))
    _, context, carried, others = proposed(TwoKinds(), {"x": X}, tmp_path, device, fused, RULES)
    assert len(carried) == (3 if device == "cuda" else 2)
    assert all(EQUAL_LAYERS in one.techniques for one in carried)
    assert others[-1].techniques == ("compile",)
    assert not any(EQUAL_LAYERS in one.techniques for one in others)
    assert len(others) == (3 if device == "cuda" else 2), "the best recipe on the whole's own graph"
    for one in carried:
        stored = Candidate.model_validate_json(one.model_dump_json())
        built = context.build(stored_recipe(stored.passes))
        assert built is not None
        assert (built.source, built.techniques) == (one.source, one.techniques)
        assert one.source.count("def _part_") == 2
    assert TaskContext.open(context.task, device).build(stored_recipe(carried[0].passes)) is None


ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
DECODER = ENCODER | {"vocab_size": 99, "num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = {"input_ids": torch.arange(32).reshape(2, 16) * 7 % 90 + 3}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "BertModel": ("BertConfig", DECODER, IDS | {"attention_mask": (IDS["input_ids"] < 80).long()}),
    "AlbertModel": ("AlbertConfig", DECODER | {"embedding_size": 16}, IDS),
    "LlamaForCausalLM": ("LlamaConfig", DECODER, IDS | {"use_cache": False}),
    "ViTModel": ("ViTConfig", ENCODER | {"image_size": 32, "patch_size": 8}, {"pixel_values": torch.randn(2, 3, 32, 32)}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_layers_of_a_librarys_model_compute_the_same(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, settings, inputs = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings))
    call, _, found, _ = proposed(model, inputs, tmp_path, "cpu", RULES)
    candidate = candidate_of(found[0].source, model)
    assert found[0].techniques[0] == EQUAL_LAYERS
    outputs = call.rebuild(iter(candidate(*call.examples[0].tensors)))
    torch.testing.assert_close(outputs[0], model(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert candidate.last_path == "optimized"
