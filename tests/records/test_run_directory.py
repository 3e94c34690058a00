"""A run directory: whole lines or none, whatever ends the process."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.records import (
    Evaluation,
    RunDirectory,
    Verdict,
    capture_environment,
    read_objects,
    require_possible,
    unpacked,
)
from kernelwright.records import run_directory as module
from kernelwright.records.run_directory import commit, processor
from tests.forks import forked


def evaluation(number):
    return Evaluation(
        task=str(number),
        task_sha256="a",
        candidate_sha256="b",
        verdict=Verdict.ACCEPTED,
        detail="ä\n" * number,
    )


def test_what_is_appended_is_read_back_in_order(tmp_path):
    run = RunDirectory(tmp_path / "new" / "run")
    assert list(run.evaluations()) == []
    records = [evaluation(number) for number in range(5)]
    for record in records:
        run.append(record)
    assert list(run.evaluations()) == records
    assert list(RunDirectory(run.path).evaluations()) == records


@pytest.mark.parametrize("keep", [0, 1, 40, -2, -1])
def test_a_torn_last_line_costs_itself_only(tmp_path, keep):
    run = RunDirectory(tmp_path)
    run.append(evaluation(0))
    whole = run.evaluations_path.stat().st_size
    run.append(evaluation(1))
    size = run.evaluations_path.stat().st_size
    os.truncate(run.evaluations_path, whole + keep if keep >= 0 else size + keep)
    found = [record.task for record in run.evaluations()]
    assert found == (["0", "1"] if keep == -1 else ["0"])
    run.append(evaluation(2))
    assert [record.task for record in run.evaluations()] == [*found, "2"]


def test_lines_that_are_no_records_are_skipped_and_told_once(tmp_path, caplog):
    run = RunDirectory(tmp_path)
    run.append(evaluation(0))
    with run.evaluations_path.open("ab") as file:
        file.write(b'\n{"task": 3}\nnonsense\n\xff\xfe\n[]\n')
    run.append(evaluation(1))
    for _ in range(2):
        assert [record.task for record in run.evaluations()] == ["0", "1"]
    assert [record.args for record in caplog.records] == [(number, run.evaluations_path) for number in (3, 4, 5, 6)]


def test_records_without_a_configuration_are_not_gone_on_with(tmp_path):
    run = RunDirectory(tmp_path)
    run.claim({"kind": "x"}, same=("kind",), device="cpu")
    run.append(evaluation(0))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match=r"holds evaluations.jsonl but no config.json"):
        run.claim({"kind": "x"}, same=("kind",), device="cpu")


def test_a_writer_that_is_killed_leaves_whole_lines(tmp_path):
    run = RunDirectory(tmp_path)
    reader, writer = os.pipe()

    def write():
        for number in range(1_000_000):
            run.append(evaluation(number))
            os.write(writer, b"x")

    pid = forked(write)
    for _ in range(5):
        os.read(reader, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(writer)
    acknowledged = 5 + len(os.read(reader, 1 << 16))
    os.close(reader)
    tasks = [record.task for record in run.evaluations()]
    assert len(tasks) >= acknowledged
    assert tasks == [str(number) for number in range(len(tasks))]


def test_json_files_are_replaced_whole(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.read_json("config.json") is None
    run.write_json("config.json", {"b": 1, "a": [2]})
    assert run.read_json("config.json") == {"a": [2], "b": 1}
    run.write_json("config.json", {"c": 3})
    assert run.read_json("config.json") == {"c": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_file_that_is_no_json_is_a_usage_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json"):
        RunDirectory(tmp_path).read_json("config.json")


def test_a_directory_that_cannot_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(UsageError, match="Choose another"):
            RunDirectory(path)


# --- the environment ------------------------------------------------------------------------------


def test_the_environment_names_what_a_number_depends_on(monkeypatch):
    found = capture_environment("cpu")
    assert found["device"] == "cpu"
    assert found["packages"]["torch"]
    assert found["cpu_count"] == os.cpu_count()
    assert found["python"] == platform.python_version()
    assert "gpu" not in found
    monkeypatch.setattr(module.metadata, "version", lambda name: (_ for _ in ()).throw(module.metadata.PackageNotFoundError))
    assert set(capture_environment("cpu")["packages"].values()) == {None}


def test_gpus_come_from_the_driver_and_are_none_without_one(tmp_path, set_gpus, monkeypatch):
    set_gpus(1)
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1, 143771 MiB, 1980 MHz, 700.00 W'\necho\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert capture_environment("cuda:0")["cuda_device_max_connections"] == "1"
    (gpu,) = capture_environment("cuda:0")["gpu"]
    assert (gpu["name"], gpu["driver_version"]) == ("NVIDIA H200", "570.1")
    driver.unlink()
    assert capture_environment("cuda:0")["gpu"] == []


@pytest.mark.parametrize(
    ("text", "name"), [("vendor: x\nmodel name\t: Fast 9000\n", "Fast 9000"), ("nothing", None), (None, None)]
)
def test_the_processor_is_named_from_the_kernel_or_by_python(tmp_path, text, name):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert processor(tmp_path / "cpuinfo") == (name or platform.processor())


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout without a commit, and git with an author in it."""
    monkeypatch.delenv("KERNELWRIGHT_COMMIT")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    return tmp_path, git


def test_the_commit_says_when_the_tree_differs(checkout):
    root, git = checkout
    assert commit(root) is None
    (root / "file").write_text("a")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    clean = commit(root)
    assert len(clean) == 40
    (root / "untracked").touch()
    assert commit(root) == clean
    (root / "file").write_text("b")
    assert commit(root) == clean + "+dirty"


def test_asking_for_the_commit_writes_nothing_into_the_checkout(checkout):
    root, git = checkout
    (root / "file").write_text("a")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    os.utime(root / "file", (1, 1))
    before = (root / ".git" / "index").read_bytes()
    assert len(commit(root)) == 40
    assert (root / ".git" / "index").read_bytes() == before, "git would note what it saw, under a lock"


def test_without_git_there_is_no_commit(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commit(checkout[0]) is None


def test_outside_a_checkout_the_builder_may_name_the_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELWRIGHT_COMMIT", "abc")
    assert commit(tmp_path) == "abc"
    (tmp_path / ".git").mkdir()  # of whoever copied the files
    assert commit(tmp_path) == "abc"
    (tmp_path / ".git").rmdir()
    monkeypatch.delenv("KERNELWRIGHT_COMMIT")
    assert commit(tmp_path) is None


# --- claiming -------------------------------------------------------------------------------------


def claim(run, **changes):
    config = {"kind": "optimize", "task": "a", "task_sha256": "1", "cubin_sha256": "2"} | changes
    return run.claim(config, same=("kind", "task_sha256", "cubin_sha256"), device="cpu")


def test_a_directory_with_results_is_resumed_by_the_same_run_only(tmp_path):
    run = RunDirectory(tmp_path)
    assert claim(run)
    run.append(evaluation(0))
    assert not claim(run)
    with pytest.raises(UsageError, match=r"another `task` \(\"a\", now \"b\"\)"):
        claim(run, task="b", task_sha256="3")
    with pytest.raises(UsageError, match=r"another `task` \(still a: its file, or a model's code, mode or example inputs"):
        claim(run, task_sha256="3")
    with pytest.raises(UsageError, match=r"another `cubin_sha256` \(\"2\", now \"4\"\)"):
        claim(run, cubin_sha256="4")
    assert run.read_json("config.json")["task"] == "a"


def test_a_directory_in_which_nothing_was_found_out_can_be_had_by_another_run(tmp_path):
    assert claim(RunDirectory(tmp_path))
    assert claim(RunDirectory(tmp_path), task="corrected", task_sha256="3")
    assert RunDirectory(tmp_path).read_json("config.json")["task"] == "corrected"


CLAIM = """
import sys
from pathlib import Path
from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.records import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
try:
    run.claim({"kind": "optimize"}, same=("kind",), device="cpu")
except UsageError as error:
    print(error)
else:
    print("claimed", flush=True)
    sys.stdin.read()
"""


def claimed_elsewhere(path):
    command = [sys.executable, "-c", CLAIM, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.exhaustive
def test_two_processes_cannot_work_in_one_directory_and_a_killed_one_leaves_it_free(tmp_path):
    with claimed_elsewhere(tmp_path) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(UsageError, match="another process is at work in it"):
            claim(RunDirectory(tmp_path))
        assert RunDirectory(tmp_path).read_json("config.json") == {"kind": "optimize"}
        other.kill()
    run = RunDirectory(tmp_path)
    assert claim(run)
    with claimed_elsewhere(tmp_path) as other:
        assert "another process" in other.stdout.readline()
    del run
    with claimed_elsewhere(tmp_path) as other:
        assert other.stdout.readline() == "claimed\n"
        other.kill()


def test_one_process_may_claim_a_directory_again(tmp_path):
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    assert claim(first)
    assert claim(second)


def test_a_directory_that_cannot_be_claimed_for_want_of_permission_is_said(tmp_path):
    (tmp_path / ".lock").mkdir()  # as good as no permission, also for root
    with pytest.raises(UsageError, match="Wanted a directory to write to"):
        claim(RunDirectory(tmp_path))


def test_what_differs_is_named_and_nothing_else(tmp_path):
    run = RunDirectory(tmp_path)
    (tmp_path / "found.jsonl").touch()
    run.write_json("config.json", {"settings": {"blocks": 6, "audits": 4, "deep": {"a": 1, "b": 2}}})
    with pytest.raises(UsageError, match=r"another `settings` \(blocks: 6, now 3; deep: a: 1, now null\)\."):
        run.claim({"settings": {"blocks": 3, "audits": 4, "deep": {"b": 2}}}, same=("settings",), device="cpu")


def test_only_a_directory_without_findings_is_removed(tmp_path):
    empty, begun = RunDirectory(tmp_path / "empty"), RunDirectory(tmp_path / "begun")
    for run in (empty, begun):
        claim(run)
    begun.append(evaluation(0))
    for run in (empty, begun):
        run.remove_if_nothing_was_found_out()
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]
    assert len(list(begun.evaluations())) == 1


@pytest.mark.parametrize("content", ["[1]", '"text"'])
def test_a_config_that_is_of_no_run_is_a_usage_error_and_stays(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "index.js").touch()
    with pytest.raises(UsageError, match="is not of a run"):
        claim(RunDirectory(tmp_path))
    assert (tmp_path / "config.json").read_text() == content


def test_what_cannot_be_read_or_written_is_said(tmp_path):
    run = RunDirectory(tmp_path)
    for name in ("config.json", "evaluations.jsonl", "table.json"):
        (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=r"config\.json; Is a directory"):
        run.read_json("config.json")
    with pytest.raises(UsageError, match=r"evaluations\.jsonl; Is a directory"):
        list(run.evaluations())
    with pytest.raises(InfrastructureError, match=r"evaluations\.jsonl; Is a directory"):
        run.append(evaluation(0))
    with pytest.raises(InfrastructureError, match=r"table\.json; Is a directory"):
        run.write_json("table.json", {})
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", ["folder", "pipe", "of a folder that takes no file"])
def test_what_no_evaluation_can_be_added_to_is_told_before_any_is_made(kind, tmp_path):
    run = RunDirectory(tmp_path)
    if kind == "folder":
        run.evaluations_path.mkdir()
    elif kind == "pipe":
        os.mkfifo(run.evaluations_path)
    else:
        run.evaluations_path.symlink_to("/proc/none")
    with pytest.raises(UsageError, match=r"Wanted a run directory whose evaluations\.jsonl can be written, found"):
        claim(run)
    assert not (tmp_path / "config.json").exists()


def test_claiming_makes_no_file_of_evaluations_and_spares_what_is_there(tmp_path):
    claim(RunDirectory(tmp_path))
    assert not (tmp_path / "evaluations.jsonl").exists()
    (tmp_path / "evaluations.jsonl").write_text("{}\n")
    claim(RunDirectory(tmp_path))
    assert (tmp_path / "evaluations.jsonl").read_text() == "{}\n"


def test_whether_a_directory_can_be_made_is_said_without_making_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "a" / "b", Path("a/b"), Path("a")):
        require_possible(path)
    for path in (tmp_path / "file", tmp_path / "file" / "a", Path("file")):
        with pytest.raises(UsageError, match=r"found .*file: Not a directory\. Choose another one"):
            require_possible(path)
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="Permission denied"):
        require_possible(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("packer", [gzip, lzma])
def test_a_packed_json_file_is_read_like_any_other(tmp_path, packer):
    run, data = RunDirectory(tmp_path), '{"moved": "ä"}'.encode()
    (tmp_path / ("winner.json.gz" if packer is gzip else "winner.json.xz")).write_bytes(packer.compress(data))
    assert run.read_json("winner.json") == {"moved": "ä"}
    assert unpacked(tmp_path / "winner.json") == data
    run.write_json("winner.json", {"moved": 2})
    assert run.read_json("winner.json") == {"moved": 2}, "what was written since the run was packed counts"


def test_lines_written_since_a_run_was_packed_come_after_the_packed_ones(tmp_path):
    (tmp_path / "schedules.jsonl.gz").write_bytes(gzip.compress(b'{"number": 1}\n[2]\n{"number'))
    (tmp_path / "schedules.jsonl").write_text('{"number": 3}\n\n{"num')
    assert list(read_objects(tmp_path / "schedules.jsonl")) == [{"number": 1}, {"number": 3}]
    assert list(read_objects(tmp_path / "others.jsonl")) == []


@pytest.mark.parametrize("damage", ["no gzip", "cut", "no JSON", "no UTF-8"])
def test_a_packed_json_file_that_is_damaged_is_a_usage_error(tmp_path, damage):
    packed = gzip.compress(json.dumps({"moved": list(range(1000))}).encode())
    others = {"no gzip": b"{}", "no JSON": gzip.compress(b"{"), "no UTF-8": gzip.compress(b'"\xff"')}
    (tmp_path / "winner.json.gz").write_bytes(others.get(damage, packed[:-9]))
    with pytest.raises(UsageError, match=r"winner\.json\.gz"):
        RunDirectory(tmp_path).read_json("winner.json")


@pytest.mark.parametrize(
    ("packer", "damage"), [(gzip, b"not packed at all"), (lzma, b"not packed at all"), (gzip, None), (lzma, None)]
)
def test_packed_records_that_are_damaged_are_a_usage_error(tmp_path, packer, damage):
    packed, name = packer.compress(evaluation(1).model_dump_json().encode() + b"\n"), "gz" if packer is gzip else "xz"
    (tmp_path / f"evaluations.jsonl.{name}").write_bytes(damage or packed[:-9])
    with pytest.raises(UsageError, match=rf"evaluations\.jsonl\.{name}"):
        list(RunDirectory(tmp_path).evaluations())
