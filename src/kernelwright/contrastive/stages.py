"""Runs a stage of training from its settings to its result; the command and the recipes call it."""

from __future__ import annotations

from pathlib import Path

from kernelwright.contrastive.context import StageContext, StageResult, stage_context
from kernelwright.contrastive.evaluations import Log
from kernelwright.contrastive.held_out import TaskSplit, split_of
from kernelwright.contrastive.settings import ContrastiveConfig, SelfSupervisedConfig, StageConfig, SupervisedConfig
from kernelwright.contrastive.trained_model import require_base, require_training_packages
from kernelwright.records import RunDirectory


def train(config: StageConfig, out: Path, *, log: Log = lambda line: None, limit_s: float | None = None) -> StageResult:
    """Train one stage on the tasks that its configuration leaves to training; the same directory goes on where it was.

    After `limit_s` seconds it saves and returns unfinished.

    Raises:
        UsageError: the directory belongs to another run, or something in the configuration does not exist.
        InfrastructureError: packages, a device or a model are missing, or candidates cannot be judged.
    """
    require_training_packages()
    split = split_of(config.tasks)
    with stage_context(config.judge, config.checker, log=log, limit_s=limit_s) as context:
        if not (out / "final").is_dir():
            require_base(config.model)
        return train_with(config, split, RunDirectory(out), context)


def train_with(config: StageConfig, split: TaskSplit, run: RunDirectory, context: StageContext) -> StageResult:
    """Train one stage with judges, models and tasks that the caller brings.

    Raises:
        UsageError, InfrastructureError: as `train`.
    """
    # Imported only now: reading a configuration needs neither torch nor transformers.
    from kernelwright.contrastive.reinforcement import train_contrastive
    from kernelwright.contrastive.supervised import train_self_supervised, train_supervised

    match config:
        case SupervisedConfig():
            return train_supervised(config, split, run, context)
        case SelfSupervisedConfig():
            return train_self_supervised(config, split, run, context)
        case ContrastiveConfig():
            return train_contrastive(config, split, run, context)
