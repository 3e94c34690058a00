"""Computes features of a candidate's syntax tree, to find structurally similar code, and its identity under renaming."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from kernelwright.contrastive.hacks.names import Function, Names, parse, without_docstrings, without_handovers
from kernelwright.contrastive.hacks.shapes import shapes
from kernelwright.records import sha256_of

SOURCE_LIMIT = 200_000
"""Characters of a candidate that are looked at; our choice, ten times the longest kernel we have seen."""
SHAPE = "shape:"
PATH = "path:"
"""Prefixes of features that are shapes (`shapes.py`), and paths of the tree."""

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

    def rename(name: str) -> str:
        return renamed.setdefault(name, f"v{len(renamed)}")

    for node in ast.walk(tree):
        match node:
            case ast.Name() if node.id in names.bound:
                node.id = rename(node.id)
            case ast.arg():
                node.arg = rename(node.arg)
            case ast.Attribute() if node.attr in names.own_attributes:
                node.attr = rename(node.attr)
            case ast.ClassDef() if node.name != "ModelNew":
                node.name = rename(node.name)
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
            node.name = rename(node.name)
    return sha256_of(ast.dump(tree))
