"""Proposes candidates without a model or a network: exact rewrites, fused kernels, wrappers, and a search over them.

The plan is a fixed list of recipes followed by those derived from the best candidates so far. A record stores the recipe of
its candidate, so the same history gives the same proposals in a new process too. On a GPU those come first that earlier
searches lead one to expect most of (`order`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kernelwright.records import Candidate, Evaluation
from kernelwright.records.decisions import OWN_POLICY, steady
from kernelwright.records.policy import Context, Look
from kernelwright.records.screened import Compiles, Screened, compiles
from kernelwright.rewrites import wrappers
from kernelwright.rewrites.order import Order, order_in_use
from kernelwright.rewrites.passes import (
    CUDA_GRAPH,
    GRAPH_OF,
    PASSES,
    BlocksPass,
    FusionPass,
    RulesPass,
    WrapperPass,
    alternatives,
    rules_of,
    stored_recipe,
    with_graph,
)
from kernelwright.rewrites.recipes import Recipe, SearchedBlock, TaskContext

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


class BuiltinPolicy:
    """Rewrites, fused kernels and wrappers, most promising first, with combinations of what was found to help.

    Args:
        order: Gains expected of them on a GPU; None for the order in use.
        blocks: Equal submodules of the task's model of which one was searched; what was found there is all that is tried.
    """

    name = OWN_POLICY
    look: Look = "screened"

    def __init__(self, order: Order | None = None, blocks: Sequence[SearchedBlock] = ()) -> None:
        self._tasks: dict[tuple[str, str], TaskContext] = {}
        self._order, self._blocks = order, blocks

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """The next candidates of the plan that the history does not have."""
        key = (context.task.sha256, context.device)
        if key not in self._tasks:
            self._tasks[key] = TaskContext.open(context.task, context.device, self._blocks)
        task = self._tasks[key]
        proposals = self._unseen(task, context)
        if not task.on_gpu or task.blocks:  # the searches that the order is learnt from were on GPUs
            return list(itertools.islice(proposals, count))
        order = self._order or order_in_use()
        best_first = sorted(proposals, key=lambda candidate: -order.gain(candidate.techniques, task.place))
        # Nothing tells what an untried technique is worth, and five candidates that had one hid what was known to be better
        # (level 2, 13 in results/kernelbench-h200/cuda-l1-fp16-4-h200): they and the others come in turn.
        tried = [candidate for candidate in best_first if order.knows(candidate.techniques)]
        untried = [candidate for candidate in best_first if not order.knows(candidate.techniques)]
        pairs = itertools.zip_longest(untried, tried)
        in_turn = [candidate for pair in pairs for candidate in pair if candidate is not None]
        return sorted(in_turn, key=lambda candidate: _is_late(task, candidate))[:count]

    def _unseen(self, task: TaskContext, context: Context) -> Iterator[Candidate]:
        """The candidates of the plan that the history does not have."""
        seen = context.seen
        for recipe, parent in _plan(task, context):
            built = task.build(recipe)
            if built is None:
                continue
            candidate = built.candidate(self.name, parent)
            if candidate.sha256 not in seen and candidate.sha256 != parent:
                seen.add(candidate.sha256)
                yield candidate


def _is_late(task: TaskContext, candidate: Candidate) -> tuple[bool, bool]:
    """Rank of candidates that come after all others: graphs whose copies cost much, and after those autotuners.

    An autotuner takes longest, and searches looked only where it could still win: what is known of it is biased.
    """
    varies = compiles(candidate.source) is Compiles.VARIANTS
    return varies, task.copies_much and not wrappers.WITH_GRAPH.isdisjoint(candidate.techniques)


def _plan(task: TaskContext, context: Context) -> Iterator[tuple[Recipe, str | None]]:
    """All recipes for a task after a history, each with the hash of the candidate that it is derived from."""
    for recipe in _of_blocks(task, context) if task.blocks else first_recipes(task):
        yield recipe, None
    # Calls of microseconds are launches; which copies to save is known once a graph is known to help.
    looks: tuple[Screened | Evaluation, ...] = (*context.screened, *context.history)
    long = {look.candidate_sha256 for look in looks if (look.candidate_us or 0.0) > _DIRECT_US}
    short = [(recipe, sha256) for recipe, sha256 in _best(context) if sha256 not in long]
    captured = [(recipe, sha256) for recipe, sha256 in short if _wrapper_of(recipe) in wrappers.DIRECT]
    for recipe, sha256 in captured[:_DIRECT]:
        yield recipe.plus(WrapperPass(wrappers.DIRECT[_wrapper_of(recipe)])), sha256
    if task.blocks:
        return
    for recipe in _without_graph(task, looks):
        yield recipe, None
    for recipe, sha256 in _best(context):
        for derived in _derived(task, recipe):
            yield derived, sha256


def _of_blocks(task: TaskContext, context: Context) -> Iterator[Recipe]:
    """Recipes that the search of one of equal submodules has found for all of them, the best of them for the whole's graph,
    which fuses across their ends, and wrappers that alone did as well."""
    blocks = [block for block in task.searched if block.equal.paths in task.blocks and block.recipes]
    paths = tuple(block.equal.paths for block in blocks)
    carried: list[Recipe] = []
    for place in range(max((len(block.recipes) for block in blocks), default=0)):
        chosen = tuple(block.recipes[min(place, len(block.recipes) - 1)] for block in blocks)
        recipe = Recipe((BlocksPass(paths, chosen),))
        carried += [*with_graph(recipe)][int(place > 0) :] if task.on_gpu else [recipe]
    yield from carried
    made = filter(None, map(task.build, carried))
    if any(one.candidate(OWN_POLICY, None).sha256 not in context.seen for one in made):
        return  # the whole is traced while these are screened
    task.trace_whole()
    for recipe in max(blocks, key=lambda block: block.equal.calls).recipes[:1] if blocks else ():
        yield from with_graph(recipe) if task.on_gpu else (recipe,)
    for kind in dict.fromkeys(kind for block in blocks for kind in block.wrappers):
        yield Recipe((WrapperPass(kind),))


def first_recipes(task: TaskContext) -> Iterator[Recipe]:
    """The fixed part of the plan."""
    for step in PASSES:
        yield from step.first(task)
    whole = Recipe((RulesPass.always(),))
    chains, single = whole.plus(FusionPass()), whole.plus(FusionPass(single=True))
    yield whole
    yield chains
    if task.on_gpu:
        # Launches are most of a small task's time there; rewrites and kernels keep their value in a graph.
        yield whole.plus(CUDA_GRAPH)
        yield chains.plus(CUDA_GRAPH)
        yield Recipe((CUDA_GRAPH,))
        yield from with_graph(single)
    else:
        yield single
    yield Recipe((FusionPass(),))
    always = rules_of(whole)
    optional = [rule.name for rule in alternatives(task, whole)]
    for name in optional:
        yield Recipe((RulesPass.of((*always, name)),))
    if len(optional) > 1:
        yield Recipe((RulesPass.of((*always, *optional)),))
    built = task.build(whole)
    fired = rules_of(built.effect) if built else ()
    if len(fired) > 1:
        for name in fired:
            yield Recipe((RulesPass.of((name,)),))
    for kind in WrapperPass.kinds(task):
        wrapper = WrapperPass(kind)
        later = kind in GRAPH_OF and task.on_gpu and not task.copies_much
        if kind in wrappers.KEEPS_LAYOUT or not later:
            yield Recipe((wrapper,))
        if built and kind in wrappers.KEEPS_LAYOUT and not later:
            yield whole.plus(wrapper)
        if kind == "cudnn-benchmark" and not later:
            # cuDNN's own choice may be the slowest part of a large task, and a graph of another choice comes last there.
            yield chains.plus(wrapper)


def _without_graph(task: TaskContext, looks: Sequence[Screened | Evaluation]) -> Iterator[Recipe]:
    """Wrappers without the graph that hindered: it failed, or its copies cost more than launches that a long call hides."""
    known = {look.techniques: look for look in looks if look.policy == OWN_POLICY}
    plain, whole = Recipe(), Recipe((RulesPass.always(),))
    for kind in WrapperPass.kinds(task) if task.on_gpu else ():
        for recipe in (plain, whole) if kind in GRAPH_OF else ():
            graph = task.build(recipe.plus(WrapperPass(GRAPH_OF[kind])))
            look = known.get(graph.techniques) if graph else None
            if look is None or (recipe is whole and kind not in wrappers.KEEPS_LAYOUT):
                continue
            gain = look.estimate if isinstance(look, Screened) else look.speedup
            if gain is None or (gain > _NEARLY and (look.candidate_us or 0.0) > _SHORT_US):
                yield recipe.plus(WrapperPass(kind))


def _best(context: Context) -> Iterator[tuple[Recipe, str]]:
    """Recipes by this policy that were improvements or look like it, best first, and the hashes of their candidates."""
    estimates = steady(context.screened)
    gains: dict[str, tuple[float, Screened | Evaluation]] = {
        look.candidate_sha256: (estimates[look.candidate_sha256], look)
        for look in context.screened
        if look.policy == OWN_POLICY and estimates.get(look.candidate_sha256, 0.0) > _LOOKS_FASTER
    }
    for item in context.history:
        if item.policy == OWN_POLICY:
            gains.pop(item.candidate_sha256, None)  # the verdict counts
            if item.is_improvement:
                gains[item.candidate_sha256] = (item.speedup_low or 0.0, item)
    for sha256, (_, record) in sorted(gains.items(), key=lambda found: -found[1][0]):
        if record.passes:
            yield stored_recipe(record.passes), sha256


def _wrapper_of(recipe: Recipe) -> str:
    """Name of a recipe's wrapper; empty without one."""
    wrapper = recipe.get(WrapperPass)
    return wrapper.kind if wrapper is not None else ""


def _derived(task: TaskContext, recipe: Recipe) -> Iterator[Recipe]:
    """Neighbours of a recipe that was an improvement."""
    fusion = recipe.get(FusionPass)
    for single in (False, True):
        if fusion is None or fusion.single != single:
            yield recipe.plus(replace(fusion, single=single) if fusion else FusionPass(single=single))
    if not _wrapper_of(recipe):
        is_opaque = any(step.is_opaque for step in recipe.passes)
        for kind in WrapperPass.kinds(task):
            # The rest is fused already, and dynamo cannot see through the launches of CUDA C++ of our own.
            if kind in wrappers.KEEPS_LAYOUT and not (is_opaque and kind.startswith("compile")):
                yield recipe.plus(WrapperPass(kind))
    rules = rules_of(recipe)
    for rule in alternatives(task, recipe):
        yield recipe.plus(RulesPass.of((*rules, rule.name)))
    built = task.build(recipe)
    fired = [name for name in built.techniques if name in rules] if built else []
    if len(fired) > 1:
        for name in fired:
            yield recipe.plus(RulesPass.of(other for other in fired if other != name))
