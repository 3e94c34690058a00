"""What Triton makes of the candidates of `helion_trial.py` without a GPU: machine code for Hopper, and numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernelwright.gpu.triton_compiler import CompiledKernel, compile_triton

ARCHITECTURE = 90
H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=62914560,
    total_memory=150 << 30,
    warp_size=32,
)


@contextmanager
def pretend_h200() -> Iterator[None]:
    """Answer for an H200 whatever PyTorch is asked about its GPU; Helion keeps the answers."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: H200,
        "get_device_name": lambda device=None: H200.name,
    }
    # What Inductor asks took its functions from `torch.cuda` when it was imported.
    from torch._dynamo.device_interface import CudaInterface

    kept = {name: staticmethod(answers[name]) for name in ("is_available", "get_device_properties")}
    version = mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0")
    with mock.patch.multiple(torch.cuda, **answers), mock.patch.multiple(CudaInterface, **kept), version:
        yield


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    grid: tuple[int, ...]
    tensor_cores: str
    """The instruction that multiplies matrices, if there is one."""


def launches_of(task: str, source: str, folder: Path) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Kernels, arguments and options of each launch in a call, found on the meta device."""
    from triton.runtime.jit import JITFunction

    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append((self, given, options | {"grid": grid}))
        return types.SimpleNamespace(function=None, packed_metadata=None, run=lambda *_: None)

    for name, text in (("task", task), ("candidate", source.replace(".is_cuda", ".is_meta"))):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    inputs, candidate = load(folder / "task.py"), load(folder / "candidate.py")
    with pretend_h200(), mock.patch.object(JITFunction, "run", run), torch.device("meta"), torch.inference_mode():
        candidate.ModelNew()(*inputs.get_inputs())
    return found


def load(path: Path) -> Any:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"candidate_{abs(hash(path)):x}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(kernel: Any, given: Sequence[Any], options: Mapping[str, Any]) -> CompiledKernel:
    """A launch's kernel for Hopper. Every tensor is taken to begin at a multiple of 16 bytes."""
    names = list(kernel.arg_names)
    values = dict(zip(names, given, strict=False)) | {name: value for name, value in options.items() if name in names}
    constexprs = {one.name for one in kernel.params if one.is_constexpr}
    constants = {
        name: value for name, value in values.items() if name in constexprs or (isinstance(value, int) and value == 1)
    }
    signature = {name: _type(value) for name, value in values.items() if name not in constants}
    aligned = frozenset(
        name for name in signature if _is_tensor(values[name]) or (isinstance(values[name], int) and values[name] % 16 == 0)
    )
    warps, stages = options.get("num_warps", 4), options.get("num_stages", 3)
    return compile_triton(kernel, signature, constants, ARCHITECTURE, warps, stages, aligned)


def _type(value: Any) -> str:
    """Triton's name of an argument's type."""
    from triton.runtime.jit import type_canonicalisation_dict

    if isinstance(value, int):
        return "i32"
    tensor = value if _is_tensor(value) else value.base
    kind = type_canonicalisation_dict[str(tensor.dtype).split(".")[-1]]
    return f"*{kind}" if _is_tensor(value) else f"tensordesc<{kind}{list(value.block_shape)}>"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def resources(kernel: CompiledKernel, grid: Sequence[int]) -> Resources:
    """What ptxas says of a kernel's text."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(kernel.ptx)
        command = [str(ptxas), "-v", f"--gpu-name=sm_{ARCHITECTURE}a", str(path), "-o", str(path.with_suffix(".cubin"))]
        told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", told), re.findall(r"(\d+) bytes spill stores", told)
    return Resources(
        kernel.name,
        int(registers[1]) if registers else 0,
        sum(map(int, spilled)),
        kernel.shared_bytes,
        kernel.num_warps,
        tuple(grid),
        next((name for name in ("wgmma", "mma.sync") if name in kernel.ptx), "-"),
    )


INTERPRET = """
import importlib.util, json, sys, torch
torch.manual_seed(0)
spec = importlib.util.spec_from_file_location("candidate", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
candidate = module.ModelNew()
reference = module.Model()
reference.load_state_dict(candidate.state_dict())
inputs = module.get_inputs()
with torch.inference_mode():
    found = candidate(*inputs)
    wanted = reference.double()(*[one.double() if one.is_floating_point() else one for one in inputs])
assert found.shape == wanted.shape and found.stride() == wanted.stride(), (found.shape, found.stride())
launched = len(module._LAUNCHES)
error = float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())
print(json.dumps({"error": error, "launched": launched}))
"""
NEAR_TANH = """

@triton.jit
def _near_tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1

"""


def interpreted(source: str) -> dict[str, Any]:
    """Largest error of a candidate, relative to the largest output of a float64 reference, under Triton's interpreter."""
    # The interpreter has no library of CUDA's.
    text = source.replace(".is_cuda", ".is_cpu").replace("from triton.language.extra import libdevice\n", NEAR_TANH)
    text = text.replace("libdevice.tanh", "_near_tanh").replace("libdevice.", "tl.").replace("tl_math.", "tl.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "candidate.py"
        path.write_text(text, encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-c", INTERPRET, str(path)]
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = plain | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1][:300]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check(folder: Path) -> None:
    """Compile every candidate for Hopper and interpret the small ones; write `check.json` and `check.md`."""
    rows = []
    for path in sorted([*folder.glob("helion-*/level1/*.py"), *folder.glob("ours-*/level1/*.py")], key=place):
        source = path.read_text(encoding="utf-8")
        task = (folder / "suite" / "level1" / path.name).read_text(encoding="utf-8")
        row: dict[str, Any] = {
            "task": path.stem.partition("_")[2],
            "side": path.parts[-3],
            "lines": own_lines(source),
        }
        row["alone"] = "helion" not in re.sub(r"_?helion_\w+|Helion's", "", source)
        row["kernels"], began_s = [], time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as temporary:
                for kernel, given, options in launches_of(task, source, Path(temporary)):
                    made = compiled(kernel, given, options)
                    row["kernels"].append(asdict(resources(made, options["grid"])))
        # Whatever a candidate raises on tensors without memory is its row's.
        except Exception as error:  # noqa: BLE001
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
        row["compile_s"] = round(time.monotonic() - began_s, 1)
        if (small := folder / "small" / path.relative_to(folder)).exists():
            row["interpreted"] = interpreted(small.read_text(encoding="utf-8"))
        rows.append(row)
        print(json.dumps(row), flush=True)
    (folder / "check.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (folder / "check.md").write_text(table(rows), encoding="utf-8")


def own_lines(source: str) -> int:
    """Lines that hold a candidate's kernels, without what all candidates of its side share."""
    shared = ("*self.constants)", "launch(*tensors)")
    begin = max(source.rfind(mark) for mark in shared)
    kernels = source[begin:].partition("\n")[2].partition("class ModelNew")[0]
    return sum(bool(line.strip()) for line in kernels.splitlines())


def place(path: Path) -> tuple[int, str]:
    """Sorts candidates by their task's number, then by the folder that they lie in."""
    return int(path.stem.partition("_")[0]), path.parts[-3]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What `check` found, one line for each candidate."""
    heads = ("task", "side", "lines", "alone", "sm_90", "error", "registers", "spilled bytes", "shared bytes", "warps")
    lines = [f"| {' | '.join(heads)} | tensor cores |", "|---|---|---:|---|---|---:|---:|---:|---:|---:|---|"]
    for row in rows:
        kernels, told = row["kernels"], row.get("interpreted", {})
        error = f"{told['error']:.1e}" if "error" in told else "fails" if told else "-"
        cells = [row["task"], row["side"], row["lines"], row["alone"], "fails" if "failure" in row else len(kernels), error]
        for key in ("registers", "spilled_bytes", "shared_bytes", "warps", "tensor_cores"):
            cells.append(", ".join(str(one[key]) for one in kernels))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"
