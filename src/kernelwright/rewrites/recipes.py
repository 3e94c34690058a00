"""Defines recipes: a candidate is made by passes with knobs, one after another, and its record stores them as data.

A pass is a class of `passes`. `TaskContext` carries recipes out on one task, each once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

from kernelwright.judge.check.guard import RESPELLING
from kernelwright.records import Candidate, StoredPasses, Task
from kernelwright.rewrites import emit, wrappers
from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    can_be_channels_last,
    is_random,
    is_tensor,
    numel,
    shape,
    value,
)
from kernelwright.rewrites.order import Place
from kernelwright.rewrites.rules import rewrite
from kernelwright.rewrites.tracing import CarriedStateError, OperatorGraph, Trace, UntraceableError, trace, trace_block
from kernelwright.tasks.in_memory.repeated import EqualModules

CONVOLUTIONS_2D = (aten.conv2d, aten.conv_transpose2d)
_COPIED_BYTES = 128 << 20
"""Inputs and outputs from which a CUDA graph's copies of them cost more than the launches that it saves: on today's tasks
with so much the same candidate was slower in a graph in 32 of 36 looks, 1.27 times in the geometric mean
(results/kernelbench-h200/today-tenth-1-again-h100). At 64 MiB it was faster in three of three."""
_TRACED_WHOLE = 16
"""Calls of equal submodules above which the whole is not traced: 32 layers of a decoder take half a minute. Our choice."""
_SIGNS = 3
"""Batch norms over two values from which a network passes rounding on as it is. Our choice; see `_is_erratic`."""


@dataclass(frozen=True, slots=True)
class RecipePass(ABC):
    """One step of making a candidate. A subclass is a frozen dataclass; its fields are its knobs."""

    name: ClassVar[str]
    """Name in records."""
    rank: ClassVar[int]
    """Place in a recipe and in the plan; lower ones come first."""
    is_opaque: ClassVar[bool] = False
    """True for kernels that torch.compile cannot see through."""

    @classmethod
    def first(cls, task: TaskContext) -> Iterator[Recipe]:
        """Recipes with this pass for the first part of the plan, most promising first; none where it cannot apply."""
        yield from ()

    def suits(self, task: TaskContext) -> bool:
        """False where the task as a whole rules it out."""
        return task.trace is not None and not task.is_erratic

    def knobs(self) -> dict[str, Any]:
        """The knobs as JSON has them."""
        return {name: list(knob) if isinstance(knob, tuple) else knob for name, knob in asdict(self).items()}

    @classmethod
    def of_knobs(cls, knobs: dict[str, Any]) -> Self:
        """The pass with knobs as JSON has them."""
        return cls(**{name: tuple(knob) if isinstance(knob, list) else knob for name, knob in knobs.items()})

    @abstractmethod
    def apply(self, draft: Draft) -> bool:
        """Carry it out and name in the draft what took effect; False where the recipe makes no candidate."""


P = TypeVar("P", bound=RecipePass)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The passes that make a candidate, in order, at most one of a class."""

    passes: tuple[RecipePass, ...] = ()

    def get(self, kind: type[P]) -> P | None:
        """The pass of a class; None without one."""
        return next((step for step in self.passes if isinstance(step, kind)), None)

    def plus(self, *steps: RecipePass) -> Recipe:
        """The same recipe with more passes; each replaces one of its own class."""
        kinds = {type(step) for step in steps}
        kept = [step for step in self.passes if type(step) not in kinds]
        return Recipe(tuple(sorted((*kept, *steps), key=lambda step: step.rank)))

    @property
    def stored(self) -> StoredPasses:
        """The passes as data, for a record."""
        return tuple((step.name, step.knobs()) for step in self.passes)


@dataclass(frozen=True, slots=True)
class SearchedBlock:
    """Equal submodules of a task's model, such as its layers, and what a search of one of them has found."""

    task: Task
    """The one that was searched, as a task of its own."""
    equal: EqualModules
    recipes: tuple[Recipe, ...] = ()
    """The fastest by estimate, best first, without wrappers."""
    wrappers: tuple[str, ...] = ()
    """Wrappers that alone are about as fast."""


@dataclass(frozen=True, slots=True)
class BuiltRecipe:
    """A recipe carried out."""

    source: str
    techniques: tuple[str, ...]
    note: str
    effect: Recipe
    """The passes that took effect, with knobs for what they did and not for what they might have done."""

    def candidate(self, policy: str, parent: str | None) -> Candidate:
        """The record of this candidate."""
        return Candidate(
            source=self.source,
            policy=policy,
            techniques=self.techniques,
            passes=self.effect.stored,
            parent=parent,
            note=self.note,
        )


@dataclass(slots=True)
class Draft:
    """A candidate in the making."""

    task: TaskContext
    graphs: tuple[OperatorGraph, ...] | None = None
    """Operators for train and for eval mode, of each part in turn; None until a pass changes them."""
    parts: Trace | None = None
    """Origin of the graphs where they are those of equal submodules; None for the task's own trace."""
    techniques: list[str] = field(default_factory=list)
    """Changes of the graphs so far, for the reader."""
    wrapper: str | None = None
    """Name of the wrapper around the result."""
    effect: list[RecipePass] = field(default_factory=list)

    def operators(self) -> tuple[OperatorGraph, ...]:
        """The graphs, copied from the trace and swept where no pass has changed them yet."""
        if self.graphs is None:
            self.graphs = self.task.copies()
            for graph in self.graphs:
                rewrite(graph, ())
        return self.graphs

    def record(self, step: RecipePass, *techniques: str) -> bool:
        """Add a pass that took effect, and the techniques to show for it. Returns True."""
        self.effect.append(step)
        self.techniques += techniques
        return True

    def built(self) -> BuiltRecipe:
        """The candidate's text."""
        text, techniques = self.task.task.source, tuple(dict.fromkeys(self.techniques))
        traced = self.parts or self.task.trace
        if self.graphs is not None and traced is not None:
            respelled, captured = RESPELLING.issuperset(techniques), self.wrapper in wrappers.WITH_GRAPH
            source = emit.module(text, traced, self.graphs, techniques, respelled=respelled, captured=captured)
        else:
            source = "\n\n".join(filter(None, (emit.future_import(text), emit.reference_source(text))))
        if self.wrapper is not None:
            techniques = (*techniques, self.wrapper)
            source = wrappers.wrap(source, self.wrapper, techniques, self.task.draws)
        return BuiltRecipe(source, techniques, self.task.note(), Recipe(tuple(self.effect)))


@dataclass(slots=True)
class TaskContext:
    """One task on one device: its operator graphs and every candidate built so far."""

    task: Task
    device: str
    trace: Trace | None = None
    blocks: dict[tuple[str, ...], Trace] = field(default_factory=dict)
    """Traces of equal submodules, of which one was searched, by the paths of all of them."""
    searched: Sequence[SearchedBlock] = ()
    """These submodules, with what was found."""
    obstacle: str = ""
    """Reason for having no operator graph."""
    keeps_state: bool = False
    """True where a call leaves a tensor for the next one, which a CUDA graph would read where the captured call did."""
    is_erratic: bool = False
    """True where any other rounding makes it another network."""
    draws: bool = False
    """True where a mode draws random numbers; False where unknown."""
    takes_channels_last: bool = True
    """True where it has convolutions in two dimensions, and nothing that refuses their other layout, or where unknown."""
    copies_much: bool = False
    """True where a CUDA graph's copies of inputs and outputs cost more than it saves; False where unknown."""
    place: Place = field(default_factory=Place)
    """The task as far as the order of proposals knows it."""
    broken: dict[str, str] = field(default_factory=dict)
    """Rules that failed on this task, with their errors."""
    recipes: dict[Recipe, BuiltRecipe | None] = field(default_factory=dict)
    """Recipes carried out so far."""

    @classmethod
    def open(cls, task: Task, device: str, blocks: Sequence[SearchedBlock] = ()) -> Self:
        """Trace a task, or of equal submodules one; `trace_whole` then traces the rest when there is time."""
        context = cls(task, device, searched=blocks)
        for block in blocks:
            paths, inputs = block.equal.paths, block.equal.inputs
            if (part := trace_block(block.task, inputs.args, inputs.kwargs)) is not None:
                context.blocks[paths] = replace(part, paths=tuple(f"model.{path}" for path in paths))
        if context.blocks:
            context.obstacle = "its layers are equal, and one was traced for all"
            context.draws = any(map(_draws, context.blocks.values()))
        else:
            context.trace_whole()
        return context

    def trace_whole(self) -> None:
        """Trace the task, unless it is traced or has very many layers; when that fails, note why."""
        if self.trace is not None or sum(block.equal.calls for block in self.searched if self.blocks) > _TRACED_WHOLE:
            return
        try:
            self.trace = traced = trace(self.task)
        except UntraceableError as error:
            self.obstacle = str(error)
            self.keeps_state = isinstance(error, CarriedStateError)
            return
        self.obstacle, graph = "", traced.training
        self.place = Place.of(traced)
        self.copies_much = _copied_bytes(traced) >= _COPIED_BYTES
        self.is_erratic = _is_erratic(traced)
        self.draws = _draws(traced)
        has_images = emit.uses(graph, *CONVOLUTIONS_2D)
        self.takes_channels_last = has_images and can_be_channels_last(graph.graph, graph.mode)

    @property
    def on_gpu(self) -> bool:
        """True where candidates run on a GPU."""
        return self.device.startswith("cuda")

    def block(self, paths: tuple[str, ...]) -> TaskContext:
        """Equal submodules as a task of their own."""
        traced = self.blocks[paths]
        return TaskContext(self.task, self.device, traced, place=Place.of(traced), broken=self.broken)

    def copies(self) -> tuple[OperatorGraph, ...]:
        """The traced graphs, to be rewritten.

        Raises:
            UntraceableError: there are none.
        """
        if self.trace is None:
            raise UntraceableError(self.obstacle)
        return tuple(map(emit.copy_graph, self.trace.graphs))

    def note(self) -> str:
        """Remarks on what could not be tried."""
        to_do = "Wrappers alone are tried; submodules may be optimized one by one."
        parts = [f"No operator graph: {self.obstacle}. {to_do}"] if self.obstacle else []
        if self.trace is not None and self.trace.obstacle:
            alike = [(one.paths[0], len(one.paths) - 1) for one in (self.trace, *self.trace.others)]
            paths = ", ".join(f"{path} and {more} like it" if more else path for path, more in alike)
            parts.append(f"Rewritten in parts, {paths}; the whole has no operator graph: {self.trace.obstacle}.")
        parts += [f"Left out: {message}." for message in self.broken.values()]
        return " ".join(parts)

    def build(self, recipe: Recipe) -> BuiltRecipe | None:
        """Carry out a recipe; None when it makes no candidate of this task."""
        if recipe not in self.recipes:
            self.recipes[recipe] = self._build(recipe)
        return self.recipes[recipe]

    def _build(self, recipe: Recipe) -> BuiltRecipe | None:
        draft = Draft(self)
        try:
            if not all(step.suits(self) and step.apply(draft) for step in recipe.passes):
                return None
            has_no_effect = not draft.effect or (draft.graphs is not None and not draft.techniques)
            return None if has_no_effect else draft.built()
        except UntraceableError as error:
            self.obstacle = str(error)
            return None


def _draws(traced: Trace) -> bool:
    """True where a mode draws random numbers."""
    return any(is_random(node) for mode in traced.graphs for node in mode.graph.nodes)


def _copied_bytes(traced: Trace) -> int:
    """Size of a task's inputs and outputs."""
    nodes = traced.training.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder" and node.meta["role"] == "input"]
    outputs = next(node for node in nodes if node.op == "output").all_input_nodes
    return sum(value(node).nbytes for node in (*inputs, *outputs) if is_tensor(node))


def _is_erratic(traced: Trace) -> bool:
    """True where batch norms over two values follow one another, as behind a pooling to 1x1 with a batch of two.

    Such a norm gives little more than the sign of a difference, which rounding decides where the two are alike. In an
    EfficientNet with 14 of them, eager with another library for convolutions moves the last running variance by a quarter.
    """
    norms = Editor(traced.training.graph, traced.training.mode).nodes(aten.batch_norm)
    inputs: list[Any] = [node.args[0] for node in norms if argument(node, "training") and is_tensor(node.args[0])]
    return sum(numel(item) == 2 * shape(item)[1] for item in inputs) >= _SIGNS
