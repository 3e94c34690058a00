"""The script that runs many legal schedules and compares their outputs, on the CUDA driver's stand-in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kernelwright.sass import move_to_json
from tests.gpu import stand_in

MEASURE = Path(__file__).parents[2] / "benchmarks" / "sass_schedules"
pytestmark = [pytest.mark.toolchain, pytest.mark.skipif(stand_in.COMPILER is None, reason="needs a C compiler")]


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(MEASURE))
        import execute_schedules
        import prepare

        yield prepare, execute_schedules
    sys.modules.pop("execute_schedules"), sys.modules.pop("prepare")


@pytest.fixture(scope="module")
def folder(scripts, tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels")
    scripts[0].main(path, ["softmax", "rope"])
    return path


@pytest.fixture
def execute(scripts, folder, tmp_path_factory, monkeypatch):
    monkeypatch.setenv(stand_in.VARIABLE, str(stand_in.build(tmp_path_factory.mktemp("driver"))))

    def run(out, schedules, **options):
        given = {"seconds": 100.0, "slice_size": 10, "launcher_on": stand_in.stand_in_on, **options}
        return scripts[1].execute(folder, out, schedules=schedules, **given)

    return run


@pytest.mark.exhaustive
def test_many_schedules_run_on_several_gpus_and_the_same_call_goes_on(execute, tmp_path):
    first = execute(tmp_path, 20)
    assert (first["schedules"], first["distinct"], first["wrong"], first["faults"], first["broken"]) == (20, 20, 0, 0, {})
    assert {name: found["schedules"] for name, found in first["per_kernel"].items()} == {"softmax": 10, "rope": 10}
    again = execute(tmp_path, 60, gpus=2, processes=2)
    assert again["schedules"] == 60
    assert [(call["gpus"], call["processes"]) for call in again["calls"]] == [(1, 1), (2, 2)]
    lines = [json.loads(line) for line in (tmp_path / "slices.jsonl").read_text().splitlines()]
    assert len({(line["kernel"], line["slice"]) for line in lines}) == len(lines) == 6


@pytest.mark.exhaustive
def test_wrong_outputs_are_counted_and_looked_into(execute, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_WRONG_AT", "9")
    found = execute(tmp_path, 10)
    assert (found["schedules"], found["wrong"], found["faults"]) == (10, 1, 0)
    assert found["bad"][0]["kernel"] == "rope"
    assert found["bad"][0]["moves"]


@pytest.mark.exhaustive
def test_a_fault_costs_its_process_and_nothing_else(execute, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAIL_AT", "21")
    found = execute(tmp_path, 20, processes=1)
    # Every process faults after the original's four launches and two of each of eight schedules.
    assert (found["schedules"], found["faults"], found["wrong"]) == (20, 2, 0)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in found["faults_found"][0]["fault"]
    assert all(bad["moves"] for bad in found["bad"])


@pytest.mark.exhaustive
def test_a_kernel_that_does_not_run_at_all_does_not_stop_the_others(execute, folder, tmp_path):
    broken = folder / "broken.json"
    broken.write_text((folder / "rope.json").read_text().replace("rope.cubin", "none.cubin"))
    try:
        found = execute(tmp_path, 10)
    finally:
        broken.unlink()
    assert "none.cubin" in found["broken"]["broken"] or "broken.txt" in found["broken"]["broken"]
    assert found["schedules"] == 10


@pytest.mark.exhaustive
def test_the_schedule_that_ends_its_process_is_named(execute, scripts, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_EXIT_AT", "9")
    monkeypatch.setattr(scripts[1], "MOST_FAULTS", 1)
    found = execute(tmp_path, 10)
    assert set(found["broken"]) == {"rope", "softmax"}
    fault, bad = found["faults_found"][0], found["bad"][0]
    # The original's four launches, and two of each schedule: the third one of the slice.
    assert (fault["kernel"], fault["slice"], fault["at"]) == ("rope", 0, 2)
    assert "the process ended with 41" in fault["fault"]
    kernel = scripts[1].Kernel(folder, "rope")
    third = [[move_to_json(m) for m in schedule.history] for schedule, *_ in scripts[1].schedules_of(kernel, 0, 3)][2]
    assert bad["moves"] == json.loads(json.dumps(third))
