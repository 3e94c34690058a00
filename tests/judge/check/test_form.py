"""Earlier outputs that are read again: what may be unreadable, and what is a failure of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernelwright.judge.check.compare import Distance
from kernelwright.judge.check.findings import held_findings
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.records import Reason


def test_a_worker_that_dies_while_an_earlier_output_is_read_keeps_its_reason():
    def recopy(index):
        raise WorkerError(Reason.CRASHED, "signal 11")

    with pytest.raises(WorkerError) as caught:
        held_findings(SimpleNamespace(recopy=recopy), 0, [], Distance(0.0, 0.0), set())
    assert caught.value.reason is Reason.CRASHED
