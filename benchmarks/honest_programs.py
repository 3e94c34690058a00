"""Does the judge reject honest programs?

    python benchmarks/honest_programs.py OUT --accepted RUN [RUN ...] --builtin 8 --device cuda --per-device 7

Puts programs before today's judge, without a clock, that were written to be right: what the judge of earlier runs accepted,
and the built-in policy's first proposals for its own tasks. A judge that is made stricter loses by rejecting these; each
rejection is listed, to be read. Started again with the same directory, it goes on.

On a CPU, programs that name a GPU's tools are left out and counted.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernelwright.errors import KernelwrightError
from kernelwright.execution.local import Job, JudgePool
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.records.policy import Context
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.tasks.generated import family_tasks
from kernelwright.tasks.suites import builtin_tasks

GPU_TOOLS = ("triton", "cuda")
"""Programs that name one of them are not for a CPU."""


def accepted_in(paths: Sequence[Path], tasks: dict[str, Task]) -> Iterator[Job]:
    """What was accepted in earlier runs.

    Raises:
        SystemExit: a run was of other tasks, or keeps no sources.
    """
    for path in paths:
        for found in RunDirectory(path).evaluations():
            if not found.accepted:
                continue
            if found.task_sha256 not in tasks or not found.source:
                raise SystemExit(f"wanted sources for known tasks in {path}; found none of {found.task}, or another task")
            yield Job(tasks[found.task_sha256], Candidate(source=found.source, policy=found.policy))


def proposed(tasks: Sequence[Task], device: str, count: int) -> Iterator[Job]:
    """What the built-in policy proposes before it has seen a verdict."""
    for task in tasks:
        context = Context(task=task, device=device, history=(), seed=0)
        yield from (Job(task, candidate) for candidate in BuiltinPolicy().propose(context, count))


def _key(job: Job) -> tuple[str, str]:
    return job.task.sha256, job.candidate.sha256


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, and write `summary.json` beside the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--accepted", type=Path, nargs="*", default=[], metavar="RUN", help="runs to take programs from")
    parser.add_argument("--builtin", type=int, default=0, metavar="N", help="proposals for each built-in task")
    parser.add_argument("--families", type=int, default=120, help="how many generated tasks the runs had")
    parser.add_argument("--limit", type=int, help="judge a sample of so many")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--per-device", type=int, default=1)
    options = parser.parse_args(arguments)
    devices = devices_of(options.device)
    settings = Settings(timed=False, forbid=frozenset())
    tasks = {task.sha256: task for task in [*builtin_tasks(), *family_tasks(options.families)]}
    run = RunDirectory(options.out)
    config = {
        "kind": "honest programs",
        "settings": settings.model_dump(mode="json"),
        "accepted": [path.name for path in options.accepted],
        "builtin": options.builtin,
        "limit": options.limit,
    }
    run.claim(config, same=tuple(config), device=devices[0])
    jobs = [*accepted_in(options.accepted, tasks), *proposed(builtin_tasks(), devices[0], options.builtin)]
    jobs = list({_key(job): job for job in jobs}.values())
    fit = [job for job in jobs if devices[0] != "cpu" or not any(word in job.candidate.source for word in GPU_TOOLS)]
    random.Random(0).shuffle(fit)
    chosen = fit[: options.limit]
    done = {(found.task_sha256, found.candidate_sha256) for found in run.evaluations()}
    todo = [job for job in chosen if _key(job) not in done]
    errors: list[str] = []
    with JudgePool(devices, settings, options.per_device) as pool:
        for number, (job, outcome) in enumerate(pool.evaluate(todo), 1):
            if isinstance(outcome, KernelwrightError):
                errors.append(f"{job.task.id}: {outcome}")
                continue
            run.append(outcome)
            if not outcome.accepted or number % 50 == 0:
                verdict = f"{outcome.reason}: {outcome.detail[:300]}" if outcome.reason else "accepted"
                print(f"{number}/{len(todo)} {job.task.id} {outcome.policy} {verdict}", flush=True)
    found = list(run.evaluations())
    summary = {
        "programs": len(jobs),
        "not_for_this_device": len(jobs) - len(fit),
        "judged": len(found),
        "accepted": sum(one.accepted for one in found),
        "rejected": [
            {"task": one.task, "policy": one.policy, "candidate_sha256": one.candidate_sha256, "reason": one.reason}
            | {"detail": one.detail}
            for one in found
            if not one.accepted
        ],
        "labels": dict(Counter(str(label) for one in found for label in one.labels).most_common()),
        "errors": errors,
    }
    run.write_json("summary.json", summary)
    print({name: value for name, value in summary.items() if name != "rejected"})


if __name__ == "__main__":
    main()
