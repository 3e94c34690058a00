"""A task that imports modules from its folder is one text that stands alone, and disturbs no other modules."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.rewrites.passes import WrapperPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from kernelwright.rewrites.tracing import load
from kernelwright.tasks import bring_to_life, task_from_file
from kernelwright.tasks.source import bundled, imported_by, installed, line_in_file

CPU = torch.device("cpu")


def test_libraries_that_a_text_imports_are_told_from_the_users_modules():
    names = imported_by("import os, no_such\nimport torch.nn as nn\nfrom kernelwright import tasks\nfrom . import beside")
    assert installed(names) == ["torch.nn", "kernelwright", "kernelwright.tasks"]
    lazy = "import torch\nimport kernelwright\nmodel = kernelwright.Judge(torch.nn.Linear(1, 1).weight)"
    assert imported_by(lazy) == ["torch", "kernelwright", "kernelwright.Judge"], "what a lazy module imports when asked"


TASK = '''"""Scales rows."""
from __future__ import annotations
import torch
from shapes_net import Net

class Model(Net):
    pass

def get_inputs():
    return [torch.ones(4, 4)]

def get_init_inputs():
    return [4]
'''
NET = """import torch
from parts.layers import twice

class Net(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        from parts.late import FACTOR  # a "quote", a \\ and \'\'\'three\'\'\'
        return twice(x) * FACTOR
"""
LAYERS = "from . import constants\nfrom .constants import TWO as two\ndef twice(x):\n    return x * two + constants.ZERO\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "task")


def write(folder: Path, factor: int = 3) -> Path:
    (folder / "parts").mkdir(parents=True)
    (folder / "task.py").write_text(TASK)
    (folder / "shapes_net.py").write_text(NET)
    (folder / "unused.py").write_text("raise RuntimeError")
    (folder / "parts/layers.py").write_text(LAYERS)
    (folder / "parts/constants.py").write_text("TWO = 2\nZERO = 0\n")
    (folder / "parts/late.py").write_text(f"FACTOR = {factor}\n")
    return folder


def answer(task: Task) -> float:
    live = bring_to_life(task)
    return float(live.model(0, CPU)(*live.inputs(0, CPU))[0, 0])


def test_the_text_runs_without_the_folder_and_holds_what_it_imports_alone(folder: Path, tmp_path: Path) -> None:
    task = task_from_file(folder / "task.py")
    folder.rename(tmp_path / "elsewhere")
    assert answer(task) == 6.0
    assert "unused" not in task.source
    assert ast.get_docstring(ast.parse(task.source)) == "Scales rows."


def test_a_bundle_runs_in_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import decimal\ndef late():\n    import other\n    return other.X\n")
    (tmp_path / "other.py").write_text("X = 7\n")
    text = bundled("import helper, json\nprint(json.dumps(helper.late()))", tmp_path) + "print(helper.late())\n"
    done = subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "7\n7\n"


def test_the_hash_covers_the_modules_and_not_where_they_lie(tmp_path: Path) -> None:
    first, same, other = (write(tmp_path / name, factor) for name, factor in (("a", 3), ("b", 3), ("c", 5)))
    hashes = [task_from_file(folder / "task.py").sha256 for folder in (first, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_two_tasks_with_modules_of_one_name_have_their_own(tmp_path: Path) -> None:
    tasks = [task_from_file(write(tmp_path / str(factor), factor) / "task.py") for factor in (3, 5)]
    assert [answer(task) for task in (*tasks, *tasks)] == [6.0, 10.0, 6.0, 10.0]


def test_modules_of_the_program_with_these_names_are_put_back(folder: Path, monkeypatch) -> None:
    mine = types.ModuleType("shapes_net")
    monkeypatch.setitem(sys.modules, "shapes_net", mine)
    live = bring_to_life(task_from_file(folder / "task.py"))
    assert sys.modules["shapes_net"] is mine
    assert live.module.Net is not getattr(mine, "Net", None)
    assert type(sys.meta_path[0]).__name__ != "_FolderModules", "a program's own modules come first afterwards"


@pytest.mark.exhaustive
def test_candidates_of_the_built_in_policy_stand_alone(folder: Path, tmp_path: Path) -> None:
    context = TaskContext(task_from_file(folder / "task.py"), "cpu")
    folder.rename(tmp_path / "elsewhere")
    built = context.build(Recipe((WrapperPass("compile"),)))
    assert built is not None
    assert load(built.source, "candidate").ModelNew(4).size == 4


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("task.py", "class Model", "1 / 0\nclass Model", r"ZeroDivisionError: division by zero, in line 6 of task\.py"),
        ("shapes_net.py", "twice\n", "thrice\n", r"cannot import name 'thrice' .*, in line 2 of shapes_net\.py"),
        (
            "task.py",
            "import torch\n",
            "import nonesuch\n",
            r"in line 3 of task\.py\. Put nonesuch\.py or the package nonesuch",
        ),
        ("shapes_net.py", "parts.layers", "parts.layer", r"Put parts/layer\.py or the package parts/layer into"),
        ("task.py", "import torch\n", "import torch\n__import__('unused')\n", "Write `import unused`: beside"),
        ("task.py", "from shapes_net", "from .shapes_net", "Leave out the dot before the module's name"),
    ],
)
def test_an_error_names_the_file_and_the_line_and_what_to_do(
    folder: Path, file: str, old: str, new: str, words: str
) -> None:
    path = folder / file
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(TaskError, match=words) as caught:
        bring_to_life(task_from_file(folder / "task.py"))
    assert "\n" not in str(caught.value)


def test_lines_of_the_text_are_those_of_the_file(folder: Path) -> None:
    text = task_from_file(folder / "task.py").source
    found = {line: line_in_file(text, number) for number, line in enumerate(text.split("\n"), 1)}
    assert {line: found[line] for line in TASK.strip().split("\n") if line} == {
        line: number for number, line in enumerate(TASK.strip().split("\n"), 1) if line
    }


@pytest.mark.parametrize("text", ["x = 1", "import os\nimport torch.nn\nfrom jinja2 import Template\nimport nonesuch"])
def test_a_text_that_imports_nothing_from_its_folder_is_as_it_was(tmp_path: Path, text: str) -> None:
    for name in ("os", "torch", "jinja2"):  # a folder is no module where a package of its name is installed
        (tmp_path / name).mkdir()
    (tmp_path / "os.py").write_text("x = 1")
    (tmp_path / "torch/nn.py").write_text("x = 1")
    assert bundled(text, tmp_path) == text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("jinja2.py", "x = 1", r"found .*jinja2\.py beside it and .*which is installed\. Rename"),
        ("mine.py", "def (", r"the module mine of a task in .*mine\.py; it is not valid Python in line 1"),
        ("mine.py", b"\xff\xfe", r"the module mine, which the task imports, .*not UTF-8"),
        ("mine.py", "import more\n#" + "#" * ((16 << 20) - 13), "less than 16 MiB of modules"),
    ],
)
def test_a_module_that_cannot_be_taken_along_is_an_error(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "more.py").write_text("x = 'some more'")
    with pytest.raises(TaskError, match=words):
        bundled("import jinja2, mine", tmp_path)
