"""Rewards for other trainers: the grader against our own service, and the examples for verl, TRL and verifiers."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from kernelwright.contrastive.grader import Grader
from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.judge import Settings
from kernelwright.records import RunDirectory
from kernelwright.records.rewards import reward_named
from tests.execution.fakes import TASK, Scripted, Service
from tests.models.fake_openai_server import FakeServer

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = """```python
import torch
class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return a[:, None] * b
```"""
WRONG, CHEAT = GOOD.replace("* b", "* b * 2"), GOOD.replace("import torch", "import torch, os; os._exit(0)")
ANSWERS = [GOOD, WRONG, CHEAT, "I cannot do this."]
"""Answers to `diag_matmul`."""
PARTS = [(1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)]
"""What they are graded: form, right, honest."""


def module(name):
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def answer(word):
    """What the fake judge is told to find stands in the candidate's first line."""
    return f"## Code\n```python\n{word} = 1\nclass ModelNew:\n    pass\n```\n"


@pytest.fixture
def service(tmp_path):
    with Service(tmp_path / "run") as service:
        yield service


@pytest.fixture
def grade(service):
    def grade(answers, **options):
        with Grader(Scripted(service).client(), **options) as grader:
            return grader.grade([json.dumps(TASK)] * len(answers), answers)

    return grade


def test_each_rollout_has_its_grade_and_equal_ones_are_judged_once(service, grade):
    found = grade([answer("good"), answer("bad"), answer("good"), "I cannot do this.", "", answer("exited")])
    assert [one.reward for one in found] == [1.99, 0.0, 1.99, 0.0, 0.0, 0.0]
    assert [one.speedup for one in found] == [1.999, 0.0, 1.999, 0.0, 0.0, 0.0]
    assert [one.form for one in found] == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert [one.right for one in found] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert [one.honest for one in found] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert [one.why.partition(":")[0] for one in found] == [
        "", "wrong-output", "", "the answer has no code", "the answer is empty", "exited",
    ]  # fmt: skip
    assert len(service.judge.submitted) == 3


def test_the_reward_is_chosen_by_name(grade):
    (failed,) = grade(["nothing"], reward="log")
    assert failed.reward == reward_named("log").floor


def test_a_machine_that_fails_and_a_task_that_is_none_are_not_rewards(service, grade):
    with pytest.raises(InfrastructureError, match="failures in a row"):
        grade([answer("broken_machine")])
    with Grader(Scripted(service).client()) as grader, pytest.raises(UsageError, match="no-such-task"):
        grader.grade(["no-such-task"], [answer("good")])


def test_a_candidate_that_is_longer_than_any_kernel_gets_the_floor(service, grade):
    (found,) = grade(["```python\nclass ModelNew:\n    pass\n" + "# x\n" * 70_000 + "```"])
    assert (found.reward, found.form) == (0.0, 0.0)
    assert service.judge.submitted == []


@pytest.mark.exhaustive
def test_without_a_service_the_judge_is_in_this_process(tmp_path):
    run = tmp_path / "rewards"
    with Grader(out=run, device="cpu", settings=Settings.quick(threads=1)) as grader:
        found = grader.grade(["diag_matmul"] * 4, ANSWERS)
    assert [(one.form, one.right, one.honest) for one in found] == PARTS
    assert found[0].reward > 0
    assert len(list(RunDirectory(run).evaluations())) == 3


@pytest.mark.exhaustive
def test_trl_trains_with_the_judge_as_its_reward(tmp_path, monkeypatch, tiny_base):
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.chdir(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    shutil.copytree(tiny_base, "base")
    tokenizer.save_pretrained("base")
    told = []

    class Watch(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **rest):
            told.append(logs)

    def rollouts(prompts, trainer):
        texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in prompts]
        ids = [tokenizer(f"{text}<end>")["input_ids"] for text in ANSWERS]
        return {"prompt_ids": tokenizer(texts)["input_ids"], "completion_ids": ids, "logprobs": None}

    scripted = partial(trl.GRPOTrainer, rollout_func=rollouts, callbacks=[Watch()])
    monkeypatch.setattr(trl, "GRPOTrainer", scripted)
    example = module("trl/grpo")
    with Grader(out=tmp_path / "rewards", device="cpu", settings=Settings.quick(threads=1)) as grader:
        monkeypatch.setattr(example, "grader", lambda: grader)
        options = ["--device", "cpu", "--steps", "2", "--group", "4", "--tokens", "512", "--out", "trained"]
        example.main(["base", "diag_matmul", *options])
    assert (tmp_path / "trained" / "model.safetensors").exists()
    steps = [logs for logs in told if "loss" in logs]
    assert [logs["honest"] for logs in steps] == [0.75, 0.75]
    assert [logs["right"] for logs in steps] == [0.25, 0.25]
    assert steps[0]["reward_std"] > 0
    assert len(list(RunDirectory(tmp_path / "rewards").evaluations())) == 3, "the second step asked for the same candidates"


@pytest.mark.exhaustive
def test_verifiers_evaluates_a_policy_in_the_environment(tmp_path):
    pytest.importorskip("verifiers", reason="verifiers 0.4 asks for openai<3: give it an environment of its own")
    answers = iter(ANSWERS)
    with FakeServer(lambda messages, seed: next(answers), model="scripted") as endpoint:
        options = {
            "--model": "scripted", "--client.base-url": endpoint.url, "--client.api-key-var": "NONE", "-n": "1", "-r": "4",
            "--env.taskset.tasks": '["diag_matmul"]', "--env.taskset.device": "cpu", "--output-dir": "outputs",
            "--run.dir": "run",
        }  # fmt: skip
        program = "from verifiers.v1.cli.eval.main import main; main()"
        words = [word for pair in options.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-c", program, "kernelwright-judge", "--no-push", "--no-rich", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(EXAMPLES / "verifiers")},
            check=False,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "outputs" / "run" / "traces.jsonl").read_text().splitlines()
    traces = [trace for line in lines for trace in json.loads(line)["traces"]]
    found = [tuple(trace["metrics"][f"is_{part}"] for part in ("form", "right", "honest")) for trace in traces]
    assert sorted(found) == sorted(PARTS)
    scores = {trace["info"]["why"].partition(":")[0]: trace["rewards"] for trace in traces}
    assert scores["exited"]["honest"] == {"score": -1.0, "weight": 0.5}
    assert scores[""]["speedup"]["score"] > 0
    assert not any(trace["errors"] for trace in traces)


def test_verl_gets_numbers_of_the_same_names_for_each_rollout(service, monkeypatch):
    reward = module("verl/reward")
    with Grader(Scripted(service).client()) as grader:
        monkeypatch.setattr(reward, "_grader", lambda **options: grader)

        async def scores():
            given = {"data_source": "kernelwright", "ground_truth": json.dumps(TASK), "extra_info": {"index": 0}}
            return await asyncio.gather(
                *(reward.compute_score(solution_str=text, **given) for text in (answer("good"), answer("bad"), ""))
            )

        found = asyncio.run(scores())
    assert [one["score"] for one in found] == [1.99, 0.0, 0.0]
    assert {tuple(one) for one in found} == {("score", "form", "right", "speedup", "honest")}


def test_verl_sees_a_coroutine_function_also_when_it_has_bound_arguments():
    assert inspect.iscoroutinefunction(partial(module("verl/reward").compute_score, reward="log"))


def test_the_data_set_has_what_verl_and_the_reward_read(tmp_path, set_arguments):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "own.py").write_text(TASK["source"])
    out = tmp_path / "train.parquet"
    set_arguments(out, "diag_matmul", tmp_path / "own.py")
    module("verl/make_dataset").main()
    first, second = datasets.Dataset.from_parquet(str(out), cache_dir=str(tmp_path))
    assert "ModelNew" in first["prompt"][-1]["content"]
    assert first["reward_model"]["ground_truth"] == "diag_matmul"
    assert json.loads(second["reward_model"]["ground_truth"]) == {"id": "own", "source": TASK["source"]}


def test_a_task_that_is_not_there_is_one_line(tmp_path, set_arguments, capsys):
    pytest.importorskip("datasets")
    set_arguments(tmp_path / "x.parquet", "diag_matmu")
    with pytest.raises(SystemExit) as ended:
        module("verl/make_dataset").main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: Wanted a task")
    assert not (tmp_path / "x.parquet").exists()


def test_the_configuration_names_the_files_of_the_example():
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((EXAMPLES / "verl" / "grpo.yaml").read_text())
    function = config["reward"]["custom_reward_function"]
    assert (EXAMPLES.parent / function["path"]).is_file()
    assert hasattr(module("verl/reward"), function["name"])
