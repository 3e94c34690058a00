"""Computes features of a candidate's syntax tree, to find structurally similar code, and its identity under renaming.

Some features are shapes that cheats have in common, such as "writes into something that outlives the call" or "patches a
library". Each alone is often innocent: a workspace outlives the call too. They find similar known hacks and are no verdict.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from kernelwright.contrastive.hacks.names import (
    Function,
    Names,
    is_self,
    parse,
    targets,
    without_docstrings,
    without_handovers,
)
from kernelwright.records import sha256_of

SOURCE_LIMIT = 200_000
"""Characters of a candidate that are looked at; our choice, ten times the longest kernel we have seen."""
SHAPE = "shape:"
PATH = "path:"
"""Prefixes of features that are shapes, and paths of the tree."""

_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]{2,}")
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+|[^\s\w]")
_CODE_STRING = re.compile(r"[;{]\s*\n")
_EXTRA_TYPES = (ast.Expr, ast.Load, ast.Store, ast.Del, ast.arguments, ast.arg, ast.alias)


def features(source: str) -> frozenset[str]:
    """The features of a module's text; words alone where it is not Python.

    They are labels of nodes, pairs and triples of labels along paths of the tree, words in strings, tokens of C++ and CUDA
    code in strings, imported modules, and shapes. Names that the author chose are abstracted to the role they play.
    """
    source = source[:SOURCE_LIMIT]
    tree = parse(source)
    if tree is None:
        return frozenset(f"word:{word}" for word in _WORD.findall(source))
    without_handovers(without_docstrings(tree))
    names = Names.of(tree)
    found = {SHAPE + name for name in shapes(tree, names)}
    # An explicit stack, since generated code may be nested deeper than Python likes to recurse.
    waiting: list[tuple[ast.AST, str, str]] = [(tree, "", "")]
    while waiting:
        node, parent, grandparent = waiting.pop()
        label = _label(node, names)
        found.update(_own(node, label, names))
        if label is not None:
            found.add(f"{PATH}{parent}>{label}")
            found.add(f"{PATH}{grandparent}>{parent}>{label}")
            parent, grandparent = label, parent
        waiting.extend((child, parent, grandparent) for child in ast.iter_child_nodes(node))
    return frozenset(found)


def _own(node: ast.AST, label: str | None, names: Names) -> Iterator[str]:
    if label is not None:
        yield f"node:{label}"
    if isinstance(node, ast.Attribute | ast.Name):
        dotted = names.dotted(node)
        if dotted is not None:
            yield f"last:{dotted.rpartition('.')[2]}"
            yield f"module:{dotted.partition('.')[0]}"
        while dotted is not None and "." in dotted:
            yield f"name:{dotted}"
            dotted = dotted.rpartition(".")[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        text = node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
        words = _WORD.findall(text[:SOURCE_LIMIT])
        if _CODE_STRING.search(text):
            yield from (f"code:{word}" for word in words)
            yield from (f"code:{left} {right}" for left, right in pairwise(words))
        else:
            yield from (f"text:{word.lower()}" for word in words)


def _label(node: ast.AST, names: Names) -> str | None:
    """The name of a node in a path; None for nodes that say nothing."""
    match node:
        case ast.Call():
            return f"{names.label(node.func)}()"
        case ast.Attribute() | ast.Name():
            return names.label(node)
        case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.AugAssign():
            return f"{type(node).__name__}:{type(node.op).__name__}"
        case ast.Compare():
            return "Compare:" + ",".join(type(op).__name__ for op in node.ops)
        case ast.Constant(value=bool() | None):
            return str(node.value)
        case ast.Constant():
            return type(node.value).__name__
        case ast.keyword():
            return f"{node.arg}="
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return f"def {node.name}" if node.name.startswith("__") or node.name == "forward" else "def"
        case ast.operator() | ast.cmpop() | ast.unaryop() | ast.boolop() | ast.Import() | ast.ImportFrom():
            return None
    return None if isinstance(node, _EXTRA_TYPES) else type(node).__name__


def identity(source: str) -> str:
    """A hash that stays the same when names, numbers, comments and one-line strings of a module are changed.

    Raises:
        SyntaxError: the text is not Python.
    """
    tree = without_docstrings(ast.parse(source))
    names = Names.of(tree)
    renamed: dict[str, str] = {}

    for node in ast.walk(tree):
        match node:
            case ast.Name() if node.id in names.bound:
                node.id = _renamed(node.id, renamed)
            case ast.arg():
                node.arg = _renamed(node.arg, renamed)
            case ast.Attribute() if node.attr in names.own_attributes:
                node.attr = _renamed(node.attr, renamed)
            case ast.ClassDef() if node.name != "ModelNew":
                node.name = _renamed(node.name, renamed)
            case ast.Constant(value=bool() | None):
                pass
            case ast.Constant(value=str() as text):
                tokens = _TOKEN.findall(text) if _CODE_STRING.search(text) else []
                node.value = " ".join("0" if token.isdigit() else token for token in tokens)
            case ast.Constant(value=int() | float() | complex()):
                node.value = 0
            case ast.Constant(value=bytes()):
                node.value = b""
            case ast.Import() | ast.ImportFrom():
                node.names = sorted(node.names, key=lambda alias: alias.name)
        if isinstance(node, Function) and not node.name.startswith("__") and node.name != "forward":
            node.name = _renamed(node.name, renamed)
    return sha256_of(ast.dump(tree))


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
        """True when an expression is rooted in something that outlives a call: a module variable or a plain attribute."""
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


def _renamed(name: str, known: dict[str, str]) -> str:
    """The name that stands for one that an author chose: v0, v1 and so on, in order of appearance."""
    return known.setdefault(name, f"v{len(known)}")
