"""Records every prompt and answer of a model as JSON lines, and answers again out of such a transcript.

A line is on disk before the next answer is taken, so a run killed at any moment has lost no answer it had paid for, and
the same run started again gets those answers from the file. `docs/record-format.md` describes the fields.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from kernelwright.errors import PolicyError, UsageError
from kernelwright.models.chat import ChatModel, Completion, Message, ModelAnswer, Sampling
from kernelwright.records import append_lines, encodable, sha256_of


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(_Line):
    """One message of a prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


class PromptLine(_Line):
    """A conversation, written once in a file however often it is asked."""

    kind: Literal["prompt"] = "prompt"
    """The kind of line: `prompt`."""
    id: str
    """Hex SHA-256 of the messages' canonical JSON."""
    messages: tuple[Turn, ...]
    """Role and content of each message."""


class AnswerLine(_Line):
    """One answer to a conversation."""

    kind: Literal["answer"] = "answer"
    """The kind of line: `answer`."""
    time_utc: str
    """Time of completion, ISO 8601."""
    model: str
    """Name in records, such as `local:qwen2.5-coder-0.5b`."""
    prompt: str
    """`id` of the prompt line."""
    number: int
    """Number among the answers asked for in one call."""
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    text: str
    reasoning: str = ""
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    failure: str | None = None
    cost: float | None = None
    currency: str = ""
    bears_prompt: bool = True

    @field_validator("text", "reasoning", mode="before")
    @classmethod
    def _encodable(cls, text: str) -> str:
        return encodable(text)

    @property
    def completion(self) -> Completion:
        """The answer as the model gave it."""
        return Completion(**{item.name: getattr(self, item.name) for item in fields(Completion)})

    @property
    def sampling(self) -> Sampling:
        """Parameters it was drawn with."""
        return Sampling(**{item.name: getattr(self, item.name) for item in fields(Sampling)})


_LINE: TypeAdapter[PromptLine | AnswerLine] = TypeAdapter(Annotated[PromptLine | AnswerLine, Field(discriminator="kind")])


def prompt_id(prompt: Sequence[Message]) -> str:
    """Id of a conversation in a transcript."""
    return sha256_of([asdict(message) for message in prompt])


class Transcript:
    """A transcript file, made when the first answer arrives. One process writes it at a time; its threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._prompts = {line.id for line in self._lines() if isinstance(line, PromptLine)}

    def append(self, model: str, prompt: Sequence[Message], sampling: Sampling, answer: ModelAnswer) -> None:
        """Write one answer, after its prompt if the file lacks it, and wait until both are on disk."""
        identity = prompt_id(prompt)
        record = AnswerLine(
            time_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
            model=model,
            prompt=identity,
            number=answer.number,
            reasoning=answer.reasoning,
            cost=answer.cost,
            currency=answer.currency,
            bears_prompt=answer.bears_prompt,
            **asdict(sampling),
            **asdict(answer.completion),
        )
        with self._lock:
            lines: list[_Line] = [record]
            if identity not in self._prompts:
                turns = tuple(Turn(role=message.role, content=message.content) for message in prompt)
                lines.insert(0, PromptLine(id=identity, messages=turns))
            try:
                append_lines(self.path, (line.model_dump_json() for line in lines))
            except OSError as error:
                raise UsageError(
                    f"Wanted to write a transcript to {self.path}; {error.strerror}. Choose another place."
                ) from error
            self._prompts.add(identity)

    def answers(self) -> Iterator[AnswerLine]:
        """Every whole answer, in order of writing."""
        for line in self._lines():
            if isinstance(line, AnswerLine):
                yield line

    def _lines(self) -> Iterator[PromptLine | AnswerLine]:
        if not self.path.exists():
            return
        with self.path.open("r", encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    yield _LINE.validate_json(text)
                except ValidationError:
                    continue


class Recorded(ChatModel):
    """A model whose every answer is recorded.

    Answers that the transcript already holds, of the same model to the same prompt with the same sampling, are given
    again without asking, each once: a run that was killed goes on without paying twice. Failed ones are asked anew.
    Without a model the transcript is only replayed, of the model `name` where one is given.
    """

    def __init__(self, model: ChatModel | None, transcript: Transcript, *, name: str = "") -> None:
        self.model = model
        self.transcript = transcript
        self.name = model.name if model is not None else name
        self._known: defaultdict[tuple[str, Sampling], list[ModelAnswer]] = defaultdict(list)
        for line in transcript.answers():
            if line.failure is None and (line.model == self.name or not self.name):
                answer = ModelAnswer(prompt=0, number=0, completion=line.completion, reasoning=line.reasoning)
                self._known[line.prompt, line.sampling].append(answer)

    def answers(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> Iterator[ModelAnswer]:
        """Implements `ChatModel.answers`: first those on file, then new ones, each recorded before it is handed over."""
        missing: defaultdict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            known = self._known[prompt_id(prompt), sampling]
            used, known[:] = known[:count], known[count:]
            for number, answer in enumerate(used):
                yield replace(answer, prompt=index, number=number)
            if len(used) < count:
                missing[count - len(used)].append(index)
        for lacking, indices in missing.items():
            yield from self._asked(prompts, indices, count - lacking, lacking, sampling)

    def _asked(
        self, prompts: Sequence[Sequence[Message]], indices: list[int], have: int, lacking: int, sampling: Sampling
    ) -> Iterator[ModelAnswer]:
        """Ask for the answers number `have` and on, of the prompts at these indices."""
        if self.model is None:
            raise PolicyError(
                f"Wanted {lacking} more answers to each of {len(indices)} prompts; the transcript {self.transcript.path} "
                "has no more of this model, prompt and sampling. Give a model that can be asked."
            )
        # With the same seed a model would give the answers on file once more.
        seed = int(sha256_of([sampling.seed, have])[:7], 16) if have else sampling.seed
        asked = [prompts[index] for index in indices]
        for answer in self.model.answers(asked, count=lacking, sampling=replace(sampling, seed=seed)):
            placed = replace(answer, prompt=indices[answer.prompt], number=have + answer.number)
            self.transcript.append(self.name, prompts[placed.prompt], sampling, placed)
            yield placed
