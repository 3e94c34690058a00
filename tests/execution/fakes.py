"""A reward service in this process whose judge does as it is told, and a network that fails as it is told."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import httpx
from fastapi.testclient import TestClient

from kernelwright.errors import InfrastructureError, TaskError
from kernelwright.execution.service.app import create_app
from kernelwright.execution.service.client import ServiceClient
from kernelwright.execution.service.queue import EvaluationQueue, EvaluationStore
from kernelwright.execution.work import Evaluate
from kernelwright.judge import Settings
from kernelwright.records import Evaluation, Reason, Verdict
from tests.executors import FakeExecutor

TOKEN = "correct-horse-battery"
SETTINGS = Settings.quick(threads=1)
LIMIT_S = 60
TASK = {
    "id": "relu",
    "source": "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n",
}


def shared_by_all(server):
    """Fork servers of screening that are one which other tests have too: each would import torch anew."""
    return SimpleNamespace(is_single=True, keep_off=server.keep_off, server=lambda compiling: server)


class FakeJudge(FakeExecutor):
    """Judges of one slot; what they find follows from the candidate's text."""

    def __init__(self):
        super().__init__(self._verdict, kinds=(Evaluate,))
        self.begun, self.gate = threading.Semaphore(0), threading.Event()

    def _verdict(self, work):
        self.begun.release()
        word = work.candidate.source.split()[0].replace("_", "-")
        if word == "hold" and not self.gate.wait(LIMIT_S):
            return InfrastructureError("held for ever")
        if True in self.closed:
            return InfrastructureError("its judge was killed")
        if word == "broken-machine":
            return InfrastructureError("Wanted memory; there is none.")
        if word == "broken-task":
            return TaskError("Wanted a task; its Model raised.")
        if word == "fault":
            return InfrastructureError("Wanted an evaluation; found a fault of this program: ZeroDivisionError.")
        good = word in ("good", "hold", "untimed")
        gain = 1.0 if good and word != "untimed" else None
        return Evaluation(
            task=work.task.id,
            task_sha256=work.task.sha256,
            candidate_sha256=work.candidate.sha256,
            verdict=Verdict.ACCEPTED if good else Verdict.REJECTED,
            reason=None if good else Reason(word) if word in [*Reason] else Reason.WRONG_OUTPUT,
            speedup=gain and 2.119,
            speedup_low=gain and 1.999,
            speedup_high=gain and 2.3,
            source=work.candidate.source,
            policy=work.candidate.policy,
            checks={"sets": {"größe": 1}},
        )

    def close(self, *, at_once=False):
        super().close(at_once=at_once)
        if at_once:
            self.gate.set()


class Service:
    """A service in this process, and what a test looks at."""

    def __init__(self, path, *, token=TOKEN, **options):
        self.path = path
        self.judge = FakeJudge()
        self.queue = EvaluationQueue(self.judge, EvaluationStore(path, "cpu", SETTINGS), SETTINGS, **options)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = TestClient(create_app(self.queue, token), base_url="http://127.0.0.1", raise_server_exceptions=False)

    def __enter__(self):
        self.http.__enter__()
        return self

    def __exit__(self, *exception):
        self.judge.gate.set()
        self.http.__exit__(*exception)

    def post(self, candidate="good", wait_s=LIMIT_S, **fields):
        body = {"task": TASK, "candidate": candidate, **fields}
        return self.http.post("/v1/evaluations", json=body, params={"wait_s": wait_s}, headers=self.headers)

    def get(self, path, **params):
        return self.http.get(path, params=params, headers=self.headers)

    def metrics(self):
        return self.get("/v1/metrics").json()


class Scripted:
    """A server that gives these answers, then passes on to a service."""

    def __init__(self, service, *answers):
        self.service = service
        self.answers = list(answers)
        self.seen = []

    def __call__(self, request):
        self.seen.append((request.method, request.url.path))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)
        found = self.service.http.request(
            request.method, str(request.url), content=request.content, headers=dict(request.headers)
        )
        return httpx.Response(found.status_code, headers=dict(found.headers), content=found.content)

    def client(self, token=TOKEN):
        return ServiceClient("http://127.0.0.1", token, backoff_s=0.0, transport=httpx.MockTransport(self))
