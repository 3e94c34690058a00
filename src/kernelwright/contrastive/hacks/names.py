"""Resolves what the names of a candidate stand for, so that structures can be compared without names."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from kernelwright.rewrites.emit import REFERENCE_NOTE

_BUILTINS = frozenset(dir(builtins))
_KEPT_METHODS = frozenset({"forward", "__init__"})
_USUAL = {"nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy", "tl": "triton.language"}
"""Modules behind the usual names that a snippet uses without importing them."""
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Names:
    """The origin of each name of a module."""

    imported: dict[str, str] = field(default_factory=dict)
    """Name to dotted path: `nn` to `torch.nn`."""
    bound: set[str] = field(default_factory=set)
    """Names that the module itself gives something to, at any depth."""
    module_level: set[str] = field(default_factory=set)
    """Variables of the module, without its functions, classes and imports."""
    own_attributes: set[str] = field(default_factory=set)
    """Attributes of `self` that the module assigns, and its methods."""
    submodules: set[str] = field(default_factory=set)
    """Attributes of `self` that hold an `nn.Module` or a parameter, going by what is assigned."""

    @classmethod
    def of(cls, tree: ast.Module) -> Names:
        """Collect the names of a module."""
        names = cls()
        for node in ast.walk(tree):
            names._visit(node)
        for item in tree.body:
            for target in targets(item):
                if isinstance(target, ast.Name):
                    names.module_level.add(target.id)
        return names

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    head = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.imported[alias.asname or head] = head
            case ast.ImportFrom():
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}".lstrip(".")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.bound.add(node.name)
                self.bound |= _arguments(node.args)
            case ast.Lambda():
                self.bound |= _arguments(node.args)
            case ast.ClassDef():
                self.bound.add(node.name)
                methods = {item.name for item in node.body if isinstance(item, Function)}
                self.own_attributes |= {name for name in methods - _KEPT_METHODS if not name.startswith("__")}
            case ast.Name(ctx=ast.Store()):
                self.bound.add(node.id)
            case ast.ExceptHandler(name=str() as name):
                self.bound.add(name)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                self._visit_assignment(node)

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        for target in targets(node):
            if isinstance(target, ast.Attribute) and is_self(target.value):
                self.own_attributes.add(target.attr)
                made_by = self.dotted(node.value.func) if isinstance(node.value, ast.Call) else None
                if made_by is not None and made_by.startswith(("torch.nn.", "nn.")):
                    self.submodules.add(target.attr)

    def dotted(self, node: ast.expr) -> str | None:
        """`torch.cuda.Stream` for an expression that names something of a library; None for anything else."""
        if isinstance(node, ast.Name):
            if node.id in self.imported:
                return self.imported[node.id]
            known = node.id in self.bound or node.id in _BUILTINS or node.id == "self"
            return None if known else _USUAL.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def label(self, node: ast.expr) -> str:
        """A name, attribute or call target without the spelling that its author chose."""
        dotted = self.dotted(node)
        if dotted is not None:
            return dotted
        match node:
            case ast.Name():
                if node.id in _BUILTINS and node.id not in self.bound:
                    return node.id
                return "self" if node.id == "self" else "global" if node.id in self.module_level else "local"
            case ast.Attribute():
                if is_self(node.value) and node.attr in self.own_attributes:
                    return "self.own"
                return "." + node.attr
            case ast.Call():
                return f"{self.label(node.func)}()"
            case ast.Subscript():
                return f"{self.label(node.value)}[]"
        return type(node).__name__


def _arguments(given: ast.arguments) -> set[str]:
    named = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return {item.arg for item in named if item is not None}


def is_self(node: ast.AST) -> bool:
    """True when an expression is the name `self`."""
    return isinstance(node, ast.Name) and node.id == "self"


def targets(node: ast.stmt) -> list[ast.expr]:
    """The targets of an assignment, tuples taken apart; nothing for other statements."""
    match node:
        case ast.Assign():
            waiting = list(node.targets)
        case ast.AnnAssign() | ast.AugAssign() | ast.For():
            waiting = [node.target]
        case _:
            return []
    found: list[ast.expr] = []
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            found.append(target.value if isinstance(target, ast.Starred) else target)
    return found


def parse(source: str) -> ast.Module | None:
    """The syntax tree; None for text that is not Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def without_docstrings(tree: ast.Module) -> ast.Module:
    """The tree with docstrings taken out, in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and _has_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def without_handovers(tree: ast.Module) -> ast.Module:
    """The tree without the guards that give inputs of another kind to the reference, in place.

    `if not (x.shape == (8, 8) and x.dtype is torch.float32): return super().forward(x)` at the beginning of `forward` says
    for which inputs the rest is meant. It is what keeps a drop-in right for all others, and no early answer. A test of
    anything but the inputs' kind and what the constructor settled, such as a count of calls or a value, is no such guard.
    What the built-in policy writes to tell a user that the reference runs goes too.
    """
    noting = {ast.dump(node) for node in without_docstrings(ast.parse(REFERENCE_NOTE)).body if isinstance(node, Function)}
    tree.body = [node for node in tree.body if ast.dump(node) not in noting]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function):
            node.body = [line for line in node.body if not _is_note(line)] or [ast.Pass()]
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    settled = _stored(node for node in functions if node.name == "__init__")
    settled -= _stored(node for node in functions if node.name != "__init__")
    for node in functions:
        if node.name == "forward":
            inputs = [item.arg for item in (*node.args.posonlyargs, *node.args.args)][1:]
            while len(node.body) > 1 and _is_handover(node.body[0], inputs, settled):
                del node.body[0]
    return tree


_NOTING = re.compile(
    r"_note_reference|torch\.is_grad_enabled|torch\.cuda\.get_device_properties|\w+\.(is_contiguous|stride)"
)
"""Calls in the method that notes a call of the reference."""
_KIND = frozenset(
    {"shape", "dtype", "device", "type", "ndim", "layout", "is_cuda", "is_contiguous", "stride", "size", "dim"}
)
"""Attributes and methods of a tensor that say of which kind it is, whatever it holds."""
_KIND_TESTS = (
    ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Tuple, ast.Constant,
    ast.boolop, ast.unaryop, ast.cmpop, ast.Load,
)  # fmt: skip


def _stored(functions: Iterable[Function]) -> set[str]:
    """Names of the attributes that functions assign, of whatever object."""
    nodes = (node for function in functions for node in ast.walk(function))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def _is_note(line: ast.stmt) -> bool:
    """True for what notes that the reference runs, as the built-in policy writes it."""
    text = ast.unparse(line)
    if isinstance(line, ast.FunctionDef):
        calls = {ast.unparse(node.func) for node in ast.walk(line) if isinstance(node, ast.Call)}
        return line.name == "_runs_reference" and all(_NOTING.fullmatch(call) for call in calls)
    return text == "last_path = None" or text.startswith(
        ("self._runs_reference(", "self.__dict__['last_path'] = ", "if not self._is_as_traced:\n    _note_reference(self, ")
    )


def _is_handover(statement: ast.stmt, inputs: list[str], settled: set[str]) -> bool:
    match statement:
        case ast.If(
            test=test,
            body=[
                ast.Return(
                    ast.Call(
                        func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr="forward"),
                        args=given,
                        keywords=[],
                    )
                )
            ],
            orelse=[],
        ):
            same = [item.id if isinstance(item, ast.Name) else None for item in given] == inputs
            return same and _asks_for_kind(test, inputs, settled)
    return False


def _asks_for_kind(test: ast.AST, inputs: list[str], settled: set[str]) -> bool:
    """True when an expression depends on nothing but the inputs' kind and what the constructor settled."""
    match test:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr)):
            # A kernel of its own has no derivative.
            return attr == "is_grad_enabled"
        case ast.Call(func=ast.Attribute() as method, args=[], keywords=[]):
            return _asks_for_kind(method, inputs, settled)
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant()]):
            return name in inputs
        case ast.Attribute(value=ast.Name(id="torch")):
            return True
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name), attr="device"), attr="type"):
            return name in inputs
        case ast.Attribute(value=ast.Name(id=name), attr=attr):
            return (name in inputs and attr in _KIND) or (name == "self" and attr in settled)
    parts = ast.iter_child_nodes(test)
    return isinstance(test, _KIND_TESTS) and all(_asks_for_kind(part, inputs, settled) for part in parts)


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def code_only(source: str) -> str:
    """The text as it is, but without comments, docstrings and the blank lines that they leave.

    What a candidate says about itself is no evidence, and may be written to be read by a checker. Text that is not
    Python is returned unchanged. Comments inside strings, such as those of CUDA code, stay: there they are data.
    """
    tree = parse(source)
    if tree is None:
        return source
    lines = source.splitlines(keepends=True)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError):
        return source
    cuts = [(*token.start, *token.end, "") for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and _has_docstring(node):
            text = node.body[0]
            begin, end = _characters(lines, text.lineno, text.col_offset), text.end_lineno or text.lineno
            filler = "" if isinstance(node, ast.Module) or len(node.body) > 1 else "pass"
            cuts.append((text.lineno, begin, end, _characters(lines, end, text.end_col_offset or 0), filler))
    for begin_line, begin, end_line, end, filler in sorted(cuts, reverse=True):
        first, last = lines[begin_line - 1], lines[end_line - 1]
        lines[begin_line - 1 : end_line] = [first[:begin] + filler + last[end:]]
    return _squeezed("".join(lines), source)


def _characters(lines: list[str], number: int, offset_bytes: int) -> int:
    """ast counts bytes in a line; strings are cut by characters."""
    return len(lines[number - 1].encode()[:offset_bytes].decode(errors="ignore"))


def _squeezed(text: str, original: str) -> str:
    # Blank lines inside a multi-line string belong to it, so only a text without any is squeezed.
    kept = text.strip() + "\n"
    if '"""' not in text and "'''" not in text:
        kept = "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"
    return kept if parse(kept) is not None else original
