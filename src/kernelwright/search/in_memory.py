"""Searches for a faster version of a model in memory, and puts what was confirmed into it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from kernelwright.deploy import placement
from kernelwright.deploy.placement import ConfirmedCode
from kernelwright.errors import ModelError
from kernelwright.judge import resolve_device
from kernelwright.records import Evaluation, RunDirectory
from kernelwright.records.decisions import interval_in_words
from kernelwright.search.optimize import OptimizeResult
from kernelwright.tasks.in_memory import Inputs, check_model, device_of, folder_on_path, name_of, sets_of, task_of, tried

if TYPE_CHECKING:
    from kernelwright.search.blocks import BlockResult


@dataclass(frozen=True, slots=True)
class ModelResult:
    """Result of a search for a model in memory. Printed, it says what was confirmed for which inputs."""

    run: Path
    module: nn.Module
    """The model with confirmed code in place; the model itself where nothing was confirmed to be faster."""
    searches: dict[str, OptimizeResult]
    """One search for each form of inputs, by the inputs in words."""
    placements: tuple[ConfirmedCode, ...]
    """Code that was confirmed, with the inputs for which it holds."""
    blocks: dict[str, list[BlockResult]] = field(default_factory=dict)
    """Equal submodules of which one was searched for all, by the inputs in words."""

    @property
    def improved(self) -> bool:
        """True where anything was confirmed to be faster."""
        return bool(self.placements)

    def save(self, folder: str | Path) -> None:
        """Write what was confirmed into a folder; `kernelwright.load(model, folder)` puts it into the model again."""
        placement.save(self.placements, Path(folder))

    def __str__(self) -> str:
        lines = [
            f"{len(self.placements)} of {len(self.searches)} forms of inputs are confirmed to be faster; see {self.run}"
        ]
        for inputs, search in self.searches.items():
            lines.append(f"  {inputs}: {search}")
            lines += [f"    {block}" for block in self.blocks.get(inputs, ())]
            if search.near_miss is not None:
                gain = f"{interval_in_words(search.near_miss)} by {', '.join(search.near_miss.techniques)}"
                lines.append(f"    nearest: {gain}; {_to_settle(search.near_miss)}")
        return "\n".join(lines)


def _to_settle(found: Evaluation) -> str:
    """Noise floor of a near miss and advice that settles it."""
    processes = found.processes_to_settle
    advice = "measure on a quieter machine"
    if processes is not None:
        settings = f"kernelwright.judge.Settings(processes_min={processes}, processes_max={processes})"
        advice += f", or with settings={settings} and another `out`"
    return f"the noise here is {found.noise_floor:.3f}: {advice}"


def optimize_model(
    model: object,
    example_inputs: Any,
    *,
    device: str,
    out: Path,
    search: Callable[..., OptimizeResult],
    splits: bool = False,
    tell: Callable[[str], None] = lambda message: None,
) -> ModelResult:
    """Search for each form of inputs, and put what was confirmed into the model.

    Args:
        model: The model.
        example_inputs: One set or a list of them, as `example_inputs.sets_of` reads them.
        device: `auto` for the model's own, or a device on which the model must be.
        out: The run directory; with several forms of inputs it holds one for each.
        search: Searches for a faster drop-in of a task on a device, in a run directory.
        splits: True searches one of several equal layers, and then the whole with what was found, by the built-in policy.
        tell: Callback for what is searched, where it splits.

    Raises:
        ModelError: the model or the inputs cannot be used.
        UsageError, InfrastructureError: as `search`.
    """
    checked = check_model(model)
    if checked.training:
        warnings.warn(
            "kernelwright: the model is in train mode, so code is searched for train mode, without gradients. For inference "
            "call model.eval() first.",
            stacklevel=3,
        )
    calls = tried(checked, sets_of(example_inputs), alone=True)
    where = device_of(checked, [example for call in calls for example in call.examples])
    if device != "auto" and resolve_device(device).type != where.type:
        raise ModelError(
            f"Wanted {name_of(checked)} on {device}; found it on {where}. Call model.to({device!r}), or leave `device` out."
        )
    name = str(where) if device == "auto" else device
    RunDirectory(out)  # which says what is wrong with `out`
    searches: dict[str, OptimizeResult] = {}
    blocks: dict[str, list[BlockResult]] = {}
    placements = []
    with folder_on_path(out / "model"):
        for number, call in enumerate(calls, start=1):
            run = out if len(calls) == 1 else out / f"inputs-{number}"
            task, options = task_of(checked, call, out / "model"), dict[str, Any]()
            if splits:
                # Imported only now: the rules import torch's exporter, which takes a second.
                from kernelwright.rewrites.builtin import BuiltinPolicy
                from kernelwright.search.blocks import search_blocks

                layers = partial(search, judged=0, baselines=())
                parts = search_blocks(checked, call, out / "model", layers, device=name, out=run, tell=tell)
                blocks[call.description] = parts
                if any(part.block.recipes for part in parts):
                    tell("trying in the whole what was found")
                    options["policy"] = BuiltinPolicy(blocks=[part.block for part in parts])
            searches[call.description] = found = search(task, device=name, out=run, **options)
            if found.best is not None and found.best.speedup_low is not None:
                placements.append(
                    ConfirmedCode(
                        source=found.best.source,
                        inputs=Inputs(*call.examples[0].args, **call.examples[0].kwargs),
                        training=checked.training,
                        device=where.type,
                        hardware=placement.hardware_name(where),
                        speedup_low=found.best.speedup_low,
                    )
                )
    return ModelResult(out, placement.place(checked, placements), searches, tuple(placements), blocks)
