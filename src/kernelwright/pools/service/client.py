"""Calls the reward service: asks, waits, and asks again when the machine is at fault. Needs httpx.

Asking again is safe, since equal requests are one evaluation. Neither torch nor FastAPI is needed here.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

from pydantic import ValidationError

from kernelwright.errors import ConfigError, InfrastructureError, UsageError
from kernelwright.pools.service.protocol import (
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
    """

    def __init__(
        self, url: str, token: str | None = None, *, backoff_s: float = BACKOFF_S, transport: Any | None = None
    ) -> None:
        token = token or os.environ.get(TOKEN_VARIABLE)
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "timeout": httpx.Timeout(SLACK_S, read=WAIT_S + SLACK_S),
            "limits": httpx.Limits(max_connections=None),
            "transport": transport,
            "verify": httpx.create_ssl_context(),  # once: to load the certificates takes longer than a request
        }
        self._backoff_s = backoff_s

    def evaluate(self, request: EvaluationRequest) -> EvaluationReply:
        """`evaluate_async` for plain code; coroutines await that one instead."""
        return asyncio.run(self.evaluate_async(request))

    async def evaluate_async(self, request: EvaluationRequest) -> EvaluationReply:
        """Have a candidate judged, and wait for it. Any number may wait at once.

        Raises:
            UsageError: the service refuses the request; to repeat it would not help.
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
        failures = 0
        while True:
            try:
                if pending is None:
                    answer = await client.post("/v1/evaluations", params=wait, content=body, headers=kind)
                else:
                    answer = await client.get(f"/v1/evaluations/{pending}", params=follow)
            except httpx.TransportError as error:
                failures, found = failures + 1, f"{type(error).__name__}: {error}"
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
                    raise UsageError(f"The reward service refuses this request ({answer.status_code}): {_found(answer)}")
                failures, found = failures + 1, f"status {answer.status_code}: {_found(answer)}"
            if failures >= FAILURES_MAX:
                raise InfrastructureError(
                    f"Wanted an evaluation from the reward service; {failures} failures in a row, the last one {found}. "
                    "Is it running, and does its log say more?"
                )
            pending = None  # what failed is not remembered, so it has to be asked for anew
            # Spread, so that all who wait for one service do not come back at once.
            await asyncio.sleep(min(BACKOFF_LIMIT_S, self._backoff_s * 2 ** (failures - 1)) * random.uniform(0.5, 1.0))


def _reply(answer: httpx.Response) -> EvaluationReply:
    try:
        return EvaluationReply.model_validate_json(answer.content)
    except ValidationError as error:
        raise UsageError(
            f"Wanted an answer of the reward service; found something else ({error.error_count()} problems). Is it the same "
            "version as this client, and is the address right?"
        ) from error


def _found(answer: httpx.Response) -> str:
    try:
        body = ErrorBody.model_validate_json(answer.content)
    except ValidationError:
        return answer.text[:200]
    return f"{body.error}: wanted {body.wanted}, found {body.found} {body.do}"


def _retry_after_s(answer: httpx.Response) -> float:
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else BACKOFF_S


__all__ = ["ErrorCode", "EvaluationReply", "EvaluationRequest", "ServiceClient"]
