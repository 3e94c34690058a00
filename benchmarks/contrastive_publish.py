"""Copy a campaign of contrastive training into a folder that can be published: packed, without weights and databases.

    python benchmarks/contrastive_publish.py CAMPAIGN results/contrastive-h200

CAMPAIGN is the `--work` of benchmarks/contrastive_campaign.py, or what an export of it holds, unpacked. Evaluations,
rollouts and examples are packed with gzip; whatever reads a run directory reads its evaluations as they are.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
from pathlib import Path

from contrastive_export import ARMS, PACKED

WHOLE = ("summary.json", "table.md", "campaign.json", "arms.json", "hacks", "held-out/results")
RUNS = ("sft", "self-supervised", *ARMS, "held-out", "held-out/confirmations")
PLAIN = ("config.json", "environment.json", "state.json", "metrics.jsonl", "hacks.jsonl")
LINES = ("evaluations.jsonl", "rollouts.jsonl", "examples.jsonl")


def main() -> None:
    """Publish one campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    publish(options.campaign, options.target)


def publish(campaign: Path, target: Path) -> None:
    """Write the published form of a campaign into `target`; what is there already and not part of it stays."""
    target.mkdir(parents=True, exist_ok=True)
    for name in WHOLE:
        if (campaign / name).is_dir():
            shutil.copytree(campaign / name, target / name, dirs_exist_ok=True)
        elif (campaign / name).exists():
            shutil.copyfile(campaign / name, target / name)
    for run in RUNS:
        _publish_run(campaign / run, target / run)


def _publish_run(run: Path, target: Path) -> None:
    for name in PLAIN:
        if (run / name).exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / name, target / name)
    for name in LINES:
        # Of evaluations, those that came with an earlier slice are packed already and go in front.
        packed = run / PACKED
        before = packed.read_bytes() if name == "evaluations.jsonl" and packed.exists() else b""
        since = gzip.compress((run / name).read_bytes(), mtime=0) if (run / name).exists() else b""
        if before or since:
            target.mkdir(parents=True, exist_ok=True)
            (target / f"{name}.gz").write_bytes(before + since)


if __name__ == "__main__":
    main()
