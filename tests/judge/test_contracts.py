"""Both contracts: which candidates keep both, `kernelbench` alone, or neither, and which one decides."""

from __future__ import annotations

import pytest

from kernelwright.errors import UsageError
from kernelwright.execution.service.protocol import SettingsRequest
from kernelwright.execution.service.queue import resolve
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Contract, Evaluation, Label, Reason, Verdict
from kernelwright.records.models import Precision
from kernelwright.records.tables import BenchEntry, _result, bench_table
from kernelwright.report.tables import render_markdown
from tests.judge.snippets import ANY_WAIT, RELU, candidate, task
from tests.quick import exhaustive_but

DROP_IN = Settings.quick(threads=1, timed=False)
KERNELBENCH = Settings.quick(threads=1, timed=False, contract=Contract.KERNELBENCH)
RIGHT = "return torch.relu(self.linear(x))"
RENAMED = Candidate(source=candidate().source.replace("self.linear", "self.other"))
ONLY_KERNELBENCH: dict[str, tuple[Candidate, Reason, frozenset[Label]]] = {
    "other names of weights": (RENAMED, Reason.STATE_MISMATCH, frozenset({Label.STATE_DIFFERS})),
    "state that does not load": (
        candidate(init="self.load_state_dict = lambda *a, **k: 1 / 0"),
        Reason.STATE_MISMATCH,
        frozenset({Label.STATE_DIFFERS}),
    ),
    "other strides": (
        candidate("return torch.relu(self.linear(x)).t().contiguous().t()"),
        Reason.WRONG_STRIDES,
        frozenset({Label.STRIDES_DIFFER}),
    ),
    "refuses strided inputs": (
        candidate(f"assert x.is_contiguous(), 'contiguous inputs only'\n{RIGHT}"),
        Reason.LAYOUT_DEPENDENT,
        frozenset({Label.CONTIGUOUS_ONLY}),
    ),
    "wrong on strided inputs": (
        candidate("return torch.relu(self.linear(x.as_strided((32, 16), (16, 1))))"),
        Reason.LAYOUT_DEPENDENT,
        frozenset(),
    ),
    "dies on strided inputs": (
        candidate(f"x.is_contiguous() or os.kill(os.getpid(), signal.SIGSEGV)\n{RIGHT}"),
        Reason.LAYOUT_DEPENDENT,
        frozenset(),
    ),
    "refuses inputs off a boundary": (
        candidate(f"assert x.data_ptr() % 16 == 0\n{RIGHT}"),
        Reason.LAYOUT_DEPENDENT,
        frozenset({Label.CONTIGUOUS_ONLY}),
    ),
    "built in eval mode": (candidate(init="self.eval()"), Reason.MODE_MISMATCH, frozenset()),
    "eval mode after a call": (candidate(f"self.training = False\n{RIGHT}"), Reason.MODE_MISMATCH, frozenset()),
    "wrong in the other mode": (
        candidate("y = self.linear(x)\nreturn torch.relu(y) if self.training else y"),
        Reason.MODE_MISMATCH,
        frozenset(),
    ),
    "raises in the other mode": (candidate(f"assert self.training\n{RIGHT}"), Reason.MODE_MISMATCH, frozenset()),
}
NORM = task("return self.norm(inputs[0])", init="self.norm = torch.nn.BatchNorm1d(16)", name="norm")
FORGETFUL = Candidate(
    source=NORM.source.replace("Model(", "ModelNew(").replace(
        "return self.norm(inputs[0])",
        "n = self.norm; frozen = not self.training\n"
        "        return torch.batch_norm(inputs[0], n.weight, n.bias, *((n.running_mean, n.running_var) if frozen else "
        "(None, None)), not frozen, 0.1, n.eps, False)",
    )
)


def missing(found: Evaluation, contract: Contract) -> tuple[Reason, ...]:
    assert found.contracts is not None
    assert found.contracts[contract].kept is (not found.contracts[contract].missing)
    return found.contracts[contract].missing


@pytest.mark.parametrize("settings", exhaustive_but([DROP_IN, KERNELBENCH], KERNELBENCH), ids=lambda one: one.contract.value)
def test_an_honest_candidate_keeps_both(judge, settings):
    found = judge.evaluate(RELU, candidate(), settings=settings)
    assert found.accepted, found.detail
    assert found.contract is settings.contract
    assert {contract: missing(found, contract) for contract in Contract} == dict.fromkeys(Contract, ())
    assert Evaluation.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    "what",
    exhaustive_but(
        ONLY_KERNELBENCH,
        "other names of weights",
        "other strides",
        "refuses strided inputs",
        "dies on strided inputs",
        "refuses inputs off a boundary",
        "wrong in the other mode",
    ),
)
@pytest.mark.parametrize("settings", exhaustive_but([DROP_IN, KERNELBENCH], KERNELBENCH), ids=lambda one: one.contract.value)
def test_what_only_kernelbench_allows_is_told_under_either_contract(judge, what, settings):
    proposed, reason, labels = ONLY_KERNELBENCH[what]
    found = judge.evaluate(RELU, proposed, settings=settings)
    assert missing(found, Contract.DROP_IN) == (reason,), found.detail
    assert missing(found, Contract.KERNELBENCH) == (), found.detail
    assert labels == set(found.labels) & {Label.STATE_DIFFERS, Label.STRIDES_DIFFER, Label.CONTIGUOUS_ONLY}
    assert found.checks["missing"].keys() == {reason}
    if settings is KERNELBENCH:
        assert (found.verdict, found.reason, found.detail) == (Verdict.ACCEPTED, None, "")
    else:
        assert (found.verdict, found.reason) == (Verdict.REJECTED, reason)


@pytest.mark.parametrize("settings", exhaustive_but([DROP_IN, KERNELBENCH], KERNELBENCH), ids=lambda one: one.contract.value)
def test_statistics_that_do_not_move_are_no_matter_of_kernelbench(judge, settings):
    found = judge.evaluate(NORM, FORGETFUL, settings=settings)
    assert missing(found, Contract.DROP_IN)[0] is Reason.BUFFER_MISMATCH, found.detail
    assert missing(found, Contract.KERNELBENCH) == (), found.detail
    assert found.accepted is (settings is KERNELBENCH)


NEITHER = {
    "wrong": (candidate("return self.linear(x)"), (Reason.WRONG_OUTPUT,)),
    "wrong, and other names": (
        Candidate(source=candidate("return self.linear(x)").source.replace("self.linear", "self.other")),
        (Reason.STATE_MISMATCH, Reason.WRONG_OUTPUT),
    ),
    "the constructor's weights": (
        candidate("return torch.relu(x @ self.w.T + self.b)", init="self.w, self.b = map(torch.clone, self.parameters())"),
        (Reason.STALE_WEIGHTS,),
    ),
    "some of the constructor's weights": (
        candidate("return torch.relu(x @ self.w.T + self.linear.bias)", init="self.w = self.linear.weight.detach().clone()"),
        (Reason.STALE_WEIGHTS,),
    ),
    "wrong with the constructor's weights too": (
        candidate("return torch.relu(x @ self.w.T + 1)", init="self.w = self.linear.weight.detach().clone()"),
        (Reason.WRONG_OUTPUT,),
    ),
    "inputs changed": (candidate(f"x.relu_()\n{RIGHT}"), (Reason.INPUT_MUTATED,)),
    "no Python": (Candidate(source="def ("), (Reason.SYNTAX_ERROR,)),
}


@pytest.mark.parametrize(
    "what", exhaustive_but(NEITHER, "wrong", "wrong, and other names", "the constructor's weights", "no Python")
)
def test_what_keeps_neither_is_rejected_by_both(judge, what):
    proposed, reasons = NEITHER[what]
    found = judge.evaluate(RELU, proposed, settings=KERNELBENCH)
    assert missing(found, Contract.DROP_IN) == reasons, found.detail
    assert missing(found, Contract.KERNELBENCH) == reasons[-1:]
    assert (found.verdict, found.reason) == (Verdict.REJECTED, reasons[-1])
    said = [detail for reason, detail in found.checks.get("missing", {}).items() if reason in reasons]
    assert len(said) == (len(reasons) if len(reasons) > 1 else 0), "each reason with its detail"
    assert all(said)
    assert judge.evaluate(RELU, proposed, settings=DROP_IN).reason is reasons[0]


def test_both_contracts_hold_in_timed_calls_too(judge):
    settings = Settings.quick(threads=1, processes_min=1, processes_max=1, **ANY_WAIT)
    number = len(judge.evaluate(RELU, RENAMED, settings=DROP_IN).checks["sets"]) + 12
    late = f"self.n = getattr(self, 'n', 0) + 1\nreturn torch.relu(self.other(x)) * (self.n < {number})"
    cheat = Candidate(source=candidate(late).source.replace("self.linear", "self.other"))
    found = judge.evaluate(RELU, cheat, settings=settings)
    assert found.reason is Reason.STATE_MISMATCH
    assert missing(found, Contract.KERNELBENCH), "it is wrong once it has been called often"
    found = judge.evaluate(RELU, RENAMED, settings=settings)
    assert missing(found, Contract.KERNELBENCH) == ()
    assert found.speedup is None


def test_a_forbidden_label_rejects_under_kernelbench_too(judge):
    for label in (Label.STATE_DIFFERS, Label.LIBRARY_CALL):
        settings = KERNELBENCH.model_copy(update={"forbid": frozenset({label})})
        assert judge.evaluate(RELU, RENAMED, settings=settings).verdict is Verdict.REJECTED


def test_an_allowed_label_does_not_make_a_drop_in(judge):
    settings = DROP_IN.model_copy(update={"forbid": frozenset()})
    found = judge.evaluate(RELU, ONLY_KERNELBENCH["refuses strided inputs"][0], settings=settings)
    assert found.accepted, found.detail
    assert missing(found, Contract.DROP_IN) == (Reason.LAYOUT_DEPENDENT,)


def test_every_rejection_ends_with_what_to_change(judge):
    found = judge.evaluate(RELU, candidate("return self.linear(x)"))
    assert found.detail.splitlines()[-1] == f"To change: {Reason.WRONG_OUTPUT.hint}."
    assert not [one for one in Reason if "\n" in one.hint or one.hint.endswith(".")]


def test_a_service_gives_no_weaker_contract_than_its_own():
    strict = resolve(KERNELBENCH, SettingsRequest(contract=Contract.DROP_IN))
    assert (strict.contract, strict.forbid) == (Contract.DROP_IN, DROP_IN.forbid)
    assert resolve(KERNELBENCH, SettingsRequest()).contract is Contract.KERNELBENCH
    with pytest.raises(UsageError, match="drop-in"):
        resolve(DROP_IN, SettingsRequest(contract=Contract.KERNELBENCH))


def test_the_table_has_a_column_for_each_contract(judge):
    found = judge.evaluate(RELU, RENAMED, settings=KERNELBENCH)
    entry = BenchEntry(RELU.id, RELU.sha256, None, RENAMED.sha256)
    older = found.model_copy(update={"contracts": None})
    new, old = (_result(entry, [one], Precision.DEFAULT, ()) for one in (found, older))
    rows = bench_table([new])
    assert rows[0].contracts == {"drop-in": 0, "kernelbench": 1}
    assert bench_table([old])[0].contracts is None
    assert "| drop-in | kernelbench |" in render_markdown(rows)
    assert "| 0/1 | 1/1 |" in render_markdown(rows)
    assert "kernelbench |" not in render_markdown(bench_table([old]))
