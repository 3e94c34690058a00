"""`kernelwright sass show|play|check`: output, exit status, and errors in one line."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from kernelwright.cli import main
from tests.sass.support import build, compiled


@pytest.fixture
def cubin(tmp_path):
    path = tmp_path / "softmax.cubin"
    path.write_bytes(compiled("softmax", 80))
    return path


def run(capsys, *arguments):
    status = main(["sass", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_play_then_check(cubin, tmp_path, capsys):
    out = tmp_path / "mutated.cubin"
    status, text, error = run(capsys, "play", cubin, "--moves", 30, "--seed", 7, "--out", out, "--json")
    assert (status, error) == (0, "")
    result = json.loads(text)
    assert result["played"] == 30
    assert result["legal"] is True
    assert out.read_bytes() != cubin.read_bytes()
    status, text, error = run(capsys, "check", cubin, out, "--json")
    assert (status, error) == (0, "")
    assert json.loads(text) == {"legal": True, "violations": [], "moved": result["moved"]}


def test_the_same_seed_gives_the_same_bytes(cubin, tmp_path, capsys):
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(files, (1, 1, 2), strict=True):
        assert run(capsys, "play", cubin, "--moves", 10, "--seed", seed, "--out", path)[0] == 0
    a, b, c = (path.read_bytes() for path in files)
    assert a == b != c


def test_no_moves_is_the_same_file(cubin, tmp_path, capsys):
    out = tmp_path / "same.cubin"
    assert run(capsys, "play", cubin, "--moves", 0, "--out", out)[0] == 0
    assert out.read_bytes() == cubin.read_bytes()


def test_the_papers_moves(cubin, tmp_path, capsys):
    out = tmp_path / "paper.cubin"
    status, text, _ = run(capsys, "play", cubin, "--moves", 5, "--paper", "--out", out, "--json")
    assert status == 0
    assert json.loads(text)["played"] == 5


@pytest.mark.parametrize("kind", ["input", "link to it", "folder", "pipe", "in no folder"])
def test_what_playing_must_not_write_over(kind, cubin, tmp_path, capsys):
    out = {"input": cubin, "in no folder": tmp_path / "none" / "out.cubin"}.get(kind, tmp_path / "out")
    if kind == "link to it":
        out.symlink_to(cubin)
    elif kind == "folder":
        out.mkdir()
    elif kind == "pipe":
        os.mkfifo(out)
    before, names = cubin.read_bytes(), sorted(tmp_path.iterdir())
    status, text, error = run(capsys, "play", cubin, "--out", out)
    assert (status, text, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"error: wanted to write {out}, found: ")
    assert (cubin.read_bytes(), sorted(tmp_path.iterdir())) == (before, names)


def test_what_was_played_takes_an_older_files_place_whole_or_not_at_all(cubin, tmp_path, capsys, monkeypatch):
    old, link = tmp_path / "old.cubin", tmp_path / "link.cubin"
    old.write_bytes(b"before")
    link.symlink_to(old)
    replace = Path.replace

    def full(path, target):
        if target == old:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        status, _, error = run(capsys, "play", cubin, "--moves", 1, "--out", link)
    assert (status, "No space left" in error, error.count("\n")) == (2, True, 1)
    assert old.read_bytes() == b"before"
    assert sorted(tmp_path.iterdir()) == sorted([cubin, old, link])
    assert run(capsys, "play", cubin, "--moves", 1, "--out", link)[0] == 0
    assert link.is_symlink()
    assert old.read_bytes() != b"before"


def test_an_illegal_schedule(cubin, tmp_path, capsys):
    sample = build("softmax", 80)
    index = next(i for i, x in enumerate(sample.kernel.instructions) if x.control.wait_mask)
    broken = tmp_path / "broken.cubin"
    broken.write_bytes(sample.with_control(index, wait_mask=0))
    status, text, error = run(capsys, "check", cubin, broken, "--json")
    report = json.loads(text)
    assert (status, error, report["legal"]) == (1, "", False)
    assert {"wait"} <= {v["kind"] for v in report["violations"]}
    assert all(set(v) == {"kind", "address", "detail"} for v in report["violations"])
    status, text, _ = run(capsys, "check", cubin, broken)
    assert status == 1
    assert "not legal" in text


def test_show(cubin, capsys):
    status, text, _ = run(capsys, "show", cubin)
    assert status == 0
    assert {line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2].isalpha()} == {
        "B01----",
        "R-,",
        "W-,",
        "Y",
        "S04",
        "a--",
    }
    assert "softmax: sm_80" in text
    assert "EXIT" in text
    status, text, _ = run(capsys, "show", cubin, "--json")
    kernel = json.loads(text)["kernels"][0]
    assert status == 0
    assert len(kernel["instructions"]) == len(build("softmax", 80).kernel.instructions)
    first = kernel["instructions"][0]
    assert {"address", "opcode", "stall", "wait_mask", "defs", "uses", "pinned"} <= set(first)


@pytest.mark.parametrize("command", ["show", "play", "check-first", "check-second"])
@pytest.mark.parametrize("content", [None, b"", b"junk", "cut"])
def test_unreadable_files(command, content, cubin, tmp_path, capsys):
    bad = tmp_path / "bad.cubin"
    if content is not None:
        bad.write_bytes(compiled("softmax", 80)[:3000] if content == "cut" else content)
    arguments = {
        "show": ["show", bad],
        "play": ["play", bad, "--out", tmp_path / "out"],
        "check-first": ["check", bad, cubin],
        "check-second": ["check", cubin, bad],
    }[command]
    status, text, error = run(capsys, *arguments)
    assert (status, text) == (2, "")
    assert error.startswith("error: wanted")
    assert str(bad) in error
    assert error.count("\n") == 1


def test_no_fitting_disassembler(cubin, capsys, monkeypatch):
    monkeypatch.setattr("kernelwright.gpu.disassembler._candidates", lambda: iter(()))
    status, text, error = run(capsys, "check", cubin, cubin)
    assert (status, text) == (3, "")
    assert "wanted nvdisasm, found none" in error


def test_a_place_that_cannot_be_written(cubin, tmp_path, capsys):
    status, text, error = run(capsys, "play", cubin, "--moves", 1, "--out", tmp_path / "no" / "where")
    assert (status, text) == (2, "")
    assert "wanted to write" in error


def test_a_kernel_that_is_not_there(cubin, capsys):
    status, _, error = run(capsys, "show", cubin, "--kernel", "other")
    assert status == 2
    assert "wanted kernel 'other', found ['softmax']" in error


SPECS = """
import triton
import triton.language as tl
from kernelwright.gpu.launch_spec import TensorArgument
from kernelwright.gpu.triton_spec import TritonSpec


@triton.jit
def doubled(x_ptr, out_ptr):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out_ptr + at, tl.load(x_ptr + at) * 2)


ARGUMENTS = [TensorArgument(name="x_ptr", dtype="fp32", shape=(1024,))]
ARGUMENTS += [TensorArgument(name="out_ptr", dtype="fp32", shape=(1024,), role="output")]
SPECS = {"doubled": TritonSpec(kernel=doubled, arguments=ARGUMENTS, grid=(8,))}
"""


def test_a_triton_kernel_becomes_a_cubin_without_a_gpu(tmp_path, capsys):
    source, out = tmp_path / "kernels.py", tmp_path / "k.cubin"
    source.write_text(SPECS)
    status, text, error = run(capsys, "compile", f"{source}:doubled", "--architecture", "sm_86", "--out", out, "--json")
    assert (status, error) == (0, "")
    assert json.loads(text) == {"out": str(out), "architecture": 86, "kernels": ["doubled"]}
    status, text, _ = run(capsys, "show", out)
    assert (status, text.split(",")[0]) == (0, "doubled: sm_86")


@pytest.mark.toolchain
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_source_becomes_a_cubin_and_a_cubin_does_not(tmp_path, capsys):
    source, out = tmp_path / "k.cu", tmp_path / "k.cubin"
    source.write_text('extern "C" __global__ void doubled(float *x) { x[threadIdx.x] *= 2; }')
    assert run(capsys, "compile", source, "--out", out)[:2] == (
        0,
        f"{out}: doubled for sm_90; `kernelwright sass show {out}` prints it\n",
    )
    assert run(capsys, "compile", out, "--out", tmp_path / "again.cubin")[0] == 2
    source.write_text("no C++")
    status, text, error = run(capsys, "compile", source, "--out", out)
    assert (status, text) == (2, "")
    assert error.startswith(f"error: Wanted a kernel that compiles in {source}; ")


@pytest.mark.parametrize(
    "source", ["nothing.cu", "nothing.py:kernel", "nothing.toml", "nothing.cubin", "corpus:nothing", "."]
)
def test_what_cannot_be_compiled_is_one_line(source, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, text, error = run(capsys, "compile", source, "--out", "k.cubin")
    assert (status, text, error.count("\n")) == (2, "", 1)
    assert not (tmp_path / "k.cubin").exists()
