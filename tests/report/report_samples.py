"""Hand-made runs for the tests of the page: what the judge writes, without a judge."""

from __future__ import annotations

import random
from pathlib import Path

from kernelwright.records import Evaluation, Label, Reason, RunDirectory, TimingBlock, Verdict, sha256_of

REFERENCE = '''import torch
import torch.nn as nn


class Model(nn.Module):
    """diag(A) @ B"""

    def __init__(self):
        super().__init__()

    def forward(self, a, b):
        return torch.diag(a) @ b


N, M = 1024, 1024


def get_inputs():
    return [torch.randn(N), torch.randn(N, M)]


def get_init_inputs():
    return []
'''


def candidate_source(expression: str) -> str:
    return REFERENCE.replace("class Model(", "class ModelNew(").replace("torch.diag(a) @ b", expression)


def blocks(ratio: float, processes: int = 3, seed: int = 0) -> tuple[TimingBlock, ...]:
    chance = random.Random(seed)
    made = []
    for process in range(processes):
        for _ in range(4):

            def near(value: float) -> float:
                return value * (1 + chance.uniform(-0.01, 0.01))

            made.append(
                TimingBlock(
                    process=process,
                    reference_us=(near(900.0), near(900.0)),
                    candidate_us=(near(900.0 / ratio), near(900.0 / ratio)),
                    null_us=(near(900.0), near(900.0)),
                )
            )
    return tuple(made)


def accepted(
    expression: str,
    speedup: float,
    *,
    width: float = 0.02,
    task: str = "diag_matmul",
    reference: str = REFERENCE,
    policy: str = "builtin",
    techniques: tuple[str, ...] = (),
    labels: tuple[Label, ...] = (),
    parent: str | None = None,
    source: str | None = None,
) -> Evaluation:
    text = candidate_source(expression) if source is None else source
    return Evaluation(
        task=task,
        task_sha256=sha256_of(reference),
        candidate_sha256=sha256_of(text),
        verdict=Verdict.ACCEPTED,
        speedup=speedup,
        speedup_low=speedup * (1 - width),
        speedup_high=speedup * (1 + width),
        noise_floor=0.011,
        reference_us=900.0,
        candidate_us=900.0 / speedup,
        labels=labels,
        device="cpu",
        policy=policy,
        techniques=techniques,
        parent=parent,
        source=text,
        blocks=blocks(speedup),
        checks={
            "input_sets": [
                {"name": "given", "error": 1.2e-7, "tolerance": 1.9e-6, "passed": True},
                {"name": "large", "error": 3.1e-7, "tolerance": 1.9e-6, "passed": True},
            ],
            "clocks": {"inner_us": 480.0, "outer_us": 497.0},
            "advice": [],
        },
        started="2026-01-02T03:04:05+00:00",
        elapsed_s=7.25,
    )


def rejected(
    expression: str,
    reason: Reason,
    detail: str = "",
    *,
    task: str = "diag_matmul",
    reference: str = REFERENCE,
    policy: str = "builtin",
    techniques: tuple[str, ...] = (),
    labels: tuple[Label, ...] = (),
    source: str | None = None,
) -> Evaluation:
    text = candidate_source(expression) if source is None else source
    return Evaluation(
        task=task,
        task_sha256=sha256_of(reference),
        candidate_sha256=sha256_of(text),
        verdict=Verdict.REJECTED,
        reason=reason,
        detail=detail,
        labels=labels,
        device="cpu",
        policy=policy,
        techniques=techniques,
        source=text,
        started="2026-01-02T03:04:05+00:00",
        elapsed_s=3.5,
    )


def search() -> list[Evaluation]:
    """A search as `optimize` leaves it, in order."""
    first = accepted("torch.einsum('i,ij->ij', a, b)", 1.62, techniques=("diag-to-einsum",), labels=(Label.LIBRARY_CALL,))
    second = accepted(
        "a.unsqueeze(1) * b",
        3.71,
        techniques=("diag-to-broadcast",),
        labels=(Label.LIBRARY_CALL,),
        parent=first.candidate_sha256,
    )
    return [
        accepted("torch.diag(a).matmul(b)", 1.003, techniques=("matmul-method",), labels=(Label.LIBRARY_CALL,)),
        rejected(
            "torch.diag(a) @ b + 1e-3",
            Reason.WRONG_OUTPUT,
            "set `given`: error 1e-3, allowed 1.9e-6",
            techniques=("fold-bias",),
        ),
        first,
        rejected(
            "torch.compile(torch.diag)(a) @ b",
            Reason.BUILD_TIMEOUT,
            "300 s",
            techniques=("torch-compile",),
            labels=(Label.WRAPPER_ONLY,),
        ),
        accepted(
            "torch.mul(a[:, None], b).contiguous()",
            2.95,
            width=0.06,
            techniques=("diag-to-broadcast", "contiguous"),
            labels=(Label.LIBRARY_CALL,),
        ),
        second,
        accepted("(a * b.T).T", 0.71, techniques=("transpose",), labels=(Label.STRIDES_DIFFER,)),
        rejected("b.mul_(a[:, None])", Reason.INPUT_MUTATED, "input 1 changed", techniques=("in-place",)),
        accepted(
            "a.view(-1, 1) * b",
            3.66,
            width=0.04,
            techniques=("diag-to-broadcast", "view"),
            labels=(Label.LIBRARY_CALL,),
            parent=second.candidate_sha256,
        ),
        rejected("a @ b", Reason.WRONG_SHAPE, "wanted (1024, 1024), found (1024,)", techniques=("drop-diag",)),
        second.model_copy(update={"confirms": True, "speedup": 3.68, "speedup_low": 3.6, "speedup_high": 3.75}),
    ]


def write_run(path: Path, evaluations: list[Evaluation], *, reference: str = REFERENCE) -> RunDirectory:
    run = RunDirectory(path)
    run.write_json(
        "config.json",
        {
            "kind": "optimize",
            "device": "cpu",
            "task": "diag_matmul",
            "task_source": reference,
            "settings": {"processes_min": 3, "forbid": ["strides-differ"]},
        },
    )
    run.write_json(
        "environment.json",
        {
            "python": "3.11.2",
            "processor": "Example CPU",
            "cpu_count": 2,
            "device": "cpu",
            "cuda": None,
            "packages": {"torch": "2.13.0", "numpy": "2.3.0"},
            "commit": "0123456789abcdef",
        },
    )
    for evaluation in evaluations:
        run.append(evaluation)
    return run
