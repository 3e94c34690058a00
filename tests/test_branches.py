"""The check of branch coverage notices what it is there for."""

from __future__ import annotations

import pytest

from tests.branches import faults, untaken

CODE = "def f(x):\n    if x:\n        g()\n    return 1\n"
REPORT = {
    "files": {"judge.py": {"missing_branches": [[2, 4], [4, -1]]}},
    "totals": {"covered_branches": 98, "num_branches": 100},
}
LISTED = [{"file": "judge.py", "reason": "needs a GPU", "branches": ["if x: -> return 1", "return 1 -> exit"]}]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "judge.py").write_text(CODE)
    return tmp_path


def test_branches_are_named_by_their_lines(root):
    assert list(untaken(REPORT, root)) == [("judge.py", "if x: -> return 1"), ("judge.py", "return 1 -> exit")]


def test_what_is_listed_is_no_fault(root):
    assert faults(REPORT, LISTED, root) == []


def test_a_branch_that_is_not_listed_is_a_fault(root):
    (fault,) = faults(REPORT, [{**LISTED[0], "branches": ["if x: -> return 1"]}], root)
    assert "return 1 -> exit" in fault


def test_a_listed_line_that_is_gone_is_a_fault(root):
    (fault,) = faults(REPORT, [*LISTED, {"file": "judge.py", "branches": ["if y: -> exit"]}], root)
    assert "if y" in fault


def test_less_than_95_per_cent_is_a_fault(root):
    (fault,) = faults({**REPORT, "totals": {"covered_branches": 94, "num_branches": 100}}, LISTED, root)
    assert "94.0%" in fault
