"""The template of attention: its numbers under Triton's interpreter, what it compiles to, and which calls it takes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from kernelwright.gpu.compilers import CompiledKernel, compile_triton
from kernelwright.judge.check.guard import static_labels
from kernelwright.records import Label, Task
from kernelwright.records.knobs import knobs_of
from kernelwright.records.policy import Context
from kernelwright.rewrites import emit, templates
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.order import Order
from kernelwright.rewrites.passes import AttentionPass, FusionPass, RulesPass, stored_recipe
from kernelwright.rewrites.recipes import Recipe, TaskContext
from kernelwright.rewrites.rules import RULES
from kernelwright.rewrites.templates import attention, base
from kernelwright.rewrites.templates.attention import ATTENTION, Attention, AttentionKnobs
from kernelwright.rewrites.tracing import trace
from tests.quick import exhaustive_but
from tests.rewrites.samples import compare, interpreted, interpreted_answer, module_at, task_text
from tests.rewrites.test_products import written

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
INTERPRET = """
import importlib.util, json, sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

modules = []
for path in sys.argv[1:3]:
    spec = importlib.util.spec_from_file_location("emitted", path)
    modules.append(importlib.util.module_from_spec(spec))
    spec.loader.exec_module(modules[-1])
inf, nan = float("inf"), float("nan")

def mask_of(name, batch, heads, queries, keys):
    if name == "causal":
        return torch.ones(keys, keys, dtype=torch.bool).tril()[-queries:]
    if name == "window":
        far = torch.arange(queries)[:, None] - torch.arange(keys)
        return (far >= 0) & (far < 20)
    if name == "random":
        return torch.rand(batch, heads, queries, keys) > 0.5
    if name == "padding":
        return (torch.arange(keys) < torch.tensor([keys // 2, keys])[:, None])[:, None, None]
    if name == "added":
        return torch.randn(1, heads, queries, keys)
    if name == "nothing":
        hidden = torch.ones(queries, keys, dtype=torch.bool)
        hidden[3], hidden[16:32] = False, False
        return hidden
    # Float's least number, which a factor would make infinite, hides all keys alike.
    return torch.full((queries, keys), torch.finfo(torch.float32).min) if name == "least" else None

def made(
    sizes, knobs, dtype="float32", mask=None, causal=False, inside=False, scale=None, special=False, strided=False, far=False
):
    torch.manual_seed(0)
    batch, heads, queries, keys, width, width_v = sizes
    several = () if heads == 0 else (heads,)
    shapes = ((queries, width), (keys, width), (keys, width_v))
    q, k, v = (torch.randn(batch, *several, *shape).to(getattr(torch, dtype)) for shape in shapes)
    if inside:
        q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (q, k, v))
    if strided:
        q, k, v = (torch.stack([one.mT, one.mT], -1)[..., 0].mT for one in (q, k, v))
    shown = mask_of(mask, batch, heads, queries, keys)
    if special:
        q[..., 3, 5], q[..., 4, 6], k[..., 2, 1], v[..., 0, 7], v[..., 33, 2] = inf, nan, -inf, nan, inf
    found = modules[far].launch_attention(q, k, v, shown, scale, causal, inside, knobs)
    assert found.shape == (*q.shape[:-1], width_v) and found.dtype == q.dtype
    assert (found.transpose(1, 2) if inside else found).is_contiguous()
    wide = shown.double() if mask in ("added", "least") else shown
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, is_causal=causal, scale=scale)
        own = F.scaled_dot_product_attention(q, k, v, shown, is_causal=causal, scale=scale).double()
    if mask == "nothing":
        assert not exact[..., 3, :].any() and torch.equal(found[..., 3, :], torch.zeros_like(found[..., 3, :]))
    if special:
        finite = exact.isfinite()
        assert finite.any() and not finite.all()
        same = torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())
        return (0.0 if same and torch.allclose(found[finite].double(), exact[finite], atol=1e-5) else inf), 0.0
    return tuple(((one.double() - exact).norm() / exact.norm()).item() for one in (found, own))

print(json.dumps([made(*case, **others) for *case, others in json.loads(sys.argv[3])]))
"""
TILE = {"block_m": 32, "block_n": 16, "num_warps": 4, "num_stages": 2, "precision": "tf32x3"}
HALF = TILE | {"precision": "ieee"}
CASES: dict[str, tuple[object, ...]] = {
    "whole tiles": ((1, 2, 64, 64, 32, 32), TILE, {}),
    "odd lengths": ((2, 3, 40, 21, 32, 32), TILE, {}),
    "a large scale": ((1, 2, 50, 37, 32, 32), TILE, {"scale": 1.5}),
    "odd heads": ((1, 2, 40, 40, 24, 20), TILE, {}),
    "values wider than keys": ((1, 2, 40, 40, 16, 64), TILE, {}),
    "heads in two parts": ((1, 2, 40, 40, 96, 80), TILE, {}),
    "the widest of float32": ((1, 1, 40, 40, 128, 128), TILE, {}),
    "three dimensions": ((3, 0, 33, 20, 32, 32), TILE, {}),
    "three dimensions and a mask": ((2, 0, 40, 40, 32, 32), TILE, {"mask": "causal"}),
    "strides": ((2, 3, 33, 20, 32, 32), TILE, {"strided": True}),
    "heads side by side": ((2, 3, 33, 20, 32, 32), TILE, {"inside": True}),
    "causal": ((2, 2, 40, 40, 32, 32), TILE, {"causal": True}),
    "causal, more keys": ((1, 2, 40, 70, 32, 32), TILE, {"causal": True}),
    "causal, more queries": ((1, 2, 70, 40, 32, 32), TILE, {"causal": True}),
    "a causal mask": ((2, 2, 40, 40, 32, 32), TILE, {"mask": "causal"}),
    "a window": ((1, 1, 96, 96, 32, 32), TILE, {"mask": "window"}),
    "a mask of its own for each head": ((2, 2, 33, 20, 32, 32), TILE, {"mask": "random"}),
    "padding": ((2, 2, 33, 20, 32, 32), TILE, {"mask": "padding"}),
    "an added mask": ((2, 2, 33, 20, 32, 32), TILE, {"mask": "added", "scale": 0.3}),
    "an added mask of least numbers": ((1, 2, 40, 40, 32, 32), TILE, {"mask": "least"}),
    "queries that see nothing": ((1, 2, 40, 40, 32, 32), TILE, {"mask": "nothing"}),
    "indices of 64 bits": ((2, 2, 33, 20, 96, 32), TILE, {"mask": "padding", "far": True, "strided": True}),
    "indices of 64 bits, causal": ((2, 2, 40, 40, 32, 96), TILE, {"causal": True, "far": True}),
    "Inf and NaN": ((1, 2, 50, 40, 32, 32), TILE, {"special": True}),
    "float16": ((2, 2, 50, 40, 32, 32), HALF, {"dtype": "float16"}),
    "float16, causal": ((2, 2, 40, 40, 96, 32), HALF, {"dtype": "float16", "causal": True}),
    "float16, a causal mask": ((2, 2, 40, 40, 32, 32), HALF, {"dtype": "float16", "mask": "causal"}),
}
"""Batch, heads (0 for three dimensions), queries, keys and widths. Most have a tile of queries, one of keys, and a part
of another: the interpreter takes a hundredth of a second for a pair of tiles. It multiplies bfloat16's bits as integers, so
that none of these cases has it."""


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emitted") / "attention.py"
    path.write_text(ATTENTION.module(AttentionKnobs()))
    return path


MORE = (
    "whole tiles",
    "a large scale",
    "odd heads",
    "the widest of float32",
    "three dimensions",
    "strides",
    "causal, more queries",
    "a causal mask",
    "a mask of its own for each head",
    "indices of 64 bits, causal",
    "float16",
    "float16, a causal mask",
)
"""Cases for the exhaustive test: what they have stands in others too, one at a time or together."""


def errors(emitted: Path, cases: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Errors of these cases, and of PyTorch's own attention in their type.

    By one process: Triton interprets where it is told to at import.
    """
    far = emitted.with_name("far.py")
    far.write_text(emitted.read_text().replace("wide = any(", "wide = bool("))
    found = interpreted_answer(INTERPRET, str(emitted), str(far), json.dumps([CASES[name] for name in cases]))
    return dict(zip(cases, found, strict=True))


@needs_triton
@pytest.mark.parametrize("more", exhaustive_but([False, True], False))
def test_the_error_is_that_of_the_operands_type(more, emitted):
    # How float32 rounds depends on the processor: its own attention has 1e-7 to 4e-7 on these, float16's 2e-4.
    found = errors(emitted, [name for name in CASES if (name in MORE) == more])
    limits = {case: 4e-4 if case.startswith("float16") else max(3e-7, own) for case, (_, own) in found.items()}
    assert {case: error for case, (error, _) in found.items() if error >= limits[case]} == {}


@needs_triton
def test_values_beyond_the_diagonals_tile_are_not_read(emitted, tmp_path):
    script = """
    import importlib.util, sys, torch
    spec = importlib.util.spec_from_file_location("emitted", sys.argv[2])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    q, k, v = (torch.randn(1, 1, 96, 16) for _ in range(3))
    v[:, :, 64:] = float("nan")
    knobs = {"block_m": 32, "block_n": 16, "num_warps": 4, "num_stages": 2, "precision": "tf32x3"}
    for mask, causal in ((None, True), (torch.ones(96, 96, dtype=torch.bool).tril(), False)):
        found = module.launch_attention(q, k, v, mask, None, causal, False, knobs)
        assert found[:, :, :64].isfinite().all() and found[:, :, 64:].isnan().all()
    """
    interpreted(script, "", "", tmp_path, str(emitted))


TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel's text."""

    spilled_bytes: int
    shared_bytes: int
    tensor_cores: str

    @staticmethod
    def of(kernel: CompiledKernel) -> Resources:
        import triton

        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.ptx"
            path.write_text(kernel.ptx)
            command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
            told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", told)))
        units = next((name for name in ("wgmma", "mma.sync") if name in kernel.ptx), "-")
        return Resources(spilled, kernel.shared_bytes, units)


def built(path: Path, sizes: Attention, knobs: AttentionKnobs, *, causal: bool, mask: str) -> tuple[Resources, str]:
    """What a kernel takes on Hopper, and its PTX."""
    module = module_at(path)
    kind, split = TYPES[sizes.dtype], sizes.dtype == "float32"
    (first, rest), (first_v, rest_v) = (module.attention_parts(one, split) for one in (sizes.width, sizes.width_v))
    constants: dict[str, object] = {"BLOCK_M": knobs.block_m, "BLOCK_N": knobs.block_n, "WIDTH": sizes.width}
    constants |= {"FIRST": first, "REST": rest, "WIDTH_V": sizes.width_v, "FIRST_V": first_v, "REST_V": rest_v}
    constants |= {"CAUSAL": causal, "MASK": mask, "EVEN": sizes.keys % knobs.block_n == 0, "PRECISION": knobs.precision}
    constants |= {"WIDE": False} | dict.fromkeys(("width_q", "width_k", "width_v", "col_mask"), 1)
    signature = {name: "i32" for name in module.attend.arg_names if name not in constants}
    signature |= dict.fromkeys(("q", "k", "v", "mask", "out"), f"*{kind}") | dict.fromkeys(("scale", "factor"), "fp32")
    signature |= {"mask": "*i1"} if mask == "shows" else {}
    aligned = frozenset(signature) - {"heads", "queries", "keys", "scale", "factor"}
    kernel = compile_triton(
        module.attend,
        signature,
        constants,  # type: ignore[arg-type]
        90,
        knobs.num_warps,
        knobs.num_stages,
        aligned,
    )
    return Resources.of(kernel), kernel.ptx


MANY = Attention(heads=1024, queries=1024, keys=1024, width=96, width_v=96)
KERNELS = [
    (replace(MANY, dtype=dtype, width=width, width_v=width), causal)
    for dtype, width, causal in (
        ("float32", 96, True),
        ("float32", 64, False),
        ("float32", 128, True),
        ("float16", 64, False),
        ("bfloat16", 64, True),
        ("float16", 128, True),
    )
]


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(("sizes", "causal"), KERNELS)
def test_without_a_mask_no_choice_spills_on_hopper(sizes, causal, emitted, tmp_path, triton_cache):
    for knobs in ATTENTION.alternatives(sizes):
        taken, ptx = built(emitted, sizes, knobs, causal=causal, mask="none")
        assert (taken.spilled_bytes, taken.tensor_cores, "mma.sync" in ptx) == (0, "wgmma", False), knobs
        assert taken.shared_bytes <= base.SHARED_BYTES


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize("mask", ["shows", "added"])
def test_a_mask_spills_little(mask, emitted, tmp_path, triton_cache):
    taken, _ = built(emitted, MANY, ATTENTION.alternatives(MANY)[0], causal=False, mask=mask)
    # Triton 3.7.1 makes it 24 bytes of a thread, 3.6.0 makes it 88.
    assert taken.spilled_bytes <= 96


@needs_triton
@pytest.mark.parametrize("precision", exhaustive_but(["tf32x3", "bf16x6"], "tf32x3"))
def test_float32_has_all_products_of_its_pieces(precision, emitted, tmp_path, triton_cache):
    """The interpreter knows nothing of pieces, so that their products are counted."""
    knobs = AttentionKnobs(block_m=64, num_warps=4, precision=precision)
    sizes = replace(MANY, width=32, width_v=32)
    count = built(emitted, sizes, knobs, causal=False, mask="none")[1].count("wgmma.mma_async")
    once = built(emitted, sizes, replace(knobs, precision="tf32"), causal=False, mask="none")[1].count("wgmma.mma_async")
    # Six products of bfloat16, of which one instruction takes twice as much.
    assert count == 3 * once > 0


HEADS_OF = {
    "two parts": replace(MANY, width=96, width_v=96),
    "a short second part": replace(MANY, width=80, width_v=80),
    "one part": replace(MANY, width=48, width_v=48),
    "longer keys": replace(MANY, width=64, width_v=32),
    "short keys": replace(MANY, width=16, width_v=64),
}
DESCRIPTOR = re.compile(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d{12,});")


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(("heads", "most"), [("two parts", 1), *((heads, None) for heads in HEADS_OF)])
def test_float32_pieces_at_one_address_have_one_layout(heads, most, emitted, tmp_path, triton_cache):
    """From a kernel with two, ptxas 12.8 made descriptors of registers that nothing had written: an illegal access."""
    for knobs in ATTENTION.alternatives(HEADS_OF[heads])[:most]:
        _, ptx = built(emitted, HEADS_OF[heads], knobs, causal=False, mask="none")
        layouts: dict[str, set[int]] = {}
        for address, rest in DESCRIPTOR.findall(ptx):
            layouts.setdefault(address, set()).add(int(rest) >> 32)
        assert layouts, "descriptors of wgmma are found"
        assert {len(one) for one in layouts.values()} == {1}, knobs


@needs_triton
def test_rows_are_as_long_as_the_emitted_module_makes_them(emitted):
    parts = module_at(emitted).attention_parts
    for width in range(1, attention.WIDEST_SPLIT + 1):
        assert attention.row_lengths(width) == set(parts(width, True)) - {0}, width


@pytest.mark.parametrize(("width", "width_v", "split"), [(96, 96, 0), (64, 96, 0), (64, 32, 0), (64, 64, 3), (128, 40, 2)])
def test_pieces_of_bfloat16_are_offered_where_their_rows_are_equal(width, width_v, split):
    found = ATTENTION.alternatives(replace(MANY, width=width, width_v=width_v))
    assert sum(one.precision == "bf16x6" for one in found) == split
    assert sum(one.precision == "tf32x3" for one in found) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "types"),
        ({"queries": 1}, "queries"),
        ({"keys": 15}, "keys"),
        ({"width": 129}, "numbers"),
        ({"width_v": 160}, "numbers"),
        ({"heads": 2, "queries": 64}, "multiply-adds"),
        ({"dtype": "float16", "width": 256}, None),
        ({"dtype": "float16", "width": 257}, "numbers"),
        ({}, None),
    ],
)
def test_what_the_template_does_not_take_has_a_reason(changes, reason):
    found = ATTENTION.refusal(replace(MANY, **changes))
    assert (found is None) if reason is None else (reason in str(found))


def test_few_queries_are_spread_over_the_multiprocessors():
    assert ATTENTION.alternatives(MANY)[0].block_m == 128
    many = replace(MANY, width=128, width_v=128)
    for few in (replace(many, heads=32, queries=197), replace(many, queries=49)):
        first, *others = ATTENTION.alternatives(few)
        assert first.block_m == 64
        assert {first, *others} == set(ATTENTION.alternatives(many))
        assert len(others) == len(set(others)) >= 3


QKV = "torch.randn(2, 4, 32, 16), torch.randn(2, 4, 32, 16), torch.randn(2, 4, 32, 16)"
HEADS = "q, k, v = (self.f(a) for _ in range(3)); q, k, v = (x.view(2, 32, 4, 16).transpose(1, 2) for x in (q, k, v))"
MERGED = "torch.randn(2, 32, 64)"
LINEAR = "self.f = nn.Linear(64, 64)"
TAKEN = {
    "the operator": task_text("return F.scaled_dot_product_attention(a, b, c)", QKV),
    "causal": task_text("return F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=0.1)", QKV),
    "softmax of products": task_text("return torch.softmax(a @ b.mT / 4.0, -1) @ c", QKV),
    "bmm": task_text(
        "return torch.bmm(torch.softmax(torch.bmm(a, b.mT), -1), c)", "N(4, 32, 16), N(4, 40, 16), N(4, 40, 24)"
    ),
    "a mask that is state": task_text(
        "return torch.softmax((a @ b.mT).masked_fill(self.m == 0, -math.inf), -1) @ c",
        QKV,
        "self.register_buffer('m', torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))",
    ),
    "an added mask": task_text("return F.scaled_dot_product_attention(a, b, c, d)", f"{QKV}, N(32, 32)"),
    "heads that are merged again": task_text(
        f"{HEADS}\nreturn F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 32, 64)",
        MERGED,
        LINEAR,
    ),
    "float16": task_text("return F.scaled_dot_product_attention(a, b, c)", QKV.replace("16)", "16, dtype=torch.float16)")),
}
OTHERS = {
    "dropout": task_text("return F.scaled_dot_product_attention(a, b, c, dropout_p=0.5)", QKV),
    "float64": task_text("return F.scaled_dot_product_attention(a.double(), b.double(), c.double())", QKV),
    "keys of one head": task_text("return F.scaled_dot_product_attention(a, b[:, :1], c[:, :1])", QKV),
    "grouped heads": task_text("return F.scaled_dot_product_attention(a, b[:, :2], c[:, :2], enable_gqa=True)", QKV),
    "a negative scale": task_text("return F.scaled_dot_product_attention(a, b, c, scale=-1.0)", QKV),
    "two dimensions": task_text("return F.scaled_dot_product_attention(a[0, 0], b[0, 0], c[0, 0])", QKV),
    "no softmax": task_text("return torch.relu(a @ b.mT) @ c", QKV),
}


def context_of(text: str) -> TaskContext:
    return TaskContext.open(Task(id="sample", source=text), "cuda")


PRODUCTS = [template.technique for template in templates.PRODUCTS]
ALWAYS = frozenset(rule.name for rule in RULES if rule.always)
ALONE = Recipe((RulesPass.always(), AttentionPass()))
RECIPE = ALONE.plus(FusionPass(single=True))


@needs_triton
@pytest.mark.parametrize(
    "name", exhaustive_but(TAKEN, "the operator", "softmax of products", "a mask that is state", "an added mask", "float16")
)
def test_an_attention_is_replaced_by_one_that_is_equal(name, any_size, tmp_path):
    made = context_of(TAKEN[name]).build(ALONE)
    assert made is not None
    assert made.techniques[-1] == ATTENTION.technique
    assert stored_recipe(made.effect.stored).get(AttentionPass)
    before, class_new, forward = made.source.partition("class ModelNew")
    assert forward.count("tiled_attention_0(") == 1
    assert "softmax" not in forward
    # Without a GPU the emitted function calls PyTorch's, so this shows how it is called.
    tolerance = 2e-3 if name == "float16" else 1e-5
    source = before + class_new + forward.replace(".is_cuda", ".is_cpu")
    compare(TAKEN[name], source, tolerance, written(tmp_path))


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_left_alone(name, any_size):
    assert context_of(OTHERS[name]).build(RECIPE) is None


def test_dropout_leaves_evaluation_mode_its_kernel(any_size):
    drops = "F.scaled_dot_product_attention(a, b, c, dropout_p=0.5 if self.training else 0.0)"
    text = task_text(f"return F.scaled_dot_product_attention({drops}, b, c)", QKV)
    traced = trace(Task(id="sample", source=text))
    graphs = emit.copy_graph(traced.training), emit.copy_graph(traced.evaluation)
    assert templates.replace(ATTENTION, *graphs) == 3
    source = emit.module(text, traced, graphs, (ATTENTION.technique,))
    assert source.count("def tiled_attention_0(") == 1
    assert "tiled_attention_1" not in source, "equal calls share a function, in both modes"


@needs_triton
@pytest.mark.parametrize("name", exhaustive_but(TAKEN, "a mask that is state"))
def test_an_interpreted_candidate_equals_the_reference(name, any_size, tmp_path):
    made = context_of(TAKEN[name]).build(RECIPE)
    assert made is not None
    script = """
    import sys, torch
    from pathlib import Path
    from tests.rewrites.samples import module_at
    folder = Path(sys.argv[1])
    module = module_at(folder / "candidate.py")
    old = {}
    exec((folder / "reference.txt").read_text(), old)
    torch.manual_seed(0)
    wanted = old["Model"]()
    torch.manual_seed(0)
    model = module.ModelNew()
    inputs = old["get_inputs"]()
    # Neither the reference nor PyTorch's attention is to answer.
    module.Model.forward = module.F.scaled_dot_product_attention = None
    with torch.no_grad():
        found = model(*inputs)
    del module.F.scaled_dot_product_attention
    import torch.nn.functional as F, torch._C as C
    F.scaled_dot_product_attention = C._nn.scaled_dot_product_attention
    with torch.no_grad():
        exact = wanted.double()(*[one.double() for one in inputs])
    assert found.shape == exact.shape
    limit = 1e-3 if found.dtype == torch.float16 else 5e-7
    error = ((found.double() - exact).norm() / exact.norm()).item()
    assert error < limit, error
    """
    candidate = made.source.replace("attention_tensor_cores(q.device)", "True")
    interpreted(script, TAKEN[name], candidate, tmp_path)


BLOCK = task_text(
    """q, k, v = self.f(a).split(512, 2)
    q, k, v = (x.view(8, 512, 8, 64).transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax((q @ k.mT / 8.0).masked_fill(self.m[:512, :512] == 0, -math.inf), -1)
    return self.g((weights @ v).transpose(1, 2).reshape(8, 512, 512))""",
    "torch.randn(8, 512, 512)",
    "self.f, self.g = nn.Linear(512, 1536), nn.Linear(512, 512)\nself.register_buffer('m', torch.ones(1024, 1024).tril())",
)


def proposed(text: str, device: str = "cuda", count: int = 8, order: Order | None = None) -> list[tuple[str, ...]]:
    given = Context(task=Task(id="sample", source=text), device=device, history=(), seed=0)
    return [one.techniques for one in BuiltinPolicy(order).propose(given, count)]


@pytest.mark.exhaustive
def test_the_policy_proposes_it_alone_and_beside_split_products(nvcc):
    assert ATTENTION.technique in {name for one in proposed(BLOCK) for name in one}, "by the order in use"
    found = {frozenset(one) for one in proposed(BLOCK, count=100, order=Order({})) if ATTENTION.technique in one}
    for technique in (None, *PRODUCTS):
        for wrapper in (None, "cuda-graph"):
            wanted = {ATTENTION.technique, technique, wrapper} - {None}
            others = {*PRODUCTS, "cuda-graph"} - wanted
            assert any(wanted <= one and not others & one for one in found), wanted
    assert not any(name.startswith("compile") for one in found for name in one)
    assert not [one for one in proposed(BLOCK, device="cpu", count=100) if ATTENTION.technique in one]
    assert not [one for one in proposed(task_text("return torch.softmax(a, -1)", "N(64, 64)")) if ATTENTION.technique in one]


def test_a_candidate_says_what_it_is_and_declares_its_knobs():
    made = context_of(BLOCK).build(RECIPE)
    assert made is not None
    compile(made.source, "candidate", "exec")
    assert {Label.SPLIT_PRECISION, Label.CUSTOM_KERNEL} <= static_labels(made.source, BLOCK)
    assert Label.SUSPICIOUS_SOURCE not in static_labels(made.source, BLOCK)
    choices = ATTENTION.alternatives(replace(MANY, width=64, width_v=64))
    assert knobs_of(made.source)["KNOBS_TILED_ATTENTION_0.tile"] == tuple(map(asdict, choices))


def test_its_names_are_no_other_templates_and_no_tasks():
    text = ATTENTION.module(AttentionKnobs())
    assert not any(templates.clash(template, text) for template in templates.PRODUCTS)
    assert context_of(BLOCK + "\nclass attend:\n    pass\n").build(RECIPE) is None
