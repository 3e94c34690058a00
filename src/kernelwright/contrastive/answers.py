"""Finds the candidate's source in a model's answer, or the reason for which there is none, and tags its techniques.

Never raises on any text. It tolerates headings of any level, number and case, or none, and reasoning between tags, also with
the opening tag left to the prompt. Fences may be of backticks or tildes, indented, with any language or none, never closed,
around the whole answer, or within a docstring. There may be several blocks of code, code without any fence, and words after
it. Tags are for records and reports, never for a reward; their names follow CUDA-L1's list (section 4.6) where it has one.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from kernelwright.models.chat import Completion

CLASS_NAME = "ModelNew"

SOURCE_LIMIT_CHARACTERS = 1 << 18
"""Longer code is not parsed: no kernel is this long, and Python's parser takes memory by the hundredfold."""

_REASONING = r"(?:think|thinking|reasoning|thought)"
_REASONING_END = re.compile(rf"</{_REASONING}>", re.IGNORECASE)
_REASONING_START = re.compile(rf"<{_REASONING}>", re.IGNORECASE)
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$")
_HEADING = re.compile(r"^\s{0,3}(?:#{1,6}|\*\*|__)[\s\d.):*_#]*([A-Za-z][A-Za-z \t&/-]*?)\s*(?:\*\*|__)?[\s:#*_]*$")
_SECTIONS = (("performance analysis", "analysis"), ("algorithm design", "design"), ("code", "code"))
_CLASS = re.compile(rf"^[ \t]*class[ \t]+{CLASS_NAME}\b", re.MULTILINE)
_UNDEFINED = f"the code does not define {CLASS_NAME}"
_CODE_START = re.compile(r"^(?:import|from|class|def|@|\"\"\")", re.MULTILINE)
_OTHER_LANGUAGES = {
    "c",
    "c++",
    "cpp",
    "cuda",
    "cu",
    "bash",
    "sh",
    "shell",
    "text",
    "txt",
    "json",
    "diff",
    "console",
    "latex",
}


class AnswerFailure(StrEnum):
    """The reason for which an answer holds no candidate."""

    NO_ANSWER = "no-answer"
    """The model gave none: its `Completion` carries a failure."""
    EMPTY = "empty"
    """Nothing but white space, or nothing after the reasoning."""
    TRUNCATED = "truncated"
    """Cut off before the code was complete."""
    NO_CODE = "no-code"
    """Words without code."""
    NO_MODEL_NEW = "no-model-new"
    """Code that does not define `ModelNew`."""
    SYNTAX_ERROR = "syntax-error"
    """Code that names `ModelNew` and is not Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """A parsed answer: either `source` or `failure` is set."""

    source: str | None = None
    """A module that defines `ModelNew`."""
    failure: AnswerFailure | None = None
    detail: str = ""
    """The failure in words."""
    analysis: str = ""
    """Text of the section Performance Analysis; empty when there is none."""
    design: str = ""
    """Text of the section Algorithm Design."""


@dataclass(frozen=True, slots=True)
class _CodeBlock:
    """Code between fences."""

    text: str
    language: str
    closed: bool


def parse_completion(completion: Completion) -> ParsedAnswer:
    """`parse_answer`, given also how the answer ended.

    A whole candidate in an answer that broke off later counts: its tokens are paid for.
    """
    answer = parse_answer(completion.text, truncated=completion.finish_reason == "length")
    if answer.source is None and completion.failure is not None:
        return ParsedAnswer(failure=AnswerFailure.NO_ANSWER, detail=completion.failure)
    return answer


def parse_answer(text: str, *, truncated: bool = False) -> ParsedAnswer:
    """Find the candidate in an answer, which may be known to be cut: the last whole block of code with `ModelNew`."""
    said = _without_reasoning(text)
    if said is None:
        return ParsedAnswer(failure=AnswerFailure.TRUNCATED, detail="the answer ends within its reasoning")
    if not said.strip():
        if truncated:
            return ParsedAnswer(failure=AnswerFailure.TRUNCATED, detail="the limit was reached before anything was said")
        where = "the answer is empty" if not text.strip() else "nothing follows the reasoning"
        return ParsedAnswer(failure=AnswerFailure.EMPTY, detail=where)
    said = said.replace("\ufeff", "")
    prose, blocks = _unwrapped(*_split(said))
    sections = _sections(prose)
    found = _candidate(prose, blocks, sections.get("code", ""), truncated)
    if found.source is None and any('"""' in block.text for block in blocks):
        # Examples in a docstring may have fences of their own.
        again = _candidate(*_unwrapped(*_split(said, within_strings=False)), "", truncated)
        found = again if again.source is not None else found
    return replace(found, analysis=sections.get("analysis", ""), design=sections.get("design", ""))


def _without_reasoning(text: str) -> str | None:
    """The text after the reasoning; None when the reasoning does not end."""
    ends = list(_REASONING_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    start = _REASONING_START.search(rest)
    if start is None:
        return rest
    before = rest[: start.start()]
    return before if CLASS_NAME in before else None


def _split(text: str, *, within_strings: bool = True) -> tuple[list[str], list[_CodeBlock]]:
    """The lines outside fences, and the blocks within them; with `within_strings` a fence in a long string counts too."""
    prose: list[str] = []
    blocks: list[_CodeBlock] = []
    inside: list[str] | None = None
    indent = fence = language = ""
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.match(line)
        if match and inside and not within_strings and "\n".join(inside).count('"""') % 2:
            match = None
        if match is None:
            if inside is None:
                prose.append(line)
            else:
                inside.append(line.removeprefix(indent))
        elif inside is not None and not match[2].startswith(fence):
            inside.append(line.removeprefix(indent))
        else:
            opens = inside is None or match[3].strip()
            if inside is not None:
                # A fence that names a language begins a block, also where the one before was never closed.
                blocks.append(_CodeBlock(_lines(inside), language, not opens))
            indent, fence = match[1], match[2]
            language = (match[3].split() or [""])[0].strip("{}.").lower()
            inside = [] if opens else None
    if inside is not None:
        blocks.append(_CodeBlock(_lines(inside), language, False))
    return prose, [block for block in blocks if block.text.strip()]


def _unwrapped(prose: list[str], blocks: list[_CodeBlock]) -> tuple[list[str], list[_CodeBlock]]:
    """Blocks of Markdown opened: some models put their whole answer into one."""
    found: list[_CodeBlock] = []
    for block in blocks:
        if block.language not in ("markdown", "md"):
            found.append(block)
            continue
        said, within = _split(block.text)
        prose = prose + said
        found += [replace(inner, closed=inner.closed or block.closed) for inner in within]
    return prose, found


def _lines(lines: list[str]) -> str:
    return "\n".join(lines).strip("\n") + "\n"


def _sections(prose: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    current: str | None = None
    for line in prose:
        heading = _HEADING.match(line) if len(line) <= 200 else None
        title = heading[1].lower() if heading else ""
        name = next((name for words, name in _SECTIONS if words in title), None)
        if name is not None:
            current = name
            found[current] = []
        elif current is not None:
            found[current].append(line)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def _candidate(prose: list[str], blocks: list[_CodeBlock], code_section: str, truncated: bool) -> ParsedAnswer:
    """Source or failure, from blocks; where none names the class, from code that stands without fences."""
    texts = [block.text for block in reversed(blocks) if CLASS_NAME in block.text and block.language not in _OTHER_LANGUAGES]
    if not texts:
        texts = [text for text in _bare_code("\n".join(prose), code_section) if _CLASS.search(text)]
    problems = []
    for text in texts:
        problem = _problem(text)
        if problem is None:
            return ParsedAnswer(source=text)
        problems.append(problem)
    # A module that holds CUDA is often called `cuda` or `cpp` as a whole; what is Python in spite of its name is Python.
    for block in reversed(blocks):
        if block.language in _OTHER_LANGUAGES and CLASS_NAME in block.text and _problem(block.text) is None:
            return ParsedAnswer(source=block.text)
    if (blocks and not blocks[-1].closed) or (truncated and not blocks):
        return ParsedAnswer(failure=AnswerFailure.TRUNCATED, detail="the answer ends before its code does")
    if problems:
        missing = problems[0] == _UNDEFINED
        return ParsedAnswer(
            failure=AnswerFailure.NO_MODEL_NEW if missing else AnswerFailure.SYNTAX_ERROR, detail=problems[0]
        )
    if truncated:
        return ParsedAnswer(failure=AnswerFailure.TRUNCATED, detail="the limit was reached before the code was written")
    if blocks:
        return ParsedAnswer(failure=AnswerFailure.NO_MODEL_NEW, detail=_UNDEFINED)
    if any(_problem(text) == _UNDEFINED and _CODE_START.search(text) for text in _bare_code("\n".join(prose), code_section)):
        return ParsedAnswer(failure=AnswerFailure.NO_MODEL_NEW, detail=_UNDEFINED)
    return ParsedAnswer(failure=AnswerFailure.NO_CODE, detail="the answer has no code")


def _bare_code(said: str, code_section: str) -> Iterable[str]:
    """Texts that may be code without a fence, likeliest first."""
    yield _lines([said])
    for text in (code_section, said):
        start = _CODE_START.search(text)
        if start is not None:
            code = text[start.start() :]
            yield _lines([code])
            yield _lines([_without_afterword(code)])


def _without_afterword(code: str) -> str:
    """Code up to the unindented line with which it stops being Python: words, a closing tag or a token that ends a turn."""
    lines = code.split("\n")
    if len(code) > SOURCE_LIMIT_CHARACTERS:
        return code
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError as error:
        end = (error.lineno or 0) - 1
        if 0 < end < len(lines) and not lines[end][:1].isspace():
            return "\n".join(lines[:end])
    except (ValueError, RecursionError, MemoryError):
        pass
    return code


def _problem(source: str) -> str | None:
    """The fault of a text that is no module with `ModelNew`; None when it is one."""
    if len(source) > SOURCE_LIMIT_CHARACTERS:
        return f"it has more than {SOURCE_LIMIT_CHARACTERS} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
            names = {_defined(node) for node in ast.walk(tree)}
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        # Null bytes, lone surrogates, and nesting beyond what the parser bears.
        return f"{type(error).__name__}: {error}"
    return None if CLASS_NAME in names else _UNDEFINED


def _defined(node: ast.AST) -> str | None:
    match node:
        case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
            return name
        case _:
            return None


_SHOWN_BY = {
    "triton": r"@triton\.jit",
    "cuda-kernel": r"__global__",
    "cpp-extension": r"\bload_inline\(|\bcpp_extension\.load\(",
    "shared-memory": r"__shared__",
    "warp-primitives": r"__shfl_\w+|__ballot_sync|__reduce_\w+_sync",
    "vectorised-access": r"\bfloat[24]\b|\bhalf2\b|__m(?:128|256|512)",
    "tensor-cores": r"\bwmma::|\bmma\.sync|\btl\.dot\(",
    "autotuning": r"@triton\.autotune",
    "loop-unrolling": r"#pragma unroll|\btl\.static_range\(",
    "openmp": r"#pragma omp",
    "cuda-graph": r"\bCUDAGraph\(|\bcuda\.graph\(",
    "streams": r"\bcuda\.Stream\(|\bcudaStreamCreate",
    "torch-compile": r"\btorch\.compile\(|@torch\.compile",
    "torch-script": r"\btorch\.jit\.",
    "memory-format": r"\bchannels_last",
    "inplace-operators": r"\binplace=True|\b\w+\.(?:add|mul|sub|div|relu|sigmoid|clamp)_\(",
    "fused-attention": r"\bscaled_dot_product_attention\(",
    "fused-product-sum": r"\b(?:addmm|baddbmm|addmv|addcmul|addcdiv)\(",
    "einsum": r"\beinsum\(",
    "half-precision": r"\.half\(\)|\bfloat16\b|\bbfloat16\b|\bautocast\b",
    "tf32": r"\ballow_tf32\b|\bset_float32_matmul_precision\(",
}
_PATTERNS = {tag: re.compile(pattern) for tag, pattern in _SHOWN_BY.items()}


def techniques_in(source: str) -> tuple[str, ...]:
    """Tags of what appears in a module's text; `operators` when there is nothing but PyTorch's own."""
    return tuple(tag for tag, pattern in _PATTERNS.items() if pattern.search(source)) or ("operators",)


_REWRITTEN_BY = {
    "library-norm": r"\bF\.(?:layer_norm|rms_norm|batch_norm|group_norm|normalize)\(",
    "library-activation": r"\bF\.(?:gelu|silu|mish|hardswish|hardsigmoid|softsign|leaky_relu|relu6|glu)\(",
    "library-softmax": r"\b(?:softmax|log_softmax|logsumexp|cross_entropy)\(",
    "library-reduction": r"\b(?:var|var_mean|smooth_l1_loss|cosine_similarity|vector_norm|amax)\(",
    "scan": r"\bcumsum\(",
    "reduce-before-product": r"@ \w+\.(?:mean|sum)\(|\.(?:mean|sum)\([^()]*\) @|weight\.sum\(",
    "reordered-product": r"@ \([\w.(), ]+ @ |\(\w+ @ \w+\) @ ",
    "broadcast": r"\[:, None\]|\.unsqueeze\(|\.expand\(",
    "indexing": r"\[(?::, )?index\]|\bindex_select\(|\.gather\(|\bF\.embedding\(",
}
_REWRITES = {tag: re.compile(pattern) for tag, pattern in _REWRITTEN_BY.items()}


def rewrites_in(code: str) -> tuple[str, ...]:
    """Tags of an answer without its reference: those of `techniques_in`, and ways to do less work with operators alone."""
    found = tuple(tag for tag, pattern in _REWRITES.items() if pattern.search(code))
    return found + tuple(tag for tag in techniques_in(code) if not found or tag != "operators")
