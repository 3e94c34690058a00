"""`bench` through the real judge: candidates in full, the baselines of a task in one rotation; and its resumption."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import replace
from typing import ClassVar

import pytest

import kernelwright
from kernelwright.errors import DeviceError, InfrastructureError, UsageError
from kernelwright.execution.local import JudgePool
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Reason, RunDirectory, Task, Verdict
from kernelwright.records.models import Precision
from kernelwright.records.rescore import rescore
from kernelwright.search import bench as module
from kernelwright.tasks.entries import Suite, SuiteEntry
from tests.samples import BarePool

SETTINGS = Settings.quick(threads=1, timed=False, thorough=False)
LATER = module.Agenda(deadline=lambda: True)


def source(expression: str) -> str:
    return f"""import torch

class Model(torch.nn.Module):
    def forward(self, a, b):
        return {expression}

def get_inputs():
    return [torch.randn(64), torch.randn(64, 32)]

def get_init_inputs():
    return []
"""


DIAGONAL = Task(id="diagonal", source=source("torch.diag(a) @ b"))
SCALED = Task(id="scaled", source=source("a[:, None] * b"))
BROKEN = Task(id="broken", source=source("a @ missing"))
FASTER = Candidate(source=source("a[:, None] * b").replace("class Model", "class ModelNew"))


@pytest.fixture
def suite() -> Suite:
    return Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1), SuiteEntry(SCALED, None, 1), SuiteEntry(BROKEN, None, 2)))


@pytest.fixture
def cheap(monkeypatch):
    """Two baselines that need no compiler."""
    again = (
        ("class {name}({base}):\n    def forward(self, *inputs):\n        return super().forward(*inputs).clone()\n",),
        "",
    )
    wrong = (("class {name}({base}):\n    def forward(self, *inputs):\n        return super().forward(*inputs) + 1\n",), "")
    monkeypatch.setattr("kernelwright.rewrites.baselines.BASELINES", {"again": again, "wrong": wrong})
    monkeypatch.setattr(module, "ALL_BASELINES", ("eager", "again", "wrong"))


@pytest.mark.exhaustive
def test_a_suite_is_measured_once_and_resumed(tmp_path, suite, cheap, judge_pool):
    events = []
    arguments = {
        "baselines": ["eager", "again", "wrong"],
        "device": "cpu",
        "out": tmp_path,
        "settings": SETTINGS,
        "evaluator": judge_pool,
    }
    calls = iter([False, True])
    first = module.bench(suite, **arguments, on_event=events.append, agenda=module.Agenda(lambda: next(calls, True)))
    assert [(event.task, event.what, event.done, event.total) for event in events] == [("diagonal", "candidate", 1, 7)]
    assert not first.errors
    assert "3 tasks, 2 without a candidate. Of the candidates 1 build" in (tmp_path / "table.md").read_text()

    events.clear()
    result = module.bench(suite, **arguments, on_event=events.append)
    assert sorted((event.task, event.what) for event in events) == sorted(
        (task, what) for task in ("diagonal", "scaled", "broken") for what in ("again", "wrong")
    )
    assert {event.done for event in events} == set(range(2, 8))
    assert sorted(result.errors) == ["broken again", "broken wrong"]
    assert (result.counts.without_candidate, result.counts.failed, result.counts.baselines_failed) == (2, 0, 1)
    found = {(one.task, *one.techniques): one for one in RunDirectory(tmp_path).evaluations()}
    assert found[("diagonal",)].accepted
    assert not found["scaled", "wrong"].accepted
    assert {row.baseline for row in result.rows} >= {"eager", "again"}

    events.clear()
    module.bench(suite, **arguments, on_event=events.append)
    assert {event.task for event in events} == {"broken"}, "an error is no measurement: it is still owed"


@pytest.mark.parametrize(("baselines", "words"), [(["eager", "nonsense"], "nonsense"), (["eager"], "brings no candidates")])
def test_what_cannot_be_measured_is_said_and_leaves_nothing(tmp_path, baselines, words):
    with pytest.raises(UsageError, match=words):
        module.bench(Suite("made", (SuiteEntry(SCALED, None, 1),)), baselines=baselines, device="cpu", out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cudagraph", "cudagraph-fresh", "cudnn"])
def test_a_baseline_that_needs_a_gpu_is_not_eager_under_another_name(tmp_path, suite, name):
    with pytest.raises(DeviceError, match=f"Wanted a GPU for the baseline {name}; found the CPU alone"):
        module.bench(suite, baselines=["eager", name], device="cpu", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class OtherJudges:
    """An `Evaluator` that measures no baselines together, as `RayPool`; its verdicts come from nowhere."""

    slots = 1
    is_closed = False

    def evaluate(self, jobs, stop=None):
        for job in jobs:
            yield job, judged(job.task, 3.0, strict=False)

    def close(self, *, at_once=False):
        self.is_closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def test_any_evaluator_judges_candidates_and_stays_open(tmp_path, suite):
    judges = OtherJudges()
    result = kernelwright.bench(suite, baselines=["eager"], device="cpu", out=tmp_path, evaluator=judges)
    assert [found.speedup for found in RunDirectory(tmp_path).evaluations()] == [3.0]
    assert {round(row.solved.geomean, 6) for row in result.rows if row.level is None} == {3.0}
    assert not judges.is_closed


def test_an_evaluator_that_cannot_measure_baselines_together_is_refused_for_them(tmp_path, suite):
    with pytest.raises(UsageError, match="measures baselines together, such as JudgePool; found OtherJudges"):
        kernelwright.bench(suite, device="cpu", out=tmp_path / "run", evaluator=OtherJudges())
    assert not list(tmp_path.iterdir())
    with JudgePool(["cpu"], SETTINGS) as pool:
        assert isinstance(pool, module.RotatingEvaluator)


def test_a_directory_of_another_run_is_refused(tmp_path, suite, cheap):
    module.bench(
        suite, baselines=["again"], device="cpu", out=tmp_path, settings=SETTINGS, agenda=module.Agenda(lambda: True)
    )
    with pytest.raises(UsageError, match="another `settings`"):
        module.bench(suite, baselines=["again"], device="cpu", out=tmp_path, agenda=LATER)


@pytest.mark.parametrize("lost", [(), ("tasks.json",)])
def test_tasks_that_were_edited_since_are_refused_by_name(tmp_path, lost):
    def again(*entries):
        made = Suite("made", entries)
        return module.bench(made, baselines=["eager"], device="cpu", out=tmp_path, evaluator=OtherJudges())

    first, second = SuiteEntry(DIAGONAL, FASTER, 1), SuiteEntry(SCALED, FASTER, 1)
    again(first, second)
    for name in lost:  # a published run has its evaluations alone
        (tmp_path / name).unlink()
    edited = replace(second, task=Task(id=SCALED.id, source=SCALED.source + "# edited\n"))
    before = (tmp_path / "table.json").read_text()
    with pytest.raises(UsageError, match=r"the text of the task scaled has changed.* Choose another directory"):
        again(first, edited)
    assert (tmp_path / "table.json").read_text() == before
    again(first, second)


def judged(task: Task, speedup: float, *, strict: bool, policy: str = "file") -> Evaluation:
    return Evaluation(
        task=task.id,
        task_sha256=task.sha256,
        candidate_sha256=FASTER.sha256,
        verdict=Verdict.ACCEPTED,
        speedup=speedup,
        reference_us=50.0 if strict else 100.0,
        policy=policy,
        techniques=("again",) if policy == "baseline" else (),
        checks={"strict_fp32": strict},
    )


def test_strict_precision_has_its_own_column_and_touches_no_other(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_json("config.json", {"settings": {"strict_fp32": False}})
    for evaluation in (
        judged(DIAGONAL, 4.0, strict=False),
        judged(DIAGONAL, 1.5, strict=True),
        judged(DIAGONAL, 2.0, strict=False, policy="baseline"),
    ):
        run.append(evaluation)
    suite = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1),))
    rows = {row.baseline: row for row in module.summarise(run, suite, {}).rows if row.level is None}
    assert rows["eager"].solved.geomean == pytest.approx(4.0)
    assert rows["again"].solved.geomean == pytest.approx(2.0)
    assert rows["eager"].strict.geomean == pytest.approx(1.5)
    assert rows["again"].strict is None
    text = (tmp_path / "table.md").read_text()
    assert text.count("Geomean, TF32 off") == 1
    assert "| 1/1 | 1/1 | 0/1 | 1.50x | 1/1 |" in text


def test_two_candidates_of_one_task_are_two_entries(tmp_path):
    run = RunDirectory(tmp_path)
    worse, twin = Candidate(source=FASTER.source + "# again\n"), Task(id="twin", source=DIAGONAL.source)
    rejection = {"verdict": Verdict.REJECTED, "reason": Reason.WRONG_OUTPUT, "speedup": None}
    run.append(judged(DIAGONAL, 4.0, strict=False))
    run.append(judged(twin, 1.0, strict=False).model_copy(update=rejection | {"candidate_sha256": worse.sha256}))
    counts = module.summarise(run, Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1), SuiteEntry(twin, worse, 1))), {}).counts
    assert (counts.accepted, counts.rejected) == (1, {Reason.WRONG_OUTPUT: 1})


class PreciseJudges(OtherJudges):
    """Verdicts that tell their precision, as the judge's do."""

    def __init__(self, most=9):
        self.asked = []
        self.most = most

    def evaluate(self, jobs, stop=None):
        for job in itertools.islice(jobs, self.most):
            precision = Precision.of(dict(job.settings))
            self.asked.append(precision)
            speedup = {Precision.DEFAULT: 4.0, Precision.STRICT: 1.5, Precision.TF32_PRODUCTS: 1.25}[precision]
            found = judged(job.task, speedup, strict=precision is Precision.STRICT)
            checks = found.checks | ({"tf32_products": True} if precision is Precision.TF32_PRODUCTS else {})
            yield job, found.model_copy(update={"checks": checks, "candidate_sha256": job.candidate.sha256})


def test_three_precisions_are_judged_once_each_however_often_a_run_resumes(tmp_path):
    suite = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1),))

    def again(**too):
        judges = PreciseJudges(most=1)
        result = module.bench(suite, device="cpu", out=tmp_path, evaluator=judges, **too)
        return judges.asked, next(row for row in result.rows if row.level is None and row.baseline == "eager")

    both = {"strict_too": True, "tf32_products_too": True}
    assert again()[0] == [Precision.DEFAULT]
    asked, row = again(tf32_products_too=True)
    assert asked == [Precision.TF32_PRODUCTS]
    assert row.strict is None
    assert again(**both)[0] == [Precision.STRICT]
    asked, row = again(**both)
    assert asked == []
    speedups = [found.geomean for found in (row.solved, row.strict, row.tf32_products)]
    assert speedups == pytest.approx([4.0, 1.5, 1.25])
    text = (tmp_path / "table.md").read_text()
    assert text.count("Geomean, TF32 off | Success, TF32 off | Geomean, TF32 products | Success, TF32 products |") == 1
    assert "| 1.50x | 1/1 | 1.25x | 1/1 |" in text
    assert rescore(RunDirectory(tmp_path)).differences == []


def test_a_run_in_tf32_has_no_column_for_it_and_may_have_a_strict_one(tmp_path):
    suite, judges = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1),)), PreciseJudges()
    settings = Settings(tf32_products=True)
    result = module.bench(suite, device="cpu", out=tmp_path, settings=settings, strict_too=True, evaluator=judges)
    assert judges.asked == [Precision.TF32_PRODUCTS, Precision.STRICT]
    row = result.rows[0]
    assert (row.solved.geomean, row.strict.geomean, row.tf32_products) == (pytest.approx(1.25), pytest.approx(1.5), None)


def test_a_run_from_before_that_setting_resumes(tmp_path):
    suite, judges = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1),)), PreciseJudges()
    module.bench(suite, device="cpu", out=tmp_path, evaluator=judges)
    config = RunDirectory(tmp_path).read_json("config.json")
    assert "tf32_products" not in config["settings"]
    with pytest.raises(UsageError, match="tf32_products: null, now true"):
        module.bench(suite, device="cpu", out=tmp_path, settings=Settings(tf32_products=True), evaluator=judges)
    module.bench(suite, device="cpu", out=tmp_path, evaluator=judges)
    assert judges.asked == [Precision.DEFAULT]


@pytest.mark.exhaustive
def test_each_candidate_is_judged_in_both_precisions_when_asked(tmp_path):
    suite = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1),))
    result = module.bench(suite, device="cpu", out=tmp_path, settings=SETTINGS, strict_too=True)
    assert sorted(found.checks["strict_fp32"] for found in RunDirectory(tmp_path).evaluations()) == [False, True]
    assert result.rows[0].strict is not None


class FakePool(BarePool):
    """A `JudgePool` whose findings come from nowhere; the first device's candidates wait until all baselines are done."""

    made: ClassVar[list[tuple[tuple[str, ...], int, dict[str, frozenset[int]]]]] = []
    measured: ClassVar[dict[str, tuple[str, ...]]] = {}
    enough = threading.Event()
    fails = False

    def __init__(self, devices, settings, per_device=1, cores=None):
        self.devices = tuple(devices)
        self.made.append((self.devices, per_device, cores))

    def evaluate(self, jobs, stop=None):
        assert self.enough.wait(10)
        if self.fails:
            raise KeyboardInterrupt
        for job in jobs:
            yield job, judged(job.task, 3.0, strict=False).model_copy(update={"candidate_sha256": job.candidate.sha256})

    def rotate(self, rotations, stop=None):
        for one in rotations:
            self.measured[one.task.id] = self.devices
            found = judged(one.task, 1.5, strict=False)
            yield (
                one,
                [
                    found.model_copy(
                        update={"candidate_sha256": each.sha256, "policy": each.policy, "techniques": each.techniques}
                    )
                    for each in one.baselines
                ],
            )
            if len(self.measured) == 2:
                self.enough.set()
                while self.fails and not stop():
                    pass


@pytest.fixture
def two_devices(monkeypatch):
    for name, value in (("made", []), ("measured", {}), ("enough", threading.Event())):
        monkeypatch.setattr(FakePool, name, value)
    monkeypatch.setattr(module, "JudgePool", FakePool)
    monkeypatch.setattr(module, "devices_of", lambda name: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))


def test_baselines_are_measured_on_the_last_device_beside_candidates(tmp_path, cheap, two_devices):
    suite = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1), SuiteEntry(SCALED, None, 1)))
    module.bench(suite, baselines=["again"], out=tmp_path, spread=module.Spread(8, 10, baselines_beside=True))
    cores = {"cuda:0": frozenset(range(4)), "cuda:1": frozenset(range(4, 8))}
    wanted = [(("cuda:0",), 8, cores), (("cuda:0",), 10, cores), (("cuda:1",), 8, cores), (("cuda:1",), 10, cores)]
    assert sorted(FakePool.made, key=lambda one: one[:2]) == wanted, "each kind of work on either device"
    assert FakePool.measured == {"diagonal": ("cuda:1",), "scaled": ("cuda:1",)}, "the others wait for the candidate"
    assert len(list(RunDirectory(tmp_path).evaluations())) == 3


def test_what_is_broken_off_ends_the_work_beside_it(tmp_path, cheap, two_devices, monkeypatch):
    monkeypatch.setattr(FakePool, "fails", True)
    more = Task(id="more", source=source("a[:, None] * b * 2"))
    suite = Suite("made", tuple(SuiteEntry(task, FASTER, 1) for task in (DIAGONAL, SCALED, more)))
    with pytest.raises(KeyboardInterrupt):
        module.bench(suite, baselines=["again"], out=tmp_path, spread=module.Spread(baselines_beside=True))
    found = [one.task for one in RunDirectory(tmp_path).evaluations()]
    assert found == ["diagonal", "scaled"], "what comes after is of a pool that was closed in the middle"


def test_what_others_may_be_to_blame_for_is_done_once_more(tmp_path, suite):
    class Crowded(OtherJudges):
        def evaluate(self, jobs, stop=None):
            for job in jobs:
                changes = {
                    "verdict": Verdict.REJECTED,
                    "reason": Reason.OUT_OF_MEMORY,
                    "speedup": None,
                    "reference_us": None,
                }
                yield job, judged(job.task, 1.0, strict=False).model_copy(update=changes)

    def again(judges, retry):
        module.bench(suite, device="cpu", out=tmp_path, evaluator=judges, agenda=module.Agenda(retry=retry))
        return len(list(RunDirectory(tmp_path).evaluations()))

    blame = lambda found: found.reason is Reason.OUT_OF_MEMORY  # noqa: E731
    assert [again(Crowded(), retry) for retry in (None, None, blame, blame)] == [1, 1, 2, 2]


def test_an_error_is_forgotten_once_the_work_is_done(tmp_path, suite):
    class Broken(OtherJudges):
        def evaluate(self, jobs, stop=None):
            for job in jobs:
                yield job, InfrastructureError("no memory")

    results = [
        module.bench(suite, device="cpu", out=tmp_path, evaluator=judges, baselines=["eager"])
        for judges in (Broken(), OtherJudges())
    ]
    assert [list(result.errors) for result in results] == [["diagonal candidate"], []]
    assert [(each.counts.without_candidate, each.counts.failed) for each in results] == [(2, 1), (2, 0)]
    assert RunDirectory(tmp_path).read_json("errors.json") == {}


def test_what_failed_before_comes_last(tmp_path):
    suite = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1), SuiteEntry(SCALED, FASTER, 1)))
    taken = []

    class FirstFails(OtherJudges):
        def evaluate(self, jobs, stop=None):
            for job in jobs:
                taken.append(job.task.id)
                failed = job.task is DIAGONAL and len(taken) < 3
                found = judged(job.task, 2.0, strict=False).model_copy(update={"candidate_sha256": "0"})
                yield job, InfrastructureError("no memory") if failed else found

    for _ in range(2):
        module.bench(suite, device="cpu", out=tmp_path, evaluator=FirstFails())
    assert taken == ["diagonal", "scaled", "scaled", "diagonal"]
