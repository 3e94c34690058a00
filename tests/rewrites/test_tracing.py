"""Tracing and printing: what cannot be traced says so, and a candidate keeps the module's contract."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from kernelwright.judge.check.guard import static_labels
from kernelwright.records import Task
from kernelwright.rewrites.emit import reference_source
from kernelwright.rewrites.tracing import UntraceableError, load, trace
from tests.quick import exhaustive_but
from tests.rewrites.samples import apply_rules, compare, task_text


def test_a_huge_task_is_traced_without_its_memory() -> None:
    text = task_text("return self.f(a).sum(1)", "torch.rand(1 << 20, 1 << 16)", "self.f = nn.Linear(1 << 16, 1 << 16)")
    traced = trace(Task(id="huge", source=text))
    assert traced.inputs[0].shape == (1 << 20, 1 << 16)


def test_long_recurrent_layers_are_traced_quickly() -> None:
    """512 steps of 6 layers would be 100,000 operators if the exporter walked through them."""
    text = task_text("return self.f(a)[0]", "N(2, 512, 8)", "self.f = nn.GRU(8, 8, 6, batch_first=True)")
    assert len(trace(Task(id="gru", source=text)).training.graph.nodes) < 60


@pytest.mark.parametrize(
    ("forward", "init", "why"),
    [
        ("return a * 2 if a.sum() > 0 else a", "pass", "Guard|data-dependent|DataDependent"),
        ("a += 1\nreturn a", "pass", "writes to a"),
        ("self.p.data.add_(1)\nreturn a + self.p", "self.p = nn.Parameter(torch.ones(1))", "."),
        ("a[:, 0] = 1\nreturn a * 2", "pass", "shares"),
        ("return a + 1", "self.d = nn.Dropout(0.5).eval()", "different modes"),
        ("self.h = a + self.h\nreturn self.h * 1.0", "self.h = torch.zeros(4, 6)", "keeps a state between calls in h"),
    ],
    ids=[
        "control flow",
        "writes its input",
        "writes a parameter",
        "writes through a view of its input",
        "mixed modes",
        "carried state",
    ],
)
def test_what_cannot_be_traced_says_why(forward: str, init: str, why: str) -> None:
    with pytest.raises(UntraceableError, match=why):
        trace(Task(id="sample", source=task_text(forward, "N(4, 6)", init)))


def test_nested_graphs_of_autocast_are_printed_with_their_conversions() -> None:
    half = "with torch.autocast('cpu', torch.bfloat16): b = self.f(a).relu()"
    whole = "with torch.autocast('cpu', enabled=False), torch.no_grad(): c = self.f(a)"
    text = task_text(f"{half}\n{whole}\nreturn b.float() * 1.0 + c", "N(4, 6)", "self.f = nn.Linear(6, 6)")
    done = apply_rules(text, "remove-noops")
    compare(done.reference, done.source, 1e-6)
    with pytest.raises(UntraceableError, match="enters autocast of cuda; call the model in it instead"):
        trace(Task(id="elsewhere", source=text.replace("'cpu', torch", "'cuda', torch")))


@pytest.mark.parametrize("training", [True, False])
def test_a_mode_without_a_graph_is_left_to_the_reference(training: bool) -> None:
    branch = "if self.training is not self.mode and a.sum() > 100: return a"
    text = task_text(f"{branch}\nreturn (a * 1.0).relu()", "N(4, 6)", f"self.mode = {training}\nself.train(self.mode)")
    model = load(apply_rules(text, "remove-noops").source, "candidate").ModelNew()
    assert model.training is training
    model(torch.ones(4, 6))
    assert model.last_path == "optimized"
    with pytest.warns(UserWarning, match="wanted self.training" if training else "wanted not self.training"):
        model.train(not training)(torch.ones(4, 6))
    assert model.last_path == "reference"


def test_an_input_may_lie_in_another_way_which_is_then_what_the_code_is_for() -> None:
    text = task_text("return self.f(a).relu() * 1.0", "N(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)")
    text = text.replace("pass", "self.f = nn.Conv2d(3, 4, 3)")
    done = apply_rules(text, "remove-noops")
    assert "a.stride() == (75, 1, 15, 3)" in done.source
    compare(done.reference, done.source, 1e-6)
    model = load(done.source, "candidate").ModelNew()
    with pytest.warns(UserWarning, match="wanted a.stride"):
        model(torch.randn(2, 3, 5, 5))
    assert model.last_path == "reference"


def test_operators_of_other_libraries_keep_their_names() -> None:
    text = task_text("return torch.ops.kw_sample.double_relu(a) * 1.0", "N(4)")
    with torch.library._scoped_library("kw_sample", "DEF") as library:
        library.define("double_relu(Tensor x) -> Tensor")
        library.impl("double_relu", lambda x: 2 * x.relu(), "CompositeExplicitAutograd")
        done = apply_rules(text, "remove-noops")
        assert "torch.ops.kw_sample.double_relu.default(a)" in done.source
        compare(done.reference, done.source, 1e-6)


def test_a_constant_that_the_first_call_moves_and_a_result_that_is_only_left_behind_are_no_state() -> None:
    text = task_text("self.h = self.h.to(a.device)\nself.last = a * self.h\nreturn self.last * 1.0", "torch.ones(3)")
    text = text.replace("pass", "self.h = torch.full((3,), 2.0)")
    done = apply_rules(text, "remove-noops")
    assert load(done.source, "candidate").ModelNew()(torch.ones(3)).tolist() == [2.0] * 3
    # A later call finds it on the device, as the reference's does.
    before, _, after = done.source.partition("class ModelNew")[2].partition("self.h = self.h.to(a.device)\n")
    assert "self.h" not in before
    assert "self.h" in after


@pytest.mark.usefixtures("float64")
def test_what_a_task_prints_is_not_among_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    trace(Task(id="talkative", source="print('loaded')\n" + task_text("print('called')\nreturn a + 1", "N(4)")))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loaded" in captured.err
    assert "called" in captured.err


def test_a_view_is_printed_so_that_it_holds_for_what_another_device_lays_out_in_another_way() -> None:
    """A CPU's attention returns batch, head, position; a GPU's kernels leave the heads inside."""
    text = task_text("return F.relu(a).view(2, 12) * 1.0", "N(4, 6)")
    done = apply_rules(text, "remove-noops")
    printed = done.source.partition("class ModelNew")[2]
    assert "reshape([2, 12])" in printed
    assert "view(" not in printed
    compare(done.reference, done.source, 1e-14)


@pytest.mark.parametrize("value", ["0.5", "float('-inf')", "3", "True"])
def test_a_constant_of_forward_is_filled_by_a_kernel_as_a_cuda_graph_wants(value: str) -> None:
    text = task_text(f"return torch.where(a > -9, a, torch.tensor({value})) + 0", "N(4, 6)")
    done = apply_rules(text, "remove-noops")
    assert f"torch.full((), {value.replace(chr(39), chr(34))}, " in done.source
    assert "torch.tensor(" not in done.source.partition("class ModelNew")[2]
    compare(done.reference, done.source, 1e-14)


def test_writes_through_views_of_own_values_are_made_functional() -> None:
    text = task_text(
        "m = torch.zeros_like(a)\nm[:, 2:] = 1\nb = a * 1.0\nb[0] += 2\nb.t()[1].mul_(3)\nreturn b + m", "N(4, 6)"
    )
    done = apply_rules(text, "remove-noops")
    compare(done.reference, done.source, 1e-14)


def test_attention_whose_keys_serve_several_queries_is_printed_whole() -> None:
    text = task_text(
        "return F.scaled_dot_product_attention(a * 1.0, b, b, is_causal=True, enable_gqa=True)",
        "N(2, 4, 5, 8), N(2, 2, 5, 8)",
    )
    done = apply_rules(text, "remove-noops")
    compare(done.reference, done.source, 1e-14)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "forward",
    [
        "return torch.ops.aten.einsum.default('ij,jk,kl->il', [a * 1.0, a.t(), b], path=[1, 2, 0, 1])",
        "return (a * 1.0).reshape(2, 2, 2, 3).to(torch.float32, memory_format=torch.channels_last)",
        "return F.kl_div(a * 1.0, b, log_target=True)",
        "return F.triplet_margin_loss(a * 1.0, b, a * b)",
        "return F.binary_cross_entropy_with_logits(a * 1.0, b, pos_weight=b[0])",
    ],
    ids=["no such keyword", "by keyword only", "another default", "another default of many", "with an argument left out"],
)
def test_operators_are_called_as_such_where_pythons_function_takes_other_arguments(forward: str) -> None:
    done = apply_rules(task_text(forward, "N(4, 6), torch.rand(4, 6)"), "remove-noops")
    compare(done.reference, done.source, 1e-14)


def test_in_place_operators_on_own_values_are_made_functional() -> None:
    text = task_text(
        "x = a * 1.0\nx += 1\nx = F.relu(x, inplace=True)\ny = torch.exp(x)\nx.mul_(2)\nreturn x + y", "N(4, 6)"
    )
    done = apply_rules(text, "remove-noops")
    compare(done.reference, done.source, 1e-14)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("forward", "init"),
    [
        ("return self.d(a.flatten(1)) * 2", "self.d = nn.Dropout(0.4, inplace=True)"),
        ("return a * a.new_empty(4, 1).bernoulli_(0.6) if self.training else a * 1.0", "pass"),
        ("b = a * 2\nc = b.view(6, 4)\nc.mul_(3)\nreturn c + 1", "pass"),
    ],
    ids=["dropout of a view", "stochastic depth", "a view of what nobody reads later"],
)
def test_writes_that_nobody_else_sees_are_made_functional(forward: str, init: str) -> None:
    done = apply_rules(task_text(f"a = a * 1.5\n{forward}", "N(4, 6)", init), "remove-unused")
    compare(done.reference, done.source, 1e-6)


def test_batch_norm_keeps_its_running_statistics() -> None:
    text = task_text("return self.n(a * 1.0) * 1.0", "N(8, 5)", "self.n = nn.BatchNorm1d(5)")
    done = apply_rules(text, "remove-noops")
    compare(done.reference, done.source, 1e-14)


@pytest.mark.usefixtures("float64")
def test_outputs_stay_fresh_and_keep_their_layout() -> None:
    """`a * 1` is a copy, so its replacement must not be `a` itself."""
    done = apply_rules(task_text("return a * 1.0, (a * 1.0).t()", "N(4, 6)"), "remove-noops")
    compare(done.reference, done.source, 1e-14)


@pytest.mark.usefixtures("float64")
def test_nested_outputs_and_random_streams() -> None:
    text = task_text(
        "x = F.dropout(a, 0.5, self.training)\nreturn {'x': x * 1.0, 'rest': [torch.rand(3) + a.sum(), (x + 1,)]}", "N(4, 6)"
    )
    done = apply_rules(text, "remove-noops")
    compare(done.reference, done.source, 1e-14)
    module = load(done.source, "candidate")
    assert set(module.ModelNew()(torch.randn(4, 6))) == {"x", "rest"}


def test_anything_else_runs_the_reference() -> None:
    text = task_text("return self.f(a).sum(1)", "N(4, 6)", "self.f = nn.Linear(6, 8)")
    done = apply_rules(text, "push-reduction-through-product")
    torch.manual_seed(0)
    model = load(done.source, "candidate").ModelNew()
    expected = load(text, "reference").Model()
    expected.load_state_dict(model.state_dict())
    for x in (torch.randn(9, 6), torch.randn(6, 4).t(), torch.randn(2, 4, 6)):
        torch.testing.assert_close(model(x), expected(x))
    torch.testing.assert_close(model.double()(torch.ones(4, 6).double()), expected.double()(torch.ones(4, 6).double()))


def test_constructor_arguments_are_part_of_what_is_baked_in() -> None:
    text = """
import torch
class Model(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x, shift=2.0):
        return (x * self.factor + shift) * 1.0
def get_inputs(): return [torch.randn(3)]
def get_init_inputs(): return [3.0]
"""
    module = load(apply_rules(text, "remove-noops").source, "candidate")
    x = torch.ones(3)
    assert module.ModelNew(3.0)(x).tolist() == [5.0] * 3
    with pytest.warns(UserWarning, match=r"wanted arguments \(3.0\), found 4.0"):
        other = module.ModelNew(4.0)
    assert other(x).tolist() == [6.0] * 3
    with pytest.warns(UserWarning, match="wanted shift == 2.0"):
        assert module.ModelNew(3.0)(x, 1.0).tolist() == [4.0] * 3


FORMS = """
import torch
class Model(torch.nn.Module):
    def __init__(self, width, sizes, names={{"a": (1, 2)}}, *, scale=2.0):
        super().__init__()
        self.factor = width * len(sizes) * scale
    def forward(self, x):
        return x * self.factor * 1.0
def get_inputs(): return [torch.randn(3)]
def get_init_inputs(): return [{given}]
"""


def test_what_tells_of_the_reference_is_no_sign_of_a_wrapper() -> None:
    done = apply_rules(task_text("return a.relu() * 1.0", "N(4, 6)"), "remove-noops")
    assert not re.search(r"torch\.compile|CUDAGraph", done.source)
    assert static_labels(done.source, done.reference, ("remove-noops", "cuda-graph")) == set()


@pytest.mark.parametrize("given", ["3, (3, 5, 7)", "3, [3, 5, 7]", '3, (3, 5, 7), {"a": [1, 2]}'])
def test_constructor_arguments_are_recognised_however_they_are_given(given: str) -> None:
    module = load(apply_rules(FORMS.format(given=given), "remove-noops").source, "candidate")
    same = [
        ((3, [3, 5, 7]), {}),
        ((3, (3, 5, 7)), {"scale": 2}),
        ((), {"sizes": [3, 5, 7], "width": 3}),
        ((3, torch.Size((3, 5, 7)), {"a": [1, 2]}), {}),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for args, kwargs in same:
            model = module.ModelNew(*args, **kwargs)
            assert model.last_path is None
            assert model(torch.ones(3)).tolist() == [18.0] * 3
            assert model.last_path == "optimized"
    for args, kwargs in [((4, (3, 5, 7)), {}), ((3, (3, 5)), {}), ((3, (3, 5, 7)), {"scale": 3.0})]:
        with pytest.warns(UserWarning, match="wanted arguments"):
            model = module.ModelNew(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(3))
        assert model.last_path == "reference"


def test_defaults_of_the_constructor_are_baked_in_too() -> None:
    text = FORMS.format(given="").replace("width, sizes", "width=3, sizes=(3, 5, 7)")
    module = load(apply_rules(text, "remove-noops").source, "candidate")
    assert module.ModelNew()(torch.ones(3)).tolist() == [18.0] * 3
    with pytest.warns(UserWarning, match="wanted arguments"):
        assert module.ModelNew(width=4)(torch.ones(3)).tolist() == [24.0] * 3


@pytest.mark.parametrize("captured", [False, True])
def test_a_call_of_another_kind_says_once_that_the_reference_runs(captured: bool) -> None:
    text = task_text("return (a * 1.0).relu().sum(1)", "N(4, 6)")
    model = load(apply_rules(text, "remove-noops", captured=captured).source, "candidate").ModelNew()
    for x, wanted in (
        (torch.randn(9, 6), r"wanted a.shape == \(4, 6\), found torch.float32 \[9, 6\] on cpu"),
        (torch.randn(4, 6).half(), "wanted a.dtype is torch.float32"),
        (torch.randn(6, 4).t(), r"wanted a.is_contiguous\(\)"),
    ):
        model._has_warned = False
        with pytest.warns(UserWarning, match=wanted):
            model(x)
        assert model.last_path == "reference"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)
            model(torch.randn(4, 6))
        assert model.last_path == "optimized"


def test_a_compiler_that_wants_one_graph_gets_it_of_the_reference_too() -> None:
    text = task_text("return (a * 1.0).relu().sum(1)", "N(4, 6)")
    model = load(apply_rules(text, "remove-noops").source, "candidate").ModelNew()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for rows, path in ((4, "optimized"), (9, "reference"), (4, "optimized")):
        compiled(torch.randn(rows, 6))
        assert model.last_path == path


WHOLE = '''"""About."""
from __future__ import annotations
import torch
N = 3  # kept
class Model(torch.nn.Module): pass
def get_inputs():
    return []
def get_init_inputs():
    return []
if __name__ == "__main__":
    1 / 0
'''


def test_candidates_carry_the_reference_but_not_its_inputs() -> None:
    kept = reference_source(WHOLE)
    assert kept == "import torch\nN = 3  # kept\nclass Model(torch.nn.Module): pass"


ATTENTION = [
    ("batch_first=True", "a, a, a"),
    ("batch_first=True", "a, a, a, attn_mask=torch.zeros(5, 5)"),
    ("batch_first=True", "query=a, key=a + 1, value=a"),
    ("batch_first=True", "a, a, a, attn_mask=torch.eye(5) == 0"),
    ("batch_first=True", "query=a, key=a, value=a, need_weights=False"),
    ("batch_first=True", "a[0], a[0], a[0]"),
    ("batch_first=True, bias=False", "a, a, a"),
    ("batch_first=True, add_bias_kv=True", "a, a, a"),
    ("batch_first=True, add_zero_attn=True", "a, a, a"),
    ("", "a, a, a"),
]
"""Arguments of attention layers and of their calls: of one operator, and of what has none for one reason each."""


@pytest.mark.parametrize(("given", "call"), exhaustive_but(ATTENTION, *ATTENTION[:3]))
@pytest.mark.parametrize("heads", exhaustive_but([2, 3], 2))
def test_attention_lies_as_in_inference(given: str, call: str, heads: int) -> None:
    """Where PyTorch has one operator for it, which it does not take while it is traced."""
    text = task_text(f"return self.f({call})[0]", "N(4, 5, 12)", f"self.f = nn.MultiheadAttention(12, {heads}, {given})")
    traced = trace(Task(id="attention", source=text)).evaluation.graph
    (found,) = (result.meta["val"] for result in torch.fx.graph.Graph.output_node(traced).all_input_nodes)
    module = load(text, "attention")
    with torch.no_grad():
        wanted = module.Model().eval()(*module.get_inputs())
    assert found.stride() == wanted.stride()
