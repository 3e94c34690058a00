"""Searches the repeated layers of a model in memory once.

One of them is a task of its own, whose estimates choose the code of all. The judge sees the whole model with that code,
since a layer that wins alone may lose in the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from kernelwright.errors import ModelError
from kernelwright.records import RunDirectory
from kernelwright.records.decisions import SCHEDULE, ranked
from kernelwright.records.screened import Screened
from kernelwright.rewrites.passes import WrapperPass, stored_recipe
from kernelwright.rewrites.recipes import Recipe, SearchedBlock
from kernelwright.search.optimize import OptimizeResult
from kernelwright.tasks.in_memory import ModelCall, name_of, task_of, tried
from kernelwright.tasks.in_memory.repeated import equal_modules

_RECIPES = 3
"""Recipes of one layer, those nearly as fast as the best, that are tried in the whole. Our choice."""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Outcome of the search of one of several equal submodules."""

    name: str
    """Class of the submodules."""
    block: SearchedBlock
    share: float
    """Share of the model's calls of innermost submodules that they make."""
    search: OptimizeResult
    best: Screened | None
    """The fastest look at one of them; None where none was right."""

    def __str__(self) -> str:
        first, count = self.block.paths[0], self.block.calls
        found = f"at best about {self.best.estimate:.2f}x alone" if self.best and self.best.estimate else "none right"
        return f"{count} equal {self.name} ({first}, ...): one searched for all, {self.search.screened} screened, {found}"


def search_blocks(
    model: nn.Module, call: ModelCall, folder: Path, search: Callable[..., OptimizeResult], device: str, out: Path
) -> list[BlockResult]:
    """Search one of each kind of equal submodules of a model; none where they are few, or cannot be searched alone.

    Args:
        model: The model.
        call: The call of the model that is to be faster.
        folder: Folder for the stored submodules, on Python's path.
        search: Screens proposals for a task, and has none judged.
        device: The device.
        out: Run directory of the whole; each kind has one in it.
    """
    results = []
    for number, equal in enumerate(equal_modules(model, call.examples[0]), start=1):
        try:
            (one,) = tried(equal.module, [equal.inputs], alone=True)
            task = task_of(equal.module, one, folder)
        except ModelError:  # it takes or returns what no task can, such as a cache: the whole is searched as ever
            return []
        found = search(task, device=device, out=out / f"block-{number}")
        looks = ranked([*RunDirectory(found.run).screened()])
        block = SearchedBlock(task, equal.paths, equal.inputs.args, equal.inputs.kwargs, equal.calls, tuple(_fastest(looks)))
        results.append(BlockResult(name_of(equal.module), block, equal.share, found, looks[0] if looks else None))
    return results


def _fastest(looks: Iterable[Screened]) -> list[Recipe]:
    """Recipes of one layer to try in the whole, best first, without the wrappers, which are for the whole."""
    found: dict[Recipe, float] = {}
    for look in looks:
        steps = [step for step in stored_recipe(look.passes).passes if not isinstance(step, WrapperPass)]
        if steps:
            found.setdefault(Recipe(tuple(steps)), look.estimate or 0.0)
    best = max(found.values(), default=0.0)
    near = [recipe for recipe, estimate in found.items() if estimate >= SCHEDULE.finalist * best]
    return list(itertools.islice(near, _RECIPES))
