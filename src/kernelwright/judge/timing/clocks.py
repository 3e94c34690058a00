"""Cross-examines the clocks of one process triple, and rejects a candidate that computes where its own clock is blind.

The harness costs the reference and the candidate the same, so that what a candidate's calls take beyond it is time that
its own clock has not seen. Single requests are noisy; series of calls under one request decide what is charged
(`kernelwright.records.scoring`).

Before every timed call the last-level cache is emptied.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from kernelwright.judge.check.findings import RejectionError
from kernelwright.judge.isolation.process import CallClocks
from kernelwright.judge.settings import Settings
from kernelwright.records import Reason, TimingBlock, TimingSeries
from kernelwright.records.scoring import charge_of, outside_us, whole_ns

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_HOST_MAX_BYTES = 64 << 20
"""Most of a processor's cache that is emptied. A virtual machine may report the cache of its whole host: to write twice
260 MB around each call took more than half of an evaluation. Our choice."""


class CacheFlush:
    """Empties the last-level cache by writing twice its size, on a processor at most so many bytes where told."""

    def __init__(self, device: torch.device, host_bytes_max: int | None = None) -> None:
        self._device = device
        if device.type == "cuda":
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self._buffer = torch.empty(max(size, 1 << 26), dtype=torch.uint8, device=device)
        else:
            size = 2 * last_level_cache_bytes()
            self.host = np.zeros(size if host_bytes_max is None else min(size, host_bytes_max), dtype=np.uint8)
        self._round = 0

    def __call__(self) -> float:
        """Flush and wait; returns the time it took, microseconds."""
        self._round = (self._round + 1) % 251
        start_ns = time.perf_counter_ns()
        if self._device.type == "cuda":
            self._buffer.fill_(self._round)
            torch.cuda.synchronize(self._device)
        else:
            self.host.fill(self._round)
        return (time.perf_counter_ns() - start_ns) / 1e3


def last_level_cache_bytes(caches: Path = _CACHES) -> int:
    """Size of the processor's largest cache, at most `_HOST_MAX_BYTES`; 32 MiB where the kernel does not say."""
    largest = 0
    for path in caches.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        largest = max(largest, int(text.rstrip("KM")) * unit)
    return min(largest, _HOST_MAX_BYTES) if largest else 32 << 20


_SIDES = ("reference", "candidate", "null")
_OWN_SHARE = 0.02
"""Share of the candidate's own latency that may be missing from it: for one that is ten times slower it decides nothing."""
_HELPERS_SHARE = 0.1
"""Share of the time in which a candidate's processes run that may be its children's."""
_QUIET_RATIO, _QUIET_SLACK_US = 1.5, 100.0
"""The parent's own flush after a candidate's call may take this much longer than after a reference's."""


@dataclass
class CallSamples:
    """Clocks of one side in one process triple, in call order."""

    clocks: list[CallClocks] = field(default_factory=list)
    """Clocks of single calls."""
    idle_us: list[float] = field(default_factory=list)
    """Processor time between calls, microseconds."""
    quiet_us: list[float] = field(default_factory=list)
    """Time of the judge's cache flush after each call, microseconds."""
    series: list[CallClocks] = field(default_factory=list)
    """Mean of the calls of each series."""

    def harness_us(self) -> list[float]:
        """Time of each single call outside the inner clock, microseconds."""
        return [clock.outer_us - clock.inner_us for clock in self.clocks]


@dataclass(frozen=True, slots=True)
class TripleClocks:
    """Timings of one process triple, as they are recorded, and the time of single calls outside the inner clock."""

    blocks: tuple[TimingBlock, ...]
    series: TimingSeries
    harness_us: tuple[list[float], list[float]]
    """Time of each single call outside the inner clock, of (candidate, both references), microseconds."""
    summary: dict[str, float]
    """For the record's `checks`, microseconds."""


def cross_examine(process: int, samples: Mapping[str, CallSamples], calls: int) -> TripleClocks:
    """Turn the samples of one process triple into records, and charge the candidate what its own clock did not see.

    `calls` is the number of calls of a series.
    """
    reference, candidate, null = (samples[name] for name in _SIDES)
    series = TimingSeries(
        process=process,
        calls=calls,
        reference_outer_us=whole_ns(clock.outer_us for clock in reference.series),
        reference_inner_us=whole_ns(clock.inner_us for clock in reference.series),
        candidate_outer_us=whole_ns(clock.outer_us for clock in candidate.series),
        candidate_inner_us=whole_ns(clock.inner_us for clock in candidate.series),
    )
    claimed = [
        TimingBlock(
            process=process,
            reference_us=_pair(reference, index),
            candidate_us=_pair(candidate, index),
            null_us=_pair(null, index),
            claimed_us=_pair(candidate, index),
            alongside_us={name: _pair(side, index) for name, side in samples.items() if name not in _SIDES},
        )
        for index in range(len(reference.clocks) // 2)
    ]
    charge = charge_of(claimed, series)
    trusted_us = [*reference.harness_us(), *null.harness_us()]
    return TripleClocks(
        blocks=tuple(block.model_copy(update={"candidate_us": charge.apply(block.claimed_us)}) for block in claimed),
        series=series,
        harness_us=(candidate.harness_us(), trusted_us),
        summary={
            "harness_us": median(trusted_us),
            "excess_us": median(candidate.harness_us()) - median(trusted_us),
            "charged_us": charge.charged_us,
            **asdict(charge),
        },
    )


def reject_hidden_time(triples: Sequence[TripleClocks], settings: Settings) -> None:
    """Over all processes together: a busy machine disturbs one of them, a candidate that hides time hides it in all."""
    latency_us = median(median(value for block in one.blocks for value in block.reference_us) for one in triples)
    own_us = median(median(value for block in one.blocks for value in block.candidate_us) for one in triples)
    found = {
        "single": (settings.excess_limit_us, [one.harness_us for one in triples]),
        "series": (settings.audit_limit_us, [outside_us(one.series) for one in triples]),
    }
    for kind, (limit_us, sides) in found.items():
        candidate, reference = ([value for side in sides for value in side[index]] for index in (0, 1))
        # Load disturbs most calls of either, where programs wait for the processor, and never makes one shorter.
        excess_us = max(certain_excess(candidate, reference), min(candidate) - float(np.quantile(reference, 0.25)))
        if excess_us > max(limit_us, settings.excess_limit * latency_us, _OWN_SHARE * own_us):
            raise RejectionError(
                Reason.CLOCK_DISAGREEMENT,
                f"the parent's clock sees {excess_us:.1f} us a call ({kind}) that the "
                f"candidate's own clock does not; the reference takes {latency_us:.1f} us",
            )


def reject_idle_work(samples: Mapping[str, CallSamples], helpers_us: float, ran_us: float, limit_us: float) -> None:
    """Reject a candidate that computes between calls.

    Args:
        samples: Samples by side.
        helpers_us: Processor time of the candidate's child processes.
        ran_us: Time for which the candidate's processes could run.
        limit_us: Processor time between calls, beyond the reference's, that is put down to thread pools.
    """
    excess_us = certain_excess(samples["candidate"].idle_us, samples["reference"].idle_us)
    if excess_us > limit_us:
        raise RejectionError(
            Reason.WORK_OUTSIDE_TIMING,
            f"the process used {excess_us:.0f} us of processor time between calls beyond the reference's",
        )
    if helpers_us > _HELPERS_SHARE * ran_us:
        raise RejectionError(
            Reason.WORK_OUTSIDE_TIMING, f"its child processes used {helpers_us / 1e3:.0f} ms while it was timed"
        )


def reject_unquiet(samples: Mapping[str, CallSamples]) -> None:
    """Reject a candidate that keeps the device busy after its calls."""
    candidate, reference = (samples[name].quiet_us for name in ("candidate", "reference"))
    usual_us = median(reference)
    if certain_excess(candidate, reference) > (_QUIET_RATIO - 1) * usual_us + _QUIET_SLACK_US:
        raise RejectionError(
            Reason.DEVICE_NOT_QUIET,
            f"a cache flush after its calls takes {median(candidate):.0f} us; after the reference's {usual_us:.0f} us",
        )


def certain_excess(candidate: list[float], reference: list[float]) -> float:
    """Distance of the candidate's lower quartile above the reference's upper one. A busy machine disturbs some calls of
    either and cannot explain it."""
    return float(np.quantile(candidate, 0.25) - np.quantile(reference, 0.75))


def _pair(samples: CallSamples, index: int) -> tuple[float, ...]:
    return whole_ns(clock.inner_us for clock in samples.clocks[2 * index : 2 * index + 2])
