"""Computes scaled dot-product attention in one kernel: a template that emits Triton source.

A program has a tile of one head's queries. It walks over the keys, keeps the scores in registers, and corrects its sums
whenever a higher score comes (online softmax, as in flash attention). Operands of float16 and bfloat16 are multiplied as
they are. Those of float32 are split in registers as in `one_pass_product`, so that the error is that of float32. PyTorch's
own kernels multiply float32 without tensor cores.

A causal program leaves out the keys that are later than its queries. A mask of booleans is read in each call. Keys before
the first and after the last that any query of the program sees are left out, by tiles. Before the first hidden key the mask
is not read again, so that a mask that is causal costs little more than the flag.

A query that sees no key gets zeros, as PyTorch has it since 2.5. Inf and NaN come out as in PyTorch where nothing is hidden.
Those of hidden keys and values may or may not come through, as in PyTorch, whose kernels differ among each other.

Heads are padded to a power of two, or to the sum of two where that is less, as 96 is 64 and 32. Those of float32 are padded
to 32 at least.

The emitted module imports torch and triton, and defines `tiled_attention(q, k, v, mask, scale, causal, ...)` of three or
four dimensions with any strides.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, cast

import torch
from torch import fx

from kernelwright.rewrites.graph import Editor, arguments, aten, contiguous_strides, dtype, is_tensor, number, shape, value
from kernelwright.rewrites.templates.base import MULTIPROCESSORS, CallTemplate, TemplateKernel, kernel_text, knob_table

TYPES = ("float32", "float16", "bfloat16")
"""Types of elements that the kernel takes."""
LEAST_LENGTH = 16
"""Queries and keys below which a tile is mostly empty. Our choice."""
LEAST_WORK = 1 << 26
"""Multiply-adds of a call below which a launch takes as long. Our choice."""
WIDEST = 256
"""Length of queries, keys and values up to which a tile of 16-bit numbers fits registers."""
WIDEST_SPLIT = 128
"""The same for float32, whose pieces take three times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKnobs:
    """Knobs of the kernel; every choice computes the same.

    Attributes:
        block_m: queries of a program.
        block_n: keys that one step reads.
        num_warps: warps of a thread block.
        num_stages: depth of the software pipeline.
        precision: of `tl.dot`: `tf32x3`, `bf16x6`, or `ieee`, which leaves operands of 16 bits as they are.
    """

    block_m: int = 128
    block_n: int = 32
    num_warps: int = 8
    num_stages: int = 2
    precision: str = "tf32x3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Sizes of a call.

    Attributes:
        heads: attentions that are independent of each other: heads times batch.
        width: length of a query and of a key.
        width_v: length of a value.
        dtype: type of all operands, one of `TYPES`.
    """

    heads: int
    queries: int
    keys: int
    width: int
    width_v: int
    dtype: str = "float32"


class TiledAttention(CallTemplate[Attention, AttentionKnobs]):
    """Attention by tiles of queries, which walk over the keys.

    The options of a kernel are the factor of the scores, whether a query sees no later key, and whether the result lies in
    memory as [batch, queries, heads, width].
    """

    technique = "tiled-attention"
    function: ClassVar = "tiled_attention"
    operators: ClassVar = (aten.scaled_dot_product_attention,)
    task_operators: ClassVar = frozenset({"scaled_dot_product_attention", "softmax", "_softmax"})
    caller = "attention.caller.txt"
    default = AttentionKnobs()

    def sizes_of(self, node: fx.Node) -> Attention | None:
        """Sizes of an attention without dropout or shared keys, of operands of one type; None of another."""
        given = arguments(node)
        operands = [given["query"], given["key"], given["value"]]
        if not all(map(is_tensor, operands)) or given["dropout_p"] or given["enable_gqa"]:
            return None
        query, key, values = map(shape, operands)
        kinds = set(map(dtype, operands))
        if len(query) not in (3, 4) or not query[:-2] == key[:-2] == values[:-2] or len(kinds) > 1:
            return None
        scale, mask = given["scale"], cast(fx.Node | None, given["attn_mask"])
        # The highest score is looked for before it is scaled.
        if scale is not None and not 0 < (number(scale) or 0.0) < math.inf:
            return None
        if mask is not None and (given["is_causal"] or dtype(mask) not in (torch.bool, *kinds)):
            return None
        return Attention(
            heads=math.prod(query[:-2]),
            queries=query[-2],
            keys=key[-2],
            width=query[-1],
            width_v=values[-1],
            dtype=str(*kinds).removeprefix("torch."),
        )

    def refusal(self, sizes: Attention) -> str | None:
        """The reason why the kernel does not take a call of these sizes; None if it does."""
        if sizes.dtype not in TYPES:
            return f"wanted one of the types {', '.join(TYPES)}, found {sizes.dtype}"
        if min(sizes.queries, sizes.keys) < LEAST_LENGTH:
            return f"wanted at least {LEAST_LENGTH} queries and keys, found {sizes.queries} and {sizes.keys}"
        widest = WIDEST_SPLIT if sizes.dtype == "float32" else WIDEST
        if max(sizes.width, sizes.width_v) > widest:
            return f"wanted heads of at most {widest} numbers, found {sizes.width} and {sizes.width_v}"
        work = sizes.heads * sizes.queries * sizes.keys * (sizes.width + sizes.width_v)
        if work < LEAST_WORK:
            return f"wanted at least {LEAST_WORK} multiply-adds, found {work}"
        return None

    def alternatives(self, sizes: Attention) -> tuple[AttentionKnobs, ...]:
        """Knobs worth a look for a call of these sizes, the default first."""
        widest = max(sizes.width, sizes.width_v)
        if sizes.dtype == "float32":
            name = "narrow_split" if widest <= 64 else "wide_split"
        else:
            name = "narrow" if widest <= 64 else "wide" if widest <= 128 else "widest"
        choices = tuple(AttentionKnobs(**row) for row in knob_table("attention")[name])
        # Rows of 32 and of 64 pieces in bfloat16 have two layouts at one address of shared memory. From those ptxas 12.8, of
        # Triton 3.6.0 and 3.7.1, makes code that reads registers without a value: an illegal access or wrong numbers.
        if sizes.dtype == "float32" and len(row_lengths(sizes.width) | row_lengths(sizes.width_v)) > 1:
            choices = tuple(knobs for knobs in choices if knobs.precision != "bf16x6")
        # Tiles of 128 queries would leave some of the multiprocessors idle, or be half empty.
        if sizes.heads * -(-sizes.queries // 128) < MULTIPROCESSORS or sizes.queries <= 64:
            low = next(knobs for knobs in choices if knobs.block_m == 64)
            return (low, *(knobs for knobs in choices if knobs is not low))
        return choices

    def options(self, node: fx.Node, sizes: Attention) -> tuple[float, bool, bool]:
        """Factor, order of queries and keys, and layout of the result."""
        given = arguments(node)
        scale = number(given["scale"]) or 1 / math.sqrt(sizes.width)
        return scale, bool(given["is_causal"]), _heads_inside(value(node))

    def module(self, knobs: AttentionKnobs) -> str:
        """Text of a module that defines `tiled_attention(q, k, v, ..., knobs=ATTENTION_KNOBS)`."""
        return kernel_text("attention.triton.txt", knobs=asdict(knobs))

    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text."""
        return {"tiles": tuple(map(asdict, kernel.choices)), "options": ", ".join(map(repr, kernel.options))}

    def outputs(self, kernel: TemplateKernel, *inputs: torch.Tensor) -> torch.Tensor:
        """The answers to fake tensors."""
        q, _, v, *_ = inputs
        if kernel.options[-1]:
            batch, heads, queries, _ = q.shape
            return q.new_empty((batch, queries, heads, v.shape[-1])).transpose(1, 2)
        return q.new_empty((*q.shape[:-1], v.shape[-1]))

    def insert(self, editor: Editor, node: fx.Node, sizes: Attention, kernel: TemplateKernel) -> None:
        """Put a call of the kernel in the place of a node."""
        given = arguments(node)
        operands = [given["query"], given["key"], given["value"]]
        operands += [given["attn_mask"]] if given["attn_mask"] is not None else []
        editor.replace(node, editor.call(node, kernel, *operands))


def row_lengths(width: int) -> set[int]:
    """Numbers in the rows of the tiles of a float32 head, as the emitted `attention_parts` has it."""
    return {32} if width <= 32 else {64, 32} if 64 < width <= 96 else {64}


def _heads_inside(result: torch.Tensor) -> bool:
    """True where a result lies as PyTorch's for queries with heads side by side, so that merging them is a view."""
    if result.dim() != 4:
        return False
    inner = result.transpose(1, 2)
    return not result.is_contiguous() and inner.stride() == contiguous_strides(tuple(inner.shape))


ATTENTION = TiledAttention()
