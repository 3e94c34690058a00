"""Calls the reward service: asks, waits, and asks again when the machine is at fault. Needs httpx.

Asking again is safe, since equal requests are one evaluation. Neither torch nor FastAPI is needed here.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from kernelwright.errors import ConfigError, InfrastructureError, UsageError
from kernelwright.pools.service.protocol import ErrorBody, ErrorCode, EvaluationReply, EvaluationRequest, State

try:
    import httpx
except ImportError as error:
    raise ConfigError(
        f"Wanted httpx, to call the reward service; {error}. Install it with `pip install 'kernelwright[serve]'`."
    ) from error

TOKEN_VARIABLE = "KERNELWRIGHT_TOKEN"

WAIT_S = 60.0
"""How long one request waits for its evaluation before the next one does."""

SLACK_S = 30.0
"""For an answer to arrive, beyond the time that was asked for."""

FAILURES_MAX = 8
"""Failures in a row, of the network or of the service's machine, before giving up. Our choice."""

BACKOFF_S = 1.0
"""Before the first try after a failure; doubles with each, up to `BACKOFF_LIMIT_S`."""

BACKOFF_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Ask:
    method: str
    path: str
    query: dict[str, str]
    body: str | None = None


@dataclass(frozen=True, slots=True)
class _Pause:
    seconds: float


_Dialogue = Generator[_Ask | _Pause, httpx.Response | httpx.TransportError | None, EvaluationReply]


class ServiceClient:
    """Calls the service, from plain code (`evaluate`) or from coroutines (`evaluate_async`).

    Args:
        url: Such as `http://127.0.0.1:8730`.
        token: What the service wants; the variable KERNELWRIGHT_TOKEN when None.
        backoff_s: Before the first try after a failure.
        transport: Of httpx, for tests; an asynchronous one for `evaluate_async`.
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
        self._client: httpx.Client | None = None

    def evaluate(self, request: EvaluationRequest) -> EvaluationReply:
        """Have a candidate judged, and wait for it.

        Returns:
            The answer, with its evaluation and, where one was asked for, its reward.

        Raises:
            UsageError: the service refuses the request; to repeat it would not help.
            InfrastructureError: the service cannot be reached, or its machine fails again and again.
        """
        if self._client is None:
            self._client = httpx.Client(**self._options)
        dialogue = _dialogue(request, self._backoff_s)
        step = next(dialogue)
        while True:
            answer: httpx.Response | httpx.TransportError | None = None
            if isinstance(step, _Pause):
                time.sleep(step.seconds)
            else:
                try:
                    answer = self._client.request(**_arguments(step))
                except httpx.TransportError as error:
                    answer = error
            try:
                step = dialogue.send(answer)
            except StopIteration as end:
                reply: EvaluationReply = end.value
                return reply

    async def evaluate_async(self, request: EvaluationRequest) -> EvaluationReply:
        """As `evaluate`, without blocking the event loop. Any number may wait at once."""
        # A client of its own: one that is kept belongs to the event loop in which it was first used.
        async with httpx.AsyncClient(**self._options) as client:
            dialogue = _dialogue(request, self._backoff_s)
            step = next(dialogue)
            while True:
                answer: httpx.Response | httpx.TransportError | None = None
                if isinstance(step, _Pause):
                    await asyncio.sleep(step.seconds)
                else:
                    try:
                        answer = await client.request(**_arguments(step))
                    except httpx.TransportError as error:
                        answer = error
                try:
                    step = dialogue.send(answer)
                except StopIteration as end:
                    reply: EvaluationReply = end.value
                    return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _arguments(ask: _Ask) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} if ask.body is not None else {}
    return {"method": ask.method, "url": ask.path, "params": ask.query, "content": ask.body, "headers": headers}


def _dialogue(request: EvaluationRequest, backoff_s: float) -> _Dialogue:
    """What to ask and how long to pause until there is an answer; free of how asking and pausing are done."""
    wait = {"wait_s": f"{WAIT_S:g}"}
    post = _Ask("POST", "/v1/evaluations", wait, request.model_dump_json(exclude_defaults=True))
    ask = post
    failures = 0
    while True:
        answer = yield ask
        assert answer is not None
        if isinstance(answer, httpx.TransportError):
            failures, found = failures + 1, f"{type(answer).__name__}: {answer}"
        elif answer.status_code in (200, 202):
            reply = _reply(answer)
            if reply.state is State.DONE:
                return reply
            failures = failures if ask is post else 0
            follow = wait | ({"reward": request.reward} if request.reward is not None else {})
            ask = _Ask("GET", f"/v1/evaluations/{reply.id}", follow)
            continue
        elif answer.status_code == 429:
            # A full queue is no failure: it means that others are served.
            failures = 0
            yield _Pause(_retry_after_s(answer) * random.uniform(1.0, 1.5))
            continue
        elif answer.status_code >= 500 or (answer.status_code == 404 and ask is not post):
            # 404: the service was restarted before it had ended this one.
            failures, found = failures + 1, f"status {answer.status_code}: {_found(answer)}"
        else:
            raise UsageError(f"The reward service refuses this request ({answer.status_code}): {_found(answer)}")
        if failures >= FAILURES_MAX:
            raise InfrastructureError(
                f"Wanted an evaluation from the reward service; {failures} failures in a row, the last one {found}. "
                "Is it running, and does its log say more?"
            )
        ask = post  # what failed is not remembered, so it has to be asked for anew
        # Spread, so that all who wait for one service do not come back at once.
        yield _Pause(min(BACKOFF_LIMIT_S, backoff_s * 2 ** (failures - 1)) * random.uniform(0.5, 1.0))


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
