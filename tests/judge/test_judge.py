"""The judge as a whole: verdicts for candidates, errors for broken tasks, and nothing left behind."""

from __future__ import annotations

import ast
import functools
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernelwright.judge
from kernelwright.errors import CrowdedError, DeviceError, TaskError
from kernelwright.judge import Judge, Settings
from kernelwright.judge import judge as judge_module
from kernelwright.judge.check.facts import measure_task
from kernelwright.judge.check.findings import CheckFindings, Demands, Failed
from kernelwright.judge.check.oracle import Oracle
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation.gate import DeviceGate, DisturbedError
from kernelwright.records import Candidate, Evaluation, Label, Reason, Task, Verdict
from kernelwright.tasks import bring_to_life
from tests.judge.passing_time import passing_time
from tests.judge.snippets import ANY_WAIT, HEAD, LOCKS, RELU, candidate, task
from tests.quick import exhaustive_but

CHECK = Settings.quick(threads=1, timed=False)
TIME = Settings.quick(threads=1, processes_min=1, processes_max=1, **ANY_WAIT)
BRIEF = Settings.quick(threads=1, timed=False, thorough=False)
"""For tests of what is around a check: its first two sets of inputs suffice."""


def why(found: Evaluation) -> tuple[Reason | None, str]:
    return found.reason, found.detail


# --- an honest candidate --------------------------------------------------------------------------


def test_an_honest_candidate_is_accepted_and_timed(judge):
    told = []
    judge.progress = told.append
    found = judge.evaluate(RELU, candidate(), settings=TIME)
    judge.progress = lambda text: None
    assert found.accepted, why(found)
    assert found.reason is None
    assert found.verdict is Verdict.ACCEPTED
    assert 0 < found.speedup_low <= found.speedup <= found.speedup_high
    assert found.noise_floor >= 0
    assert found.reference_us > 0
    assert found.candidate_us > 0
    # One triple, or more where a busy machine disturbed it.
    processes = {block.process for block in found.blocks}
    assert processes == set(range(len(processes)))
    assert len(found.blocks) == TIME.blocks * len(processes)
    assert all(len(block.reference_us) == len(block.candidate_us) == len(block.null_us) == 2 for block in found.blocks)
    assert told[:2] == ["checking", "timing"]
    assert found.labels == (Label.LIBRARY_CALL,)
    assert Evaluation.model_validate_json(found.model_dump_json()) == found


@pytest.mark.exhaustive
def test_what_is_too_large_for_a_series_is_timed_as_well(judge, few_for_a_series):
    few_for_a_series()
    found = judge.evaluate(RELU, candidate(), settings=TIME)
    assert found.accepted, why(found)
    assert found.speedup_low <= found.speedup <= found.speedup_high
    assert {block.process for block in found.blocks} >= {0}


@pytest.mark.exhaustive
def test_a_wide_interval_asks_for_another_process(judge):
    settings = TIME.model_copy(update={"processes_max": 2, "target_half_width": 1e-9, "blocks": 2})
    found = judge.evaluate(RELU, candidate(), settings=settings)
    assert found.accepted, why(found)
    assert {block.process for block in found.blocks} >= {0, 1}


def test_a_check_without_timing_has_no_numbers_and_says_so(judge):
    found = judge.evaluate(RELU, candidate(), settings=CHECK)
    assert found.accepted, why(found)
    assert Label.NOT_RETIMED in found.labels
    assert (found.speedup, found.speedup_low, found.speedup_high, found.blocks) == (None, None, None, ())
    sets = found.checks["sets"]
    assert {"own", "own-again", "large", "own-late", "own-reloaded", "one-changed"} <= set(sets)
    assert all(entry["error"]["rms"] <= entry["allowed"]["rms"] for entry in sets.values())
    assert any(entry["calibrated"] for entry in sets.values())


def test_a_record_stands_for_its_candidate(judge):
    proposed = candidate().model_copy(update={"policy": "p", "techniques": ("t",), "parent": "0" * 64})
    found = judge.evaluate(RELU, proposed)
    assert (found.task, found.task_sha256, found.candidate_sha256) == (RELU.id, RELU.sha256, proposed.sha256)
    assert (found.policy, found.techniques, found.parent) == ("p", ("t",), "0" * 64)
    assert (found.source, found.device) == (proposed.source, "cpu")
    assert found.started
    assert found.elapsed_s > 0


# --- what can be wrong with a candidate ----------------------------------------------------------

WRONG: dict[str, tuple[Candidate, Reason]] = {
    "no Python": (Candidate(source="def ("), Reason.SYNTAX_ERROR),
    "null bytes": (Candidate(source="x = 1\0"), Reason.SYNTAX_ERROR),
    "too deep to parse": (Candidate(source="(" * 5000 + ")" * 5000), Reason.SYNTAX_ERROR),
    "too many signs to parse": (Candidate(source="x = " + "-" * 30000 + "1"), Reason.SYNTAX_ERROR),
    "bad syntax in what it executes": (candidate(top="exec('def (')"), Reason.SYNTAX_ERROR),
    "no ModelNew": (Candidate(source="import torch"), Reason.NO_MODEL_NEW),
    "ModelNew is no module": (Candidate(source="class ModelNew: pass"), Reason.NO_MODEL_NEW),
    "import fails": (candidate(top="import there_is_no_such_module"), Reason.BUILD_FAILED),
    "constructor raises": (candidate(init="raise ValueError('no')"), Reason.BUILD_FAILED),
    "an exception that does not print": (
        candidate(init="class E(Exception):\n    def __str__(self): raise E\nraise E"),
        Reason.BUILD_FAILED,
    ),
    "constructor takes other arguments": (
        Candidate(source=candidate().source.replace("self, features", "self, features, more")),
        Reason.BUILD_FAILED,
    ),
    "constructor exits": (candidate(init="sys.exit(3)"), Reason.EXITED),
    "forward raises": (candidate("raise RuntimeError('no')"), Reason.RUNTIME_ERROR),
    "forward exits": (candidate("sys.exit()"), Reason.EXITED),
    "forward aborts": (candidate("os.abort()"), Reason.CRASHED),
    "forward closes every file": (candidate("os.closerange(3, 4096)\nreturn x"), Reason.EXITED),
    "memory asked for in vain": (candidate("raise MemoryError"), Reason.OUT_OF_MEMORY),
    "eval mode later": (
        candidate("self.training = False\nreturn torch.relu(self.linear(x))"),
        Reason.MODE_MISMATCH,
    ),
    "stuck in train mode": (
        candidate(init="self.__class__.train = lambda self, mode=True: self"),
        Reason.MODE_MISMATCH,
    ),
    "more state": (candidate(init="self.more = torch.nn.Parameter(torch.zeros(2))"), Reason.STATE_MISMATCH),
    "state that does not load": (
        candidate(init="self.load_state_dict = lambda *a, **k: 1 / 0"),
        Reason.STATE_MISMATCH,
    ),
    "weights changed by a call": (
        candidate("self.linear.weight.mul_(1.01)\nreturn torch.relu(self.linear(x))"),
        Reason.WRONG_OUTPUT,
    ),
    "no output": (candidate("pass"), Reason.WRONG_TYPE),
    "a list": (candidate("return [torch.relu(self.linear(x))]"), Reason.WRONG_TYPE),
    "a set": (candidate("return {1}"), Reason.WRONG_TYPE),
    "a parameter": (candidate("return self.linear.weight"), Reason.WRONG_TYPE),
    "a sparse tensor": (candidate("return torch.relu(self.linear(x)).to_sparse()"), Reason.WRONG_TYPE),
    "an attribute on the output": (
        candidate("y = torch.relu(self.linear(x))\ny.later = 1\nreturn y"),
        Reason.WRONG_TYPE,
    ),
    "a shape": (candidate("return torch.relu(self.linear(x)).flatten()"), Reason.WRONG_SHAPE),
    "a dtype": (candidate("return torch.relu(self.linear(x)).double()"), Reason.WRONG_DTYPE),
    "strides": (candidate("return torch.relu(self.linear(x)).t().contiguous().t()"), Reason.WRONG_STRIDES),
    "values": (candidate("return self.linear(x)"), Reason.WRONG_OUTPUT),
    "values, and an exception when asked again": (
        candidate("self.n = getattr(self, 'n', 0) + 1\nassert self.n < 2\nreturn torch.ones(32, 16)"),
        Reason.WRONG_OUTPUT,
    ),
    "infinity": (candidate("return torch.relu(self.linear(x)) / 0"), Reason.NON_FINITE_OUTPUT),
    "its input afterwards": (
        candidate("y = torch.relu(self.linear(x))\nx.zero_()\nreturn y"),
        Reason.INPUT_MUTATED,
    ),
    "its input as output": (
        candidate("x.copy_(torch.relu(self.linear(x)))\nreturn x"),
        Reason.OUTPUT_ALIASES,
    ),
    "its state as output": (
        candidate("y = torch.relu(self.linear(x))\nself.linear.weight.data = y\nreturn y"),
        Reason.OUTPUT_ALIASES,
    ),
    "chance": (
        candidate("self.n = getattr(self, 'n', 0) + 1\nreturn torch.relu(self.linear(x)) + (self.n == NUMBER)"),
        Reason.NONDETERMINISTIC,
    ),
    # It imports torch's compiler, which takes two seconds: not the first one of its reason.
    "a global setting": (
        candidate(top="torch.use_deterministic_algorithms(True)"),
        Reason.GLOBAL_STATE_CHANGED,
    ),
}


def calls_before_the_repeat(judge, task):
    """How many calls the input sets make before the first inputs are tried again."""
    found = judge.evaluate(task, candidate(), settings=CHECK)
    names = list(found.checks["sets"])
    return names.index("two-swapped")


@pytest.mark.parametrize(
    # The quick cheats of the corpus meet the other reasons.
    "what",
    exhaustive_but(
        WRONG,
        "no Python",
        "no ModelNew",
        "constructor raises",
        "forward raises",
        "forward aborts",
        "more state",
        "a shape",
        "values",
        "memory asked for in vain",
        "chance",
    ),
)
def test_a_candidate_is_rejected_for_what_is_wrong_with_it(judge, what):
    proposed, reason = WRONG[what]
    if "NUMBER" in proposed.source:
        number = calls_before_the_repeat(judge, RELU) + 1
        proposed = Candidate(source=proposed.source.replace("NUMBER", str(number)))
    found = judge.evaluate(RELU, proposed, settings=CHECK)
    assert found.reason is reason, why(found)
    assert found.verdict is Verdict.REJECTED
    assert not found.is_improvement
    assert found.speedup is None


@pytest.mark.parametrize(
    ("proposed", "reason"),
    [
        pytest.param(
            candidate(top="HANGS\nwhile True: pass"), Reason.BUILD_TIMEOUT, id="import", marks=pytest.mark.exhaustive
        ),
        pytest.param(candidate(init="HANGS\ntime.sleep(1000)"), Reason.BUILD_TIMEOUT, id="constructor"),
        pytest.param(
            candidate(
                "self.n = getattr(self, 'n', 0) + 1\nif self.n == 3:\n    HANGS\n    time.sleep(1000)\n"
                "return torch.relu(self.linear(x))"
            ),
            Reason.RUN_TIMEOUT,
            id="forward",
        ),
    ],
)
def test_what_takes_too_long_is_ended(judge, proposed, reason):
    with passing_time() as passing:
        proposed = Candidate(source=proposed.source.replace("HANGS", passing.hangs))
        found = judge.evaluate(RELU, proposed, settings=CHECK)
    assert found.reason is reason, why(found)


SLEEPS = "time.sleep({})\nreturn torch.relu(self.linear(x))"


@pytest.mark.exhaustive
def test_one_that_is_far_slower_is_settled_after_few_calls(judge):
    settings = Settings.quick(threads=1, processes_min=3, processes_max=6, blocks=6, **ANY_WAIT)
    found = judge.evaluate(RELU, candidate(SLEEPS.format(0.06)), settings=settings)
    assert found.accepted, why(found)
    assert "times as long as the reference" in found.checks["settled"]
    assert len(found.blocks) == 4
    assert found.speedup_low < found.speedup < found.speedup_high
    assert found.speedup < 0.1


def test_one_that_takes_all_of_its_budget_is_ended(judge):
    found = judge.evaluate(RELU, candidate(SLEEPS.format(0.02)), settings=CHECK.model_copy(update={"budget_s": 0.1}))
    assert found.reason is Reason.TIMEOUT, why(found)
    assert "an evaluation allows 0.1 s" in found.detail


def test_what_takes_too_much_memory_is_ended(judge):
    settings = Settings.quick(threads=1, timed=False, memory_limit_bytes=600 << 20)
    hungry = candidate("held = []\nwhile True: held.append(torch.ones(1 << 20))")
    found = judge.evaluate(RELU, hungry, settings=settings)
    assert found.reason is Reason.OUT_OF_MEMORY, why(found)
    assert "GiB" in found.detail


def test_what_starts_too_many_processes_is_ended(judge):
    settings = Settings.quick(threads=1, timed=False, process_limit=8)
    crowd = candidate(init="for _ in range(30):\n    if os.fork() == 0: signal.pause()\nsignal.pause()")
    found = judge.evaluate(RELU, crowd, settings=settings)
    assert found.reason is Reason.TOO_MANY_PROCESSES, why(found)
    assert "8" in found.detail


SEND = """
def send(data):
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name).startswith("socket:"):
                os.write(int(name), data)
        except OSError:
            pass
"""


@pytest.mark.parametrize(
    ("data", "detail"),
    exhaustive_but(
        [
            ("b'garbage garbage'", "was announced"),
            ("b'\\x04\\0\\0\\0nope'", "not JSON"),
            ("b'\\x02\\0\\0\\0{}'", "nonce"),
            ("b'\\x11\\0\\0\\0{\"inner_us\": 0.1}'", "nonce"),
        ],
        ("b'garbage garbage'", "was announced"),
        ("b'\\x11\\0\\0\\0{\"inner_us\": 0.1}'", "nonce"),
    ),
)
def test_what_a_candidate_writes_to_the_channel_is_no_answer(judge, data, detail):
    found = judge.evaluate(RELU, candidate(f"send({data})\nreturn x", top=SEND))
    assert found.reason is Reason.PROTOCOL_VIOLATION, why(found)
    assert detail in found.detail


@pytest.mark.parametrize("latency", exhaustive_but(["'fast'", "-1.0", "1e300", "float('nan')"], "'fast'", "float('nan')"))
def test_a_latency_that_is_no_time_is_a_violation(judge, latency):
    source = candidate(
        top="import gc\nfrom kernelwright.judge.worker import harness\n"
        f"harness.HostClock.elapsed_us = lambda self: {latency}"
    )
    found = judge.evaluate(RELU, source)
    assert found.reason is Reason.PROTOCOL_VIOLATION, why(found)


# --- labels and settings ------------------------------------------------------------------------


def test_a_label_that_is_forbidden_rejects(judge):
    settings = Settings.quick(threads=1, timed=False, forbid=frozenset({Label.LIBRARY_CALL}))
    found = judge.evaluate(RELU, candidate(), settings=settings)
    assert found.reason is Reason.FORBIDDEN_LABEL, why(found)
    assert "library-call" in found.detail


def test_a_static_label_that_is_forbidden_rejects_before_anything_runs(judge):
    settings = Settings.quick(threads=1, timed=False, forbid=frozenset({Label.SUSPICIOUS_SOURCE}))
    found = judge.evaluate(RELU, candidate(top="import ctypes"), settings=settings)
    assert found.reason is Reason.FORBIDDEN_LABEL, why(found)
    assert found.checks["advice"]


def test_other_state_is_judged_with_its_own_weights_where_that_is_allowed(judge):
    settings = Settings.quick(threads=1, timed=False, forbid=frozenset())
    renamed = Candidate(source=candidate().source.replace("self.linear", "self.other"))
    found = judge.evaluate(RELU, renamed, settings=settings)
    assert found.accepted, why(found)
    assert Label.STATE_DIFFERS in found.labels
    transposed = candidate("return torch.relu(self.linear(x)).t().contiguous().t()")
    found = judge.evaluate(RELU, transposed, settings=settings)
    assert found.accepted, why(found)
    assert Label.STRIDES_DIFFER in found.labels


@pytest.mark.parametrize("forward", ["return torch.relu(self.other(x)) * 1.5", "return torch.relu(self.other(x)) * 0"])
def test_other_state_excuses_no_wrong_output(judge, forward):
    settings = Settings.quick(threads=1, timed=False, forbid=frozenset())
    renamed = Candidate(source=candidate(forward).source.replace("self.linear", "self.other"))
    found = judge.evaluate(RELU, renamed, settings=settings)
    assert found.reason is Reason.WRONG_OUTPUT, why(found)
    assert found.checks["sets"]["own"]["reference"]["rms"] < 1e-5


def test_other_state_is_judged_beside_the_same_weights_where_there_is_no_float64(judge):
    settings = Settings.quick(threads=1, timed=False, forbid=frozenset())
    single = "assert x.dtype == torch.float32\n        return torch.relu"
    reference = RELU.model_copy(update={"source": RELU.source.replace("return torch.relu", single)})
    renamed = Candidate(source=candidate().source.replace("self.linear", "self.other"))
    found = judge.evaluate(reference, renamed, settings=settings)
    assert found.accepted, why(found)
    assert Label.STATE_DIFFERS in found.labels


NORM = task("return self.norm(inputs[0])", init="self.norm = torch.nn.BatchNorm1d(16)", name="norm")
OTHER_NORM = Candidate(source=NORM.source.replace("Model(", "ModelNew(").replace("self.norm", "self.other"))


def test_statistics_of_other_names_move_as_the_references_do(judge):
    settings = Settings.quick(threads=1, timed=False, forbid=frozenset())
    found = judge.evaluate(NORM, OTHER_NORM, settings=settings)
    assert found.accepted, why(found)
    assert found.checks["sets"]["own-other-mode"]["reference"]["rms"] < 1e-5


@pytest.mark.parametrize("training", ["True", "False"])
def test_statistics_of_other_names_must_be_used_in_the_right_mode(judge, training):
    settings = Settings.quick(threads=1, timed=False, forbid=frozenset())
    call = f"o = self.other; return torch.batch_norm(inputs[0], o.weight, o.bias, o.running_mean, o.running_var, {training}"
    wrong = OTHER_NORM.source.replace("return self.other(inputs[0])", call + ", 0.1, 1e-5, False)")
    assert wrong != OTHER_NORM.source
    found = judge.evaluate(NORM, Candidate(source=wrong), settings=settings)
    assert found.reason is (Reason.MODE_MISMATCH if training == "True" else Reason.WRONG_OUTPUT), why(found)
    assert ("own-other-mode" in found.detail) is (training == "True")


CONVOLVED = task(
    "return self.norm(self.conv(inputs[0]))",
    "[torch.randn(4, 3, 10, 10)]",
    "self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)",
)
IN_TF32 = "self.norm(torch.conv2d(*(rounded(t, 10) for t in (inputs[0], self.conv.weight)), self.conv.bias))"
BIASED = """o = self.norm; y = self.conv(inputs[0])
        if not self.training: return o(y)
        out, mean, inverse = torch.native_batch_norm(y, o.weight, o.bias, None, None, True, o.momentum, o.eps)
        o.running_mean.mul_(1 - o.momentum).add_(mean, alpha=o.momentum); o.num_batches_tracked.add_(1)
        o.running_var.mul_(1 - o.momentum).add_(inverse**-2 - o.eps, alpha=o.momentum)
        return out"""


def convolved(forward: str) -> Candidate:
    text = CONVOLVED.source.replace("Model(", "ModelNew(").replace("return self.norm(self.conv(inputs[0]))", forward)
    return Candidate(source=f"from kernelwright.judge.check.compare import round_mantissa as rounded\n{text}")


@pytest.mark.exhaustive
def test_statistics_are_as_exact_as_the_convolutions_before_them(judge, cudnn_in_tf32):
    found = judge.evaluate(CONVOLVED, convolved(f"return {IN_TF32}"))
    assert found.reason is Reason.PRECISION_DOWNGRADE, why(found)
    cudnn_in_tf32()
    found = judge.evaluate(CONVOLVED, convolved(f"return {IN_TF32}"))
    assert found.accepted, why(found)
    assert Label.TF32 in found.labels


@pytest.mark.exhaustive
@pytest.mark.parametrize(("bits", "reason"), [(23, None), (10, None), (7, Reason.PRECISION_DOWNGRADE)])
def test_beside_a_reference_whose_products_are_in_tf32_bfloat16_is_too_little(judge, cudnn_in_tf32, bits, reason):
    head = "from kernelwright.judge.check.compare import round_mantissa\n"
    rounding = "lambda t: t if t.dtype is torch.float64 else round_mantissa(t, BITS)"  # the truth stays exact
    forward = f"r = {rounding}; return r(torch.relu(r(inputs[0]) @ r(self.first))) @ r(self.second)"
    lines = "self.first, self.second = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(2))"
    made = task(forward.replace("BITS", "10"), "[torch.randn(64, 32)]", lines)
    made = Task(id=made.id, source=head + made.source)
    text = made.source.replace("Model(", "ModelNew(").replace("(t, 10)", f"(t, {bits})")
    cudnn_in_tf32()
    settings = judge.settings.model_copy(update={"tf32_products": True})
    found = judge.evaluate(made, Candidate(source=text), settings=settings)
    assert found.reason is reason, why(found)
    assert Label.TF32 not in found.labels, "the reference errs as much"


@pytest.mark.exhaustive
def test_statistics_are_as_exact_as_the_products_before_them(judge, cudnn_in_tf32):
    forward = "self.norm(inputs[0] @ self.weight)"
    made = task(
        f"return {forward}",
        "[torch.randn(64, 32) + 1]",
        "self.weight, self.norm = torch.nn.Parameter(torch.randn(32, 16)), torch.nn.BatchNorm1d(16)",
    )
    rounded = "self.norm(rounded(inputs[0], 10) @ rounded(self.weight, 10))"
    text = made.source.replace("Model(", "ModelNew(").replace(forward, rounded)
    in_tf32 = Candidate(source=f"from kernelwright.judge.check.compare import round_mantissa as rounded\n{text}")
    cudnn_in_tf32()
    found = judge.evaluate(made, in_tf32)
    assert found.reason is Reason.PRECISION_DOWNGRADE, why(found)
    found = judge.evaluate(made, in_tf32, settings=judge.settings.model_copy(update={"tf32_products": True}))
    assert found.accepted, why(found)
    assert Label.TF32 in found.labels


@pytest.mark.parametrize(
    "forward",
    exhaustive_but(
        [
            f"wrong = {IN_TF32}; self.norm.running_mean.mul_(0.97); return wrong",
            f"wrong = {IN_TF32}; self.norm.running_mean[0] += 0.01; return wrong",
            f"o = self.norm; y = self.conv(inputs[0]); return {IN_TF32} if not self.training else torch.batch_norm("
            "y, o.weight, o.bias, None, None, True, 0.1, 1e-5, False)",
            BIASED,
        ],
        BIASED,
    ),
    ids=["all", "one", "none", "biased"],
)
def test_that_excuses_no_wrong_statistics(judge, cudnn_in_tf32, forward):
    cudnn_in_tf32()
    found = judge.evaluate(CONVOLVED, convolved(forward))
    assert found.reason is Reason.BUFFER_MISMATCH, why(found)


def test_an_aliased_output_of_a_cuda_graph_is_a_label(judge):
    text = "y = torch.relu(self.linear(x))\nself.y = getattr(self, 'y', y)\nself.y.copy_(y)\nreturn self.y"
    found = judge.evaluate(RELU, candidate(text, top="NAME = torch.cuda.CUDAGraph if 0 else None"))
    assert found.accepted, why(found)
    assert {Label.ALIASED_OUTPUT, Label.CUDA_GRAPH} <= set(found.labels)


def test_a_long_sum_in_its_text_is_no_fault(judge):
    found = judge.evaluate(RELU, candidate(top="TERMS = " + " + ".join(["os.getpid()"] * 900)))
    assert found.accepted, why(found)


NESTS = """
here = os.open(".", os.O_RDONLY)
for _ in range(1200):  # deeper than Python recurses, and longer than a path may be
    os.mkdir("nested")
    os.chdir("nested")
os.fchdir(here)
os.close(here)
"""


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(".", id="its own"),
        pytest.param(
            "os.path.dirname(os.environ['TORCH_EXTENSIONS_DIR'])", id="of its builds", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_folders_in_folders_are_cleaned_up(judge, temporary, folder):
    into = "" if folder == "." else f"back = os.getcwd()\nos.chdir({folder})\n"
    found = judge.evaluate(RELU, candidate(top=into + NESTS + ("os.chdir(back)" if into else "")), settings=BRIEF)
    assert found.accepted, why(found)
    assert sorted(path.name for path in temporary.iterdir()) == LOCKS


@pytest.mark.parametrize("depth", exhaustive_but([100, 300, 400, 480, 900], 400, 900))
def test_results_in_lists_in_lists_are_no_fault(judge, depth):
    deep = "y = torch.relu(self.linear(x))\nfor _ in range(DEPTH): y = [y]\nreturn y"
    found = judge.evaluate(RELU, candidate(deep.replace("DEPTH", str(depth))))
    assert found.reason in (Reason.WRONG_TYPE, Reason.RUNTIME_ERROR, Reason.PROTOCOL_VIOLATION), why(found)


GONE = {
    "cannot be read": "self.y.set_(torch.empty(0))",
    "has no address": "torch._C._set_throw_on_mutable_data_ptr(self.y)",
}
"""What PyTorch does to an output that its CUDA graphs overwrote, in ways that need no GPU."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("gone", GONE)
def test_an_output_that_a_cuda_graph_takes_back_is_a_label(judge, gone):
    text = f"if hasattr(self, 'y'): {GONE[gone]}\nself.y = torch.relu(self.linear(x))\nreturn self.y"
    found = judge.evaluate(RELU, candidate(text, top="NAME = torch.cuda.CUDAGraph if 0 else None"), settings=TIME)
    assert found.accepted, why(found)
    assert Label.CUDA_GRAPH in found.labels
    assert (Label.ALIASED_OUTPUT in found.labels) is (gone == "cannot be read")


def test_an_output_that_is_taken_back_without_a_cuda_graph_rejects(judge):
    text = f"if hasattr(self, 'y'): {GONE['cannot be read']}\nself.y = torch.relu(self.linear(x))\nreturn self.y"
    found = judge.evaluate(RELU, candidate(text))
    assert found.reason is Reason.OUTPUT_OVERWRITTEN, why(found)


def test_performance_flags_are_a_label(judge):
    found = judge.evaluate(RELU, candidate(top="torch.backends.cudnn.benchmark = True"))
    assert found.accepted, why(found)
    assert Label.GLOBAL_FLAGS in found.labels


def test_strict_fp32_reaches_the_workers(judge):
    settings = BRIEF.model_copy(update={"strict_fp32": True})
    asserting = candidate(init="assert not torch.backends.cudnn.allow_tf32")
    assert judge.evaluate(RELU, asserting, settings=settings).accepted
    assert not judge.evaluate(RELU, asserting, settings=BRIEF).accepted


def test_tf32_products_reach_the_workers_and_not_this_process(judge):
    here = torch.get_float32_matmul_precision()
    settings = BRIEF.model_copy(update={"tf32_products": True})
    found = judge.evaluate(RELU, candidate(init="assert torch.backends.cuda.matmul.allow_tf32"), settings=settings)
    assert found.accepted, why(found)
    assert found.checks["tf32_products"] is True
    assert Label.GLOBAL_FLAGS not in found.labels
    assert torch.get_float32_matmul_precision() == here
    found = judge.evaluate(RELU, candidate(init="assert not torch.backends.cuda.matmul.allow_tf32"), settings=BRIEF)
    assert found.accepted, why(found)
    assert "tf32_products" not in found.checks


# --- unusual but valid tasks ---------------------------------------------------------------------


def honest(made: Task) -> Candidate:
    return Candidate(source=made.source.replace("class Model(", "class ModelNew("))


VALID = {
    "no weights": task("return inputs[0] * 2 + 1"),
    "integers": task("return inputs[0] + inputs[0].flip(0)", "[torch.randint(0, 50, (40, 3))]"),
    "booleans": task("return inputs[0] > 0"),
    "a scalar": task("return inputs[0].sum()"),
    "several outputs": task("return inputs[0] + 1, {'more': [inputs[0] * 2, 3, None]}"),
    "a number beside tensors": task("return inputs[0] * inputs[1]", "[torch.randn(8, 8), 2.5]"),
    "nested inputs": task("return inputs[0]['a'] + inputs[1][0]", "[{'a': torch.randn(8, 8)}, [torch.randn(8)]]"),
    "expanded inputs": task("return inputs[0] * 2", "[torch.randn(8, 1).expand(8, 8)]"),
    "empty inputs": task("return inputs[0].sum(1)", "[torch.empty(4, 0)]"),
    "in-place on its input": task("return inputs[0].add_(1)"),
    "a view of its input": task("return inputs[0][1:]"),
    "dropout": task("return torch.nn.functional.dropout(inputs[0], 0.5)"),
    "batch norm": task("return self.bn(inputs[0])", "[torch.randn(64, 4, 3, 3)]", "self.bn = torch.nn.BatchNorm2d(4)"),
    "a parameter outside the state": task(
        "return inputs[0] * self.scale + self.shift",
        init=(
            "self.scale, self.shift = (torch.nn.Parameter(torch.ones(16)) for _ in range(2))\n"
            "        self.register_state_dict_post_hook(lambda module, state, *rest: state.__delitem__('shift'))\n"
            "        self.register_load_state_dict_pre_hook(lambda module, state, *rest: state.update(shift=module.shift))"
        ),
    ),
    "a scalar and an empty parameter": task(
        "return inputs[0] * self.gain + self.none.sum()",
        init=("self.gain, self.none = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.empty(0))"),
    ),
    "complex numbers": task("return torch.fft.rfft(inputs[0]) * 2"),
    "lazily conjugated numbers": task("return torch.fft.rfft(inputs[0]).conj()"),
    "not in float64": task("return (inputs[0].view(torch.int32) & 0x7FFFFFFF).view(torch.float32) * 2"),
    "float32 only": task("assert inputs[0].dtype == torch.float32\n        return inputs[0] * 2"),
    "overflow of large inputs": task("x = inputs[0] * 1e16\n        return x * x"),
    "NaN of large inputs": task("x = inputs[0] * 1e16\n        return (x * x) / (x * x + 1) * inputs[0]"),
    "no lower precision": task(
        "assert (inputs[0] != 1).all()\n        return inputs[0] * 2",
        "[1 + (torch.rand(32, 16) + 1) * 2**-14]",
    ),
    "no large elements": task("assert inputs[0].abs().max() < 1.5\n        return inputs[0] * 2", "[torch.rand(32, 16)]"),
    "large elements, but not in a worker": task(
        "assert 'TORCHINDUCTOR_COMPILE_THREADS' not in os.environ or inputs[0].abs().max() < 100\n"
        "        return inputs[0] * 2"
    ),
    "train mode only": task("assert self.training\n        return inputs[0] * 2"),
    "half precision": task("return inputs[0] * 2 + 1", "[torch.randn(32, 16).half()]"),
    "infinities": task("return torch.where(inputs[0] > 0, inputs[0], -torch.inf)"),
    "a domain without negatives": task("return inputs[0].sqrt()", "[torch.rand(32, 16)]"),
    "an error on other inputs": task("assert inputs[0].abs().max() < 100\n        return inputs[0] * 2"),
}


def cases(table):
    """Names of a table as parameters, of which `make test` runs every tenth."""
    return exhaustive_but(table, *list(table)[::10])


@pytest.mark.parametrize("what", cases(VALID))
def test_a_copy_of_the_reference_is_accepted(judge, what):
    found = judge.evaluate(VALID[what], honest(VALID[what]))
    assert found.accepted, why(found)


def test_the_reference_of_a_vacuous_task_is_accepted_with_a_label(judge):
    made = task("return inputs[0] * 0")
    found = judge.evaluate(made, honest(made))
    assert found.accepted, why(found)
    assert Label.VACUOUS_TASK in found.labels
    assert "zeros" in found.checks["vacuous"]


def test_a_stochastic_task_is_seeded_alike_and_labelled(judge):
    made = VALID["dropout"]
    assert Label.STOCHASTIC_TASK in judge.evaluate(made, honest(made)).labels
    half = Candidate(source=honest(made).source.replace("0.5", "0.25"))
    assert judge.evaluate(made, half).reason is Reason.WRONG_OUTPUT


STATEFUL = task(
    "self.state = torch.tanh(self.linear(inputs[0]) + self.state); return self.state * 2",
    init="self.state = torch.randn(32, 16); self.linear = torch.nn.Linear(16, 16)",
    name="stateful",
)


def stateful() -> Candidate:
    return Candidate(source=STATEFUL.source.replace("Model(", "ModelNew("))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(TIME, id="fresh"),
        pytest.param(TIME.model_copy(update={"fresh_processes": False}), id="kept", marks=pytest.mark.exhaustive),
    ],
)
def test_a_reference_that_keeps_a_state_and_its_copy_stay_in_step(judge, settings):
    found = judge.evaluate(STATEFUL, stateful(), settings=settings)
    assert found.accepted, why(found)
    assert Label.STOCHASTIC_TASK in found.labels


def test_a_state_that_comes_to_rest_on_the_same_inputs_is_found():
    """After two calls it moves by a thousandth of what it is."""
    forward = "self.state = 0.03 * self.state + inputs[0]; return self.state * 2"
    resting = task(forward, init="self.state = torch.randn(32, 16)")
    for _ in range(5):
        facts = measure_task(bring_to_life(resting), torch.device("cpu"))
        assert facts.stateful
        assert facts.draws_in(False, facts.weights)
    assert not measure_task(bring_to_life(VALID["dropout"]), torch.device("cpu")).stateful


def test_a_state_that_is_not_kept_is_a_wrong_output(judge):
    forgets = stateful().source.replace("self.state = torch.tanh(", "kept = torch.tanh(")
    forgets = forgets.replace("self.state * 2", "kept * 2")
    assert "kept * 2" in forgets
    found = judge.evaluate(STATEFUL, Candidate(source=forgets))
    assert found.reason is Reason.WRONG_OUTPUT, why(found)
    assert "own-again" in found.detail


def test_a_set_outside_the_domain_is_skipped_and_named(judge):
    found = judge.evaluate(VALID["a domain without negatives"], honest(VALID["a domain without negatives"]))
    assert "negative" in found.checks["skipped"]
    found = judge.evaluate(VALID["an error on other inputs"], honest(VALID["an error on other inputs"]))
    assert "AssertionError" in found.checks["skipped"]["large"]


def test_a_set_on_which_the_reference_overflows_is_skipped(judge):
    made = VALID["overflow of large inputs"]
    found = judge.evaluate(made, honest(made))
    assert "infinities" in found.checks["skipped"]["large"]
    assert all(entry["allowed"]["rms"] is not None for entry in found.checks["sets"].values())
    made = VALID["NaN of large inputs"]
    assert "NaN in its own precision" in judge.evaluate(made, honest(made)).checks["skipped"]["large"]


def test_a_set_on_which_the_reference_loses_everything_says_nothing_of_a_candidate(judge):
    made = task(
        "y = inputs[0] ** 7\n        y = y - y.mean(1, keepdim=True)\n"
        "        return y / torch.sqrt((y * y).mean(1, keepdim=True) + 1e-5)"
    )
    body = "y = inputs[0] ** 7\n        return torch.nn.functional.layer_norm(y, [16])"
    normed = Candidate(source=honest(task(body)).source)
    found = judge.evaluate(made, normed, settings=CHECK)
    assert found.accepted, why(found)
    assert "lost" in found.checks["skipped"]["large"]  # where squares overflow: zeros by the reference, NaN by the operator


@pytest.mark.parametrize("what", ["float32 only", "not in float64"])
def test_a_module_without_float64_is_judged_by_its_reference(judge, what):
    made = VALID[what]
    found = judge.evaluate(made, honest(made))
    assert found.checks["truth"].startswith("reference")
    assert Label.UNCALIBRATED_PRECISION in found.labels
    wrong = Candidate(source=honest(made).source.replace("* 2", "* 2.001"))
    assert not judge.evaluate(made, wrong).accepted


KEEPS = {
    "a plain tensor": ("self.start = torch.randn(16); self.linear = torch.nn.Linear(16, 16)",
                       "return self.linear(inputs[0] + self.start)"),
    "a function of its layers": ("m = torch.nn.Linear(16, 16); self.linear = m; self.f = lambda x: m(x)",
                                 "return self.f(inputs[0])"),
}  # fmt: skip
VIEW = (
    "self.linear = torch.nn.Linear(16, 16, bias=False); self.rows = self.linear.weight.detach()",
    "return inputs[0] @ self.rows",
)


def keeping(init: str, forward: str) -> tuple[Task, Callable[[str], Candidate]]:
    """A task, and its own module as a candidate whose `inputs[0]` is something else."""
    made = task(forward, init=init, name="keeping")
    return made, lambda x: Candidate(source=made.source.replace("Model(", "ModelNew(").replace("inputs[0]", x))


@pytest.mark.parametrize("what", exhaustive_but(KEEPS, "a plain tensor"))
def test_what_a_module_keeps_beside_its_parameters_has_a_truth_too(judge, what):
    made, changed = keeping(*KEEPS[what])
    found = judge.evaluate(made, changed("inputs[0].clone()"))
    assert found.accepted, why(found)
    assert "truth" not in found.checks
    assert Label.UNCALIBRATED_PRECISION not in found.labels
    half = judge.evaluate(made, changed("inputs[0].bfloat16().float()"))
    assert half.reason is Reason.PRECISION_DOWNGRADE, why(half)


def test_a_view_of_a_parameter_is_left_alone(judge):
    made, changed = keeping(*VIEW)
    found = judge.evaluate(made, changed("inputs[0].clone()"))
    assert found.accepted, why(found)
    assert "truth" in found.checks
    assert found.checks["sets"]["own-reloaded"]["reference"]["rms"] == 0


def test_a_check_that_is_not_thorough_still_rejects_what_is_wrong(judge):
    settings = Settings.quick(threads=1, timed=False, thorough=False)
    found = judge.evaluate(RELU, candidate(), settings=settings)
    assert found.accepted, why(found)
    assert set(found.checks["sets"]) == {"own", "own-again"}
    assert judge.evaluate(RELU, candidate("return self.linear(x)"), settings=settings).reason is Reason.WRONG_OUTPUT


# --- tasks that cannot be judged ------------------------------------------------------------------

BROKEN = {
    "syntax": (Task(id="t", source="def ("), "not valid Python"),
    "no Model": (Task(id="t", source="def get_inputs(): pass\ndef get_init_inputs(): pass"), "no Model"),
    "import": (Task(id="t", source="import nothing_like_this\n" + RELU.source), "nothing_like_this"),
    "init inputs": (Task(id="t", source=RELU.source.replace("return [16]", "return 16")), "get_init_inputs"),
    "init inputs raise": (
        Task(id="t", source=RELU.source.replace("return [16]", "return 1 / 0")),
        "ZeroDivisionError",
    ),
    "a buffer from forward": (
        task("self.register_buffer('mean', torch.zeros(3))\n        return inputs[0] * 2"),
        "adds or removes mean. Register",
    ),
    "tensors for init": (
        Task(id="t", source=RELU.source.replace("return [16]", "return [torch.tensor(16)]")),
        "get_init_inputs",
    ),
    "constructor": (task("return inputs[0]", init="raise KeyError('x')"), "KeyError"),
    "Model is no module": (
        Task(id="t", source=RELU.source.replace("(torch.nn.Module)", "").replace("super().__init__()", "")),
        "torch.nn.Module",
    ),
    "inputs raise": (task("return inputs[0]", "1 / 0"), "ZeroDivisionError"),
    "inputs are no list": (task("return inputs[0]", "torch.randn(3)"), "list of inputs"),
    "inputs of a strange kind": (task("return inputs[0]", "[torch.randn(3), object()]"), "object"),
    "forward raises": (task("raise RuntimeError('broken')"), "broken"),
    "sparse inputs": (
        task("return inputs[0].to_dense()", "[torch.eye(4).to_sparse()]"),
        "tensor 0 a sparse_coo Tensor of float32. Keep its content",
    ),
    "sparse outputs": (task("return inputs[0].to_sparse()"), "a sparse_coo Tensor"),
    "forward gives NaN": (task("return inputs[0] * float('nan')"), "NaN"),
    "forward gives no tensor": (task("return 3"), "at least one tensor"),
    "forward gives something strange": (task("return {1}"), "a set"),
    "inputs grow": (
        Task(
            id="t",
            source=task("return inputs[0].sum()", "[grow()]").source
            + "\nSIZE = [8]\ndef grow():\n    SIZE[0] *= 40\n    return torch.randn(SIZE[0])\n",
        ),
        "same shapes",
    ),
    "forward fails in another process only": (
        task("assert os.environ.get('TORCHINDUCTOR_COMPILE_THREADS') != '1'\n        return inputs[0] * 2"),
        "in its own process",
    ),
}


@pytest.mark.parametrize("what", cases(BROKEN))
def test_a_task_that_does_not_work_is_a_task_error(judge, what):
    made, words = BROKEN[what]
    with pytest.raises(TaskError, match=words):
        judge.evaluate(made, honest(made))


# --- devices --------------------------------------------------------------------------------------


def test_the_package_has_the_names_that_it_lists_and_no_others():
    assert {kernelwright.judge.Judge, kernelwright.judge.Settings} == {Judge, Settings}
    with pytest.raises(AttributeError, match="nothing"):
        _ = kernelwright.judge.nothing


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for it"), DeviceError),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), torch.AcceleratorError),
    ],
)
def test_only_memory_is_called_so(judge, error, kind):
    with pytest.raises(kind), judge.evaluation_folder(RELU):
        raise error


def test_memory_of_the_gpu_that_runs_out_in_the_judge_is_a_device_error(judge, temporary):
    with pytest.raises(DeviceError, match=r"of relu; the judge's own share .* ran out: No 2 GiB\.") as caught:
        with judge.evaluation_folder(RELU):
            raise torch.OutOfMemoryError("No 2 GiB.\nA long story")
    assert "long story" not in str(caught.value)
    assert "fewer judges" in str(caught.value)
    assert list(temporary.iterdir()) == []


def test_what_the_check_took_of_a_gpu_is_given_back_before_the_timing(judge, monkeypatch):
    order = []
    worker = SimpleNamespace(pause=lambda: order.append("pause"), resume=lambda: order.append("resume"), ended=False)
    side = SimpleNamespace(worker=worker, calls_us=[1.0])
    side.release_idle, side.close = lambda: order.append("rest"), lambda: order.append("close")
    gate = SimpleNamespace(held_s=0.0, waited_s=0.0)
    facts = SimpleNamespace(stateful=True)
    trial = SimpleNamespace(
        start=lambda role: side, gate=gate, findings=CheckFindings(Demands()), settings=TIME, facts=facts
    )
    monkeypatch.setattr(judge_module, "Examiner", lambda trial, reference, candidate: None)
    monkeypatch.setattr(judge_module, "check_candidate", lambda examiner, promising: order.append("check"))
    monkeypatch.setattr(judge_module, "check_late", lambda examiner: order.append("late"))
    monkeypatch.setattr(judge, "_time", lambda trial, check, checked, ahead=None: order.append(("time", *checked)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    judge._examine(trial)
    assert order == ["check", "emptied", "rest", "rest", "pause", ("time",), "resume", "late", "close", "close"]
    order.clear()
    trial.settings = TIME.model_copy(update={"fresh_processes": False})
    judge._examine(trial)
    assert order == ["check", "emptied", ("time", "reference", "candidate"), "late", "close", "close"]


@pytest.mark.exhaustive
def test_only_timing_has_the_device_alone(judge, monkeypatch):
    ways = []
    enter = judge_module.DeviceGate.__call__
    monkeypatch.setattr(
        judge_module.DeviceGate, "__call__", lambda self, *, shared=False: ways.append(shared) or enter(self, shared=shared)
    )
    checked = judge.evaluate(RELU, candidate(), settings=TIME.model_copy(update={"timed": False}))
    assert set(ways) == {True}
    assert checked.checks["device_s"] == 0.0
    timed = judge.evaluate(RELU, candidate(), settings=TIME)
    assert set(ways) == {True, False}
    assert timed.checks["device_s"] > 0.0


def test_an_evaluation_says_where_its_time_went(judge, monkeypatch):
    monkeypatch.setattr(judge_module, "_SPENT_S", 0.0)
    checked = judge.evaluate(RELU, candidate(), settings=CHECK).checks
    spent_s = checked["spent_s"]
    for role in ("reference", "candidate"):
        assert spent_s.keys() >= {f"{role} start", f"{role} build", f"{role} call", f"{role} end"}
    assert all(seconds >= 0 for seconds in spent_s.values())
    assert checked["waited_s"] > 0
    failed = judge.evaluate(RELU, candidate(top="raise ValueError"), settings=CHECK).checks["spent_s"]
    assert "candidate end" in failed
    assert "candidate call" not in failed  # which was the evaluation's before


def test_a_judge_for_a_gpu_that_is_not_there_starts_nothing(judge, set_gpus):
    set_gpus(0)
    before = children_of(os.getpid())
    with pytest.raises(DeviceError):
        Judge("cuda")
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize(("device", "threads"), [("cpu", 1), ("cuda:0", 2)])
def test_the_judge_of_a_gpu_keeps_its_threads(gpu_judge, device, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    gpu_judge.device = torch.device(device)
    with gpu_judge.evaluation_folder(RELU):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


# --- nothing is left ------------------------------------------------------------------------------


def children_of(pid: int) -> set[int]:
    return {int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()}


def test_the_compiler_is_imported_once_a_candidate_may_need_it(gpu_judge, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_judge, "_imported", set())
    monkeypatch.setattr(gpu_judge.fork_server, "import_compiler", asked.append)
    monkeypatch.setattr(gpu_judge, "evaluation_folder", lambda task: (_ for _ in ()).throw(TaskError("Wanted no more.")))
    for top, done in (("", 0), ("import triton", 1), ("import triton", 1)):
        with pytest.raises(TaskError):
            gpu_judge.evaluate(RELU, candidate(top=top))
        assert len(asked) == done


def test_the_libraries_of_a_task_are_imported_before_its_workers_start(judge):
    task = RELU.model_copy(update={"source": f"import cloudpickle\n{RELU.source}"})
    assert judge.evaluate(task, candidate(top='import sys\nassert "cloudpickle" in sys.modules')).reason is None


@pytest.mark.parametrize(
    "proposed",
    [
        candidate(),
        pytest.param(candidate("return x"), marks=pytest.mark.exhaustive),
        pytest.param(candidate("os._exit(1)"), marks=pytest.mark.exhaustive),
        candidate(
            init="for _ in range(3):\n    if os.fork() == 0:\n        if os.fork() == 0: signal.pause()\n        os._exit(0)"
        ),
        candidate(
            "os.setpgid(0, 0)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif os.fork() == 0: signal.pause()\nreturn x"
        ),
    ],
    ids=["accepted", "rejected", "exited", "grandchildren", "stubborn"],
)
def test_no_process_and_no_directory_is_left(judge, temporary, proposed):
    files = len(os.listdir("/proc/self/fd"))
    threads = torch.get_num_threads()
    judge.evaluate(RELU, proposed, settings=BRIEF)
    assert children_of(judge.fork_server.process.pid) == set()
    assert sorted(path.name for path in temporary.iterdir()) == LOCKS
    assert len(os.listdir("/proc/self/fd")) == files
    assert torch.get_num_threads() == threads


def test_integers_that_are_always_alike_beside_right_values_are_said_to_prove_nothing(judge):
    made = task("v, i = inputs[0].sort(dim=1)\n        return v, i // 64", "[torch.randn(64, 32)]")
    lazy = Candidate(source=honest(made).source.replace("return v, i // 64", "return v, torch.zeros_like(i)"))
    found = judge.evaluate(made, lazy)
    assert Label.VACUOUS_TASK in found.labels
    assert found.checks["vacuous"] == [f"{name} for output 1" for name in ("first-row", "other-output", "zeros")]


def test_wrong_integers_beside_right_values_are_no_matter_of_precision(judge):
    made = task("v, i = inputs[0].topk(2, dim=1)\n        return v, i", "[torch.randn(64, 32)]")
    lazy = Candidate(source=honest(made).source.replace("return v, i", "return v, torch.zeros_like(i)"))
    found = judge.evaluate(made, lazy)
    assert found.reason is Reason.WRONG_OUTPUT
    assert Label.VACUOUS_TASK not in judge.evaluate(made, honest(made)).labels


def full():
    """What an attempt finds to which memory did not suffice."""
    findings = CheckFindings(Demands())
    findings.failure = Failed(Reason.OUT_OF_MEMORY, "no memory")
    return findings


def test_an_evaluation_without_memory_is_tried_once_more_alone(gpu_judge, monkeypatch):
    """A neighbour's candidate may have had all of it."""
    answers = [full(), CheckFindings(Demands())]
    monkeypatch.setattr(gpu_judge, "_found", lambda *given: answers.pop(0))
    assert gpu_judge.evaluate(RELU, candidate()).accepted
    assert gpu_judge.memory.ways == [False, True]


@pytest.mark.parametrize(("alone", "ways"), [(False, [False]), (True, [True]), (None, [False, True])])
@pytest.mark.parametrize("found", ["error", "verdict"])
def test_whoever_asks_may_wait_for_the_memory_later_or_at_once(gpu_judge, alone, ways, found):
    def attempt():
        if gpu_judge.memory.alone:
            return "found"
        if found == "error":
            raise DeviceError("no memory")
        return "full"

    asked = functools.partial(gpu_judge.with_memory, attempt, lambda one: one == "full", alone)
    if alone is False:
        with pytest.raises(CrowdedError, match="found too little memory" if found == "verdict" else "no memory"):
            asked()
    else:
        assert asked() == "found"
    assert gpu_judge.memory.ways == ways


def test_memory_of_a_processor_is_not_waited_for(judge):
    assert judge.with_memory(lambda: "full", lambda found: True, None) == "full"
    with pytest.raises(DeviceError, match=r"no memory\Z"):
        judge.with_memory(lambda: (_ for _ in ()).throw(DeviceError("no memory")), lambda found: True, None)


def test_what_was_ended_for_anothers_kernels_is_tried_again_until_the_gpu_is_taken_for_shared(gpu_judge):
    tries, limits = [], []

    def attempt():
        tries.append(gpu_judge.disturbances)
        limits.append(limit_of_a_gate(gpu_judge))
        if len(tries) in (1, 3, 4):
            raise DisturbedError("others")
        return "found"

    gpu_judge.disturbances = 0
    assert [gpu_judge.with_memory(attempt, lambda found: False, None) for _ in range(2)] == ["found", "found"]
    assert tries == [0, 1, 1, 2, 3]
    assert limits == [CHECK.unstoppable_limit_s] * 4 + [None]
    gpu_judge.disturbances = 0


def limit_of_a_gate(judge):
    """How long the gate of a trial that begins now waits for kernels."""
    limits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "device", torch.device("cpu"))
        patch.setattr(judge_module, "DeviceGate", lambda device, limit_s: limits.append(limit_s) or DeviceGate(device))
        judge.trial(RELU, candidate(), None, CHECK, CheckFindings(Demands()))
    return limits[0]


@pytest.mark.parametrize("alone", [None, False])
def test_whoever_made_others_wait_for_its_kernels_is_tried_alone_where_nobody_waits(gpu_judge, alone):
    """They may have been another's, and a large tensor in an odd layout can take the reference ten seconds too."""
    limits = []

    def attempt():
        limits.append(limit_of_a_gate(gpu_judge))
        if not gpu_judge.memory.alone:
            raise CrowdedError("work on the GPU went on for 10 s after its process had been stopped.")
        return "found"

    if alone is False:
        with pytest.raises(CrowdedError, match=r"cuda:0 beside other evaluations; work .* stopped\. Try it alone\."):
            gpu_judge.with_memory(attempt, lambda found: False, alone)
    else:
        assert gpu_judge.with_memory(attempt, lambda found: False, alone) == "found"
    assert gpu_judge.memory.ways == ([False] if alone is False else [False, True])
    assert limits == [CHECK.unstoppable_limit_s, None][: len(limits)]


def test_a_candidate_is_not_to_blame_for_memory_that_the_judge_itself_has_taken(gpu_judge, simulated_gpu):
    simulated_gpu.reserved_gib = 60
    assert gpu_judge.with_memory(full, CheckFindings.ran_out, None).failure.reason is Reason.OUT_OF_MEMORY
    simulated_gpu.reserved_gib = 80
    with pytest.raises(DeviceError, match=r"half of cuda:0's 140\.0 GiB .* took 80\.0 GiB\. .* too large"):
        gpu_judge.with_memory(full, CheckFindings.ran_out, None)


def test_what_one_check_computed_is_let_go_before_many_others(judge, monkeypatch):
    """The garbage collector cannot know how large they are, and on a GPU they are what fills the memory."""
    computed, most = [], []
    truth = Oracle.truth

    def counted(*arguments, **options):
        most.append(sum(reference() is not None for reference in computed))
        outputs = truth(*arguments, **options)
        computed.extend(weakref.ref(output) for output in outputs)
        return outputs

    monkeypatch.setattr(Oracle, "truth", counted)
    gc.disable()
    try:
        found = judge.evaluate(RELU, candidate(), settings=CHECK)
    finally:
        gc.enable()
    assert found.accepted, why(found)
    assert len(computed) > 20
    assert max(most) <= 5  # of the two first inputs, of the latest that was posed and that was judged, and of this one


def test_a_task_error_leaves_nothing_either(judge, temporary):
    made = BROKEN["forward fails in another process only"][0]
    with pytest.raises(TaskError):
        judge.evaluate(made, honest(made))
    assert children_of(judge.fork_server.process.pid) == set()
    assert sorted(path.name for path in temporary.iterdir()) == LOCKS


def test_the_snippets_are_what_they_claim():
    assert HEAD in RELU.source
    ast.parse(candidate().source)


@pytest.mark.exhaustive
def test_a_sparse_output_whose_draws_differ_in_condition_is_judged_by_each_draw(judge):
    """A threshold at four standard deviations: some draws have one positive element, which is nearly all cancellation."""
    sparse = task(
        "return torch.relu((inputs[0] @ self.weight - 13.0) * 1.5)",
        "[torch.randn(64, 10)]",
        init="self.weight = torch.nn.Parameter(torch.ones(10, 5))",
        name="sparse",
    )
    folded = Candidate(
        source=sparse.source.replace("class Model(", "class ModelNew(").replace(
            "torch.relu((inputs[0] @ self.weight - 13.0) * 1.5)",
            "torch.relu(torch.addmm(torch.full((5,), -19.5), inputs[0], self.weight * 1.5))",
        )
    )
    found = judge.evaluate(sparse, folded, settings=Settings.quick(threads=1, blocks=12, **ANY_WAIT))
    assert found.accepted, (found.reason, found.detail)


@pytest.mark.exhaustive
def test_a_first_look_starts_one_process_of_the_candidate(judge, monkeypatch):
    started = []
    start = Trial.start
    monkeypatch.setattr(Trial, "start", lambda self, role: started.append(role) or start(self, role))
    settings = TIME.model_copy(update={"fresh_processes": False})
    found = judge.evaluate(RELU, honest(RELU), settings=settings)
    assert found.accepted, (found.reason, found.detail)
    # A busy machine may disturb a triple, and then gets another, of fresh processes.
    triples = {block.process for block in found.blocks}
    assert sorted(started[:3]) == ["candidate", "reference", "reference"]
    assert triples == set(range(len(started) // 3))
    old = candidate("self.n = getattr(self, 'n', 0) + 1\nreturn torch.relu(self.linear(x)) + (self.n > 14)")
    assert not judge.evaluate(RELU, old, settings=settings).accepted, "what goes wrong with age is seen in one process, too"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried much.\nMore."), CrowdedError),
        (RuntimeError("other"), RuntimeError),
    ],
)
def test_a_full_gpu_is_said_in_one_line_and_leaves_no_process(monkeypatch, raised, becomes):
    def fail(device):
        raise raised

    closed = []
    monkeypatch.setattr(judge_module, "CacheFlush", fail)
    monkeypatch.setattr(Judge, "close", lambda self: (closed.append(1), self.workers.close(), self.fork_server.close()))
    with pytest.raises(becomes) as caught:
        Judge("cpu")
    assert closed
    assert "\n" not in str(caught.value)
    assert becomes is RuntimeError or "filled" in str(caught.value)


@pytest.mark.parametrize(
    ("mine_us", "why"), [(2e6, "1.0 s longer than the reference's"), (1e7, "10 times as long"), (1.001e6, "")]
)
def test_calls_that_exceed_the_budget_together_are_slow(mine_us, why):
    sides = [SimpleNamespace(calls_us=[one]) for one in (1e6, mine_us)]
    assert why in judge_module.slowness(*sides, budget_s=10.0)
    assert bool(judge_module.slowness(*sides, budget_s=10.0)) == bool(why)
