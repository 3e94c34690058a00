"""Runs the reward service: reads its token, listens, and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.execution.service.protocol import TOKEN_VARIABLE
from kernelwright.execution.service.queue import EvaluationQueue

TOKEN_CHARACTERS_MIN = 16
"""Fewest characters of a token: shorter ones can be guessed."""

_GRACE_S = 30
"""Time for answers to leave after the last evaluation, seconds."""


def take_token(file: Path | None) -> str | None:
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
