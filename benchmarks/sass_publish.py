"""Copies a campaign's folder into one that can be published: packed, without weights, caches and paths of the machine.

    python benchmarks/sass_publish.py runs/sass results/sass-h200

Of the machine code a kernel's original is kept once, and the tuned code of the winner that was deployed. Lines of many
schedules are packed; whatever reads a run directory reads them as they are.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from publishing import copy_plain, from_command_line, write_packed

from kernelwright.records import RunDirectory, unpacked

PLAIN = (
    *("config.json", "environment.json", "summary.json", "times.json", "weighed.json", "confirmations.jsonl"),
    *("target.json", "ppo/ppo.json"),
)
PACKED = ("schedules.jsonl", "winner.json", "ppo/ppo.jsonl")
_SOURCE_PATH = re.compile(rb"/[\w.+-]+(?:/[\w.+-]+)+")


def main() -> None:
    """Publish one campaign."""
    from_command_line(__doc__, publish)


def publish(campaign: Path, target: Path) -> None:
    """Write the published form of a campaign into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "calls.json"):
        shutil.copy(campaign / name, target / name)
    for kernel in sorted(path for path in campaign.iterdir() if path.is_dir()):
        runs = sorted(path.parent for path in kernel.glob("*/summary.json"))
        final = RunDirectory(kernel).read_json("deployed.json") or {}
        for run in runs:
            publish_run(run, target / kernel.name / run.name, is_winner=run.name == final.get("agent"))
        if runs:
            (target / kernel.name / "original.cubin").write_bytes(without_paths((runs[0] / "original.cubin").read_bytes()))
        if final:
            shutil.copy(kernel / "deployed.json", target / kernel.name / "deployed.json")


def publish_run(run: Path, target: Path, is_winner: bool) -> None:
    """Write the published form of one agent's run directory."""
    copy_plain(run, target, PLAIN)
    for name in PACKED:
        write_packed(target, name, unpacked(run / name))
    if is_winner and (run / "tuned.cubin").exists():
        (target / "tuned.cubin").write_bytes(without_paths((run / "tuned.cubin").read_bytes()))


def without_paths(cubin: bytes) -> bytes:
    """Return machine code whose debugging sections name no folder; every byte of code stays where it is."""
    return _SOURCE_PATH.sub(lambda found: b"." * len(found[0]), cubin)


if __name__ == "__main__":
    main()
