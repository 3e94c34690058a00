"""Both levels composed, with a fake game and fake judges: what is judged, what is kept, and what a resumed run repeats."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernelwright import cli
from kernelwright.assembly.search import AssemblyResult
from kernelwright.errors import DeviceError, TaskError, UsageError
from kernelwright.gpu.launch_spec import KernelLaunch
from kernelwright.judge.schedules import Confirmation
from kernelwright.records import Evaluation, RunDirectory, Task, Verdict
from kernelwright.records.decisions import is_composed
from kernelwright.search import then_sass

TASK = Task(id="t", source="reference")


def judged(source: str, speedup: float | None, techniques: tuple[str, ...] = (), **fields) -> Evaluation:
    from kernelwright.records.canonical import sha256_of

    return Evaluation(
        task=TASK.id,
        task_sha256=TASK.sha256,
        candidate_sha256=sha256_of(source),
        verdict=Verdict.REJECTED if speedup is None else Verdict.ACCEPTED,
        speedup=speedup,
        speedup_low=speedup and speedup - 0.01,
        noise_floor=0.01,
        source=source,
        techniques=techniques,
        **fields,
    )


BEST = judged("winner", 2.0, ("fuse",), confirms=True)


class FakePool:
    """Gives the composed candidate these speedups, one after the other."""

    def __init__(self, *speedups):
        self.speedups = list(speedups)
        self.asked = []

    def evaluate(self, jobs):
        for job in jobs:
            self.asked.append(job.candidate)
            found = self.speedups.pop(0)
            if isinstance(found, Exception):
                yield job, found
            else:
                candidate = job.candidate
                yield job, judged(candidate.source, found, candidate.techniques, parent=candidate.parent)


@pytest.fixture
def composed(monkeypatch):
    """Cubins that the search handed to `compose`."""
    state = SimpleNamespace(tuned=[])

    def compose(candidate, kernels):
        state.tuned += [kernel.cubin for kernel in kernels]
        carried = candidate.model_copy(update={"source": candidate.source + " tuned"})
        return None if all(kernel.refusal for kernel in kernels) else carried

    monkeypatch.setattr(then_sass, "compose", compose)
    return state


def play(run, pool, launches=2, said=None, is_faster=True):
    target = SimpleNamespace(spec=SimpleNamespace(name="a/b c"), cubin=b"original")
    kernels = [KernelLaunch(f"kernel{number}", target, "", 1) for number in range(launches)]
    held = Confirmation(1.1, 1.05, 1.15, 0.01, 10.0, None, 6)
    return then_sass.tune_kernels(
        run,
        pool,
        TASK,
        BEST,
        tune=lambda target, out: AssemblyResult(out, {}, *((held, "greedy", out.name.encode()) if is_faster else ())),
        tell=(said if said is not None else []).append,
        capture=lambda task, candidate: kernels,
    )


def test_a_faster_composition_is_judged_twice_and_takes_the_place(tmp_path, composed):
    run, pool = RunDirectory(tmp_path), FakePool(2.5, 2.4)
    best = play(run, pool)
    assert (best.source, best.speedup, best.confirms) == ("winner tuned", 2.4, True)
    assert best.techniques == ("fuse", "tuned-schedule")
    assert best.parent == BEST.candidate_sha256
    assert composed.tuned == [b"sass-0-a_b_c", b"sass-1-a_b_c"]
    assert [found.confirms for found in run.evaluations()] == [False, True]
    assert all(is_composed(found) for found in run.evaluations())
    assert not is_composed(BEST)


@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_run_repeats_nothing(tmp_path, composed, after):
    run = RunDirectory(tmp_path)
    if after == 1:
        with pytest.raises(TaskError):
            play(run, FakePool(2.5, TaskError("killed")))
    else:
        play(run, FakePool(2.5, 2.4))
    composed.tuned.clear()
    pool = FakePool(2.4)
    assert play(run, pool).speedup == 2.4
    assert composed.tuned == []
    assert len(pool.asked) == 2 - after


@pytest.mark.parametrize(
    ("speedups", "asked"), [((None,), 1), ((1.0,), 1), ((2.5, 1.9), 2), ((2.5, None), 2)],
    ids=["rejected", "no improvement", "slower when confirmed", "rejected when confirmed"],
)  # fmt: skip
def test_what_is_not_better_leaves_the_winner_as_it_was(tmp_path, composed, speedups, asked):
    pool, said = FakePool(*speedups), []
    assert play(RunDirectory(tmp_path), pool, said=said) is BEST
    assert len(pool.asked) == asked
    assert any("as it was" in line for line in said)


def test_nothing_is_judged_when_no_kernel_got_faster(tmp_path, composed):
    pool, said = FakePool(), []
    assert play(RunDirectory(tmp_path), pool, said=said, is_faster=False) is BEST
    assert "kernel1: nothing faster was found" in said
    assert play(RunDirectory(tmp_path), pool, launches=0) is BEST
    assert pool.asked == []


def test_a_cpu_has_no_machine_code_to_tune(tmp_path, capsys):
    with pytest.raises(DeviceError, match="--then-sass"):
        then_sass.needs_gpu("cpu")
    then_sass.needs_gpu("cuda:0")
    out = str(tmp_path / "run")
    assert cli.main(["optimize", "diag_matmul", "--device", "cpu", "--then-sass", "--out", out]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_unknown_agent_is_a_usage_error():
    with pytest.raises(UsageError, match="nobody"):
        then_sass.play_with("nobody", 10, 0)
