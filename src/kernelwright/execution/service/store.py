"""Keeps the service's evaluations in a run directory, with an index from each request to its record.

A record is on disk before anybody is told of it, so a kill at any moment loses no finished evaluation; a restart reads
the file and answers from it.
"""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

from kernelwright.errors import UsageError
from kernelwright.judge import Settings
from kernelwright.records import Evaluation, RunDirectory, capture_environment
from kernelwright.version import __version__

REQUEST_KEY = "request"
"""In an evaluation's `checks`: the id of the request that it answers."""


class EvaluationStore:
    """The service's run directory. One service at a time may have it open.

    Args:
        path: The directory; created when missing.
        device: `cpu` or `cuda`, the kind of device that its records are of.
        settings: Settings of requests that change none.
        hardware: Names of the hardware that judges; found on this machine when None.

    Raises:
        UsageError: another service has it open, or it belongs to a run on other hardware, by other versions, or of
            another kind: its records would answer what they were not asked.
    """

    def __init__(self, path: Path, device: str, settings: Settings, hardware: list[str] | None = None) -> None:
        self.run = RunDirectory(path)
        try:
            self._lock_file = (path / ".lock").open("a")
        except OSError as error:
            raise UsageError(f"Wanted a directory to write to at {path}; {error.strerror}. Choose another one.") from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock_file.close()
            raise UsageError(
                f"Wanted a run directory to myself; another service has {path} open. Choose another one."
            ) from error
        self._writing = threading.Lock()
        try:
            self._claim(device, settings, hardware)
            self._offsets = self._index()
        except UsageError:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._offsets)

    def get(self, request: str) -> Evaluation | None:
        """The record that answers a request; None when there is none."""
        offset = self._offsets.get(bytes.fromhex(request))
        if offset is None:
            return None
        with self.run.evaluations_path.open("rb") as file:
            file.seek(offset)
            return Evaluation.model_validate_json(file.readline())

    def append(self, request: str, evaluation: Evaluation) -> Evaluation:
        """Put a record on disk, under the request that it answers; returns it as it is there.

        Raises:
            InfrastructureError: it could not be written.
        """
        marked = evaluation.model_copy(update={"checks": {**evaluation.checks, REQUEST_KEY: request}})
        with self._writing:
            self.run.append(marked)
            end = self.run.evaluations_path.stat().st_size
            self._offsets[bytes.fromhex(request)] = end - len(marked.model_dump_json().encode()) - 1
        return marked

    def close(self) -> None:
        """Let another service have the directory."""
        self._lock_file.close()

    def _index(self) -> dict[bytes, int]:
        offsets: dict[bytes, int] = {}
        path = self.run.evaluations_path
        if not path.exists():
            return offsets
        with path.open("rb") as file:
            offset = 0
            for line in file:
                try:
                    # Read as JSON only, which is ten times as fast as checking it; `get` checks.
                    request = json.loads(line)["checks"][REQUEST_KEY]
                    offsets[bytes.fromhex(request)] = offset
                except (ValueError, KeyError, TypeError):
                    pass  # torn by a kill: its work is still owed
                offset += len(line)
        return offsets

    def _claim(self, device: str, settings: Settings, hardware: list[str] | None) -> None:
        environment = capture_environment(device)
        if hardware is None:
            hardware = sorted({gpu["name"] for gpu in environment.get("gpu", ())}) or [environment["processor"]]
        config: dict[str, Any] = {
            "kind": "serve",
            "device": device,
            "hardware": hardware,
            "torch": environment["packages"]["torch"],
            "kernelwright": __version__,
        }
        earlier: dict[str, Any] | None = self.run.read_json("config.json")
        for key, value in config.items():
            if earlier is not None and earlier.get(key) != value:
                raise UsageError(
                    f"Wanted to go on in {self.run.path}; it belongs to a run with another `{key}` ({earlier.get(key)!r}, "
                    f"now {value!r}), whose records answer other questions. Choose another directory."
                )
        values = settings.model_dump(mode="json")
        values["forbid"] = sorted(values["forbid"])
        self.run.write_json("config.json", {**config, "settings": values})
        self.run.write_json("environment.json", environment)
