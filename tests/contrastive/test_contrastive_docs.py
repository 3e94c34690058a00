"""docs/contrastive.md names every sampler, reward and failure that there is, and the constants' values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernelwright.contrastive import evaluations, model_policy, prompts, samplers, scoring
from kernelwright.contrastive.answers import AnswerFailure
from kernelwright.records import rewards

PAGE = (Path(__file__).parents[2] / "docs" / "contrastive.md").read_text(encoding="utf-8")


def cells(heading: str) -> set[str]:
    """Code spans in the first cells of the tables below a heading."""
    section = re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    firsts = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    return {code for cell in firsts for code in re.findall(r"`([^`]+)`", cell)}


def test_samplers_and_failures_are_all_there():
    assert set(samplers.SAMPLERS) <= cells("Samplers")
    assert cells("Answers") == set(AnswerFailure)


def test_rewards_are_all_there():
    described = cells("Rewards") - {"CLIP", "UPDATE_EVERY", "WINDOW", "LEAST_DEVIATION"}
    assert described == set(rewards.FLOORS)
    assert all(f"`{name}`" in (rewards.reward_named.__doc__ or "") for name in described)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("TEMPERATURE", samplers.TEMPERATURE, "0.5"),
        ("BUCKET_RATIO", samplers.BUCKET_RATIO, "powers of 1.2"),
        ("ISLANDS", samplers.ISLANDS, "4"),
        ("MIGRATION", samplers.MIGRATION, "0.1 of"),
        ("--exemplars", model_policy.EXEMPLARS, "2"),
        ("CLIP", scoring.CLIP, "1.5"),
        ("UPDATE_EVERY", scoring.UPDATE_EVERY, "100 rewards"),
        ("WINDOW", scoring.WINDOW, "1000 rewards"),
        ("LEAST_DEVIATION", scoring.LEAST_DEVIATION, "0.01"),
    ],
)
def test_constants_in_tables_have_their_values(name, value, shown):
    (row,) = re.findall(rf"^\| [^|]*`{name}`[^|]* \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert row.startswith(shown)
    assert float(re.search(r"[\d.]+", shown)[0]) == value


def test_constants_in_sentences_have_their_values():
    assert f"{prompts.PROMPT_LIMIT_CHARACTERS:,} characters (`PROMPT_LIMIT_CHARACTERS`" in PAGE
    assert f"above {evaluations.SUSPICIOUS_SPEEDUP:g} (`SUSPICIOUS_SPEEDUP`)" in PAGE
    assert evaluations.SUSPICIOUS_LEAP == 2, "the page says twice"
    assert f"{evaluations.AGREEMENT:.0%}".replace("%", " %") + " apart (`AGREEMENT`)" in PAGE
    assert f"after {model_policy.PATIENCE} answers in a row" in PAGE
