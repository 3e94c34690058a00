"""What is told of a compiler's output: real compilers, run on wrong sources."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from kernelwright.judge import Judge
from kernelwright.judge.worker.serving import LINES_MAX, first_errors, triton_errors
from kernelwright.records import Reason
from tests.judge.snippets import RELU, candidate
from tests.quick import exhaustive_but

CPP = "int f() {\\n  return y;\\n}\\n"
EXTENSION = f"""
from torch.utils.cpp_extension import load_inline
load_inline("wrong", ["{CPP}"], no_implicit_headers=True, verbose=VERBOSE)
"""
KERNEL = """
__global__ void scale(float* x) {
  x[0] = factor;
}
"""
TRITON = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def scale(x, n: tl.constexpr):
FILL
    tl.store(x + tl.arange(0, n), factor)

triton.compile(ASTSource(scale, {"x": "*fp32"}, {"n": 64}), target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("verbose", [False, True], ids=["in the exception", "printed"])
@pytest.mark.skipif(not shutil.which("ninja") or not shutil.which("c++"), reason="PyTorch builds extensions with them")
def test_an_extension_that_does_not_compile_tells_file_line_and_message(judge: Judge, verbose: bool) -> None:
    found = judge.evaluate(RELU, candidate(top=EXTENSION.replace("VERBOSE", str(verbose))))
    assert found.reason is Reason.BUILD_FAILED
    told = found.detail.splitlines()
    assert told[0].startswith("RuntimeError: Error building extension 'wrong")
    assert told[1].startswith("main.cpp:2:10: error: ")
    assert "return y;" in told[2]
    assert "ninja" not in found.detail
    assert "home/tmp" not in found.detail


@pytest.mark.skipif(not shutil.which("nvcc"), reason="it is CUDA's compiler")
def test_errors_of_nvcc_are_told_with_their_lines(tmp_path) -> None:
    source = tmp_path / "cuda.cu"
    source.write_text(KERNEL)
    command = ["nvcc", "-c", str(source), "-o", str(tmp_path / "cuda.o")]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    told = first_errors(f"Error building extension 'x': [1/2] {' '.join(command)}\n{ran.stdout}", tmp_path / "log")
    assert told.splitlines()[:2] == ["Error building extension 'x'", 'cuda.cu(3): error: identifier "factor" is undefined']


@pytest.mark.parametrize("statements", exhaustive_but([1, 100], 100))
def test_a_triton_kernel_that_does_not_compile_tells_place_and_message(judge: Judge, statements: int) -> None:
    pytest.importorskip("triton")
    fill = "\n".join(f"    y{index} = tl.arange(0, n)" for index in range(statements))
    found = judge.evaluate(RELU, candidate(top=TRITON.replace("FILL", fill)))
    assert found.reason is Reason.BUILD_FAILED, found.detail
    wrong = "    tl.store(x + tl.arange(0, n), factor)"
    line = found.source.splitlines().index(wrong) + 1
    told = found.detail.splitlines()
    place = f"candidate.py:{line}:{wrong.index('factor') + 1}"
    assert told[0] == f"CompilationError: {place}: error: NameError('factor is not defined')"
    assert told[1 : told.index(wrong) + 2][-2:] == [wrong, " " * wrong.index("factor") + "^"]
    assert len(told) < LINES_MAX


def test_an_error_in_a_function_that_a_triton_kernel_calls_tells_both_places(judge: Judge) -> None:
    pytest.importorskip("triton")
    inner = "@triton.jit\ndef inner(x):\n    return x + missing\n"
    kernel = TRITON.replace("@triton.jit\ndef scale", inner + "\n@triton.jit\ndef scale")
    found = judge.evaluate(RELU, candidate(top=kernel.replace("FILL", "    y = inner(x)")))
    lines = found.source.splitlines()
    assert f"candidate.py:{lines.index('    return x + missing') + 1}:16: error: NameError" in found.detail
    assert f"candidate.py:{lines.index('    y = inner(x)') + 1}:9: called here" in found.detail


def test_other_errors_are_no_errors_of_triton() -> None:
    assert triton_errors(ValueError("no"), "candidate.py", "x = 1") is None


def test_no_more_than_forty_lines_are_told(tmp_path) -> None:
    errors = "\n".join(f"/tmp/build/main.cpp:{line}:1: error: no" for line in range(99))
    told = first_errors(f"Error building extension 'x': [1/2] c++\n{errors}", tmp_path / "log").splitlines()
    assert len(told) == LINES_MAX
    assert told[1] == "main.cpp:0:1: error: no"


def test_where_no_error_is_recognised_the_last_lines_are_told(tmp_path) -> None:
    log = tmp_path / "log"
    text = "Error building extension 'x'"
    assert first_errors(text, log) == text
    log.write_text("Building extension module\nold\nBuilding extension module x...\n" + "\n".join(map(str, range(99))))
    assert first_errors(text, log).splitlines() == [text, *map(str, range(99 - LINES_MAX + 1, 99))]


def test_other_words_stay_as_they_are(tmp_path) -> None:
    assert first_errors("/usr/lib/x.so: error: no", tmp_path / "log") == "/usr/lib/x.so: error: no"
