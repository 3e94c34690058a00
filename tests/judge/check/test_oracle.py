"""The float64 truth, and new weights."""

from __future__ import annotations

import random

import pytest
import torch

from kernelwright.errors import TaskError
from kernelwright.judge.check import oracle as oracle_module
from kernelwright.judge.check.compare import distance, round_mantissa
from kernelwright.judge.check.oracle import (
    Oracle,
    OtherSums,
    OutOfDomainError,
    recurrent_in_tf32,
    tensors_of,
    transposed_convolution,
)
from kernelwright.records import Task
from kernelwright.tasks import bring_to_life
from tests.judge.snippets import RELU, task

CPU = torch.device("cpu")


def oracle(made):
    live = bring_to_life(made)
    return Oracle(live, CPU, 3), live.inputs(4, CPU)


def test_the_truth_is_float64_and_repeats():
    judge, inputs = oracle(RELU)
    first, second = (judge.truth(inputs, judge.initial_state, training=True) for _ in range(2))
    assert first[0].dtype == torch.float64
    assert torch.equal(first[0], second[0])
    own = judge.own_precision(inputs, judge.initial_state, training=True, seed=1)
    assert own[0].dtype == torch.float32
    assert 0 < distance(own[0], first[0]).rms < 1e-6
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("kept_bytes", [1 << 30, 0])
def test_a_truth_is_of_the_weights_that_it_was_asked_for_whatever_came_before(kept_bytes, monkeypatch):
    monkeypatch.setattr(oracle_module, "_KEPT_BYTES", kept_bytes)
    judge, inputs = oracle(RELU)
    other = {key: value + 1.0 for key, value in judge.initial_state.items()}
    asked = [(state, bits) for state in (judge.initial_state, other) for bits in (None, 7)]
    fresh = [oracle(RELU)[0].truth(inputs, state, training=True, mantissa_bits=bits)[0] for state, bits in asked]
    for index in (0, 1, 0, 3, 2, 2, 0):
        state, bits = asked[index]
        judge.truth(inputs, state, training=True, noise=0.1)
        assert torch.equal(judge.truth(inputs, state, training=True, mantissa_bits=bits)[0], fresh[index])


def test_a_truth_lets_others_in_between_its_operators_and_stays_the_same():
    judge, inputs = oracle(task("return torch.relu(inputs[0] * 2.0) + 1.0"))
    before, asked = judge.truth(inputs, judge.initial_state, training=True), []
    judge.give_way = lambda: asked.append(None)
    after = judge.truth(inputs, judge.initial_state, training=True)
    assert len(asked) >= 3
    assert torch.equal(before[0], after[0])


def test_constants_made_in_forward_are_float64_too():
    judge, inputs = oracle(task("return inputs[0] * torch.full((16,), 0.1)"))
    (truth,) = judge.truth(inputs, {}, training=True)
    assert torch.equal(truth, inputs[0].double() * 0.1)


def test_fewer_bits_are_further_from_the_truth():
    judge, inputs = oracle(RELU)
    truth = judge.truth(inputs, judge.initial_state, training=True)[0]
    errors = [
        distance(judge.truth(inputs, judge.initial_state, training=True, mantissa_bits=bits)[0], truth).rms
        for bits in (23, 10, 7)
    ]
    assert errors[0] == 0.0 or errors[0] < 1e-7
    assert errors[0] < errors[1] < errors[2]


def test_integers_stay_integers():
    judge, _ = oracle(task("return inputs[0] + 1", "[torch.arange(4)]"))
    (truth,) = judge.truth([torch.arange(4)], {}, training=True, mantissa_bits=7)
    assert truth.tolist() == [1, 2, 3, 4]
    assert truth.dtype == torch.int64


def test_the_inputs_and_the_state_stay_as_they_were():
    judge, inputs = oracle(task("self.bn(inputs[0]); return inputs[0].add_(1)", init="self.bn = torch.nn.BatchNorm1d(16)"))
    before, state = inputs[0].clone(), {key: value.clone() for key, value in judge.initial_state.items()}
    judge.own_precision(inputs, judge.initial_state, training=True, seed=1)
    judge.truth(inputs, judge.initial_state, training=True)
    judge.own_outputs(inputs)
    assert torch.equal(inputs[0], before)
    assert all(torch.equal(judge.initial_state[key], value) for key, value in state.items())


def test_the_mode_counts():
    judge, inputs = oracle(task("return torch.nn.functional.dropout(inputs[0], 0.5, self.training)"))
    assert not torch.equal(judge.truth(inputs, {}, training=True)[0], inputs[0].double())
    assert torch.equal(judge.truth(inputs, {}, training=False)[0], inputs[0].double())


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        ("raise ValueError('here')", "raised ValueError: here"),
        ("return inputs[0] / 0 * 0", "NaN"),
        ("raise torch.AcceleratorError('CUDA error: misaligned address')", "misaligned"),
    ],
)
def test_what_the_reference_cannot_do_is_out_of_its_domain(forward, words):
    judge, inputs = oracle(task(forward))
    with pytest.raises(OutOfDomainError, match=words):
        judge.truth(inputs, {}, training=True)
    with pytest.raises(OutOfDomainError, match=words):
        judge.own_precision(inputs, {}, training=True, seed=0)


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "AcceleratorError"])
def test_no_check_is_left_out_because_others_filled_the_device(kind):
    judge, inputs = oracle(task(f"raise torch.{kind}('CUDA error: out of memory')"))
    for ask in (
        lambda: judge.truth(inputs, {}, training=True),
        lambda: judge.own_precision(inputs, {}, training=True, seed=0),
        lambda: judge.own_outputs(inputs),
    ):
        with pytest.raises(getattr(torch, kind)):
            ask()


@pytest.mark.parametrize(("forward", "words"), [("return {1}", "a set"), ("return 1", "at least one tensor")])
def test_a_reference_that_returns_no_tensor_is_a_task_error(forward, words):
    judge, inputs = oracle(task(forward))
    with pytest.raises(TaskError, match=words):
        judge.truth(inputs, {}, training=True)


@pytest.mark.parametrize(("forward", "words"), [("return {1}", "a set"), ("1 / 0", "ZeroDivisionError")])
def test_the_structure_of_outputs_needs_a_reference_that_runs(forward, words):
    judge, inputs = oracle(task(forward))
    with pytest.raises(TaskError, match=words):
        judge.own_outputs(inputs)


def test_new_weights_are_another_draw_of_the_same_size_and_nowhere_at_a_default():
    lines = (
        "self.a, self.bn = torch.nn.Parameter(torch.zeros(5000)), torch.nn.BatchNorm1d(5000); "
        "self.b = torch.nn.Parameter(torch.randn(5000) * 0.01); "
        "self.register_buffer('mask', torch.ones(3)); self.e = torch.nn.Parameter(torch.empty(0)); "
        "self.register_buffer('table', torch.arange(3))"
    )
    judge, _ = oracle(task("return inputs[0]", init=lines))
    state = judge.random_state(torch.Generator().manual_seed(1))
    other = judge.random_state(torch.Generator().manual_seed(2))
    assert set(state) == set(judge.initial_state)
    for key in ("a", "b", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"):
        assert not torch.equal(state[key], judge.initial_state[key])
        assert not torch.equal(state[key], other[key])
        assert not ((state[key] == 0) | (state[key] == 1)).any()
        assert state[key].dtype == judge.initial_state[key].dtype
    assert (state["bn.running_var"] > 0).all()
    assert 0.005 < float(state["b"].std()) < 0.02
    assert 0.05 < float(state["a"].std()) < 0.2
    for key in ("mask", "table", "bn.num_batches_tracked", "e"):
        assert torch.equal(state[key], judge.initial_state[key])


def test_only_buffers_that_hold_a_default_get_another():
    lines = (
        "self.bn, self.weight = torch.nn.BatchNorm1d(8), torch.nn.Parameter(torch.zeros(8)); "
        "self.register_buffer('mean', torch.zeros(8)); self.register_buffer('scale', torch.tensor(0.125)); "
        "self.register_buffer('table', torch.linspace(0, 1, 8)); "
        "self.register_buffer('mask', torch.full((8,), -torch.inf)); "
        "self.register_buffer('count', torch.zeros(8, dtype=torch.long)); self.register_buffer('none', torch.empty(0))"
    )
    judge, _ = oracle(task("return inputs[0]", init=lines))
    state = judge.other_defaults(torch.Generator().manual_seed(1))
    assert set(state) == {"mean", "scale"}
    assert (state["mean"] != 0).all()
    assert len(set(state["mean"].tolist())) == 8
    assert 0.05 < float(state["scale"]) < 0.25
    assert state["scale"] != 0.125


def test_tensors_among_inputs():
    a, b = torch.zeros(1), torch.ones(1)
    assert [id(tensor) for tensor in tensors_of([a, 3, {"x": (b,)}])] == [id(a), id(b)]


def test_tied_parameters_get_one_value_under_all_their_names():
    made = task(
        "return self.second(self.first(inputs[0]))",
        init=(
            "self.first = torch.nn.Linear(16, 16, bias=False)\n"
            "        self.second = torch.nn.Linear(16, 16, bias=False)\n"
            "        self.second.weight = self.first.weight"
        ),
    )
    tied = Oracle(bring_to_life(made), torch.device("cpu"), seed=1)
    state = tied.random_state(torch.Generator().manual_seed(2))
    assert tied.parameter_names == {"first.weight", "second.weight"}
    assert torch.equal(state["first.weight"], state["second.weight"])
    assert not torch.equal(state["first.weight"], tied.initial_state["first.weight"])
    torn = state | {"second.weight": state["first.weight"] + 1}
    assert torch.equal(tied.tied(torn)["second.weight"], state["first.weight"])


def test_noise_moves_finite_elements_by_its_share_of_them_and_of_their_size():
    judge, _ = oracle(task("return inputs[0]", init="self.register_buffer('mask', torch.ones(3))"))
    x = torch.ones(4096)
    x[:1024] = 0
    x[-1] = torch.inf
    (moved,) = judge.truth([x], judge.initial_state, training=True, noise=1e-3)
    assert moved[-1] == torch.inf
    size = 1e-3 * (3071 / 4096) ** 0.5  # of the root of the mean square, infinities taken for 0
    assert float(moved[:1024].std()) == pytest.approx(size, rel=0.15)
    assert float((moved[1024:-1] - 1).std()) == pytest.approx(1e-3 + size, rel=0.15)
    assert not torch.equal(moved, judge.truth([x], judge.initial_state, training=True, noise=1e-3)[0])
    assert torch.equal(judge.truth([x], judge.initial_state, training=True)[0], x.double())


def test_noise_moves_parameters_but_no_masks():
    lines = "self.w = torch.nn.Parameter(torch.ones(64)); self.register_buffer('mask', torch.ones(64))"
    judge, _ = oracle(task("return self.w + 0, self.mask + 0", init=lines))
    weights, mask = judge.truth([], judge.initial_state, training=True, noise=1e-3)
    assert 0 < float((weights - 1).abs().max()) < 0.02
    assert torch.equal(mask, torch.ones(64, dtype=torch.float64))


def test_only_convolutions_lose_what_tf32_does_not_hold():
    both = task(
        "return torch.conv1d(inputs[0], self.weight), inputs[0] @ self.weight[0].T",
        "[torch.randn(2, 3, 3)]",
        init="self.weight = torch.nn.Parameter(torch.randn(4, 3, 3))",
    )
    judge, inputs = oracle(both)
    truth = judge.truth(inputs, judge.initial_state, training=True)
    rounded = judge.with_tf32(inputs, judge.initial_state, training=True, products=False)
    x, weight = (round_mantissa(one.double(), 10) for one in (inputs[0], judge.initial_state["weight"]))
    assert torch.equal(rounded[0], torch.conv1d(x, weight))
    assert not torch.equal(rounded[0], truth[0])
    assert torch.equal(rounded[1], truth[1])


PRODUCTS = {
    "mm": "x @ y",
    "bmm": "x.expand(3, 6, 5) @ y",
    "a batch of rows": "x.reshape(2, 3, 5) @ y",
    "linear": "torch.nn.functional.linear(x, y.T)",
    "linear with a bias": "torch.nn.functional.linear(x, y.T, bias)",
    "einsum": "torch.einsum('ij,jk->ki', x, y)",
    "addmm": "torch.addmm(bias, mat1=x, mat2=y, beta=0.5)",
    "addmm in place": "bias.repeat(6, 1).addmm_(x, y)",
    "baddbmm": "torch.baddbmm(bias, x.expand(3, 6, 5), y.expand(3, 5, 4))",
    "addbmm": "torch.addbmm(bias, x.expand(3, 6, 5), y.expand(3, 5, 4))",
    "into given memory": "torch.mm(x, y, out=bias.repeat(6, 1))",
    "complex": "torch.view_as_real(torch.complex(x, -x).conj() @ torch.complex(y, y))",
    "an activation": "torch._addmm_activation(bias, x, y)",
}


@pytest.mark.parametrize("expression", PRODUCTS.values(), ids=PRODUCTS)
def test_factors_of_products_lose_what_tf32_does_not_hold_if_asked(expression):
    made = task(f"x, y, bias = inputs; return {expression}", "[torch.randn(6, 5), torch.randn(5, 4), torch.randn(4)]")
    judge, inputs = oracle(made)
    x, y, bias = (one.double() for one in inputs)
    names = {"torch": torch, "x": round_mantissa(x, 10), "y": round_mantissa(y, 10), "bias": bias}
    (rounded,) = judge.with_tf32(inputs, {}, training=True, products=True)
    (truth,) = judge.truth(inputs, {}, training=True)
    assert torch.equal(rounded, eval(expression, names))
    assert not torch.equal(rounded, truth)
    assert judge.with_tf32(inputs, {}, training=True, products=False) is None


@pytest.mark.parametrize("expression", ["x.long() @ y.long()", "x @ y[:, 0]", "(x * x).sum(-1)"])
def test_products_of_integers_and_with_vectors_lose_nothing(expression):
    judge, inputs = oracle(
        task(f"x, y = inputs; return {expression}", "[torch.randn(6, 5) * 9000, torch.randn(5, 4) * 9000]")
    )
    found = judge.with_tf32(inputs, {}, training=True, products=True)
    assert found is None or torch.equal(found[0], judge.truth(inputs, {}, training=True)[0])


def test_attention_is_made_of_products_where_no_fused_kernel_takes_float64():
    attention = "torch.nn.functional.scaled_dot_product_attention(inputs[0], inputs[0], inputs[0])"
    made = task(f"return {attention}", "[torch.randn(2, 2, 8, 16)]")
    judge, inputs = oracle(made)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (rounded,) = judge.with_tf32(inputs, {}, training=True, products=True)
        (truth,) = judge.truth(inputs, {}, training=True)
    assert 1e-5 < distance(rounded, truth).rms < 1e-3


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_is_a_sum_of_products(dimensions):
    plain = getattr(torch.nn.functional, f"conv_transpose{dimensions}d")
    seed = random.Random(dimensions)
    for _ in range(30):
        stride, dilation, taps = ([seed.randint(1, 3) for _ in range(dimensions)] for _ in range(3))
        padding = [seed.randint(0, min(2, far * (count - 1))) for far, count in zip(dilation, taps, strict=True)]
        more = [seed.randint(0, max(step, far) - 1) for step, far in zip(stride, dilation, strict=True)]
        x = torch.randn(2, 3, *(seed.randint(4, 6) for _ in range(dimensions)), dtype=torch.float64)
        weight, bias = torch.randn(3, 4, *taps, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        wanted = plain(x, weight, bias, stride, padding, more, 1, dilation)
        found = transposed_convolution(x, weight, bias, stride, padding, dilation, more)
        assert found.shape == wanted.shape
        assert found.is_contiguous()
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_truth_on_a_shared_device_computes_transposed_convolutions_as_products_and_rounds_them_alike(monkeypatch):
    lines = "self.weight = torch.nn.Parameter(torch.randn(3, 4, 3, 3))"
    judge, inputs = oracle(task("return torch.conv_transpose2d(inputs[0], self.weight)", "[torch.randn(2, 3, 5, 5)]", lines))
    how = {"training": True}
    before = [
        judge.truth(inputs, judge.initial_state, **how),
        judge.with_tf32(inputs, judge.initial_state, products=False, **how),
    ]
    called = []
    monkeypatch.setattr(oracle_module, "_WORTH_PRODUCTS", 1)
    monkeypatch.setattr(
        oracle_module, "transposed_convolution", lambda *args: called.append(args) or transposed_convolution(*args)
    )
    judge.give_way = lambda: None
    sums = OtherSums()
    after = [
        judge.truth(inputs, judge.initial_state, mode=sums, **how),
        judge.with_tf32(inputs, judge.initial_state, products=False, **how),
    ]
    assert len(called) == 2
    assert not torch.equal(called[0][0], called[1][0]), "rounded before it is computed"
    assert all(torch.allclose(one[0], other[0], rtol=1e-12, atol=1e-12) for one, other in zip(before, after, strict=True))
    alone = OtherSums()
    judge.give_way = None
    judge.truth(inputs, judge.initial_state, mode=alone, **how)
    assert sums.names == alone.names


def test_of_a_recurrent_network_in_cudnn_all_that_goes_in_is_rounded():
    generator = torch.Generator().manual_seed(0)
    x, weight, hidden, cell = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    flat, others = torch.randn(24), (2, 4, 0, 1, False)
    lstm = recurrent_in_tf32((x, [weight, hidden], 4, flat, hidden, cell, *others))
    rounded_x, rounded_weight, rounded_hidden, rounded_cell = (round_mantissa(one, 10) for one in (x, weight, hidden, cell))
    assert torch.equal(lstm[0], rounded_x)
    assert not torch.equal(lstm[0], x)
    assert all(map(torch.equal, lstm[1], [rounded_weight, rounded_hidden]))
    assert lstm[2:4] == (4, None), "cuDNN would take the flat buffer of the exact weights"
    assert torch.equal(lstm[4], rounded_hidden)
    assert torch.equal(lstm[5], rounded_cell)
    assert lstm[6:] == others
    assert recurrent_in_tf32((x, [weight], 4, flat, hidden, None, *others))[5] is None, "a GRU has no cell"


def test_a_module_without_convolutions_has_nothing_to_lose():
    judge, inputs = oracle(RELU)
    assert judge.with_tf32(inputs, judge.initial_state, training=True, products=False) is None


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_that_cannot_be_copied_has_a_truth_all_the_same():
    normed = Task(
        id="normed",
        source="""
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.utils.weight_norm(torch.nn.Linear(3, 3))
    def forward(self, x): return self.linear(x)
def get_inputs(): return [torch.randn(4, 3)]
def get_init_inputs(): return []
""",
    )
    judge, inputs = oracle(normed)
    state = {key: value + 1 for key, value in judge.initial_state.items()}
    truth = judge.truth(inputs, state, training=True)
    own = judge.own_precision(inputs, state, training=True, seed=1)
    assert truth[0].dtype == torch.float64
    assert 0 < distance(own[0], truth[0]).rms < 1e-6


@pytest.mark.parametrize(
    ("device", "reserved_gib", "is_given_back"), [("cuda:0", 30, True), ("cuda:0", 12, False), ("cpu", 30, False)]
)
def test_what_a_truth_was_computed_in_is_given_back_where_it_is_much(simulated_gpu, device, reserved_gib, is_given_back):
    """Workers on the same GPU need it next."""
    simulated_gpu.reserved_gib, simulated_gpu.allocated_gib = reserved_gib, 5
    judge, inputs = oracle(RELU)
    judge.device = torch.device(device)
    judge.truth(inputs, judge.initial_state, training=True)
    assert bool(simulated_gpu.asked) is is_given_back
