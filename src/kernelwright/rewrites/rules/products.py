"""Rewrites matrix products with structure, chains of them, and attention."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx

from kernelwright.rewrites.graph import (
    TABLES,
    Editor,
    argument,
    aten,
    dtype,
    is_call,
    is_float,
    is_tensor,
    named,
    numel,
    operand_nodes,
    read_once,
    scalar,
    shape,
    stretch_of,
    value,
)
from kernelwright.rewrites.rules.affine import CONVOLUTIONS, affine
from kernelwright.rewrites.rules.base import each
from kernelwright.rewrites.templates.products import Operands

PRODUCTS = (aten.matmul, aten.mm, aten.bmm)


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
    """True where `diagonal` or `diag_embed` is about the main diagonal of the last two dimensions."""
    dims = {argument(node, name) % rank for name in ("dim1", "dim2")}
    return dims == {rank - 1, rank - 2} and not argument(node, "offset")


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


@torch.compiler.disable  # type: ignore[misc]
def one_below_another(*weights: torch.Tensor) -> torch.Tensor:
    """Weights of linear operators as one tensor.

    Parameters move into it, as those of `torch.nn.LSTM` move into its flat weights. They stay the objects that they are, and
    what is written to one is read here; later calls copy nothing. Others, and parameters of which a gradient may be wanted
    or whose memory they share with something else, are copied in each call.
    """
    first, end = weights[0], 0
    if torch.is_grad_enabled() or any(type(weight) is not torch.nn.Parameter for weight in weights):
        return torch.cat(weights)
    places = [(weight.untyped_storage().data_ptr(), weight.storage_offset(), weight.is_contiguous()) for weight in weights]
    for weight, place in zip(weights, places, strict=True):
        if place != (places[0][0], places[0][1] + end, True):
            break
        end += weight.numel()
    else:
        return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat(weights)
        if all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights):
            for weight, part in zip(weights, torch.split(whole, [len(weight) for weight in weights]), strict=True):
                weight.data = part
    return whole


def join_linears(editor: Editor) -> int:
    """Linear operators of one tensor, such as queries, keys and values, are one product, of which they are slices.

    Conditions: not float32, whose products have kernels of their own; the weights are parameters, each read by one of
    them; all have a bias, or none has. The weights then lie one below another (`one_below_another`).
    """
    found: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in editor.nodes(aten.linear):
        source, weight, bias = (argument(node, name) for name in ("input", "weight", "bias"))
        state = [item for item in (weight, bias) if item is not None]
        is_live = all(
            item.op == "placeholder" and item.meta["role"] == "parameter" and len(item.users) == 1 for item in state
        )
        if is_live and dtype(node) != torch.float32:
            found.setdefault((source, bias is None), []).append(node)
    groups = [members for members in found.values() if len(members) > 1]
    start = editor.nodes()[0]
    for members in groups:
        # Made before everything else, they do not divide the graph that torch.compile sees.
        names = ("weight", "bias") if argument(members[0], "bias") is not None else ("weight",)
        whole = [editor.call(start, one_below_another, *(argument(node, name) for node in members)) for name in names]
        joined = editor.call(members[0], aten.linear.default, members[0].args[0], *whole)
        end = 0
        for node in members:
            begin, end = end, end + shape(node)[-1]
            editor.replace(node, editor.call(node, aten.slice.Tensor, joined, len(shape(node)) - 1, begin, end))
    return len(groups)


def activated_product(bias: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, by_tanh: bool) -> torch.Tensor:
    """ReLU of a product with a bias, or GELU by tanh; on a GPU within the product. A processor's takes another GELU."""
    if rows.is_cuda:
        return torch._addmm_activation(bias, rows, weight, use_gelu=by_tanh)
    result = torch.addmm(bias, rows, weight)
    return F.gelu(result, approximate="tanh") if by_tanh else torch.relu(result)


@each(aten.relu, aten.gelu)
def activation_in_product(editor: Editor, node: fx.Node) -> fx.Node | None:
    """ReLU, or GELU by tanh, of a linear operator or `addmm` is computed by the library's product.

    Conditions: not float32; a bias is a vector; the product has no other reader than the activation, or a view.
    """
    view = read_once(node.args[0], aten.view, aten.reshape)
    product = read_once(view.args[0] if view else node.args[0], aten.linear, aten.addmm)
    by_tanh = is_call(node, aten.gelu)
    given = Operands.of(product) if product is not None else None
    if given is None or product is None or (given.alpha, given.beta) != (1, 1) or dtype(node) == torch.float32:
        return None
    columns = shape(product)[-1:]
    if (
        len(shape(given.right)) != 2
        or (by_tanh and argument(node, "approximate") != "tanh")
        or (given.bias is not None and shape(given.bias) != columns)
    ):
        return None
    left, right, bias = given.left, given.right, given.bias
    if given.transposed:
        right = editor.call(node, aten.t.default, right)
    if bias is None:
        bias = editor.call(node, aten.new_zeros.default, left, [*columns])
    rows = left if len(shape(left)) == 2 else editor.reshape(node, left, (-1, shape(left)[-1]))
    result = editor.call(node, activated_product, bias, rows, right, by_tanh)
    return editor.reshape(node, result, shape(node))


MASK_OPERATORS = named(TABLES["facts"]["make_masks"])


LEAST_WIDE_HEAD = 512
"""Length of queries from which on attention is two products: the scores are few beside the arithmetic that makes them."""


def heads_inside_on_gpu(result: torch.Tensor) -> torch.Tensor:
    """An attention's result (batch, heads, queries, width) as PyTorch's kernel for wide heads lays it out on a GPU."""
    return result.transpose(1, 2).contiguous().transpose(1, 2) if result.is_cuda else result


@each(aten.scaled_dot_product_attention)
def wide_attention(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Attention of long queries is two products and a softmax, each of which has faster kernels than the whole.

    Conditions: queries of at least `LEAST_WIDE_HEAD` numbers; no mask, dropout or sharing of keys. Rounding differs. A
    result that is handed out lies as PyTorch's own.
    """
    query, key, values = node.args[:3]
    others = (argument(node, name) for name in ("attn_mask", "dropout_p", "is_causal", "enable_gqa"))
    if not all(map(is_tensor, (query, key, values))) or any(others):
        return None
    width = shape(cast(fx.Node, query))[-1]
    if width < LEAST_WIDE_HEAD:
        return None
    scale = argument(node, "scale")
    products = editor.call(node, aten.matmul.default, query, editor.call(node, aten.transpose.int, key, -2, -1))
    scores = editor.call(node, aten.mul.Tensor, products, 1 / math.sqrt(width) if scale is None else float(scale))
    result = editor.call(node, aten.matmul.default, editor.call(node, aten.softmax.int, scores, -1), values)
    if any(user.op == "output" for user in node.users) and _lies_heads_inside(cast(fx.Node, query), cast(fx.Node, values)):
        result = editor.call(node, heads_inside_on_gpu, result)
    return result if shape(result) == shape(node) else None


@each(aten.scaled_dot_product_attention)
def share_heads(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Attention to keys and values that are repeated for several queries' heads reads each of them once.

    Conditions: four dimensions; not float32, for which PyTorch has no such kernel; each head of keys and values is
    repeated for the same number of neighbouring heads.
    """
    query, *repeated = node.args[:3]
    once = [_before_repeats(item) for item in repeated]
    if argument(node, "enable_gqa") or dtype(node) == torch.float32 or not is_tensor(query) or len(once) < 2:
        return None
    key, values = once
    if key is None or values is None or shape(key)[:2] != shape(values)[:2]:
        return None
    return editor.again(node, node, query, key, values, *node.args[3:], **node.kwargs, enable_gqa=True)


def _before_repeats(item: Any) -> fx.Node | None:
    """The tensor (batch, heads, length, width) whose heads a tensor repeats, each several times in a row."""
    expanded: Any = item.args[0] if is_call(item, aten.reshape, aten.view, aten._unsafe_view) else None
    spread: Any = expanded.args[0] if is_call(expanded, aten.expand) else None
    if not is_call(spread, aten.unsqueeze) or int(argument(spread, "dim")) != 2 or len(shape(item)) != 4:
        return None
    source = cast(fx.Node, spread.args[0])
    batch, heads, length, width = shape(source)
    return source if shape(item) == (batch, heads * shape(expanded)[2], length, width) else None


def _lies_heads_inside(query: fx.Node, values: fx.Node) -> bool:
    """True where PyTorch attends to such long queries by its memory-efficient kernel on a GPU.

    Its other kernels take 256 numbers at most, and what is not aligned for any is computed by products.
    """
    whole = all(shape(one)[-1] * value(one).element_size() % 16 == 0 for one in (query, values))
    return whole and len(shape(query)) == 4 and dtype(query) in (torch.float32, torch.float16, torch.bfloat16)


@each(aten.matmul, aten.bmm)
def attention(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`softmax(q @ k.T * scale + mask) @ v` is scaled dot-product attention.

    Conditions: queries shorter than `LEAST_WIDE_HEAD`; the softmax runs over the keys; scores and weights have no other
    reader; no dropout in between. A mask that is module state or an input is handed over and read in each call; only a mask
    that `forward` itself makes from constants may be recognised as causal. Rows whose keys are all masked, which the
    reference makes NaN, may differ.
    """
    weights, values = operand_nodes(node) or (None, None)
    weights = read_once(weights, aten.softmax, aten._softmax)
    if weights is None or values is None or argument(weights, "dim") not in (-1, len(shape(weights)) - 1):
        return None
    found = _scores(weights.args[0])
    if found is None or dtype(weights) != dtype(node) or len(shape(node)) not in (3, 4):
        return None
    query, transposed, scale, masks = found
    if len(masks) > 1 or shape(query)[-1] >= LEAST_WIDE_HEAD or not _fits(query, transposed, values):
        return None
    key = editor.call(node, aten.transpose.int, transposed, -2, -1)
    mask, extra = None, {"scale": scale}
    if masks:
        kind, item = masks[0]
        if _is_causal(kind, item, shape(query)[-2], shape(key)[-2]):
            extra["is_causal"] = True
        else:
            mask = editor.call(node, aten.logical_not.default, item) if kind == "hide" else item
            # A mask of rank 2 to 4 broadcasts; the operator wants at least two dimensions.
            if dtype(mask) not in (torch.bool, dtype(query)) or len(shape(mask)) < 2:
                return None
    result = editor.call(node, aten.scaled_dot_product_attention.default, query, key, values, mask, **extra)
    return result if shape(result) == shape(node) else None


def _is_causal(kind: str, mask: fx.Node, rows: int, columns: int) -> bool:
    """True where a mask is made from constants and hides from every query exactly the later keys."""
    constant = _evaluate(mask)
    if constant is None or rows != columns:
        return False
    seen = ~constant if kind == "hide" else constant == 0
    square = torch.ones(rows, columns, dtype=torch.bool).tril()
    hidden_is_infinite = kind == "hide" or bool((constant[~seen] == -math.inf).all())
    return seen.reshape(-1, rows, columns).eq(square).all().item() is True and hidden_is_infinite


def _scores(item: Any) -> tuple[fx.Node, fx.Node, float, list[tuple[str, Any]]] | None:
    """Read scores back to `(query, transposed key, scale, masks)`, where a mask hides keys or is added."""
    scale = 1.0
    masks: list[tuple[str, Any]] = []
    while read_once(item):
        step = affine(item)
        if step and step.shift == 0.0 and step.scale > 0:
            scale, item = scale * step.scale, step.source
            continue
        if is_call(item, aten.masked_fill) and scalar(item.args[2]) == -math.inf and is_tensor(item.args[1]):
            masks.append(("hide", item.args[1]))
            item = item.args[0]
            continue
        # An added mask outside the factor is what the operator does; inside it, the mask would be scaled too.
        if scale == 1.0 and not masks and (pair := operand_nodes(item, aten.add)):
            item, mask = pair
            masks.append(("add", mask))
            continue
        break
    pair = operand_nodes(read_once(item), aten.matmul, aten.bmm)
    if pair is None:
        return None
    query, transposed = pair
    # PyTorch's own multi-head attention scales the query; the operator does that at no cost.
    while (step := affine(query)) and step.shift == 0.0:
        scale, query = scale * step.scale, step.source
    return query, transposed, scale, masks


@each(aten.add)
def rotate_before_transpose(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A rotary embedding of `x.transpose(1, 2)` is the transpose of one of x, which a kernel reads and writes in order.

    The embedding is `q * cos + cat([-q[..., h:], q[..., :h]], -1) * sin`. Conditions: four dimensions; no other reader of
    either product; the result has the strides of the reference's.
    """
    terms = [read_once(item, aten.mul) for item in operand_nodes(node) or ()]
    for one, two in (terms, terms[::-1]) if len(terms) == 2 else ():
        for (query, cosine), (turned, sine) in itertools.product(_either_way(one), _either_way(two)):
            if not _is_transposed(query) or not _swaps_halves(turned, query) or shape(query) != shape(node):
                continue
            source, half = cast(fx.Node, query.args[0]), shape(query)[-1] // 2
            factors = [_before_transpose(editor, node, item) for item in (cosine, sine)]
            if None in factors:
                continue
            last = editor.call(node, aten.neg.default, editor.call(node, aten.slice.Tensor, source, 3, half, 2 * half))
            first = editor.call(node, aten.slice.Tensor, source, 3, 0, half)
            other = editor.call(node, aten.cat.default, [last, first], 3)
            parts = [editor.call(node, aten.mul.Tensor, *pair) for pair in zip((source, other), factors, strict=True)]
            result = editor.call(node, aten.transpose.int, editor.call(node, aten.add.Tensor, *parts), 1, 2)
            if dtype(result) == dtype(node) and value(result).stride() == value(node).stride():
                return result
    return None


def _either_way(product: fx.Node | None) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """Both orders of a product's factors."""
    pair = operand_nodes(product)
    return (pair, pair[::-1]) if pair else ()


def _is_transposed(node: fx.Node) -> bool:
    """True where a tensor (batch, heads, length, width) is a view of one (batch, length, heads, width)."""
    if not is_call(node, aten.transpose) or len(shape(node)) != 4:
        return False
    return {int(argument(node, name)) % 4 for name in ("dim0", "dim1")} == {1, 2}


def _swaps_halves(node: fx.Node, query: fx.Node) -> bool:
    """True where a tensor is the last half of a query, negated, before its first half."""
    if not is_call(node, aten.cat) or len(node.users) > 1 or int(argument(node, "dim")) % 4 != 3:
        return False
    half = shape(query)[-1] // 2
    parts = argument(node, "tensors")
    if len(parts) != 2 or (negated := read_once(parts[0], aten.neg)) is None or shape(node) != shape(query):
        return False
    pieces = [cast(fx.Node, negated.args[0]), parts[1]]
    return [stretch_of(piece, 3) for piece in pieces] == [(query, half), (query, 0)] and all(
        shape(piece)[-1] == half for piece in pieces
    )


def _before_transpose(editor: Editor, at: fx.Node, factor: fx.Node) -> fx.Node | None:
    """A factor that broadcasts to (batch, heads, length, width), for a tensor (batch, length, heads, width)."""
    if is_call(factor, aten.unsqueeze) and len(shape(factor)) == 4 and int(argument(factor, "dim")) % 4 == 1:
        return editor.call(at, aten.unsqueeze.default, factor.args[0], 2)
    if len(shape(factor)) == 4:
        return editor.call(at, aten.transpose.int, factor, 1, 2)
    return editor.call(at, aten.unsqueeze.default, factor, 1) if len(shape(factor)) == 2 else None


def _fits(query: fx.Node, transposed: fx.Node, values: fx.Node) -> bool:
    same = dtype(query) == dtype(transposed) == dtype(values)
    ranks = {len(shape(query)), len(shape(transposed)), len(shape(values))}
    return same and len(ranks) == 1 and shape(transposed)[-1] == shape(values)[-2]


def _evaluate(node: fx.Node) -> torch.Tensor | None:
    """The value of a mask made from constants alone; None when it depends on anything else."""
    if node.op != "call_function" or not is_call(node, *MASK_OPERATORS) or value(node).numel() > 1 << 24:
        return None
    arguments = []
    for item in node.args:
        result = _evaluate(item) if isinstance(item, fx.Node) else item
        if isinstance(item, fx.Node) and result is None:
            return None
        arguments.append(result)
    kwargs = {key: item for key, item in node.kwargs.items() if key not in ("device", "pin_memory")}
    result = node.target(*arguments, **kwargs)  # type: ignore[operator]
    return result if isinstance(result, torch.Tensor) else None
