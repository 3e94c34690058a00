"""Tune many kernels by PPO and its controls under equal budgets, and write results/sass-<gpu>/.

    python benchmarks/sass_campaign.py results/sass-h200 --minutes 9 --gpus 1
    python benchmarks/sass_campaign.py results/sass-h200 --minutes 9 --gpus 4        # the same command goes on

Each kernel has a run directory of its own and a process of its own, with one GPU. A kernel whose run is finished
is not run again, and one that was cut short when the call's time was up goes on where it was. After the search
each winner goes through `deploy`, which proves it and times it again in fresh processes: that is the number in
`summary.json`, and a kernel without a confirmed gain counts as 1. With `--backend` naming a model, nothing is
deployed and every number is marked as simulated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kernelwright.records import RunDirectory

HERE = Path(__file__).resolve()
PAPER = ("softmax", "rmsnorm", "gemm_leakyrelu", "batched_gemm", "fused_feed_forward", "attention_mma")
CORPUS = (*PAPER, "sgemm", "layernorm", "row_sum", "attention_wgmma")
HEADROOM = ("gelu_chain", "gemv", "int8_gemm", "rope", "recurrence", "pairwise")
TARGETS = {name: f"corpus:{name}" for name in CORPUS} | {
    name: f"{HERE.with_name('sass_kernels.py')}:{name}" for name in HEADROOM
}
AGENTS = ("ppo", "greedy", "guided", "anneal", "random")
AGENT_SHARE = 0.35
"""Of a kernel's time box that one agent may use. PPO needs most of it; the others are done with their budget sooner."""

LEAST_S = 20.0
"""A kernel is begun only if the call still has this much time."""


def main() -> None:
    """Run what is left, as far as the time goes, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", default=",".join(TARGETS), help="comma-separated")
    parser.add_argument("--agents", default=",".join(AGENTS), help="comma-separated; each has the whole budget")
    parser.add_argument("--budget", type=int, default=1000, help="schedules for each agent and kernel")
    parser.add_argument("--box", type=float, default=240.0, help="seconds for one kernel")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call; what is not done then goes on in the next")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moves", default="beyond", choices=("beyond", "paper"))
    parser.add_argument("--backend", default="gpu")
    parser.add_argument("--architecture", type=int, default=None)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        tune(options, options.only)
        return
    campaign(options)
    summary = summarise(options.out)
    print(json.dumps({key: summary[key] for key in ("kernels", "geomean", "max", "wrong_outputs", "schedules_run")}))


def campaign(options: argparse.Namespace) -> None:
    """Give every GPU a kernel, and the next one when it is done."""
    end = time.monotonic() + 60.0 * options.minutes
    kernels = options.kernels.split(",")
    unknown = [name for name in kernels if name not in TARGETS]
    if unknown:
        sys.exit(f"wanted kernels out of {', '.join(TARGETS)}, found {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    waiting = [name for name in kernels if not is_finished(options.out / name)]
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    while waiting or running:
        for gpu in range(options.gpus):
            if gpu in running or not waiting or time.monotonic() + LEAST_S > end:
                continue
            name = waiting.pop(0)
            running[gpu] = (name, start(options, name, gpu))
        if not running:
            break
        for gpu, (name, process) in list(running.items()):
            if process.poll() is not None:
                del running[gpu]
                print(f"{name}: exit status {process.returncode}", flush=True)
            elif time.monotonic() > end:
                # Every measurement is on disk already, so nothing but the time since the last one is lost.
                process.terminate()
                process.wait()
                del running[gpu]
                waiting.append(name)
        time.sleep(0.2)
    if waiting:
        print(f"left for the next call: {', '.join(waiting)}", flush=True)


def start(options: argparse.Namespace, name: str, gpu: int) -> subprocess.Popen[bytes]:
    """Start one kernel in a process that sees one GPU, with what it says in a file beside its run."""
    given = ["--agents", options.agents, "--budget", str(options.budget), "--box", str(options.box)]
    given += ["--seed", str(options.seed), "--moves", options.moves, "--backend", options.backend]
    if options.architecture is not None:
        given += ["--architecture", str(options.architecture)]
    with (options.out / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE), str(options.out), "--only", name, *given],
            stdout=log,
            stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")},
        )


def is_finished(path: Path) -> bool:
    """Whether a kernel's run and its deployment are done."""
    return (path / "deployed.json").exists()


def tune(options: argparse.Namespace, name: str) -> None:
    """Tune one kernel, and deploy its winner into a cache of its own run directory."""
    from kernelwright.rl.assembly_arena import open_game
    from kernelwright.rl.assembly_search import GameSettings, optimize_kernel

    agents = tuple(options.agents.split(","))
    settings = GameSettings(agents, options.budget, options.seed, options.moves, limit_s=AGENT_SHARE * options.box)
    game = open_game(TARGETS[name], options.backend, options.architecture)
    out = options.out / name
    try:
        result = optimize_kernel(
            game.program, game.arena, out=out, name=name, settings=settings, kernel_name=game.kernel_name,
            target=game.target, tell=lambda message: print(message, flush=True),
        )  # fmt: skip
    finally:
        game.arena.close()
    RunDirectory(out).write_json(
        "deployed.json", deployed(out, found=result.best is not None, simulated=game.arena.is_simulated)
    )


def deployed(out: Path, *, found: bool, simulated: bool) -> dict[str, Any]:
    """Send the winner through the deployed path and return what that said."""
    if not found:
        return {"deployed": False, "reason": "no gain was confirmed"}
    if simulated:
        return {"deployed": False, "reason": "simulated"}
    from kernelwright.tuning.cache import TunedCache
    from kernelwright.tuning.deploy import deploy, read_winner

    done = deploy(read_winner(out), TunedCache(out / "cache"))
    if done.refusal is not None or done.confirmation is None:
        return {"deployed": False, "reason": str(done.refusal), "detail": done.detail}
    ratio = done.confirmation.speedup
    return {
        "deployed": True,
        "speedup": ratio.estimate,
        "low": ratio.low,
        "high": ratio.high,
        "noise_floor": done.confirmation.noise_floor,
        "original_us": done.confirmation.original_us,
        "processes": done.confirmation.processes,
    }


def summarise(out: Path) -> dict[str, Any]:
    """Write `summary.json` from the run directories of the finished kernels, and return it."""
    per_kernel: dict[str, Any] = {}
    for path in sorted(out.iterdir()):
        run = RunDirectory(path) if path.is_dir() else None
        if run is None or not is_finished(path):
            continue
        summary, final = run.read_json("summary.json"), run.read_json("deployed.json")
        per_kernel[path.name] = of_kernel(summary, final)
    gains = {name: found["speedup"] for name, found in per_kernel.items()}
    agents = sorted({agent for found in per_kernel.values() for agent in found["controls"]})
    seconds = sum(found["seconds"] for found in per_kernel.values())
    schedules = sum(found["schedules_run"] for found in per_kernel.values())
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
        "schedules_run": schedules,
        "schedules_per_second": schedules / seconds if seconds else None,
        "simulated": any(found["simulated"] for found in per_kernel.values()),
        "left_out": [name for name in TARGETS if name not in per_kernel],
    }
    RunDirectory(out).write_json("summary.json", summary)
    return summary


def of_kernel(summary: dict[str, Any], final: dict[str, Any]) -> dict[str, Any]:
    """What the summary says of one kernel: the deployed speedup, or 1 where nothing was deployed."""
    best = summary["best"]
    measured = final if final.get("deployed") else best if summary["simulated"] else None
    schedules, rate = summary["schedules_run"], summary["schedules_per_second"]
    return {
        "speedup": 1.0 if measured is None else measured["speedup"],
        "interval": None if measured is None else [measured["low"], measured["high"]],
        "noise_floor": None if measured is None else measured["noise_floor"],
        "agent": None if best is None else best["agent"],
        "deployed": final.get("deployed", False),
        "why_not_deployed": final.get("reason"),
        "controls": {agent: of_agent(found) for agent, found in summary["agents"].items()},
        "budget": summary["budget"],
        "schedules_run": schedules,
        "seconds": schedules / rate if rate else 0.0,
        "wrong_outputs": summary["wrong_outputs"],
        "statuses": summary["statuses"],
        "simulated": summary["simulated"],
        "unit": summary["unit"],
        "simulated_bound": summary["simulated_bound"]["gain_at_most"],
        "simulated_limit": summary["simulated_bound"]["limited_by"],
    }


def of_agent(found: dict[str, Any]) -> dict[str, Any]:
    """What one agent got: the confirmed speedup of its best, or 1."""
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
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


if __name__ == "__main__":
    main()
