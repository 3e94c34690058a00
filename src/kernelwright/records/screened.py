"""Defines the record of a quick look at a candidate, which estimates its speedup and proves nothing.

The compiler of a candidate, guessed from its text, tells how long the look will take.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kernelwright.records.knobs import shown
from kernelwright.records.models import Candidate, StoredPasses, Task
from kernelwright.records.reasons import Reason


class Screened(BaseModel):
    """Estimate of one candidate by a process that the candidate ran in, and could have forged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["screened"] = "screened"
    """Mark by which such a record never loads as an evaluation."""
    task: str
    task_sha256: str
    candidate_sha256: str
    correct: bool
    """True when its outputs were right on the two input sets that were tried."""
    reason: Reason | None = None
    """Reason for not being correct, one of the judge's."""
    detail: str = ""
    estimate: float | None = None
    """Reference latency / candidate latency, the median of paired calls in one process; None where it was not timed."""
    spread: float | None = None
    """Half the distance between the quartiles of the pairs' logarithmic ratios."""
    pairs: int = 0
    """Number of paired calls."""
    reference_us: float | None = None
    candidate_us: float | None = None
    least_us: float | None = None
    """Time in which the GPU writes as many bytes as inputs and outputs have, microseconds; None on a CPU."""
    operations_us: float | None = None
    """Time for the products, convolutions and attention of one call of the reference, at the GPU's measured rate of a large
    product, microseconds; float32 as TF32. None on a CPU and where that is unknown."""
    memory_bytes: int | None = None
    """Most GPU memory that the task took until its truths were known, bytes."""
    policy: str = "file"
    techniques: tuple[str, ...] = ()
    passes: StoredPasses = ()
    parent: str | None = None
    knobs: dict[str, str] = Field(default_factory=dict)
    """Values of the knobs that its source declares, as text."""
    source: str = ""
    device: str = "cpu"
    started: str = ""
    elapsed_s: float = 0.0
    spent_s: dict[str, float] = Field(default_factory=dict)
    """Seconds by phase: `task`, `build`, `first call`, `check`, `wait`, `time`, `next`."""

    @property
    def is_beyond_roofline(self) -> bool:
        """True when it claims less time than moving the inputs and outputs takes.

        Operations have no part in it: algebra may avoid them, and no candidate avoids the bytes.
        """
        return self.candidate_us is not None and self.least_us is not None and self.candidate_us < self.least_us

    @property
    def replays_graph(self) -> bool:
        """True for one that replays a CUDA graph, by its text or, where that was not published, by its techniques."""
        named = any("cuda-graph" in name or name == "compile-max-autotune" for name in self.techniques)
        return named or "CUDAGraph(" in self.source

    def candidate(self) -> Candidate:
        """The candidate that was looked at, for the judge."""
        return Candidate(
            source=self.source,
            policy=self.policy,
            techniques=self.techniques,
            passes=self.passes,
            parent=self.parent,
        )


def screened_of(task: Task, candidate: Candidate, **found: Any) -> Screened:
    """A record of one candidate of a task with what was found."""
    return Screened(
        task=task.id,
        task_sha256=task.sha256,
        candidate_sha256=candidate.sha256,
        policy=candidate.policy,
        techniques=candidate.techniques,
        passes=candidate.passes,
        parent=candidate.parent,
        source=candidate.source,
        knobs=shown(candidate.source),
        **found,
    )


class Compiles(IntEnum):
    """Kind of a candidate by its compilers, cheapest first. A wrong guess costs time and nothing else."""

    NOTHING = 0
    CODE = 1
    """C++, CUDA or Triton: seconds."""
    INDUCTOR = 2
    """torch.compile, whose own imports take seconds before it compiles anything."""
    VARIANTS = 3
    """An autotuner that compiles many variants of each kernel: tens of seconds."""


_VARIANTS = re.compile(r"max[-_]autotune|triton\.autotune|coordinate_descent")
_INDUCTOR = re.compile(r"torch\s*\.\s*(_inductor|compile)\b")
_CODE = re.compile(r"\b(triton|cpp_extension|load_inline|nvcc|nvrtc|gcc|subprocess|jit|numba|cupy)\b|g\+\+")


def compiles(source: str) -> Compiles:
    """Kind of compiler work that a candidate's text asks for."""
    if _VARIANTS.search(source):
        return Compiles.VARIANTS
    if uses_inductor(source):
        return Compiles.INDUCTOR
    return Compiles.CODE if _CODE.search(source) else Compiles.NOTHING


def uses_inductor(source: str) -> bool:
    """True where it uses torch.compile, with an autotuner or without."""
    return _INDUCTOR.search(source) is not None
