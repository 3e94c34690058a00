"""Compiles and disassembles kernels for compute capability 9.0 into a folder; no GPU is needed.

    python benchmarks/sass_prepare.py DIR [--kinds hint,move]

The corpus in small sizes that do not fill the last tile, and the kernels of `benchmarks/sass_kernels.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kernelwright.gpu import disassemble
from kernelwright.gpu.launch_spec import ScalarArgument, TensorArgument
from kernelwright.gpu.target import CORPUS, corpus_specs, read_specs, save_target
from kernelwright.gpu.triton_spec import TritonSpec

ARCHITECTURE = 90
_ROWS = 528
_M, _N, _K = 496, 528, 528
_SIDE, _BATCH = 512, 4
_HEADS, _CONTEXT, _WIDTH = 8, 512, 64


def small(name: str) -> TritonSpec:
    """Return a kernel of the corpus in a size at which checking its outputs is quick."""
    spec = corpus_specs()[name]
    shapes, grid = _SHAPES[spec.kernel.__name__]
    sizes = _SIZES.get(spec.kernel.__name__, {})
    arguments = []
    for argument in spec.arguments:
        if isinstance(argument, TensorArgument):
            arguments.append(argument.model_copy(update={"shape": shapes[argument.name.removesuffix("_ptr")]}))
        elif isinstance(argument, ScalarArgument) and argument.name in sizes:
            arguments.append(argument.model_copy(update={"value": sizes[argument.name]}))
        else:
            arguments.append(argument)
    tiles = [-(-size // spec.constants[block]) if block else size for size, block in grid]
    return replace(spec, arguments=arguments, grid=tuple(tiles))


_Shapes = dict[str, tuple[int, ...]]
_Grid = list[tuple[int, str | None]]


def _rows(columns: int, **weights: tuple[int, ...]) -> tuple[_Shapes, _Grid]:
    return {"out": (_ROWS, columns), "in": (_ROWS, columns), **weights}, [(_ROWS, None)]


_PRODUCT: tuple[_Shapes, _Grid] = (
    {"a": (_M, _K), "b": (_K, _N), "c": (_M, _N)},
    [(_M, "BLOCK_M"), (_N, "BLOCK_N")],
)
_SHAPES: dict[str, tuple[_Shapes, _Grid]] = {
    "softmax": _rows(1008),
    "rmsnorm": _rows(2064, weight=(2064,)),
    "layernorm": _rows(1008, weight=(1008,), bias=(1008,)),
    "row_sum": ({"out": (_ROWS,), "in": (_ROWS, 4096)}, [(_ROWS, None)]),
    "gemm_leakyrelu": _PRODUCT,
    "sgemm": _PRODUCT,
    "batched_gemm": (
        {name: (_BATCH, _SIDE, _SIDE) for name in "abc"},
        [(_SIDE, "BLOCK_M"), (_SIDE, "BLOCK_N"), (_BATCH, None)],
    ),
    "fused_feed_forward": (
        {name: (_SIDE, _SIDE) for name in ("x", "gate", "up", "out")},
        [(_SIDE, "BLOCK_M"), (_SIDE, "BLOCK_N")],
    ),
    "flash_attention": (
        {name: (_HEADS, _CONTEXT, _WIDTH) for name in ("q", "k", "v", "out")},
        [(_CONTEXT, "BLOCK_M"), (_HEADS, None)],
    ),
}
"""Shape of each tensor, and the grid as (size, the constant it is divided by)."""
_PRODUCT_SIZES = {"M": _M, "N": _N, "K": _K, "stride_am": _K, "stride_bk": _N, "stride_cm": _N}
_SIZES: dict[str, dict[str, int]] = {
    "gemm_leakyrelu": _PRODUCT_SIZES,
    "sgemm": _PRODUCT_SIZES,
    "fused_feed_forward": dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wk", "stride_om"), _SIDE),
    "flash_attention": {"n_ctx": _CONTEXT, "head_stride": _CONTEXT * _WIDTH},
}
"""Integer arguments that differ from the corpus's own sizes."""


def specs() -> dict[str, TritonSpec]:
    """Return every kernel to run, by its name."""
    headroom = Path(__file__).with_name("sass_kernels.py")
    return {name: small(name) for name in CORPUS} | read_specs(headroom)


def prepare(folder: Path, names: list[str], kinds: str = "") -> None:
    """Write a launch file, a cubin and a listing of every kernel, or of those that are named; and the kinds of moves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kinds").write_text(kinds, encoding="utf-8")
    for name, spec in specs().items():
        if names and name not in names:
            continue
        target = replace(spec, settings={**spec.settings, "input_sets": 1}).build(name, ARCHITECTURE)
        save_target(target, folder)
        (folder / f"{name}.txt").write_text(disassemble(target.cubin), encoding="utf-8")


def main() -> None:
    """Prepare what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="kernels; all when none is named")
    parser.add_argument(
        "--kinds", default="", help="kinds of moves that sass_execute.py plays, comma-separated; all by default"
    )
    options = parser.parse_args()
    prepare(options.folder, options.names, options.kinds)


if __name__ == "__main__":
    main()
