"""Every rule is exact in float64 where it fires, and does not fire when a side condition fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelwright.rewrites.rules import RULES
from kernelwright.rewrites.rules.products import heads_inside_on_gpu
from tests.quick import exhaustive_but
from tests.rewrites.samples import apply_rules, compare, load, task_text

X = "N(4, 6)"
IMAGE = "N(2, 4, 9, 8)"
LINEAR = "self.f = nn.Linear(6, 8)"
CONV = "self.f = nn.Conv2d(4, 5, 3)"
UP = "self.f = nn.ConvTranspose2d(4, 5, 3, {})"

JOINED = "self.f, self.g, self.h = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 9)"

FIRES: list[tuple[str, ...]] = [
    ("remove-unused", "unread = torch.exp(a)\nreturn a + 1", X),
    ("remove-noops", "return self.d(a * 1.0 + 0.0) * 2", X, "self.d = nn.Dropout(0.0)"),
    ("remove-noops", "return a.contiguous().clone() / 1", X),
    ("share-common-subexpressions", "return torch.exp(a) * 2 + torch.exp(a)", X),
    (
        "write-out-row-losses",
        "x = F.cross_entropy(a, self.t), F.cross_entropy(a, self.t, reduction='sum')\n"
        "return x, F.cross_entropy(a, self.t, reduction='none')",
        X,
        "self.register_buffer('t', torch.tensor([2, 0, -100, 5]))",
    ),
    (
        "write-out-row-losses",
        "return F.triplet_margin_loss(a, a * 2 - b, b, margin=0.5), F.triplet_margin_loss(a, b, a + 1, reduction='sum')",
        f"{X}, {X}",
    ),
    (
        "write-out-row-losses",
        "x = F.cosine_similarity(a, b, dim=0), F.cosine_similarity(a, b, dim=-1)\n"
        "return x, F.pairwise_distance(a, b, keepdim=True)",
        f"{X}, {X}",
    ),
    ("drop-indices", "return torch.max(a, dim=1, keepdim=True)[0] - torch.min(a, dim=0)[0]", X),
    ("canonical-activation", "return a * torch.sigmoid(a)", X),
    ("canonical-activation", "return a * torch.tanh(F.softplus(a))", X),
    ("canonical-activation", "return 0.5 * a * (1 + torch.erf(a / math.sqrt(2.0)))", X),
    ("canonical-activation", "return 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a ** 3)))", X),
    ("canonical-activation", "return a * torch.clamp(a + 3, 0, 6) / 6", X),
    ("canonical-softmax", "e = torch.exp(a - a.amax(1, keepdim=True))\nreturn e / e.sum(1, keepdim=True)", X),
    ("canonical-softmax", "return torch.log(torch.softmax(a, 1))", X),
    (
        "canonical-layer-norm",
        "m = a.mean(-1, keepdim=True)\nv = a.var(-1, keepdim=True, unbiased=False)\nreturn (a - m) / torch.sqrt(v + 1e-5)",
        X,
    ),
    (
        "canonical-layer-norm",
        "c = a - a.mean(-1, keepdim=True)\nreturn c * torch.rsqrt((c ** 2).mean(-1, keepdim=True) + 1e-5)",
        X,
    ),
    ("polynomial", "return (3 * a + a) + torch.pow(a.abs() + 1, 3) + (a.abs() + 1) ** 0.5", X),
    ("merge-constants", "return ((a * 2 + 1) * 3 - 4) / 5", X),
    ("range-analysis", "return torch.clamp(torch.tanh(a), -1, 1) + F.leaky_relu(torch.relu(a)) ", X),
    ("range-analysis", "return torch.clamp(torch.clamp(a, 0, 1) * 2, 0.0, 1.0) / 2", X),
    ("reduce-size-one", "return torch.logsumexp(a.sum(1, keepdim=True), dim=1, keepdim=True)", X),
    ("reduce-size-one", "return torch.softmax(a, 1)", "N(4, 1)"),
    ("subtract-itself", "return (a - a) + 1", X),
    ("diagonal-operand", "return torch.diag(a) @ b", "N(4), N(4, 5)"),
    ("diagonal-operand", "return b @ torch.diag_embed(a)", "N(2, 4), N(2, 3, 4)"),
    ("diagonal-operand", "return a @ torch.eye(6)", X),
    ("add-weights", "return self.f(a) + self.g(a)", "N(9, 6)", f"{LINEAR}\nself.g = nn.Linear(6, 8, bias=False)"),
    ("add-weights", "return self.f(a) + a @ self.p", "N(9, 6)", f"{LINEAR}\nself.p = nn.Parameter(torch.randn(6, 8))"),
    ("add-weights", "return self.f(a) + self.f(b)", "N(9, 6), N(9, 6)", LINEAR),
    ("add-weights", "return self.f(a) + self.g(a)", IMAGE, f"{CONV}\nself.g = nn.Conv2d(4, 5, 3)"),
    (
        "einsum-to-product",
        "return torch.einsum('bijl,lk->bijk', a, b) + torch.einsum('xyzw, vw -> xyzv', a, b.mT)",
        "N(2, 3, 4, 5), N(5, 6)",
    ),
    ("reorder-product-chain", "return (a @ b) @ c", "N(8, 2), N(2, 8), N(8, 1)"),
    (
        "wide-attention",
        "return F.scaled_dot_product_attention(a, b, c) + F.scaled_dot_product_attention(a, b, c, scale=0.1)",
        "N(2, 3, 5, 512), N(2, 3, 7, 512), N(2, 3, 7, 6)",
    ),
    (
        "attention",
        "return torch.softmax(a @ b.transpose(-2, -1) / 2.0, -1) @ c",
        "N(2, 3, 5, 4), N(2, 3, 7, 4), N(2, 3, 7, 6)",
    ),
    (
        "share-heads",
        "b, c = (x[:, :, None].expand(2, 2, 3, 7, 4).reshape(2, 6, 7, 4) for x in (b, c))\n"
        "return F.scaled_dot_product_attention(a, b, c)",
        "N(2, 6, 5, 4), N(2, 2, 7, 4), N(2, 2, 7, 4)",
    ),
    ("join-linears", "return self.f(a) * self.g(a), self.h(a)", X, JOINED),
    (
        "join-linears",
        "return self.f(a) + self.h(a)[:, :8]",
        X,
        "self.f, self.h = (nn.Linear(6, n, bias=False) for n in (8, 9))",
    ),
    ("activation-in-product", "return torch.relu(self.f(a)), F.gelu(self.g(a[None]), approximate='tanh')", X, JOINED),
    (
        "activation-in-product",
        "return torch.relu(torch.addmm(self.b, a.view(-1, 3), self.w).view(2, 2, 8))",
        "N(2, 2, 3)",
        "self.w, self.b = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.randn(8))",
    ),
    (
        "rotate-before-transpose",
        "q = a.transpose(1, 2)\nreturn q * b + torch.cat((-q[..., 4:], q[..., :4]), -1) * c",
        "N(2, 5, 3, 8), N(5, 8), N(2, 1, 5, 8)",
    ),
    (
        "attention",
        "return torch.softmax((a * -0.5) @ b.transpose(-2, -1) + c, -1) @ b",
        "N(2, 3, 7, 4), N(2, 3, 5, 4), N(7, 5)",
    ),
    (
        "attention",
        "s = (a @ b.transpose(-2, -1)).masked_fill(torch.triu(torch.ones(5, 5), 1) == 1, float('-inf'))\n"
        "return torch.softmax(s, -1) @ c",
        "N(2, 3, 5, 4), N(2, 3, 5, 4), N(2, 3, 5, 4)",
    ),
    (
        "attention",
        "s = (a @ b.transpose(-2, -1) * 0.5).masked_fill(self.m, -math.inf)\nreturn torch.softmax(s, -1) @ c",
        "N(2, 5, 4), N(2, 5, 4), N(2, 5, 4)",
        "self.register_buffer('m', torch.arange(5) > 3)\nself.m = self.m[None].repeat(5, 1)",
    ),
    ("sink-constants", "return (a * 3 + 2).mean(1) + (a / 2 - 1).sum((0, 1)) + F.avg_pool1d(a * 2 + 1, 3)[:, 0]", X),
    ("add-after-pool", "return F.max_pool2d(a + self.p, 2)", IMAGE, "self.p = nn.Parameter(torch.randn(4, 1, 1))"),
    ("add-after-pool", "return (a + self.p).mean((2, 3))", IMAGE, "self.p = nn.Parameter(torch.randn(1, 4, 1, 1))"),
    ("merge-reductions", "return a.mean(3, keepdim=True).mean((0, 2)) + a.sum(1).sum(0).sum()", IMAGE),
    ("push-reduction-through-product", "return self.f(a).sum(1, keepdim=True)", X, LINEAR),
    ("push-reduction-through-product", "return self.f(a).mean((1, 2))", "N(3, 5, 6)", LINEAR),
    ("push-reduction-through-product", "return self.f(a).sum(1)", "N(3, 5, 6)", LINEAR),
    ("push-reduction-through-product", "return (a @ b).sum(-2)", "N(2, 5, 6), N(2, 6, 3)"),
    ("pool-weights", "return F.avg_pool1d(self.f(a).unsqueeze(1), 3).squeeze(1)", X, LINEAR),
    ("pool-before-1x1-convolution", "return F.avg_pool2d(self.f(a), 2)", IMAGE, "self.f = nn.Conv2d(4, 5, 1)"),
    ("reduce-before-convolution", "return self.f(a).mean((2, 3), keepdim=True)", IMAGE, UP.format("stride=2, padding=1")),
    ("reduce-before-convolution", "return self.f(a).sum(2)", IMAGE, UP.format("dilation=2")),
    ("reduce-before-convolution", "return F.adaptive_avg_pool2d(self.f(a), 1)", IMAGE, "self.f = nn.Conv2d(4, 5, 3, 2, 1)"),
    (
        "reduce-before-convolution",
        "return self.f(a).mean(2)",
        "N(2, 3, 4, 5, 6)",
        "self.f = nn.ConvTranspose3d(3, 4, 3, 2, 1)",
    ),
    (
        "reduce-before-convolution",
        "return self.f(a).mean((2, 4))",
        "N(2, 3, 4, 5, 6)",
        "self.f = nn.Conv3d(3, 4, 3, padding=1)",
    ),
    (
        "pool-into-transposed-convolution",
        "return F.avg_pool2d(self.f(a), 2)",
        IMAGE,
        UP.format("stride=2, padding=1, output_padding=1"),
    ),
    ("pool-into-transposed-convolution", "return F.avg_pool2d(self.f(a), (3, 4))", IMAGE, UP.format("stride=(1, 2)")),
    (
        "pool-into-transposed-convolution",
        "return F.avg_pool3d(self.f(a), (2, 3, 4)) + F.avg_pool3d(self.g(a), (2, 3, 4))",
        "N(2, 3, 4, 5, 6)",
        "self.f = nn.ConvTranspose3d(3, 4, (5, 2, 3), (2, 3, 2), (2, 0, 1))\n"
        "self.g = nn.ConvTranspose3d(3, 4, (5, 2, 3), (2, 3, 2), (2, 0, 1), bias=False)",
    ),
    (
        "pool-into-transposed-convolution",
        "return F.avg_pool1d(self.f(a), 3)",
        "N(2, 4, 11)",
        "self.f = nn.ConvTranspose1d(4, 5, 7, 3, 6, 2)",
    ),
    ("pool-into-stride", "return F.avg_pool2d(self.f(a), 2)", IMAGE, "self.f = nn.Conv2d(4, 6, 3, padding=1, groups=2)"),
    ("pool-first", "return F.max_pool2d(torch.tanh(a * 2 + 1), 3, 2, 1)", IMAGE),
    ("pool-first", "return torch.relu(a).amax((2, 3))", IMAGE),
    ("merge-pools", "return F.max_pool2d(F.max_pool2d(a, 3, 1), 2)", IMAGE),
    ("merge-pools", "return F.avg_pool2d(F.avg_pool2d(a, 2), 2)", IMAGE),
    ("drop-shift-before-norm", "return torch.softmax(a + self.p, 1)", X, "self.p = nn.Parameter(torch.randn(4, 1))"),
    ("drop-shift-before-norm", "s = a + 3\nreturn s - s.mean(1, keepdim=True)", X),
    ("drop-shift-before-norm", "return F.layer_norm(a + self.p, [6])", X, "self.p = nn.Parameter(torch.randn(1))"),
    ("fold-into-linear", "return self.f(a) * 2.0", X, LINEAR),
    ("fold-into-linear", "return self.f(a) + self.p", X, f"{LINEAR}\nself.p = nn.Parameter(torch.randn(8))"),
    (
        "fold-into-linear",
        "return self.f(a) * self.p + self.q",
        IMAGE,
        f"{CONV}\nself.p = nn.Parameter(torch.randn(5, 1, 1))\nself.q = nn.Parameter(torch.rand(1, 5, 1, 1))",
    ),
    ("fold-into-linear", "return self.f(a) / 3.0 - 1.0", IMAGE, UP.format("stride=2")),
    ("slice-first", "return F.gelu(self.f(a))[:, -1]", "N(3, 5, 6)", LINEAR),
    ("slice-first", "return F.layer_norm(a + b, [6])[:, 1]", "N(3, 5, 6), N(3, 5, 6)"),
    ("batch-steps", "return torch.tanh(self.f(a[:, 0])) + self.f(a[:, 1])", "N(3, 2, 6)", LINEAR),
    (
        "last-step-of-reverse",
        "return self.f(a)[0][:, -1]",
        "N(3, 5, 6)",
        "self.f = nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True)",
    ),
    ("last-step-of-reverse", "return self.f(a)[0][-1]", "N(5, 3, 6)", "self.f = nn.GRU(6, 4, bidirectional=True)"),
    ("compose-views", "return a.view(24).view(2, 12).transpose(0, 1).transpose(0, 1) + 1", X),
    ("strength-reduction", "return a / 3.0 + a / torch.sqrt(b)", f"{X}, torch.rand(4, 6) + 1"),
    ("drop-bias-before-norm", "return self.n(self.f(a))", IMAGE, f"{CONV}\nself.n = nn.BatchNorm2d(5, momentum=0.3)"),
    ("drop-bias-before-norm", "return self.n(self.f(a))", X, f"{LINEAR}\nself.n = nn.BatchNorm1d(8)"),
    ("drop-bias-before-norm", "return self.n(self.f(a))", IMAGE, f"{CONV}\nself.n = nn.InstanceNorm2d(5)"),
    ("flip-transposed-convolution", "return self.f(a)", IMAGE, UP.format("padding=1, dilation=2")),
    ("flip-transposed-convolution", "return self.f(a)", IMAGE, "self.f = nn.ConvTranspose2d(4, 6, 3, groups=2)"),
]

HOLDS_BACK: list[tuple[str, ...]] = [
    (
        "one has a bias",
        "join-linears",
        "return self.f(a), self.g(a)",
        X,
        "self.f, self.g = nn.Linear(6, 8), nn.Linear(6, 8, False)",
    ),
    ("one weight of two", "join-linears", "return self.f(a), self.f(a * 2), self.g(a)", X, JOINED),
    ("computed weights", "join-linears", "return F.linear(a, b * 2), F.linear(a, b * 3)", f"{X}, N(8, 6)"),
    ("two tensors", "join-linears", "return self.f(a), self.g(a + 1)", X, JOINED),
    ("GELU by erf", "activation-in-product", "return F.gelu(self.f(a))", X, LINEAR),
    ("another reader", "activation-in-product", "y = self.f(a)\nreturn torch.relu(y) + y", X, LINEAR),
    ("a matrix added", "activation-in-product", "return torch.relu(torch.addmm(b, a, b))", "N(6, 6), N(6, 6)"),
    (
        "heads in turn",
        "share-heads",
        "return F.scaled_dot_product_attention(a, *(x[:, None].expand(2, 3, 2, 7, 4).reshape(2, 6, 7, 4) for x in (b, c)))",
        "N(2, 6, 5, 4), N(2, 2, 7, 4), N(2, 2, 7, 4)",
    ),
    (
        "values of their own",
        "share-heads",
        "return F.scaled_dot_product_attention(a, b[:, :, None].expand(2, 2, 3, 7, 4).reshape(2, 6, 7, 4), c)",
        "N(2, 6, 5, 4), N(2, 2, 7, 4), N(2, 6, 7, 4)",
    ),
    ("dropout drops", "remove-noops", "return F.dropout(a, 0.5, True)", X),
    ("a random call is read later", "remove-unused", "unread = torch.rand(3)\nreturn a + torch.rand(6)", X),
    ("random calls differ", "share-common-subexpressions", "return torch.rand(6) + torch.rand(6) + a", X),
    ("indices are read", "drop-indices", "v, i = torch.max(a, 1)\nreturn v + i", X),
    ("another constant", "canonical-activation", "return a * torch.clamp(a + 2, 0, 6) / 6", X),
    ("another factor", "canonical-activation", "return a * torch.sigmoid(2 * a)", X),
    ("no maximum is subtracted", "canonical-softmax", "e = torch.exp(a)\nreturn e / e.sum(1, keepdim=True)", X),
    (
        "other dimensions",
        "canonical-softmax",
        "e = torch.exp(a - a.amax(0, keepdim=True))\nreturn e / e.sum(1, keepdim=True)",
        X,
    ),
    (
        "the variance is unbiased",
        "canonical-layer-norm",
        "return (a - a.mean(-1, keepdim=True)) / torch.sqrt(a.var(-1, keepdim=True) + 1e-5)",
        X,
    ),
    ("classes have weights", "write-out-row-losses", "return F.cross_entropy(a, b.argmax(1), b[0].abs())", f"{X}, {X}"),
    (
        "labels are smooth",
        "write-out-row-losses",
        "return F.cross_entropy(a, b.argmax(1), label_smoothing=0.1)",
        f"{X}, {X}",
    ),
    ("probabilities, no classes", "write-out-row-losses", "return F.cross_entropy(a, b.softmax(1))", f"{X}, {X}"),
    ("another norm", "write-out-row-losses", "return F.pairwise_distance(a, b, p=1.0)", f"{X}, {X}"),
    ("they swap", "write-out-row-losses", "return F.triplet_margin_loss(a, b, a + b, swap=True)", f"{X}, {X}"),
    ("one row for all", "write-out-row-losses", "return F.pairwise_distance(a, b[:1])", f"{X}, {X}"),
    ("eager sums in float32", "write-out-row-losses", "return F.cosine_similarity(a.half(), a.half() + 1)", X),
    ("the inner value is read", "merge-constants", "b = a * 2\nreturn b * 3 + torch.exp(b)", X),
    ("the bound binds", "range-analysis", "return torch.clamp(torch.tanh(a), -0.5, 1)", X),
    ("GELU goes below zero", "range-analysis", "return torch.relu(F.gelu(a))", X),
    ("pinned to one value, which NaN is not", "range-analysis", "return torch.clamp(torch.clamp(a, max=0), 0, 1)", X),
    ("two rows", "reduce-size-one", "return a.sum(0)", "N(2, 5)"),
    ("another diagonal", "diagonal-operand", "return torch.diag(a, 1) @ b", "N(4), N(5, 5)"),
    (
        "other inputs and weights",
        "add-weights",
        "return self.f(a) + self.g(b)",
        "N(9, 6), N(9, 6)",
        f"{LINEAR}\nself.g = nn.Linear(6, 8)",
    ),
    ("the order is the best one", "reorder-product-chain", "return (a @ b) @ c", "N(1, 8), N(8, 8), N(8, 8)"),
    (
        "the sum runs over a letter in the middle",
        "einsum-to-product",
        "return torch.einsum('ilj,lk->ijk', a, b)",
        "N(2, 5, 4), N(5, 6)",
    ),
    (
        "queries are short",
        "wide-attention",
        "return F.scaled_dot_product_attention(a, b, c)",
        "N(2, 3, 5, 64), N(2, 3, 7, 64), N(2, 3, 7, 6)",
    ),
    (
        "it is causal",
        "wide-attention",
        "return F.scaled_dot_product_attention(a, b, c, is_causal=True)",
        "N(2, 3, 5, 512), N(2, 3, 5, 512), N(2, 3, 5, 6)",
    ),
    (
        "the weights are read",
        "attention",
        "w = torch.softmax(a @ b.transpose(-2, -1), -1)\nreturn w @ c + w.sum()",
        "N(2, 5, 4), N(2, 5, 4), N(2, 5, 4)",
    ),
    (
        "softmax runs over the queries",
        "attention",
        "return torch.softmax(a @ b.transpose(-2, -1), -2) @ c",
        "N(2, 5, 4), N(2, 5, 4), N(2, 5, 4)",
    ),
    ("the pool pads", "sink-constants", "return F.avg_pool1d(a + 1, 3, padding=1)", X),
    (
        "the bias varies inside a window",
        "add-after-pool",
        "return F.max_pool2d(a + self.p, 2)",
        IMAGE,
        "self.p = nn.Parameter(torch.randn(9, 8))",
    ),
    ("the product is read", "push-reduction-through-product", "b = self.f(a)\nreturn b.sum(1) + b[:, 0]", X, LINEAR),
    ("the maximum is not linear", "push-reduction-through-product", "return self.f(a).amax(1)", X, LINEAR),
    ("windows overlap", "pool-weights", "return F.avg_pool1d(self.f(a).unsqueeze(1), 3, 2).squeeze(1)", X, LINEAR),
    (
        "several groups",
        "reduce-before-convolution",
        "return self.f(a).mean((2, 3))",
        IMAGE,
        "self.f = nn.Conv2d(4, 4, 3, groups=2)",
    ),
    ("channels are summed", "reduce-before-convolution", "return self.f(a).mean(1)", IMAGE, CONV),
    (
        "the window is no multiple of the stride",
        "pool-into-transposed-convolution",
        "return F.avg_pool2d(self.f(a), 3)",
        IMAGE,
        UP.format("stride=2"),
    ),
    (
        "taps lie apart",
        "pool-into-transposed-convolution",
        "return F.avg_pool2d(self.f(a), 2)",
        IMAGE,
        UP.format("stride=2, dilation=2"),
    ),
    ("windows overlap", "pool-into-stride", "return F.avg_pool2d(self.f(a), 3, 2)", IMAGE, CONV),
    ("GELU is not increasing", "pool-first", "return F.max_pool2d(F.gelu(a), 2)", IMAGE),
    ("the factor is negative", "pool-first", "return F.max_pool2d(a * -2, 2)", IMAGE),
    (
        "the factor's sign is unknown",
        "pool-first",
        "return F.max_pool2d(a * self.p, 2)",
        IMAGE,
        "self.p = nn.Parameter(torch.randn(4, 1, 1))",
    ),
    ("windows of the first pool overlap", "merge-pools", "return F.avg_pool2d(F.avg_pool2d(a, 3, 1), 2)", IMAGE),
    ("the first pool pads", "merge-pools", "return F.max_pool2d(F.max_pool2d(a, 2, padding=1), 2)", IMAGE),
    (
        "the shift varies along the axis",
        "drop-shift-before-norm",
        "return torch.softmax(a + self.p, 1)",
        X,
        "self.p = nn.Parameter(torch.randn(6))",
    ),
    (
        "the weight is larger than the output",
        "fold-into-linear",
        "return self.f(a) * self.p",
        "N(2, 6)",
        f"{LINEAR}\nself.p = nn.Parameter(torch.randn(8))",
    ),
    (
        "the factor varies over pixels",
        "fold-into-linear",
        "return self.f(a) * self.p",
        IMAGE,
        f"{CONV}\nself.p = nn.Parameter(torch.randn(7, 6))",
    ),
    ("softmax mixes what is sliced", "slice-first", "return torch.softmax(a, 1)[:, 0]", "N(3, 5, 6)"),
    (
        "other weights",
        "batch-steps",
        "return self.f(a[:, 0]) + self.g(a[:, 1])",
        "N(3, 2, 6)",
        f"{LINEAR}\nself.g = nn.Linear(6, 8)",
    ),
    (
        "all steps are read",
        "last-step-of-reverse",
        "return self.f(a)[0]",
        "N(3, 5, 6)",
        "self.f = nn.LSTM(6, 4, batch_first=True, bidirectional=True)",
    ),
    ("the stride is 2", "flip-transposed-convolution", "return self.f(a)", IMAGE, UP.format("stride=2")),
    (
        "the padding is larger than the kernel reaches",
        "flip-transposed-convolution",
        "return self.f(a)",
        IMAGE,
        UP.format("padding=3"),
    ),
]


def quick_by_rule(cases: list[tuple[str, ...]], place: int) -> list[object]:
    """All cases as parameters; the first of each rule, whose name stands at this place, is run by `make test`."""
    first = {case[place]: case for case in reversed(cases)}.values()
    return exhaustive_but([(case,) for case in cases], *((case,) for case in first))


@pytest.mark.parametrize("case", quick_by_rule(FIRES, 0), ids=[f"{i}-{case[0]}" for i, case in enumerate(FIRES)])
@pytest.mark.usefixtures("float64")
def test_rewrite_is_exact(case: tuple[str, ...]) -> None:
    rule, *task = case
    done = apply_rules(task_text(*task), rule)
    assert done.fired == (rule,)
    compare(done.reference, done.source, 1e-12)


@pytest.mark.parametrize("case", quick_by_rule(HOLDS_BACK, 1), ids=[f"{case[1]}: {case[0]}" for case in HOLDS_BACK])
@pytest.mark.usefixtures("float64")
def test_rule_holds_back(case: tuple[str, ...]) -> None:
    why, rule, *task = case
    assert apply_rules(task_text(*task), rule).fired == (), why


def test_every_rule_has_a_case_and_says_its_conditions() -> None:
    assert {rule.name for rule in RULES} == {case[0] for case in FIRES}
    assert all("Conditions:" in (rule.apply.__doc__ or "") for rule in RULES)


@pytest.mark.usefixtures("float64")
def test_batch_norm_bias_stays_in_eval_mode() -> None:
    text = task_text("return self.n(self.f(a))", IMAGE, f"{CONV}\nself.n = nn.BatchNorm2d(5)")
    source = apply_rules(text, "drop-bias-before-norm").source
    training, evaluation = source.split("if self.training:")[1].split("running_mean, self.n.running_var")[:2]
    assert "self.f.bias" not in training.split("F.batch_norm")[0]
    assert "self.f.bias" in evaluation


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_factor_in_weights_of_16_bits_errs_hardly_more_than_in_the_result(dtype: str) -> None:
    """Inputs far from zero are the worst of those tried: errors of the weights add up there."""
    init = f"self.f = nn.Conv2d(64, 32, 3).to(torch.{dtype})\nself.p = nn.Parameter(torch.rand(32, 1, 1).to(torch.{dtype}))"
    text = task_text("return self.f(a) * self.p", f"(torch.rand(8, 64, 16, 16) + 3).to(torch.{dtype})", init)
    done = apply_rules(text, "fold-into-linear")
    assert done.fired == ("fold-into-linear",)
    torch.manual_seed(0)
    own, new, (x,) = load(text, "own").Model(), load(done.source, "new").ModelNew(), load(text, "own").get_inputs()
    new.load_state_dict(own.state_dict())
    with torch.no_grad():
        exact = copy.deepcopy(own).double()(x.double())
        wanted, found = ((model(x).double() - exact).norm() for model in (own, new))
    assert found <= 1.5 * wanted


def test_loaded_mask_is_read_in_each_call() -> None:
    """A mask that is module state is never taken for causal, whatever it holds when it is traced."""
    text = task_text(
        "s = (a @ b.transpose(-2, -1)).masked_fill(self.m == 0, -math.inf)\nreturn torch.softmax(s, -1) @ c",
        "N(2, 5, 4), N(2, 5, 4), N(2, 5, 4)",
        "self.register_buffer('m', torch.tril(torch.ones(5, 5)))",
    )
    done = apply_rules(text, "attention")
    assert done.fired == ("attention",)
    assert "is_causal" not in done.source
    assert "self.m" in done.source.split("class ModelNew")[1]


def test_a_scaled_query_costs_nothing() -> None:
    text = task_text(
        "return torch.softmax(torch.mul(a, 0.25) @ b.transpose(-2, -1) * 2.0, -1) @ c",
        "N(2, 3, 5, 4), N(2, 3, 5, 4), N(2, 3, 5, 4)",
    )
    written = apply_rules(text, "attention").source.split("class ModelNew")[1]
    assert "scale=0.5" in written
    assert "* 0.25" not in written


def test_outputs_behind_attention_lie_as_the_references_whatever_kernel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernels of fused attention hand out a transposed layout, and what is computed from it lies so too."""
    text = task_text(
        "return torch.relu(torch.softmax(a @ b.transpose(-2, -1) / 2.0, -1) @ c)",
        "N(2, 3, 5, 4), N(2, 3, 5, 4), N(2, 3, 5, 4)",
    )
    done = apply_rules(text, "attention")
    fused = torch.nn.functional.scaled_dot_product_attention

    def transposed(*given: Any, **named: Any) -> torch.Tensor:
        return fused(*given, **named).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", transposed)
    space: dict[str, Any] = {}
    exec(done.source, space)
    inputs = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    assert not transposed(*inputs).is_contiguous()
    assert space["ModelNew"]()(*inputs).is_contiguous()


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


WIDE = "torch.randn(2, 3, 5, 512), torch.randn(2, 3, 7, 512), torch.randn(2, 3, 7, {})"


def test_a_result_of_wide_attention_lies_as_that_of_pytorchs_kernel_on_a_gpu():
    rewritten = apply_rules(task_text("return F.scaled_dot_product_attention(a, b, c)", WIDE.format(8)), "wide-attention")
    assert "heads_inside_on_gpu(" in rewritten.source
    with FakeTensorMode():
        given = [torch.empty(2, 3, rows, 512, device="cuda") for rows in (5, 7, 7)]
        theirs = torch.ops.aten._scaled_dot_product_efficient_attention(*given, None, False)[0]
    ours = torch.randn(2, 3, 5, 512)
    laid_out = heads_inside_on_gpu(ours.as_subclass(OnGpu))
    assert laid_out.stride() == theirs.stride()
    assert torch.equal(laid_out.as_subclass(torch.Tensor), ours)
    assert heads_inside_on_gpu(ours) is ours, "on a processor it is dense"


@pytest.mark.parametrize(
    ("forward", "inputs"),
    [
        ("return F.scaled_dot_product_attention(a, b, c) + 1", WIDE.format(8)),
        ("return F.scaled_dot_product_attention(a, b, c)", WIDE.format(6)),
        ("return F.scaled_dot_product_attention(a[0], b[0], c[0])", WIDE.format(8)),
        ("return F.scaled_dot_product_attention(a.double(), b.double(), c.double())", WIDE.format(8)),
    ],
    ids=["not handed out", "not aligned", "three dimensions", "float64"],
)
def test_other_results_of_wide_attention_stay_as_they_lie(forward, inputs):
    rewritten = apply_rules(task_text(forward, inputs), "wide-attention")
    assert rewritten.fired == ("wide-attention",)
    assert "heads_inside_on_gpu" not in rewritten.source


def test_weights_that_move_together_stay_the_parameters_that_they_were() -> None:
    """What is written to one is read, however it is written: in place, by its data, by loading; also in a copy."""
    done = apply_rules(
        task_text("return self.f(a), self.g(a), self.h(a)", f"{X}.double()", f"{JOINED}\nself.double()"), "join-linears"
    )
    model = load(done.source, "moved").ModelNew()
    given = torch.randn(4, 6, dtype=torch.float64)

    def expected(of: Any) -> list[torch.Tensor]:
        return [F.linear(given, layer.weight, layer.bias) for layer in (of.f, of.g, of.h)]

    before = dict(model.named_parameters())
    with torch.no_grad():
        model(given)
        assert model.f.weight.untyped_storage().data_ptr() == model.h.weight.untyped_storage().data_ptr(), (
            "they lie together"
        )
        model.g.weight.mul_(2)
        torch.testing.assert_close(list(model(given)), expected(model))
        model.h.bias.data = torch.randn(9, dtype=torch.float64)
        torch.testing.assert_close(list(model(given)), expected(model))
        twin = copy.deepcopy(model)
        twin.f.weight.add_(1)
        torch.testing.assert_close(list(twin(given)), expected(twin))
        torch.testing.assert_close(list(model(given)), expected(model))
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        torch.testing.assert_close(list(model(given)), expected(model))
    with torch.inference_mode():
        torch.testing.assert_close(list(model(given)), expected(model))
    assert dict(model.named_parameters()) == before, "the same objects"
    sum(part.sum() for part in model(given)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_of_somebodys_memory_stay_where_they_are() -> None:
    done = apply_rules(
        task_text("return self.f(a), self.g(a), self.h(a)", f"{X}.double()", f"{JOINED}\nself.double()"), "join-linears"
    )
    model = load(done.source, "shared").ModelNew()
    flat = torch.randn(2 * 48, dtype=torch.float64)
    model.f.weight.data, model.g.weight.data = (part.view(8, 6) for part in flat.split(48))
    given = torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        model(given)
        flat.zero_()
        torch.testing.assert_close(model(given)[0], model.f.bias.expand(4, 8))
