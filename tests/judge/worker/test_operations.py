"""Arithmetic that a call's products, convolutions, recurrent layers and attention take, against numbers made by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kernelwright.judge.worker.inspection import Library, global_state, operations_of

ROWS, STEPS = 3, 5


def counted(module: nn.Module, *inputs: torch.Tensor) -> int:
    with torch.no_grad():
        return operations_of(lambda: module(*inputs))


@pytest.mark.parametrize(
    ("module", "shape", "wanted"),
    [
        (nn.Linear(8, 16), (4, 8), 2 * 4 * 8 * 16),
        (nn.Conv2d(4, 8, 3), (2, 4, 10, 10), 2 * (2 * 8 * 8 * 8) * (4 * 3 * 3)),
        (nn.Conv2d(4, 8, 3, groups=2, stride=2), (2, 4, 11, 11), 2 * (2 * 8 * 5 * 5) * (2 * 3 * 3)),
        (nn.ConvTranspose1d(4, 8, 3), (2, 4, 10), 2 * (2 * 4 * 10) * (8 * 3)),
        (nn.Sequential(nn.ReLU(), nn.Softmax(-1), nn.LayerNorm(8)), (4, 8), 0),
        (nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2))), (4, 8), 2 * 4 * 8 * (8 + 2)),
    ],
)
def test_layers(module, shape, wanted):
    assert counted(module, torch.randn(shape)) == wanted


def test_products():
    one, other = torch.randn(6, 7), torch.randn(7, 5)
    assert operations_of(lambda: one @ other) == 2 * 6 * 7 * 5
    assert operations_of(lambda: torch.mm(one, other, out=torch.empty(6, 5))) == 2 * 6 * 7 * 5
    batch, others = torch.randn(2, 6, 7), torch.randn(2, 7, 5)
    assert operations_of(lambda: batch @ others) == 2 * 2 * 6 * 7 * 5
    assert operations_of(lambda: torch.einsum("bij,bjk->ik", batch, others)) == 2 * 2 * 6 * 7 * 5
    assert operations_of(lambda: torch.addbmm(torch.zeros(6, 5), batch, others)) == 2 * 2 * 6 * 7 * 5


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_layers(kind, gates, dtype):
    """In float32 an LSTM is one operator on some processors, in float64 it is many products."""
    module = kind(8, 16, num_layers=2, bidirectional=True, dtype=dtype)
    weights = 2 * 16 * gates * ((8 + 16) + (2 * 16 + 16))
    assert counted(module, torch.randn(STEPS, ROWS, 8, dtype=dtype)) == 2 * STEPS * ROWS * weights


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("projected", [0, 6])
def test_recurrent_layers_of_cudnn(packed, projected):
    """PyTorch knows their shapes without a GPU."""

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    kept = projected or 16
    weights = [weight(64, 8), weight(64, kept), weight(64), weight(64), *([weight(6, 16)] if projected else [])]
    lengths = [ROWS, ROWS, 2, 1, 1] if packed else []
    inputs = weight(sum(lengths), 8) if packed else weight(STEPS, ROWS, 8)
    first, cell = weight(1, ROWS, kept), weight(1, ROWS, 16)
    layer = (2, 16, projected, 1, False, 0.0, False, False, lengths, None)  # the mode 2 is an LSTM
    rows = sum(lengths) if packed else STEPS * ROWS
    found = operations_of(
        lambda: torch.ops.aten._cudnn_rnn(inputs, weights, len(weights), torch.empty(0, device="meta"), first, cell, *layer)
    )
    assert found == 2 * rows * (64 * 8 + 64 * kept + 16 * projected)


def test_attention_and_the_fast_path_of_a_transformer():
    query, key, value = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8)
    attention = nn.functional.scaled_dot_product_attention
    assert operations_of(lambda: attention(query, key, value)) == 2 * 2 * 3 * 16 * 20 * (8 + 8)
    layer, tokens = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), 2 * 5
    products = 2 * tokens * (16 * 3 * 16 + 16 * 16 + 2 * 16 * 32)
    assert counted(layer, torch.randn(2, 5, 16)) == products + 2 * tokens * 5 * (16 + 16)


def test_nothing_of_the_process_is_changed_even_where_the_call_raises():
    def settings() -> tuple[object, ...]:
        return global_state(), library.replaced(), torch.backends.mha.get_fastpath_enabled()

    def failing() -> None:
        nn.Linear(8, 8)(torch.randn(2, 8))
        raise ValueError("the call's own")

    counted(nn.Linear(8, 8), torch.randn(2, 8))  # imports
    library = Library()
    before = settings()
    counted(nn.LSTM(8, 16), torch.randn(STEPS, ROWS, 8))
    with pytest.raises(ValueError, match="the call's own"):
        operations_of(failing)
    assert settings() == before


@pytest.mark.parametrize("training", [False, True])
def test_a_network_counts_as_by_pytorch_s_own_counter(training):
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 7 * 7, 16)]
    network, inputs = nn.Sequential(*layers).train(training), torch.randn(4, 3, 16, 16)
    with FlopCounterMode(display=False) as theirs, torch.no_grad():
        network(inputs)
    assert counted(network, inputs) == theirs.get_total_flops() > 0


@pytest.mark.exhaustive
def test_counting_does_not_import_the_compiler():
    """A process that compiles nothing would take a second longer to start."""
    text = (
        "import sys, torch\n"
        "from kernelwright.judge.worker.inspection import operations_of\n"
        "module = torch.nn.Linear(8, 16)\n"
        "assert operations_of(lambda: module(torch.randn(4, 8))) == 1024\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
