"""One word, one meaning: no two classes of the package share a name."""

from __future__ import annotations

import collections

from tests.package import PACKAGE, contents_of, modules

MODULES = modules()

STILL_TWICE: set[str] = set()


def class_names() -> dict[str, list[str]]:
    names = collections.defaultdict(list)
    for path in MODULES:
        for name, _ in contents_of(path).classes:
            names[name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    return names


def test_no_class_name_is_defined_twice():
    twice = {name: where for name, where in class_names().items() if len(where) > 1}
    assert set(twice) == STILL_TWICE, twice


def test_every_folder_says_what_it_is_for():
    silent = [
        str(path.parent.relative_to(PACKAGE))
        for path in MODULES
        if path.name == "__init__.py" and not contents_of(path).has_docstring
    ]
    assert silent == []
