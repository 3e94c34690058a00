"""The campaign's order, its time and what it carries away, with a stand-in for the recipe that leaves marks."""

from __future__ import annotations

import json
import os
from pathlib import Path

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
        if (out / f"late-{name}").exists():
            (out / f"late-{name}").unlink()
            sys.exit(4)
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


def test_every_part_is_done_once_on_the_gpus_that_are_its_own(campaign, tmp_path):
    limits = ("--gpus", "4", "--time-limit", "1000", "--reserve", "300")
    assert run(campaign, tmp_path, *limits) == 0
    calls = asked(tmp_path / "work")
    assert [call["only"] for call in calls[:1]] == [["augment:sft"]]
    assert {tuple(call["only"]): call["gpus"] for call in calls[1:3]} == {
        ("train:sft",): "0",
        ("measure:zero-shot",): "1,2,3",
    }
    assert {call["only"][0]: call["gpus"] for call in calls[3:5]} == {"train:self-supervised": "0,1", "measure:sft": "2,3"}
    arms = {call["only"][0]: call for call in calls[5:9]}
    assert sorted(call["gpus"] for call in arms.values()) == ["0", "1", "2", "3"]
    assert all(call["only"] == [name, name.replace("train", "measure")] for name, call in arms.items())
    assert len({tuple(call["changes"]) for call in arms.values()}) == 1  # the same time for each
    seconds = float(arms["train:vanilla-grpo"]["changes"][0].removeprefix("contrastive.seconds="))
    assert 500 < seconds < 640  # of 1000, without the reserve and the grace
    assert {call["only"][0] for call in calls[9:11]} == {"measure:self-supervised", "measure:evolutionary"}
    assert calls[-1]["only"] == ["summary"]
    # Nothing is left to do.
    assert run(campaign, tmp_path, *limits) == 0
    assert [call["only"] for call in asked(tmp_path / "work")[len(calls) :]] == [["summary"]]


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


def test_an_export_fits_through_a_narrow_door(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contrastive_export as export

    monkeypatch.setattr(export, "PIECE_BYTES", 60_000)
    folder = tmp_path / "folder"
    for name in ("sft", "self-supervised", *export.ARMS):
        (folder / name / "final").mkdir(parents=True)
        (folder / name / "final" / export.WEIGHTS).write_bytes(os.urandom(40_000))
        (folder / name / "evaluations.jsonl.gz").write_bytes(os.urandom(3_000))
    names = export.pack(folder, tmp_path / "out")
    assert len(names) <= export.PIECES
    assert all(path.stat().st_size <= 60_000 for path in (tmp_path / "out").iterdir())
    export.unpack(tmp_path / "out", tmp_path / "back")
    kept = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*") if path.is_file()}
    assert {f"{name}/evaluations.jsonl.gz" for name in ("sft", *export.ARMS)} <= kept
    weights = sorted(name for name in kept if name.endswith(export.WEIGHTS))
    assert {"self-supervised", "sft", "contrastive-bucket"} <= {name.split("/")[0] for name in weights}
    assert len(weights) < 6
    for name in kept:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
