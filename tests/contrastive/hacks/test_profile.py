"""Signs of cheating in a measured candidate."""

from __future__ import annotations

from kernelwright.contrastive.hacks import (
    Sign,
    profile,
)
from kernelwright.records import Label, Reason, TimingBlock
from tests.contrastive.hacks.samples import HONEST, record


class TestProfile:
    def test_of_a_measured_candidate(self):
        slow_first = TimingBlock(process=0, reference_us=(50.0, 51.0, 49.0), candidate_us=(90.0, 2.0, 2.1))
        disturbed = TimingBlock(process=1, reference_us=(99.0, 98.0, 97.0), candidate_us=(2.0, 2.0, 2.0))
        evaluation = record(
            HONEST,
            speedup=25.0,
            speedup_low=20.0,
            speedup_high=30.0,
            candidate_us=2.0,
            reference_us=50.0,
            blocks=(slow_first, disturbed),
            labels=(Label.GLOBAL_FLAGS,),
            checks={"sets": {"plain": {"error": {"rms": 0.9e-3, "worst": 1e-3}, "allowed": {"rms": 1e-3, "worst": 1e-2}}}},
        )
        assert profile(evaluation) == {
            Sign.SPEEDUP_SUSPICIOUS,
            Sign.SPEEDUP_IMPLAUSIBLE,
            Sign.LATENCY_TINY,
            Sign.FAST_AFTER_FIRST_CALL,
            Sign.REFERENCE_DISTURBED,
            Sign.FLAGS_CHANGED,
            Sign.ERROR_NEAR_LIMIT,
        }

    def test_of_a_rejected_one_and_of_none(self):
        assert profile(record(HONEST, verdict="rejected", reason=Reason.STALE_OUTPUT)) == {Sign.OUTPUT_REPEATS}
        assert profile(record(HONEST)) == frozenset()

    def test_calls_in_two_groups(self):
        block = TimingBlock(process=0, reference_us=(9.0,) * 6, candidate_us=(9.0, 1.0, 9.0, 1.0, 9.0, 1.0))
        assert profile(record(HONEST, blocks=(block,))) == {Sign.LATENCY_BIMODAL}
