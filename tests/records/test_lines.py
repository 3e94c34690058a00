"""Lines on disk: whole, in order, from several processes, after a torn one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernelwright.records import append_lines, encodable


def test_lines_follow_one_another_and_a_torn_one_swallows_none(tmp_path):
    path = tmp_path / "new" / "lines.jsonl"
    append_lines(path, ["1", "2"])
    with path.open("ab") as file:
        file.write(b'{"torn": ')
    append_lines(path, iter(["3"]))
    append_lines(path, [])
    assert path.read_text().splitlines() == ["1", "2", '{"torn": ', "3"]


def test_processes_do_not_tear_one_anothers_lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    code = (
        "import sys; from pathlib import Path; from kernelwright.records import append_lines\n"
        "for number in range(50): append_lines(Path(sys.argv[1]), [sys.argv[2] * 3000] * 2)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), mark]) for mark in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    lines = path.read_text().splitlines()
    assert sorted(lines) == ["a" * 3000] * 100 + ["b" * 3000] * 100
    assert lines[::2] == lines[1::2], "the lines of one call stay together"


def test_half_a_surrogate_pair_is_written_as_a_question_mark(tmp_path):
    append_lines(tmp_path / "lines", ["a\ud83d"])
    assert (tmp_path / "lines").read_text() == "a?\n"
    assert encodable("\ud83db") == "?b"


def test_what_cannot_be_written_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        append_lines(tmp_path / "file" / "lines", ["1"])
