"""Copies a campaign of contrastive training into a folder that can be published: packed, without weights and databases.

    python benchmarks/contrastive_publish.py CAMPAIGN results/contrastive-h200
    python benchmarks/contrastive_publish.py CAMPAIGN results/contrastive-h200 --weights

CAMPAIGN is the `--work` of benchmarks/contrastive_campaign.py, or what an export of it holds, unpacked. Evaluations,
rollouts and examples are packed; whatever reads a run directory reads its evaluations as they are.

With `--weights` the adapters of stage 2 and of the arms come along as int8, with what an arm's checkpoint says of its
training: contrastive_restart.py makes a campaign of it that goes on. What rounding changed is printed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from contrastive_export import ARMS, PACKED_WEIGHTS, STAGE_2, WEIGHTS, export, packed_weights
from publishing import copy_plain, write_packed

from kernelwright.records import unpacked

WHOLE = ("summary.json", "table.md", "campaign.json", "arms.json", "hacks", "held-out/results")
RUNS = ("sft", "self-supervised", "held-out", "held-out/confirmations", "held-out/baselines")
PLAIN = ("config.json", "environment.json", "state.json", "metrics.jsonl", "hacks.jsonl")
STATE = ("adapter_config.json", "contrastive.json")
"""Files that stand beside the weights of a checkpoint or of a finished model."""
LINES = ("evaluations.jsonl", "rollouts.jsonl", "examples.jsonl", "screened.jsonl")


def main() -> None:
    """Publish one campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--weights", action="store_true", help="publish adapters too, for a campaign that goes on")
    given = parser.parse_args()
    publish(given.campaign, given.target)
    if given.weights:
        publish_weights(given.campaign, given.target)


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


def publish_weights(campaign: Path, target: Path) -> None:
    """Write stage 2's and the arms' adapters into `target`, as int8, and say what rounding changed."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder)
        export(campaign, kept)
        # Nothing is trained from stage 1 any more, and it takes a minute to make again.
        shutil.rmtree(kept / "sft", ignore_errors=True)
        packed = packed_weights(kept)
        for name, data in packed.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)
        for run in {Path(name).parts[0] for name in packed}:
            found = [path for name in STATE for path in (kept / run).rglob(name)]
            copy_plain(kept, target, [str(path.relative_to(kept)) for path in found])
        _say_errors(kept, packed)


def _say_errors(kept: Path, packed: dict[str, bytes]) -> None:
    from contrastive_weights import error_of, restored_adapter
    from safetensors.torch import load_file

    stage_2 = f"{STAGE_2}/final/{PACKED_WEIGHTS}"
    begun = load_file(kept / STAGE_2 / "final" / WEIGHTS) if stage_2 in packed else None
    for name, data in packed.items():
        wanted = load_file((kept / name).with_name(WEIGHTS))
        found = restored_adapter(data, packed.get(stage_2))
        said = f"{name}: {len(data):,} bytes, relative error {error_of(found, wanted):.2%}"
        if name != stage_2 and begun is not None:
            said += f", of its change since stage 2 {error_of(found, wanted, begun):.2%}"
        print(said)


def _publish_run(run: Path, target: Path) -> None:
    copy_plain(run, target, PLAIN)
    for name in LINES:
        write_packed(target, name, unpacked(run / name))


if __name__ == "__main__":
    main()
