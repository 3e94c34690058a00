"""Lists the sources and tails that only tasks bound by the device have, each with its wasteful spelling and others.

Most waste is in the algebra: a product of which only a sum is wanted, layouts that cancel, matrices with structure. The
pointwise parts between them are those of `family_parts.py`. None of the spellings is trusted to be right: the judge
decides. See `device_bound.py`.
"""

from __future__ import annotations

from kernelwright.tasks.generated.family_parts import Part, Source

_SQUARE_WEIGHTS = ("torch.randn(ROWS, OUT)", "torch.randn(OUT, OUT) / OUT**0.5")
_SCORES = "s = q @ k.transpose(1, 2) * 0.125"
_HEADS = ("torch.randn(ROWS // WIDTH, WIDTH, 64)",) * 3

SOURCES = (
    Source(
        "transposed-twice",
        "the input, transposed and back",
        ("y = x.t().contiguous().t().contiguous()",),
        {"no-copies": ("y = x",), "one-copy": ("y = x.clone()",)},
    ),
    Source(
        "permuted-blocks",
        "groups of eight rows, permuted and back",
        ("y = x.view(-1, 8, OUT).permute(1, 0, 2).contiguous()", "y = y.permute(1, 0, 2).reshape(ROWS, OUT)"),
        {"no-copies": ("y = x",), "one-copy": ("y = x.clone()",)},
    ),
    Source(
        "interleaved",
        "even and odd columns, interleaved again",
        ("y = torch.stack([x[:, 0::2], x[:, 1::2]], dim=2).reshape(ROWS, OUT)",),
        {"no-copies": ("y = x",), "one-copy": ("y = x.clone()",)},
    ),
    Source(
        "joined-halves",
        "both halves of each row scaled and joined",
        ("y = torch.cat([x[:, : OUT // 2] * 2.0, x[:, OUT // 2 :] * 2.0], dim=1)",),
        {"whole": ("y = x * 2.0",), "scale-after": ("y = torch.cat([x[:, : OUT // 2], x[:, OUT // 2 :]], dim=1) * 2.0",)},
    ),
    Source(
        "outer-sum",
        "the sum of a repeated column and a repeated row",
        ("y = a.repeat(1, OUT) + b.repeat(ROWS, 1)",),
        {"broadcast": ("y = a + b",), "expand": ("y = a.expand(ROWS, OUT) + b.expand(ROWS, OUT)",)},
        arguments=("a", "b"),
        inputs=("torch.randn(ROWS, 1)", "torch.randn(1, OUT)"),
    ),
    Source(
        "low-rank",
        "the input times a matrix of rank 32",
        ("y = x @ (u @ v)",),
        {"cheap-order": ("y = (x @ u) @ v",), "named": ("weight = torch.matmul(u, v)", "y = torch.matmul(x, weight)")},
        arguments=("x", "u", "v"),
        inputs=("torch.randn(ROWS, WIDTH) / WIDTH**0.5", "torch.randn(WIDTH, 32)", "torch.randn(32, OUT)"),
        kind="gemm",
    ),
    Source(
        "kronecker",
        "the input times a Kronecker product",
        ("y = x @ torch.kron(a, b)",),
        {
            "two-small-products": ("y = (a.t() @ (x.view(-1, 32, OUT // 32) @ b)).reshape(-1, OUT)",),
            "einsum": ("y = torch.einsum('rij,ik,jl->rkl', x.view(-1, 32, OUT // 32), a, b).reshape(-1, OUT)",),
        },
        arguments=("x", "a", "b"),
        inputs=("torch.randn(ROWS, OUT)", "torch.randn(32, 32) / 6.0", "torch.randn(OUT // 32, OUT // 32) / 8.0"),
        kind="gemm",
    ),
    Source(
        "permutation-product",
        "columns put in order by a product with a permutation matrix",
        ("y = x @ torch.eye(OUT, device=x.device, dtype=x.dtype)[:, index]",),
        {"index": ("y = x[:, index]",), "index-select": ("y = torch.index_select(x, 1, index)",)},
        arguments=("x", "index"),
        inputs=("torch.randn(ROWS, OUT)", "torch.randperm(OUT)"),
        kind="gemm",
    ),
    Source(
        "gated-product",
        "a product gated by itself, computed twice",
        ("y = (x @ w) * torch.sigmoid(x @ w)",),
        {"silu": ("y = F.silu(x @ w)",), "shared": ("p = x @ w", "y = p * torch.sigmoid(p)")},
        arguments=("x", "w"),
        inputs=("torch.randn(ROWS, WIDTH)", "torch.randn(WIDTH, OUT) / WIDTH**0.5"),
        kind="gemm+pointwise",
    ),
    Source(
        "summed-products",
        "the sum of two products of one matrix",
        ("y = x @ w + x @ w.t()",),
        {"add-weights": ("y = x @ (w + w.t())",), "in-place": ("y = x @ w", "y += x @ w.t()")},
        arguments=("x", "w"),
        inputs=_SQUARE_WEIGHTS,
        kind="gemm",
    ),
    Source(
        "attention",
        "attention spelt out",
        (
            _SCORES,
            "e = torch.exp(s - s.amax(dim=-1, keepdim=True))",
            "p = e / e.sum(dim=-1, keepdim=True)",
            "y = (p @ v).reshape(ROWS, 64)",
        ),
        {
            "fused-attention": ("y = F.scaled_dot_product_attention(q, k, v).reshape(ROWS, 64)",),
            "softmax": (_SCORES, "y = (torch.softmax(s, dim=-1) @ v).reshape(ROWS, 64)"),
            "divide-after": (
                _SCORES,
                "e = torch.exp(s - s.amax(dim=-1, keepdim=True))",
                "y = ((e @ v) / e.sum(dim=-1, keepdim=True)).reshape(ROWS, 64)",
            ),
        },
        arguments=("q", "k", "v"),
        inputs=_HEADS,
        kind="attention",
    ),
    Source(
        "causal-attention",
        "attention to what came before, spelt out",
        (
            _SCORES,
            "later = torch.triu(torch.ones_like(s), diagonal=1) > 0",
            "p = torch.softmax(torch.where(later, torch.full_like(s, -float('inf')), s), dim=-1)",
            "y = (p @ v).reshape(ROWS, 64)",
        ),
        {
            "fused-attention": ("y = F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(ROWS, 64)",),
            "small-mask": (
                _SCORES,
                "later = torch.ones(WIDTH, WIDTH, dtype=torch.bool, device=q.device).triu(1)",
                "y = (torch.softmax(s.masked_fill(later, -float('inf')), dim=-1) @ v).reshape(ROWS, 64)",
            ),
        },
        arguments=("q", "k", "v"),
        inputs=_HEADS,
        kind="attention",
    ),
    Source(
        "linear-attention",
        "attention without softmax, scores first",
        ("y = ((q @ k.transpose(1, 2)) @ v).reshape(ROWS, 64)",),
        {
            "cheap-order": ("y = (q @ (k.transpose(1, 2) @ v)).reshape(ROWS, 64)",),
            "named": ("s = torch.bmm(q, k.transpose(1, 2))", "y = torch.bmm(s, v).reshape(ROWS, 64)"),
        },
        arguments=("q", "k", "v"),
        inputs=_HEADS,
        kind="attention",
    ),
)

_CENTRED = "d = y - torch.mean(y, dim=1, keepdim=True)"
_SHIFTED = "d = y - torch.max(y, dim=1, keepdim=True)[0]"
_WEIGHTS = "torch.randn(OUT, WIDTH) / OUT**0.5"
_OTHER = "torch.randn(ROWS, OUT)"

TAILS = (
    Part(
        "mean-of-product",
        "multiplied by a matrix and averaged over its columns",
        ("y = (y @ m).mean(dim=1, keepdim=True)",),
        {
            "reduce-before-product": ("y = y @ m.mean(dim=1, keepdim=True)",),
            "sum": ("y = (y @ m).sum(dim=1, keepdim=True) / WIDTH",),
        },
        arguments=("m",),
        inputs=(_WEIGHTS,),
    ),
    Part(
        "sum-of-linear",
        "a linear layer whose outputs are summed",
        ("y = self.head(y).sum(dim=1, keepdim=True)",),
        {
            "reduce-before-product": (
                "y = F.linear(y, self.head.weight.sum(dim=0, keepdim=True), self.head.bias.sum().view(1))",
            ),
            "bias-after": ("y = (y @ self.head.weight.t()).sum(dim=1, keepdim=True) + self.head.bias.sum()",),
        },
        modules=("self.head = nn.Linear(out, width)",),
    ),
    Part(
        "column-mean-of-product",
        "multiplied by a matrix and averaged over the rows",
        ("y = (y @ m).mean(dim=0)",),
        {"reduce-before-product": ("y = y.mean(dim=0) @ m",), "sum": ("y = (y @ m).sum(dim=0) / ROWS",)},
        arguments=("m",),
        inputs=(_WEIGHTS,),
    ),
    Part(
        "row-dots",
        "the diagonal of its product with another matrix",
        ("y = torch.diagonal(y @ t.t()).clone()",),
        {"row-sums": ("y = (y * t).sum(dim=1)",), "einsum": ("y = torch.einsum('rc,rc->r', y, t)",)},
        arguments=("t",),
        inputs=(_OTHER,),
    ),
    Part(
        "scan-by-product",
        "a running sum by a product with a triangular matrix",
        ("y = y @ torch.triu(torch.ones(OUT, OUT, device=y.device, dtype=y.dtype))",),
        {"cumsum": ("y = torch.cumsum(y, dim=1)",)},
    ),
    Part(
        "scan-differences",
        "differences of a running sum",
        ("c = torch.cumsum(y, dim=1)", "y = c[:, 1:] - c[:, :-1]"),
        {"slice": ("y = y[:, 1:].clone()",), "diff": ("y = torch.diff(torch.cumsum(y, dim=1), dim=1)",)},
    ),
    Part(
        "reversed-scan",
        "a running sum from the right by flipping twice",
        ("y = torch.flip(torch.cumsum(torch.flip(y, dims=[1]), dim=1), dims=[1])",),
        {
            "total-minus-scan": ("c = torch.cumsum(y, dim=1)", "y = y + (c[:, -1:] - c)"),
            "sum-minus-scan": ("y = y.sum(dim=1, keepdim=True) - torch.cumsum(y, dim=1) + y",),
        },
    ),
    Part(
        "shifted-softmax",
        "shifted by row and put through softmax spelt out",
        (
            "y = y + torch.mean(y, dim=1, keepdim=True)",
            _SHIFTED,
            "y = torch.exp(d)",
            "y = y / torch.sum(y, dim=1, keepdim=True)",
        ),
        {
            "softmax": ("y = torch.softmax(y, dim=1)",),
            "shift-kept": ("y = torch.softmax(y + y.mean(dim=1, keepdim=True), dim=1)",),
        },
        ("y = tl.where(mask, y, -float('inf'))", "y = tl.exp(y - tl.max(y))", "y = y / tl.sum(y)"),
    ),
    Part(
        "column-softmax",
        "softmax over the rows by way of a transposed copy",
        ("y = torch.softmax(y.t().contiguous(), dim=1).t().contiguous()",),
        {"softmax": ("y = torch.softmax(y, dim=0)",), "one-copy": ("y = torch.softmax(y.t(), dim=1).t().contiguous()",)},
    ),
    Part(
        "picked-log-softmax",
        "the negative logarithm of softmax at one column a row, spelt out",
        (
            _SHIFTED,
            "y = d - torch.log(torch.sum(torch.exp(d), dim=1, keepdim=True))",
            "y = -y[torch.arange(ROWS, device=y.device), picked]",
        ),
        {
            "cross-entropy": ("y = F.cross_entropy(y, picked, reduction='none')",),
            "logsumexp": ("y = torch.logsumexp(y, dim=1) - y.gather(1, picked[:, None])[:, 0]",),
            "log-softmax": ("y = -torch.log_softmax(y, dim=1).gather(1, picked[:, None])[:, 0]",),
        },
        arguments=("picked",),
        inputs=("torch.randint(0, OUT, (ROWS,))",),
    ),
    Part(
        "entropy",
        "entropy of softmax spelt out",
        (
            _SHIFTED,
            "e = torch.exp(d)",
            "p = e / torch.sum(e, dim=1, keepdim=True)",
            "y = -torch.sum(p * torch.log(p + 1e-20), dim=1, keepdim=True)",
        ),
        {
            "from-log-softmax": ("q = torch.log_softmax(y, dim=1)", "y = -(q.exp() * q).sum(dim=1, keepdim=True)"),
            "softmax": ("p = torch.softmax(y, dim=1)", "y = -torch.sum(p * torch.log(p + 1e-20), dim=1, keepdim=True)"),
        },
        (
            "y = tl.where(mask, y, -float('inf'))",
            "d = y - tl.max(y)",
            "e = tl.exp(d)",
            "s = tl.sum(e)",
            "y = tl.log(s) - tl.sum(tl.where(mask, e * d, 0.0)) / s",
        ),
    ),
    Part(
        "affine-norm",
        "layer normalisation with weights spelt out",
        (
            _CENTRED,
            "y = d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=1, keepdim=True) + 1e-5)",
            "y = y * self.scale + self.shift",
        ),
        {
            "layer-norm": ("y = F.layer_norm(y, y.shape[1:], self.scale, self.shift, eps=1e-5)",),
            "scale-after": ("y = F.layer_norm(y, y.shape[1:], eps=1e-5) * self.scale + self.shift",),
        },
        modules=("self.scale = nn.Parameter(torch.rand(out) + 0.5)", "self.shift = nn.Parameter(torch.randn(out))"),
    ),
    Part(
        "batch-norm",
        "normalised over the rows, spelt out",
        ("d = y - torch.mean(y, dim=0)", "y = d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=0) + 1e-5)"),
        {
            "batch-norm": ("y = F.batch_norm(y, None, None, training=True, eps=1e-5)",),
            "var": ("v, u = torch.var_mean(y, dim=0, correction=0)", "y = (y - u) * torch.rsqrt(v + 1e-5)"),
        },
    ),
    Part(
        "group-norm",
        "normalised over each of eight groups of columns, spelt out",
        (
            "g = y.view(ROWS, 8, OUT // 8)",
            "d = g - torch.mean(g, dim=2, keepdim=True)",
            "y = (d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=2, keepdim=True) + 1e-5)).view(ROWS, OUT)",
        ),
        {
            "layer-norm": ("y = F.layer_norm(y.view(ROWS, 8, OUT // 8), (OUT // 8,), eps=1e-5).view(ROWS, OUT)",),
            "group-norm": ("y = F.group_norm(y, 8, eps=1e-5)",),
        },
    ),
    Part(
        "gated-halves",
        "the left half gated by the right",
        ("left, right = y.chunk(2, dim=1)", "y = left / (1.0 + torch.exp(-right))"),
        {"glu": ("y = F.glu(y, dim=1)",), "sigmoid": ("left, right = y.chunk(2, dim=1)", "y = left * torch.sigmoid(right)")},
    ),
    Part(
        "repeated-sum",
        "repeated four times along each row and summed",
        ("y = y.repeat(1, 4).sum(dim=1, keepdim=True)",),
        {
            "scaled-sum": ("y = 4.0 * y.sum(dim=1, keepdim=True)",),
            "twice": ("y = 2.0 * y.repeat(1, 2).sum(dim=1, keepdim=True)",),
        },
        ("y = 4.0 * tl.sum(tl.where(mask, y, 0.0))",),
    ),
    Part(
        "joined-sum",
        "joined with its multiples and summed",
        ("y = torch.cat([y, y * 2.0, y * 3.0], dim=1).sum(dim=1, keepdim=True)",),
        {
            "scaled-sum": ("y = 6.0 * y.sum(dim=1, keepdim=True)",),
            "summed-apart": (
                "y = y.sum(1, keepdim=True) + (y * 2.0).sum(1, keepdim=True) + (y * 3.0).sum(1, keepdim=True)",
            ),
        },
        ("y = 6.0 * tl.sum(tl.where(mask, y, 0.0))",),
    ),
    Part(
        "weighted-sum",
        "each row's sum with weights that are repeated",
        ("y = (y * weights.repeat(ROWS, 1)).sum(dim=1)",),
        {"product": ("y = y @ weights.view(-1)",), "broadcast": ("y = (y * weights).sum(dim=1)",)},
        arguments=("weights",),
        inputs=("torch.randn(1, OUT)",),
    ),
    Part(
        "huber",
        "Huber's loss against a target, spelt out, averaged over each row",
        ("d = y - t", "a = torch.abs(d)", "y = torch.where(a < 1.0, 0.5 * d * d, a - 0.5).mean(dim=1)"),
        {
            "smooth-l1": ("y = F.smooth_l1_loss(y, t, reduction='none').mean(dim=1)",),
            "clamped": ("a = torch.abs(y - t)", "c = a.clamp(max=1.0)", "y = (c * (a - 0.5 * c)).mean(dim=1)"),
        },
        arguments=("t",),
        inputs=(_OTHER,),
    ),
    Part(
        "cosine",
        "cosine of the angle to another matrix's rows, spelt out",
        (
            "n = torch.sqrt(torch.sum(y * y, dim=1)) * torch.sqrt(torch.sum(t * t, dim=1))",
            "y = torch.sum(y * t, dim=1) / torch.clamp(n, min=1e-8)",
        ),
        {
            "norms": (
                "n = torch.linalg.vector_norm(y, dim=1) * torch.linalg.vector_norm(t, dim=1)",
                "y = (y * t).sum(dim=1) / n.clamp(min=1e-8)",
            ),
            "cosine-similarity": ("y = F.cosine_similarity(y, t, dim=1)",),
        },
        arguments=("t",),
        inputs=(_OTHER,),
    ),
)
