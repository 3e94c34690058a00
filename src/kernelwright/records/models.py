"""Defines the records: Task, Candidate and Evaluation.

They are frozen and forbid unknown fields. `docs/record-format.md` describes their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kernelwright.records.improvement import NEAR_MISS_LOW, clears_noise_floor, processes_to_settle
from kernelwright.records.lines import encodable, sha256_of
from kernelwright.records.reasons import Label, Reason

BASELINE_POLICY = "baseline"
"""Policy of the records of stock baselines."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Verdict(StrEnum):
    """Verdict on replacing the reference. Being faster is not part of it."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"


def with_hint(reason: Reason, detail: str) -> str:
    """The detail of a rejection with a last line that says what to change."""
    return f"{detail}\nTo change: {reason.hint}.".strip()


class Contract(StrEnum):
    """Promise that a candidate is held to. `docs/verdicts.md` describes both."""

    DROP_IN = "drop-in"
    """It takes the reference's place in any program."""
    KERNELBENCH = "kernelbench"
    """It gives the reference's outputs after the same constructor and seed, for inputs laid out as the task makes them."""


class Task(_Record):
    """A computation to speed up: a Python module in KernelBench's format."""

    id: str
    """Stable name, such as `diag_matmul` or `kernelbench/level1/12`."""
    source: str
    """Text of a module that defines `Model`, `get_inputs` and `get_init_inputs`."""
    origin: str = ""
    """Origin of the text, for people."""

    @property
    def sha256(self) -> str:
        """Identity of the computation: the hash of its text."""
        return sha256_of(self.source)


StoredPasses = tuple[tuple[str, dict[str, Any]], ...]
"""Steps that made a candidate, in order: the name and the knobs of each. Empty where the proposer stores none."""


class Candidate(_Record):
    """A self-contained module that defines `ModelNew` and claims to compute the same as the task's `Model`."""

    source: str
    """Text of the module."""
    policy: str = "file"
    techniques: tuple[str, ...] = ()
    passes: StoredPasses = ()
    parent: str | None = None
    note: str = ""
    """Remark for people, such as the file's name."""

    @field_validator("source", "note", mode="before")
    @classmethod
    def _encodable(cls, text: object) -> object:
        return encodable(text) if isinstance(text, str) else text

    def __hash__(self) -> int:
        return hash((self.source, self.policy, self.parent))

    @property
    def name_alongside(self) -> str:
        """Name in the record of another candidate that it is timed beside: a baseline's own, else its hash."""
        return "-".join(self.techniques) if self.policy == BASELINE_POLICY else self.sha256

    @property  # cached, it would go along into a copy with another source
    def sha256(self) -> str:
        """Identity: the hash of the source."""
        return sha256_of(self.source)


class Precision(StrEnum):
    """Use of TF32 on both sides of an evaluation."""

    DEFAULT = "default"
    """PyTorch's default: cuDNN may use it, products may not."""
    STRICT = "strict"
    """Nothing may use it."""
    TF32_PRODUCTS = "tf32-products"
    """Products may use it too."""

    @classmethod
    def of(cls, names: Mapping[str, Any]) -> Precision:
        """The precision that settings, or the checks of an evaluation, have."""
        if names.get("strict_fp32"):
            return cls.STRICT
        return cls.TF32_PRODUCTS if names.get("tf32_products") else cls.DEFAULT


class TimingBlock(_Record):
    """One randomised block of a process triple: latencies of its sides on the same inputs, in call order."""

    process: int
    """Number of the fresh process triple, from 0."""
    reference_us: tuple[float, ...]
    """Latencies of the reference, microseconds. The n-th call of each side had the same input."""
    candidate_us: tuple[float, ...]
    """Charged latencies: the inner clock's plus what the outer clock saw beyond the harness's own cost, microseconds."""
    null_us: tuple[float, ...] = ()
    """Latencies of a second process of the reference, for the A/A noise floor, microseconds."""
    claimed_us: tuple[float, ...] = ()
    """Latencies by the candidate's own clock, microseconds. Empty for a baseline, whose clock is trusted."""
    alongside_us: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Latencies of each that was timed alongside, by name and by its own clock, microseconds. Before 2026-11-29 there was
    one at most: `rival_us`."""


class TimingSeries(_Record):
    """Series of calls under one request each, in one process triple. The n-th series of each side had the same inputs."""

    process: int
    """Number of the fresh process triple, from 0."""
    calls: int
    """Number of calls in each series."""
    reference_outer_us: tuple[float, ...]
    """Mean time of a call in each series by the judge's own clock, harness included, microseconds."""
    reference_inner_us: tuple[float, ...]
    """The same by the clock in the worker."""
    candidate_outer_us: tuple[float, ...]
    """As `reference_outer_us`, of the candidate."""
    candidate_inner_us: tuple[float, ...]
    """As `reference_inner_us`, of the candidate."""


class Scoring(_Record):
    """Rule by which the numbers of an evaluation follow from its blocks and series."""

    miss_probability: float
    """Probability with which the interval may miss: 5 %, less what was spent at earlier looks that could have stopped it."""


class KeptContract(_Record):
    """Answer to one contract."""

    kept: bool
    """True when the candidate keeps it."""
    missing: tuple[Reason, ...] = ()
    """Reasons against it, in the order found. One that keeps on failing is not asked further."""


class Evaluation(_Record):
    """Findings of the judge. A reward is computed from this record and nothing else."""

    task: str
    """Id of the task."""
    task_sha256: str
    """Hash of the task's text, modules of its folder included."""
    candidate_sha256: str
    """Hash of the candidate's text."""
    verdict: Verdict
    """`accepted` or `rejected`."""
    reason: Reason | None = None
    """Reason of a rejection."""
    detail: str = ""
    """The reason in words, with the candidate's lines of a traceback. The last line says what to change. Untrusted text."""
    contract: Contract = Contract.DROP_IN
    """The contract that decided the verdict."""
    contracts: dict[Contract, KeptContract] | None = None
    """Answers to both contracts; None in an old record and for a baseline, which is not checked."""
    speedup: float | None = None
    """Reference latency / candidate latency, paired; None when rejected or not timed."""
    speedup_low: float | None = None
    """Lower end of the 95 % interval."""
    speedup_high: float | None = None
    """Upper end of the 95 % interval."""
    noise_floor: float | None = None
    """Upper bound of the distance of the A/A ratio from 1 in the same run."""
    reference_us: float | None = None
    """Median latency of the reference over all calls, microseconds."""
    candidate_us: float | None = None
    """Median latency of the candidate over all calls, microseconds."""
    versus: dict[str, tuple[float, float, float]] = Field(default_factory=dict)
    """For each that was timed alongside, its latency / candidate latency, paired, and the ends of its 95 % interval. Stock
    baselines have their names, other candidates their hash. Before 2026-11-29 there was one at most: `rival`, `vs_rival`."""
    labels: tuple[Label, ...] = ()
    """Remarks on the candidate."""
    device: str = "cpu"
    """`cpu`, `cuda:0` and so on."""
    policy: str = "file"
    """Name of the proposer; `file` for a candidate given by hand."""
    techniques: tuple[str, ...] = ()
    """The proposer's own names for its changes, such as `fold-linear-reduction`."""
    passes: StoredPasses = ()
    """Steps of the built-in policy with their knobs, from which a resumed search builds on. Others have none."""
    parent: str | None = None
    """`candidate_sha256` of the candidate that it was derived from."""
    confirms: bool = False
    """True when this measurement had no part in choosing the candidate: the final of one that was judged before, or the
    first measurement of the one that screening ranked first, if its interval begins at 1.1 or above."""
    source: str = ""
    """The candidate's text, so that a record stands alone."""
    blocks: tuple[TimingBlock, ...] = ()
    """Timed calls."""
    series: tuple[TimingSeries, ...] = ()
    """Timed series of calls, in order of measuring."""
    scoring: Scoring | None = None
    """Rule of the numbers; None when not timed, or in a record that lacks what they need."""
    checks: dict[str, Any] = Field(default_factory=dict)
    """Errors and tolerances for each input set, clocks, advice; `docs/record-format.md` describes the keys."""
    started: str = ""
    """Time of the start: UTC, ISO 8601."""
    elapsed_s: float = 0.0
    """Duration, seconds."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_rival(cls, record: Any) -> Any:
        """Read a record of before 2026-11-29, which had one baseline beside the candidate, its `rival`."""
        if not isinstance(record, dict) or "rival" not in record:
            return record
        record = dict(record)
        name, *ratio = (record.pop(key, None) for key in ("rival", "vs_rival", "vs_rival_low", "vs_rival_high"))
        record["blocks"] = blocks = [dict(block) for block in record.get("blocks", ())]
        for block in blocks:
            rival_us = block.pop("rival_us", ())
            block["alongside_us"] = {name: rival_us} if name else {}
        return record | ({"versus": {name: ratio}} if name else {})

    @property
    def accepted(self) -> bool:
        """True for the verdict `accepted`."""
        return self.verdict is Verdict.ACCEPTED

    @property
    def is_improvement(self) -> bool:
        """True when the lower bound of the speedup clears the noise floor: only that is called faster."""
        return self.accepted and clears_noise_floor(self.speedup_low, self.noise_floor)

    @property
    def is_near_miss(self) -> bool:
        """True when the speedup exceeds 1 + the noise floor, and the lower end of its interval is near 1 and does not."""
        seems_faster = self.accepted and clears_noise_floor(self.speedup, self.noise_floor)
        near = self.speedup_low is not None and self.speedup_low > NEAR_MISS_LOW
        return seems_faster and near and not self.is_improvement and bool(self.blocks)

    @property
    def processes_to_settle(self) -> int | None:
        """Process triples that a near miss is likely to need; None for anything else, or where no number will do."""
        if not self.is_near_miss or self.speedup is None or self.speedup_low is None:
            return None
        timed = len({block.process for block in self.blocks})
        return processes_to_settle(self.speedup, self.speedup_low, self.noise_floor or 0.0, timed)

    @property
    def paired_us(self) -> float | None:
        """Latency of the candidate by the paired speedup: the reference's median divided by it, microseconds.

        This is what is shown, for `reference_us / candidate_us` is another number than the speedup: it is of medians over
        all calls, where the speedup compares calls in pairs, process by process.
        """
        return self.reference_us / self.speedup if self.reference_us and self.speedup else None

    def candidate(self) -> Candidate:
        """The candidate that was judged, from the record."""
        return Candidate(
            source=self.source,
            policy=self.policy,
            techniques=self.techniques,
            passes=self.passes,
            parent=self.parent,
        )
