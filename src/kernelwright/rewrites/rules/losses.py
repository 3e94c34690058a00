"""Writes losses of rows, and distances between rows, out in operators that one kernel can compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kernelwright.rewrites.graph import Editor, arguments, aten, dtype, is_call, numel, scalar, shape
from kernelwright.rewrites.rules.base import each

NONE, MEAN, SUM = 0, 1, 2
"""Values of the argument `reduction` of PyTorch's losses."""
_TYPES = (torch.float32, torch.float64)
"""Narrower ones are summed in float32 by eager, and would not be here."""


@each(aten.cross_entropy_loss, aten.triplet_margin_loss, aten.pairwise_distance, aten.cosine_similarity)
def write_out_row_losses(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A loss, distance or similarity of rows is written as eager computes it, so that its reductions can be fused.

    Conditions: rows in float32 or float64, of equal shapes. Of cross entropy: a matrix of scores, a class for each row, no
    weights, no smoothing. Of distances: the Euclidean one, and no swap.
    """
    given = arguments(node)
    if is_call(node, aten.cross_entropy_loss):
        return _cross_entropy(editor, node, given)
    rows = [given[name] for name in ("anchor", "positive", "negative", "x1", "x2") if name in given]
    if any(dtype(item) not in _TYPES or shape(item) != shape(rows[0]) for item in rows) or not shape(rows[0]):
        return None
    if is_call(node, aten.cosine_similarity):
        return _cosine_similarity(editor, node, rows[0], rows[1], given)
    if scalar(given["p"]) != 2.0 or given.get("swap"):
        return None
    eps = float(given["eps"])
    if is_call(node, aten.pairwise_distance):
        return _distance(editor, node, rows[0], rows[1], eps, bool(given["keepdim"]))
    near, far = (_distance(editor, node, rows[0], other, eps) for other in rows[1:])
    beyond = editor.call(node, aten.add.Scalar, editor.call(node, aten.sub.Tensor, near, far), float(given["margin"]))
    return _reduced(editor, node, editor.call(node, aten.clamp_min.default, beyond, 0.0), int(given["reduction"]))


def _distance(editor: Editor, at: fx.Node, one: fx.Node, two: fx.Node, eps: float, keepdim: bool = False) -> fx.Node:
    apart = editor.call(at, aten.add.Scalar, editor.call(at, aten.sub.Tensor, one, two), eps)
    return editor.call(at, aten.linalg_vector_norm.default, apart, 2, [-1], keepdim)


def _cosine_similarity(editor: Editor, at: fx.Node, one: fx.Node, two: fx.Node, given: dict[str, Any]) -> fx.Node:
    dim = int(given["dim"])
    ratios = []
    for rows in (one, two):
        length = editor.call(at, aten.linalg_vector_norm.default, rows, 2, [dim], True)
        at_least = editor.call(at, aten.clamp_min.default, length, float(given["eps"]))
        ratios.append(editor.call(at, aten.div.Tensor, rows, at_least))
    return editor.call(at, aten.sum.dim_IntList, editor.call(at, aten.mul.Tensor, *ratios), [dim])


def _cross_entropy(editor: Editor, at: fx.Node, given: dict[str, Any]) -> fx.Node | None:
    """The logarithm of the sum of exponentials, less the score of each row's own class."""
    scores, classes = given["self"], given["target"]
    if dtype(scores) not in _TYPES or len(shape(scores)) != 2 or dtype(classes) != torch.int64 or not numel(scores):
        return None
    if given.get("weight") is not None or float(given.get("label_smoothing") or 0.0) != 0.0:
        return None
    ignored = editor.call(at, aten.eq.Scalar, classes, int(given["ignore_index"]))
    named = editor.call(at, aten.masked_fill.Scalar, classes, ignored, 0)
    own = editor.call(at, aten.gather.default, scores, 1, editor.call(at, aten.unsqueeze.default, named, 1))
    largest = editor.call(at, aten.amax.default, scores, [1], True)
    powers = editor.call(at, aten.exp.default, editor.call(at, aten.sub.Tensor, scores, largest))
    total = editor.call(at, aten.log.default, editor.call(at, aten.sum.dim_IntList, powers, [1], True))
    missing = editor.call(at, aten.sub.Tensor, total, editor.call(at, aten.sub.Tensor, own, largest))
    losses = editor.call(at, aten.masked_fill.Scalar, editor.reshape(at, missing, shape(classes)), ignored, 0.0)
    if int(given["reduction"]) != MEAN:
        return _reduced(editor, at, losses, int(given["reduction"]))
    counted = editor.call(at, aten.sum.default, editor.call(at, aten.logical_not.default, ignored))
    return editor.call(at, aten.div.Tensor, _reduced(editor, at, losses, SUM), counted)


def _reduced(editor: Editor, at: fx.Node, losses: fx.Node, reduction: int) -> fx.Node:
    if reduction == NONE:
        return losses
    return editor.call(at, aten.mean.default if reduction == MEAN else aten.sum.default, losses)
