"""Tunes many kernels by PPO and its controls under equal budgets, and writes results/sass-<gpu>/.

    python benchmarks/sass_campaign.py results/sass-h200 --minutes 9 --gpus 4
    python benchmarks/sass_campaign.py results/sass-h200 --minutes 9 --gpus 4        # the same command goes on

Each agent on each kernel has a run directory and a process of its own. Several processes share a GPU and time their
schedules one at a time, since most of an agent's time goes into choosing what to measure. A run that is finished is
not repeated, and one that was cut short when the call's time was up goes on where it was, so that budgets end up equal.
When a kernel's agents are done, the best confirmed winner goes through `deploy`, which proves it and times it again in
fresh processes: that is the number in `summary.json`, and a kernel without a confirmed improvement counts as 1. What fails
leaves the rest alone. With `--backend` naming a model, nothing is deployed and every number is marked as simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelwright.errors import UsageError
from kernelwright.records import RunDirectory
from kernelwright.records.lines import read_json

if TYPE_CHECKING:
    from kernelwright.sass import AnyMove, Kernel

HERE = Path(__file__).resolve()
PAPER = ("softmax", "rmsnorm", "gemm_leakyrelu", "batched_gemm", "fused_feed_forward", "attention_mma")
CORPUS = (*PAPER, "sgemm", "layernorm", "row_sum", "attention_wgmma")
HEADROOM = (
    *("gelu_chain", "gemv", "int8_gemm", "rope", "recurrence", "pairwise"),
    *("gemm_mma", "sgemm_small", "sgemm_wide"),
)
TARGETS = {name: f"corpus:{name}" for name in CORPUS} | {
    name: f"{HERE.with_name('sass_kernels.py')}:{name}" for name in HEADROOM
}
AGENTS = ("ppo", "guided", "sweeps", "greedy", "anneal", "random")
"""PPO first: it takes longest."""
PLAYING_SHARE = 0.75
"""Share of a call's time for playing; the rest is for confirming and deploying."""
LEAST_S = 20.0
"""Nothing is begun for which there is less time than this."""
CORES_SHARE = 0.75
MOST_SIDE_BY_SIDE = 14
PPO_THREADS = "2"
ARCHIVE_BYTES = 12 << 20
"""An archive that has grown to this is followed by another."""
_LEFT_OUT_OF_ARCHIVES = ("policy.zip", ".lock")


def main() -> None:
    """Run what is left, as far as the time goes, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", default=",".join(TARGETS), help="comma-separated")
    parser.add_argument("--agents", default=",".join(AGENTS), help="comma-separated; each has the whole budget")
    parser.add_argument("--budget", type=int, default=1000, help="schedules for each agent and kernel")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call; what is not done then goes on in the next")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--network-device", default="cpu", choices=("cpu", "cuda"), help="where PPO's networks are")
    parser.add_argument(
        "--side-by-side", type=int, default=None, help="processes that share a GPU; by default as cores allow"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moves", default="beyond", help="beyond, paper, or without-KIND: every kind of move but one")
    parser.add_argument("--start", type=Path, default=None, help="an earlier campaign, from whose winners to go on; no PPO")
    parser.add_argument("--backend", default="gpu")
    parser.add_argument("--architecture", type=int, default=None)
    parser.add_argument("--pack", type=Path, default=None, help="folder for summary.json and archives of the runs")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        if options.agent is not None:
            tune(options, options.only, options.agent)
        else:
            deploy_best(options.out / options.only)
        return
    failed = campaign(options)
    summary = summarise(options.out, failed)
    if options.pack is not None:
        pack(options.out, options.pack)
    print(
        json.dumps({key: summary[key] for key in ("kernels", "geomean", "max", "wrong_outputs", "schedules_run", "failed")})
    )


@dataclass(frozen=True, slots=True)
class Unit:
    """Work of one process: an agent plays on a kernel, or the kernel's winner is deployed (no agent)."""

    kernel: str
    agent: str | None = None

    @property
    def name(self) -> str:
        """For people and for files."""
        return f"{self.kernel}/{self.agent or 'deploy'}"

    def is_done(self, out: Path, agents: Sequence[str]) -> bool:
        """True where its result is on disk and no time limit cut it short."""
        if self.agent is not None:
            found = read_json(out / self.kernel / self.agent / "summary.json")
            return found is not None and found["agents"][self.agent]["stopped_by"] != "time"
        final = RunDirectory(out / self.kernel).read_json("deployed.json")
        if final is None or not set(agents) <= set(final["agents"]):
            return False
        return bool(final.get("schedules") == schedules_of(read_summaries(out / self.kernel)))


Start = Callable[[Unit, int, float], "subprocess.Popen[bytes]"]


@dataclass(slots=True)
class Yard:
    """The GPUs and what runs on each."""

    gpus: int
    places: int
    running: dict[Unit, tuple[int, Any]] = field(default_factory=dict)

    def free_gpu(self) -> int | None:
        """Return the GPU with the fewest processes, or None when all are full."""
        loads = Counter({gpu: 0 for gpu in range(self.gpus)})
        loads.update(gpu for gpu, _ in self.running.values())
        gpu = min(loads, key=lambda gpu: (loads[gpu], gpu))
        return gpu if loads[gpu] < self.places else None


def campaign(options: argparse.Namespace, start: Start | None = None) -> list[str]:
    """Run one process for each agent on each kernel, and one to deploy each kernel's winner; return what failed."""
    begin = time.monotonic()
    end = begin + 60.0 * options.minutes
    until = begin + PLAYING_SHARE * 60.0 * options.minutes
    kernels, agents = options.kernels.split(","), options.agents.split(",")
    unknown = [name for name in kernels if name not in TARGETS]
    if unknown:
        sys.exit(f"wanted kernels out of {', '.join(TARGETS)}, found {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    begin_unit = start or (lambda unit, gpu, play_until: start_process(options, unit, gpu, play_until))
    waiting = [Unit(kernel, agent) for agent in agents for kernel in kernels]
    waiting = [unit for unit in waiting if not unit.is_done(options.out, agents)]
    owed = [Unit(kernel) for kernel in kernels if not Unit(kernel).is_done(options.out, agents)]
    schedules = count_schedules(options.out)
    yard = Yard(options.gpus, options.side_by_side or places(options.gpus))
    failed: list[str] = []
    while True:
        now = time.monotonic()
        playing = waiting if now + LEAST_S < until else []
        busy = {unit.kernel for unit in (*playing, *yard.running)}
        ready = [unit for unit in owed if unit.kernel not in busy and is_played(options.out, unit.kernel)]
        for unit in (*ready, *playing) if now + LEAST_S < end else ():
            gpu = yard.free_gpu()
            if gpu is None:
                break
            yard.running[unit] = (gpu, begin_unit(unit, gpu, until))
            (waiting if unit.agent else owed).remove(unit)
        if not yard.running:
            break
        for unit, (_, process) in list(yard.running.items()):
            status = process.poll()
            if status is None and now > end:
                # Every measurement is on disk already, so nothing but the time since the last one is lost.
                process.terminate()
                process.wait()
                waiting.append(unit)
            elif status is None:
                continue
            elif status:
                failed.append(unit.name)
                print(f"{unit.name}: exit status {status}: {last_line(log_of(options.out, unit))}", flush=True)
            del yard.running[unit]
        time.sleep(0.2)
    left = [unit.name for unit in (*waiting, *owed)]
    if left:
        print(f"left for the next call: {', '.join(left)}", flush=True)
    note_call(options, time.monotonic() - begin, count_schedules(options.out) - schedules)
    return failed


def places(gpus: int) -> int:
    """Return how many processes may share a GPU, for the cores there are."""
    return min(MOST_SIDE_BY_SIDE, max(1, int(CORES_SHARE * (os.cpu_count() or 1)) // gpus))


def log_of(out: Path, unit: Unit) -> Path:
    """File that takes a process's output."""
    return out / unit.kernel / f"{unit.agent or 'deploy'}.log"


def start_process(options: argparse.Namespace, unit: Unit, gpu: int, until: float) -> subprocess.Popen[bytes]:
    """Start a process that sees one GPU, with what it says in a file beside its run."""
    given = ["--only", unit.kernel, "--until", str(until), "--budget", str(options.budget), "--seed", str(options.seed)]
    given += ["--moves", options.moves, "--backend", options.backend, "--agents", options.agents]
    given += ["--network-device", options.network_device]
    if options.start is not None:
        given += ["--start", str(options.start)]
    if unit.agent is not None:
        given += ["--agent", unit.agent]
    if options.architecture is not None:
        given += ["--architecture", str(options.architecture)]
    path = log_of(options.out, unit)
    path.parent.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "OMP_NUM_THREADS": PPO_THREADS if unit.agent == "ppo" else "1",
        "KERNELWRIGHT_GPU_TURNS": str((options.out / f"gpu{gpu}.lock").resolve()),
    }
    with path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE), str(options.out), *given], stdout=log, stderr=log, env=environment
        )


def is_played(out: Path, kernel: str) -> bool:
    """True where an agent has finished with a kernel."""
    return any((out / kernel).glob("*/summary.json"))


def tune(options: argparse.Namespace, kernel: str, agent: str) -> None:
    """Let one agent play on one kernel."""
    from kernelwright.assembly.search import GameSettings, optimize_kernel
    from kernelwright.assembly.testbed import find_game

    out = options.out / kernel / agent
    # What it has played in earlier calls does not count against this call's time.
    earlier_s = ((RunDirectory(out).read_json("times.json") or {}).get(agent) or {}).get("seconds", 0.0)
    with find_game(TARGETS[kernel], options.backend, options.architecture) as game:
        limit_s = earlier_s + max(1.0, options.until - time.monotonic())
        start = () if options.start is None else winner_of(options.start / kernel, game.kernel)
        settings = GameSettings(
            (agent,), options.budget, options.seed, options.moves, limit_s=limit_s, start=start,
            network_device=options.network_device,
        )  # fmt: skip
        named = replace(game, name=kernel)
        optimize_kernel(named, out=out, settings=settings, log=lambda message: print(message, flush=True))


def winner_of(path: Path, kernel: Kernel) -> tuple[AnyMove, ...]:
    """The moves of the winner that a kernel's earlier campaign deployed; none where nothing was.

    Raises:
        UsageError: the winner is missing, or they do not lead to it, since the kernel is compiled to other code now.
    """
    from kernelwright.assembly.backends import schedule_digest
    from kernelwright.sass import Schedule, move_from_json

    final = RunDirectory(path).read_json("deployed.json") or {}
    if not final.get("deployed"):
        return ()
    run = RunDirectory(path / final["agent"])
    winner = run.read_json("winner.json")
    if winner is None:
        raise UsageError(f"wanted the winner that {path} deployed, found no winner.json in {run.path}; put it back")
    schedule = Schedule(kernel)
    for move in winner["moves"]:
        schedule.play(move_from_json(move))
    if schedule_digest(schedule) != winner["digest"]:
        raise UsageError(f"wanted the moves of {path} to lead to its winner, found another schedule; the compiler differs")
    return tuple(schedule.history)


def deploy_best(path: Path) -> None:
    """Send a kernel's best confirmed winner through the deployed path, and write what that said."""
    summaries = read_summaries(path)
    held = {agent: found["best"] for agent, found in summaries.items() if found["best"] is not None}
    final: dict[str, Any] = {
        "deployed": False, "agents": sorted(summaries), "agent": None, "schedules": schedules_of(summaries)
    }  # fmt: skip
    if not held:
        final["reason"] = "no improvement was confirmed"
    else:
        best = max(held, key=lambda agent: held[agent]["low"])
        final["agent"] = best
        simulated = summaries[best]["simulated"]
        final |= {"reason": "simulated", **held[best], "agent": best} if simulated else deployed(path / best, path / "cache")
    RunDirectory(path).write_json("deployed.json", final)


def deployed(run: Path, cache: Path) -> dict[str, Any]:
    """Deploy a run's winner and return what that said."""
    from kernelwright.assembly.search import numbers_of
    from kernelwright.deploy.cache import TunedCache
    from kernelwright.deploy.deploy import deploy, read_winner

    done = deploy(read_winner(run), TunedCache(cache))
    if done.confirmation is None or done.confirmation.speedup is None:
        return {"reason": str(done.refusal), "detail": done.detail}
    numbers = numbers_of(done.confirmation)
    measured = {name: numbers[name] for name in ("speedup", "low", "high", "noise_floor", "processes")}
    measured["original_us"] = numbers["baseline"]
    if done.refusal is not None:
        return {"reason": str(done.refusal), "detail": done.detail, **measured}
    return {"deployed": True, **measured}


def read_summaries(path: Path) -> dict[str, dict[str, Any]]:
    """The summaries of a kernel's finished runs, by agent."""
    found = {
        run.parent.name: RunDirectory(run.parent).read_json("summary.json") for run in sorted(path.glob("*/summary.json"))
    }
    return {agent: summary for agent, summary in found.items() if summary is not None}


def schedules_of(summaries: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Number of schedules that each agent has measured."""
    return {agent: summary["agents"][agent]["schedules"] for agent, summary in summaries.items()}


def count_schedules(out: Path) -> int:
    """Number of schedules on record."""
    count = 0
    for path in out.glob("*/*/schedules.jsonl"):
        with path.open("rb") as file:
            count += sum(1 for _ in file)
    return count


def note_call(options: argparse.Namespace, seconds: float, schedules: int) -> None:
    """Add to the record of calls how long this one took, and what for."""
    run = RunDirectory(options.out)
    calls = run.read_json("calls.json") or []
    call = {
        "seconds": seconds,
        "schedules": schedules,
        "gpus": options.gpus,
        "playing_s": PLAYING_SHARE * 60.0 * options.minutes,
    }
    run.write_json("calls.json", [*calls, call])


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def summarise(out: Path, failed: Sequence[str] = ()) -> dict[str, Any]:
    """Write `summary.json` from the run directories of the kernels that were played on, and return it."""
    per_kernel: dict[str, Any] = {}
    for path in sorted(out.iterdir()):
        summaries = read_summaries(path) if path.is_dir() else {}
        if summaries:
            per_kernel[path.name] = of_kernel(summaries, RunDirectory(path).read_json("deployed.json") or {})
    gains = {name: found["speedup"] for name, found in per_kernel.items()}
    agents = sorted({agent for found in per_kernel.values() for agent in found["controls"]})
    calls = RunDirectory(out).read_json("calls.json") or []
    seconds = sum(call["seconds"] for call in calls)
    summary = {
        "kernels": len(per_kernel),
        "geomean": geomean(list(gains.values())),
        "max": max(gains.values(), default=None),
        "paper_kernels_geomean": geomean([gain for name, gain in gains.items() if name in PAPER]),
        "per_kernel": per_kernel,
        "controls": {
            agent: geomean([found["controls"].get(agent, {}).get("speedup", 1.0) for found in per_kernel.values()])
            for agent in agents
        },
        "wrong_outputs": sum(found["wrong_outputs"] for found in per_kernel.values()),
        "schedules_run": sum(found["schedules_run"] for found in per_kernel.values()),
        "schedules_per_second": sum(call["schedules"] for call in calls) / seconds if seconds else None,
        "calls": calls,
        "simulated": any(found["simulated"] for found in per_kernel.values()),
        "failed": list(failed),
        "left_out": [name for name in TARGETS if name not in per_kernel],
    }
    RunDirectory(out).write_json("summary.json", summary)
    return summary


def of_kernel(summaries: dict[str, dict[str, Any]], final: dict[str, Any]) -> dict[str, Any]:
    """Summary of one kernel: the deployed speedup, or 1 where nothing was deployed."""
    one = next(iter(summaries.values()))
    measured = final if final.get("deployed") or final.get("reason") == "simulated" else None
    statuses: Counter[str] = Counter()
    for summary in summaries.values():
        statuses.update(summary["statuses"])
    return {
        "speedup": 1.0 if measured is None else measured["speedup"],
        "interval": None if measured is None else [measured["low"], measured["high"]],
        "noise_floor": None if measured is None else measured["noise_floor"],
        "agent": final.get("agent"),
        "deployed": final.get("deployed", False),
        "why_not_deployed": final.get("reason", None if final.get("deployed") else "it was not its turn yet"),
        "refused_at": None if final.get("deployed") or "low" not in final else [final["low"], final["high"]],
        "original_us": final.get("original_us"),
        "controls": {agent: of_agent(summary["agents"][agent]) for agent, summary in summaries.items()},
        "budget": one["budget"],
        "schedules_run": sum(summary["schedules_run"] for summary in summaries.values()),
        "wrong_outputs": sum(summary["wrong_outputs"] for summary in summaries.values()),
        "statuses": dict(statuses),
        "simulated": one["simulated"],
        "unit": one["unit"],
        "simulated_bound": one["simulated_bound"]["gain_at_most"],
        "simulated_limit": one["simulated_bound"]["limited_by"],
    }


def of_agent(found: dict[str, Any]) -> dict[str, Any]:
    """Result of one agent: the confirmed speedup of its best, or 1."""
    held = found["confirmed"]
    return {
        "speedup": 1.0 if held is None else held["speedup"],
        "interval": None if held is None else [held["low"], held["high"]],
        "best_in_search": found["best_in_search"],
        "schedules": found["schedules"],
        "stopped_by": found["stopped_by"],
    }


def geomean(values: list[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return statistics.geometric_mean(values) if values else None


def pack(out: Path, folder: Path) -> list[Path]:
    """Write the summary and a few archives of everything but the policies' weights into one folder; return its files."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / "summary.json"
    summary.write_bytes((out / "summary.json").read_bytes())
    files = [summary]
    left = [path for path in sorted(out.rglob("*")) if path.is_file() and not path.name.endswith(_LEFT_OUT_OF_ARCHIVES)]
    while left:
        files.append(folder / f"runs-{len(files)}.tar.gz")
        with tarfile.open(files[-1], "w:gz") as archive:
            while left and files[-1].stat().st_size < ARCHIVE_BYTES:
                path = left.pop(0)
                archive.add(path, path.relative_to(out))
    return files


if __name__ == "__main__":
    main()
