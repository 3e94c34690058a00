"""Runs the whole of recipes/cuda_l1.py on borrowed GPUs, in slices of minutes, with little to carry between machines.

    python benchmarks/contrastive_campaign.py --base MODEL.gguf --work DIR --export OUT --time-limit 540

A slice does what it can before the limit and exports what is worth keeping; the next slice, on the same machine or on
another that is given `--resume OUT`, goes on. `--export-only` packs what there is while another process is at work.

First teachers' code is judged on every GPU (no model is needed yet, so it may still be on its way: `--wait-for-base`). Then
two lanes, each with half of the GPUs: one trains stages 1 and 2 and measures stage 2, the other measures the untrained
model, stage 1 and evolutionary search (where an earlier slice has measured the first two, training has all GPUs). Then the
arms of stage 3, one to a GPU, the most telling first, each in a process that trains for the same time as the others do and
then measures what it trained. They train for as long as leaves time to measure all of them in `--total`, unless
`contrastive.seconds` says otherwise; where that would be less than `LEAST_ARM_S`, the last arms are left for a later slice.
With `--arms-first` both stages are trained on all GPUs, then the arms; only then is anything measured: the arms, the
others, and the arms' ablations. `--arms` names the only ones to train.

What is exported: contrastive_export.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contrastive_export import ABLATED, ARMS, RESTARTED, packed, unpack

from kernelwright.judge.isolation.sandbox import die_with_parent

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "cuda_l1.py"
STAGES = ("sft", "self-supervised")
MEASURED = ("zero-shot", *STAGES, "evolutionary")
ABLATIONS = ("shuffled", "one-level")
EXPORT_S = 15.0
"""Kept back for writing the export."""
SUMMARY_S = 30.0
"""And for the summary."""
GRACE_S = 45.0
"""Time in which a part that was told to stop ends its step, seconds; it is killed after that, which costs that step."""
LOADING_S = 45.0
"""For an arm to load the model and to start its judges. A guess."""
RESERVE_S = 300.0
"""For measuring an arm, where nothing has been measured yet to tell from. A guess."""
RESERVE_SHARE = 1.15
"""Multiple of the longest time that measuring has taken: an arm that is shown exemplars draws its answers in rounds."""
LEAST_ARM_S = 300.0
"""Below it an arm makes too few steps to be worth measuring. Our choice."""
POLL_S = 1.0
NOT_FAILED = (0, 4, -9)
"""Statuses of parts that finished, that ran out of time, and that were killed at the limit."""


@dataclass(frozen=True, slots=True)
class Part:
    """Parts of the recipe that one process does, one after the other."""

    names: tuple[str, ...]
    gpus: tuple[int, ...] | None
    """GPUs that it may use; None means all."""
    changes: tuple[str, ...] = ()
    needs: str | None = None
    """The stage that must be trained before it can start."""
    least_s: float = 0.0
    """With less time left it is not started."""
    tried: bool = False
    """True after a first failure: a part is tried twice, since nobody may be looking for minutes."""


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
        reserve_s: For measuring one arm on one GPU; None: what measuring has taken so far.
        resumed: Whether it goes on from another machine's export, which is noted.
        arms: Of stage 3, the most telling first.
        arms_first: Whether all of them are trained before anything is measured.
        equal_steps: Whether arms train for as many steps as the settings say, however many slices that takes, and not for
            the same time.
        measured: Models that are measured besides the arms.
        recipe_words: More words of the recipe's command line.
        export: Packs what there is, every so many seconds: a machine may go away without a word.
    """

    def __init__(
        self,
        base: str,
        work: Path,
        recipes: Path,
        changes: Sequence[str],
        gpus: int,
        limit_s: float,
        *,
        total_s: float | None = None,
        reserve_s: float | None = None,
        resumed: bool = False,
        arms: Sequence[str] = ARMS,
        arms_first: bool = False,
        equal_steps: bool = False,
        measured: Sequence[str] = MEASURED,
        recipe_words: Sequence[str] = (),
        export: Callable[[], object] | None = None,
        export_every_s: float = math.inf,
    ) -> None:
        self._base = base
        self._work = work
        self._recipes = recipes
        self._changes = tuple(changes)
        self._gpus = gpus
        self._began = time.monotonic()
        self._deadline = self._began + limit_s - EXPORT_S - SUMMARY_S
        self._end = self._began + (total_s or limit_s) - EXPORT_S - SUMMARY_S
        self._reserve_s = reserve_s
        self._arms = tuple(arms)
        self._arms_first = arms_first
        self._equal_steps, self._measured, self._recipe_words = equal_steps, tuple(measured), tuple(recipe_words)
        self._export, self._export_every_s, self._exported = export, export_every_s, self._began
        self.log: list[dict[str, Any]] = []
        """Parts that were done in this slice; `campaign.json` has those of all slices."""
        self._slices: list[dict[str, Any]] = _slices_of(work)
        self._slices.append({"parts": self.log, "on_another_machine": resumed, "gpus": gpus})

    def run(self, base_is_ready: Iterable[bool] = (True,)) -> bool:
        """Do what there is time for; True when everything is done. A part that fails holds up only what needs it.

        Args:
            base_is_ready: Asked again and again once the model is needed, until it is True.
        """
        if not self._has_examples() and not self._side_by_side([[Part(("augment:sft",), None)]]):
            return False
        for ready in base_is_ready:
            if ready:
                break
            if self._left_s() <= 0:
                return False
            time.sleep(POLL_S)
        # Stage 1's weights may be gone once stage 2 is trained: nothing but its measuring needs them.
        trained = [name for name in STAGES if self._has_final(name)]
        untrained = () if STAGES[-1] in trained else tuple(f"train:{name}" for name in STAGES if name not in trained)
        if untrained and (self._arms_first or not self._measuring("zero-shot") + self._measuring("sft")):
            self._side_by_side([[Part(untrained, None)]])  # nothing is to be done beside it
            untrained = ()
        if self._arms_first:
            self._train_arms()
        first = self._measuring("self-supervised")
        if untrained:
            # One process: starting judges takes long.
            first = [Part(untrained + tuple(name for part in first for name in part.names), None)]
        others = [part for name in ("zero-shot", "sft", "evolutionary") for part in self._measuring(name)]
        self._side_by_side([first, others])
        self._train_arms()
        return all(self._is_measured(name) for name in self._measured) and all(map(self._is_done, self._arms))

    def summarise(self) -> None:
        """Write summary.json, table.md and hacks/ from what is finished."""
        self._deadline = time.monotonic() + SUMMARY_S + GRACE_S
        self._side_by_side([[Part(("summary",), None)]])

    def _measuring(self, name: str) -> list[Part]:
        needs = {"zero-shot": None, "evolutionary": "self-supervised"}.get(name, name)
        if name not in self._measured:
            return []
        return [] if self._is_measured(name) else [Part((f"measure:{name}",), None, needs=needs)]

    def _train_arms(self) -> None:
        """Train and measure those arms that are not measured yet, once there is a model to begin with."""
        todo = [name for name in self._arms if not self._is_done(name)]
        if not todo or not self._has_final("self-supervised"):
            return
        at_once = max(1, self._gpus)
        # What is left of a slice is worth an arm's start if a step fits in behind.
        least_s = LOADING_S if self._gpus else 0.0
        if self._left_s() <= least_s:
            return
        changes = self._time_of_arms(math.ceil(len(todo) / at_once))

        def part(index: int, names: tuple[str, ...], needs: str | None = None) -> Part:
            return Part(names, (index,) if self._gpus else None, changes, needs, least_s=0.0 if needs else least_s)

        owns = [todo[index::at_once] for index in range(at_once)]
        if not self._arms_first:
            self._wait(
                [
                    [part(index, (f"train:{name}", f"measure:{name}", *self._ablated(name))) for name in own]
                    for index, own in enumerate(owns)
                ]
            )
            return
        lanes = [
            [part(index, (f"train:{name}",)) for name in own if not self._has_final(name)]
            + [part(index, (f"measure:{name}",), name) for name in own if self._is_to_do(f"measure:{name}")]
            for index, own in enumerate(owns)
        ]
        # The other models, on the GPU that has least to do; then what is told of a model that is measured.
        for other in (other for name in self._measured for other in self._measuring(name)):
            index = min(range(at_once), key=lambda index: len(lanes[index]))
            lanes[index].append(replace(other, gpus=(index,) if self._gpus else None))
        for index, own in enumerate(owns):
            ablated = [(name, tuple(filter(self._is_to_do, self._ablated(name)))) for name in own]
            lanes[index] += [part(index, names, name) for name, names in ablated if names]
        self._wait(lanes)

    def _ablated(self, name: str) -> tuple[str, ...]:
        """Parts that measure an arm's model with changed prompts."""
        if "--ablations" not in self._recipe_words or not name.startswith("contrastive-bucket"):
            return ()
        return tuple(f"measure:{name}-{ablation}" for ablation in ABLATIONS)

    def _time_of_arms(self, waves: int) -> tuple[str, ...]:
        """The change of settings that says how long each arm trains: the same for all, in all slices."""
        if self._equal_steps or any(change.startswith("contrastive.seconds=") for change in self._changes):
            return ()
        path = self._work / "arms.json"
        if not path.exists():
            left_s = self._end - GRACE_S - time.monotonic()
            each_s = [left_s / count - LOADING_S - self._measuring_s() for count in range(waves, 0, -1)]
            seconds = next((each for each in each_s if each >= LEAST_ARM_S), max(60.0, each_s[-1]))
            path.write_text(json.dumps([f"contrastive.seconds={seconds:.0f}"]))
        return tuple(json.loads(path.read_text()))

    def _measuring_s(self) -> float:
        """Time to measure an arm on one GPU, seconds."""
        if self._reserve_s is not None:
            return self._reserve_s
        taken: dict[str, float] = {}
        for entry in (entry for one in self._slices for entry in one["parts"]):
            [name, *others] = entry["parts"]
            if not others and name in ("measure:sft", "measure:self-supervised", "measure:evolutionary"):
                taken[name] = taken.get(name, 0.0) + entry["seconds"] * max(1, entry.get("gpus", 1))
        return RESERVE_SHARE * max(taken.values()) if taken else RESERVE_S

    def _has_examples(self) -> bool:
        return (self._work / "sft" / "examples.jsonl").exists()

    def _has_final(self, name: str) -> bool:
        return (self._work / name / "final").is_dir()

    def _is_measured(self, name: str) -> bool:
        return (self._work / "held-out" / "results" / f"{name}.json").exists()

    def _is_to_do(self, measuring: str) -> bool:
        return not self._is_measured(measuring.removeprefix("measure:"))

    def _is_done(self, arm: str) -> bool:
        """True where an arm is measured, with changed prompts too where that is wanted."""
        return not any(map(self._is_to_do, (f"measure:{arm}", *self._ablated(arm))))

    def _side_by_side(self, lanes: Sequence[Sequence[Part]]) -> bool:
        """Do lanes of parts beside one another, each with its share of the GPUs, or one after the other where there are too
        few for that. True when all parts finished."""
        busy = [lane for lane in lanes if lane]
        if len(busy) > max(1, self._gpus):
            busy = [[part for lane in busy for part in lane]]
        everywhere = tuple(range(self._gpus))
        # Uneven shares of the GPUs go to the first lane, which is the longest.
        shares = [everywhere[index :: len(busy)] if self._gpus else None for index in range(len(busy))]
        return self._wait([[replace(part, gpus=share) for part in lane] for lane, share in zip(busy, shares, strict=True)])

    def _left_s(self) -> float:
        return self._deadline - GRACE_S - time.monotonic()

    def _start(self, part: Part, limit_s: float) -> Running:
        environment = dict(os.environ) | {"TOKENIZERS_PARALLELISM": "false"}
        if part.gpus is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            known = visible.split(",") if visible else [str(index) for index in range(self._gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(known[index] for index in part.gpus)
        command = [sys.executable, str(RECIPE), "--base", self._base, "--out", str(self._work)]
        command += ["--recipes", str(self._recipes), *self._recipe_words]
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

    def _wait(self, lanes: Sequence[Sequence[Part]]) -> bool:
        """Do the parts of each lane in order, lanes beside one another; True when all finished. A part whose stage nobody
        has trained by the time that nothing else is at work is left out."""
        waiting = [list(lane) for lane in lanes]
        running: dict[int, Running] = {}
        done = True
        while running or any(waiting):
            for number, lane in enumerate(waiting):
                if number not in running and lane and self._may_start(lane[0]):
                    running[number] = self._start(lane.pop(0), self._left_s())
            if not running:
                done = False
                waiting = [lane[1:] for lane in waiting]
            for number, one in list(running.items()):
                status = one.process.poll()
                if status is None and time.monotonic() > self._deadline:
                    one.process.kill()
                    status = one.process.wait()
                if status is not None:
                    del running[number]
                    self._note(one, status)
                    if status in NOT_FAILED or one.part.tried:
                        done = done and status == 0
                    else:
                        waiting[number].insert(0, replace(one.part, tried=True))
            if self._export is not None and time.monotonic() - self._exported > self._export_every_s:
                self._export()
                self._exported = time.monotonic()
            if running:
                time.sleep(POLL_S / 4)
        return done

    def _may_start(self, part: Part) -> bool:
        return self._left_s() > part.least_s and (part.needs is None or self._has_final(part.needs))

    def _note(self, ended: Running, status: int) -> None:
        """Say how a part ended, and write it down: whoever kills the campaign does not lose it."""
        took_s = round(time.monotonic() - ended.began, 1)
        gpus = self._gpus if ended.part.gpus is None else len(ended.part.gpus)
        began_s = round(ended.began - self._began, 1)
        names = list(ended.part.names)
        self.log.append({"parts": names, "status": status, "seconds": took_s, "began": began_s, "gpus": gpus})
        temporary = self._work / "campaign.json.part"
        temporary.write_text(json.dumps(self._slices, indent=2) + "\n")
        temporary.rename(self._work / "campaign.json")
        print(f"{began_s + took_s:.0f} s: {' '.join(names)}: {_in_words(status)} after {took_s:.0f} s", flush=True)


def _slices_of(work: Path) -> list[dict[str, Any]]:
    path = work / "campaign.json"
    return json.loads(path.read_text()) if path.exists() else []


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
    # Imported while the file is on its way.
    from kernelwright.models.pretrained import Weights, load_pretrained

    deadline = time.monotonic() + wait_s
    while not base.is_file() and time.monotonic() < deadline:
        time.sleep(POLL_S)
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
    if given.ablations:
        (given.work / ABLATED).touch()
    gpus = given.gpus if given.gpus is not None else _gpus()
    base, process = unpacking(given.base, given.work, given.wait_for_base)
    left_s = given.time_limit - (time.monotonic() - began)
    restarted = given.work / RESTARTED
    campaign = Campaign(
        base,
        given.work,
        given.recipes,
        given.changes,
        gpus,
        left_s,
        total_s=given.total,
        reserve_s=given.reserve,
        resumed=given.resume is not None or restarted.exists(),
        arms=[f"{arm}-seed-{seed}" if seed else arm for seed in range(given.seeds) for arm in given.arms],
        arms_first=given.arms_first,
        equal_steps=given.equal_steps,
        measured=given.measured,
        recipe_words=["--seeds", str(given.seeds), *(["--ablations"] if given.ablations else [])],
        export=lambda: packed(given.work, given.export),
        export_every_s=given.export_every,
    )
    restarted.unlink(missing_ok=True)
    finished = campaign.run(_until_done(process))
    campaign.summarise()
    packed(given.work, given.export)
    if process is not None and process.poll() is None:
        process.kill()
    failed = any(entry["status"] not in NOT_FAILED for entry in campaign.log)
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
    parser.add_argument(
        "--reserve", type=float, metavar="SECONDS", help="for measuring an arm; by default what measuring has taken so far"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="of stage 3, the most telling first")
    parser.add_argument("--arms-first", action="store_true", help="train all of them before anything is measured")
    parser.add_argument("--seeds", type=int, default=1, help="times that each arm is trained")
    parser.add_argument("--ablations", action="store_true", help="measure the arm of buckets with changed prompts too")
    parser.add_argument("--equal-steps", action="store_true", help="train arms for the same steps and not for the same time")
    parser.add_argument("--measured", nargs="*", choices=MEASURED, default=MEASURED, help="models besides the arms")
    parser.add_argument(
        "--export-every", type=float, default=math.inf, metavar="SECONDS", help="export so often during the slice too"
    )
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


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
