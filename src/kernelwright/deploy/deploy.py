"""Puts the winner of a search into the cache: proves it again, measures it again, and keeps its provenance.

A run directory holds its winner as three files that `write_winner` makes and `read_winner` reads:

    target.json      the launch spec, with the architecture
    original.cubin   what the compiler made
    tuned.cubin      the winner
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from kernelwright.config import build
from kernelwright.deploy.cache import CacheEntry, ConfirmedSpeedup, Proof, Tuned, TunedCache, key_of
from kernelwright.errors import ConfigError, UsageError
from kernelwright.gpu import ARCHITECTURES, disassemble
from kernelwright.gpu.driver import GpuIdentity
from kernelwright.gpu.launch_spec import LaunchSpec, Target
from kernelwright.judge.schedules import Confirmation, confirm
from kernelwright.records.run_directory import RunDirectory, capture_environment
from kernelwright.sass import CheckReport, check_report
from kernelwright.sass.elf import naming_file, read_cubin
from kernelwright.sass.identity import code_of, transplant
from kernelwright.seconds import utc_now
from kernelwright.version import __version__

_log = logging.getLogger(__name__)
TARGET_FILE, ORIGINAL_FILE, TUNED_FILE = "target.json", "original.cubin", "tuned.cubin"

Remeasure = Callable[[Target, bytes], Confirmation]
"""Times a tuned cubin again; `confirm_one` on a machine with a GPU."""


def confirm_one(target: Target, cubin: bytes) -> Confirmation:
    """Time one schedule against the original in fresh processes; raises as `confirm`."""
    (found,) = confirm(target, [cubin])
    return found


def gpu_of(confirmation: Confirmation) -> GpuIdentity:
    """The GPU of a measured schedule.

    Raises:
        ValueError: it is a model's.
    """
    if confirmation.gpu is None:
        raise ValueError("wanted a schedule that a GPU has run, found a model's costs")
    return confirmation.gpu


class Refusal(StrEnum):
    """Why a tuned kernel is not deployed."""

    UNCHANGED = "unchanged"
    """It is the original."""
    UNTESTED_ARCHITECTURE = "untested-architecture"
    """The rules were not mined for its compute capability."""
    NOT_LEGAL = "not-legal"
    """It is no legal re-schedule of the original."""
    FAILED = "failed"
    """It faulted, hung or ended its process."""
    WRONG_OUTPUT = "wrong-output"
    """Its outputs differ from the original's."""
    NO_IMPROVEMENT = "no-improvement"
    """Fresh processes do not confirm that it is faster."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Outcome of deploying: the entry and its directory, or the refusal and its detail in words."""

    entry: CacheEntry | None = None
    path: Path | None = None
    refusal: Refusal | None = None
    detail: str = ""
    confirmation: Confirmation | None = None


@dataclass(frozen=True, slots=True)
class Winner:
    """Winner of a search: the target, the tuned cubin and its provenance."""

    target: Target
    tuned: bytes
    provenance: Mapping[str, Any] = field(default_factory=dict)


class _TargetFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: LaunchSpec
    architecture: int
    provenance: dict[str, Any] = {}


def write_winner(folder: Path, winner: Winner) -> None:
    """Write a winner into a run directory, each file in one step, the tuned cubin last."""
    run = RunDirectory(folder)
    described = _TargetFile(
        spec=winner.target.spec, architecture=winner.target.architecture, provenance=dict(winner.provenance)
    )
    run.write_json(TARGET_FILE, described.model_dump(mode="json"))
    run.write_bytes(ORIGINAL_FILE, winner.target.cubin)
    run.write_bytes(TUNED_FILE, winner.tuned)


def read_winner(folder: Path) -> Winner:
    """Read what `write_winner` wrote.

    Raises:
        UsageError: the directory holds no winner, or one of its files is damaged.
    """
    try:
        values = json.loads((folder / TARGET_FILE).read_text(encoding="utf-8"))
        original, tuned = ((folder / name).read_bytes() for name in (ORIGINAL_FILE, TUNED_FILE))
    except OSError as error:
        raise UsageError(
            f"Wanted the winner of a search in {folder}, found no {Path(error.filename).name}; name a run that has "
            "confirmed an improvement on a GPU."
        ) from error
    except ValueError as error:
        raise UsageError(f"Wanted JSON in {folder / TARGET_FILE}, found: {error}.") from error
    for name, data in ((ORIGINAL_FILE, original), (TUNED_FILE, tuned)):
        with naming_file(folder / name):
            read_cubin(data)
    try:
        described = build(_TargetFile, values)
    except ConfigError as error:
        raise UsageError(f"{error} The file is {folder / TARGET_FILE}.") from error
    return Winner(Target(described.spec, original, described.architecture), tuned, described.provenance)


def deploy(
    winner: Winner,
    cache: TunedCache,
    *,
    remeasure: Remeasure | None = confirm_one,
    gpu: str | None = None,
) -> Deployment:
    """Prove and measure a winner again and, if it is right and faster, put it into the cache.

    Args:
        remeasure: times it again; None to deploy on the proof alone, for a machine without a GPU.
        gpu: name of the GPU it is for; only with `remeasure=None`, which has none to ask.

    Raises:
        UsageError: `gpu` is missing, a cubin cannot be read, or the cache cannot be written.
        ToolchainError: no fitting disassembler.
        DeviceError: the machine is at fault.
    """
    if (remeasure is None) != (gpu is not None):
        raise UsageError("Wanted the name of a GPU where nothing is measured, and only there. Name it or measure.")
    target = winner.target
    if winner.tuned == target.cubin:
        return Deployment(refusal=Refusal.UNCHANGED, detail="the winner is the original")
    if target.architecture not in ARCHITECTURES:
        tested = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
        said = f"found sm_{target.architecture}, wanted one of {tested}"
        return Deployment(refusal=Refusal.UNTESTED_ARCHITECTURE, detail=said)
    report: CheckReport = check_report(target.cubin, winner.tuned, disassemble)
    if not report.legal:
        return Deployment(refusal=Refusal.NOT_LEGAL, detail=str(report.violations[0]))
    cache.require_writable()
    confirmation: Confirmation | None = None
    if remeasure is not None:
        confirmation = remeasure(target, winner.tuned)
        if confirmation.wrong is not None:
            refusal = Refusal.WRONG_OUTPUT if confirmation.failure is None else Refusal.FAILED
            return Deployment(refusal=refusal, detail=confirmation.wrong, confirmation=confirmation)
        if not confirmation.is_improvement:
            said = (
                f"the speedup's interval begins at {confirmation.low:.4f}, "
                f"wanted above {1 + (confirmation.noise_floor or 0.0):.4f}"
            )
            return Deployment(refusal=Refusal.NO_IMPROVEMENT, detail=said, confirmation=confirmation)
    entry = CacheEntry(
        key=key_of(
            target.cubin,
            target.architecture,
            gpu or (gpu_of(confirmation).name if confirmation else ""),
            target.spec.signature,
        ),
        entry=target.spec.entry,
        original_sha256=hashlib.sha256(target.cubin).hexdigest(),
        tuned_sha256=hashlib.sha256(winner.tuned).hexdigest(),
        proof=Proof(checker=f"kernelwright {__version__}", moved=report.moved),
        measurement=_measurement(confirmation),
        deterministic=target.spec.deterministic,
        rtol=target.spec.rtol,
        atol=target.spec.atol,
        provenance={
            **winner.provenance,
            "environment": capture_environment("cpu" if confirmation is None else "cuda"),
            "deployed_at": utc_now(),
        },
    )
    path = cache.put(entry, winner.tuned)
    if confirmation is not None:
        cache.mark_verified(entry, gpu_of(confirmation))
    return Deployment(entry, path, confirmation=confirmation)


def find_tuned(cache: TunedCache, cubin: bytes, architecture: int, gpu: str, signature: str) -> Tuned | None:
    """Return the tuned kernel for a compiler's cubin, as a cubin of this build; None when there is none.

    The build may differ in debug information from the one that was tuned; its own is kept.
    """
    try:
        found = cache.get(key_of(cubin, architecture, gpu, signature))
        return None if found is None else Tuned(found.entry, transplant(cubin, code_of(found.cubin)))
    except ValueError as error:
        _log.warning("the tuned kernel for %s cannot be used: %s", signature, error)
        return None


def _measurement(confirmation: Confirmation | None) -> ConfirmedSpeedup | None:
    if confirmation is None:
        return None
    gpu = gpu_of(confirmation)
    numbers = asdict(confirmation)
    return ConfirmedSpeedup(
        speedup=numbers["speedup"],
        speedup_low=numbers["low"],
        speedup_high=numbers["high"],
        noise_floor=numbers["noise_floor"],
        original_us=numbers["baseline"],
        processes=confirmation.processes,
        gpu=gpu.name,
        driver=gpu.driver,
    )
