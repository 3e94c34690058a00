"""The decorator, on kernels that Triton really compiles and a driver that stands in for the GPU's."""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys

import pytest
import torch
import triton
from triton.runtime import driver

import kernelwright
from kernelwright import sass
from kernelwright.deploy import triton_jit
from kernelwright.deploy.cache import CacheEntry, Proof, TunedCache, key_of
from kernelwright.deploy.triton_jit import TunedFunction
from kernelwright.errors import DisassemblerMismatchError, UsageError
from kernelwright.gpu import disassemble
from kernelwright.gpu.launch_spec import ScalarArgument, TensorArgument, signature_of
from kernelwright.gpu.triton_spec import TritonSpec
from tests.deploy import kernels
from tests.deploy.fake_triton import FakeDriver
from tests.gpu.fakes import GPU
from tests.sass.support import retuned

N = 1000
GRID = (8,)


def scaled(grid, x, y, n, factor, *_):
    y[:n] = x[:n] * factor


def scaled_wrongly(grid, x, y, n, factor, *_):
    y[:n] = x[:n] * factor
    y[0] += 1e-6


def forget():
    """Let no test launch what another has compiled and loaded."""
    for function in (kernels.scale, kernels.tuned_scale.fn):
        function.device_caches.clear()
    kernels.tuned_scale.cache.clear()


@pytest.fixture
def fake(monkeypatch):
    stand_in = FakeDriver(scaled)
    monkeypatch.setattr(driver, "_active", stand_in)
    monkeypatch.setattr(triton_jit, "gpu_identity", lambda device: GPU)
    forget()
    yield stand_in
    forget()


@pytest.fixture
def cache(tmp_path):
    return TunedCache(tmp_path / "cache")


def tensors():
    return torch.arange(N, dtype=torch.float32), torch.zeros(N)


def keep(cache, kernel, tuned=None, **changes):
    """Put a tuned kernel for a compiled one into the cache; return its cubin."""
    original = kernel.asm["cubin"]
    tuned = retuned(original) if tuned is None else tuned
    entry = CacheEntry(
        key=key_of(original, 90, GPU.name, signature_of(kernel)),
        entry=kernel.metadata.name,
        original_sha256=hashlib.sha256(original).hexdigest(),
        tuned_sha256=hashlib.sha256(tuned).hexdigest(),
        proof=Proof(checker="test", moved=1),
        **changes,
    )
    cache.put(entry, tuned)
    return tuned


def launch(function, **options):
    x, y = tensors()
    kernel = function[GRID](x, y, N, 3.0, **options)
    assert torch.allclose(y, x * 3, atol=1e-4)
    return kernel


@pytest.fixture
def tuned(fake, cache):
    """The cubin of a tuned `scale`, in the cache."""
    compiled = kernels.scale.warmup(torch.float32, torch.float32, N, 3.0, grid=GRID, BLOCK=128)
    kernels.scale.device_caches.clear()
    return keep(cache, compiled)


def test_the_first_launch_runs_the_original_and_later_ones_the_tuned_kernel(fake, cache, tuned, caplog):
    function = kernelwright.jit(kernels.scale, cache=cache)
    original = launch(function, BLOCK=128).asm["cubin"]
    # The comparison runs both once more.
    assert fake.launched == [original, original, tuned]
    for _ in range(3):
        launch(function, BLOCK=128)
    assert fake.launched[3:] == [tuned] * 3
    assert fake.utils.loaded == [original, tuned]
    assert caplog.records == []


def test_the_comparison_is_remembered(fake, cache, tuned):
    launch(kernelwright.jit(kernels.scale, cache=cache), BLOCK=128)
    kernels.scale.device_caches.clear()
    before = len(fake.launched)
    function = kernelwright.jit(kernels.scale, cache=cache)
    launch(function, BLOCK=128)
    launch(function, BLOCK=128)
    assert fake.launched[before + 1 :] == [tuned]


def test_tritons_own_cache_keeps_the_original(fake, cache, tuned):
    function = kernelwright.jit(kernels.scale, cache=cache)
    original = launch(function, BLOCK=128).asm["cubin"]
    launch(function, BLOCK=128)
    kernels.scale.device_caches.clear()
    assert launch(kernels.scale, BLOCK=128).asm["cubin"] == original
    assert fake.launched[-1] == original


def test_wrong_outputs_keep_the_original_and_are_said_once(fake, cache, tuned, caplog):
    fake.behaviour[tuned] = scaled_wrongly
    function = kernelwright.jit(kernels.scale, cache=cache)
    for _ in range(3):
        kernel = launch(function, BLOCK=128)
    assert fake.launched[-2:] == [kernel.asm["cubin"]] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "bytes of tensor 1 differ" in caplog.text
    assert not any(cache.is_verified(found.entry, GPU) for found in cache.entries())


def test_a_kernel_that_is_not_deterministic_is_compared_within_its_tolerance(fake, cache, caplog):
    compiled = kernels.scale.warmup(torch.float32, torch.float32, N, 3.0, grid=GRID, BLOCK=128)
    kernels.scale.device_caches.clear()
    tuned = keep(cache, compiled, deterministic=False, atol=1e-5)
    fake.behaviour[tuned] = scaled_wrongly
    function = kernelwright.jit(kernels.scale, cache=cache)
    launch(function, BLOCK=128)
    launch(function, BLOCK=128)
    assert fake.launched[-1] == tuned
    assert caplog.records == []


def test_what_is_not_legal_never_runs(fake, cache, caplog):
    compiled = kernels.scale.warmup(torch.float32, torch.float32, N, 3.0, grid=GRID, BLOCK=128)
    kernels.scale.device_caches.clear()
    program = sass.load(compiled.asm["cubin"], disassemble)
    words = [instruction.word for instruction in program.kernel().instructions]
    words[0], words[1] = words[1], words[0]
    broken = keep(cache, compiled, program.with_words({program.kernel().name: words}))
    function = kernelwright.jit(kernels.scale, cache=cache)
    launch(function, BLOCK=128)
    launch(function, BLOCK=128)
    assert broken not in fake.launched
    assert "not a legal schedule" in caplog.text


def test_without_a_fitting_disassembler_the_proof_made_before_stands(fake, cache, tuned, monkeypatch, caplog):
    def mismatch(cubin):
        raise DisassemblerMismatchError("wanted nvdisasm of CUDA 12")

    monkeypatch.setattr(triton_jit, "disassemble", mismatch)
    function = kernelwright.jit(kernels.scale, cache=cache)
    with caplog.at_level(logging.INFO):
        launch(function, BLOCK=128)
        launch(function, BLOCK=128)
    assert fake.launched[-1] == tuned
    assert "the proof made when the kernel was deployed stands" in caplog.text


def test_another_configuration_runs_the_original_and_says_so(fake, cache, tuned, caplog):
    function = kernelwright.jit(kernels.scale, cache=cache)
    first = launch(function, BLOCK=128, num_warps=8)
    launch(function, BLOCK=128, num_warps=8)
    assert set(fake.launched) == {first.asm["cubin"]}
    assert "no tuned kernel fits scale" in caplog.text
    assert len(caplog.records) == 1


def test_each_specialisation_is_looked_up(fake, cache, tuned):
    function = kernelwright.jit(kernels.scale, cache=cache)
    for block in (256, 128, 256, 128):
        launch(function, BLOCK=block)
    assert fake.launched[-1] == tuned
    assert fake.launched[-2] != tuned


def test_a_kernel_that_nobody_tuned_is_no_warning(fake, cache, caplog):
    with caplog.at_level(logging.WARNING):
        launch(kernelwright.jit(kernels.scale, cache=cache), BLOCK=128)
    assert caplog.records == []


def test_a_damaged_entry_keeps_the_original(fake, cache, tuned, caplog):
    next(cache.root.rglob("*.cubin")).write_bytes(b"damaged")
    function = kernelwright.jit(kernels.scale, cache=cache)
    launch(function, BLOCK=128)
    launch(function, BLOCK=128)
    assert tuned not in fake.launched
    assert "damaged" in caplog.text


@pytest.mark.exhaustive
def test_over_autotune_the_winner_is_replaced(fake, cache, caplog):
    found = launch(kernels.tuned_scale)
    tuned = keep(cache, found)
    kernels.tuned_scale.fn.device_caches.clear()
    function = kernelwright.jit(kernels.tuned_scale, cache=cache)
    launch(function)
    launch(function)
    assert fake.launched[-1] == tuned
    assert caplog.records == []


@pytest.mark.exhaustive
def test_under_autotune_every_configuration_is_looked_up(fake, cache):
    compiled = kernels.scale.warmup(torch.float32, torch.float32, N, 3.0, grid=GRID, BLOCK=256)
    kernels.scale.device_caches.clear()
    tuned = keep(cache, compiled)
    configs = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})]
    function = triton.autotune(configs=configs, key=["n"])(kernelwright.jit(kernels.scale, cache=cache))
    launch(function)
    assert tuned in fake.launched
    assert isinstance(function.fn, TunedFunction)


def test_views_and_shared_memory_are_copied_as_they_are(fake, cache, tuned):
    seen = []

    def remembers(grid, x, y, n, factor, *_):
        memory, other = x.untyped_storage(), y.untyped_storage()
        seen.append((x.storage_offset(), memory.nbytes(), memory.data_ptr() == other.data_ptr()))
        y[:n] = x[:n] * factor

    fake.default = remembers
    memory = torch.arange(2 * N, dtype=torch.float32)
    function = kernelwright.jit(kernels.scale, cache=cache)
    function[GRID](memory[:N], memory[N:], N, 3.0, BLOCK=128)
    assert torch.equal(memory[:N], torch.arange(N, dtype=torch.float32))
    assert torch.equal(memory[N:], 3 * memory[:N])
    assert seen == [(0, 8 * N, True)] * 3


def test_an_argument_that_cannot_be_copied_keeps_the_original(fake, cache, tuned, caplog):
    class Pointer:
        def __init__(self, tensor):
            self.tensor, self.dtype = tensor, tensor.dtype

        def data_ptr(self):
            return self.tensor.data_ptr()

    fake.default = lambda grid, x, y, n, factor, *_: y.copy_(x.tensor * factor)
    x, y = tensors()
    function = kernelwright.jit(kernels.scale, cache=cache)
    for _ in range(2):
        function[GRID](Pointer(x), y, N, 3.0, BLOCK=128)
    assert tuned not in fake.launched
    assert "found a Pointer" in caplog.text


def test_what_a_spec_compiles_is_what_a_launch_compiles(fake):
    """A kernel tuned from its spec is found by launches on such arguments."""
    arguments = [
        TensorArgument(name="x_ptr", dtype="fp32", shape=(N,)),
        TensorArgument(name="y_ptr", dtype="fp32", shape=(N,), role="inout"),
        ScalarArgument(name="n", value=N),
        ScalarArgument(name="factor", type="fp32", value=3.0),
    ]
    for n in (1, 7, 992):
        values = [a.model_copy(update={"value": n}) if a.name == "n" else a for a in arguments]
        target = TritonSpec(kernels.scale, values, GRID, {"BLOCK": 128}).build("scale", 90)
        kernel = kernels.scale.warmup(torch.float32, torch.float32, n, 3.0, grid=GRID, BLOCK=128)
        assert key_of(kernel.asm["cubin"], 90, "", signature_of(kernel)) == key_of(
            target.cubin, 90, "", target.spec.signature
        )


def test_only_triton_functions_are_decorated():
    with pytest.raises(TypeError, match=r"@triton\.jit"):
        kernelwright.jit(lambda: None)


def test_under_the_interpreter_the_function_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    interpreted = triton.jit(kernels.scale.fn)
    assert kernelwright.jit(interpreted) is interpreted
    assert kernelwright.jit(cache="anywhere")(interpreted) is interpreted


def test_options_of_the_decorator(fake, tmp_path):
    decorated = kernelwright.jit(cache=tmp_path / "here")(kernels.scale)
    assert decorated.cache.root == tmp_path / "here"
    assert decorated.arg_names == kernels.scale.arg_names


@pytest.mark.parametrize("cache", [5, b"here", ["here"]])
def test_a_cache_that_is_no_directory_is_refused_when_the_function_is_decorated(cache):
    said = rf"Wanted `cache` to be a directory's path.* or None for the default; found {re.escape(repr(cache))}\. Name"
    for function in (kernels.scale, None):
        with pytest.raises(UsageError, match=said):
            kernelwright.jit(function, cache=cache)


def test_importing_the_machine_code_library_loads_neither_torch_nor_triton():
    code = "import sys, kernelwright.sass; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
