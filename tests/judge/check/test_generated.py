"""What the built-in policy's generators write is no sign of a cheat; one changed word of it, or anything beside it, is."""

from __future__ import annotations

import inspect

import pytest

from kernelwright.judge.check import guard
from kernelwright.judge.check.guard import KNOWN, RESPELLING, without_generated
from kernelwright.records import Candidate, Label, Task
from kernelwright.rewrites import emit, templates, wrappers
from kernelwright.rewrites.builtin import first_recipes
from kernelwright.rewrites.passes import EQUAL_LAYERS
from kernelwright.rewrites.recipes import TaskContext
from kernelwright.rewrites.rules import RULES
from kernelwright.rewrites.rules.products import one_below_another
from kernelwright.rewrites.templates import fp16_convolution
from kernelwright.rewrites.templates.base import kernel_text
from kernelwright.tasks.source import _LOADER
from kernelwright.tasks.suites import builtin_task, builtin_tasks

REFERENCE = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n"
GRAPH = wrappers.wrap(REFERENCE, "cuda-graph", ("cuda-graph",))
SEARCHED = wrappers.wrap(REFERENCE, "cudnn-cuda-graph", ("cudnn-cuda-graph",))
DIRECT = wrappers.wrap(REFERENCE, "direct-cuda-graph", ("direct-cuda-graph",))
SOURCE = "void fused_0(const float* in0, float* out0, long threads)"
HELPERS = kernel_text("fused.triton.txt")
FUSED = f"""{kernel_text("fused_build.py.txt", source=SOURCE, name="fused_0123456789abcdef")}
def fused_0(x0):
    y0 = x0.new_empty([2])
    _library.fused_0(ctypes.c_void_p(x0.data_ptr()), ctypes.c_void_p(y0.data_ptr()), ctypes.c_int64(1))
    return y0
"""
LAUNCH = f"import torch\n{HELPERS}\n_fused_0_launch = _Launch(_tanh, 256, 4)\n"
FP16 = f"import torch\n{HELPERS}\n{fp16_convolution.FP16.helpers.strip()}\n_fused_0_launch = _Launch(_tanh, 256, 4)\n"
SPLIT = {template.form: template.module(template.default) for template in (templates.SPLIT_CUDA, templates.SPLIT_TRITON)}
RECURRENT = (
    templates.RECURRENT.module(templates.RECURRENT.default)
    + 'recurrent_0 = Recurrent(torch.gru, "", 64, 256, (True, 1, 0.0, False, False, False))\n'
)
JOINED = f"import torch\n\n{inspect.getsource(one_below_another)}"
FOLDED = templates.RELU_CONVOLUTION.module(None)
BUNDLE = f"_FOLDER_MODULES = {{}}\n{_LOADER}"


def is_suspicious(text: str) -> bool:
    return Label.SUSPICIOUS_SOURCE in guard.static_labels(without_generated(text), REFERENCE)


@pytest.mark.parametrize(("more", "left"), [("", ()), ("import threading\n", ("starts threads or streams",))])
def test_advice_on_generated_words_does_not_count_and_no_other_is_left_out(more, left):
    candidate, task = Candidate(source=FUSED + more, policy="file"), Task(id="t", source=REFERENCE)
    plain = guard.read_candidate(candidate, task)
    assert plain.advice == left
    strict = guard.read_candidate(candidate, task, {Label.SUSPICIOUS_SOURCE})
    assert Label.SUSPICIOUS_SOURCE in strict.labels, "where the label is forbidden all words count"
    assert strict.labels - plain.labels == (set() if left else {Label.SUSPICIOUS_SOURCE})


@pytest.mark.parametrize("text", ["def (", "-" * 30_000 + "1"])
def test_what_cannot_be_read_stays_as_it_is(text):
    assert without_generated(text) == text


@pytest.mark.parametrize(
    "text",
    [
        GRAPH,
        DIRECT,
        FUSED,
        LAUNCH,
        FP16,
        *SPLIT.values(),
        RECURRENT,
        RECURRENT + GRAPH,
        BUNDLE + FUSED,
        FUSED + SEARCHED,
        LAUNCH + DIRECT,
        JOINED,
        FOLDED,
    ],
)
def test_generated_code_is_not_suspicious(text):
    assert not is_suspicious(text), guard.advice(text)


def test_every_known_definition_is_needed(monkeypatch):
    for one in KNOWN - {"25ee996d370bdd20"}:  # the bundle's own has no pattern; it must not hide the others
        monkeypatch.setattr("kernelwright.judge.check.guard.KNOWN", KNOWN - {one})
        assert any(
            map(is_suspicious, [GRAPH, DIRECT, FUSED, LAUNCH, FP16, *SPLIT.values(), SEARCHED, RECURRENT, JOINED, FOLDED])
        ), one


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (GRAPH, "self.graph.replay()", "pass"),
        (GRAPH, "static.copy_(item)", "pass"),
        (SEARCHED, "thread.submit(run)", "thread.submit(keep)"),
        (
            SEARCHED,
            "\nimport concurrent.futures\n",
            "\nimport concurrent.futures\nconcurrent.futures.ThreadPoolExecutor = Keeper\n",
        ),
        (DIRECT, "words[place] = tensor.data_ptr()", "pass"),
        (FUSED, "return ctypes.CDLL(path)", "return ctypes.CDLL('libc.so.6')"),
        (FP16, "found = tl.maximum(found, _largest_finite(", "found = tl.maximum(1.0, _largest_finite("),
        (LAUNCH, "compiled.run(*self.grid, stream, *given, *tensors, *self.constants)", "pass"),
        (FUSED, "return y0", "return seen.setdefault(x0.data_ptr(), y0)"),
        (FUSED, "ctypes.c_void_p(x0.data_ptr()), ", "ctypes.c_void_p(keep(x0.data_ptr())), "),
        (FUSED, "    y0 =", "    key = ctypes.c_void_p(x0.data_ptr())\n    y0 ="),
        (JOINED, "weight.data = part", "weight.data = kept[weight.data_ptr()]"),
        (FOLDED, "if made is None:", "if not _TABLES:"),
        (FUSED, "import torch.utils", "import threading\nimport torch.utils"),
    ],
)
def test_a_changed_word_is_suspicious_again(text, old, new):
    assert old in text
    assert is_suspicious(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "more",
    [
        "_library = Keeper()",
        "def _build():\n    return Keeper()",
        "for _build in makers: pass",
        "torch.utils.cpp_extension.load_inline = lambda **_: 'libc.so.6'",
        "ctypes.c_void_p = Keeper",
        "setattr(ctypes, 'c_void_p', Keeper)",
        "import sys\nsys.modules['ctypes'] = Keeper()",
        "globals()['_library'] = Keeper()",
        "def keep():\n    global _library, _build",
    ],
)
def test_another_meaning_of_the_names_makes_all_of_it_suspicious_again(more):
    assert is_suspicious(f"{FUSED}\n{more}\n")


def test_a_rewrite_that_saves_a_compiler_nothing_is_a_wrapper_behind_it():
    context = TaskContext.open(builtin_task("no_op_chain"), "cpu")
    built = [built for recipe in first_recipes(context) if (built := context.build(recipe))]
    candidates = [one.candidate("builtin", None) for one in built]
    labels = {one.techniques: guard.read_candidate(one, context.task).labels for one in candidates}
    assert Label.WRAPPER_ONLY in labels["remove-noops", "compile"]
    assert Label.WRAPPER_ONLY not in labels["remove-noops",]
    assert {*(rule.name for rule in RULES), EQUAL_LAYERS} >= RESPELLING


def test_no_word_in_a_text_says_who_wrote_it():
    """A label follows from the record, which a candidate's author does not write, or from what the code does."""
    wrapped = REFERENCE.replace("Model(", "ModelNew(").replace("torch.relu(x)", "torch.compile(torch.relu)(x.t()).t()")
    claiming = wrapped.replace("    def", f'    """{emit.RESPELLED}."""\n\n    def')
    assert guard.static_labels(claiming, REFERENCE) == guard.static_labels(wrapped, REFERENCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 10))])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_first_candidate_of_a_built_in_task_is_suspicious(device, part):
    for task in list(builtin_tasks())[part::10]:
        context = TaskContext.open(task, device)
        for recipe in first_recipes(context):
            if built := context.build(recipe):
                labels = guard.static_labels(without_generated(built.source), task.source)
                assert Label.SUSPICIOUS_SOURCE not in labels, (task.id, built.techniques, guard.advice(built.source))
