"""The trial of Helion as a generator: what it needs without Helion, and one kernel where Helion is installed."""

import importlib.util
import types
from pathlib import Path

import pytest
import torch

EMITTED = """from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_compat import libdevice
from helion.runtime import default_launcher as _default_launcher
import __main__ as _source_module

@triton.jit
def _helion_largest(x, out, n: tl.constexpr):
    # src[kernels.py:3]: out[...] = ...
    row = libdevice.exp(tl.load(x + tl.arange(0, n)))
    tl.store(out, triton_helpers.max2(row, 0))

def largest(x: torch.Tensor, *, _launcher=_default_launcher):
    out = torch.empty([1])
    _launcher(_helion_largest, (1,), x, out, 16, num_warps=4, num_stages=1)
    return out
"""


@pytest.fixture
def trial(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import helion_trial

    return helion_trial


@pytest.fixture
def helpers(tmp_path, monkeypatch):
    """A module of two functions, of which one calls the other."""
    path = tmp_path / "helpers.py"
    path.write_text("def larger(a, b):\n    return max(a, b)\n\n\ndef max2(a, dim):\n    return reduce(a, larger)\n")
    spec = importlib.util.spec_from_file_location("helpers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("larger", "max2"):
        setattr(module, name, types.SimpleNamespace(fn=getattr(module, name)))
    return module


def test_emitted_text_stands_alone(trial, helpers):
    text = trial.standalone(EMITTED, {"triton_helpers": helpers})
    assert "helion.runtime" not in text
    assert "_inductor" not in text
    assert "src[" not in text
    assert "_launcher=_launcher" in text
    assert text.count("import libdevice") == 1
    # What a helper calls stands before it, and both before the kernel.
    assert text.index("def larger") < text.index("def max2") < text.index("def _helion_largest")
    assert "max2(row, 0)" in text
    assert "triton_helpers." not in text


def test_what_still_needs_helion_is_refused(trial, helpers):
    text = EMITTED.replace("tl.store(out, ", "tl.store(_source_module.TABLE, ")
    with pytest.raises(ValueError, match=r"found \['_source_module'\]"):
        trial.standalone(text, {"triton_helpers": helpers})


def test_kernels_take_what_the_modules_give_them(trial):
    given = {one.name: [tuple(item.shape) for item in trial.arguments_of(one, one.small)] for one in trial.TRIALS}
    assert len(given) == 12
    assert given["rms_norm"] == [(2, 8, 256)]
    assert given["product"] == [(256, 64), (256, 64), (256,), (256,)]
    # Nothing is allocated for the sizes that are measured.
    largest = trial.arguments_of(trial.TRIALS[0], trial.TRIALS[0].sizes)
    assert largest[0].device == torch.device("meta")


def test_our_own_candidate_is_a_kernel_and_its_lines_are_counted(trial):
    from helion_check import own_lines

    chosen = {one.name: one for one in trial.TRIALS}
    (source,) = trial.our_candidates(chosen["layer_norm"])
    assert "CUDAGraph" not in source
    assert "def _fused_0_kernel" in source
    assert 20 < own_lines(source) < 40
    (argmax,) = trial.our_candidates(chosen["middle_argmax"])
    assert "_index_of(" in argmax


@pytest.mark.exhaustive
def test_helion_emits_a_kernel_that_is_right(trial):
    pytest.importorskip("helion")
    pytest.importorskip("triton")
    from helion_check import interpreted

    first, *others = trial.helion_candidates(trial.TRIALS[0], trial.TRIALS[0].small)
    assert len(others) == len(trial.TRIALS[0].others)
    answer = interpreted(first)
    assert answer["launched"] == 1
    assert answer["error"] < 1e-6
