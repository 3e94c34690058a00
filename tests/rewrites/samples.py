"""Small tasks in float64, and the comparison of a candidate with its reference."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.policy import Context
from kernelwright.rewrites import emit
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.fusion import KernelFuser
from kernelwright.rewrites.order import Order
from kernelwright.rewrites.rules import RULES, rewrite
from kernelwright.rewrites.tracing import load, trace

TEMPLATE = """
import math
import torch
from torch import nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {names}):
        {forward}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""

BY_NAME = {rule.name: rule for rule in RULES}


def task_text(forward: str, inputs: str, init: str = "pass") -> str:
    """A task from the body of `forward` over inputs a, b, c, d, and the body of the constructor.

    In inputs `N(2, 3)` is `torch.randn(2, 3)`.
    """
    inputs = re.sub(r"\bN\(", "torch.randn(", inputs)
    listed = ast.parse(f"[{inputs}]", mode="eval").body
    assert isinstance(listed, ast.List)
    count = len(listed.elts)
    body = "\n        ".join(line.strip() for line in forward.strip().splitlines())
    setup = "\n        ".join(line.strip() for line in init.strip().splitlines())
    return TEMPLATE.format(init=setup, names=", ".join("abcd"[:count]), forward=body, inputs=inputs)


@dataclass
class Rewritten:
    """What a set of rules made of a task."""

    reference: str
    source: str
    fired: tuple[str, ...]


def apply_rules(
    text: str,
    *names: str,
    fuse: str | None = None,
    single: bool = False,
    tiled: bool = False,
    single_pass: bool = False,
    channels: bool = False,
    fp16: bool = False,
    captured: bool = False,
) -> Rewritten:
    traced = trace(Task(id="sample", source=text))
    graphs = emit.copy_graph(traced.training), emit.copy_graph(traced.evaluation)
    fired = [name for graph in graphs for name in rewrite(graph, [BY_NAME[name] for name in names])]
    if fuse:
        fuser = KernelFuser(fuse, single, tiled, single_pass, channels, fp16)
        for graph in graphs:
            fuser.fuse(graph)
        fired += fuser.techniques
    techniques = tuple(dict.fromkeys(fired))
    return Rewritten(text, emit.module(text, traced, graphs, techniques, captured=captured), techniques)


def context(text: str, history: tuple[Evaluation, ...] = (), device: str = "cuda") -> Context:
    return Context(task=Task(id="sample", source=text), device=device, history=history, seed=0)


def proposed(text: str, count: int = 100, *, device: str = "cuda", order: Order | None = None) -> list[Candidate]:
    """What the built-in policy proposes first for a task."""
    return BuiltinPolicy(order).propose(context(text, device=device), count)


PLAIN = Order({})
"""An order that knows nothing: proposals come as the plan has them."""


def tensors(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    return [found for part in item for found in tensors(part)] if isinstance(item, list | tuple) else []


def other_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Another state of the same shapes, with spread in every parameter."""
    generator = torch.Generator().manual_seed(11)
    state = {}
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            state[name] = value
            continue
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        state[name] = noise.abs() + 0.5 if "var" in name else value + 0.3 * noise
    return state


def compare(
    reference: str,
    candidate: str,
    tolerance: float,
    loader: Callable[[str, str], Any] = load,
    steps: Iterable[int] = range(4),
) -> float:
    """Run both in train and eval mode, before and after other weights were loaded.

    Args:
        steps: Those of the four to run: even ones are in train mode, from the third on the weights are others.

    Returns:
        The largest error, relative to the largest output.
    """
    old, new = load(reference, "reference"), loader(candidate, "candidate")
    torch.manual_seed(1)
    expected_model = old.Model(*old.get_init_inputs())
    torch.manual_seed(1)
    model = new.ModelNew(*old.get_init_inputs())
    assert list(model.state_dict()) == list(expected_model.state_dict())
    fallbacks: list[int] = []
    original = new.Model.forward

    def counted(self: Any, *args: Any) -> Any:
        fallbacks.append(1)
        return original(self, *args)

    new.Model.forward = counted
    worst = 0.0
    state = None
    for step in steps:
        if step >= 2 and state is None:
            state = other_state(expected_model)
            expected_model.load_state_dict(state)
            model.load_state_dict(state)
        expected_model.train(step % 2 == 0)
        model.train(step % 2 == 0)
        torch.manual_seed(20 + step)
        inputs = old.get_inputs()
        kept = copy.deepcopy(inputs)
        with torch.no_grad():
            torch.manual_seed(5)
            expected = tensors(expected_model(*inputs))
            torch.manual_seed(5)
            outputs = tensors(model(*inputs))
        assert all(torch.equal(one, two) for one, two in zip(inputs, kept, strict=True)), "an input was changed"
        owned = {item.untyped_storage().data_ptr() for item in (*model.parameters(), *model.buffers(), *inputs)}
        for want, have in zip(expected, outputs, strict=True):
            assert (have.shape, have.dtype, have.stride()) == (want.shape, want.dtype, want.stride())
            assert have.untyped_storage().data_ptr() not in owned, "an output shares storage with state or input"
            assert torch.isfinite(want).all()
            worst = max(worst, float((have - want).abs().max() / (want.abs().max() + 1e-12)))
        for want, have in zip(expected_model.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-8)
    assert not fallbacks, "the candidate ran the reference"
    assert worst < tolerance, f"error {worst:.1e}"
    return worst


INTERPRETERS = """
import functools, inspect, json, os, runpy, signal, sys, types, warnings
import torch, triton, triton.language
from triton.runtime import interpreter
import tests.rewrites.samples

warnings.simplefilter("ignore")

@functools.cache
def builtins_of(package):
    return [name for name, member in inspect.getmembers(package) if triton.language.core.is_builtin(member)]

def members(package):
    return [(name, getattr(package, name)) for name in builtins_of(package)]

# At each call of a function of a kernel it goes through its whole language for what is built in: a third of its time.
interpreter.inspect = types.SimpleNamespace(**vars(inspect) | {"getmembers": members})
for line in sys.stdin:
    given = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        signal.alarm(300)
        try:
            said = os.open(given["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            wrong = os.open(given["wrong"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for to, of in enumerate((nothing, said, wrong)):
                os.dup2(of, to)
            os.environ["HOME"] = given["home"]
            sys.argv = ["script", *given["arguments"]]
            runpy.run_path(given["script"], run_name="__main__")
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Forks a process for each script, and says how it ended: what all of them import takes longer than most of them. Triton
interprets where it is told to at import."""


@functools.cache
def _interpreters(owner: int) -> subprocess.Popen[str]:
    """What forks processes in which Triton interprets, for a process of tests. It ends with it, when its input does."""
    return subprocess.Popen(
        [sys.executable, "-c", INTERPRETERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
            "PATH": "/usr/bin:/bin",
            "HOME": tempfile.gettempdir(),
        },
    )


def _interpret(script: str, arguments: Iterable[str], folder: Path) -> str:
    """What a script prints that a process of its own runs, in which Triton interprets."""
    names = {name: str(folder / f"{name}.txt") for name in ("script", "said", "wrong")}
    Path(names["script"]).write_text(textwrap.dedent(script))
    server = _interpreters(os.getpid())
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(names | {"home": str(folder), "arguments": list(arguments)}) + "\n")
    server.stdin.flush()
    assert server.stdout.readline() == "0\n", Path(names["wrong"]).read_text()[-3000:]
    return Path(names["said"]).read_text()


def interpreted(script: str, reference: str, candidate: str, folder: Path, *arguments: str) -> None:
    """Run a script on both texts, in a process in which Triton interprets.

    It finds them as `reference.txt` and `candidate.py` in the folder that is its first argument.
    """
    (folder / "reference.txt").write_text(reference)
    # The interpreter works on tensors of the CPU.
    (folder / "candidate.py").write_text(candidate.replace(".is_cuda", ".is_cpu"))
    _interpret(script, (str(folder), *arguments), folder)


def interpreted_answer(script: str, *arguments: str) -> Any:
    """The JSON that a script prints in a process in which Triton interprets."""
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(_interpret(script, arguments, Path(folder)))


def module_at(path: Path) -> ModuleType:
    """The module in a file, under the file's name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernels_of(source: str, folder: Path) -> tuple[ModuleType, dict[str, Any]]:
    """The module of a candidate and its Triton kernels, by their names."""
    path = folder / "kernels.py"
    path.write_text(source)
    module = module_at(path)
    named = {name.lstrip("_"): item for name, item in vars(module).items() if hasattr(item, "arg_names")}
    return module, {name: item for name, item in named.items() if name.startswith("fused")}
