"""A run gives its numbers back from its raw timings, and a changed record is found."""

from __future__ import annotations

import json

import pytest

from kernelwright.cli import main
from kernelwright.errors import UsageError
from kernelwright.records import Evaluation, RunDirectory, Scoring, TimingBlock, TimingSeries, Verdict, append_lines, scoring
from kernelwright.records.intervals import Interval
from kernelwright.records.rescore import RescoreState, rescore
from kernelwright.records.scoring import score, score_ratios
from kernelwright.records.tables import ENTRIES, BenchEntry, table_json, task_results


def timings(speedup=2.0, rival=None):
    """Blocks and series of three process triples whose candidate hides 5 us of each call.

    `rival` is the rival's speedup over the reference; None leaves it out.
    """
    blocks, series = [], []
    for process in range(3):
        wobble = 1 + 0.01 * process
        for block in range(3):
            latency_us = 100.0 * wobble * (1 + 0.003 * block)
            claimed_us = (latency_us / speedup, latency_us / speedup * 1.01)
            blocks.append(
                TimingBlock(
                    process=process,
                    reference_us=(latency_us, latency_us),
                    null_us=(latency_us * 1.002, latency_us),
                    candidate_us=claimed_us,
                    claimed_us=claimed_us,
                    alongside_us={"compile": (latency_us / rival, latency_us / rival)} if rival else {},
                )
            )
        series.append(
            TimingSeries(
                process=process,
                calls=16,
                reference_inner_us=(100.0, 101.0, 99.0, 100.0),
                reference_outer_us=(160.0, 161.5, 159.0, 160.5),
                candidate_inner_us=(50.0, 50.5, 49.5, 50.0),
                candidate_outer_us=(115.0, 116.0, 114.5, 115.0),
            )
        )
    return blocks, series


def evaluation(task="relu", rival=None, **changes):
    found = score(*timings(rival=rival), Scoring(miss_probability=0.0125))
    values = {"task": task, "task_sha256": task, "candidate_sha256": "c", "verdict": Verdict.ACCEPTED, **found.recorded}
    return Evaluation.model_validate(values | changes)


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


def rejected(task):
    return Evaluation(task=task, task_sha256=task, candidate_sha256="r", verdict=Verdict.REJECTED)


def test_numbers_follow_from_the_record_alone(run):
    run.append(evaluation())
    run.append(rejected("relu"))
    found = rescore(run)
    assert (found.state, found.differences, found.too_old) == (RescoreState.SAME, [], [])
    assert found.scored == 7 + 9


def test_what_the_outer_clock_saw_is_charged_again():
    found = evaluation()
    assert found.blocks[0].candidate_us[0] > found.blocks[0].claimed_us[0] + 4
    assert score(found.blocks, found.series, found.scoring).numbers["speedup"] == found.speedup < 2


def test_a_ratio_to_a_rival_is_of_charged_calls_and_lowered_as_the_speedup_is():
    rule = Scoring(miss_probability=0.0125)
    blocks, series = timings(rival=1.6)
    believed = score(blocks, (), rule)
    # Every pair of calls: the rival takes 1 / 1.6 of the reference's time, the candidate 1 / 2 and once 1.01 / 2.
    assert believed.versus["compile"].estimate == pytest.approx(2 / 1.6, rel=0.011)
    found = score(blocks, series, rule)
    assert found.versus["compile"].estimate < 0.95 * believed.versus["compile"].estimate
    assert found.versus["compile"].estimate == pytest.approx(found.speedup.estimate / 1.6, rel=1e-3)
    assert found.versus["compile"].low == pytest.approx(found.speedup.low / 1.6, rel=1e-2)
    assert found.versus["compile"].low <= found.versus["compile"].estimate <= found.versus["compile"].high
    # An outer clock that contradicts the claim takes as much off both.
    slow = [one.model_copy(update={"candidate_outer_us": (260.0, 261.0, 259.0, 260.0)}) for one in series]
    lowered = score(blocks, slow, rule)
    assert lowered.speedup.high < 1
    assert lowered.versus["compile"].low <= lowered.versus["compile"].estimate <= lowered.versus["compile"].high < 1
    ratio = lowered.versus["compile"]
    assert lowered.numbers["versus"] == {"compile": (ratio.estimate, ratio.low, ratio.high)}
    # One that is not timed in later processes has the ratio of the first.
    early = [block if block.process == 0 else block.model_copy(update={"alongside_us": {}}) for block in blocks]
    assert score(early, series, rule).versus["compile"].estimate == pytest.approx(found.versus["compile"].estimate, rel=0.01)


def test_the_claims_interval_over_a_rival_is_lowered_by_the_factors_of_the_speedup():
    claimed, final = Interval(2.0, 1.9, 2.1), Interval(1.5, 1.2, 1.6)
    found = scoring.lowered_alike(Interval(1.2, 1.1, 1.3), claimed, final)
    assert (found.estimate, found.low, found.high) == pytest.approx((1.2 * 0.75, 1.1 * 1.2 / 1.9, 1.3 * 1.6 / 2.1))
    kept = scoring.lowered_alike(Interval(1.2, 1.1, 1.3), claimed, Interval(1.0, 1.0, 3.0))
    assert (kept.estimate, kept.low, kept.high) == pytest.approx((0.6, 1.1 / 1.9, 1.3))


@pytest.mark.parametrize("rival", [None, 1.6])
def test_a_record_with_one_rival_or_none_is_read_and_gives_the_same(rival):
    """Records of before 2026-11-29 name the one baseline that was timed beside a candidate `rival`."""
    record = json.loads(evaluation(rival=rival).model_dump_json())
    (name, ratio), *_ = [*record.pop("versus").items(), (None, (None, None, None))]
    record |= {"rival": name} | dict(zip(("vs_rival", "vs_rival_low", "vs_rival_high"), ratio, strict=True))
    for block in record["blocks"]:
        block["rival_us"] = block.pop("alongside_us").get(name, [])
    assert Evaluation.model_validate(record) == evaluation(rival=rival)
    assert Evaluation.model_validate_json(json.dumps(record)) == evaluation(rival=rival)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["versus"]["compile"].__setitem__(0, 1.5),
        lambda record: record["versus"]["compile"].__setitem__(1, 1.25),
        lambda record: record["blocks"][0].update(alongside_us={"compile": [1.0, 1.0]}),
        lambda record: record["versus"].update(cudnn=[2.0, 2.0, 2.0]),
        lambda record: record["versus"].clear(),
    ],
)
def test_a_tampered_ratio_to_what_was_beside_is_found(run, change):
    record = json.loads(evaluation(rival=1.6).model_dump_json())
    append_lines(run.evaluations_path, [json.dumps(record)])
    assert rescore(run).state is RescoreState.SAME
    change(record)
    append_lines(run.evaluations_path, [json.dumps(record)])
    assert {one.name for one in rescore(run).differences} & {"versus compile", "versus cudnn"}


def doctored(run, change):
    record = json.loads(evaluation().model_dump_json())
    change(record)
    append_lines(run.evaluations_path, [json.dumps(record)])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda record: record.update(speedup=2.5), {"speedup"}),
        (lambda record: record.update(speedup_low=1.0), {"speedup_low", "is_improvement"}),
        (lambda record: record.update(noise_floor=0.9), {"noise_floor", "is_improvement"}),
        (lambda record: record.update(verdict="rejected", reason="wrong-output"), {"speedup"}),
        (lambda record: record["blocks"][0].update(candidate_us=[1.0, 1.0]), {"candidate_us"}),
        (lambda record: record["scoring"].update(miss_probability=0.05), None),
        (lambda record: record["series"].pop(), None),
        (lambda record: record["series"][0].update(candidate_outer_us=[200.0] * 4), None),
        (lambda record: record["series"][0].update(candidate_outer_us=[200.0]), {"speedup"}),
        (lambda record: record.update(blocks=[]), {"speedup"}),
    ],
)
def test_a_tampered_record_is_found(run, change, names):
    doctored(run, change)
    found = rescore(run)
    assert found.state is RescoreState.DIFFERS
    if names is not None:
        assert {one.name for one in found.differences} == names


def test_a_record_of_before_is_no_success(run, capsys):
    run.append(evaluation(series=(), scoring=None))
    assert rescore(run).state is RescoreState.TOO_OLD
    assert main(["rescore", str(run.path)]) == 2
    assert "cannot be scored again: evaluations.jsonl, record 1 (relu): written before" in capsys.readouterr().out


def test_a_difference_outweighs_what_is_too_old(run):
    run.append(evaluation(series=(), scoring=None))
    run.append(evaluation(speedup=9.0))
    assert rescore(run).state is RescoreState.DIFFERS


def test_the_command_says_what_differs(run, capsys):
    run.append(evaluation())
    assert main(["rescore", str(run.path)]) == 0
    run.append(evaluation(speedup=9.0))
    capsys.readouterr()
    assert main(["rescore", str(run.path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], [one["name"] for one in told["differences"]]) == ("differs", ["speedup"])
    assert main(["rescore", str(run.path)]) == 1
    assert "speedup is recorded as 9.0, computed as 1." in capsys.readouterr().out


def test_what_is_no_run_is_unusable(tmp_path, capsys):
    assert main(["rescore", str(tmp_path)]) == 2
    assert "Wanted a run directory" in capsys.readouterr().err
    assert main(["rescore", str(tmp_path / "nothing")]) == 2


def test_a_table_follows_from_the_evaluations(run):
    run.append(evaluation("a"))
    run.append(rejected("b"))
    entries = [BenchEntry("a", "a", 1, "c"), BenchEntry("b", "b", 1, "r")]
    run.write_json(
        ENTRIES,
        [{"task": e.task, "task_sha256": e.task, "level": 1, "candidate_sha256": e.candidate_sha256} for e in entries],
    )
    run.write_json("table.json", table_json(run, task_results(run, entries, {})))
    assert rescore(run).state is RescoreState.SAME
    table = run.read_json("table.json")
    # Words for what a search still owed follow from the rules of its day.
    table["tasks"][0]["reason"] = "a verdict is owed"
    run.write_json("table.json", table)
    assert rescore(run).state is RescoreState.SAME
    table["tally"]["improved"] += 1
    table["tasks"][0]["reference_us"] = 1.0
    run.write_json("table.json", table)
    names = [(difference.where, difference.name) for difference in rescore(run).differences]
    assert names == [("table.json", "tally.improved"), ("table.json", "tasks[0].reference_us")]
    (run.path / ENTRIES).unlink()
    assert rescore(run).state is RescoreState.TOO_OLD


def confirmation(**changes):
    ratios, nulls = [[0.02, 0.021], [0.022, 0.02], [0.021, 0.02]], [[0.0, 0.001], [0.001, 0.0], [0.0, -0.001]]
    interval, floor = score_ratios(ratios, nulls)
    numbers = {"speedup": interval.estimate, "low": interval.low, "high": interval.high, "noise_floor": floor}
    known = {"digest": "d", "processes": 3, "wrong": None, "is_improvement": interval.low > 1 + floor}
    return numbers | known | {"log_ratios": ratios, "null_log_ratios": nulls} | changes


def test_confirmed_schedules_follow_from_their_ratios(run):
    right = confirmation()
    append_lines(run.path / "confirmations.jsonl", [json.dumps(right)])
    run.write_json(
        "summary.json",
        {"best": {name: right[name] for name in ("digest", "speedup", "low", "high", "noise_floor", "is_improvement")}},
    )
    found = rescore(run)
    assert (found.state, found.scored) == (RescoreState.SAME, 10)
    run.write_json("summary.json", {"best": {**run.read_json("summary.json")["best"], "speedup": 3.0}})
    assert [one.where for one in rescore(run).differences] == ["summary.json, best"]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"low": 1.5}, RescoreState.DIFFERS),
        ({"is_improvement": False}, RescoreState.DIFFERS),
        ({"log_ratios": [], "null_log_ratios": []}, RescoreState.TOO_OLD),
        ({"log_ratios": [["x"]]}, RescoreState.DIFFERS),
        ({"processes": 0, "log_ratios": []}, RescoreState.SAME),
    ],
)
def test_a_tampered_confirmation_is_found(run, changes, state):
    append_lines(run.path / "confirmations.jsonl", [json.dumps(confirmation(**changes))])
    assert rescore(run).state is state


def test_a_confirmation_under_an_older_name_is_read(run):
    old = confirmation()
    old["is_gain"] = old.pop("is_improvement")
    append_lines(run.path / "confirmations.jsonl", [json.dumps(old)])
    names = ("digest", "speedup", "low", "high", "noise_floor", "is_gain")
    run.write_json("summary.json", {"best": {name: old[name] for name in names}})
    assert rescore(run).state is RescoreState.SAME
    append_lines(run.path / "confirmations.jsonl", [json.dumps(old | {"is_gain": False})])
    assert {one.name for one in rescore(run).differences} == {"is_improvement"}


def test_an_unreadable_run_is_unusable(run):
    (run.path / "evaluations.jsonl").mkdir(parents=True)
    with pytest.raises(UsageError):
        rescore(run)
