"""What is told of a candidate's exception: its own frames, and no path of this machine."""

from __future__ import annotations

import socket

import torch

from kernelwright.judge.worker import serving
from kernelwright.judge.worker.channel import Channel

SOURCE = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner = Inner(how)
        self.inner(torch.ones(2))

class Inner(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "import":
            import candidate
            from candidate import nothing
        if self.how == "depth":
            return self(x)
        return torch.nn.functional.linear(x, torch.ones(3, 3))
"""


def error_of(tmp_path, source=SOURCE, how="library"):
    config = {
        "role": "candidate",
        "source": source,
        "class": "ModelNew",
        "device": "cpu",
        "private": str(tmp_path),
        "threads": torch.get_num_threads(),
        "strict_fp32": False,
        "arenas": {},
    }
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        channel.send({"nonce": "0", "op": "build", "arguments": {"list": [{"value": how}]}, "seed": 0})
        ours.shutdown(socket.SHUT_WR)
        serving.serve(theirs, config, [])
        return channel.receive()["error"]


def test_the_candidates_own_frames_are_told_and_nobody_elses(tmp_path):
    error = error_of(tmp_path)
    frames = [line.strip() for line in error["trace"].splitlines() if line.lstrip().startswith("File ")]
    assert frames == [
        'File "candidate.py", line 8, in __init__',
        'File "candidate.py", line 21, in forward',
    ]
    assert "torch.nn.functional.linear(x" in error["trace"]


def test_the_candidates_file_goes_by_its_name_in_the_exceptions_words_too(tmp_path):
    error = error_of(tmp_path, how="import")
    assert "(candidate.py)" in error["message"]
    assert str(tmp_path) not in str(error)


def test_of_a_deep_fall_the_last_frames_are_told(tmp_path):
    error = error_of(tmp_path, how="depth")
    assert error["type"] == "RecursionError"
    assert 1 <= error["trace"].count("return self(x)") <= 6
    assert 'File "/' not in error["trace"]


def test_a_fall_that_was_not_in_the_candidates_code_has_no_frames(tmp_path):
    error = error_of(tmp_path, source="def (")
    assert (error["type"], error["trace"]) == ("SyntaxError", "")
    assert "candidate.py, line 1" in error["message"]
