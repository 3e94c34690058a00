"""Rewards verl's rollouts by asking `kernelwright serve`.

verl calls `compute_score` for each rollout, many at a time; each call waits without blocking the others. The service's
queue is the limit on how many are judged at once, and equal answers of a group are judged once.

A rollout's failure is a reward: the floor. A failure of the machine is none: the request is repeated, and the error finally
raised, because a policy must not learn from a broken judge.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

from kernelwright.contrastive.answers import parse_answer
from kernelwright.errors import ConfigError
from kernelwright.execution.service.client import EvaluationRequest, ServiceClient
from kernelwright.records.rewards import reward_named

URL_VARIABLE = "KERNELWRIGHT_URL"


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    reward: str = "lower-bound",
    **_: Any,
) -> dict[str, float]:
    """The reward of one rollout.

    Args:
        data_source: As in the data set; not needed.
        solution_str: The model's answer.
        ground_truth: The task as JSON: the id of a built-in one, or `{"id": ..., "source": ...}`.
        extra_info: verl's; not needed.
        reward: Name of the reward; set it with `reward.custom_reward_function.reward_kwargs`.

    Returns:
        `score`, which verl trains on, and numbers for its metrics.
    """
    floor = {"score": reward_named(reward)(None), "answered": 0.0, "accepted": 0.0, "speedup_low": 0.0}
    answer = parse_answer(solution_str)
    if answer.source is None:
        return floor
    try:
        request = EvaluationRequest(task=json.loads(ground_truth), candidate=answer.source, policy="verl", reward=reward)
    except ConfigError:
        return floor  # longer than any kernel
    reply = await _client(os.environ.get(URL_VARIABLE, "http://127.0.0.1:8730")).evaluate_async(request)
    assert reply.evaluation is not None
    assert reply.reward is not None
    return {
        "score": reply.reward.value,
        "answered": 1.0,
        "accepted": float(reply.evaluation.accepted),
        "speedup_low": reply.evaluation.speedup_low or 0.0,
    }


@functools.cache
def _client(url: str) -> ServiceClient:
    return ServiceClient(url)
