"""Calls the reward service: asks, waits, and asks again when the machine is at fault. Needs httpx.

Asking again is safe, since equal requests are one evaluation. Neither torch nor FastAPI is needed here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import Any

from pydantic import ValidationError

from kernelwright.config import require_http_url
from kernelwright.errors import ConfigError, InfrastructureError, ShuttingDownError, TaskError, UsageError
from kernelwright.execution.service.protocol import (
    TOKEN_VARIABLE,
    ErrorBody,
    ErrorCode,
    EvaluationReply,
    EvaluationRequest,
    State,
)

try:
    import httpx
except ImportError as error:
    raise ConfigError(
        f"Wanted httpx, to call the reward service; {error}. Install it with `pip install 'kernelwright[serve]'`."
    ) from error

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""Wait of one request for its evaluation; the next one waits on."""

SLACK_S = 30.0
"""Time for an answer to arrive, beyond the time that was asked for."""

FAILURES_MAX = 8
"""Failures in a row, of the network or of the service's machine, before giving up. Our choice."""

BACKOFF_S = 1.0
"""Pause before the first try after a failure; doubles with each, up to `BACKOFF_LIMIT_S`."""

BACKOFF_LIMIT_S = 60.0


class ServiceClient:
    """Calls the service, from plain code (`evaluate`) or from coroutines (`evaluate_async`).

    Args:
        url: Address, such as `http://127.0.0.1:8730`.
        token: The service's token; the variable KERNELWRIGHT_TOKEN when None.
        backoff_s: Pause before the first try after a failure.
        transport: Asynchronous transport of httpx, for tests.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(
        self, url: str, token: str | None = None, *, backoff_s: float = BACKOFF_S, transport: Any | None = None
    ) -> None:
        require_http_url(url, "http://127.0.0.1:8730", "the reward service")
        token = token or os.environ.get(TOKEN_VARIABLE)
        self._options: dict[str, Any] = {
            "base_url": url.rstrip("/").removesuffix("/v1"),
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "timeout": httpx.Timeout(SLACK_S, read=WAIT_S + SLACK_S),
            "limits": httpx.Limits(max_connections=None),
            "transport": transport,
            "verify": httpx.create_ssl_context(),  # once: to load the certificates takes longer than a request
        }
        self._backoff_s = backoff_s

    def evaluate(self, request: EvaluationRequest) -> EvaluationReply:
        """`evaluate_async` for plain code; coroutines and notebooks await that one instead."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.evaluate_async(request))
        raise UsageError(
            "Wanted `evaluate` in plain code; found an event loop at work, as in a coroutine or a notebook. Write "
            "`await client.evaluate_async(request)` there."
        )

    async def evaluate_async(self, request: EvaluationRequest) -> EvaluationReply:
        """Have a candidate judged, and wait for it. Any number may wait at once.

        Raises:
            TaskError: the task itself does not work.
            UsageError: the service refuses the request; to repeat it would not help.
            ShuttingDownError: the service keeps saying that it ends.
            InfrastructureError: the service cannot be reached, or its machine fails again and again.
        """
        # A client of its own: one that is kept belongs to the event loop in which it was first used.
        async with httpx.AsyncClient(**self._options) as client:
            return await self._evaluate(client, request)

    async def _evaluate(self, client: httpx.AsyncClient, request: EvaluationRequest) -> EvaluationReply:
        wait = {"wait_s": f"{WAIT_S:g}"}
        follow = wait if request.reward is None else wait | {"reward": request.reward}
        body, kind = request.model_dump_json(exclude_defaults=True), {"Content-Type": "application/json"}
        pending: str | None = None
        failures, fault = 0, InfrastructureError()
        while True:
            try:
                if pending is None:
                    answer = await client.post("/v1/evaluations", params=wait, content=body, headers=kind)
                else:
                    answer = await client.get(f"/v1/evaluations/{pending}", params=follow)
            except httpx.RequestError as error:
                failures, fault = failures + 1, InfrastructureError(f"{type(error).__name__}: {error}")
            else:
                if answer.status_code in (200, 202):
                    reply = _reply(answer)
                    if reply.state is State.DONE:
                        return reply
                    failures = failures if pending is None else 0
                    pending = reply.id
                    continue
                if answer.status_code == 429:
                    # A full queue is no failure: it means that others are served.
                    failures = 0
                    await asyncio.sleep(_retry_after_s(answer) * random.uniform(1.0, 1.5))
                    continue
                # 404: the service was restarted before it had ended this one.
                if answer.status_code < 500 and (answer.status_code != 404 or pending is None):
                    raise _refusal(answer)
                failures, fault = failures + 1, _failure(answer)
            if failures >= FAILURES_MAX:
                raise type(fault)(
                    f"Wanted an evaluation from the reward service at {self._options['base_url']}; {failures} failures in a "
                    f"row, the last one {fault}. Is it running, and does its log say more?"
                )
            pending = None  # what failed is not remembered, so it has to be asked for anew
            # Spread, so that all who wait for one service do not come back at once.
            wait_s = min(BACKOFF_LIMIT_S, self._backoff_s * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
            log.warning("%s: %s; asking again in %.1f s", self._options["base_url"], fault, wait_s)
            await asyncio.sleep(wait_s)


def _reply(answer: httpx.Response) -> EvaluationReply:
    try:
        return EvaluationReply.model_validate_json(answer.content)
    except ValidationError as error:
        raise UsageError(
            f"Wanted an answer of the reward service; found something else ({error.error_count()} problems). Is it the same "
            "version as this client, and is the address right?"
        ) from error


def _refusal(answer: httpx.Response) -> UsageError:
    body = _problem(answer)
    if body is None:
        return UsageError(
            f"Wanted an answer of the reward service; found status {answer.status_code}: {answer.text[:200]!r}. Is the "
            "address the service's own?"
        )
    if body.error is ErrorCode.TASK_ERROR:
        return TaskError(body.found)
    if body.found.startswith("Wanted "):  # a whole message
        return UsageError(body.found)
    return UsageError(f"Wanted {body.wanted}; the reward service found {body.found} ({body.error}). {body.do}")


def _failure(answer: httpx.Response) -> InfrastructureError:
    body = _problem(answer)
    if body is None:
        return InfrastructureError(f"status {answer.status_code}: {answer.text[:200]!r}")
    kind = ShuttingDownError if body.error is ErrorCode.SHUTTING_DOWN else InfrastructureError
    return kind(f"status {answer.status_code}, {body.error}: {body.found}")


def _problem(answer: httpx.Response) -> ErrorBody | None:
    """Error that the service reports; None where another program answered."""
    try:
        return ErrorBody.model_validate_json(answer.content)
    except ValidationError:
        return None


def _retry_after_s(answer: httpx.Response) -> float:
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else BACKOFF_S


__all__ = ["ErrorCode", "EvaluationReply", "EvaluationRequest", "ServiceClient"]
