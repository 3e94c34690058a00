"""Small tasks and candidates for the judge's own tests."""

from __future__ import annotations

from kernelwright.records import Candidate, Task

HEAD = """
import os, signal, sys, time
import torch
"""

LOCKS = ["kernelwright-cpu.gate-turn.lock", "kernelwright-cpu.lock"]
"""What judges on a processor leave in the folder for temporary files."""

ANY_WAIT = {"excess_limit_us": 1e9, "audit_limit_us": 1e9}
"""Settings for what is timed and is not about clocks: on a busy machine the parent waits for the processor longer after the
calls of one side than after those of the other, and a handful of calls cannot tell that from hidden time."""

RELU = Task(
    id="relu",
    source=HEAD
    + """
class Model(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = torch.nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))


def get_inputs():
    return [torch.randn(32, 16)]


def get_init_inputs():
    return [16]
""",
)


def task(forward: str, inputs: str = "[torch.randn(32, 16)]", init: str = "", name: str = "made") -> Task:
    """A task from the body of `forward(self, *inputs)`, one for the inputs, a line of `__init__`."""
    return Task(
        id=name,
        source=f"""{HEAD}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {init or "pass"}

    def forward(self, *inputs):
        {forward}


def get_inputs():
    return {inputs}


def get_init_inputs():
    return []
""",
    )


def candidate(forward: str = "return torch.relu(self.linear(x))", *, top: str = "", init: str = "pass") -> Candidate:
    """A candidate for `RELU`: an honest one, unless told otherwise. Bodies may have several lines."""

    def indented(text: str) -> str:
        return text.strip().replace("\n", "\n        ")

    return Candidate(
        source=f"""{HEAD}
{top}
class ModelNew(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = torch.nn.Linear(features, features)
        {indented(init)}

    def forward(self, x):
        {indented(forward)}
"""
    )


def baseline(forward: str, init: str = "pass", name: str = "x") -> Candidate:
    """A wrapper of `RELU`'s own module, as a stock baseline is one."""
    source = f"""{RELU.source}

class ModelNew(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = 0
        {init}

    def forward(self, x):
        self.calls += 1
        {forward}
"""
    return Candidate(source=source, policy="baseline", techniques=(name,))
