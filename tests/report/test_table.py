"""The bench table, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from kernelwright.errors import UsageError
from kernelwright.records import Evaluation, Label, Reason, Verdict
from kernelwright.records.tables import BEST, TableRow, TaskResult, baseline_table, bench_table, statistics_of, tally
from kernelwright.report.tables import render_markdown


def accepted(speedup: float | None, *, low: float | None = None, reference_us: float | None = None) -> Evaluation:
    return Evaluation(
        task="t",
        task_sha256="a",
        candidate_sha256="b",
        verdict=Verdict.ACCEPTED,
        speedup=speedup,
        speedup_low=low,
        speedup_high=1.05 * speedup if speedup else None,
        noise_floor=0.02,
        reference_us=reference_us,
        labels=(Label.LIBRARY_CALL,),
    )


def rejected(reason: Reason) -> Evaluation:
    return Evaluation(task="t", task_sha256="a", candidate_sha256="b", verdict=Verdict.REJECTED, reason=reason, detail="x")


RESULTS = [
    TaskResult("a", 1, {"eager": 100.0, "compile": 50.0}, accepted(4.0, low=3.9)),
    TaskResult("b", 1, {"eager": 100.0, "compile": 200.0}, accepted(1.0, low=0.99)),
    TaskResult("c", 1, {"eager": 100.0}, rejected(Reason.WRONG_OUTPUT)),
    TaskResult("d", 2, {"eager": 100.0, "compile": 80.0}, None),
    TaskResult("e", 2, {"eager": 10.0, "compile": 5.0}, accepted(2.0, low=1.01)),
]


def row(rows: list[TableRow], level: int | None, baseline: str) -> TableRow:
    (found,) = [item for item in rows if (item.level, item.baseline) == (level, baseline)]
    return found


def test_rows_come_by_level_and_then_all_with_the_best_baseline_last() -> None:
    rows = bench_table(RESULTS)
    assert [(item.level, item.baseline) for item in rows] == [
        (level, baseline) for level in (1, 2, None) for baseline in ("eager", "compile", BEST)
    ]


def test_all_levels_against_eager() -> None:
    found = row(bench_table(RESULTS), None, "eager")
    assert (found.tasks, found.success, found.above) == (5, 3, 2)
    # Solved: 1, 2, 4.
    assert found.solved.count == 3
    assert found.solved.mean == pytest.approx(7 / 3)
    assert found.solved.largest == 4.0
    assert (found.solved.p75, found.solved.p50, found.solved.p25) == (3.0, 2.0, 1.5)
    assert found.solved.geomean == pytest.approx(2.0)
    # Filled: 1, 1, 1, 2, 4.
    assert found.filled.count == 5
    assert found.filled.mean == pytest.approx(1.8)
    assert (found.filled.p75, found.filled.p50, found.filled.p25) == (2.0, 1.0, 1.0)
    assert found.filled.geomean == pytest.approx(8 ** (1 / 5))
    # Exactly 1x is not above 1x, exactly 2x not above 2x.
    assert found.fast_p == {1.0: 2 / 5, 1.5: 2 / 5, 2.0: 1 / 5}


def test_another_baseline_scales_the_paired_speedup_and_leaves_out_tasks_where_it_failed() -> None:
    found = row(bench_table(RESULTS), None, "compile")
    # a: 4 * 50/100 = 2, b: 1 * 200/100 = 2, e: 2 * 5/10 = 1; c has no compile latency, d no candidate.
    assert (found.tasks, found.success, found.above) == (4, 3, 2)
    assert found.solved.mean == pytest.approx(5 / 3)
    assert found.solved.geomean == pytest.approx(4 ** (1 / 3))
    assert found.filled.mean == pytest.approx(6 / 4)
    assert found.fast_p == {1.0: 0.5, 1.5: 0.5, 2.0: 0.0}


def test_best_baseline_is_chosen_for_each_task() -> None:
    found = row(bench_table(RESULTS), None, BEST)
    # a: 4 * 50/100 = 2, b: 1 * 100/100 = 1, e: 2 * 5/10 = 1; c and d are unsolved.
    assert (found.tasks, found.success, found.above) == (5, 3, 1)
    assert found.solved.mean == pytest.approx(4 / 3)
    assert found.solved.geomean == pytest.approx(2 ** (1 / 3))
    assert found.filled.mean == pytest.approx(6 / 5)


def test_one_level() -> None:
    found = row(bench_table(RESULTS), 1, "eager")
    assert (found.tasks, found.success, found.above) == (3, 2, 1)
    assert found.solved.mean == pytest.approx(2.5)
    assert (found.solved.p75, found.solved.p50, found.solved.p25) == (3.25, 2.5, 1.75)
    assert found.filled.mean == pytest.approx(2.0)


def test_level_without_solution_has_no_statistics_but_its_filled_ones() -> None:
    found = row(bench_table([TaskResult("d", 2, {"eager": 9.0}, None)]), 2, "eager")
    assert found.solved.mean is None
    assert found.solved.geomean is None
    assert found.filled.mean == 1.0
    assert found.fast_p[1.0] == 0.0


def test_tasks_without_level_count_in_all_only() -> None:
    rows = bench_table([TaskResult("x", None, {}, accepted(3.0)), RESULTS[0]])
    assert [item.level for item in rows if item.baseline == "eager"] == [1, None]
    assert row(rows, None, "eager").solved.count == 2


def test_accepted_but_untimed_is_a_success_without_a_speedup() -> None:
    found = row(bench_table([TaskResult("x", 1, {"eager": 1.0}, accepted(None))]), 1, "eager")
    assert found.success == 1
    assert found.solved.count == 0
    assert found.filled.mean == 1.0


def test_judge_stands_in_for_an_eager_latency_that_the_bench_lacks() -> None:
    result = TaskResult("x", 1, {"compile": 30.0}, accepted(2.0, reference_us=60.0))
    assert result.speedup() == 2.0
    assert result.speedup("compile") == pytest.approx(1.0)
    assert result.speedup(BEST) == pytest.approx(1.0)
    without = TaskResult("x", 1, {"compile": 30.0}, accepted(2.0))
    assert without.speedup("compile") is None
    assert without.speedup("cudagraph") is None


def test_exactly_the_threshold_is_not_above_it() -> None:
    rows = bench_table([TaskResult("x", 1, {}, accepted(1.01)), TaskResult("y", 1, {}, accepted(1.0101))])
    assert row(rows, 1, "eager").above == 1


def test_repeated_task_is_refused() -> None:
    with pytest.raises(UsageError, match="several for a"):
        bench_table([RESULTS[0], RESULTS[0]])


@pytest.mark.parametrize("latency_us", [0.0, -1.0, math.nan, math.inf])
def test_impossible_latency_is_refused(latency_us: float) -> None:
    with pytest.raises(UsageError, match="compile"):
        TaskResult("x", 1, {"compile": latency_us}, None)


def test_the_name_best_is_kept() -> None:
    with pytest.raises(UsageError, match="another name"):
        TaskResult("x", 1, {"best": 1.0}, None)


def test_statistics_of_one_value() -> None:
    found = statistics_of([2.5])
    assert (found.count, found.mean, found.largest) == (1, 2.5, 2.5)
    assert (found.p75, found.p50, found.p25) == (2.5, 2.5, 2.5)
    assert found.geomean == pytest.approx(2.5)


def test_statistics_do_not_depend_on_the_order() -> None:
    assert statistics_of([3.0, 1.0, 2.0]) == statistics_of([1.0, 2.0, 3.0])


def test_tally_counts_what_became_of_candidates() -> None:
    wrong = TaskResult("f", 3, {}, rejected(Reason.WRONG_OUTPUT))
    crashed = TaskResult("g", 3, {}, rejected(Reason.CRASHED))
    counts = tally([*RESULTS, wrong, crashed])
    assert (counts.tasks, counts.without_candidate, counts.accepted) == (7, 1, 3)
    # The floor is 0.02: lows of 3.9 clear it, 0.99 and 1.01 do not.
    assert counts.improved == 1
    assert list(counts.rejected.items()) == [("wrong-output", 2), ("crashed", 1)]
    assert counts.labels == {"library-call": 3}


def test_what_failed_or_is_owed_is_not_without_a_candidate() -> None:
    failed = TaskResult("f", 3, {}, None, has_candidate=True, failed=("candidate", "compile"))
    owed = TaskResult("g", 3, {"eager": 1.0}, None, has_candidate=True, failed=("cudnn",))
    counts = tally([*RESULTS, failed, owed])
    assert (counts.tasks, counts.without_candidate, counts.failed, counts.pending, counts.baselines_failed) == (
        7,
        1,
        1,
        1,
        2,
    )
    assert counts.built == 4
    text = render_markdown(bench_table([failed]), tally([*RESULTS, failed, owed]))
    assert "7 tasks, 1 without a candidate, 1 failed (a fault of the task or of the machine, not of the candidate)," in text
    assert ", 1 not judged yet. Of the candidates judged 4 build, 3 are accepted" in text
    assert "Of 2 tasks a baseline failed by a fault of the task or of the machine." in text


def test_markdown_states_both_variants() -> None:
    text = render_markdown(bench_table(RESULTS), tally(RESULTS))
    heads = "Level | Baseline | Mean | Max | 75 % | 50 % | 25 % | Geomean | fast_1 | fast_1.5 | fast_2"
    assert text.count(f"| {heads} | Success | >1.01x | Ahead |\n") == 2
    shared = "40.0 % | 40.0 % | 20.0 % | 3/5 | 2/5 | 1/5 |\n"
    solved = text.index(f"| all | eager | 2.33x | 4.00x | 3.00x | 2.00x | 1.50x | 2.00x | {shared}")
    filled = text.index(f"| all | eager | 1.80x | 4.00x | 2.00x | 1.00x | 1.00x | 1.52x | {shared}")
    assert text.index("left out") < solved < text.index("count as 1.00x") < filled
    assert "5 tasks, 1 without a candidate. Of the candidates 4 build, 3 are accepted and 1 rejected;" in text
    assert "3 of the accepted are clean" in text
    assert "1 are improvements" in text
    assert "Rejected for wrong-output 1." in text
    assert text.endswith("\n")


def test_markdown_of_nothing_solved_prints_dashes_and_three_figures_otherwise() -> None:
    text = render_markdown(bench_table([TaskResult("d", 1, {"eager": 9.0}, None)]))
    assert "| 1 | eager | - | - | - | - | - | - | 0.0 % | 0.0 % | 0.0 % | 0/1 | 0/1 |" in text
    for speedup, shown in ((0.9541, "0.954x"), (1.004, "1.00x"), (12.34, "12.3x"), (368.2, "368x")):
        assert f"| {shown} |" in render_markdown(bench_table([TaskResult("x", 1, {}, accepted(speedup))]))


def test_a_suite_without_candidates_has_a_table_of_its_baselines_alone() -> None:
    results = [
        TaskResult("a", 1, {"eager": 8.0, "compile": 2.0, "cudnn": 16.0}, None),
        TaskResult("b", 1, {"eager": 9.0, "cudnn": 3.0}, None),
        TaskResult("c", 1, {}, None),
    ]
    rows = {row.baseline: row for row in baseline_table(results)}
    assert {name: (row.ran, row.speedups.largest) for name, row in rows.items()} == {
        "compile": (1, 4.0),
        "cudnn": (2, 3.0),
        "best": (2, 4.0),
    }
    assert rows["best"].speedups.mean == pytest.approx(3.5)
    assert rows["cudnn"].speedups.geomean == pytest.approx(1.5**0.5)
    text = render_markdown(bench_table(results), tally(results), baseline_table(results))
    assert "Speedups of the solved" not in text
    assert "| cudnn | 2 | 1.75x | 3.00x |" in text
    assert baseline_table([TaskResult("a", 1, {"eager": 8.0}, None)]) == []


@pytest.mark.parametrize(
    ("policy", "techniques", "ratio", "interval", "ahead"),
    [
        ("builtin", ("cudnn-benchmark",), 1.0, (1.0, 1.0), False),
        ("builtin", ("compile",), 1.0, (1.0, 1.0), False),
        ("builtin", ("cuda-graph",), 2.0, (3.9 / 2.1, 4.2 / 1.9), True),  # that baseline was not measured
        ("builtin", ("cudnn-benchmark", "pool-first"), 2.0, (3.9 / 2.1, 4.2 / 1.9), True),
        ("api", ("cudnn-benchmark",), 2.0, (3.9 / 2.1, 4.2 / 1.9), True),
    ],
)
def test_a_winner_that_is_a_baseline_is_not_ahead_of_it(policy, techniques, ratio, interval, ahead) -> None:
    winner = accepted(4.0, low=3.9).model_copy(update={"policy": policy, "techniques": techniques})
    latencies_us = {"eager": 100.0, "compile": 80.0, "cudnn": 50.0}
    result = TaskResult("x", 1, latencies_us, winner, intervals={"compile": (1.2, 1.3), "cudnn": (1.9, 2.1)})
    assert result.best == "cudnn"
    assert result.speedup(BEST) == pytest.approx(ratio)
    assert result.interval(BEST) == pytest.approx(interval)
    assert (result.is_ahead(BEST), result.is_ahead("eager")) == (ahead, True)
    assert result.speedup() == 4.0
    assert row(bench_table([result]), None, BEST).ahead == ahead


@pytest.mark.parametrize(
    ("policy", "techniques", "ratio", "interval"),
    [
        ("api", ("fuse",), 1.5, (1.2, 1.8)),
        ("builtin", ("cudnn-benchmark",), 1.0, (1.0, 1.0)),
        ("builtin", ("compile",), 1.0, (1.0, 1.0)),
    ],
)
def test_a_ratio_of_paired_calls_takes_the_place_of_two_measurements(policy, techniques, ratio, interval) -> None:
    changes = {"policy": policy, "techniques": techniques, "versus": {"cudnn": (1.5, 1.2, 1.8)}}
    winner = accepted(4.0, low=3.9).model_copy(update=changes)
    latencies_us = {"eager": 100.0, "compile": 80.0, "cudnn": 50.0}
    intervals = {"compile": (1.2, 1.3), "cudnn": (1.0, 5.0)}
    result = TaskResult("x", 1, latencies_us, winner, intervals=intervals)
    assert (result.speedup(BEST), result.interval(BEST)) == (ratio, interval)
    assert result.is_ahead(BEST) is (interval[0] > 1)
    assert result.speedup() == 4.0
    if techniques == ("fuse",):
        assert (result.speedup("cudnn"), result.interval("cudnn")) == (1.5, (1.2, 1.8))
        assert result.speedup("compile") == pytest.approx(4.0 / 1.25)
        # Another baseline is the best by now.
        other = TaskResult("x", 1, {**latencies_us, "compile": 40.0}, winner, intervals=intervals)
        assert other.speedup(BEST) == pytest.approx(1.6)
        # Which one is the best was measured as well: the interval over it begins where the lowest over any does.
        both = winner.model_copy(update={"versus": {"cudnn": (1.5, 1.2, 1.8), "compile": (1.6, 0.9, 2.0)}})
        finals = TaskResult("x", 1, latencies_us, both, intervals=intervals)
        assert (finals.speedup(BEST), finals.interval(BEST), finals.is_ahead(BEST)) == (1.5, (0.9, 1.8), False)
        assert finals.is_ahead("cudnn")
