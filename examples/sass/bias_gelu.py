"""Defines a Triton kernel to tune, and its launch while it is tuned.

    kernelwright sass optimize examples/sass/bias_gelu.py --out run
    kernelwright sass deploy run

Then decorate the kernel where it is used, and its launches use the tuned code:

    @kernelwright.jit
    @triton.jit
    def bias_gelu(...)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelwright.gpu.launch_spec import ScalarArgument, TensorArgument
from kernelwright.gpu.triton_spec import TritonSpec

ROWS, COLUMNS, BLOCK = 2048, 4096, 1024


@triton.jit
def bias_gelu(x_ptr, bias_ptr, out_ptr, columns, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201 - Triton's arguments.
    """out = gelu(x + bias), by the tanh approximation; one block of one row a program."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask).to(tl.float32)
    x += tl.load(bias_ptr + offsets, mask=mask).to(tl.float32)
    inner = 0.7978845608 * (x + 0.044715 * x * x * x)
    out = x / (1.0 + tl.exp(-2.0 * inner))
    tl.store(out_ptr + row * columns + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


SPECS = {
    "bias_gelu": TritonSpec(
        kernel=bias_gelu,
        arguments=[
            TensorArgument(name="x_ptr", dtype="fp16", shape=(ROWS, COLUMNS)),
            TensorArgument(name="bias_ptr", dtype="fp16", shape=(COLUMNS,)),
            TensorArgument(name="out_ptr", dtype="fp16", shape=(ROWS, COLUMNS), role="output"),
            ScalarArgument(name="columns", value=COLUMNS),
        ],
        grid=(ROWS, triton.cdiv(COLUMNS, BLOCK)),
        constants={"BLOCK": BLOCK},
    ),
}
