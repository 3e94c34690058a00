"""Names what a worker's environment says about torch.compile, for whoever starts processes without importing torch."""

from __future__ import annotations

COMPILER_ENVIRONMENT = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Those go below TMPDIR, which is fresh in every process: ten seconds each time for headers that are used once.
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}
"""Settings of torch.compile's compiler: it starts no processes of its own."""
