"""Labels and advice from a candidate's text."""

from __future__ import annotations

import pytest

from kernelwright.judge.check import findings, guard
from kernelwright.records import Label
from kernelwright.rewrites import templates, wrappers
from kernelwright.rewrites.templates import fp16_convolution
from tests.quick import exhaustive_but

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return torch.relu(self.linear(x))
"""


def module(body, top=""):
    return f"import torch\n{top}\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        {body}\n"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("sys._getframe()", "reads stack frames"),
        ("inspect.stack()", "reads stack frames"),
        ("gc.get_objects()", "reads stack frames"),
        ("time.perf_counter = f", "patches a clock or an event"),
        ("torch.cuda.Event.elapsed_time = f", "patches a clock or an event"),
        ("os.fork()", "uses other processes or raw memory"),
        ("open('/proc/self/mem')", "uses other processes or raw memory"),
        ("import ctypes", "uses other processes or raw memory"),
        ("os.dup2(1, 2)", "writes files or descriptors"),
        ("open('x', 'w')", "writes files or descriptors"),
        ("import threading", "starts threads or streams"),
        ("torch.cuda.Stream()", "starts threads or streams"),
        ("x.data_ptr()", "keeps results by pointer or identity"),
        ("id(x)", "keeps results by pointer or identity"),
        ("exec('x')", "builds names at run time"),
        ("eval('x')", "builds names at run time"),
        ("class T(torch.Tensor): pass", "subclasses torch.Tensor"),
        ("x.half()", "lowers precision"),
        ("torch.autocast('cuda')", "lowers precision"),
        ("try:\n    load_inline()\nexcept Exception: pass", "hides a failed kernel"),
        ("if self.training: pass", "depends on the training flag"),
        ("self.eval()", "depends on the training flag"),
    ],
)
def test_a_pattern_is_named(code, name):
    assert name in guard.advice(code)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.relu(x)",
        "start = time.perf_counter()",
        "if a == b: pass",
        "open('x')",
        "model.eval",
        "'a text'",
        "valid(x)",
        "x.float()",
    ],
)
def test_ordinary_code_has_no_advice(code):
    assert guard.advice(code) == ()


def test_comments_and_docstrings_are_not_code():
    assert guard.advice('"""ctypes and os.fork()"""\n# exec("x")\nclass A:\n    "threading"\n    x = 1\n') == ()
    assert guard.advice("def f():\n    'ctypes'\n") == ()


def test_what_does_not_parse_is_searched_as_it_is():
    assert guard.advice("def ( ctypes") == ("uses other processes or raw memory",)
    assert guard.static_labels("def ( torch.compile", REFERENCE) == set()


def test_what_the_reference_does_itself_is_not_suspicious():
    suspicious = module("return x.half() if self.training else x")
    assert Label.SUSPICIOUS_SOURCE in guard.static_labels(suspicious, REFERENCE)
    halves = module("return x.to(torch.float16)")
    assert Label.SUSPICIOUS_SOURCE in guard.static_labels(halves, REFERENCE)
    assert Label.SUSPICIOUS_SOURCE not in guard.static_labels(halves, REFERENCE + "\nx = torch.bfloat16\n")
    by_mode = module("if self.training: pass")
    assert Label.SUSPICIOUS_SOURCE in guard.static_labels(by_mode, REFERENCE)
    assert Label.SUSPICIOUS_SOURCE not in guard.static_labels(by_mode, REFERENCE + "\nnn.BatchNorm2d(3)\n")


@pytest.mark.parametrize(
    "text",
    [
        "'''__global__ void f() {}'''",
        "torch.utils.cpp_extension.load_inline(name='x')",
        "@triton.jit\ndef f(): pass",
    ],
)
def test_source_of_its_own_is_a_custom_kernel(text):
    assert Label.CUSTOM_KERNEL in guard.static_labels(module("return x", f"x = {text}" if "@" not in text else text), "")


@pytest.mark.parametrize(
    "text",
    [
        "h = x.half()\n        l = (x - h.float()).half()\n        return h @ w + l @ w",
        "h = x.to(dtype=torch.bfloat16)\n        l = (x - h).bfloat16()",
        "return (x - x.to(torch.float16).float()).half() @ w",
        "return tl.dot(x, w, input_precision='bf16x3')",
        "s = '''__half h = __float2half_rn(x);\n__half l = __float2half_rn(x - __half2float(h));'''",
    ],
)
def test_products_of_16_bit_pieces_are_a_label(text):
    assert Label.SPLIT_PRECISION in guard.static_labels(module(text), REFERENCE)


@pytest.mark.parametrize("template", templates.PRODUCTS[:2])
def test_the_built_in_split_product_has_its_label(template):
    text = template.module(template.default)
    assert {Label.SPLIT_PRECISION, Label.CUSTOM_KERNEL} <= guard.static_labels(text, REFERENCE)


@pytest.mark.parametrize(
    "text",
    [
        "return torch.relu(self.linear(x))",
        "return (x.half() @ self.w.half()).float()",
        "with torch.autocast('cuda', dtype=torch.float16):\n            return self.linear(x) - x",
        "h = x.half()\n        return self.linear(h).float() - x",
        "h = x.to(torch.bfloat16)\n        return (h - h.mean()) @ w",
        "return tl.dot(x, w, input_precision='tf32x3')",
    ],
)
def test_whole_operands_in_16_bits_are_not_split(text):
    assert Label.SPLIT_PRECISION not in guard.static_labels(module(text), REFERENCE)


@pytest.mark.parametrize(
    ("text", "reference", "labelled"),
    [
        ("return (x.half() @ self.w.half()).float()", REFERENCE, True),
        ("return (x.half() @ self.w.half()).float()", module("return x.half()"), False),
        ("y = (x * factor).to(tl.float16)", REFERENCE, True),
        ("s = '''__half h = __float2half_rn(x);'''", REFERENCE, True),
        ("h = x.half()\n        l = (x - h.float()).half()\n        return h @ w + l @ w", REFERENCE, False),
        ("return torch.relu(self.linear(x))", REFERENCE, False),
    ],
)
def test_whole_operands_in_16_bits_are_a_label(text, reference, labelled):
    assert (Label.FP16_OPERANDS in guard.static_labels(module(text), reference)) == labelled


def test_the_built_in_convolution_of_float16_has_its_label():
    assert Label.FP16_OPERANDS in guard.static_labels(f"import torch\n{fp16_convolution.FP16.helpers}", REFERENCE)


@pytest.mark.parametrize("text", ["torch.cuda.CUDAGraph()", "torch.compile(f, mode='reduce-overhead')"])
def test_a_cuda_graph_is_a_label(text):
    assert Label.CUDA_GRAPH in guard.static_labels(module(text), REFERENCE)


def test_the_same_operators_behind_compile_are_a_wrapper():
    wrapped = REFERENCE.replace("class Model(", "class ModelNew(") + "\nModelNew = torch.compile(ModelNew)\n"
    assert Label.WRAPPER_ONLY in guard.static_labels(wrapped, REFERENCE)
    # Another operator, or one of the reference's left out: more than a wrapper.
    assert Label.WRAPPER_ONLY not in guard.static_labels(wrapped.replace("torch.relu(", "torch.relu(torch.mm("), REFERENCE)
    assert Label.WRAPPER_ONLY not in guard.static_labels(wrapped.replace("torch.relu", ""), REFERENCE)
    assert Label.WRAPPER_ONLY not in guard.static_labels(wrapped, "def (")
    assert Label.WRAPPER_ONLY not in guard.static_labels(wrapped + "\nx = '__global__'\n", REFERENCE)
    assert Label.WRAPPER_ONLY not in guard.static_labels(REFERENCE, REFERENCE)


@pytest.mark.parametrize("name", wrappers.ON_CUDA)
def test_what_the_built_in_policy_puts_around_a_module_is_a_wrapper(name):
    assert Label.WRAPPER_ONLY in guard.static_labels(wrappers.wrap(REFERENCE, name, (name,)), REFERENCE)


def replayed(answer: str) -> str:
    """A subclass of the reference that replays what it computes."""
    return f"""{REFERENCE}

class ModelNew(Model):
    def compute(self, x):
        return {answer}

    def forward(self, x):
        key = (self.training, x.shape, x.stride())
        graphs = self.__dict__.setdefault("graphs", {{}})
        if key not in graphs:
            static, graph = x.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self.compute(static)
            graphs[key] = graph, static, output
        graph, static, output = graphs[key]
        static.copy_(x)
        graph.replay()
        return output.clone()
"""


@pytest.mark.parametrize(
    ("answer", "is_wrapper"),
    [
        ("torch.relu(self.linear(x))", True),
        ("self.linear(x).clamp(min=0)", False),
        ("torch.relu(super().forward(x))", False),  # the base's operators count where they are called too
    ],
)
def test_a_subclass_is_a_wrapper_if_it_spells_the_same_operators(answer, is_wrapper):
    assert (Label.WRAPPER_ONLY in guard.static_labels(replayed(answer), REFERENCE)) is is_wrapper


def test_pythons_own_sum_is_an_operator_and_its_all_is_not():
    wrapped = REFERENCE.replace("class Model(", "class ModelNew(") + "\nModelNew = torch.compile(ModelNew)\n"
    checked = wrapped.replace("self.linear(x)", "self.linear(x if all([x.shape]) else x)")
    assert checked != wrapped
    assert Label.WRAPPER_ONLY in guard.static_labels(checked, REFERENCE)
    assert Label.WRAPPER_ONLY not in guard.static_labels(checked.replace("all(", "sum("), REFERENCE)
    assert Label.WRAPPER_ONLY not in guard.static_labels(checked.replace("all(", "torch.all("), REFERENCE)


def test_a_helper_of_its_own_does_not_make_it_more_than_a_wrapper():
    wrapped = REFERENCE.replace("class Model(", "class ModelNew(").replace("self.linear(x)", "self.linear(my_helper(x))")
    assert Label.WRAPPER_ONLY in guard.static_labels(wrapped + "\ntorch.compile\n", REFERENCE)


SCRIPTED = """
import torch

{function}

class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        return {call}
"""
BY_HAND = """
@torch.jit.script
def norm(x, w, b):
    y = x - x.mean(-1, keepdim=True)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * w + b
"""


@pytest.mark.parametrize(
    ("function", "call", "is_wrapper"),
    [
        (BY_HAND, "norm(x, self.norm.weight, self.norm.bias)", False),
        (BY_HAND, "self.norm(x)", True),
        ("@torch.jit.script\ndef as_is(x): return x", "self.norm(as_is(x))", True),
    ],
    ids=["by hand", "by hand and not called", "no operator"],
)
def test_operators_of_functions_that_a_class_calls_count_too(function, call, is_wrapper):
    reference = SCRIPTED.format(function="", call="self.norm(x)").replace("ModelNew", "Model")
    candidate = SCRIPTED.format(function=function, call=call)
    assert (Label.WRAPPER_ONLY in guard.static_labels(candidate, reference)) is is_wrapper


def test_suspicion_is_a_label():
    assert Label.SUSPICIOUS_SOURCE in guard.static_labels(module("return x", "import ctypes"), REFERENCE)
    assert guard.static_labels(module("return x"), REFERENCE) == set()


SETTINGS = {
    "default_dtype": "torch.float32",
    "default_device": "cpu",
    "grad_enabled": True,
    "deterministic": False,
    "flags": {"float32_matmul_precision": "highest", "cudnn_allow_tf32": "True", "threads": "1"},
    "environment": {"PATH": "/bin"},
    "warnings": [],
    "signals": {},
    "flush_denormal": False,
}


def test_unchanged_settings_say_nothing():
    assert findings.changed_settings(SETTINGS, dict(SETTINGS)) == {}


@pytest.mark.parametrize(
    ("name", "value", "labels"),
    [
        ("flags", SETTINGS["flags"] | {"float32_matmul_precision": "high"}, {Label.GLOBAL_FLAGS, Label.TF32}),
        ("flags", SETTINGS["flags"] | {"cudnn_allow_tf32": "False"}, {Label.GLOBAL_FLAGS}),
        ("environment", {"PATH": "/bin", "OMP_NUM_THREADS": "1"}, {Label.GLOBAL_FLAGS}),
        ("warnings", ["('ignore', None, <class 'Warning'>)"], {Label.GLOBAL_FLAGS}),
    ],
)
def test_performance_settings_are_labels(name, value, labels):
    changes = findings.changed_settings(SETTINGS, SETTINGS | {name: value})
    assert findings.dynamic_labels(changes).keys() == labels
    assert findings.forbidden_changes(changes) == []


@pytest.mark.parametrize("name", ["default_dtype", "default_device", "grad_enabled", "deterministic", "flush_denormal"])
def test_settings_that_a_drop_in_leaves_alone_are_named(name):
    (found,) = findings.forbidden_changes(findings.changed_settings(SETTINGS, SETTINGS | {name: "other"}))
    assert found == f"{name}: {SETTINGS[name]} -> other"


@pytest.mark.parametrize(
    "source",
    [
        "x = 0x" + "f" * 5000,
        "x = " + "+".join(["1"] * 900),
        "x = " + "-" * 30_000 + "1",
        "x = " + "(" * 5000,
        "x = a" + ".b" * 50_000,
        "x = 1\0",
        "x = 1;" * 100_000,
        "\ufeffx = 1",
        "# coding: nonesuch\nx = 1",
        "",
    ],
    ids=["digits", "sum", "minuses", "parentheses", "attributes", "null", "long", "mark", "coding", "empty"],
)
def test_no_text_ends_the_analysis(source):
    assert guard.static_labels(source, REFERENCE) == set()
    assert guard.advice(source + "\nimport ctypes") in (("uses other processes or raw memory",), ())


@pytest.mark.parametrize(
    "seed",
    exhaustive_but(
        ["open(", "getattr(a,", "perf_counter", "cudaSt", "triton ", "@jit ", "a = b.to(float16 "],
        "getattr(a,",
        "a = b.to(float16 ",
    ),
)
def test_the_time_of_a_pattern_does_not_grow_with_the_square_of_the_text(seed):
    """The slowest of these took hours."""
    text = (seed * guard.READ_CHARACTERS)[: guard.READ_CHARACTERS]
    assert guard.advice(f"x = {text!r}") is not None


def test_a_file_is_read_as_python_reads_it():
    assert guard.parse("\ufeffx = 1").body
    assert not guard.parse("x = (" + "\n" * guard.READ_CHARACTERS).body
    with pytest.raises(guard.PARSE_ERRORS):
        guard.parse("x = '\ud800'")
