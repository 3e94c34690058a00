"""Answers requests from inside a worker process, and shortens the output of a failed build to its first errors."""

from __future__ import annotations

import ast
import importlib
import os
import re
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

from kernelwright.judge.worker.channel import Channel, ChannelClosedError
from kernelwright.judge.worker.environment import COMPILER_ENVIRONMENT
from kernelwright.judge.worker.harness import Harness

OUTPUT_LOG = "output.log"
"""File in a worker's private folder that receives what it prints."""
STACK_LOG, ASKED = "stack.log", "asked"
"""File there to which a worker writes where it is, and the pipe that asks for that."""
_FRAMES_MAX = 100
"""Frames of a thread that an account holds, the innermost first."""
_AWAKE_S = 2e-3
"""Longest time for which a worker waits for the next request without sleeping, after calls that warm the host up."""


def serve(connection: socket.socket, config: dict[str, Any], files: list[int]) -> None:
    """Answer the parent until it hangs up. Exceptions of the module become answers."""
    channel = Channel(connection)
    harness: Harness | None = None
    while True:
        try:
            message = channel.receive()
        except ChannelClosedError:
            return
        try:
            if message["op"] == "forget":
                answer: dict[str, Any] = {"clean": harness is None or harness.forget()}
                harness = None
            elif message["op"] == "adopt":
                config, files = config | message["config"], channel.receive_files(message["files"])
                answer = {}
            else:
                harness = harness or _harness(config, files)
                answer = getattr(harness, f"op_{message['op']}")(message)
        except SystemExit as error:
            answer = {"error": {"type": "SystemExit", "message": f"exit status {error.code}", "trace": ""}}
        except BaseException as error:  # noqa: BLE001 - whatever a candidate raises is its answer
            answer = {"error": _error(error, config)}
        answer["nonce"] = message["nonce"]
        try:
            channel.send(answer)
        except ChannelClosedError:
            return
        if message["op"] == "repeat":
            channel.watch(_AWAKE_S)


def say_where_when_asked(private: Path) -> None:
    """Start a thread that writes where all others are whenever the parent asks.

    It holds the interpreter's lock meanwhile. A signal's handler does not, and crashed processes that compiled in another
    thread: it read frames that were being made (`docs/log.md`).
    """
    asked = os.open(private / ASKED, os.O_RDONLY)
    stack = os.open(private / STACK_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    threading.Thread(target=_answer_where, args=(asked, stack), daemon=True).start()


def _answer_where(asked: int, stack: int) -> None:
    while os.read(asked, 1 << 10):
        os.write(stack, _where().encode(errors="replace"))


def _where() -> str:
    """Lines of all threads but this one, as `progress` reads them."""
    lines = []
    for thread, frame in sys._current_frames().items():
        if thread == threading.get_ident():
            continue
        lines.append("Thread (most recent call first):\n")
        for _ in range(_FRAMES_MAX):
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
            if frame.f_back is None:
                break
            frame = frame.f_back
    return "".join(lines)


def _harness(config: dict[str, Any], files: list[int]) -> Harness:
    """The ordinary harness, or that of another program such as `screening`, which is imported only where it runs."""
    program = config.get("program")
    if program is None:
        return Harness(config, files)
    return importlib.import_module(program).harness(config, files)  # type: ignore[no-any-return]


def _error(error: BaseException, config: dict[str, Any]) -> dict[str, str]:
    """An exception's words and the module's own frames, its file by name only.

    Frames of the harness and of libraries say nothing about the candidate, and their paths are this machine's.
    """
    name, private = f"{config['role']}.py", Path(config["private"])
    path = str(private / name)
    try:
        said = triton_errors(error, name, config["source"]) or str(error)
        text = first_errors(said.replace(path, name), private / OUTPUT_LOG)
    except Exception:  # noqa: BLE001 - a candidate's exception may fail to print
        text = "(no message)"
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    trace = "".join(traceback.StackSummary.extract(iter(own[-6:])).format())
    return {
        "type": type(error).__name__,
        "message": text,
        "trace": trace.replace(path, name)[-4000:],
    }


def prepare_directories(private: Path, build: Path) -> None:
    """Point every cache and temporary file of this process into its private directory."""
    for name in ("home", "tmp"):
        (private / name).mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "HOME": str(private / "home"),
        "TMPDIR": str(private / "tmp"),
        "XDG_CACHE_HOME": str(private / "home/.cache"),
        "TORCH_EXTENSIONS_DIR": str(build / "torch_extensions"),
        "TRITON_CACHE_DIR": str(build / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(build / "inductor"),
        "CUDA_CACHE_PATH": str(build / "cuda"),
        "MPLCONFIGDIR": str(private / "home"),
        **COMPILER_ENVIRONMENT,
    }
    tempfile.tempdir = None  # some module imported before the fork may have asked for it already
    os.chdir(private)


LINES_MAX = 40
_LINE_CHARACTERS_MAX = 300
_WORDS_CHARACTERS_MAX, _ERRORS_CHARACTERS_MAX = 2000, 4000
"""Characters told of an ordinary exception, and of a compiler's errors."""
_LOG_BYTES_MAX = 1 << 20
_TRITON_LINES = 4
"""Lines of a kernel that are shown, up to the wrong one."""
_EXTENSION = "Error building extension"
"""First words of PyTorch's error when ninja fails; the compiler's output follows unless `verbose` sent it to stdout."""
_ERROR = re.compile(r"\b(error|fatal)\b\s*:|\bundefined reference\b|\bcannot find -l|^\w+ fatal\b|^ptxas\b.*\berror\b")
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+")
"""Folders in front of a file's name: they are this machine's."""


def first_errors(text: str, log: Path) -> str:
    """An exception's words, at most `LINES_MAX` lines; of compilers' output the errors, each with its file and line.

    `log` is the file that the process prints to.
    """
    if text.startswith(_EXTENSION) and not _ERROR.search(text):
        text = f"{text.splitlines()[0]}\n{_tail(log)}"
    lines = text.splitlines()
    if text.startswith(_EXTENSION):
        errors = _with_context(lines)
        lines = [lines[0].partition(": ")[0], *(errors or lines[1:][-LINES_MAX + 1 :])][:LINES_MAX]
    elif len(lines) > LINES_MAX:  # as Triton's errors: the place first, then the kernel, then what is wrong with it
        lines = [lines[0], *lines[1 - LINES_MAX :]]
    else:
        return text[:_WORDS_CHARACTERS_MAX]
    return "\n".join(_FOLDERS.sub("", line)[:_LINE_CHARACTERS_MAX] for line in lines)[:_ERRORS_CHARACTERS_MAX]


def triton_errors(error: BaseException, file: str, source: str) -> str | None:
    """Errors of Triton's compiler as place, message and code, the innermost function first; None for other errors.

    Triton counts lines from the kernel's first one, and names no file.
    """
    told: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        code, node, inner = getattr(cause, "src", None), getattr(cause, "node", None), cause.__cause__
        if isinstance(code, str) and isinstance(node, ast.expr | ast.stmt):
            line, column = node.lineno, node.col_offset
            message = getattr(cause, "error_message", None) or ("" if hasattr(inner, "node") else str(inner or ""))
            begin = _begin(code.splitlines(), source.splitlines())
            place = f"{file}:{begin + line}:{column + 1}" if begin is not None else f"line {line} of a kernel outside {file}"
            shown = code.splitlines()[max(0, line - _TRITON_LINES) : line]
            told[:0] = [f"{place}: {'error: ' + message if message else 'called here'}", *shown, " " * column + "^"]
        cause = inner
    return "\n".join("\n".join(told).splitlines()[:LINES_MAX]) or None


def _begin(part: list[str], lines: list[str]) -> int | None:
    """Number of lines before a function, whose own lines may have lost their indentation."""
    wanted = [line.strip() for line in part]
    found = [line.strip() for line in lines]
    return next((at for at in range(len(found)) if found[at : at + len(wanted)] == wanted), None)


def _with_context(lines: list[str]) -> list[str]:
    """Lines that tell of an error, and the indented ones after each, which show the code."""
    kept, in_error = [], False
    for line in lines:
        in_error = bool(_ERROR.search(line)) or (in_error and line.startswith(" "))
        if in_error:
            kept.append(line)
    return kept


def _tail(log: Path) -> str:
    """Output of the latest build."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES_MAX))
            return file.read().decode("utf-8", "replace").rpartition("Building extension module")[2]
    except OSError:
        return ""
