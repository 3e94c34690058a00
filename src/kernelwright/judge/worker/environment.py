"""Names what a worker's environment says, for whoever starts processes without importing torch."""

from __future__ import annotations

COMPILER_ENVIRONMENT = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Those go below TMPDIR, which is fresh in every process: ten seconds each time for headers that are used once.
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}
"""Settings of torch.compile's compiler: it starts no processes of its own."""

WORKER_ENVIRONMENT = COMPILER_ENVIRONMENT | {
    # The pools of idle threads must not spin beside the worker that is being timed.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Freed memory is kept. glibc learns from what is freed which blocks to keep, and a fresh process has learnt nothing:
    # half of the calls with an output of 4 MiB took 0.5 ms, and half 2.3, with each page faulted in
    # (results/2026-11-28-kept-memory-cpu). 32 MiB is glibc's highest.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}
"""Variables of every worker, with those that it inherits; read when its process starts or torch is imported."""
