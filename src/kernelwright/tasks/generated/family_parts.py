"""Lists the parts of generated tasks: sources, pointwise parts and tails, each with its wasteful spelling and others.

None of the spellings is trusted to be right: the judge decides. See `families.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Part:
    """A step of a task: statements that read and write `y`, the rows of a matrix."""

    name: str
    about: str
    """In words; goes into the task's docstring."""
    lines: tuple[str, ...]
    """The spelling in the task."""
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Other spellings, by technique, the best first; the later ones are right too and gain little or nothing."""
    triton: tuple[str, ...] | None = None
    """The same on a block `y` of one row (with its `mask`) in Triton; None where it cannot be said that way."""
    arguments: tuple[str, ...] = ()
    """Inputs of the task that it reads, which no other part of the task has."""
    inputs: tuple[str, ...] = ()
    """Expressions that draw them."""
    modules: tuple[str, ...] = ()
    """Statements of the constructor, which has `width` and `out`."""


@dataclass(frozen=True, slots=True)
class Source(Part):
    """The first step: makes `y` from the inputs."""

    arguments: tuple[str, ...] = ("x",)
    inputs: tuple[str, ...] = ("torch.randn(ROWS, OUT)",)
    kind: str = "elementwise"
    """Class of task, as in the built-in suite."""


SOURCES = (
    Source("input", "the input", ("y = x",)),
    Source(
        "linear",
        "a linear layer",
        ("y = self.linear(x)",),
        {
            "functional": ("y = F.linear(x, self.linear.weight, self.linear.bias)",),
            "product-and-bias": ("y = x @ self.linear.weight.t() + self.linear.bias",),
        },
        inputs=("torch.randn(ROWS, WIDTH)",),
        modules=("self.linear = nn.Linear(width, out)",),
        kind="gemm+pointwise",
    ),
    Source(
        "joined-linear",
        "two linear layers of one input, joined",
        ("y = torch.cat([self.left(x), self.right(x)], dim=1)",),
        {
            "one-product": (
                "weight = torch.cat([self.left.weight, self.right.weight])",
                "bias = torch.cat([self.left.bias, self.right.bias])",
                "y = F.linear(x, weight, bias)",
            )
        },
        inputs=("torch.randn(ROWS, WIDTH)",),
        modules=("self.left = nn.Linear(width, out // 2)", "self.right = nn.Linear(width, out // 2)"),
        kind="gemm+pointwise",
    ),
    Source(
        "linear-of-rows",
        "a linear layer applied row group by row group",
        ("y = torch.cat([self.linear(part) for part in x.split(ROWS // 16)])",),
        {
            "whole-batch": ("y = self.linear(x)",),
            "fewer-groups": ("y = torch.cat([self.linear(part) for part in x.split(ROWS // 4)])",),
        },
        inputs=("torch.randn(ROWS, WIDTH)",),
        modules=("self.linear = nn.Linear(width, out)",),
        kind="gemm+pointwise",
    ),
    Source(
        "diagonal-left",
        "a diagonal matrix times a matrix",
        ("y = torch.diag(a) @ b",),
        {"broadcast": ("y = a[:, None] * b",), "broadcast-unsqueeze": ("y = a.unsqueeze(1) * b",)},
        arguments=("a", "b"),
        inputs=("torch.randn(ROWS // 4)", "torch.randn(ROWS // 4, OUT)"),
        kind="gemm",
    ),
    Source(
        "diagonal-right",
        "a matrix times a diagonal matrix",
        ("y = b @ torch.diag(a)",),
        {"broadcast": ("y = b * a",), "broadcast-unsqueeze": ("y = a.unsqueeze(0) * b",)},
        arguments=("a", "b"),
        inputs=("torch.randn(OUT)", "torch.randn(ROWS, OUT)"),
        kind="gemm",
    ),
    Source(
        "product-chain",
        "three matrices multiplied in the costly order",
        ("y = (a @ b) @ c",),
        {"cheap-order": ("y = a @ (b @ c)",), "named": ("left = torch.matmul(a, b)", "y = torch.matmul(left, c)")},
        arguments=("a", "b", "c"),
        inputs=("torch.randn(ROWS, WIDTH) / WIDTH", "torch.randn(WIDTH, 2 * WIDTH)", "torch.randn(2 * WIDTH, 64)"),
        kind="gemm",
    ),
    Source(
        "one-hot",
        "rows of a table picked by a product with one-hot rows",
        ("y = F.one_hot(index, WIDTH).to(table.dtype) @ table",),
        {
            "index": ("y = table[index]",),
            "index-select": ("y = torch.index_select(table, 0, index)",),
            "embedding": ("y = F.embedding(index, table)",),
        },
        arguments=("index", "table"),
        inputs=("torch.randint(0, WIDTH, (ROWS,))", "torch.randn(WIDTH, OUT)"),
        kind="gemm",
    ),
    Source(
        "repeated-mean",
        "the mean of eight copies",
        ("y = x.unsqueeze(1).repeat(1, 8, 1).mean(dim=1)",),
        {"copy": ("y = x.clone()",), "expand": ("y = x.unsqueeze(1).expand(-1, 8, -1).mean(dim=1)",)},
        kind="reduction",
    ),
    Source(
        "heads-in-loop",
        "eight heads multiplied one by one and joined",
        ("y = torch.cat([part @ self.heads[i] for i, part in enumerate(x.chunk(8, dim=1))], dim=1)",),
        {
            "batched": (
                "y = torch.bmm(x.view(-1, 8, WIDTH // 8).transpose(0, 1), self.heads).transpose(0, 1).reshape(-1, OUT)",
            ),
            "einsum": ("y = torch.einsum('rhi,hio->rho', x.view(-1, 8, WIDTH // 8), self.heads).reshape(-1, OUT)",),
        },
        inputs=("torch.randn(ROWS, WIDTH)",),
        modules=("self.heads = nn.Parameter(torch.randn(8, width // 8, out // 8) / width**0.5)",),
        kind="gemm+pointwise",
    ),
    Source(
        "columns-reversed",
        "columns stacked one by one in reverse",
        ("y = torch.stack([x[:, -1 - i] for i in range(OUT)], dim=1)",),
        {
            "flip": ("y = torch.flip(x, dims=[1])",),
            "index": ("y = x[:, torch.arange(OUT - 1, -1, -1, device=x.device)]",),
            "two-halves": (
                "y = torch.stack([x[:, -1 - i] for i in range(OUT // 2)], dim=1)",
                "y = torch.cat([y, torch.flip(x[:, : OUT // 2], dims=[1])], dim=1)",
            ),
        },
        kind="elementwise",
    ),
    Source(
        "masked-product",
        "a product masked by a matrix of ones and zeros",
        ("y = (a @ b) * torch.tril(torch.ones(WIDTH, WIDTH, device=a.device, dtype=a.dtype))",),
        {"tril": ("y = torch.tril(a @ b)",), "masked-by-tril": ("y = (a @ b) * torch.tril(torch.ones_like(a))",)},
        arguments=("a", "b"),
        inputs=("torch.randn(WIDTH, WIDTH) / WIDTH", "torch.randn(WIDTH, WIDTH)"),
        kind="gemm",
    ),
    Source(
        "shared-products",
        "two products that share an operand, added",
        ("y = x @ self.first + x @ self.second",),
        {
            "add-weights": ("y = x @ (self.first + self.second)",),
            "in-place": ("y = x @ self.first", "y += x @ self.second"),
        },
        inputs=("torch.randn(ROWS, WIDTH)",),
        modules=(
            "self.first = nn.Parameter(torch.randn(width, out) / width**0.5)",
            "self.second = nn.Parameter(torch.randn(width, out) / width**0.5)",
        ),
        kind="gemm+pointwise",
    ),
)

POINTWISE = (
    Part("plain", "as it is", (), triton=()),
    Part(
        "gelu-formula",
        "GELU by its tanh formula",
        ("y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.pow(y, 3.0))))",),
        {
            "gelu": ("y = F.gelu(y, approximate='tanh')",),
            "cube-by-products": ("y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * y * y * y)))",),
            "factored": ("u = 0.7978845608 * y * (1.0 + 0.044715 * torch.square(y))", "y = 0.5 * y * (torch.tanh(u) + 1.0)"),
        },
        ("u = 0.7978845608 * (y + 0.044715 * y * y * y)", "y = y * tl.sigmoid(2.0 * u)"),
    ),
    Part(
        "mish",
        "Mish spelt out",
        ("y = y * torch.tanh(F.softplus(y))",),
        {"mish": ("y = F.mish(y)",), "product-last": ("gate = torch.tanh(F.softplus(y))", "y = gate.mul(y)")},
    ),
    Part(
        "silu",
        "SiLU spelt out",
        ("y = y / (1.0 + torch.exp(-y))",),
        {
            "silu": ("y = F.silu(y)",),
            "sigmoid": ("y = y * torch.sigmoid(y)",),
            "reciprocal": ("y = y * torch.reciprocal(1.0 + torch.exp(-y))",),
        },
        ("y = y * tl.sigmoid(y)",),
    ),
    Part(
        "hard-swish",
        "hard swish spelt out",
        ("y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0",),
        {
            "hardswish": ("y = F.hardswish(y)",),
            "relu6": ("y = y * F.relu6(y + 3.0) / 6.0",),
            "hardsigmoid": ("y = y * F.hardsigmoid(y)",),
        },
        ("y = y * tl.minimum(tl.maximum(y + 3.0, 0.0), 6.0) / 6.0",),
    ),
    Part(
        "softsign",
        "softsign spelt out",
        ("y = y / (1.0 + torch.abs(y))",),
        {"softsign": ("y = F.softsign(y)",), "reciprocal": ("y = y * torch.reciprocal(torch.abs(y) + 1.0)",)},
        ("y = y / (1.0 + tl.abs(y))",),
    ),
    Part(
        "no-ops",
        "a chain of operators that change nothing, and ReLU twice",
        ("y = y * 1.0", "y = torch.relu(y + 0.0)", "y = torch.relu(y.clone())"),
        {
            "relu": ("y = torch.relu(y)",),
            "fewer-no-ops": ("y = torch.relu(y * 1.0)", "y = y.clone()"),
            "relu-once": ("y = torch.relu(y * 1.0 + 0.0)",),
        },
        ("y = tl.maximum(y, 0.0)",),
    ),
    Part(
        "clamps",
        "clamped, scaled, clamped, scaled back",
        ("y = torch.clamp(y, min=-1.5, max=1.5) * 2.0", "y = torch.clamp(y, min=-8.0, max=8.0) / 2.0"),
        {
            "one-clamp": ("y = torch.clamp(y, min=-1.5, max=1.5)",),
            "scaled-back": ("y = torch.clamp(y, min=-1.5, max=1.5) * 2.0", "y = y * 0.5"),
            "scaled-first": ("y = torch.clamp(y * 2.0, min=-3.0, max=3.0) / 2.0",),
        },
        ("y = tl.minimum(tl.maximum(y, -1.5), 1.5)",),
    ),
    Part(
        "affine-chain",
        "four scalings and shifts",
        ("y = (y * 0.5 - 1.0) * 4.0 + 2.0",),
        {
            "one-affine": ("y = y * 2.0 - 2.0",),
            "two-shifts": ("y = y * 2.0 - 4.0", "y = y + 2.0"),
            "shift-first": ("y = (y - 2.0) * 2.0 + 2.0",),
        },
        ("y = y * 2.0 - 2.0",),
    ),
    Part(
        "common-terms",
        "gates that are computed twice",
        ("y = torch.sigmoid(y) * torch.tanh(y) + 2.0 * torch.sigmoid(y)",),
        {
            "shared": ("y = torch.sigmoid(y) * (torch.tanh(y) + 2.0)",),
            "named": ("gate = torch.sigmoid(y)", "y = gate * torch.tanh(y) + 2.0 * gate"),
        },
        ("y = tl.sigmoid(y) * (2.0 * tl.sigmoid(2.0 * y) + 1.0)",),
    ),
    Part(
        "dead-scores",
        "row scores that nobody reads",
        ("scores = torch.softmax(y @ y.t(), dim=-1)", "y = torch.relu(y)"),
        {"drop-dead": ("y = torch.relu(y)",), "without-softmax": ("scores = y @ y.t()", "y = torch.relu(y)")},
        ("y = tl.maximum(y, 0.0)",),
    ),
    Part(
        "transposed-relu",
        "ReLU on a transposed copy, transposed back",
        ("y = torch.relu(y.t().contiguous()).t().contiguous()",),
        {"relu": ("y = torch.relu(y)",), "one-copy": ("y = torch.relu(y).t().contiguous().t().contiguous()",)},
        ("y = tl.maximum(y, 0.0)",),
    ),
    Part(
        "leaky-where",
        "leaky ReLU by selection",
        ("y = torch.where(y > 0, y, 0.01 * y)",),
        {"leaky-relu": ("y = F.leaky_relu(y, 0.01)",), "maximum": ("y = torch.maximum(y, 0.01 * y)",)},
        ("y = tl.where(y > 0, y, 0.01 * y)",),
    ),
    Part(
        "groups-in-loop",
        "ReLU and square, column group by column group",
        ("y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(8, dim=1)], dim=1)",),
        {
            "whole": ("y = torch.relu(y)", "y = y * y"),
            "fewer-groups": ("y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(2, dim=1)], dim=1)",),
        },
        ("y = tl.maximum(y, 0.0)", "y = y * y"),
    ),
)

_MAXIMUM = "m = torch.max(y, dim=1, keepdim=True)[0]"
TAILS = (
    Part("as-is", "returned as it is", ()),
    Part(
        "row-sum",
        "summed over each row",
        ("y = torch.sum(y, dim=1, keepdim=True)",),
        triton=("y = tl.sum(tl.where(mask, y, 0.0))",),
    ),
    Part(
        "scanned-sum",
        "summed by way of a running sum",
        ("y = torch.cumsum(y, dim=1)[:, -1:].clone()",),
        {
            "sum": ("y = torch.sum(y, dim=1, keepdim=True)",),
            "last-of-scan": ("y = torch.cumsum(y, dim=1)[:, -1].unsqueeze(1).clone()",),
        },
        ("y = tl.sum(tl.where(mask, y, 0.0))",),
    ),
    Part(
        "softmax",
        "softmax spelt out",
        (_MAXIMUM, "e = torch.exp(y - m)", "y = e / torch.sum(e, dim=1, keepdim=True)"),
        {
            "softmax": ("y = torch.softmax(y, dim=1)",),
            "through-logarithm": ("y = torch.exp(torch.log_softmax(y, dim=1))",),
            "amax": ("e = torch.exp(y - torch.amax(y, dim=1, keepdim=True))", "y = e / e.sum(dim=1, keepdim=True)"),
        },
        ("y = tl.where(mask, y, -float('inf'))", "y = tl.exp(y - tl.max(y))", "y = y / tl.sum(y)"),
    ),
    Part(
        "log-sum-exp",
        "logarithm of the sum of exponentials spelt out",
        (
            _MAXIMUM,
            "y = torch.log(torch.sum(torch.exp(y - m), dim=1, keepdim=True)) + m",
        ),
        {
            "logsumexp": ("y = torch.logsumexp(y, dim=1, keepdim=True)",),
            "amax": (
                "m = torch.amax(y, dim=1, keepdim=True)",
                "y = torch.log(torch.sum(torch.exp(y - m), dim=1, keepdim=True)) + m",
            ),
        },
        ("y = tl.where(mask, y, -float('inf'))", "m = tl.max(y)", "y = tl.log(tl.sum(tl.exp(y - m))) + m"),
    ),
    Part(
        "rms-norm",
        "divided by its root mean square",
        ("y = y / torch.sqrt(torch.mean(torch.pow(y, 2), dim=1, keepdim=True) + 1e-5)",),
        {
            "rms-norm": ("y = F.rms_norm(y, y.shape[1:], eps=1e-5)",),
            "rsqrt": ("y = y * torch.rsqrt((y * y).mean(dim=1, keepdim=True) + 1e-5)",),
            "square": ("y = y / torch.sqrt(torch.mean(torch.square(y), dim=1, keepdim=True) + 1e-5)",),
        },
        ("y = y / tl.sqrt(tl.sum(tl.where(mask, y * y, 0.0)) / columns + 1e-5)",),
    ),
    Part(
        "layer-norm",
        "layer normalisation spelt out",
        ("y = y - torch.mean(y, dim=1, keepdim=True)", "y = y / torch.sqrt(torch.mean(y * y, dim=1, keepdim=True) + 1e-5)"),
        {
            "layer-norm": ("y = F.layer_norm(y, y.shape[1:], eps=1e-5)",),
            "var": (
                "v = torch.var(y, dim=1, correction=0, keepdim=True)",
                "y = (y - y.mean(dim=1, keepdim=True)) / torch.sqrt(v + 1e-5)",
            ),
        },
        (
            "y = tl.where(mask, y - tl.sum(tl.where(mask, y, 0.0)) / columns, 0.0)",
            "y = y / tl.sqrt(tl.sum(y * y) / columns + 1e-5)",
        ),
    ),
    Part(
        "unit-length",
        "scaled to unit length",
        ("y = y / torch.clamp(torch.sqrt(torch.sum(y * y, dim=1, keepdim=True)), min=1e-12)",),
        {
            "normalize": ("y = F.normalize(y, dim=1)",),
            "norm": ("y = y / torch.linalg.vector_norm(y, dim=1, keepdim=True).clamp(min=1e-12)",),
            "square": ("y = y / torch.clamp(torch.sqrt(torch.sum(torch.square(y), dim=1, keepdim=True)), min=1e-12)",),
        },
        ("y = y / tl.maximum(tl.sqrt(tl.sum(tl.where(mask, y * y, 0.0))), 1e-12)",),
    ),
    Part(
        "variance",
        "variance of each row spelt out",
        ("m = torch.mean(y, dim=1, keepdim=True)", "y = torch.mean(torch.pow(y - m, 2), dim=1)"),
        {
            "var": ("y = torch.var(y, dim=1, correction=0)",),
            "square": ("y = y - torch.mean(y, dim=1, keepdim=True)", "y = torch.mean(y * y, dim=1)"),
        },
    ),
    Part(
        "max-with-index",
        "largest of each row, found with its index",
        ("y = torch.max(y, dim=1, keepdim=True)[0]",),
        {
            "amax": ("y = torch.amax(y, dim=1, keepdim=True)",),
            "max-of-values": ("y = torch.max(y, dim=1)[0].unsqueeze(1)",),
        },
        ("y = tl.max(tl.where(mask, y, -float('inf')))",),
    ),
    Part(
        "sorted-max",
        "largest of each row, found by sorting",
        ("y = torch.sort(y, dim=1)[0][:, -1:].clone()",),
        {"amax": ("y = torch.amax(y, dim=1, keepdim=True)",), "max": ("y = torch.max(y, dim=1, keepdim=True)[0]",)},
        ("y = tl.max(tl.where(mask, y, -float('inf')))",),
    ),
    Part(
        "sorted-four",
        "sum of the four largest of each row, found by sorting",
        ("y = torch.sort(y, dim=1, descending=True)[0][:, :4].sum(dim=1)",),
        {
            "topk": ("y = torch.topk(y, 4, dim=1)[0].sum(dim=1)",),
            "ascending": ("y = torch.sort(y, dim=1)[0][:, -4:].sum(dim=1)",),
        },
    ),
    Part(
        "first-rows",
        "of which the first rows are returned",
        ("y = y[:16].clone()",),
    ),
)
