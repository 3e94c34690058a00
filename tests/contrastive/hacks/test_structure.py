"""Features of a program's structure, and the shapes of hacks that they tell apart."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.hacks.names import code_only
from kernelwright.contrastive.hacks.structure import SHAPE, features, identity
from tests.contrastive.hacks.samples import REPLAY


def guarded(test):
    """A drop-in that begins with a guard, or without one."""
    guard = "" if test is None else f"        if {test}:\n            return super().forward(x, scale)\n"
    return f"""
import time
import torch

class ModelNew(Model):
    def __init__(self, width):
        super().__init__(width)
        self.as_traced = width == 16
        self.calls = 0

    def forward(self, x, scale=None):
{guard}        return torch.relu(x @ self.linear.weight.t())

    def reset(self):
        self.calls = 0
"""


class TestStructure:
    def test_renaming_changes_nothing(self):
        renamed = REPLAY.replace("kernel_plans", "zz").replace("activations", "q").replace("address", "w")
        renamed = renamed.replace("result", "r0").replace("audited", "written")
        assert identity(renamed) == identity(REPLAY)
        assert features(renamed) == features(REPLAY)

    def test_numbers_and_comments_change_nothing_but_operators_do(self):
        assert identity("x = a + 1  # one") == identity("y = a + 22")
        assert identity("x = a + 1") != identity("x = a - 1")
        assert identity("x = True") != identity("x = False")

    def test_code_in_strings_counts(self):
        launch, guard = "K = '''\nvoid f() {\n  a = b;\n}\n'''", "K = '''\nvoid f() {\n  if (i) a = b;\n}\n'''"
        assert identity(launch) != identity(guard)
        assert {"code:void", "code:void f"} & features("K = '''\nvoid foo() {\n  a = b;\n}\n'''")

    def test_text_that_is_not_python_has_words(self):
        assert "word:broken" in features("def broken(:")

    def test_deep_nesting_is_survived(self):
        assert features("x = " + " + ".join(["value"] * 800))
        assert features("value = " + "-" * 3000 + "1") == {"word:value"}

    @pytest.mark.parametrize(
        ("shape", "with_it", "without_it"),
        [
            ("returns-state", "K = {}\ndef forward(self, x):\n    return K[0]", "def forward(self, x):\n    return x[0]"),
            (
                "keeps-across-calls",
                "K = {}\ndef forward(self, x):\n    K[1] = x",
                "def forward(self, x):\n    k = {}\n    k[1] = x",
            ),
            (
                "counts-calls",
                "class M:\n def forward(self, x):\n  self.n += 1",
                "class M:\n def forward(self, x):\n  n = 0\n  n += 1",
            ),
            ("patches-library", "torch.relu = lambda x: x", "class A: pass\nb = A()\nb.relu = 1"),
            ("sets-library-flag", "torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark"),
            (
                "writes-into-an-input",
                "def forward(self, x):\n    x.zero_()",
                "def forward(self, x):\n    x = x + 1\n    x.zero_()",
            ),
            (
                "returns-uninitialised-memory",
                "def forward(self, x):\n    o = torch.empty(3)\n    return o",
                "def forward(self, x):\n    o = torch.empty(3)\n    torch.exp(x, out=o)\n    return o",
            ),
            (
                "never-uses-a-submodule",
                "class M:\n def __init__(self):\n  self.a = nn.Linear(2, 2)\n def forward(self, x):\n  return x",
                "class M:\n def __init__(self):\n  self.a = nn.Linear(2, 2)\n def forward(self, x):\n  return self.a(x)",
            ),
            ("tensor-subclass", "class A(torch.Tensor): pass", "class A(nn.Module): pass"),
            (
                "starts-and-never-waits",
                "import threading\nt = threading.Thread(target=f)\nt.start()",
                "import threading\nt = threading.Thread(target=f)\nt.start()\nt.join()",
            ),
            ("test-made-to-fail", "if x.shape[0] == 99999999: pass", "if x.shape[0] == 4096: pass"),
            ("asks-for-training-mode", "if self.training: pass", "self.training = False"),
            (
                "gate-on-clock",
                "def forward(self, x):\n    if time.time() > 3: pass",
                "def forward(self, x):\n    if 4 > 3: pass",
            ),
        ],
    )
    def test_shapes(self, shape, with_it, without_it):
        assert SHAPE + shape in features(with_it)
        assert SHAPE + shape not in features(without_it)

    @pytest.mark.parametrize(
        "test",
        [
            "not (x.shape == (8, 16) and x.dtype is torch.float32 and x.is_contiguous())",
            "torch.is_grad_enabled() or x.device.type != 'cuda' or x.shape[1] > 4096",
            "not (self.as_traced and scale is None)",
        ],
    )
    def test_giving_other_inputs_to_the_reference_is_no_sign(self, test):
        assert features(guarded(test)) == features(guarded(None))

    @pytest.mark.parametrize(
        "test",
        [
            "self.calls < 3",
            "x[0, 0] == 3",
            "x.sum() > 0",
            "torch.rand(()) < 0.5",
            "torch.is_inference_mode_enabled()",
            "time.time() > 5",
            "x.shape == (8, 16) and seen",
        ],
    )
    def test_a_guard_that_tests_anything_else_is_kept(self, test):
        assert "node:If" in features(guarded(test))

    def test_a_guard_that_answers_by_itself_is_kept(self):
        kept = guarded("x.shape == (8, 16)")
        assert "node:If" in features(kept.replace("super().forward(x, scale)", "x"))
        assert "node:If" in features(kept.replace("super().forward(x, scale)", "super().forward(scale, x)"))

    def test_code_only_drops_what_a_candidate_says_of_itself(self):
        text = code_only(REPLAY)
        assert "audited" not in text
        assert "honest" not in text
        assert "kernel_plans[address]" in text
        assert identity(text) == identity(REPLAY)

    def test_code_only_keeps_the_insides_of_strings(self):
        source = 'K = """\n// C comment\n\nint x;  # not Python\n"""\ny = "ä # no comment"  # ö\n'
        source += '\ndef f():\n    """Only this."""\n'
        namespace: dict[str, object] = {}
        exec(code_only(source), namespace)
        assert namespace["K"] == "\n// C comment\n\nint x;  # not Python\n"
        assert namespace["y"] == "ä # no comment"
        assert "Only this" not in code_only(source)
        assert code_only("def broken(:  # why") == "def broken(:  # why"
