"""Defines the messages of the reward service. Unknown fields are refused: a misspelt one would silently change nothing.

This module needs neither torch nor FastAPI, so that a client can be light.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from kernelwright.errors import ConfigError
from kernelwright.records import Contract, Evaluation, Label

TOKEN_VARIABLE = "KERNELWRIGHT_TOKEN"

SOURCE_LIMIT_CHARACTERS = 1 << 18
"""Longest task or candidate, as for a model's answers: no kernel is longer, and Python's parser takes memory by the
hundredfold."""

BODY_LIMIT_BYTES = 4 << 20
"""Largest request: room for a task and a candidate, every character of them escaped."""

WAIT_LIMIT_S = 300.0
"""Longest wait of one request. Proxies commonly cut connections that are silent for longer."""

REPEAT_LIMIT = 99


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _RaisesConfigError(ModelMetaclass):
    """Lets a constructor that is called in Python raise this package's error; what is parsed raises pydantic's own."""

    def __call__(cls, **fields: Any) -> Any:
        try:
            return super().__call__(**fields)
        except ValidationError as error:
            found = explained(error.errors(include_url=False), cast("type[BaseModel]", cls))
            end = "" if found.endswith("?") else "."
            raise ConfigError(
                f"Wanted valid fields of {cls.__name__}, which docs/rewards.md lists; found {found}{end}"
            ) from error


class _WireModel(BaseModel, metaclass=_RaisesConfigError):
    model_config = ConfigDict(frozen=True, extra="forbid")


Source = Annotated[str, StringConstraints(min_length=1, max_length=SOURCE_LIMIT_CHARACTERS)]
Name = Annotated[str, StringConstraints(pattern=r"^[\w./+-]{1,200}$")]
Words = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class TaskText(_WireModel):
    """A task that the service does not know. Its code runs in the judge's own process: tasks are trusted."""

    id: Name
    source: Source


class SettingsRequest(_WireModel):
    """Judge settings that a caller may choose. Those that make a verdict strict are the service's own."""

    timed: bool | None = None
    """False checks correctness only."""
    strict_fp32: bool = False
    """Turn TF32 off on both sides, also where the service allows it in products; it stays off where the service turned it
    off. To allow it in products is the service's own choice."""
    processes_min: int | None = Field(default=None, ge=1, le=64)
    processes_max: int | None = Field(default=None, ge=1, le=64)
    blocks: int | None = Field(default=None, ge=2, le=1000)
    target_half_width: float | None = Field(default=None, gt=0, lt=1)
    build_limit_s: float | None = Field(default=None, gt=0)
    """May lower the service's own limit, not raise it."""
    run_limit_s: float | None = Field(default=None, gt=0)
    """May lower the service's own limit, not raise it."""
    contract: Contract | None = None
    """The contract that decides the verdict. Under a service's `drop-in` it cannot be `kernelbench`."""
    forbid: frozenset[Label] = frozenset()
    """Labels that reject, beside those that the service forbids."""


class EvaluationRequest(_WireModel):
    """One candidate to judge. Equal task, candidate, settings and repeat are one evaluation, whoever asks how often."""

    task: Name | TaskText
    """Id of a built-in task, or a task's text."""
    candidate: Source
    """A Python module that defines `ModelNew`."""
    policy: Name = "service"
    """Name of the proposer, for the record."""
    techniques: tuple[Words, ...] = Field(default=(), max_length=32)
    settings: SettingsRequest = SettingsRequest()
    """Settings of the judge that differ from the service's."""
    repeat: int = Field(default=0, ge=0, le=REPEAT_LIMIT)
    """Another number is another measurement of the same candidate, recorded as a confirmation: for a speedup that is
    too good to be believed at once."""
    reward: Name | None = None
    """Name of the reward to compute from the record, such as `lower-bound`."""


class PostQuery(_WireModel):
    """Parameters in the address of a request to judge."""

    wait_s: float = Field(default=0.0, ge=0, le=WAIT_LIMIT_S)


class GetQuery(PostQuery):
    """Parameters in the address of a request for an evaluation that was asked for before."""

    reward: str | None = None


class State(StrEnum):
    """Progress of an evaluation."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class RewardReply(_WireModel):
    """A reward, computed from the record alone."""

    name: str
    value: float


class EvaluationReply(_WireModel):
    """An evaluation, or its progress."""

    id: str
    """Hash of task, candidate, settings and repeat."""
    state: State
    reused: bool = False
    """True when it was judged before this request."""
    evaluation: Evaluation | None = None
    """The whole record, once done."""
    reward: RewardReply | None = None
    """Once done, where one was asked for."""


class ErrorCode(StrEnum):
    """Reason why a request was not answered."""

    UNAUTHORIZED = "unauthorized"
    WRONG_HOST = "wrong-host"
    NOT_FOUND = "not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    INVALID_JSON = "invalid-json"
    INVALID_REQUEST = "invalid-request"
    TASK_ERROR = "task-error"
    """The task itself does not work."""
    TOO_LARGE = "too-large"
    QUEUE_FULL = "queue-full"
    SHUTTING_DOWN = "shutting-down"
    INFRASTRUCTURE = "infrastructure"
    """The machine failed, not the candidate. Nothing is remembered of it: ask again."""
    FAULT = "fault"
    """A defect of the service."""


class ErrorBody(_WireModel):
    """Every answer whose status is 400 or above."""

    error: ErrorCode
    wanted: str
    found: str
    do: str


class Health(_WireModel):
    """State of the service, for load balancers."""

    status: str
    """`ok` or `shutting-down`."""
    version: str


class Metrics(_WireModel):
    """Counts since the service started, and what goes on now."""

    lanes: int
    """Evaluations that can go on at once."""
    queued: int
    queue_limit: int
    running: int
    recorded: int
    """Evaluations on disk, those of earlier runs included."""
    accepted: int
    rejected: dict[str, int]
    """By reason."""
    infrastructure_errors: int
    task_errors: int
    dropped: int
    """Requests that had not begun when the service was told to end."""
    reused: int
    """Requests answered from the record."""
    joined: int
    """Requests that joined an evaluation that another one had begun."""
    refused_full: int
    judging_s: float
    """Time spent judging, all lanes together."""
    uptime_s: float


_PARTS: dict[str, type[BaseModel]] = {"settings": SettingsRequest, "task": TaskText}
_UNION_BRANCHES = ("constrained-str", TaskText.__name__)
"""Steps of pydantic's path to a field that are in no message."""


def explained(problems: Sequence[Mapping[str, Any]], model: type[BaseModel]) -> str:
    """Pydantic's problems with a message in words: every misspelt field with the one that is near, else the first problem.

    Args:
        problems: As of `ValidationError.errors()`.
        model: Model of the message.
    """
    unknown = [_unknown(_path(one), model) for one in problems if one["type"] == "extra_forbidden"]
    if unknown:
        return "; ".join(unknown[:5])
    # A task is a name or a text: of the two complaints, the one that reaches further in is meant.
    deepest = max(problems, key=lambda one: len(one["loc"]))
    return f"{'.'.join(_path(deepest))}: {deepest['msg']}"


def _path(problem: Mapping[str, Any]) -> list[str]:
    return [str(step)[:100] for step in problem["loc"] if step not in _UNION_BRANCHES]


def _unknown(path: list[str], model: type[BaseModel]) -> str:
    known = list(_PARTS.get(path[-2] if len(path) > 1 else "", model).model_fields)
    near = difflib.get_close_matches(path[-1], known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
    return f"`{'.'.join(path)}`, which does not exist; {hint}"
