"""Gives a stage of training what it works with besides its settings: judges, access to the model, and a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernelwright.contrastive.evaluations import BestBaselines, Estimator, EvaluationCache, JudgedRun, Say
from kernelwright.contrastive.hacks import HackChecker
from kernelwright.contrastive.scoring import Verification
from kernelwright.contrastive.settings import (
    CheckerSection,
    JudgeSection,
    ModelSection,
    RewardSection,
    SelfSupervisedConfig,
    StageConfig,
    SupervisedConfig,
)
from kernelwright.contrastive.trained_model import load_for_training
from kernelwright.errors import ConfigError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import JudgePool
from kernelwright.execution.screens import Screens
from kernelwright.judge import Settings, devices_of
from kernelwright.models.chat import ChatModel
from kernelwright.records import RunDirectory, sha256_of
from kernelwright.version import __version__

Loader = Callable[[ModelSection, int], tuple[Any, Any]]
"""Loads a model and its tokenizer; the number seeds a new adapter."""


def sampler_of(model: Any, tokenizer: Any, name: str, batch: int) -> ChatModel:
    """The package's own batched sampler over a model in this process; it reads the weights as they are at each call."""
    from kernelwright.models.local import LocalModel, LocalSettings

    return LocalModel(model, tokenizer, name=name, settings=LocalSettings(batch_size=batch))


@dataclass(frozen=True, slots=True)
class ConfiguredJudges:
    """Judges, and the settings under which they judge."""

    judges: Evaluator
    settings: Settings | None = None
    """None leaves them to the judges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """Everything that measures candidates for a stage."""

    device: str
    """Kind of device on which candidates run: `cpu`, `cuda` or `cuda:N`."""
    rewards: ConfiguredJudges
    """For first measurements, from which rewards come."""
    reported: ConfiguredJudges
    """For independent re-measurements of what is reported."""
    verifiers: Mapping[str, Evaluator] | None = None
    """Pools that measure suspicious speedups again, by device; None leaves that out."""
    checker: HackChecker | None = None
    """Second opinion on suspicious improvements."""
    cache: Path | None = None
    """File of evaluations that runs on this machine share (`EvaluationCache`)."""
    screens: Screens | None = None
    """Makes estimates, where rewards may rest on them."""

    def rewarded(self, run: RunDirectory, say: Say, *, timed: bool) -> JudgedRun:
        """A run's evaluations and a way to get more of them, timed or checked only."""
        chosen = self.rewards
        if chosen.settings is not None and not timed:
            chosen = replace(chosen, settings=chosen.settings.model_copy(update={"timed": False}))
        return self._judged(run, say, chosen, first_on(self.device))

    def confirming(self, run: RunDirectory, say: Say) -> JudgedRun:
        """The same for what is reported. The cache never returns a first measurement here."""
        return self._judged(run, say, self.reported, f"again on {self.device}")

    def _judged(self, run: RunDirectory, say: Say, chosen: ConfiguredJudges, label: str) -> JudgedRun:
        cache = None if self.cache is None else EvaluationCache(self.cache, label, chosen.settings)
        return JudgedRun(run, chosen.judges, say, settings=chosen.settings, cache=cache)

    def estimator(self, section: RewardSection, judged: JudgedRun) -> Estimator | None:
        """Lets estimates stand for a share of the verdicts, where that is wanted; raises ConfigError where it cannot be."""
        if not section.screened_share:
            return None
        if self.screens is None or self.rewards.settings is None or not self.rewards.settings.timed:
            raise ConfigError("Wanted screened rewards (reward.screened_share); these judges do not time, or elsewhere.")
        return Estimator(judged, self.screens, section.screened_share, section.suspicious_speedup, section.suspicious_leap)

    def verification(self, section: RewardSection) -> Verification | None:
        """The second measurement of suspicious candidates, where that is wanted and possible."""
        if not (section.reverify and self.verifiers):
            return None
        return Verification(
            pools=self.verifiers,
            checker=self.checker,
            settings=self.rewards.settings,
            above=section.suspicious_speedup,
            leap=section.suspicious_leap,
        )


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """A stage's ways to load its model and to sample from it."""

    load: Loader = load_for_training
    sampler: Callable[[Any, Any, str, int], ChatModel] = sampler_of


def first_on(device: str) -> str:
    """Label of the first measurements that runs on a kind of device share."""
    return f"first on {device}"


class Deadline:
    """The time by which a stage saves what it has and returns unfinished: seconds from now; None sets no limit."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    def passed(self) -> bool:
        """Whether the time is up."""
        return self.comes_within(0.0)

    def comes_within(self, seconds: float) -> bool:
        """Whether work that takes so long would end after the deadline."""
        return self._end_s is not None and time.monotonic() + seconds >= self._end_s


@dataclass(frozen=True, slots=True)
class StageContext:
    """The judges, models and deadline of a stage. Tests put others in."""

    judging: Judging
    model: ModelAccess = ModelAccess()
    deadline: Deadline = field(default_factory=Deadline)
    say: Say = lambda line: None

    @property
    def device(self) -> str:
        """Kind of device on which candidates run."""
        return self.judging.device

    def judged(self, run: RunDirectory, *, timed: bool = True) -> JudgedRun:
        """A run's first measurements."""
        return self.judging.rewarded(run, self.say, timed=timed)

    def confirming(self, run: RunDirectory) -> JudgedRun:
        """A run's re-measurements of what is reported."""
        return self.judging.confirming(run, self.say)

    def baselines(self, run: RunDirectory, wanted: str) -> BestBaselines | None:
        """Best baselines, with their measurements in `baselines` of a run; None where the reference is what is wanted."""
        if wanted == "eager":
            return None
        return BestBaselines(self.judged(RunDirectory(run.path / "baselines")), self.device)


@dataclass(frozen=True, slots=True)
class StageResult:
    """The end of a stage."""

    finished: bool
    """False when the time was up; the same call goes on."""
    final: str | None
    """Folder of the trained adapter or model; None while unfinished, or when nothing was trained."""
    steps: int
    """Steps or rounds done."""


@contextmanager
def stage_context(
    section: JudgeSection, doubts: CheckerSection, *, say: Say = lambda line: None, limit_s: float | None = None
) -> Iterator[StageContext]:
    """Start the judges that a configuration asks for.

    After `limit_s` seconds a stage saves and returns.

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
        judging = Judging(
            device="cuda" if on_gpu else "cpu",
            rewards=ConfiguredJudges(pool, settings),
            # A job brings its settings, so the same processes do for both.
            reported=ConfiguredJudges(pool, confirming),
            verifiers=verifiers,
            checker=checker_of(doubts),
            cache=section.shared,
            screens=stack.enter_context(Screens(devices, settings)),
        )
        yield StageContext(judging, deadline=Deadline(limit_s), say=say)


def checker_of(section: CheckerSection) -> HackChecker | None:
    """The checker that reads suspicious improvements for signs of cheating; None for none.

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
    """Mark a run directory with its configuration, or see that it has the same; returns whether it is new.

    The number of steps may differ, so that a finished run can be taken further, and so may the folders of the model and
    the number of judges.

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
        "kernelwright": __version__,
    }
    return run.claim(whole, same=("kind", "config_sha256"), device=device)
