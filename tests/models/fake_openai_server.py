"""An OpenAI-compatible endpoint on a local socket that answers as told and fails as told.

Each request takes the next of `faults`, if there is one left; then it is answered by `reply`. Nothing here sleeps: a
server that is to be silent waits until the test closes it.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request."""

    kind: (
        Literal["status", "close", "silence", "html", "bad-json", "no-choices", "whole", "no-events"]
        | Literal["cut", "stall", "no-end", "bad-chunk", "error-event"]
    )
    status: int = 500
    message: str = "injected"
    headers: dict[str, str] = field(default_factory=dict)
    code: str | None = None
    pieces: int = 1
    """How many pieces of a stream still arrive."""


def status(code: int, message: str = "injected", **headers: str) -> Fault:
    return Fault("status", code, message, {name.replace("_", "-"): value for name, value in headers.items()})


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def echo(messages: list[dict[str, str]], seed: int) -> str:
    return f"{messages[-1]['content']} #{seed}"


class FakeServer:
    """Use as a context manager; `url` is the base URL."""

    def __init__(
        self,
        reply: Callable[[list[dict[str, str]], int], str] = echo,
        *,
        model: str = "fake",
        key: str | None = None,
        n: Literal["taken", "refused", "ignored"] = "taken",
        reasoning: str = "",
        tells_usage: bool = True,
        finish_reason: str = "stop",
    ) -> None:
        self.reply, self.model, self.key, self.n = reply, model, key, n
        self.reasoning, self.tells_usage, self.finish_reason = reasoning, tells_usage, finish_reason
        self.faults: deque[Fault] = deque()
        self.seen: list[Seen] = []
        self.in_flight, self.most_in_flight = 0, 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        handler = type("Handler", (_Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.gate.set()
        self.http.shutdown()
        self.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with fake.lock:
            fake.seen.append(Seen(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            fault = fake.faults.popleft() if fake.faults else None
            fake.in_flight += 1
            fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
        fake.gate.wait()
        try:
            self._answer(body, fault)
        except ConnectionError:
            # The client had enough.
            self.close_connection = True
        finally:
            with fake.lock:
                fake.in_flight -= 1

    def _answer(self, body: dict[str, Any], fault: Fault | None) -> None:
        fake = self.fake
        if fake.key and self.headers["authorization"] != f"Bearer {fake.key}":
            # As some providers do, the refusal repeats the key.
            self._error(401, f"Incorrect API key provided: {self.headers['authorization']}", "invalid_api_key")
        elif body["model"] != fake.model:
            self._error(404, f"The model {body['model']} does not exist", "model_not_found")
        elif body.get("n", 1) > 1 and fake.n == "refused":
            self._error(400, "Only one completion choice is allowed", None)
        elif fault is not None and not self._fail_early(fault, body):
            self._stream(body, fault)
        elif fault is None and body.get("stream"):
            self._stream(body, None)
        elif fault is None:
            self._whole(body)

    def _fail_early(self, fault: Fault, body: dict[str, Any]) -> bool:
        """Faults in place of an answer; False when this one is a fault in the middle of one."""
        if fault.kind == "status":
            self._error(fault.status, fault.message, fault.code, fault.headers)
        elif fault.kind == "close":
            self.close_connection = True
            self.connection.close()
        elif fault.kind == "silence":
            self.fake.closing.wait()
            self.close_connection = True
        elif fault.kind == "html":
            self._send(200, b"<html>a proxy's page</html>", "text/html")
        elif fault.kind == "bad-json":
            self._send(200, b'{"choices": [', "application/json")
        elif fault.kind == "whole":
            self._whole(body)
        elif fault.kind == "no-events":
            self._send(200, b"", "text/event-stream; charset=utf-8")
        elif fault.kind == "no-choices":
            self._send(200, json.dumps({"id": "x", "object": "chat.completion", "choices": []}).encode(), "application/json")
        else:
            return False
        return True

    def _texts(self, body: dict[str, Any]) -> list[str]:
        count = body.get("n", 1) if self.fake.n == "taken" else 1
        seed = body.get("seed", 0)
        return [self.fake.reply(body["messages"], seed + index) for index in range(count)]

    def _usage(self, body: dict[str, Any], texts: list[str]) -> dict[str, Any]:
        """Tokens are words here; half of the prompt's count as cached."""
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        reasoning = len(self.fake.reasoning.split())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sum(len(text.split()) for text in texts) + reasoning,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": prompt // 2},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _whole(self, body: dict[str, Any]) -> None:
        texts = self._texts(body)
        choices = [
            {
                "index": index,
                "finish_reason": self.fake.finish_reason,
                "message": {"role": "assistant", "content": text, "reasoning_content": self.fake.reasoning or None},
            }
            for index, text in enumerate(texts)
        ]
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices}
        if self.fake.tells_usage:
            answer["usage"] = self._usage(body, texts)
        self._send(200, json.dumps(answer).encode(), "application/json")

    def _stream(self, body: dict[str, Any], fault: Fault | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        texts = self._texts(body)
        pieces: list[tuple[int, dict[str, str]]] = []
        for index, text in enumerate(texts):
            if self.fake.reasoning:
                pieces.append((index, {"reasoning_content": self.fake.reasoning}))
            pieces += [(index, {"content": text[at : at + 4]}) for at in range(0, len(text), 4)]
        for place, (index, delta) in enumerate(pieces):
            if fault is not None and place == fault.pieces:
                return self._fail_late(fault)
            self._event({"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        for index in range(len(texts)):
            self._event({"choices": [{"index": index, "delta": {}, "finish_reason": self.fake.finish_reason}]})
        if self.fake.tells_usage and body.get("stream_options", {}).get("include_usage"):
            self._event({"choices": [], "usage": self._usage(body, texts)})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        return None

    def _fail_late(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.kind == "cut":
            self.connection.close()
        elif fault.kind == "stall":
            self.fake.closing.wait()
        elif fault.kind == "bad-chunk":
            self._chunk(b"data: {not json\n\n")
            self._chunk(b"")
        elif fault.kind == "error-event":
            self._event({"error": {"message": fault.message}})
            self._chunk(b"")
        elif fault.kind == "no-end":
            self._chunk(b"")

    def _event(self, value: dict[str, Any]) -> None:
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": self.fake.model}
        self._chunk(b"data: " + json.dumps(head | value if "error" not in value else value).encode() + b"\n\n")

    def _chunk(self, payload: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))
        self.wfile.flush()

    def _error(self, code: int, message: str, name: str | None, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"error": {"message": message, "code": name, "type": "injected"}}).encode()
        self._send(code, body, "application/json", headers)

    def _send(self, code: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
