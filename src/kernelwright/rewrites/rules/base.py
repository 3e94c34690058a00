"""Defines a rewrite rule, and applies a set of rules until none fires any more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from kernelwright.errors import InternalError
from kernelwright.rewrites.graph import Editor, Operator
from kernelwright.rewrites.tracing import OperatorGraph

Replacement = Callable[[Editor, fx.Node], fx.Node | None]
"""Function of a graph's editor and a call. Returns the node that replaces the call, or None."""
MOST_ROUNDS = 30
"""A stop for rules that feed each other; a set that is still firing then has a cycle."""


class RuleError(InternalError):
    """A rule is wrong: it raised, or it never ends. Carries the rule's name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"rule {name}: {message}")
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An exact rewrite of an operator graph.

    A rule that is not `always` better, such as another algorithm for the same convolution, is an alternative:
    it is proposed as a candidate of its own and left to the clock.
    """

    name: str
    apply: Callable[[Editor], int]
    """Rewrites a graph in place; returns how many places it changed."""
    always: bool = True

    @classmethod
    def of(cls, function: Callable[[Editor], int], *, always: bool = True) -> Rule:
        """A rule that is named as its function, with hyphens."""
        return cls(name=str(getattr(function, "__name__", "")).replace("_", "-"), apply=function, always=always)


class EachCall:
    """A rule's function over all calls of some operators, made of one that returns what replaces one call, or None."""

    def __init__(self, packets: tuple[Operator, ...], replacement: Replacement) -> None:
        self._packets = packets
        self._replacement = replacement
        functools.update_wrapper(self, replacement)

    def __call__(self, editor: Editor) -> int:
        """Replace calls in place; how many were."""
        count = 0
        for node in editor.nodes(*self._packets):
            if not node._erased and (new := self._replacement(editor, node)) is not None:
                editor.replace(node, new)
                count += 1
        return count


def each(*packets: Operator) -> Callable[[Replacement], EachCall]:
    """Decorate the replacement of one call of these operators, so that it becomes a rule's function."""
    return functools.partial(EachCall, packets)


def rewrite(graph: OperatorGraph, rules: Sequence[Rule]) -> tuple[str, ...]:
    """Apply rules in order, again and again until none fires; return the names of those that fired.

    Raises:
        RuleError: a rule failed, which is a fault of the rule and leaves the graph unusable.
    """
    editor = Editor(graph.graph, graph.mode)
    fired: set[str] = set()
    for _ in range(MOST_ROUNDS):
        changed = False
        for rule in rules:
            try:
                count = rule.apply(editor)
            except Exception as error:
                raise RuleError(rule.name, f"{type(error).__name__}: {error}") from error
            if count:
                editor.sweep()
                fired.add(rule.name)
                changed = True
        if not changed:
            editor.sweep()
            graph.graph.lint()
            return tuple(rule.name for rule in rules if rule.name in fired)
    raise RuleError(rules[0].name, f"a set of {len(rules)} rules was still firing after {MOST_ROUNDS} rounds")
