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
from kernelwright.rewrites.order import gains, learning
from kernelwright.rewrites.order.gains import Order, Place, order_in_use, read_order
from kernelwright.rewrites.order.learning import Searched, kind_of, learn, shares
from kernelwright.rewrites.tracing import trace
from tests.rewrites.samples import task_text

CONVOLUTION, PRODUCT = Place(frozenset({"conv2d", "relu"}), 1 << 20), Place(frozenset({"linear", "relu"}), 1 << 20)
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
    learnt = learn(SEARCHES, strength=1.0)
    for place, best, worst in ((CONVOLUTION, "tiled", "split"), (PRODUCT, "split", "tiled")):
        assert learnt.gain([best], place) > learnt.gain(["graph"], place) > learnt.gain([worst], place)
    assert learnt.gain(["tiled", "graph"], CONVOLUTION) > learnt.gain(["tiled"], CONVOLUTION)
    assert learnt.gain(["unheard-of"], CONVOLUTION) == 0.0


def test_which_task_gains_much_says_nothing_about_its_candidates() -> None:
    other = [searched(one.place, *((" ".join(names), gain * 1.5) for names, gain in one.gains.items())) for one in SEARCHES]
    for names in (["graph"], ["split"], ["tiled", "graph"]):
        assert learn(other).gain(names, PRODUCT) == pytest.approx(learn(SEARCHES).gain(names, PRODUCT))
    assert learn([]).gain(["graph"], PRODUCT) == 0.0


def test_the_share_of_a_full_search_that_the_first_candidates_reach() -> None:
    assert shares(SEARCHES[:1], None)[2] == round(2.0 / 2.4, 3)
    best_first = {kind: Order({"tiled": 1.0, "graph": 0.5}) for kind in ("convolution", "product")}
    assert shares(SEARCHES[:1], best_first)[2] == 1.0
    assert shares(SEARCHES, best_first)[2] == round(math.sqrt(1.2 / 2.5), 3)
    assert (kind_of(CONVOLUTION), kind_of(PRODUCT), kind_of(NOTHING)) == ("convolution", "product", "other")


def test_an_order_is_read_as_it_was_written_and_nothing_else_is_read(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    Order({"graph": 0.25, "tiled on conv2d": -1.5, "tiny": 1e-4}).write(path)
    assert read_order(path).weights == {"graph": 0.25, "tiled on conv2d": -1.5}
    for text in ("[]", '{"graph": "much"}', "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"Wanted an order of proposals in .*order\.json"):
            read_order(path)
    with pytest.raises(ConfigError, match="none-there"):
        read_order(tmp_path / "none-there")


def test_proposals_come_best_first_on_a_gpu_and_in_the_plan_s_order_on_a_processor() -> None:
    task = task_text("return torch.tanh(a * 2.0 * 1.0).sum(1)", "torch.randn(4096, 64)")
    plan = sources(task, policy=BuiltinPolicy(Order({})))
    weights = {"cuda-graph": 1.0, "remove-noops": 0.5}
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
    assert read_order(gains.PACKAGED) == order_in_use()
    mine = tmp_path / "mine.json"
    Order({"cuda-graph": 1.0}).write(mine)
    monkeypatch.setenv("KERNELWRIGHT_ORDER", str(mine))
    assert "cuda-graph" in sources(diagonal)[0].techniques


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
    assert "learnt, family left out" in said
    learnt = read_order(out)
    place = Place.of(trace(tasks[0]))
    assert (place.operators, place.elements) == (frozenset({"linear"}), 512)
    assert learnt.gain(["graph"], place) > 0 > learnt.gain(["slow"], place)
    assert json.loads(out.read_text()) == learnt.weights
    (tmp_path / "empty").mkdir()
    assert learning.main([str(tmp_path / "empty"), "--out", str(out)]) == UsageError.exit_status
    assert "Wanted the run of a search with its tasks" in capsys.readouterr().err
