"""Runs the reward service: reads its token, listens, answers requests after checking who calls, and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import pathlib
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernelwright.errors import (
    InfrastructureError,
    InternalError,
    KernelwrightError,
    QueueFullError,
    ShuttingDownError,
    TaskError,
    UsageError,
)
from kernelwright.execution.service.protocol import (
    BODY_LIMIT_BYTES,
    TOKEN_VARIABLE,
    ErrorBody,
    ErrorCode,
    EvaluationReply,
    EvaluationRequest,
    GetQuery,
    Health,
    Metrics,
    PostQuery,
    RewardReply,
    State,
    explained,
)
from kernelwright.execution.service.queue import EvaluationQueue, Outcome, PendingEvaluation
from kernelwright.records.rewards import Reward, reward_named
from kernelwright.version import __version__

HEALTH_PATH = "/v1/health"

_RETRY_SOON_S = 5
"""`Retry-After` of a failure of the machine; our choice."""

_BODY_LEFT_S = 20.0
"""Time in which a client may finish writing a body that is refused; our choice."""

RequestId = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]


class RequestError(InternalError):
    """An answer whose status is 400 or above."""

    def __init__(self, status: int, error: ErrorCode, wanted: str, found: str, do: str, **headers: str) -> None:
        super().__init__(found)
        body = ErrorBody(error=error, wanted=wanted, found=found, do=do).model_dump_json()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = Response(body, status, named, media_type="application/json")


def create_app(queue: EvaluationQueue, token: str | None) -> FastAPI:
    """The application, with which the queue starts and stops.

    Callers must bring the token as `Authorization: Bearer TOKEN`; without one anybody may call, but only by this machine's
    own name.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        queue.start()
        try:
            yield
        finally:
            await queue.stop()

    app = FastAPI(title="Kernelwright", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.post("/v1/evaluations")
    async def post_evaluation(body: EvaluationRequest, query: Annotated[PostQuery, Query()]) -> Response:
        reward = None if body.reward is None else reward_named(body.reward)
        timed = queue.settings.timed if body.settings.timed is None else body.settings.timed
        if reward is not None and reward.needs_time and not timed:
            raise RequestError(
                422,
                ErrorCode.INVALID_REQUEST,
                f"a timed evaluation, which the reward `{reward.name}` is computed from",
                "`timed` to be false",
                "Leave `settings.timed` out, or take the reward `success`.",
            )
        try:
            pending = queue.submit(body)
        except QueueFullError as full:
            raise RequestError(
                429,
                ErrorCode.QUEUE_FULL,
                "a place in the queue",
                f"{full.limit} evaluations that wait already",
                f"Ask again in {full.retry_after_s} s.",
                retry_after=str(full.retry_after_s),
            ) from full
        reused = pending.done.is_set()
        return _answer(queue, pending.id, await _waited(pending, query.wait_s), reward, reused)

    @app.get("/v1/evaluations/{request}")
    async def get_evaluation(request: RequestId, query: Annotated[GetQuery, Query()]) -> Response:
        function = None if query.reward is None else reward_named(query.reward)
        found = queue.find(request)
        if found is None:
            raise RequestError(
                404,
                ErrorCode.NOT_FOUND,
                f"the evaluation {request}",
                "none of this id; one that had not ended is forgotten at a restart",
                "Post the request again: it has the same id.",
            )
        if isinstance(found, PendingEvaluation):
            return _answer(queue, request, await _waited(found, query.wait_s), function, reused=False)
        return _answer(queue, request, found, function, reused=True)

    @app.get(HEALTH_PATH)
    async def get_health(response: Response) -> Health:
        response.status_code = 503 if queue.draining else 200
        return Health(status="shutting-down" if queue.draining else "ok", version=__version__)

    @app.get("/v1/metrics")
    async def get_metrics() -> Metrics:
        return queue.metrics()

    for kind in (KernelwrightError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(_RequestGuard, token=token)
    return app


async def _waited(pending: PendingEvaluation, wait_s: float) -> Outcome | State:
    """The outcome of an evaluation, or its state where there is none in time."""
    if wait_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pending.done.wait(), wait_s)
    return pending.state if pending.outcome is None else pending.outcome


def _answer(queue: EvaluationQueue, request: str, found: Outcome | State, reward: Reward | None, reused: bool) -> Response:
    if isinstance(found, KernelwrightError):
        return _problem(found).response
    headers = {"Location": f"/v1/evaluations/{request}"}
    if isinstance(found, State):
        headers["Retry-After"] = str(queue.retry_after_s())
        reply = EvaluationReply(id=request, state=found)
    else:
        value = None if reward is None else RewardReply(name=reward.name, value=reward(found))
        reply = EvaluationReply(id=request, state=State.DONE, reused=reused, evaluation=found, reward=value)
    status = 200 if reply.state is State.DONE else 202
    return Response(reply.model_dump_json(), status, headers, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, KernelwrightError):
        problem = _problem(error)
    elif isinstance(error, RequestValidationError):
        problem = _invalid(request, error)
    elif isinstance(error, HTTPException):
        problem = _refused(error)
    else:
        found = f"a fault of the service: {type(error).__name__}"
        problem = RequestError(500, ErrorCode.FAULT, "an answer", found, "See its log.")
    return problem.response


def _problem(error: KernelwrightError) -> RequestError:
    if isinstance(error, RequestError):
        return error
    found = str(error)
    if isinstance(error, TaskError):
        return RequestError(422, ErrorCode.TASK_ERROR, "a task that works", found, "Correct the task.")
    if isinstance(error, UsageError):
        do = "Correct the request; docs/rewards.md describes its fields."
        return RequestError(422, ErrorCode.INVALID_REQUEST, "a request that can be answered", found, do)
    code = ErrorCode.SHUTTING_DOWN if isinstance(error, ShuttingDownError) else ErrorCode.INFRASTRUCTURE
    do = "Ask again: nothing is remembered of this failure."
    return RequestError(503, code, "an evaluation", found, do, retry_after=str(_RETRY_SOON_S))


def _invalid(request: Request, error: RequestValidationError) -> RequestError:
    problem = error.errors()[0]
    in_query = problem["loc"][0] == "query"
    model = EvaluationRequest if not in_query else PostQuery if request.method == "POST" else GetQuery
    found = explained(error.errors(), model)
    if problem["type"] == "json_invalid":
        return RequestError(400, ErrorCode.INVALID_JSON, "a JSON object", found, "Send JSON, encoded in UTF-8.")
    wanted, do = "a request of known fields, each in its range", "Correct the field; docs/rewards.md lists them."
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if problem["loc"] == ("body",) and not kind.endswith("json"):
        # What a page in a browser may send unasked is never read as JSON.
        wanted, found = "a body that says it is JSON", f"the content type {kind}" if kind else "no content type"
        do = "Send the header `Content-Type: application/json`."
    return RequestError(422, ErrorCode.INVALID_REQUEST, wanted, found, do)


def _refused(error: HTTPException) -> RequestError:
    if error.status_code == 413:
        return _too_large()
    codes = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.METHOD_NOT_ALLOWED, 400: ErrorCode.INVALID_JSON}
    code = codes.get(error.status_code, ErrorCode.INVALID_REQUEST)
    do = "The routes are /v1/evaluations, /v1/evaluations/ID, /v1/health and /v1/metrics."
    return RequestError(error.status_code, code, "a request that this service answers", str(error.detail), do)


class _RequestGuard:
    """Refuses callers without the token, foreign host names and bodies that are too large."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        problem = self._refusal(scope["path"], headers)
        if problem is not None:
            # Who asks first, as curl does for a large body, need not send it.
            if b"expect" not in headers:
                await _read_to_the_end(receive)
            await problem.response(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > BODY_LIMIT_BYTES:
                if message.get("more_body"):
                    await _read_to_the_end(receive)
                raise HTTPException(413)
            return message

        await self._app(scope, counted, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> RequestError | None:
        if self._token is None and not _is_local(headers.get(b"host", b"")):
            # A page in a browser on this machine can reach us under a name of its own, and must not.
            return RequestError(
                421,
                ErrorCode.WRONG_HOST,
                "a request to this machine by the name localhost or its loopback address",
                "another Host",
                "Start the service with a token to use other names.",
            )
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        known = scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token or b"")
        if self._token is not None and path != HEALTH_PATH and not known:
            return RequestError(
                401,
                ErrorCode.UNAUTHORIZED,
                "the service's token",
                "another one" if given else "none",
                "Send the header `Authorization: Bearer TOKEN`.",
                www_authenticate="Bearer",
            )
        length = headers.get(b"content-length", b"0")
        return _too_large() if not length.isdigit() or int(length) > BODY_LIMIT_BYTES else None


async def _read_to_the_end(receive: Receive) -> None:
    """Drop the rest of a body.

    A client that writes all of it before it reads would else find its connection reset, and never the answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BODY_LEFT_S):
            while (await receive()).get("more_body"):
                pass


def _too_large() -> RequestError:
    return RequestError(
        413,
        ErrorCode.TOO_LARGE,
        f"a body of at most {BODY_LIMIT_BYTES} bytes",
        "a larger one",
        "Send less: a task and a candidate are a few kilobytes.",
        connection="close",
    )


def _is_local(host: bytes) -> bool:
    name = host.decode("latin-1")
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


TOKEN_CHARACTERS_MIN = 16
"""Fewest characters of a token: shorter ones can be guessed."""

_GRACE_S = 30
"""Time for answers to leave after the last evaluation, seconds."""


def take_token(file: pathlib.Path | None) -> str | None:
    """The token, from a file or else from the environment, out of which it is taken: no other process needs it there.

    Raises:
        UsageError: the file cannot be read or others can read it, or the token is too short or not printable ASCII.
    """
    token = os.environ.pop(TOKEN_VARIABLE, None)
    where = f"the variable {TOKEN_VARIABLE}"
    if file is not None:
        where = str(file)
        try:
            if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
                raise UsageError(f"Wanted a token that only you can read; others may read {file}. Run `chmod 600 {file}`.")
            token = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            found = (error.strerror if isinstance(error, OSError) else None) or error
            raise UsageError(f"Wanted a token in {file}; {found}. Write one with `openssl rand -hex 32`.") from error
    if token is None:
        return None
    if len(token) < TOKEN_CHARACTERS_MIN or not all("!" <= character <= "~" for character in token):
        raise UsageError(
            f"Wanted a token of at least {TOKEN_CHARACTERS_MIN} printable ASCII characters without spaces in {where}; found "
            f"{len(token)} characters. Make one with `openssl rand -hex 32`."
        )
    return token


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """A socket that listens there.

    Raises:
        UsageError: the host is unknown, or others can reach it and there is no token.
        InfrastructureError: the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"Wanted an address to listen on; {host}: {error.strerror}. Give --host another one.") from error
    if token is None and not ipaddress.ip_address(str(address[0])).is_loopback:
        raise UsageError(
            f"Wanted a token, since others can reach {host} and whoever calls this service runs code here; found none. "
            f"Set {TOKEN_VARIABLE} or give --token-file."
        )
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise InfrastructureError(
            f"Wanted to listen on {host} port {port}; {error.strerror}. Give --port another one, or 0 for any."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Address for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, queue: EvaluationQueue, listener: socket.socket, drain_s: float, on_ready: Callable[[], None]) -> int:
    """Serve until SIGINT or SIGTERM, then shut down in order; a second one ends at once what still runs.

    `drain_s` is the queue's; `on_ready` is called once requests are answered. Returns the number of the signal.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(drain_s) + _GRACE_S,
    )
    return asyncio.run(_Server(config, queue, on_ready).serve_until_signal(listener))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, queue: EvaluationQueue, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._queue, self._on_ready = queue, on_ready
        self._received: list[int] = []

    async def serve_until_signal(self, listener: socket.socket) -> int:
        """Serve; returns the number of the signal that ended it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take_signal, number)
        await self.serve(sockets=[listener])
        if not self._received:
            raise InfrastructureError("Wanted to serve; the server ended by itself. Its log says why.")
        return self._received[0]

    def _take_signal(self, number: int) -> None:
        self._received.append(number)
        if len(self._received) == 1:
            # First, so that whoever waits for what will not begin is told, and uvicorn need not wait for them.
            self._queue.drain()
            self.should_exit = True
        else:
            self._queue.hurry()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again, and end the process before its judges."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()
