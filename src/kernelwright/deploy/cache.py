"""Keeps tuned kernels on disk, found by what the compiler made, the GPU and how the kernel is launched.

    ROOT/<architecture>/<key>/entry.json          what it is, where it came from, what was proven and measured
    ROOT/<architecture>/<key>/<SHA-256>.cubin     the tuned cubin; an earlier one is removed once the entry is written
    ROOT/<architecture>/<key>/verified-*.json     machines on which its outputs were compared with the original's
    ROOT/writer.lock                              held by who writes or removes

Every file is written whole and renamed into place, cubins under the hash of their contents, the entry last: any
number of processes may write and read at once, and a reader, who needs no lock, sees one entry with its own cubin.
A file that does not match its hash is ignored, with a warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kernelwright.errors import UsageError
from kernelwright.gpu.driver import GpuIdentity
from kernelwright.records.lines import sha256_of
from kernelwright.sass.identity import cubin_identity

ENVIRONMENT_VARIABLE = "KERNELWRIGHT_CACHE"
_ENTRY, _LOCK = "entry.json", "writer.lock"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class _StoredModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CacheKey(_StoredModel):
    """Original, GPU and launch that a tuned kernel is for."""

    identity: str
    """`cubin_identity` of the original."""
    architecture: int
    """Compute capability times ten."""
    gpu: str
    """Name of the GPU it was tuned on."""
    signature: str
    """Launch signature; see `launch_signature`."""

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all fields."""
        return sha256_of(self.model_dump())


class Proof(_StoredModel):
    """Proof that the tuned cubin is a legal re-schedule of the original."""

    checker: str
    """Version of the checker."""
    moved: int
    """Number of instructions outside their original slot."""


class ConfirmedSpeedup(_StoredModel):
    """Speedup of the tuned cubin in fresh processes."""

    speedup: float
    speedup_low: float
    speedup_high: float
    noise_floor: float
    original_us: float
    processes: int
    gpu: str
    driver: str


class CacheEntry(_StoredModel):
    """A tuned kernel without its bytes."""

    version: Literal[1] = 1
    key: CacheKey
    entry: str
    """The kernel's name in the cubin."""
    original_sha256: str
    tuned_sha256: str
    proof: Proof
    measurement: ConfirmedSpeedup | None = None
    """Measured speedup; None when it was put here without a GPU."""
    deterministic: bool = True
    rtol: float = 0.0
    atol: float = 0.0
    provenance: dict[str, Any] = {}
    """Origin: run directory, moves, environment."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A tuned kernel: its entry and its cubin."""

    entry: CacheEntry
    cubin: bytes


class TunedCache:
    """A directory of tuned kernels, by default `KERNELWRIGHT_CACHE` or kernelwright/tuned in the user's cache directory."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = default_root() if root is None else root

    def put(self, entry: CacheEntry, cubin: bytes) -> Path:
        """Keep a tuned kernel, which replaces an earlier one for the same key; return its directory.

        Raises:
            UsageError: the bytes are not those that the entry names, or the directory cannot be written.
        """
        if hashlib.sha256(cubin).hexdigest() != entry.tuned_sha256:
            raise UsageError("Wanted the cubin that the entry names, found other bytes.")
        folder = self._folder(entry.key)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._writing():
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder / f"{entry.tuned_sha256}.cubin", cubin)
                _write(folder / _ENTRY, (entry.model_dump_json(indent=2) + "\n").encode())
                for path in folder.glob("*.cubin"):
                    if path.stem != entry.tuned_sha256 and _DIGEST.fullmatch(path.stem):
                        path.unlink()
        except OSError as error:
            raise self._unwritable(error) from error
        return folder

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Wait until no other process writes: a cubin that no entry names may be one whose entry comes next."""
        with (self.root / _LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def require_writable(self) -> None:
        """Check that something can be kept here, before it is measured at length.

        Raises:
            UsageError: the directory cannot be made or written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".writable.{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(
            f"Wanted to keep tuned kernels in {self.root}, found: {error.strerror}. Choose another directory with --cache "
            f"or {ENVIRONMENT_VARIABLE}."
        )

    def get(self, key: CacheKey) -> Tuned | None:
        """Return the tuned kernel for a key, or None; a damaged one is ignored with a warning."""
        found = self._read(self._folder(key))
        if found is not None and found.entry.key != key:
            _log.warning("%s is of another kernel than its directory says; ignored", self._folder(key))
            return None
        return found

    def entries(self) -> Iterator[Tuned]:
        """Yield every tuned kernel that is whole, in order of architecture and key."""
        for path in sorted(self.root.glob(f"*/*/{_ENTRY}")):
            found = self._read(path.parent)
            if found is not None:
                yield found

    def remove(self, digest: str) -> bool:
        """Remove the kernel whose key starts with `digest`; return whether there was one.

        Raises:
            UsageError: several keys start like that.
        """
        # Only what is named as this class names it: a root given by mistake must not cost anybody's files.
        ours = [path for path in self.root.glob("*/*") if _DIGEST.fullmatch(path.name) and path.is_dir()]
        folders = [path for path in ours if path.name.startswith(digest)] if digest else []
        if len(folders) > 1:
            raise UsageError(f"Wanted one tuned kernel, found {len(folders)} that start with {digest}. Give more digits.")
        for folder in folders:
            with self._writing():
                # The entry first: without it the rest is nothing to a reader.
                for path in sorted(folder.iterdir(), key=lambda path: path.name != _ENTRY):
                    path.unlink(missing_ok=True)
                folder.rmdir()
        return bool(folders)

    def mark_verified(self, entry: CacheEntry, gpu: GpuIdentity) -> None:
        """Remember that outputs of this tuned cubin were right on this GPU with this driver.

        A directory that cannot be written only means that the comparison is repeated.
        """
        try:
            text = json.dumps({"gpu": gpu.name, "driver": gpu.driver, "tuned_sha256": entry.tuned_sha256}, indent=2)
            _write(self._mark(entry, gpu), text.encode())
        except OSError as error:
            _log.info("the comparison of %s is not remembered: %s", entry.entry, error)

    def is_verified(self, entry: CacheEntry, gpu: GpuIdentity) -> bool:
        """True where `mark_verified` was called for this cubin, GPU and driver."""
        return self._mark(entry, gpu).is_file()

    def _mark(self, entry: CacheEntry, gpu: GpuIdentity) -> Path:
        where = sha256_of({"gpu": gpu.name, "driver": gpu.driver, "tuned": entry.tuned_sha256})
        return self._folder(entry.key) / f"verified-{where[:32]}.json"

    def _folder(self, key: CacheKey) -> Path:
        return self.root / str(key.architecture) / key.digest

    def _read(self, folder: Path, without_cubin: CacheEntry | None = None) -> Tuned | None:
        try:
            entry = CacheEntry.model_validate_json((folder / _ENTRY).read_bytes())
            if entry == without_cubin:
                _log.warning("%s has no cubin; ignored", folder)
                return None
            cubin = (folder / f"{entry.tuned_sha256}.cubin").read_bytes()
        except FileNotFoundError as error:
            if Path(error.filename).name == _ENTRY:
                return None
            # It may have been deployed anew since the entry was read; then another entry is there now.
            return self._read(folder, without_cubin=entry)
        except (OSError, ValidationError) as error:
            _log.warning("%s cannot be read; ignored: %s", folder, str(error).splitlines()[0])
            return None
        if hashlib.sha256(cubin).hexdigest() != entry.tuned_sha256:
            _log.warning("the cubin in %s is damaged; ignored", folder)
            return None
        return Tuned(entry, cubin)


def default_root() -> Path:
    """Return the default directory of tuned kernels."""
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernelwright" / "tuned"


def key_of(cubin: bytes, architecture: int, gpu: str, signature: str) -> CacheKey:
    """Return the key of a compiler's cubin.

    Raises:
        ValueError: the bytes are not a cubin.
    """
    return CacheKey(identity=cubin_identity(cubin), architecture=architecture, gpu=gpu, signature=signature)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
