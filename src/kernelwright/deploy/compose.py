"""Lets an accepted candidate carry tuned code for its Triton kernels.

    launches = capture_candidate(task, candidate)            # on a GPU
    composed = compose(candidate, [TunedLaunch(launch, cubin, confirmation) for launch in launches])

The composed candidate is a module like any other: it defines `ModelNew`, needs nothing of this package, and runs what Triton
compiles wherever the tuned code does not fit. It is to be judged like any other, too.
"""

from __future__ import annotations

import base64
import importlib.util
import inspect
import multiprocessing
import sys
import tempfile
import textwrap
import traceback
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelwright.deploy.deploy import gpu_of
from kernelwright.errors import DeviceError
from kernelwright.gpu.launch_spec import KernelLaunch
from kernelwright.judge.schedules import Confirmation
from kernelwright.records import Candidate, Task
from kernelwright.sass.identity import code_of, cubin_identity

CAPTURE_TIMEOUT_S = 300.0
_WARM_UP_SEED, _CAPTURE_SEED = 0, 1
_LINE = 110
_MARK = "# Below: machine code tuned for the Triton kernels above, and what puts it in place. Without it all works as well."


@dataclass(frozen=True, slots=True)
class TunedLaunch:
    """A launch of a candidate, and what tuning its kernel gave."""

    launch: KernelLaunch
    cubin: bytes | None = None
    """Schedule that is proven legal and confirmed to be faster; None where there is none."""
    confirmation: Confirmation | None = None
    """Its re-measurement in fresh processes."""

    @property
    def refusal(self) -> str:
        """Reason why the original stays; empty where the tuned code is carried."""
        if self.launch.target is None:
            return self.launch.reason
        if self.cubin is None or self.cubin == self.launch.target.cubin or self.confirmation is None:
            return "nothing faster was found"
        return ""


def compose(candidate: Candidate, kernels: Sequence[TunedLaunch]) -> Candidate | None:
    """The candidate with the tuned code of its kernels; None where no kernel got faster."""
    carried: dict[str, dict[str, dict[str, bytes]]] = {}
    gpu = ""
    for kernel in kernels:
        target, cubin, confirmation = kernel.launch.target, kernel.cubin, kernel.confirmation
        if kernel.refusal or target is None or cubin is None or confirmation is None:
            continue
        carried.setdefault(kernel.launch.function, {})[cubin_identity(target.cubin)] = code_of(cubin)
        gpu = gpu_of(confirmation).name
    return candidate.model_copy(update={"source": carry(candidate.source, carried, gpu)}) if carried else None


def carry(source: str, tuned: Mapping[str, Mapping[str, Mapping[str, bytes]]], gpu: str) -> str:
    """Return a candidate's source with tuned code for one GPU, and what puts it in place, appended.

    Args:
        source: text of a module with Triton functions.
        tuned: function name -> identity of the original cubin -> code sections, as `code_of` gives them.
    """
    from kernelwright.deploy import embedded_kernel
    from kernelwright.gpu import triton_kernels
    from kernelwright.sass import identity

    table = {
        function: {
            original: {name: base64.b64encode(zlib.compress(code, 9)).decode() for name, code in sections.items()}
            for original, sections in versions.items()
        }
        for function, versions in tuned.items()
    }
    parts = [_without_package(module) for module in (identity, triton_kernels, embedded_kernel)]
    install = f"install_embedded(globals(), {_literal(table)}, {gpu!r})"
    return "\n\n".join([source.split(_MARK)[0].rstrip("\n"), _MARK, *parts, install]) + "\n"


def capture_candidate(
    task: Task,
    candidate: Candidate,
    *,
    device: str = "cuda",
    prepare: Callable[[], None] | None = None,
    limit_s: float = CAPTURE_TIMEOUT_S,
) -> list[KernelLaunch]:
    """Run an accepted candidate in a process of its own and return the kernels it launches.

    It runs with this process's rights: judge a candidate before.

    Args:
        prepare: called first in that process; must be importable by name.

    Raises:
        DeviceError: it did not run, or not within the limit.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_capture, args=(theirs, task.source, candidate.source, device, prepare), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(limit_s) else f"no answer within {limit_s:g} s"
    except EOFError:
        answer = "the end of the process"
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, str):
        raise DeviceError(f"wanted the launches of the candidate, found: {answer}; evaluate it first")
    launches: list[KernelLaunch] = answer
    return launches


def _capture(connection: Any, task: str, candidate: str, device: str, prepare: Callable[[], None] | None) -> None:
    try:
        if prepare is not None:
            prepare()
        connection.send(_launches(task, candidate, device))
    # The candidate's failure is reported to the parent, whatever it is.
    except Exception:  # noqa: BLE001
        connection.send(traceback.format_exc(limit=-3))


def _launches(task: str, candidate: str, device: str) -> list[KernelLaunch]:
    import torch

    with tempfile.TemporaryDirectory(prefix="kernelwright-capture-") as folder:
        given = _module(Path(folder), "given_task", task)
        made = _module(Path(folder), "given_candidate", candidate)
        from kernelwright.deploy.capture import capture_launches

        torch.manual_seed(_WARM_UP_SEED)
        model = made.ModelNew(*given.get_init_inputs()).to(device)
        with torch.no_grad():
            model(*_inputs(given, device, _WARM_UP_SEED))
            inputs = _inputs(given, device, _CAPTURE_SEED)
            with capture_launches() as captured:
                model(*inputs)
    return captured.launches


def _inputs(task: types.ModuleType, device: str, seed: int) -> list[Any]:
    import torch

    torch.manual_seed(seed)
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in task.get_inputs()]


def _module(folder: Path, name: str, source: str) -> Any:
    # In a file, because Triton reads the source of its functions from there.
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _without_package(module: types.ModuleType) -> str:
    """The text of a module without its docstring and without imports of this package."""
    text = inspect.getsource(module)
    body = text.partition('"""')[2].partition('"""')[2]
    lines = [line for line in body.splitlines() if not line.startswith(("from __future__", "from kernelwright"))]
    return "\n".join(lines).strip("\n")


def _literal(table: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """A table as Python text with lines of bearable length."""
    lines = ["{"]
    for function, versions in table.items():
        lines.append(f"    {function!r}: {{")
        for original, sections in versions.items():
            lines.append(f"        {original!r}: {{")
            for name, text in sections.items():
                lines.append(f"            {name!r}: (")
                lines += [f"                {piece!r}" for piece in textwrap.wrap(text, _LINE)]
                lines.append("            ),")
            lines.append("        },")
        lines.append("    },")
    return "\n".join([*lines, "}"])
