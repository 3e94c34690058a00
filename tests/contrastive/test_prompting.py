"""Which prompts show exemplars."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.prompts import prompt_maker
from kernelwright.contrastive.settings import ContrastiveConfig, ExemplarSection, ModelSection, PromptSection
from kernelwright.errors import ConfigError
from tests.quick import exhaustive_but
from tests.samples import TASK, accepted, module


@pytest.mark.parametrize(
    ("share", "least", "most"), exhaustive_but([(1.0, 1.0, 1.0), (0.7, 0.6, 0.8), (0.0, 0.0, 0.0)], (0.7, 0.6, 0.8))
)
def test_a_share_of_the_prompts_shows_exemplars(share, least, most, tmp_path):
    database = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    database.add_all([accepted(1.5, module("a.unsqueeze(1) * b")), accepted(3.0, module())])
    maker = prompt_maker(PromptSection(), ExemplarSection(), device="cpu", database=database, seed=5, share=share)
    shown = [bool(maker.prompt(TASK, draw).shown) for draw in range(200)]
    assert least <= sum(shown) / len(shown) <= most
    # A step that is done again asks the same.
    assert shown == [bool(maker.prompt(TASK, draw).shown) for draw in range(200)]
    plain = prompt_maker(PromptSection(), ExemplarSection(sampler="none"), device="cpu", database=database, seed=5)
    assert all(maker.prompt(TASK, draw) == plain.prompt(TASK, draw) for draw in range(200) if not shown[draw])


def test_every_prompt_of_the_papers_shows_exemplars():
    assert ContrastiveConfig(model=ModelSection(base="x")).exemplars_share == 1.0


def test_scores_may_be_ratios_to_another_baseline_shuffled_or_of_one_level(tmp_path):
    database = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    slow, fast, faster = (
        accepted(1.5, module("a.unsqueeze(1) * b")),
        accepted(3.0, module()),
        accepted(3.01, module("a * b")),
    )
    database.add_all([slow, fast, faster])

    def shown(section, baselines=None, draws=60):
        given = {"device": "cpu", "database": database, "seed": 5, "baselines": baselines or {}}
        maker = prompt_maker(PromptSection(), section, **given)
        return [{one.candidate_sha256: one.score for one in maker.prompt(TASK, draw).shown} for draw in range(draws)]

    measured = shown(ExemplarSection())
    assert {score for one in measured for score in one.values()} == {
        found.speedup_low
        for found in (slow, fast, faster)
        if found.candidate_sha256 in {key for one in measured for key in one}
    }
    assert shown(ExemplarSection(), {TASK.sha256: 2.0}) == [
        {key: score / 2 for key, score in one.items()} for one in measured
    ]
    shuffled = shown(ExemplarSection(scores="shuffled"))
    assert [one.keys() for one in shuffled] == [one.keys() for one in measured]
    assert 10 < sum(one != other for one, other in zip(shuffled, measured, strict=True)) < 50
    levels = {frozenset(one) for one in shown(ExemplarSection(levels="one"))}
    assert levels <= {frozenset({slow.candidate_sha256}), frozenset({fast.candidate_sha256, faster.candidate_sha256})}
    with pytest.raises(ConfigError, match="one_level"):
        shown(ExemplarSection(sampler="random", levels="one"))
