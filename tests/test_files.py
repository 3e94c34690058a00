"""What is no regular file is neither read, nor waited for, nor replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernelwright.files import read_regular, remove_tree, replace_file


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * (1 << 20))
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 1 << 20) == b"x" * (1 << 20)
    (tmp_path / "file").write_bytes(b"x" * (1 << 20) + b"x")
    with pytest.raises(OSError, match="1048577 bytes, which is not below 1 MiB"):
        read_regular(tmp_path / "file", 1 << 20)


def test_pipes_devices_and_folders_are_not_read(pipe, tmp_path):
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(path, 1 << 20)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path, 1 << 20)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 1 << 20)


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    for data in (b"a", b"b"):
        replace_file(tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_ends_in_the_middle_leaves_the_old_file(error, tmp_path, monkeypatch):
    def ended(*_):
        raise error

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", ended)
    with pytest.raises(error):
        replace_file(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_what_is_no_file_is_not_replaced(pipe, tmp_path):
    with pytest.raises(OSError, match="not a regular file"):
        replace_file(pipe, b"")
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("mode", [0o700, 0o000], ids=["deep", "without rights"])
def test_a_tree_is_removed_however_deep_and_whatever_its_modes(tmp_path, mode):
    (tmp_path / "tree").mkdir()
    (tmp_path / "kept").write_text("not its own")
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path / "tree")
        os.symlink(tmp_path / "kept", "link")
        for _ in range(1200):  # deeper than Python recurses, and longer than a path may be
            os.mkdir("nested")
            os.chdir("nested")
        os.chmod(".", mode)
    finally:
        os.fchdir(here)
        os.close(here)
    remove_tree(tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_tree_that_is_not_there_is_no_error(tmp_path):
    remove_tree(tmp_path / "none")
