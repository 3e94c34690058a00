"""Names the constants of the judge that a run may choose; a run stores the settings it used."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_serializer, model_validator

from kernelwright.records import Contract, Label
from kernelwright.records.improvement import AUDITS_MAX

GIB = 1 << 30
LIMIT_MAX_S = 7 * 86400.0
"""Longest limit, which the system's clocks can hold."""


DROP_IN_LABELS = frozenset({Label.STATE_DIFFERS, Label.STRIDES_DIFFER, Label.CONTIGUOUS_ONLY})
"""Labels of what keeps the contract `kernelbench` and is no drop-in."""


class Settings(BaseModel):
    """Strictness, limits and precision of the judge. Numbers without a source are chosen, not tuned."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    thorough: bool = True
    """False checks only the task's own distribution of inputs: for a first look, since it proves little."""
    timed: bool = True
    """False checks correctness only. Accepted evaluations then have the label `not-retimed`."""
    processes_min: int = Field(default=3, ge=1, le=64)
    """Fresh process triples (reference, candidate, second reference) before the interval may stop the run."""
    processes_max: int = Field(default=6, ge=1, le=64)
    """Most process triples. After ten seconds of timing `processes_min` are enough: for long calls the interval is wider
    instead."""
    fresh_processes: bool = True
    """False times the first triple in the processes that were checked, which saves starting them and making a CUDA context
    each: for a first look, such as a reward, that is measured again where it matters."""
    blocks: int = Field(default=6, ge=2, le=1000)
    """Fewest randomised mirrored blocks in each triple; a block has two calls of every side."""
    triple_s: float = Field(default=0.25, ge=0)
    """Least total time of a triple's blocks, seconds. Short calls get more blocks, which cost less than a new process."""
    warmup_calls: int = Field(default=3, ge=1, le=1000)
    """Calls before the first timed one in each process, each on a fresh input."""
    target_half_width: float = Field(default=0.01, gt=0, lt=1)
    """Half-width of the 95 % interval of the log speedup at which the run stops early."""
    until_certain: bool = False
    """True also stops the run once the interval lies above 1 plus the noise floor, and the ratio to the fastest of what is
    timed alongside is decided. A search measures this way first, and other winners again without it."""

    build_limit_s: float = Field(default=300.0, gt=0, le=LIMIT_MAX_S)
    """Limit of importing and constructing the candidate, compilers included, and of its first call, seconds."""
    run_limit_s: float = Field(default=60.0, gt=0, le=LIMIT_MAX_S)
    """Limit of every later call, seconds, counted from the end of a compiler's work in it. Both have `build_limit_s`."""
    stall_limit_s: float = Field(default=40.0, gt=0, le=LIMIT_MAX_S)
    """Limit of any request of the candidate during which no compiler works, seconds."""
    unstoppable_limit_s: float = Field(default=10.0, gt=0, le=LIMIT_MAX_S)
    """Time for which kernels of a stopped process may keep a GPU from other evaluations, seconds. After it the candidate is
    judged once more with the GPU to itself."""
    budget_s: float = Field(default=120.0, gt=0, le=LIMIT_MAX_S)
    """Limit of all requests of the candidate together, beyond those of its reference and without compiling, seconds."""
    memory_limit_bytes: int = Field(default=8 * GIB, gt=0)
    """Limit of anonymous memory of a worker's whole process group, bytes."""
    device_memory_limit_bytes: int = Field(default=32 * GIB, gt=0)
    """Limit of GPU memory that PyTorch allocates for each process, bytes."""
    process_limit: int = Field(default=128, ge=1)
    """Most processes of a worker; threads are not counted."""
    file_limit_bytes: int = Field(default=2 * GIB, gt=0)
    """Largest file that a candidate may write, bytes."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Intra-operator threads of both sides; None is all cores this process may use."""

    strict_fp32: bool = False
    """True turns TF32 off on both sides, also for cuDNN, where PyTorch allows it by default."""
    tf32_products: bool = False
    """True allows TF32 in matrix products on both sides. cuDNN may use it anyway, by PyTorch's default."""
    contract: Contract = Contract.DROP_IN
    """Contract that decides the verdict. Both are answered."""
    forbid: frozenset[Label] = DROP_IN_LABELS
    """Labels that reject; by default none under the contract `kernelbench`. `aliased-output` is legal by default for CUDA
    graphs only."""

    error_ratio: float = Field(default=16.0, gt=1)
    """Largest error of a candidate against the float64 truth, in multiples of the reference's own. Sequential float32 sums
    of 4096 positive terms measure about 6 times a blocked sum's error; TF32 is 50 to 1000 times."""
    error_floor_eps: float = Field(default=4.0, gt=0)
    """Error that is always allowed, in units of the dtype's rounding error: exact references have error 0. So is the
    geometric mean of the reference's error and the next lower precision's."""
    lower_precision_share: float = Field(default=0.5, gt=0, lt=1)
    """Cap on all of these: this share of the error that the next lower precision makes on the same inputs."""

    excess_limit: float = Field(default=0.25, gt=0)
    """Excess of the outer clock over the inner one that rejects, as a share of the reference's latency. A smaller excess is
    charged to the candidate."""
    excess_limit_us: float = Field(default=100.0, gt=0)
    """The same in microseconds. An excess rejects only above both limits."""
    audits: int = Field(default=8, ge=2, le=AUDITS_MAX)
    """Series of calls in each process triple whose outer clock decides what is charged."""
    audit_limit_us: float = Field(default=25.0, gt=0)
    """As `excess_limit_us`, for a call in a series, where the outer clock is less noisy, microseconds."""
    idle_limit_us: float = Field(default=3000.0, gt=0)
    """Processor time between calls, beyond the reference's own, that counts as thread pools winding down, microseconds."""

    @model_validator(mode="before")
    @classmethod
    def _forbid_by_contract(cls, values: Any) -> Any:
        if isinstance(values, dict) and "forbid" not in values and values.get("contract") == Contract.KERNELBENCH:
            return {**values, "forbid": frozenset()}
        return values

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if self.processes_max < self.processes_min:
            raise ValueError(
                f"processes_max is {self.processes_max}, less than processes_min, which is {self.processes_min}"
            )
        if self.strict_fp32 and self.tf32_products:
            raise ValueError("wanted strict_fp32 or tf32_products, found both")
        return self

    @field_serializer("forbid", when_used="json")
    def _in_order(self, labels: frozenset[Label]) -> list[str]:
        return sorted(labels)

    @model_serializer(mode="wrap")
    def _as_older_ones(self, serialized: Any) -> dict[str, Any]:
        """Without `tf32_products` where it is off: older runs, caches and records have none."""
        return {name: value for name, value in serialized(self).items() if name != "tf32_products" or value}

    @property
    def brief(self) -> Settings:
        """The same with at most as many timed calls as an interval needs."""
        few = {"processes_min": 2, "processes_max": 2, "blocks": 2, "triple_s": 0.0, "audits": 2, "warmup_calls": 1}
        return self.model_copy(update={name: min(getattr(self, name), most) for name, most in few.items()})

    @classmethod
    def quick(cls, **changes: object) -> Settings:
        """Settings of two process triples and few blocks: for tests and rewards, where the interval may be wide."""
        values: dict[str, object] = {
            "processes_min": 2,
            "processes_max": 2,
            "blocks": 3,
            "triple_s": 0.0,
            "audits": 6,
            "warmup_calls": 2,
            "build_limit_s": 60.0,
            "run_limit_s": 5.0,
            "memory_limit_bytes": 2 * GIB,
        }
        return cls.model_validate(values | changes)
