"""Stores every judged candidate of every task in one SQLite file, from which contrastive prompts draw.

An entry is one candidate of one task on one kind of device. Candidates judged more than once are merged so that the
order of arrival does not matter, and so that nothing gets better by being measured often: re-measurements that confirm
count instead of the first measurement, which selection made optimistic; among equals the worst counts.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kernelwright.errors import ExemplarDatabaseError, InfrastructureError, UsageError
from kernelwright.records import Evaluation, Reason, RunDirectory, Verdict, files_of

SCHEMA_VERSION = 1
"""Written into every file; another version is refused, never guessed at."""

APPLICATION_ID = 0x4B77_4578
"""Marks the file as one of these: `KwEx` in ASCII."""

BUSY_TIMEOUT_S = 60.0
"""Longest wait for another process's transaction; one takes milliseconds."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemplar:
    """A judged candidate, as a prompt or a training stage needs it."""

    task: str
    """The task's id."""
    task_sha256: str
    candidate_sha256: str
    source: str
    verdict: Verdict
    reason: Reason | None
    """Reason of the rejection; None when accepted."""
    score: float | None
    """Lower end of the speedup's 95 % interval; None when rejected or not timed."""
    improvement: bool
    """True when that bound clears the noise floor."""
    confirmed: bool
    """True when the score is an independent re-measurement."""
    parent: str | None
    techniques: tuple[str, ...]
    policy: str
    device: str
    """Kind of device that it was judged on: `cpu` or `cuda`."""
    started: str
    """Time of the judging: UTC, ISO 8601."""

    def known_score(self) -> float:
        """The score; raises ValueError where there is none."""
        if self.score is None:
            raise ValueError(f"an exemplar without a score: {self.candidate_sha256}")
        return self.score


class ExemplarDatabase:
    """Judged candidates in an SQLite file that several processes and threads may read and write at once.

    A connection is opened for each operation, so an object may be forked, pickled and shared between threads. Scores of
    a CPU and of a GPU are kept apart; those of different GPU models are not, so use a file for each model.

    Args:
        path: The file; created, with parents, when something is to be kept.

    Raises:
        ExemplarDatabaseError: the file is something else, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            return
        if not path.is_file():
            found = "a folder" if path.is_dir() else "something else than a file"
            raise ExemplarDatabaseError(f"Wanted an exemplar database at {path}; found {found}. Name a file.")
        with self._connection() as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID:
            raise ExemplarDatabaseError(
                f"Wanted an exemplar database at {path}; found an SQLite file of something else. Choose another path."
            )
        if version != SCHEMA_VERSION:
            raise ExemplarDatabaseError(
                f"Wanted an exemplar database of version {SCHEMA_VERSION} at {path}; found version {version}. "
                "Choose another path and import the run directories again."
            )

    def add(self, evaluation: Evaluation) -> bool:
        """Keep one evaluation; True when its candidate was not there before."""
        return self.add_all([evaluation]) == 1

    def add_all(self, evaluations: Iterable[Evaluation]) -> int:
        """Keep many in one transaction; returns how many candidates were not there before."""
        news = [_exemplar(evaluation) for evaluation in evaluations]
        if not news:
            return 0
        added = 0
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for new in news:
                key = (new.task_sha256, new.candidate_sha256, new.device)
                row = connection.execute(
                    f"SELECT {_COLUMNS} FROM candidates WHERE task_sha256 = ? AND candidate_sha256 = ? AND device = ?", key
                ).fetchone()
                added += row is None
                if row is None or _weight(new) > _weight(_from_row(row)):
                    connection.execute(f"REPLACE INTO candidates ({_COLUMNS}) VALUES ({_MARKS})", _to_row(new))
            connection.execute("COMMIT")
        return added

    def import_run(self, path: Path) -> int:
        """Keep every evaluation of a run directory; returns how many candidates were not there before.

        Raises:
            UsageError: there are no evaluations at `path`.
        """
        if not files_of(path / "evaluations.jsonl"):
            raise UsageError(f"Wanted a run directory with evaluations.jsonl at {path}; found none. Check the path.")
        with self._connection():
            pass  # A run that judged nothing leaves an empty database, not none.
        return self.add_all(RunDirectory(path).evaluations())

    def exemplars(self, task_sha256: str, *, device: str) -> list[Exemplar]:
        """Accepted and timed candidates of a task on that kind of device, best first."""
        return self._select(
            "task_sha256 = ? AND device = ? AND verdict = 'accepted' AND score IS NOT NULL "
            "ORDER BY score DESC, candidate_sha256",
            (task_sha256, _kind(device)),
        )

    def best(self, task_sha256: str, *, device: str) -> Exemplar | None:
        """The accepted candidate with the highest score; None when there is none."""
        return next(iter(self.exemplars(task_sha256, device=device)), None)

    def _select(self, condition: str, values: tuple[str, ...]) -> list[Exemplar]:
        if not self.path.exists():
            # Reading makes no file: a search whose endpoint answered nothing has nothing to keep.
            return []
        with self._connection() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM candidates WHERE {condition}", values).fetchall()
        return [_from_row(row) for row in rows]

    def _create(self) -> None:
        """Make the whole file elsewhere and link it into place: of several processes one wins, none sees half of it."""
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(temporary, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(_SCHEMA)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            finally:
                connection.close()
            # Where another process has linked its own by now, that one holds.
            with suppress(FileExistsError):
                os.link(temporary, self.path)
        except (OSError, sqlite3.OperationalError) as error:
            raise ExemplarDatabaseError(
                f"Wanted to create an exemplar database at {self.path}; {error}. Choose another path."
            ) from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if not self.path.exists():
            self._create()
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            yield connection
        except sqlite3.OperationalError as error:
            raise InfrastructureError(
                f"Wanted to use the exemplar database {self.path}; SQLite says: {error}. Disk full, or a writer stuck?"
            ) from error
        except sqlite3.DatabaseError as error:
            raise ExemplarDatabaseError(
                f"Wanted an exemplar database at {self.path}; SQLite says: {error}. Choose another path."
            ) from error
        finally:
            # Closing rolls an unfinished transaction back.
            if connection is not None:
                connection.close()


_FIELDS = tuple(field.name for field in fields(Exemplar))
_COLUMNS = ", ".join(_FIELDS)
_MARKS = ", ".join("?" * len(_FIELDS))


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _exemplar(evaluation: Evaluation) -> Exemplar:
    return Exemplar(
        task=evaluation.task,
        task_sha256=evaluation.task_sha256,
        candidate_sha256=evaluation.candidate_sha256,
        source=evaluation.source,
        verdict=evaluation.verdict,
        reason=evaluation.reason,
        score=evaluation.speedup_low if evaluation.accepted else None,
        improvement=evaluation.is_improvement,
        confirmed=evaluation.confirms,
        parent=evaluation.parent,
        techniques=evaluation.techniques,
        policy=evaluation.policy,
        device=_kind(evaluation.device),
        started=evaluation.started,
    )


def _weight(entry: Exemplar) -> tuple[bool, int, float]:
    """Rank of a measurement of a candidate; the highest counts: confirming before first, then worse before better."""
    if entry.verdict is Verdict.REJECTED:
        return entry.confirmed, 2, 0.0
    if entry.score is not None:
        return entry.confirmed, 1, -entry.score
    return entry.confirmed, 0, 0.0


def _to_row(entry: Exemplar) -> tuple[object, ...]:
    values = {name: getattr(entry, name) for name in _FIELDS} | {"techniques": json.dumps(entry.techniques)}
    return tuple(values.values())


def _from_row(row: tuple[Any, ...]) -> Exemplar:
    values = dict(zip(_FIELDS, row, strict=True))
    return Exemplar(
        **values
        | {
            "verdict": Verdict(values["verdict"]),
            "reason": Reason(values["reason"]) if values["reason"] else None,
            "improvement": bool(values["improvement"]),
            "confirmed": bool(values["confirmed"]),
            "techniques": tuple(json.loads(values["techniques"])),
        }
    )
