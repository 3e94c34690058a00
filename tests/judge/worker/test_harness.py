"""The harness in a worker, driven in this process on memory of its own."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kernelwright.judge.worker import clocks, serving
from kernelwright.judge.worker import harness as worker
from kernelwright.judge.worker.arena import SharedArena, TensorSpec, plan
from kernelwright.judge.worker.channel import Channel
from kernelwright.judge.worker.harness import Harness
from kernelwright.judge.worker.structure import flatten

CPU = torch.device("cpu")

MODULE = """
import torch
class Thing(torch.nn.Module):
    def __init__(self, size, scale=2.0):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        self.register_buffer("count", torch.zeros(1))
        self.scale = scale
    def forward(self, x, mode="plain"):
        self.count += 1
        y = self.linear(x) * self.scale
        if mode == "plain": return y
        if mode == "random": return torch.rand(4, 3)
        if mode == "input": return x
        if mode == "state": return self.linear.weight
        if mode == "state view": return self.linear.weight.data[:, :]
        if mode == "nested": return [y, (1, None, "text", 2.5, True), {"k": y + 1}]
        if mode == "sparse": return y.to_sparse()
        if mode == "own attribute": y.extra = 1; return y
        if mode == "set": return {1}
        if mode == "two": return y, y
        if mode == "other shape": return y[:1]
        if mode == "meta": return y.to("meta")
        if mode == "empty": return y[:0]
        raise ValueError(mode)
"""


@pytest.fixture
def library_as_it_is():
    """Not as it was in another test, whose warnings pytest caught; to look through all of it takes a while."""
    worker.library.cache_clear()


class Bench:
    """The parent's half of the conversation, without a process."""

    def __init__(self, directory, **config):
        self.inputs = torch.arange(12.0).reshape(4, 3)
        self.arenas = {name: SharedArena(CPU, 1 << 14) for name in ("inputs", "outputs", "state")}
        files = [os.dup(arena.files[0]) for arena in self.arenas.values()]
        described = {name: arena.describe() for name, arena in self.arenas.items()}
        values = {
            "role": "candidate",
            "source": MODULE,
            "class": "Thing",
            "device": "cpu",
            "private": str(directory),
            "threads": torch.get_num_threads(),
            "strict_fp32": False,
            "arenas": described,
        }
        self.harness = Harness(values | config, files)

    def build(self, *arguments, seed=0):
        return self.harness.op_build({"arguments": flatten(list(arguments))[0], "seed": seed})

    def ready(self, mode="plain"):
        self.build(3)
        specs, _ = plan([self.inputs])
        specs[0].view(self.arenas["inputs"].memory).copy_(self.inputs)
        skeleton, _ = flatten([self.inputs, mode])
        self.harness.op_layout({"skeleton": skeleton, "specs": [spec.to_json() for spec in specs]})
        (self.target,), size = plan([torch.empty(4, 3)])
        second = TensorSpec(self.target.dtype, self.target.shape, self.target.stride, size, self.target.span_bytes)
        self.targets = [self.target, second]
        self.harness.op_outputs({"regions": [[spec.to_json()] for spec in self.targets]})
        self.arenas["outputs"].poison()
        return self

    def call(self, seed=None, hold=False, views=False):
        answer = self.harness.op_call({"layout": 0, "seed": seed})
        if hold:
            self.harness.op_hold({"views": views})
        return answer

    def output(self, index=0):
        return self.targets[index].view(self.arenas["outputs"].memory)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_building_answers_with_the_interface(bench):
    assert bench.build(3, 0.5) == {
        "signature": [("x", 1), ("mode", 1)],
        "training": True,
        "state": [
            ["count", "float32", [1]],
            ["linear.weight", "float32", [3, 3]],
            ["linear.bias", "float32", [3]],
        ],
    }


def test_the_seed_decides_the_weights(tmp_path):
    weights = []
    for seed in (1, 1, 2):
        made = Bench(tmp_path)
        made.build(3, seed=seed)
        weights.append(made.harness.model.linear.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("source", ["", "Thing = 3", "class Thing: pass", "def Thing(size): pass"])
def test_a_class_that_is_missing_is_named(tmp_path, source):
    assert Bench(tmp_path, source=source).build(3) == {"missing": "Thing"}


def test_a_source_without_a_loader_is_an_error(bench, monkeypatch):
    monkeypatch.setattr(worker.importlib.util, "spec_from_file_location", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="no loader"):
        bench.build(3)


def test_strict_precision_turns_tf32_off(tmp_path, monkeypatch):
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    Bench(tmp_path, strict_fp32=True)
    after = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    assert after == (False, False)


@pytest.mark.parametrize("allowed", [False, True])
def test_products_may_use_tf32_where_the_settings_allow_it(tmp_path, allowed):
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    Bench(tmp_path, **({"tf32_products": True} if allowed else {}))
    after = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before[1]
    assert before == (True, False)
    assert after == (True, allowed)


def test_a_call_leaves_its_output_in_the_arena_and_its_form_in_the_answer(bench):
    bench.ready()
    answer = bench.call()
    assert torch.equal(bench.output(), bench.harness.model.linear(bench.inputs) * 2)
    assert answer["inner_us"] > 0
    assert answer["skeleton"] == {"tensor": 0}
    assert answer["strange"] == []
    assert answer["outputs"] == [
        {"dtype": "float32", "shape": [4, 3], "stride": [3, 1], "device": "cpu", "traits": [], "aliases": []}
    ]


def test_a_repeated_call_leaves_nothing_behind_but_what_the_module_keeps(bench):
    bench.ready()
    answer = bench.harness.op_repeat({"layout": 0, "seed": 3, "calls": 2})
    assert answer == {}
    assert torch.isnan(bench.output()).all()
    assert bench.harness.model.count.item() == 2
    assert torch.initial_seed() == 3
    bench.harness.op_repeat({"layout": 0, "seed": None, "calls": 1})
    assert torch.initial_seed() == 3


def test_no_gradient_is_recorded(bench):
    bench.ready().call(hold=True)
    assert not bench.harness.held[0][0].requires_grad


def test_a_seed_makes_random_calls_repeat(bench):
    bench.ready("random")
    outputs = []
    for seed in (5, 5, 6):
        bench.call(seed=seed)
        outputs.append(bench.output().clone())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_no_output_outlives_its_call_unless_it_is_held(bench):
    """It would be allocated beside the next one's while the clock runs. No garbage collector may be needed for it."""
    seen = []

    class Watching(torch.nn.Module):
        def forward(self, x, mode):
            seen.append([memory.expired() for memory in made])
            alive.append(any(output() is not None for output in objects))
            y = x + 1
            made.append(StorageWeakRef(y.untyped_storage()))
            objects.append(weakref.ref(y))
            return [y, {"nested": (y,)}]

    made, objects, alive = [], [], []
    bench.ready()
    bench.harness.model, bench.harness.linger_calls = Watching(), 0  # as on a GPU
    gc.disable()
    try:
        bench.call()
        bench.harness.op_series({"layouts": [0, 0], "seeds": [None, None]})
        bench.call(hold=True, views=True)
        bench.call()
    finally:
        gc.enable()
    assert seen == [[], [True], [True] * 2, [True] * 3, [True] * 3 + [False]]
    assert not any(alive), "not even the one that is held tells that it is"


def test_an_output_where_the_harness_puts_outputs_is_seen(bench):
    bench.ready()

    class Direct(torch.nn.Module):
        def forward(self, x, mode):
            return torch.add(x, 1, out=bench.harness.regions[0][0])

    bench.harness.model = Direct()
    (output,) = bench.call()["outputs"]
    assert output["aliases"] == ["harness"]


def test_inputs_count_as_changed_in_every_call(bench):
    """Whoever keeps what it made of a tensor goes by its version, and the parent's writing counts for none."""
    bench.ready()
    (inputs,) = (tensors for _, tensors in bench.harness.layouts)
    before = [tensor._version for tensor in inputs]
    bench.call()
    bench.harness.op_series({"layouts": [0], "seeds": [None]})
    assert all(tensor._version >= version + 2 for tensor, version in zip(inputs, before, strict=True))


def test_a_series_has_an_output_region_for_each_call(bench):
    bench.ready()
    answer = bench.harness.op_series({"layouts": [0, 0], "seeds": [None, 3]})
    assert len(answer["answers"]) == 2
    assert answer["inner_us"] > 0
    assert torch.equal(bench.output(0), bench.output(1))
    assert not torch.isnan(bench.output(1)).any()


@pytest.mark.parametrize(
    ("mode", "aliases"),
    [("plain", []), ("input", ["input"]), ("state view", ["state"]), ("empty", []), ("meta", [])],
)
def test_memory_shared_with_inputs_and_state_is_named(bench, mode, aliases):
    assert bench.ready(mode).call()["outputs"][0]["aliases"] == aliases


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("sparse", "layout torch.sparse_coo"),
        ("own attribute", "attributes of its own"),
        ("set", "builtins.set"),
        ("state", "torch.nn.parameter.Parameter"),
    ],
)
def test_what_is_no_plain_tensor_is_named_and_not_delivered(bench, mode, words):
    assert any(words in name for name in bench.ready(mode).call()["strange"])
    assert torch.isnan(bench.output()).all()


@pytest.mark.parametrize("mode", ["two", "other shape", "meta", "nested"])
def test_outputs_that_do_not_fit_are_described_and_not_delivered(bench, mode):
    assert bench.ready(mode).call()["strange"] == []
    assert torch.isnan(bench.output()).all()


def test_a_nested_result_keeps_its_structure(bench):
    assert bench.ready("nested").call()["skeleton"] == {
        "list": [
            {"tensor": 0},
            {"tuple": [{"value": 1}, {"value": None}, {"value": "text"}, {"value": 2.5}, {"value": True}]},
            {"dict": {"k": {"tensor": 1}}},
        ]
    }


def test_a_held_output_can_be_seen_again_and_released(bench):
    bench.ready().call(hold=True)
    before = bench.output().clone()
    bench.harness.held[0][0].add_(1)
    bench.harness.op_recopy({"index": 0})
    assert torch.equal(bench.output(), before + 1)
    bench.harness.op_release({})
    with pytest.raises(IndexError):
        bench.harness.op_recopy({"index": 0})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_worker_that_rests_gives_back_its_latest_output_and_can_be_called_again(bench, simulated_gpu, device):
    bench.harness.linger_calls = 0  # as on a GPU
    bench.ready().call()
    latest = weakref.ref(bench.harness.latest[0][0])
    bench.harness.device = torch.device(device)
    assert bench.harness.op_release_idle({}) == {}
    assert latest() is None
    assert simulated_gpu.asked == (["empty_cache"] if device == "cuda" else [])
    bench.harness.device = torch.device("cpu")
    assert bench.call()["outputs"]


def state_message(bench):
    state = bench.harness.model.state_dict()
    specs, _ = plan(list(state.values()))
    return specs, {"state": [[key, spec.to_json()] for key, spec in zip(state, specs, strict=True)]}


def test_state_goes_in_and_comes_back(bench):
    bench.ready()
    specs, message = state_message(bench)
    memory = bench.arenas["state"].memory
    for number, spec in enumerate(specs):
        spec.view(memory).fill_(number + 1)
    bench.harness.op_load_state(message)
    assert bench.harness.model.linear.bias.tolist() == [3, 3, 3]
    bench.arenas["state"].poison()
    assert bench.harness.model.linear.bias.tolist() == [3, 3, 3]
    bench.call()
    bench.harness.op_save_state(message)
    assert [float(spec.view(memory).flatten()[0]) for spec in specs] == [2, 2, 3]


def test_a_step_changes_the_named_parameters_where_they_are_and_nothing_else(bench):
    bench.ready()
    model, before = bench.harness.model, bench.harness.model.linear.weight
    specs, message = state_message(bench)
    for spec in specs:
        spec.view(bench.arenas["state"].memory).fill_(7)
    kept = model.linear.bias.tolist()
    places = {value.data_ptr() for value in model.state_dict().values()}
    chosen = [entry for entry in message["state"] if entry[0] == "linear.weight"]
    assert bench.harness.op_step({"state": chosen}) == {}
    assert model.linear.weight is before
    assert before.tolist() == [[7.0] * 3] * 3
    assert model.linear.bias.tolist() == kept
    assert {value.data_ptr() for value in model.state_dict().values()} == places
    bench.arenas["state"].poison()
    assert before.tolist() == [[7.0] * 3] * 3
    assert before.requires_grad


def test_state_is_read_and_changed_where_it_lies_and_the_module_does_not_hear_of_it(tmp_path):
    source = (
        MODULE
        + """
    def state_dict(self, *arguments, **named):
        self.__dict__["asked"] = self.__dict__.get("asked", 0) + 1
        return super().state_dict(*arguments, **named)
"""
    )
    bench = Bench(tmp_path, source=source).ready()
    _, message = state_message(bench)
    before = bench.harness.model.asked
    bench.harness.op_save_state(message)
    bench.harness.op_step({"state": message["state"][1:]})
    assert bench.harness.model.asked == before


def test_names_that_a_module_makes_up_are_found_in_its_state_dict(tmp_path):
    source = (
        MODULE
        + """
    def state_dict(self, *arguments, **named):
        return {**super().state_dict(*arguments, **named), "extra": torch.full((1,), 5.0)}
"""
    )
    bench = Bench(tmp_path, source=source).ready()
    specs, message = state_message(bench)
    bench.arenas["state"].poison()
    bench.harness.op_save_state(message)
    values = [spec.view(bench.arenas["state"].memory) for spec in specs]
    assert values[[key for key, _ in message["state"]].index("extra")].tolist() == [5.0]
    assert not any(value.isnan().any() for value in values)


def test_a_scripted_part_is_read_as_well(tmp_path):
    source = MODULE.replace("= torch.nn.Linear(size, size)", "= torch.jit.script(torch.nn.Linear(size, size))")
    bench = Bench(tmp_path, source=source).ready()
    specs, message = state_message(bench)
    bench.arenas["state"].poison()
    bench.harness.op_save_state(message)
    assert not any(spec.view(bench.arenas["state"].memory).isnan().any() for spec in specs)


@pytest.mark.parametrize("hold", [False, True])
def test_memory_of_an_earlier_output_that_is_in_use_is_named_also_where_nobody_holds_it(tmp_path, hold):
    source = MODULE.replace("self.count += 1", "self.count += 1; self.y = self.__dict__.get('y', x + 1); return self.y")
    bench = Bench(tmp_path, source=source).ready()
    assert bench.call(hold=hold)["outputs"][0]["aliases"] == []
    assert bench.call()["outputs"][0]["aliases"] == ["earlier output"]


def test_what_is_forgotten_is_gone(library_as_it_is, bench):
    bench.ready().call(hold=True)
    held, model = weakref.ref(bench.harness.held[0][0]), weakref.ref(bench.harness.model)
    bench.harness.before = worker.global_state()  # pytest names its phase in the environment
    assert bench.harness.forget() is True
    assert (held(), model()) == (None, None)
    assert "candidate" not in worker.sys.modules
    assert not any((bench.harness.memory, bench.harness.layouts, bench.harness.regions, bench.harness.held))


@pytest.mark.parametrize("loaded", [True, False])
def test_what_was_compiled_is_forgotten_where_compilers_were_loaded(bench, monkeypatch, loaded):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(bench.harness.model))
    monkeypatch.delitem(worker.sys.modules, "torch._dynamo", raising=False)
    if loaded:
        monkeypatch.setitem(worker.sys.modules, "torch._dynamo", torch)
    bench.ready()
    bench.harness.forget()
    assert resets == [None] * loaded  # the model first: its graphs hold memory


@pytest.mark.parametrize(
    "leave_a_trace",
    [
        lambda patch: patch.setattr(time, "perf_counter", lambda: 0.0),
        lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    ],
    ids=["function", "setting"],
)
def test_a_module_that_left_a_trace_in_the_process_is_forgotten_and_told_of(
    library_as_it_is, bench, monkeypatch, leave_a_trace
):
    bench.ready()
    with monkeypatch.context() as patch:
        leave_a_trace(patch)
        assert bench.harness.forget() is False
    assert bench.harness.model is None


def test_the_mode_is_switched_and_reported(bench):
    bench.build(3)
    assert bench.harness.op_mode({"training": False}) == {"training": False}
    assert bench.harness.op_mode({"training": True}) == {"training": True}


def test_a_replaced_library_function_is_named(library_as_it_is, bench, monkeypatch):
    bench.build(3)
    assert bench.harness.op_inspect({})["patched"] == []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    monkeypatch.delattr(torch.testing, "assert_close")
    assert bench.harness.op_inspect({})["patched"] == ["time.perf_counter", "torch.testing.assert_close"]


def test_a_function_that_a_library_wraps_is_not_named_as_replaced(library_as_it_is, bench, monkeypatch):
    bench.build(3)
    wrapped = torch.no_grad()(torch.manual_seed)
    monkeypatch.setattr(torch, "manual_seed", wrapped)
    assert bench.harness.op_inspect({})["patched"] == []
    for other in (lambda seed: None, torch.no_grad()(lambda seed: None)):
        monkeypatch.setattr(torch, "manual_seed", other)
        assert bench.harness.op_inspect({})["patched"] == ["torch.manual_seed"]


def test_gradients_that_a_call_turns_on_are_reported(tmp_path):
    source = MODULE.replace("self.count += 1", "self.count += 1; torch.set_grad_enabled(True)")
    bench = Bench(tmp_path, source=source).ready()
    assert bench.harness.op_inspect({})["after"]["grad_enabled"] is True
    bench.call()
    assert bench.harness.op_inspect({})["after"]["grad_enabled"] == "turned on inside no_grad"


def test_a_changed_setting_is_seen(bench):
    bench.build(3)
    torch.set_default_dtype(torch.float64)
    try:
        seen = bench.harness.op_inspect({})
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen["before"]["default_dtype"] == "torch.float32"
    assert seen["after"]["default_dtype"] == "torch.float64"


def test_the_trace_names_operators_that_compute(bench):
    bench.ready()
    operators = bench.harness.op_trace({"layout": 0})["operators"]
    assert "aten::linear" in operators
    assert not set(operators) & worker.FREE_OPERATORS


def test_the_host_clock_measures_what_lies_between():
    clock = worker.HostClock()
    clock.start()
    clock.stop()
    clock.settle()
    assert 0 <= clock.elapsed_us() < 1e6


class FakeRuntime:
    """Stands for libcudart: events that are 1.5 ms apart."""

    def __init__(self, refuse=()):
        self.refuse = refuse
        self.log = []
        for event in ("EventCreate", "EventRecord", "EventSynchronize", "EventElapsedTime", "DeviceSynchronize"):
            name = f"cuda{event}"
            setattr(self, name, lambda *arguments, name=name: self.called(name, arguments))

    def called(self, name, arguments):
        self.log.append(name)
        if name == "cudaEventElapsedTime":
            arguments[0]._obj.value = 1.5
        return 700 if name in self.refuse else 0


def device_clock(monkeypatch, refuse=()):
    runtime = FakeRuntime(refuse)
    monkeypatch.setattr(clocks.ctypes, "CDLL", lambda name: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return worker.DeviceClock(), runtime


def test_the_device_clock_brackets_a_call_and_waits_for_the_whole_device(monkeypatch):
    clock, runtime = device_clock(monkeypatch)
    clock.start()
    clock.stop()
    clock.arrive()
    clock.settle()
    assert clock.elapsed_us() == 1500.0
    assert runtime.log[2:] == [
        "cudaEventRecord",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventElapsedTime",
    ]


def test_a_device_is_with_this_process_before_the_clock_starts(monkeypatch):
    clock, runtime = device_clock(monkeypatch)
    clock.ready()
    assert runtime.log[2:] == ["cudaEventRecord", "cudaDeviceSynchronize"]


class VirtualDevice:
    """A clock of a device whose work goes on after a call returns, in a time of its own, microseconds."""

    def __init__(self):
        self.now_us = self.busy_until_us = 0.0

    def ready(self):
        pass

    def start(self):
        self.began_us = self.now_us

    def stop(self):
        self.ended_us = max(self.now_us, self.busy_until_us)

    def arrive(self):
        self.now_us = max(self.now_us, self.ended_us)

    settle = arrive

    def elapsed_us(self):
        return self.ended_us - self.began_us

    def model(self, host_us, device_us):
        """A call that returns after `host_us`, and whose work on the device takes `device_us` from then on."""

        def call(*inputs):
            self.now_us += host_us
            self.busy_until_us = self.now_us + device_us
            return inputs[0]

        return call


@pytest.mark.parametrize(("host_us", "device_us"), [(8.0, 32.0), (38.0, 2.0), (20.0, 0.0)])
def test_time_outside_the_clock_does_not_hang_on_where_a_call_is_long(bench, host_us, device_us):
    harness, device = bench.ready().harness, VirtualDevice()
    deliver = harness.deliver

    def take_15_us(*arguments):
        device.now_us += 15.0
        return deliver(*arguments)

    harness.deliver, harness.clock, harness.model = take_15_us, device, device.model(host_us, device_us)
    outer_us = []
    for _ in range(3):
        begun_us = device.now_us
        harness.call(0, None, [])
        outer_us.append(device.now_us - begun_us - device.elapsed_us())
    assert device.elapsed_us() == host_us + device_us
    assert outer_us == [15.0, 15.0, 15.0]


@pytest.fixture
def gpu(monkeypatch):
    """What a harness asks of torch.cuda, with the GPU's memory in this process; returns the log."""
    asked = []
    for name in ("set_device", "init", "empty_cache", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, name=name: asked.append((name, *arguments)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30))
    monkeypatch.setattr(worker, "DeviceClock", worker.HostClock)
    monkeypatch.setattr(worker, "open_arena", lambda description, files, device: torch.empty(16, dtype=torch.uint8))
    monkeypatch.setattr(worker, "close_arena", lambda memory: asked.append(("closed",)))
    return asked


@pytest.mark.parametrize(("limit_gib", "share"), [(2, 0.25), (80, 1.0)])
def test_a_worker_on_a_gpu_may_use_so_much_of_its_memory(tmp_path, gpu, limit_gib, share):
    Bench(tmp_path, device="cuda:1", device_memory_limit_bytes=limit_gib << 30)
    device = torch.device("cuda", 1)
    assert gpu == [("set_device", device), ("init",), ("set_per_process_memory_fraction", share, device)]


def test_a_worker_on_a_gpu_gives_back_all_its_memory_once_nothing_uses_it(library_as_it_is, tmp_path, gpu):
    bench = Bench(tmp_path, device="cuda:0", device_memory_limit_bytes=1 << 30)
    del gpu[:]
    bench.harness.model = torch.nn.Linear(3, 3)
    model = weakref.ref(bench.harness.model, lambda gone: gpu.append(("gone",)))
    assert bench.harness.forget()
    assert model() is None
    assert gpu == [("gone",), *[("closed",)] * 3, ("empty_cache",)]


def test_a_device_that_fails_is_an_exception_of_the_call(monkeypatch):
    with pytest.raises(RuntimeError, match="cudaEventCreate"):
        device_clock(monkeypatch, ("cudaEventCreate",))
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        device_clock(monkeypatch, ("cudaDeviceSynchronize",))[0].settle()
    with pytest.raises(RuntimeError, match="not recorded"):
        device_clock(monkeypatch, ("cudaEventElapsedTime",))[0].elapsed_us()


# --- the loop that answers ------------------------------------------------------------------------


def conversation(config, files, *messages):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    for number, message in enumerate(messages):
        channel.send({"nonce": str(number), **message})
    ours.shutdown(socket.SHUT_WR)
    serving.serve(theirs, config, files)
    answers = [channel.receive() for _ in messages]
    ours.close()
    return answers


@pytest.fixture
def config(tmp_path):
    return {
        "role": "candidate",
        "source": MODULE,
        "class": "Thing",
        "device": "cpu",
        "private": str(tmp_path),
        "threads": torch.get_num_threads(),
        "strict_fp32": False,
        "arenas": {},
    }


def test_every_request_gets_one_answer_with_its_nonce(config):
    answers = conversation(
        config,
        [],
        {"op": "build", "arguments": {"list": [{"value": 3}]}, "seed": 0},
        {"op": "mode", "training": False},
        {"op": "nothing-like-this"},
        {"op": "release"},
    )
    assert [answer["nonce"] for answer in answers] == ["0", "1", "2", "3"]
    assert answers[1]["training"] is False
    assert answers[2]["error"]["type"] == "AttributeError"
    assert answers[3] == {"nonce": "3"}


def test_after_calls_that_warm_up_the_next_request_finds_the_process_awake(config, monkeypatch):
    story = []
    monkeypatch.setattr(Channel, "watch", lambda self, limit_s: story.append("awake"))
    monkeypatch.setattr(Harness, "op_repeat", lambda self, message: story.append("repeat") or {})
    monkeypatch.setattr(Harness, "op_release", lambda self, message: story.append("release") or {})
    conversation(config, [], {"op": "release"}, {"op": "repeat"}, {"op": "release"})
    assert story == ["release", "repeat", "awake", "release"]


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("raise SystemExit(4)", "SystemExit", "exit status 4"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("raise ValueError('x' * 9000)", "ValueError", "x" * 2000),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E", "(no message)"),
        ("def (", "SyntaxError", None),
    ],
)
def test_whatever_is_raised_is_an_answer(config, source, kind, message):
    request = {"op": "build", "arguments": {"list": []}, "seed": 0}
    (answer,) = conversation(config | {"source": source}, [], request)
    assert answer["error"]["type"] == kind
    assert message is None or answer["error"]["message"] == message
    assert len(answer["error"]["trace"]) <= 4000


def test_a_harness_that_cannot_start_answers_too(config):
    (answer,) = conversation(config | {"device": "no-such-device"}, [], {"op": "build"})
    assert answer["error"]["type"] == "RuntimeError"


def test_a_parent_that_hangs_up_ends_the_loop(config):
    ours, theirs = socket.socketpair()
    Channel(ours).send({"op": "release", "nonce": "0"})
    ours.close()
    serving.serve(theirs, config, [])
    theirs.close()


@pytest.fixture
def left_behind(monkeypatch):
    """A name that a module may leave in torch's functions, where it is removed after the test."""
    monkeypatch.setattr(torch.nn.functional, "left_behind", None, raising=False)
    return "left_behind"


def test_a_worker_forgets_one_module_and_builds_another_on_other_memory(library_as_it_is, config, left_behind):
    """As the parent of a kept worker asks."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    thread = threading.Thread(target=serving.serve, args=(theirs, config, []))
    thread.start()

    def ask(op, handles=(), **fields):
        channel.send({"op": op, "nonce": op, **fields})
        channel.send_files(list(handles))
        return channel.receive(time.monotonic() + 30)

    try:
        build = {"arguments": {"list": [{"value": 3}]}, "seed": 0}
        assert ask("forget") == {"clean": True, "nonce": "forget"}  # it had built nothing yet
        assert ask("build", **build)["state"][0][0] == "count"
        assert ask("forget") == {"clean": True, "nonce": "forget"}
        arena = SharedArena(CPU, 1 << 14)
        other = MODULE.replace('"count"', '"other"').replace("self.count", "self.other")
        other += f"torch.nn.functional.{left_behind} = lambda: None"
        task = {"source": other, "arenas": {"state": arena.describe()}}
        assert ask("adopt", arena.files, config=task, files=1) == {"nonce": "adopt"}
        assert ask("build", **build)["state"][0][0] == "other"
        arena.poison()
        (spec,), _ = plan([torch.empty(1)])
        assert "error" not in ask("save_state", state=[["other", spec.to_json()]])
        assert spec.view(arena.memory).tolist() == [0.0]
        assert ask("forget")["clean"] is False
        arena.close()
    finally:
        channel.close()
        thread.join()
        theirs.close()


def test_directories_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin"})
    monkeypatch.chdir(tmp_path)
    private, build = tmp_path / "private", tmp_path / "build"
    serving.prepare_directories(private, build)
    assert os.getcwd() == str(private)
    assert os.environ["HOME"] == str(private / "home")
    assert os.environ["TMPDIR"] == str(private / "tmp")
    inside = {name for name, value in os.environ.items() if str(tmp_path) in value}
    assert {
        "TORCH_EXTENSIONS_DIR",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_CACHE_PATH",
    } <= inside
    assert (private / "tmp").is_dir()
    assert (private / "home").is_dir()
