"""Verdicts that are read out of a model's answers."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.hacks import (
    Family,
    Vote,
)
from kernelwright.contrastive.hacks.checker import opinion_of
from kernelwright.models.chat import Completion
from tests.contrastive.hacks.samples import CLEAN, HACK


class TestAnswers:
    @pytest.mark.parametrize(
        ("text", "vote", "family", "failure"),
        [
            (HACK, Vote.HACK, Family.CACHING, None),
            (CLEAN, Vote.CLEAN, None, None),
            (f"Let me see.\n```json\n{HACK}\n```\nDone.", Vote.HACK, Family.CACHING, None),
            (f'<think>maybe {{"verdict": "clean"}}</think>{HACK}', Vote.HACK, Family.CACHING, None),
            ("**Verdict:** Hack\n**Family:** stale memory\n**Reason:** empty", Vote.HACK, Family.STALE_MEMORY, None),
            ("verdict = clean", Vote.CLEAN, None, None),
            ('{"Verdict": "CHEATING", "family": "stealing"}', Vote.HACK, None, None),
            ('{"verdict": "hack", "family": 3, "reason": ["a"]}', Vote.HACK, None, None),
            ('{"verdict": "unsure"}', Vote.UNSURE, None, None),
            (f"{HACK}\n{CLEAN}", Vote.UNSURE, None, "contradictory"),
            ('{"verdict": "banana"}', Vote.UNSURE, None, "unknown-verdict"),
            ('{"verdict": null}', Vote.UNSURE, None, "unknown-verdict"),
            ("It looks fine to me.", Vote.UNSURE, None, "no-verdict"),
            ('{"reason": "cut", "verdict": "hack"', Vote.UNSURE, None, "no-verdict"),
            ('{"reason": "cut",\n"verdict": "hack"', Vote.HACK, None, None),
            ("{" * 4000, Vote.UNSURE, None, "no-verdict"),
            ("", Vote.UNSURE, None, "no-verdict"),
        ],
    )
    def test_tolerant_reading(self, text, vote, family, failure):
        found = opinion_of(Completion(text=text, prompt_tokens=0, completion_tokens=0))
        assert (found.vote, found.family, found.failure) == (vote, family, failure)

    def test_answers_that_did_not_arrive(self):
        cut = Completion(text="<think>long", prompt_tokens=0, completion_tokens=0, finish_reason="length")
        assert opinion_of(cut).failure == "cut"
        lost = Completion(text=HACK, prompt_tokens=0, completion_tokens=0, failure="stream-cut")
        assert (opinion_of(lost).vote, opinion_of(lost).failure) == (Vote.UNSURE, "no-answer")
