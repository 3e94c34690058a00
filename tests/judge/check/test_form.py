"""Earlier outputs that are read again: what may be unreadable, and what is a failure of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernelwright.judge.check.form import held_output
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.records import Reason


def test_a_worker_that_dies_while_an_earlier_output_is_read_keeps_its_reason():
    def recopy(index):
        raise WorkerError(Reason.CRASHED, "signal 11")

    with pytest.raises(WorkerError) as caught:
        held_output(SimpleNamespace(), SimpleNamespace(recopy=recopy), 0)
    assert caught.value.reason is Reason.CRASHED
