"""Describes the launches of the built-in corpus: CuAsmRL's six kernels and four more.

The sizes are our choice, meant for some tens of microseconds on a large GPU: the paper's are not in the sources that
could be read.
"""

from __future__ import annotations

from kernelwright.gpu.corpus import CORPUS, KernelSpec
from kernelwright.gpu.launch_spec import Argument, ScalarArgument, TensorArgument
from kernelwright.gpu.triton_spec import TritonSpec

_ROWS = 4096
_SIDE = 1024
_BATCH = 4
_HEADS, _CONTEXT, _HEAD_WIDTH = 8, 1024, 64
_EPSILON = 1e-5
_SCALE = 0.18
"""log2(e) / sqrt(64), rounded: the kernel uses exp2."""


def corpus_specs() -> dict[str, TritonSpec]:
    """Return the spec of every kernel of the corpus by its name."""
    return {name: _spec(kernel) for name, kernel in CORPUS.items()}


def _spec(kernel: KernelSpec) -> TritonSpec:
    arguments, grid = _LAUNCHES[kernel.source](kernel)
    return TritonSpec(kernel.function, arguments, grid, kernel.constants, kernel.num_warps, kernel.num_stages)


_Launch = tuple[list[Argument], tuple[int, ...]]


def _matrix(name: str, kernel: KernelSpec, *shape: int, output: bool = False) -> TensorArgument:
    return TensorArgument.model_validate(
        {
            "name": f"{name}_ptr",
            "dtype": kernel.dtype,
            "shape": shape,
            "role": "output" if output else "input",
            "init": "zeros" if output else "normal",
            "scale": 0.5,
        }
    )


def _integers(**values: int) -> list[Argument]:
    return [ScalarArgument(name=name, value=value) for name, value in values.items()]


def _rows(kernel: KernelSpec, columns: int, *weights: str, epsilon: bool = False, reduced: bool = False) -> _Launch:
    arguments: list[Argument] = [
        _matrix("out", kernel, *((_ROWS,) if reduced else (_ROWS, columns)), output=True),
        _matrix("in", kernel, _ROWS, columns),
        *(_matrix(name, kernel, columns) for name in weights),
        *_integers(row_stride=columns, n_cols=columns),
    ]
    if epsilon:
        arguments.append(ScalarArgument(name="eps", type="fp32", value=_EPSILON))
    return arguments, (_ROWS,)


def _product(kernel: KernelSpec) -> _Launch:
    return [
        _matrix("a", kernel, _SIDE, _SIDE),
        _matrix("b", kernel, _SIDE, _SIDE),
        _matrix("c", kernel, _SIDE, _SIDE, output=True),
        *_integers(M=_SIDE, N=_SIDE, K=_SIDE, stride_am=_SIDE, stride_bk=_SIDE, stride_cm=_SIDE),
    ], _tiles(kernel)


def _batched_product(kernel: KernelSpec) -> _Launch:
    side = _SIDE // 2
    return [
        _matrix("a", kernel, _BATCH, side, side),
        _matrix("b", kernel, _BATCH, side, side),
        _matrix("c", kernel, _BATCH, side, side, output=True),
        *_integers(M=side, N=side, K=side, stride_ab=side * side, stride_am=side),
        *_integers(stride_bb=side * side, stride_bk=side, stride_cb=side * side, stride_cm=side),
    ], (side // kernel.constants["BLOCK_M"], side // kernel.constants["BLOCK_N"], _BATCH)


def _feed_forward(kernel: KernelSpec) -> _Launch:
    return [
        _matrix("x", kernel, _SIDE, _SIDE),
        _matrix("gate", kernel, _SIDE, _SIDE),
        _matrix("up", kernel, _SIDE, _SIDE),
        _matrix("out", kernel, _SIDE, _SIDE, output=True),
        *_integers(M=_SIDE, N=_SIDE, K=_SIDE, stride_xm=_SIDE, stride_wk=_SIDE, stride_om=_SIDE),
    ], _tiles(kernel)


def _attention(kernel: KernelSpec) -> _Launch:
    shape = (_HEADS, _CONTEXT, _HEAD_WIDTH)
    return [
        *(_matrix(name, kernel, *shape) for name in ("q", "k", "v")),
        _matrix("out", kernel, *shape, output=True),
        *_integers(n_ctx=_CONTEXT, head_stride=_CONTEXT * _HEAD_WIDTH),
        ScalarArgument(name="scale", type="fp32", value=_SCALE),
    ], (_CONTEXT // kernel.constants["BLOCK_M"], _HEADS)


def _tiles(kernel: KernelSpec) -> tuple[int, int]:
    return _SIDE // kernel.constants["BLOCK_M"], _SIDE // kernel.constants["BLOCK_N"]


_LAUNCHES = {
    "softmax": lambda kernel: _rows(kernel, 1008),
    "rmsnorm": lambda kernel: _rows(kernel, 2064, "weight", epsilon=True),
    "layernorm": lambda kernel: _rows(kernel, 1008, "weight", "bias", epsilon=True),
    "row_sum": lambda kernel: _rows(kernel, 4096, reduced=True),
    "gemm_leakyrelu": _product,
    "batched_gemm": _batched_product,
    "fused_feed_forward": _feed_forward,
    "flash_attention": _attention,
    "sgemm": _product,
}
"""Arguments and grid of each function of the corpus."""
