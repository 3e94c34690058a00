"""Rotary embeddings: halves of a tensor that change places are loads of one kernel, in the tensor's own order."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.judge.check.guard import RESPELLING
from tests.rewrites.samples import apply_rules, compare, interpreted, task_text
from tests.rewrites.test_fusion import needs_triton
from tests.rewrites.test_sixteen_bits import PRECISE, drawing

RULE = "rotate-before-transpose"
ROTARY = """
q = a.view(2, 20, 3, 16).transpose(1, 2)
cosine, sine = b.unsqueeze(1), c.unsqueeze(1)
return {}
"""
EMBEDDED = "q * cosine + torch.cat((-q[..., 8:], q[..., :8]), -1) * sine"
INPUTS = "drawn(2, 20, 48), drawn(2, 20, 16), drawn(2, 20, 16)"
TURNED = "torch.cat((a[:, 30:], -a[:, 10:30], a[:, -90:10]), 1) * b"


def text(forward: str, inputs: str, dtype: str = "float32") -> str:
    return drawing(task_text(forward, inputs), dtype)


@pytest.mark.parametrize(
    ("embedded", "factors"),
    [
        (EMBEDDED, "drawn(2, 20, 16), drawn(2, 20, 16)"),
        ("cosine * q + sine * torch.cat((-q[..., 8:], q[..., :8]), -1)", "drawn(1, 20, 16), drawn(1, 20, 16)"),
        (EMBEDDED.replace("cosine", "b").replace("sine", "c"), "drawn(20, 16), drawn(2, 1, 20, 16)"),
    ],
)
def test_a_rotation_comes_before_the_transpose(embedded: str, factors: str) -> None:
    done = apply_rules(text(ROTARY.format(embedded), f"drawn(2, 20, 48), {factors}"), RULE)
    assert done.fired == (RULE,)
    assert done.source.split("class ModelNew")[1].count(".transpose(") == 1 + ("(2, 1, 20" in factors)
    compare(done.reference, done.source, 1e-6)
    assert RULE in RESPELLING, "torch.compile chooses this order by itself"


@pytest.mark.parametrize(
    "embedded",
    [
        "q * cosine + torch.cat((q[..., 8:], q[..., :8]), -1) * sine",
        "q * cosine + torch.cat((-q[..., :8], q[..., 8:]), -1) * sine",
        "q * cosine + torch.cat((-q[..., 4:], q[..., :4]), -1) * sine",
        "q * cosine + torch.cat((-q[:, :, 10:], q[:, :, :10]), 2) * sine",
        "q.contiguous() * cosine + torch.cat((-q[..., 8:], q[..., :8]), -1) * sine",
        "torch.cat((-q[..., 8:], q[..., :8]), -1) * sine + q",
        "torch.cat((-q[..., 8:], q[..., :8]), -1) * sine + q * cosine",
        "q * cosine - torch.cat((-q[..., 8:], q[..., :8]), -1) * sine",
    ],
)
def test_what_is_no_rotation_stays(embedded: str) -> None:
    assert not apply_rules(text(ROTARY.format(embedded), INPUTS), RULE).fired


@needs_triton
@pytest.mark.parametrize(
    ("forward", "inputs", "dtype"),
    [
        (ROTARY.format(EMBEDDED), INPUTS, "bfloat16"),
        (ROTARY.format(EMBEDDED), INPUTS, "float32"),
        (f"return {TURNED}", "drawn(33, 90), drawn(33, 90)", "float16"),
    ],
)
def test_parts_that_change_places_are_one_kernel(forward: str, inputs: str, dtype: str, tmp_path: Path, small: None) -> None:
    done = apply_rules(text(forward, inputs, dtype), RULE, fuse="cuda")
    body = done.source.split("class ModelNew")[1]
    assert "torch." not in body.split("super().forward")[1], "one kernel computes all of it"
    assert ("tl.max_contiguous" in done.source) == ("30" in forward), "halves of 8 numbers are read as vectors"
    # A GPU rounds to the nearest number of bfloat16, Triton's interpreter to the next one towards zero.
    units = {"bfloat16": 1.02, "float16": 0.51, "float32": 4}[dtype]
    interpreted(PRECISE, done.reference, done.source, tmp_path, str(units))


@pytest.mark.parametrize(
    "forward",
    [
        "torch.cat((a[:, 8:], b[:, :8]), 1) * b",
        "torch.cat((a[:, ::2], a[:, 1::2]), 1) * b",
        "torch.cat([a[:, one : one + 10] for one in range(0, 90, 10)], 1) * b",
        "torch.cat((a.exp()[:, 8:], a[:, :8]), 1) * b",
    ],
)
def test_other_parts_stay_pytorchs(forward: str, small: None) -> None:
    done = apply_rules(text(f"return {forward}", "drawn(33, 90), drawn(33, 90)"), fuse="cuda")
    assert "torch.cat" in done.source.split("class ModelNew")[1]
