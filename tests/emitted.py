"""Writes the hash of every candidate that the built-in policy emits for the tasks of a suite, to be compared after a change.

    python -m tests.emitted tests/golden/emitted.jsonl builtin modules
    python -m tests.emitted tests/golden/emitted-kernelbench.jsonl kernelbench --path CHECKOUT

Each task is proposed for twice, on a CPU and on a GPU: first without a history, then after made-up estimates that put three
candidates ahead. No GPU and no compiler is needed. Hashes depend on the versions of torch and transformers, which the first
line names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelwright.records import Candidate, Task
from kernelwright.records.lines import sha256_of
from kernelwright.records.policy import Context
from kernelwright.records.screened import Screened, screened_of
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.tasks.suites import load_suite

DEVICES = ("cpu", "cuda")
MOST = 200
"""Candidates asked for at a time: more than any plan has."""
AHEAD = 3
"""Candidates of the first plan that the made-up estimates put ahead."""
MODULES = 10
"""Modules of the suite `modules`, all small ones or large ones in turn."""


def versions() -> dict[str, str]:
    """Versions of the packages that a hash depends on."""
    try:
        import transformers
    except ImportError:
        return {"torch": torch.__version__}
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def with_compiler() -> tempfile.TemporaryDirectory[str]:
    """Let the policy find an nvcc, which it never runs, so that CUDA C++ is emitted on every machine."""
    folder = tempfile.TemporaryDirectory(prefix="kw-nvcc-")
    (Path(folder.name) / "bin").mkdir()
    (Path(folder.name) / "bin" / "nvcc").touch(mode=0o755)
    os.environ["CUDA_HOME"] = folder.name
    return folder


def tasks_of(suite: str, path: Path | None) -> list[Task]:
    """The tasks of a suite; of `modules` ten, each of another kind, at its two sizes in turn."""
    tasks = [entry.task for entry in load_suite(suite, path=path).entries]
    if suite != "modules":
        return tasks
    by_size = [[task for task in tasks if task.id.endswith(size)] for size in ("-small", "-large")]
    step = max(1, len(by_size[0]) // MODULES)
    return [by_size[number % 2][place] for number, place in enumerate(range(0, len(by_size[0]), step))][:MODULES]


def looks_at(task: Task, plan: Sequence[Candidate]) -> tuple[Screened, ...]:
    """Made-up estimates: three candidates are ahead, every fifth is wrong, and half of the calls are long."""
    order = sorted(plan, key=lambda candidate: sha256_of(f"{task.id} {candidate.techniques}"))
    place = {candidate.sha256: number for number, candidate in enumerate(order)}
    looks = []
    for candidate in plan:
        number = place[candidate.sha256]
        wrong = number % 5 == 4
        estimate = None if wrong else 2.0 - number / 10 if number < AHEAD else 0.95
        latency_us = None if wrong else 5000.0 if number % 2 else 50.0
        looks.append(screened_of(task, candidate, correct=not wrong, estimate=estimate, candidate_us=latency_us))
    return tuple(looks)


def emitted(task: Task, device: str) -> list[Candidate]:
    """All candidates that the policy emits for a task, in order: the first plan, and what follows estimates of it."""
    policy = BuiltinPolicy()
    context = Context(task=task, device=device, history=(), seed=0)
    plan = policy.propose(context, MOST)
    looks = looks_at(task, plan)
    return plan + policy.propose(Context(task=task, device=device, history=(), seed=0, screened=looks), MOST)


def line_of(suite: str, task: Task, device: str) -> dict[str, Any]:
    """One line: each candidate as a part of its hash and its techniques; one hash of all where the suite is large."""
    candidates = emitted(task, device)
    named = [f"{candidate.sha256[:10]} {' '.join(candidate.techniques)}" for candidate in candidates]
    line: dict[str, Any] = {"task": task.id, "device": device, "count": len(named)}
    full = "\n".join(f"{candidate.sha256} {' '.join(candidate.techniques)}" for candidate in candidates)
    return line | ({"sha256": sha256_of(full)} if suite == "kernelbench" else {"candidates": named})


def lines(suites: Sequence[str], path: Path | None, part: slice = slice(None)) -> Iterator[dict[str, Any]]:
    """The lines of suites, after one of versions."""
    yield versions()
    with with_compiler():
        for suite in suites:
            for task in tasks_of(suite, path)[part]:
                for device in DEVICES:
                    started = time.monotonic()
                    yield line_of(suite, task, device)
                    print(f"{task.id} {device} {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("suites", nargs="+", choices=("builtin", "modules", "kernelbench"))
    parser.add_argument("--path", type=Path, help="checkout of KernelBench")
    options = parser.parse_args()
    text = "".join(json.dumps(line) + "\n" for line in lines(options.suites, options.path))
    options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
