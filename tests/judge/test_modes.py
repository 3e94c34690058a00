"""The other mode, and all that the reference itself fails as its own first candidate."""

from __future__ import annotations

import pytest

from kernelwright.judge import Judge, Settings
from kernelwright.judge.check import check
from kernelwright.records import Candidate, Evaluation, Label, Reason, Task
from tests.exploits.corpus import load_cases, load_corpus_task, program
from tests.judge.snippets import task

LARGE = "[torch.randn(256, 64)]"
SETTINGS = Settings.quick(threads=1, timed=False)
LINEAR = "self.l = torch.nn.Linear(16, 16); self.eval()"


@pytest.fixture(scope="module")
def judge(_one_fork_server):
    with Judge("cpu", SETTINGS, fork_server=_one_fork_server()) as found:
        yield found


def with_train(body: str) -> Task:
    made = task("return self.l(inputs[0])", init="self.l = torch.nn.Linear(16, 16); self.eval()")
    method = f"    def train(self, mode=True): {body}\n\n    def forward"
    return made.model_copy(update={"source": made.source.replace("    def forward", method)})


def own(judge: Judge, made: Task) -> Evaluation:
    """The verdict on a reference as its own candidate."""
    return judge.evaluate(made, Candidate(source=made.source.replace("class Model(", "class ModelNew(")))


@pytest.mark.parametrize(
    ("made", "labels"),
    [
        pytest.param(
            with_train("return super().train(False)"),
            {Label.MODE_UNCHECKED},
            id="it stays in eval mode",
        ),
        pytest.param(
            with_train("assert not mode; return super().train(mode)"),
            {Label.MODE_UNCHECKED},
            id="it has no train mode",
        ),
        pytest.param(
            task("assert not self.training; return self.l(inputs[0])", init=LINEAR),
            {Label.MODE_UNCHECKED},
            id="it raises in train mode",
        ),
        pytest.param(
            task("return self.l(inputs[0]) * (1 + self.training * int.from_bytes(os.urandom(3)) / 2**20)", init=LINEAR),
            {Label.OTHER_DRAWS},
            id="it draws numbers that no seed decides",
        ),
        pytest.param(
            task(
                "drift = int.from_bytes(os.urandom(3)) / 2**24 + CALLS.__next__() * (__name__ == 'reference'); "
                "return self.l(inputs[0]) * (1 + self.training * drift)",
                init=f"globals()['CALLS'] = iter(range(10**6)); {LINEAR}",
            ),
            {Label.MODE_UNCHECKED},
            id="it draws others from call to call",
        ),
        pytest.param(
            task("self.out.copy_(inputs[0]); return self.out.mul_(2)", init="self.out = torch.zeros(32, 16)"),
            set(),
            id="it returns one tensor again and again",
        ),
        pytest.param(
            task("KEPT.append(inputs[0] * 2); return KEPT[-1] + 0", LARGE, init="globals()['KEPT'] = []"),
            set(),
            id="it keeps what it has computed",
        ),
        pytest.param(
            task("return inputs[0] * 2", init="torch.use_deterministic_algorithms(True, warn_only=True)"),
            set(),
            id="it changes a setting of the process",
        ),
        pytest.param(
            task(
                "x = inputs[0]; assert x.dtype == torch.float32; noise = torch.tensor(list(os.urandom(x.numel()))) / 256; "
                "return x * (2 + (x > 2000).any() * noise.view(x.shape))"
            ),
            set(),
            id="it answers some inputs by chance",
        ),
        pytest.param(
            task("self.eval(); return self.l(inputs[0])", init="self.l = torch.nn.Linear(16, 16)"),
            set(),
            id="it leaves train mode by itself",
        ),
    ],
)
def test_what_the_reference_fails_rejects_nobody(judge, monkeypatch, made, labels):
    monkeypatch.setattr(check, "_GROWTH_S", 60.0)  # a busy machine does not leave the growth out
    found = own(judge, made)
    assert found.accepted, (found.reason, found.detail)
    assert {Label.MODE_UNCHECKED, Label.OTHER_DRAWS} & {*found.labels} == labels


@pytest.mark.parametrize(
    ("made", "change", "reason"),
    [
        (
            with_train("return super().train(False)"),
            ("super().train(False)", "super().train(mode)"),
            Reason.MODE_MISMATCH,
        ),
        (
            task("return self.norm(inputs[0])", init="self.norm = torch.nn.BatchNorm1d(16)"),
            ("return self", "return (1 + (inputs[0] > 2000).any()) * self"),
            Reason.WRONG_OUTPUT,
        ),
        (task("return inputs[0] * 2"), ("* 2", "* (2 + (inputs[0] > 2000).any())"), Reason.WRONG_OUTPUT),
        (
            task("self.out.copy_(inputs[0]); return self.out.mul_(2)", init="self.out = torch.zeros(32, 16)"),
            ("return self.out", "return 1.1 * self.out"),
            Reason.WRONG_OUTPUT,
        ),
    ],
)
def test_what_the_reference_does_not_fail_rejects(judge, made, change, reason):
    text = made.source.replace("class Model(", "KEPT = []\nclass ModelNew(").replace(*change)
    assert judge.evaluate(made, Candidate(source=text)).reason is reason


def test_other_random_numbers_of_the_same_distribution_are_labelled(judge):
    case = next(one for one in load_cases("hacks") if one.name == "n06_one_mask_for_all_rows")
    found = judge.evaluate(load_corpus_task(case.task), Candidate(source=program(case, "correct")))
    assert found.accepted, found.detail
    assert Label.OTHER_DRAWS in found.labels


NORM = task(
    "y = self.l(inputs[0]); y = torch.nn.functional.dropout(y, 0.1, self.training); return self.norm(y)",
    init="self.l, self.norm = torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16); self.eval()",
)


@pytest.mark.parametrize("moves", [True, False])
def test_buffers_move_as_they_should_where_the_mode_draws(judge, moves):
    drawn = "y = y * (torch.rand(y.shape) > 0.1) / 0.9 if self.training else y"
    norm = "self.norm(y)" if moves else "torch.nn.functional.batch_norm(y, self.norm.running_mean.clone(), "
    norm += "" if moves else "self.norm.running_var.clone(), self.norm.weight, self.norm.bias, self.training)"
    text = NORM.source.replace("class Model(", "class ModelNew(").replace("self.norm(y)", norm)
    text = text.replace("y = torch.nn.functional.dropout(y, 0.1, self.training)", drawn)
    found = judge.evaluate(NORM, Candidate(source=text))
    assert found.accepted is moves, found.detail
    assert moves or found.reason is Reason.MODE_MISMATCH
