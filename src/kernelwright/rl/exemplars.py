"""Every judged candidate of every task, in one SQLite file: what a contrastive prompt draws from.

An entry is one candidate of one task on one kind of device. Candidates judged more than once are merged so that the
order of arrival does not matter, and so that nothing gets better by being measured often: re-measurements that confirm
count instead of the first measurement, which selection made optimistic; among equals the worst counts.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernelwright.errors import UsageError
from kernelwright.records import Evaluation, RunDirectory, Verdict

SCHEMA_VERSION = 1
"""Written into every file; another version is refused, never guessed at."""

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for another process's transaction; one takes milliseconds."""

_SCHEMA = """
CREATE TABLE candidates (
    task_sha256 TEXT NOT NULL,
    candidate_sha256 TEXT NOT NULL,
    device TEXT NOT NULL,
    task TEXT NOT NULL,
    verdict TEXT NOT NULL,
    reason TEXT,
    score REAL,
    improvement INTEGER NOT NULL,
    confirmed INTEGER NOT NULL,
    source TEXT NOT NULL,
    parent TEXT,
    techniques TEXT NOT NULL,
    policy TEXT NOT NULL,
    started TEXT NOT NULL,
    PRIMARY KEY (task_sha256, candidate_sha256, device)
) WITHOUT ROWID;
CREATE INDEX by_score ON candidates (task_sha256, device, verdict, score);
"""
_COLUMNS = (
    "task_sha256, candidate_sha256, device, task, verdict, reason, score, improvement, confirmed, "
    "source, parent, techniques, policy, started"
)


class ExemplarDatabaseError(UsageError):
    """The file is not an exemplar database, or is one of another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemplar:
    """A judged candidate, as a prompt or a training stage needs it."""

    task: str
    """The task's id."""
    task_sha256: str
    candidate_sha256: str
    source: str
    verdict: Verdict
    reason: str | None
    """Why it was rejected; None when accepted."""
    score: float | None
    """Lower end of the speedup's 95 % interval; None when rejected or not timed."""
    improvement: bool
    """Whether that bound clears the noise floor."""
    confirmed: bool
    """Whether the score is an independent re-measurement."""
    parent: str | None
    techniques: tuple[str, ...]
    policy: str
    device: str
    """The kind it was judged on: `cpu` or `cuda`."""
    started: str
    """When it was judged: UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much a database holds."""

    tasks: int
    candidates: int
    accepted: int
    improvements: int


class ExemplarDatabase:
    """Judged candidates in an SQLite file that several processes and threads may read and write at once.

    A connection is opened for each operation, so an object may be forked, pickled and shared between threads. Scores of
    a CPU and of a GPU are kept apart; those of different GPU models are not, so use a file for each model.

    Args:
        path: The file; created, with parents, when missing.

    Raises:
        ExemplarDatabaseError: the file is something else, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, evaluation: Evaluation) -> bool:
        """Keep one evaluation; True when its candidate was not there before."""
        raise NotImplementedError

    def add_all(self, evaluations: Iterable[Evaluation]) -> int:
        """Keep many in one transaction; returns how many candidates were not there before."""
        raise NotImplementedError

    def import_run(self, path: Path) -> int:
        """Keep every evaluation of a run directory; returns how many candidates were not there before.

        Raises:
            UsageError: there are no evaluations at `path`.
        """
        raise NotImplementedError

    def exemplars(self, task_sha256: str, *, device: str) -> list[Exemplar]:
        """Accepted and timed candidates of a task, best first.

        Args:
            task_sha256: Which task.
            device: `cpu`, `cuda` or `cuda:N`: whose scores.
        """
        raise NotImplementedError

    def best(self, task_sha256: str, *, device: str) -> Exemplar | None:
        """The accepted candidate with the highest score; None when there is none."""
        raise NotImplementedError

    def everything(self, task_sha256: str, *, device: str) -> list[Exemplar]:
        """All candidates of a task, rejected ones included, oldest first."""
        raise NotImplementedError

    def counts(self, task_sha256: str | None = None) -> Counts:
        """How much there is, of one task or of all."""
        raise NotImplementedError
