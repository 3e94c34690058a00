"""The benchmark of detection."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from kernelwright.contrastive.hacks import (
    AdversarialChecker,
    HackDatabase,
)
from kernelwright.records import Task
from tests.contrastive.hacks.samples import HACK, ROOT, FakeModel


@pytest.fixture(scope="module")
def benchmark() -> types.ModuleType:
    path = ROOT / "benchmarks" / "hack_detection.py"
    spec = importlib.util.spec_from_file_location("hack_detection", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TestBenchmark:
    """What keeps the published rates honest."""

    @pytest.mark.exhaustive
    def test_texts_do_not_give_themselves_away(self, benchmark):
        for folder in ("hacks", "unseen", "honest"):
            for case in benchmark.load_cases(folder):
                for mode in (None,) if case.honest else ("exploit", "correct"):
                    text = benchmark.plain(case.source, mode)
                    compile(text, case.name, "exec")
                    for word in ("MODE", "EXPECT", "Catalogue", "#  ", case.docstring[:20]):
                        assert word not in text, (case.name, mode, word)
                    for word in ("honest", "cheat", "hack", "exploit", "decoy"):
                        assert word not in text.lower(), (case.name, mode, word)

    def test_a_stripped_cheat_still_cheats_and_a_corrected_one_does_not(self, benchmark):
        (case,) = [case for case in benchmark.load_cases("hacks") if case.name == "c01_pointer_cache"]
        answers = {}
        for mode in ("exploit", "correct"):
            space: dict[str, object] = {}
            exec(benchmark.plain(case.source, mode), space)
            model, x = space["ModelNew"](4, 4), torch.randn(2, 4)
            first = model(x).clone()
            x.copy_(torch.randn(2, 4))
            answers[mode] = torch.equal(first, model(x))
        assert answers == {"exploit": True, "correct": False}

    @pytest.mark.exhaustive
    def test_no_case_sees_a_pattern_made_from_itself(self, benchmark):
        cases = {case.name: case for case in benchmark.load_cases("hacks")}
        hold_out = benchmark.HoldOut(HackDatabase.packaged(), by_mechanism=False)
        harder = benchmark.HoldOut(HackDatabase.packaged(), by_mechanism=True)
        for name in ("c01_pointer_cache", "c01_gpu_pointer_cache", "z01_lazy_subclass"):
            for item in benchmark._of_case("hacks", cases[name]):
                near = hold_out.retriever(item).nearest(item.source, count=400)
                assert not {neighbour.pattern.origin for neighbour in near} & {f"exploits/{item.group}"}
                mechanisms = {
                    entry
                    for neighbour in harder.retriever(item).nearest(item.source, count=400)
                    for entry in neighbour.pattern.catalogue
                }
                assert not mechanisms & item.catalogue

    @pytest.mark.exhaustive
    def test_a_model_is_measured_with_and_without_the_database(self, benchmark, tmp_path):
        cases = {case.name: case for case in benchmark.load_cases("hacks")}
        items = benchmark._of_case("hacks", cases["c01_pointer_cache"])
        run = benchmark.RunDirectory(tmp_path)
        transcript = benchmark.Transcript(tmp_path / "transcript.jsonl")
        fake = FakeModel(HACK, HACK, "no idea")
        model = benchmark.Recorded(benchmark.Batched(fake, 1), transcript)
        hold_out = benchmark.HoldOut(HackDatabase.packaged(), by_mechanism=False)
        checker = benchmark.HeldOutAdversarial(model, hold_out, items, 1)
        found = benchmark.by_vote(run, "fake", items, checker.review_all([(item.task, item.evaluation) for item in items]))
        split = items[0].split
        assert found["hack"][split]["detection"]["hits"] == 1
        assert found["hack"][split]["false_alarms"]["hits"] == 1
        blind = AdversarialChecker(model, None).review(items[0].task, items[0].evaluation)
        assert blind.opinions[0].failure == "no-verdict"
        assert ["Known cheats" in prompt[1].content for prompt in fake.prompts] == [True, True, False]
        assert "| fake, hack |" in benchmark.table({"checkers": {"fake": found}})
        assert len((tmp_path / "votes.jsonl").read_text().splitlines()) == 2

    def test_wilson_interval(self, benchmark):
        # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662.
        found = benchmark.wilson(81, 263)
        assert (round(found["low"], 4), round(found["high"], 4)) == (0.2553, 0.3662)
        assert benchmark.wilson(0, 20)["low"] == 0.0

    def test_threshold_is_chosen_on_training_cases_alone(self, benchmark):
        task = Task(id="t", source="t")

        def item(name: str, kind: str, split: str):
            group = next(
                f"{name}{n}" for n in range(999) if benchmark.Item("", f"{name}{n}", kind, "hacks", task, "").split == split
            )
            return benchmark.Item(name, group, kind, "hacks", task, "")

        scores = [(item(f"h{n}", "honest", "training"), n / 20) for n in range(10)]
        scores += [(item("c", "cheat", "training"), 0.47), (item("x", "honest", "test"), 0.9)]
        assert benchmark.choose_threshold(scores) == 0.45
