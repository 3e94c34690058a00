"""Convolutions of 16 bits with a batch norm, a residual and ReLU as calls of cuDNN: what they compute, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.records import Task
from kernelwright.rewrites.passes import FusionPass, ReluConvolutionPass, RulesPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from tests.rewrites.samples import interpreted, task_text
from tests.rewrites.test_fusion import needs_triton
from tests.rewrites.test_sixteen_bits import BOTH, drawing

CLOSE = f"""
import torch

def with_relu(x, weight, bias, *geometry):
    assert x.is_contiguous(memory_format=torch.channels_last) and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.relu(torch.conv2d(x, weight, bias, *geometry))

def with_residual(x, weight, residual, alpha, bias, *geometry):
    assert residual.is_contiguous(memory_format=torch.channels_last)
    return torch.relu(torch.conv2d(x, weight, bias, *geometry) + alpha * residual)

torch.cudnn_convolution_relu, torch.cudnn_convolution_add_relu = with_relu, with_residual
{BOTH}
model.eval(), rewritten.eval()
precise = copy.deepcopy(model).double()
with torch.no_grad():
    have, eager = tensors(rewritten(*given)), tensors(model(*given))
    exact = tensors(precise(*(one.double() for one in given)))
assert rewritten.last_path == "optimized"
for mine, theirs, right in zip(have, eager, exact, strict=True):
    assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    error = (mine - right).abs().max() / right.abs().max()
    assert error < 2 ** -9, float(error)
"""
STATE = """
self.c, self.d = nn.Conv2d(6, 16, 3, stride=2, padding=1, bias=BIAS), nn.Conv2d(6, 16, 1, stride=2, bias=False)
self.n, self.m = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
[norm.running_mean.normal_() for norm in (self.n, self.m)], [norm.running_var.uniform_(0.5, 2) for norm in (self.n, self.m)]
[norm.weight.data.uniform_(-2, 2) for norm in (self.n, self.m)], [norm.bias.data.normal_() for norm in (self.n, self.m)]
self.to(torch.TYPE).eval()
"""
CASES = {
    "plain": ("return torch.relu(self.n(self.c(a)))", "True", 2),
    "residual": ("return torch.relu(self.n(self.c(a)) + b)", "False", 2),
    "branch": ("return torch.relu(self.m(self.d(a)) + self.n(self.c(a)))", "True", 3),
    "pool": ("return torch.relu(F.max_pool2d(self.n(self.c(a)), 2))", "False", 2),
}


def _built(forward: str, bias: str = "True", dtype: str = "float16") -> str | None:
    """The text of the candidate of a task; None where the pass makes none."""
    state = STATE.replace("BIAS", bias).replace("TYPE", dtype)
    text = drawing(task_text(forward, "drawn(2, 6, 8, 10), drawn(2, 16, 4, 5)", state), dtype)
    recipe = Recipe((RulesPass.always(), ReluConvolutionPass(), FusionPass()))
    built = TaskContext.open(Task(id="sample", source=text), "cuda").build(recipe)
    return built.source if built is not None and "relu-convolution" in built.techniques else None


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_it_is_close_to_float64(case: str, tmp_path: Path) -> None:
    forward, bias, functions = CASES[case]
    source = _built(forward, bias)
    assert source is not None
    assert source.count("def relu_convolution_") == functions
    assert "torch.backends.cudnn.enabled and" in source, "without it the reference runs"
    state = STATE.replace("BIAS", bias).replace("TYPE", "float16")
    reference = drawing(task_text(forward, "drawn(2, 6, 8, 10), drawn(2, 16, 4, 5)", state), "float16")
    interpreted(CLOSE, reference, source, tmp_path)


@pytest.mark.parametrize(
    ("forward", "dtype"),
    [
        ("return torch.relu(self.n(self.c(a)))", "float32"),
        ("y = self.n(self.c(a))\nreturn torch.relu(y) + y", "float16"),
        ("return F.silu(self.n(self.c(a)))", "float16"),
        ("return torch.relu(F.batch_norm(self.c(a), self.n.running_mean, self.n.running_var))", "float16"),
        ("return torch.relu(F.batch_norm(self.c(a), None, None, self.n.weight, self.n.bias, True))", "float16"),
    ],
    ids=["float32", "another reader", "SiLU", "no weights", "of the batch itself"],
)
def test_it_holds_back(forward: str, dtype: str) -> None:
    assert _built(forward, dtype=dtype) is None
