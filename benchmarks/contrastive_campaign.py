"""The whole of recipes/cuda_l1.py on borrowed GPUs, in slices of minutes, with little to carry between machines.

    python benchmarks/contrastive_campaign.py --base MODEL.gguf --work DIR --export OUT --time-limit 540

A slice does what it can before the limit and exports what is worth keeping; the next slice, on the same machine or on
another that is given `--resume OUT`, goes on. `--export-only` packs what there is while another process is at work.

Phases, each of which uses every GPU: teachers' code is judged (no model is needed yet, so it may still be on its way:
`--wait-for-base`); stage 1 is trained on one GPU while the others measure the untrained model; stage 2 on one half while the
other measures stage 1; then vanilla GRPO and the three contrastive arms side by side, each in a process with a GPU of its
own that trains for the same time and then measures what it trained; then what is left to measure. Arms train for as long as
leaves `--reserve` seconds of `--total` for the measuring, unless `contrastive.seconds` says otherwise.

What is exported: contrastive_export.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contrastive_export import ARMS, packed, unpack

from kernelwright.evaluation.sandbox import die_with_parent

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "cuda_l1.py"
REST = ("sft", "self-supervised", "evolutionary")
EXPORT_S = 15.0
"""Kept back for writing the export."""
SUMMARY_S = 30.0
"""And for the summary."""
GRACE_S = 60.0
"""How long a part that was told to stop may take to end its step; then it is killed, which costs that step."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """Parts of the recipe that one process does, one after the other."""

    names: tuple[str, ...]
    gpus: tuple[int, ...] | None
    """Which it may use; None: all."""
    changes: tuple[str, ...] = ()


@dataclass(slots=True)
class Running:
    """A part at work."""

    part: Part
    process: subprocess.Popen[bytes]
    began: float


class Campaign:
    """One slice of a campaign.

    Args:
        base: The model, as the recipe takes it: unpacked by the time that it is needed.
        work: The reproduction's directory on this machine.
        recipes: Folder with the recipe's TOML files.
        changes: Settings to change, as the recipe takes them.
        gpus: How many; 0 runs everything on the CPU.
        limit_s: Of the slice.
        total_s: Of all slices together; None: this slice is all there is.
        reserve_s: Of it, for the measuring.
    """

    def __init__(
        self,
        base: str,
        work: Path,
        recipes: Path,
        changes: Sequence[str],
        gpus: int,
        limit_s: float,
        total_s: float | None = None,
        reserve_s: float = 420.0,
    ) -> None:
        self._base = base
        self._work = work
        self._recipes = recipes
        self._changes = tuple(changes)
        self._gpus = gpus
        self._deadline = time.monotonic() + limit_s - EXPORT_S - SUMMARY_S
        self._end = time.monotonic() + (total_s or limit_s) - EXPORT_S - SUMMARY_S
        self._reserve_s = reserve_s
        self.log: list[dict[str, object]] = []

    def run(self, base_is_ready: Iterable[bool] = (True,)) -> bool:
        """Do what there is time for; True when everything is done. An arm that fails does not hold the others up.

        Args:
            base_is_ready: Asked again and again once the model is needed, until it is True.
        """
        everywhere = tuple(range(self._gpus))
        if not self._has_examples() and not self._together([Part(("augment:sft",), None)]):
            return False
        for ready in base_is_ready:
            if ready:
                break
            if self._left_s() <= 0:
                return False
            time.sleep(POLL_S)
        others = everywhere[1:] or None
        first = [Part(("train:sft",), everywhere[:1] or None)] if not self._has_final("sft") else []
        zero = [Part(("measure:zero-shot",), others)] if not self._is_measured("zero-shot") else []
        if not self._in_turn_or_together(first, zero) or not self._has_final("sft"):
            return False
        half = len(everywhere) // 2
        second = [Part(("train:self-supervised",), everywhere[: max(1, half)] or None)]
        after_first = [Part(("measure:sft",), everywhere[half:] or None)] if not self._is_measured("sft") else []
        if self._has_final("self-supervised"):
            second = []
        if not self._in_turn_or_together(second, after_first) and not self._has_final("self-supervised"):
            return False
        finished = self._arms()
        rest = [name for name in REST if not self._is_measured(name)]
        shares = _dealt(everywhere, len(rest)) if self._gpus else [None] * len(rest)
        parts = [Part((f"measure:{name}",), share) for name, share in zip(rest, shares, strict=True)]
        finished = self._in_turn_or_together(*([part] for part in parts)) and finished
        return finished and self._is_measured("zero-shot")

    def summarise(self) -> None:
        """Write summary.json, table.md and hacks/ from what is finished."""
        self._deadline = time.monotonic() + SUMMARY_S
        self._wait([self._start(Part(("summary",), None), SUMMARY_S)])

    def _arms(self) -> bool:
        todo = [name for name in ARMS if not self._is_measured(name)]
        waves = [todo[start : start + max(1, self._gpus)] for start in range(0, len(todo), max(1, self._gpus))]
        done = True
        for number, wave in enumerate(waves):
            if self._left_s() <= 0:
                return False
            left_s = (self._end - GRACE_S - time.monotonic()) / (len(waves) - number)
            changes: tuple[str, ...] = (f"contrastive.seconds={max(60.0, left_s - self._reserve_s):.0f}",)
            if any(change.startswith("contrastive.seconds=") for change in self._changes) or self._arms_have_begun():
                changes = ()
            share_s = self._left_s() / (len(waves) - number)
            parts = [
                Part((f"train:{name}", f"measure:{name}"), (index,) if self._gpus else None, changes)
                for index, name in enumerate(wave)
            ]
            self._remember(changes)
            done = self._wait([self._start(part, share_s) for part in parts]) and done
        return done

    def _arms_have_begun(self) -> bool:
        """Whether an earlier slice has said how long arms train, which must not change between them."""
        path = self._work / "arms.json"
        if path.exists():
            self._changes = (*self._changes, *json.loads(path.read_text()))
            return True
        return False

    def _remember(self, changes: Sequence[str]) -> None:
        path = self._work / "arms.json"
        if not path.exists():
            path.write_text(json.dumps(list(changes)))

    def _has_examples(self) -> bool:
        return (self._work / "sft" / "examples.jsonl").exists()

    def _has_final(self, name: str) -> bool:
        return (self._work / name / "final").is_dir()

    def _is_measured(self, name: str) -> bool:
        return (self._work / "held-out" / "results" / f"{name}.json").exists()

    def _together(self, parts: Sequence[Part]) -> bool:
        """Whether all of them finished."""
        if self._left_s() <= 0:
            return False
        return self._wait([self._start(part, self._left_s()) for part in parts])

    def _in_turn_or_together(self, *groups: Sequence[Part]) -> bool:
        """Side by side where there is a GPU for each, else one after the other."""
        busy = [group for group in groups if group]
        if len(busy) <= self._gpus:
            return self._together([part for group in busy for part in group])
        return all([self._together(group) for group in busy])

    def _left_s(self) -> float:
        return self._deadline - GRACE_S - time.monotonic()

    def _start(self, part: Part, limit_s: float) -> Running:
        environment = dict(os.environ) | {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if part.gpus is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            known = visible.split(",") if visible else [str(index) for index in range(self._gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(known[index] for index in part.gpus)
        command = [sys.executable, str(RECIPE), "--base", self._base, "--out", str(self._work)]
        command += ["--recipes", str(self._recipes)]
        command += [word for change in (*self._changes, *part.changes) for word in ("--set", change)]
        command += ["--time-limit", f"{max(1.0, limit_s):.0f}", "--only", *part.names]
        logs = self._work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{part.names[-1].replace(':', '-')}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                # A campaign that was killed must not leave parts behind that hold GPUs and directories.
                preexec_fn=die_with_parent,
            )
        return Running(part, process, time.monotonic())

    def _wait(self, running: Sequence[Running]) -> bool:
        """Whether all of them finished."""
        done = True
        left = list(running)
        while left:
            for one in list(left):
                status = one.process.poll()
                if status is None and time.monotonic() > self._deadline:
                    one.process.kill()
                    status = one.process.wait()
                if status is None:
                    continue
                left.remove(one)
                took_s = round(time.monotonic() - one.began, 1)
                self.log.append({"parts": list(one.part.names), "status": status, "seconds": took_s})
                print(f"{' '.join(one.part.names)}: {_in_words(status)} after {took_s:.0f} s", flush=True)
                done = done and status == 0
            if left:
                time.sleep(POLL_S / 4)
        return done


def _dealt(gpus: tuple[int, ...], hands: int) -> list[tuple[int, ...]]:
    """GPUs dealt out to so many parts, all of them to each where there are too few."""
    return [gpus[hand::hands] if len(gpus) >= hands else gpus for hand in range(hands)]


def _in_words(status: int) -> str:
    return {0: "finished", 4: "the time was up", -9: "killed at the limit"}.get(status, f"failed with status {status}")


def unpacking(base: str, work: Path, wait_s: float) -> tuple[str, subprocess.Popen[bytes] | None]:
    """A GGUF file's folder, and the process that unpacks it there, once for each machine; anything else as it is."""
    if not base.endswith(".gguf"):
        return base, None
    folder = work / "base"
    if (folder / "config.json").is_file():
        return str(folder), None
    command = [sys.executable, __file__, "--unpack-base", base, "--work", str(work), "--wait-for-base", str(wait_s)]
    return str(folder), subprocess.Popen(command, env=dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""})


def unpack_base(base: Path, work: Path, wait_s: float) -> None:
    """Write a GGUF file's model into `work/base`, in one step, once the file is there."""
    deadline = time.monotonic() + wait_s
    while not base.is_file() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    from kernelwright.policies.pretrained import Weights, load_pretrained

    model, tokenizer = load_pretrained(Weights(path=str(base), dtype="bfloat16", device="cpu"))
    temporary = work / "base.part"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(str(temporary))
    tokenizer.save_pretrained(str(temporary))
    temporary.rename(work / "base")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one slice; 0 when the campaign is finished, 4 when there is more to do, 3 when a part failed."""
    given = parsed(arguments)
    if given.unpack_base is not None:
        unpack_base(given.unpack_base, given.work, given.wait_for_base)
        return 0
    if given.export_only:
        packed(given.work, given.export)
        return 0
    began = time.monotonic()
    if given.resume is not None and not given.work.exists():
        unpack(given.resume, given.work)
    given.work.mkdir(parents=True, exist_ok=True)
    gpus = given.gpus if given.gpus is not None else _gpus()
    base, process = unpacking(given.base, given.work, given.wait_for_base)
    left_s = given.time_limit - (time.monotonic() - began)
    campaign = Campaign(
        base, given.work, given.recipes, given.changes, gpus, left_s, total_s=given.total, reserve_s=given.reserve
    )
    finished = campaign.run(_until_done(process))
    campaign.summarise()
    _note(given.work, campaign.log, resumed=given.resume is not None, gpus=gpus)
    packed(given.work, given.export)
    if process is not None and process.poll() is None:
        process.kill()
    failed = any(entry["status"] not in (0, 4, -9) for entry in campaign.log)
    return 0 if finished else 3 if failed else 4


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="hub id, folder or GGUF file")
    parser.add_argument("--work", type=Path, required=True, help="the reproduction's directory on this machine")
    parser.add_argument("--export", type=Path, default=Path("export"), help="where to put what is worth keeping")
    parser.add_argument("--resume", type=Path, help="an earlier export to go on from, where WORK is new")
    parser.add_argument("--recipes", type=Path, default=ROOT / "recipes", help="folder with the recipe's TOML files")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="STAGE.KEY=VALUE", help="change a setting"
    )
    parser.add_argument("--gpus", type=int, help="how many; by default all")
    parser.add_argument("--time-limit", type=float, default=540.0, metavar="SECONDS", help="of this slice")
    parser.add_argument("--total", type=float, metavar="SECONDS", help="left for this and all later slices together")
    parser.add_argument("--reserve", type=float, default=420.0, metavar="SECONDS", help="of it, for measuring the arms")
    parser.add_argument("--wait-for-base", type=float, default=0.0, metavar="SECONDS", help="for a GGUF file to arrive")
    parser.add_argument("--export-only", action="store_true", help="pack what there is, and nothing else")
    parser.add_argument("--unpack-base", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _until_done(process: subprocess.Popen[bytes] | None) -> Iterable[bool]:
    """False until a process has ended, then True.

    Raises:
        SystemExit: it failed.
    """
    while process is not None and process.poll() is None:
        yield False
    if process is not None and process.returncode:
        raise SystemExit("the model could not be unpacked; see above")
    yield True


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
