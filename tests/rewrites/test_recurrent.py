"""The template of recurrent layers: its kernel on a CPU, and which calls it takes."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch

from kernelwright.records import Task
from kernelwright.records.policy import Context
from kernelwright.rewrites import templates
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.templates import recurrent
from kernelwright.rewrites.templates.base import kernel_text
from kernelwright.rewrites.templates.recurrent import RECURRENT, Layers, RecurrentKnobs
from kernelwright.rewrites.tracing import load, trace
from tests.quick import exhaustive_but

HERE = Path(__file__).parent


def on_cpu(folder: Path, head: str) -> ctypes.CDLL:
    """The kernel with these definitions before it, for a CPU."""
    before, after = (HERE / "recurrent_on_cpu.cpp").read_text().split("// KERNEL\n")
    folder.mkdir(exist_ok=True)
    (folder / "k.cpp").write_text(before + head + kernel_text("recurrent.cu") + after)
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "k.cpp", "-o", "k.so"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr[-3000:]
    return ctypes.CDLL(str(folder / "k.so"))


def network(layers: Layers, *, bias: bool, batch_first: bool) -> torch.nn.LSTM | torch.nn.GRU:
    """PyTorch's own layers."""
    made = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[layers.kind]
    both = layers.directions == 2
    return made(layers.inputs, layers.hidden, layers.layers, bias, batch_first=batch_first, bidirectional=both)


def emitted(library: ctypes.CDLL, layers: Layers, options: tuple[object, ...]) -> object:
    """The template's caller, which launches on the CPU."""
    module = types.ModuleType("emitted")
    exec(RECURRENT.module(RECURRENT.default), module.__dict__)
    module.built = lambda text, *options: library
    module.torch = types.SimpleNamespace(**vars(torch))
    module.torch.cuda = types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=0), get_device_capability=lambda device: (9, 0)
    )
    return module.Recurrent(None, "", 0, layers.hidden, options)


def sizes(kind: str, batch: int, steps: int, inputs: int, hidden: int, layers: int, directions: int) -> Layers:
    """Sizes in the order of their names."""
    names = ("batch", "steps", "inputs", "hidden", "layers", "directions")
    return Layers(kind=kind, **dict(zip(names, (batch, steps, inputs, hidden, layers, directions), strict=True)))


CASES = {
    "a stack whose columns do not fill the slices": (sizes("lstm", 5, 6, 12, 8, 3, 1), (4, 16)),
    "inputs wider than states": (sizes("gru", 3, 5, 72, 8, 2, 1), (2, 16)),
    "both directions": (sizes("lstm", 10, 4, 20, 12, 2, 2), (4, 32)),
    "a batch as large as a unit's threads": (sizes("gru", 16, 4, 4, 12, 3, 2), (4, 16)),
    "a stack of many blocks": (sizes("gru", 10, 5, 8, 16, 3, 1), (4, 16)),
    "one block": (sizes("lstm", 1, 3, 4, 4, 1, 1), (4, 16)),
}
ALL_OPTIONS = tuple(itertools.product((True, False), (True, False)))
FEW_OPTIONS: list[object] = [
    ("both directions", ((True, True), (False, False))),
    ("a stack of many blocks", ((True, False), (False, True))),
]
"""Whether there is a bias, and whether batches come first: each of both, of an LSTM and of a GRU."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("name", "options"),
    exhaustive_but(
        [(name, ALL_OPTIONS) for name in CASES] + FEW_OPTIONS,
        FEW_OPTIONS[0],
    ),
    ids=lambda given: given if isinstance(given, str) else len(given),
)
def test_the_kernel_computes_what_pytorchs_layers_do(name, options, tmp_path):
    layers, knobs = CASES[name]
    head = recurrent.cuda_head(layers, RecurrentKnobs(units=knobs[0], slices=knobs[1]))
    library = on_cpu(tmp_path / "built", head)
    for bias, batch_first in options:
        torch.manual_seed(0)
        net = network(layers, bias=bias, batch_first=batch_first)
        x = torch.randn(layers.steps, layers.batch, layers.inputs)
        x = x.transpose(0, 1).contiguous() if batch_first else x
        kinds = 2 if layers.kind == "lstm" else 1
        states = tuple(torch.randn(kinds, layers.layers * layers.directions, layers.batch, layers.hidden))
        call = (bias, layers.layers, 0.0, False, layers.directions == 2, batch_first)
        parameters = [one.detach() for one in net.parameters()]
        ours = emitted(library, layers, call).launch(x, states, parameters)
        given = [one.double() for one in states]
        with torch.no_grad():
            output, last = net.double()(x.double(), tuple(given) if kinds == 2 else given[0])
        for mine, other in zip(ours, (output, *(last if kinds == 2 else (last,))), strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.exhaustive
def test_a_state_whose_bits_mean_unwritten_is_another_nan(tmp_path):
    layers = sizes("lstm", 2, 4, 4, 4, 2, 1)
    library = on_cpu(tmp_path / "built", recurrent.cuda_head(layers, RecurrentKnobs(units=4, slices=16)))
    torch.manual_seed(0)
    net = network(layers, bias=True, batch_first=False)
    x = torch.randn(4, 2, 4)
    x.view(torch.int32)[1, 0, 2] = -1
    states = tuple(torch.randn(2, 2, 2, 4))
    parameters = [one.detach() for one in net.parameters()]
    outputs, *_ = emitted(library, layers, (True, 2, 0.0, False, False, False)).launch(x, states, parameters)
    assert outputs[1:, 0].isnan().all()
    assert (outputs[1:, 0].view(torch.int32) != -1).all()
    assert outputs[:, 1].isfinite().all()


TASK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.{net}

    def forward(self, x):
        {body}

def get_inputs():
    return [torch.randn({shape}{dtype})]

def get_init_inputs():
    return []
"""


def task(net: str, shape: str = "32, 10, 128", body: str = "return self.net(x)[0]", dtype: str = "") -> Task:
    """A task of one recurrent network."""
    return Task(id="task", source=TASK.format(net=net, shape=shape, body=body, dtype=dtype), origin="test")


def replaced(given: Task) -> int:
    """How many calls of a task's training graph the template computes."""
    return templates.replace(RECURRENT, trace(given).training)


@pytest.mark.parametrize(
    "given",
    [
        task("LSTM(128, 256, 6)"),
        task("GRU(128, 256, 6, bidirectional=True)"),
        task("LSTM(128, 256, 2, bias=False, batch_first=True)", shape="10, 32, 128"),
        task("GRU(128, 256)", shape="32, 128"),
        task("GRU(128, 256, dropout=0.0)", body="return self.net(x, torch.zeros(1, 10, 256))[1]"),
    ],
)
def test_it_takes_layers_that_fit(given):
    assert replaced(given) == 1


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(task("LSTM(128, 256, 2, dropout=0.5)"), marks=pytest.mark.exhaustive),
        task("LSTM(128, 256, proj_size=64)"),
        task("LSTM(128, 256)", shape="15, 10, 128"),
        pytest.param(task("GRU(126, 256)", shape="32, 10, 126"), marks=pytest.mark.exhaustive),
        pytest.param(task("GRU(128, 256)", shape="32, 64, 128"), marks=pytest.mark.exhaustive),
        task("LSTM(128, 1024, 2)"),
        task("LSTM(128, 256, dtype=torch.float64)", dtype=", dtype=torch.float64"),
        task("RNN(128, 256)"),
    ],
)
def test_it_leaves_other_calls_to_pytorch(given):
    assert replaced(given) == 0


def test_the_policy_proposes_it_where_cuda_can_be_built(nvcc):
    given = task("GRU(128, 256, 6, batch_first=True)", shape="10, 32, 128", body="return self.net(x)[0][:, -1]")
    proposals = BuiltinPolicy().propose(Context(task=given, history=(), device="cuda:0", seed=0), 40)
    with_kernel = [one for one in proposals if RECURRENT.technique in one.techniques]
    assert any("cuda-graph" in one.techniques for one in with_kernel)
    assert not any("compile" in name for one in with_kernel for name in one.techniques)
    # On another device than the traced one it runs the reference.
    module = load(with_kernel[0].source, "candidate")
    torch.manual_seed(0)
    reference = module.Model()
    torch.manual_seed(0)
    candidate = module.ModelNew()
    x = torch.randn(10, 32, 128)
    with torch.no_grad():
        assert torch.equal(candidate(x), reference(x))


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("kind", recurrent.GATES)
def test_the_weights_of_kernelbenchs_networks_stay_in_registers(kind, tmp_path):
    layers = sizes(kind, 10, 512, 128, 256, 6, 1)
    knobs = RECURRENT.alternatives(layers)[0]
    module: dict[str, object] = {}
    exec(RECURRENT.module(RECURRENT.default), module)
    (tmp_path / "k.cu").write_text(recurrent.cuda_head(layers, knobs) + str(module["RECURRENT_CUDA"]))
    command = ["nvcc", "-O3", "-std=c++17", "-arch=sm_90", "-Xptxas", "-v", "-cubin", "-o", "k.cubin", "k.cu"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert built.stderr.count("0 bytes spill stores, 0 bytes spill loads") == built.stderr.count("spill stores") > 0
