"""Keeps rollouts on disk: every answer of a model with its prompt and its outcome, one JSON line each.

With the evaluations they are all that a reward needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from kernelwright.contrastive.answers import AnswerFailure, parse_completion
from kernelwright.contrastive.prompts import AnswerForm, Prompt, whole_source
from kernelwright.models.chat import Completion, Message, Sampling
from kernelwright.records import Evaluation, Reason, Task, Verdict, append_lines, encodable, read_lines, sha256_of
from kernelwright.records.rewards import Reward
from kernelwright.records.screened import Screened
from kernelwright.seconds import utc_now


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
    seed: int
    """Seed of the sampling."""
    form: AnswerForm = "module"
    """Form that the answer's code was to have."""
    prompt_sha256: str
    prompt: tuple[Message, ...] = ()
    """The conversation; in the file it stands with the first rollout that has it."""
    exemplars: tuple[str, ...] = ()
    """Hashes of the candidates shown in the prompt, worst first."""
    completion: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"
    failure: AnswerFailure | None = None
    """Reason for which the answer holds no candidate."""
    detail: str = ""
    """The failure in words."""
    candidate_sha256: str | None = None
    verdict: Verdict | None = None
    """None where it was not judged, or by a search: then the verdict is in `evaluations.jsonl`."""
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
    def of(
        cls,
        task: Task,
        prompt: Prompt,
        completion: Completion,
        *,
        stage: str,
        step: int,
        sample: int,
        model: str,
        sampling: Sampling,
        form: AnswerForm = "module",
    ) -> Rollout:
        """The record of an answer that is not judged yet; parses it."""
        answer = parse_completion(completion)
        return cls(
            task=task.id,
            task_sha256=task.sha256,
            stage=stage,
            step=step,
            sample=sample,
            model=model,
            temperature=sampling.temperature,
            seed=sampling.seed,
            form=form,
            prompt_sha256=prompt.sha256,
            prompt=prompt.messages,
            exemplars=tuple(exemplar.candidate_sha256 for exemplar in prompt.shown),
            completion=completion.text,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            finish_reason=completion.finish_reason,
            failure=answer.failure,
            detail=answer.detail,
            candidate_sha256=None if answer.source is None else sha256_of(whole_source(task, answer.source, form)),
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

    def judged(self, evaluation: Evaluation | None, reward: Reward, smoothed: float | None = None) -> Rollout:
        """With what became of it; without an evaluation the answer held no candidate."""
        return self.model_copy(
            update={
                "verdict": evaluation.verdict if evaluation else None,
                "reason": evaluation.reason if evaluation else None,
                "reward": reward(evaluation),
                "smoothed": smoothed,
            }
        )

    def screened(self, found: Screened, reward: Reward, smoothed: float | None = None) -> Rollout:
        """With what was estimated of it; the judge did not take it."""
        told = {"reason": found.reason, "estimate": found.estimate, "reward": reward.estimated(found), "smoothed": smoothed}
        return self.model_copy(update=told)


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
        for line in read_lines(self.path):
            try:
                rollout = Rollout.model_validate_json(line)
            except ValidationError:
                continue
            if rollout.prompt:
                prompts[rollout.prompt_sha256] = rollout.prompt
            yield rollout.model_copy(update={"prompt": prompts.get(rollout.prompt_sha256, ())})
