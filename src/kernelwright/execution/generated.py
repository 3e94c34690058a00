"""Takes back the judge's advice on what the built-in policy's generators write the same every time.

A CUDA graph needs a stream and looks where parameters lie; a C++ kernel is called through ctypes with addresses. In the
generators' own words these are no signs of a cheat. A definition is known by a hash of its exact text, and counts only
where nothing else in the module gives its name or its library's functions another meaning. The judge knows none of them, so
that this list decides nothing.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator

from kernelwright.judge.check import guard
from kernelwright.records import Evaluation, Label, Task

KNOWN = frozenset(
    {
        "656b1692362a7b63",  # _Recording, rewrites/wrappers.py
        "31994751de9ea881",  # _Recording with direct copies, the same
        "87c7d5e0e9f4a870",  # _beside, the same
        "4c1036089f312c63",  # _build, rewrites/templates/fused_build.py.txt
        "ccf202575904c163",  # _Launch, rewrites/templates/fused.triton.txt
        "25ee996d370bdd20",  # _FolderModules, tasks/source.py
        "6d84f3cd589ff08d",  # built, rewrites/templates/cuda_library.txt
        "4d393cd04b7b5009",  # library, rewrites/templates/split_product.cuda.txt
        "48e3f94389c98ffa",  # Product, the same
        "3088a0745eb2baab",  # two_halves, rewrites/templates/split_product.triton.txt
        "1c6c86e9d67e5c4a",  # split, the same
        "52be548a79f29435",  # recurrent_library, rewrites/templates/recurrent.cuda.txt
        "99d61ecc0e3fdbb0",  # Recurrent, the same
        "768bce88695525ec",  # _lay_tile, rewrites/templates/fp16_convolution.triton.txt
        "c8478f84e592eff3",  # _lay_filters, the same
        "2ee9bbdc7ce0f648",  # _Prepared, the same
    }
)
"""Hashes of definitions, by `digest`; a test compares them with what the generators write."""

_CALL = re.compile(
    r"_library\.fused_\d+\((?:ctypes\.c_void_p\(\w+\.data_ptr\(\)\), )*ctypes\.c_int64\((?:torch\.get_num_threads\(\)|1)\)\)"
)
"""Call of a C++ kernel: addresses are passed on, and nothing is kept."""
_SHARED = frozenset({"torch", "ctypes", "sys", "builtins", "subprocess", "os", "concurrent"})
"""Modules whose functions the definitions use."""


def digest(text: str) -> str:
    """Hash of a definition's text, in which the name of a library of kernels does not count."""
    return hashlib.sha256(re.sub(r"fused_[0-9a-f]{16}", "fused", text).encode()).hexdigest()[:16]


def without_advice_on_generated(evaluation: Evaluation, task: Task) -> Evaluation:
    """The evaluation without advice that only our generators' words give, nor `suspicious-source` where none is left."""
    if Label.SUSPICIOUS_SOURCE not in evaluation.labels:
        return evaluation
    text = beside_generated(evaluation.source)
    labels = set(evaluation.labels)
    if Label.SUSPICIOUS_SOURCE not in guard.static_labels(text, task.source):
        labels.remove(Label.SUSPICIOUS_SOURCE)
    checks = evaluation.checks | {"advice": list(guard.advice(text))}
    return evaluation.model_copy(update={"labels": tuple(sorted(labels)), "checks": checks})


def beside_generated(source: str) -> str:
    """A candidate's source without the definitions that are known; all of it where it cannot be read."""
    try:
        return ast.unparse(_without_known(guard.parse(source), source))
    except guard.PARSE_ERRORS:
        return source


def _without_known(tree: ast.Module, source: str) -> ast.Module:
    """The tree without known definitions, calls of the kernels that they build, and imports that only these use."""
    lines = source.split("\n")
    bound = Counter(_bound(tree))
    known = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and digest("\n".join(lines[_first_line(node) - 1 : node.end_lineno])) in KNOWN
        and bound[node.name] == 1
    }
    body = [node for node in tree.body if getattr(node, "name", None) not in known]
    if not known or any(_changes_library(node) for part in body for node in ast.walk(part)):
        return tree
    if "_build" in known and bound["_library"] == bound["ctypes"] == 1 and "_library = _build()" in map(ast.unparse, body):
        body = [_without_calls(node) for node in body]
    used = {node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
    unused = [
        f"import {name}" for name in ("ctypes", "subprocess", "concurrent.futures") if name.partition(".")[0] not in used
    ]
    body = [node for node in body if not (isinstance(node, ast.Import) and ast.unparse(node) in unused)]
    return ast.Module(body, tree.type_ignores)


def _first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _bound(tree: ast.Module) -> Iterator[str]:
    """Every name that something is bound to, as often as that happens."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names


def _changes_library(node: ast.AST) -> bool:
    """Whether a node may give a function of a module another meaning."""
    if isinstance(node, ast.Name):
        return node.id in ("setattr", "globals", "vars", "exec", "eval")
    if not isinstance(node, ast.Attribute):
        return False
    path = ast.unparse(node)
    changes = not isinstance(node.ctx, ast.Load) and path.partition(".")[0] in _SHARED
    return path == "sys.modules" or (changes and not path.startswith("torch.backends."))


def _without_calls(node: ast.stmt) -> ast.stmt:
    """A function that calls a C++ kernel, without that statement."""
    if not isinstance(node, ast.FunctionDef):
        return node
    kept = [part for part in node.body if not _CALL.fullmatch(ast.unparse(part))]
    node.body = kept or [ast.Pass()]
    return node
