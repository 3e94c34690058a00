"""Rules of a search: the order of screening, what the judge takes, what stands, and a task's status."""

from __future__ import annotations

import pytest

from kernelwright.records import Candidate, Task
from kernelwright.records.decisions import (
    SCHEDULE,
    TaskRecords,
    TaskStatus,
    compiling_pays,
    confirmed_best,
    gain_per_second,
    headroom,
    is_top_ranked,
    judging_bytes,
    needs_no_rerun,
    next_of,
    next_to_confirm,
    next_to_judge,
    ranked,
    too_good,
    tuning_pays,
)
from kernelwright.records.screened import Compiles, compiles, screened_of, uses_inductor
from kernelwright.rewrites.wrappers import WRAPPERS, wrap
from tests.samples import TASK, accepted, module, rejected

PLAIN, SCALED = module(), module("b * a[:, None]")
COMPILED, TUNED = (wrap(TASK.source, name, (name,)) for name in ("compile", "compile-max-autotune"))
TRITON = module(note="triton")


def screened(source, estimate, **changes):
    return screened_of(TASK, Candidate(source=source), correct=True, estimate=estimate, spread=0.0, **changes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cuda-graph", Compiles.NOTHING),
        ("cudnn-benchmark", Compiles.NOTHING),
        ("channels-last-cuda-graph", Compiles.NOTHING),
        ("compile", Compiles.INDUCTOR),
        ("compile-cuda-graph", Compiles.INDUCTOR),
        ("compile-max-autotune", Compiles.VARIANTS),
    ],
)
def test_the_text_tells_what_is_compiled(name, kind):
    assert name in WRAPPERS
    source = wrap(TASK.source, name, (name,))
    assert compiles(source) is kind
    assert uses_inductor(source) == (kind is not Compiles.NOTHING)


def test_what_compiles_nothing_comes_first_and_waits_for_its_own_process():
    waiting = [Candidate(source=text) for text in (TUNED, COMPILED, TRITON, PLAIN)]
    assert next_of(waiting, [], [], {*Compiles}) is waiting[3]
    assert next_of(waiting, [], [], {*Compiles} - {Compiles.NOTHING}) is waiting[2]
    assert next_of(waiting[:2], [], [], {*Compiles}) is waiting[1]
    assert next_of(waiting, [], [], set()) is None
    assert next_of(waiting[:1], waiting[1:2], [], {*Compiles}) is None, "its estimate may tell that it is not worth it"
    assert next_of(waiting[:1], [], [], {*Compiles}) is waiting[0]


def test_the_judge_may_take_more_memory_than_screening_and_contexts_beside():
    large = [screened(PLAIN, 1.0, memory_bytes=20 << 30), screened(SCALED, 1.0, memory_bytes=12 << 30)]
    assert 31 << 30 < judging_bytes(large) < 50 << 30
    assert 0 < judging_bytes([screened(PLAIN, 1.0, memory_bytes=1 << 20)]) < 4 << 30
    assert judging_bytes([screened(PLAIN, 1.0)]) == judging_bytes([]) == 0, "on a processor"


def test_the_judge_takes_what_gains_most_for_each_second_that_it_costs():
    def task(estimate, *seconds):
        return [
            screened(PLAIN, 0.9, elapsed_s=max(seconds)),
            *(screened(SCALED, estimate, elapsed_s=one) for one in seconds),
        ]

    dear, cheap = task(4.0, 5.0, 80.0), task(2.0, 5.0, 8.0)
    assert gain_per_second(cheap) > gain_per_second(dear), "a look of 80 s is a judge's four minutes"
    assert gain_per_second(task(4.0, 8.0)) > gain_per_second(cheap)
    assert gain_per_second(task(4.0, 0.1)) == gain_per_second(task(4.0, 0.2)), "the judge has costs of its own"
    nothing = [screened(PLAIN, 0.9, elapsed_s=5.0)]
    assert gain_per_second(nothing) == gain_per_second(task(1.04, 5.0))
    assert gain_per_second(nothing) > gain_per_second([screened(PLAIN, 0.9, elapsed_s=9.0)])
    assert gain_per_second([]) > 0


def test_an_autotuner_must_be_able_to_win():
    assert tuning_pays([]), "nothing is known"
    assert tuning_pays([screened(PLAIN, 1.2), screened(COMPILED, 1.3)])
    assert not tuning_pays([screened(PLAIN, 1.2), screened(COMPILED, 1.3), screened(TUNED, 1.2)]), "one was tried"
    assert not tuning_pays([screened(PLAIN, 1.5), screened(COMPILED, 1.3)]), "torch.compile is behind"
    assert tuning_pays([screened(PLAIN, 2.0), screened(TRITON, 1.3)]), "nothing tells how torch.compile does"
    assert not tuning_pays([screened(COMPILED, 0.5)]), "the reference itself is ahead"
    at_the_roofline = screened(COMPILED, 2.0, candidate_us=10.5, least_us=10.0)
    assert not tuning_pays([at_the_roofline])


def test_torch_compile_is_not_asked_again_where_it_was_slow_and_far_behind():
    slow, quick = ({"elapsed_s": seconds} for seconds in (20.0, 19.0))
    assert compiling_pays([screened(PLAIN, 2.0)]), "nothing tells how torch.compile does"
    assert compiling_pays([screened(PLAIN, 2.0), screened(COMPILED, 1.0, **quick)])
    assert compiling_pays([screened(PLAIN, 2.0), screened(COMPILED, 1.4, **slow)])
    assert not compiling_pays([screened(PLAIN, 2.0), screened(COMPILED, 1.3, **slow)])
    assert not compiling_pays([screened(COMPILED, 0.6, **slow)]), "the reference itself is ahead"
    waiting = [Candidate(source=text) for text in (TUNED, COMPILED + "# another")]
    behind = [screened(PLAIN, 2.0), screened(COMPILED, 1.3, **slow)]
    assert next_of(waiting, [], behind[:1], {*Compiles}) is waiting[1]
    assert next_of(waiting, [], behind, {*Compiles}) is None
    assert next_of([*waiting, Candidate(source=TRITON)], [], behind, {*Compiles}).source == TRITON


def estimates(*speedups, **changes):
    return [
        screened_of(TASK, Candidate(source=f"# {number}"), correct=True, estimate=speedup, spread=0.01, **changes)
        for number, speedup in enumerate(speedups)
    ]


def verdicts(screened, make):
    return {one.candidate_sha256: make(source=one.source) for one in screened}


def test_the_judge_takes_what_looks_too_good_and_then_the_best():
    found = estimates(1.2, 9.0, 1.3, 0.8, 1.5, 1.4)
    assert next_to_judge(found, {}, 2) == found[1]
    assert too_good(ranked(found)) == {found[1].candidate_sha256}
    beyond = estimates(1.2, candidate_us=1.0, least_us=2.0)
    assert too_good(beyond) == {beyond[0].candidate_sha256}


def test_a_wide_interval_of_what_is_no_improvement_keeps_nobody_out():
    found = estimates(1.8, 1.4)
    wide = accepted(1.2, found[0].source).model_copy(update={"speedup_low": 0.3, "speedup_high": 26.0})
    assert not wide.is_improvement
    judged = {found[0].candidate_sha256: wide}
    assert next_to_judge(found, judged, 2) == found[1]
    assert next_to_judge(estimates(1.8, 1.25), judged, 2) is None, "less than 5 % above the speedup"
    good = wide.model_copy(update={"speedup_low": 1.15})
    assert good.is_improvement
    assert next_to_judge(found, {found[0].candidate_sha256: good}, 2) is None


def test_where_what_looked_too_good_is_good_the_others_have_lost():
    found = estimates(1.2, 9.0, 1.3)
    honest = {found[1].candidate_sha256: accepted(8.0, found[1].source)}
    assert next_to_judge(found, honest, 2) is None
    cheat = {found[1].candidate_sha256: rejected(source=found[1].source)}
    assert next_to_judge(found, cheat, 2) == found[2]


def test_the_next_best_is_judged_only_where_its_estimate_is_clearly_above_what_was_measured():
    found = estimates(1.6, 1.5, 1.4, 1.3)
    measured = accepted(1.38, found[0].source, speedup_high=1.42)
    assert next_to_judge(found, {found[0].candidate_sha256: measured}, 3) == found[1]
    wide = accepted(1.38, found[0].source, speedup_high=1.44)
    assert next_to_judge(found, {found[0].candidate_sha256: wide}, 3) is None


@pytest.mark.parametrize(("text", "first"), [("torch.cuda.CUDAGraph()", 1), ("torch.compile(f)", 0)])
def test_a_graph_is_not_put_first_for_a_host_that_was_busy_while_it_was_timed(text, first):
    """The reference took twice its usual time beside the first candidate, whose estimate that raised if it is a graph."""
    looks = [(2.0, 200.0), (1.75, 100.0), (1.4, 100.0)]
    found = [
        screened_of(
            TASK, Candidate(source=f"{text}  # {number}"), correct=True, estimate=estimate, reference_us=reference_us
        )
        for number, (estimate, reference_us) in enumerate(looks)
    ]
    assert ranked(found)[0] == next_to_judge(found, {}, 1) == found[first]
    measured = {found[first].candidate_sha256: accepted(1.4, found[first].source, speedup_high=1.42)}
    assert next_to_judge(found, measured, 3) == (None if first else found[1])


def test_what_the_judge_rejects_is_replaced_until_it_has_seen_enough():
    found = estimates(*[1.1 + number / 100 for number in range(20)])
    best = found[::-1]
    assert next_to_judge(found, verdicts(best[:2], rejected), 2) == best[2]
    assert next_to_judge(found, {one.candidate_sha256: accepted(1.0, one.source) for one in best[:2]}, 2) is None
    assert next_to_judge(found, verdicts(best[:6], rejected), 2) is None


def test_after_two_that_fail_alike_comes_what_has_least_in_common_with_them():
    names = [("split", "fuse", "graph"), ("split", "graph"), ("split", "fuse"), ("graph",), ("compile",)]
    found = [
        one.model_copy(update={"techniques": techniques, "policy": "builtin"})
        for one, techniques in zip(estimates(2.0, 1.9, 1.8, 1.7, 1.6), names, strict=True)
    ]

    def failed(count, detail="error 1e-2"):
        def verdict(look):
            return rejected(source=look.source, techniques=look.techniques, policy="builtin", detail=detail)

        return {look.candidate_sha256: verdict(look) for look in (*found[:2], found[4])[:count]}

    assert next_to_judge(found, failed(1), 3) == found[1]
    assert next_to_judge(found, failed(2), 3) == found[4]
    assert next_to_judge(found, failed(3), 3) is None
    mixed = failed(2) | {name: one.model_copy(update={"detail": "slow"}) for name, one in failed(1).items()}
    assert next_to_judge(found, mixed, 3) == found[2]


def test_one_clear_measurement_of_what_screening_put_first_stands():
    found = estimates(1.5, 1.4)
    assert is_top_ranked(found[0].candidate_sha256, found, {})
    assert not is_top_ranked(found[1].candidate_sha256, found, {})
    assert is_top_ranked(found[1].candidate_sha256, found, verdicts(found[:1], rejected))
    assert not is_top_ranked(found[1].candidate_sha256, found, verdicts(found[:1], accepted))
    doubted, small = estimates(9.0, 1.5), estimates(1.09)
    assert not any(is_top_ranked(one.candidate_sha256, several, {}) for several in (doubted, small) for one in several)
    own = [one.model_copy(update={"policy": "builtin"}) for one in doubted]
    assert [is_top_ranked(one.candidate_sha256, own, {}) for one in own] == [True, False]
    beyond = [one.model_copy(update={"candidate_us": 1.0, "least_us": 2.0}) for one in own]
    assert not is_top_ranked(beyond[0].candidate_sha256, beyond, {})
    assert needs_no_rerun(accepted(1.5, found[0].source))
    assert not needs_no_rerun(accepted(1.15, found[0].source))


def test_a_winner_is_measured_again_unless_something_better_stands():
    winner, named = accepted(1.5, "# a"), accepted(1.6, "# b")
    judged, stands = {winner.candidate_sha256: winner}, {named.candidate_sha256: named}
    assert next_to_confirm(judged, {}) == winner
    assert next_to_confirm(judged, stands) is None
    assert next_to_confirm({named.candidate_sha256: named}, {winner.candidate_sha256: winner}) == named


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_a_graph_is_known_by_its_technique_where_the_text_was_not_published(name):
    parts, _ = WRAPPERS[name]
    task = Task(id="t", source="#")
    published = screened_of(task, Candidate(source="", techniques=(name,)), correct=True)
    assert published.replays_graph == any("CUDAGraph(" in part for part in parts)


@pytest.mark.parametrize(
    ("speedups", "said"),
    [([None], "1 accepted, not timed"), ([None, 1.5, 1.2], "3 judged, none an improvement: at best 1.50 from 0.90")],
)
def test_of_accepted_candidates_that_are_no_improvement_the_fastest_timed_one_is_told(speedups, said):
    judged = [
        accepted(speedup or 1.0, f"# {number}", speedup=speedup, speedup_low=None if speedup is None else 0.9)
        for number, speedup in enumerate(speedups)
    ]
    assert TaskRecords.of(judged).status(3) == (TaskStatus.NONE, said)


def test_a_task_is_settled_where_more_proposals_would_hardly_help():
    records = TaskRecords()
    assert not records.is_settled, "a first look is owed to every task"
    records.looked_at = SCHEDULE.first_look
    records.add(screened("#", 1.5, candidate_us=10.0, least_us=2.0))
    assert (records.is_settled, headroom(records.screened)) == (False, 5.0)
    records.looked_at, records.before = 2 * SCHEDULE.first_look, 1.49
    assert records.is_settled, "the last proposals brought nothing"
    records.before = 1.2
    assert not records.is_settled
    records.add(screened("#", 1.5, candidate_us=2.1, least_us=2.0))
    assert records.is_settled, "it is at the roofline"


def test_a_baseline_that_is_no_faster_than_eager_is_not_the_best():
    found = [
        accepted(gain, f"# {name}", policy="baseline", techniques=(name,))
        for name, gain in (("compile", 0.9), ("cudnn", 1.0), ("cudagraph", 2.0))
    ]
    assert TaskRecords.of(found).best_baseline is None
    faster = accepted(1.1, "# c", policy="baseline", techniques=("channels-last",))
    assert TaskRecords.of([*found, faster]).best_baseline == ("channels-last", 1.1)


def test_finalists_are_the_next_best_that_are_judged_or_this_packages_own():
    def look(name, estimate, policy="builtin"):
        return screened_of(TASK, Candidate(source=name, policy=policy), correct=True, estimate=estimate, spread=0.0)

    records = TaskRecords.of([look("first", 2.0), look("own", 1.9), look("others", 1.95, "api"), look("judged", 1.2, "api")])
    for found in (accepted(1.85, "judged"), rejected(source="wrong")):
        records.add(found)
    records.add(look("far", 1.5))
    beside = records.finalists(Candidate(source="first"), 3)
    assert [one.source for one in beside] == ["own", "judged"]
    assert [one.source for one in records.finalists(Candidate(source="first"), 2)] == ["own"]
    assert [one.source for one in records.finalists(Candidate(source="far"), 9)] == ["first", "own", "judged"]


def test_of_confirmed_ones_that_which_was_slower_than_another_beside_it_is_not_the_best():
    """Its own interval begins higher: its processes were quieter."""
    stock = accepted(1.9, "stock", confirms=True, policy="builtin", techniques=("cuda-graph",))
    slower = {"versus": {"cudagraph-fresh": (0.95, 0.93, 0.97), "compile": (0.5, 0.5, 0.5)}, "speedup_low": 1.95}
    winner = accepted(2.0, "own", confirms=True, **slower)
    assert confirmed_best([winner, stock]).source == "stock"
    assert confirmed_best([winner]).source == "own", "a baseline that is no drop-in is not there to take its place"
    level = winner.model_copy(update={"versus": {"cudagraph-fresh": (1.01, 0.9, 1.1)}})
    assert confirmed_best([level, stock]).source == "own"
    both = stock.model_copy(update={"versus": {winner.candidate_sha256: (0.99, 0.9, 1.1)}})
    assert confirmed_best([winner, both]).source == "own", "each was slower once"


@pytest.mark.parametrize(
    ("ratio", "needed"),
    [
        ((0.9, 0.8, 1.0), True),
        ((0.99, 0.97, 1.01), False),
        ((0.99, 0.985, 0.995), True),
        ((1.1, 1.0, 1.2), False),
        (None, False),
    ],
)
def test_stock_is_judged_as_a_candidate_where_the_winner_is_behind_it_in_its_own_processes(ratio, needed):
    stock = accepted(2.0, "#", policy="baseline", techniques=("compile",))
    winner = accepted(2.0, "own", confirms=True, versus={} if ratio is None else {"compile": ratio})
    assert TaskRecords.of([stock, winner]).needs_fallback is needed
    assert TaskRecords.of([stock]).needs_fallback
    itself = winner.model_copy(update={"policy": "builtin", "techniques": ("compile",)})
    assert not TaskRecords.of([stock, itself]).needs_fallback
