"""The built-in policy emits the candidates that it emitted when `tests/golden/` was written, in the same order.

A change that means to emit others writes the files anew with `benchmarks/emitted.py`, and says why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelwright.tasks.suites import builtin_task
from tests import emitted
from tests.quick import exhaustive_but

GOLDEN = Path(__file__).parents[1] / "golden"
SAMPLE = ("batch_norm_train", "constant_chain", "conv2d_tanh_max_pool", "gru_last_output", "linear_gelu_composite")
KERNELBENCH = os.environ.get("KERNELBENCH")


def read(name: str) -> tuple[dict[str, str], dict[tuple[str, str], dict[str, Any]]]:
    """The versions with which a file was written, and its other lines by task and device."""
    versions, *lines = [json.loads(line) for line in (GOLDEN / name).read_text(encoding="utf-8").splitlines()]
    return versions, {(line["task"], line["device"]): line for line in lines}


VERSIONS, LINES = read("emitted.jsonl")
NAMES = list(dict.fromkeys(name for name, _ in LINES))


@pytest.fixture(autouse=True)
def _with_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KERNELWRIGHT_ORDER", raising=False)
    monkeypatch.setenv("CUDA_HOME", os.environ.get("CUDA_HOME", ""))
    with emitted.with_compiler():
        yield


@pytest.mark.parametrize("name", exhaustive_but(NAMES, *SAMPLE))
def test_the_policy_emits_the_candidates_that_it_did(name: str) -> None:
    if name.startswith("modules/"):
        if emitted.versions() != VERSIONS:
            pytest.skip(f"the file was written with {VERSIONS}")
        task = next(task for task in emitted.tasks_of("modules", None) if task.id == name)
    else:
        if emitted.versions()["torch"] != VERSIONS["torch"]:
            pytest.skip(f"the file was written with torch {VERSIONS['torch']}")
        task = builtin_task(name)
    for device in emitted.DEVICES:
        assert emitted.line_of("builtin", task, device) == LINES[name, device]


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.skipif(KERNELBENCH is None, reason="KERNELBENCH names no checkout of KernelBench")
def test_the_policy_emits_the_candidates_that_it_did_for_kernelbench() -> None:
    versions, lines = read("emitted-kernelbench.jsonl")
    if emitted.versions()["torch"] != versions["torch"]:
        pytest.skip(f"the file was written with torch {versions['torch']}")
    tasks = emitted.tasks_of("kernelbench", Path(str(KERNELBENCH)))
    changed = [
        (task.id, device)
        for task in tasks
        for device in emitted.DEVICES
        if emitted.line_of("kernelbench", task, device) != lines[task.id, device]
    ]
    assert changed == []
