"""`kernelwright sass optimize|deploy`: what is printed, exit statuses, and no invented times."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kernelwright.cli import main
from kernelwright.cli.sass import ARCHITECTURES
from kernelwright.errors import DeviceError
from kernelwright.gpu.target import corpus_specs
from kernelwright.sass import elf

CONTRACT = {"target", "kernel", "run", "backend", "unit", "simulated", "schedules", "best"}


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cubin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        path = folder / "row_sum.cubin"
        path.write_bytes(corpus_specs()["row_sum"].build("row_sum", 80).cubin)
    return path


def run(capsys, *arguments):
    status = main(["sass", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_model_says_that_it_is_one(cubin, tmp_path, capsys):
    arguments = ["optimize", cubin, "--backend", "static-issue-cycles", "--agent", "greedy", "--agent", "random"]
    arguments += ["--budget", 30, "--seed", 4, "--moves", "paper", "--out", tmp_path / "run"]
    status, text, error = run(capsys, *arguments, "--json")
    found = json.loads(text)
    assert status == 0
    assert set(found) == CONTRACT
    assert (found["simulated"], found["unit"], found["schedules"]) == (True, "issue cycles", 60)
    assert found["best"]["speedup"] > 1
    assert "not confirmed yet" in error
    status, text, _ = run(capsys, *arguments)
    assert status == 0
    assert "simulated, not a time" in text
    assert " us" not in text
    status, text, error = run(capsys, "deploy", tmp_path / "run")
    assert (status, text) == (2, "")
    assert "wanted the winner of a search" in error.lower()


def test_the_page_of_such_a_run_is_made_again_by_report(cubin, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["optimize", cubin, "--backend", "static-issue-cycles", "--agent", "greedy", "--budget", 5, "--out", out]
    assert run(capsys, *arguments)[0] == 0
    first = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    assert (out / "report.html").read_text() == first


PRINTING = """
import atexit, os, sys
import triton
from kernelwright.gpu.target import corpus_specs

print("by import")
print("by the first stdout", file=sys.__stdout__)
os.write(1, b"by the descriptor\\n")
os.system("echo by a subprocess")
atexit.register(print, "by an exit handler")
SPECS = {"one": corpus_specs()["row_sum"]}
"""


@pytest.mark.exhaustive
def test_what_a_file_of_specs_prints_is_not_among_the_result(tmp_path):
    (tmp_path / "specs.py").write_text(PRINTING)
    arguments = ["specs.py:one", "--backend", "static-issue-cycles", "--agent", "greedy", "--budget", "2", "--json"]
    command = [sys.executable, "-m", "kernelwright", "sass", "optimize", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert set(json.loads(done.stdout)) == CONTRACT
    for by in ("import", "the first stdout", "the descriptor", "a subprocess", "an exit handler"):
        assert f"by {by}\n" in done.stderr


@pytest.fixture
def no_gpu(monkeypatch):
    def absent(device=0):
        raise DeviceError("wanted the CUDA driver, found none; run on a machine with an NVIDIA GPU")

    monkeypatch.setattr("kernelwright.gpu.driver.gpu_identity", absent)


def test_without_a_gpu_it_says_so_and_invents_nothing(no_gpu, tmp_path, capsys):
    status, text, error = run(capsys, "optimize", "corpus:softmax", "--agent", "greedy", "--out", tmp_path / "run", "--json")
    assert (status, text) == (3, "")
    assert error.startswith("error: wanted the CUDA driver")
    assert "--backend static-issue-cycles or simulated-issue" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing.cubin"],
        ["nothing.toml"],
        ["nothing.py:kernel"],
        ["."],
        ["corpus:nothing"],
        ["nothing.cubin", "--backend", "simulated-issue"],
        ["nothing.toml", "--backend", "simulated-issue"],
        ["corpus:nothing", "--backend", "simulated-issue"],
        ["corpus:softmax", "--backend", "guesses"],
        ["corpus:softmax", "--backend", "simulated-issue", "--agent", "luck"],
        ["corpus:softmax", "--budget", "0"],
        ["corpus:softmax", "--moves", "all"],
        ["corpus:row_sum", "--backend", "simulated-issue", "--agent", "greedy", "--kernel", "another"],
        ["corpus:row_sum", "--backend", "simulated-issue", "--agent", "greedy", "--network-device", "cuda:0"],
        ["corpus:row_sum", "--backend", "simulated-issue", "--agent", "greedy", "--gpus", "2"],
        ["CUBIN", "--backend", "simulated-issue", "--agent", "greedy", "--architecture", "90"],
        ["text.cubin", "--backend", "simulated-issue", "--agent", "greedy"],
    ],
)
def test_wrong_usage(arguments, cubin, no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.cubin").write_text("no cubin")
    status, text, error = run(capsys, "optimize", *(cubin if word == "CUBIN" else word for word in arguments))
    assert (status, text) == (2, "")
    assert error.lower().startswith("error: ")
    assert error.count("\n") == 1
    assert "text.cubin" not in arguments or "text.cubin" in error
    assert [path.name for path in tmp_path.iterdir()] == ["text.cubin"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("softmax", "there is no file softmax. Did you mean corpus:softmax?"),
        ("row_sun", "there is no file row_sun. Did you mean corpus:row_sum?"),
        ("zzzz", "there is no file zzzz. Check the path."),
        ("notes.txt", "found notes.txt. Rename it."),
    ],
)
@pytest.mark.parametrize("backend", ["gpu", "simulated-issue"])
def test_a_target_that_is_no_file_is_told_so(name, said, backend, no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    status, text, error = run(capsys, "optimize", name, "--backend", backend, "--agent", "greedy")
    assert (status, text, error.count("\n")) == (2, "", 1)
    assert said in error


LAUNCH = """
source = "kernel.cu"
options = ["-O3"]
name = "k"
entry = "k"
grid = [1, 1, 1]
block = [32, 1, 1]
[[arguments]]
kind = "tensor"
name = "a"
dtype = "fp32"
shape = [32]
role = "output"
"""
SPEC = """
import triton
import triton.language as tl
from kernelwright.gpu.launch_spec import TensorArgument
from kernelwright.gpu.triton_spec import TritonSpec

@triton.jit
def k(a):
    tl.store(a, nonsense)

SPECS = {"k": TritonSpec(k, [TensorArgument(name="a", dtype="fp32", shape=(32,), role="output")], (1,))}
"""


@pytest.mark.parametrize(("name", "text", "said"), [("k.toml", LAUNCH, "kernel.cu(1): error"), ("k.py", SPEC, "nonsense")])
def test_a_kernel_that_does_not_compile_is_the_users_and_one_line(name, text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    compiler = tmp_path / "nvcc"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$last(1): error:\n  x is undefined." >&2\nexit 2\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("KERNELWRIGHT_NVCC", str(compiler))
    (tmp_path / "kernel.cu").touch()
    (tmp_path / name).write_text(text)
    status, out, error = run(capsys, "optimize", name, "--backend", "static-issue-cycles", "--agent", "greedy")
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"error: Wanted a kernel that compiles in {'kernel.cu' if name == 'k.toml' else name}; ")
    assert said in error
    assert "kernelwright-nvcc" not in error
    assert not (tmp_path / "runs").exists()


def test_a_larger_budget_takes_a_run_further(cubin, tmp_path, capsys):
    arguments = ["optimize", cubin, "--backend", "static-issue-cycles", "--agent", "greedy", "--out", tmp_path / "run"]
    played = [json.loads(run(capsys, *arguments, "--json", "--budget", n)[1])["schedules"] for n in (5, 12, 7)]
    assert played == [5, 12, 12]


def test_where_no_schedule_was_faster_nothing_was_measured_again(cubin, tmp_path, capsys):
    arguments = ["optimize", cubin, "--backend", "static-issue-cycles", "--agent", "greedy", "--out", tmp_path / "run"]
    status, text, _ = run(capsys, *arguments, "--limit", "0")
    assert status == 0
    assert "none: no schedule of the search was faster" in text


@pytest.mark.parametrize("names", [["config.json", "original.cubin"], ["config.json", "schedules.jsonl"]])
def test_an_interrupted_search_says_and_keeps_what_was_measured(names, cubin, tmp_path, monkeypatch, capsys):
    def interrupted(game, *, out, **arguments):
        for name in names:
            (out / name).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("kernelwright.assembly.search.optimize_kernel", interrupted)
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "optimize", cubin, "--backend", "static-issue-cycles", "--agent", "greedy")[0] == 130
    kept = list((tmp_path / "runs").iterdir())
    assert len(kept) == ("schedules.jsonl" in names)
    status, _, error = run(capsys, "optimize", cubin, "--backend", "static-issue-cycles", "--agent", "greedy", "--out", ".")
    wanted = "every schedule measured is in .;" if kept else "no schedule was measured yet"
    assert (status, wanted in error) == (130, True)


def test_the_architectures_to_choose_from_are_those_that_can_be_read():
    assert tuple(map(int, ARCHITECTURES)) == elf.ARCHITECTURES


def test_without_a_gpu_the_network_cannot_be_on_one(tmp_path, capsys):
    arguments = ["optimize", "corpus:row_sum", "--backend", "simulated-issue", "--network-device", "cuda:0"]
    status, text, error = run(capsys, *arguments, "--out", tmp_path / "run")
    assert (status, text) == (3, "")
    assert "Choose `cpu`" in error
    assert not (tmp_path / "run").exists()


def test_deploying_what_is_no_run(tmp_path, capsys):
    status, text, error = run(capsys, "deploy", tmp_path)
    assert (status, text) == (2, "")
    assert "target.json" in error
