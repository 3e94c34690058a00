"""`kernelwright optimize` and `kernelwright bench`: the skin over the functions of the same names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kernelwright
from kernelwright import cli
from kernelwright.cli.optimize import evaluation_line
from kernelwright.errors import CandidateError, DeviceError, PolicyError, TaskError, UsageError
from kernelwright.execution.work import Baselines, Evaluate
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Reason, RunDirectory, Task, Verdict
from kernelwright.records.decisions import BaselineComparison
from kernelwright.records.screened import screened_of
from kernelwright.rewrites.wrappers import BY_DEFAULT
from kernelwright.search.bench import chosen_baselines
from kernelwright.tasks.suites import load_suite
from tests.samples import diagonal
from tests.search.fakes import FakeExecutor

TASK = diagonal(96)


def evaluation(**changes: object) -> Evaluation:
    values: dict[str, object] = {
        "task": "task",
        "task_sha256": "t",
        "candidate_sha256": "c",
        "verdict": Verdict.ACCEPTED,
        "speedup": 2.0,
        "speedup_low": 1.9,
        "speedup_high": 2.1,
        "noise_floor": 0.01,
        "source": "class ModelNew: pass",
        "techniques": ("diagonal-operand",),
    }
    return Evaluation.model_validate(values | changes)


ESTIMATE = screened_of(Task(id="task", source=TASK), Candidate(source="#"), correct=True, estimate=1.2)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch):
    """Put a function in place of the search; the skin is what is tested here."""
    import kernelwright.search.optimize

    def replace(function):
        monkeypatch.setattr(kernelwright.search.optimize, "optimize", function)

    return replace


@pytest.fixture
def suite_run(monkeypatch: pytest.MonkeyPatch):
    """Put a function in place of a suite's judging, or of its search; the skin is what is tested here."""
    import kernelwright.search.bench
    import kernelwright.search.suite

    def replace(function):
        monkeypatch.setattr(kernelwright.search.bench, "bench", function)
        monkeypatch.setattr(kernelwright.search.suite, "search_suite", function)

    return replace


def optimize(*arguments: str) -> int:
    return cli.main(["optimize", "task.py", "--device", "cpu", "--out", "run", *arguments])


def found(best: Evaluation | None, tell: bool = False):
    from kernelwright.search.optimize import OptimizeResult, SearchEvent

    def search(task, *, policy, device, budget, judged, out, settings, on_event, composer, servers, baselines):
        assert composer is None
        assert baselines is None
        assert servers.server(compiling=False).process.poll() is None, "they import torch while the command does"
        assert judged == 3
        assert (task.source, policy.name, device, budget) == (TASK, "builtin", "cpu", 5)
        on_event(SearchEvent("judging \x1b[31m"))
        on_event(SearchEvent("judged", evaluation(), 1))
        return OptimizeResult(out, best, 1)

    return search


def test_what_was_found_is_one_json_object(place, search, capsys):
    search(found(evaluation()))
    assert optimize("--budget", "5", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "task": "task",
        "device": "cpu",
        "run": "run",
        "evaluations": 1,
        "screened": 0,
        "best": {"speedup": 2.0, "speedup_low": 1.9, "source": "class ModelNew: pass"},
        "beside": None,
        "drop_in": None,
    }
    assert "1/5  improvement  2x [1.9, 2.1], noise floor 1.00%  diagonal-operand" in captured.err
    assert "\x1b[31m" not in captured.err


def test_finding_nothing_is_a_result(place, search, capsys):
    search(found(None))
    assert optimize("--budget", "5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["best"] is None
    assert optimize("--budget", "5") == 0
    assert "none: no improvement was confirmed" in capsys.readouterr().out


def test_baselines_are_named_with_what_is_handed_out(place, search, capsys):
    from kernelwright.search.optimize import DROP_IN, OptimizeResult

    def searched(task, *, out, baselines, **_):
        assert baselines == ["compile", "cudagraph-fresh"]
        beside = BaselineComparison(
            baselines={"compile": 1.95, "cudagraph-fresh": 0.9},
            best="compile",
            speedup=1.026,
            low=0.95,
            high=1.1,
            is_ahead=False,
        )
        return OptimizeResult(out, evaluation(), 1, beside=beside, drop_in=out / DROP_IN)

    search(searched)
    assert optimize("--baselines", "compile, cudagraph-fresh") == 0
    lines = capsys.readouterr().out.splitlines()
    said = (
        "baselines    compile 1.95x, cudagraph-fresh 0.90x; not certainly ahead of the fastest, compile: 1.026x [0.95, 1.1]"
    )
    assert said in lines
    assert "drop-in      run/optimized.py" in lines
    assert any(line.endswith("1.026x (0.950 to 1.100) over the best stock configuration, compile") for line in lines)


def test_baselines_that_there_are_not_are_refused(place, capsys):
    assert optimize("--baselines", "compiled") == 2
    assert "Wanted baselines from eager, compile" in capsys.readouterr().err
    assert optimize("--baselines", "cudnn") == 3
    assert "Wanted a GPU for the baseline cudnn" in capsys.readouterr().err
    assert optimize("--baselines", "compile", "--check-only") == 2
    assert "found others. Name eager alone" in capsys.readouterr().err
    assert not (place / "run").exists()


class Judges(FakeExecutor):
    """An executor with one verdict for each judgement, and baselines all as fast as is said."""

    def __init__(self, *speedups: float, compiled: float | None = None, **changes: object) -> None:
        super().__init__(
            {}, lambda task: DeviceError("no memory") if compiled is None else compiled, {Evaluate: 1, Baselines: 1}
        )
        self.speedups, self.changes = list(speedups), changes

    def verdict(self, work):
        speedup = self.speedups.pop(0)
        low = {"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1}
        hashes = {"task_sha256": work.task.sha256, "candidate_sha256": work.candidate.sha256}
        return evaluation(source=work.candidate.source, **low, **hashes, **self.changes)


class OneIdea:
    name = "one-idea"

    def propose(self, context, count):
        return [Candidate(source="class ModelNew: pass", policy="one-idea", techniques=("idea",))]


def test_a_search_says_what_lasts_and_goes_on_where_it_was(place):
    said: list[str] = []

    def hear(event):
        if event.lasting:
            said.append(event.message)

    settings = {"policy": OneIdea(), "device": "cpu", "out": "run", "on_event": hear}
    lost = kernelwright.optimize("task.py", **settings, evaluator=Judges(2.0, 1.0))
    assert (lost.beside, lost.drop_in) == (None, None)
    assert (lost.best, lost.evaluations) == (None, 1)
    lost_words = "the improvement of diagonal-operand did not hold when measured again"
    assert said == ["the policy has nothing more to try", lost_words]
    said.clear()
    again = kernelwright.optimize("task.py", **settings, evaluator=Judges())
    assert (again.best, again.evaluations) == (None, 1)
    assert said[0] == "resuming after 1 proposals"


@pytest.mark.parametrize("compiled", [1.5, 1.9, None])
def test_a_drop_in_says_how_it_compares_with_the_baselines_asked_for(place, compiled):
    said = []
    settings = {"policy": OneIdea(), "device": "cpu", "out": "run", "on_event": lambda event: said.append(event.message)}
    judges = Judges(2.0, 2.0, compiled=compiled)
    result = kernelwright.optimize("task.py", **settings, evaluator=judges, baselines=["eager", "compile"])
    assert result.best is not None
    assert result.drop_in == Path("run/optimized.py")
    assert sorted(path.name for path in place.glob("run/*.py")) == ["optimized.py"]
    text = (place / "run" / "optimized.py").read_text()
    assert "from optimized import ModelNew" in text
    if compiled is None:
        assert result.beside is None
        assert "baselines could not be measured: no memory" in said
        return
    assert result.beside is not None
    assert (result.beside.baselines, result.beside.best) == ({"compile": compiled}, "compile")
    assert (result.beside.low, result.beside.high) == (1.9 / (1.05 * compiled), 2.1 / (0.95 * compiled))
    assert f"Baselines over eager: compile {compiled:.3f}x. Over the best of them, compile, this is" in text
    # What is on record is not measured again.
    assert kernelwright.optimize("task.py", **settings, evaluator=Judges(), baselines=["compile"]) == result


def test_on_a_gpu_stock_configurations_are_measured_unless_others_are_named():
    timed = Settings()
    assert chosen_baselines(None, "cuda:0", timed, None) == [*BY_DEFAULT]
    assert chosen_baselines(None, "cpu", timed, None) == []
    assert chosen_baselines(None, "cuda:0", Settings(timed=False), None) == []
    assert chosen_baselines(["eager"], "cuda:0", timed, None) == []
    assert chosen_baselines(["cudnn"], "cuda:0", timed, None) == ["cudnn"]


def test_baselines_take_an_evaluator_that_measures_them_together(place):
    only_judges = FakeExecutor({}, slots={Evaluate: 1})
    with pytest.raises(UsageError, match="an evaluator such as LocalExecutor"):
        kernelwright.optimize("task.py", out="run", policy=OneIdea(), evaluator=only_judges, baselines=["compile"])


def test_a_candidate_that_is_not_there_is_an_error_of_its_own(place):
    with pytest.raises(CandidateError, match="Wanted a candidate"):
        kernelwright.evaluate("task.py", "nowhere.py", device="cpu")


def test_text_in_the_place_of_a_path_is_refused_and_told_its_record(place):
    with pytest.raises(
        CandidateError, match=r"found the text of one\. Give kernelwright\.records\.Candidate\(source=text\)"
    ):
        kernelwright.evaluate("task.py", "import torch\n", device="cpu")
    with pytest.raises(TaskError, match=r"Give kernelwright\.records\.Task\(id=NAME, source=text\)"):
        kernelwright.optimize("import torch\n", out="run")


def test_the_verbs_are_listed_before_they_are_loaded():
    assert {"evaluate", "optimize", "bench"} <= set(dir(kernelwright))


def test_a_budget_of_nothing_is_refused_and_leaves_nothing(place):
    with pytest.raises(UsageError, match="at least one proposal; found 0"):
        kernelwright.optimize("task.py", out="run", budget=0)
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("records", "kept"),
    [
        ([evaluation()], "1 finished evaluations are"),
        ([ESTIMATE, ESTIMATE, evaluation()], "2 estimates and 1 finished evaluations are"),
        ([ESTIMATE, ESTIMATE], "2 estimates and 0 finished evaluations are"),
    ],
)
def test_an_interrupt_says_what_is_kept_and_how_to_go_on(place, search, capsys, records, kept):
    def interrupted(task, *, out, **_):
        run = RunDirectory(out)
        for record in records:
            run.append(record)
        raise KeyboardInterrupt

    search(interrupted)
    assert optimize() == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == f"interrupted: {kept} in run; the same command with --out run goes on"


def test_a_failing_policy_is_infrastructure(place, search, capsys):
    def failing(*_, **__):
        raise PolicyError("Wanted a policy that answers; found none. Try again.")

    search(failing)
    assert optimize() == 3
    assert capsys.readouterr().err == "error: Wanted a policy that answers; found none. Try again.\n"


def test_a_rejection_in_progress_shows_its_reason():
    rejected = evaluation(
        verdict=Verdict.REJECTED,
        reason=Reason.WRONG_OUTPUT,
        speedup=None,
        speedup_low=None,
        speedup_high=None,
    )
    assert evaluation_line(rejected) == "rejected     wrong-output  diagonal-operand"


BLOCKS = [{"process": process, "reference_us": [1.0], "candidate_us": [1.0]} for process in range(3)]
MISS = {"speedup": 1.1, "speedup_low": 1.03, "speedup_high": 1.17, "noise_floor": 0.05, "blocks": BLOCKS}


def test_a_near_miss_in_progress_shows_the_floor_that_it_missed():
    assert evaluation_line(evaluation(**MISS)) == "near miss    1.1x [1.03, 1.17], noise floor 5.00%  diagonal-operand"
    slow = evaluation(speedup=0.9, speedup_low=0.8, noise_floor=None)
    assert evaluation_line(slow) == "accepted     0.9x [0.8, 2.1], no noise floor  diagonal-operand"


def test_a_near_miss_is_kept_and_the_command_that_settles_it_is_printed(place, capsys, search):
    from kernelwright.search.optimize import optimize as real

    judges = Judges(1.1, 1.1, noise_floor=0.05, blocks=evaluation(**MISS).blocks)
    search(lambda task, **given: real(task, **given | {"policy": OneIdea(), "evaluator": judges}))
    assert optimize() == 0
    captured = capsys.readouterr()
    command = captured.out.splitlines()[-1].removeprefix("to settle it ")
    assert command.startswith("kernelwright evaluate task.py run/near_miss.py --device cpu --processes ")
    assert (place / "run" / "near_miss.py").read_text() == "class ModelNew: pass"
    assert "the lower end 1.000 is not above 1.050, 1 + the noise floor" in captured.out


def test_a_bench_prints_its_table_and_what_could_not_be_measured(place, capsys, suite_run):
    import kernelwright.search.bench as bench_module

    def bench(suite, *, baselines, device, out, settings, strict_too, tf32_products_too, on_event):
        assert [entry.level for entry in suite.entries] == [1, 1]
        assert baselines == ["eager", "cudnn"]
        run = RunDirectory(out)
        run.write_json("table.json", {"rows": [{"level": 1}], "tally": {"tasks": 2}})
        run.write_text("table.md", "| Level |\n")
        name = suite.entries[0].task.id
        on_event(bench_module.BenchEvent(name, "cudnn", evaluation(), 1, 2))
        on_event(bench_module.BenchEvent(name, "candidate", PolicyError("gone"), 2, 2))
        return bench_module.BenchResult(run.path, [], None, {f"{name} cudnn": "gone"})

    suite_run(bench)
    arguments = ["bench", "builtin", "--levels", "1", "--limit", "2", "--baselines", "eager, cudnn"]
    arguments += ["--device", "cpu", "--out", "run"]
    assert cli.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out).keys() == {"suite", "run", "errors", "rows", "tally"}
    assert "2/2" in captured.err
    assert "not measured: " in captured.err
    # --only twice is cumulative, and as good as a list.
    ids = [entry.task.id for entry in load_suite("builtin", levels=[1]).entries[:2]]
    assert cli.main([*arguments, "--only", ids[1], "--only", ids[0]]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "| Level |"


def test_a_search_of_a_suite_that_its_minutes_ended_says_what_is_left(place, capsys, suite_run):
    from kernelwright.search.bench import BenchResult

    outcomes = ["winner", "no-winner", "screened-only", "untouched", "untouched"]
    without_baselines = {1}

    def search_suite(suite, *, out, **_):
        run = RunDirectory(out)
        run.write_text("table.md", "| Task |\n")
        names = [entry.task.id for entry in suite.entries]
        lines = [
            {"task": name, "outcome": outcome, "ahead": False, "baselines_measured": number not in without_baselines}
            for number, (name, outcome) in enumerate(zip(names, outcomes, strict=True))
        ]
        return BenchResult(run.path, [], None, {f"{names[-1]} search": "does not run"}, lines)

    suite_run(search_suite)
    arguments = ["bench", "builtin", "--limit", str(len(outcomes)), "--policy", "builtin", "--device", "cpu", "--out", "run"]
    assert cli.main([*arguments, "--minutes", "1"]) == 0
    assert "not done  3 of 5 tasks; the same command goes on" in capsys.readouterr().out
    outcomes[2:] = ["no-winner"] * 3
    without_baselines.clear()
    assert cli.main(arguments) == 0
    assert "not done" not in capsys.readouterr().out


def test_the_tasks_of_a_suite_are_listed(capsys):
    assert cli.main(["bench", "builtin", "--levels", "1", "--limit", "2", "--list"]) == 0
    ids = capsys.readouterr().out.split()
    assert ids == [entry.task.id for entry in load_suite("builtin", levels=[1]).entries[:2]]
    assert cli.main(["bench", "builtin", "--limit", "1", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tasks"]) == 1


def test_slices_of_a_suite_are_samples_and_together_the_whole(place, suite_run):
    taken = []

    def bench(suite, **_):
        taken.append([entry.task.id for entry in suite.entries])
        raise TaskError("enough")

    suite_run(bench)
    for number in (1, 2, 3):
        assert cli.main(["bench", "builtin", "--slice", f"{number}/3", "--device", "cpu", "--out", "run"]) == 2
    whole = [entry.task.id for entry in load_suite("builtin").entries]
    assert taken == [whole[0::3], whole[1::3], whole[2::3]]
