"""Makes a language model a policy: contrastive prompts in, parsed candidates out.

With a frozen model this is CUDA-L1's fixed-parameter search (section 2.4): the evolutionary loop without a gradient.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernelwright.contrastive.answers import AnswerFailure, techniques_in
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.prompts import Prompt, contrastive_prompt
from kernelwright.contrastive.samplers import ExemplarSampler, sampler_named
from kernelwright.contrastive.samples import Origin, Rollout, RolloutLog, Sample
from kernelwright.errors import NothingUsableError
from kernelwright.models.chat import ADVICE, ChatModel, CompletionFailure, Sampling
from kernelwright.models.transcript import Recorded, Transcript
from kernelwright.records import Candidate, sha256_of
from kernelwright.records.policy import Context

_LOGGER = logging.getLogger(__name__)

EXEMPLARS = 2
"""Exemplars in a prompt: N of CUDA-L1's section 2.4.3."""

PATIENCE = 16
"""Answers in a row without a new candidate after which a search ends. Our choice."""

FAILURES_ALIKE = 3
"""Answers in a row that the endpoint failed to give, for one and the same reason, after which it ends. Our choice."""


@dataclass(kw_only=True)
class ContrastivePolicy:
    """Proposes what a model writes when it is shown earlier candidates and their scores.

    A prompt follows from the seed, the number of prompts so far and the exemplars, and every answer is on disk before
    its candidate is proposed: a search that was killed first proposes what it had been answered and had not judged.
    """

    name: str = field(init=False)
    """Name in records, such as `api:deepseek-chat+bucket`."""
    model: ChatModel
    database: ExemplarDatabase
    """Source of exemplars; the search's history is added to it."""
    sampler: ExemplarSampler
    log: RolloutLog
    sampling: Sampling = field(default_factory=Sampling)
    """Drawing of answers; the seed counts from the search's own."""
    exemplars: int = EXEMPLARS
    """Most exemplars in a prompt."""
    samples: int = 1
    """Answers to one prompt, where more are wanted than one. Fewer prompts cost less; each shows less of what has just been
    learnt."""
    hardware: str = ""
    """The device's name for people."""
    patience: int = PATIENCE
    """Answers in a row without a new candidate after which the search ends."""
    _warned: str = ""
    """Latest warning of an answer without a candidate."""
    _failures: list[str] = field(default_factory=list)
    """Codes of the latest answers that the endpoint failed to give, all the same."""
    _rollouts: dict[str, list[Rollout]] = field(default_factory=dict)
    """Earlier answers by the hash of their task."""

    def __post_init__(self) -> None:
        self.name = f"{self.model.name}+{self.sampler.name}"

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """At most `count` candidates that are not in the history.

        Raises:
            NothingUsableError: `patience` answers in a row held no new candidate, or `FAILURES_ALIKE` failed alike.
            PromptTooLongError: the task does not fit into a prompt.
            PolicyError: the model cannot be reached, or refuses all work.
        """
        self.database.add_all(context.history)
        sha256 = context.task.sha256
        if sha256 not in self._rollouts:
            self._rollouts[sha256] = [found for found in self.log.rollouts() if found.task_sha256 == sha256]
        rollouts = self._rollouts[sha256]
        seen = {found.candidate_sha256 for found in context.history}
        found = self._new_candidates(context, rollouts, seen)
        fruitless: Counter[str] = Counter()
        while len(found) < count and fruitless.total() < self.patience:
            answered = self._ask(context, max(count - len(found), self.samples))
            rollouts += answered
            self._require_answers(answered, context)
            fresh = self._new_candidates(context, answered, seen)
            found += fresh
            if fresh:
                fruitless.clear()
            else:
                fruitless.update(answer.failure or "a candidate that was judged before" for answer in answered)
        if not found:
            listed = ", ".join(f"{number} times {what}" for what, number in fruitless.most_common())
            raise NothingUsableError(
                f"Wanted a new candidate of {self.model.name} for the task {context.task.id}; {fruitless.total()} answers "
                f"in a row held none ({listed}). Read {self.log.path}; try another model, temperature or token limit."
            )
        return found[:count]

    def _require_answers(self, answered: list[Rollout], context: Context) -> None:
        """Tell of every answer that is of no use; raise where the endpoint fails again and again in the same way."""
        for answer in answered:
            message = f"{answer.failure}: {answer.detail}" if answer.failure is not None else ""
            if message and message != self._warned:
                _LOGGER.warning("%s: no candidate in an answer: %s", self.model.name, message)
            self._warned = message
            code = answer.detail.partition(": ")[0] if answer.failure is AnswerFailure.NO_ANSWER else ""
            self._failures = [*(self._failures if code in self._failures else []), code] if code else []
            if len(self._failures) >= FAILURES_ALIKE:
                advice = ADVICE.get(CompletionFailure(code), "Correct what it names.")
                raise NothingUsableError(
                    f"Wanted a new candidate of {self.model.name} for the task {context.task.id}; {len(self._failures)} "
                    f"answers in a row failed alike: {answer.detail}. {advice}".rstrip()
                )

    def _new_candidates(self, context: Context, rollouts: list[Rollout], seen: set[str]) -> list[Candidate]:
        """Candidates of rollouts, each once; takes note of them in `seen`."""
        found = []
        for rollout in rollouts:
            if rollout.candidate_sha256 is None or rollout.candidate_sha256 in seen:
                continue
            seen.add(rollout.candidate_sha256)
            source = rollout.source(context.task)
            # Another version of the parser may read an old answer otherwise.
            if source is not None:
                parent = rollout.exemplars[-1] if rollout.exemplars else None
                found.append(Candidate(source=source, policy=self.name, techniques=techniques_in(source), parent=parent))
        return found

    def _ask(self, context: Context, count: int) -> list[Rollout]:
        """One prompt, `count` answers, all on disk."""
        step = max((rollout.step for rollout in self._rollouts[context.task.sha256]), default=-1) + 1
        seed = int(sha256_of([context.task.sha256, context.seed, step])[:8], 16) >> 1
        prompt = self._prompt(context, random.Random(seed))
        sampling = replace(self.sampling, seed=seed)
        (completions,) = self.model.sample([prompt.messages], count=count, sampling=sampling)
        origin = Origin(stage="search", model=self.model.name, sampling=sampling)
        answered = []
        for number, completion in enumerate(completions):
            sample = Sample(task=context.task, prompt=prompt, completion=completion, step=step, sample=number)
            sample.parse(origin.form, self.name)
            answered.append(Rollout.of(sample, origin))
        self.log.append(answered)
        return answered

    def _prompt(self, context: Context, rng: random.Random) -> Prompt:
        known = self.database.exemplars(context.task.sha256, device=context.device)
        return contrastive_prompt(
            context.task,
            self.sampler.sample(known, self.exemplars, rng),
            device=context.device,
            hardware=self.hardware,
        )


def policy_for_run(
    model: ChatModel,
    directory: Path,
    *,
    sampler: str = "bucket",
    database: Path | None = None,
    sampling: Sampling | None = None,
    exemplars: int = EXEMPLARS,
    samples: int = 1,
    hardware: str = "",
    patience: int = PATIENCE,
) -> ContrastivePolicy:
    """The policy of a search that keeps everything in its run directory, so that the same directory goes on.

    Writes `rollouts.jsonl`, `transcript.jsonl`, from which paid answers come back after a kill, and `exemplars.sqlite`.

    `directory` is the search's `out`; `database` may name another exemplar database, such as one that searches share. The
    rest is as in `ContrastivePolicy`.

    Raises:
        ConfigError: there is no such sampler.
        ExemplarDatabaseError: the database cannot be used.
    """
    return ContrastivePolicy(
        model=Recorded(model, Transcript(directory / "transcript.jsonl")),
        database=ExemplarDatabase(database or directory / "exemplars.sqlite"),
        sampler=sampler_named(sampler),
        log=RolloutLog(directory),
        sampling=sampling or Sampling(),
        exemplars=exemplars,
        samples=samples,
        hardware=hardware,
        patience=patience,
    )
