"""The built-in policy's split products before the judge, beside torch.compile and a CUDA graph of the reference.

    python benchmarks/split_race.py --out RUN_DIR --seconds 330 --commit "$(git rev-parse HEAD)"
    python benchmarks/split_race.py --out /tmp/dry --device cpu --seconds 300

Writes each task in KernelBench's format, lets the policy propose for it, and judges its proposals that hold a split product.
The stock baselines of a task are measured together, in one rotation with eager. Started again with the same directory, it
goes on. `summary.json` and `summary.md` are rewritten after every evaluation. On a CPU the shapes are tiny and the
candidates fall back to PyTorch: that shows that the script runs to its end, and nothing else.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import KernelwrightError
from kernelwright.execution.local import Job, JudgePool, RotationJob
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.policy import Context
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.rewrites.baselines import baseline_source
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.products import FORMS
from kernelwright.rewrites.templates import split_product

PLAIN = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, a, b):
        return {expression}


def get_inputs():
    return [torch.rand({left}), torch.rand({right})]


def get_init_inputs():
    return []
"""
LAYER = """import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, features_in, features_out):
        super().__init__()
        self.gemm = nn.Linear(features_in, features_out)
{init}
    def forward(self, x):
        x = self.gemm(x)
        return {expression}


def get_inputs():
    return [torch.rand({rows}, {features_in})]


def get_init_inputs():
    return [{features_in}, {features_out}]
"""
PROPOSALS = 8


def plain(expression: str, left: Sequence[int], right: Sequence[int]) -> str:
    """A product of two inputs."""
    return PLAIN.format(expression=expression, left=", ".join(map(str, left)), right=", ".join(map(str, right)))


def layer(expression: str, shape: Sequence[int], init: str = "") -> str:
    """A linear layer and what follows it."""
    indented = f"        {init}\n" if init else ""
    sizes = dict(zip(("rows", "features_in", "features_out"), shape, strict=True))
    return LAYER.format(expression=expression, init=indented, **sizes)


def tasks(divisor: int) -> list[Task]:
    """The tasks, the most important first; shapes of KernelBench's levels 1 and 2, divided on a CPU."""

    def s(*sizes: int) -> tuple[int, ...]:
        return tuple(max(1, size // divisor) for size in sizes)

    texts = {
        "square_matmul_4096": plain("torch.matmul(a, b)", s(4096, 4096), s(4096, 4096)),
        "gemm_multiply_leaky_relu_1024x8192x8192": layer("F.leaky_relu(x * 2.0, 0.1)", s(1024, 8192, 8192)),
        "matmul_swish_bias_32768x1024x4096": layer(
            "torch.sigmoid(x) * x + self.bias", s(32768, 1024, 4096), "self.bias = nn.Parameter(torch.rand(features_out))"
        ),
        "standard_matmul_2048x8192x4096": plain("torch.matmul(a, b)", s(2048, 8192), s(8192, 4096)),
        "transposed_a_2048x8192x4096": plain("torch.matmul(a.T, b)", s(8192, 2048), s(8192, 4096)),
        "transposed_b_2048x8192x4096": plain("torch.matmul(a, b.T)", s(2048, 8192), s(4096, 8192)),
        "tall_matmul_16384x1024x1024": plain("torch.matmul(a, b)", s(16384, 1024), s(1024, 1024)),
        "large_k_matmul_256x524288x256": plain("torch.matmul(a, b)", s(256, 524288), s(524288, 256)),
        "batched_matmul_128x512x1024x2048": plain("torch.bmm(a, b)", s(128, 512, 1024), s(128, 1024, 2048)),
    }
    return [Task(id=name, source=text) for name, text in texts.items()]


def proposals(task: Task) -> list[Candidate]:
    """What the policy proposes with a split product, those without a CUDA graph first."""
    context = Context(task=task, device="cuda", history=(), seed=0)
    found = [one for one in BuiltinPolicy().propose(context, PROPOSALS) if set(one.techniques) & set(FORMS)]
    return sorted(found, key=lambda one: "cuda-graph" in one.techniques)


def turns(all_tasks: Sequence[Task]) -> Iterator[Job]:
    """Candidates to judge: of each task first those in CUDA C++, without a graph and with one, then the others."""
    jobs = [Job(task, one) for task in all_tasks for one in proposals(task)]
    # The sort keeps the order of the tasks.
    yield from sorted(
        jobs,
        key=lambda job: ("split-product-cuda" not in job.candidate.techniques, "cuda-graph" in job.candidate.techniques),
    )


def rotations(all_tasks: Sequence[Task], names: Sequence[str]) -> list[RotationJob]:
    """The stock baselines of each task."""
    return [
        RotationJob(
            task,
            tuple(
                Candidate(source=baseline_source(task, name), policy=BASELINE_POLICY, techniques=(name,)) for name in names
            ),
        )
        for task in all_tasks
    ]


class Race:
    """Keeps a run directory and its summary while two pools of judges fill it.

    Args:
        run: The directory.
        all_tasks: In the order of the summary.
    """

    def __init__(self, run: RunDirectory, all_tasks: Sequence[Task]) -> None:
        self.run, self.tasks = run, all_tasks
        self.errors: dict[str, str] = {}
        self.over = threading.Event()
        self._keeping = threading.Lock()

    def keep(self, task: Task, outcome: Evaluation | KernelwrightError) -> None:
        """Record one evaluation; nothing once the time is over, when judges are ended in the middle of their work."""
        with self._keeping:
            if self.over.is_set():
                return
            if isinstance(outcome, KernelwrightError):
                self.errors[task.id] = str(outcome)
                print(f"{task.id}: {outcome}", flush=True)
            else:
                self.run.append(outcome)
                row = row_of(outcome)
                print(f"{task.id} {row['techniques']}: {row['verdict']} {row['speedup']} {row['detail'][:200]}", flush=True)
            self.summarise()

    def summarise(self) -> None:
        """Write `summary.json` and `summary.md` from the records."""
        found = list(self.run.evaluations())
        rows = [summary_of(task, [one for one in found if one.task_sha256 == task.sha256]) for task in self.tasks]
        self.run.write_json("summary.json", {"rows": rows, "errors": self.errors})
        self.run.write_text("summary.md", table_of(rows))


def row_of(found: Evaluation) -> dict[str, Any]:
    """What is told of one evaluation."""
    return {
        "techniques": ", ".join(found.techniques),
        "verdict": str(found.verdict),
        "reason": str(found.reason) if found.reason else None,
        "detail": found.detail,
        "speedup": found.speedup,
        "speedup_low": found.speedup_low,
        "speedup_high": found.speedup_high,
        "reference_us": found.reference_us,
        "candidate_us": found.candidate_us,
        "labels": [str(label) for label in found.labels],
        "elapsed_s": found.elapsed_s,
    }


def summary_of(task: Task, found: Sequence[Evaluation]) -> dict[str, Any]:
    """Candidates and baselines of one task, and how the best of each compare."""
    candidates = [row_of(one) for one in found if one.policy != BASELINE_POLICY]
    baselines = [row_of(one) for one in found if one.policy == BASELINE_POLICY]
    best = max((row for row in candidates if row["speedup"]), key=lambda row: row["speedup"], default=None)
    stock = max((row["speedup"] for row in baselines if row["speedup"]), default=None)
    return {
        "task": task.id,
        "best": best,
        # Eager is a baseline too.
        "best_baseline_speedup": max(stock, 1.0) if stock else None,
        "over_best_baseline": best["speedup"] / max(stock, 1.0) if best and stock else None,
        "candidates": candidates,
        "baselines": baselines,
    }


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| task | eager, us | speedup | 95 % interval | how | best stock baseline |", "|---|---|---|---|---|---|"]
    for row in rows:
        best, stock = row["best"], row["best_baseline_speedup"]
        told = f"{stock:.2f}" if stock else ""
        if best is None:
            lines.append(f"| {row['task']} | | none accepted | | | {told} |")
        else:
            interval = f"{best['speedup_low']:.2f} to {best['speedup_high']:.2f}"
            numbers = f"{best['reference_us']:.0f} | {best['speedup']:.2f} | {interval}"
            lines.append(f"| {row['task']} | {numbers} | {best['techniques']} | {told} |")
    return "\n".join(lines) + "\n"


def race(
    race_: Race, jobs: list[Job], owed: list[RotationJob], device: str, judges: tuple[int, int], seconds: float
) -> None:
    """Judge candidates and measure baselines beside one another until both are done or the time is over."""
    start = time.monotonic()
    stop: Callable[[], bool] = race_.over.is_set
    settings = Settings() if device != "cpu" else Settings.quick(build_limit_s=120.0)
    pools = [JudgePool([device], settings, count) for count in judges]

    def judge() -> None:
        for job, outcome in pools[0].evaluate(jobs, stop):
            race_.keep(job.task, outcome)

    def measure() -> None:
        for rotation, outcomes in pools[1].rotate(owed, stop):
            for outcome in [outcomes] if isinstance(outcomes, KernelwrightError) else outcomes:
                race_.keep(rotation.task, outcome)

    threads = [threading.Thread(target=work, daemon=True) for work in (judge, measure)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + seconds - time.monotonic()))
    race_.over.set()
    for pool in pools:
        pool.close(at_once=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run or go on, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the run directory")
    parser.add_argument("--seconds", type=float, default=330.0, help="end after this long, whatever is left")
    parser.add_argument("--commit", default="", help="commit of the checkout, for the record")
    parser.add_argument("--device", default="cuda", help="`cuda`, `cuda:N`, or `cpu` to try out the script")
    parser.add_argument("--judges", type=int, default=4, help="judges of candidates at once")
    parser.add_argument("--measures", type=int, default=2, help="tasks whose baselines are measured at once")
    parser.add_argument("--tasks", default="", help="tasks, with commas between; all by default")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    device = devices_of(options.device)[0]
    on_gpu = device != "cpu"
    if not on_gpu:
        split_product.LEAST_WORK, split_product.LEAST_SIDE = 0, 1
    all_tasks = [task for task in tasks(1 if on_gpu else 64) if not options.tasks or task.id in options.tasks.split(",")]
    names = ("compile", "cudagraph") if on_gpu else ("compile",)
    run = RunDirectory(options.out)
    config = {"kind": "split race", "tasks": [task.id for task in all_tasks], "baselines": list(names), "device": device}
    run.claim(config | {"commit": options.commit}, same=tuple(config), device=device)
    run.write_json("tasks.json", [task.model_dump(mode="json") for task in all_tasks])
    for task in all_tasks:
        run.write_text(f"{task.id}.txt", task.source)
    done = {(found.task_sha256, found.candidate_sha256) for found in run.evaluations()}
    jobs = [job for job in turns(all_tasks) if (job.task.sha256, job.candidate.sha256) not in done]
    owed = [
        one
        for one in rotations(all_tasks, names)
        if any((one.task.sha256, each.sha256) not in done for each in one.baselines)
    ]
    print(f"{len(jobs)} candidates, {len(owed)} rotations, {time.monotonic() - start:.0f} s so far", flush=True)
    here = Race(run, all_tasks)
    race(here, jobs, owed, device, (options.judges, options.measures), options.seconds - (time.monotonic() - start) - 8)
    here.summarise()
    print((options.out / "summary.md").read_text())
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
