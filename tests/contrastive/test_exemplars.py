"""The exemplar database: what it keeps, how it merges, and what it refuses."""

from __future__ import annotations

import itertools
import multiprocessing
import sqlite3

import pytest

from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.errors import ExemplarDatabaseError, UsageError
from kernelwright.records import Reason, RunDirectory, Verdict
from tests.samples import TASK, accepted, module, rejected


@pytest.fixture
def database(tmp_path):
    return ExemplarDatabase(tmp_path / "deep" / "exemplars.sqlite")


def test_what_was_judged_comes_back(database):
    evaluation = accepted(2.0, parent="p", techniques=("triton", "tiling"), device="cuda:3", policy="api:x")
    assert database.add(evaluation)
    (found,) = database.exemplars(TASK.sha256, device="cuda")
    assert (found.task, found.task_sha256, found.candidate_sha256) == (TASK.id, TASK.sha256, evaluation.candidate_sha256)
    assert (found.source, found.parent, found.techniques) == (evaluation.source, "p", ("triton", "tiling"))
    assert (found.score, found.improvement, found.confirmed) == (evaluation.speedup_low, True, False)
    assert (found.verdict, found.reason, found.policy, found.device) == (Verdict.ACCEPTED, None, "api:x", "cuda")
    assert found.started == evaluation.started


def test_exemplars_are_accepted_and_timed_and_best_first(database):
    slow, fast = accepted(0.8), accepted(3.0)
    wrong = rejected(Reason.WRONG_OUTPUT)
    untimed = accepted(speedup=None, speedup_low=None)
    assert database.add_all([slow, wrong, fast, untimed]) == 4
    names = [found.candidate_sha256 for found in database.exemplars(TASK.sha256, device="cpu")]
    assert names == [fast.candidate_sha256, slow.candidate_sha256]
    best = database.best(TASK.sha256, device="cpu")
    assert best is not None
    assert best.candidate_sha256 == fast.candidate_sha256


def test_tasks_and_devices_are_kept_apart(database):
    source = module()
    database.add_all([accepted(2.0, source), accepted(5.0, source, device="cuda:0"), accepted(3.0, source, task_sha256="t")])
    assert [found.score for found in database.exemplars(TASK.sha256, device="cpu")] == [1.9]
    assert [found.score for found in database.exemplars(TASK.sha256, device="cuda:1")] == [4.75]
    assert database.best("unknown", device="cpu") is None
    assert len(database.exemplars("t", device="cpu")) == 1


def measurements():
    source = module(note="measured again and again")
    return [
        accepted(4.0, source),
        accepted(3.0, source),
        accepted(2.0, source, confirms=True),
        accepted(2.5, source, confirms=True),
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_confirming_measurement_replaces_the_first_in_any_order(tmp_path, order):
    database = ExemplarDatabase(tmp_path / "d.sqlite")
    every = measurements()
    assert [database.add(every[index]) for index in order] == [True, False, False, False]
    best = database.best(TASK.sha256, device="cpu")
    assert best is not None
    assert (best.score, best.confirmed) == (pytest.approx(1.9), True)


def test_a_candidate_that_failed_its_confirmation_is_no_exemplar(database):
    source = module()
    database.add(accepted(9.0, source))
    assert not database.add(rejected(Reason.NONDETERMINISTIC, source=source, confirms=True))
    assert database.exemplars(TASK.sha256, device="cpu") == []


def test_of_two_first_measurements_the_worse_counts(database):
    one, other = module(note="one"), module(note="other")
    database.add_all([accepted(2.0, one), rejected(source=one), rejected(source=other), accepted(2.0, other)])
    assert database.exemplars(TASK.sha256, device="cpu") == []


def test_a_confirmation_may_also_raise_a_score(database):
    source = module()
    database.add_all([accepted(1.5, source), accepted(2.0, source, confirms=True)])
    best = database.best(TASK.sha256, device="cpu")
    assert best is not None
    assert best.score == pytest.approx(1.9)


def test_a_run_directory_is_imported_once(database, tmp_path):
    run = RunDirectory(tmp_path / "run")
    for evaluation in (accepted(2.0), rejected()):
        run.append(evaluation)
    assert database.import_run(run.path) == 2
    assert database.import_run(run.path) == 0
    with pytest.raises(UsageError, match="found none"):
        database.import_run(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_opening_again_finds_what_was_there(database):
    database.add(accepted(2.0))
    assert len(ExemplarDatabase(database.path).exemplars(TASK.sha256, device="cpu")) == 1


def test_another_version_is_refused(database):
    database.add(accepted())
    connection = sqlite3.connect(database.path)
    connection.execute("PRAGMA user_version = 99")
    connection.commit()
    connection.close()
    with pytest.raises(ExemplarDatabaseError, match="found version 99"):
        ExemplarDatabase(database.path)


def test_other_files_are_refused_and_left_alone(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, and longer than the header of one: " + "x" * 200)
    with pytest.raises(ExemplarDatabaseError, match="not a database"):
        ExemplarDatabase(text)
    assert text.read_text().startswith("not a database")
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(ExemplarDatabaseError, match="something else"):
        ExemplarDatabase(other)
    with pytest.raises(ExemplarDatabaseError, match="Choose another path"):
        ExemplarDatabase(text / "below-a-file.sqlite").add(accepted())
    with pytest.raises(ExemplarDatabaseError, match="found a folder") as error:
        ExemplarDatabase(tmp_path)
    assert error.value.exit_status == 2


def _write(path, barrier, writer):
    barrier.wait()
    database = ExemplarDatabase(path)
    for number in range(10):
        database.add(accepted(1.5, module(note=f"{writer} {number}")))
        database.add(accepted(1.0 + writer, module(note="everybody's")))


def test_several_processes_create_and_write_at_once(tmp_path):
    path = tmp_path / "shared.sqlite"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    writers = [context.Process(target=_write, args=(path, barrier, writer)) for writer in range(1, 5)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(timeout=60)
    assert [process.exitcode for process in writers] == [0] * 4
    database = ExemplarDatabase(path)
    every = database.exemplars(TASK.sha256, device="cpu")
    assert len(every) == 41
    shared = [found for found in every if "everybody" in found.source]
    assert [found.score for found in shared] == [pytest.approx(1.9)]
    assert [found.name for found in tmp_path.iterdir() if found.name.startswith(".")] == []
