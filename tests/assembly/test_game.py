"""The assembly game as a Gymnasium environment: spaces, masks, rewards, replay."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from kernelwright.assembly.game import (
    BEYOND_ID,
    ENVIRONMENT_ID,
    AssemblyGameEnv,
    BeyondGameEnv,
    StaticIssueCycles,
    replay,
)
from kernelwright.errors import UsageError
from kernelwright.gpu import disassemble
from kernelwright.gpu.target import corpus_specs
from kernelwright.sass import Move, MoveError, Schedule, check, load


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    target = corpus_specs()["row_sum"].build("row_sum", 80)
    patch.undo()
    return load(target.cubin, disassemble)


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


@pytest.mark.parametrize(("name", "kind"), [(ENVIRONMENT_ID, AssemblyGameEnv), (BEYOND_ID, BeyondGameEnv)])
def test_gymnasium_makes_it_and_has_nothing_to_say_against_it(program, name, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = gymnasium.make(name, program=program)
        assert type(made.unwrapped) is kind
        made.reset(seed=0)
        made.step(made.action_space.sample(mask=made.unwrapped.action_masks().astype(np.int8)))
    with pytest.raises(UsageError, match=r"wanted a disassembled program .* found bytes; .*load"):
        gymnasium.make(name, program=program.image.data)


def test_what_the_documentation_shows_works_and_passes_gymnasiums_own_checks(program):
    text = (Path(__file__).parents[2] / "docs" / "assembly-game.md").read_text(encoding="utf-8")
    names = {"cubin": program.image.data}
    with warnings.catch_warnings():
        # The checker warns that the environment is wrapped, and so has no entry of its own in the registry.
        warnings.simplefilter("ignore", UserWarning)
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(block, names)
        assert len(names["info"]["moves"]) == 1
        names["check_env"](names["Masked"](AssemblyGameEnv(program)), skip_render_check=True)


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
    for column, scoreboards in (
        (8, [i.control.read_barrier for i in instructions]),
        (9, [i.control.write_barrier for i in instructions]),
    ):
        wanted = [0 if number is None else (number + 1) / 6 for number in scoreboards]
        assert any(wanted)
        assert observation[:, column] == pytest.approx(wanted)


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


@pytest.mark.parametrize("kind", [AssemblyGameEnv, BeyondGameEnv])
def test_stopping_is_refused_where_it_is_masked_and_refusals_use_up_nothing(program, kind):
    env = kind(program, horizon=2, may_stop=False)
    env.reset()
    mask = env.action_masks()
    assert not mask[-1]
    for action in (env.stop_action, int(np.flatnonzero(~mask)[0]), -1, env.stop_action + 1):
        with pytest.raises(MoveError, match="the mask allows"):
            env.step(action)
    for expected in (False, True):
        _, _, terminated, truncated, _ = env.step(int(np.flatnonzero(env.action_masks())[0]))
        assert (terminated, truncated) == (False, expected)


def test_stopping_is_all_that_is_left_where_nothing_may_move(program, monkeypatch):
    env = BeyondGameEnv(program)
    env.reset()
    monkeypatch.setattr(env.schedule, "is_legal", lambda move: False)
    assert list(np.flatnonzero(env.action_masks())) == [env.stop_action]
    assert env.step(env.stop_action)[2]


def test_reset_returns_to_the_original(program):
    env = AssemblyGameEnv(program)
    first, _ = env.reset()
    wander(env, 1, 20)
    again, info = env.reset()
    assert np.array_equal(first, again)
    assert info["moves"] == []
    assert env.schedule.cubin(program) == program.image.data


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "options"), [(AssemblyGameEnv, {"memory_only": False, "offsets": (-7, -1, 1, 7)}), (BeyondGameEnv, {})]
)
def test_the_moves_in_info_replay_to_the_same_bytes(program, kind, options):
    env = kind(program, horizon=100, **options)
    wander(env, 9, 29)
    *_, info = env.step(int(np.flatnonzero(env.action_masks())[0]))
    assert len(info["moves"]) == 30
    played = env.schedule.cubin(program)
    assert played != program.image.data
    for moves in (info["moves"], json.loads(json.dumps(info["moves"])), env.schedule.history):
        assert replay(program, moves).cubin(program) == played
    assert check(program.image.data, played, disassemble) == []


@pytest.mark.parametrize(
    "move", [Move(0, 10**6), ["move", 0, 10**6], (140, 139), ["jump", 1, 2], [["move", 1, 2]], "move", None, {"move": 1}]
)
def test_what_is_no_move_or_not_legal_is_not_replayed(program, move):
    with pytest.raises(MoveError, match="wanted a"):
        replay(program, [move])


def test_only_a_disassembled_program_is_replayed_on(program):
    with pytest.raises(UsageError, match="found bytes"):
        replay(program.image.data, [])


@pytest.mark.parametrize("options", [{"offsets": ()}, {"offsets": (0, 1)}, {"offsets": (1, 1)}, {"horizon": 0}])
def test_options_that_make_no_sense(program, options):
    with pytest.raises(UsageError, match="wanted"):
        AssemblyGameEnv(program, **options)
