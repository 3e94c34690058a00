"""Keeps a run in a directory: the environment and configuration of a run, and one JSON line per finished evaluation.

A line is written whole and flushed to disk before the next one starts, so a run that is killed at any moment loses no
finished evaluation; a torn last line is work that is still pending and is dropped when the run is read again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.files import remove_tree, replace_file
from kernelwright.records.lines import append_lines, files_of, read_json, read_records, sha256_of
from kernelwright.records.models import Evaluation, Task
from kernelwright.records.screened import Screened

_LOCK = ".lock"
_ASKED = {"config.json", "environment.json", "tasks.json", "original.cubin", "model", _LOCK}
"""Files of a directory in which nothing has been found out."""
_RECORDS = ("evaluations.jsonl", "screened.jsonl", "schedules.jsonl", "rollouts.jsonl")
"""Files of a directory in which a run has begun."""
_ROOT = Path(__file__).resolve().parents[3]
"""Root of the checkout, where this file lies in one."""


class RunDirectory:
    """Reads and appends the records of one run, in a directory that is created when missing.

    Files of a published run may be packed; they are read alike.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = False
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def claim(self, config: dict[str, Any], *, same: Sequence[str], device: str) -> bool:
        """Write `config.json` and `environment.json`, or check that the directory is of the same run.

        No other process can claim the directory while this object lives. One in which nothing was found out yet,
        because the task was broken, say, belongs to nobody and can be had by another run.

        Args:
            config: The run's configuration.
            same: Keys in which a resumed run must agree with the earlier one; a key that ends in `_sha256` stands for the
                one without, where there is one.
            device: Device in the environment.

        Returns:
            True for a new directory.

        Raises:
            UsageError: it belongs to another run, another process is at work in it, or it cannot be written.
        """
        self._hold()
        self._require_writable()
        if self._is_free():
            self.write_json("environment.json", capture_environment(device))
            # Last: with it the directory is claimed.
            self.write_json("config.json", config)
            return True
        self.require_same(config, same=same)
        return False

    def require_same(self, config: dict[str, Any], *, same: Sequence[str]) -> None:
        """Check that a run could resume here, as `claim` does, and write nothing; raises UsageError where it could not."""
        if self._is_free():
            return
        earlier = self.read_json("config.json")
        if not isinstance(earlier, dict):
            raise UsageError(f"Wanted to resume in {self.path}; its config.json is not of a run. Choose another directory.")
        for key in same:
            if earlier.get(key) != config[key]:
                short = key.removesuffix("_sha256")
                name = short if short in config else key
                differs = _difference(earlier.get(name), config[name])
                if earlier.get(name) == config[name]:  # the name alone
                    differs = f"still {config[name]}: its file, or a model's code, mode or example inputs, has changed"
                raise UsageError(
                    f"Wanted to resume in {self.path}; it belongs to a run with another `{name}` ({differs}). "
                    "Choose another directory."
                )

    def require_same_texts(self, tasks: Sequence[Task]) -> None:
        """Check that a run has measured these tasks as they are now; raises UsageError where a text has changed."""
        earlier = {found.task: found.task_sha256 for found in self.evaluations()}
        earlier |= {task["id"]: sha256_of(task["source"]) for task in self.read_json("tasks.json") or []}
        for task in tasks:
            if earlier.get(task.id, task.sha256) != task.sha256:
                raise UsageError(
                    f"Wanted to resume in {self.path}; the text of the task {task.id} has changed since that run began. "
                    "Choose another directory, or put the text back."
                )

    def _is_free(self) -> bool:
        if self.holds_only_what_was_asked:
            return True
        is_new = self.read_json("config.json") is None
        for name in _RECORDS if is_new else ():
            if files_of(self.path / name):
                raise UsageError(
                    f"Wanted to resume in {self.path}; it holds {name} but no config.json, which says of what run. "
                    "Put the file back, or choose another directory."
                )
        return is_new

    @property
    def holds_only_what_was_asked(self) -> bool:
        """True while nothing has been found out here."""
        return all(path.name in _ASKED for path in self.path.iterdir())

    def remove_if_nothing_was_found_out(self) -> None:
        """Remove the directory where it holds nothing but what was asked."""
        if self.holds_only_what_was_asked:
            remove_tree(self.path)

    def _hold(self) -> None:
        """Keep other processes from claiming this directory until this object or the process ends."""
        if self._held:
            return
        try:
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unwritable(error) from error
        weakref.finalize(self, os.close, lock)
        try:
            # Of the process, not of the file: the same process may come back, and no child keeps it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UsageError(
                f"Wanted {self.path} to myself; another process is at work in it. Let it end, or choose another directory."
            ) from error
        self._held = True

    def _require_writable(self) -> None:
        """Check that evaluations can be appended, before any is made."""
        path = self.evaluations_path
        is_new = not path.exists()
        try:
            if not is_new and not path.is_file():
                raise OSError(errno.EINVAL, "not a regular file")
            with path.open("ab"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            raise UsageError(
                f"Wanted a run directory whose {path.name} can be written, found {path}: {error.strerror}. Choose another."
            ) from error

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(f"Wanted a directory to write to at {self.path}; {error.strerror}. Choose another one.")

    @property
    def evaluations_path(self) -> Path:
        """The JSON lines file of evaluations."""
        return self.path / "evaluations.jsonl"

    @property
    def screened_path(self) -> Path:
        """The JSON lines file of estimates."""
        return self.path / "screened.jsonl"

    def append(self, record: Evaluation | Screened) -> None:
        """Write one record to the file of its kind and wait until it is on disk; raises InfrastructureError."""
        path = self.screened_path if isinstance(record, Screened) else self.evaluations_path
        self._append(path, record.model_dump_json(), sync=True)

    def append_object(self, name: str, value: Any) -> None:
        """Write one JSON object to a file of lines; a kill of this process does not lose it. Raises InfrastructureError."""
        self._append(self.path / name, json.dumps(value, separators=(",", ":")), sync=False)

    def _append(self, path: Path, line: str, *, sync: bool) -> None:
        try:
            append_lines(path, [line], sync=sync)
        except OSError as error:
            raise not_written(path, error) from error

    def evaluations(self) -> Iterator[Evaluation]:
        """Every whole record of the judge, in order of writing; raises UsageError where the file cannot be read.

        Torn lines are skipped with a warning: their work is still pending.
        """
        return read_records(self.evaluations_path, Evaluation)

    def screened(self) -> Iterator[Screened]:
        """Every whole estimate, in order of writing; raises as `evaluations`."""
        return read_records(self.screened_path, Screened)

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file in one step, so that no reader sees half of it."""
        self.write_text(name, json.dumps(value, indent=2, sort_keys=True) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace a text file in one step; raises InfrastructureError."""
        self.write_bytes(name, text.encode("utf-8"))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace a file in one step; raises InfrastructureError."""
        target = self.path / name
        try:
            replace_file(target, data)
        except OSError as error:
            raise not_written(target, error) from error

    def read_json(self, name: str) -> Any | None:
        """A JSON file of this run, packed or not; None when it is not there. Raises UsageError for a broken one."""
        return read_json(self.path / name)


def require_possible(path: Path) -> None:
    """Check that a run directory is there or can be made, and make none; raises UsageError.

    What comes before the first record may take long, or fail.
    """
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    number = errno.ENOTDIR if not there.is_dir() else 0 if os.access(there, os.W_OK | os.X_OK) else errno.EACCES
    if number:
        found = f"{there}: {os.strerror(number)}"
        raise UsageError(f"Wanted a directory to write to at {path}; found {found}. Choose another one.")


def not_written(target: Path, error: OSError) -> InfrastructureError:
    """Error for a file of a run that cannot be written."""
    return InfrastructureError(f"Wanted to write {target}; {error.strerror}. Make room, or choose another directory.")


def _difference(earlier: Any, now: Any) -> str:
    if isinstance(earlier, dict) and isinstance(now, dict):
        names = [name for name in sorted({*earlier, *now}) if earlier.get(name) != now.get(name)]
        return "; ".join(f"{name}: {_difference(earlier.get(name), now.get(name))}" for name in names)
    return f"{_shortly(earlier)}, now {_shortly(now)}"


def _shortly(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."


def capture_environment(device: str) -> dict[str, Any]:
    """Conditions of a measurement here: versions, processor, GPU, driver, commit."""
    import torch

    packages: dict[str, str | None] = {}
    for name in ("torch", "triton", "numpy", "kernelwright"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    environment: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "packages": packages,
        "commit": commit(),
        "device": device,
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        environment["gpu"] = _gpus()
        # It changes how processes share a GPU, and so what is measured there.
        environment["cuda_device_max_connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return environment


def _gpus() -> list[dict[str, str]]:
    fields = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in text.splitlines() if line.strip()]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of this machine's processor, as the kernel lists it or else as Python has it."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def commit(root: Path = _ROOT) -> str | None:
    """The commit of this package's checkout, with `+dirty` when the tree differs from it; None outside a checkout.

    A copy of the files, which cannot know, is told by KERNELWRIGHT_COMMIT.
    """
    if told := os.environ.get("KERNELWRIGHT_COMMIT"):
        return told
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(
            # Without the lock that a commit at the same time would find taken.
            ["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+dirty" if dirty.stdout.strip() else "")
