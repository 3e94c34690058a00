"""Records made by hand, and a model that says what it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count as numbers

from kernelwright.contrastive.exemplars import Exemplar
from kernelwright.models.chat import ChatModel, Completion, Message, Sampling
from kernelwright.records import Evaluation, Reason, Task, Verdict, sha256_of


def diagonal(size: int) -> str:
    """A task's text: a product with a diagonal matrix."""
    return f"""import torch


class Model(torch.nn.Module):
    def forward(self, a, b):
        return torch.diag(a) @ b


def get_inputs():
    return [torch.randn({size}), torch.randn({size}, {size})]


def get_init_inputs():
    return []
"""


TASK = Task(id="diagonal", source=diagonal(96))

_NUMBERS = numbers()


def module(expression: str = "a[:, None] * b", note: str = "") -> str:
    """A candidate for TASK."""
    return f'''import torch


class ModelNew(torch.nn.Module):
    """{note}"""

    def forward(self, a, b):
        return {expression}
'''


def answer(source: str, analysis: str = "The product wastes work.", design: str = "Scale rows.") -> str:
    """An answer as the prompt asks for it."""
    return (
        f"## Performance Analysis\n{analysis}\n\n## Algorithm Design\n{design}\n\n"
        f"## Code Implementation\n```python\n{source}```\n"
    )


def accepted(ratio: float = 2.0, source: str | None = None, **changes: object) -> Evaluation:
    text = source if source is not None else module(note=f"number {next(_NUMBERS)}")
    values: dict[str, object] = {
        "task": TASK.id,
        "task_sha256": TASK.sha256,
        "candidate_sha256": sha256_of(text),
        "verdict": Verdict.ACCEPTED,
        "speedup": ratio,
        "speedup_low": ratio * 0.95,
        "speedup_high": ratio * 1.05,
        "noise_floor": 0.01,
        "source": text,
        "policy": "scripted",
        "started": "2026-01-02T03:04:05+00:00",
    }
    return Evaluation.model_validate(values | changes)


def rejected(reason: Reason = Reason.WRONG_OUTPUT, source: str | None = None, **changes: object) -> Evaluation:
    timing = dict.fromkeys(("speedup", "speedup_low", "speedup_high", "noise_floor"))
    return accepted(1.0, source, verdict=Verdict.REJECTED, reason=reason, **(timing | changes))


def exemplar(score: float, name: str, parent: str | None = None, source: str = "") -> Exemplar:
    return Exemplar(
        task=TASK.id,
        task_sha256=TASK.sha256,
        candidate_sha256=name,
        source=source or module(note=name),
        verdict=Verdict.ACCEPTED,
        reason=None,
        score=score,
        improvement=score > 1,
        confirmed=False,
        parent=parent,
        techniques=(),
        policy="scripted",
        device="cpu",
        started="",
    )


class ScriptedModel(ChatModel):
    """Gives the scripted answers one after the other, and remembers what it was asked."""

    name = "scripted"

    def __init__(self, answers: Sequence[str | Completion] | Callable[[int], str]) -> None:
        self._answers = answers
        self.given = 0
        self.asked: list[tuple[Message, ...]] = []
        self.samplings: list[Sampling] = []

    def sample(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> list[list[Completion]]:
        self.samplings.append(sampling)
        answers = []
        for prompt in prompts:
            self.asked.append(tuple(prompt))
            answers.append([self._next() for _ in range(count)])
        return answers

    def _next(self) -> Completion:
        if callable(self._answers):
            said: str | Completion = self._answers(self.given)
        else:
            said = self._answers[self.given] if self.given < len(self._answers) else ""
        self.given += 1
        if isinstance(said, Completion):
            return said
        return Completion(text=said, prompt_tokens=10, completion_tokens=len(said) // 4)
