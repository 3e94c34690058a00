"""`kernelwright optimize --policy api|local`: what the options mean, what is missing, and one search over HTTP."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelwright import cli
from kernelwright.cli.model_options import Proposer
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.errors import NothingUsableError, PolicyError
from kernelwright.models.chat import ChatModel, Completion, Message, ModelAnswer, Sampling
from kernelwright.models.transcript import Transcript
from kernelwright.records import RunDirectory
from kernelwright.records.model_costs import TRANSCRIPT
from tests.samples import diagonal

TASK = diagonal(64)

ANSWER = """## Performance Analysis
Most products are with zero.

## Algorithm Design
Scale rows.

## Code Implementation
```python
import torch


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return a[:, None] * b
```
"""

QUICK = "processes_min = 2\nprocesses_max = 2\nblocks = 3\naudits = 3\nwarmup_calls = 2\nrun_limit_s = 5.0\n"
# On a busy machine the outer clock sees others' work, and an honest candidate would be rejected for it.
QUICK += "excess_limit_us = 1e6\naudit_limit_us = 1e6\nidle_limit_us = 1e7\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "quick.toml").write_text(QUICK)
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch):
    """Put a model that says nothing in place of the real ones; returns what was asked of the factory and the search."""
    import kernelwright.models.factory
    import kernelwright.search.optimize
    from kernelwright.search.optimize import OptimizeResult

    seen: dict[str, object] = {}

    class Silent(ChatModel):
        name = "silent"

        def sample(self, prompts, *, count, sampling):
            seen["prompt"], seen["count"], seen["sampling"] = prompts[0], count, sampling
            return [[Completion(text="", prompt_tokens=0, completion_tokens=0)] * count]

    def chat_model(kind, **options):
        seen["kind"], seen["options"] = kind, options
        return Silent()

    def optimize(task, *, policy, device, budget, judged, out, settings, on_event, composer, servers, baselines):
        assert servers is None, "nothing is screened"
        from kernelwright.records.policy import Context

        RunDirectory(out).evaluations_path.touch()
        with pytest.raises(NothingUsableError) as caught:
            policy.propose(Context(task=task, device=device, history=(), seed=0), 1)
        seen["policy"], seen["refusal"] = policy.name, str(caught.value)
        return OptimizeResult(out, None, 0)

    monkeypatch.setattr(kernelwright.models.factory, "chat_model", chat_model)
    monkeypatch.setattr(kernelwright.search.optimize, "optimize", optimize)
    return seen


NEEDS_CLIENT = pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="the package openai is not installed")


def optimize(*arguments: str) -> int:
    return cli.main(["optimize", "task.py", "--device", "cpu", "--out", "run", *arguments])


def test_options_reach_the_model_the_prompt_and_the_sampling(place, opened):
    (place / "model.toml").write_text('concurrency = 3\nmodel = "overridden"\n')
    arguments = ["--policy", "api", "--model", "m", "--base-url", "http://localhost:1/v1", "--key-variable", "MY_KEY"]
    arguments += ["--model-settings", "model.toml", "--sampler", "island", "--temperature", "0.3", "--max-tokens", "77"]
    arguments += ["--samples", "5", "--patience", "9", "--exemplars", "3", "--exemplar-database", "shared.sqlite"]
    assert optimize(*arguments) == 0
    assert opened["kind"] == "api"
    assert opened["options"] == {
        "model": "m",
        "base_url": "http://localhost:1/v1",
        "key_variable": "MY_KEY",
        "concurrency": 3,
    }
    assert opened["policy"] == "silent+island"
    assert (opened["sampling"].temperature, opened["sampling"].max_tokens, opened["count"]) == (0.3, 77, 5)
    assert "10 answers in a row" in opened["refusal"]
    assert (place / "shared.sqlite").exists()
    assert not (place / "run" / "exemplars.sqlite").exists()
    assert len(list(RolloutLog(place / "run").rollouts())) == 10


def test_a_local_model_is_a_path_and_may_have_an_adapter(place, opened):
    assert optimize("--policy", "local", "--model", "folder", "--adapter", "lora") == 0
    assert (opened["kind"], opened["options"]) == ("local", {"path": "folder", "adapter": "lora"})
    assert (opened["policy"], opened["sampling"].temperature) == ("silent+bucket", 1.0)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        pytest.param(["--policy", "api"], 3, "Wanted the name of a model; found none", marks=NEEDS_CLIENT),
        pytest.param(["--policy", "api", "--model", "m"], 3, "OPENAI_API_KEY is not set", marks=NEEDS_CLIENT),
        (["--policy", "local"], 3, "none was named"),
        (["--policy", "local", "--model", "nowhere/at-all.gguf"], 3, "nowhere/at-all.gguf"),
        (["--policy", "local", "--model", "/nowhere/at-all"], 3, "there is nothing at /nowhere/at-all"),
        (["--policy", "local", "--model", "models/nothing"], 3, "there is nothing at models/nothing"),
        (["--policy", "local", "--model", "models/nothing", "--adapter", "runs/nothing"], 3, "nothing at models/nothing"),
        pytest.param(["--policy", "api", "--model", "m", "--adapter", "lora"], 2, "adapter", marks=NEEDS_CLIENT),
        (["--policy", "local", "--model", "m", "--base-url", "http://x/v1"], 2, "base_url"),
        pytest.param(
            ["--policy", "api", "--model", "m", "--base-url", "ftp://x"], 2, "address of an endpoint", marks=NEEDS_CLIENT
        ),
        (["--policy", "api", "--model", "m", "--base-url", ""], 2, "--base-url; found an empty one"),
        (["--policy", "api", "--model", "m", "--model-settings", "nowhere.toml"], 2, "nowhere.toml"),
        pytest.param(["--policy", "api", "--model-settings", "wrong.toml"], 2, "file is wrong.toml.", marks=NEEDS_CLIENT),
        pytest.param(
            ["--policy", "api", "--model", "m", "--base-url", "ftp://x", "--model-settings", "empty.toml"],
            2,
            "The file is empty.toml, besides the options.",
            marks=NEEDS_CLIENT,
        ),
        (["--policy", "api", "--model", "m", "--sampler", "best"], 2, "--sampler"),
        (["--model", "m"], 2, "Wanted --model with a language model"),
        (["--temperature", "1"], 2, "Wanted --temperature with a language model"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(place, capsys, arguments, status, words):
    (place / "wrong.toml").write_text('model = "m"\nattemps = 1\n')
    (place / "empty.toml").write_text("")
    assert optimize(*arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    assert words in captured.err
    assert not (place / "run").exists()


@NEEDS_CLIENT
def test_an_endpoint_that_is_not_there_is_infrastructure_and_says_where(place, capsys):
    (place / "model.toml").write_text("attempts = 1\n")
    arguments = ["--policy", "api", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--model-settings", "model.toml"]
    assert optimize(*arguments) == 3
    assert "http://127.0.0.1:9/v1" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.exhaustive
@NEEDS_CLIENT
def test_a_directory_whose_endpoint_answered_nothing_belongs_to_nobody(place, capsys):
    (place / "model.toml").write_text("attempts = 1\n")
    arguments = ["--policy", "api", "--base-url", "http://127.0.0.1:9/v1", "--model-settings", "model.toml"]
    for name in ("mistyped", "corrected"):
        assert optimize(*arguments, "--model", name) == 3
        assert f"Wanted answers of ApiModel('{name}'" in capsys.readouterr().err


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, PolicyError])
def test_whatever_ends_a_search_its_costs_are_said_over_all_resumptions(tmp_path, capsys, end):
    def answered():
        completion = Completion(text="x", prompt_tokens=1000, completion_tokens=100)
        answer = ModelAnswer(prompt=0, number=0, completion=completion, cost=0.25, currency="EUR")
        Transcript(tmp_path / TRANSCRIPT).append("api:m", [Message("user", "Hello")], Sampling(), answer)

    answered()
    with contextlib.suppress(KeyboardInterrupt, PolicyError), Proposer(SimpleNamespace()).accounted(tmp_path):
        answered()
        if end is not None:
            raise end
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "the language model: 2 answers, 2000 prompt tokens, 200 answer tokens, 0.5 EUR "
        "(this time 1 answer, 1000 prompt tokens, 100 answer tokens, 0.25 EUR)"
    )


def test_a_search_without_a_language_model_says_nothing_of_costs(tmp_path, capsys):
    with Proposer(SimpleNamespace()).accounted(tmp_path):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.exhaustive
@NEEDS_CLIENT
def test_a_search_over_http_before_the_real_judge(place, capsys, monkeypatch):
    from tests.models.fake_openai_server import FakeServer

    answers = iter([ANSWER])
    with FakeServer(lambda messages, seed: next(answers, "I have no further idea.")) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        arguments = ["--policy", "api", "--model", "fake", "--base-url", server.url, "--patience", "2", "--budget", "3"]
        assert optimize(*arguments, "--settings", "quick.toml", "--json") == 0
    captured = capsys.readouterr()
    names = {"task", "device", "run", "evaluations", "screened", "best", "beside", "drop_in"}
    assert json.loads(captured.out).keys() == names
    assert json.loads(captured.out)["evaluations"] == 1
    assert "2 answers in a row held none" in captured.err
    assert "the language model: 3 answers, " in captured.err
    found = [evaluation for evaluation in RunDirectory(place / "run").evaluations() if not evaluation.confirms]
    assert [evaluation.policy for evaluation in found] == ["api:fake+bucket"]
    assert found[0].accepted, found[0].detail
    exemplars = ExemplarDatabase(place / "run" / "exemplars.sqlite").exemplars(found[0].task_sha256, device="cpu")
    assert len(exemplars) == 1
    written = b"".join(path.read_bytes() for path in (place / "run").rglob("*") if path.is_file())
    assert b"sk-secret" not in written
