"""`kernelwright serve`: a real server, a real judge, a real kill; and what it refuses to start with."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx

from kernelwright import cli
from kernelwright.execution.service.client import ServiceClient
from kernelwright.execution.service.protocol import EvaluationRequest, State, TaskText
from kernelwright.records import RunDirectory

TOKEN = "correct-horse-battery"
LIMIT_S = 90

TASK = """import torch, time


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + 3


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
"""

GOOD = TASK.split("def get_inputs")[0].replace("class Model(", "class ModelNew(").strip() + "\n"

SETTINGS = """
processes_min = 2
processes_max = 2
blocks = 2
audits = 2
warmup_calls = 1
build_limit_s = 5
run_limit_s = 5
threads = 1
excess_limit_us = 1e6
audit_limit_us = 1e6
idle_limit_us = 1e7
"""
"""Of these the last three: on a busy machine the outer clock sees others' work, and honest candidates would be rejected."""


def request(candidate: str = GOOD) -> EvaluationRequest:
    return EvaluationRequest(task=TaskText(id="relu", source=TASK), candidate=candidate, reward="lower-bound")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KERNELWRIGHT_TOKEN", raising=False)
    (tmp_path / "quick.toml").write_text(SETTINGS)
    return tmp_path


@contextmanager
def serving(*arguments: str):
    """A server in a process of its own, and its address."""
    program = "import sys; from kernelwright.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--device", "cpu", "--out", "run", *arguments]
    environment = {**os.environ, "KERNELWRIGHT_TOKEN": TOKEN}
    with (
        open("server.log", "a") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), Path("server.log").read_text()
            yield process, url
        finally:
            process.kill()


def verl_score(url: str, answer: str) -> dict[str, float]:
    """As a verl worker would get it: in another process, from the worked example."""
    program = (
        "import asyncio, importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('reward', sys.argv[1])\n"
        "reward = importlib.util.module_from_spec(spec); spec.loader.exec_module(reward)\n"
        "call = reward.compute_score(data_source='', solution_str=sys.argv[2], ground_truth=sys.argv[3])\n"
        "print(json.dumps(asyncio.run(call)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    example = Path(__file__).parents[2] / "examples" / "verl" / "reward.py"
    task = json.dumps({"id": "relu", "source": TASK})
    done = subprocess.run(
        [sys.executable, "-c", program, str(example), answer, task],
        env={**os.environ, "KERNELWRIGHT_URL": url, "KERNELWRIGHT_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def descendants(pid: int) -> list[int]:
    """Of a process, as handles (pidfd_open)."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return [os.pidfd_open(member) for member in family[1:]]


@pytest.mark.exhaustive
def test_a_service_judges_survives_a_kill_and_ends_in_order(place):
    with serving("--settings", "quick.toml") as (process, url):
        client = ServiceClient(url, TOKEN)
        good = client.evaluate(request())
        wrong = client.evaluate(request(GOOD.replace("+ 3", "+ 4")))
        assert verl_score(url, f"```python\n{GOOD}```")["score"] == good.reward.value
        assert good.evaluation.accepted, good.evaluation.detail
        assert 0 < good.evaluation.speedup_low <= good.evaluation.speedup <= good.evaluation.speedup_high
        assert (wrong.evaluation.reason, wrong.reward.value) == ("wrong-output", 0.0)
        slow = request("import time; time.sleep(1000)").model_dump_json(exclude_defaults=True)
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        begun = httpx.post(f"{url}/v1/evaluations?wait_s=0.5", content=slow, headers=headers)
        assert begun.json()["state"] == State.RUNNING
        handles = descendants(process.pid)
        assert len(handles) >= 3  # the judge, its fork server, its worker
        process.kill()
        process.wait(LIMIT_S)
    for handle in handles:
        assert select.select([handle], [], [], LIMIT_S)[0], "a process was left behind"
        os.close(handle)
    assert len(list(RunDirectory(place / "run").evaluations())) == 2

    with serving("--settings", "quick.toml") as (process, url):
        client = ServiceClient(url, TOKEN)
        again = client.evaluate(request())
        assert again.reused
        assert again.evaluation == good.evaluation
        assert again.reward == good.reward
        assert descendants(process.pid) == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        assert process.stdout.read() == ""
    log = Path("server.log").read_text()
    assert "2 evaluations on record in run" in log
    assert log.splitlines()[-1].startswith("ended: 2 finished evaluations are in run")
    assert TOKEN not in log


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    return line


def serve(*arguments: str) -> int:
    return cli.main(["serve", "--port", "0", "--device", "cpu", "--out", "run", *arguments])


def test_others_may_not_reach_a_service_without_a_token(place, capsys):
    assert serve("--host", "0.0.0.0") == 2
    assert "KERNELWRIGHT_TOKEN" in error_of(capsys)
    assert not (place / "run").exists()


@pytest.mark.parametrize("token", ["", "short", "with a space in it all", "zeichen-ohne-ascii-ü"])
def test_a_token_that_can_be_guessed_is_refused(place, capsys, monkeypatch, token):
    monkeypatch.setenv("KERNELWRIGHT_TOKEN", token)
    assert serve() == 2
    line = error_of(capsys)
    assert "openssl rand" in line
    assert not token or token not in line
    assert "KERNELWRIGHT_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("mode", "text", "words"), [(0o644, TOKEN, "chmod 600"), (0o600, "short", "16"), (None, "", "No such")]
)
def test_a_token_file_is_only_for_its_owner(place, capsys, mode, text, words):
    if mode is not None:
        (place / "token").write_text(text)
        (place / "token").chmod(mode)
    assert serve("--token-file", "token") == 2
    assert words in error_of(capsys)


def test_a_host_that_does_not_exist_is_wrong_usage(place, capsys):
    assert serve("--host", "no-such-host.invalid") == 2
    assert "--host" in error_of(capsys)


def test_a_port_that_is_taken_is_infrastructure(place, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve("--port", str(taken.getsockname()[1])) == 3
    assert "--port" in error_of(capsys)


@pytest.mark.parametrize("name", ["fastapi", "uvicorn"])
def test_a_missing_package_names_the_extra(place, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert serve() == 2
    assert "pip install 'kernelwright[serve]'" in error_of(capsys)


def test_a_directory_of_another_kind_is_refused(place, capsys):
    RunDirectory(place / "run").write_json("config.json", {"kind": "optimize"})
    assert serve() == 2
    assert "another `kind`" in error_of(capsys)


def test_a_device_that_is_not_there_is_infrastructure(place, capsys):
    assert serve("--device", "cuda:99") == 3
    error_of(capsys)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_how_it_ended_is_its_status(place, capsys, monkeypatch, number, status):
    from kernelwright.execution.service import app

    def ready_then_signal(app, queue, listener, drain_s, ready):
        def on_ready():
            ready()
            os.kill(os.getpid(), number)

        return run(app, queue, listener, drain_s, on_ready)

    run = app.run
    monkeypatch.setattr(app, "run", ready_then_signal)
    monkeypatch.setenv("KERNELWRIGHT_TOKEN", TOKEN)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert serve() == status
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    captured = capsys.readouterr()
    assert captured.out.startswith("http://127.0.0.1:")
    assert "ended: nothing was judged yet" in captured.err
