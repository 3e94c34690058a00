"""Sends length-prefixed JSON over a socket pair: the only messages between a worker and its parent.

A worker's messages are parsed as JSON of bounded size and never unpickled. They carry no result: outputs are
read from shared memory and compared, and latencies are believed only as far as the parent's own clock agrees.
"""

from __future__ import annotations

import array
import json
import select
import socket
import struct
import time
from typing import Any

from kernelwright.errors import InternalError

MAX_MESSAGE_BYTES = 16 << 20


class ChannelClosedError(InternalError):
    """The other side is gone."""


class ChannelTimeoutError(InternalError):
    """Nothing complete arrived in time."""


class ChannelGarbageError(InternalError):
    """The bytes that arrived are not a message."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; raises ChannelClosedError."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message made by `encode`, so that the encoding costs nothing inside a timed window."""
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive_encoded(self, deadline: float | None = None) -> bytes:
        """The body of the next message, undecoded, until a `time.monotonic()` deadline; None waits for ever.

        Raises:
            ChannelClosedError, ChannelTimeoutError, ChannelGarbageError: as their names say.
        """
        (length,) = struct.unpack("=I", self._read(4, deadline))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelGarbageError(f"a message of {length} bytes was announced; the limit is {MAX_MESSAGE_BYTES}")
        return self._read(length, deadline)

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        """The next message, decoded. Raises as `receive_encoded`."""
        return decode(self.receive_encoded(deadline))

    def watch(self, limit_s: float) -> None:
        """Wait until something arrives, or for so long, without giving the processor's core away."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and not self.pending():
            pass

    def _read(self, length: int, deadline: float | None) -> bytes:
        chunks = []
        while length:
            if deadline is not None:
                wait = deadline - time.monotonic()
                if wait <= 0 or not select.select([self.socket], [], [], wait)[0]:
                    raise ChannelTimeoutError
            try:
                chunk = self.socket.recv(min(length, 1 << 20))
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not chunk:
                raise ChannelClosedError("end of stream")
            chunks.append(chunk)
            length -= len(chunk)
        return b"".join(chunks)

    def send_files(self, files: list[int]) -> None:
        """Send file handles, of which the other side gets duplicates; raises ChannelClosedError."""
        if not files:
            return
        try:
            self.socket.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive_files(self, count: int) -> list[int]:
        """The file handles of the other side's `send_files`, of which there are `count`; raises ChannelClosedError."""
        if not count:
            return []
        files = array.array("i")
        try:
            _, ancillary, _, _ = self.socket.recvmsg(1, socket.CMSG_SPACE(files.itemsize * count))
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not ancillary:
            raise ChannelClosedError("end of stream")
        files.frombytes(ancillary[0][2][: files.itemsize * count])
        return list(files)

    def pending(self, wait_s: float = 0.0) -> bool:
        """True if a message lies unread, or begins within that time; between requests there should be none."""
        return bool(select.select([self.socket], [], [], wait_s)[0])

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def encode(message: dict[str, Any]) -> bytes:
    """A message as it goes over the wire."""
    body = json.dumps(message).encode()
    return struct.pack("=I", len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """A message from its body; raises ChannelGarbageError where that is not a JSON object."""
    try:
        # Text with lone surrogates parses, and cannot be written to any file.
        message = json.loads(json.dumps(json.loads(body), ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ChannelGarbageError("not JSON") from error
    if not isinstance(message, dict):
        raise ChannelGarbageError("not an object")
    return message
