"""Cases of `tests/exploits` as a checker may see them: what they do, without what they say about themselves.

A file of the corpus says in its docstring that it cheats, and switches between cheating and honesty by a constant. Shown
as it is, its verdict could be read off. `plain` makes of it what a policy might have written:

1. `MODE` is replaced by its value and everything that follows from it is folded: branches never taken, conditions always
   true, code after a return.
2. The corpus's own constants (`TASK`, `EXPECT`, `MODE`, ...), docstrings and comments go.
3. What nothing refers to any more goes: functions, classes, imports, variables that are only written.
4. Functions, classes, module variables and private attributes get neutral names (`helper_1`, `Type_1`, `value_1`), and so
   do names of extensions and files in strings that speak of the corpus. Local variables, other strings and library
   names stay.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import nn

CONSTANTS = frozenset({"TASK", "DEVICE", "NEEDS", "EXPECT", "EXPECT_LABELS", "IN_PROCESS", "NAIVE", "MODE"})
_TELLING = re.compile(r"\b[a-z]\d\d_\w+|\bhonest_\w+|\b(?:decoy|lazy)\b")
_GROWERS = frozenset({"append", "extend", "add", "update", "setdefault", "insert"})


def plain(source: str, mode: str | None = None, *, rename: bool = True) -> str:
    """The text of a case with `MODE` set to `mode`, or of one without a switch; with its own names if not `rename`."""
    tree = ast.parse(source)
    tree.body = [item for item in tree.body if not _is_corpus_constant(item)]
    tree = _Fold(mode).visit(tree)
    _drop_docstrings(tree)
    _truncate(tree)
    while _sweep(tree, leftovers=mode == "correct"):
        pass
    if rename:
        _Rename(tree).visit(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = _TELLING.sub("part", node.value)
            elif isinstance(node, ast.Attribute):
                node.attr = _TELLING.sub("part", node.attr)
    return _unparse(tree)


def _is_corpus_constant(item: ast.stmt) -> bool:
    return isinstance(item, ast.Assign) and any(isinstance(name, ast.Name) and name.id in CONSTANTS for name in item.targets)


class _Fold(ast.NodeTransformer):
    """Replace MODE and fold what follows from it."""

    def __init__(self, mode: str | None) -> None:
        self._mode = mode

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._mode) if node.id == "MODE" and self._mode is not None else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Compare(
                left=ast.Constant(value=str() as left), ops=[op], comparators=[ast.Constant(value=str() as right)]
            ):
                return ast.Constant((left == right) == isinstance(op, ast.Eq))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        neutral = isinstance(node.op, ast.And)
        values = [value for value in node.values if not (isinstance(value, ast.Constant) and value.value is neutral)]
        for value in values:
            if isinstance(value, ast.Constant) and value.value is (not neutral):
                return value
        if not values:
            return ast.Constant(neutral)
        return values[0] if len(values) == 1 else ast.BoolOp(node.op, values)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="int"), args=[ast.Constant(value=bool() as value)]):
                return ast.Constant(int(value))
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Subscript(value=ast.Dict(keys=keys, values=values), slice=ast.Constant(value=str() as wanted)):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == wanted:
                        return value
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        return [] if isinstance(node.test, ast.Constant) and not node.test.value else node


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or isinstance(node, ast.If | ast.For | ast.While | ast.With):
            continue
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            del body[0]


def _truncate(tree: ast.Module) -> None:
    """Cut statements after a return or raise, and fill blocks that became empty."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list) or (block and not isinstance(block[0], ast.stmt)):
                continue
            for index, item in enumerate(block):
                if isinstance(item, ast.Return | ast.Raise | ast.Continue):
                    del block[index + 1 :]
                    break
            if name == "body" and not block and not isinstance(node, ast.Module):
                block.append(ast.Pass())


def _sweep(tree: ast.Module, *, leftovers: bool) -> bool:
    """Take out what nothing refers to; whether anything went.

    With `leftovers`, also containers and attributes that are only written. In a cheat these may be the cheat itself.
    """
    names, attributes = _loads(tree, leftovers)
    sweeper = _Sweep(names, attributes, leftovers)
    sweeper.visit(tree)
    _truncate(tree)
    return sweeper.changed


def _loads(tree: ast.Module, leftovers: bool) -> tuple[set[str], set[str]]:
    """Names and attributes that are read; with `leftovers`, without those that are only read to be written into."""
    ignored: set[ast.AST] = set()
    for node in ast.walk(tree) if leftovers else ():
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                while isinstance(target, ast.Subscript):
                    target = target.value
                    ignored.add(target)
        if _grows(node) is not None:
            ignored.add(_grows(node))  # type: ignore[arg-type]
    names = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in ignored
    }
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in ignored
    }
    for node in ast.walk(tree):
        # A function that only refers to itself is not referred to.
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = [item for item in ast.walk(node) if isinstance(item, ast.Name) and item.id == node.name]
            everywhere = [item for item in ast.walk(tree) if isinstance(item, ast.Name) and item.id == node.name]
            if inside and len(inside) == len(everywhere):
                names.discard(node.name)
    return names, attributes


def _grows(node: ast.AST) -> ast.expr | None:
    """The container of a statement like `container.append(item)`."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() | ast.Attribute() as base, attr=attr))) if (
            attr in _GROWERS
        ):
            return base
    return None


class _Sweep(ast.NodeTransformer):
    def __init__(self, names: set[str], attributes: set[str], leftovers: bool) -> None:
        self._names, self._attributes, self._leftovers = names, attributes, leftovers
        self._class: list[str] = []
        self.changed = False

    def _dead(self, target: ast.expr | None) -> bool:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Tuple):
            return all(self._dead(item) for item in target.elts)
        if isinstance(target, ast.Name):
            return target.id not in self._names
        own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
        return (
            self._leftovers
            and own
            and isinstance(target, ast.Attribute)
            and target.attr.startswith("_")
            and target.attr not in self._attributes
        )

    def _gone(self) -> None:
        self.changed = True

    def visit_Assign(self, node: ast.Assign) -> Any:
        return self._gone() if all(self._dead(target) for target in node.targets) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        return self._gone() if isinstance(node.target, ast.Subscript | ast.Attribute) and self._dead(node.target) else node

    def visit_Expr(self, node: ast.Expr) -> Any:
        base = _grows(node)
        return self._gone() if self._leftovers and base is not None and self._dead(base) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        method = bool(self._class)
        kept = (
            node.name in self._attributes
            or hasattr(nn.Module, node.name)
            or node.name.startswith("__")
            or node.decorator_list
        )
        if (method and not kept) or (not method and node.name not in self._names):
            return self._gone()
        outside, self._class = self._class, []
        self.generic_visit(node)
        self._class = outside
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        if node.name not in self._names and node.name != "ModelNew":
            return self._gone()
        self._class.append(node.name)
        self.generic_visit(node)
        self._class.pop()
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        return self._gone() if all(isinstance(item, ast.Pass) for item in node.body) or not node.body else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return self._gone() if not node.orelse and all(isinstance(item, ast.Pass) for item in node.body) else node

    def visit_Import(self, node: ast.Import) -> Any:
        return self._imports(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return self._imports(node)

    def _imports(self, node: ast.Import | ast.ImportFrom) -> Any:
        kept = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in self._names]
        if len(kept) < len(node.names):
            self.changed = True
        node.names = kept
        return node if kept else None


class _Rename(ast.NodeTransformer):
    """Neutral names for what the author named."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: dict[str, str] = {}
        self._attributes: dict[str, str] = {}
        for item in tree.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                self._give(self._names, item.name, "helper")
            elif isinstance(item, ast.ClassDef) and item.name != "ModelNew":
                self._give(self._names, item.name, "Type")
            for target in (
                ast.walk(item) if isinstance(item, ast.Assign | ast.For | ast.If | ast.While | ast.With | ast.Try) else ()
            ):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    self._give(self._names, target.id, "value")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not _is_library(method.name):
                        self._give(self._attributes, method.name, "method")
            match node:
                case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store(), attr=attr):
                    if attr.startswith("_") and not _is_library(attr):
                        self._give(self._attributes, attr, "_item")

    @staticmethod
    def _give(table: dict[str, str], name: str, kind: str) -> None:
        if name not in table and not name.startswith("__"):
            number = 1 + sum(value.startswith(kind + "_") for value in table.values())
            table[name] = f"{kind}_{number}"

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._names.get(node.id, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        node.attr = self._attributes.get(node.attr, node.attr)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.name = self._names.get(node.name) or self._attributes.get(node.name, node.name)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        self.generic_visit(node)
        node.name = self._names.get(node.name, node.name)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.name = self._names.get(node.name, node.name)
        return node


def _is_library(name: str) -> bool:
    return name.startswith("__") or hasattr(nn.Module, name) or hasattr(torch.Tensor, name) or name == "forward"


def _unparse(tree: ast.Module) -> str:
    """Text of a tree with multi-line strings, such as C++ code, written as such."""
    texts: list[str] = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "\n" in node.value.strip()
            and '"""' not in node.value
        ):
            texts.append(node.value)
            node.value = f"multi-line-{len(texts) - 1}"
    text = ast.unparse(ast.fix_missing_locations(tree))
    for index, value in enumerate(texts):
        prefix = "r" if "\\" in value else ""
        text = text.replace(f"'multi-line-{index}'", f'{prefix}"""{value}"""')
    return text + "\n"
