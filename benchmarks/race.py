"""Runs a plan of `kernelwright bench` on the GPUs of a host for a limited time, and packs all records again and again.

    python3 benchmarks/race.py plan.json --seconds 1560 --work DIR --pack packed
    python3 benchmarks/race.py plan.json --seconds 60 --work DIR --pack packed --device cpu

A plan has a list of steps for each GPU, by its number. A step is a run directory's name and the arguments of its command:

    {"0": [{"name": "large", "arguments": ["kernelbench", "--path", "KernelBench", "--policy", "builtin"],
            "share": 0.4, "earlier": "large.tar.gz"}]}

It may take `share` of the seconds that are left when it begins, all by default; a search is told so in minutes. `earlier` is
the archive of a run directory to go on with, or the folder of a published one. A step that outlives its time is killed. Each
GPU has an equal part of the processor's cores. Whatever happens to this program, `--pack` holds the records of at most
--every seconds before, and at its end all of them. `make_pages.py --publish` takes the directories.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelwright.records import unpacked

COMMAND = (sys.executable, "-m", "kernelwright")
OVERTIME_S = 20.0
"""Time beyond its minutes that a search may take to end its processes and to write its table."""
LEAST_S = 30.0
"""Time below which nothing more is begun."""
LEFT_OUT = ("report.html", ".lock")

Step = Mapping[str, Any]


def packed(work: Path, target: Path) -> None:
    """Write each run directory, and the output of its command, as an archive; one that is there is replaced at once."""
    target.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path for path in work.iterdir() if path.is_dir()):
        unfinished = target / f".{folder.name}.tar.gz"
        files = [path for path in folder.rglob("*") if path.is_file() and path.name not in LEFT_OUT]
        with tarfile.open(unfinished, "w:gz", compresslevel=3) as archive:
            for path in (*sorted(files), *sorted(work.glob(f"{folder.name}.*"))):
                with contextlib.suppress(FileNotFoundError):  # a search at work replaces and removes some
                    archive.add(path, path.relative_to(work))
        unfinished.replace(target / f"{folder.name}.tar.gz")


@contextlib.contextmanager
def packing(work: Path, target: Path, every_s: float) -> Iterator[None]:
    """Pack again and again meanwhile, and all at the end."""
    over = threading.Event()

    def pack_repeatedly() -> None:
        while not over.wait(every_s):
            packed(work, target)

    packer = threading.Thread(target=pack_repeatedly, daemon=True)
    packer.start()
    yield
    over.set()
    packer.join()
    packed(work, target)


def run_limited(
    command: Sequence[str],
    work: Path,
    name: str,
    limit_s: float,
    cores: Iterable[int],
    environment: Mapping[str, str],
) -> None:
    """Run one command, kill it and what it has started when its time is over, and tell how it ended.

    Args:
        command: Its words; what it prints goes beside its run directory.
        work: Folder of the run directories.
        name: Its run directory's name.
        limit_s: Longest duration, seconds.
        cores: Processor cores that it may use.
        environment: Its environment.
    """
    with (work / f"{name}.json").open("w") as out, (work / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        os.sched_setaffinity(process.pid, cores)
        try:
            ending = f"status {process.wait(max(0.0, limit_s))}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ending = "killed at the end of the time"
    last = (work / f"{name}.log").read_text(errors="replace").splitlines()[-3:]
    print(f"{time.strftime('%X')} {name}: {ending}", *last, sep="\n  ", flush=True)


class Race:
    """Steps of several GPUs that share one limit of time.

    Args:
        plan: Steps by the number of a GPU.
        options: Options of the command line.
    """

    def __init__(self, plan: Mapping[str, Sequence[Step]], options: argparse.Namespace) -> None:
        self.plan, self.options = plan, options
        self._ends_s = time.monotonic() + options.seconds

    def run(self) -> None:
        """Do all steps."""
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // len(self.plan))
        threads = [
            threading.Thread(target=self._serve, args=(gpu, steps, cores[number * share : (number + 1) * share] or cores))
            for number, (gpu, steps) in enumerate(self.plan.items())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, gpu: str, steps: Sequence[Step], cores: Sequence[int]) -> None:
        for step in steps:
            left_s = self._ends_s - time.monotonic()
            limit_s = min(left_s, left_s * step.get("share", 1.0))
            if limit_s > LEAST_S + OVERTIME_S:
                self._do(gpu, step, cores, limit_s)

    def _do(self, gpu: str, step: Step, cores: Sequence[int], limit_s: float) -> None:
        work, name, device = self.options.work, step["name"], self.options.device
        if "earlier" in step:
            _bring(Path(step["earlier"]), work, name)
        command = [*COMMAND, "bench", *step["arguments"], "--device", device, "--out", str(work / name), "--json"]
        if "--policy" in command:
            command += ["--minutes", f"{(limit_s - OVERTIME_S) / 60:.2f}"]
        environment = os.environ | ({} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": gpu})
        print(f"{time.strftime('%X')} GPU {gpu}, {name}: {limit_s:.0f} s", flush=True)
        run_limited(command, work, name, limit_s, cores, environment)


def _bring(earlier: Path, work: Path, name: str) -> None:
    """Have a run directory to go on with in the folder of all, unless it is there."""
    if (work / name).exists():
        return
    if earlier.is_file():
        with tarfile.open(earlier) as archive:
            archive.extractall(work, filter="data")
        return
    shutil.copytree(earlier, work / name)
    for path in [*(work / name).glob("*.gz"), *(work / name).glob("*.xz")]:
        path.with_suffix("").write_bytes(unpacked(path.with_suffix("")))
        path.unlink()


def main(arguments: Sequence[str] | None = None) -> None:
    """Read a plan and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="limit of the whole, packing included")
    parser.add_argument("--work", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--pack", type=Path, required=True, help="folder of their archives")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two packings")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    with packing(options.work, options.pack, options.every):
        Race(json.loads(options.plan.read_text(encoding="utf-8")), options).run()


if __name__ == "__main__":
    main()
