"""The order of proposals: what is learnt from searches, what it is worth on tasks unseen, and who proposes by it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kernelwright.errors import ConfigError, UsageError
from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.records.policy import Context
from kernelwright.records.screened import screened_of
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.order import PACKAGED, Order, Place, learning, order_in_use, read_order
from kernelwright.rewrites.order.learning import Searched, by_order, found_elsewhere, kind_of, learn, shares
from kernelwright.rewrites.tracing import trace
from tests.rewrites.samples import task_text

CONVOLUTION, PRODUCT = Place(frozenset({"conv2d", "relu"}), 2, 1 << 22), Place(frozenset({"linear", "relu"}), 2, 1 << 22)
NOTHING = Place()


def searched(place: Place, *gains: tuple[str, float]) -> Searched:
    return Searched("t", place, {tuple(names.split()): gain for names, gain in gains})


SEARCHES = [
    *[searched(CONVOLUTION, ("graph", 1.1), ("tiled", 2.0), ("tiled graph", 2.4), ("split", 0.8))] * 4,
    *[searched(PRODUCT, ("split", 2.5), ("graph", 1.2), ("tiled", 0.9))] * 4,
]


def sources(task: str, device: str = "cuda", policy: BuiltinPolicy | None = None) -> list[Candidate]:
    asked = Context(task=Task(id="sample", source=task), device=device, history=(), seed=0)
    return (policy or BuiltinPolicy()).propose(asked, 100)


def test_a_technique_is_worth_what_it_gained_on_such_operators() -> None:
    learnt = learn(SEARCHES, strength=0.1)
    assert learn(SEARCHES, strength=1e6).gain(["tiled"], CONVOLUTION) == pytest.approx(0.0, abs=1e-3)
    for place, best in ((CONVOLUTION, "tiled"), (PRODUCT, "split")):
        assert max(("graph", "split", "tiled"), key=lambda name: learnt.gain([name], place)) == best
    assert learnt.gain(["tiled", "graph"], CONVOLUTION) > learnt.gain(["tiled"], CONVOLUTION)
    assert learnt.gain(["unheard-of"], CONVOLUTION) == 0.0


def test_which_task_gains_much_says_nothing_about_its_candidates() -> None:
    other = [searched(one.place, *((" ".join(names), gain * 1.5) for names, gain in one.gains.items())) for one in SEARCHES]
    for names in (["graph"], ["split"], ["tiled", "graph"]):
        assert learn(other).gain(names, PRODUCT) == pytest.approx(learn(SEARCHES).gain(names, PRODUCT), abs=1e-4)
    assert learn([]).gain(["graph"], PRODUCT) == 0.0


def test_how_often_a_candidate_is_the_best_counts_more_than_its_mean() -> None:
    better = searched(NOTHING, ("steady", 1.4), ("risky", 2.2))
    worse = searched(NOTHING, ("steady", 1.4), ("risky", 0.3))
    learnt = learn([better] * 4 + [worse] * 2)
    assert 2.2**4 * 0.3**2 < 1.4**6
    assert learnt.gain(["risky"], NOTHING) > learnt.gain(["steady"], NOTHING)


def test_what_limits_a_task_decides_where_operators_do_not() -> None:
    short, long = Place(frozenset({"relu"}), 4, 4_000), Place(frozenset({"relu"}), 4, 4_000_000_000)
    learnt = learn(
        [
            *[searched(short, ("graph", 3.0), ("fused", 1.2))] * 4,
            *[searched(long, ("graph", 0.8), ("fused", 1.5))] * 4,
        ]
    )
    for place, better, worse in ((short, "graph", "fused"), (long, "fused", "graph")):
        assert learnt.gain([better], place) > learnt.gain([worse], place)
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


def test_the_share_of_a_full_search_that_the_first_candidates_reach() -> None:
    tiled_first = [(one, by_order(one, Order({"tiled": 1.0, "graph": 0.5}))) for one in SEARCHES]
    assert shares([(one, [*one.gains]) for one in SEARCHES[:1]])[2] == round(2.0 / 2.4, 3)
    assert shares(tiled_first[:1])[2] == 1.0
    assert shares(tiled_first)[2] == round(math.sqrt(1.2 / 2.5), 3)
    assert (kind_of(CONVOLUTION), kind_of(PRODUCT), kind_of(NOTHING)) == ("convolution", "product", "other")


def test_what_other_searches_of_the_same_task_found() -> None:
    first, second, third = (
        searched(PRODUCT, ("graph", gain), (other, 9.0)) for gain, other in ((1.0, "a"), (2.0, "b"), (8.0, "c"))
    )
    elsewhere = Searched("another task", PRODUCT, {("graph",): 100.0})
    assert found_elsewhere(first, [first, second, third, elsewhere]) == {("graph",): pytest.approx(math.log(4.0))}
    assert found_elsewhere(first, [first, elsewhere]) == {}


def test_an_order_is_read_as_it_was_written_and_nothing_else_is_read(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    Order({"graph": 0.25, "tiled on conv2d": -1.5, "tiny": 1e-4, "tiny on conv2d": 1e-4}).write(path)
    assert read_order(path).weights == {"graph": 0.25, "tiled on conv2d": -1.5, "tiny": 1e-4}
    for text in ("[]", '{"graph": "much"}', "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"Wanted an order of proposals in .*order\.json"):
            read_order(path)
    with pytest.raises(ConfigError, match="none-there"):
        read_order(tmp_path / "none-there")


def test_proposals_come_best_first_on_a_gpu_and_in_the_plan_s_order_on_a_processor() -> None:
    task = task_text("return torch.tanh(a * 2.0 * 1.0).sum(1)", "torch.randn(4096, 64)")
    plan = sources(task, policy=BuiltinPolicy(Order({})))
    weights = {name: 0.0 for one in plan for name in one.techniques} | {"cuda-graph": 1.0, "remove-noops": 0.5}
    found = sources(task, policy=BuiltinPolicy(Order(weights)))
    assert {one.sha256 for one in found} == {one.sha256 for one in plan}
    worth = [
        sum(weights.get(name, 0.0) for name in one.techniques)
        for one in found
        if "compile-max-autotune" not in one.techniques
    ]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] == 1.5
    assert "compile-max-autotune" in found[-1].techniques
    heavy = BuiltinPolicy(Order({name: 9.0 for one in plan for name in one.techniques}))
    assert "compile-max-autotune" in sources(task, policy=heavy)[-1].techniques, "an autotuner is last whatever is known"
    assert sources(task, "cpu", heavy) == sources(task, "cpu", BuiltinPolicy(Order({})))


def test_the_packaged_order_knows_what_the_races_showed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    diagonal = task_text("return torch.diag(a) @ b", "torch.randn(512), torch.randn(512, 64)")
    assert "diagonal-operand" in sources(diagonal)[0].techniques
    product = task_text("return a @ b", "torch.randn(4096, 4096), torch.randn(4096, 4096)")
    assert sources(product)[0].techniques[0].startswith("split-product")
    assert read_order(PACKAGED) == order_in_use()
    mine = tmp_path / "mine.json"
    names = {name for one in sources(diagonal) for name in one.techniques}
    Order(dict.fromkeys(names, 0.0) | {"cuda-graph": 1.0}).write(mine)
    monkeypatch.setenv("KERNELWRIGHT_ORDER", str(mine))
    assert "cuda-graph" in sources(diagonal)[0].techniques


def test_what_no_search_has_tried_comes_in_turn_with_the_best_that_is_known() -> None:
    task = task_text("return torch.tanh(a * 2.0 * 1.0).sum(1)", "torch.randn(4096, 64)")
    names = {name for one in sources(task) for name in one.techniques}
    known = dict.fromkeys(names - {"remove-noops"}, 0.0) | {"cuda-graph": 1.0}
    found = [one.techniques for one in sources(task, policy=BuiltinPolicy(Order(known)))]
    assert "compile-max-autotune" in found[-1], "an autotuner is last whatever is known"
    fast = [one for one in found if "compile-max-autotune" not in one]
    new = ["remove-noops" in one for one in fast]
    both = 2 * min(sum(new), len(new) - sum(new))
    assert both >= 4
    assert new[:both] == [True, False] * (both // 2)
    for is_new in (True, False):
        graphs = ["cuda-graph" in one for one in fast if ("remove-noops" in one) == is_new]
        assert graphs == sorted(graphs, reverse=True), "each of the two is best first"


def test_one_command_learns_from_runs_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    texts = {
        "product": task_text("return self.f(a)", "torch.randn(64, 6)", "self.f = nn.Linear(6, 8)"),
        "sum": task_text("return a.sum(1)", "torch.randn(64, 6)"),
    }
    tasks = [Task(id=name, source=text) for name, text in texts.items()]
    run.write_json("tasks.json", [task.model_dump(mode="json") for task in tasks])
    looks = {("graph",): 1.5, ("slow",): 0.7}
    for task in tasks:
        for number, (names, estimate) in enumerate(looks.items()):
            candidate = Candidate(source=f"# {number}", policy="builtin", techniques=names)
            run.append(screened_of(task, candidate, correct=True, estimate=estimate))
    out = tmp_path / "order.json"
    assert learning.main([str(run.path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 tasks, 4 candidates, 2 families")
    for order in ("as they were looked at", "at random", "learnt, family left out"):
        assert order in said
    learnt = read_order(out)
    place = Place.of(trace(tasks[0]))
    assert place.operators == frozenset({"linear"})
    assert learnt.gain(["graph"], place) > 0 > learnt.gain(["slow"], place)
    assert json.loads(out.read_text()) == learnt.weights
    (tmp_path / "empty").mkdir()
    assert learning.main([str(tmp_path / "empty"), "--out", str(out)]) == UsageError.exit_status
    assert "Wanted the run of a search with its tasks" in capsys.readouterr().err
