"""Matrix products with structure: diagonal or identity operands, triangular or diagonal results, chains."""

from __future__ import annotations

from typing import Any

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dims_of,
    is_call,
    is_float,
    is_tensor,
    only_user,
    shape,
    value,
)
from kernelwright.rewrites.helpers import lower_triangle_of_product, upper_triangle_of_product
from kernelwright.rewrites.rules.affine import CONVOLUTIONS

PRODUCTS = (aten.matmul, aten.mm, aten.bmm)
BLOCKS = 8
"""Row blocks of a triangular product: 56 % of the full product's work, in pieces still large enough to be fast."""


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    left, right = node.args[:2]
    plain = len(node.args) == 2 and isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return (left, right) if plain else None  # type: ignore[return-value]


def diagonal_operand(editor: Editor) -> int:
    """A product with a diagonal matrix scales rows or columns; one with the identity does nothing.

    Conditions: the diagonal matrix is made in `forward` from a vector, on the main diagonal. A non-finite
    number in the other operand would spread NaN over its row or column in the reference and does not here.
    """
    count = 0
    for node in editor.nodes(*PRODUCTS):
        operands = _operands(node)
        if node._erased or operands is None or min(len(shape(item)) for item in operands) < 2:
            continue
        for index, (matrix, other) in enumerate((operands, operands[::-1])):
            result = None
            if (vector := _diagonal_of(matrix)) is not None:
                lifted = editor.call(node, aten.unsqueeze.default, vector, -1 if index == 0 else -2)
                result = editor.call(node, aten.mul.Tensor, lifted, other)
            elif is_call(matrix, aten.eye) and len(set(shape(matrix))) == 1 and value(matrix).dtype == value(other).dtype:
                result = editor.call(node, aten.clone.default, other)
            if result is not None and shape(result) == shape(node):
                editor.replace(node, result)
                count += 1
                break
    return count


def _diagonal_of(node: fx.Node) -> fx.Node | None:
    """The vector on the diagonal of a matrix that is zero elsewhere."""
    if is_call(node, aten.diag, aten.diag_embed):
        source = node.args[0]
        plain = isinstance(source, fx.Node) and not argument(
            node, "offset" if is_call(node, aten.diag_embed) else "diagonal"
        )
        if not plain or not isinstance(source, fx.Node):
            return None
        if is_call(node, aten.diag):
            return source if len(shape(source)) == 1 else None
        rank = len(shape(node))
        return source if {argument(node, "dim1") % rank, argument(node, "dim2") % rank} == {rank - 1, rank - 2} else None
    if is_call(node, aten.mul) and len(node.args) == 2:
        # diag(v) is also v * eye(n), with v along either axis.
        for one, two in (node.args, node.args[::-1]):
            if (
                is_call(one, aten.eye)
                and is_tensor(two)
                and isinstance(two, fx.Node)
                and value(two).dtype == value(node).dtype
            ):
                if shape(two) == (shape(node)[-1],):
                    return two
                if len(shape(two)) == 2 and shape(two)[1] == 1 and is_call(two, aten.unsqueeze):
                    return two.args[0]  # type: ignore[return-value]
    return None


def diagonal_result(editor: Editor) -> int:
    """The diagonal or trace of a product needs one dot product per row, not the whole product.

    Conditions: main diagonal of the last two dimensions; the product has no other reader.
    """
    count = 0
    for node in editor.nodes(aten.diagonal, aten.diag, aten.trace):
        product = node.args[0]
        if node._erased or not isinstance(product, fx.Node) or not is_call(product, *PRODUCTS) or only_user(product) is None:
            continue
        operands = _operands(product)
        rank = len(shape(product))
        if operands is None or any(len(shape(item)) != rank for item in operands) or rank < 2:
            continue
        if is_call(node, aten.diagonal):
            dims = {argument(node, "dim1") % rank, argument(node, "dim2") % rank}
            if dims != {rank - 1, rank - 2} or argument(node, "offset"):
                continue
        elif rank != 2 or (is_call(node, aten.diag) and argument(node, "diagonal")):
            continue
        left, right = operands
        size = min(shape(product)[-2:])
        left = editor.call(node, aten.slice.Tensor, left, rank - 2, 0, size) if shape(left)[-2] > size else left
        right = editor.call(node, aten.slice.Tensor, right, rank - 1, 0, size) if shape(right)[-1] > size else right
        terms = editor.call(node, aten.mul.Tensor, left, editor.call(node, aten.transpose.int, right, -2, -1))
        dims = None if is_call(node, aten.trace) else [rank - 1]  # type: ignore[assignment]
        target: Any = aten.sum.default if dims is None else aten.sum.dim_IntList
        editor.replace(node, editor.call(node, target, terms, *([dims] if dims is not None else [])))
        count += 1
    return count


def sum_of_products(editor: Editor) -> int:
    """`sum(a[:, :, None] * b[None, :, :], 1)` is a matrix product, without the three-dimensional intermediate.

    Conditions: floating point; one operand is constant along one dimension, the other along another one, and the sum runs
    over one dimension that both have; at most one batch dimension; the product has no other reader.
    """
    count = 0
    for node in editor.nodes(aten.sum):
        product = node.args[0]
        if node._erased or node.kwargs or not isinstance(product, fx.Node) or not is_call(product, aten.mul):
            continue
        operands = _operands(product)
        if operands is None or only_user(product) is None or not is_float(node) or value(product).dtype != value(node).dtype:
            continue
        rank = len(shape(product))
        dims = dims_of(argument(node, "dim"), rank)
        if dims is None or len(dims) != 1 or rank not in (3, 4):
            continue
        padded = [(1,) * (rank - len(shape(item))) + shape(item) for item in operands]
        summed, full = dims[0], shape(product)
        if any(item[summed] != full[summed] for item in padded) or full[summed] == 1:
            continue
        others = [dim for dim in range(rank) if dim != summed]
        rows = [dim for dim in others if padded[0][dim] == full[dim] and padded[1][dim] == 1 and full[dim] > 1]
        columns = [dim for dim in others if padded[1][dim] == full[dim] and padded[0][dim] == 1 and full[dim] > 1]
        batch = [dim for dim in others if dim not in rows + columns]
        shared = all(padded[0][dim] == padded[1][dim] == full[dim] for dim in batch)
        if len(rows) != 1 or len(columns) != 1 or not shared:
            continue
        left, right = (
            editor.call(node, aten.reshape.default, item, list(sizes)) for item, sizes in zip(operands, padded, strict=True)
        )
        left = _matrix(editor, node, left, batch, rows[0], summed, columns[0])
        right = _matrix(editor, node, right, batch, summed, columns[0], rows[0])
        result = editor.call(node, aten.matmul.default, left, right)
        made = [*batch, rows[0], columns[0]]
        order = [made.index(dim) for dim in others]
        if order != sorted(order):
            result = editor.call(node, aten.permute.default, result, order)
        editor.replace(node, editor.call(node, aten.reshape.default, result, list(shape(node))))
        count += 1
    return count


def _matrix(editor: Editor, at: fx.Node, item: fx.Node, batch: list[int], first: int, second: int, missing: int) -> fx.Node:
    """An operand as (batch..., first, second)."""
    order = [*batch, first, second, missing]
    if order != sorted(order):
        item = editor.call(at, aten.permute.default, item, order)
    return editor.call(at, aten.squeeze.dim, item, -1)


def reorder_product_chain(editor: Editor) -> int:
    """`(a @ b) @ c` is `a @ (b @ c)`, whichever takes fewer operations.

    Conditions: matrices of the same batch shape; the inner product has no other reader; at least a quarter
    fewer multiplications. Rounding differs as in any other order of a sum.
    """
    count = 0
    for node in editor.nodes(*PRODUCTS):
        outer = _operands(node)
        if node._erased or outer is None:
            continue
        for index, inner in enumerate(outer):
            if not is_call(inner, *PRODUCTS) or only_user(inner) is None:
                continue
            pair = _operands(inner)
            other = outer[1 - index]
            if pair is None or any(shape(item)[:-2] != shape(node)[:-2] or len(shape(item)) < 2 for item in (*pair, other)):
                continue
            first, second, third = (*pair, other) if index == 0 else (other, *pair)
            rows, one = shape(first)[-2:]
            two, columns = shape(third)[-2:]
            left_cost = rows * one * two + rows * two * columns
            right_cost = one * two * columns + rows * one * columns
            now, then = (left_cost, right_cost) if index == 0 else (right_cost, left_cost)
            if 4 * then > 3 * now:
                continue
            if index == 0:
                result = editor.call(node, aten.matmul.default, first, editor.call(node, aten.matmul.default, second, third))
            else:
                result = editor.call(node, aten.matmul.default, editor.call(node, aten.matmul.default, first, second), third)
            editor.replace(node, result)
            count += 1
            break
    return count


def triangle_of_product(editor: Editor) -> int:
    """`tril(a @ b)` and `triu(a @ b)` compute only the blocks that are kept.

    Conditions: two matrices of at least 512 rows; the product has no other reader. Nothing is assumed about a and b.
    """
    count = 0
    for node in editor.nodes(aten.tril, aten.triu):
        product = node.args[0]
        if node._erased or not isinstance(product, fx.Node) or not is_call(product, *PRODUCTS) or only_user(product) is None:
            continue
        operands = _operands(product)
        if operands is None or len(shape(product)) != 2 or shape(product)[0] < 512:
            continue
        helper = lower_triangle_of_product if is_call(node, aten.tril) else upper_triangle_of_product
        editor.replace(node, editor.call(node, helper, *operands, int(argument(node, "diagonal")), BLOCKS))
        count += 1
    return count


def add_weights(editor: Editor) -> int:
    """`x A + x B` is `x (A + B)`, and `x A + y A` is `(x + y) A`: one product instead of two.

    For `linear`, matrix products and convolutions of equal geometry. Conditions: neither product has another reader; no
    broadcasting; adding the operands touches at most an eighth of the elements that the product multiplies.
    """
    count = 0
    for node in editor.nodes(aten.add):
        if node._erased or node.kwargs or len(node.args) != 2 or not is_float(node):
            continue
        one, two = node.args
        if not isinstance(one, fx.Node) or not isinstance(two, fx.Node) or one is two:
            continue
        if shape(one) != shape(two) or only_user(one) is None or only_user(two) is None:
            continue
        result = _distribute(editor, node, one, two) or _distribute(editor, node, two, one)
        if result is not None and shape(result) == shape(node) and value(result).dtype == value(node).dtype:
            editor.replace(node, result)
            count += 1
    return count


def _distribute(editor: Editor, node: fx.Node, one: fx.Node, two: fx.Node) -> fx.Node | None:
    if is_call(one, *CONVOLUTIONS) and one.target is two.target and one.args[3:] == two.args[3:] and not one.kwargs:
        if one.args[0] is not two.args[0] or shape(one.args[1]) != shape(two.args[1]) or two.kwargs:  # type: ignore[arg-type]
            return None
        weight = editor.call(node, aten.add.Tensor, one.args[1], two.args[1])
        target: Any = one.target
        return editor.call(node, target, one.args[0], weight, _sum(editor, node, one, two), *one.args[3:])
    first, second = _as_linear(one), _as_linear(two)
    if first is None or second is None:
        return None
    (x, weight, turned), (y, other, other_turned) = first, second
    rows = value(node).numel() // shape(node)[-1]
    if x is y and shape(weight)[:: -1 if turned != other_turned else 1] == shape(other) and rows >= 8:
        if turned != other_turned:
            other = editor.call(node, aten.t.default, other)
        total = editor.call(node, aten.add.Tensor, weight, other)
        if turned:
            total = editor.call(node, aten.t.default, total)
        bias = _sum(editor, node, one, two)
        return editor.call(node, aten.linear.default, x, total, bias)
    same = weight is other and turned == other_turned and shape(x) == shape(y)
    if same and shape(node)[-1] >= 8:
        total = editor.call(node, aten.add.Tensor, x, y)
        if turned:
            weight = editor.call(node, aten.t.default, weight)
        return editor.call(node, aten.linear.default, total, weight, _sum(editor, node, one, two))
    return None


def _as_linear(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """`(x, weight, turned)` of a product with one matrix: turned when the matrix is (in, out) and not (out, in)."""
    if is_call(node, aten.linear):
        return argument(node, "input"), argument(node, "weight"), False
    operands = _operands(node) if is_call(node, aten.matmul, aten.mm) else None
    if operands is None or len(shape(operands[1])) != 2 or len(shape(operands[0])) < 2:
        return None
    return operands[0], operands[1], True


def _sum(editor: Editor, at: fx.Node, one: fx.Node, two: fx.Node) -> fx.Node | None:
    """The sum of the biases of two linear operators; None when neither has one."""
    found = [argument(node, "bias") for node in (one, two) if not is_call(node, *PRODUCTS)]
    biases = [bias for bias in found if isinstance(bias, fx.Node)]
    if not biases:
        return None
    return biases[0] if len(biases) == 1 else editor.call(at, aten.add.Tensor, *biases)
