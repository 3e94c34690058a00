"""Runs tuned machine code under torch.compile, whose Triton kernels are looked up in the same cache.

    with tuned_torch_compile():
        fast = torch.compile(model)
        fast(*inputs)

Two of inductor's own settings make its kernels reachable: it calls Triton's post-compile hook with every kernel, and it
launches them by Triton's launcher instead of its own, which loads cubins from files that Triton wrote. Kernels are
compiled in this process, because the hook is.

A kernel is replaced before its first launch, when there are no arguments to compare on. So only those are used whose
outputs were already compared on this GPU with this driver, which deploying does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kernelwright.deploy.cache import TunedCache
from kernelwright.deploy.deploy import find_tuned
from kernelwright.errors import KernelwrightError, ToolchainError
from kernelwright.gpu.driver import gpu_identity
from kernelwright.gpu.launch_spec import signature_of

SETTINGS: dict[str, Any] = {
    "run_jit_post_compile_hook": True,
    "use_static_cuda_launcher": False,
    "compile_threads": 1,
}
"""Settings of `torch._inductor.config` that make kernels reachable; tested with torch 2.11 and 2.13."""
_log = logging.getLogger(__name__)


@contextmanager
def tunable_torch_compile() -> Iterator[None]:
    """Let torch.compile make kernels that can be captured and replaced.

    What it has compiled in this process before is compiled anew inside, and again afterwards.

    Raises:
        ToolchainError: this torch has other settings.
    """
    from torch._inductor import config
    from torch._inductor.utils import clear_caches

    missing = [name for name in SETTINGS if not hasattr(config, name)]
    if missing:
        raise ToolchainError(f"wanted torch.compile with {', '.join(missing)}, found none of that name; install torch 2.13")
    with config.patch(SETTINGS):
        # A kernel of the same source that is loaded already would be launched as it is.
        clear_caches()
        try:
            yield
        finally:
            clear_caches()


@contextmanager
def tuned_torch_compile(cache: TunedCache | None = None) -> Iterator[None]:
    """Let torch.compile use tuned kernels, of the default cache unless another is given, for what it compiles inside.

    Raises:
        ToolchainError: this torch has other settings.
    """
    from triton import knobs

    store = TunedCache() if cache is None else cache
    before = knobs.runtime.jit_post_compile_hook

    def hook(**event: Any) -> Any:
        # Triton itself passes a dictionary here; torch.compile the compiled kernel.
        kernel = event["compile"]
        if hasattr(kernel, "asm"):
            replace_before_loading(kernel, store)
        return before(**event) if before is not None else None

    with tunable_torch_compile():
        knobs.runtime.jit_post_compile_hook = hook
        try:
            yield
        finally:
            knobs.runtime.jit_post_compile_hook = before


def replace_before_loading(kernel: Any, cache: TunedCache) -> None:
    """Give a `CompiledKernel` that was not loaded yet its tuned cubin, if there is one to be used."""
    name = kernel.metadata.name
    try:
        from triton.runtime import driver

        gpu = gpu_identity(driver.active.get_current_device())
        found = find_tuned(cache, kernel.asm["cubin"], gpu.architecture, gpu.name, signature_of(kernel))
    except (KernelwrightError, OSError) as error:
        _log.warning("no tuned kernel is looked up for %s: %s", name, error)
        return
    if found is None:
        _log.info("no tuned kernel for %s in %s", name, cache.root)
        return
    if kernel.module is not None or not cache.is_verified(found.entry, gpu):
        why = "it is loaded already" if kernel.module is not None else f"it was never compared on {gpu.name} here; deploy it"
        _log.warning("the tuned kernel for %s is not used: %s", name, why)
        return
    kernel.asm["cubin"] = kernel.kernel = found.cubin
