"""Finding a disassembler of the right generation, and compiling without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernelwright.cli import doctor
from kernelwright.errors import UsageError
from kernelwright.sass.corpus import CORPUS
from kernelwright.toolchain import Disassembler, compile_triton, disassemble, installed_disassemblers
from kernelwright.toolchain.disassembler import ENVIRONMENT_VARIABLE
from kernelwright.toolchain.errors import (
    CompilationFailed,
    DisassemblerMismatch,
    DisassemblerMissing,
    DisassemblyRejected,
)
from sass.support import build, compiled


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
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "release {version}, V{version}.0"; exit; fi\n{body}\n'
    )
    path.chmod(0o755)
    return path


def test_the_disassembler_beside_triton_is_found_and_fits():
    found = installed_disassemblers()
    assert found
    chosen = Disassembler.for_cubin(compiled("softmax", 80))
    assert chosen.version[0] == 12
    assert "IMAD" in chosen.listing(compiled("softmax", 80))


def test_no_disassembler(nothing_installed):
    with pytest.raises(
        DisassemblerMissing, match=rf"wanted nvdisasm, found none.*{ENVIRONMENT_VARIABLE}"
    ) as error:
        disassemble(compiled("softmax", 80))
    assert error.value.exit_status == 3


def test_a_disassembler_of_another_generation_is_not_used(nothing_installed, monkeypatch):
    newer = fake(nothing_installed / "nvdisasm", "13.1")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(newer))
    cubin = compiled("softmax", 80)
    with pytest.raises(
        DisassemblerMismatch, match=r"wanted nvdisasm of CUDA 12 for this cubin.*13\.1"
    ) as error:
        Disassembler.for_cubin(cubin)
    assert error.value.exit_status == 3
    newer_format = bytearray(cubin)
    newer_format[8] = 8
    assert Disassembler.for_cubin(bytes(newer_format)).path == newer


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
        with pytest.raises(DisassemblerMissing, match=f"{ENVIRONMENT_VARIABLE} names.* {path}; correct"):
            disassemble(b"whatever")
    (found,) = (probe() for probe in doctor.PROBES if "disassembler" in probe.__name__)
    assert not found.present
    assert str(no_disassembler) in found.found


def test_a_failing_disassembler_blames_the_file(tmp_path):
    broken = Disassembler(
        fake(tmp_path / "nvdisasm", "12.8", "echo 'bad section in '$6 >&2; exit 255"), (12, 8)
    )
    with pytest.raises(DisassemblyRejected, match="bad section in the cubin") as error:
        broken.listing(b"whatever")
    assert error.value.exit_status == 2
    gone = Disassembler(tmp_path / "nowhere", (12, 8))
    with pytest.raises(DisassemblerMissing):
        gone.listing(b"whatever")


def test_a_compiled_kernel_says_how_to_launch_it():
    spec = CORPUS["batched_gemm"]
    kernel = compile_triton(
        spec.function, spec.signature, spec.constants, 80, spec.num_warps, spec.num_stages, spec.aligned
    )
    assert (kernel.name, kernel.architecture, kernel.num_warps) == ("batched_gemm", 80, 4)
    assert kernel.shared_bytes > 8192
    assert ".target sm_80" in kernel.ptx
    assert build("batched_gemm", 80).kernel.name == "batched_gemm"


def test_kernels_that_do_not_compile():
    spec = CORPUS["softmax"]
    with pytest.raises(CompilationFailed, match="wanted types or values for"):
        compile_triton(spec.function, {"out_ptr": "*fp32"}, spec.constants, 80)
    with pytest.raises(CompilationFailed, match="wanted softmax for sm_80, found"):
        compile_triton(spec.function, spec.signature, {"BLOCK": 1000}, 80)


@pytest.mark.parametrize("architecture", [0, 95, 12345])
def test_an_architecture_that_does_not_exist_is_refused_before_it_ends_the_process(architecture):
    spec = CORPUS["row_sum"]
    with pytest.raises(UsageError, match=f"wanted a compute capability.*, found {architecture}"):
        compile_triton(spec.function, spec.signature, spec.constants, architecture)
