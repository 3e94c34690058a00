"""Draws reproducible contents of a kernel's tensors, and compares outputs."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelwright.gpu.launch_spec import LaunchSpec, TensorArgument

POISON = 0xFF
"""Byte that pure outputs are filled with before a checked launch: NaN in every float type."""

_NUMPY: dict[str, Any] = {
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "i1": np.uint8, "i8": np.int8, "u8": np.uint8,
    "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip
_BF16_SHIFT = 16
PERIOD = (1 << 20) + 7
"""Drawn numbers repeat after so many, since drawing them takes most of the time that a fresh process needs. It is a prime,
so no two rows or tiles of a tensor are alike; our choice."""


def initial_contents(tensor: TensorArgument, seed: int) -> bytes:
    """Return the bytes a tensor holds before a launch, the same for the same name, spec and seed."""
    if tensor.role == "output":
        return bytes([POISON]) * tensor.size_bytes
    # Of the name too, so that two tensors of one shape do not hold the same numbers.
    generator = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    drawn = min(math.prod(tensor.shape), PERIOD)
    values: npt.NDArray[Any]
    if tensor.init == "normal":
        values = generator.standard_normal(drawn, dtype=np.float32) * np.float32(tensor.scale)
    elif tensor.init == "uniform":
        values = generator.uniform(tensor.low, tensor.high, drawn)
    elif tensor.init == "integers":
        values = generator.integers(int(tensor.low), int(tensor.high), drawn)
    else:
        values = np.full(drawn, 0 if tensor.init == "zeros" else 1)
    once = _encode(values, tensor.dtype)
    return once if len(once) == tensor.size_bytes else (once * -(-tensor.size_bytes // len(once)))[: tensor.size_bytes]


def difference(spec: LaunchSpec, expected: list[bytes], found: list[bytes]) -> str | None:
    """Say how outputs, the bytes of each, differ by more than the spec allows, or return None."""
    for tensor, left, right in zip(spec.outputs, expected, found, strict=True):
        if left == right:
            continue
        if spec.deterministic:
            differing = int(np.count_nonzero(np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)))
            return f"{differing} of {len(left)} bytes of {tensor.name} differ"
        one, other = _decode(left, tensor.dtype), _decode(right, tensor.dtype)
        close = np.isclose(one, other, rtol=spec.rtol, atol=spec.atol, equal_nan=True)
        if not close.all():
            return f"{int(np.count_nonzero(~close))} of {close.size} values of {tensor.name} are out of tolerance"
    return None


def _encode(values: npt.NDArray[Any], dtype: str) -> bytes:
    if dtype != "bf16":
        return np.ascontiguousarray(values.astype(_NUMPY[dtype])).tobytes()
    bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32).astype(np.uint64)
    # Round to nearest, ties to even, as the hardware does.
    rounded = (bits + 0x7FFF + ((bits >> _BF16_SHIFT) & 1)) >> _BF16_SHIFT
    return rounded.astype(np.uint16).tobytes()


def _decode(data: bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << _BF16_SHIFT).view(np.float32).astype(np.float64)
    return np.frombuffer(data, _NUMPY[dtype]).astype(np.float64)
