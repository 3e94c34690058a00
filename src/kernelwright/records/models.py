"""Defines the records: Task, Candidate and Evaluation.

They are frozen and forbid unknown fields. `docs/record-format.md` describes their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kernelwright.records.canonical import sha256_of
from kernelwright.records.improvement import NEAR_MISS_LOW, clears_noise_floor, processes_to_settle
from kernelwright.records.lines import encodable


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Verdict(StrEnum):
    """Verdict on replacing the reference. Being faster is not part of it."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"


class Reason(StrEnum):
    """Reason of a rejection. `docs/verdicts.md` describes each code."""

    SYNTAX_ERROR = "syntax-error"
    """The source is not valid Python."""
    NO_MODEL_NEW = "no-model-new"
    """The module does not define a class `ModelNew` that is a `torch.nn.Module`."""
    BUILD_FAILED = "build-failed"
    """Importing the module or constructing `ModelNew` raised an exception."""
    BUILD_TIMEOUT = "build-timeout"
    """Importing and constructing took longer than the limit."""
    RUNTIME_ERROR = "runtime-error"
    """A call raised an exception."""
    TIMEOUT = "timeout"
    """All calls together took longer than an evaluation may."""
    RUN_TIMEOUT = "run-timeout"
    """A call did not finish within the limit."""
    CRASHED = "crashed"
    """The process died of a signal."""
    EXITED = "exited"
    """The process ended by itself before it had answered."""
    OUT_OF_MEMORY = "out-of-memory"
    """The process used more memory than it may."""
    TOO_MANY_PROCESSES = "too-many-processes"
    """The process started more children than it may."""
    PROTOCOL_VIOLATION = "protocol-violation"
    """Something other than the harness wrote to the channel."""
    STATE_MISMATCH = "state-mismatch"
    """`state_dict` has other keys, shapes or dtypes than the reference's, or does not take new weights."""
    MODE_MISMATCH = "mode-mismatch"
    """The module is in another train/eval mode than the reference, or wrong in the mode it was not built in."""
    BUFFER_MISMATCH = "buffer-mismatch"
    """Buffers, such as batch-norm statistics, differ from the reference's after the same calls."""
    WRONG_TYPE = "wrong-type"
    """An output is not a plain `torch.Tensor` or the structure of outputs differs."""
    WRONG_SHAPE = "wrong-shape"
    WRONG_DTYPE = "wrong-dtype"
    WRONG_DEVICE = "wrong-device"
    WRONG_STRIDES = "wrong-strides"
    """An output's strides differ from the reference's."""
    WRONG_OUTPUT = "wrong-output"
    """An output is further from the float64 truth than the tolerance allows."""
    PRECISION_DOWNGRADE = "precision-downgrade"
    """The error is what the next lower precision gives, not what the reference's precision gives."""
    NON_FINITE_OUTPUT = "non-finite-output"
    """NaN or infinity where the truth is finite."""
    STALE_WEIGHTS = "stale-weights"
    """Right with the weights it was built with, wrong after new weights were loaded."""
    STALE_OUTPUT = "stale-output"
    """The output belongs to an earlier call's input."""
    TIMED_OUTPUT_WRONG = "timed-output-wrong"
    """Right when checked, wrong in a timed call."""
    INPUT_MUTATED = "input-mutated"
    """A call changed its inputs although the reference does not."""
    OUTPUT_OVERWRITTEN = "output-overwritten"
    """A later call changed the output of an earlier one."""
    OUTPUT_ALIASES = "output-aliases"
    """An output shares memory with an input, a parameter or a buffer although the reference's does not."""
    LAYOUT_DEPENDENT = "layout-dependent"
    """It is wrong, or raises, where inputs lie otherwise in memory than the task makes them."""
    NONDETERMINISTIC = "nondeterministic"
    """The same input gave outputs further apart than the tolerance."""
    CLOCK_DISAGREEMENT = "clock-disagreement"
    """The latency seen from outside is longer than the one measured inside by more than the harness costs."""
    WORK_OUTSIDE_TIMING = "work-outside-timing"
    """The process computed between timed calls."""
    DEVICE_NOT_QUIET = "device-not-quiet"
    """The device was still busy after the candidate's call had ended."""
    GLOBAL_STATE_CHANGED = "global-state-changed"
    """It changed process-wide state that a drop-in module must leave alone."""
    FORBIDDEN_LABEL = "forbidden-label"
    """It carries a label that the settings do not allow."""


HINTS: dict[Reason, str] = {
    Reason.SYNTAX_ERROR: "mend the line that Python's parser names",
    Reason.NO_MODEL_NEW: "define a class ModelNew(torch.nn.Module) at the top level of the file",
    Reason.BUILD_FAILED: "mend the first error above; ModelNew takes what get_init_inputs() returns, and its file imports "
    "installed packages only, nothing beside it",
    Reason.BUILD_TIMEOUT: "build less at import, or raise --build-timeout",
    Reason.RUNTIME_ERROR: "mend the error above; forward must take other values of the task's inputs too",
    Reason.TIMEOUT: "make calls faster, or raise budget_s",
    Reason.RUN_TIMEOUT: "end every wait, and move long work into the first call, or raise --timeout",
    Reason.CRASHED: "check pointers, bounds and alignment of the kernel; compute-sanitizer finds most such errors",
    Reason.EXITED: "return from forward instead of ending the process",
    Reason.OUT_OF_MEMORY: "free or reuse memory between calls; nothing may grow with their number",
    Reason.TOO_MANY_PROCESSES: "start no processes in a call",
    Reason.PROTOCOL_VIOLATION: "write to no file descriptor that the module has not opened",
    Reason.STATE_MISMATCH: "register parameters and buffers under the reference's names, shapes and dtypes; "
    "--contract kernelbench leaves names free",
    Reason.MODE_MISMATCH: "leave self.training alone and compute in both modes what the reference computes; "
    "--contract kernelbench asks for the built mode only",
    Reason.BUFFER_MISMATCH: "update running statistics and counters as the reference does, in both modes; "
    "--contract kernelbench does not compare them",
    Reason.WRONG_TYPE: "return plain torch.Tensor objects in the reference's structure",
    Reason.WRONG_SHAPE: "return the reference's shape",
    Reason.WRONG_DTYPE: "convert the output to the reference's dtype",
    Reason.WRONG_DEVICE: "return the output on the inputs' device",
    Reason.WRONG_STRIDES: "return the reference's strides, as by .contiguous(); --contract kernelbench leaves them free",
    Reason.WRONG_OUTPUT: "compare forward with the reference in float64 on the input set that is named above",
    Reason.PRECISION_DOWNGRADE: "keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks",
    Reason.NON_FINITE_OUTPUT: "subtract the maximum before exp, write every element, and divide by no zero",
    Reason.STALE_WEIGHTS: "derive folded or packed weights from the parameters in every call, or whenever one was changed",
    Reason.STALE_OUTPUT: "compute every call's output from its own inputs; a cache must compare all of them",
    Reason.TIMED_OUTPUT_WRONG: "compute every call alike, whatever its number, its time and the process",
    Reason.INPUT_MUTATED: "work on a copy of the inputs",
    Reason.OUTPUT_OVERWRITTEN: "allocate a new output for each call, or clone the buffer that is reused",
    Reason.OUTPUT_ALIASES: "return memory of the output's own: clone a view of inputs, parameters or buffers",
    Reason.LAYOUT_DEPENDENT: "read inputs by their strides, or call .contiguous() on them; a pointer may lie off a vector's "
    "boundary. --contract kernelbench gives only the task's own layout",
    Reason.NONDETERMINISTIC: "look for a race or memory that is read before it is written",
    Reason.CLOCK_DISAGREEMENT: "do all work inside the call, on the current stream",
    Reason.WORK_OUTSIDE_TIMING: "join threads and processes before forward returns",
    Reason.DEVICE_NOT_QUIET: "let the current stream wait for every other stream before forward returns",
    Reason.GLOBAL_STATE_CHANGED: "put back the setting that is named above before forward returns, or do not change it",
    Reason.FORBIDDEN_LABEL: "avoid what the label names, or take it off the forbidden ones with --allow",
}
"""What to change, in one line, for each reason."""


def with_hint(reason: Reason, detail: str) -> str:
    """The detail of a rejection with a last line that says what to change."""
    return f"{detail}\nTo change: {HINTS[reason]}.".strip()


class Label(StrEnum):
    """Remark on an accepted candidate. Settings can turn any of them into a rejection."""

    WRAPPER_ONLY = "wrapper-only"
    """The same operators behind torch.compile or a CUDA graph; no new kernel."""
    TF32 = "tf32"
    """It lets matrix products use TF32 and stays within the tolerance."""
    SPLIT_PRECISION = "split-precision"
    """It computes float32 products from 16-bit pieces of each value: several products on tensor cores instead of one."""
    FP16_OPERANDS = "fp16-operands"
    """It rounds float32 values to 16 bits, whole, and stays within the tolerance."""
    LIBRARY_CALL = "library-call"
    """Its work is done by PyTorch's or a vendor's operators, not by code of its own."""
    CUSTOM_KERNEL = "custom-kernel"
    """It has CUDA, Triton or C++ source of its own."""
    CUDA_GRAPH = "cuda-graph"
    ALIASED_OUTPUT = "aliased-output"
    """A later call overwrites the output of an earlier one (a CUDA graph's static buffer)."""
    GLOBAL_FLAGS = "global-flags"
    """It sets process-wide performance flags, such as cudnn.benchmark."""
    STATE_DIFFERS = "state-differs"
    """Weights cannot be loaded into it; judged with its own from the same seed, which were not drawn anew."""
    CONTIGUOUS_ONLY = "contiguous-only"
    """It refuses inputs that lie otherwise in memory than the task makes them, with an error of its own."""
    PREPACKED_WEIGHTS = "prepacked-weights"
    """It prepares weights when they are loaded, and does not notice when a parameter is changed or replaced later."""
    STRIDES_DIFFER = "strides-differ"
    STOCHASTIC_TASK = "stochastic-task"
    """The reference draws random numbers in `forward`; both sides were seeded alike before each call."""
    VACUOUS_TASK = "vacuous-task"
    """A trivial output passes this task's check, so being right proves little."""
    UNCALIBRATED_PRECISION = "uncalibrated-precision"
    """No input set of this task tells the reference's precision from the next lower one."""
    SUSPICIOUS_SOURCE = "suspicious-source"
    """Static analysis found patterns known from cheats. Advice only."""
    NOT_RETIMED = "not-retimed"
    """Checked but not timed, by request."""


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


class Candidate(_Record):
    """A self-contained module that defines `ModelNew` and claims to compute the same as the task's `Model`."""

    source: str
    policy: str = "file"
    """Name of the proposer."""
    techniques: tuple[str, ...] = ()
    """Changes in the policy's words, such as `fold-linear-reduction`."""
    parent: str | None = None
    """`sha256` of the candidate it was derived from."""
    note: str = ""

    @field_validator("source", "note", mode="before")
    @classmethod
    def _encodable(cls, text: object) -> object:
        return encodable(text) if isinstance(text, str) else text

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
    candidate_us: tuple[float, ...]
    """Charged latency: the inner clock's plus what the outer clock saw beyond the harness's own cost."""
    null_us: tuple[float, ...] = ()
    """A second process of the reference, for the A/A noise floor."""
    claimed_us: tuple[float, ...] = ()
    """The candidate's latency by its own process's clock; empty where that is believed, or in an old record."""
    rival_us: tuple[float, ...] = ()
    """Latency of the rival, by its own clock; empty without one."""


class TimingSeries(_Record):
    """Series of calls under one request each, in one process triple.

    Each list has one number a series, the mean time of its calls in microseconds: by the judge's own clock (outer),
    harness included, and by the clock in the worker (inner). The n-th series of each side had the same inputs.
    """

    process: int
    """Number of the fresh process triple, from 0."""
    calls: int
    """Number of calls in each series."""
    reference_outer_us: tuple[float, ...]
    reference_inner_us: tuple[float, ...]
    candidate_outer_us: tuple[float, ...]
    candidate_inner_us: tuple[float, ...]


class Scoring(_Record):
    """Rule by which the numbers of an evaluation follow from its blocks and series."""

    miss_probability: float
    """Probability with which the interval may miss: 5 %, less what looks at which the run could have stopped have spent."""


class KeptContract(_Record):
    """Whether a candidate keeps one contract."""

    kept: bool
    missing: tuple[Reason, ...] = ()
    """What it does not keep, in the order found; one that keeps on failing is not asked further."""


class Evaluation(_Record):
    """Findings of the judge. A reward is computed from this record and nothing else."""

    task: str
    task_sha256: str
    candidate_sha256: str
    verdict: Verdict
    reason: Reason | None = None
    detail: str = ""
    """The reason in words, and in the last line what to change."""
    contract: Contract = Contract.DROP_IN
    """The contract that decided the verdict."""
    contracts: dict[Contract, KeptContract] | None = None
    """Answers to both contracts; None in an old record and for a baseline, which is not checked."""
    speedup: float | None = None
    """Reference latency / candidate latency, paired; None when rejected or not timed."""
    speedup_low: float | None = None
    """Lower end of the 95 % interval."""
    speedup_high: float | None = None
    noise_floor: float | None = None
    """Upper bound of |A/A ratio - 1| in the same run."""
    reference_us: float | None = None
    candidate_us: float | None = None
    """Median latency over all calls."""
    rival: str | None = None
    """Name of the stock baseline that was timed in the same process triples; None without one."""
    vs_rival: float | None = None
    """Rival's latency / candidate latency, paired."""
    vs_rival_low: float | None = None
    """Lower end of its 95 % interval."""
    vs_rival_high: float | None = None
    labels: tuple[Label, ...] = ()
    device: str = "cpu"
    policy: str = "file"
    techniques: tuple[str, ...] = ()
    parent: str | None = None
    confirms: bool = False
    """True where the choice of the candidate had no part in this measurement: a winner's, made again on fresh seeds and in
    fresh processes, or the only one of what screening put first, where it is clear."""
    source: str = ""
    """The candidate's text, so that a record stands alone."""
    blocks: tuple[TimingBlock, ...] = ()
    """Timed calls."""
    series: tuple[TimingSeries, ...] = ()
    """Timed series of calls, in order of measuring."""
    scoring: Scoring | None = None
    """Rule of the numbers; None when not timed, or in a record that lacks what they need."""
    checks: dict[str, Any] = Field(default_factory=dict)
    """Per input set: errors, tolerances; clocks; advice. Keys are described in `docs/record-format.md`."""
    started: str = ""
    """UTC, ISO 8601."""
    elapsed_s: float = 0.0

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
        return Candidate(source=self.source, policy=self.policy, techniques=self.techniques, parent=self.parent)
