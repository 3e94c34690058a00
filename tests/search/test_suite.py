"""A search over a suite: what is owed follows from the records, whenever it is killed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kernelwright.errors import InfrastructureError
from kernelwright.judge import Settings
from kernelwright.records import Candidate, RunDirectory, Task, TimingBlock, decisions, sha256_of
from kernelwright.records.decisions import SCHEDULE, headroom
from kernelwright.records.screened import screened_of
from kernelwright.rewrites.baselines import baseline_source
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.search import schedule
from kernelwright.search import suite as searching
from kernelwright.search.beside import rival_of
from kernelwright.tasks.entries import Suite, SuiteEntry
from tests.quick import exhaustive_but
from tests.samples import TASK, accepted, rejected

TASKS = [Task(id=name, source=f"{TASK.source}# {name}\n") for name in ("one", "two")]
SUITE = Suite("tiny", tuple(SuiteEntry(task) for task in TASKS))
ESTIMATES = (1.5, 1.2, 0.9, 1.4)
TAKEN_BYTES = 10 << 30
LIES = 1.5
"""Estimate that the judge does not confirm."""


JOBS = []
MEASURED = []
LEAST = set()
"""Least process triples of what was measured."""
RESTED = []


class Screens:
    """Searchers that estimate four candidates of each task, the last of which has an autotuner."""

    at_once = 1
    want_a_device = False

    def __init__(self, devices, settings, policy, cores, judges):
        assert (devices, policy) == (["cpu"], "builtin")
        assert judges.is_idle("cpu")
        judges.rest("cpu")
        assert RESTED.pop() == "cpu"

    def screen(self, jobs, stop=None):
        for job in filter(None, jobs):
            JOBS.append((job.task.id, job.budget, job.tunes))
            known = {found.candidate_sha256 for found in job.earlier}
            for speedup in ESTIMATES[: job.budget if job.tunes else min(job.budget, 3)]:
                candidate = Candidate(source=f"# {job.task.id} {speedup}", policy="builtin", techniques=(str(speedup),))
                if candidate.sha256 not in known:
                    found = {"correct": True, "estimate": speedup, "spread": 0.0, "memory_bytes": TAKEN_BYTES}
                    yield job, screened_of(job.task, candidate, **found)
            yield job, None

    def close(self):
        pass


class Judges:
    """A pool whose verdicts are the estimates, but for one that it rejects."""

    slots, waiting = 1, 0

    def __init__(self, devices, settings, per_device, cores, beside=None):
        pass

    def evaluate(self, jobs, stop=None):
        for job in jobs:
            MEASURED.append((job.task.id, job.candidate.techniques[0], job.settings.until_certain))
            LEAST.add(job.settings.processes_min)
            speedup = float(job.candidate.techniques[0])
            common = {"task": job.task.id, "task_sha256": job.task.sha256, "policy": "builtin"}
            common["techniques"] = job.candidate.techniques
            if speedup == LIES:
                yield job, rejected(source=job.candidate.source, **common)
            else:
                yield job, accepted(speedup, job.candidate.source, **common)

    def rotate(self, rotations, stop=None):
        return iter(())

    def rest(self, device):
        RESTED.append(device)

    def is_idle(self, device):
        return True

    def close(self, *, at_once=False):
        pass


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.setattr(searching, "Searchers", Screens)
    monkeypatch.setattr(searching, "JudgePool", Judges)


def search(out, **given):
    return searching.search_suite(SUITE, policy=BuiltinPolicy(), out=out, device="cpu", settings=Settings(), **given)


def test_judges_and_baselines_are_told_how_much_memory_a_task_may_take(tmp_path, monkeypatch):
    asked = []
    judged = Judges.evaluate

    def evaluate(self, jobs, stop=None):
        for job, found in judged(self, jobs):
            asked.append(job)
            yield job, found

    monkeypatch.setattr(Judges, "evaluate", evaluate)
    monkeypatch.setattr(Judges, "rotate", lambda self, rotations, stop=None: asked.extend(rotations) or iter(()))
    search(tmp_path, budget=4, judged=1, baselines=["compile"])
    assert {type(one).__name__ for one in asked} == {"Job", "RotationJob"}
    assert all(one.memory_bytes > TAKEN_BYTES for one in asked)


@pytest.mark.parametrize(("compiled", "handed_out"), [(1.1, True), (1.38, False)])
def test_a_drop_in_is_handed_out_only_where_it_is_certainly_ahead_of_the_best_baseline(
    tmp_path, monkeypatch, compiled, handed_out
):
    def rotate(self, rotations, stop=None):
        for rotation in rotations:
            common = {"task": rotation.task.id, "task_sha256": rotation.task.sha256, "reference_us": 100.0}
            yield (
                rotation,
                [accepted(compiled, policy="baseline", techniques=one.techniques, **common) for one in rotation.baselines],
            )

    monkeypatch.setattr(Judges, "rotate", rotate)
    result = search(tmp_path, budget=4, judged=1, baselines=["compile"])
    found = {one["task"]: (one["outcome"], one["best_baseline"], one["ahead"]) for one in result.tasks}
    assert found == {name: ("winner", "compile", handed_out) for name in ("one", "two")}
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
    result = search(tmp_path, budget=4, judged=1, baselines=["compile"])
    assert [(one["speedup"], one["ahead"], one["baselines_measured"]) for one in result.tasks] == [(1.4, False, False)] * 2
    assert not (tmp_path / "optimized").exists()
    assert "| not measured yet | 1.40x (1.33 to 1.47) | - | no |" in (tmp_path / "table.md").read_text()


LIMIT_S = 30
"""Time after which a test that waits for ever has failed."""


@pytest.mark.parametrize(("beside", "ahead"), [(1, True), (0, False)])
def test_on_a_gpu_the_judge_begins_while_the_last_tasks_are_screened(tmp_path, monkeypatch, beside, ahead):
    asked = threading.Event()

    class ScreensSlowly(Screens):
        def __init__(self, devices, settings, policy, cores, judges):
            assert devices == ["cuda:0"]

        def screen(self, jobs, stop=None):
            for job in jobs:
                if job.task.id == "two" and ahead:
                    assert asked.wait(LIMIT_S), "the judge waits for the last task"
                yield from super().screen([job])

    class JudgesAtOnce(Judges):
        def evaluate(self, jobs, stop=None):
            for job, found in super().evaluate(jobs):
                asked.set()
                yield job, found

    monkeypatch.setattr(searching, "Searchers", ScreensSlowly)
    monkeypatch.setattr(searching, "JudgePool", JudgesAtOnce)
    monkeypatch.setattr(searching, "SCHEDULE", replace(SCHEDULE, screened_when_judging_begins=float(beside)))
    MEASURED.clear()
    run, heard = RunDirectory(tmp_path), []
    search = searching.SuiteSearch(run, SUITE, BuiltinPolicy(), ["cuda:0"], Settings(), 4, 1, None, heard.append)
    search.work(SUITE, [])
    assert {(task, name) for task, name, _ in MEASURED} == {(one.id, name) for one in TASKS for name in (str(LIES), "1.4")}
    assert (next(event for event in heard if event.judged).screened < 8) == ahead


@pytest.mark.parametrize(("screening", "waits", "judging"), [(1, 0, 7), (3, 0, 5), (6, 0, 4), (0, 0, 8), (3, 2, 7)])
def test_while_few_tasks_are_screened_more_judges_work(tmp_path, screening, waits, judging):
    tasks = [Task(id=str(number), source=f"{TASK.source}# {number}\n") for number in range(16)]
    suite = Suite("tiny", tuple(SuiteEntry(task) for task in tasks))
    search = searching.SuiteSearch(RunDirectory(tmp_path), suite, BuiltinPolicy(), ["cuda:0"], Settings(), 4, 1, None, None)
    for number, state in enumerate(search._states.values()):
        state.at_work, state.exhausted = number < screening, number >= screening
        candidate = Candidate(source=f"# {number}", policy="builtin")
        state.screened = [screened_of(state.task, candidate, correct=True, estimate=1.5, spread=0.0)]
    search._judging_begins.set()
    taken = []

    class Full(Judges):
        slots, waiting = 8, waits

        def evaluate(self, jobs, stop=None):
            while len(taken) < self.slots and (job := next(jobs)) is not None:
                taken.append(job)
            search._ended.set()
            return iter(())

    search.judge(Full([], None, 8, {}))
    assert len(taken) == judging


def baseline(task, name, gain, **changes):
    source = baseline_source(task, name)
    common = {"task": task.id, "task_sha256": task.sha256, "policy": "baseline", "techniques": (name,)}
    return accepted(gain, source, **(common | changes))


def test_a_measurement_in_full_has_the_best_measured_baseline_as_its_rival(tmp_path, monkeypatch):
    jobs = []

    class Notes(Judges):
        def evaluate(self, given, stop=None):
            for job in given:
                jobs.append(job)
                yield from super().evaluate([job])

    monkeypatch.setattr(decisions, "SCHEDULE", replace(SCHEDULE, clear_low=1.45))
    run = RunDirectory(tmp_path)
    _, two = TASKS
    for found in (
        baseline(two, "compile", 1.2),
        baseline(two, "cudagraph-fresh", 1.1),
        baseline(two, "cudagraph", 3.0),  # its outputs are overwritten
        baseline(two, "cudnn", 1.3, speedup=None, verdict="rejected", reason="wrong-output"),
    ):
        run.append(found)
    search = searching.SuiteSearch(run, SUITE, BuiltinPolicy(), ["cuda:0"], Settings(), 4, 1, None, None)
    search.screen(Screens(["cpu"], None, "builtin", None, Judges(["cpu"], None, 1, None)))
    search.judge(Notes([], None, 1, None))
    names = [(job.task.id, job.candidate.techniques[0], job.rival and job.rival.techniques[0]) for job in jobs]
    # The task whose baselines are known comes first; what screening put first is measured in full, others have two looks.
    assert names == [
        ("two", "1.5", "compile"),
        ("two", "1.4", None),
        ("two", "1.4", "compile"),
        ("one", "1.5", None),
        ("one", "1.4", None),
        ("one", "1.4", None),
    ]
    assert jobs[0].rival == Candidate(source=baseline_source(two, "compile"), policy="baseline", techniques=("compile",))


def test_a_first_winner_of_a_task_comes_before_a_better_one_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "SCHEDULE", replace(SCHEDULE, worth_judging=0.0))
    search = searching.SuiteSearch(RunDirectory(tmp_path), SUITE, BuiltinPolicy(), ["cpu"], Settings(), 4, 3, None, None)
    search.screen(Screens(["cpu"], None, "builtin", None, Judges(["cpu"], None, 1, None)))
    MEASURED.clear()
    search.judge(Judges([], None, 1, None))
    assert [(task, name) for task, name, _ in MEASURED] == [
        ("one", "1.5"),
        ("one", "1.4"),
        ("two", "1.5"),
        ("two", "1.4"),
        ("one", "1.2"),
        ("two", "1.2"),
    ]


class Wanting:
    """Searchers with a task that wants a device for itself; it has had one when they are asked for the fourth time."""

    def __init__(self, search, done):
        self.search, self.done, self.told = search, done, []
        search._screening_over.clear()

    @property
    def want_a_device(self):
        self.told.append(len(self.done))
        if len(self.told) > 3:
            self.search._screening_over.set()
        return len(self.told) <= 3


def test_further_candidates_of_a_task_with_a_winner_make_room_for_what_must_be_screened_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "SCHEDULE", replace(SCHEDULE, worth_judging=0.0))
    monkeypatch.setattr(searching, "_POLL_S", 0.0)
    search = searching.SuiteSearch(RunDirectory(tmp_path), SUITE, BuiltinPolicy(), ["cpu"], Settings(), 4, 3, None, None)
    search.screen(Screens(["cpu"], None, "builtin", None, Judges(["cpu"], None, 1, None)))
    MEASURED.clear()
    search._searchers = wanting = Wanting(search, MEASURED)
    search.judge(Judges([], None, 1, None))
    assert wanting.told == [4] * 4, "the first winner of each task does not wait"
    assert [(task, name) for task, name, _ in MEASURED[4:]] == [("one", "1.2"), ("two", "1.2")]


def test_baselines_of_tasks_without_a_winner_make_room_for_what_must_be_screened_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "_POLL_S", 0.0)
    run, order = RunDirectory(tmp_path), []
    common = {"task": "two", "task_sha256": TASKS[1].sha256, "policy": "builtin"}
    run.append(accepted(1.3, "# two", confirms=True, **common))
    search = searching.SuiteSearch(run, SUITE, BuiltinPolicy(), ["cpu"], Settings(), 4, 1, None, None)
    search._judging_begins.set()
    search._searchers = wanting = Wanting(search, order)

    class Rotates(Judges):
        def rotate(self, rotations, stop=None):
            for one in filter(None, rotations):
                order.append(one.task.id)
                yield one, [baseline(one.task, "compile", 1.5)]

    search.measure(SUITE, ["compile"], Rotates([], None, 1, None))
    assert order == ["two", "one"]
    assert wanting.told == [1] * 4


@pytest.mark.parametrize(("verdict", "wins"), [(1.9, True), (1.05, False)])
def test_a_baseline_that_is_faster_than_the_winner_is_judged_last_and_once(tmp_path, monkeypatch, verdict, wins):
    judged = []

    def rotate(self, rotations, stop=None):
        for rotation in rotations:
            common = {
                "task": rotation.task.id,
                "task_sha256": rotation.task.sha256,
                "policy": "baseline",
                "reference_us": 100.0,
            }
            gains = {"compile": 1.9 if rotation.task.id == "one" else 1.3, "cudnn": 1.2}
            names = [one.techniques for one in rotation.baselines]
            sources = [one.source for one in rotation.baselines]
            yield (
                rotation,
                [accepted(gains[n], text, techniques=(n,), **common) for (n,), text in zip(names, sources, strict=True)],
            )

    class Knows(Judges):
        def evaluate(self, jobs, stop=None):
            for job in jobs:
                judged.append((job.task.id, job.candidate.techniques[0], job.candidate.policy))
                common = {"task": job.task.id, "task_sha256": job.task.sha256, "policy": "builtin"}
                (name,) = job.candidate.techniques
                speedup = verdict if name == "compile" else float(name)
                yield job, accepted(speedup, job.candidate.source, techniques=(name,), **common)

    monkeypatch.setattr(Judges, "rotate", rotate)
    monkeypatch.setattr(searching, "JudgePool", Knows)
    for _ in range(2):
        result = search(tmp_path, budget=4, judged=1, baselines=["compile"])
    assert judged == [("one", "1.5", "builtin"), ("two", "1.5", "builtin"), ("one", "compile", "builtin")]
    found = {one["task"]: (one["speedup"], one["techniques"], one["ahead"]) for one in result.tasks}
    assert found["one"] == ((1.9, ["compile"], False) if wins else (1.5, ["1.5"], False))
    assert found["two"] == (1.5, ["1.5"], True)


def test_what_is_no_faster_than_eager_is_no_rival():
    task = TASKS[0]
    found = [baseline(task, "compile", 0.9), baseline(TASKS[1], "cudnn", 2.0), baseline(task, "reduce-overhead", 2.0)]
    assert rival_of(task, found) is None
    # Of two measurements the later one counts.
    again = [baseline(task, "compile", 1.5), baseline(task, "cudnn", 1.2), baseline(task, "compile", 1.1)]
    assert rival_of(task, again).techniques == ("cudnn",)


@pytest.mark.parametrize("failed", [True, False])
def test_baselines_that_are_measured_beside_become_rivals(tmp_path, failed):
    class Rotates(Judges):
        def rotate(self, rotations, stop=None):
            for one in rotations:
                found = InfrastructureError("lost") if failed else [baseline(one.task, "compile", 1.5)]
                yield one, found

    search = searching.SuiteSearch(RunDirectory(tmp_path), SUITE, BuiltinPolicy(), ["cpu"], Settings(), 4, 1, None, None)
    search._judging_begins.set()
    search.measure(SUITE, ["compile"], Rotates([], None, 1, None))
    states = search._states.values()
    assert all(state.has_baselines for state in states)
    rivals = [rival_of(state.task, state.baselines) for state in states]
    assert [one and one.techniques for one in rivals] == [None if failed else ("compile",)] * 2


def test_baselines_of_winners_are_measured_first_then_those_of_the_most_promising_tasks(tmp_path):
    """Where the minutes end before all are measured, a winner without baselines would count for nothing."""
    run = RunDirectory(tmp_path)
    tasks = {name: Task(id=name, source=f"{TASK.source}# {name}\n") for name in ("dull", "late", "fair", "fast", "won")}
    estimates = {"dull": 0.9, "late": 1.1, "fair": 1.4, "fast": 3.0, "won": 1.2}
    candidates = {name: Candidate(source=f"# {name}", policy="builtin", techniques=("t",)) for name in tasks}
    for name, task in tasks.items():
        run.append(screened_of(task, candidates[name], correct=True, estimate=estimates[name], spread=0.0))

    def win(name):
        common = {"task": name, "task_sha256": tasks[name].sha256, "policy": "builtin", "techniques": ("t",)}
        return accepted(1.3, candidates[name].source, confirms=True, **common)

    run.append(win("won"))
    suite = Suite("several", tuple(SuiteEntry(task) for task in tasks.values()))
    search = searching.SuiteSearch(run, suite, BuiltinPolicy(), ["cpu"], Settings(), 4, 1, None, None)
    search._judging_begins.set()
    order = []

    class Rotates(Judges):
        def rotate(self, rotations, stop=None):
            for one in rotations:
                order.append(one.task.id)
                if one.task.id == "fast":
                    search._keep(tasks["late"], win("late"))
                yield one, [baseline(one.task, "compile", 1.5)]

    search.measure(suite, ["compile"], Rotates([], None, 1, None))
    assert order == ["won", "fast", "late", "fair", "dull"]


def missed(task, low=0.97, name="1.5", **changes):
    """A measurement of six processes that comes near to a gain."""
    blocks = [
        TimingBlock(process=number, reference_us=(100.0,), candidate_us=(75.0,), null_us=(100.0,)) for number in range(6)
    ]
    common = {"task": task.id, "task_sha256": task.sha256, "policy": "builtin", "techniques": (name,), "blocks": blocks}
    return accepted(1.3, f"# {task.id} {name}", **(common | {"speedup_low": low} | changes))


@pytest.mark.parametrize("holds", [True, False])
def test_a_near_miss_is_measured_once_more_by_as_many_series_as_settle_it(tmp_path, monkeypatch, holds):
    """Task one comes near with its first candidate and far from it with its second; task two has a winner."""
    jobs = []

    def evaluate(self, given, stop=None):
        for job in given:
            jobs.append((job.task.id, job.candidate.techniques[0], job.settings.processes_min, job.settings.audits))
            speedup = float(job.candidate.techniques[0])
            if job.task.id == "two":
                yield job, accepted(speedup, job.candidate.source, task="two", task_sha256=job.task.sha256, policy="builtin")
            elif job.settings.audits > 8:
                yield job, missed(job.task, low=1.2 if holds else 0.99)
            else:
                yield job, missed(job.task, low=0.97 if speedup == 1.5 else 0.5, name=job.candidate.techniques[0])

    monkeypatch.setattr(Judges, "evaluate", evaluate)
    result = search(tmp_path, budget=4, judged=3)
    needed = missed(TASKS[0]).processes_to_settle
    assert 6 < needed <= SCHEDULE.settling_processes
    settles = "one", "1.5", max(6, -(-needed // 2)), 2 * 8
    assert [job for job in jobs if job[3] != 8] == [settles]
    assert [job for job in jobs if job[0] == "one"][-1] == settles, "it is owed nothing else by then"
    assert {one["task"]: one["outcome"] for one in result.tasks} == {
        "one": "winner" if holds else "no-winner",
        "two": "winner",
    }
    jobs.clear()
    search(tmp_path, budget=4, judged=3)
    assert jobs == [], "whatever it was, it is settled"


@pytest.mark.parametrize("measured", [True, False])
def test_a_near_miss_is_settled_before_what_gains_less_once_its_baselines_are_there(tmp_path, measured):
    """The first candidate of `near` was a near miss; that of `won` is confirmed, and its second may be better."""
    run = RunDirectory(tmp_path)
    estimates = {"won": (2.0, 1.9), "small": (1.06,), "new": (1.4,), "near": (1.5,)}
    tasks = {name: Task(id=name, source=f"{TASK.source}# {name}\n") for name in estimates}
    for name, task in tasks.items():
        for estimate in estimates[name]:
            candidate = Candidate(source=f"# {name} {estimate}", policy="builtin", techniques=(str(estimate),))
            run.append(screened_of(task, candidate, correct=True, estimate=estimate, spread=0.0))
    run.append(missed(tasks["near"]))
    won = {"task": "won", "task_sha256": tasks["won"].sha256, "policy": "builtin", "techniques": ("2.0",)}
    run.append(accepted(1.2, "# won 2.0", confirms=True, **won))
    suite = Suite("several", tuple(SuiteEntry(task) for task in tasks.values()))
    search = searching.SuiteSearch(run, suite, BuiltinPolicy(), ["cpu"], Settings(), 4, 2, None, None)
    for begun in (search._judging_begins, search._screening_over):
        begun.set()
    search._baselines_over.clear()
    if measured:
        for state in search._states.values():
            state.has_baselines = True
    order = []

    class Takes(Judges):
        def evaluate(self, jobs, stop=None):
            for job in jobs:
                order.append(job.task.id)
                search._baselines_over.set() if len(order) == 3 else None
                yield job, rejected(source=job.candidate.source, task=job.task.id, task_sha256=job.task.sha256)

    search.judge(Takes([], None, 1, None))
    assert order == (["new", "near", "small", "won"] if measured else ["new", "small", "won", "near"])


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ([missed(TASKS[0])], "1.5"),
        ([missed(TASKS[0], 0.95), missed(TASKS[0], 0.98, "1.4")], "1.4"),
        ([missed(TASKS[0], 0.91, noise_floor=0.25)], None),
        ([missed(TASKS[0], 0.5)], None),
        ([missed(TASKS[0]), missed(TASKS[0], 0.96, confirms=True), missed(TASKS[0], 0.98, "1.4")], None),
        ([missed(TASKS[0]), missed(TASKS[0], 1.2, "1.4", confirms=True)], None),
    ],
    ids=["near", "the nearest", "too many processes", "far", "one was settled", "a winner"],
)
def test_which_near_miss_is_settled(found, named):
    state = schedule.TaskState(task=TASKS[0])
    for one in found:
        (state.confirmed if one.confirms else state.judged)[one.candidate_sha256] = one
    assert (state.near_miss_to_settle and state.near_miss_to_settle.techniques[0]) == named


class Killed(Exception):
    """Stands for a kill."""


def kill_after(records):
    heard = []

    def hear(event):
        heard.append(event)
        if len(heard) == records:
            raise Killed

    return hear


@pytest.mark.parametrize("stands", [True, False])
@pytest.mark.parametrize("records", exhaustive_but([1, 5, 8, 11], 5))
def test_a_killed_run_goes_on_and_does_nothing_twice(tmp_path, monkeypatch, records, stands):
    if not stands:
        monkeypatch.setattr(decisions, "SCHEDULE", replace(SCHEDULE, clear_low=2.0))
    with pytest.raises(Killed):
        search(tmp_path, budget=4, judged=1, on_event=kill_after(records))
    result = search(tmp_path, budget=4, judged=1)
    run = RunDirectory(tmp_path)
    looks = [(found.task, found.candidate_sha256) for found in run.screened()]
    assert len(looks) == len(set(looks)) == 8
    verdicts = [(found.task, found.candidate_sha256, found.confirms) for found in run.evaluations()]
    wanted = {
        (task.id, sha256_of(f"# {task.id} {speedup}"), confirms)
        for task in TASKS
        for speedup, confirms in ((LIES, False), (1.4, True), *(() if stands else ((1.4, False),)))
    }
    assert len(verdicts) == len(set(verdicts))
    assert set(verdicts) == wanted
    assert [(row.level, row.tasks) for row in result.rows if row.level is None] != []
    assert result.errors == {}
    assert search(tmp_path, budget=4, judged=1).errors == {}
    assert len(list(run.evaluations())) == len(verdicts)


def test_what_screening_put_first_is_measured_in_full_once(tmp_path):
    MEASURED.clear()
    search(tmp_path, budget=4, judged=1)
    assert [(name, certain) for task, name, certain in MEASURED if task == "one"] == [(str(LIES), False), ("1.4", False)]


def test_with_minutes_a_clear_gain_need_not_be_measured_in_full(tmp_path):
    MEASURED.clear()
    LEAST.clear()
    result = search(tmp_path, budget=4, judged=1, minutes=5)
    assert [(name, certain) for task, name, certain in MEASURED if task == "one"] == [(str(LIES), True), ("1.4", True)]
    assert {4} == LEAST
    assert {one["task"]: one["outcome"] for one in result.tasks} == {"one": "winner", "two": "winner"}


def test_with_minutes_a_gain_that_is_not_clear_is_measured_in_full_after_that(tmp_path, monkeypatch):
    monkeypatch.setattr("kernelwright.records.decisions.needs_no_rerun", lambda found: False)
    MEASURED.clear()
    search(tmp_path, budget=4, judged=1, minutes=5)
    assert [(name, certain) for task, name, certain in MEASURED if task == "one"] == [
        (str(LIES), True),
        ("1.4", True),
        ("1.4", False),
    ]


def test_of_two_measurements_the_first_may_end_when_it_is_certain(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "SCHEDULE", replace(SCHEDULE, clear_low=2.0))
    MEASURED.clear()
    search(tmp_path, budget=4, judged=1)
    assert [(name, certain) for task, name, certain in MEASURED if task == "one"] == [
        (str(LIES), True),
        ("1.4", True),
        ("1.4", False),
    ]


def test_with_minutes_autotuners_come_last_of_all_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "SCHEDULE", replace(SCHEDULE, first_look=2))
    JOBS.clear()
    search(tmp_path, budget=6, judged=1, minutes=5.0)
    assert [
        (name, budget, tunes) for budget, tunes in ((2, False), (4, False), (6, True)) for name in ("one", "two")
    ] == JOBS
    assert len(list(RunDirectory(tmp_path).screened())) == 8


def test_a_task_has_its_next_round_while_another_is_in_its_first(tmp_path, monkeypatch):
    class TwoAtOnce(Screens):
        def screen(self, jobs, stop=None):
            slow = next(jobs)
            assert (slow.task.id, slow.budget) == ("one", 2)
            for budget, tunes in ((2, False), (4, False), (6, True)):
                quick = next(jobs)
                assert (quick.task.id, quick.budget, quick.tunes) == ("two", budget, tunes)
                yield from super().screen([quick])
            assert next(jobs) is None, "what is left is at work"
            yield from super().screen([slow])
            yield from super().screen(jobs)

    monkeypatch.setattr(decisions, "SCHEDULE", replace(SCHEDULE, first_look=2))
    monkeypatch.setattr(searching, "Searchers", TwoAtOnce)
    search(tmp_path, budget=6, judged=1, minutes=5.0)
    assert len(list(RunDirectory(tmp_path).screened())) == 8


def test_past_screenings_half_only_tasks_without_a_look_are_screened(tmp_path):
    """Three tasks of eleven were never looked at while the judge took further candidates, and then rested."""
    run = RunDirectory(tmp_path)
    run.append(screened_of(TASKS[0], Candidate(source="# seen"), correct=True, estimate=2.0, candidate_us=9.0, least_us=1.0))
    search = searching.SuiteSearch(run, SUITE, BuiltinPolicy(), ["cpu"], Settings(), 6, 1, 10.0, None)
    assert {next(search._jobs()).task.id for _ in SUITE.entries} == {"one", "two"}
    for state in search._states.values():
        state.at_work = False
    search._began_s -= 60 * 6.0
    assert not search._stops_screening
    jobs = search._jobs()
    assert next(jobs).task.id == "two"
    assert next(jobs) is None, "the other one has had its look"
    search._keep(TASKS[1], screened_of(TASKS[1], Candidate(source="# seen too"), correct=True, estimate=2.0))
    assert search._stops_screening
    search._states[TASKS[1].sha256].screened.clear()
    search._began_s -= 60 * 2.0
    assert search._stops_screening, "three quarters of the time are over"


@pytest.mark.parametrize(("estimate", "outcome"), [(0.9, "screened-only"), (1.4, "winner")])
def test_a_task_whose_first_look_was_cut_short_is_not_decided_without_a_winner(tmp_path, monkeypatch, estimate, outcome):
    class Ends(Screens):
        def screen(self, jobs, stop=None):
            job = next(jobs)
            candidate = Candidate(source="#", policy="builtin", techniques=(str(estimate),))
            yield job, screened_of(job.task, candidate, correct=True, estimate=estimate, spread=0.0)

    monkeypatch.setattr(searching, "Searchers", Ends)
    first, second = search(tmp_path, budget=6, judged=1, minutes=5.0).tasks
    assert (first["outcome"], second["outcome"]) == (outcome, "untouched")
    assert (first["reason"] == "its first look was cut short") == (outcome == "screened-only")
    monkeypatch.setattr(searching, "Searchers", Screens)
    first, second = search(tmp_path, budget=6, judged=1, minutes=5.0).tasks
    assert {first["outcome"], second["outcome"]} == {"winner"}
    assert RunDirectory(tmp_path).read_json("cut_short.json") == []


def test_progress_tells_the_best_so_far_and_what_is_settled(tmp_path):
    heard = []
    search(tmp_path, budget=4, judged=1, on_event=heard.append)
    assert [event.screened for event in heard if event.judged == 0][:1] == [1]
    last = heard[-1]
    assert (last.settled, last.tasks, last.screened, last.judged, last.errors) == (2, 2, 8, 4, 0)
    assert last.best in {("one", 1.4), ("two", 1.4)}


def test_minutes_go_to_tasks_with_room_left(tmp_path):
    state = schedule.TaskState(task=TASK)
    assert not state.is_settled, "a first look is owed to every task"
    state.looked_at = SCHEDULE.first_look
    candidate = Candidate(source="#")
    state.screened = [screened_of(TASK, candidate, correct=True, estimate=1.5, candidate_us=10.0, least_us=2.0)]
    assert (state.is_settled, headroom(state.screened)) == (False, 5.0)
    state.looked_at, state.before = 2 * SCHEDULE.first_look, 1.49
    assert state.is_settled, "the last proposals brought nothing"
    state.before = 1.2
    assert not state.is_settled
    state.screened = [screened_of(TASK, candidate, correct=True, estimate=1.5, candidate_us=2.1, least_us=2.0)]
    assert state.is_settled, "it is at the roofline"
