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
four dimensions with any strides. This module itself imports the standard library alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kernelwright.rewrites.templates.text import kernel_text

PRECISIONS = ("tf32x3", "bf16x6", "ieee")
"""Of Triton's `tl.dot`; operands of 16 bits take `ieee`, which leaves them as they are."""
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
MULTIPROCESSORS = 132
"""Of an H100 or H200."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a thread block can have on an H100 or H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKnobs:
    """Knobs of the kernel; every choice computes the same.

    Attributes:
        block_m: queries of a program.
        block_n: keys that one step reads.
        num_warps: warps of a thread block.
        num_stages: depth of the software pipeline.
        precision: one of `PRECISIONS`.
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


_LOW = AttentionKnobs(block_m=64, num_warps=4)
_NARROW_SPLIT = (
    AttentionKnobs(),
    AttentionKnobs(block_n=64, precision="bf16x6"),
    _LOW,
    AttentionKnobs(precision="bf16x6"),
    AttentionKnobs(block_n=64),
    AttentionKnobs(block_m=64, num_warps=4, precision="bf16x6"),
)
"""For float32 of up to 64 numbers. None spills without a mask of booleans, with one up to 36 bytes of a thread."""
_WIDE_SPLIT = (
    AttentionKnobs(),
    AttentionKnobs(precision="bf16x6"),
    _LOW,
    AttentionKnobs(num_stages=3),
    AttentionKnobs(block_n=16, precision="bf16x6"),
)
"""For float32 of up to 128 numbers. Steps of 64 keys spill 100 bytes of a thread and more. Of these none does without a mask
of booleans; with one all but the last do, the first 24 bytes at 96 numbers (88 by Triton 3.6.0)."""
_NARROW = (
    AttentionKnobs(block_n=64, num_warps=4, num_stages=3, precision="ieee"),
    AttentionKnobs(block_n=128, precision="ieee"),
    AttentionKnobs(block_n=64, num_stages=3, precision="ieee"),
    AttentionKnobs(block_m=64, block_n=64, num_warps=4, num_stages=3, precision="ieee"),
    AttentionKnobs(block_m=64, block_n=128, num_warps=4, precision="ieee"),
)
"""For 16-bit numbers, up to 64 of them. None spills."""
_WIDE = (
    AttentionKnobs(block_n=64, num_stages=3, precision="ieee"),
    AttentionKnobs(block_n=128, precision="ieee"),
    AttentionKnobs(block_m=64, block_n=64, num_warps=4, num_stages=3, precision="ieee"),
    AttentionKnobs(block_n=64, precision="ieee"),
)
"""The same, up to 128. None spills; 128 queries in four warps spill 148 bytes of a thread."""
_WIDEST = (
    AttentionKnobs(precision="ieee"),
    AttentionKnobs(block_m=64, block_n=64, precision="ieee"),
    AttentionKnobs(block_n=64, precision="ieee"),
    AttentionKnobs(block_m=64, num_warps=4, precision="ieee"),
)
"""The same, up to 256. The last two spill up to 48 bytes of a thread."""


def refusal(sizes: Attention) -> str | None:
    """Why the template does not take a call of these sizes; none if it does."""
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


def _row_lengths(width: int) -> set[int]:
    """Numbers in the rows of the tiles of a float32 head, as the emitted `attention_parts` has it."""
    return {32} if width <= 32 else {64, 32} if 64 < width <= 96 else {64}


def alternatives(sizes: Attention) -> tuple[AttentionKnobs, ...]:
    """Knobs worth a look for a call of these sizes, the default first."""
    widest = max(sizes.width, sizes.width_v)
    found: tuple[AttentionKnobs, ...]
    if sizes.dtype == "float32":
        found = _NARROW_SPLIT if widest <= 64 else _WIDE_SPLIT
        # Rows of 32 and of 64 pieces in bfloat16 have two layouts at one address of shared memory. From those ptxas 12.8, of
        # Triton 3.6.0 and 3.7.1, makes code that reads registers without a value: an illegal access or wrong numbers.
        if len(_row_lengths(sizes.width) | _row_lengths(sizes.width_v)) > 1:
            found = tuple(one for one in found if one.precision != "bf16x6")
    else:
        found = _NARROW if widest <= 64 else _WIDE if widest <= 128 else _WIDEST
    # Tiles of 128 queries would leave some of the multiprocessors idle, or be half empty.
    if sizes.heads * -(-sizes.queries // 128) < MULTIPROCESSORS or sizes.queries <= 64:
        low = next(one for one in found if one.block_m == 64)
        return (low, *(one for one in found if one is not low))
    return found


def emit(knobs: AttentionKnobs) -> str:
    """Text of a module that defines `tiled_attention(q, k, v, ..., knobs=ATTENTION_KNOBS)`."""
    return kernel_text("attention.triton.txt", knobs=asdict(knobs))
