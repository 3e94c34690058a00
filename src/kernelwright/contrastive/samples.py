"""Defines a sample, which moves through training, and keeps it on disk as a rollout, one JSON line each.

With the evaluations, rollouts are all that a reward needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, field_validator

from kernelwright.contrastive.answers import AnswerFailure, parse_completion
from kernelwright.contrastive.prompts import AnswerForm, Prompt, whole_source
from kernelwright.files import replace_file
from kernelwright.models.chat import Completion, Message, Sampling
from kernelwright.records import (
    Candidate,
    Evaluation,
    Reason,
    Task,
    Verdict,
    append_lines,
    encodable,
    read_records,
)
from kernelwright.records.screened import Screened
from kernelwright.seconds import utc_now

Key = tuple[str, str]
"""A candidate of a task: the task's hash and the candidate's."""


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """A prompt and its answer as tokens; the answer includes the token that ended it."""

    prompt: list[int]
    answer: list[int]


@dataclass(slots=True, kw_only=True)
class Sample:
    """One answer of a model and everything that training finds out about it. Each step fills in its fields."""

    # Drawn: what was asked, and what the model answered.
    task: Task
    prompt: Prompt
    completion: Completion
    step: int
    """Step of the stage, from 0; in a search, the number of the prompt."""
    sample: int
    """Number of the answer in its step, from 0."""
    tokens: TokenizedSample | None = None
    """The same as tokens, for an answer that a gradient step learns from."""

    # Parsed: a candidate, or the reason for which there is none.
    candidate: Candidate | None = None
    failure: AnswerFailure | None = None
    detail: str = ""
    """The failure in words."""

    # Judged: at most one of both. With a candidate and neither, the machine could not judge it.
    evaluation: Evaluation | None = None
    estimate: Screened | None = None
    """Screening's estimate, where the reward rests on it."""

    # Rewarded.
    is_copy: bool = False
    """True for a candidate that the prompt showed, but for comments and layout."""
    score: float | None = None
    """Value of the named reward; None for what could not be judged, which must not count either way."""
    reward: float | None = None
    """Value that training maximises: the score, or the floor for a copy, smoothed where that is wanted."""
    rollout: Rollout | None = None
    """The record of it on disk."""

    # Learnt from.
    advantage: float = 0.0
    """Reward relative to its group."""
    token_advantages: list[float] = field(default_factory=list)
    """Advantage of each token of the answer; 0 for a token that is spared."""

    @property
    def key(self) -> Key | None:
        """Hashes of task and candidate; None without a candidate."""
        return None if self.candidate is None else (self.task.sha256, self.candidate.sha256)

    @property
    def has_ended(self) -> bool:
        """True unless the answer was cut at its limit of tokens."""
        return self.completion.finish_reason != "length"

    @property
    def tokenized(self) -> TokenizedSample:
        """The tokens of an answer that was drawn as tokens."""
        assert self.tokens is not None
        return self.tokens

    def parse(self, form: AnswerForm, policy: str) -> None:
        """Find the candidate in the answer. Its policy is the model that wrote it, its parent the best exemplar."""
        answer = parse_completion(self.completion)
        self.failure, self.detail = answer.failure, answer.detail
        if answer.source is not None:
            parent = self.prompt.shown[-1].candidate_sha256 if self.prompt.shown else None
            self.candidate = Candidate(source=whole_source(self.task, answer.source, form), policy=policy, parent=parent)


_SAMPLES: TypeAdapter[list[Sample]] = TypeAdapter(list[Sample])
_DRAWN = {"task", "prompt", "completion", "step", "sample"}


def write_drawn(path: Path, samples: Sequence[Sample]) -> None:
    """Write a batch as it was drawn, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, _SAMPLES.dump_json(list(samples), include={"__all__": _DRAWN}))


def read_drawn(path: Path) -> list[Sample]:
    """A batch as it was drawn."""
    return _SAMPLES.validate_json(path.read_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Stage, model and sampling that answers come from, as their records name them."""

    stage: str
    model: str
    sampling: Sampling
    form: AnswerForm = "module"
    """Form that the answers' code was to have."""


class Rollout(BaseModel):
    """One answer of a model, and what the judge made of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    task_sha256: str
    stage: str
    """`search`, `self-supervised`, `contrastive` (vanilla GRPO and evolutionary search, too) or `held-out`."""
    step: int
    """Step of the stage, from 0; in a search, the number of the prompt."""
    sample: int
    """Number of the answer in its step, from 0."""
    model: str
    """Name of the model."""
    temperature: float
    """Temperature of the sampling."""
    seed: int
    """Seed of the sampling."""
    form: AnswerForm = "module"
    """Form that the answer's code was to have."""
    prompt_sha256: str
    """Hash of the prompt."""
    prompt: tuple[Message, ...] = ()
    """Messages of the prompt. In the file only the first rollout that has them holds them."""
    exemplars: tuple[str, ...] = ()
    """Hashes of the candidates shown in the prompt, worst first."""
    completion: str
    """The answer."""
    prompt_tokens: int = 0
    """Length of the prompt, tokens."""
    completion_tokens: int = 0
    """Length of the answer, tokens."""
    finish_reason: str = "stop"
    """Reason for which the answer ended, in the model's words, such as `stop` or `length`."""
    failure: AnswerFailure | None = None
    """Reason for which the answer holds no candidate."""
    detail: str = ""
    """The failure in words."""
    candidate_sha256: str | None = None
    verdict: Verdict | None = None
    """Verdict in a training stage; None where it was not judged, and in a search, whose verdicts `evaluations.jsonl` has."""
    reason: Reason | None = None
    estimate: float | None = None
    """Screening's estimate of the speedup, where the reward rests on it and not on a verdict."""
    baseline: str | None = None
    """Baseline that the reward is a ratio to, where that is the best of several: `eager` or `cudagraph-fresh`."""
    baseline_speedup: float | None = None
    """Its speedup over the reference."""
    reward: float | None = None
    """Value of the named reward."""
    smoothed: float | None = None
    """Reward after the rolling normalisation."""
    started: str = ""
    """Time of writing: UTC, ISO 8601."""

    @field_validator("completion", "detail", mode="before")
    @classmethod
    def _encodable(cls, text: str) -> str:
        return encodable(text)

    @classmethod
    def of(cls, sample: Sample, origin: Origin, *, smoothed: float | None = None) -> Rollout:
        """The record of a sample as far as it has come."""
        verdict = sample.evaluation or sample.estimate
        return cls(
            task=sample.task.id,
            task_sha256=sample.task.sha256,
            stage=origin.stage,
            step=sample.step,
            sample=sample.sample,
            model=origin.model,
            temperature=origin.sampling.temperature,
            seed=origin.sampling.seed,
            form=origin.form,
            prompt_sha256=sample.prompt.sha256,
            prompt=sample.prompt.messages,
            exemplars=tuple(exemplar.candidate_sha256 for exemplar in sample.prompt.shown),
            completion=sample.completion.text,
            prompt_tokens=sample.completion.prompt_tokens,
            completion_tokens=sample.completion.completion_tokens,
            finish_reason=sample.completion.finish_reason,
            failure=sample.failure,
            detail=sample.detail,
            candidate_sha256=None if sample.candidate is None else sample.candidate.sha256,
            verdict=None if sample.evaluation is None else sample.evaluation.verdict,
            reason=None if verdict is None else verdict.reason,
            estimate=None if sample.estimate is None else sample.estimate.estimate,
            reward=sample.score,
            smoothed=smoothed,
            started=utc_now(),
        )

    def answered(self) -> Completion:
        """The answer as the model gave it."""
        return Completion(
            text=self.completion,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            finish_reason=self.finish_reason,
        )

    def source(self, task: Task) -> str | None:
        """The candidate's text, parsed from the answer again; None when there is none."""
        if self.candidate_sha256 is None:
            return None
        answer = parse_completion(self.answered())
        return None if answer.source is None else whole_source(task, answer.source, self.form)


class RolloutLog:
    """Appends to and reads `rollouts.jsonl` of a run directory; a torn last line is skipped.

    Args:
        directory: The run directory; created at the first append when missing.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "rollouts.jsonl"
        self._written: set[str] = set()

    def append(self, rollouts: Iterable[Rollout]) -> None:
        """Write rollouts and wait until they are on disk. Each process writes a prompt's text once."""
        lines = []
        for rollout in rollouts:
            known = rollout.prompt_sha256 in self._written
            lines.append((rollout.model_copy(update={"prompt": ()}) if known else rollout).model_dump_json())
            self._written.add(rollout.prompt_sha256)
        append_lines(self.path, lines)

    def rollouts(self) -> Iterator[Rollout]:
        """Every whole record, packed ones of a published run first, in order of writing, prompts filled in.

        Raises:
            UsageError: the file is there and cannot be read.
        """
        prompts: dict[str, tuple[Message, ...]] = {}
        for rollout in read_records(self.path, Rollout):
            if rollout.prompt:
                prompts[rollout.prompt_sha256] = rollout.prompt
            yield rollout.model_copy(update={"prompt": prompts.get(rollout.prompt_sha256, ())})
