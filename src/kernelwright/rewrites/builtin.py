"""Proposes candidates without a model or a network: exact rewrites, fused kernels, wrappers, and a search over them.

A candidate is described by a `Recipe`; the plan is a fixed list of recipes followed by those derived from the best
candidates so far. A record's techniques name its recipe, so the same history gives the same proposals in a new process too.
On a GPU those come first that earlier searches lead one to expect most of (`order`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelwright.judge.check.guard import RESPELLING
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.compiling import Compiles, compiles
from kernelwright.records.decisions import OWN_POLICY, steady
from kernelwright.records.policy import Context, Look
from kernelwright.records.screened import Screened
from kernelwright.rewrites import emit, fusion, templates, wrappers
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
from kernelwright.rewrites.normalise import CarriedStateError, UntraceableError
from kernelwright.rewrites.order.gains import Order, Place, order_in_use
from kernelwright.rewrites.rules import RULES, Rule, RuleError, rewrite
from kernelwright.rewrites.tracing import Trace, trace

_BY_NAME = {rule.name: rule for rule in RULES}
_LOOKS_FASTER = 1.02
"""Estimate above which variants of a candidate are worth a look. Our choice."""
_DIRECT = 2
"""Best candidates with a CUDA graph that are tried with one that saves the launches of copies. Our choice."""
_DIRECT_US = 100.0
"""Latency of a call with a graph above which it is not tried: on two H200s it was ahead of the other one in 21 of 41 looks
below, and in 8 of 27 above (results/kernelbench-h200)."""
_SHORT_US = 1000.0
"""Latency of a call above which the launches of copies do not matter. Our choice."""
_NEARLY = 0.9
"""Estimate of a long call with a graph from which it is tried without. Our choice."""
_COPIED_BYTES = 128 << 20
"""Inputs and outputs from which a CUDA graph's copies of them cost more than the launches that it saves: on today's tasks
with so much the same candidate was slower in a graph in 32 of 36 looks, 1.27 times in the geometric mean
(results/kernelbench-h200/today-tenth-1-again-h100). At 64 MiB it was faster in three of three."""
_SIGNS = 3
"""Batch norms over two values from which a network passes rounding on as it is. Our choice; see `_is_erratic`."""
_GRAPH_OF = {
    "compile": "compile-cuda-graph",
    "cudnn-benchmark": "cudnn-cuda-graph",
    "compile-cudnn": "compile-cudnn-cuda-graph",
    "channels-last": "channels-last-cuda-graph",
}
"""Wrappers and the same with a graph. Without it rewritten code and channels-last came near the best in none of 51 looks."""
IN_TILE = frozenset({fusion.WHOLE_CHANNELS, fusion.POOLED_TILES})
"""What a recipe with `channels` may do."""
_CONVOLUTIONS_2D = (aten.conv2d, aten.conv_transpose2d)
_CONVOLUTIONS = (*_CONVOLUTIONS_2D, aten.conv1d, aten.conv3d, aten.conv_transpose1d, aten.conv_transpose3d)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a candidate is made: which rules may fire, whether pointwise chains are fused, and what wraps the result."""

    rules: frozenset[str] = frozenset()
    fuse: str | None = None
    """`chains`: groups of two operators and more become kernels; `all`: single ones as well."""
    wrapper: str | None = None
    product: str | None = None
    """How large float32 products are computed: technique of one of `templates.PRODUCTS`."""
    tiled: bool = False
    """Whether kernels of our own compute convolutions, with what follows."""
    once: bool = False
    """Whether long rows are read once."""
    channels: bool = False
    """Whether kernels of convolutions may reduce their channels, and pool."""
    half: bool = False
    """Whether they multiply float16 where they may use TF32."""
    recurrent: bool = False
    """Whether LSTMs and GRUs are kernels that stay for all time steps."""
    attention: bool = False
    """Whether a kernel of our own computes attention."""


@dataclass(frozen=True, slots=True)
class BuiltRecipe:
    """A recipe carried out."""

    source: str
    techniques: tuple[str, ...]
    note: str

    def candidate(self, policy: str, parent: str | None) -> Candidate:
        """The record of this candidate."""
        return Candidate(source=self.source, policy=policy, techniques=self.techniques, parent=parent, note=self.note)


@dataclass(slots=True)
class Workshop:
    """One task on one device: its operator graphs and every candidate built so far."""

    task: Task
    device: str
    trace: Trace | None = None
    obstacle: str = ""
    """Why there is no operator graph."""
    keeps_state: bool = False
    """Whether a call leaves a tensor for the next one, which a CUDA graph would read where the captured call did."""
    is_erratic: bool = False
    """Whether any other rounding makes it another network."""
    draws: bool = False
    """Whether a mode draws random numbers; False where unknown."""
    takes_channels_last: bool = True
    """Whether it has convolutions in two dimensions, and nothing that refuses their other layout; True where unknown."""
    copies_much: bool = False
    """Whether a CUDA graph's copies of inputs and outputs cost more than it saves; False where unknown."""
    place: Place = field(default_factory=Place)
    """The task as far as the order of proposals knows it."""
    broken: dict[str, str] = field(default_factory=dict)
    """Rules that failed on this task, and how."""
    built: dict[Recipe, BuiltRecipe | None] = field(default_factory=dict)

    @classmethod
    def open(cls, task: Task, device: str) -> Workshop:
        """Trace a task; when that fails, say why and go on without a graph."""
        workshop = cls(task, device)
        try:
            workshop.trace = trace(task)
            workshop.place = Place.of(workshop.trace)
            workshop.copies_much = _copied_bytes(workshop.trace) >= _COPIED_BYTES
            workshop.is_erratic = _is_erratic(workshop.trace)
            graphs = (workshop.trace.training, workshop.trace.evaluation)
            workshop.draws = any(is_random(node) for one in graphs for node in one.graph.nodes)
            graph = workshop.trace.training
            has_images = emit.uses(graph, *_CONVOLUTIONS_2D)
            workshop.takes_channels_last = has_images and can_be_channels_last(graph.graph, graph.mode)
        except UntraceableError as error:
            workshop.obstacle = str(error)
            workshop.keeps_state = isinstance(error, CarriedStateError)
        return workshop

    def build(self, recipe: Recipe) -> BuiltRecipe | None:
        """Carry out a recipe; None when nothing in it applies to this task."""
        if recipe not in self.built:
            self.built[recipe] = self._build(recipe)
        return self.built[recipe]

    def _build(self, recipe: Recipe) -> BuiltRecipe | None:
        changes = bool(recipe.rules or recipe.fuse or recipe.product or recipe.recurrent or recipe.attention)
        if self.keeps_state and recipe.wrapper in wrappers.WITH_GRAPH:
            return None
        if self.is_erratic and (changes or recipe.wrapper not in wrappers.SAME_ROUNDING):
            return None
        source = "\n\n".join(filter(None, (emit.future_import(self.task.source), emit.reference_source(self.task.source))))
        techniques: tuple[str, ...] = ()
        if self.trace is not None and changes:
            try:
                source, techniques = self._rewritten(self.trace, recipe)
            except UntraceableError as error:
                self.obstacle = str(error)
        if changes and not techniques:
            return None
        if recipe.wrapper is not None:
            techniques = (*techniques, recipe.wrapper)
            source = wrappers.wrap(source, recipe.wrapper, techniques, self.draws)
        return BuiltRecipe(source, techniques, self._note()) if techniques else None

    def _rewritten(self, traced: Trace, recipe: Recipe) -> tuple[str, tuple[str, ...]]:
        while True:
            rules = [rule for rule in RULES if rule.name in recipe.rules and rule.name not in self.broken]
            graphs = emit.copy_graph(traced.training), emit.copy_graph(traced.evaluation)
            try:
                fired = [name for graph in graphs for name in rewrite(graph, rules)]
                break
            except RuleError as error:
                self.broken[error.name] = str(error)
        if recipe.product:
            if templates.clash(templates.BY_TECHNIQUE[recipe.product], emit.reference_source(self.task.source)):
                return "", ()
            if not templates.replace(templates.BY_TECHNIQUE[recipe.product], *graphs):
                return "", ()
            fired.append(recipe.product)
        if recipe.recurrent:
            if templates.clash(templates.RECURRENT, emit.reference_source(self.task.source)):
                return "", ()
            if not templates.replace(templates.RECURRENT, *graphs):
                return "", ()
            fired.append(templates.RECURRENT.technique)
        if recipe.attention:
            if templates.clash(templates.ATTENTION, emit.reference_source(self.task.source)):
                return "", ()
            if not templates.replace(templates.ATTENTION, *graphs):
                return "", ()
            fired.append(templates.ATTENTION.technique)
        if recipe.fuse:
            fuser = fusion.KernelFuser(
                self.device,
                single=recipe.fuse == "all",
                convolutions=recipe.tiled,
                single_pass=recipe.once,
                channels=recipe.channels,
                fp16=recipe.half,
            )
            for graph in graphs:
                fuser.fuse(graph)
            asked = {fusion.TILED: recipe.tiled, fusion.FP16_CONVOLUTION: recipe.half, fusion.ONE_READ: recipe.once}
            wanted = {name for name, is_asked in asked.items() if is_asked}
            lacking = not wanted.issubset(fuser.techniques) or (recipe.channels and IN_TILE.isdisjoint(fuser.techniques))
            if lacking or not (fuser.techniques or recipe.product or recipe.recurrent or recipe.attention):
                return "", ()
            fired += fuser.techniques
        techniques = tuple(dict.fromkeys(fired))
        if not techniques:
            return "", ()
        respelled, captured = RESPELLING.issuperset(techniques), recipe.wrapper in wrappers.WITH_GRAPH
        return emit.module(self.task.source, traced, graphs, techniques, respelled=respelled, captured=captured), techniques

    def _note(self) -> str:
        parts = [f"No operator graph: {self.obstacle}."] if self.obstacle else []
        parts += [f"Left out: {message}." for message in self.broken.values()]
        return " ".join(parts)

    def fires(self, rule: Rule, others: frozenset[str]) -> bool:
        """Whether a rule changes the graph beside these others."""
        built = self.build(Recipe(others | {rule.name}))
        return built is not None and rule.name in built.techniques

    def wrappers(self) -> tuple[str, ...]:
        """The wrappers that make sense on this device."""
        if not self.device.startswith("cuda") or self.keeps_state:
            return wrappers.ON_ANY_DEVICE
        found: tuple[str, ...] = ()
        if self.trace is None or emit.uses(self.trace.training, *_CONVOLUTIONS):
            found += wrappers.WITH_CONVOLUTIONS
            found += wrappers.WITH_LARGE_CONVOLUTIONS if self.copies_much else ()
        if self.takes_channels_last:
            found += wrappers.WITH_CONVOLUTIONS_2D
        return found + wrappers.ON_CUDA


def _copied_bytes(traced: Trace) -> int:
    """Size of a task's inputs and outputs."""
    nodes = traced.training.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder" and node.meta["role"] == "input"]
    outputs = next(node for node in nodes if node.op == "output").all_input_nodes
    return sum(value(node).nbytes for node in (*inputs, *outputs) if is_tensor(node))


def _is_erratic(traced: Trace) -> bool:
    """Whether batch norms over two values follow one another, as behind a pooling to 1x1 with a batch of two.

    Such a norm gives little more than the sign of a difference, which rounding decides where the two are alike. In an
    EfficientNet with 14 of them, eager with another library for convolutions moves the last running variance by a quarter.
    """
    norms = Editor(traced.training.graph, traced.training.mode).nodes(aten.batch_norm)
    inputs: list[Any] = [node.args[0] for node in norms if argument(node, "training") and is_tensor(node.args[0])]
    return sum(numel(item) == 2 * shape(item)[1] for item in inputs) >= _SIGNS


class BuiltinPolicy:
    """Rewrites, fused kernels and wrappers, most promising first, with combinations of what was found to help.

    Args:
        order: What is expected of them on a GPU; None for the one in use.
    """

    name = OWN_POLICY
    look: Look = "screened"

    def __init__(self, order: Order | None = None) -> None:
        self._workshops: dict[tuple[str, str], Workshop] = {}
        self._order = order

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """The next candidates of the plan that the history does not have."""
        key = (context.task.sha256, context.device)
        if key not in self._workshops:
            self._workshops[key] = Workshop.open(context.task, context.device)
        workshop = self._workshops[key]
        proposals = self._unseen(workshop, context)
        if not context.device.startswith("cuda"):  # the searches that the order is learnt from were on GPUs
            return list(itertools.islice(proposals, count))
        order = self._order or order_in_use()

        def late(one: Candidate) -> tuple[bool, bool]:
            # An autotuner takes longest, and searches looked only where it could still win: what is known of it is biased.
            varies = compiles(one.source) is Compiles.VARIANTS
            return varies, workshop.copies_much and not wrappers.WITH_GRAPH.isdisjoint(one.techniques)

        best_first = sorted(proposals, key=lambda one: -order.gain(one.techniques, workshop.place))
        # Nothing tells what an untried technique is worth, and five candidates that had one hid what was known to be better
        # (level 2, 13 in results/kernelbench-h200/cuda-l1-fp16-4-h200): they and the others come in turn.
        untried, tried = ([one for one in best_first if order.knows(one.techniques) == known] for known in (False, True))
        in_turn = [one for pair in itertools.zip_longest(untried, tried) for one in pair if one is not None]
        return sorted(in_turn, key=late)[:count]

    def _unseen(self, workshop: Workshop, context: Context) -> Iterator[Candidate]:
        """The candidates of the plan that the history does not have."""
        seen = context.seen
        for recipe, parent in self._plan(workshop, context):
            built = workshop.build(recipe)
            if built is None:
                continue
            candidate = built.candidate(self.name, parent)
            if candidate.sha256 not in seen and candidate.sha256 != parent:
                seen.add(candidate.sha256)
                yield candidate

    def _plan(self, workshop: Workshop, context: Context) -> Iterator[tuple[Recipe, str | None]]:
        for recipe in _first(workshop):
            yield recipe, None
        # Calls of microseconds are launches; which copies to save is known once a graph is known to help.
        looks: tuple[Screened | Evaluation, ...] = (*context.screened, *context.history)
        long = {one.candidate_sha256 for one in looks if (one.candidate_us or 0.0) > _DIRECT_US}
        graphs = [one for one in _best(context) if one[0].wrapper in wrappers.DIRECT and one[1] not in long]
        for recipe, sha256 in graphs[:_DIRECT]:
            yield replace(recipe, wrapper=wrappers.DIRECT[str(recipe.wrapper)]), sha256
        for recipe in _without_graph(workshop, looks):
            yield recipe, None
        for recipe, sha256 in _best(context):
            for derived in _derived(workshop, recipe):
                yield derived, sha256


def _first(workshop: Workshop) -> Iterator[Recipe]:
    """The fixed part of the plan."""
    always = frozenset(rule.name for rule in RULES if rule.always)
    whole = Recipe(always)
    attends: tuple[bool, ...] = (False,)
    attention = templates.ATTENTION
    if attention.builds_for(workshop.device) and not attention.task_operators.isdisjoint(workshop.place.operators):
        tiled_attention = replace(whole, fuse="all", attention=True)
        attends = (True, False) if workshop.build(tiled_attention) else attends
    buildable = [one.technique for one in templates.PRODUCTS if one.builds_for(workshop.device)]
    for technique, attended in itertools.product(buildable, attends):
        # Nothing else gains as much on a large product; a graph saves the launches of splitting both operands. A rule that
        # leaves out half of a product by blocks of it leaves no product to split, and gains less. Of
        # candidates with equal ranks the plan's order decides: those with a kernel for attention come first.
        split = Recipe(always - {"triangle-of-product"}, fuse="all", product=technique, attention=attended)
        yield split
        yield replace(split, wrapper="cuda-graph")
    if True in attends:
        yield tiled_attention
        yield replace(tiled_attention, wrapper="cuda-graph")
    if templates.RECURRENT.builds_for(workshop.device):
        lasting = replace(whole, fuse="all", recurrent=True)
        yield lasting
        yield replace(lasting, wrapper="cuda-graph")
    if workshop.device.startswith("cuda"):
        # A kernel that also computes what follows saves reading and writing the convolution's result.
        for half, channels in itertools.product((True, False), repeat=2):
            tiled = replace(whole, fuse="all", tiled=True, half=half, channels=channels)
            yield tiled
            yield replace(tiled, wrapper="cuda-graph")
        yield replace(whole, fuse="all", once=True)
    fused = workshop.build(replace(whole, fuse="all"))
    if fused is not None and fusion.SPLIT_ROWS in fused.techniques:
        # A kernel with a program for each row, as eager has, leaves most of the GPU idle.
        yield replace(whole, fuse="all")
        yield replace(whole, fuse="all", wrapper="cuda-graph")
    yield whole
    yield replace(whole, fuse="chains")
    if workshop.device.startswith("cuda"):
        # Launches are most of a small task's time there; rewrites and kernels keep their value in a graph.
        yield replace(whole, wrapper="cuda-graph")
        yield replace(whole, fuse="chains", wrapper="cuda-graph")
        yield Recipe(wrapper="cuda-graph")
    yield replace(whole, fuse="all")
    if workshop.device.startswith("cuda"):
        yield replace(whole, fuse="all", wrapper="cuda-graph")
    yield Recipe(fuse="chains")
    alternatives = [rule for rule in RULES if not rule.always and workshop.fires(rule, always)]
    for rule in alternatives:
        yield Recipe(always | {rule.name})
    if len(alternatives) > 1:
        yield Recipe(always | {rule.name for rule in alternatives})
    built = workshop.build(whole)
    fired = [name for name in built.techniques if name in _BY_NAME] if built else []
    if len(fired) > 1:
        for name in fired:
            yield Recipe(frozenset({name}))
    for name in workshop.wrappers():
        later = name in _GRAPH_OF and workshop.device.startswith("cuda") and not workshop.copies_much
        if name in wrappers.KEEPS_LAYOUT or not later:
            yield Recipe(wrapper=name)
        if built and name in wrappers.KEEPS_LAYOUT and not later:
            yield replace(whole, wrapper=name)
        if name == "cudnn-benchmark" and not later:
            # cuDNN's own choice may be the slowest part of a large task, and a graph of another choice comes last there.
            yield replace(whole, fuse="chains", wrapper=name)


def _without_graph(workshop: Workshop, looks: Sequence[Screened | Evaluation]) -> Iterator[Recipe]:
    """Wrappers without the graph that hindered: it failed, or its copies cost more than launches that a long call hides."""
    whole = Recipe(frozenset(rule.name for rule in RULES if rule.always))
    found = {one.techniques: one for one in looks if one.policy == BuiltinPolicy.name}
    for name in workshop.wrappers() if workshop.device.startswith("cuda") else ():
        for recipe in (Recipe(wrapper=name), whole) if name in _GRAPH_OF else ():
            graph = workshop.build(replace(recipe, wrapper=_GRAPH_OF[name]))
            look = found.get(graph.techniques) if graph else None
            if look is None or (recipe is whole and name not in wrappers.KEEPS_LAYOUT):
                continue
            gain = look.estimate if isinstance(look, Screened) else look.speedup
            if gain is None or (gain > _NEARLY and (look.candidate_us or 0.0) > _SHORT_US):
                yield replace(recipe, wrapper=name)


def _best(context: Context) -> Iterator[tuple[Recipe, str]]:
    """Recipes by this policy that were improvements or look like it, best first, and the hashes of their candidates."""
    estimates = steady(context.screened)
    found = {
        one.candidate_sha256: (estimates[one.candidate_sha256], one.techniques)
        for one in context.screened
        if one.policy == BuiltinPolicy.name and estimates.get(one.candidate_sha256, 0.0) > _LOOKS_FASTER
    }
    for item in context.history:
        if item.policy == BuiltinPolicy.name:
            found.pop(item.candidate_sha256, None)  # the verdict counts
            if item.is_improvement:
                found[item.candidate_sha256] = (item.speedup_low or 0.0, item.techniques)
    for sha256, (_, techniques) in sorted(found.items(), key=lambda one: -one[1][0]):
        yield _recipe_of(techniques), sha256


def _recipe_of(techniques: tuple[str, ...]) -> Recipe:
    """The recipe behind a record: the techniques name everything that took part."""
    return Recipe(
        frozenset(name for name in techniques if name in _BY_NAME),
        next(
            (kind for name in techniques for kind in ("chains", "all") if name.startswith(f"fuse-{kind}")),
            None,
        ),
        next((name for name in techniques if name in wrappers.WRAPPERS), None),
        next((one.technique for one in templates.PRODUCTS if one.technique in techniques), None),
        fusion.TILED in techniques,
        fusion.ONE_READ in techniques,
        not IN_TILE.isdisjoint(techniques),
        fusion.FP16_CONVOLUTION in techniques,
        templates.RECURRENT.technique in techniques,
        templates.ATTENTION.technique in techniques,
    )


def _derived(workshop: Workshop, recipe: Recipe) -> Iterator[Recipe]:
    """Neighbours of a recipe that was an improvement."""
    for fuse in ("chains", "all"):
        if recipe.fuse != fuse:
            yield replace(recipe, fuse=fuse)
    if recipe.wrapper is None:
        for name in workshop.wrappers():
            # The rest is fused already, and dynamo cannot see through the launches of CUDA C++ of our own.
            own = recipe.product is not None or recipe.recurrent or recipe.attention
            compiled = name.startswith("compile") and own
            if name in wrappers.KEEPS_LAYOUT and not compiled:
                yield replace(recipe, wrapper=name)
    for rule in RULES:
        if not rule.always and rule.name not in recipe.rules and workshop.fires(rule, recipe.rules):
            yield replace(recipe, rules=recipe.rules | {rule.name})
    built = workshop.build(recipe)
    fired = [name for name in built.techniques if name in recipe.rules] if built else []
    if len(fired) > 1:
        for name in fired:
            yield replace(recipe, rules=frozenset(fired) - {name})
