"""Plays the assembly game by PPO with masked actions; CuAsmRL's network and hyper-parameters are the defaults.

Every number below that names CuAsmRL is the one in the authors' published code; where the paper or its code
is silent, it says "our choice". The package that does the learning is sb3-contrib's MaskablePPO.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

from kernelwright.assembly.budget import AgentContext, Budget
from kernelwright.assembly.game import AssemblyGameEnv, BeyondGameEnv
from kernelwright.gpu.launcher import turn_on_gpu
from kernelwright.judge import resolve_device


@dataclass(frozen=True, slots=True)
class PpoConfig:
    """Hyper-parameters; values are CuAsmRL's unless they are marked as our choice.

    Attributes:
        rollout_steps: moves of each environment between updates.
        minibatch: samples of a gradient step.
        epochs: passes over a rollout.
        learning_rate: at the start; falls linearly to zero over the run.
        clip: of the probability ratio, and of the change in value.
        gradient_norm: largest norm of a gradient.
        features: width of the fully connected layer.
        steps_per_schedule: moves played for each schedule of the budget at most, since a schedule that was measured
        before costs nothing (our choice).
    """

    rollout_steps: int = 64
    minibatch: int = 8
    epochs: int = 4
    learning_rate: float = 2.5e-4
    adam_epsilon: float = 1e-5
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.01
    value_weight: float = 0.5
    gradient_norm: float = 0.5
    features: int = 512
    steps_per_schedule: float = 2.0
    device: str = "cpu"


def train(context: AgentContext, config: PpoConfig | None = None) -> MaskablePPO:
    """Train a policy on one kernel until the budget is spent, and return it.

    Keeps `ppo.jsonl` (one line an update: returns, entropy, losses) and `policy.zip` in the context's directory.

    Raises:
        BudgetSpentError: the ordinary end.
        DeviceError: the network's device is not there.
    """
    config = config or PpoConfig()
    device = resolve_device(config.device)
    algorithm, policy = learner_on(device)
    envs = _ThreadedGames([functools.partial(_game, context)] * context.budget.lanes)
    envs.seed(context.seed)
    steps = max(config.rollout_steps, round(config.steps_per_schedule * context.budget.schedules))
    model = algorithm(
        policy,
        envs,
        learning_rate=lambda left: config.learning_rate * left,
        n_steps=config.rollout_steps,
        batch_size=config.minibatch,
        n_epochs=config.epochs,
        gamma=config.discount,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip,
        clip_range_vf=config.clip,
        normalize_advantage=True,
        ent_coef=config.entropy_weight,
        vf_coef=config.value_weight,
        max_grad_norm=config.gradient_norm,
        target_kl=None,
        policy_kwargs=_policy_arguments(config),
        seed=context.seed,
        device=device,
        verbose=0,
    )
    log = None if context.directory is None else context.directory / "ppo.jsonl"
    try:
        model.learn(steps, callback=_Curve(log, context.budget))
    finally:
        if context.directory is not None:
            (context.directory / "ppo.json").write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
            model.save(context.directory / "policy.zip")
    return model


@contextmanager
def _turn(device: torch.device) -> Iterator[None]:
    """Work on a GPU while no process times schedules there."""
    with turn_on_gpu():
        yield
        torch.cuda.synchronize(device)


class TurnTakingPolicy(MaskableActorCriticPolicy):
    """The policy on a GPU, where the network works only when nothing is timed."""

    def forward(self, *values: Any, **named: Any) -> Any:
        """Choose actions in a turn."""
        with _turn(self.device):
            return super().forward(*values, **named)

    def predict_values(self, obs: Any) -> Any:
        """Value states in a turn."""
        with _turn(self.device):
            return super().predict_values(obs)


class TurnTakingPpo(MaskablePPO):
    """PPO on a GPU, where the network learns only when nothing is timed.

    In this process playing and learning alternate anyway. Other processes that time schedules on the same GPU wait until
    the GPU has done the network's work.
    """

    def train(self) -> None:
        """Update the network in a turn."""
        with _turn(self.device):
            super().train()


def learner_on(device: torch.device) -> tuple[type[MaskablePPO], type[MaskableActorCriticPolicy]]:
    """The algorithm and the policy class for a device."""
    if device.type == "cuda":
        return TurnTakingPpo, TurnTakingPolicy
    return MaskablePPO, MaskableActorCriticPolicy


def _game(context: AgentContext) -> AssemblyGameEnv:
    kind = AssemblyGameEnv if context.moves == "paper" else BeyondGameEnv
    return kind(context.program, context.kernel_name, context.budget, horizon=context.horizon, may_stop=False)


class _ThreadedGames(DummyVecEnv):
    """Several games side by side, each waiting for a GPU of its own while the others play."""

    def step_wait(self) -> Any:
        """Take the step of every game."""
        if self.num_envs == 1:
            return super().step_wait()
        with ThreadPoolExecutor(self.num_envs) as pool:
            steps = [pool.submit(env.step, action) for env, action in zip(self.envs, self.actions, strict=True)]
        for index, step in enumerate(steps):
            observation, reward, terminated, truncated, info = step.result()
            self.buf_rews[index], self.buf_dones[index] = reward, terminated or truncated
            self.buf_infos[index] = {**info, "TimeLimit.truncated": truncated and not terminated}
            if terminated or truncated:
                self.buf_infos[index]["terminal_observation"] = observation
                observation, self.reset_infos[index] = self.envs[index].reset()
            self._save_obs(index, observation)
        return self._obs_from_buf(), np.copy(self.buf_rews), np.copy(self.buf_dones), list(self.buf_infos)


class _PaperNetwork(BaseFeaturesExtractor):
    """CuAsmRL's network: three convolutions over the listing and one wide layer."""

    def __init__(self, observation_space: Any, features_dim: int) -> None:
        super().__init__(observation_space, features_dim)
        convolutions = torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, (5, 3), stride=(2, 1), padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 4, stride=2, padding=(0, 1)),
            torch.nn.ReLU(),
            torch.nn.Conv2d(64, 64, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
        )
        with torch.no_grad():
            width = convolutions(torch.zeros(1, 1, *observation_space.shape)).shape[1]
        self.layers = torch.nn.Sequential(convolutions, torch.nn.Linear(width, features_dim), torch.nn.ReLU())

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Features of observations."""
        features: torch.Tensor = self.layers(observations.unsqueeze(1))
        return features


def _policy_arguments(config: PpoConfig) -> dict[str, Any]:
    """CuAsmRL's network with a linear actor and a linear critic.

    Orthogonal initialisation with gain 0.01 for the actor and 1 for the critic is what stable-baselines3 does.
    """
    return {
        "features_extractor_class": _PaperNetwork,
        "features_extractor_kwargs": {"features_dim": config.features},
        "net_arch": [],
        "ortho_init": True,
        # The same steps in one pass over the weights: 9 times as fast for a layer of this size.
        "optimizer_kwargs": {"eps": config.adam_epsilon, "fused": True},
    }


class _Curve(BaseCallback):
    """Writes one line an update: what the paper plots (return, entropy, divergence)."""

    def __init__(self, path: Path | None, budget: Budget) -> None:
        super().__init__()
        self.path = path
        self.budget = budget
        self.returns: list[float] = []
        self.running: Any = None
        self.lines: list[dict[str, float | None]] = []

    def _on_step(self) -> bool:
        rewards, dones = self.locals["rewards"], self.locals["dones"]
        self.running = np.array(rewards) if self.running is None else self.running + rewards
        self.returns += [float(value) for value in self.running[dones]]
        self.running[dones] = 0.0
        return True

    def _on_rollout_end(self) -> None:
        losses = self.model.logger.name_to_value
        line = {
            "steps": self.num_timesteps,
            "schedules": self.budget.spent,
            "episodes": len(self.returns),
            "mean_return": float(np.mean(self.returns)) if self.returns else None,
            "entropy": _number(losses.get("train/entropy_loss"), -1.0),
            "divergence": _number(losses.get("train/approx_kl")),
            "value_loss": _number(losses.get("train/value_loss")),
        }
        self.returns = []
        self.lines.append(line)
        if self.path is not None:
            text = "".join(json.dumps(entry) + "\n" for entry in self.lines)
            self.path.write_text(text, encoding="utf-8")


def _number(value: Any, sign: float = 1.0) -> float | None:
    return None if value is None else sign * float(value)
