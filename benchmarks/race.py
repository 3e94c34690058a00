"""Searches a suite, slice by slice, for a limited time, and packs all records again and again.

    python3 benchmarks/race.py --suite cuda-l1 --path h100.json --slices 2/5,3/5 --seconds 1600 --work DIR --pack packed
    python3 benchmarks/race.py ... --earlier packed/*.tar.gz    # goes on where another machine stopped
    python3 benchmarks/race.py --suite builtin --slices 1/40 --seconds 120 --device cpu --work DIR --pack packed

Each slice is one run directory of `kernelwright bench SUITE --slice K/N --policy builtin --minutes M`; with --kernels the
kernels that the suite brings are judged after it, under the contract `kernelbench`. A command that outlives its time is
killed. Whatever happens to this program, `--pack` holds the records of at most --every seconds before, and at its end all of
them. `race_summary.py` sums up the directories.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

COMMAND = (sys.executable, "-m", "kernelwright")
OVERTIME_S = 20.0
"""Time beyond its minutes that a search may take to end its processes and to write its table."""
LEAST_S = 30.0
"""Time below which nothing more is begun."""
LEFT_OUT = ("report.html", ".lock")


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


def unpacked(archives: Sequence[Path], work: Path) -> None:
    """Bring back run directories that are not there."""
    for path in archives:
        if not (work / path.name.removesuffix(".tar.gz")).exists():
            with tarfile.open(path) as archive:
                archive.extractall(work, filter="data")


@contextlib.contextmanager
def packing(work: Path, target: Path, every_s: float) -> Iterator[None]:
    """Pack again and again meanwhile, and all at the end."""
    over = threading.Event()

    def again_and_again() -> None:
        while not over.wait(every_s):
            packed(work, target)

    packer = threading.Thread(target=again_and_again, daemon=True)
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
    *,
    cores: Iterable[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run one command, and kill it and what it has started where its time is over; tell how it ended.

    Args:
        command: Its words; what it prints goes beside its run directory.
        work: Folder of the run directories.
        name: Of its own.
        limit_s: Seconds that it may take.
        cores: Processor cores that it may use. By default all.
        environment: Its environment. By default this process's.
    """
    with (work / f"{name}.json").open("w") as out, (work / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)
        try:
            said = f"status {process.wait(max(0.0, limit_s))}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said = "killed at the end of the time"
    last = (work / f"{name}.log").read_text(errors="replace").splitlines()[-3:]
    print(f"{time.strftime('%X')} {name}: {said}", *last, sep="\n  ", flush=True)


class Race:
    """Commands that share one limit of time.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._ends_s = time.monotonic() + options.seconds

    @property
    def left_s(self) -> float:
        """Seconds until everything has to be packed."""
        return self._ends_s - time.monotonic()

    def run(self) -> None:
        """Search the slices in turn."""
        options = self.options
        for part in options.slices.split(","):
            name = f"{options.suite}-{part.replace('/', 'of')}{'-only' if options.only else ''}"
            minutes = (self.left_s - OVERTIME_S) / 60
            search = ["--policy", "builtin", "--budget", str(options.budget), "--judge", str(options.judge)]
            self._bench(name, part, [*search, "--minutes", f"{minutes:.2f}", "--baselines", options.baselines])
            if options.kernels:
                self._bench(f"{name}-kernels", part, ["--contract", "kernelbench", "--baselines", "eager"])

    def _bench(self, name: str, part: str, further: Sequence[str]) -> None:
        options = self.options
        if self.left_s < LEAST_S + OVERTIME_S:
            return
        command = [*COMMAND, "bench", options.suite, "--slice", part, "--device", options.device]
        command += [*(["--path", str(options.path)] if options.path else []), *further]
        command += ["--only", options.only] if options.only else []
        command += ["--out", str(options.work / name), "--json"]
        print(f"{time.strftime('%X')} {name}: {self.left_s:.0f} s left", flush=True)
        run_limited(command, options.work, name, self.left_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", required=True, help="as of `kernelwright bench`")
    parser.add_argument("--path", type=Path, help="of the suite")
    parser.add_argument("--slices", required=True, help="such as 1/5,2/5, in the order of their importance")
    parser.add_argument("--only", help="of these slices, tasks such as level2/40,level2/58: those with new proposals")
    parser.add_argument("--seconds", type=float, required=True, help="limit of the whole, packing included")
    parser.add_argument("--work", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--pack", type=Path, required=True, help="folder of their archives")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two packings")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="archives of an earlier race to go on with")
    parser.add_argument("--device", default="cuda", help="`cuda` is every GPU")
    parser.add_argument("--budget", type=int, default=24, help="proposals for a task")
    parser.add_argument("--judge", type=int, default=3, help="screened candidates of a task that the judge takes at most")
    parser.add_argument("--baselines", default="eager,compile,cudagraph-fresh,cudnn", help="measured beside the search")
    parser.add_argument("--kernels", action="store_true", help="judge the kernels that the suite brings, too")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    unpacked(options.earlier, options.work)
    with packing(options.work, options.pack, options.every):
        Race(options).run()


if __name__ == "__main__":
    main()
