"""`kernelwright sass cache list|remove`: what is printed, what is gone, and nothing else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kernelwright.cli import main
from kernelwright.deploy.cache import CacheEntry, CacheKey, ConfirmedSpeedup, Proof, TunedCache

ENTRY_CONTRACT = ["key", "kernel", "architecture", "gpu", "signature", "moved"]
ENTRY_CONTRACT += ["speedup", "speedup_low", "speedup_high", "driver", "run"]


def put(root: Path, identity: str, *, measured: bool) -> str:
    cubin = identity.encode()
    found = ConfirmedSpeedup(
        speedup=1.05,
        speedup_low=1.03,
        speedup_high=1.07,
        noise_floor=0.01,
        original_us=20.0,
        processes=5,
        gpu="G",
        driver="1",
    )
    entry = CacheEntry(
        key=CacheKey(identity=identity, architecture=90, gpu="G\x1b[31m", signature="k()"),
        entry="softmax",
        original_sha256="0" * 64,
        tuned_sha256=hashlib.sha256(cubin).hexdigest(),
        proof=Proof(checker="kernelwright", moved=3),
        measurement=found if measured else None,
        provenance={"run": "softmax-run"},
    )
    return TunedCache(root).put(entry, cubin).name


def run(capsys, *arguments):
    status = main(["sass", "cache", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELWRIGHT_CACHE", str(tmp_path / "tuned"))
    return tmp_path / "tuned"


def test_entries_are_listed_for_people_and_for_programs(root, capsys):
    keys = {put(root, "1" * 64, measured=True), put(root, "2" * 64, measured=False)}
    status, text, error = run(capsys, "list", "--json")
    assert (status, error) == (0, "")
    listed = json.loads(text)
    assert listed["cache"] == str(root)
    assert {entry["key"] for entry in listed["entries"]} == keys
    assert all(list(entry) == ENTRY_CONTRACT for entry in listed["entries"])
    assert {entry["speedup_low"] for entry in listed["entries"]} == {1.03, None}
    status, text, error = run(capsys, "list")
    assert (status, error) == (0, "")
    lines = sorted(text.splitlines(), key=lambda line: "not measured" in line)
    assert lines[0].endswith("softmax  1.05x [1.03, 1.07]")
    assert lines[1].endswith("softmax  not measured")
    assert {line.split()[0] for line in lines} == {key[:12] for key in keys}
    assert "\x1b" not in text


def test_an_empty_cache_is_no_error(root, capsys):
    assert run(capsys, "list") == (0, f"no tuned kernels in {root}\n", "")
    assert json.loads(run(capsys, "list", "--json")[1]) == {"cache": str(root), "entries": []}


def test_one_is_removed_by_the_beginning_of_its_key(root, capsys):
    first, second = put(root, "1" * 64, measured=True), put(root, "2" * 64, measured=True)
    status, text, error = run(capsys, "remove", first[:12], "--json")
    assert (status, error) == (0, "")
    assert json.loads(text) == {"cache": str(root), "removed": first[:12]}
    assert [found.entry.key.digest for found in TunedCache(root).entries()] == [second]
    status, text, error = run(capsys, "remove", first[:12])
    assert (status, text) == (2, "")
    assert "found none" in error


@pytest.mark.parametrize("key", ["", "zz", "*", "..", "entry.json"])
def test_what_is_no_key_removes_nothing(root, capsys, key):
    put(root, "1" * 64, measured=True)
    assert run(capsys, "remove", key)[0] == 2
    assert len(list(TunedCache(root).entries())) == 1


def test_a_key_that_is_not_unique_is_refused(root, capsys):
    for number in range(17):
        put(root, f"{number:064x}", measured=False)
    digests = [found.entry.key.digest for found in TunedCache(root).entries()]
    twice = next(digit for digit in "0123456789abcdef" if sum(digest.startswith(digit) for digest in digests) > 1)
    status, _, error = run(capsys, "remove", twice)
    assert status == 2
    assert "Give more digits" in error
    assert len(list(TunedCache(root).entries())) == 17


def test_a_damaged_entry_is_left_out_with_a_warning_and_can_be_removed(root, capsys, caplog):
    key = put(root, "1" * 64, measured=True)
    (root / "90" / key / "entry.json").write_text("{")
    assert json.loads(run(capsys, "list", "--json")[1])["entries"] == []
    assert "ignored" in caplog.text
    assert run(capsys, "remove", key)[0] == 0
    assert not (root / "90" / key).exists()


def test_a_directory_that_is_no_cache_keeps_its_files(tmp_path, capsys):
    precious = tmp_path / "home" / "documents" / "abc" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.touch()
    assert run(capsys, "remove", "abc", "--cache", tmp_path / "home")[0] == 2
    assert precious.exists()


def test_a_file_is_no_cache(tmp_path, capsys):
    (tmp_path / "file").touch()
    status, _, error = run(capsys, "list", "--cache", tmp_path / "file")
    assert status == 2
    assert "found the file" in error


def test_an_unknown_command_names_the_nearest(capsys):
    status, _, error = run(capsys, "lst")
    assert status == 2
    assert "did you mean `list`?" in error
    assert main(["sass", "chek"]) == 2
    assert "did you mean `check`?" in capsys.readouterr().err
