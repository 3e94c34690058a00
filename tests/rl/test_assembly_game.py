"""The assembly game as a Gymnasium environment: spaces, masks, rewards, replay."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from kernelwright.errors import UsageError
from kernelwright.rl.assembly_game import (
    ENVIRONMENT_ID,
    AssemblyGameEnv,
    RecordedTimings,
    StaticIssueCycles,
    replay,
    schedule_digest,
)
from kernelwright.sass import Move, MoveError, Schedule, check, load
from kernelwright.sass.corpus import CORPUS
from kernelwright.toolchain import compile_triton, disassemble


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    spec = CORPUS["row_sum"]
    kernel = compile_triton(spec.function, spec.signature, spec.constants, 80, aligned=spec.aligned)
    patch.undo()
    return load(kernel.cubin, disassemble)


def wander(env, seed, steps):
    """Play random allowed moves; return the rewards."""
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    rewards = []
    for _ in range(steps):
        allowed = np.flatnonzero(env.action_masks()[:-1])
        if not len(allowed):
            break
        _, reward, terminated, _, _ = env.step(rng.choice(allowed))
        assert not terminated
        rewards.append(reward)
    return rewards


def test_it_is_registered_and_passes_gymnasiums_own_checks(program):
    made = gymnasium.make(ENVIRONMENT_ID, program=program, disable_env_checker=True)
    assert isinstance(made.unwrapped, AssemblyGameEnv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)

        class Masked(gymnasium.ActionWrapper):
            """The checker samples actions without a mask; map what is illegal to stopping."""

            def action(self, action):
                return action if self.unwrapped.action_masks()[action] else self.unwrapped.stop_action

        check_env(Masked(AssemblyGameEnv(program)), skip_render_check=True)


def test_spaces(program):
    env = AssemblyGameEnv(program)
    observation, info = env.reset(seed=1)
    instructions = program.kernel().instructions
    assert observation.shape == (len(instructions), 18)
    assert env.observation_space.contains(observation)
    assert env.action_space.n == 2 * len(env.candidates) + 1
    assert all(instructions[i].traits.is_memory for i in env.candidates)
    assert info["backend"] == "static-issue-cycles"
    assert info["unit"] == "issue cycles"
    first = instructions[0].control
    assert observation[0, 11] == pytest.approx(first.stall / 15)


def test_the_mask_is_exactly_what_may_be_played(program):
    env = AssemblyGameEnv(program, offsets=(-3, -1, 1, 4), memory_only=False)
    wander(env, 3, 10)
    mask = env.action_masks()
    assert mask[-1], "stopping is always allowed"
    legal = set(env.schedule.legal_moves())
    for action in range(env.stop_action):
        candidate, offset = divmod(action, 4)
        source = env.schedule.slot_of(env.candidates[candidate])
        assert mask[action] == (Move(source, source + env.offsets[offset]) in legal)
    refused = int(np.flatnonzero(~mask)[0])
    before = env.schedule.words()
    with pytest.raises(MoveError):
        env.step(refused)
    assert env.schedule.words() == before


def test_rewards_add_up_to_the_relative_gain(program):
    env = AssemblyGameEnv(program, memory_only=False, offsets=(-5, -1, 1, 5), horizon=100)
    rewards = wander(env, 5, 40)
    backend = StaticIssueCycles()
    start, end = backend.cost(Schedule(program.kernel())), backend.cost(env.schedule)
    assert start != end
    assert sum(rewards) == pytest.approx(100 * (start - end) / start)


def test_an_episode_ends_by_stopping_or_by_the_horizon(program):
    env = AssemblyGameEnv(program, horizon=2)
    env.reset()
    _, reward, terminated, truncated, _ = env.step(env.stop_action)
    assert (reward, terminated, truncated) == (0.0, True, False)
    env.reset()
    for expected in (False, True):
        action = int(np.flatnonzero(env.action_masks())[0])
        _, _, terminated, truncated, _ = env.step(action)
        assert (terminated, truncated) == (False, expected)


def test_reset_returns_to_the_original(program):
    env = AssemblyGameEnv(program)
    first, _ = env.reset()
    wander(env, 1, 20)
    again, info = env.reset()
    assert np.array_equal(first, again)
    assert info["moves"] == []
    assert env.schedule.cubin(program) == program.image.data


def test_replay_and_legality_of_what_leaves_the_game(program):
    env = AssemblyGameEnv(program, memory_only=False, offsets=(-7, -1, 1, 7), horizon=100)
    wander(env, 9, 30)
    moves = [Move(*move) for move in env._info()["moves"]]
    schedule = replay(program, moves)
    assert schedule.words() == env.schedule.words()
    mutated = schedule.cubin(program)
    assert mutated != program.image.data
    assert check(program.image.data, mutated, disassemble) == []
    with pytest.raises(MoveError):
        replay(program, [Move(0, len(program.kernel().instructions) - 1)])


def test_recorded_timings(program):
    schedule = Schedule(program.kernel())
    move = next(schedule.legal_moves(max_distance=1, memory_only=True))
    start = schedule_digest(schedule)
    schedule.play(move)
    env = AssemblyGameEnv(program, backend=RecordedTimings({start: 20.0, schedule_digest(schedule): 19.0}))
    env.reset()
    action = next(a for a in range(env.stop_action) if env.move_of(a) == move)
    _, reward, _, _, info = env.step(action)
    assert reward == pytest.approx(5.0)
    assert (info["backend"], info["unit"], info["cost"]) == ("recorded-timings", "us", 19.0)
    with pytest.raises(UsageError, match="wanted a recorded time"):
        env.step(int(np.flatnonzero(env.action_masks()[:-1])[-1]))


@pytest.mark.parametrize(
    "options", [{"offsets": ()}, {"offsets": (0, 1)}, {"offsets": (1, 1)}, {"horizon": 0}]
)
def test_options_that_make_no_sense(program, options):
    with pytest.raises(UsageError, match="wanted"):
        AssemblyGameEnv(program, **options)
