"""Shared memory: what one side writes the other reads, whatever the layout; what nobody wrote is NaN."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.errors import DeviceError
from kernelwright.judge.worker import arena as arena_module
from kernelwright.judge.worker.arena import SharedArena, TensorSpec, close_arena, open_arena, plan

CPU = torch.device("cpu")


def second_mapping(arena):
    handles = [os.dup(handle) for handle in arena.files]
    return open_arena(json.loads(json.dumps(arena.describe())), handles, CPU)


def layouts():
    base = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    return {
        "contiguous": base.float(),
        "transposed": base.double().transpose(1, 3),
        "channels-last": base.to(torch.bfloat16).contiguous(memory_format=torch.channels_last),
        "every-other": base.to(torch.int32)[:, ::2, 1:, ::3],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "empty-inside": torch.empty(2, 0, 3, dtype=torch.int64),
        "one": torch.ones(1, 1, 1),
        "bool": base % 3 == 0,
        "complex": torch.complex(base.float(), -base.float()),
        "half": base.half().permute(3, 2, 1, 0),
        "uint8": base.to(torch.uint8),
        "int16": base.to(torch.int16),
    }


def test_every_layout_goes_through_two_mappings_of_one_memory():
    tensors = list(layouts().values())
    specs, size = plan(tensors)
    arena = SharedArena(CPU, size)
    for spec, tensor in zip(specs, tensors, strict=True):
        spec.view(arena.memory).copy_(tensor)
    other = second_mapping(arena)
    assert other.data_ptr() != arena.memory.data_ptr()
    for spec, tensor in zip(specs, tensors, strict=True):
        seen = TensorSpec.from_json(json.loads(json.dumps(spec.to_json()))).view(other)
        assert (seen.dtype, seen.shape) == (tensor.dtype, tensor.shape)
        assert seen.stride() == tensor.stride()
        assert torch.equal(seen, tensor)
        seen.zero_()
    assert not any(spec.view(arena.memory).any() for spec in specs)
    arena.close()


SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(st.lists(st.tuples(SHAPES, st.sampled_from([1, 2, 4, 8])), max_size=6))
def test_planned_tensors_never_overlap_and_stay_inside(shapes):
    dtypes = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.int64}
    tensors = [torch.zeros(shape, dtype=dtypes[size]) for shape, size in shapes]
    specs, size = plan(tensors)
    ends = [0]
    for spec, tensor in zip(specs, tensors, strict=True):
        assert spec.offset_bytes >= ends[-1]
        assert spec.offset_bytes % 512 == 0
        assert spec.span_bytes == tensor.numel() * tensor.element_size()
        ends.append(spec.offset_bytes + spec.span_bytes)
    assert size >= max(ends)
    assert size > 0


def test_the_span_of_a_strided_tensor_reaches_to_its_last_element():
    assert TensorSpec.of(torch.zeros(10, 10)[::3, ::4]).span_bytes == 4 * (1 + 3 * 30 + 2 * 4)


def test_a_poisoned_arena_is_nan_in_every_floating_type():
    arena = SharedArena(CPU, 4096)
    arena.poison()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.isnan(arena.memory.view(dtype)).all()
    assert (arena.memory.view(torch.int32) == -1).all()
    arena.close()


def test_an_arena_that_nobody_can_reach_is_closed():
    arena = SharedArena(CPU, 4096)
    (handle,) = arena.files
    del arena
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_a_closed_arena_gives_its_memory_back():
    arena = SharedArena(CPU, 4096)
    (handle,) = arena.files
    arena.close()
    arena.close()
    assert arena.files == ()
    assert arena.memory.numel() == 0
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(handle)


def test_opening_takes_its_own_handle_off_the_list_and_closes_it():
    arena = SharedArena(CPU, 512)
    handles = [os.dup(arena.files[0]), 999_999]
    first = handles[0]
    open_arena(arena.describe(), handles, CPU)
    assert handles == [999_999]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(first)
    arena.close()


def test_the_memory_has_no_name_in_the_file_system_and_is_not_inherited():
    arena = SharedArena(CPU, 512)
    assert os.fstat(arena.files[0]).st_nlink == 0
    assert not os.get_inheritable(arena.files[0])
    arena.close()


def test_neither_side_can_change_its_size():
    arena = SharedArena(CPU, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.files[0], 0)
    os.ftruncate(arena.files[0], 4096)
    arena.close()


def test_a_view_beyond_the_arena_is_refused():
    arena = SharedArena(CPU, 512)
    with pytest.raises(RuntimeError):
        TensorSpec("float32", (1024,), (1,), 0, 4096).view(arena.memory)
    arena.close()


# --- the calls into the CUDA runtime, with a runtime that only counts ---------------------------


class FakeRuntime:
    """Stands for libcudart: hands out addresses, or fails."""

    def __init__(self, status=0):
        self.status = status
        self.freed, self.closed = [], []
        self.statuses = []
        """Of the next allocations, before `status` is."""
        self.last_error = 0
        outer = self

        class Opener:
            argtypes = None

            def __call__(self, pointer, handle, flags):
                pointer._obj.value = int.from_bytes(bytes(handle)[:8], "little")
                return outer.status

        self.cudaIpcOpenMemHandle = Opener()

    def cudaMalloc(self, pointer, size):
        self.size = size.value
        pointer._obj.value = 0x7000
        self.last_error = self.statuses.pop(0) if self.statuses else self.status
        return self.last_error

    def cudaGetLastError(self):
        found, self.last_error = self.last_error, 0
        return found

    def cudaIpcGetMemHandle(self, handle, pointer):
        import ctypes

        ctypes.memmove(ctypes.addressof(handle._obj), pointer.value.to_bytes(8, "little"), 8)
        return self.status

    def cudaFree(self, pointer):
        self.freed.append(pointer.value)
        return self.status

    def cudaIpcCloseMemHandle(self, pointer):
        self.closed.append(pointer.value)
        return self.status


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    monkeypatch.setattr(arena_module, "_cudart", lambda: fake)
    monkeypatch.setattr(arena_module, "wrap_cuda", lambda pointer, size, device: (pointer, size, device))
    return fake


def test_device_memory_is_allocated_shared_opened_and_freed(runtime):
    device = torch.device("cuda", 0)
    arena = SharedArena(device, 4096)
    assert runtime.size == 2 << 20
    assert arena.files == ()
    description = json.loads(json.dumps(arena.describe()))
    assert description["kind"] == "cuda"
    assert open_arena(description, [], device) == (0x7000, 4096, device)
    arena.close()
    arena.close()
    assert runtime.freed == [0x7000]


@pytest.mark.parametrize(("size_bytes", "pages"), [(1, 1), (2 << 20, 1), ((2 << 20) + 1, 2), ((7 << 30) + 512, 3585)])
def test_device_memory_is_allocated_in_whole_pages(runtime, size_bytes, pages):
    SharedArena(torch.device("cuda", 0), size_bytes).close()
    assert runtime.size == pages * (2 << 20)


def test_a_full_gpu_is_a_device_error_that_nobody_else_finds(runtime, simulated_gpu):
    simulated_gpu.free_gib, simulated_gpu.total_gib = 1.5, 80
    runtime.status = 2
    with pytest.raises(DeviceError, match=r"arena of 6\.50 GiB; CUDA's error is 2, with 1\.50 of 80\.00 GiB free"):
        SharedArena(torch.device("cuda", 0), 13 << 29)
    assert runtime.last_error == 0


def test_what_torch_keeps_for_itself_is_given_back_to_make_room(runtime, simulated_gpu):
    asked = []
    simulated_gpu.asked = SimpleNamespace(append=lambda what: asked.append((what, [*runtime.statuses])))
    for statuses in ([2, 0], [0]):  # a try that fails and one that does not, and one that does not
        runtime.statuses = statuses
        SharedArena(torch.device("cuda", 0), 4096).close()
        assert asked == [("empty_cache", [0])]  # after the first try, before the second


def test_a_missing_cuda_runtime_is_a_device_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    with pytest.raises(DeviceError, match=r"libcudart\.so\.0"):
        arena_module._cudart()


def test_the_array_interface_names_the_bytes():
    described = arena_module._CudaBytes(0x7000, 64).__cuda_array_interface__
    assert described["data"] == (0x7000, False)
    assert described["shape"] == (64,)
    assert described["typestr"] == "|u1"


def test_a_worker_lets_go_of_device_memory_and_a_device_that_refuses_is_an_error(runtime):
    memory = SimpleNamespace(device=torch.device("cuda", 0), data_ptr=lambda: 0x7000)
    close_arena(memory)
    assert runtime.closed == [0x7000]
    runtime.status = 1
    with pytest.raises(DeviceError, match="close an arena: error 1"):
        close_arena(memory)


def test_a_worker_on_a_processor_asks_no_runtime_to_let_go(runtime):
    close_arena(torch.empty(8, dtype=torch.uint8))
    assert runtime.closed == []


def test_device_memory_becomes_a_tensor_of_its_device(monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: (data.__cuda_array_interface__, device))
    described, device = arena_module.wrap_cuda(0x7000, 64, torch.device("cuda", 1))
    assert (described["data"], described["shape"]) == ((0x7000, False), (64,))
    assert device == torch.device("cuda", 1)
