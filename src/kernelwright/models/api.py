"""Asks a model behind an OpenAI-compatible endpoint: OpenAI, DeepSeek, Qwen, vLLM, llama.cpp, `transformers serve`.

The key comes from the environment, goes into the SDK's client and nowhere else: no setting, record, log line, exception
or `repr` has it. The SDK's own retries are off: they sleep where nothing can interrupt them, their limits are fixed and
differ between its versions, and a 429 would not hold back the other requests.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from typing import Any, Literal

import openai
from pydantic import BaseModel, ConfigDict, Field

from kernelwright.config import require_http_url
from kernelwright.errors import PolicyError
from kernelwright.models.chat import (
    ChatModel,
    Completion,
    CompletionFailure,
    Message,
    Meter,
    ModelAnswer,
    Prices,
    Sampling,
    Usage,
)
from kernelwright.models.replies import (
    ApiReply,
    Fault,
    body_in_one_piece,
    content_type,
    fault_of,
    redacted,
    transport_errors,
    whole_reply,
)

log = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
FIRST_WAIT_S = 1.0
"""Wait before the second attempt; it doubles with each further one. Our choice, as are the defaults below."""

NO_STREAM_ADVICE = "see whether the address is right, which as a rule ends in /v1"

EXCERPT_CHARACTERS = 60
"""Beginning of what is no answer, in its failure."""
FEWEST_FAULTS = 3
"""Fewest requests in a row that run out of attempts before an endpoint that had answered counts as gone."""


LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")


class ApiSettings(BaseModel):
    """Address and limits of an endpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = ""
    """Provider's name of the model; empty: the environment's `OPENAI_MODEL`."""
    base_url: str = ""
    """Address up to and with `/v1`; empty: the environment's `OPENAI_BASE_URL`, else OpenAI's own."""
    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key."""
    concurrency: int = Field(default=8, ge=1)
    """Requests in flight at once."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Attempts started in a minute at most, evenly spaced."""
    attempts: int = Field(default=6, ge=1)
    """Attempts at a request before it counts as failed."""
    longest_wait_s: float = Field(default=120, gt=0)
    """Longest wait between two attempts. A server that asks for more is not asked again."""
    silence_timeout_s: float = Field(default=120, gt=0)
    """Limit without a connection, or without a further byte of an answer."""
    answer_timeout_s: float = Field(default=1800, gt=0)
    """Limit for one whole answer, however busily it trickles."""
    stream: bool = True
    """Read answers as they are written: an answer cut short then keeps what had arrived, and long ones do not time out."""
    several: Literal["auto", "n", "requests"] = "auto"
    """Way to ask for several answers to a prompt. `n` is one request, which charges prompt tokens once. `requests` is one
    for each answer. `auto` is `n` for as long as the server takes it."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Provider's name for the limit of an answer. The other one is sent where a refusal names it."""
    send_seed: bool = True
    """Off for providers that refuse requests with a seed."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, such as `top_k`. They are recorded: no secrets here."""
    prices: Prices | None = None
    """Prices per million tokens; without them the cost is unknown."""


class ApiModel(ChatModel):
    """A `ChatModel` over HTTP.

    Args:
        settings: Address and limits.
        environ: Environment with the key and defaults.
        sleep: Sleeps so many seconds; for tests.
        clock: Monotonic seconds; for tests.

    Raises:
        PolicyError: no model is named, or there is no key for an endpoint that needs one.
        ConfigError: the address is none, or has a password in it.
    """

    def __init__(
        self,
        settings: ApiSettings,
        *,
        environ: Mapping[str, str] = os.environ,
        sleep: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        model = settings.model or environ.get("OPENAI_MODEL", "")
        if not model:
            raise PolicyError("Wanted the name of a model; found none. Give --model, `model` or OPENAI_MODEL.")
        base_url = settings.base_url or environ.get("OPENAI_BASE_URL", "") or OPENAI_URL
        require_http_url(base_url, "http://localhost:8000/v1", "an endpoint")
        self._key = _key_of(environ, settings.key_variable)
        if not self._key and base_url == OPENAI_URL:
            raise PolicyError(
                f"Wanted a key for {OPENAI_URL}; the environment variable {settings.key_variable} is not set. Set it, or "
                "give the `base_url` of an endpoint that needs none."
            )
        self.settings = settings.model_copy(update={"model": model, "base_url": base_url})
        self.name = f"api:{model}"
        self._pacer = _Pacer(settings.requests_per_minute, clock)
        self._sleep = sleep
        self._clock = clock
        self._meter = Meter()
        self._random = random.Random()
        self._limit_field: str = settings.max_tokens_field
        self._takes_n = settings.several != "requests"
        self._told_of_no_stream = False
        self._client = openai.OpenAI(
            # Servers that need no key still want the header to be there.
            api_key=self._key or "none",
            base_url=base_url,
            timeout=settings.silence_timeout_s,
            max_retries=0,
        )

    def __repr__(self) -> str:
        return f"ApiModel({self.settings.model!r} at {self.settings.base_url})"

    @property
    def usage(self) -> Usage:
        """Tokens and attempts so far."""
        return self._meter.total

    @property
    def cost(self) -> float | None:
        """Cost of all answers so far; None when the settings have no prices."""
        return self.usage.cost(self.settings.prices)

    def answers(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> Iterator[ModelAnswer]:
        """Implements `ChatModel.answers`.

        Raises:
            PolicyError: the endpoint refuses all work; or nothing but faults came back: the first request to run out of
                attempts before any was answered, or as many in a row as may be in flight (at least `FEWEST_FAULTS`).
        """
        answered, faults_in_a_row = False, 0
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.settings.concurrency, thread_name_prefix="kernelwright-api")
        asked: dict[Future[ApiReply | Fault], tuple[int, list[int]]] = {}
        without_n: set[int] = set()

        def submit(prompt: int, numbers: list[int]) -> None:
            together = self._takes_n and prompt not in without_n
            for group in [numbers] if together else [[number] for number in numbers]:
                future = pool.submit(self._request, prompts[prompt], len(group), sampling, group[0], stop)
                asked[future] = prompt, group

        try:
            for index in range(len(prompts) if count else 0):
                submit(index, list(range(count)))
            while asked:
                done, _ = wait(asked, return_when=FIRST_COMPLETED)
                # A fault may end it all, and what was answered is paid for: answers first.
                for future in sorted(done, key=lambda future: isinstance(future.result(), Fault)):
                    outcome, (prompt, numbers) = future.result(), asked.pop(future)
                    if self._may_be_for_n(outcome, numbers):
                        without_n.add(prompt)
                        submit(prompt, numbers)
                        continue
                    if isinstance(outcome, ApiReply):
                        answered, faults_in_a_row = True, 0
                    else:
                        faults_in_a_row += outcome.retried
                        self._check_endpoint(outcome, faults_in_a_row, answered)
                    found = self._answers(outcome, prompt, numbers)
                    yield from found
                    if isinstance(outcome, ApiReply) and outcome.fault is None:
                        # Refused with `n` and answered without, or told to give more answers than it gave.
                        self._takes_n &= prompt not in without_n and len(found) == len(numbers)
                    if len(found) < len(numbers):
                        submit(prompt, numbers[len(found) :])
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_endpoint(self, fault: Fault, faults_in_a_row: int, answered: bool) -> None:
        """Raise `PolicyError` where going on is useless; one unlucky request is no reason."""
        if fault.hopeless:
            raise PolicyError(_what_to_do(fault, self))
        patience = max(self.settings.concurrency, FEWEST_FAULTS) if answered else 1
        if fault.retried and faults_in_a_row >= patience:
            raise PolicyError(
                f"Wanted answers of {self!r}; after {self.settings.attempts} attempts: {fault.text}. See whether the "
                "endpoint is up and the address is right; for `rate-limited`, lower `concurrency` or set "
                "`requests_per_minute`."
            )

    def _may_be_for_n(self, outcome: ApiReply | Fault, numbers: list[int]) -> bool:
        """True for a refusal that might not come if the request asked for one answer."""
        refused = isinstance(outcome, Fault) and outcome.code == CompletionFailure.REFUSED and not outcome.hopeless
        return refused and len(numbers) > 1 and self.settings.several == "auto"

    def _answers(self, outcome: ApiReply | Fault, prompt: int, numbers: list[int]) -> list[ModelAnswer]:
        """A request's outcome as answers: fewer than asked for where the server gave fewer."""
        if isinstance(outcome, Fault):
            failed = Completion(text="", prompt_tokens=0, completion_tokens=0, finish_reason="error", failure=outcome.text)
            self._meter.add(Usage(failures=len(numbers)))
            return [ModelAnswer(prompt=prompt, number=number, completion=failed) for number in numbers]
        found = outcome.answers(prompt, numbers, self.settings.prices)
        self._meter.add(
            outcome.usage + Usage(requests=1, failures=sum(answer.completion.failure is not None for answer in found))
        )
        return found

    def _request(
        self, prompt: Sequence[Message], n: int, sampling: Sampling, number: int, stop: threading.Event
    ) -> ApiReply | Fault:
        """Try one request until it is answered or trying is useless."""
        sleep = self._sleep or stop.wait
        for attempt in range(1, self.settings.attempts + 1):
            self._pacer.wait(sleep)
            body = self._body(prompt, n, sampling, number)
            outcome = self._attempt(body, stop)
            other = next(field for field in LIMIT_FIELDS if field not in body)
            if isinstance(outcome, Fault) and outcome.code == CompletionFailure.REFUSED and other in outcome.detail:
                self._limit_field = other
                outcome = self._attempt(self._body(prompt, n, sampling, number), stop)
            if isinstance(outcome, ApiReply) or not outcome.retried or attempt == self.settings.attempts:
                break
            wait_s = outcome.retry_after_s
            if wait_s is None:
                # Jitter keeps requests that failed together from coming back together.
                wait_s = min(FIRST_WAIT_S * 2 ** (attempt - 1), self.settings.longest_wait_s) * self._random.uniform(
                    0.5, 1.0
                )
            if wait_s > self.settings.longest_wait_s or stop.is_set():
                break
            log.warning("%s: attempt %d ended with %s; the next in %.1f s", self.name, attempt, outcome.text, wait_s)
            self._meter.add(Usage(retries=1))
            if outcome.code == CompletionFailure.RATE_LIMITED:
                self._pacer.hold(wait_s)
            else:
                sleep(wait_s)
        return outcome

    def _attempt(self, body: dict[str, Any], stop: threading.Event) -> ApiReply | Fault:
        """Make one attempt. Text that arrives before a fault is kept as an answer cut short."""
        reply = ApiReply()
        try:
            answer = self._client.chat.completions.create(**body)
            piece = body_in_one_piece(answer) if self.settings.stream else None
            whole = whole_reply(piece) if self.settings.stream else answer
            if whole is None:
                deadline_s = self._clock() + self.settings.answer_timeout_s
                reply.read_stream(answer, lambda: stop.is_set() or self._clock() > deadline_s)
                if reply.is_blank and piece is not None:
                    came = content_type(answer) or "something of no type"
                    begun = f"that begins {piece[:EXCERPT_CHARACTERS]!r}" if piece.strip() else "with nothing in it"
                    detail = f"no event stream came but {came} {begun}: {NO_STREAM_ADVICE}"
                    reply.fault = Fault(CompletionFailure.JUNK_ANSWER, redacted(detail, self._key))
            else:
                reply.read_whole(whole)
                if self.settings.stream and not self._told_of_no_stream:
                    self._told_of_no_stream = True
                    log.warning("%s does not stream, and each answer is waited for: as with `stream = false`", self.name)
                if reply.fault is not None:
                    reply.fault = replace(reply.fault, detail=redacted(reply.fault.detail, self._key))
        except transport_errors() as error:
            fault = fault_of(error, self._key)
            if not reply.has_text:
                return fault
            unreachable = fault.code == CompletionFailure.UNREACHABLE
            reply.fault = Fault(CompletionFailure.STREAM_CUT if unreachable else fault.code)
        return reply

    def _body(self, prompt: Sequence[Message], n: int, sampling: Sampling, number: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [asdict(message) for message in prompt],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._limit_field: sampling.max_tokens,
            "extra_body": self.settings.extra_body or None,
        }
        if n > 1:
            body["n"] = n
        if self.settings.send_seed:
            # A server that honours seeds would otherwise give the same answer to each request.
            body["seed"] = sampling.seed + number
        if self.settings.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


class _Pacer:
    """Spaces out the starts of attempts, and holds them all back while the server wants to be left alone."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float]) -> None:
        self._interval_s = 60 / per_minute if per_minute else 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = clock()

    def wait(self, sleep: Callable[[float], object]) -> None:
        with self._lock:
            now_s = self._clock()
            start_s = max(now_s, self._next_s)
            self._next_s = start_s + self._interval_s
        if start_s > now_s:
            sleep(start_s - now_s)

    def hold(self, wait_s: float) -> None:
        with self._lock:
            self._next_s = max(self._next_s, self._clock() + wait_s)


def _what_to_do(fault: Fault, model: ApiModel) -> str:
    settings = model.settings
    if fault.status in (401, 403):
        advice = f"Put a key that is valid there into the environment variable {settings.key_variable}."
    elif fault.status in (402, 429):
        advice = "The account has no credit left: top it up, or use another endpoint."
    else:
        advice = f"See whether the endpoint has the model {settings.model!r} and the address ends as it should, in /v1."
    return f"Wanted answers of {model!r}; it refuses with status {fault.status}: {fault.detail}. {advice}"


def _key_of(environ: Mapping[str, str], variable: str) -> str:
    """The key; empty where there is none. White space around it is what files and copied lines bring along."""
    key = environ.get(variable, "").strip()
    if not all("!" <= character <= "~" for character in key):
        # No header can carry it, and the exceptions that say so quote it.
        raise PolicyError(
            f"Wanted a key of printable ASCII characters in the environment variable {variable}; found white space or "
            "other characters in it. Copy the key again."
        )
    return key
