"""Copy a campaign of contrastive training into a folder that can be published: packed, without weights and databases.

    python benchmarks/contrastive_publish.py CAMPAIGN results/contrastive-h200

CAMPAIGN is the `--work` of benchmarks/contrastive_campaign.py, or what an export of it holds, unpacked. Evaluations,
rollouts and examples are packed with gzip; whatever reads a run directory reads its evaluations as they are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from contrastive_export import ARMS, PACKED
from publishing import copy_plain, from_command_line, packed_bytes, write_packed

WHOLE = ("summary.json", "table.md", "campaign.json", "arms.json", "hacks", "held-out/results")
RUNS = ("sft", "self-supervised", "held-out", "held-out/confirmations", "held-out/baselines")
PLAIN = ("config.json", "environment.json", "state.json", "metrics.jsonl", "hacks.jsonl")
LINES = ("evaluations.jsonl", "rollouts.jsonl", "examples.jsonl", "screened.jsonl")


def main() -> None:
    """Publish one campaign."""
    from_command_line(__doc__, publish)


def publish(campaign: Path, target: Path) -> None:
    """Write the published form of a campaign into `target`; what is there already and not part of it stays."""
    target.mkdir(parents=True, exist_ok=True)
    for name in WHOLE:
        if (campaign / name).is_dir():
            shutil.copytree(campaign / name, target / name, dirs_exist_ok=True)
        elif (campaign / name).exists():
            shutil.copyfile(campaign / name, target / name)
    arms = [path.name for arm in ARMS for path in (campaign / arm, *sorted(campaign.glob(f"{arm}-seed-*"))) if path.is_dir()]
    for run in (*RUNS, *arms, *(f"{arm}/baselines" for arm in arms)):
        _publish_run(campaign / run, target / run)


def _publish_run(run: Path, target: Path) -> None:
    copy_plain(run, target, PLAIN)
    for name in LINES:
        # Of evaluations, those that came with an earlier slice are packed already and go in front.
        packed = run / PACKED
        before = packed.read_bytes() if name == "evaluations.jsonl" and packed.exists() else b""
        write_packed(target, name, before + packed_bytes(run / name))


if __name__ == "__main__":
    main()
