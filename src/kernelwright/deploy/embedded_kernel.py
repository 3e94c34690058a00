"""Runs tuned code that a candidate carries: the text of this module is pasted into the candidate.

Only the standard library, torch and Triton are there when it runs.
"""

from __future__ import annotations

import base64
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernelwright.gpu.triton_kernels import WrappedFunction, jit_function, load, put_in_place, with_cubin
from kernelwright.sass.identity import cubin_identity, transplant


class EmbeddedKernel(WrappedFunction):
    """A Triton function whose launches use tuned code for what Triton compiles here, if it is for this GPU.

    The first launch of each specialisation runs what Triton compiled.

    Args:
        tuned: code for each identity of a cubin: section name -> base64 of the zlib-compressed section.
        gpu: name of the GPU it was tuned on.
    """

    def __init__(self, function: Any, tuned: Mapping[str, Mapping[str, str]], gpu: str) -> None:
        super().__init__(function)
        self._tuned = tuned
        self._gpu = gpu

    def _decide(self, kernel: Any, args: Sequence[Any], grid: Any, kwargs: dict[str, Any]) -> None:
        try:
            original = kernel.asm["cubin"]
            packed = self._tuned.get(cubin_identity(original))
            if packed is None or _gpu_name() != self._gpu:
                warnings.warn(f"tuned code for {self._jit.__name__} is for another build or GPU", stacklevel=3)
                return
            code = {name: zlib.decompress(base64.b64decode(text)) for name, text in packed.items()}
            tuned = with_cubin(kernel, transplant(original, code))
            self._decided[id(tuned)] = tuned
            load(tuned)
            put_in_place(self._jit, kernel, tuned)
        # A launch that has worked must not fail for lack of its faster twin.
        except (OSError, RuntimeError, ValueError, zlib.error) as error:
            warnings.warn(f"tuned code for {self._jit.__name__} is not used: {error}", stacklevel=3)


def install_embedded(module: dict[str, Any], tuned: Mapping[str, Mapping[str, Mapping[str, str]]], gpu: str) -> None:
    """Wrap the Triton functions of a module, given as its `globals()`, for which there is tuned code by function name."""
    for name, value in list(module.items()):
        try:
            function = jit_function(value)
        except TypeError:
            continue
        if function.__name__ in tuned and not isinstance(value, EmbeddedKernel):
            module[name] = EmbeddedKernel(value, tuned[function.__name__], gpu)


def _gpu_name() -> str:
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""
