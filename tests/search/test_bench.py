"""`bench` through the real judge: candidates in full, the baselines of a task in one rotation; and its resumption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernelwright
from kernelwright.errors import DeviceError, InfrastructureError, UsageError
from kernelwright.execution.executor import LocalExecutor
from kernelwright.execution.work import Baselines, Evaluate
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Reason, RunDirectory, Task, Verdict
from kernelwright.records.models import Precision
from kernelwright.records.rescore import rescore
from kernelwright.rewrites.wrappers import baseline_source
from kernelwright.search.bench import bench, summarise
from kernelwright.tasks.entries import Suite, SuiteEntry
from tests.search.fakes import FakeExecutor, Proposal

SETTINGS = Settings.quick(threads=1, timed=False, thorough=False)


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
        ("class $name($base):\n    def forward(self, *inputs):\n        return super().forward(*inputs).clone()\n",),
        "",
    )
    wrong = (("class $name($base):\n    def forward(self, *inputs):\n        return super().forward(*inputs) + 1\n",), "")
    monkeypatch.setattr("kernelwright.rewrites.wrappers.BASELINES", {"again": again, "wrong": wrong})
    monkeypatch.setattr("kernelwright.search.bench.ALL_BASELINES", ("eager", "again", "wrong"))


@pytest.fixture
def executor():
    with LocalExecutor(["cpu"], SETTINGS) as executor:
        yield executor


@pytest.mark.exhaustive
def test_a_suite_is_measured_once_and_resumed(tmp_path, suite, cheap, executor):
    events = []
    arguments = {
        "baselines": ["eager", "again", "wrong"],
        "device": "cpu",
        "out": tmp_path,
        "settings": SETTINGS,
        "evaluator": executor,
    }
    first = bench(suite, **(arguments | {"baselines": ["eager"]}), on_event=events.append)
    assert [(event.task, event.what, event.done, event.total) for event in events] == [("diagonal", "candidate", 1, 1)]
    assert not first.errors
    assert "3 tasks, 2 without a candidate. Of the candidates 1 build" in (tmp_path / "table.md").read_text()

    events.clear()
    result = bench(suite, **arguments, on_event=events.append)
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
    bench(suite, **arguments, on_event=events.append)
    assert {event.task for event in events} == {"broken"}, "an error is no measurement: it is still owed"


@pytest.mark.parametrize(("baselines", "words"), [(["eager", "nonsense"], "nonsense"), (["eager"], "brings no candidates")])
def test_what_cannot_be_measured_is_said_and_leaves_nothing(tmp_path, baselines, words):
    with pytest.raises(UsageError, match=words):
        bench(Suite("made", (SuiteEntry(SCALED, None, 1),)), baselines=baselines, device="cpu", out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cudagraph", "cudagraph-fresh", "cudnn"])
def test_a_baseline_that_needs_a_gpu_is_not_eager_under_another_name(tmp_path, suite, name):
    with pytest.raises(DeviceError, match=f"Wanted a GPU for the baseline {name}; found the CPU alone"):
        bench(suite, baselines=["eager", name], device="cpu", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def executor_of(speedup=3.0, kinds=(Evaluate,), gains=1.5, **changes):
    """An executor that gives every candidate the same speedup."""
    script = {task.id: [Proposal("file", speedup, **changes)] for task in (DIAGONAL, SCALED, BROKEN)}
    return FakeExecutor(script, lambda task: gains, dict.fromkeys(kinds, 1))


def test_any_executor_judges_candidates_and_stays_open(tmp_path, suite):
    executor = executor_of()
    result = kernelwright.bench(suite, baselines=["eager"], device="cpu", out=tmp_path, evaluator=executor)
    assert [found.speedup for found in RunDirectory(tmp_path).evaluations()] == [3.0]
    assert {round(row.solved.geomean, 6) for row in result.rows if row.level is None} == {3.0}
    assert executor.closed == []


def test_an_executor_that_cannot_measure_baselines_together_is_refused_for_them(tmp_path, suite):
    with pytest.raises(UsageError, match="measures baselines together, such as LocalExecutor; found FakeExecutor"):
        kernelwright.bench(suite, device="cpu", out=tmp_path / "run", evaluator=executor_of())
    assert not list(tmp_path.iterdir())


def test_a_directory_of_another_run_is_refused(tmp_path, suite):
    given = {"device": "cpu", "out": tmp_path, "evaluator": executor_of()}
    bench(suite, settings=SETTINGS, **given)
    with pytest.raises(UsageError, match="another `settings`"):
        bench(suite, **given)


@pytest.mark.parametrize("lost", [(), ("tasks.json",)])
def test_tasks_that_were_edited_since_are_refused_by_name(tmp_path, lost):
    def again(*entries):
        made = Suite("made", entries)
        return bench(made, baselines=["eager"], device="cpu", out=tmp_path, evaluator=executor_of())

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


def test_two_candidates_of_one_task_are_two_entries(tmp_path):
    run = RunDirectory(tmp_path)
    worse, twin = Candidate(source=FASTER.source + "# again\n"), Task(id="twin", source=DIAGONAL.source)
    rejection = {"verdict": Verdict.REJECTED, "reason": Reason.WRONG_OUTPUT, "speedup": None}
    run.append(judged(DIAGONAL, 4.0, strict=False))
    run.append(judged(twin, 1.0, strict=False).model_copy(update=rejection | {"candidate_sha256": worse.sha256}))
    counts = summarise(run, Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1), SuiteEntry(twin, worse, 1))), {}).counts
    assert (counts.accepted, counts.rejected) == (1, {Reason.WRONG_OUTPUT: 1})


class PreciseExecutor(FakeExecutor):
    """Speedups by the precision that was asked for; breaks off after so many."""

    def __init__(self, most=9):
        super().__init__({}, slots={Evaluate: 1})
        self.most = most

    @property
    def asked(self):
        return [Precision.of(dict(one.settings)) for one in self.judgements]

    def submit(self, work):
        if len(self.submitted) == self.most:
            raise KeyboardInterrupt
        super().submit(work)

    def verdict(self, work):
        speedups = {Precision.DEFAULT: 4.0, Precision.STRICT: 1.5, Precision.TF32_PRODUCTS: 1.25}
        found = super().verdict(work)
        precision = Precision.of(found.checks)
        us = 50.0 if precision is Precision.STRICT else 100.0
        return found.model_copy(update={"speedup": speedups[precision], "reference_us": us})


def test_three_precisions_are_judged_once_each_however_often_a_run_resumes(tmp_path):
    suite = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1),))

    def again(**too):
        executor = PreciseExecutor()
        result = bench(suite, device="cpu", out=tmp_path, evaluator=executor, **too)
        return executor.asked, next(row for row in result.rows if row.level is None and row.baseline == "eager")

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
    suite, executor = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1),)), PreciseExecutor()
    settings = Settings(tf32_products=True)
    result = bench(suite, device="cpu", out=tmp_path, settings=settings, strict_too=True, evaluator=executor)
    assert executor.asked == [Precision.TF32_PRODUCTS, Precision.STRICT]
    row = result.rows[0]
    assert (row.solved.geomean, row.strict.geomean, row.tf32_products) == (pytest.approx(1.25), pytest.approx(1.5), None)


def test_a_run_from_before_that_setting_resumes(tmp_path):
    suite, executor = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1),)), PreciseExecutor()
    bench(suite, device="cpu", out=tmp_path, evaluator=executor)
    config = RunDirectory(tmp_path).read_json("config.json")
    assert "tf32_products" not in config["settings"]
    with pytest.raises(UsageError, match="tf32_products: null, now true"):
        bench(suite, device="cpu", out=tmp_path, settings=Settings(tf32_products=True), evaluator=executor)
    bench(suite, device="cpu", out=tmp_path, evaluator=executor)
    assert executor.asked == [Precision.DEFAULT]


def test_candidates_come_before_baselines_and_each_is_told(tmp_path):
    suite = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1), SuiteEntry(SCALED, FASTER, 1)))
    executor, heard = executor_of(kinds=(Evaluate, Baselines)), []
    bench(suite, baselines=["eager", "compile"], device="cpu", out=tmp_path, evaluator=executor, on_event=heard.append)
    kinds = [type(one) for one in executor.submitted]
    assert kinds == [Evaluate, Evaluate], "a given candidate has its final at once"
    assert [event.done for event in heard] == [1, 2, 3, 4]
    assert {(event.task, event.what) for event in heard} == {
        (task, what) for task in ("diagonal", "scaled") for what in ("candidate", "compile")
    }
    bench(
        suite,
        baselines=["compile"],
        device="cpu",
        out=tmp_path,
        evaluator=(again := executor_of(kinds=(Evaluate, Baselines))),
    )
    assert again.submitted == []


def test_an_error_is_forgotten_once_the_work_is_done(tmp_path, suite):
    results = [
        bench(suite, device="cpu", out=tmp_path, evaluator=executor_of(speedup), baselines=["eager"])
        for speedup in (InfrastructureError("no memory"), 3.0)
    ]
    assert [list(result.errors) for result in results] == [["diagonal candidate"], []]
    assert [(each.counts.without_candidate, each.counts.failed) for each in results] == [(2, 1), (2, 0)]
    assert RunDirectory(tmp_path).read_json("errors.json") == {}


def test_what_failed_before_comes_last(tmp_path):
    suite, taken = Suite("made", (SuiteEntry(DIAGONAL, FASTER, 1), SuiteEntry(SCALED, FASTER, 1))), []
    for fails in (True, False):
        executor = executor_of()
        executor.script["diagonal"] = [Proposal("file", InfrastructureError("no memory") if fails else 2.0)]
        executor.script["scaled"] = [Proposal("file", InfrastructureError("lost") if fails else 2.0)]
        run = RunDirectory(tmp_path)
        bench(suite, device="cpu", out=tmp_path, evaluator=executor)
        taken += [task for task, _ in executor.judged]
        if fails:
            run.write_json("errors.json", {"diagonal candidate": "no memory"})
    assert taken == ["diagonal", "scaled", "scaled", "diagonal"]


@pytest.mark.parametrize(
    ("layer", "able"),
    [("Linear(4, 4)", set()), ("Conv1d(4, 4, 1)", {"cudnn"}), ("Conv2d(4, 4, 1)", {"cudnn", "channels-last"})],
)
def test_settings_for_convolutions_are_no_baselines_of_a_model_without(layer, able):
    task = Task(id="one", source=f"import torch\nclass Model(torch.nn.{layer.partition('(')[0]}):\n    pass\n")
    sizes = [int(size) for size in layer.partition("(")[2].rstrip(")").split(",")]
    built = set()
    for name in ("cudnn", "channels-last"):
        scope = {}
        exec(baseline_source(task, name), scope)
        try:
            scope["ModelNew"](*sizes)
            built.add(name)
        except TypeError:
            pass
    assert built == able


def test_a_baseline_with_fresh_outputs_copies_what_the_next_call_overwrites(monkeypatch):
    kept = {}
    monkeypatch.setattr(torch, "compile", lambda forward, mode: kept.setdefault("call", lambda x: (kept["buffer"], mode)))
    kept["buffer"], scope = torch.ones(2), {}
    task = Task(
        id="one", source="import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    )
    exec(baseline_source(task, "reduce-overhead-fresh"), scope)
    output, mode = scope["ModelNew"]()(torch.zeros(2))
    assert (output.tolist(), mode) == ([1.0, 1.0], "reduce-overhead")
    assert output.data_ptr() != kept["buffer"].data_ptr()
