"""The campaign's order, its time and what it carries away, with a stand-in for the recipe that leaves marks."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]

RECIPE = """
import json, os, pathlib, sys, time
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
only = words[words.index("--only") + 1 :]
changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
with (out / "asked.jsonl").open("a") as file:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    file.write(json.dumps({"only": only, "gpus": seen, "changes": changes}) + chr(10))
for part in only:
    kind, _, name = part.partition(":")
    if kind == "augment":
        (out / "sft").mkdir(exist_ok=True)
        (out / "sft" / "examples.jsonl").touch()
    elif kind == "train":
        for sign, status in (("late", 4), ("broken", 1)):
            if (out / f"{sign}-{name}").exists():
                (out / f"{sign}-{name}").unlink()
                sys.exit(status)
        if (out / f"hopeless-{name}").exists():
            sys.exit(1)
        (out / name / "final").mkdir(parents=True)
        (out / name / "final" / "adapter_config.json").touch()
    elif kind == "measure":
        (out / "held-out" / "results").mkdir(parents=True, exist_ok=True)
        (out / "held-out" / "results" / f"{name}.json").write_text("{}")
    else:
        (out / "summary.json").write_text("{}")
"""


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contrastive_campaign

    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    monkeypatch.setattr(contrastive_campaign, "RECIPE", recipe)
    monkeypatch.setattr(contrastive_campaign, "POLL_S", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return contrastive_campaign


def asked(work):
    return [json.loads(line) for line in (work / "asked.jsonl").read_text().splitlines()]


def run(campaign, tmp_path, *more):
    words = ["--base", "model", "--work", str(tmp_path / "work"), "--export", str(tmp_path / "out"), *more]
    return campaign.main(words)


def seconds_of(call):
    (change,) = call["changes"]
    return float(change.removeprefix("contrastive.seconds="))


def test_every_part_is_done_once_on_the_gpus_that_are_its_own(campaign, tmp_path):
    limits = ("--gpus", "4", "--time-limit", "1000", "--reserve", "300")
    assert run(campaign, tmp_path, *limits) == 0
    calls = asked(tmp_path / "work")
    assert calls[0]["only"] == ["augment:sft"]
    assert calls[0]["gpus"] == "0,1,2,3"
    lanes = {"0,2": [], "1,3": []}
    for call in calls[1:5]:
        lanes[call["gpus"]].append(call["only"])
    assert lanes == {
        "0,2": [["train:sft", "train:self-supervised", "measure:self-supervised"]],
        "1,3": [["measure:zero-shot"], ["measure:sft"], ["measure:evolutionary"]],
    }
    arms = {call["only"][0]: call for call in calls[5:9]}
    assert sorted(call["gpus"] for call in arms.values()) == ["0", "1", "2", "3"]
    assert all(call["only"] == [name, name.replace("train", "measure")] for name, call in arms.items())
    assert len({tuple(call["changes"]) for call in arms.values()}) == 1  # the same time for each
    assert 500 < seconds_of(arms["train:vanilla-grpo"]) < 600  # of 1000, without the reserve, loading and the grace
    assert calls[9]["only"] == ["summary"]
    # Nothing is left to do.
    assert run(campaign, tmp_path, *limits) == 0
    assert [call["only"] for call in asked(tmp_path / "work")[len(calls) :]] == [["summary"]]


@pytest.mark.exhaustive
def test_stage_2_is_trained_on_all_gpus_where_nothing_can_be_done_beside_it(campaign, tmp_path):
    work = tmp_path / "work"
    (work / "sft" / "final").mkdir(parents=True)
    (work / "sft" / "examples.jsonl").touch()
    (work / "held-out" / "results").mkdir(parents=True)
    for name in ("zero-shot", "sft"):
        (work / "held-out" / "results" / f"{name}.json").write_text("{}")
    assert run(campaign, tmp_path, "--gpus", "2", "--time-limit", "1000", "--reserve", "300") == 0
    first, *second = ((call["gpus"], call["only"]) for call in asked(work)[:3])
    assert first == ("0,1", ["train:self-supervised"])
    assert sorted(second) == [("0", ["measure:self-supervised"]), ("1", ["measure:evolutionary"])]


@pytest.mark.exhaustive
def test_arms_that_are_named_go_before_all_measuring_where_that_is_asked_for(campaign, tmp_path):
    limits = ("--gpus", "2", "--time-limit", "1000", "--set", "contrastive.seconds=500", "--arms-first")
    named = ("--arms", "vanilla-grpo", "contrastive-bucket")
    assert run(campaign, tmp_path, *limits, *named) == 0
    calls = [(call["gpus"], call["only"]) for call in asked(tmp_path / "work")]
    assert calls[:2] == [("0,1", ["augment:sft"]), ("0,1", ["train:sft", "train:self-supervised"])]
    lanes = [[only for on, only in calls[2:10] if on == gpu] for gpu in ("0", "1")]
    for arm, lane in zip(named[1:], lanes, strict=True):
        assert lane[:2] == [[f"train:{arm}"], [f"measure:{arm}"]]
    assert sorted(only for lane in lanes for only in lane[2:]) == [
        ["measure:evolutionary"],
        ["measure:self-supervised"],
        ["measure:sft"],
        ["measure:zero-shot"],
    ]
    assert calls[10:] == [("0,1", ["summary"])]


@pytest.mark.exhaustive
def test_a_gpu_without_an_arm_to_train_measures_while_another_trains(campaign, tmp_path):
    work = tmp_path / "work"
    for name in ("self-supervised", "vanilla-grpo"):
        (work / name / "final").mkdir(parents=True)
    (work / "sft").mkdir()
    (work / "sft" / "examples.jsonl").touch()
    words = ("--gpus", "2", "--time-limit", "1000", "--arms-first", "--equal-steps", "--measured", "self-supervised")
    assert run(campaign, tmp_path, *words, "--arms", "vanilla-grpo", "contrastive-bucket") == 0
    calls = [(call["gpus"], call["only"]) for call in asked(work)]
    assert [only for on, only in calls if on == "0"] == [["measure:vanilla-grpo"], ["measure:self-supervised"]]
    assert [only for on, only in calls if on == "1"] == [["train:contrastive-bucket"], ["measure:contrastive-bucket"]]
    assert calls[-1] == ("0,1", ["summary"])


@pytest.mark.exhaustive
def test_arms_of_several_seeds_take_equal_steps_and_exports_are_made_meanwhile(campaign, tmp_path, monkeypatch):
    exports = []
    monkeypatch.setattr(campaign, "packed", lambda work, out: exports.append(work))
    limits = ("--gpus", "1", "--time-limit", "1000", "--arms-first", "--equal-steps", "--export-every", "0")
    named = ("--arms", "vanilla-grpo", "contrastive-bucket", "--seeds", "2", "--ablations", "--measured", "sft")
    assert run(campaign, tmp_path, *limits, *named) == 0
    calls = asked(tmp_path / "work")
    assert [call["only"] for call in calls[2:]] == [
        *([f"{do}:{arm}{seed}"] for do in ("train", "measure") for seed in ("", "-seed-1") for arm in named[1:3]),
        ["measure:sft"],
        *([f"measure:contrastive-bucket{seed}-{how}" for how in campaign.ABLATIONS] for seed in ("", "-seed-1")),
        ["summary"],
    ]
    assert all(call["changes"] == [] for call in calls), "no arm has a time of its own"
    assert len(exports) > len(calls)
    (tmp_path / "work" / "held-out" / "results" / "contrastive-bucket-one-level.json").unlink()
    (tmp_path / "work" / "contrastive-bucket" / "final").rename(tmp_path / "gone")
    assert run(campaign, tmp_path, *limits, *named) == 0
    (again, measured, _) = asked(tmp_path / "work")[len(calls) :]
    assert again == calls[3]
    assert measured["only"] == ["measure:contrastive-bucket-one-level"], "an arm is done once it has its ablations too"


@pytest.mark.exhaustive
def test_two_gpus_do_the_most_telling_arms_first_for_as_long_as_leaves_time_for_all(campaign, tmp_path):
    limits = ("--gpus", "2", "--time-limit", "1500", "--total", "3000", "--reserve", "300")
    assert run(campaign, tmp_path, *limits) == 0
    calls = [call for call in asked(tmp_path / "work") if call["only"][0] in {f"train:{name}" for name in campaign.ARMS}]
    assert {call["only"][0] for call in calls[:2]} == {"train:contrastive-bucket", "train:vanilla-grpo"}
    assert sorted(call["gpus"] for call in calls) == ["0", "0", "1", "1"]
    assert 1000 < seconds_of(calls[0]) < 1150  # half of 3000, without the reserve, loading and the grace
    assert len({tuple(call["changes"]) for call in calls}) == 1


@pytest.mark.exhaustive
def test_where_time_is_short_the_last_arms_are_left_for_later_rather_than_all_cut_short(campaign, tmp_path):
    assert run(campaign, tmp_path, "--gpus", "2", "--time-limit", "1100", "--reserve", "300") == 0
    call = next(call for call in asked(tmp_path / "work") if "train:contrastive-bucket" in call["only"])
    assert 600 < seconds_of(call) < 700  # not (1100 - 90) / 2 - 300 and loading, which would be 115


@pytest.mark.exhaustive
def test_the_time_to_measure_an_arm_is_what_measuring_has_taken(campaign, tmp_path):
    work = tmp_path / "work"
    (work / "sft").mkdir(parents=True)
    (work / "sft" / "examples.jsonl").touch()
    before = [
        {"parts": ["measure:sft"], "status": -9, "seconds": 100.0, "gpus": 2},
        {"parts": ["measure:sft"], "status": 0, "seconds": 200.0, "gpus": 1},
        {"parts": ["measure:zero-shot"], "status": 0, "seconds": 900.0, "gpus": 1},
    ]
    (work / "campaign.json").write_text(json.dumps([{"parts": before, "on_another_machine": False, "gpus": 2}]))
    assert run(campaign, tmp_path, "--gpus", "4", "--time-limit", "2000") == 0
    call = next(call for call in asked(work) if "train:contrastive-bucket" in call["only"])
    held_back = campaign.RESERVE_SHARE * 400 + campaign.LOADING_S + campaign.GRACE_S + campaign.EXPORT_S + campaign.SUMMARY_S
    assert 2000 - held_back - 60 < seconds_of(call) <= 2000 - held_back


@pytest.mark.exhaustive
def test_what_fails_holds_up_only_what_needs_it(campaign, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "late-sft").touch()
    assert run(campaign, tmp_path, "--gpus", "1", "--time-limit", "1000") == 4
    assert [call["only"] for call in asked(work)] == [
        ["augment:sft"],
        ["train:sft", "train:self-supervised", "measure:self-supervised"],
        ["measure:zero-shot"],
        ["summary"],
    ]
    assert run(campaign, tmp_path, "--gpus", "1", "--time-limit", "1000") == 0
    slices = json.loads((work / "campaign.json").read_text())
    assert [entry["status"] for entry in slices[0]["parts"]] == [0, 4, 0, 0]
    assert all(entry["status"] == 0 for entry in slices[1]["parts"])


@pytest.mark.exhaustive
def test_a_part_that_fails_is_tried_once_more(campaign, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "broken-sft").touch()
    (work / "hopeless-vanilla-grpo").touch()
    assert run(campaign, tmp_path, "--gpus", "2", "--time-limit", "1000") == 3
    asked_for = [call["only"][0] for call in asked(work)]
    assert [asked_for.count(f"train:{name}") for name in ("sft", "vanilla-grpo", "contrastive-random")] == [2, 2, 1]
    statuses = [entry["status"] for one in json.loads((work / "campaign.json").read_text()) for entry in one["parts"]]
    assert sorted(set(statuses)) == [0, 1]
    assert statuses.count(1) == 3


@pytest.mark.exhaustive
def test_the_next_slice_on_another_machine_goes_on_with_the_same_time_for_each_arm(campaign, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "late-vanilla-grpo").touch()
    assert run(campaign, tmp_path, "--gpus", "2", "--time-limit", "800") == 4
    before = asked(work)
    told = {call["changes"][0] for call in before if call["only"][0] == "train:contrastive-bucket"}
    work.rename(tmp_path / "gone")
    elsewhere = ["--base", "model", "--work", str(tmp_path / "new"), "--export", str(tmp_path / "out2")]
    assert campaign.main([*elsewhere, "--resume", str(tmp_path / "out"), "--gpus", "2", "--time-limit", "500"]) == 0
    since = asked(tmp_path / "new")[len(before) :]
    assert ["train:vanilla-grpo", "measure:vanilla-grpo"] in [call["only"] for call in since]
    assert {tuple(call["changes"]) for call in since if call["only"][0].startswith("train:")} == {tuple(told)}
    slices = json.loads((tmp_path / "new" / "campaign.json").read_text())
    assert [entry["on_another_machine"] for entry in slices] == [False, True]


def test_the_evaluations_that_parts_share_come_along(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contrastive_export as export

    from kernelwright.contrastive.prompts import whole_source
    from kernelwright.contrastive.sampling.evaluation_cache import EvaluationCache
    from kernelwright.records import Candidate
    from tests.contrastive.stages.toys import toy_code, toy_evaluation, toy_task

    task = toy_task("even", "amber")
    candidate = Candidate(source=whole_source(task, toy_code(0), "subclass"))
    found = toy_evaluation(task, candidate)
    EvaluationCache(tmp_path / "work" / "judged.sqlite", "first", None).add(found)
    export.packed(tmp_path / "work", tmp_path / "out")
    export.unpack(tmp_path / "out", tmp_path / "elsewhere")
    assert EvaluationCache(tmp_path / "elsewhere" / "judged.sqlite", "first", None).find(task, candidate) == found


@pytest.mark.exhaustive
def test_the_model_may_still_be_on_its_way_while_teachers_are_judged(campaign, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    told = []

    def arriving():
        assert [call["only"] for call in asked(work)] == [["augment:sft"]]
        told.append(1)
        yield False
        yield True

    slice_of = campaign.Campaign("model", work, ROOT / "recipes", [], 0, 1000.0)
    assert slice_of.run(arriving())
    assert told


def test_what_is_published_is_all_records_and_no_weights(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from contrastive_export import WEIGHTS
    from contrastive_publish import publish

    from kernelwright.contrastive.prompts import whole_source
    from kernelwright.records import Candidate, RunDirectory
    from tests.contrastive.stages.toys import toy_code, toy_evaluation, toy_task

    task = toy_task("even", "amber")
    work, target = tmp_path / "work", tmp_path / "target"
    for way, name in enumerate(("sft", "held-out/confirmations")):
        candidate = Candidate(source=whole_source(task, toy_code(way), "subclass"))
        RunDirectory(work / name).append(toy_evaluation(task, candidate))
    (work / "sft" / "final").mkdir()
    (work / "sft" / "final" / WEIGHTS).touch()
    (work / "judged.sqlite").touch()
    (work / "hacks" / "wrong-output").mkdir(parents=True)
    (work / "hacks" / "wrong-output" / "1.py").write_text("x = 1")
    (work / "summary.json").write_text("{}")
    publish(work, target)
    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == {
        "summary.json",
        "hacks/wrong-output/1.py",
        "sft/evaluations.jsonl.gz",
        "held-out/confirmations/evaluations.jsonl.gz",
    }
    for name in ("sft", "held-out/confirmations"):
        assert list(RunDirectory(target / name).evaluations()) == list(RunDirectory(work / name).evaluations())


def test_stage_1_s_weights_are_left_behind_once_nothing_needs_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contrastive_export as export
    import torch
    from safetensors.torch import save_file

    work = tmp_path / "work"
    for name in ("sft", "self-supervised"):
        (work / name / "final").mkdir(parents=True)
        save_file({"weight": torch.ones(2)}, work / name / "final" / export.WEIGHTS)
    export.export(work, tmp_path / "before")
    (work / "held-out" / "results").mkdir(parents=True)
    (work / "held-out" / "results" / "sft.json").write_text("{}")
    export.export(work, tmp_path / "after")
    assert (tmp_path / "before" / "sft" / "final" / export.WEIGHTS).exists()
    assert [path.parts[-3] for path in (tmp_path / "after").rglob(export.WEIGHTS)] == ["self-supervised"]


def test_a_model_tuned_in_full_keeps_its_tokenizer_and_an_adapter_leaves_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contrastive_export as export

    for stage, config in (("sft", "config.json"), ("self-supervised", "adapter_config.json")):
        (tmp_path / "work" / stage / "final").mkdir(parents=True)
        for name in ("tokenizer.json", config):
            (tmp_path / "work" / stage / "final" / name).write_text("{}")
    export.export(tmp_path / "work", tmp_path / "out")
    assert [path.parent.parent.name for path in (tmp_path / "out").rglob("tokenizer.json")] == ["sft"]


def test_an_export_fits_through_a_narrow_door(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contrastive_export as export
    import torch
    from contrastive_weights import error_of
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(export, "PIECE_BYTES", 60_000)
    folder = tmp_path / "folder"
    for name in ("sft", "self-supervised", *export.ARMS):
        (folder / name / "final").mkdir(parents=True)
        save_file({"a": torch.rand(40_000)}, folder / name / "final" / export.WEIGHTS)
        (folder / name / "evaluations.jsonl.gz").write_bytes(os.urandom(3_000))
    names = export.pack(folder, tmp_path / "out")
    assert len(names) <= export.PIECES
    assert all(path.stat().st_size <= 60_000 for path in (tmp_path / "out").iterdir())
    export.unpack(tmp_path / "out", tmp_path / "back")
    kept = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*") if path.is_file()}
    assert {f"{name}/evaluations.jsonl.gz" for name in ("sft", *export.ARMS)} <= kept
    weights = sorted(name for name in kept if name.endswith(export.WEIGHTS))
    # Arms that are not measured yet before stage 1, which nothing is trained from any more.
    assert {"self-supervised", "contrastive-bucket", "vanilla-grpo"} <= {name.split("/")[0] for name in weights}
    assert len(weights) < 6
    for name in kept - set(weights):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    for name in weights:
        assert error_of(load_file(tmp_path / "back" / name), load_file(folder / name)) < 0.01

    # An arm that has been measured is no longer needed; one that has not would have to be trained again.
    (folder / "held-out" / "results").mkdir(parents=True)
    (folder / "held-out" / "results" / "contrastive-bucket.json").write_text("{}")
    export.pack(folder, tmp_path / "out")
    export.unpack(tmp_path / "out", tmp_path / "later")
    assert (tmp_path / "later" / "vanilla-grpo" / "final" / export.WEIGHTS).exists()
    assert not (tmp_path / "later" / "contrastive-bucket" / "final" / export.WEIGHTS).exists()


@pytest.mark.exhaustive
def test_a_published_campaign_s_second_stage_learns_what_it_learnt_without_drawing_or_judging(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from contrastive_restart import restart
    from pydantic import TypeAdapter

    from kernelwright.contrastive.sampling.judging import JudgedRun
    from kernelwright.contrastive.sampling.metrics import rollout_metrics
    from kernelwright.contrastive.sampling.scoring import Attempt, Scorer
    from kernelwright.errors import UsageError
    from kernelwright.models.chat import Sampling
    from kernelwright.records import RunDirectory
    from kernelwright.records.rewards import reward_named

    class Nobody:
        def evaluate(self, jobs, stop=None):
            assert not list(jobs)
            return iter(())

    published, work = ROOT / "results" / "contrastive-h200", tmp_path / "work"
    restart(published, work)
    run = RunDirectory(work / "self-supervised")
    judged = JudgedRun(run, Nobody())
    sampling = Sampling(temperature=1.0, max_tokens=576, seed=0)
    scorer = Scorer(
        judged, reward_named("success"), form="subclass", stage="self-supervised", model="base", sampling=sampling
    )
    recorded = [json.loads(line) for line in (published / "self-supervised" / "metrics.jsonl").read_text().splitlines()]
    for number, wanted in enumerate(recorded):
        text = (run.path / "rounds" / f"{number:03d}" / "attempts.json").read_bytes()
        scored = scorer.score(TypeAdapter(list[Attempt]).validate_json(text))
        found = {(one.task_sha256, one.candidate_sha256): one for one in judged.evaluations()}
        values = rollout_metrics([one.rollout for one in scored], found)
        assert {f"self-supervised/{name}": value for name, value in values.items()} | {"step": number} == wanted
    assert (work / "sft" / "examples.jsonl").read_text().count("\n") == 426
    assert [path.name for path in (work / "held-out" / "results").iterdir()] == ["zero-shot.json"]
    with pytest.raises(UsageError, match="Wanted a new directory"):
        restart(published, work)
    with pytest.raises(UsageError, match="it lacks sft/examples"):
        restart(tmp_path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.exhaustive
def test_a_new_campaign_knows_every_first_measurement_of_a_published_one(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from contrastive_recall import recall

    from kernelwright.contrastive.sampling.evaluation_cache import EvaluationCache
    from kernelwright.contrastive.stages.config import JudgeSection
    from kernelwright.contrastive.stages.context import first_on
    from kernelwright.errors import UsageError
    from kernelwright.records import RunDirectory

    published = ROOT / "results" / "2026-11-25-contrastive-device-bound-first-h100"
    recall(published, tmp_path / "work")
    assert capsys.readouterr().out == "613 first measurements, made on NVIDIA H100 80GB HBM3\n"
    # As a campaign that begins with the recipe on that machine looks for them.
    section = JudgeSection(**tomllib.loads((ROOT / "recipes" / "device_bound" / "sft.toml").read_text())["judge"])
    known = EvaluationCache(tmp_path / "work" / "judged.sqlite", first_on("cuda"), section.judge_settings())
    for folder in ("sft", "vanilla-grpo/baselines"):
        one = list(RunDirectory(published / folder).evaluations())[-1]
        found = known.find(SimpleNamespace(sha256=one.task_sha256), one.candidate())
        assert found is not None
        assert found.blocks == one.blocks
    again = next(iter(RunDirectory(published / "held-out" / "confirmations").evaluations()))
    assert known.find(SimpleNamespace(sha256=again.task_sha256), again.candidate()).blocks != again.blocks
    with pytest.raises(UsageError, match="Wanted a published campaign"):
        recall(tmp_path, tmp_path / "other")
    baselines = RunDirectory(tmp_path / "work" / "held-out" / "baselines")
    was = list(baselines.evaluations())
    assert was == list(RunDirectory(published / "held-out" / "baselines").evaluations())
    assert len(was) == 40
    recall(published, tmp_path / "work")  # knows it already, and what was first stays
    assert list(baselines.evaluations()) == was
    assert known.find(SimpleNamespace(sha256=again.task_sha256), again.candidate()).blocks != again.blocks


def test_a_campaign_whose_weights_are_gone_starts_again_without_the_untrained_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from contrastive_restart import restart

    work = tmp_path / "work"
    restart(ROOT / "results" / "2026-11-25-contrastive-device-bound-second-h100", work)
    assert (work / "sft" / "examples.jsonl").read_text().count("\n") == 177
    rounds = [json.loads(path.read_text()) for path in sorted((work / "self-supervised" / "rounds").rglob("attempts.json"))]
    assert [len(attempts) for attempts in rounds] == [128, 128]
    assert not (work / "held-out").exists()
