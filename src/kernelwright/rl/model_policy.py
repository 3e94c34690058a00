"""A language model as a policy: contrastive prompts in, parsed candidates out.

With a frozen model this is CUDA-L1's fixed-parameter search: the evolutionary loop without a gradient.
"""

from __future__ import annotations

from kernelwright.errors import PolicyError
from kernelwright.policies import Context
from kernelwright.policies.chat import ChatModel, Sampling
from kernelwright.records import Candidate
from kernelwright.rl.exemplar_samplers import ExemplarSampler
from kernelwright.rl.exemplars import ExemplarDatabase
from kernelwright.rl.prompts import PROMPT_LIMIT_CHARACTERS
from kernelwright.rl.rollouts import RolloutLog


class NothingUsableError(PolicyError):
    """A model answered many times and none of it was a new candidate."""


class ContrastivePolicy:
    """Proposes what a model writes when it is shown earlier candidates and their scores.

    Args:
        model: Who answers.
        database: Where exemplars come from; the search's history is added to it.
        sampler: Which exemplars a prompt shows.
        rollouts: Where answers are kept. Those that were not judged before a kill are proposed first, not paid again.
        sampling: How answers are drawn.
        exemplar_count: At most so many in a prompt; 2 in CUDA-L1.
        hardware: The device's name for people.
        patience: Answers in a row without a new candidate after which the search ends.
        prompt_limit_characters: Of a prompt.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        database: ExemplarDatabase,
        sampler: ExemplarSampler,
        rollouts: RolloutLog,
        sampling: Sampling | None = None,
        exemplar_count: int = 2,
        hardware: str = "",
        patience: int = 16,
        prompt_limit_characters: int = PROMPT_LIMIT_CHARACTERS,
    ) -> None:
        self.name = f"{model.name}+{sampler.name}"

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """At most `count` candidates that are not in the history."""
        raise NotImplementedError
