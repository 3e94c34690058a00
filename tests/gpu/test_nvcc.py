"""Cubins of nvcc: the same path as Triton's, from source to a proven schedule."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

from kernelwright import sass
from kernelwright.deploy.cache import TunedCache
from kernelwright.deploy.deploy import Winner, deploy, find_tuned
from kernelwright.errors import CompilationError, CompilerMissingError, ToolchainError, UsageError
from kernelwright.gpu import disassemble, installed_disassemblers
from kernelwright.gpu.compilers import NVCC_VARIABLE, compile_cuda, find_nvcc
from kernelwright.gpu.target import load_target
from kernelwright.sass.elf import without_code
from kernelwright.sass.program import assemble_program
from tests.deploy.test_deploy import saying
from tests.gpu.fakes import GPU
from tests.quick import exhaustive_but
from tests.sass.support import retuned

SOURCE = Path(__file__).with_name("cuda") / "kernels.cu"
KERNELS = {"sgemm", "row_sum", "histogram", "pipelined_scale", "tensor_gemm", "double_norm", "calls", "jumps"}


def generation():
    """The CUDA major release of the nvcc here, 0 when there is none."""
    try:
        said = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
        return int(re.search(r"release (\d+)", said)[1])
    except (CompilerMissingError, OSError):
        return 0


pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(
        generation() not in {tool.version[0] for tool in installed_disassemblers()},
        reason="needs nvcc and an nvdisasm of its generation",
    ),
]


@pytest.fixture(scope="module", params=exhaustive_but([80, 90], 90))
def cubin(request):
    return compile_cuda(SOURCE.read_text(), request.param)


@pytest.fixture(scope="module")
def program(cubin):
    return sass.load(cubin, disassemble)


def test_every_kernel_is_read_and_written_back_byte_by_byte(cubin, program):
    assert {kernel.name for kernel in program.kernels} == KERNELS
    words = {kernel.name: sass.Schedule(kernel).words() for kernel in program.kernels}
    assert program.with_words(words) == cubin


@pytest.mark.exhaustive
def test_schedules_of_every_kernel_are_proven_legal(cubin, program):
    rng = random.Random(0)
    schedules = [sass.Schedule(kernel) for kernel in program.kernels]
    for schedule in schedules:
        for _ in range(30):
            move = sass.ANY_MOVE.draw(schedule, rng)
            if move is not None:
                schedule.play(move)
    assert all(schedule.moved for schedule in schedules)
    mutated = program.with_words({schedule.kernel.name: schedule.words() for schedule in schedules})
    assert sass.check(cubin, mutated, disassemble) == []


def test_one_kernel_of_several_is_disassembled_alone(cubin, program):
    kernel, others = program.kernel("sgemm"), KERNELS - {"sgemm"}
    listing = disassemble(without_code(cubin, others))
    assert listing.count(".section\t.text.") == 1
    alone = assemble_program(program.image, listing, others).kernel()
    read = [[(i.word, i.defs, i.uses) for i in k.instructions] for k in (alone, kernel)]
    assert (read[0], alone.blocks, alone.fixed) == (read[1], kernel.blocks, kernel.fixed)


@pytest.mark.exhaustive
def test_a_broken_dependence_is_found(cubin, program):
    kernel = program.kernel("sgemm")
    words = [instruction.word for instruction in kernel.instructions]
    chain = next(
        i for i in range(len(words) - 1)
        if kernel.instructions[i].opcode == kernel.instructions[i + 1].opcode == "FFMA"
        and kernel.instructions[i].defs & kernel.instructions[i + 1].uses
    )  # fmt: skip
    words[chain], words[chain + 1] = words[chain + 1], words[chain]
    kinds = {violation.kind for violation in sass.check(cubin, program.with_words({"sgemm": words}), disassemble)}
    assert "raw" in kinds


POLICIES = ("", "L1::evict_first.", "L1::evict_last.", "L1::evict_unchanged.", "L1::no_allocate.")
PREFETCHED = ("", "L2::64B.", "L2::128B.", "L2::256B.")
COPY = """
extern "C" __global__ void copy{number}(const float4* a, float4* b) {{
  float4 v;
  asm volatile("ld.global.{load}v4.f32 {{%0, %1, %2, %3}}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(a + threadIdx.x));
  asm volatile("st.global.{store}v4.f32 [%0], {{%1, %2, %3, %4}};"
               :: "l"(b + threadIdx.x), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}}
"""


@pytest.mark.exhaustive
def test_a_hint_edit_writes_what_ptxas_writes_for_that_policy():
    pairs = [(policy + size, policy) for policy in POLICIES for size in PREFETCHED]
    source = "".join(COPY.format(number=n, load=load, store=store) for n, (load, store) in enumerate(pairs))
    program = sass.load(compile_cuda(source, 90), disassemble)
    plain = program.kernel("copy0")
    slots = [next(i for i, it in enumerate(plain.instructions) if it.opcode == opcode) for opcode in ("LDG", "STG")]
    for number in range(1, len(pairs)):
        schedule = sass.Schedule(plain)
        theirs = [instruction.word for instruction in program.kernel(f"copy{number}").instructions]
        for slot in slots:
            changed = plain.instructions[slot].word ^ theirs[slot]
            if changed:
                schedule.play(sass.HintEdit(slot, changed >> 84 & 7 | (changed >> 68 & 3) << 3))
        assert schedule.words() == theirs, pairs[number]


LAUNCH = """
source = "kernels.cu"
architecture = 90
options = ["-O3"]
name = "sgemm"
entry = "sgemm"
grid = [4, 4, 1]
block = [16, 16, 1]

[[arguments]]
kind = "tensor"
name = "a"
dtype = "fp32"
shape = [64, 64]

[[arguments]]
kind = "tensor"
name = "b"
dtype = "fp32"
shape = [64, 64]

[[arguments]]
kind = "tensor"
name = "c"
dtype = "fp32"
shape = [64, 64]
role = "output"

[[arguments]]
kind = "scalar"
name = "n"
value = 64
"""


@pytest.fixture
def launch_file(tmp_path):
    text = SOURCE.read_text()
    begin = text.index('extern "C" __global__ void sgemm')
    (tmp_path / "kernels.cu").write_text(text[begin : text.index('extern "C"', begin + 1)])
    path = tmp_path / "launch.toml"
    path.write_text(LAUNCH)
    return path


@pytest.mark.exhaustive
def test_a_launch_file_with_source_becomes_a_target_that_can_be_tuned_and_deployed(launch_file, tmp_path):
    target = load_target(str(launch_file), 80)
    assert target.architecture == 90
    assert target.spec.signature == "sgemm(*fp32, *fp32, *fp32, i32) threads=256 shared=0"
    tuned, cache = retuned(target.cubin, "sgemm"), TunedCache(tmp_path / "cache")
    assert deploy(Winner(target, tuned), cache, remeasure=saying(1.05)).refusal is None
    again = load_target(str(launch_file), 90)
    assert find_tuned(cache, again.cubin, 90, GPU.name, again.spec.signature).cubin == tuned


def test_a_launch_file_with_a_cubin(launch_file, tmp_path, cubin):
    (tmp_path / "kernels.cubin").write_bytes(cubin)
    launch_file.write_text(LAUNCH.replace('source = "kernels.cu"', 'cubin = "kernels.cubin"'))
    assert load_target(str(launch_file), 90).cubin == cubin


def test_a_missing_source_is_named(launch_file, tmp_path):
    (tmp_path / "kernels.cu").unlink()
    with pytest.raises(UsageError, match=r"kernels\.cu"):
        load_target(str(launch_file), 90)


def test_what_nvcc_refuses_is_said_with_its_words():
    with pytest.raises(CompilationError, match="undefined") as failed:
        compile_cuda('extern "C" __global__ void k() { nowhere(); }', 90)
    assert failed.value.exit_status == 3


def test_an_nvcc_that_is_killed_refuses_nothing(tmp_path, monkeypatch):
    killed = tmp_path / "nvcc"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setenv(NVCC_VARIABLE, str(killed))
    with pytest.raises(ToolchainError, match="ended by signal 9") as failed:
        compile_cuda("", 90)
    assert not isinstance(failed.value, CompilationError)


def test_without_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv(NVCC_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(CompilerMissingError, match="KERNELWRIGHT_NVCC"):
        compile_cuda("", 90)


@pytest.mark.exhaustive
def test_the_example_of_a_cuda_kernel_is_a_target_with_something_to_move():
    target = load_target(str(Path(__file__).parents[2] / "examples" / "sass" / "sgemm.toml"), 90)
    schedule = sass.Schedule(sass.load(target.cubin, disassemble).kernel(target.spec.entry))
    assert len(schedule.movable_slots) > 200
