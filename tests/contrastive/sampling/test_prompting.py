"""Which prompts show exemplars."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.sampling.prompting import prompt_maker
from kernelwright.contrastive.stages.config import ContrastiveConfig, ExemplarSection, ModelSection, PromptSection
from tests.quick import exhaustive_but
from tests.samples import TASK, accepted, module


@pytest.mark.parametrize(
    ("share", "least", "most"), exhaustive_but([(1.0, 1.0, 1.0), (0.7, 0.6, 0.8), (0.0, 0.0, 0.0)], (0.7, 0.6, 0.8))
)
def test_a_share_of_the_prompts_shows_exemplars(share, least, most, tmp_path):
    database = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    database.add_all([accepted(1.5, module("a.unsqueeze(1) * b")), accepted(3.0, module())])
    maker = prompt_maker(PromptSection(), ExemplarSection(), device="cpu", database=database, seed=5, share=share)
    shown = [bool(maker.prompt(TASK, draw).shown) for draw in range(400)]
    assert least <= sum(shown) / len(shown) <= most
    # A step that is done again asks the same.
    assert shown == [bool(maker.prompt(TASK, draw).shown) for draw in range(400)]
    plain = prompt_maker(PromptSection(), ExemplarSection(sampler="none"), device="cpu", database=database, seed=5)
    assert all(maker.prompt(TASK, draw) == plain.prompt(TASK, draw) for draw in range(400) if not shown[draw])


def test_every_prompt_of_the_papers_shows_exemplars():
    assert ContrastiveConfig(model=ModelSection(base="x")).exemplars_share == 1.0
