"""Gives a stage of training what it works with besides its settings: judges, access to the model, and a deadline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelwright.contrastive.evaluations import (
    GRAPH,
    Deadline,
    Estimator,
    Log,
    RunEvaluations,
    SharedEvaluations,
    TaskBaselines,
)
from kernelwright.contrastive.hacks import AdversarialChecker, HackChecker, HackDatabase, StructuralChecker
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
from kernelwright.execution.executor import GIVEN_ROUNDS_PER_GPU, LocalExecutor
from kernelwright.execution.work import Executor
from kernelwright.judge import Settings, devices_of
from kernelwright.models.chat import ChatModel
from kernelwright.models.factory import chat_model
from kernelwright.records import RunDirectory, sha256_of
from kernelwright.records.policy import Policy
from kernelwright.version import __version__


@dataclass(frozen=True, slots=True)
class ConfiguredJudges:
    """Judges, and the settings under which they judge."""

    judges: Executor
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
    verifier: Executor | None = None
    """Measures suspicious speedups again; None leaves that out."""
    checker: HackChecker | None = None
    """Second opinion on suspicious improvements."""
    shared: Path | None = None
    """File of evaluations that runs on this machine share (`SharedEvaluations`)."""
    screens: LocalExecutor | None = None
    """Makes estimates, where rewards may rest on them."""


class ModelAccess:
    """A stage's ways to load its model and to sample from it."""

    def load(self, section: ModelSection, seed: int) -> tuple[Any, Any]:
        """The model, ready to be trained, and its tokenizer; the seed is that of a new adapter's random weights."""
        return load_for_training(section, seed)

    def sampler(self, model: Any, tokenizer: Any, name: str, batch: int) -> ChatModel:
        """The package's own batched sampler over a model in this process; it reads the weights as they are at each call."""
        from kernelwright.models.local import LocalModel, LocalSettings

        return LocalModel(model, tokenizer, name=name, settings=LocalSettings(batch_size=batch))


def first_on(device: str) -> str:
    """Label of the first measurements that runs on a kind of device share."""
    return f"first on {device}"


@dataclass(frozen=True, slots=True)
class StageContext:
    """The judges, models and deadline of a stage. Tests put others in."""

    judging: Judging
    model: ModelAccess = field(default_factory=ModelAccess)
    deadline: Deadline = field(default_factory=Deadline)
    log: Log = lambda line: None
    teachers: Mapping[str, Policy] = field(default_factory=dict)
    """Teachers by name, besides the package's own."""

    @property
    def device(self) -> str:
        """Kind of device on which candidates run."""
        return self.judging.device

    def store(self, run: RunDirectory, *, timed: bool = True) -> RunEvaluations:
        """A run's first measurements and a way to get more of them, timed or checked only."""
        settings = self.judging.rewards.settings
        if settings is not None and not timed:
            settings = settings.model_copy(update={"timed": False})
        return self._store(run, ConfiguredJudges(self.judging.rewards.judges, settings), first_on(self.device))

    def confirming(self, run: RunDirectory) -> RunEvaluations:
        """The same for what is reported. An evaluation that runs share never stands for a first measurement here."""
        return self._store(run, self.judging.reported, f"again on {self.device}")

    def _store(self, run: RunDirectory, chosen: ConfiguredJudges, label: str) -> RunEvaluations:
        path = self.judging.shared
        shared = None if path is None else SharedEvaluations(path, label, chosen.settings)
        return RunEvaluations(run, chosen.judges, self.log, settings=chosen.settings, shared=shared)

    def baselines(self, run: RunDirectory, name: str = GRAPH) -> TaskBaselines:
        """A baseline of each task, with its measurements in `baselines` of a run."""
        return TaskBaselines(self.store(RunDirectory(run.path / "baselines")), self.device, name)

    def estimator(self, section: RewardSection, store: RunEvaluations) -> Estimator | None:
        """Lets estimates stand for a share of the verdicts, where that is wanted; raises ConfigError where it cannot be."""
        if not section.screened_share:
            return None
        screens, settings = self.judging.screens, self.judging.rewards.settings
        if screens is None or settings is None or not settings.timed:
            raise ConfigError("Wanted screened rewards (reward.screened_share); these judges do not time, or elsewhere.")
        return Estimator(store, screens, section.screened_share, section.suspicious_speedup, section.suspicious_leap)


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
    section: JudgeSection, doubts: CheckerSection, *, log: Log = lambda line: None, limit_s: float | None = None
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
        judges, rounds = (section.per_device, GIVEN_ROUNDS_PER_GPU) if on_gpu else (1, 1)
        # One for all: work brings its settings, and what is looked at again comes when nothing else is judged.
        executor = stack.enter_context(LocalExecutor(devices, settings, judges=judges, rounds=rounds))
        judging = Judging(
            device="cuda" if on_gpu else "cpu",
            rewards=ConfiguredJudges(executor, settings),
            reported=ConfiguredJudges(executor, confirming),
            verifier=executor,
            checker=checker_of(doubts),
            shared=section.shared,
            screens=executor,
        )
        yield StageContext(judging, deadline=Deadline(limit_s), log=log)


def checker_of(section: CheckerSection) -> HackChecker | None:
    """The checker that reads suspicious improvements for signs of cheating; None for none.

    Raises:
        ConfigError: an option of the model is wrong.
        PolicyError: the model cannot be reached.
    """
    if section.kind == "none":
        return None
    known = HackDatabase.packaged(Path(section.confirmed) if section.confirmed else None)
    if section.kind == "structural":
        return StructuralChecker(known)
    return AdversarialChecker(chat_model(section.kind, **section.options), known, samples=section.samples)


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
