"""What a stage works with: judges, a way to load the model, a way to sample from it, and a clock that may end it early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernelwright
from kernelwright.contrastive.hacks import HackChecker
from kernelwright.contrastive.sampling.judging import JudgedRun, Judges, Say
from kernelwright.contrastive.sampling.scoring import Verification
from kernelwright.contrastive.sampling.shared import SharedEvaluations
from kernelwright.contrastive.sampling.warming import Warming
from kernelwright.contrastive.stages.config import (
    CheckerSection,
    JudgeSection,
    ModelSection,
    RewardSection,
    SelfSupervisedConfig,
    StageConfig,
    SupervisedConfig,
)
from kernelwright.contrastive.updates.models import load_for_training
from kernelwright.judge import Settings, devices_of
from kernelwright.models.chat import ChatModel
from kernelwright.pools import Evaluator, JudgePool
from kernelwright.records import RunDirectory, sha256_of

Loader = Callable[[ModelSection, int], tuple[Any, Any]]
"""Loads a model and its tokenizer; the number seeds a new adapter."""


def sampler_of(model: Any, tokenizer: Any, name: str, batch: int) -> ChatModel:
    """The package's own batched sampler over a model in this process; it reads the weights as they are at each call."""
    from kernelwright.models.local import LocalModel, LocalSettings

    return LocalModel.from_module(model, tokenizer, name=name, settings=LocalSettings(batch_size=batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """Everything a stage needs that is not its configuration. Tests put other judges and models in."""

    judges: Judges
    device: str
    """Where candidates run, resolved: `cpu`, `cuda` or `cuda:N`."""
    verifiers: Mapping[str, Evaluator] | None = None
    """For measuring suspicious speedups again, by device; None leaves that out."""
    checker: HackChecker | None = None
    """Reads suspicious improvements for signs of cheating."""
    settings: Settings | None = None
    """Of the judges, for what is to be stricter than them."""
    confirmers: Judges | None = None
    """Judges with full settings, for re-measuring what is reported; None takes `judges`."""
    shared: Path | None = None
    """A file of evaluations that runs on this machine share (`SharedEvaluations`)."""
    confirming_settings: Settings | None = None
    """Of the confirmers."""
    load: Loader = load_for_training
    sampler: Callable[[Any, Any, str, int], ChatModel] = sampler_of
    say: Say = lambda line: None
    deadline: float | None = None
    """On `time.monotonic`'s clock: a stage that reaches it saves what it has and returns unfinished."""
    out_of_time: Callable[[], bool] = field(default=lambda: False)

    def judged(self, run: RunDirectory, *, timed: bool = True) -> JudgedRun:
        """A run's evaluations, and a way to get more of them, timed or checked only."""
        settings = self.settings
        if settings is not None and not timed:
            settings = settings.model_copy(update={"timed": False})
        shared = None if self.shared is None else SharedEvaluations(self.shared, f"first on {self.device}", settings)
        return JudgedRun(run, self.judges, self.say, settings=settings, shared=shared)

    def confirming(self, run: RunDirectory) -> JudgedRun:
        """The same with full settings, for re-measuring what is reported. No first measurement is ever taken for one."""
        judges = self.confirmers or self.judges
        settings = self.confirming_settings
        shared = None if self.shared is None else SharedEvaluations(self.shared, f"again on {self.device}", settings)
        return JudgedRun(run, judges, self.say, settings=settings, shared=shared)

    def verification(self, section: RewardSection) -> Verification | None:
        """How suspicious candidates are looked at again, where that is wanted and possible."""
        if not (section.reverify and self.verifiers):
            return None
        return Verification(
            pools=self.verifiers,
            checker=self.checker,
            settings=self.settings,
            above=section.suspicious_speedup,
            leap=section.suspicious_leap,
        )

    def must_stop(self) -> bool:
        """Whether the time is up."""
        return self.ends_within(0.0)

    def ends_within(self, seconds: float) -> bool:
        """Whether the time is up, or will be so soon that what takes so long would not be done."""
        return self.out_of_time() or (self.deadline is not None and time.monotonic() + seconds >= self.deadline)


@dataclass(frozen=True, slots=True)
class StageResult:
    """How a stage ended."""

    finished: bool
    """False when the time was up; the same call goes on."""
    final: str | None
    """Folder of the trained adapter or model; None while unfinished, or when nothing was trained."""
    steps: int
    """Steps or rounds done."""


@contextmanager
def equipped(
    section: JudgeSection, doubts: CheckerSection, *, say: Say = lambda line: None, limit_s: float | None = None
) -> Iterator[Equipment]:
    """Judges as the configuration asks for.

    Args:
        section: The judge's part of a stage's configuration.
        doubts: The checker's part.
        say: Told about progress.
        limit_s: Seconds after which a stage saves and returns.

    Raises:
        DeviceError: there is no such device.
        ConfigError: a setting of the judge is wrong.
    """
    devices = devices_of(section.device)
    settings = section.judge_settings()
    confirming = section.confirming_settings()
    on_gpu = devices[0].startswith("cuda")
    with ExitStack() as stack:
        pool = stack.enter_context(JudgePool(devices, settings, section.per_device if on_gpu else 1))
        verifiers = {device: stack.enter_context(JudgePool([device], settings)) for device in devices}
        judges = Warming(pool) if on_gpu else pool
        yield Equipment(
            judges=judges,
            device="cuda" if on_gpu else "cpu",
            verifiers=verifiers,
            # A job brings its settings, so the same processes do for both.
            confirmers=judges,
            confirming_settings=confirming,
            shared=section.shared,
            checker=checker_of(doubts),
            settings=settings,
            say=say,
            deadline=None if limit_s is None else time.monotonic() + limit_s,
        )


def checker_of(section: CheckerSection) -> HackChecker | None:
    """Who reads suspicious improvements for signs of cheating; None for nobody.

    Raises:
        ConfigError: an option of the model is wrong.
        PolicyError: the model cannot be reached.
    """
    from kernelwright.contrastive.hacks import AdversarialChecker, HackDatabase, StructuralChecker
    from kernelwright.models.factory import chat_model

    if section.kind == "none":
        return None
    known = HackDatabase.packaged(Path(section.confirmed) if section.confirmed else None)
    if section.kind == "structural":
        return StructuralChecker(known)
    return AdversarialChecker(chat_model(section.kind, **section.options), known)


_MAY_CHANGE: Any = {"steps": True, "rounds": True, "seconds": True, "augmentation": {"seconds"}}
"""Settings that say how long a run goes on, not what it is."""


def claim(run: RunDirectory, stage: str, config: StageConfig, device: str) -> bool:
    """Say what a run directory is, or see that it belongs to the same configuration.

    The number of steps may differ, so that a finished run can be taken further, and so may the folders of the model and
    the number of judges.

    Returns:
        Whether the directory is new.

    Raises:
        UsageError: it belongs to another run.
    """
    # Settings left at their defaults are not compared, so that a run outlives a version that adds one.
    said = config.model_dump(mode="json", exclude_defaults=True, exclude=_MAY_CHANGE)
    # How many judges there are, and where they remember what they found, changes nothing about what is found.
    said["judge"] = {key: value for key, value in said.get("judge", {}).items() if key not in ("shared", "per_device")}
    said["model"] |= {
        "base": config.model.base.rpartition("/")[2],
        "adapter": config.model.adapter and config.model.adapter.name,
    }
    if not isinstance(config, SupervisedConfig):
        said["exemplars"] = said.get("exemplars", {}) | {"seeds": [path.name for path in config.exemplars.seeds]}
    if isinstance(config, SelfSupervisedConfig) and config.rehearse is not None:
        said["rehearse"] = config.rehearse.name
    whole = {
        "kind": f"train {stage}",
        "config": config.model_dump(mode="json"),
        "config_sha256": sha256_of(said),
        "kernelwright": kernelwright.__version__,
    }
    return run.claim(whole, same=("kind", "config_sha256"), device=device)
