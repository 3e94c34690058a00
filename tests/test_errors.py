"""Every exception of the package stands in the one drawn tree, under the parent it is drawn with, and ends in `Error`."""

from __future__ import annotations

import builtins
import functools
import re
from pathlib import Path

from kernelwright import errors
from kernelwright.errors import listed
from tests.package import Contents, contents, contents_of, modules

ROOT = Path(__file__).parents[1]
DRAWN_LINE = re.compile(r"    (?P<indent>[│├└─ ]*)(?P<name>\w+Error)(?:\s+(?P<status>\d))?(?:\s{2,}\S.*)?")
BUILT_IN = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)}


def bases_of(module: Contents) -> dict[str, list[str]]:
    """Every class of a module with the last names of its bases."""
    return {name: [*bases] for name, bases in module.classes}


def exceptions_of(classes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Those of the classes that are exceptions, directly or through one another."""
    known: dict[str, list[str]] = {}
    while True:
        more = {name: bases for name, bases in classes.items() if BUILT_IN.union(known) & {*bases}}
        if more.keys() == known.keys():
            return known
        known = more


def drawn_tree(text: str) -> dict[str, str]:
    """The parent of each drawn exception; that of the first is empty."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in text.splitlines():
        if match := DRAWN_LINE.fullmatch(line):
            depth = len(match["indent"]) // 4
            above[depth:] = [match["name"]]
            parents[match["name"]] = above[depth - 1] if depth else ""
    return parents


DRAWN = drawn_tree(errors.__doc__ or "")


@functools.cache
def found() -> dict[str, list[str]]:
    """The package's exceptions, read where a test asks: collection would read the whole package in each process of tests."""
    return exceptions_of({name: bases for path in modules() for name, bases in bases_of(contents_of(path)).items()})


def test_every_exception_is_drawn_under_its_parent():
    # A private one is control flow inside one module.
    assert {name: bases[0] for name, bases in found().items() if not name.startswith("_")} == DRAWN | {
        "KernelwrightError": "Exception"
    }


def test_every_exception_ends_in_error():
    assert [name for name in found() if not name.endswith("Error")] == []


def test_the_drawing_gives_the_exit_statuses():
    lines = filter(None, map(DRAWN_LINE.fullmatch, (errors.__doc__ or "").splitlines()))
    statuses = {match["name"]: int(match["status"]) for match in lines if match["status"]}
    assert statuses == {name: getattr(errors, name).exit_status for name in statuses}
    public = {
        kind for name in found() if (kind := getattr(errors, name, None)) and not issubclass(kind, errors.InternalError)
    }
    assert {*statuses} == {kind.__name__ for kind in public} - {"KernelwrightError"} | {"InternalError"}


def test_the_page_shows_the_same_tree():
    assert drawn_tree((ROOT / "docs" / "errors.md").read_text(encoding="utf-8")) == DRAWN


def test_the_test_itself_sees_an_exception_outside_the_tree():
    source = "class Lost(Exception): pass\nclass Deeper(Lost): pass\nclass Plain: pass"
    assert exceptions_of(bases_of(contents(source))).keys() == {"Lost", "Deeper"}


def test_a_list_in_a_message_says_how_many_more_there_are():
    assert listed([]) == "none"
    assert listed(["a", "b"]) == "a, b"
    assert listed(range(12)) == "0, 1, 2, 3, 4 and 7 more"
