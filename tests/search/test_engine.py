"""The engine behind `optimize`, `bench` and a suite's search, on a scripted executor and a simulated clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelwright.errors import DeviceError, InfrastructureError, PolicyError
from kernelwright.execution.work import Baselines, Evaluate, Screen
from kernelwright.judge import Settings
from kernelwright.records import Candidate, RunDirectory, TimingBlock
from kernelwright.records.decisions import SCHEDULE, TUNED_SCHEDULE, Effort, MeasurementPlan, TaskRecords, TaskStatus
from kernelwright.records.screened import Compiles, screened_of
from kernelwright.rewrites.wrappers import baseline_source
from kernelwright.search.engine import (
    Engine,
    SearchPlan,
    SearchState,
    TaskState,
    WorkStep,
    baseline_of,
    file_records,
    judgement,
    next_step,
    settings_for,
)
from kernelwright.search.optimize import optimize
from kernelwright.search.suite import search_suite
from kernelwright.tasks.entries import Suite, SuiteEntry
from tests.quick import exhaustive_but
from tests.samples import accepted, rejected
from tests.search.fakes import TAKEN_BYTES, FakeExecutor, Proposal, Scripted, task_named

LIES = Proposal("lies", 1.5, is_rejected=True)
"""A candidate whose estimate the judge does not confirm."""
GOOD, FAIR, SLOW = Proposal("good", 1.4), Proposal("fair", 1.2), Proposal("slow", 0.9)
TUNED = Proposal("tuned", 1.3, compiler=Compiles.VARIANTS)
TWO = {"one": [LIES, FAIR, SLOW, GOOD], "two": [LIES, FAIR, SLOW, GOOD]}
ONE = {"one": [LIES, FAIR, SLOW, GOOD]}


def suite_of(script):
    return Suite("tiny", tuple(SuiteEntry(task_named(name)) for name in script))


def search(out, executor, **given):
    policy = Scripted(executor.script, given.pop("look", "screened"))
    given = {"budget": 4, "judged": 1, "device": "cpu", "settings": Settings()} | given
    return search_suite(suite_of(executor.script), policy=policy, out=out, executor=executor, clock=executor.clock, **given)


def run_engine(out, executor, plan=None, listen=lambda event: None, baselines=(), **given):
    """Run the engine itself, as on a GPU unless `device` says otherwise."""
    given = {"settings": Settings(), "device": "cuda:0", "budget": 4, "judged": 1} | given
    look = given.pop("look", "screened")
    plan = SearchPlan(policy=Scripted(executor.script, look), **given)
    tasks = [TaskState(task_named(name), TaskRecords(schedule=plan.schedule), look) for name in executor.script]
    run = RunDirectory(out)
    file_records(tasks, run)
    for task in tasks:
        task.stock = tuple(baseline_of(task.task, name) for name in baselines)
        task.baselines = () if task.records.baselines else task.stock
    engine = Engine(run, SearchState(plan, tasks), executor, listen, executor.clock)
    engine.run()
    return engine


def outcomes(result):
    return {line["task"]: line["outcome"] for line in result.tasks}


# --- what is handed out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compiled", "handed_out"), [(1.1, True), (1.38, False)])
def test_a_drop_in_is_handed_out_only_where_it_is_certainly_ahead_of_the_best_baseline(tmp_path, compiled, handed_out):
    result = search(tmp_path, FakeExecutor(TWO, lambda task: compiled), baselines=["compile"])
    found = {line["task"]: (line["outcome"], line["best_baseline"], line["ahead"]) for line in result.tasks}
    assert found == {name: ("winner", "compile", handed_out) for name in TWO}
    files = sorted(path.name for path in (tmp_path / "optimized").glob("*"))
    assert files == (["one.py", "two.py"] if handed_out else [])
    if handed_out:
        header = (tmp_path / "optimized" / "one.py").read_text()
        assert "Baselines over eager: compile 1.100x. Over the best of them, compile, this is 1.273x" in header
        assert "from one import ModelNew" in header
    text = (tmp_path / "table.md").read_text()
    assert f"on {2 * handed_out} of 2 tasks" in text
    assert f"| compile {compiled:.2f}x | 1.40x (1.33 to 1.47) | {1.4 / compiled:.2f}x (" in text


def test_without_the_baselines_that_were_asked_for_nothing_is_handed_out(tmp_path):
    executor = FakeExecutor(TWO, lambda task: InfrastructureError("lost"))
    result = search(tmp_path, executor, baselines=["compile"])
    assert [(one["speedup"], one["ahead"], one["baselines_measured"]) for one in result.tasks] == [(1.4, False, False)] * 2
    assert sorted(result.errors) == ["one compile", "two compile"]
    assert not (tmp_path / "optimized").exists()
    assert "| not measured yet | 1.40x (1.33 to 1.47) | - | no |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (
            1.1,
            "good: 1.400x (1.330 to 1.470) over eager, 1.273x (1.209 to 1.336) over the best stock configuration, compile",
        ),
        (1.6, "compile, a stock configuration: 1.600x (1.520 to 1.680) over eager; nothing else is faster"),
        (None, "good: 1.400x (1.330 to 1.470) over eager"),
    ],
)
def test_a_search_of_one_task_hands_out_the_fastest_and_says_what_it_is(tmp_path, gain, said):
    executor = FakeExecutor({"one": [*ONE["one"], Proposal("compile", None, gain)]}, lambda task: gain)
    wanted = ["eager"] if gain is None else ["compile"]
    task = task_named("one")
    found = optimize(
        task, policy=Scripted(ONE), device="cpu", budget=4, judged=1, out=tmp_path, evaluator=executor, baselines=wanted
    )
    assert str(found) == said
    assert said in (tmp_path / "optimized.py").read_text().replace("\n#  ", "")
    assert (found.evaluations, found.screened) == (2 + (gain == 1.6), 4)
    assert (found.beside is None) == (gain is None)
    assert executor.closed == [], "the caller's stays open"


def test_where_nothing_is_confirmed_what_came_nearest_is_written(tmp_path):
    near = Proposal("near", 1.4, 1.3, verdict=missed_fields(0.92))
    found = optimize(
        task_named("one"), policy=Scripted({"one": [near]}), device="cpu", budget=1, judged=1, out=tmp_path,
        evaluator=FakeExecutor({"one": [near]}),
    )  # fmt: skip
    assert (found.best, found.drop_in, found.near_miss.techniques) == (None, None, ("near",))
    assert (tmp_path / "near_miss.py").read_text() == found.near_miss.source


# --- the judge ---------------------------------------------------------------------------------------------------------


def test_judges_and_baselines_are_told_how_much_memory_a_task_may_take(tmp_path):
    executor = FakeExecutor({"one": [LIES], "two": [GOOD, FAIR]})
    search(tmp_path, executor, baselines=["compile"])
    asked = [one for one in executor.submitted if not isinstance(one, Screen)]
    assert [type(one) for one in asked] == [Evaluate, Evaluate, Baselines]
    assert all(one.memory_bytes > TAKEN_BYTES for one in asked)
    _, final, alone = (one.memory_bytes for one in asked)
    assert final > 1.2 * alone, "a stock configuration is a fourth side"


@pytest.mark.parametrize(("rounds", "ahead"), [(2, True), (1, False)])
def test_on_a_gpu_the_judge_begins_while_the_last_tasks_are_screened(tmp_path, rounds, ahead):
    slots = {Screen: rounds, Evaluate: 1, Baselines: 1}
    seconds = {"one": 1.0, "two": 10.0}
    executor = FakeExecutor(TWO, slots=slots, seconds=lambda work: seconds[work.task.id])
    heard = []
    run_engine(tmp_path, executor, listen=heard.append)
    assert set(executor.judged) == {(task, name) for task in TWO for name in ("lies", "good")}
    kinds = [type(event.outcome).__name__ for event in heard if event.outcome is not None]
    assert (kinds.index("Evaluation") < 8) == ahead


@pytest.mark.parametrize(("screening", "waits", "judging"), [(1, 0, 7), (3, 0, 5), (6, 0, 4), (0, 0, 8), (3, 2, 7)])
def test_while_few_tasks_are_screened_more_judges_work(screening, waits, judging):
    script = {str(number): [Proposal("only", 1.5)] for number in range(16)}
    executor = FakeExecutor(script, slots={Screen: 16, Evaluate: 8})
    executor.waiting = waits
    tasks = [TaskState(task_named(name), look="screened", is_stopped=True) for name in script]
    for number, task in enumerate(tasks):
        look = screened_of(task.task, script["0"][0].candidate(task.task), correct=True, estimate=1.5, spread=0.0)
        task.records.add(look)
        task.running += [WorkStep(task, Screen(task.task))] if number < screening else []
    state = SearchState(SearchPlan(settings=Settings(), judged=1), tasks, slots=executor.slots, judging_begins=True)
    for _ in range(20):
        state.free = {Evaluate: executor.free(Evaluate)}
        if (step := next_step(state)) is None:
            break
        executor.submit(step.work)
        step.task.running.append(step)
    assert len(executor.judged) == judging


def test_a_final_has_every_stock_configuration_and_the_next_best_in_its_processes(tmp_path):
    script = {"one": [Proposal("first", 1.5), Proposal("second", 1.45), Proposal("far", 1.3), Proposal("fourth", 1.42)]}
    gains = {"compile": 1.2, "cudagraph": 3.0, "cudnn": 0.9}
    executor = FakeExecutor(script, lambda task: gains)
    engine = run_engine(tmp_path, executor, baselines=[*gains], judged=3)
    (final,) = executor.judgements
    assert [one.techniques[0] for one in final.alongside] == [*gains, "second", "fourth"]
    assert executor.rotations == []
    records = engine.state.tasks[0].records
    assert {one.techniques[0]: round(one.speedup, 6) for one in records.baselines} == gains
    assert records.best_baseline == ("compile", pytest.approx(1.2)), "the outputs of the other are overwritten"
    assert records.winner.versus["compile"][0] == pytest.approx(1.25)
    assert run_engine(tmp_path, executor, baselines=[*gains], judged=3).state.tasks[0].baselines == ()
    assert len(executor.judgements) == 1, "neither second nor fourth was faster beside it"


def test_a_finalist_that_is_stock_is_timed_as_stock():
    task = TaskState(task_named("one"), look="screened")
    for proposal in (Proposal("first", 1.5), Proposal("compile-max-autotune", 1.45)):
        look = screened_of(task.task, proposal.candidate(task.task), correct=True, estimate=proposal.estimate, spread=0.0)
        task.records.add(look)
    plan = task.records.measure(Proposal("first").candidate(task.task))
    state = SearchState(SearchPlan(settings=Settings()), [task])
    assert [one.techniques[0] for one in judgement(task, plan, state).work.alongside] == ["compile-max-autotune"]
    task.stock = (baseline_of(task.task, "compile"),)
    assert [one.name_alongside for one in judgement(task, plan, state).work.alongside] == ["compile", "max-autotune-fresh"]


def test_what_proves_faster_in_a_final_has_one_of_its_own(tmp_path):
    script = {"one": [Proposal("first", 1.5, 1.3), Proposal("second", 1.45, 1.6), Proposal("third", 1.42, 1.35)]}
    executor = FakeExecutor(script, lambda task: 1.1)
    (task,) = run_engine(tmp_path, executor, baselines=["compile"], judged=3).state.tasks
    assert executor.judged == [("one", "first"), ("one", "second")]
    alongside = [[one.techniques[0] for one in work.alongside] for work in executor.judgements]
    assert alongside == [["compile", "second", "third"], ["compile", "third"]]
    assert (task.records.winner.techniques, task.records.winner.speedup) == (("second",), 1.6)


def test_where_candidates_fail_alike_the_judge_stops_after_three_and_says_why(tmp_path):
    def wrong(name, estimate):
        return Proposal(name, estimate, is_rejected=True, verdict={"detail": f"error {estimate} on own-other-mode"})

    script = {"one": [wrong(f"graph{number}", 2.0 - number / 10) for number in range(5)]}
    said = []
    (task,) = run_engine(
        tmp_path, FakeExecutor(script), judged=3, budget=5, listen=lambda event: said.append(event.message)
    ).state.tasks
    assert len(task.records.judged) == 3
    why = "all 3 that were judged fail alike, so no more are: wrong-output: error 1.8 on own-other-mode"
    assert task.records.status(3) == (TaskStatus.NONE, why)
    assert said.count(why) == 1


def test_what_only_seems_faster_in_a_final_leaves_the_winner_alone(tmp_path):
    """Its clock is believed there, and no longer where it is the candidate."""
    liar = Proposal("liar", 1.45, 9.0, is_rejected=True)
    executor = FakeExecutor({"one": [Proposal("first", 1.5), liar]})
    (task,) = run_engine(tmp_path, executor, judged=2).state.tasks
    assert executor.judged == [("one", "first"), ("one", "liar")]
    assert (task.records.winner.techniques, task.records.winner.speedup) == (("first",), 1.5)


def test_stock_that_was_faster_than_the_winner_in_the_same_processes_is_handed_out(tmp_path):
    """Its own measurement has a lower end below the winner's, which a busy machine may well give."""
    wide = {"speedup_low": 1.2, "speedup_high": 2.0}
    script = {"one": [Proposal("first", 1.4), Proposal("cuda-graph", None, 1.6, verdict=wide)]}
    executor = FakeExecutor(script, lambda task: 1.6)
    (task,) = run_engine(tmp_path, executor, baselines=["cudagraph-fresh"]).state.tasks
    assert [[one.techniques[0] for one in work.alongside] for work in executor.judgements] == [
        ["cudagraph-fresh"],
        ["first"],
    ]
    assert task.records.best.techniques == ("cuda-graph",)


def baseline(task, name, gain, **changes):
    source = baseline_source(task, name)
    common = {"task": task.id, "task_sha256": task.sha256, "policy": "baseline", "techniques": (name,)}
    return accepted(gain, source, **(common | changes))


def test_a_first_winner_of_a_task_comes_before_a_better_one_of_another(tmp_path):
    schedule = replace(SCHEDULE, worth_judging=0.0)
    executor = FakeExecutor(TWO)
    run_engine(tmp_path, executor, judged=3, schedule=schedule)
    firsts = [(task, name) for name in ("lies", "good") for task in TWO]
    assert executor.judged[:4] == sorted(firsts, key=firsts.index) or set(executor.judged[:4]) == set(firsts)
    assert executor.judged[4:] == [("one", "fair"), ("two", "fair")]


def test_what_is_not_urgent_makes_room_for_a_task_that_must_be_screened_alone():
    won, open_ = (TaskState(task_named(name), look="screened", is_stopped=True) for name in ("won", "open"))
    screening = TaskState(task_named("large"), look="screened", is_stopped=True)
    screening.running.append(WorkStep(screening, Screen(screening.task)))
    for task in (won, open_):
        for proposal in (GOOD, FAIR):
            task.records.add(screened_of(task.task, proposal.candidate(task.task), correct=True, estimate=proposal.estimate))
    done, lost = (TaskState(task_named(name), look="screened", is_stopped=True) for name in ("done", "lost"))
    for task in (won, done):
        task.records.add(accepted(1.1, "# won", task=task.task.id, task_sha256=task.task.sha256, confirms=True))
    for task in (done, lost):
        task.baselines = (baseline_of(task.task, "compile"),)
    state = SearchState(SearchPlan(settings=Settings(), device="cuda:0", judged=2), [won, done, screening])
    state.slots = {Evaluate: 4, Baselines: 4}
    state.judging_begins = state.wants_device = True

    def taken(kind):
        state.free = {kind: 4}
        step = next_step(state)
        return step and step.task.task.id

    assert taken(Evaluate) is None, "it has a winner"
    assert taken(Baselines) == "done"
    state.tasks = [open_, lost, screening]
    assert taken(Evaluate) == "open", "the first winner of a task does not wait"
    assert taken(Baselines) is None
    state.wants_device = False
    assert (taken(Baselines), taken(Evaluate)) == ("lost", "open")


@pytest.mark.parametrize(("verdict", "wins"), [(1.9, True), (1.05, False)])
def test_a_baseline_that_is_faster_than_the_winner_is_judged_last_and_once(tmp_path, verdict, wins):
    script = {name: [Proposal("good", 1.5), Proposal("compile", None, verdict)] for name in ("one", "two")}
    gains = {"one": {"compile": 1.9, "cudnn": 1.2}, "two": {"compile": 1.3, "cudnn": 1.2}}
    executor = FakeExecutor(script, gains, {Screen: 1, Evaluate: 1, Baselines: 1})
    for _ in range(2):
        engine = run_engine(tmp_path, executor, baselines=["compile", "cudnn"])
    assert executor.judged == [("one", "good"), ("two", "good"), ("one", "compile")]
    best = [task.records.best for task in engine.state.tasks]
    first = (1.9, ("compile",)) if wins else (1.5, ("good",))
    assert [(one.speedup, one.techniques) for one in best] == [first, (1.5, ("good",))]
    assert all(one.policy == "builtin" for one in best)


def test_baselines_that_cannot_be_measured_in_a_final_are_asked_for_once_more(tmp_path):
    executor = FakeExecutor(ONE, lambda task: InfrastructureError("lost"), {Screen: 1, Evaluate: 1, Baselines: 1})
    engine = run_engine(tmp_path, executor, baselines=["compile"])
    assert [type(one) for one in executor.submitted] == [Screen, Evaluate, Evaluate, Baselines]
    assert list(engine.errors) == ["one compile"]


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_baselines_are_measured_without_a_candidate_only_where_none_has_a_final(tmp_path, device):
    executor = FakeExecutor({"one": [LIES], "two": [LIES, GOOD]}, lambda task: 0.9)
    run_engine(tmp_path, executor, baselines=["compile"], device=device)
    assert executor.rotations == ["one"]
    if device == "cpu":
        assert isinstance(executor.submitted[-1], Baselines)


def test_baselines_of_winners_are_measured_first_then_those_of_the_most_promising_tasks(tmp_path):
    """Where the minutes end before all are measured, a winner without baselines would count for nothing."""
    estimates = {"dull": 0.9, "late": 1.1, "fair": 1.4, "fast": 3.0, "won": 1.2}
    tasks = []
    for name, estimate in estimates.items():
        task = TaskState(task_named(name), look="screened", is_stopped=True)
        task.baselines = (baseline_of(task.task, "compile"),)
        task.records.add(screened_of(task.task, Candidate(source=f"# {name}"), correct=True, estimate=estimate, spread=0.0))
        task.records.add(rejected(source=f"# {name}", task=name, task_sha256=task.task.sha256))
        tasks.append(task)

    def win(task):
        task.records.add(accepted(1.3, "# w", task=task.task.id, task_sha256=task.task.sha256, confirms=True))

    win(tasks[4])
    state = SearchState(SearchPlan(settings=Settings(), device="cuda:0"), tasks, free={Baselines: 9}, judging_begins=True)
    order = []
    while (step := next_step(state)) is not None:
        order.append(step.task.task.id)
        step.task.baselines = ()
        if order[-1] == "fast":
            win(tasks[1])
    assert order == ["won", "fast", "late", "fair", "dull"]


def missed_fields(low=0.97):
    """Fields of a measurement of six processes that comes near to a gain."""
    blocks = [
        TimingBlock(process=number, reference_us=(100.0,), candidate_us=(75.0,), null_us=(100.0,)) for number in range(6)
    ]
    return {"speedup_low": low, "blocks": tuple(blocks)}


def missed(name="1.5", low=0.97, **changes):
    return accepted(1.3, f"# {name}", techniques=(name,), **(missed_fields(low) | changes))


@pytest.mark.parametrize("holds", [True, False])
def test_a_near_miss_is_measured_once_more_by_as_many_series_as_settle_it(tmp_path, holds):
    class Settles(FakeExecutor):
        def verdict(self, work):
            found = super().verdict(work)
            again = work.settings is not None and work.settings.audits != 8
            return found.model_copy(update={"speedup_low": 1.2 if holds else 0.99}) if again else found

    near = Proposal("near", 1.5, 1.3, verdict=missed_fields())
    executor = Settles({"one": [near, FAIR], "two": [GOOD]})
    result = search(tmp_path, executor, judged=3)
    needed = missed().processes_to_settle
    assert 6 < needed <= SCHEDULE.settling_processes
    settling = [one for one in executor.judgements if one.settings.audits != 8]
    assert [(one.task.id, one.settings.processes_min, one.settings.audits) for one in settling] == [
        ("one", max(6, -(-needed // 2)), 16)
    ]
    assert outcomes(result) == {"one": "winner" if holds else "no-winner", "two": "winner"}
    executor.submitted.clear()
    search(tmp_path, executor, judged=3)
    assert executor.judged == [], "whatever it was, it is settled"


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ([missed()], "1.5"),
        ([missed(low=0.95), missed("1.4", 0.98)], "1.4"),
        ([missed(low=0.91, noise_floor=0.25)], None),
        ([missed(low=0.5)], None),
        ([missed(), missed(low=0.96, confirms=True), missed("1.4", 0.98)], None),
        ([missed(), missed("1.4", 1.2, confirms=True)], None),
    ],
    ids=["near", "the nearest", "too many processes", "far", "one was settled", "a winner"],
)
def test_which_near_miss_is_settled(found, named):
    near = TaskRecords.of(found).near_miss_to_settle
    assert (near and near.techniques[0]) == named


def measured(executor, task="one"):
    return [
        (name, one.settings.until_certain)
        for one in executor.judgements
        if one.task.id == task
        for name in one.candidate.techniques
    ]


@pytest.mark.parametrize(
    ("changes", "minutes", "wanted"),
    [
        ({}, None, [("lies", False), ("good", False)]),
        ({"clear_low": 2.0}, None, [("lies", True), ("good", True), ("good", False)]),
        ({}, 5, [("lies", True), ("good", True)]),
        ({"clear_low": 1.36}, 5, [("lies", True), ("good", True), ("good", False)]),
    ],
    ids=["top-ranked in full", "the first of two ends early", "a clear gain with minutes", "no clear gain with minutes"],
)
def test_how_long_a_candidate_is_measured(tmp_path, changes, minutes, wanted):
    schedule = replace(SCHEDULE, **changes)
    executor = FakeExecutor(TWO)
    assert outcomes(search(tmp_path, executor, minutes=minutes, schedule=schedule)) == dict.fromkeys(TWO, "winner")
    assert measured(executor) == wanted


@pytest.mark.parametrize(("least", "most", "early"), [(3, 6, 4), (2, 3, 3), (5, 6, 5), (1, 1, 1)])
def test_what_stands_early_has_four_process_triples_where_the_settings_allow_it(least, most, early):
    plan = MeasurementPlan(Candidate(source="#"), Effort.EARLY)
    found = settings_for(plan, Settings(processes_min=least, processes_max=most))
    assert (found.processes_min, found.processes_max, found.until_certain) == (early, most, True)


# --- screening ---------------------------------------------------------------------------------------------------------


def compiled(speedup):
    return Proposal("compiled", speedup, compiler=Compiles.INDUCTOR)


@pytest.mark.parametrize(("speedup", "best"), [(2.0, "compiled"), (1.3, "good")])
def test_the_judge_does_not_wait_for_torch_compile_and_takes_it_where_it_is_better(tmp_path, speedup, best):
    script = {"one": [GOOD, compiled(speedup)]}
    executor = FakeExecutor(script, seconds=lambda work: 10.0)
    heard = []
    engine = run_engine(tmp_path, executor, listen=heard.append)
    assert executor.judged == [("one", "good")] + ([("one", "compiled")] if best == "compiled" else [])
    began = next(place for place, event in enumerate(heard) if event.message == "judging good")
    assert sum(event.outcome is not None for event in heard[:began]) == 1, "one is still being screened"
    assert engine.state.tasks[0].records.best.techniques == (best,)


@pytest.mark.parametrize(("speedup", "ended"), [(1.4, True), (1.0, False)])
def test_an_autotuner_is_ended_once_something_else_is_an_improvement(tmp_path, speedup, ended):
    script = {"one": [replace(GOOD, speedup=speedup), TUNED]}
    executor = FakeExecutor(script, seconds=lambda work: 10.0 if isinstance(work, Screen) else 1.0)
    run_engine(tmp_path, executor)
    assert bool(executor.cancelled) == ended
    assert len(list(RunDirectory(tmp_path).screened())) == 2 - ended


def test_with_minutes_autotuners_come_last_of_all_tasks(tmp_path):
    schedule = replace(SCHEDULE, first_look=2)
    script = {name: [LIES, FAIR, SLOW, TUNED] for name in ("one", "two")}
    executor = FakeExecutor(script)
    search(tmp_path, executor, budget=6, minutes=5.0, schedule=schedule)
    rounds = [(2, False), (4, False), (6, True)]
    assert executor.rounds == [(name, *each) for each in rounds for name in ("one", "two")]
    assert len(list(RunDirectory(tmp_path).screened())) == 8


def test_a_task_has_its_next_round_while_another_is_in_its_first(tmp_path):
    schedule = replace(SCHEDULE, first_look=2)
    script = {name: [LIES, FAIR, SLOW, TUNED] for name in ("one", "two")}
    slots = {Screen: 2, Evaluate: 1, Baselines: 1}
    executor = FakeExecutor(script, slots=slots, seconds=lambda work: 50.0 if work.task.id == "one" else 1.0)
    search(tmp_path, executor, budget=6, minutes=50.0, schedule=schedule)
    assert executor.rounds[:4] == [("one", 2, False), ("two", 2, False), ("two", 4, False), ("two", 6, True)]


def test_past_screenings_half_only_tasks_without_a_look_are_screened():
    """Three tasks of eleven were never looked at while the judge took further candidates, and then rested."""
    one, two = (TaskState(task_named(name), look="screened") for name in ("one", "two"))
    seen = screened_of(one.task, Candidate(source="# seen"), correct=True, estimate=2.0, candidate_us=9.0, least_us=1.0)
    one.records.add(seen)
    plan = SearchPlan(settings=Settings(), budget=6, judged=1, limit_s=600.0)
    state = SearchState(plan, [one, two], free={Screen: 2})

    def tasks():
        found = []
        while (step := next_step(state)) is not None:
            step.task.running.append(step)
            found.append(step.task.task.id)
        for task in state.tasks:
            task.running.clear()
        return found

    assert sorted(tasks()) == ["one", "two"]
    state.elapsed_s = 360.0
    assert tasks() == ["two"], "the other one has had its look"
    state.elapsed_s = 480.0
    assert tasks() == [], "three quarters of the time are over"
    state.elapsed_s = 360.0
    two.records.add(screened_of(two.task, Candidate(source="# seen too"), correct=True, estimate=2.0))
    assert tasks() == []


@pytest.mark.parametrize(("estimate", "outcome"), [(0.9, "screened-only"), (1.4, "winner")])
def test_a_task_whose_first_look_was_cut_short_is_not_decided_without_a_winner(tmp_path, estimate, outcome):
    script = {name: [Proposal("first", estimate), Proposal("second", 1.5)] for name in ("one", "two")}
    executor = FakeExecutor(script, seconds=lambda work: 200.0 if isinstance(work, Screen) else 1.0)
    first, second = search(tmp_path, executor, minutes=5.0).tasks
    assert (first["outcome"], second["outcome"]) == (outcome, "untouched")
    assert (first["reason"] == "its first look was cut short") == (outcome == "screened-only")
    assert outcomes(search(tmp_path, FakeExecutor(script), minutes=5.0)) == dict.fromkeys(script, "winner")
    assert RunDirectory(tmp_path).read_json("cut_short.json") == []


def test_minutes_end_the_work_in_its_middle(tmp_path):
    executor = FakeExecutor(TWO, seconds=lambda work: 50.0 if isinstance(work, Evaluate) else 1.0)
    result = search(tmp_path, executor, minutes=1.0)
    assert executor.clock.time_s < 75.0
    assert True in executor.closed
    assert {one["outcome"] for one in result.tasks} <= {"screened-only", "winner"}


def test_a_task_that_is_settled_gets_no_more_proposals(tmp_path):
    schedule = replace(SCHEDULE, first_look=1)
    at_roofline = {"candidate_us": 2.1, "least_us": 2.0}
    has_headroom = {"candidate_us": 10.0, "least_us": 2.0}
    script = {
        "near": [Proposal("a", 1.5, look=at_roofline), GOOD],
        "far": [Proposal("a", 1.5, look=has_headroom), Proposal("b", 1.51, look=has_headroom), GOOD],
    }
    executor = FakeExecutor(script)
    search(tmp_path, executor, minutes=5.0, schedule=schedule)
    assert executor.rounds == [("near", 1, False), ("far", 1, False), ("far", 2, False)]


# --- errors, kills and resumption --------------------------------------------------------------------------------------


class KilledError(Exception):
    """Stands for a kill."""


def kill_after(records):
    """A listener that raises after so many records."""
    left = iter(range(records - 1, -1, -1))

    def hear(event):
        found = getattr(event, "evaluation", None) or getattr(event, "screened", None) or getattr(event, "outcome", None)
        if isinstance(event, object) and found is not None and next(left, 0) == 0:
            raise KilledError

    return hear


@pytest.mark.parametrize("stands", [True, False])
@pytest.mark.parametrize("records", exhaustive_but(range(1, 13), 5, 10))
def test_a_killed_run_goes_on_and_does_nothing_twice(tmp_path, records, stands):
    schedule = SCHEDULE if stands else replace(SCHEDULE, clear_low=2.0)
    if records < 12 or not stands:
        with pytest.raises(KilledError):
            search(tmp_path, FakeExecutor(TWO), on_event=kill_after(records), schedule=schedule)
    result = search(tmp_path, FakeExecutor(TWO), schedule=schedule)
    run = RunDirectory(tmp_path)
    looks = [(found.task, found.candidate_sha256) for found in run.screened()]
    assert len(looks) == len(set(looks)) == 8
    verdicts = [(found.task, *found.techniques, found.confirms) for found in run.evaluations()]
    wanted = {("lies", False), ("good", True), *(() if stands else (("good", False),))}
    assert sorted(verdicts) == sorted((task, *one) for task in TWO for one in wanted)
    assert (result.errors, outcomes(result)) == ({}, dict.fromkeys(TWO, "winner"))
    again = FakeExecutor(TWO)
    search(tmp_path, again, schedule=schedule)
    assert again.submitted == []


def test_an_exhausted_task_is_not_asked_again(tmp_path):
    search(tmp_path, FakeExecutor(TWO), budget=24)
    assert len(RunDirectory(tmp_path).read_json("exhausted.json")) == 2
    again = FakeExecutor(TWO)
    search(tmp_path, again, budget=24)
    assert again.rounds == []


def test_an_error_is_noted_and_the_others_go_on(tmp_path):
    script = {"one": [Proposal("a", DeviceError("too large"))], "two": [replace(GOOD, speedup=InfrastructureError("lost"))]}
    script["three"] = [GOOD]
    result = search(tmp_path, FakeExecutor(script))
    assert result.errors == {"one search": "too large", "two search": "lost"}
    assert outcomes(result)["three"] == "winner"
    assert search(tmp_path, FakeExecutor(script | {"two": [GOOD]})).errors == {"one search": "too large"}


def test_a_search_of_one_task_raises_what_the_judge_raises(tmp_path):
    script = {"one": [replace(GOOD, speedup=InfrastructureError("lost"))]}
    with pytest.raises(InfrastructureError, match="lost"):
        optimize(task_named("one"), policy=Scripted(script), device="cpu", out=tmp_path, evaluator=FakeExecutor(script))


def test_what_cannot_be_screened_is_judged_one_by_one(tmp_path):
    script = {"one": [Proposal("bad", DeviceError("full"), 1.1), Proposal("next", 1.5, 1.5)]}
    executor, said = FakeExecutor(script), []
    found = optimize(
        task_named("one"), policy=Scripted(script), device="cpu", out=tmp_path, evaluator=executor,
        on_event=lambda event: said.append(event.message),
    )  # fmt: skip
    assert "cannot be screened, so all are judged: full" in said
    assert executor.judged == [("one", "bad"), ("one", "next"), ("one", "next")]
    assert found.best.techniques == ("next",)


# --- policies that learn from verdicts ---------------------------------------------------------------------------------


def test_every_proposal_of_a_policy_that_learns_from_verdicts_is_judged_and_the_best_confirmed(tmp_path):
    executor = FakeExecutor(ONE, slots={Evaluate: 2, Baselines: 1})
    said = []
    policy = Scripted(ONE, "judged")
    found = optimize(
        task_named("one"), policy=policy, device="cpu", budget=4, out=tmp_path, evaluator=executor, on_event=said.append
    )
    assert executor.judged == [("one", name) for name in ("lies", "fair", "slow", "good", "good")]
    assert (found.best.techniques, found.evaluations, found.screened) == (("good",), 4, 0)
    judged = [event for event in said if event.evaluation is not None]
    assert [event.number for event in judged] == [1, 2, 3, 4]
    assert "confirming good in fresh processes" in [event.message for event in said]


@pytest.mark.parametrize("again", [1.9, None])
def test_what_was_confirmed_before_stands_though_others_seemed_better_since(tmp_path, again):
    run, task = RunDirectory(tmp_path), task_named("one")
    common = {"task": task.id, "task_sha256": task.sha256}
    run.append(accepted(2.0, "# first", **common))
    if again:
        run.append(accepted(again, "# first", confirms=True, **common))
    names = [f"lucky {number}" for number in range(SCHEDULE.confirmations_tried)]
    script = {"one": [Proposal(name, None, 0.9) for name in names]}
    for name in names:
        candidate = Proposal(name).candidate(task)
        run.append(accepted(5.0, candidate.source, techniques=(name,), **common))
    engine = run_engine(tmp_path, FakeExecutor(script), look="judged", budget=4)
    best = engine.state.tasks[0].records.best
    assert (best and best.speedup) == again


def test_a_policy_that_fails_ends_a_search_of_one_task_and_is_noted_in_a_suite(tmp_path):
    class Fails(Scripted):
        def propose(self, context, count):
            raise PolicyError("no answer")

    executor = FakeExecutor(TWO)
    with pytest.raises(PolicyError):
        optimize(task_named("one"), policy=Fails(TWO, "judged"), device="cpu", out=tmp_path / "one", evaluator=executor)
    policy = Fails(TWO, "judged")
    result = search_suite(
        suite_of(TWO), policy=policy, out=tmp_path / "suite", device="cpu", executor=executor, clock=executor.clock
    )
    assert result.errors == dict.fromkeys(["one search", "two search"], "no answer")


def test_a_suite_is_judged_task_by_task_and_each_is_confirmed(tmp_path):
    executor = FakeExecutor(TWO)
    result = search(tmp_path, executor, look="judged")
    names = ["lies", "fair", "slow", "good", "good"]
    assert executor.judged == [(task, name) for task in TWO for name in names]
    assert outcomes(result) == dict.fromkeys(TWO, "winner")


# --- tuned kernels -----------------------------------------------------------------------------------------------------


class Composes:
    """Lets a winner carry tuned kernels, and notes for whom."""

    def __init__(self, fails=False):
        self.asked, self.fails = [], fails

    def compose(self, task, winner, log):
        self.asked.append(task.id)
        if self.fails:
            log("the winner launches no Triton kernel; nothing to tune")
            return None
        techniques = (*winner.techniques, TUNED_SCHEDULE)
        changes = {"source": winner.source + " tuned", "techniques": techniques, "parent": winner.sha256}
        return winner.model_copy(update=changes)


@pytest.mark.parametrize(
    ("tuned", "asked", "best"),
    [
        (Proposal("good, tuned-schedule", None, 1.8), 2, 1.8),
        (Proposal("good, tuned-schedule", None, 1.8, again=1.3), 2, 1.4),
        (Proposal("good, tuned-schedule", None, 1.0), 1, 1.4),
        (Proposal("good, tuned-schedule", is_rejected=True), 1, 1.4),
    ],
    ids=["faster", "slower when confirmed", "no improvement", "rejected"],
)
def test_a_winner_with_tuned_kernels_is_judged_twice_and_takes_the_place_where_it_is_faster(tmp_path, tuned, asked, best):
    script = {"one": [GOOD, tuned], "two": [GOOD, tuned]}
    composer = Composes()
    for _ in range(2):
        executor = FakeExecutor({name: [GOOD] for name in script})
        executor.script = script
        plan_script = Scripted({name: [GOOD] for name in script})
        result = search_suite(
            suite_of(script), policy=plan_script, out=tmp_path, budget=1, judged=1, device="cpu", composer=composer,
            executor=executor, clock=executor.clock,
        )  # fmt: skip
    assert composer.asked == ["one", "two"], "a run that resumes repeats nothing"
    run = RunDirectory(tmp_path)
    composed = [found for found in run.evaluations() if TUNED_SCHEDULE in found.techniques]
    assert [found.confirms for found in composed if found.task == "one"] == [False, True][:asked]
    assert {line["speedup"] for line in result.tasks} == {best}


def test_nothing_is_judged_when_no_kernel_got_faster(tmp_path):
    executor, composer, heard = FakeExecutor({"one": [GOOD]}), Composes(fails=True), []
    run_engine(tmp_path, executor, composer=composer, listen=heard.append)
    assert executor.judged == [("one", "good")]
    assert "the winner launches no Triton kernel; nothing to tune" in [event.message for event in heard]


# --- progress ----------------------------------------------------------------------------------------------------------


def test_progress_tells_the_best_so_far_and_what_is_settled(tmp_path):
    heard = []
    search(tmp_path, FakeExecutor(TWO), on_event=heard.append)
    assert heard[0].screened == 1
    last = heard[-1]
    assert (last.settled, last.tasks, last.screened, last.judged, last.errors) == (2, 2, 8, 4, 0)
    assert last.best in {("one", 1.4), ("two", 1.4)}
