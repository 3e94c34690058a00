"""From a winner to the cache, and from what a compiler made back to the winner."""

from __future__ import annotations

import math

import pytest

import kernelwright
from kernelwright import sass
from kernelwright.deploy.cache import TunedCache
from kernelwright.deploy.deploy import Refusal, Winner, deploy, find_tuned, read_winner, write_winner
from kernelwright.errors import UsageError
from kernelwright.gpu import disassemble
from kernelwright.gpu.launch_spec import Target
from kernelwright.gpu.triton_spec import TritonSpec
from kernelwright.judge.schedules import Confirmation, Plan, ScheduleFailure, confirm
from kernelwright.sass.identity import code_of, cubin_identity, transplant
from tests.gpu.fakes import GPU, faster_by_every_changed_byte
from tests.sass.support import retuned

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 3.0, mask=i < n)

from kernelwright.gpu.triton_spec import TritonSpec

SPECS = {"k": TritonSpec(kernel, [], (8,))}
"""


@pytest.fixture
def winner(row_sum, tuned_row_sum):
    return Winner(row_sum, tuned_row_sum, {"moves": [[1, 2]]})


@pytest.fixture
def cache(tmp_path):
    return TunedCache(tmp_path / "cache")


def saying(low, wrong=None):
    """A re-measurement with a known result."""
    return lambda target, tuned: Confirmation(1.1, low, 1.2, 0.01, 20.0, wrong, 5, gpu=GPU)


def test_a_winner_comes_back_from_its_run_directory(winner, tmp_path):
    write_winner(tmp_path / "run", winner)
    assert read_winner(tmp_path / "run") == winner
    with pytest.raises(UsageError, match=r"found no target\.json"):
        read_winner(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"), [("target.json", "{}"), ("target.json", "{"), ("original.cubin", "text"), ("tuned.cubin", "")]
)
def test_a_damaged_file_of_a_winner_is_named(winner, tmp_path, name, content):
    write_winner(tmp_path, winner)
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=name.replace(".", r"\.")):
        read_winner(tmp_path)


def test_where_nothing_can_be_kept_nothing_is_measured(winner, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--cache"):
        deploy(winner, TunedCache(tmp_path / "file"), remeasure=lambda target, tuned: pytest.fail("it was measured"))


def test_deploying_proves_measures_keeps_and_remembers(winner, cache):
    done = deploy(winner, cache, remeasure=saying(1.05))
    assert done.refusal is None
    entry = done.entry
    assert entry.key.gpu == GPU.name
    assert entry.proof.moved > 0
    assert entry.proof.checker == f"kernelwright {kernelwright.__version__}"
    assert (entry.measurement.speedup_low, entry.measurement.noise_floor) == (1.05, 0.01)
    assert entry.provenance["moves"] == [[1, 2]]
    assert entry.provenance["environment"]["packages"]["triton"]
    assert entry.provenance["deployed_at"].endswith("+00:00")
    assert cache.is_verified(entry, GPU)
    found = find_tuned(cache, winner.target.cubin, 90, GPU.name, winner.target.spec.signature)
    assert found.cubin == winner.tuned


@pytest.mark.exhaustive
def test_the_real_re_measurement_fits_the_hook(winner, cache):
    given = {"processes": 2, "plan": Plan.steady(3), "check_seeds": 1, "factory": faster_by_every_changed_byte}
    done = deploy(winner, cache, remeasure=lambda target, tuned: confirm(target, [tuned], **given)[0])
    assert done.refusal is None
    assert done.entry.measurement.processes == 2
    assert math.isclose(done.confirmation.speedup, done.entry.measurement.speedup)


def broken(winner):
    """The winner with its first two movable instructions swapped against the rules."""
    program = sass.load(winner.target.cubin, disassemble)
    words = [instruction.word for instruction in program.kernel().instructions]
    words[0], words[1] = words[1], words[0]
    return program.with_words({program.kernel().name: words})


def test_what_is_not_legal_is_never_run(winner, cache):
    def never(target, tuned):
        raise AssertionError("it was run")

    done = deploy(Winner(winner.target, broken(winner)), cache, remeasure=never)
    assert done.refusal is Refusal.NOT_LEGAL
    assert list(cache.entries()) == []


def fails(target, tuned):
    return Confirmation.of_failure("fault: CUDA_ERROR_ILLEGAL_ADDRESS", 5, ScheduleFailure.FAULT)


@pytest.mark.parametrize(
    ("remeasure", "refusal", "said"),
    [
        (saying(1.005), Refusal.NO_IMPROVEMENT, "1.0050, wanted above 1.0100"),
        (saying(1.1, "3 of 64 bytes of out differ"), Refusal.WRONG_OUTPUT, "3 of 64 bytes"),
        (fails, Refusal.FAILED, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ],
)
def test_what_is_not_confirmed_is_not_kept(winner, cache, remeasure, refusal, said):
    done = deploy(winner, cache, remeasure=remeasure)
    assert done.refusal is refusal
    assert said in done.detail
    assert list(cache.entries()) == []


def test_the_original_is_not_deployed(winner, cache):
    assert deploy(Winner(winner.target, winner.target.cubin), cache, remeasure=fails).refusal is Refusal.UNCHANGED


def test_no_schedule_is_deployed_where_the_rules_were_not_mined(winner, cache):
    blackwell = Target(winner.target.spec, winner.target.cubin, 100)
    done = deploy(Winner(blackwell, winner.tuned), cache, remeasure=saying(1.05))
    assert done.refusal is Refusal.UNTESTED_ARCHITECTURE
    assert list(cache.entries()) == []


def test_without_a_gpu_its_name_must_be_given_and_no_measurement_is_claimed(winner, cache):
    with pytest.raises(UsageError):
        deploy(winner, cache, remeasure=None)
    entry = deploy(winner, cache, remeasure=None, gpu="NVIDIA H200").entry
    assert entry.measurement is None
    assert not cache.is_verified(entry, GPU)


@pytest.fixture(scope="module")
def two_builds(tmp_path_factory):
    """The same kernel from two files in which it stands on other lines."""
    from kernelwright.gpu.launch_spec import ScalarArgument, TensorArgument
    from kernelwright.gpu.target import read_specs

    built = []
    for name, head in (("one", ""), ("elsewhere", "# A comment.\n\n")):
        path = tmp_path_factory.mktemp(name) / f"{name}.py"
        path.write_text(head + KERNEL)
        spec = read_specs(path)["k"]
        arguments = [
            TensorArgument(name="x_ptr", dtype="fp32", shape=(1024,)),
            TensorArgument(name="y_ptr", dtype="fp32", shape=(1024,), role="output"),
            ScalarArgument(name="n", value=1000),
        ]
        built.append(TritonSpec(spec.kernel, arguments, (8,), {"BLOCK": 128}).build("k", 80))
    return built


def test_moving_the_source_changes_the_bytes_and_not_the_identity(two_builds):
    one, other = two_builds
    assert one.cubin != other.cubin
    assert cubin_identity(one.cubin) == cubin_identity(other.cubin)


@pytest.mark.exhaustive
def test_a_tuned_kernel_is_found_for_another_build_and_fits_it(two_builds, cache):
    one, other = two_builds
    tuned = retuned(one.cubin)
    deploy(Winner(one, tuned), cache, remeasure=saying(1.05))
    found = find_tuned(cache, other.cubin, 80, GPU.name, other.spec.signature)
    assert found.cubin not in (tuned, other.cubin)
    assert code_of(found.cubin) == code_of(tuned)
    assert sass.check(other.cubin, found.cubin, disassemble) == []
    assert find_tuned(cache, other.cubin, 80, "Other GPU", other.spec.signature) is None


def test_other_code_has_another_identity_and_cannot_be_put_in(two_builds, row_sum, tuned_row_sum):
    assert cubin_identity(row_sum.cubin) != cubin_identity(tuned_row_sum)
    with pytest.raises(ValueError, match="wanted code for"):
        transplant(row_sum.cubin, code_of(two_builds[0].cubin))


@pytest.mark.parametrize("data", [b"", b"text", b"\x7fELF\x02" + bytes(80), b"\x7fELF\x02" + b"\xff" * 80])
def test_what_is_no_cubin_has_no_identity(data):
    with pytest.raises(ValueError, match="wanted a"):
        cubin_identity(data)
