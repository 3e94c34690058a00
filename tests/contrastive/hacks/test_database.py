"""The known hacks themselves, and those that are confirmed and kept."""

from __future__ import annotations

import ast
import json

import pytest

from kernelwright.contrastive.hacks import (
    Family,
    HackDatabase,
    Retriever,
    Sign,
)
from kernelwright.contrastive.hacks.structure import features
from kernelwright.errors import UsageError
from tests.contrastive.hacks.samples import REPLAY, ROOT, record

EXPLOITS = ROOT / "tests" / "exploits"


class TestPatterns:
    def test_there_are_enough_in_every_family(self, patterns):
        assert len(patterns) >= 200
        for family in Family:
            assert sum(pattern.family is family for pattern in patterns) >= 10, family

    def test_each_is_another_mechanism(self, patterns):
        assert len({pattern.id for pattern in patterns}) == len(patterns)
        assert len({pattern.name.casefold() for pattern in patterns}) == len(patterns)
        assert len({pattern.what for pattern in patterns}) == len(patterns)
        known: dict[str, str] = {}
        for pattern in patterns:
            assert known.setdefault(pattern.identity(), pattern.id) == pattern.id

    @pytest.mark.exhaustive
    def test_no_two_have_nearly_the_same_features(self, patterns):
        found = [(pattern.id, features(pattern.snippet)) for pattern in patterns]
        for index, (name, own) in enumerate(found):
            for other, theirs in found[:index]:
                assert len(own & theirs) < 0.97 * len(own | theirs), (name, other)

    def test_each_is_described(self, patterns):
        for pattern in patterns:
            assert len(pattern.what) > 20, pattern.id
            assert len(pattern.why) > 15, pattern.id
            assert pattern.source_signs, pattern.id
            assert pattern.measured_signs, pattern.id
            assert ast.parse(pattern.snippet).body, pattern.id
            ast.parse(pattern.honest)
            assert pattern.honest != pattern.snippet, pattern.id
        assert all(sign.meaning for sign in Sign)

    def test_each_says_where_it_comes_from(self, patterns):
        for pattern in patterns:
            kind, _, name = pattern.origin.partition("/")
            if kind == "exploits":
                assert (EXPLOITS / "hacks" / f"{name}.py").exists(), pattern.id
            elif kind == "catalogue":
                assert name in pattern.catalogue, pattern.id
            else:
                assert pattern.origin == "written", pattern.id

    def test_every_cheat_of_the_corpus_is_known_and_none_of_the_unseen(self, patterns):
        made_from = {pattern.origin.removeprefix("exploits/").replace("gpu_", "") for pattern in patterns}
        stems = {path.stem.replace("gpu_", "") for path in (EXPLOITS / "hacks").glob("*.py")}
        # Its twin on the CPU is the same mechanism under another device's name.
        # The other drops bits as p02_truncated_mantissa does, where a mark tells that it is timed.
        stems -= {"p01_autocast_conv", "p06_fewer_bits_when_timed"}
        assert stems <= made_from
        assert not made_from & {path.stem for path in (EXPLOITS / "unseen").glob("*.py")}

    def test_snippets_do_not_give_themselves_away(self, patterns):
        for pattern in patterns:
            for word in ("MODE ==", "EXPECT", "catalogue", '"exploit"', "'exploit'"):
                assert word not in pattern.snippet + pattern.honest, (pattern.id, word)


class TestConfirmed:
    def test_grows_once_for_each_structure(self, tmp_path, patterns):
        path = tmp_path / "deep" / "hacks.jsonl"
        database = HackDatabase(patterns, path)
        rejected = record(REPLAY, verdict="rejected", reason="stale-output", detail="an old answer")
        added = database.add_confirmed(rejected, Family.CACHING, name="plans by address", what="Replays results.")
        assert added is not None
        assert added.origin == f"confirmed/{rejected.candidate_sha256[:12]}"
        assert added.measured_signs == (Sign.OUTPUT_REPEATS,)
        assert "returns-state" in added.source_signs
        assert "audited" not in added.snippet
        assert "stale-output" in added.why
        renamed = record(REPLAY.replace("kernel_plans", "other"), verdict="rejected", reason="stale-output")
        assert database.add_confirmed(renamed, Family.CACHING, name="again", what="The same.") is None
        assert len(path.read_text().splitlines()) == 1
        assert len(HackDatabase(patterns, path)) == len(patterns) + 1

    def test_is_found_afterwards(self, tmp_path):
        database = HackDatabase((), tmp_path / "hacks.jsonl")
        database.add_confirmed(record(REPLAY), Family.CACHING, name="plans", what="Replays results.")
        near = Retriever(HackDatabase((), tmp_path / "hacks.jsonl")).nearest(REPLAY)
        assert near[0].pattern.name == "plans"
        assert near[0].similarity > 0.8

    def test_two_writers_and_torn_lines(self, tmp_path):
        path = tmp_path / "hacks.jsonl"
        first, second = HackDatabase((), path), HackDatabase((), path)
        assert first.add_confirmed(record(REPLAY), Family.CACHING, name="one", what="Replays.")
        assert second.add_confirmed(record(REPLAY), Family.CACHING, name="one", what="Replays.") is None
        with path.open("a") as file:
            file.write('{"id": "torn", "fam')
        other = second.add_confirmed(record("import os\nos._exit(0)\n"), Family.HARNESS, name="one", what="Leaves.")
        assert other is not None
        assert other.name != "one"
        assert [json.loads(line)["id"] for line in (path.read_text().splitlines()[0], path.read_text().splitlines()[2])]
        assert len(HackDatabase((), path)) == 2

    def test_needs_source_that_is_python(self):
        for source in ("", "def broken(:", "# nothing but a comment\n"):
            with pytest.raises(UsageError, match="source"):
                HackDatabase().add_confirmed(record(source), Family.CACHING, name="x", what="y")

    def test_two_patterns_of_one_id_are_refused(self, patterns):
        with pytest.raises(UsageError, match="one pattern of each id"):
            HackDatabase((patterns[0], patterns[0]))

    def test_a_file_that_cannot_be_written_says_so(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError):
            HackDatabase((), tmp_path / "file" / "hacks.jsonl").add_confirmed(
                record(REPLAY), Family.CACHING, name="x", what="y"
            )
