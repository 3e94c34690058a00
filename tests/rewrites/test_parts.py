"""A module that has no operator graph is rewritten in parts: the largest submodules that have one."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import warnings
from typing import Any

import pytest
import torch

from kernelwright.records import Task
from kernelwright.rewrites.passes import RulesPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from kernelwright.rewrites.tracing import UntraceableError, load, trace

TEXT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x, tables, mask=None, scale=2.0, **more):
        y = self.linear(self.norm(x)) * tables[0] + tables[1]
        return x + (y * 1.0 if mask is None else y * mask) * scale

class Model(nn.Module):
    def __init__(self, width=8, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2 * width, width))
        self.seldom = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        tables = torch.ones(x.shape[-1]), torch.zeros(x.shape[-1])
        for block in self.blocks:
            if x.sum() > 1e9:
                return x
            x = block(x, tables, scale=0.5)
        rows = self.seldom(x[x[:, 0] > 0])
        return self.last(x) + rows.sum()

def get_inputs():
    return [torch.randn(64, 8)]

def get_init_inputs():
    return [8]
"""


def candidate(text: str = TEXT) -> Any:
    context = TaskContext.open(Task(id="parts", source=text), "cpu")
    built = context.build(Recipe((RulesPass.always(),)))
    assert built is not None
    assert "remove-noops" in built.techniques
    return load(built.source, "candidate")


def both(made: Any, *arguments: int) -> tuple[Any, Any]:
    reference, model = load(TEXT, "reference").Model(*arguments), made.ModelNew(*arguments)
    reference.load_state_dict(model.state_dict())
    return reference, model


def test_the_largest_submodules_are_found_equal_ones_together() -> None:
    traced = trace(Task(id="parts", source=TEXT))
    assert [one.paths for one in (traced, *traced.others)] == [("blocks.0", "blocks.1", "blocks.2"), ("last",)]
    assert "data-dependent" in traced.obstacle
    note = TaskContext.open(Task(id="parts", source=TEXT), "cpu").note()
    assert note.startswith("Rewritten in parts, blocks.0 and 2 like it, last; the whole has no operator graph: Guard")


@pytest.mark.parametrize("training", [True, False])
def test_parts_compute_what_the_reference_does(training: bool) -> None:
    made = candidate()
    reference, model = both(made, 8)
    own = made.Block.forward
    made.Block.forward = None  # which nobody calls
    with torch.no_grad():
        for one in (reference, model):
            one.train(training)
        x = torch.randn(64, 8)
        torch.manual_seed(1)
        wanted = reference(x)
        torch.manual_seed(1)
        torch.testing.assert_close(model(x), wanted)
        assert model.last_path == "optimized"
    assert all("forward" not in vars(part) for part in model.modules())
    made.Block.forward = own


def test_other_shapes_and_other_arguments_run_the_reference_and_say_so() -> None:
    made = candidate()
    reference, model = both(made, 8)
    x = torch.randn(5, 8)
    with pytest.warns(UserWarning, match=r"wanted x.shape == \(64, 8\), found torch.float32 \[5, 8\]"):
        torch.testing.assert_close(model.eval()(x), reference.eval()(x))
    assert model.last_path == "reference"
    with pytest.warns(UserWarning, match=r"wanted arguments \(8\)"):
        reference, model = both(made, 8, 2)
    torch.testing.assert_close(model.eval()(torch.ones(64, 8)), reference.eval()(torch.ones(64, 8)))


def test_parts_are_put_back_after_an_error_and_survive_copies() -> None:
    made = candidate()
    model = made.ModelNew(8).eval()
    with warnings.catch_warnings(), pytest.raises(RuntimeError):
        model(torch.randn(64, 7))
    assert all("forward" not in vars(part) for part in model.modules())
    sys.modules["candidate"] = made
    try:
        x = torch.randn(64, 8)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(other(x), model(x))
    finally:
        del sys.modules["candidate"]


def test_a_module_without_any_traceable_part_says_what_is_wrong_with_the_whole() -> None:
    text = TEXT.replace("y = self.linear(self.norm(x))", "y = self.linear(self.norm(x if x.sum() < 1e9 else -x))")
    text = text.replace("return self.last(x) + rows.sum()", "return x")
    with pytest.raises(UntraceableError, match="data-dependent"):
        trace(Task(id="parts", source=text))


def test_keywords_that_were_traced_run_the_part_and_others_the_reference() -> None:
    text = TEXT.replace("x = block(x, tables, scale=0.5)", "x = block(x, tables, scale=0.5, **self.more)")
    text = text.replace(
        "super().__init__()", "super().__init__()\n        self.more = {'use_cache': False, 'bias': torch.ones(8)}"
    )
    text = text.replace("tables[1]", "tables[1] + more.get('bias', 0.0)")
    made = candidate(text)
    reference, model = load(text, "reference").Model(8), made.ModelNew(8).eval()
    reference.load_state_dict(model.state_dict())
    x, own = torch.randn(64, 8), made.Block.forward
    made.Block.forward = None
    torch.testing.assert_close(model(x), reference.eval()(x))
    assert model.last_path == "optimized"
    made.Block.forward = own
    for more, wanted in (({"bias": model.more["bias"]}, "len(more) == 2"), (model.more | {"use_cache": True}, "is False")):
        changed = copy.deepcopy(model)
        changed.more = reference.more = more
        with pytest.warns(UserWarning, match=re.escape(wanted) + r", found torch.float32.*\('bias', tensor"):
            torch.testing.assert_close(changed(x), reference(x))
        assert changed.last_path == "reference"


LAST = """
import dataclasses

@dataclasses.dataclass
class Outcome:
    y: torch.Tensor

class Last(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return Outcome(self.parts(x))

class Block"""


def test_a_part_that_returns_no_tensors_is_searched_for_parts() -> None:
    text = TEXT.replace("class Block", LAST.strip()).replace("self.last = nn.Sequential", "self.last = Last")
    traced = trace(Task(id="parts", source=text.replace("self.last(x)", "self.last(x).y")))
    assert [one.paths for one in traced.others] == [("last.parts",)]


def test_a_part_under_autocast_is_left_alone() -> None:
    text = TEXT.replace(
        "return self.last(x)", "with torch.autocast('cpu', torch.bfloat16):\n            return self.last(x)"
    )
    traced = trace(Task(id="parts", source=text))
    assert [one.paths for one in (traced, *traced.others)] == [("blocks.0", "blocks.1", "blocks.2")]
