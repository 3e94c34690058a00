"""Tuning one kernel: what counts as a winner, what is written, what is resumed, and what was learnt."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.assembly.explanation import grouped, lessons, played, steps_to
from kernelwright.assembly.search import GameSettings, numbers_of, optimize_kernel
from kernelwright.assembly.testbed import Game, GpuTestbed, find_game, simulated_testbed
from kernelwright.deploy.deploy import read_winner
from kernelwright.errors import UsageError
from kernelwright.gpu import disassemble
from kernelwright.gpu.launch_spec import LaunchSpec, Target
from kernelwright.judge.schedules import Confirmation
from kernelwright.records import RunDirectory
from kernelwright.report.moves import write_moves_report
from kernelwright.sass import Schedule, check, load, move_from_json
from kernelwright.sass.simulator import ideal_cycles, simulate
from tests.assembly.support import ORIGINAL_US, faster_when_changed, never_faster, program_of, wrong_when_changed
from tests.quick import exhaustive_but
from tests.sass.support import play_random

CONTROLS = ("greedy", "anneal", "random")


@pytest.fixture(scope="module")
def program():
    return program_of()


def tuned(program, out, *, testbed=None, **options):
    settings = GameSettings(**{"agents": ("greedy",), "budget": 60, "learn": False, **options})
    testbed = testbed or simulated_testbed("static-issue-cycles", 80)
    return optimize_kernel(Game("row_sum", program, testbed), out=out, settings=settings)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_agents_have_equal_budgets_and_the_directory_says_everything(program, tmp_path):
    result = tuned(program, tmp_path, agents=CONTROLS, learn=True)
    entries = lines(tmp_path / "schedules.jsonl")
    assert {agent: sum(e["agent"] == agent for e in entries) for agent in CONTROLS} == dict.fromkeys(CONTROLS, 60)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["schedules_run"] == 180
    assert summary["schedules_per_second"] > 0
    assert summary["wrong_outputs"] == 0
    assert summary["simulated"] is True
    assert set(summary["agents"]) == set(CONTROLS)
    assert all(found["schedules"] == 60 for found in summary["agents"].values())
    assert summary["simulated_bound"]["gain_at_most"] >= 1
    assert json.loads((tmp_path / "config.json").read_text())["kind"] == "sass optimize"
    assert (tmp_path / "environment.json").exists()
    assert result.best.is_improvement
    winner = json.loads((tmp_path / "winner.json").read_text())
    schedule = Schedule(program.kernel())
    for move in winner["moves"]:
        schedule.play(move_from_json(move))
    mutated = (tmp_path / "simulated.cubin").read_bytes()
    assert schedule.cubin(program) == mutated
    assert check(program.image.data, mutated, disassemble) == []
    assert not (tmp_path / "tuned.cubin").exists(), "a model's winner is not to be deployed"
    assert winner["lessons"]
    assert {"block", "changes", "without", "also_undone", "in_loop"} <= set(winner["lessons"][0])


def test_a_run_goes_on_where_it_was_and_refuses_to_be_another_one(program, tmp_path):
    first = tuned(program, tmp_path / "a", budget=30)
    again = tuned(program, tmp_path / "a", budget=30)
    assert (again.best, again.agent) == (first.best, first.agent)
    assert len(lines(tmp_path / "a" / "schedules.jsonl")) == 30
    assert len(lines(tmp_path / "a" / "confirmations.jsonl")) == 2
    whole = tuned(program, tmp_path / "b", budget=50)
    cut = tmp_path / "c"
    tuned(program, cut, budget=50)
    text = (cut / "schedules.jsonl").read_text().splitlines(keepends=True)
    (cut / "schedules.jsonl").write_text("".join(text[:20]) + text[20][:15])
    for name in ("confirmations.jsonl", "weighed.json", "summary.json", "winner.json"):
        (cut / name).unlink()
    assert tuned(program, cut, budget=50).best == whole.best
    for change in ({"seed": 9}, {"agents": ("random",)}, {"moves": "paper"}):
        with pytest.raises(UsageError, match="another"):
            tuned(program, tmp_path / "a", **{"budget": 30, **change})
    tuned(program, tmp_path / "a", budget=33)
    assert len(lines(tmp_path / "a" / "schedules.jsonl")) == 33


def test_a_search_that_time_ended_may_go_on_and_its_new_best_is_weighed(program, tmp_path):
    assert tuned(program, tmp_path / "a", budget=40, limit_s=0.0).best is None
    assert tuned(program, tmp_path / "a", budget=40).best == tuned(program, tmp_path / "b", budget=40).best is not None


@pytest.mark.parametrize(
    "options",
    [{"agents": ()}, {"agents": ("x",)}, {"agents": ("ppo", "ppo")}, {"budget": 0}, {"moves": "all"}, {"horizon": 0}],
)
def test_settings_that_make_no_sense(options):
    with pytest.raises(UsageError, match="wanted"):
        GameSettings(**options)


@pytest.fixture(scope="module")
def target(program):
    spec = {
        "name": "row_sum",
        "entry": program.kernel().name,
        "grid": [8, 1, 1],
        "block": [128, 1, 1],
        "arguments": [{"kind": "tensor", "name": "y", "dtype": "fp32", "shape": [64], "role": "output"}],
    }
    return Target(LaunchSpec.model_validate(spec), program.image.data, 80)


@pytest.mark.exhaustive
def test_a_winner_on_a_gpu_is_measured_again_proven_and_ready_to_deploy(program, target, tmp_path):
    testbed = GpuTestbed(target, program, [0, 1], launcher_on=faster_when_changed, processes=2)
    try:
        settings = GameSettings(agents=("greedy",), budget=6)
        game = Game("row_sum", program, testbed, target=target)
        result = optimize_kernel(game, out=tmp_path, settings=settings)
    finally:
        testbed.close()
    assert result.best.is_improvement
    assert result.best.baseline == pytest.approx(ORIGINAL_US)
    assert result.best.processes == 2
    assert result.summary["simulated"] is False
    assert result.summary["unit"] == "us"
    assert result.summary["measured_on"]["gpu"]["name"] == "Pretended GPU"
    winner = read_winner(tmp_path)
    assert winner.target.cubin == program.image.data
    assert check(winner.target.cubin, winner.tuned, disassemble) == []
    assert winner.provenance["agent"] == "greedy"
    page = (tmp_path / "report.html").read_text()
    assert "Simulated" not in page
    assert "2 fresh processes" in page
    found = json.loads((tmp_path / "winner.json").read_text())["lessons"]
    assert found
    assert all(lesson["without"]["processes"] == 1 for lesson in found)
    assert min(lesson["without"]["speedup"] for lesson in found) < result.best.speedup


@pytest.mark.exhaustive
def test_what_does_not_hold_is_no_winner(program, target, tmp_path):
    testbed = GpuTestbed(target, program, [0], launcher_on=never_faster, processes=1)
    try:
        result = tuned(program, tmp_path, testbed=testbed, budget=10)
    finally:
        testbed.close()
    assert result.best is None
    assert not (tmp_path / "tuned.cubin").exists()
    assert "No improvement" in (tmp_path / "report.html").read_text()


def test_wrong_outputs_and_faults_are_verdicts(program, target):
    changed = Schedule(program.kernel())
    changed.play(next(changed.legal_moves()))
    original = Schedule(program.kernel())
    testbed = GpuTestbed(target, program, [0], launcher_on=wrong_when_changed, processes=1)
    try:
        wrong, right = testbed.confirm([changed, original])
    finally:
        testbed.close()
    assert wrong.wrong is not None
    assert (wrong.speedup, wrong.is_improvement) == (None, False)
    assert right.wrong is None
    assert right.speedup == pytest.approx(1.0)
    assert not right.is_improvement


class Lucky:
    """A testbed whose search sees improvements that its re-measurement does not confirm."""

    is_simulated = True

    def __init__(self):
        self.inner = simulated_testbed("static-issue-cycles", 80)
        self.backends = self.inner.backends
        self.confirmed = 0

    def begin_search(self):
        pass

    def confirm(self, schedules):
        self.confirmed += len(schedules)
        return [Confirmation(1.02, 0.99, 1.05, 0.001, 20.0, None, 5)] * len(schedules)

    def weigh(self, schedule):
        return Confirmation(1.02, 1.01, 1.03, 0.001, 20.0, None, 1)

    def describe(self):
        return {}


def test_luck_in_the_search_is_not_a_gain(program, tmp_path):
    testbed = Lucky()
    result = tuned(program, tmp_path, testbed=testbed)
    assert result.best is None
    assert testbed.confirmed == 2
    assert result.summary["agents"]["greedy"]["confirmed"] is None
    assert result.summary["agents"]["greedy"]["best_in_search"] > 1


@pytest.mark.parametrize(
    ("verdict", "improves"),
    [
        (Confirmation(1.1, 1.05, 1.2, 0.02, 1.0, None, 5), True),
        (Confirmation(1.1, 1.02, 1.2, 0.02, 1.0, None, 5), False),
        (Confirmation(1.1, 1.05, 1.2, 0.02, 1.0, "output 0 differs", 5), False),
        (Confirmation(None, None, None, None, None, "fault", 5), False),
    ],
)
def test_an_improvement_is_right_and_clears_the_noise(verdict, improves):
    assert verdict.is_improvement is improves


@pytest.mark.parametrize(("name", "architecture"), exhaustive_but([("row_sum", 80), ("sgemm", 90)], ("row_sum", 80)))
@given(seed=st.integers(0, 2**32), moves=st.integers(1, 150))
@settings(max_examples=8, deadline=None)
def test_the_steps_to_a_schedule_lead_there(name, architecture, seed, moves):
    program = program_of(name, architecture)
    schedule = Schedule(program.kernel())
    play_random(schedule, random.Random(seed), moves)
    steps = steps_to(schedule)
    found, refused = played(schedule, steps)
    assert refused == 0
    assert found.words() == schedule.words()
    groups = grouped(steps, 5)
    assert len(groups) <= 5
    assert [step for group in groups for step in group] == steps


def test_leaving_out_the_move_that_matters_loses_the_gain(program):
    testbed = simulated_testbed("static-issue-cycles", 80)
    original = Schedule(program.kernel())
    cost = testbed.backends[0].cost
    costs = []
    for move in original.legal_moves(max_distance=6):
        twin = original.copy()
        twin.play(move)
        costs.append((cost(twin), (move.source, move.target), twin))
    schedule = min(costs, key=lambda found: found[:2])[2]
    assert cost(schedule) < cost(original)
    found = lessons(schedule, lambda s: numbers_of(testbed.weigh(s)))
    assert len(found) == 1
    assert found[0]["without"]["speedup"] == 1.0
    change = found[0]["changes"][0]
    assert change["kind"] == "move"
    assert change["over_count"] == abs(change["to_slot"] - change["from_slot"])


def test_the_page_needs_no_network_and_says_when_it_is_simulated(program, tmp_path):
    tuned(program, tmp_path, agents=("greedy", "random"), learn=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"name": "<script>alert(1)</script>"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = write_moves_report(RunDirectory(tmp_path), tmp_path / "page.html").read_text()
    assert "Simulated, not a time" in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert "What it learnt" in page
    assert "Before and after" in page
    with pytest.raises(UsageError, match=r"summary\.json"):
        write_moves_report(RunDirectory(tmp_path / "empty"), tmp_path / "page.html")


@pytest.mark.parametrize(("name", "architecture"), exhaustive_but([("row_sum", 80), ("sgemm", 90)], ("row_sum", 80)))
def test_no_schedule_falls_below_the_simulated_bound(name, architecture):
    program = program_of(name, architecture)
    for warps in (1, 4):
        bound = ideal_cycles(program.kernel(), architecture, warps, 3)
        assert bound.cycles == max(bound.limits.values()) == bound.limits[bound.limited_by]
        for seed in range(5):
            schedule = Schedule(program.kernel())
            play_random(schedule, random.Random(seed), 60 * seed)
            assert simulate(schedule, architecture, warps, 3) >= bound.cycles


def test_a_bare_cubin_can_be_played_but_not_timed(program, tmp_path, monkeypatch):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(program.image.data)
    game = find_game(str(path), "simulated-issue")
    assert load(path.read_bytes(), disassemble).kernel().name == game.program.kernel().name
    monkeypatch.setattr("kernelwright.gpu.driver.gpu_identity", lambda device: None)
    with pytest.raises(UsageError, match="bare cubin"):
        find_game(str(path))
    with pytest.raises(UsageError, match="wanted a backend"):
        find_game(str(path), "guesses")
