"""Input sets: what each does to tensors, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.judge.check.compare import round_mantissa
from kernelwright.tasks import INPUT_SETS, WEIGHT_SETS, InputSet, input_sets
from kernelwright.tasks.invariants import Invariant, TensorForm, outline

BY_NAME = {one.name: one for one in INPUT_SETS}
KEEPING = [one for one in INPUT_SETS if one.breaks is None]
"""Sets that break no invariant of what they vary."""
SHAPES = st.lists(st.integers(0, 5), max_size=4)
FLOATS = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def apply(name, *inputs):
    return BY_NAME[name].apply(list(inputs), generator())


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator(1)).to(dtype)


def test_names_are_unique_and_the_own_distribution_comes_first():
    assert len(BY_NAME) == len(INPUT_SETS)
    assert INPUT_SETS[0].name == "own"
    assert all(one.catches for one in INPUT_SETS)


@given(st.sampled_from(KEEPING), SHAPES, FLOATS)
def test_shape_dtype_and_zeros_survive(inputs, shape, dtype):
    x = normal(*shape, dtype=dtype)
    x = torch.where(torch.rand(x.shape, generator=generator(2)) < 0.5, x, torch.zeros_like(x))
    (varied,) = inputs.apply([x], generator())
    assert (varied.shape, varied.dtype) == (x.shape, x.dtype)
    assert not varied[x == 0].any()


@given(st.sampled_from(KEEPING), SHAPES)
def test_a_triangle_of_zeros_stays_one(inputs, shape):
    x = normal(*shape, 6, 6).tril()
    (varied,) = inputs.apply([x], generator())
    assert not varied.triu(1).any()


@given(st.sampled_from(INPUT_SETS))
def test_the_drawn_inputs_themselves_are_not_written_to(inputs):
    x, n = normal(7, 5), torch.arange(20) % 3
    before = x.clone(), n.clone()
    inputs.apply([x, n], generator())
    assert torch.equal(x, before[0])
    assert torch.equal(n, before[1])


@pytest.mark.parametrize("inputs", KEEPING, ids=lambda one: one.name)
def test_sets_for_floats_leave_integers_alone_and_the_other_way_round(inputs):
    x, n, b = normal(40, 5), torch.arange(200) % 7, torch.arange(9) % 2 == 0
    varied = inputs.apply([x, n, b, 3, "text", None], generator())
    assert varied[3:] == [3, "text", None]
    assert torch.equal(varied[2], b)
    of_floats = inputs.varies(TensorForm.of(x, x))
    assert torch.equal(varied[1] if of_floats else varied[0], n if of_floats else x)


def test_nested_inputs_keep_their_structure():
    a, b = normal(3), normal(4)
    (varied,) = apply("negative", {"x": [a, (b, 2)], "n": 1})
    assert torch.equal(varied["x"][0], -a)
    assert torch.equal(varied["x"][1][0], -b)
    assert varied["x"][1][1] == 2
    assert isinstance(varied["x"][1], tuple)
    assert varied["n"] == 1


def test_own_is_as_drawn():
    x = normal(4, 4)
    for name in ("own", "own-again"):
        assert apply(name, x)[0] is x


def test_each_variation_does_what_its_name_says():
    x = normal(400, 50)
    assert torch.equal(apply("negative", x)[0], -x)
    assert torch.equal(apply("large", x)[0], x * 4096)
    assert torch.equal(apply("small", x)[0], x / 4096)
    signs = apply("signs", x)[0]
    assert torch.equal(signs.abs(), x.abs())
    assert 0.4 < float((signs != x).float().mean()) < 0.6
    zero_one = apply("zero-one", x)[0]
    assert set(zero_one.unique().tolist()) == {0.0, 1.0}
    assert apply("constant", x)[0].unique().tolist() == [0.75]
    outliers = apply("outliers", x)[0] / x
    assert 1e-4 < float((outliers > 2).float().mean()) < 0.01
    assert torch.allclose(outliers[outliers > 2], torch.tensor(50.0))
    rows = apply("mixed-scale", x)[0] / x
    assert torch.allclose(rows, rows[:, :1].expand_as(rows))
    exponents = torch.log2(rows[:, 0])
    assert torch.equal(exponents, exponents.round())
    assert exponents.min() >= -6
    assert exponents.max() <= 6
    assert len(exponents.unique()) > 8


def test_another_layout_has_the_same_values():
    for shape in ((6, 4), (2, 6, 4)):
        x = normal(*shape)
        (varied,) = apply("non-contiguous", x)
        assert torch.equal(varied, x)
        assert not varied.is_contiguous()
        assert varied.transpose(-1, -2).is_contiguous()
    line = normal(5)
    assert apply("non-contiguous", line)[0] is line


LAYOUTS = [one for one in INPUT_SETS if one.layout]


@pytest.mark.parametrize("inputs", LAYOUTS, ids=lambda one: one.name)
def test_a_layout_changes_nothing_but_places_of_tensors_of_every_type(inputs):
    image = normal(2, 3, 4, 5)
    drawn = [image, normal(3, 4), normal(5), image > 0, torch.arange(24).view(2, 3, 4), torch.tensor(1.5), normal(0, 3)]
    for x in (*drawn, image.mT, image[:, :, :2], normal(1, 4).expand(3, 4)):
        (varied,) = inputs.apply([x], generator())
        assert torch.equal(varied, x)
        (outlined,) = inputs.apply([outline(x)], generator())
        assert outlined.stride() == varied.stride(), "memory is measured so"


def test_each_layout_is_what_its_name_says():
    image = normal(2, 3, 4, 5)
    assert apply("sliced", image)[0].stride() == (72, 24, 6, 1)
    assert apply("sliced", normal(5))[0].stride() == (2,)
    assert apply("exchanged", image)[0].stride() == (5, 10, 30, 1)
    assert apply("non-contiguous", image)[0].is_contiguous(memory_format=torch.channels_last)
    assert apply("non-contiguous", image.mT)[0].is_contiguous()


@pytest.mark.parametrize(
    ("name", "shape", "fits"),
    [
        ("non-contiguous", (4,), False), ("non-contiguous", (4, 4), True), ("non-contiguous", (4, 1), False),
        ("exchanged", (3, 4), False), ("exchanged", (2, 3, 4), True), ("exchanged", (1, 3, 4), False),
        ("non-contiguous", (2, 3, 4), True), ("non-contiguous", (2, 3, 4, 4), True), ("exchanged", (2, 3, 4, 4), True),
        ("sliced", (), False), ("sliced", (2, 3), True),
    ],
)  # fmt: skip
def test_a_layout_that_changes_no_tensor_is_not_drawn(name, shape, fits):
    x = outline(normal(*shape))
    assert BY_NAME[name].fits([TensorForm(outline(torch.tensor(1.0))), TensorForm(x)]) is fits
    (varied,) = apply(name, x)
    assert not BY_NAME[name].fits([TensorForm(varied)]) or name in ("non-contiguous", "sliced")


@pytest.mark.parametrize("inputs", [one for one in INPUT_SETS if not one.layout], ids=lambda one: one.name)
@pytest.mark.parametrize(
    "x", [normal(6, 8).mT, normal(6, 8)[:, :5], normal(2, 3, 4, 5).to(memory_format=torch.channels_last)]
)
def test_other_values_lie_as_the_task_draws_them(inputs, x):
    assert inputs.apply([x, x], generator())[0].stride() == x.stride()
    n = (x * 8).int() if inputs.integers else x
    assert inputs.apply([n, n], generator())[0].stride() == n.stride()


@pytest.mark.parametrize("x", [normal(1, 8).expand(6, 8), normal(12).unfold(0, 4, 1)])
def test_other_values_of_shared_memory_have_memory_of_their_own(x):
    (varied,) = apply("signs", x)
    assert varied.is_contiguous()
    assert torch.equal(varied.abs(), x.abs())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("inputs", INPUT_SETS, ids=lambda one: one.name)
def test_floats_of_eight_bits_are_varied_too(inputs, dtype):
    x = normal(6, 8).to(dtype)
    (varied, _) = inputs.apply([x, x], generator())
    assert (varied.shape, varied.dtype) == (x.shape, dtype)


def test_a_scalar_has_no_rows_to_scale():
    x = torch.tensor(2.0)
    assert apply("mixed-scale", x)[0] is x


def test_skewed_integers_are_mostly_one_value_that_was_drawn():
    n = torch.randint(0, 50, (2000,), generator=generator(3))
    (varied,) = apply("skewed-integers", n)
    value, count = varied.unique(return_counts=True)
    assert int(count.max()) > 1600
    assert set(value.tolist()) <= set(n.tolist())


@pytest.mark.parametrize("n", [torch.arange(10).flip(0), torch.tensor([3]), torch.empty(0, dtype=torch.int64)])
def test_a_permutation_stays_one(n):
    assert torch.equal(apply("skewed-integers", n)[0], n)


def test_the_same_seed_varies_alike():
    x = normal(30, 30)
    for inputs in INPUT_SETS:
        first, second = (inputs.apply([x], generator(4))[0] for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def test_a_set_of_ones_own():
    doubled = InputSet("doubled", lambda x, g: x * 2, "nothing")
    assert float(doubled.apply([torch.tensor(1.5)], generator())[0]) == 3.0


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, 10), (torch.float32, 7), (torch.float64, 23), (torch.float16, 3)]
)
def test_lower_precisions_round_biased_elements_towards_zero(dtype, bits):
    before = normal(1024, 1024, dtype=dtype)
    for name in ("biased", "biased-later"):
        (x,) = apply(name, before)
        lost = 1 - round_mantissa(x.double(), bits) / x.double()
        assert lost[x != before].min() >= 0
        assert lost.max() < 2.0 ** -(bits + 1)
        assert lost.mean() > 2.0 ** -(bits + 4)


def test_some_biased_elements_stay_as_drawn_and_in_one_set_the_first_do(monkeypatch):
    monkeypatch.setattr(input_sets, "PART", 1000)
    before = normal(64, 64)
    for seed in range(20):
        for name in ("biased", "biased-later"):
            alike = (BY_NAME[name].vary(before, generator(seed)) == before).flatten()
            assert 0.05 < alike.double().mean() < 0.36
            assert name == "biased" or alike[:200].all()
    low = BY_NAME["biased"].vary(before, generator()).flatten()[-64:].view(torch.int32) & 0x7FFF
    assert len(set(low.tolist())) > 60


def test_biased_elements_stay_near_what_was_drawn():
    before = normal(64, 64)
    (after,) = apply("biased", before)
    assert ((after - before).abs() / before.abs()).max() < 2.0**-7
    special = torch.tensor([0.0, float("inf"), -float("inf")])
    assert torch.equal(apply("biased", special)[0], special)
    assert apply("biased", torch.view_as_complex(normal(4, 2)))[0].dtype == torch.complex64


# --- values with structure -----------------------------------------------------------------------------------------------


def ranks(row):
    return row.argsort().argsort()


def test_ordered_rows_are_each_of_another_order():
    x = normal(400, 512)
    (varied,) = apply("ordered", x)
    steps = varied.diff(dim=1)
    rising, falling = (steps >= 0).all(dim=1), (steps <= 0).all(dim=1)
    assert min(rising.sum(), falling.sum()) > 20
    interleaved = [row for row in varied[~(rising | falling)] if len(row.unique()) == 512]
    assert any((row[::16] < row.median()).all() and row[15::16].min() > row.median() for row in interleaved)
    assert any(len(row.unique()) <= 512 / 16 for row in varied)
    clustered = varied.sort(dim=1).values.diff(dim=1)
    assert any(int((row > 0.01).sum()) < 8 for row in clustered)
    plain = [row.sort().values for row in varied if len(row.unique()) == 512]
    assert sum(any(torch.equal(row, own) for own in x.sort(dim=1).values) for row in plain) > 100


def test_ordered_columns_are_ordered_along_another_dimension_than_the_last():
    (varied,) = apply("ordered-across", normal(512, 300))
    steps = varied.diff(dim=0)
    assert int(((steps >= 0).all(dim=0) | (steps <= 0).all(dim=0)).sum()) > 50


def test_zeros_keep_their_places_among_ordered_elements():
    x = normal(30, 64).masked_fill_(torch.rand(30, 64, generator=generator(2)) < 0.3, 0.0)
    assert torch.equal(apply("ordered", x)[0] == 0, x == 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_far_leaves_half_of_the_digits(dtype):
    (varied,) = apply("far", normal(64, 64, dtype=dtype))
    assert 0.3 < float(varied.double().mean()) * torch.finfo(dtype).eps ** 0.5 < 3
    assert 0.5 < float(varied.double().std()) < 2


def test_one_tensor_alone_is_far_and_each_in_turn():
    tensors = [normal(8, 8), normal(8, 8) + 1]
    forms = [TensorForm.of(tensor, tensor) for tensor in tensors]
    moved = set()
    for seed in range(20):
        varied = BY_NAME["far"].apply(list(tensors), generator(seed), forms)
        moved.add(tuple(not torch.equal(one, other) for one, other in zip(varied, tensors, strict=True)))
    assert moved == {(True, False), (False, True)}


def test_near_rows_differ_from_those_of_other_tensors_too_by_little():
    first, second = apply("near", normal(40, 32), normal(24, 32) * 1.1)
    apart = torch.cdist(first.double(), second.double())
    assert float(apart.max()) < 0.2
    assert float(apart.min()) > 1e-3
    assert float(first.square().mean()) > 0.3


def test_integers_that_are_large_or_alike_stay_in_their_range():
    n = torch.randint(-128, 128, (500,), generator=generator(2), dtype=torch.int8)
    (varied,) = apply("alike-integers", n)
    assert len(varied.unique()) == 1
    assert varied[0] in n
    ends = {tuple(sorted(BY_NAME["large-integers"].apply([n], generator(seed))[0].unique().tolist())) for seed in range(9)}
    assert ends <= {(-128, -127, -126), (125, 126, 127)} | {(-128, -127), (126, 127)}
    assert len({min(end) < 0 for end in ends}) == 2


FORMS = {
    Invariant.SORTED: lambda g: torch.randint(0, 9, (40,), generator=g).sort().values,
    Invariant.SYMMETRIC: lambda g: (x := torch.randn(3, 6, 6, generator=g)) @ x.mT,
    Invariant.PERMUTATION: lambda g: torch.randperm(40, generator=g),
    Invariant.PREFIX_MASK: lambda g: torch.arange(12) < torch.randint(1, 12, (20, 1), generator=g),
    Invariant.ONE_HOT: lambda g: torch.nn.functional.one_hot(torch.randint(0, 12, (20,), generator=g), 12).float(),
    Invariant.ZEROS: lambda g: torch.randn(6, 6, generator=g).tril(),
    Invariant.LEAST_INTEGER: lambda g: torch.randint(64, 129, (20,), generator=g),
}


def form(draw):
    return TensorForm.of(draw(generator(1)), draw(generator(2)))


@pytest.mark.parametrize("invariant", Invariant)
def test_two_draws_show_what_all_share(invariant):
    found = form(FORMS[invariant])
    assert found.invariants == {invariant}
    x = FORMS[invariant](generator(3))
    (broken,) = BY_NAME[f"not-{invariant}"].apply([x], generator(), [found])
    assert not TensorForm.of(broken, broken).invariants & {invariant} - {Invariant.ZEROS}
    assert not torch.equal(broken, x)


@pytest.mark.parametrize("invariant", Invariant)
@pytest.mark.parametrize("inputs", KEEPING, ids=lambda one: one.name)
def test_other_sets_keep_it(inputs, invariant):
    x, found = FORMS[invariant](generator(3)), form(FORMS[invariant])
    (varied,) = inputs.apply([x], generator(), [found])
    if not inputs.varies(found):
        assert varied is x
    elif inputs.name not in ("zero-one", "constant", "missing"):  # which may leave nothing of it
        assert invariant in TensorForm.of(varied, varied).invariants or len(varied.unique()) == 1


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda g: torch.randn(20, 20, generator=g), id="normal"),
        pytest.param(lambda g: torch.randint(0, 2, (20, 20), generator=g), id="bits"),
        pytest.param(lambda g: torch.zeros(4, 8), id="zeros"),
        pytest.param(lambda g: torch.ones(8, 8, dtype=torch.bool), id="ones"),
        pytest.param(lambda g: torch.randn(20, 1, generator=g), id="column"),
        pytest.param(lambda g: torch.randn((), generator=g), id="scalar"),
        pytest.param(lambda g: torch.empty(0, 4), id="empty"),
        pytest.param(lambda g: torch.randn(8, 8, generator=g).to(torch.float8_e4m3fn), id="of eight bits"),
    ],
)
def test_what_has_no_form_shows_none(draw):
    assert form(draw).invariants == set()


def test_pointers_get_other_segments_between_the_same_ends():
    pointers = torch.arange(0, 65, 8).repeat(3, 1)
    found = TensorForm.of(pointers, pointers)
    assert [one.name for one in INPUT_SETS if one.varies(found) and not one.layout] == ["skewed-integers", "other-segments"]
    (varied,) = BY_NAME["other-segments"].apply([pointers], generator(), [found])
    assert (varied[:, [0, -1]] == torch.tensor([0, 64])).all()
    assert (varied.diff(dim=1) >= 0).all()
    assert len(varied.diff(dim=1).unique()) > 2


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda g: (torch.arange(12) >= torch.randint(1, 12, (20, 1), generator=g))[..., None], id="last alone"),
        pytest.param(
            lambda g: torch.zeros(20, 1, 12).masked_fill_(
                torch.arange(12) >= torch.randint(1, 12, (20, 1, 1), generator=g), -torch.inf
            ),
            id="added",
        ),
    ],
)
def test_masks_for_padding_are_known_in_every_form(draw):
    assert Invariant.PREFIX_MASK in form(draw).invariants
    x = draw(generator(3))
    for inputs in INPUT_SETS:
        (varied,) = inputs.apply([x], generator(), [form(draw)])
        assert varied.shape == x.shape
        holds = Invariant.PREFIX_MASK in TensorForm.of(varied, varied).invariants
        assert holds or inputs.breaks or x.dtype != torch.bool, inputs.name


def test_rows_that_are_sparse_in_other_places_each_time_are_filled():
    def draw(g):
        return torch.randn(40, 100, generator=g).mul_(torch.rand(40, 100, generator=g) < 0.1)

    assert not form(draw).invariants
    assert BY_NAME["filled"].fits([form(draw)])
    assert not BY_NAME["filled"].fits([form(FORMS[Invariant.ZEROS])])
    x = draw(generator(3))
    (varied,) = BY_NAME["filled"].apply([x], generator(), [form(draw)])
    assert torch.equal(varied[x != 0], x[x != 0])
    assert 0.5 < int(varied.count_nonzero()) / x.numel() < 0.95


def test_sets_for_some_operators_wait_for_them():
    found = [TensorForm.of(torch.ones(9, 9), torch.ones(9, 9))]
    fitting = {name: [one.name for one in INPUT_SETS if one.operators and one.fits(found, name)] for name in ("", " relu")}
    assert fitting == {"": [], " relu": ["far", "near"]}
    assert BY_NAME["ordered"].fits(found, " max_pool2d")
    assert not BY_NAME["ordered"].fits(found, " clamp_min maximum _softmax")
    assert BY_NAME["vast"].fits(found, " sin")
    assert not BY_NAME["vast"].fits(found, " sinh")
    lengths = [form(FORMS[Invariant.LEAST_INTEGER])]
    assert BY_NAME["not-least-integer"].fits(lengths, " add lt")
    assert not BY_NAME["not-least-integer"].fits(lengths, " add embedding")


def test_rows_of_integers_are_ordered_and_a_mask_keeps_its_zeros():
    x = torch.randint(0, 50, (64, 256), generator=generator(1))
    (varied,) = apply("ordered", x)
    assert torch.equal(varied.amin(1), varied.amin(1).clamp_min(0))
    assert set(varied.unique().tolist()) <= set(x.unique().tolist())
    assert not torch.equal(varied, x)
    mask = torch.randint(0, 2, (64, 256), generator=generator(1))
    assert torch.equal(apply("ordered", mask)[0], mask)


def test_one_element_in_sixteen_is_missing_where_a_reference_looks_for_such():
    (varied,) = apply("missing", normal(64, 256))
    assert 0.04 < float(varied.isnan().float().mean()) < 0.09
    forms = [TensorForm.of(normal(64, 256), normal(64, 256))]
    assert BY_NAME["missing"].fits(forms, " nansum")
    assert not BY_NAME["missing"].fits(forms, " sum add")


def test_weights_are_pruned_and_a_slope_becomes_large():
    by_name = {one.name: one for one in WEIGHT_SETS}
    pruned = by_name["weights-sixteenth"].vary(normal(64, 64), generator())
    assert (pruned == 0).all(1).any()
    assert 0.05 < float((pruned == 0).float().mean()) < 0.25
    slope = by_name["weights-16-times"].vary(torch.tensor([0.01]), generator())
    torch.testing.assert_close(slope, torch.tensor([4.0]))
