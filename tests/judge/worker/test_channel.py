"""The channel: whatever comes over it is a message of bounded size, or an exception of a known kind."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.judge.worker.channel import (
    MAX_MESSAGE_BYTES,
    Channel,
    ChannelClosedError,
    ChannelGarbageError,
    ChannelTimeoutError,
    decode,
    encode,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    pair = Channel(ours), Channel(theirs)
    yield pair
    for end in pair:
        end.close()


def soon():
    return time.monotonic() + 30


@given(st.dictionaries(st.text(), JSON, max_size=5))
@settings(max_examples=40)
def test_a_message_arrives_as_it_was_sent(message):
    assert decode(encode(message)[4:]) == message


def test_messages_keep_their_order_and_their_bounds(ends):
    ours, theirs = ends
    for number in range(3):
        theirs.send({"number": number})
    assert [ours.receive(soon())["number"] for _ in range(3)] == [0, 1, 2]


def test_a_message_larger_than_the_sockets_buffer_arrives_in_pieces():
    class Trickle:
        """A socket that gives one byte at a time."""

        def __init__(self, data):
            self.data = data

        def recv(self, count):
            piece, self.data = self.data[:1], self.data[1:]
            return piece

    assert Channel(Trickle(encode({"long": "x" * 500}))).receive() == {"long": "x" * 500}


def test_a_deadline_in_the_past_gives_up_at_once(ends):
    ours, theirs = ends
    with pytest.raises(ChannelTimeoutError):
        ours.receive(time.monotonic() - 1)
    theirs.send({})
    with pytest.raises(ChannelTimeoutError):
        ours.receive(time.monotonic() - 1)


def test_a_deadline_that_passes_while_waiting_gives_up(ends):
    with pytest.raises(ChannelTimeoutError):
        ends[0].receive(time.monotonic() + 1e-3)


def test_half_a_message_waits_for_the_rest_and_not_for_ever(ends):
    ours, theirs = ends
    theirs.socket.sendall(encode({"a": 1})[:-1])
    with pytest.raises(ChannelTimeoutError):
        ours.receive(time.monotonic() + 1e-3)


@pytest.mark.parametrize("keep", [0, 2, 4, 6])
def test_a_message_cut_off_by_the_end_of_the_stream_is_no_message(ends, keep):
    ours, theirs = ends
    theirs.socket.sendall(encode({"a": 1})[:keep])
    theirs.close()
    with pytest.raises(ChannelClosedError):
        ours.receive(soon())


def test_the_other_side_is_gone(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosedError):
        ours.receive(soon())
    with pytest.raises(ChannelClosedError):
        ours.send({"to": "nobody"})


def test_a_reset_connection_is_a_closed_channel(ends):
    class Broken:
        def recv(self, count):
            raise ConnectionResetError("gone")

    with pytest.raises(ChannelClosedError, match="gone"):
        Channel(Broken()).receive()


def test_an_announced_length_beyond_the_limit_is_refused_before_it_is_read(ends):
    ours, theirs = ends
    theirs.socket.sendall(struct.pack("=I", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ChannelGarbageError, match=str(MAX_MESSAGE_BYTES + 1)):
        ours.receive(soon())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"nonsense",
        b"[1]",
        b'"text"',
        b"1",
        b"null",
        b"[" * 100_000,
        b'{"a": }',
        b"{'a': 1}",
    ],
)
def test_what_is_not_a_json_object_is_garbage(ends, body):
    ours, theirs = ends
    theirs.socket.sendall(struct.pack("=I", len(body)) + body)
    with pytest.raises(ChannelGarbageError):
        ours.receive(soon())


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        try:
            message = Channel(ours).receive()
        except (ChannelClosedError, ChannelGarbageError):
            return
        assert json.loads(data[4 : 4 + struct.unpack("=I", data[:4])[0]]) == message


def test_something_unread_is_seen_without_reading_it(ends):
    ours, theirs = ends
    assert not ours.pending()
    theirs.socket.sendall(b"x")
    assert ours.pending()
    assert ours.pending()


def test_nothing_from_a_worker_is_ever_unpickled():
    import kernelwright.judge.isolation.process as process
    import kernelwright.judge.worker.channel as channel

    for module in (channel, process):
        text = Path(module.__file__).read_text(encoding="utf-8")
        assert not any(word in text for word in ("import pickle", "torch.load", "marshal", "eval("))


def test_files_that_nobody_sends_any_more_are_the_end_of_the_channel(ends):
    first, second = ends
    first.close()
    with pytest.raises(ChannelClosedError, match="end of stream"):
        second.receive_files(1)


def test_files_cross_as_duplicates_and_none_crosses_as_none(ends):
    first, second = ends
    reader, writer = os.pipe()
    first.send_files([])
    first.send_files([writer])
    os.close(writer)
    (theirs,) = second.receive_files(1)
    assert second.receive_files(0) == []
    os.write(theirs, b"x")
    os.close(theirs)
    assert os.read(reader, 2) == b"x"
    os.close(reader)


def test_files_for_a_side_that_is_gone_are_a_closed_channel(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosedError):
        ours.send_files([0])


def test_watching_ends_with_a_message_or_with_its_time(ends, monkeypatch):
    ours, theirs = ends
    now = iter([0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0])
    monkeypatch.setattr("kernelwright.judge.worker.channel.time", SimpleNamespace(monotonic=lambda: next(now)))
    ours.watch(2.5)
    assert next(now) == 0.0, "nothing came"
    theirs.send({"a": 1})
    now = iter([0.0, 1.0])
    ours.watch(2.5)
    assert list(now) == []
    assert ours.receive() == {"a": 1}
