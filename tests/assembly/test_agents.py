"""Agents and their budget: budgets, memory, seeds, resuming, failures, and that PPO learns."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.assembly.agents import AGENTS, Agent, GuidedClimb, play, require_agent
from kernelwright.assembly.backends import SimulatedIssue, StaticIssueCycles, schedule_digest
from kernelwright.assembly.budget import AgentContext, Budget, read_entries
from kernelwright.assembly.game import BEYOND, FAILED_REWARD, AssemblyGameEnv, BeyondGameEnv
from kernelwright.assembly.search import GameSettings
from kernelwright.errors import BudgetSpentError, DeviceError, InfrastructureError, UsageError
from kernelwright.gpu import disassemble
from kernelwright.records import RunDirectory
from kernelwright.sass import Move, MoveError, Schedule, check, move_from_json
from tests.assembly.support import WrongWhenMovedFar, program_of
from tests.quick import exhaustive_but

SEARCHES = tuple(agent for agent in AGENTS if agent != "ppo")


class Counting(StaticIssueCycles):
    """Counts, and sees that nothing is measured twice."""

    def __init__(self):
        self.digests = []
        self.lock = threading.Lock()

    def cost(self, schedule):
        digest = schedule_digest(schedule)
        with self.lock:
            assert not schedule.history or digest not in self.digests
            if schedule.history:
                self.digests.append(digest)
        return super().cost(schedule)


def budget_of(program, schedules, agent="greedy", backends=None, **options):
    return Budget(program.kernel(), backends or [StaticIssueCycles()], schedules, agent, **options)


@pytest.fixture(scope="module")
def program():
    return program_of()


@pytest.mark.parametrize(
    ("moves", "agent"),
    exhaustive_but(
        [(moves, agent) for moves in ("paper", "beyond") for agent in SEARCHES],
        ("beyond", "sweeps"),
    ),
)
def test_a_search_spends_exactly_its_budget_and_improves_the_model(program, agent, moves):
    counting = Counting()
    schedules = 60 if agent == "guided" else 150
    budget = budget_of(program, schedules, agent, [counting])
    play(agent, AgentContext(program, None, budget, seed=0, moves=moves))
    assert budget.spent == len(set(counting.digests)) == len(counting.digests) == schedules
    assert budget.stopped_by == "schedules"
    best = budget.best(1)
    assert best
    assert best[0].measurement.relative < 1.0
    schedule = budget.schedule_of(best[0])
    assert schedule_digest(schedule) == best[0].digest
    assert check(program.image.data, schedule.cubin(program), disassemble) == []


@pytest.mark.parametrize("agent", exhaustive_but(SEARCHES, "anneal"))
def test_the_same_seed_gives_the_same_schedules_and_another_one_others(program, agent):
    found = []
    for seed in (1, 1, 2):
        budget = budget_of(program, 40, agent)
        play(agent, AgentContext(program, None, budget, seed=seed))
        found.append([entry.digest for entry in budget.entries])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("agent", exhaustive_but(SEARCHES, "anneal"))
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(program, agent, tmp_path, monkeypatch):
    # What was paid for is played again without paying, for longer than a search looks in vain.
    monkeypatch.setattr(Agent, "idle_rounds", 20)
    whole = budget_of(program, 60, agent)
    play(agent, AgentContext(program, None, whole, seed=5))
    run, path = RunDirectory(tmp_path), tmp_path / "schedules.jsonl"
    first = budget_of(program, 25, agent, run=run)
    play(agent, AgentContext(program, None, first, seed=5))
    with path.open("ab") as file:
        file.write(b'{"number": 26, "agent": "gr')
    counting = Counting()
    second = budget_of(program, 60, agent, [counting], run=run)
    assert second.spent == 25
    play(agent, AgentContext(program, None, second, seed=5))
    assert len(counting.digests) == 35
    assert [entry.digest for entry in second.entries] == [entry.digest for entry in whole.entries]
    assert [e.digest for e in read_entries(run, agent)] == [e.digest for e in whole.entries]


def test_several_backends_share_one_budget_and_never_repeat(program):
    counting = Counting()
    budget = budget_of(program, 90, "anneal", [counting] * 3)
    play("anneal", AgentContext(program, None, budget, seed=1))
    assert budget.lanes == 3
    assert budget.spent == len(counting.digests) == 90


def test_time_ends_a_search_too(program):
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    budget = budget_of(program, 1000, "random", limit_s=20.0, clock=clock)
    play("random", AgentContext(program, None, budget))
    assert budget.stopped_by == "time"
    assert 0 < budget.spent <= 20


def test_the_original_is_free_and_known_schedules_are_too(program):
    budget = budget_of(program, 1)
    schedule = Schedule(program.kernel())
    assert budget.measure(schedule).relative == 1.0
    schedule.play(next(schedule.legal_moves()))
    assert budget.measure(schedule) is budget.measure(schedule)
    assert budget.spent == 1
    schedule.play(list(schedule.legal_moves(max_distance=2))[-1])
    with pytest.raises(BudgetSpentError):
        budget.measure(schedule)
    with pytest.raises(UsageError, match="wanted a budget"):
        budget_of(program, 0)


def test_records_say_what_happened_and_repeat_no_moves(program, tmp_path):
    path = tmp_path / "schedules.jsonl"
    budget = budget_of(program, 80, "anneal", run=RunDirectory(tmp_path))
    play("anneal", AgentContext(program, None, budget, seed=2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(1, 81))
    assert all(line["status"] == "measured" and line["cost"] > 0 and line["baseline"] > 0 for line in lines)
    assert all(line["agent"] == "anneal" and len(line["digest"]) == 64 for line in lines)
    assert sum(len(line["moves"]) for line in lines) <= 3 * len(lines)
    for entry in (budget.entries[10], budget.entries[-1]):
        assert schedule_digest(budget.schedule_of(entry)) == entry.digest


@pytest.mark.parametrize("agent", exhaustive_but(SEARCHES, "anneal"))
def test_a_schedule_that_fails_is_on_record_and_never_the_best(program, agent):
    budget = budget_of(program, 80, agent, [WrongWhenMovedFar()])
    play(agent, AgentContext(program, None, budget, seed=0))
    statuses = {entry.measurement.status for entry in budget.entries}
    assert statuses == {"measured", "wrong-output"}
    assert all(entry.measurement.status == "measured" for entry in budget.best(80))


def test_a_failure_ends_the_episode_with_the_papers_reward(program):
    env = BeyondGameEnv(program, backend=WrongWhenMovedFar(), operations=("move-8", "move+8"))
    env.reset()
    for _ in range(32):
        action = int(np.flatnonzero(env.action_masks()[:-1])[0])
        _, reward, terminated, truncated, info = env.step(action)
        if terminated:
            assert (reward, info["status"], info["cost"]) == (FAILED_REWARD, "wrong-output", None)
            return
        assert not truncated
    pytest.fail("wanted a schedule that fails")


def test_unknown_agents_and_missing_packages(monkeypatch):
    with pytest.raises(UsageError, match="wanted an agent out of ppo"):
        require_agent("gradient")
    monkeypatch.setattr("kernelwright.assembly.agents.PPO_PACKAGES", ("a_package_nobody_has",))
    with pytest.raises(InfrastructureError, match=r"a_package_nobody_has.*kernelwright\[game\]"):
        require_agent("ppo")


@pytest.mark.exhaustive
@given(st.integers(0, 2**32), st.integers(1, 8))
@settings(max_examples=4, deadline=None)
def test_the_mask_of_the_wider_game_is_exactly_what_may_be_played(seed, steps):
    program = program_of()
    env = BeyondGameEnv(program, max_candidates=8)
    rng = random.Random(seed)
    env.reset()
    for _ in range(steps):
        mask = env.action_masks()
        allowed = np.flatnonzero(mask[:-1])
        assert not mask[-1]
        refused = np.flatnonzero(~mask)
        with pytest.raises(MoveError):
            env.step(int(rng.choice(refused)))
        observation, _, terminated, _, info = env.step(int(rng.choice(allowed)))
        assert not terminated
        assert env.observation_space.contains(observation)
    assert check(program.image.data, env.schedule.cubin(program), disassemble) == []
    again = Schedule(program.kernel())
    for move in info["moves"]:
        again.play(move_from_json(move))
    assert again.words() == env.schedule.words()


@pytest.mark.exhaustive
def test_the_wider_game_pays_relative_throughput(program):
    env = BeyondGameEnv(program, horizon=50)
    env.reset()
    rng = np.random.default_rng(1)
    total = 0.0
    for _ in range(20):
        _, reward, _, _, info = env.step(rng.choice(np.flatnonzero(env.action_masks())))
        total += reward
    assert info["cost"] != info["initial_cost"]
    assert total == pytest.approx(100 * (info["initial_cost"] / info["cost"] - 1))


@pytest.mark.parametrize(
    "options", [{"operations": ()}, {"operations": ("fly",)}, {"operations": ("yield", "yield")}, {"max_candidates": 0}]
)
def test_options_of_the_wider_game_that_make_no_sense(program, options):
    with pytest.raises(UsageError, match="wanted"):
        BeyondGameEnv(program, **options)


@pytest.mark.exhaustive
def test_every_operation_is_used_somewhere():
    envs = [BeyondGameEnv(program_of(name, 90)) for name in ("sgemm", "softmax")]
    allowed = {action % len(BEYOND) for env in envs for action in np.flatnonzero(env.action_masks()[:-1])}
    names = {BEYOND[number] for number in allowed}
    assert {name.rstrip("+-0123456789") for name in names} == {"move", "cluster", "stall", "yield", "reuse", "hint"}


def test_the_simulated_issue_knows_waits_that_the_sum_of_stalls_does_not(program):
    """Taking a load behind what waits for nothing of it costs no stall cycle, and does cost time."""
    backend = SimulatedIssue(80)
    original = Schedule(program.kernel())
    costs = {backend.cost(original)}
    for move in original.legal_moves(max_distance=4, memory_only=True):
        schedule = original.copy()
        schedule.play(move)
        if schedule.issue_cycles == original.issue_cycles:
            costs.add(backend.cost(schedule))
    assert len(costs) > 1


def random_policy_returns(program, horizon, episodes):
    env = AssemblyGameEnv(program, horizon=horizon, may_stop=False)
    rng = np.random.default_rng(0)
    returns = []
    for _ in range(episodes):
        env.reset()
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(rng.choice(np.flatnonzero(env.action_masks())))
            total, over = total + reward, terminated or truncated
        returns.append(total)
    return returns


@pytest.mark.exhaustive
def test_ppo_learns(program, tmp_path):
    """After some hundred moves its episodes are better than nine in ten random ones."""
    import torch

    from kernelwright.assembly.ppo import PpoConfig, train

    by_chance = random_policy_returns(program, 16, 40)
    torch.set_num_threads(1)
    budget = budget_of(program, 350, "ppo")
    config = PpoConfig(features=32, learning_rate=1e-3, minibatch=16)
    with pytest.raises(BudgetSpentError):
        train(AgentContext(program, None, budget, seed=1, moves="paper", horizon=16, directory=tmp_path), config)
    assert budget.spent == 350
    curve = [json.loads(line) for line in (tmp_path / "ppo.jsonl").read_text().splitlines()]
    learnt = np.mean([line["mean_return"] for line in curve[-3:]])
    assert learnt > np.quantile(by_chance, 0.9)
    assert learnt > np.mean(by_chance) + 1.0
    assert budget.best(1)[0].measurement.relative < 0.99
    assert (tmp_path / "policy.zip").exists()
    assert curve[-1]["entropy"] > 0


@pytest.mark.exhaustive
def test_ppo_plays_the_wider_game_on_several_backends_with_the_papers_network(program):
    budget = budget_of(program, 20, "ppo", [StaticIssueCycles()] * 2)
    play("ppo", AgentContext(program, None, budget, seed=1, horizon=8))
    assert budget.spent == 20
    assert budget.stopped_by == "schedules"


def test_ppos_network_goes_where_it_is_told(program, monkeypatch):
    from kernelwright.assembly import ppo as assembly_ppo

    told = []
    monkeypatch.setattr(assembly_ppo, "train", lambda context, config: told.append(config.device))
    play("ppo", AgentContext(program, None, budget_of(program, 20, "ppo"), network_device="cuda:1"))
    assert told == ["cuda:1"]


@pytest.mark.exhaustive
def test_a_network_on_a_gpu_works_only_in_its_turn(program, monkeypatch):
    from kernelwright.assembly import ppo as assembly_ppo

    turns = []

    @contextlib.contextmanager
    def turn():
        turns.append("begin")
        yield
        turns.append("end")

    def is_turn():
        return turns[-1:] == ["begin"]

    class Watching(StaticIssueCycles):
        def cost(self, schedule):
            assert not is_turn(), "the network must let go of the GPU while schedules are timed"
            return super().cost(schedule)

    algorithm, policy = assembly_ppo.learner_on(torch.device("cuda:0"))
    worked = []
    for owner, name in ((policy, "evaluate_actions"), (policy, "extract_features")):
        original = getattr(owner, name)

        def watched(self, *values, name=name, original=original, **named):
            worked.append((name, is_turn()))
            return original(self, *values, **named)

        monkeypatch.setattr(owner, name, watched)
    monkeypatch.setattr(assembly_ppo, "turn_on_gpu", turn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: turns.append("waited"))
    monkeypatch.setattr(assembly_ppo, "learner_on", lambda device: (algorithm, policy))
    monkeypatch.setattr(assembly_ppo, "resolve_device", lambda device: torch.device("cpu"))
    small = assembly_ppo.PpoConfig(rollout_steps=8, features=8, device="cuda:0")
    budget = budget_of(program, 20, "ppo", [Watching()])
    with pytest.raises(BudgetSpentError):
        assembly_ppo.train(AgentContext(program, None, budget, horizon=8), small)
    assert {name for name, _ in worked} == {"evaluate_actions", "extract_features"}
    assert all(in_turn for _, in_turn in worked)
    assert turns == ["begin", "waited", "end"] * (len(turns) // 3)


def test_a_network_on_a_gpu_that_is_not_there_is_an_error_before_anything_is_played(program):
    budget = budget_of(program, 20, "ppo")
    with pytest.raises(DeviceError):
        play("ppo", AgentContext(program, None, budget, network_device="cuda:7"))
    assert budget.spent == 0


class Contrary(StaticIssueCycles):
    """Costs the more, the better the simulated issue thinks of a schedule."""

    def __init__(self, sign):
        self.sign = sign

    def cost(self, schedule):
        return 1e6 + self.sign * SimulatedIssue(80, warps=2, iterations=2).cost(schedule)


@pytest.mark.exhaustive
def test_the_guided_search_asks_its_model_less_where_the_model_is_wrong(program, monkeypatch):
    asked = {}
    simulated = GuidedClimb.simulated_cycles
    for sign in (1, -1):
        asked[sign] = 0

        def count(agent, schedule, move, sign=sign):
            asked[sign] += 1
            return simulated(agent, schedule, move)

        monkeypatch.setattr(GuidedClimb, "simulated_cycles", count)
        play("guided", AgentContext(program, None, budget_of(program, 60, "guided", [Contrary(sign)]), seed=0))
    assert asked[-1] < 0.8 * asked[1]


@pytest.mark.parametrize("agent", exhaustive_but(SEARCHES, "anneal"))
def test_a_search_begins_where_it_is_told(program, agent):
    first = budget_of(program, 150)
    play("greedy", AgentContext(program, None, first, seed=0))
    (best,) = first.best(1)
    start = tuple(first.schedule_of(best).history)
    budget = budget_of(program, 30, agent)
    play(agent, AgentContext(program, None, budget, seed=1, start=start))
    assert all(tuple(budget.schedule_of(entry).history)[: len(start)] == start for entry in budget.entries)
    assert budget.spent == 30
    if agent != "random":
        assert budget.entries[0].digest == best.digest
        assert budget.best(1)[0].measurement.relative <= best.measurement.relative


def test_ppo_begins_at_the_original(program):
    with pytest.raises(UsageError, match="begins at the original"):
        GameSettings(("ppo",), start=(Move(1, 2),))


def test_a_schedule_that_cannot_be_recorded_is_said_by_its_file(tmp_path):
    with pytest.raises(InfrastructureError, match=r"Wanted to write /dev/full; No space left on device\."):
        RunDirectory(Path("/dev")).append_object("full", {"number": 1})
    (tmp_path / "schedules.jsonl").mkdir()
    with pytest.raises(InfrastructureError, match=r"schedules\.jsonl; Is a directory"):
        RunDirectory(tmp_path).append_object("schedules.jsonl", {"number": 1})
