"""What the names of a candidate stand for, so that its structure can be compared with the names taken out."""

from __future__ import annotations

import ast
import builtins
import io
import tokenize
from dataclasses import dataclass, field
from typing import TypeAlias

_BUILTINS = frozenset(dir(builtins))
_KEPT_METHODS = frozenset({"forward", "__init__"})
_USUAL = {"nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy", "tl": "triton.language"}
"""What names stand for that a snippet uses without importing them."""
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Names:
    """Where each name of a module comes from."""

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
    """Whether an expression is the name `self`."""
    return isinstance(node, ast.Name) and node.id == "self"


def targets(node: ast.stmt) -> list[ast.expr]:
    """What an assignment assigns to, tuples taken apart; nothing for other statements."""
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
