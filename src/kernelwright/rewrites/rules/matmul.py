"""Rewrites matrix products with structure: diagonal or identity operands, triangular or diagonal results, chains."""

from __future__ import annotations

from typing import cast

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dims_of,
    dtype,
    is_call,
    is_float,
    numel,
    operand_nodes,
    padded_shape,
    read_once,
    shape,
)
from kernelwright.rewrites.helpers import lower_triangle_of_product, upper_triangle_of_product
from kernelwright.rewrites.rules.affine import CONVOLUTIONS
from kernelwright.rewrites.rules.base import each

PRODUCTS = (aten.matmul, aten.mm, aten.bmm)
BLOCKS = 8
"""Row blocks of a triangular product: 56 % of the full product's work, in pieces still large enough to be fast."""


@each(aten.einsum)
def einsum_to_product(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`einsum("...l,lk->...k", a, b)` is the product of a and b, and `einsum("...l,kl->...k", a, b)` that of a and b.mT.

    Conditions: two operands, of which the second is a matrix; no letter comes twice in either.
    """
    equation, factors = str(node.args[0]).replace(" ", ""), cast(list[fx.Node], node.args[1])
    terms, _, result = equation.partition("->")
    one, _, two = terms.partition(",")
    if len(factors) != 2 or len(two) != 2 or "," in two or len(set(one)) < len(one) or not (one + two + result).isalpha():
        return None
    left, right = factors
    if two[0] != two[1] and one[-1] in two and result == one[:-1] + two.replace(one[-1], ""):
        if two[1] == one[-1]:
            right = editor.call(node, aten.transpose.int, right, 0, 1)
        return editor.call(node, aten.matmul.default, left, right)
    return None


@each(*PRODUCTS)
def diagonal_operand(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A product with a diagonal matrix scales rows or columns; one with the identity does nothing.

    Conditions: the diagonal matrix is made in `forward` from a vector, on the main diagonal. A non-finite
    number in the other operand would spread NaN over its row or column in the reference and does not here.
    """
    pair = operand_nodes(node)
    if pair is None or min(len(shape(item)) for item in pair) < 2:
        return None
    for index, (matrix, other) in enumerate((pair, pair[::-1])):
        result = None
        if (vector := _diagonal_of(matrix)) is not None:
            lifted = editor.call(node, aten.unsqueeze.default, vector, -1 if index == 0 else -2)
            result = editor.call(node, aten.mul.Tensor, lifted, other)
        elif is_call(matrix, aten.eye) and len(set(shape(matrix))) == 1 and dtype(matrix) == dtype(other):
            result = editor.call(node, aten.clone.default, other)
        if result is not None and shape(result) == shape(node):
            return result
    return None


def _diagonal_of(node: fx.Node) -> fx.Node | None:
    """The vector on the diagonal of a matrix that is zero elsewhere."""
    if is_call(node, aten.diag, aten.diag_embed):
        vector = cast(fx.Node, node.args[0])
        if is_call(node, aten.diag):
            return vector if len(shape(vector)) == 1 and not argument(node, "diagonal") else None
        return vector if _is_main_diagonal(node, len(shape(node))) else None
    # diag(v) is also v * eye(n), with v along either axis.
    pair = operand_nodes(node, aten.mul)
    for one, two in (pair, pair[::-1]) if pair else ():
        if is_call(one, aten.eye) and dtype(two) == dtype(node):
            if shape(two) == (shape(node)[-1],):
                return two
            if len(shape(two)) == 2 and shape(two)[1] == 1 and is_call(two, aten.unsqueeze):
                return cast(fx.Node, two.args[0])
    return None


def _is_main_diagonal(node: fx.Node, rank: int) -> bool:
    """Whether `diagonal` or `diag_embed` is about the main diagonal of the last two dimensions."""
    dims = {argument(node, name) % rank for name in ("dim1", "dim2")}
    return dims == {rank - 1, rank - 2} and not argument(node, "offset")


@each(aten.diagonal, aten.diag, aten.trace)
def diagonal_result(editor: Editor, node: fx.Node) -> fx.Node | None:
    """The diagonal or trace of a product needs one dot product per row, not the whole product.

    Conditions: main diagonal of the last two dimensions; the product has no other reader.
    """
    product = read_once(node.args[0], *PRODUCTS)
    pair = operand_nodes(product)
    if product is None or pair is None:
        return None
    rank = len(shape(product))
    if rank < 2 or any(len(shape(item)) != rank for item in pair):
        return None
    if not _is_main_diagonal(node, rank) if is_call(node, aten.diagonal) else rank != 2 or argument(node, "diagonal"):
        return None
    left, right = pair
    size = min(shape(product)[-2:])
    left = editor.call(node, aten.slice.Tensor, left, rank - 2, 0, size) if shape(left)[-2] > size else left
    right = editor.call(node, aten.slice.Tensor, right, rank - 1, 0, size) if shape(right)[-1] > size else right
    terms = editor.call(node, aten.mul.Tensor, left, editor.call(node, aten.transpose.int, right, -2, -1))
    if is_call(node, aten.trace):
        return editor.call(node, aten.sum.default, terms)
    return editor.call(node, aten.sum.dim_IntList, terms, [rank - 1])


@each(aten.sum)
def sum_of_products(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`sum(a[:, :, None] * b[None, :, :], 1)` is a matrix product, without the three-dimensional intermediate.

    Conditions: floating point; one operand is constant along one dimension, the other along another one, and the sum runs
    over one dimension that both have; at most one batch dimension; the product has no other reader.
    """
    product = read_once(node.args[0])
    factors = operand_nodes(product, aten.mul)
    if node.kwargs or product is None or factors is None or not is_float(node) or dtype(product) != dtype(node):
        return None
    rank = len(shape(product))
    dims = dims_of(argument(node, "dim"), rank)
    if dims is None or len(dims) != 1 or rank not in (3, 4):
        return None
    padded = [padded_shape(item, rank) for item in factors]
    summed, full = dims[0], shape(product)
    if any(item[summed] != full[summed] for item in padded) or full[summed] == 1:
        return None
    others = [dim for dim in range(rank) if dim != summed]
    rows = [dim for dim in others if padded[0][dim] == full[dim] and padded[1][dim] == 1 and full[dim] > 1]
    columns = [dim for dim in others if padded[1][dim] == full[dim] and padded[0][dim] == 1 and full[dim] > 1]
    batch = [dim for dim in others if dim not in rows + columns]
    shared = all(padded[0][dim] == padded[1][dim] == full[dim] for dim in batch)
    if len(rows) != 1 or len(columns) != 1 or not shared:
        return None
    left, right = (editor.reshape(node, item, sizes) for item, sizes in zip(factors, padded, strict=True))
    left = _matrix(editor, node, left, batch, rows[0], summed, columns[0])
    right = _matrix(editor, node, right, batch, summed, columns[0], rows[0])
    result = editor.call(node, aten.matmul.default, left, right)
    made = [*batch, rows[0], columns[0]]
    order = [made.index(dim) for dim in others]
    if order != sorted(order):
        result = editor.call(node, aten.permute.default, result, order)
    return editor.reshape(node, result, shape(node))


def _matrix(editor: Editor, at: fx.Node, item: fx.Node, batch: list[int], first: int, second: int, missing: int) -> fx.Node:
    """An operand as (batch..., first, second)."""
    order = [*batch, first, second, missing]
    if order != sorted(order):
        item = editor.call(at, aten.permute.default, item, order)
    return editor.call(at, aten.squeeze.dim, item, -1)


@each(*PRODUCTS)
def reorder_product_chain(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`(a @ b) @ c` is `a @ (b @ c)`, whichever takes fewer operations.

    Conditions: matrices of the same batch shape; the inner product has no other reader; at least a quarter
    fewer multiplications. Rounding differs as in any other order of a sum.
    """
    outer = operand_nodes(node)
    for index, item in enumerate(outer or ()):
        pair = operand_nodes(read_once(item), *PRODUCTS)
        if outer is None or pair is None:
            continue
        matrices = (*pair, outer[1]) if index == 0 else (outer[0], *pair)
        if any(shape(matrix)[:-2] != shape(node)[:-2] or len(shape(matrix)) < 2 for matrix in matrices):
            continue
        first, second, third = matrices
        rows, one = shape(first)[-2:]
        two, columns = shape(third)[-2:]
        left_cost = rows * one * two + rows * two * columns
        right_cost = one * two * columns + rows * one * columns
        now, then = (left_cost, right_cost) if index == 0 else (right_cost, left_cost)
        if 4 * then > 3 * now:
            continue
        if index == 0:
            return editor.call(node, aten.matmul.default, first, editor.call(node, aten.matmul.default, second, third))
        return editor.call(node, aten.matmul.default, editor.call(node, aten.matmul.default, first, second), third)
    return None


@each(aten.tril, aten.triu)
def triangle_of_product(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`tril(a @ b)` and `triu(a @ b)` compute only the blocks that are kept.

    Conditions: two matrices of at least 512 rows; the product has no other reader. Nothing is assumed about a and b.
    """
    product = read_once(node.args[0], *PRODUCTS)
    pair = operand_nodes(product)
    if product is None or pair is None or len(shape(product)) != 2 or shape(product)[0] < 512:
        return None
    helper = lower_triangle_of_product if is_call(node, aten.tril) else upper_triangle_of_product
    return editor.call(node, helper, *pair, int(argument(node, "diagonal")), BLOCKS)


@each(aten.add)
def add_weights(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`x A + x B` is `x (A + B)`, and `x A + y A` is `(x + y) A`: one product instead of two.

    For `linear`, matrix products and convolutions of equal geometry. Conditions: neither product has another reader; no
    broadcasting; adding the operands touches at most an eighth of the elements that the product multiplies.
    """
    one, two = map(read_once, operand_nodes(node) or (None, None))
    if one is None or two is None or one is two or shape(one) != shape(two) or not is_float(node):
        return None
    result = _distribute(editor, node, one, two) or _distribute(editor, node, two, one)
    same = result is not None and shape(result) == shape(node) and dtype(result) == dtype(node)
    return result if same else None


def _distribute(editor: Editor, node: fx.Node, one: fx.Node, two: fx.Node) -> fx.Node | None:
    if is_call(one, *CONVOLUTIONS) and one.target is two.target and one.args[3:] == two.args[3:] and not one.kwargs:
        if one.args[0] is not two.args[0] or shape(one.args[1]) != shape(two.args[1]) or two.kwargs:  # type: ignore[arg-type]
            return None
        weight = editor.call(node, aten.add.Tensor, one.args[1], two.args[1])
        return editor.again(node, one, one.args[0], weight, _sum(editor, node, one, two), *one.args[3:])
    first, second = _as_linear(one), _as_linear(two)
    if first is None or second is None:
        return None
    (x, weight, turned), (y, other, other_turned) = first, second
    rows = numel(node) // shape(node)[-1]
    if x is y and shape(weight)[:: -1 if turned != other_turned else 1] == shape(other) and rows >= 8:
        if turned != other_turned:
            other = editor.call(node, aten.t.default, other)
        total = editor.call(node, aten.add.Tensor, weight, other)
        if turned:
            total = editor.call(node, aten.t.default, total)
        bias = _sum(editor, node, one, two)
        return editor.call(node, aten.linear.default, x, total, bias)
    same = weight is other and turned == other_turned and shape(x) == shape(y)
    if not same or shape(node)[-1] < 8:
        return None
    total = editor.call(node, aten.add.Tensor, x, y)
    if turned:
        weight = editor.call(node, aten.t.default, weight)
    return editor.call(node, aten.linear.default, total, weight, _sum(editor, node, one, two))


def _as_linear(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """`(x, weight, turned)` of a product with one matrix: turned when the matrix is (in, out) and not (out, in)."""
    if is_call(node, aten.linear):
        return argument(node, "input"), argument(node, "weight"), False
    pair = operand_nodes(node, aten.matmul, aten.mm)
    return (*pair, True) if pair and len(shape(pair[1])) == 2 and len(shape(pair[0])) >= 2 else None


def _sum(editor: Editor, at: fx.Node, one: fx.Node, two: fx.Node) -> fx.Node | None:
    """The sum of the biases of two linear operators; None when neither has one."""
    found = [argument(node, "bias") for node in (one, two) if not is_call(node, *PRODUCTS)]
    biases = [bias for bias in found if isinstance(bias, fx.Node)]
    if not biases:
        return None
    return biases[0] if len(biases) == 1 else editor.call(at, aten.add.Tensor, *biases)
