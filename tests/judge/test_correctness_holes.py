"""What passed a judge that looked in one mode, in one way and in one layout; each cheat beside a fair program like it."""

from __future__ import annotations

import pytest

from kernelwright.judge import Settings
from kernelwright.records import Candidate, Contract, Evaluation, Reason, Task
from tests.judge.snippets import task

CHECK = Settings.quick(threads=1, timed=False)


def like(made: Task, old: str, new: str) -> Candidate:
    """The task's own module as a candidate, with one change."""
    text = made.source.replace("class Model(", "class ModelNew(")
    assert old in text
    return Candidate(source=text.replace(old, new))


def why(found: Evaluation) -> tuple[Reason | None, str]:
    return found.reason, found.detail


# --- buffers and random numbers in both modes -----------------------------------------------------------------------

NORM = task("return self.norm(inputs[0])", init="self.norm = torch.nn.BatchNorm1d(16)", name="norm")
FROZEN = task("return self.norm(inputs[0])", init="self.norm = torch.nn.BatchNorm1d(16); self.eval()", name="frozen")
STATISTICS = "n = self.norm; m, v = n.running_mean, n.running_var"
BY_HAND = f"""{STATISTICS}
        if self.training:
            n.num_batches_tracked += 1
        return torch.batch_norm(inputs[0], n.weight, n.bias, m, v, self.training, 0.1, n.eps, False)"""
MOVED_IN_EVAL = f"""{STATISTICS}
        if not self.training:
            m.lerp_(inputs[0].mean(0), 0.1)
            return (inputs[0] - m.lerp(inputs[0].mean(0), -1 / 9)) * torch.rsqrt(v + n.eps) * n.weight + n.bias
        return n(inputs[0])"""
STILL_IN_TRAIN = f"""{STATISTICS}
        if self.training:
            return torch.batch_norm(inputs[0], n.weight, n.bias, None, None, True, 0.1, n.eps, False)
        return n(inputs[0])"""


@pytest.mark.parametrize(
    ("made", "forward", "mode"),
    [(NORM, MOVED_IN_EVAL, "eval"), (FROZEN, STILL_IN_TRAIN, "train"), (NORM, BY_HAND, None), (FROZEN, BY_HAND, None)],
    ids=["moved in eval", "still in train", "fair", "fair, built in eval"],
)
def test_buffers_move_alike_in_both_modes(judge, made, forward, mode):
    found = judge.evaluate(made, like(made, "return self.norm(inputs[0])", forward), settings=CHECK)
    if mode is None:
        assert found.accepted, why(found)
    else:
        assert found.reason is Reason.BUFFER_MISMATCH, why(found)
        assert f"calls in {mode} mode" in found.detail
        assert found.contracts[Contract.KERNELBENCH].kept


DROPOUT = task(
    "return self.drop(self.linear(inputs[0]))",
    init="self.linear, self.drop = torch.nn.Linear(16, 16), torch.nn.Dropout(0.5); self.eval()",
    name="dropout",
)
MASK = """y = self.linear(inputs[0])
        if not self.training:
            return y
        self.mask = {kept}torch.nn.functional.dropout(torch.ones_like(y), 0.5)
        return y * self.mask"""


@pytest.mark.parametrize("kept", ["self.mask if hasattr(self, 'mask') else ", ""], ids=["kept", "drawn anew"])
def test_a_mask_is_drawn_in_every_call(judge, kept):
    found = judge.evaluate(DROPOUT, like(DROPOUT, "return self.drop(self.linear(inputs[0]))", MASK.format(kept=kept)))
    assert found.accepted is (kept == ""), why(found)
    assert found.reason is (Reason.MODE_MISMATCH if kept else None)
