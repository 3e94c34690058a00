"""Finding a disassembler of the right generation, and compiling without a GPU."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from kernelwright.cli import doctor
from kernelwright.errors import (
    CompilationError,
    DisassemblerMismatchError,
    DisassemblerMissingError,
    DisassemblyError,
    UsageError,
)
from kernelwright.gpu import Disassembler, compile_triton, disassemble, installed_disassemblers
from kernelwright.gpu.disassembler import ENVIRONMENT_VARIABLE
from kernelwright.gpu.target import corpus_specs
from kernelwright.sass.instruction import parse_listing
from tests.quick import exhaustive_but
from tests.sass.support import build, compiled

PUBLISHED = Path(__file__).parents[2] / "results" / "sass-h200"


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """No Triton, no PATH, no toolkit."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name in (ENVIRONMENT_VARIABLE, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    real = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda p: False if "/usr/local/cuda" in str(p) else real(p))
    return tmp_path


def fake(path: Path, version: str, body: str = "exit 0") -> Path:
    """An executable that says it is nvdisasm of a version."""
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "release {version}, V{version}.0"; exit; fi\n{body}\n')
    path.chmod(0o755)
    return path


def test_the_disassembler_beside_triton_is_found_and_fits():
    found = installed_disassemblers()
    assert found
    listing = Disassembler.for_cubin(compiled("softmax", 80)).listing(compiled("softmax", 80))
    assert "IMAD" in listing
    assert all(instruction.has_marks for instruction in parse_listing(listing)["softmax"].instructions)


def test_no_disassembler(nothing_installed):
    with pytest.raises(DisassemblerMissingError, match=rf"wanted nvdisasm, found none.*{ENVIRONMENT_VARIABLE}") as error:
        disassemble(compiled("softmax", 80))
    assert error.value.exit_status == 3


def test_a_disassembler_that_cannot_read_the_format_is_not_used(nothing_installed, monkeypatch):
    older = fake(nothing_installed / "nvdisasm", "12.8")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(older))
    cubin = compiled("softmax", 80)
    assert Disassembler.for_cubin(cubin).path == older
    with pytest.raises(
        DisassemblerMismatchError, match=r"wanted nvdisasm of CUDA 13 or later for this cubin.*12\.8"
    ) as error:
        Disassembler.for_cubin(in_the_new_format(cubin))
    assert error.value.exit_status == 3


def test_a_disassembler_of_the_cubins_own_generation_is_preferred(nothing_installed, monkeypatch):
    newer = fake(nothing_installed / "nvdisasm", "13.1")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(newer))
    cubin = compiled("softmax", 80)
    assert Disassembler.for_cubin(cubin).path == newer
    too_old = bytearray(cubin)
    too_old[48] = 70
    with pytest.raises(DisassemblerMismatchError, match=r"wanted nvdisasm of CUDA 12 for this cubin.*13\.1"):
        Disassembler.for_cubin(bytes(too_old))
    home = nothing_installed / "home"
    (home / "bin").mkdir(parents=True)
    older = fake(home / "bin" / "nvdisasm", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert Disassembler.for_cubin(cubin).path == older
    assert Disassembler.for_cubin(in_the_new_format(cubin)).path == newer


def in_the_new_format(cubin: bytes) -> bytes:
    """The cubin with a header as CUDA 13 writes it."""
    header = bytearray(cubin)
    header[7:9] = (0x41, 8)
    header[48:52] = (0, cubin[48], 0, 0)
    return bytes(header)


def test_a_newer_disassembler_is_given_an_older_cubin_under_its_own_header(tmp_path):
    newer = Disassembler(fake(tmp_path / "nvdisasm", "13.1", f"cp $6 {tmp_path}/seen"), (13, 1))
    cubin = compiled("softmax", 80)
    newer.listing(cubin)
    assert (tmp_path / "seen").read_bytes() == in_the_new_format(cubin)
    newer.listing(in_the_new_format(cubin))
    assert (tmp_path / "seen").read_bytes() == in_the_new_format(cubin)
    newer.listing(b"whatever")
    assert (tmp_path / "seen").read_bytes() == b"whatever"


READ_BY_NVDISASM_12_8 = {
    "attention_wgmma": (667, "a5c8594ba3c2cd0d"),
    "fused_feed_forward": (524, "7ceb7c25447d7e3b"),
    "int8_gemm": (436, "a4be9bdbdfe817b4"),
    "sgemm": (326, "4ead07372d58071e"),
}
"""Instructions of published cubins of ptxas 12.8, and a digest of what nvdisasm 12.8 says of each."""


@pytest.mark.parametrize("name", exhaustive_but(READ_BY_NVDISASM_12_8, "sgemm"))
def test_every_disassembler_reads_the_same_in_an_older_cubin(name):
    cubin = (PUBLISHED / name / "original.cubin").read_bytes()
    for tool in (tool for tool in installed_disassemblers() if tool.fits(cubin)):
        rows = [
            (kernel.name, i.address, i.text, i.word, sorted(i.defs), sorted(i.uses))
            for kernel in parse_listing(tool.listing(cubin)).values()
            for i in kernel.instructions
        ]
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
        assert (len(rows), digest) == READ_BY_NVDISASM_12_8[name], tool


def test_the_named_disassembler_comes_first(monkeypatch, tmp_path):
    named = fake(tmp_path / "nvdisasm", "12.6")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(named))
    assert Disassembler.for_cubin(compiled("softmax", 80)).path == named


@pytest.fixture
def no_disassembler(tmp_path):
    """A program by that name that says something else."""
    other = tmp_path / "bin" / "nvdisasm"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    return other


def test_what_is_not_nvdisasm_is_passed_over(nothing_installed, no_disassembler, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(no_disassembler.parent.parent))
    assert installed_disassemblers() == ()


def test_one_that_is_named_and_does_not_run_is_not_replaced_in_silence(no_disassembler, monkeypatch):
    for path in (no_disassembler.parent, no_disassembler.parent / "nowhere", no_disassembler):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
        with pytest.raises(DisassemblerMissingError, match=f"{ENVIRONMENT_VARIABLE} names.* {path}; correct"):
            disassemble(b"whatever")
    found = doctor.look_for("disassembler")
    assert not found.present
    assert str(no_disassembler) in found.found


def test_a_failing_disassembler_blames_the_file(tmp_path):
    broken = Disassembler(fake(tmp_path / "nvdisasm", "12.8", "echo 'bad section in '$6 >&2; exit 255"), (12, 8))
    with pytest.raises(DisassemblyError, match="bad section in the cubin") as error:
        broken.listing(b"whatever")
    assert error.value.exit_status == 2
    gone = Disassembler(tmp_path / "nowhere", (12, 8))
    with pytest.raises(DisassemblerMissingError):
        gone.listing(b"whatever")


SIGNATURE = {"out_ptr": "*fp32", "in_ptr": "*fp32", "row_stride": "i32", "n_cols": "i32"}


def test_a_compiled_kernel_says_how_to_launch_it():
    spec = corpus_specs()["batched_gemm"]
    names = [name for name in spec.kernel.arg_names if name not in spec.constants]
    signature = {name: "*fp16" if name.endswith("_ptr") else "i32" for name in names}
    kernel = compile_triton(spec.kernel, signature, spec.constants, 80, aligned=frozenset(names))
    assert (kernel.name, kernel.architecture, kernel.num_warps) == ("batched_gemm", 80, 4)
    assert kernel.shared_bytes > 8192
    assert ".target sm_80" in kernel.ptx
    assert build("batched_gemm", 80).kernel.name == "batched_gemm"


def test_kernels_that_do_not_compile():
    spec = corpus_specs()["softmax"]
    with pytest.raises(CompilationError, match="wanted types or values for"):
        compile_triton(spec.kernel, {"out_ptr": "*fp32"}, spec.constants, 80)
    with pytest.raises(CompilationError, match="wanted softmax for sm_80, found"):
        compile_triton(spec.kernel, SIGNATURE, {"BLOCK": 1000}, 80)


@pytest.mark.parametrize("architecture", [0, 95, 12345])
def test_an_architecture_that_does_not_exist_is_refused_before_it_ends_the_process(architecture):
    spec = corpus_specs()["row_sum"]
    with pytest.raises(UsageError, match=f"wanted a compute capability.*, found {architecture}"):
        compile_triton(spec.kernel, SIGNATURE, spec.constants, architecture)
