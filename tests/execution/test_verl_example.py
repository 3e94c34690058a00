"""The worked example for verl: its reward function against our own service, its data set, its configuration."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from kernelwright.errors import InfrastructureError
from kernelwright.records.rewards import reward_named
from tests.execution.fakes import LIMIT_S, TASK, Scripted, Service

EXAMPLE = Path(__file__).parents[2] / "examples" / "verl"


def module(name):
    spec = importlib.util.spec_from_file_location(f"verl_example_{name}", EXAMPLE / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def score(tmp_path, monkeypatch):
    """As verl calls it: keyword arguments, all rollouts of a batch at once."""
    reward = module("reward")
    with Service(tmp_path / "run") as service:
        monkeypatch.setattr(reward, "_client", lambda url: Scripted(service).client())

        def batch(answers, **options):
            async def gather():
                calls = [
                    reward.compute_score(
                        data_source="kernelwright",
                        solution_str=answer,
                        ground_truth=json.dumps(TASK),
                        extra_info={"index": 0, "num_turns": 2},
                        **options,
                    )
                    for answer in answers
                ]
                return await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)

            return asyncio.run(gather())

        batch.service = service
        yield batch


def answer(word):
    """What the fake judge is told to find stands in the candidate's first line."""
    return f"## Code\n```python\n{word} = 1\nclass ModelNew:\n    pass\n```\n"


def test_each_rollout_has_its_reward_and_equal_ones_are_judged_once(score):
    found = score([answer("good"), answer("bad"), answer("good"), "I cannot do this.", ""])
    assert [one["score"] for one in found] == [1.99, 0.0, 1.99, 0.0, 0.0]
    assert [one["accepted"] for one in found] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert [one["answered"] for one in found] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert len({tuple(one) for one in found}) == 1, "verl wants the same keys of all"
    assert len(score.service.judge.submitted) == 2


def test_the_reward_is_chosen_by_name(score):
    (failed,) = score(["nothing"], reward="log")
    assert failed["score"] == reward_named("log").floor


def test_a_machine_that_fails_is_not_a_reward(score):
    with pytest.raises(InfrastructureError, match="failures in a row"):
        score([answer("broken_machine")])


def test_a_candidate_that_is_longer_than_any_kernel_gets_the_floor(score):
    (found,) = score(["```python\nclass ModelNew:\n    pass\n" + "# x\n" * 70_000 + "```"])
    assert found["score"] == 0.0
    assert score.service.judge.submitted == []


def test_verl_sees_a_coroutine_function_also_when_it_has_bound_arguments():
    assert inspect.iscoroutinefunction(partial(module("reward").compute_score, reward="log"))


def test_the_data_set_has_what_verl_and_the_reward_read(tmp_path, set_arguments):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "own.py").write_text(TASK["source"])
    out = tmp_path / "train.parquet"
    set_arguments(out, "diag_matmul", tmp_path / "own.py")
    module("make_dataset").main()
    first, second = datasets.Dataset.from_parquet(str(out), cache_dir=str(tmp_path))
    assert "ModelNew" in first["prompt"][-1]["content"]
    assert json.loads(first["reward_model"]["ground_truth"]) == "diag_matmul"
    assert json.loads(second["reward_model"]["ground_truth"]) == {"id": "own", "source": TASK["source"]}


def test_a_task_that_is_not_there_is_one_line(tmp_path, set_arguments, capsys):
    pytest.importorskip("datasets")
    set_arguments(tmp_path / "x.parquet", "diag_matmu")
    with pytest.raises(SystemExit) as ended:
        module("make_dataset").main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: Wanted a task")
    assert not (tmp_path / "x.parquet").exists()


def test_the_configuration_names_the_files_of_the_example():
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    function = config["reward"]["custom_reward_function"]
    assert (EXAMPLE.parents[1] / function["path"]).is_file()
    assert hasattr(module("reward"), function["name"])
