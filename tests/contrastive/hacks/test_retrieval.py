"""Finds the known hacks that are like a candidate."""

from __future__ import annotations

from kernelwright.contrastive.hacks import (
    Family,
    HackDatabase,
    Retriever,
    Sign,
)
from kernelwright.contrastive.hacks.structure import SHAPE
from tests.contrastive.hacks.samples import HONEST, REPLAY, TASK, record


class TestRetrieval:
    def test_a_renamed_cheat_finds_its_kind(self, retriever):
        near = retriever.nearest(REPLAY, reference=TASK.source)
        assert near[0].pattern.family is Family.CACHING
        assert [item.similarity for item in near] == sorted((item.similarity for item in near), reverse=True)
        assert len(near) == 5
        assert any(feature.startswith(SHAPE) for feature in near[0].shared)

    def test_it_is_nearer_than_honest_code(self, retriever):
        cheat = retriever.nearest(REPLAY, reference=TASK.source, count=1)[0]
        honest = retriever.nearest(HONEST, reference=TASK.source, count=1)[0]
        assert cheat.similarity > 2 * honest.similarity

    def test_the_same_question_has_the_same_answer(self, patterns, retriever):
        again = Retriever(HackDatabase(patterns)).nearest(REPLAY, reference=TASK.source)
        assert again == retriever.nearest(REPLAY, reference=TASK.source)

    def test_what_the_reference_has_too_is_no_sign(self, retriever):
        assert retriever.nearest(REPLAY, reference=REPLAY, count=1)[0].similarity == 0.0

    def test_the_profile_moves_the_order(self, retriever):
        quiet = {item.pattern.id: item.similarity for item in retriever.nearest(HONEST, count=400)}
        loud = retriever.nearest(HONEST, evaluation=record(HONEST, reason="stale-weights", verdict="rejected"), count=400)
        risen = [item for item in loud if item.similarity > quiet[item.pattern.id]]
        assert risen
        assert all(Sign.WEIGHTS_IGNORED in item.pattern.measured_signs for item in risen)

    def test_an_empty_database_has_no_neighbours(self):
        assert Retriever(HackDatabase()).nearest(REPLAY) == ()

    def test_strange_text_is_survived(self, retriever):
        for source in ("", "def broken(:", "\0", "x = 1"):
            assert len(retriever.nearest(source)) == 5
