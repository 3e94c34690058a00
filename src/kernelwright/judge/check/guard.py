"""Reads labels and advice from a candidate's text.

Nothing here decides. Labels describe legal things a user wants to know; advice names patterns known from cheats and is
kept with the record for a closer look. Text can be written to hide from all of it: see the dynamic checks.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

import torch

from kernelwright.records import Label

PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of Python's parser; the last two where a text is nested too deeply."""
READ_CHARACTERS = 1 << 18
"""Characters of a candidate that are read here, since a tree of more may take gigabytes. Patterns look at most a few hundred
characters ahead, since otherwise their time grows with the square of a text."""
_CUSTOM = re.compile(
    r"__global__|extern\s+\"C\"|@triton\.jit|@jit\b.{0,200}triton|load_inline\s*\(|cpp_extension\.load\s*\(|\bcupy\b|RawKernel"
)
_GRAPH = re.compile(r"CUDAGraph|make_graphed_callables|reduce-overhead|cudaGraph|mode\s*=\s*['\"]max-autotune['\"]")
_WRAPPER = re.compile(r"torch\.compile|CUDAGraph|make_graphed_callables|torch\.jit\.(trace|script|freeze)")
_TO_16_BITS = r"(?:half\(\)|bfloat16\(\)|(?:to|type)\((?:dtype=)?(?:\w+\.)*b?float16\b[^)]{0,200}\))"
_SPLIT = re.compile(
    # What rounding to 16 bits left of a value: in PyTorch or Triton, in one expression or two, and in CUDA C++.
    rf"\b(?P<a>\w+) - (?P=a)\.{_TO_16_BITS}"
    rf"|\b(?P<b>\w+) = (?P<c>\w+)\.{_TO_16_BITS}[\s\S]{{0,400}}?\b(?P=c) - (?P=b)\b"
    r"|\b(?P<d>\w+) *= *__float2(?:half|bfloat16)\w*\((?P<e>\w+)\)"
    r"[\s\S]{0,400}?\b(?P=e) *- *__(?:half|bfloat16)2float\((?P=d)\)"
    r"|input_precision=['\"]bf16x"
)
"""Code that takes the operands of a product in 16-bit pieces."""
_WHOLE = re.compile(rf"\.{_TO_16_BITS}|__float2(?:half|bfloat16)")
"""Code that rounds values to 16 bits."""
_LABELS = {Label.CUSTOM_KERNEL: _CUSTOM, Label.SPLIT_PRECISION: _SPLIT, Label.CUDA_GRAPH: _GRAPH}

_ADVICE: Mapping[str, re.Pattern[str]] = {
    "reads stack frames": re.compile(r"\b_getframe\b|inspect\.(stack|currentframe)|\bgc\.get_(objects|referrers)"),
    "patches a clock or an event": re.compile(r"(perf_counter\w{0,20}|elapsed_time|synchronize|time\.time)\s*=[^=]"),
    "uses other processes or raw memory": re.compile(r"\bctypes\b|/proc/|\bptrace\b|os\.(kill|fork|_exit)|\bsubprocess\b"),
    "writes files or descriptors": re.compile(r"os\.(write|dup2)|\bopen\s*\([^)]{0,400}['\"][wa]"),
    "starts threads or streams": re.compile(
        r"\bthreading\b|concurrent\.futures|cudaSt\w{0,40}##?|cuda\.Stream|cudaStreamCreate"
    ),
    "keeps results by pointer or identity": re.compile(r"\bdata_ptr\s*\(\)|\bid\s*\("),
    "builds names at run time": re.compile(
        r"\bexec\s*\(|\beval\s*\((?!\s*\))|__import__|getattr\([^,]{1,200},\s*['\"][^'\"]{0,200}['\"]\s*\+"
    ),
    "subclasses torch.Tensor": re.compile(r"class\s+\w+\s*\(\s*(torch\.)?Tensor\s*\)|__torch_(function|dispatch)__"),
    "lowers precision": re.compile(
        r"\.half\s*\(|\bfloat16\b|\bbfloat16\b|autocast|allow_tf32\s*=\s*True|set_float32_matmul"
    ),
    "hides a failed kernel": re.compile(r"(?s)\A(?>.*?(?:load_inline|triton|cpp_extension)).*\bexcept\b"),
    "depends on the training flag": re.compile(r"if\s+(not\s+)?self\.training|\.training\s*=\s*False|self\.eval\s*\("),
}


_MODES = re.compile(
    r"[Bb]atch_?[Nn]orm|[Ii]nstance_?[Nn]orm|[Dd]ropout|spectral_norm|[Rr][Rr]e[Ll][Uu]|LSTM|GRU|RNN|Multihead|Transformer|\.training\b"
)
"""Words of a reference that differs between training and evaluation, as attention may; a recurrent network passes it on."""
RESPELLED = "The reference's operators in other words"
"""How the built-in policy describes a rewrite that saves a compiler nothing; whoever else writes it gets a label by it."""


def advice(source: str) -> tuple[str, ...]:
    """Patterns known from cheats that occur in the code; comments and docstrings are left out."""
    text = _code_only(source)
    return tuple(sorted(name for name, pattern in _ADVICE.items() if pattern.search(text)))


def static_labels(source: str, reference: str) -> set[Label]:
    """Labels that follow from the candidate's text, beside the reference's."""
    text, given = _code_only(source), _code_only(reference)
    labels = {label for label, pattern in _LABELS.items() if pattern.search(text)}
    if _WHOLE.search(text) and Label.SPLIT_PRECISION not in labels and not _WHOLE.search(given):
        labels.add(Label.FP16_OPERANDS)
    wraps = Label.CUSTOM_KERNEL not in labels and _WRAPPER.search(text)
    if wraps and (RESPELLED in source or _same_operators(source, reference)):
        labels.add(Label.WRAPPER_ONLY)
    usual = {"depends on the training flag"} if _MODES.search(given) else set()
    if set(advice(source)) - set(advice(reference)) - usual:
        labels.add(Label.SUSPICIOUS_SOURCE)
    return labels


def _same_operators(source: str, reference: str) -> bool:
    """Whether the candidate's classes call PyTorch's operators just as often as the reference's do."""
    mine, theirs = _operators(source), _operators(reference)
    if mine is None or theirs is None or theirs - mine:
        return False
    return not any(
        hasattr(place, name) for name in mine - theirs for place in (torch, torch.nn, torch.nn.functional, torch.Tensor)
    )


def parse(source: str) -> ast.Module:
    """The syntax tree of a file with this text; that of an empty one where it is too long to look at.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is no Python (`PARSE_ERRORS`).
    """
    # As bytes: a file may begin with a byte-order mark, or name another encoding.
    return ast.parse(source.encode() if len(source) <= READ_CHARACTERS else b"", "candidate.py")


@lru_cache(maxsize=16)
def _code_only(source: str) -> str:
    """The source without comments and docstrings; other strings stay, since CUDA code is one."""
    if len(source) > READ_CHARACTERS:
        return source[:READ_CHARACTERS]
    try:
        tree = parse(source)
    except PARSE_ERRORS:
        return source
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in (one for one in ast.walk(tree) if isinstance(one, documented)):
        if ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    try:
        text = ast.unparse(tree)
    except PARSE_ERRORS:  # it takes three frames for each term of a sum, and writes no integer of 4,300 digits
        return source
    # It escapes newlines in strings; regular expressions over C++ code need them as they were.
    return text.replace("\\n", "\n")


_WRAPPER_NAMES = frozenset(
    {
        "compile",
        "script",
        "trace",
        "freeze",
        "jit",
        "CUDAGraph",
        "graph",
        "replay",
        "capture_begin",
        "capture_end",
        "Stream",
        "stream",
        "current_stream",
        "wait_stream",
        "synchronize",
        "copy_",
        "clone",
        "empty_like",
        "make_graphed_callables",
        "append",
        "__init__",
        "detach",
        "ModelNew",
        "Model",
        "is_available",
        "randn",
        "rand",
        "randint",
        "get",
        "items",
        "eval",
        "cuda",
        "to",
        "stride",
        "data_ptr",
        "modules",
        "is_grad_enabled",
        "get_rng_state",
        "set_rng_state",
    }
)
_ARITHMETIC = frozenset({"abs", "divmod", "max", "min", "pow", "round", "sum"})
"""Functions of Python's own that are operators where they are given tensors; its others hold a wrapper together."""


def _operators(source: str) -> Counter[str] | None:
    """Names called inside the classes of a module and the functions these call, as a measure of which operators it runs."""
    try:
        tree = parse(source)
    except PARSE_ERRORS:
        return None
    names: Counter[str] = Counter()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    replaced = {base.id for cls in classes if _replaces_forward(cls) for base in cls.bases if isinstance(base, ast.Name)}
    for cls in classes:
        for item in cls.body:
            if cls.name in replaced and isinstance(item, ast.FunctionDef) and item.name == "forward":
                continue
            nodes = list(ast.walk(item))
            for node in nodes:  # which grows by the functions that are called
                if isinstance(node, ast.Call):
                    called = functions.pop(node.func.id, None) if isinstance(node.func, ast.Name) else None
                    nodes += [] if called is None else ast.walk(called)
                    bare = isinstance(node.func, ast.Name)
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    if name not in _WRAPPER_NAMES and not (bare and name not in _ARITHMETIC and hasattr(builtins, name)):
                        names[name] += 1
    return names


def _replaces_forward(cls: ast.ClassDef) -> bool:
    """Whether a class has a `forward` of its own and never calls its base's."""
    own = any(isinstance(item, ast.FunctionDef) and item.name == "forward" for item in cls.body)
    return own and not any(
        isinstance(node, ast.Attribute)
        and node.attr == "forward"
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        for node in ast.walk(cls)
    )
