"""Runs a plan of `kernelwright bench` on the GPUs of a host, each GPU's commands one after another, and packs all records.

    python3 benchmarks/race_host.py plan.json --seconds 1560 --work DIR --pack packed
    python3 benchmarks/race_host.py plan.json --seconds 60 --work DIR --pack packed --device cpu

A plan has a list of steps for each GPU, by its number. A step is a run directory's name and the arguments of its command:

    {"0": [{"name": "large", "arguments": ["kernelbench", "--path", "KernelBench", "--policy", "builtin"],
            "share": 0.4, "earlier": "large.tar.gz"}]}

It may take `share` of the seconds that are left when it begins, all by default; a search is told so in minutes. `earlier` is
the archive of a run directory to go on with, or the folder of a published one. A step that outlives its time is killed. Each
GPU has an equal part of the processor's cores, and with --hide, as root, its commands find the device file of that GPU alone
(`one_gpu.py`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from race import COMMAND, LEAST_S, OVERTIME_S, packing, run_limited, unpacked

Step = Mapping[str, Any]


class HostRace:
    """Steps of several GPUs that share one limit of time.

    Args:
        plan: Steps by the number of a GPU.
        options: Of the command line.
    """

    def __init__(self, plan: Mapping[str, Sequence[Step]], options: argparse.Namespace) -> None:
        self.plan, self.options = plan, options
        self._ends_s = time.monotonic() + options.seconds

    def run(self) -> None:
        """Do all steps."""
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // len(self.plan))
        threads = [
            threading.Thread(target=self._serve, args=(gpu, steps, cores[number * share : (number + 1) * share]))
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
        environment = dict(os.environ)
        if device != "cpu" and self.options.hide:
            command = [sys.executable, str(Path(__file__).with_name("one_gpu.py")), gpu, *command]
        elif device != "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        print(f"{time.strftime('%X')} GPU {gpu}, {name}: {limit_s:.0f} s", flush=True)
        run_limited(command, work, name, limit_s, cores=cores, environment=environment)


def _bring(earlier: Path, work: Path, name: str) -> None:
    """Have a run directory to go on with in the folder of all, unless it is there."""
    if earlier.is_file():
        unpacked([earlier], work)
    elif not (work / name).exists():
        shutil.copytree(earlier, work / name)
        for path in (work / name).glob("*.gz"):
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
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
    parser.add_argument("--hide", action="store_true", help="hide the device files of other GPUs from each command")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    with packing(options.work, options.pack, options.every):
        HostRace(json.loads(options.plan.read_text(encoding="utf-8")), options).run()


if __name__ == "__main__":
    main()
