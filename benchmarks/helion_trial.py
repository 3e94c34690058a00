"""Ten kernels that Helion generates, beside those of our own printers for the same tasks.

    pip install --no-deps --target /tmp/helion helion==1.5.1    # uses the torch and triton that are there
    PYTHONPATH=/tmp/helion python benchmarks/helion_trial.py emit DIR     # no GPU
    PYTHONPATH=/tmp/helion python benchmarks/helion_trial.py check DIR    # no GPU: sm_90 machine code, numbers, check.md
    python benchmarks/helion_trial.py choose DIR --seconds 240            # a GPU: screens all, copies the best of each side

What `emit` and `choose` leave in DIR is judged without Helion, by two commands:

    kernelwright bench kernelbench --path DIR/suite --levels 1 --candidates DIR/best/helion --out DIR/judged-helion
    kernelwright bench kernelbench --path DIR/suite --levels 1 --candidates DIR/best/ours --out DIR/judged-ours

`bench --candidates` judges, one candidate for each task; it does not screen. To judge first guesses without `choose`, name
DIR/helion-0 and DIR/ours-0. DIR/small has small shapes, on which `choose --device cpu` and `bench` show that all runs.

Helion asks PyTorch about the GPU that it emits for: `pretend_h200` answers for an H200. Without that its heuristics for
Hopper do not fire, and a product's default tile is 16 x 16 x 16. Its configurations are its own default for an H200, and
some named here by hand; its search needs a GPU and did not run. Candidates of both sides launch by the same few lines.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helion_check import check, place, pretend_h200
from helion_tasks import TRIALS, Trial

from kernelwright.execution.screening import ScreeningPool
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Candidate, Task
from kernelwright.records.policy import Context
from kernelwright.records.screened import Screened
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.templates.text import kernel_text

OURS_MOST = 2
"""Candidates of our own side for a task, those without a CUDA graph that the policy proposes first."""
PROPOSALS = 12
MODEL_NEW = '''

class ModelNew(Model):
    """Helion's kernel for the shapes it was emitted for; else `Model.forward` runs."""

    def forward(self, {names}):
        tensors = ({names}, *self.parameters())
        if torch.is_grad_enabled() or not x.is_cuda or x.shape != {shape} or x.dtype is not torch.float32:
            return super().forward({names})
        if not all(tensor.is_contiguous() for tensor in tensors):
            return super().forward({names})
        return {call}
'''
LAUNCHER = '''

_LAUNCHES = {}


def _launcher(kernel, grid, *arguments, num_warps, **options):
    """Launches as the kernels of our own printers are launched. Tensors come before constants."""
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    launch = _LAUNCHES.get(kernel)
    if launch is None:
        assert len(grid) == 1
        launch = _LAUNCHES[kernel] = _Launch(kernel, grid[0], num_warps, *arguments[len(tensors) :], **options)
    launch(*tensors)
'''


def standalone(text: str, modules: Mapping[str, Any]) -> str:
    """Helion's text without Helion: its imports go, and functions of the named modules are written out.

    Raises:
        ValueError: something of Helion's is left.
    """
    gone = re.compile(r"from (__future__|helion|torch\._inductor)|import .* as _source_module| *# src\[")
    lines = [line for line in text.splitlines() if not gone.match(line)]
    body = "\n".join(lines).replace("_launcher=_default_launcher", "_launcher=_launcher")
    names = "|".join(modules)
    found = dict.fromkeys(re.findall(rf"\b({names})\.(\w+)", body)) if names else {}
    needed: dict[str, str] = {}
    for module, name in found:
        _collect(modules[module], name, needed)
    body = re.sub(rf"\b(?:{names})\.(\w+)", r"\1", body) if names else body
    for name, place_of in (("tl_math", " import math as tl_math"), ("libdevice", ".extra import libdevice")):
        if f"{name}." in body:
            needed = {name: f"from triton.language{place_of}\n"} | needed
    head = "\n\n".join(needed.values())
    body = body.replace("import triton.language as tl", f"import triton.language as tl\n{head}", 1)
    imports = [line for line in text.splitlines() if gone.match(line) and "# src[" not in line]
    given = {name for line in imports for name in _imported(line)}
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    if left := (given & used) - set(needed):
        raise ValueError(f"wanted Helion's text to stand alone, found {sorted(left)}")
    return body


def _imported(line: str) -> list[str]:
    """The names that an import binds."""
    (node,) = ast.parse(line.strip()).body
    assert isinstance(node, ast.Import | ast.ImportFrom)
    return [alias.asname or alias.name for alias in node.names]


def _collect(module: Any, name: str, needed: dict[str, str]) -> None:
    """The text of a function, after the texts of those of its module that it calls."""
    if name in needed:
        return
    function = getattr(module, name)
    text = inspect.getsource(getattr(function, "fn", function))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id != name and hasattr(getattr(module, node.id, None), "fn"):
            _collect(module, node.id, needed)
    needed[name] = text


def _launch_text() -> str:
    """The class by which kernels of our own printers are launched."""
    return "\n\nclass _Launch:" + kernel_text("fused.triton.txt").partition("class _Launch:")[2].rstrip() + "\n"


def arguments_of(trial: Trial, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    """Tensors on the meta device that the candidate's module gives the kernel."""
    found: list[tuple[torch.Tensor, ...]] = []

    def kernel(*given: torch.Tensor) -> torch.Tensor:
        found.append(given)
        raise StopIteration

    scope: dict[str, Any] = {trial.kernel: kernel}
    text = (
        f"{trial.source(sizes)}\n\nclass Call(Model):\n    def forward(self, {trial.names}):\n        return {trial.call}\n"
    )
    with torch.device("meta"):
        exec(text, scope)
        try:
            scope["Call"]()(*scope["get_inputs"]())
        except StopIteration:
            return found[0]
    raise ValueError(f"wanted {trial.call} to call {trial.kernel}")


def helion_candidates(trial: Trial, sizes: Mapping[str, int]) -> list[str]:
    """A candidate for Helion's default configuration, and one for each of the others."""
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pretend_h200():
        kernels = importlib.import_module("helion_kernels")
        given = arguments_of(trial, sizes)
        with FakeTensorMode():
            fakes = tuple(torch.empty(one.shape, dtype=one.dtype, device="cuda") for one in given)
        bound = getattr(kernels, trial.kernel).bind(fakes)
        default = bound.config_spec.default_config()
        config_type = type(default)
        configs = [default, *(config_type(**(default.config | dict(other))) for other in trial.others)]
        texts = [bound.to_triton_code(config) for config in configs]
        modules = {"triton_helpers": triton_helpers}
        modules["helion_triton_helpers"] = importlib.import_module("helion.runtime.triton.helpers")
        shape = tuple(_meta_inputs(trial, sizes)[0].shape)
        model = MODEL_NEW.format(names=trial.names, shape=shape, call=trial.call)
        head = f"{trial.source(sizes)}{_launch_text()}{LAUNCHER}\n\n"
        return [f"{head}{standalone(text, modules)}{model}" for text in texts]


def _every(trial: Trial, sizes: Mapping[str, int]) -> list[str]:
    other = replace(trial, kernel=trial.also, call=trial.call.replace(trial.kernel, trial.also))
    return [*helion_candidates(trial, sizes), *(helion_candidates(other, sizes) if trial.also else ())]


def _meta_inputs(trial: Trial, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    scope: dict[str, Any] = {}
    with torch.device("meta"):
        exec(trial.source(sizes), scope)
        made: list[torch.Tensor] = scope["get_inputs"]()
    return made


def our_candidates(trial: Trial) -> list[str]:
    """The built-in policy's first proposals that are a kernel of its own, and nothing else around it."""
    task = Task(id=trial.name, source=trial.source(trial.sizes))
    found = BuiltinPolicy().propose(Context(task=task, device="cuda", history=(), seed=0), PROPOSALS)
    plain = [one for one in found if "@triton.jit" in one.source and "cuda-graph" not in one.techniques]
    return [one.source for one in plain if not any("compile" in name for name in one.techniques)][:OURS_MOST]


def emit(folder: Path) -> None:
    """Write the suite and every candidate of both sides."""
    for number, trial in enumerate(TRIALS, start=1):
        name = f"level1/{number}_{trial.name}.py"
        sides = {"helion": _every(trial, trial.sizes), "ours": our_candidates(trial)}
        texts = {"suite": trial.source(trial.sizes)}
        texts |= {f"{side}-{place}": text for side, made in sides.items() for place, text in enumerate(made)}
        small = _every(trial, trial.small)
        texts |= {"small/suite": trial.source(trial.small)}
        texts |= {f"small/helion-{place}": text for place, text in enumerate(small)}
        for where, text in texts.items():
            path = folder / where / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{trial.name}: {', '.join(f'{len(made)} of {side}' for side, made in sides.items())}", flush=True)


def choose(folder: Path, device: str, seconds: float) -> None:
    """Screen every candidate, task by task, and copy the best right one of each side into `best`."""
    end_s, over = time.monotonic() + seconds, threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.daemon = True
    timer.start()
    resolved = devices_of(device)[0]
    with (folder / "screened.jsonl").open("a", encoding="utf-8") as log:
        for path in sorted(folder.glob("suite/level1/*.py"), key=place):
            if time.monotonic() > end_s:
                print(f"{path.stem}: not reached", flush=True)
                continue
            found = screened(path, folder, resolved, over)
            for side in ("helion", "ours"):
                right = [(one.estimate or 0.0, where) for where, one in found.items() if one.correct and side in where]
                if right:
                    target = folder / "best" / side / "level1" / path.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(folder / max(right)[1] / "level1" / path.name, target)
            for where, one in found.items():
                row = {"task": path.stem, "candidate": where, "correct": one.correct, "reason": one.reason}
                row |= {key: getattr(one, key) for key in ("estimate", "reference_us", "candidate_us", "detail")}
                print(json.dumps(row), file=log, flush=True)
                print(f"{path.stem} {where}: {one.estimate} of eager, {one.candidate_us} us {one.reason or ''}", flush=True)
    timer.cancel()


def screened(task: Path, folder: Path, device: str, over: threading.Event) -> dict[str, Screened]:
    """Looks at the candidates of one task by the folders that they lie in."""
    where = {}
    for path in sorted(folder.glob(f"*-*/level1/{task.name}")):
        where[Candidate(source=path.read_text(encoding="utf-8")).sha256] = path
    candidates = [Candidate(source=path.read_text(encoding="utf-8")) for path in where.values()]
    settings = Settings() if device != "cpu" else Settings.quick(build_limit_s=120.0)
    found = {}
    with ScreeningPool(Task(id=task.stem, source=task.read_text(encoding="utf-8")), device, settings) as pool:
        for candidate, outcome in pool.screen(candidates, over.is_set):
            name = where[candidate.sha256].parts[-3]
            if isinstance(outcome, Screened):
                found[name] = outcome
            else:
                print(f"{task.stem} {name}: {outcome}", flush=True)
    return dict(sorted(found.items()))


def main() -> None:
    """Emit, check or choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("emit", "check", "choose"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto", help="of `choose`")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="time of `choose`; tasks that it does not reach have no best"
    )
    given = parser.parse_args()
    if given.what == "choose":
        choose(given.folder, given.device, given.seconds)
    else:
        {"emit": emit, "check": check}[given.what](given.folder)


if __name__ == "__main__":
    main()
