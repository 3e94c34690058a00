"""Defines examples to learn from: a prompt and an answer that the judge accepted, with its origin."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kernelwright.contrastive.prompts import AnswerForm, Prompt, answer_code
from kernelwright.files import replace_file
from kernelwright.models.chat import Message
from kernelwright.records import Evaluation, Task, sha256_of
from kernelwright.records.rewards import conservative


class Example(BaseModel):
    """One line of `examples.jsonl`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    task_sha256: str
    teacher: str
    """Author: a policy, or the model itself in the self-supervised stage."""
    techniques: tuple[str, ...]
    candidate_sha256: str
    evaluation_sha256: str
    """Hash of the evaluation's line, which says why it counts as correct."""
    speedup: float | None
    """None where it was not timed; correctness is the only filter."""
    prompt: tuple[Message, ...]
    answer: str


def example_of(task: Task, prompt: Prompt, evaluation: Evaluation, form: AnswerForm) -> Example:
    """The example that an accepted evaluation gives."""
    return Example(
        task=task.id,
        task_sha256=task.sha256,
        teacher=evaluation.policy,
        techniques=evaluation.techniques,
        candidate_sha256=evaluation.candidate_sha256,
        evaluation_sha256=sha256_of(evaluation.model_dump_json()),
        speedup=evaluation.speedup,
        prompt=prompt.messages,
        answer=answer_text(task, prompt, evaluation, form),
    )


def is_learnt(evaluation: Evaluation, slowest: float | None, fastest: float | None = None) -> bool:
    """Whether an evaluation is accepted and its speedup, where it was timed, within these bounds; None sets none."""
    speedup = evaluation.speedup
    return evaluation.accepted and (speedup is None or (slowest or 0.0) <= speedup <= (fastest or math.inf))


def answer_text(task: Task, prompt: Prompt, evaluation: Evaluation, form: AnswerForm) -> str:
    """An answer in the three sections that prompts ask for, as short as they can be and true."""
    if prompt.shown:
        best = prompt.shown[-1]
        analysis = f"Implementation {len(prompt.shown)} is the fastest so far (score {conservative(best.score or 0.0):.2f})."
    else:
        analysis = f"The reference: {_headline(task)}."
    done = [technique.replace("-", " ") for technique in evaluation.techniques]
    design = f"{', '.join(done).capitalize()}." if done else "The same result in fewer steps."
    code = answer_code(task, evaluation.source, form).strip()
    return (
        f"## Performance Analysis\n{analysis}\n\n## Algorithm Design\n{design}\n\n"
        f"## Code Implementation\n```python\n{code}\n```"
    )


def _headline(task: Task) -> str:
    """The first line of the task's docstring, without the class of task and the last full stop."""
    line = task.source.lstrip().removeprefix('"""').splitlines()[0].partition('"""')[0]
    said = line.partition(": ")[2] if ": " in line and len(line.partition(": ")[0]) < 20 else ""
    return said.removeprefix("generated; ").strip().rstrip(".") or "as given"


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Replace the file in one step."""
    replace_file(path, "".join(example.model_dump_json() + "\n" for example in examples).encode("utf-8"))


def read_examples(path: Path) -> list[Example]:
    """The examples of a file, in order; none when there is no file. Torn lines are skipped."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(Example.model_validate_json(line))
        except ValidationError:
            continue
    return found
