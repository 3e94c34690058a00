"""Caches evaluations for all runs on a machine: what one training arm had judged is not judged for another."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kernelwright.errors import InfrastructureError
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task, sha256_of

BUSY_TIMEOUT_S = 60.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS evaluations (kind TEXT, task TEXT, candidate TEXT, record TEXT, "
    "PRIMARY KEY (kind, task, candidate)) WITHOUT ROWID"
)


class EvaluationCache:
    """A file of evaluations by task, candidate and how they were made. Several processes may use it at once.

    A program has one speed, whoever wrote it: runs that are compared with each other see the same measurement of the same
    program. Use a file for each kind of machine.

    `label` and `settings` tell measurements apart that must not stand for one another, such as first ones and confirming
    ones. The SQLite file is made at the first use.
    """

    def __init__(self, path: Path, label: str, settings: Settings | None) -> None:
        self._path = path
        self._kind = sha256_of(f"{label} {settings.model_dump_json() if settings is not None else ''}")

    def find(self, task: Task, candidate: Candidate) -> Evaluation | None:
        """The evaluation of a candidate, in this candidate's name; None when there is none.

        Raises:
            InfrastructureError: the file cannot be used.
        """
        with self._connection() as connection:
            row = connection.execute(
                "SELECT record FROM evaluations WHERE kind = ? AND task = ? AND candidate = ?",
                (self._kind, task.sha256, candidate.sha256),
            ).fetchone()
        if row is None:
            return None
        # Who proposed it, and from what, differs from run to run; what was measured does not.
        told = {"policy": candidate.policy, "techniques": candidate.techniques, "parent": candidate.parent}
        return Evaluation.model_validate_json(row[0]).model_copy(update=told)

    def add(self, evaluation: Evaluation) -> None:
        """Keep an evaluation; the first of a candidate stays.

        Raises:
            InfrastructureError: the file cannot be used.
        """
        key = (self._kind, evaluation.task_sha256, evaluation.candidate_sha256)
        with self._connection() as connection:
            connection.execute("INSERT OR IGNORE INTO evaluations VALUES (?, ?, ?, ?)", (*key, evaluation.model_dump_json()))

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(_TABLE)
                yield connection
        except sqlite3.Error as error:
            raise InfrastructureError(
                f"Wanted to use the shared evaluations at {self._path}; SQLite says: {error}. Give another judge.shared."
            ) from error
