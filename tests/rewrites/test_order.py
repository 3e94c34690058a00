"""The order of proposals: how a task is described, how an order is read, and how the policy proposes by it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kernelwright.errors import ConfigError
from kernelwright.records import Task
from kernelwright.rewrites.order import PACKAGED, Order, Place, order_in_use, read_order
from kernelwright.rewrites.tracing import trace
from tests.rewrites.samples import PLAIN, proposed, task_text

NOTHING = Place()


def test_what_limits_a_task_lies_on_three_scales() -> None:
    assert dict(Place(frozenset(), 10, 10**7, 5 * 10**7).limits()) == pytest.approx(
        {
            "launches 2": 1.5,
            "bytes a launch 6": 1.5,
            "operations a byte 0": 1.5 * (1 - math.log10(5)),
            "operations a byte 1": 1.5 * math.log10(5),
        }
    )
    assert dict(Place(frozenset(), 1, 1, 1).limits()) == {
        "launches 0": 1.5,
        "bytes a launch 4": 1.5,
        "operations a byte 0": 1.5,
    }
    assert dict(NOTHING.limits()) == {}, "of a task without a graph nothing is known"


def test_a_task_is_known_by_what_it_launches_moves_and_computes() -> None:
    float_bytes = 4
    for text, inputs, init, launches, bytes_moved, operations in (
        ("return a.view(6, 64) @ b", "torch.randn(64, 6), torch.randn(64, 8)", "", 1, 2 * 384 + 512 + 48, 2 * 48 * 64),
        (
            "return self.f(a).relu()",
            "torch.randn(64, 6)",
            "self.f = nn.Linear(6, 8)",
            2,
            384 + 48 + 8 + 2 * 512,
            2 * 512 * 6,
        ),
        (
            "return self.f(a)",
            "torch.randn(2, 3, 8, 8)",
            "self.f = nn.Conv2d(3, 5, 3, bias=False)",
            1,
            384 + 135 + 360,
            2 * 360 * 27,
        ),
        (
            "return self.f(a)",
            "torch.randn(2, 3, 8, 8)",
            "self.f = nn.ConvTranspose2d(3, 5, 3, bias=False)",
            1,
            384 + 135 + 1000,
            2 * 384 * 45,
        ),
    ):
        place = Place.of(trace(Task(id="sample", source=task_text(text, inputs, init))))
        assert (place.launches, place.bytes, place.operations) == (launches, float_bytes * bytes_moved, operations), text
    assert Place.of(None) == NOTHING


def test_an_order_is_read_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    weights = {"graph": 0.25, "tiled on conv2d": -1.5, "tiny": 1e-4}
    path.write_text(json.dumps(weights))
    assert read_order(path).weights == weights
    for text in ("[]", '{"graph": "much"}', "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"Wanted an order of proposals in .*order\.json"):
            read_order(path)
    with pytest.raises(ConfigError, match="none-there"):
        read_order(tmp_path / "none-there")


def test_proposals_come_best_first_on_a_gpu_and_in_the_plan_s_order_on_a_processor() -> None:
    task = task_text("return torch.tanh(a * 2.0 * 1.0).sum(1)", "N(4096, 64)")
    plan = proposed(task, order=Order({}))
    weights = {name: 0.0 for one in plan for name in one.techniques} | {"cuda-graph": 1.0, "remove-noops": 0.5}
    found = proposed(task, order=Order(weights))
    assert {one.sha256 for one in found} == {one.sha256 for one in plan}
    worth = [
        sum(weights.get(name, 0.0) for name in one.techniques)
        for one in found
        if "compile-max-autotune" not in one.techniques
    ]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] == 1.5
    assert "compile-max-autotune" in found[-1].techniques
    heavy = Order({name: 9.0 for one in plan for name in one.techniques})
    assert "compile-max-autotune" in proposed(task, order=heavy)[-1].techniques, "an autotuner is last whatever is known"
    assert proposed(task, device="cpu", order=heavy) == proposed(task, device="cpu", order=PLAIN)


def test_the_packaged_order_knows_what_the_races_showed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    diagonal = task_text("return torch.diag(a) @ b", "N(512), N(512, 64)")
    assert "diagonal-operand" in proposed(diagonal)[0].techniques
    product = task_text("return a @ b", "N(4096, 4096), N(4096, 4096)")
    assert proposed(product)[0].techniques[0].startswith("split-product")
    assert read_order(PACKAGED) == order_in_use()
    mine = tmp_path / "mine.json"
    names = {name for one in proposed(diagonal) for name in one.techniques}
    mine.write_text(json.dumps(dict.fromkeys(names, 0.0) | {"cuda-graph": 1.0}))
    monkeypatch.setenv("KERNELWRIGHT_ORDER", str(mine))
    assert "cuda-graph" in proposed(diagonal)[0].techniques


def test_what_no_search_has_tried_comes_in_turn_with_the_best_that_is_known() -> None:
    task = task_text("return torch.tanh(a * 2.0 * 1.0).sum(1)", "N(4096, 64)")
    names = {name for one in proposed(task) for name in one.techniques}
    known = dict.fromkeys(names - {"remove-noops"}, 0.0) | {"cuda-graph": 1.0}
    found = [one.techniques for one in proposed(task, order=Order(known))]
    assert "compile-max-autotune" in found[-1], "an autotuner is last whatever is known"
    fast = [one for one in found if "compile-max-autotune" not in one]
    new = ["remove-noops" in one for one in fast]
    both = 2 * min(sum(new), len(new) - sum(new))
    assert both >= 4
    assert new[:both] == [True, False] * (both // 2)
    for is_new in (True, False):
        graphs = ["cuda-graph" in one for one in fast if ("remove-noops" in one) == is_new]
        assert graphs == sorted(graphs, reverse=True), "each of the two is best first"
