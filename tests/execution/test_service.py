"""The reward service, with judges that do as they are told: who gets in, who waits, what is remembered."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx
import uvicorn

from kernelwright.errors import ConfigError, InfrastructureError, ShuttingDownError, TaskError, UsageError
from kernelwright.execution.http_executor import HttpExecutor
from kernelwright.execution.service import queue as queues
from kernelwright.execution.service.app import create_app, listen
from kernelwright.execution.service.client import FAILURES_MAX, ServiceClient
from kernelwright.execution.service.protocol import BODY_LIMIT_BYTES, ErrorBody, EvaluationRequest, SettingsRequest, TaskText
from kernelwright.execution.service.queue import EvaluationStore
from kernelwright.execution.work import Evaluate, run_all
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.rewards import reward_named
from tests.execution.fakes import LIMIT_S, SETTINGS, TASK, TOKEN, FakeJudge, Scripted, Service


@pytest.fixture
def start(tmp_path):
    opened = []

    def make(**options):
        opened.append(Service(tmp_path / "run", **options).__enter__())
        return opened[-1]

    yield make
    for service in opened:
        service.__exit__(None, None, None)


@pytest.fixture
def service(start):
    return start()


def service_blocks(language):
    """Blocks of code on the page, from the section on the service to its table of routes."""
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    section = page.partition("## The reward service")[2].partition("| route |")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def refused(response, status, code, *words):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error", "wanted", "found", "do"}
    assert body["error"] == code
    for word in words:
        assert word in " ".join(body.values())
    return response


# --- answers --------------------------------------------------------------------------------------


def test_an_accepted_candidate_comes_back_with_its_record_and_the_reward_of_that_record(service):
    response = service.post("good", reward="lower-bound", policy="verl", techniques=["fold a sum"])
    assert response.status_code == 200
    reply = response.json()
    evaluation = Evaluation.model_validate(reply["evaluation"])
    assert (reply["state"], reply["reused"], evaluation.policy) == ("done", False, "verl")
    assert reply["reward"] == {"name": "lower-bound", "value": reward_named("lower-bound")(evaluation)}
    assert evaluation.checks["request"] == reply["id"]
    assert service.judge.submitted[0].candidate.techniques == ("fold a sum",)
    assert [found.checks["request"] for found in RunDirectory(service.path).evaluations()] == [reply["id"]]


def test_a_failed_candidate_is_an_answer_with_the_floor_as_its_reward(service):
    response = service.post("bad", reward="log")
    assert response.status_code == 200
    assert response.json()["evaluation"]["reason"] == "wrong-output"
    assert response.json()["reward"]["value"] == reward_named("log").floor


def test_without_waiting_there_is_an_id_to_ask_for(service):
    response = service.post("hold", wait_s=0)
    assert response.status_code == 202
    assert response.json()["state"] in ("queued", "running")
    assert int(response.headers["Retry-After"]) >= 1
    where = response.headers["Location"]
    assert service.judge.begun.acquire(timeout=LIMIT_S)
    assert service.get(where).json()["state"] == "running"
    assert service.get(where, wait_s=0.01).status_code == 202
    service.judge.gate.set()
    done = service.get(where, wait_s=LIMIT_S, reward="success").json()
    assert (done["state"], done["reward"]["value"]) == ("done", 1.0)


def test_a_built_in_task_is_known_by_its_id(service):
    from kernelwright.tasks.suites import builtin_task

    assert service.post(task="diag_matmul").status_code == 200
    assert service.judge.submitted[0].task == builtin_task("diag_matmul")


def test_another_repeat_is_another_measurement_and_confirms(service):
    first, again, same = service.post(), service.post(repeat=1), service.post(repeat=1)
    assert len(service.judge.submitted) == 2
    assert [reply.json()["evaluation"]["confirms"] for reply in (first, again, same)] == [False, True, True]
    assert same.json()["reused"]


# --- one evaluation for equal requests ------------------------------------------------------------


def test_equal_requests_at_once_are_one_evaluation(service):
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(service.post, "hold") for _ in range(8)]
        assert service.judge.begun.acquire(timeout=LIMIT_S)
        while service.metrics()["joined"] < 7:
            pass
        service.judge.gate.set()
        replies = [one.result().json() for one in asked]
    assert len(service.judge.submitted) == 1
    assert len({reply["id"] for reply in replies}) == 1
    assert {reply["state"] for reply in replies} == {"done"}
    assert service.post("hold").json()["reused"]
    assert service.metrics() | {"uptime_s": 0, "judging_s": 0} == {
        "lanes": 1,
        "queued": 0,
        "queue_limit": 256,
        "running": 0,
        "recorded": 1,
        "accepted": 1,
        "rejected": {},
        "infrastructure_errors": 0,
        "task_errors": 0,
        "dropped": 0,
        "reused": 1,
        "joined": 7,
        "refused_full": 0,
        "judging_s": 0,
        "uptime_s": 0,
    }


@pytest.mark.parametrize(
    "fields",
    [{"candidate": "good "}, {"task": "diag_matmul"}, {"settings": {"timed": False}}, {"settings": {"forbid": ["tf32"]}}],
)
def test_what_differs_is_judged_by_itself(service, fields):
    service.post()
    assert not service.post(**fields).json()["reused"]
    assert len(service.judge.submitted) == 2


def test_policy_and_reward_do_not_make_another_evaluation(service):
    service.post()
    assert service.post(policy="other", reward="speedup").json()["reused"]
    assert len(service.judge.submitted) == 1


def test_a_restart_remembers_what_was_finished(start):
    first = start()
    reply = first.post("good").json()
    rejected = first.post("bad").json()
    first.__exit__(None, None, None)
    with (first.path / "evaluations.jsonl").open("a") as file:
        file.write('{"task": "torn')  # as a kill leaves it
    second = start()
    again = second.post("good", reward="speedup")
    assert again.json()["reused"]
    assert again.json()["evaluation"] == reply["evaluation"]
    assert second.get(f"/v1/evaluations/{rejected['id']}").json()["evaluation"] == rejected["evaluation"]
    assert second.post("new").json()["evaluation"] == second.post("new").json()["evaluation"]
    assert [job.candidate.source for job in second.judge.submitted] == ["new"]
    second.__exit__(None, None, None)
    assert start().metrics()["recorded"] == 3


def test_a_record_is_on_disk_before_anybody_is_told(service, monkeypatch):
    def full(self, request, evaluation):
        raise InfrastructureError("Wanted to write an evaluation; no space left.")

    monkeypatch.setattr(EvaluationStore, "append", full)
    refused(service.post("good"), 503, "infrastructure", "no space left")
    monkeypatch.undo()
    assert not service.post("good").json()["reused"]


def test_one_service_at_a_time_has_a_directory(service):
    with pytest.raises(UsageError, match="another service"):
        EvaluationStore(service.path, "cpu", SETTINGS)


def test_records_of_other_hardware_answer_nothing(service):
    service.__exit__(None, None, None)
    with pytest.raises(UsageError, match="another `hardware`"):
        EvaluationStore(service.path, "cpu", SETTINGS, ["H200"])
    with pytest.raises(UsageError, match="another `device`"):
        EvaluationStore(service.path, "cuda", SETTINGS)
    EvaluationStore(service.path, "cpu", SETTINGS).close()


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "status", "code", "words"),
    [
        ("broken-machine", 503, "infrastructure", "there is none"),
        ("broken-task", 422, "task-error", "its Model raised"),
        ("fault", 503, "infrastructure", "ZeroDivisionError"),
    ],
)
def test_a_failure_that_is_not_the_candidates_is_told_and_not_remembered(service, candidate, status, code, words):
    for count in (1, 2):
        response = refused(service.post(candidate), status, code, words)
        assert len(service.judge.submitted) == count
        assert ("Retry-After" in response.headers) == (status == 503)
    assert list(RunDirectory(service.path).evaluations()) == []
    request = service.post(candidate, wait_s=0).json()
    if "id" in request:
        refused(service.get(f"/v1/evaluations/{request['id']}", wait_s=LIMIT_S), status, code)
    assert service.post("good").status_code == 200


def test_only_so_many_failures_are_kept(service, monkeypatch):
    monkeypatch.setattr(queues, "FAILURES_KEPT", 1)
    ids = []
    for number in range(2):
        response = service.post("hold", wait_s=0, settings={"blocks": 2 + number})
        ids.append(response.json()["id"])
    service.judge.closed.append(True)
    service.judge.gate.set()
    refused(service.get(f"/v1/evaluations/{ids[1]}", wait_s=LIMIT_S), 503, "infrastructure")
    refused(service.get(f"/v1/evaluations/{ids[0]}"), 404, "not-found", "Post the request again")


def test_a_full_queue_says_when_to_come_back(start):
    service = start(queue_limit=1)
    service.post("hold", wait_s=0)
    assert service.judge.begun.acquire(timeout=LIMIT_S)
    assert service.post("hold 2", wait_s=0).status_code == 202
    response = refused(service.post("hold 3", wait_s=0), 429, "queue-full")
    assert 1 <= int(response.headers["Retry-After"]) <= 600
    assert service.post("hold", wait_s=0).status_code == 202, "to join costs no place"
    assert service.metrics()["refused_full"] == 1
    service.judge.gate.set()
    assert service.post("hold 2").status_code == 200
    assert service.post("hold 3").status_code == 200


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"candidat": "x"}, "invalid-request", "body.candidat"),
        ({"candidat": "x"}, "invalid-request", "did you mean `candidate`?"),
        (
            {"task": {"id": "x", "sorce": "x = 1"}},
            "invalid-request",
            "`body.task.sorce`, which does not exist; did you mean `source`?",
        ),
        (
            {"settings": {"proceses_min": 2, "zzz": 1}},
            "invalid-request",
            "did you mean `processes_min`?; `body.settings.zzz`",
        ),
        ({"candidate": ""}, "invalid-request", "body.candidate"),
        ({"candidate": 3}, "invalid-request", "body.candidate"),
        ({"candidate": "x" * (1 << 18) + "x"}, "invalid-request", "body.candidate"),
        ({"task": "diag_matmull"}, "task-error", "diag_matmul"),
        ({"task": "../../etc/passwd"}, "task-error", "built-in"),
        ({"task": {"id": "x", "source": "x = 1"}}, "task-error", "get_inputs"),
        ({"task": {"id": "x y", "source": "x = 1"}}, "invalid-request", "body.task"),
        ({"settings": {"error_ratio": 1000}}, "invalid-request", "body.settings.error_ratio"),
        ({"settings": {"run_limit_s": 1000}}, "invalid-request", "run_limit_s"),
        ({"settings": {"processes_min": 60}}, "invalid-request", "processes_min"),
        ({"settings": {"blocks": 1}}, "invalid-request", "body.settings.blocks"),
        ({"reward": "applause"}, "invalid-request", "lower-bound"),
        ({"repeat": -1}, "invalid-request", "body.repeat"),
        ({"wait_s": -1}, "invalid-request", "query.wait_s"),
    ],
)
def test_a_request_that_cannot_be_used_is_refused_before_anything_is_judged(service, fields, code, words):
    response = service.post(**fields)
    refused(response, 422, code, words)
    assert len(response.text) < 1000
    assert service.judge.submitted == []


def test_a_reward_that_needs_a_time_is_refused_where_there_is_none_before_anything_is_judged(service):
    refused(service.post(reward="speedup", settings={"timed": False}), 422, "invalid-request", "speedup", "`success`")
    assert service.judge.submitted == []
    assert service.post(reward="success", settings={"timed": False}).json()["reward"]["value"] == 1.0


def test_a_reward_that_needs_a_time_is_refused_later_where_there_is_none(service):
    done = service.post("untimed", settings={"timed": False}).json()
    refused(service.get(f"/v1/evaluations/{done['id']}", reward="log"), 422, "invalid-request", "`success`")


def test_what_a_request_may_change_of_the_settings(service):
    asked = SettingsRequest(timed=False, strict_fp32=True, run_limit_s=1.0, forbid=["tf32"])
    service.post(settings=asked.model_dump(mode="json"))
    (job,) = service.judge.submitted
    assert (job.settings.timed, job.settings.strict_fp32, job.settings.run_limit_s) == (False, True, 1.0)
    assert job.settings.forbid == SETTINGS.forbid | {"tf32"}
    assert job.settings.error_ratio == SETTINGS.error_ratio


def test_a_request_may_be_stricter_than_a_service_that_allows_tf32_in_products():
    own = Settings(tf32_products=True)
    assert queues.resolve(own, SettingsRequest()).tf32_products
    strict = queues.resolve(own, SettingsRequest(strict_fp32=True))
    assert (strict.strict_fp32, strict.tf32_products) == (True, False)


def test_tasks_from_elsewhere_can_be_refused(start):
    service = start(builtin_only=True)
    refused(service.post(), 422, "invalid-request", "built-in")
    assert service.post(task="diag_matmul").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid-json"),
        (b"", 422, "invalid-request"),
        (b"\xff\xfe", 400, "invalid-json"),
        (b"[" * 100_000, 400, "invalid-json"),
        (b"[]", 422, "invalid-request"),
        (b'{"task": "diag_matmul", "candidate": "\\ud800"}', 422, "invalid-request"),
    ],
    ids=["cut", "empty", "no text", "deep", "list", "half a character"],
)
def test_junk_is_refused(service, body, status, code):
    headers = {**service.headers, "Content-Type": "application/json"}
    refused(service.http.post("/v1/evaluations", content=body, headers=headers), status, code)
    assert service.post("good").status_code == 200


def test_what_a_page_in_a_browser_can_send_unasked_is_refused(start):
    service = start(token=None)
    body = json.dumps({"task": TASK, "candidate": "good"})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = service.http.post("/v1/evaluations", content=body, headers={"Content-Type": kind})
        refused(response, 422, "invalid-request", kind, "Content-Type: application/json")
    refused(service.http.post("/v1/evaluations", content=body), 422, "invalid-request", "no content type")
    refused(service.http.get("/v1/metrics", headers={"Host": "evil.example"}), 421, "wrong-host")
    for host in ("localhost:8730", "127.0.0.1", "[::1]:8730"):
        assert service.http.get("/v1/metrics", headers={"Host": host}).status_code == 200
    assert service.judge.submitted == []


def chunks():
    for _ in range(BODY_LIMIT_BYTES // (1 << 20) + 1):
        yield b" " * (1 << 20)


@pytest.mark.parametrize("make", [lambda: b" " * (BODY_LIMIT_BYTES + 1), chunks], ids=["declared", "in chunks"])
def test_a_body_that_is_too_large_is_refused(service, make):
    headers = {**service.headers, "Content-Type": "application/json"}
    refused(service.http.post("/v1/evaluations", content=make(), headers=headers), 413, "too-large")


@contextmanager
def listening(app):
    """The application on a real socket; gives its port."""
    listener = listen("127.0.0.1", 0, TOKEN)
    listener.listen()  # whoever connects before the server is up waits
    runner = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        runner.should_exit = True
        thread.join()


@pytest.mark.parametrize(("token", "status"), [(TOKEN, 413), ("wrong", 401)])
def test_a_client_that_writes_all_before_it_reads_sees_the_answer(tmp_path, token, status):
    queue = queues.EvaluationQueue(FakeJudge(), EvaluationStore(tmp_path, "cpu", SETTINGS), SETTINGS)
    with listening(create_app(queue, TOKEN)) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        connection.request("POST", "/v1/evaluations", b" " * (4 * BODY_LIMIT_BYTES), {"Authorization": f"Bearer {token}"})
        assert connection.getresponse().status == status


def test_a_client_that_asks_before_it_writes_is_answered_at_once(tmp_path):
    queue = queues.EvaluationQueue(FakeJudge(), EvaluationStore(tmp_path, "cpu", SETTINGS), SETTINGS)
    with listening(create_app(queue, None)) as port, socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall(
            b"POST /v1/evaluations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer "},
    ],
)
def test_without_the_token_nothing_is_told_or_done(service, header):
    for path in ("/v1/evaluations", "/v1/metrics", "/v1/nowhere", "/openapi.json"):
        method = "POST" if path == "/v1/evaluations" else "GET"
        response = service.http.request(method, path, headers=header)
        refused(response, 401, "unauthorized")
        assert TOKEN not in response.text
        assert response.headers["WWW-Authenticate"] == "Bearer"
    health = service.http.get("/v1/health", headers=header)
    assert (health.status_code, health.json()["status"]) == (200, "ok")


def test_other_paths_and_methods_are_refused_in_the_same_form(service):
    refused(service.get("/"), 404, "not-found")
    refused(service.get("/v1/evaluations"), 405, "method-not-allowed")
    refused(service.get(f"/v1/evaluations/{'0' * 64}"), 404, "not-found")
    refused(service.get("/v1/evaluations/0"), 422, "invalid-request")


# --- the end --------------------------------------------------------------------------------------


def test_shutting_down_ends_what_runs_and_drops_what_waits(start):
    service = start()
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(service.post, "hold")
        assert service.judge.begun.acquire(timeout=LIMIT_S)
        waiting = threads.submit(service.post, "good")
        while service.metrics()["queued"] < 1:
            pass
        service.http.portal.call(service.queue.drain)
        refused(waiting.result(LIMIT_S), 503, "shutting-down")
        refused(service.post("other"), 503, "shutting-down")
        assert service.http.get("/v1/health").status_code == 503
        service.judge.gate.set()
        assert running.result(LIMIT_S).status_code == 200
    service.__exit__(None, None, None)
    assert service.judge.closed == [False]
    assert [found.source for found in RunDirectory(service.path).evaluations()] == ["hold"]
    assert start().post("hold").json()["reused"]


@pytest.mark.parametrize("way", ["limit", "second signal"])
def test_what_does_not_end_in_time_is_cut_short_and_owed(start, way):
    service = start(drain_s=0.0 if way == "limit" else 1000.0)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(service.post, "hold")
        assert service.judge.begun.acquire(timeout=LIMIT_S)
        service.http.portal.call(service.queue.drain)
        if way == "second signal":
            service.http.portal.call(service.queue.hurry)
        refused(running.result(LIMIT_S), 503, "infrastructure")
    service.__exit__(None, None, None)
    assert service.judge.closed == [True, False]
    assert list(RunDirectory(service.path).evaluations()) == []


# --- the client -----------------------------------------------------------------------------------

REQUEST = EvaluationRequest(task=TaskText(**TASK), candidate="good", reward="lower-bound")


FULL = httpx.Response(429, headers={"Retry-After": "0"})
PENDING = httpx.Response(202, json={"id": "0" * 64, "state": "queued"})


def test_the_client_has_a_candidate_judged(service):
    script = Scripted(service)
    reply = script.client().evaluate(REQUEST)
    assert reply.evaluation.accepted
    assert reply.reward.value == 1.99
    assert script.seen == [("POST", "/v1/evaluations")]


@pytest.mark.parametrize(
    "answers",
    [
        [httpx.ConnectError("refused")],
        [FULL, FULL, FULL],
        [httpx.Response(503, text="upstream"), httpx.ReadTimeout("slow"), httpx.Response(502)],
        [PENDING, httpx.Response(404)],
        [FULL] * (FAILURES_MAX + 1),
    ],
    ids=["refused", "full", "proxy", "restarted", "always full"],
)
def test_the_client_asks_again_when_that_can_help(service, answers):
    script = Scripted(service, *answers)
    assert script.client().evaluate(REQUEST).evaluation.accepted
    assert len(service.judge.submitted) == 1


def test_the_client_follows_an_evaluation_that_takes_long(service):
    reply = service.post("good").json()
    pending = httpx.Response(202, json={"id": reply["id"], "state": "running"})
    script = Scripted(service, pending, pending)
    assert script.client().evaluate(REQUEST).reward.name == "lower-bound"
    assert script.seen[-1] == ("GET", f"/v1/evaluations/{reply['id']}")


def test_the_client_gives_up_on_a_machine_that_always_fails(service):
    request = EvaluationRequest(task=TaskText(**TASK), candidate="broken-machine")
    with pytest.raises(InfrastructureError, match=r"8 failures in a row.*there is none"):
        Scripted(service).client().evaluate(request)
    assert len(service.judge.submitted) == FAILURES_MAX


@pytest.mark.parametrize(
    ("token", "answers", "words"),
    [
        ("wrong", [], "unauthorized"),
        (TOKEN, [httpx.Response(404)], "address"),
        (TOKEN, [httpx.Response(200, text="<html>")], "something else"),
        (TOKEN, [httpx.Response(413, text="nginx")], "413"),
    ],
)
def test_the_client_does_not_repeat_what_is_refused(service, token, answers, words):
    with pytest.raises(UsageError, match=words):
        Scripted(service, *answers).client(token).evaluate(REQUEST)


def test_the_client_raises_the_error_that_the_service_met(service):
    client = Scripted(service).client()
    with pytest.raises(TaskError, match=r"found 'diag_matmull'.*Did you mean diag_matmul"):
        client.evaluate(EvaluationRequest(task="diag_matmull", candidate="x"))
    with pytest.raises(UsageError, match=r"^Wanted a reward, found `speed`"):
        client.evaluate(EvaluationRequest(task="diag_matmul", candidate="x", reward="speed"))
    ending = ErrorBody(error="shutting-down", wanted="an evaluation", found="the end", do="Ask again.").model_dump()
    with pytest.raises(ShuttingDownError, match="the end"):
        Scripted(service, *[httpx.Response(503, json=ending)] * FAILURES_MAX).client().evaluate(REQUEST)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"candidat": "x"}, "`candidat`, which does not exist; did you mean `candidate`?"),
        ({"candidate": ""}, "candidate: String should have at least 1 character"),
        ({"candidate": "x", "settings": {"run_limit": 1}}, "`settings.run_limit`, which does not exist; did you mean"),
    ],
)
def test_a_request_of_wrong_fields_is_a_config_error_before_it_is_sent(fields, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        EvaluationRequest(task="diag_matmul", **fields)


def test_an_address_without_a_scheme_is_refused_before_anything_is_asked():
    with pytest.raises(ConfigError, match="http:// is missing"):
        ServiceClient("127.0.0.1:8730")


def test_plain_evaluate_in_a_coroutine_says_what_to_write(service):
    async def coroutine():
        Scripted(service).client().evaluate(REQUEST)

    with pytest.raises(UsageError, match=r"await client\.evaluate_async"):
        asyncio.run(coroutine())


def test_parameters_in_the_address_that_do_not_exist_are_named(service):
    response = service.http.post(
        "/v1/evaluations", json={"task": TASK, "candidate": "x"}, params={"wait": 3}, headers=service.headers
    )
    refused(response, 422, "invalid-request", "`query.wait`, which does not exist; did you mean `wait_s`?")
    refused(service.get(f"/v1/evaluations/{'0' * 64}", rewrd="log"), 422, "invalid-request", "did you mean `reward`?")


def test_the_examples_of_the_page_are_accepted(service, monkeypatch):
    shell, python = (service_blocks(language) for language in ("sh", "python"))
    (body,) = re.findall(r"-d '(.*?)'$", "\n".join(shell), re.DOTALL | re.MULTILINE)
    response = service.http.post(
        "/v1/evaluations",
        content=body,
        params={"wait_s": LIMIT_S},
        headers={**service.headers, "Content-Type": "application/json"},
    )
    assert response.status_code == 200, response.text
    monkeypatch.setattr("kernelwright.execution.service.client.ServiceClient", lambda url: Scripted(service).client())
    names = {}
    exec("\n".join(python), names)
    assert names["source"] == json.loads(body)["candidate"]
    assert len(service.judge.submitted) == 1, "the second was answered from the record"


def test_the_client_serves_coroutines_too(service):
    client = Scripted(service, httpx.ConnectError("refused"), FULL).client()

    async def several():
        return await asyncio.gather(*(client.evaluate_async(REQUEST) for _ in range(4)))

    replies = asyncio.run(several())
    assert {reply.reward.value for reply in replies} == {1.99}
    assert len(service.judge.submitted) == 1


def test_a_directory_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / ".lock").mkdir()  # as good as no permission, also for root
    with pytest.raises(UsageError, match="Wanted a directory to write to"):
        EvaluationStore(tmp_path, "cpu", SETTINGS)


# --- an executor behind it ----------------------------------------------------------------------------------------------


@pytest.fixture
def executor(service):
    with HttpExecutor(Scripted(service).client()) as made:
        yield made


def work(source="good", **options):
    return Evaluate(Task(**TASK), Candidate(source=source, policy="mine", techniques=("a",)), **options)


def test_a_service_is_an_executor(service, executor):
    assert executor.kinds == {Evaluate}
    strict = SETTINGS.model_copy(update={"strict_fp32": True, "processes_max": 5})
    asked = [work(), work("bad"), work("broken_task"), work(settings=strict)]
    found = {result.work: result.outcome for result in run_all(executor, asked)}
    assert [found[one].accepted for one in (asked[0], asked[1], asked[3])] == [True, False, True]
    assert isinstance(found[asked[2]], TaskError)
    judged = {one.candidate.source: one for one in service.judge.submitted if one.settings.strict_fp32 is False}
    assert (judged["good"].candidate.policy, judged["good"].candidate.techniques) == ("mine", ("a",))
    (changed,) = [one.settings for one in service.judge.submitted if one.settings.strict_fp32]
    assert changed.processes_max == 5


def test_the_same_work_again_is_another_measurement(service, executor):
    first, second = (next(iter(run_all(executor, [work()]))).outcome for _ in range(2))
    assert (first.confirms, second.confirms) == (False, True)
    assert len(service.judge.submitted) == 2


def test_work_that_a_service_has_is_cancelled(service, executor):
    executor.submit(held := work("hold"))
    assert service.judge.begun.acquire(timeout=LIMIT_S)
    executor.cancel(held)
    assert executor.next_result(LIMIT_S).outcome is None
    service.judge.gate.set()
