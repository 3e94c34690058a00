"""The whole of recipes/cuda_l1.py on borrowed GPUs, in slices of minutes, with little to carry between machines.

    python benchmarks/contrastive_campaign.py --base MODEL --work DIR --export OUT --time-limit 540

A slice does what it can before the limit and exports what is worth keeping; the next slice, on the same machine or on
another that is given `--resume OUT`, goes on. The order: stages 1 and 2 (judging on every GPU), then vanilla GRPO and the
three contrastive arms, each in a process of its own on a GPU of its own, then the measurements (judging on every GPU).

What is exported: run directories, exemplar databases, adapters in bfloat16, the newest checkpoint of an unfinished arm
without its optimiser's state (Adam then begins anew, which is said in campaign.json), summary.json and table.md. With rank 8
on a model of half a billion parameters an adapter has 9 MB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "cuda_l1.py"
FIRST = ("train:sft", "train:self-supervised")
ARMS = ("train:contrastive-bucket", "train:vanilla-grpo", "train:contrastive-island", "train:contrastive-random")
MEASURES = (
    "measure:zero-shot",
    "measure:sft",
    "measure:self-supervised",
    "measure:contrastive-bucket",
    "measure:vanilla-grpo",
    "measure:evolutionary",
    "measure:contrastive-island",
    "measure:contrastive-random",
)
EXPORT_S = 15.0
"""Kept back for writing the export."""
WEIGHTS = "adapter_model.safetensors"
PACKED = "evaluations.jsonl.gz"
GRACE_S = 60.0
"""How long a part that was told to stop may take to end its step; then it is killed, which costs that step."""
LEFT_OUT = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "tokenizer.json", "README.md")
"""Files of a checkpoint that are large, or made again."""


@dataclass(slots=True)
class Part:
    """A part of the recipe in a process of its own."""

    name: str
    process: subprocess.Popen[bytes]


class Campaign:
    """One slice of a campaign.

    Args:
        base: The model, as the recipe takes it.
        work: The reproduction's directory on this machine.
        recipes: Folder with the recipe's TOML files.
        changes: Settings to change, as the recipe takes them.
        gpus: How many; 0 runs everything on the CPU.
        limit_s: Of the slice.
    """

    def __init__(self, base: str, work: Path, recipes: Path, changes: Sequence[str], gpus: int, limit_s: float) -> None:
        self._base = base
        self._work = work
        self._recipes = recipes
        self._changes = changes
        self._gpus = gpus
        self._deadline = time.monotonic() + limit_s - EXPORT_S
        self.log: list[dict[str, object]] = []

    def run(self) -> bool:
        """Do what there is time for; True when everything is done. An arm that fails does not hold the others up."""
        if not all(self._has_final(part) or self._alone(part) for part in FIRST):
            return False
        finished = self._side_by_side(ARMS)
        for part in MEASURES:
            name = part.partition(":")[2]
            trained = {"zero-shot": "sft", "evolutionary": "self-supervised"}.get(name, name)
            if (self._work / "held-out" / "results" / f"{name}.json").exists():
                continue
            finished = self._has_final(f"train:{trained}") and self._alone(part) and finished
        return finished

    def _has_final(self, part: str) -> bool:
        return (self._work / part.partition(":")[2] / "final").is_dir()

    def _alone(self, part: str) -> bool:
        """A part that has every GPU; whether it is finished."""
        if self._left_s() <= 0:
            return False
        return self._wait([self._start(part, None)])

    def _side_by_side(self, parts: Sequence[str]) -> bool:
        """Parts that have a GPU each, in waves of as many as there are GPUs; with few GPUs each wave gets its share."""
        waves = [parts[start : start + max(1, self._gpus)] for start in range(0, len(parts), max(1, self._gpus))]
        done = True
        for number, wave in enumerate(waves):
            left_s = self._left_s()
            if left_s <= 0:
                return False
            share_s = left_s / (len(waves) - number)
            started = [self._start(part, index if self._gpus else None, share_s) for index, part in enumerate(wave)]
            done = self._wait(started) and done
        return done

    def _left_s(self) -> float:
        return self._deadline - GRACE_S - time.monotonic()

    def _start(self, part: str, gpu: int | None, limit_s: float | None = None) -> Part:
        environment = dict(os.environ) | {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if gpu is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
        limit = max(1.0, limit_s if limit_s is not None else self._left_s())
        command = [
            sys.executable,
            str(RECIPE),
            "--base",
            self._base,
            "--out",
            str(self._work),
            "--recipes",
            str(self._recipes),
        ]
        command += [word for change in self._changes for word in ("--set", change)]
        command += ["--time-limit", f"{limit:.0f}", "--only", part]
        logs = self._work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{part.replace(':', '-')}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return Part(part, process)

    def _wait(self, parts: Sequence[Part]) -> bool:
        """Whether all of them finished."""
        began = time.monotonic()
        done = True
        for part in parts:
            try:
                status = part.process.wait(timeout=max(1.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.process.kill()
                status = part.process.wait()
            self.log.append({"part": part.name, "status": status, "seconds": round(time.monotonic() - began, 1)})
            print(f"{part.name}: {_in_words(status)} after {time.monotonic() - began:.0f} s", flush=True)
            done = done and status == 0
        return done


def _in_words(status: int) -> str:
    return {0: "finished", 4: "the time was up", -9: "killed at the limit"}.get(status, f"failed with status {status}")


def export(work: Path, out: Path) -> None:
    """Copy what is worth keeping, adapters in bfloat16; an earlier export there is replaced file by file."""
    for path in sorted(work.rglob("*")):
        relative = path.relative_to(work)
        parts = relative.parts
        if not path.is_file() or parts[0] in ("base", "logs") or "ref" in parts:
            continue
        if "checkpoints" in parts and path.name in LEFT_OUT:
            continue
        if "checkpoints" in parts and not _is_newest(path, work / parts[0]):
            continue
        if "checkpoints" in parts and path.name == WEIGHTS and (work / parts[0] / "final").is_dir():
            continue  # those of `final`, which stand in for them when the arm is taken further
        if parts[1:2] in (("rounds",), ("steps",)) and (work / parts[0] / "final").is_dir():
            continue
        if path.name.startswith("attempts-") and (work / parts[0] / "results" / f"{parts[-2]}.json").exists():
            continue
        target = out / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name == WEIGHTS:
            _halved(path, target)
        elif path.name == "evaluations.jsonl":
            _packed(path, target.with_name(PACKED))
        elif path.name == PACKED:
            # One that came with an earlier export goes in front of what has been added since.
            if not path.with_name("evaluations.jsonl").exists():
                shutil.copyfile(path, target)
        else:
            shutil.copyfile(path, target)
    for stale in sorted(out.glob("*/checkpoints/checkpoint-*")):
        if not _is_newest(work / stale.relative_to(out) / WEIGHTS, work / stale.relative_to(out).parts[0]):
            shutil.rmtree(stale)


def _is_newest(path: Path, run: Path) -> bool:
    from kernelwright.rl.training.fitting import last_checkpoint

    newest = last_checkpoint(run / "checkpoints")
    return newest is not None and Path(newest) in path.parents


def _packed(path: Path, target: Path) -> None:
    """All evaluations of a run in one gzip file, which a run directory reads as it is: a tenth of the size."""
    earlier = path.with_name(PACKED)
    before = earlier.read_bytes() if earlier.exists() else b""
    target.write_bytes(before + gzip.compress(path.read_bytes()))


def _halved(path: Path, target: Path) -> None:
    """An adapter's weights in bfloat16: half the size, and what the model computes in anyway."""
    import torch
    from safetensors.torch import load_file, save_file

    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}, target)


def unpacked(base: str, work: Path) -> str:
    """A GGUF file as a folder, unpacked once for each machine; anything else as it is."""
    if not base.endswith(".gguf"):
        return base
    folder = work / "base"
    if not (folder / "config.json").is_file():
        from kernelwright.policies.pretrained import Weights, load_pretrained

        model, tokenizer = load_pretrained(Weights(path=base, dtype="bfloat16"))
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
    return str(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one slice; 0 when the campaign is finished, 4 when there is more to do, 3 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="hub id, folder or GGUF file")
    parser.add_argument("--work", type=Path, required=True, help="the reproduction's directory on this machine")
    parser.add_argument("--export", type=Path, required=True, help="where to copy what is worth keeping")
    parser.add_argument("--resume", type=Path, help="an earlier export to go on from, where WORK is new")
    parser.add_argument("--recipes", type=Path, default=ROOT / "recipes", help="folder with the recipe's TOML files")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="STAGE.KEY=VALUE", help="change a setting"
    )
    parser.add_argument("--gpus", type=int, help="how many; by default all")
    parser.add_argument("--time-limit", type=float, default=540.0, metavar="SECONDS", help="of this slice")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    if given.resume is not None and not given.work.exists():
        shutil.copytree(given.resume, given.work)
    given.work.mkdir(parents=True, exist_ok=True)
    gpus = given.gpus if given.gpus is not None else _gpus()
    base = unpacked(given.base, given.work)
    left_s = given.time_limit - (time.monotonic() - began)
    campaign = Campaign(base, given.work, given.recipes, given.changes, gpus, left_s)
    finished = campaign.run()
    _note(given.work, campaign.log, resumed=given.resume is not None, gpus=gpus)
    export(given.work, given.export)
    failed = any(entry["status"] not in (0, 4, -9) for entry in campaign.log)
    return 0 if finished else 3 if failed else 4


def _note(work: Path, log: list[dict[str, object]], *, resumed: bool, gpus: int) -> None:
    """Add this slice to `campaign.json`."""
    path = work / "campaign.json"
    slices = json.loads(path.read_text()) if path.exists() else []
    slices.append({"parts": log, "on_another_machine": resumed, "gpus": gpus})
    path.write_text(json.dumps(slices, indent=2) + "\n")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
