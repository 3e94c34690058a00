"""Multiplies float32 matrices at float32's accuracy on tensor cores: two templates, in CUDA C++ and in Triton, for Hopper.

Each row of A and each column of B is scaled by a power of two, then each value is written as a sum of two float16:
`high = f16(x)` and `low = f16(x - high)`, by a pass that writes them to memory. The product is
`high*low + low*high + high*high`, accumulated in float32 on tensor cores; `low*low` lies below float32's precision and is
left out.

- The tensor core's accumulator truncates, so that its error grows with K. It is added to a second accumulator after each
  step of `block_k`.
- A row or column that holds Inf or NaN, or whose range is too wide for two float16, is marked while it is split. Every
  output tile that it touches is computed again with float32 multiply-adds.
- Small products, other types and other devices go to `torch.matmul`.

An emitted function takes `a` of (..., M, K), and `b` with the *columns* of the right operand as rows, (N, K) or
(batch, N, K): a Linear's weight as it is, or `b.mT` of a plain matmul. Any strides are taken.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    arguments,
    aten,
    is_call,
    is_tensor,
    number,
    operands,
    packet_of,
    shape,
    value,
)
from kernelwright.rewrites.templates.base import (
    MULTIPROCESSORS,
    SHARED_BYTES,
    Kernels,
    TemplateKernel,
    block,
    kernel_text,
    knob_table,
    raw_literal,
)
from kernelwright.rewrites.templates.products import ProductSizes, ProductTemplate

LEAST_WORK = 1 << 28
"""Multiply-adds of a product below which cuBLAS's SGEMM is at least as fast. On an H200 the form `wgmma` takes 0.82 of its
time at best for 1024 x 512 x 512, and 1.25 for 128 x 1024 x 1024, half the work (results/2026-11-23-split-products-h200)."""
LEAST_BREADTH = 96
"""Least `m * n / (m + n)` of products whose operands exceed the L2 cache. Splitting and reading halves moves 16 bytes for
each value of both operands; at 4.2 TB/s and SGEMM's 50 TFLOP/s that alone takes SGEMM's time where the breadth is 95. At 128
the whole takes 0.66 of SGEMM's time on an H200 (256 x 256 x 131072, results/2026-11-23-split-products-h200)."""
L2_BYTES = 50 << 20
"""Size of the L2 cache of an H100 or H200."""
LEAST_SIDE = 32
"""Rows and columns of an output, and length of its sums, below which tiles are mostly padding."""
CUDA = ("split_operands.cu", "split_product.cu")
"""Files with the CUDA C++, which follows the definitions that `cuda_head` writes."""
CUDA_TILES = ((128, 64, 3), (128, 32, 6), (192, 64, 2), (192, 32, 5), (64, 64, 4), (160, 64, 3))
"""Choices of `block_n`, `block_k` and `num_stages` in CUDA C++ that fit beside rows of 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Knobs of the kernel that a search may set; every choice computes the same product.

    Attributes:
        block_m: rows of an output tile.
        block_n: columns of an output tile.
        block_k: length of K that one step reads.
        num_warps: warps of a thread block, in Triton. In CUDA C++ one warpgroup loads and two multiply.
        num_stages: depth of the software pipeline.
        group: tiles of M that neighbouring programs walk through before the next tile of N.
        split_k: slices of K that are computed by different programs and then added.
        cluster: thread blocks that share the loads of a tile of B, in CUDA C++.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    group: int = 8
    split_k: int = 1
    cluster: int = 1

    @property
    def shared_bytes(self) -> int:
        """Least shared memory of the pipeline's stages, in bytes."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * 4

    @property
    def fits(self) -> bool:
        """True where a Triton kernel's stages and accumulators fit on an H100 or H200, and its warps have enough to do."""
        enough = self.block_m >= 16 * self.num_warps or self.block_m * self.block_n >= 2048 * self.num_warps
        registers = 2 * self.block_m * self.block_n // (32 * self.num_warps)
        few = registers <= min(192, 57344 // (32 * self.num_warps))
        return self.shared_bytes <= SHARED_BYTES and few and enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One step of the epilogue.

    Attributes:
        cuda: statement on the value `out`, in column `col` and at `at` of the output; `$tensor` is the tensor read.
        eager: the same on the tensor `out` in PyTorch, for the fall-back.
        tensor: name of the tensor that it reads, if any: float32, of `shape`.
        shape: "columns" (N values) or "output" (as the output).
    """

    cuda: str
    eager: str
    tensor: str = ""
    shape: str = ""


def bias(name: str = "bias") -> Fragment:
    """Add a value to each column."""
    return Fragment(
        cuda="out += __ldg($tensor + col);",
        eager=f"out = out + {name}",
        tensor=name,
        shape="columns",
    )


def residual(name: str = "residual") -> Fragment:
    """Add a contiguous tensor of the output's shape."""
    return Fragment(
        cuda="out += __ldg($tensor + at);",
        eager=f"out = out + {name}",
        tensor=name,
        shape="output",
    )


def scale(factor: float) -> Fragment:
    """Multiply by a number."""
    text = f"out = out * {float(factor)!r}"
    return Fragment(cuda=f"{text}f;", eager=text)


def leaky_relu(slope: float = 0.01) -> Fragment:
    """Multiply what is negative by a slope."""
    return Fragment(
        cuda=f"out = out < 0 ? out * {float(slope)!r}f : out;",
        eager=f"out = torch.nn.functional.leaky_relu(out, {slope!r})",
    )


# NaN fails every comparison, so that this lets it through as PyTorch does.
RELU = Fragment(cuda="out = out < 0 ? 0.0f : out;", eager="out = torch.relu(out)")
GELU = Fragment(cuda="out = 0.5f * out * (1.0f + erff(out * 0.70710678f));", eager="out = torch.nn.functional.gelu(out)")
SIGMOID = Fragment(cuda="out = 1.0f / (1.0f + expf(-out));", eager="out = torch.sigmoid(out)")
SWISH = Fragment(cuda="out = out / (1.0f + expf(-out));", eager="out = torch.nn.functional.silu(out)")
MOST_TENSORS = 4
"""Tensors that an epilogue can read."""


def fragment_of(node: fx.Node, source: fx.Node, name: str) -> tuple[Fragment, fx.Node | None] | None:
    """How a kernel computes a reader of its own result, and the tensor of this name that it reads; None if it cannot."""
    if node.op != "call_function" or not is_tensor(node) or packet_of(node) is None:
        return None
    if shape(node) != shape(source) or value(node).dtype != torch.float32 or node.all_input_nodes.count(source) != 1:
        return None
    given = arguments(node)
    if is_call(node, aten.relu):
        return RELU, None
    if is_call(node, aten.sigmoid):
        return SIGMOID, None
    if is_call(node, aten.silu):
        return SWISH, None
    if is_call(node, aten.gelu) and given["approximate"] == "none":
        return GELU, None
    if is_call(node, aten.leaky_relu):
        return leaky_relu(float(given["negative_slope"])), None
    other = operands(node, aten.add, aten.mul)
    if other is None or sum(item is source for item in other) != 1:
        return None
    rest = other[1] if other[0] is source else other[0]
    factor = number(rest)
    if is_call(node, aten.mul):
        return (scale(factor), None) if factor is not None and math.isfinite(factor) else None
    if not is_tensor(rest) or value(rest).dtype != torch.float32 or not value(rest).is_contiguous():
        return None
    if shape(rest) == shape(source)[-1:]:
        return bias(name), rest
    return (residual(name), rest) if shape(rest) == shape(source) else None


def cuda_head(knobs: Knobs, epilogue: tuple[Fragment, ...] = ()) -> str:
    """Definitions that come before the kernels for these knobs and this epilogue."""
    size = knobs.block_n // 2
    places = (f"tensors.at[{index}]" for index in itertools.count())
    steps = (part.cuda.replace("$tensor", next(places)) if part.tensor else part.cuda for part in epilogue)
    return kernel_text(
        "split_head.cu.txt",
        **asdict(knobs),
        most_tensors=MOST_TENSORS,
        epilogue="".join(f"    {step}\n" for step in steps),
        size=size,
        right=size + 1,
        add=size + 2,
        registers=", ".join(f"%{i}" for i in range(size)),
        outputs=", ".join(f'"+f"(d[{i}])' for i in range(size)),
    )


def eager_text(epilogue: tuple[Fragment, ...], name: str) -> str:
    """The fall-back as a function of this name."""
    tensors = "".join(f"{fragment.tensor}, " for fragment in epilogue if fragment.tensor)
    lines = [fragment.eager for fragment in epilogue] or ["# No epilogue."]
    body = ["out = torch.matmul(a, b.mT)", *lines, "return out"]
    return "\n".join(block(f"def {name}(a, b, {tensors}):", body)) + "\n"


class SplitProduct(ProductTemplate[Knobs]):
    """Products whose operands' halves a pass writes to memory first."""

    function: ClassVar = "split_product"
    default = Knobs()
    form: ClassVar[str]
    """Name of its table of knobs."""

    def refusal(self, sizes: ProductSizes) -> str | None:
        """The reason why the kernel does not take a product of these sizes; None if it does."""
        m, n, k = sizes.m, sizes.n, sizes.k
        if min(m, n, k) < LEAST_SIDE:
            return f"wanted at least {LEAST_SIDE} rows, columns and length, found {m} x {n} x {k}"
        if m * n < LEAST_BREADTH * (m + n) and 4 * sizes.batch * (m + n) * k > L2_BYTES:
            breadth = f"wanted outputs whose m * n / (m + n) is {LEAST_BREADTH} or more, found {m} x {n}"
            return f"{breadth}; memory limits the splitting"
        if sizes.work < LEAST_WORK:
            return f"wanted at least {LEAST_WORK} multiply-adds, found {sizes.work}; cuBLAS is as fast"
        return None

    def alternatives(self, sizes: ProductSizes) -> tuple[Knobs, ...]:
        """Knobs worth a look for a product of these sizes, those of its shape's class first."""
        tiles = sizes.tiles(128, 128)
        classes = knob_table("split_product")[self.form]
        fitting = (row for row in classes if tiles >= row["tiles"] and sizes.n >= row["n"] and sizes.k >= row["k"])
        first = Knobs(**next(fitting)["knobs"])
        return tuple(dict.fromkeys(_filling(knobs, sizes) for knobs in (first, *self.tiles(first))))

    @abstractmethod
    def tiles(self, first: Knobs) -> Iterator[Knobs]:
        """Tiles that fit, with the other knobs of the class's default."""

    def identity(self, choices: tuple[Knobs, ...], options: tuple[Any, ...]) -> Hashable:
        """Equal for products of the same default, which share a function."""
        return choices[0], options


class SplitTriton(SplitProduct):
    """The product in Triton, which loads through the tensor memory accelerator."""

    technique = "split-product-triton"
    form = "tma"
    caller = "split_product.triton.caller.txt"

    def tiles(self, first: Knobs) -> Iterator[Knobs]:
        """Tiles that fit, with the other knobs of the class's default."""
        for bm, bn, bk, warps, stages in itertools.product((64, 128), (64, 128, 256), (32, 64), (4, 8), (3, 4)):
            knobs = replace(first, block_m=bm, block_n=bn, block_k=bk, num_warps=warps, num_stages=stages)
            if knobs.fits:
                yield knobs

    def module(self, knobs: Knobs) -> str:
        """Text of a module that defines `product(a, b, knobs)`; it is the same for all knobs."""
        return kernel_text("split_product.triton.txt", least_work=LEAST_WORK, least_side=LEAST_SIDE)

    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text."""
        return {"tiles": tuple(map(asdict, kernel.choices))}


class SplitCuda(SplitProduct):
    """The product in CUDA C++ with wgmma, and what follows it.

    The options of a kernel are the steps of its epilogue; each tensor that they read is a further argument of the function.
    """

    technique = "split-product-cuda"
    form = "wgmma"
    needs_nvcc = True
    caller = "split_product.cuda.caller.txt"

    def tiles(self, first: Knobs) -> Iterator[Knobs]:
        """Tiles that fit, with the other knobs of the class's default."""
        for columns, length, stages in CUDA_TILES:
            yield replace(first, block_n=columns, block_k=length, num_stages=stages)

    def module(self, knobs: Knobs) -> str:
        """Text of a module that defines the class `Product`; it is the same for all knobs."""
        given = {"cuda": raw_literal(kernel_text(*CUDA)), "library": kernel_text("cuda_library.txt")}
        return kernel_text("split_product.cuda.txt", least_work=LEAST_WORK, least_side=LEAST_SIDE, **given)

    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text."""
        return {
            "tiles": tuple((knobs.split_k, cuda_head(knobs, kernel.options)) for knobs in kernel.choices),
            "eager": eager_text(kernel.options, f"{kernel.__name__}_eager"),
            "shapes": tuple(fragment.shape for fragment in kernel.options if fragment.tensor),
        }

    def finish(self, editor: Editor, kernels: Kernels) -> None:
        """Let kernels compute what follows them, as far as each result has one reader."""
        for node in editor.nodes():
            kernel = node.target
            if isinstance(kernel, TemplateKernel) and kernel.template is self:
                self._absorb(editor, node, kernel, kernels)

    def _absorb(self, editor: Editor, node: fx.Node, kernel: TemplateKernel, kernels: Kernels) -> None:
        epilogue: tuple[Fragment, ...] = ()
        tensors: tuple[fx.Node, ...] = ()
        last = node
        while len(last.users) == 1 and len(tensors) < MOST_TENSORS:
            step = fragment_of(next(iter(last.users)), last, f"t{len(tensors)}")
            if step is None:
                break
            fragment, tensor = step
            epilogue += (fragment,)
            tensors += (tensor,) if tensor is not None else ()
            last = next(iter(last.users))
        if epilogue:
            call = editor.call(last, kernels.kernel(kernel.choices, epilogue), *node.args, *tensors)
            editor.replace(last, call)


def _filling(knobs: Knobs, sizes: ProductSizes) -> Knobs:
    """The same knobs with as many slices of K as fill the multiprocessors once, each with sums worth a program."""
    programs = sizes.tiles(knobs.block_m, knobs.block_n)
    fitting = [s for s in (2, 4, 8, 16, 32, 64) if programs * s <= MULTIPROCESSORS and sizes.k // s >= 256]
    return replace(knobs, split_k=max(fitting, default=1))


SPLIT_CUDA, SPLIT_TRITON = SplitCuda(), SplitTriton()
