"""Runs legal schedules on GPUs of compute capability 9.0 and compares every output bit by bit.

    python benchmarks/sass_prepare.py DIR           # anywhere: compile and disassemble the kernels into DIR
    python benchmarks/sass_execute.py DIR --schedules 100000 --gpus 4 --processes 48 --seconds 300 --out RESULT

Needs the CUDA driver, numpy and pydantic only. The work is cut into slices of one kernel and one seed. Each goes to one
of the processes, which share the GPUs; what it found is a line of RESULT/slices.jsonl, so the same command goes on where it
was. RESULT/result.json sums up. A schedule that faults, hangs or ends its process costs that process and
is on record: slice and seed lead to it again. Half of the schedules come from random play, half from a descent that only
accepts moves which do not lengthen the issue time, because tight schedules are where a missing dependence would show.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelwright.errors import DeviceError
from kernelwright.gpu.driver import CudaError
from kernelwright.gpu.launch_spec import Target
from kernelwright.gpu.launcher import Launcher, cuda_launcher_on
from kernelwright.gpu.target import load_target
from kernelwright.sass import ANY_MOVE, MOVE_KINDS, Neighbourhood, Program, Schedule, load, move_to_json

SLICE = 250
"""Schedules of one slice."""
STALLED_S = 60.0
"""A process that finishes no schedule for so long hangs."""
_END_TIMEOUT_S = 10.0
RETURN_PROBABILITY = 0.1
MOVES = (1, 3, 8, 20)
MOST_FAULTS = 20
"""A kernel whose schedules fault so often is left; each fault costs a new process."""
MOST_BAD = 4
"""Wrong schedules of a slice that are looked into."""
_DIGEST_BYTES = 8
_TRIES = 4
"""A slice ends after this many times as many plays as it wants schedules, since a play may lead to a known one."""
EVERY_KIND = (ANY_MOVE, Neighbourhood(kinds=MOVE_KINDS))
"""The second makes moves and edits of every kind."""

LauncherOn = Callable[[int, Any], Launcher]


class Kernel:
    """One kernel of the folder, and after `start` its launcher."""

    def __init__(self, folder: Path, name: str) -> None:
        self.target: Target = load_target(str(folder / f"{name}.json"), 90)
        listing = (folder / f"{name}.txt").read_text(encoding="utf-8")
        self.program: Program = load(self.target.cubin, lambda _: listing)
        self.original = Schedule(self.program.kernel(self.target.spec.entry))
        kinds = (folder / "kinds").read_text(encoding="utf-8")
        self.neighbourhoods = (Neighbourhood(kinds=tuple(kinds.split(","))),) if kinds else EVERY_KIND
        self._launcher: Launcher | None = None

    def start(self, launcher_on: LauncherOn, device: int) -> None:
        """Bring the kernel onto a device, once."""
        if self._launcher is None:
            self._launcher = launcher_on(device, self.target.spec)

    def outputs(self, cubin: bytes, seeds: tuple[int, ...]) -> list[list[bytes]]:
        """The outputs of a freshly loaded module on inputs of each seed."""
        assert self._launcher is not None
        handle = self._launcher.load(cubin)
        found = [self._launcher.outputs(handle, seed) for seed in seeds]
        self._launcher.unload(handle)
        return found


def play_on(schedule: Schedule, kernel: Kernel, rng: random.Random) -> Schedule:
    """Play on from a schedule, or start again now and then."""
    if rng.random() < RETURN_PROBABILITY:
        schedule = kernel.original.copy()
    descend = rng.random() < 0.5
    neighbourhood = rng.choice(kernel.neighbourhoods)
    for _ in range(rng.choice(MOVES)):
        before = schedule.issue_cycles
        move = neighbourhood.draw(schedule, rng)
        if move is not None:
            schedule.play(move)
            if descend and schedule.issue_cycles > before:
                schedule.undo()
    return schedule


def diagnose(kernel: Kernel, schedule: Schedule, seeds: tuple[int, ...], expected: list[list[bytes]]) -> dict[str, Any]:
    """Return the shortest wrong prefix of a schedule's history, and what would have helped."""

    def is_wrong(words: list[int]) -> bool:
        cubin = kernel.program.with_words({schedule.kernel.name: words})
        return any(kernel.outputs(cubin, seeds) != expected for _ in range(2))

    prefix = kernel.original.copy()
    for move in schedule.history:
        prefix.play(move)
        if is_wrong(prefix.words()):
            break
    else:
        return {"prefix": None, "moves": [move_to_json(move) for move in schedule.history]}
    instructions = prefix.kernel.instructions
    pairs = list(zip(prefix.controls(), prefix.order, strict=True))

    def variant(change: Callable[[Any, int], Any]) -> bool:
        return is_wrong([change(control, index).encode(instructions[index].word) for control, index in pairs])

    return {
        "prefix": len(prefix.history),
        "moves": [move_to_json(move) for move in prefix.history],
        "wrong_without_reuse": variant(lambda c, i: replace(c, reuse=0)),
        "wrong_with_original_stalls_or_longer": variant(
            lambda c, i: c.with_stall(max(c.stall, instructions[i].control.stall))
        ),
        "wrong_with_stalls_of_8": variant(lambda c, i: c.with_stall(max(c.stall, 8))),
        "wrong_with_stalls_of_15": variant(lambda c, i: c.with_stall(15)),
        "wrong_with_yields": variant(lambda c, i: replace(c, yields=True, reuse=0)),
    }


def schedules_of(kernel: Kernel, number: int, count: int) -> Iterator[tuple[Schedule, bytes, str]]:
    """Yield a slice's schedules, each once, with cubin and digest; the same whenever it is asked for."""
    rng = random.Random(f"{kernel.target.spec.name}/{number}")
    schedule = kernel.original.copy()
    known: set[str] = set()
    for _ in range(_TRIES * count):
        if len(known) == count:
            return
        schedule = play_on(schedule, kernel, rng)
        cubin = schedule.cubin(kernel.program)
        digest = hashlib.blake2b(cubin, digest_size=_DIGEST_BYTES).hexdigest()
        if digest not in known:
            known.add(digest)
            yield schedule, cubin, digest


def run_slice(kernel: Kernel, number: int, count: int, tell: Callable[[], None]) -> dict[str, Any]:
    """Run one slice's schedules; a fault ends it early and is in the record."""
    # Inputs of the slice's own, two of them, which stay on the GPU.
    seeds = (2 * number, 2 * number + 1)
    record: dict[str, Any] = {"schedules": 0, "wrong": 0, "least_issue_cycles": kernel.original.issue_cycles, "bad": []}
    digests: list[str] = []
    begin = time.monotonic()
    expected = kernel.outputs(kernel.target.cubin, seeds)
    if kernel.outputs(kernel.target.cubin, seeds) != expected or expected[0] == expected[1]:
        raise DeviceError(f"wanted an original that repeats itself and uses its inputs, found {kernel.target.spec.name}")
    try:
        for schedule, cubin, digest in schedules_of(kernel, number, count):
            digests.append(digest)
            record["least_issue_cycles"] = min(record["least_issue_cycles"], schedule.issue_cycles)
            found = kernel.outputs(cubin, seeds)
            record["schedules"] += 1
            tell()
            if found != expected:
                record["wrong"] += 1
                if len(record["bad"]) < MOST_BAD:
                    record["bad"].append(diagnose(kernel, schedule, seeds, expected))
    except CudaError as error:
        record["fault"] = str(error)
        record["bad"].append({"moves": [move_to_json(move) for move in schedule.history]})
    return record | {"digests": digests, "seconds": round(time.monotonic() - begin, 3)}


def work(connection: Any, folder: Path, device: int, launcher_on: LauncherOn, done: Any) -> None:
    """Run the slices that come, in a process of its own, until None comes or a fault has lost the GPU."""
    kernels: dict[str, Kernel] = {}

    def tell() -> None:
        done.value += 1

    while (task := connection.recv()) is not None:
        name, number, count = task
        try:
            if name not in kernels:
                kernels[name] = Kernel(folder, name)
            kernels[name].start(launcher_on, device)
            record = run_slice(kernels[name], number, count, tell)
        # Whatever it is must reach the parent as text, or it would be taken for the schedule's doing.
        except Exception:  # noqa: BLE001
            connection.send({"error": traceback.format_exc()})
            return
        connection.send(record)
        if "fault" in record:
            return


class Worker:
    """A process with one GPU, and what it is at."""

    def __init__(self, folder: Path, device: int, launcher_on: LauncherOn) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.device = device
        self.done = context.Value("q", 0, lock=False)
        self.process = context.Process(target=work, args=(theirs, folder, device, launcher_on, self.done), daemon=True)
        self.process.start()
        theirs.close()
        self.task: tuple[str, int, int] | None = None
        self._seen, self._since = 0, time.monotonic()

    @property
    def finished(self) -> int:
        """Schedules of its present slice that it has finished."""
        return int(self.done.value)

    def give(self, task: tuple[str, int, int] | None) -> None:
        """Hand over a slice; None ends the process."""
        self.task = task
        self.done.value = self._seen = 0
        self._since = time.monotonic()
        self.connection.send(task)

    def is_stalled(self) -> bool:
        """True where it has finished no schedule for long."""
        if self.done.value != self._seen:
            self._seen, self._since = self.done.value, time.monotonic()
        return time.monotonic() - self._since > STALLED_S

    def end(self) -> None:
        """Kill the process without waiting long for it."""
        self.process.kill()
        # A process whose kernel never ends may take long to go; the others need not wait for it.
        self.process.join(_END_TIMEOUT_S)
        self.connection.close()


def execute(
    folder: Path,
    out: Path,
    *,
    schedules: int,
    seconds: float,
    gpus: int = 1,
    processes: int = 1,
    slice_size: int = SLICE,
    launcher_on: LauncherOn = cuda_launcher_on,
) -> dict[str, Any]:
    """Run slices until there are enough schedules or the time is up; write and return what all calls found."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    if not names:
        sys.exit(f"wanted launch files in {folder}, found none; run sass_prepare.py first")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "slices.jsonl"
    lines = list(read(path))
    broken: dict[str, str] = {}
    queue = Queue(names, lines, schedules, slice_size)
    begin = time.monotonic()
    workers: list[Worker] = []
    try:
        workers = [Worker(folder, number % gpus, launcher_on) for number in range(processes)]
        for worker in workers:
            worker.give(queue.take())
        while any(worker.task for worker in workers):
            ready = multiprocessing.connection.wait([worker.connection for worker in workers if worker.task], 1.0)
            late = time.monotonic() - begin > seconds
            for number, worker in enumerate(workers):
                if worker.task is None or (worker.connection not in ready and not worker.is_stalled()):
                    continue
                record = answer(worker, folder)
                if "error" in record:
                    # The machine's or this script's fault: the other kernels go on.
                    broken.setdefault(worker.task[0], record["error"])
                    queue.settle(worker.task, 0)
                    queue.drop(worker.task[0])
                    worker.end()
                    workers[number] = worker = Worker(folder, worker.device, launcher_on)
                    worker.give(None if late else queue.take())
                    continue
                line = {"kernel": worker.task[0], "slice": worker.task[1], **record}
                lines.append(line)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                if queue.settle(worker.task, record["schedules"], faulted="fault" in record):
                    broken[worker.task[0]] = f"faulted {MOST_FAULTS} times: {record['fault']}"
                    queue.drop(worker.task[0])
                if "fault" in record:
                    worker.end()
                    workers[number] = worker = Worker(folder, worker.device, launcher_on)
                worker.give(None if late else queue.take())
            if late:
                break
    finally:
        for worker in workers:
            worker.end()
    wall_s = time.monotonic() - begin
    calls = [*previous(out), {"seconds": round(wall_s, 1), "gpus": gpus, "processes": processes}]
    result = {**summed_up(names, lines, calls), "broken": broken}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def answer(worker: Worker, folder: Path) -> dict[str, Any]:
    """Return a worker's record, or one that says how the worker was lost, and by which schedule."""
    fault = f"no schedule finished within {STALLED_S:g} s"
    if worker.connection.poll():
        try:
            record: dict[str, Any] = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(_END_TIMEOUT_S)
            fault = f"the process ended with {worker.process.exitcode}"
        else:
            return record
    assert worker.task is not None
    name, number, count = worker.task
    kernel = Kernel(folder, name)
    culprit = next(itertools.islice(schedules_of(kernel, number, count), worker.finished, None), None)
    moves = [] if culprit is None else [move_to_json(move) for move in culprit[0].history]
    return {
        # What it found of the schedules before is lost with it, so they count for nothing.
        "schedules": 0,
        "wrong": 0,
        "least_issue_cycles": None,
        "bad": [{"moves": moves}],
        "digests": [],
        "seconds": 0.0,
        "fault": fault,
        "at": worker.finished,
    }


class Queue:
    """Slices of one kernel after another until, with those that are done, there are enough schedules."""

    def __init__(self, names: list[str], lines: list[dict[str, Any]], schedules: int, size: int) -> None:
        self._names = list(names)
        self._known = {(line["kernel"], line["slice"]) for line in lines}
        self._left = schedules - sum(line["schedules"] for line in lines)
        self._size = size
        self._candidates = ((name, number) for number in itertools.count() for name in tuple(self._names))
        self._faults: Counter[str] = Counter()

    def take(self) -> tuple[str, int, int] | None:
        """Return the next slice to run, or None."""
        while self._left > 0 and self._names:
            name, number = next(self._candidates)
            if name in self._names and (name, number) not in self._known:
                count = min(self._size, self._left)
                self._left -= count
                return name, number, count
        return None

    def settle(self, task: tuple[str, int, int], ran: int, *, faulted: bool = False) -> bool:
        """Take note of a slice's end; return whether its kernel has faulted too often to go on."""
        self._left += task[2] - ran
        self._faults[task[0]] += faulted
        return faulted and self._faults[task[0]] >= MOST_FAULTS

    def drop(self, name: str) -> None:
        """Run no more slices of a kernel."""
        if name in self._names:
            self._names.remove(name)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines; a torn one is work that is still owed."""
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(text)
        except ValueError:
            continue


def previous(out: Path) -> list[dict[str, Any]]:
    """The calls that have added to a result."""
    path = out / "result.json"
    return json.loads(path.read_text(encoding="utf-8"))["calls"] if path.exists() else []


def summed_up(names: list[str], lines: list[dict[str, Any]], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of all slices."""
    per_kernel = {}
    for name in names:
        mine = [line for line in lines if line["kernel"] == name]
        per_kernel[name] = {
            "schedules": sum(line["schedules"] for line in mine),
            "distinct": len({digest for line in mine for digest in line["digests"]}),
            "wrong": sum(line["wrong"] for line in mine),
            "faults": sum("fault" in line for line in mine),
            "least_issue_cycles": min(
                (line["least_issue_cycles"] for line in mine if line["least_issue_cycles"]), default=None
            ),
        }
    totals: Counter[str] = Counter()
    for found in per_kernel.values():
        totals.update({key: found[key] for key in ("schedules", "distinct", "wrong", "faults")})
    wall_s = sum(call["seconds"] for call in calls)
    return {
        **totals,
        "schedules_per_second": round(totals["schedules"] / wall_s, 1) if wall_s else None,
        "per_kernel": per_kernel,
        "calls": calls,
        "faults_found": [
            {key: line.get(key) for key in ("kernel", "slice", "fault", "at")} for line in lines if "fault" in line
        ],
        "bad": [{"kernel": line["kernel"], "slice": line["slice"], **bad} for line in lines for bad in line["bad"]][:64],
    }


def main() -> int:
    """Run, and print the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schedules", type=int, default=100_000, help="in all, those of earlier calls included")
    parser.add_argument("--seconds", type=float, default=300.0, help="of this call")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--processes", type=int, default=12, help="in all")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    result = execute(
        options.folder, options.out, schedules=options.schedules, seconds=options.seconds, gpus=options.gpus,
        processes=options.processes,
    )  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key not in ("per_kernel", "calls", "bad")}))
    for name, error in result["broken"].items():
        print(f"{name} was not run:\n{error}", file=sys.stderr)
    return 1 if result["wrong"] or result["faults"] or result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
