"""Packs what is worth keeping of a campaign into a few files of bounded size, to carry it between machines.

`records.tar.gz.N` (run directories, exemplar databases, the evaluations that all parts share, hacks, summary, table, logs)
and `weights.tar.N` (adapters as int8, see contrastive_weights.py; the newest checkpoint of an unfinished arm without its
optimiser's state: Adam then begins anew, which is said in campaign.json; stage 1's only until nothing needs them any more).
With rank 8 on a model of 1.5 billion parameters an adapter has 9.3 MB, so that five fit beside the records.

The shared evaluations come along because arms of a later slice are compared with those of an earlier one: go on with
machines of the same kind, or leave `judged.sqlite` behind.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

ARMS = ("contrastive-bucket", "vanilla-grpo", "contrastive-island", "contrastive-random")
"""The most telling first."""
ABLATED = "ablated"
"""Marks a campaign that measures the arm of buckets with changed prompts too."""
RESTARTED = "restarted"
"""Marks a campaign whose next slice goes on from what was published of it."""
STAGE_2 = "self-supervised"
WEIGHTS = "adapter_model.safetensors"
PACKED_WEIGHTS = "adapter_model.int8.safetensors"
PACKED = "evaluations.jsonl.gz"
LEFT_OUT = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "tokenizer.json", "README.md")
"""Files that are large, or made again."""
PIECE_BYTES = 15 << 20
PIECES = 4
"""Largest size of an export, which has to fit a limit of 64 MiB on transfers."""


def export(work: Path, out: Path) -> None:
    """Copy what is worth keeping; an earlier export there is replaced file by file."""
    for path in sorted(work.rglob("*")):
        relative = path.relative_to(work)
        parts = relative.parts
        if not path.is_file() or parts[0] in ("base", "base.part") or "ref" in parts:
            continue
        if any(part.startswith(".") for part in parts):
            continue  # not whole yet
        # A model that was tuned in full is a base of its own, with a tokenizer; an adapter has that of its base.
        is_kept = path.name == "tokenizer.json" and (path.parent / "config.json").exists()
        if (path.name in LEFT_OUT and not is_kept) or path.name.endswith(("-wal", "-shm")):
            continue
        if "checkpoints" in parts and not _is_newest(path, work / parts[0]):
            continue
        if "checkpoints" in parts and path.name == WEIGHTS and (work / parts[0] / "final").is_dir():
            continue  # those of `final`, which stand in for them when the arm is taken further
        if path.name == WEIGHTS and parts[0] == "sft" and _is_past_stage_1(work):
            continue
        if parts[1:2] in (("rounds",), ("steps",)) and (work / parts[0] / "final").is_dir():
            continue
        if path.name.startswith("attempts-") and (work / parts[0] / "results" / f"{parts[-2]}.json").exists():
            continue
        # Somebody may be at work, and what was there a moment ago may have made room for something newer.
        with suppress(FileNotFoundError):
            _copy(path, out / relative)
    for stale in sorted(out.glob("*/checkpoints/checkpoint-*")):
        if not _is_newest(work / stale.relative_to(out) / WEIGHTS, work / stale.relative_to(out).parts[0]):
            shutil.rmtree(stale)


def _is_past_stage_1(work: Path) -> bool:
    """True where nothing needs stage 1's weights any more."""
    return (work / STAGE_2 / "final").is_dir() and (work / "held-out" / "results" / "sft.json").exists()


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.name == "evaluations.jsonl":
        _packed(path, target.with_name(PACKED))
    elif path.name == PACKED:
        # One that came with an earlier export goes in front of what has been added since.
        if not path.with_name("evaluations.jsonl").exists():
            shutil.copyfile(path, target)
    elif path.suffix == ".sqlite":
        _backed_up(path, target)
    else:
        shutil.copyfile(path, target)


def _is_newest(path: Path, run: Path) -> bool:
    from kernelwright.contrastive.fitting import checkpoints_in

    found = checkpoints_in(run / "checkpoints")
    return bool(found) and found[-1] in path.parents


def _packed(path: Path, target: Path) -> None:
    """All evaluations of a run in one gzip file, which a run directory reads as it is: a tenth of the size."""
    earlier = path.with_name(PACKED)
    before = earlier.read_bytes() if earlier.exists() else b""
    target.write_bytes(before + gzip.compress(path.read_bytes()))


def _backed_up(path: Path, target: Path) -> None:
    """A database as it is at one moment, though somebody may be writing."""
    target.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)


def pack(folder: Path, out: Path) -> list[str]:
    """Put a folder into at most `PIECES` files of `PIECE_BYTES`; the weights that do not fit are named and left out."""
    out.mkdir(parents=True, exist_ok=True)
    pieces = _pieces("records.tar.gz", _records(folder))
    weights = packed_weights(folder)
    while (more := _pieces("weights.tar", _tarred(weights))) and len(pieces) + len(more) > PIECES:
        print(f"left out of the export: {weights.popitem()[0]}", flush=True)
    pieces |= more
    for name, data in pieces.items():
        (out / f".{name}").write_bytes(data)
    # A machine that goes away meanwhile leaves the export of before, or this one.
    for stale in (*out.glob("records.tar.gz.*"), *out.glob("weights.tar.*")):
        if stale.name not in pieces:
            stale.unlink()
    for name in pieces:
        (out / f".{name}").rename(out / name)
    return sorted(pieces)


def packed_weights(folder: Path) -> dict[str, bytes]:
    """Every adapter of an export as int8, by its place, those that matter most first."""
    from contrastive_weights import packed_adapter
    from safetensors.torch import load_file

    stage_2 = folder / STAGE_2 / "final" / WEIGHTS
    since = packed_adapter(load_file(stage_2)) if stage_2.exists() else None
    packed = {}
    for path in sorted(folder.rglob(WEIGHTS), key=lambda path: (_rank(path, folder), path)):
        relative = path.relative_to(folder)
        is_arm = relative.parts[0].partition("-seed-")[0] in ARMS
        data = since if path == stage_2 else packed_adapter(load_file(path), since if is_arm else None)
        assert data is not None
        packed[str(relative.with_name(PACKED_WEIGHTS))] = data
    return packed


def restore_weights(folder: Path) -> None:
    """Put every packed adapter's weights in its place, in float32."""
    from contrastive_weights import restored_adapter
    from safetensors.torch import save_file

    stage_2 = folder / STAGE_2 / "final" / PACKED_WEIGHTS
    since = stage_2.read_bytes() if stage_2.exists() else None
    for path in list(folder.rglob(PACKED_WEIGHTS)):
        save_file(restored_adapter(path.read_bytes(), since), path.with_name(WEIGHTS), metadata={"format": "pt"})
        path.unlink()


def _rank(path: Path, folder: Path) -> tuple[bool, int]:
    """Rank of weights: those that others are trained from, then the arms in their order, those first that have yet to
    be measured. Once stage 2 is trained, stage 1's are only to be measured, and a minute's work to make again."""
    ended = (folder / STAGE_2 / "final").is_dir()
    order = (STAGE_2, *ARMS, "sft") if ended else (STAGE_2, "sft", *ARMS)
    name = path.relative_to(folder).parts[0]
    arm = name.partition("-seed-")[0]
    # Buckets may be measured with changed prompts too, of which this is the last.
    ablated = arm == "contrastive-bucket" and (folder / ABLATED).exists()
    last = f"{name}-one-level" if ablated else name
    is_measured = arm in ARMS and (folder / "held-out" / "results" / f"{last}.json").exists()
    return is_measured, order.index(arm) if arm in order else len(order)


def _records(folder: Path) -> bytes:
    """All files but weights."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != WEIGHTS:
                tar.add(path, arcname=str(path.relative_to(folder)))
    return held.getvalue()


def _tarred(files: Mapping[str, bytes]) -> bytes:
    if not files:
        return b""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, data in files.items():
            described = tarfile.TarInfo(name)
            described.size = len(data)
            tar.addfile(described, io.BytesIO(data))
    return held.getvalue()


def _pieces(name: str, data: bytes) -> dict[str, bytes]:
    return {
        f"{name}.{number}": data[start : start + PIECE_BYTES]
        for number, start in enumerate(range(0, len(data), PIECE_BYTES))
    }


def unpack(packed: Path, work: Path) -> None:
    """Bring an export back, as a whole or not at all."""
    temporary = work.with_name(f".{work.name}-unpacked")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in ("records.tar.gz", "weights.tar"):
        pieces = sorted(packed.glob(f"{name}.*"), key=lambda path: int(path.suffix[1:]))
        if pieces:
            with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in pieces))) as tar:
                tar.extractall(temporary, filter="data")
    restore_weights(temporary)
    temporary.rename(work)


def packed(work: Path, out: Path) -> None:
    """Export and pack."""
    staging = work.with_name(f".{work.name}-export-{os.getpid()}")
    try:
        export(work, staging)
        print("exported:", *pack(staging, out), flush=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
