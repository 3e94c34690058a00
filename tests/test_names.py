"""One word, one meaning: no two classes of the package share a name; no function or file outgrows a reader."""

from __future__ import annotations

import collections

from tests.package import PACKAGE, contents_of, modules

MODULES = modules()

STILL_TWICE: set[str] = set()
STILL_LONG_FUNCTIONS: set[str] = set()
STILL_LONG_FILES: set[str] = set()


def class_names() -> dict[str, list[str]]:
    names = collections.defaultdict(list)
    for path in MODULES:
        for name, _ in contents_of(path).classes:
            names[name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    return names


def test_no_class_name_is_defined_twice():
    twice = {name: where for name, where in class_names().items() if len(where) > 1}
    assert set(twice) == STILL_TWICE, twice


def test_no_function_has_more_than_80_lines():
    long = {name for path in MODULES for name, lines in contents_of(path).functions if lines > 80}
    assert long == STILL_LONG_FUNCTIONS


def test_no_file_has_more_than_500_lines():
    long = {str(path.relative_to(PACKAGE)) for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) > 500}
    assert long == STILL_LONG_FILES


def test_no_folder_has_more_than_a_dozen_modules():
    folders = collections.Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert [str(folder) for folder, count in folders.items() if count > 12] == []


def test_every_folder_says_what_it_is_for():
    silent = [
        str(path.parent.relative_to(PACKAGE))
        for path in MODULES
        if path.name == "__init__.py" and not contents_of(path).has_docstring
    ]
    assert silent == []
