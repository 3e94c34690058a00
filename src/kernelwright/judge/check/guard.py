"""Reads labels and advice from a candidate's text and its provenance.

Nothing here decides. Labels describe legal things a user wants to know; advice names patterns known from cheats and is
kept with the record for a closer look. Text can be written to hide from all of it: see the dynamic checks.

Two rules concern the built-in policy. Its record says by which techniques it made a candidate, and some of them only put
the reference's operators in other words. And its generators write some definitions the same every time, in which patterns
known from cheats are no sign of one: a CUDA graph needs a stream, and a C++ kernel is called through ctypes with addresses.
Such a definition is known by a hash of its exact text, never by what a candidate says of itself, and counts only where
nothing else in the module gives its name or its library's functions another meaning.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from kernelwright.records import Candidate, Label, Task

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
_RESPELLING = """
    remove-unused remove-noops share-common-subexpressions drop-indices write-out-row-losses canonical-activation
    canonical-softmax canonical-layer-norm compose-views einsum-to-product equal-layers rotate-before-transpose
    strength-reduction
"""
RESPELLING = frozenset(_RESPELLING.split())
"""Techniques of the built-in policy whose work torch.compile does by itself: behind it they are no optimisation."""
KNOWN = frozenset(
    {
        "7b7e2f67b54b9425",  # _Recording, rewrites/templates/wrapper_recording.py.txt
        "bfafb1f24e807509",  # _Recording with direct copies, the same
        "87c7d5e0e9f4a870",  # _beside, the same
        "4c1036089f312c63",  # _build, rewrites/templates/fused_build.py.txt
        "ccf202575904c163",  # _Launch, rewrites/templates/fused.triton.txt
        "25ee996d370bdd20",  # _FolderModules, tasks/data/folder_modules.txt
        "6d84f3cd589ff08d",  # built, rewrites/templates/cuda_library.txt
        "4d393cd04b7b5009",  # library, rewrites/templates/split_product.cuda.txt
        "48e3f94389c98ffa",  # Product, the same
        "56d1fbb8ba381bd1",  # two_halves, rewrites/templates/split_product.triton.txt
        "23b374536f1d48fa",  # split, the same
        "52be548a79f29435",  # recurrent_library, rewrites/templates/recurrent.cuda.txt
        "99d61ecc0e3fdbb0",  # Recurrent, the same
        "768bce88695525ec",  # _lay_tile, rewrites/templates/fp16_convolution.triton.txt
        "c8478f84e592eff3",  # _lay_filters, the same
        "2ee9bbdc7ce0f648",  # _Prepared, the same
        "32510ff98b304191",  # one_below_another, rewrites/rules/products.py
        "7bbaebe68818dbbb",  # fold_norms, rewrites/templates/relu_convolution.triton.txt
    }
)
"""Hashes of definitions, by `digest`; a test compares them with what the generators write."""

_CALL = re.compile(
    r"_library\.fused_\d+\((?:ctypes\.c_void_p\(\w+\.data_ptr\(\)\), )*ctypes\.c_int64\((?:torch\.get_num_threads\(\)|1)\)\)"
)
"""Call of a C++ kernel: addresses are passed on, and nothing is kept."""
_SHARED = frozenset({"torch", "ctypes", "sys", "builtins", "subprocess", "os", "concurrent"})
"""Modules whose functions the definitions use."""


class SourceReading(NamedTuple):
    """Labels and advice by a candidate's text and provenance."""

    labels: set[Label]
    advice: tuple[str, ...]


def read_candidate(candidate: Candidate, task: Task, forbidden: Collection[Label] = ()) -> SourceReading:
    """Labels and advice of a candidate, beside its task's text.

    What our generators write counts as a sign of a cheat only where settings forbid the label for such signs.
    """
    source = candidate.source
    labels = static_labels(source, task.source, candidate.techniques)
    if Label.SUSPICIOUS_SOURCE in labels and Label.SUSPICIOUS_SOURCE not in forbidden:
        source = without_generated(source)
        if Label.SUSPICIOUS_SOURCE not in static_labels(source, task.source):
            labels.remove(Label.SUSPICIOUS_SOURCE)
    return SourceReading(labels, advice(source))


def advice(source: str) -> tuple[str, ...]:
    """Patterns known from cheats that occur in the code; comments and docstrings are left out."""
    text = _code_only(source)
    return tuple(sorted(name for name, pattern in _ADVICE.items() if pattern.search(text)))


def static_labels(source: str, reference: str, techniques: Sequence[str] = ()) -> set[Label]:
    """Labels that follow from the candidate's text, beside the reference's, and from the techniques in its record.

    Techniques can earn a candidate a label and take none away, so that nothing is gained by claiming them.
    """
    text, given = _code_only(source), _code_only(reference)
    labels = {label for label, pattern in _LABELS.items() if pattern.search(text)}
    if _WHOLE.search(text) and Label.SPLIT_PRECISION not in labels and not _WHOLE.search(given):
        labels.add(Label.FP16_OPERANDS)
    wraps = Label.CUSTOM_KERNEL not in labels and _WRAPPER.search(text)
    respelled = len(techniques) > 1 and RESPELLING.issuperset(techniques[:-1])  # the last one is the wrapper
    if wraps and (respelled or _same_operators(source, reference)):
        labels.add(Label.WRAPPER_ONLY)
    usual = {"depends on the training flag"} if _MODES.search(given) else set()
    if set(advice(source)) - set(advice(reference)) - usual:
        labels.add(Label.SUSPICIOUS_SOURCE)
    return labels


def _same_operators(source: str, reference: str) -> bool:
    """True if the candidate's classes call PyTorch's operators just as often as the reference's do."""
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


_WRAPPING = """
    compile script trace freeze jit CUDAGraph graph replay capture_begin capture_end Stream stream current_stream
    wait_stream synchronize copy_ clone empty_like make_graphed_callables append __init__ detach ModelNew Model
    is_available randn rand randint get items eval cuda to stride data_ptr modules is_grad_enabled get_rng_state
    set_rng_state
"""
_WRAPPER_NAMES = frozenset(_WRAPPING.split())
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
    """True if a class has a `forward` of its own and never calls its base's."""
    own = any(isinstance(item, ast.FunctionDef) and item.name == "forward" for item in cls.body)
    return own and not any(
        isinstance(node, ast.Attribute)
        and node.attr == "forward"
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        for node in ast.walk(cls)
    )


def digest(text: str) -> str:
    """Hash of a definition's text, in which the name of a library of kernels does not count."""
    return hashlib.sha256(re.sub(r"fused_[0-9a-f]{16}", "fused", text).encode()).hexdigest()[:16]


def without_generated(source: str) -> str:
    """A candidate's source without the definitions that are known; all of it where it cannot be read."""
    try:
        return ast.unparse(_without_known(parse(source), source))
    except PARSE_ERRORS:
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
    """True if a node may give a function of a module another meaning."""
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
