"""Searches the repeated layers of a model in memory once.

One of them is a task of its own, whose estimates choose the code of all. The judge sees the whole model with that code,
since a layer that wins alone may lose in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from kernelwright.errors import InfrastructureError, ModelError, TaskError
from kernelwright.records import RunDirectory
from kernelwright.records.decisions import SCHEDULE, ranked
from kernelwright.records.screened import Screened
from kernelwright.rewrites.passes import WrapperPass, stored_recipe
from kernelwright.rewrites.recipes import Recipe, SearchedBlock
from kernelwright.search.optimize import OptimizeResult
from kernelwright.tasks.in_memory import ModelCall, task_of, tried
from kernelwright.tasks.in_memory.repeated import equal_modules, time_shares

_RECIPES = 3
"""Recipes of one layer, those nearly as fast as the best, that are tried in the whole. Our choice."""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Outcome of the search of one of several equal submodules. Printed, it tells what that can mean for the whole."""

    block: SearchedBlock
    share: float
    """Share of the model's time that they take."""
    search: OptimizeResult
    alone: float
    """Estimated speedup of one of them; 1 where none was found."""

    @property
    def in_the_whole(self) -> float:
        """Speedup of the whole that follows from theirs, by Amdahl's law."""
        return 1.0 / (1.0 - self.share + self.share / self.alone)

    @property
    def bound(self) -> float:
        """Speedup of the whole if they took no time, by Amdahl's law."""
        return 1.0 / (1.0 - self.share)

    def __str__(self) -> str:
        return (
            f"{self.block.equal.name} take {self.share:.0%} of the time; {self.search.screened} screened on one for all: "
            f"about {self.alone:.2f}x alone, which makes {self.in_the_whole:.2f}x of the whole, of {self.bound:.2f}x at most"
        )


def search_blocks(
    model: nn.Module,
    call: ModelCall,
    folder: Path,
    search: Callable[..., OptimizeResult],
    *,
    device: str,
    out: Path,
    tell: Callable[[str], None],
) -> list[BlockResult]:
    """Search one of each kind of equal submodules of a model; none where they are few, or cannot be searched alone.

    Args:
        model: The model.
        call: The call of the model that is to be faster.
        folder: Folder for the stored submodules, on Python's path.
        search: Screens proposals for a task, and has none judged.
        device: The device.
        out: Run directory of the whole; each kind has one in it.
        tell: Callback for what is searched, and why a layer is not searched alone.
    """
    results, example = [], call.examples[0]
    try:
        kinds = equal_modules(model, example)
        for number, (kind, share) in enumerate(zip(kinds, time_shares(model, example, kinds), strict=True), start=1):
            (one,) = tried(kind.module, [kind.inputs], alone=True)
            task = task_of(kind.module, one, folder)
            tell(f"searching one of {kind.name} for all")
            found = search(task, device=device, out=out / f"block-{number}")
            looks = ranked([*RunDirectory(found.run).screened()])
            block = SearchedBlock(task, kind, *_fastest(looks))
            alone = max([1.0, *(look.estimate or 1.0 for look in looks[:1])])
            results.append(BlockResult(block, share, found, alone))
    except (ModelError, TaskError, InfrastructureError) as error:
        tell(f"no layer is searched for all: {error}")
        return []
    return results


def _fastest(looks: Iterable[Screened]) -> tuple[tuple[Recipe, ...], tuple[str, ...]]:
    """Recipes of one layer to try in the whole, best first, without the wrappers, which are for the whole; and wrappers that
    alone are about as fast as the best of them."""
    found: dict[Recipe, float] = {}
    wrappers: dict[str, float] = {}
    for look in looks:
        recipe = stored_recipe(look.passes)
        wrapper = recipe.get(WrapperPass)
        if steps := tuple(step for step in recipe.passes if step is not wrapper):
            found.setdefault(Recipe(steps), look.estimate or 0.0)
        elif wrapper is not None:
            wrappers.setdefault(wrapper.kind, look.estimate or 0.0)
    least = SCHEDULE.finalist * max(found.values(), default=0.0)
    near = [recipe for recipe, estimate in found.items() if estimate >= least]
    return tuple(near[:_RECIPES]), tuple(kind for kind, estimate in wrappers.items() if estimate >= least)
