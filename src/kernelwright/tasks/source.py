"""Reads the text of a task or a candidate, with the modules of its folder that it imports.

Nothing is executed here, and torch is not needed.

A record stores a task's text and its hash covers it, so the text stands alone: `bundled` writes the modules beside a task's
file into it. A run can then be repeated without the folder, and every process that runs the task, here or on another
machine, has the same modules. They are found by reading `import` statements.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelwright.errors import TaskError, UsageError
from kernelwright.files import TEXT_LIMIT_BYTES, has_text_name, read_regular

REQUIRED_NAMES = ("Model", "get_inputs", "get_init_inputs")


def read_source(path: Path, what: str, wrong: type[UsageError] = TaskError, *, may_be_empty: bool = False) -> str:
    """The text of a Python file.

    Args:
        path: The file.
        what: Its expected content, in words.
        wrong: The class of error to raise.
        may_be_empty: Take an empty file as a text too.

    Raises:
        UsageError: it is missing, is no regular file, is empty, too large or is not UTF-8 text, or its name is not.
    """
    wanted = f"Wanted {what}, a Python file, at {path}"
    if not has_text_name(path):
        raise wrong(f"{wanted}; its name is not UTF-8 text, and no record could hold it. Rename the file.")
    try:
        data = read_regular(path, TEXT_LIMIT_BYTES)
    except FileNotFoundError as error:
        raise wrong(f"{wanted}; there is no such file. Check the path.") from error
    except IsADirectoryError as error:
        raise wrong(f"{wanted}; it is a directory. Name a file in it.") from error
    except OSError as error:
        raise wrong(f"{wanted}; {error.strerror}. Name a file that can be read.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(f"{wanted}; found {len(data)} bytes that are not UTF-8 text. Name a Python file.") from error
    if "\0" in text:
        raise wrong(f"{wanted}; found binary data with null bytes. Name a Python file.")
    if not text.strip() and not may_be_empty:
        raise wrong(f"{wanted}; the file is empty. Name another, or save yours.")
    return text


def parsed(source: str, what: str) -> ast.Module:
    """The syntax tree of a task's text or of a module that it imports.

    Raises:
        TaskError: it is not Python.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise TaskError(
            f"Wanted {what}; it is not valid Python{line}: {getattr(error, 'msg', error)}. Correct it there."
        ) from error


def check_task_source(source: str, where: str) -> None:
    """See that a text is Python and defines what a task must.

    Raises:
        TaskError: it is not, or does not.
    """
    tree = parsed(source, f"a task in {where}")
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            defined |= {alias.asname or alias.name for alias in node.names}
    missing = [name for name in REQUIRED_NAMES if name not in defined]
    if missing:
        raise TaskError(
            f"Wanted a task in {where} that defines {', '.join(REQUIRED_NAMES)}; found no {', '.join(missing)}. "
            "See KernelBench's format in docs/start.md."
        )


_PACKAGES = {"site-packages", "dist-packages", "kernelwright"}
"""Names of folders in which installed packages lie, and of this one."""


def installed(names: Collection[str]) -> list[str]:
    """Those of the modules that belong to an installed package: neither to the standard library nor to a user's folder."""
    specs = {top: importlib.machinery.PathFinder.find_spec(top) for top in {name.partition(".")[0] for name in names}}
    found = {top for top, spec in specs.items() if spec and spec.origin and _PACKAGES & {*Path(spec.origin).parts}}
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] in found]


def imported_by(source: str) -> list[str]:
    """Names of modules that a task's text may import, and of classes in them, since a library may load those when asked.

    Only modules of PyTorch are among them: every process has imported it.
    """
    tree = parsed(source, "a task")
    names = [*_imported(tree, "")]
    tops = {*names} - {"torch"}
    pairs = [(node.value, node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = [(owner.id, name) for owner, name in pairs if isinstance(owner, ast.Name) and name[:1].isupper()]
    return [*names, *(f"{owner}.{name}" for owner, name in used if owner in tops)]


# --- modules beside a task's file -------------------------------------------------------------------------------------


_BEGIN = "# Modules from the folder of this task's file, so that the text stands alone."
_END = "# The task's own text goes on here."

_LOADER = (Path(__file__).parent / "data" / "folder_modules.txt").read_text(encoding="utf-8")
"""Statements that let a text import from `_FOLDER_MODULES`."""
_LAST = "_folder_modules.end()"


@dataclass(frozen=True, slots=True)
class _FolderModule:
    file: Path
    """The module's file, relative to the folder."""
    source: str
    """The module's text; empty for a package without `__init__.py`."""


def bundled(source: str, folder: Path) -> str:
    """The text of a task with the modules of its folder that it imports; the text as it is where there are none.

    Raises:
        TaskError: such a module cannot be read or is no Python, or all of them are too large.
    """
    modules: dict[str, _FolderModule] = {}
    tree = parsed(source, f"a task in {folder}")
    _collect(tree, "", folder, modules)
    if not modules:
        return source
    if sum(len(module.source) for module in modules.values()) > TEXT_LIMIT_BYTES:
        raise TaskError(
            f"Wanted less than {TEXT_LIMIT_BYTES >> 20} MiB of modules beside the task in {folder}; found "
            f"{len(modules)} modules with more. Install them as a package, which a task can import."
        )
    entries = [
        f"    {name!r}: ({module.file.as_posix()!r}, {_literal(module.source)}),\n" for name, module in modules.items()
    ]
    lines = source.split("\n")
    first = _lines_before_statements(tree)
    head, rest = "".join(f"{line}\n" for line in lines[:first]), "\n".join(lines[first:])
    return f"{head}{_BEGIN}\n_FOLDER_MODULES = {{\n{''.join(entries)}}}\n{_LOADER}\n{_END}\n{rest.rstrip()}\n\n{_LAST}\n"


def line_in_file(source: str, line: int) -> int:
    """The line of a task's file that is this line of its text."""
    lines = source.split("\n")
    if _BEGIN not in lines or _END not in lines:
        return line
    begin, end = lines.index(_BEGIN), len(lines) - lines[::-1].index(_END)
    return line if line <= begin else line - (end - begin)


def _collect(tree: ast.Module, package: str, folder: Path, into: dict[str, _FolderModule]) -> None:
    """Add the modules of the folder that a text imports, and those that they import."""
    for name in _imported(tree, package):
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            if not _add(".".join(parts[:count]), folder, into):
                break


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Names of modules that a text may import; some are names in modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _add(name: str, folder: Path, into: dict[str, _FolderModule]) -> bool:
    """Add a module with those that it imports; False where the folder has none of this name."""
    if name in into:
        return True
    file = _file_of(name, folder)
    if file is None:
        return False
    where, source = folder / file, ""  # of a package without a file of its own
    if where.exists():
        source = read_source(where, f"the module {name}, which the task imports", may_be_empty=True)
    into[name] = _FolderModule(file, source)
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    _collect(parsed(source, f"the module {name} of a task in {where}"), package, folder, into)
    return True


def _file_of(name: str, folder: Path) -> Path | None:
    """File of a module in the folder, relative to it; None for what is not there, or is the standard library's.

    Raises:
        TaskError: a package of this name is installed too.
    """
    top, *below = name.split(".")
    if top in sys.stdlib_module_names:
        return None
    place = Path(top, *below)
    installed = None if below else _installed(top, folder)
    for file in (place / "__init__.py", place.with_suffix(".py")):
        if (folder / file).is_file():
            if installed:
                raise TaskError(
                    f"Wanted one module {top} for a task to import; found {folder / file} beside it and {installed}, "
                    "which is installed. Rename the one beside the task."
                )
            return file
    return place / "__init__.py" if (folder / place).is_dir() and not installed else None


def _installed(name: str, folder: Path) -> str | None:
    """File of an installed module that is not in the folder."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    origin = spec.origin if spec is not None else None
    return None if origin is None or folder.resolve() in Path(origin).resolve().parents else origin


def _literal(text: str) -> str:
    """A literal of a text that a person can read, where there is one."""
    plain = f"'''{text}'''"
    return repr(text) if "\\" in text or "'''" in text or "\r" in text or text.endswith("'") else plain


def _lines_before_statements(tree: ast.Module) -> int:
    """Number of lines before the first statement that is neither the docstring nor an import from `__future__`."""
    lines = 0
    for index, node in enumerate(tree.body):
        docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        lines = node.end_lineno or lines
    return lines
