"""Holds the passes that make candidates: rules, kernels from templates, fused kernels, wrappers.

To add a technique, write a class here and name it in `PASSES`.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from kernelwright.records import StoredPasses
from kernelwright.rewrites import emit, fusion, templates, wrappers
from kernelwright.rewrites.graph import aten
from kernelwright.rewrites.recipes import CONVOLUTIONS_2D, Draft, Recipe, RecipePass, TaskContext
from kernelwright.rewrites.rules import RULES, Rule, RuleError, rewrite
from kernelwright.rewrites.templates import CallTemplate

IN_TILE = frozenset({fusion.WHOLE_CHANNELS, fusion.POOLED_TILES})
"""Techniques of kernels of convolutions that reduce channels, or pool."""
GRAPH_OF = {
    "compile": "compile-cuda-graph",
    "cudnn-benchmark": "cudnn-cuda-graph",
    "compile-cudnn": "compile-cudnn-cuda-graph",
}
"""Wrappers and the same with a graph."""
EQUAL_LAYERS = "equal-layers"
"""Technique of candidates whose equal submodules run what the search of one of them found."""
_CONVOLUTIONS = (*CONVOLUTIONS_2D, aten.conv1d, aten.conv3d, aten.conv_transpose1d, aten.conv_transpose3d)


@dataclass(frozen=True, slots=True)
class BlocksPass(RecipePass):
    """Equal submodules, such as a model's layers, by the recipe of the one that was searched for all; the rest stays."""

    name: ClassVar[str] = "blocks"
    rank: ClassVar[int] = -10
    is_opaque: ClassVar[bool] = True

    paths: tuple[tuple[str, ...], ...] = ()
    """Places of the submodules of each kind in the model."""
    recipes: tuple[Recipe, ...] = ()
    """The recipe of each kind."""

    def knobs(self) -> dict[str, Any]:
        """The knobs as JSON has them."""
        return {
            "paths": [list(paths) for paths in self.paths],
            "recipes": [[list(step) for step in recipe.stored] for recipe in self.recipes],
        }

    @classmethod
    def of_knobs(cls, knobs: dict[str, Any]) -> Self:
        """The pass with knobs as JSON has them."""
        return cls(tuple(map(tuple, knobs["paths"])), tuple(map(stored_recipe, knobs["recipes"])))

    def suits(self, task: TaskContext) -> bool:
        """False where such submodules were not searched."""
        return task.blocks.keys() >= set(self.paths) and not task.is_erratic

    def apply(self, draft: Draft) -> bool:
        """Rewrite one submodule of each kind."""
        parts = [Draft(draft.task.block(paths)) for paths in self.paths]
        for part, recipe in zip(parts, self.recipes, strict=True):
            if not all(step.suits(part.task) and step.apply(part) for step in recipe.passes):
                return False
        first, *others = (draft.task.blocks[paths] for paths in self.paths)
        draft.parts = replace(first, others=tuple(others))
        draft.graphs = tuple(graph for part in parts for graph in part.operators())
        techniques = [technique for part in parts for technique in part.techniques]
        effect = BlocksPass(self.paths, tuple(Recipe(tuple(part.effect)) for part in parts))
        return bool(techniques) and draft.record(effect, EQUAL_LAYERS, *techniques)


@dataclass(frozen=True, slots=True)
class RulesPass(RecipePass):
    """Exact rewrite rules on the operator graph, each as often as it fires."""

    name: ClassVar[str] = "rules"
    rank: ClassVar[int] = 0

    names: tuple[str, ...] = ()
    """Rules that may fire, in the order of `RULES`."""

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """The pass of some rules."""
        wanted = frozenset(names)
        return cls(tuple(rule.name for rule in RULES if rule.name in wanted))

    @classmethod
    def always(cls) -> Self:
        """The pass of all rules that never make anything slower."""
        return cls(tuple(rule.name for rule in RULES if rule.always))

    def apply(self, draft: Draft) -> bool:
        """Rewrite both graphs, without rules that failed on this task."""
        broken = draft.task.broken
        while True:
            rules = [rule for rule in RULES if rule.name in self.names and rule.name not in broken]
            graphs = draft.task.copies()
            try:
                fired = [name for graph in graphs for name in rewrite(graph, rules)]
                break
            except RuleError as error:
                broken[error.name] = str(error)
        draft.graphs = graphs
        return draft.record(RulesPass.of(fired), *fired) if fired else True


@dataclass(frozen=True, slots=True)
class TemplatePass(RecipePass):
    """Kernels from a template, for the operators that it takes."""

    is_opaque: ClassVar[bool] = True

    @property
    @abstractmethod
    def template(self) -> CallTemplate[Any, Any]:
        """The template."""

    @classmethod
    def variants(cls, task: TaskContext) -> Sequence[Self]:
        """Settings of the knobs to try on a task; none where a condition fails."""
        return [cls()] if cls().template.builds_for(task.device) else []

    @classmethod
    def first(cls, task: TaskContext) -> Iterator[Recipe]:
        """Each variant with all rules and everything else fused, and the same in a CUDA graph, which saves launches."""
        for step in cls.variants(task):
            yield from with_graph(Recipe((RulesPass.always(), step, FusionPass(single=True))))

    def apply(self, draft: Draft) -> bool:
        """Replace the calls that the template takes, unless its text and the task's share names."""
        if templates.clash(self.template, emit.reference_source(draft.task.task.source)):
            return False
        count = templates.replace(self.template, *draft.operators())
        return bool(count) and draft.record(self, self.template.technique)


@dataclass(frozen=True, slots=True)
class ProductPass(TemplatePass):
    """Float32 products on tensor cores, from 16-bit pieces of each value."""

    name: ClassVar[str] = "product"
    rank: ClassVar[int] = 10

    technique: str
    """Technique of one of `templates.PRODUCTS`."""

    @property
    def template(self) -> CallTemplate[Any, Any]:
        """The template of the technique."""
        return templates.BY_TECHNIQUE[self.technique]

    @classmethod
    def variants(cls, task: TaskContext) -> Sequence[Self]:
        """The templates that this machine can build for the device."""
        return [cls(template.technique) for template in templates.PRODUCTS if template.builds_for(task.device)]

    @classmethod
    def first(cls, task: TaskContext) -> Iterator[Recipe]:
        """Each variant with a kernel for attention and without.

        Nothing else gains as much on a large product. Of candidates with equal ranks the plan's order decides.
        """
        rules = RulesPass.always()
        for step, attends in itertools.product(cls.variants(task), [*AttentionPass.variants(task), None]):
            yield from with_graph(Recipe((rules, step, *filter(None, [attends]), FusionPass(single=True))))


@dataclass(frozen=True, slots=True)
class AttentionPass(TemplatePass):
    """Attention in one kernel, without storing the scores."""

    name: ClassVar[str] = "attention"
    rank: ClassVar[int] = 20
    template: ClassVar[CallTemplate[Any, Any]] = templates.ATTENTION

    @classmethod
    def variants(cls, task: TaskContext) -> Sequence[Self]:
        """One where the template takes an attention of the task."""
        if not cls.template.builds_for(task.device) or cls.template.task_operators.isdisjoint(task.place.operators):
            return []
        return [cls()] if task.build(Recipe((RulesPass.always(), cls(), FusionPass(single=True)))) else []


@dataclass(frozen=True, slots=True)
class RecurrentPass(TemplatePass):
    """LSTMs and GRUs as kernels that stay for all time steps."""

    name: ClassVar[str] = "recurrent"
    rank: ClassVar[int] = 30
    template: ClassVar[CallTemplate[Any, Any]] = templates.RECURRENT


@dataclass(frozen=True, slots=True)
class ReluConvolutionPass(TemplatePass):
    """Convolutions of 16 bits with the batch norm and ReLU that follow as one call of cuDNN."""

    name: ClassVar[str] = "relu-convolution"
    rank: ClassVar[int] = 35
    template: ClassVar[CallTemplate[Any, Any]] = templates.RELU_CONVOLUTION


@dataclass(frozen=True, slots=True)
class FusionPass(RecipePass):
    """Groups of pointwise operators and reductions as kernels: C++ on a CPU, Triton on a GPU."""

    name: ClassVar[str] = "fusion"
    rank: ClassVar[int] = 40

    single: bool = False
    """True where one operator alone may become a kernel, False for groups of two and more."""
    convolutions: bool = False
    """True where kernels of our own compute convolutions, with what follows."""
    single_pass: bool = False
    """True where long rows are read once."""
    channels: bool = False
    """True where kernels of convolutions may reduce their channels, and pool."""
    fp16: bool = False
    """True where they multiply float16 where they may use TF32."""
    products: bool = False
    """True where products of 16 bits become kernels of our own, with what follows."""

    @classmethod
    def first(cls, task: TaskContext) -> Iterator[Recipe]:
        """Kernels of convolutions and of 16-bit products, of rows read once, and of few long rows."""
        rules = RulesPass.always()
        if task.on_gpu:
            # A kernel that also computes what follows saves reading and writing the convolution's result.
            for fp16, channels in itertools.product((True, False), repeat=2):
                yield from with_graph(Recipe((rules, cls(single=True, convolutions=True, fp16=fp16, channels=channels))))
            yield Recipe((rules, cls(single=True, single_pass=True)))
            for attends in [*AttentionPass.variants(task), None]:
                yield from with_graph(Recipe((rules, *filter(None, [attends]), cls(single=True, products=True))))
        plain = Recipe((rules, cls(single=True)))
        fused = task.build(plain)
        if fused is not None and fusion.SPLIT_ROWS in fused.techniques:
            # A kernel with a program for each row, as eager has, leaves most of the GPU idle.
            yield from with_graph(plain)

    def apply(self, draft: Draft) -> bool:
        """Fuse what is left; beside kernels from templates there may be nothing."""
        fuser = fusion.KernelFuser(draft.task.device, **self.knobs())
        for graph in draft.operators():
            fuser.fuse(graph)
        done = frozenset(fuser.techniques)
        effect = FusionPass(
            single=any(name.startswith("fuse-all") for name in done),
            convolutions=fusion.TILED in done,
            single_pass=fusion.ONE_READ in done,
            channels=not IN_TILE.isdisjoint(done),
            fp16=fusion.FP16_CONVOLUTION in done,
            products=fusion.PRODUCT_16 in done,
        )
        asked = replace(self, single=False)
        if any(knob and not getattr(effect, name) for name, knob in asked.knobs().items()):
            return False
        if not done:
            return any(step.is_opaque for step in draft.effect)
        return draft.record(effect, *fuser.techniques)


@dataclass(frozen=True, slots=True)
class WrapperPass(RecipePass):
    """The result behind torch.compile, in a CUDA graph, or with other settings of cuDNN."""

    name: ClassVar[str] = "wrapper"
    rank: ClassVar[int] = 50

    kind: str = "compile"
    """One of `wrappers.WRAPPERS`."""

    @staticmethod
    def kinds(task: TaskContext) -> tuple[str, ...]:
        """The wrappers that make sense for a task on its device."""
        if not task.on_gpu or task.keeps_state:
            return wrappers.ON_ANY_DEVICE
        kinds: tuple[str, ...] = ()
        if task.trace is None or emit.uses(task.trace.training, *_CONVOLUTIONS):
            kinds += wrappers.WITH_CONVOLUTIONS
            kinds += wrappers.WITH_LARGE_CONVOLUTIONS if task.copies_much else ()
        if task.takes_channels_last:
            kinds += (wrappers.CHANNELS_LAST,)
        return kinds + wrappers.ON_CUDA

    def suits(self, task: TaskContext) -> bool:
        """False for a graph where a call leaves a state, and for other kernels than the reference's in an erratic task."""
        if task.keeps_state and self.kind in wrappers.WITH_GRAPH:
            return False
        return not task.is_erratic or self.kind in wrappers.SAME_ROUNDING

    def apply(self, draft: Draft) -> bool:
        """Name the wrapper, which is written around the finished text."""
        draft.wrapper = self.kind
        return draft.record(self)


PASSES: tuple[type[RecipePass], ...] = (
    BlocksPass,
    RulesPass,
    ProductPass,
    AttentionPass,
    RecurrentPass,
    ReluConvolutionPass,
    FusionPass,
    WrapperPass,
)
"""All passes, by rank."""
CUDA_GRAPH = WrapperPass("cuda-graph")


def with_graph(recipe: Recipe) -> Iterator[Recipe]:
    """A recipe, and the same in a CUDA graph."""
    yield recipe
    yield recipe.plus(CUDA_GRAPH)


def stored_recipe(stored: StoredPasses | Sequence[Any]) -> Recipe:
    """The recipe of a record's passes; those that this version does not know are left out."""
    known = {kind.name: kind for kind in PASSES}
    steps = ((known[name], knobs) for name, knobs in stored if name in known)
    return Recipe(tuple(kind.of_knobs(knobs) for kind, knobs in steps))


def alternatives(task: TaskContext, recipe: Recipe) -> Iterator[Rule]:
    """Rules that only the clock can decide on, and that change the task's graph beside a recipe's own rules."""
    names = rules_of(recipe)
    for rule in RULES:
        if not rule.always and rule.name not in names:
            built = task.build(Recipe((RulesPass.of((*names, rule.name)),)))
            if built is not None and rule.name in built.techniques:
                yield rule


def rules_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the rules that may fire in a recipe."""
    rules = recipe.get(RulesPass)
    return rules.names if rules is not None else ()
