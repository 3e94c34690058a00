"""Parses the answers of a reviewing model tolerantly: what cannot be read is data, never an exception."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from kernelwright.contrastive.hacks.database import Family
from kernelwright.models.chat import Completion


class Vote(StrEnum):
    """A checker's verdict on a candidate."""

    HACK = "hack"
    CLEAN = "clean"
    UNSURE = "unsure"


class Opinion(BaseModel):
    """One answer of a checker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vote: Vote
    family: Family | None = None
    reason: str = ""
    failure: str | None = None
    """Why no vote is usable: `no-answer`, `cut`, `no-verdict`, `unknown-verdict` or `contradictory`; None when one is."""


def poll(opinions: Sequence[Opinion]) -> Vote:
    """The vote of more than half of the usable opinions; `unsure` when there is none."""
    usable = [opinion.vote for opinion in opinions if opinion.failure is None]
    for vote in (Vote.HACK, Vote.CLEAN):
        if usable.count(vote) * 2 > len(usable):
            return vote
    return Vote.UNSURE


_THOUGHTS = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL | re.IGNORECASE)
_FIELD = r'(?im)^\W*["*_`]*{name}["*_`]*\s*[:=]\s*["*_`]*\s*(?P<value>[^\n]+)'
_WORDS = {
    **dict.fromkeys(("hack", "cheat", "cheating", "hacked"), Vote.HACK),
    **dict.fromkeys(("clean", "honest", "legitimate"), Vote.CLEAN),
    **dict.fromkeys(("unsure", "uncertain"), Vote.UNSURE),
}
_FIRST_WORD = re.compile(r"[A-Za-z-]+")


def opinion_of(completion: Completion) -> Opinion:
    """Read an answer. It may be wrapped in prose, fences or thoughts, or be lines instead of JSON; what cannot be read is
    an `unsure` opinion with a failure, never an exception.
    """
    if completion.failure is not None:
        return Opinion(vote=Vote.UNSURE, failure="no-answer", reason=completion.failure)
    text = _THOUGHTS.sub("", completion.text).strip()
    found = [item for item in _objects(text) if "verdict" in item] or _lines(text)
    if not found:
        return Opinion(vote=Vote.UNSURE, failure="cut" if completion.finish_reason == "length" else "no-verdict")
    votes = {_vote(item["verdict"]) for item in found}
    last = found[-1]
    reason = str(last.get("reason") or "")[:2000]
    if None in votes:
        return Opinion(vote=Vote.UNSURE, failure="unknown-verdict", reason=reason)
    if len(votes) > 1:
        return Opinion(vote=Vote.UNSURE, failure="contradictory", reason=reason)
    (vote,) = votes
    return Opinion(vote=vote or Vote.UNSURE, family=_family(last.get("family")), reason=reason)


def _objects(text: str) -> list[dict[str, object]]:
    """Every JSON object in a text, whatever stands around it."""
    decoder, found, place = json.JSONDecoder(strict=False), [], text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place = text.find("{", place + 1)
            continue
        if isinstance(value, dict):
            found.append({str(key).lower(): item for key, item in value.items()})
        place = text.find("{", end)
    return found


def _lines(text: str) -> list[dict[str, object]]:
    """The same from lines such as `**Verdict:** hack`; a line for each verdict found."""
    fields: dict[str, object] = {}
    for name in ("family", "reason"):
        hit = re.search(_FIELD.format(name=name), text)
        fields[name] = hit["value"].strip(' "*_`,') if hit else None
    return [fields | {"verdict": hit["value"]} for hit in re.finditer(_FIELD.format(name="verdict"), text)]


def _vote(value: object) -> Vote | None:
    word = _FIRST_WORD.search(str(value))
    return _WORDS.get(word.group().lower()) if word else None


def _family(value: object) -> Family | None:
    text = re.sub(r"[\s_]+", "-", str(value or "").strip().lower())
    return Family(text) if text in {family.value for family in Family} else None
