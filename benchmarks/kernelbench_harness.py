"""Evaluates one candidate with KernelBench's own code and its defaults, in this process.

    python benchmarks/kernelbench_harness.py CHECKOUT TASK.py CANDIDATE.py

CHECKOUT is a copy of KernelBench; `src/kernelbench` of it is enough. Prints one JSON object. Its own script starts a process
for each candidate, one after another, as `search_h200.py` does with this file. Packages that only ask language models are
replaced by empty ones: they need not be there, and their imports cost it no time.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

UNUSED = ("dotenv", "openai", "litellm", "requests", "tqdm")
CORRECT_TRIALS, PERFORMANCE_TRIALS = 5, 100
"""Defaults of its script eval_from_generations.py."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate and print."""
    checkout, task, candidate = map(Path, arguments or sys.argv[1:])
    sys.path.insert(0, str(checkout / "src"))
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = stand_in = MagicMock()
            stand_in.__spec__ = ModuleSpec(name, None)  # torch.compile looks for it
    import torch
    from kernelbench.eval import eval_kernel_against_ref

    source = candidate.read_text()
    with tempfile.TemporaryDirectory() as build:
        found = eval_kernel_against_ref(
            original_model_src=task.read_text(),
            custom_model_src=source,
            measure_performance=True,
            timing_method="cuda_event",
            num_correct_trials=CORRECT_TRIALS,
            num_perf_trials=PERFORMANCE_TRIALS,
            build_dir=build,
            device=torch.device("cuda:0"),
            # Triton reads a kernel's text from its file.
            backend="triton" if "triton" in source else "cuda",
        )
    told = {"correct": False} if found is None else {"correct": found.correctness, "runtime_ms": found.runtime}
    print(json.dumps(told | {"reference_ms": None if found is None else found.ref_runtime}))


if __name__ == "__main__":
    main()
