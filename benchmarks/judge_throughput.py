"""Measures how long the judge takes for one candidate, and how many it judges a minute.

    python benchmarks/judge_throughput.py OUT_DIR --device cuda

Three candidates are judged one by one, the GPU being idle: of a layer of 0.1 ms, of BERT-base (bfloat16, 8 x 256) and of
ResNet-50 (float32, 32 x 224), each the reference behind a CUDA graph, which is right and takes all of the judge's time. On a
processor it is the reference itself. A rejection is that of a copy that keeps the weights of its first call.

Then references of many built-in tasks are judged against themselves, several at once. What counts is the time in which every
judge has work: from when each has ended its first evaluation (which imports torch) until no further one is begun. An
evaluation that is only partly in it counts with that part. Each record says for how long it had the device alone for timing:
timing alone, back to back, would do one evaluation in the mean of those times.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelwright.errors import KernelwrightError
from kernelwright.execution.executor import LocalExecutor
from kernelwright.execution.work import Evaluate, run_all
from kernelwright.judge import Judge, Settings, resolve_device
from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.rewrites.wrappers import baseline_source
from kernelwright.tasks.suites import load_suite

TASK = """
import torch
import {library}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = {model}
        self.eval()

    def forward(self, x):
        return {call}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""
STALE = """
class ModelNew(Model):
    def forward(self, *inputs):
        if "first" not in vars(self):
            vars(self)["first"] = __import__("copy").deepcopy(self)
        return Model.forward(vars(self)["first"], *inputs)
"""


def tasks_of(tiny: bool) -> Iterator[Task]:
    """Tasks that are judged alone; none of a library that is not installed."""
    layer = "torch.nn.functional.leaky_relu(self.model(x) * 2.0, 0.1)"
    config = "hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128" if tiny else ""
    bert, words = f"transformers.BertModel(transformers.BertConfig({config})).bfloat16()", (2, 16) if tiny else (8, 256)
    resnet, image = ("resnet18", (2, 3, 32, 32)) if tiny else ("resnet50", (32, 3, 224, 224))
    for name, library, model, call, inputs in (
        ("layer", "torch", "torch.nn.Linear(1024, 512)", layer, f"torch.randn({8 if tiny else 128}, 1024)"),
        ("bert", "transformers", bert, "self.model(x).last_hidden_state", f"torch.randint(0, 30522, {words})"),
        ("resnet", "torchvision", f"torchvision.models.{resnet}()", "self.model(x)", f"torch.randn({image})"),
    ):
        if importlib.util.find_spec(library) is None:
            print(f"{name} is left out: {library} is not installed")
            continue
        yield Task(id=name, source=TASK.format(library=library, model=model, call=call, inputs=inputs))


def _renamed(task: Task) -> str:
    return task.source.replace("class Model(", "class ModelNew(")


def judge_alone(device: str, settings: Settings, run: RunDirectory, tiny: bool) -> dict[str, Any]:
    """Judge the candidates of each task one after the other; returns seconds, and the phases of each."""
    seconds, phases = dict[str, float](), dict[str, dict[str, float]]()
    with Judge(device, settings) as judge:
        for task in tasks_of(tiny):
            right = baseline_source(task, "cudagraph-fresh") if judge.device.type == "cuda" else _renamed(task)
            # The very first evaluation waits for processes that import torch, and compiles the judge's own kernels.
            tried = {"first": right} if task.id == "layer" else {}
            for name, source in {**tried, task.id: right, f"{task.id}_rejection": task.source + STALE}.items():
                found = judge.evaluate(task, Candidate(source=source, policy="throughput"))
                run.append(found)
                seconds[f"{name}_s"], phases[name] = found.elapsed_s, found.checks["phases_s"]
                triples = len(found.checks.get("clocks", {}).get("processes", []))
                print(
                    f"{found.elapsed_s:6.1f}s {name}: {found.verdict} {found.reason}, {triples} process triples", flush=True
                )
    print("| phase |", " | ".join(phases), "|\n| --- |", " --- |" * len(phases), sep="")
    for phase in {phase: None for one in phases.values() for phase in one}:
        print(f"| {phase} |", " | ".join(f"{one.get(phase, 0.0):.2f}" for one in phases.values()), "|")
    rejections = [taken_s for name, taken_s in seconds.items() if name.endswith("_rejection_s")]
    return {**seconds, "rejection_s": max(rejections), "phases_s": phases}


@dataclass(frozen=True, slots=True)
class Ended:
    """One evaluation: when it began and ended, and for how long it had the device alone."""

    begin_s: float
    end_s: float
    held_s: float


def busy(evaluations: Sequence[Ended], from_s: float, to_s: float) -> dict[str, float]:
    """Work done in a stretch of time; an evaluation counts by the part of its time that lies within."""
    parts = [max(0.0, min(one.end_s, to_s) - max(one.begin_s, from_s)) / (one.end_s - one.begin_s) for one in evaluations]
    count = sum(parts)
    held_s = sum(part * one.held_s for part, one in zip(parts, evaluations, strict=True))
    return {
        "wall_s": to_s - from_s,
        "evaluations": count,
        "judged_per_minute": 60 * count / (to_s - from_s),
        "timing_alone_per_minute": 60 * count / held_s,
        "share_of_timing_alone": held_s / (to_s - from_s),
    }


def main() -> None:
    """Measure and write `summary.json` beside the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--per-device", type=int, default=6)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long every judge is to have work")
    parser.add_argument("--tiny", action="store_true", help="small models and few process triples: to try the script")
    options = parser.parse_args()
    device = str(resolve_device(options.device))
    settings = Settings.quick() if options.tiny else Settings()
    run = RunDirectory(options.out)
    config = {"kind": "judge-throughput", "per_device": options.per_device, "settings": settings.model_dump(mode="json")}
    run.claim(config, same=tuple(config), device=device)
    alone = judge_alone(device, settings, run, options.tiny)
    run.write_json("summary.json", alone)  # in case the time ends
    tasks = [entry.task for entry in load_suite("builtin").entries]
    works = []
    for index, task in zip(range(options.evaluations), itertools.cycle(tasks)):
        works.append(Evaluate(task, Candidate(source=f"{_renamed(task)}\n# {index}\n", policy="identity")))
    ended: list[Ended] = []
    errors = []
    stopped_s, start_s = 0.0, time.monotonic()

    def stop() -> bool:
        nonlocal stopped_s
        now_s, all_busy = time.monotonic(), len(ended) >= options.per_device
        if not stopped_s and all_busy and now_s - ended[options.per_device - 1].end_s > options.seconds:
            stopped_s = now_s
        return stopped_s > 0

    with LocalExecutor([device], settings, judges=options.per_device) as executor:
        for result in run_all(executor, works, stop):
            task, outcome = result.work.task, result.outcome
            if isinstance(outcome, KernelwrightError):
                errors.append(f"{task.id}: {outcome}")
                continue
            run.append(outcome)
            now_s, held_s = time.monotonic(), outcome.checks["device_s"]
            ended.append(Ended(now_s - outcome.elapsed_s, now_s, held_s))
            print(f"{now_s - start_s:6.1f}s {task.id} {outcome.verdict} {outcome.elapsed_s:.1f}s {held_s}", flush=True)
    if not stopped_s or len(ended) <= options.per_device:
        raise SystemExit("wanted more evaluations than judges within the time; raise --evaluations or --seconds")
    kept_busy = busy(ended, ended[options.per_device - 1].end_s, stopped_s)
    summary = {"device": device, "judges_per_device": options.per_device, **alone, **kept_busy, "errors": errors}
    run.write_json("summary.json", summary)
    print(summary)


if __name__ == "__main__":
    main()
