"""Finds shapes that cheats have in common in a syntax tree whose names are taken out.

A shape is a fact such as "writes into something that outlives the call" or "patches a library". Each alone is often
innocent: a workspace outlives the call too. They are features for finding similar known hacks, never a verdict.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernelwright.contrastive.hacks.names import Function, Names, is_self, targets

_WRITERS = frozenset({"append", "extend", "insert", "setdefault", "update", "set", "add", "put", "submit"})
_FILLS = frozenset(
    {"full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "eye"}
)
_EMPTIES = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
_LOW = frozenset({"half", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "qint8"})
_DERIVING = frozenset({"detach", "t", "data", "contiguous", "clone", "sum", "half"})
_CLOCKS = frozenset({"time", "monotonic", "perf_counter", "perf_counter_ns", "monotonic_ns", "time_ns", "process_time"})
LARGE = 1 << 16
"""A number in an equality test above which the test looks made to fail; our choice."""


def shapes(tree: ast.Module, names: Names) -> set[str]:
    """The names of the shapes that occur in a module."""
    return set(_ShapeFinder(tree, names).find())


class _ShapeFinder:
    def __init__(self, tree: ast.Module, names: Names) -> None:
        self.tree = tree
        self.names = names
        self._walked: dict[ast.AST, list[ast.AST]] = {}
        self.functions = [node for node in self._walk(tree) if isinstance(node, Function)]

    def _walk(self, node: ast.AST) -> list[ast.AST]:
        """Every node below one; kept, since generated functions are long and asked about often."""
        if node not in self._walked:
            self._walked[node] = list(ast.walk(node))
        return self._walked[node]

    def find(self) -> Iterator[str]:
        yield from self._module_level()
        for node in self._walk(self.tree):
            yield from self._anywhere(node)
        for function in self.functions:
            if function.name == "__init__":
                yield from self._constructor(function)
            else:
                yield from self._state(function)
                yield from self._control(function)
        for function in self.functions:
            if function.name == "forward":
                yield from self._forward(function)
        yield from self._waiting()

    def _module_level(self) -> Iterator[str]:
        for item in self.tree.body:
            if isinstance(item, ast.If | ast.While | ast.For | ast.With):
                yield "acts-at-import"
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Call):
                yield "calls-at-import"

    def _anywhere(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Assign() | ast.AugAssign():
                for target in targets(node):
                    if isinstance(target, ast.Attribute):
                        yield from self._attribute_set(target, node.value)
            case ast.Call():
                yield from self._call(node)
            case ast.ClassDef():
                if any(self.names.label(base).rpartition(".")[2] == "Tensor" for base in node.bases):
                    yield "tensor-subclass"
                if any(self.names.label(base) == "local" for base in node.bases):
                    yield "inherits-own-class"
            case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=int() as value)]) if abs(value) > LARGE:
                yield "test-made-to-fail"
            case ast.BoolOp(op=ast.And()) if any(isinstance(value, ast.Constant) for value in node.values):
                yield "test-made-to-fail"
            case ast.Attribute(attr="training"):
                yield "asks-for-training-mode" if isinstance(node.ctx, ast.Load) else "sets-training-mode"

    def _attribute_set(self, target: ast.Attribute, value: ast.expr) -> Iterator[str]:
        base = self.names.dotted(target.value)
        if base is not None:
            yield "sets-library-flag" if isinstance(value, ast.Constant) else "patches-library"
        elif not is_self(target.value):
            made = isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and self._is_function(value.id))
            yield "replaces-method-of-object" if made else "sets-attribute-of-object"

    def _is_function(self, name: str) -> bool:
        return any(function.name == name for function in self.functions)

    def _call(self, node: ast.Call) -> Iterator[str]:
        label = self.names.label(node.func)
        if label == "setattr":
            base = self.names.dotted(node.args[0]) if node.args else None
            if base:
                yield "patches-library"
        if label in ("exec", "eval", "compile", "__import__") and node.args:
            yield "runs-built-code"
        if label in ("id",) or label.endswith(".data_ptr"):
            yield "uses-address"
        if label in ("float",) and node.args and isinstance(node.args[0], ast.Subscript):
            yield "reads-single-elements"
        if label.endswith(".item"):
            yield "reads-single-elements"
        if label == ".eval" and not node.args:
            yield "switches-to-eval"

    def _constructor(self, function: Function) -> Iterator[str]:
        for node in self._walk(function):
            if not isinstance(node, ast.Assign):
                continue
            if any(isinstance(item, ast.Attribute) and is_self(item.value) for item in targets(node)):
                attributes = {item.attr for item in ast.walk(node.value) if isinstance(item, ast.Attribute)}
                if attributes & {"weight", "bias"} and attributes & _DERIVING:
                    yield "derives-from-weights-once"

    def _is_state(self, node: ast.expr) -> bool:
        """Whether an expression is rooted in something that outlives a call: a module variable or a plain attribute."""
        while True:
            match node:
                case ast.Attribute() if is_self(node.value):
                    return node.attr in self.names.own_attributes and node.attr not in self.names.submodules
                case ast.Attribute() | ast.Subscript() | ast.Starred():
                    node = node.value
                case ast.Call():
                    if not isinstance(node.func, ast.Attribute):
                        return False
                    node = node.func.value
                case ast.Name():
                    return node.id in self.names.module_level
                case _:
                    return False

    def _state(self, function: Function) -> Iterator[str]:
        from_state: set[str] = set()
        for node in self._walk(function):
            match node:
                case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                    for target in targets(node):
                        if not isinstance(target, ast.Name) and self._is_state(target):
                            yield "counts-calls" if _is_count(node) else "keeps-across-calls"
                        elif isinstance(target, ast.Name) and node.value is not None and self._is_state(node.value):
                            from_state.add(target.id)
                case ast.Call(func=ast.Attribute(value=base, attr=attr)) if attr in _WRITERS and self._is_state(base):
                    yield "keeps-across-calls"
                case ast.Compare() if any(self._is_state(side) for side in (node.left, *node.comparators)):
                    if any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
                        yield "looks-up-state"
                    elif any(isinstance(op, ast.Gt | ast.GtE | ast.Lt | ast.LtE) for op in node.ops):
                        yield "gate-on-state"
        for node in self._walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                value = node.value
                if self._is_state(value) or (isinstance(value, ast.Name) and value.id in from_state):
                    yield "returns-state"
            if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Return):
                yield "returns-early"

    def _control(self, function: Function) -> Iterator[str]:
        for node in self._walk(function):
            match node:
                case ast.Try(handlers=handlers) if handlers:
                    yield "handles-failure-in-call"
                case ast.Compare():
                    inside = [self.names.label(item.func) for item in ast.walk(node) if isinstance(item, ast.Call)]
                    if any(label.rpartition(".")[2] in _CLOCKS and "." in label for label in inside):
                        yield "gate-on-clock"

    def _forward(self, function: Function) -> Iterator[str]:
        given = {item.arg for item in function.args.args[1:]}
        read = {item.id for item in self._walk(function) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)}
        if given - read:
            yield "ignores-an-input"
        yield from self._mutation(function, given)
        attributes = [item for item in self._walk(self.tree) if isinstance(item, ast.Attribute)]
        if self.names.submodules - {item.attr for item in attributes if isinstance(item.ctx, ast.Load)}:
            yield "never-uses-a-submodule"
        for node in self._walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from self._returned(function, node.value)
        lows = {item.attr for item in self._walk(function) if isinstance(item, ast.Attribute)} & _LOW
        if lows:
            yield "lowers-precision-in-call"

    def _mutation(self, function: Function, given: set[str]) -> Iterator[str]:
        assigned = [item for node in self._walk(function) if isinstance(node, ast.Assign) for item in targets(node)]
        fresh = {item.id for item in assigned if isinstance(item, ast.Name)}
        for node in self._walk(function):
            match node:
                case ast.Assign() | ast.AugAssign():
                    for target in targets(node):
                        stored = isinstance(target, ast.Subscript) or isinstance(node, ast.AugAssign)
                        if stored and _root(target) in given - fresh:
                            yield "writes-into-an-input"
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)):
                    if name in given - fresh and attr.endswith("_") and not attr.endswith("__"):
                        yield "writes-into-an-input"
                case ast.keyword(arg="out", value=ast.Name(id=name)) if name in given:
                    yield "writes-into-an-input"

    def _returned(self, function: Function, value: ast.expr) -> Iterator[str]:
        calls = {self.names.label(item.func).rpartition(".")[2] for item in ast.walk(value) if isinstance(item, ast.Call)}
        if calls & _FILLS:
            yield "returns-a-constant-fill"
        if calls & {"expand", "expand_as", "as_strided", "broadcast_to"}:
            yield "returns-a-view-of-little"
        empty = calls & _EMPTIES
        if isinstance(value, ast.Name):
            assignments = [node for node in self._walk(function) if isinstance(node, ast.Assign)]
            made = [node for node in assignments if any(_root(item) == value.id for item in targets(node))]
            uses = sum(isinstance(item, ast.Name) and item.id == value.id for item in self._walk(function))
            if made and isinstance(made[0].value, ast.Call) and uses <= len(made) + 1:
                empty = {self.names.label(made[0].value.func).rpartition(".")[2]} & _EMPTIES
        if empty:
            yield "returns-uninitialised-memory"

    def _waiting(self) -> Iterator[str]:
        calls = [self.names.label(node.func) for node in self._walk(self.tree) if isinstance(node, ast.Call)]
        last = [label.rpartition(".")[2] for label in calls]
        starts = {"Thread", "submit", "apply_async", "start_new_thread"} & set(last)
        if starts and not {"join", "result", "get", "wait", "map"} & set(last):
            yield "starts-and-never-waits"


def _is_count(node: ast.stmt) -> bool:
    return isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
