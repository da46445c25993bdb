"""Derives facts about a call of an ATen graph from its lowered form, whatever its name.

A pass over a joint graph asks whether a call is a view, whether it is a constant, and which folds and products it
computes.  The rules in `lowering/rules/` answer that for every operation that has a rule: lowered by itself
(`lower_call`), a call is an expression over its operands.  `linearity.py` and `special_numbers.py` derive more from it,
by the algebra of `lowering/ir/scalar_ops.py`.

Input: an fx node whose operands have fake tensors as `val`; output: an answer that holds for all numbers, up to
rounding.  Where nothing is known, as for a call without a rule, the answer is negative.
"""

from __future__ import annotations

from operator import getitem
from typing import TypeAlias, cast
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ZERO, substitute
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Cast, Const, Expr, Index, IndexValue, Load, Op, loads, postorder
from fusion.lowering.ir.program import Contract, Extern, Map, Reduce
from fusion.lowering.ir.scalar_ops import ScalarName
from fusion.lowering.ir.sizes import elements, sizes_of
from fusion.lowering.lower import LoweredCall, lower_call
from fusion.lowering.registry import RULES
from fusion.lowering.value import Shape, Value, axes_of, axis_bounds, broadcast_to, reshape

Operands: TypeAlias = tuple[object, ...]

_LOWERED: WeakKeyDictionary[fx.Node, tuple[str, Operands, LoweredCall | None]] = WeakKeyDictionary()
"""The lowered form of each node, with its arguments then: passes ask repeatedly, and change nodes in between."""


def lowered(node: fx.Node) -> LoweredCall | None:
    """Return a call of an ATen operation, lowered by itself; None if it cannot be lowered."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target not in RULES:
        return None
    if any("val" not in arg.meta for arg in node.all_input_nodes):
        return None
    text, values = f"{node.target}{node.args}{node.kwargs}", _values(node)
    known = _LOWERED.get(node)
    if known is None or known[0] != text or any(a is not b for a, b in zip(known[1], values, strict=True)):
        known = _LOWERED[node] = text, values, _lowered(node)
    return known[2]


def _values(node: fx.Node) -> Operands:
    return tuple(each.meta.get("val") for each in (node, *node.all_input_nodes))


def _lowered(node: fx.Node) -> LoweredCall | None:
    try:
        return lower_call(node)
    except Unsupported:
        return None


def value_of_call(node: fx.Node) -> Value | None:
    """Return the element of a call's one result as an expression over its operands; None if it needs folds or calls."""
    call = lowered(node)
    if call is None or not isinstance(call.result, Value):
        return None
    if not call.nodes:
        return call.result
    return _computed(call.result, call) if len(call.nodes) == 1 else None


def results_of_call(node: fx.Node) -> dict[fx.Node, Value]:
    """Return the results of a call that are computed element by element: its own, or the parts that a graph selects.

    Elements of several results may depend on random numbers, too.
    """
    call = lowered(node)
    if call is None or not isinstance(call.result, tuple):
        value = value_of_call(node)
        return {} if value is None else {node: value}
    selected = {user: call.result[cast(int, user.args[1])] for user in node.users if user.target is getitem}
    values = {user: _computed(part, call) for user, part in selected.items() if isinstance(part, Value)}
    return {user: value for user, value in values.items() if value is not None}


def _computed(result: Value, call: LoweredCall) -> Value | None:
    """Return a result with the expression that a call stores in it; None if it stores none."""
    for step in call.nodes:
        if isinstance(step, Map) and result.buffer() == step.out:
            return Value(result.shape, result.dtype, result.device, step.expr)
    return None


# Views and constants --------------------------------------------------------------------------------------------------


def constant_of(part: object) -> int | float | None:
    """Return the constant that a part of an expression is everywhere; None if it is not known to be constant.

    >>> constant_of(2), constant_of("text")
    (2, None)
    """
    if isinstance(part, fx.Node) and part.target in RULES and RULES[cast(OpOverload, part.target)].lazy:
        value = value_of_call(part)
        return value.expr.value if value is not None and isinstance(value.expr, Const) else None
    return part if isinstance(part, (int, float)) else None


def keeps_elements(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a call has the elements of `source`, in row-major order, up to conversion to another float."""
    value = value_of_call(node)
    if value is None or value.device != source.meta["val"].device:
        return False
    return _is_at(unrounded(value.expr), source, value.shape)


def unrounded(expr: Expr) -> Expr:
    """Remove conversions between floats from an expression, except to 8-bit (quantised) floats."""
    while isinstance(expr, Cast) and expr.dtype.is_floating_point and expr.dtype.itemsize > 1:
        if not (expr.arg.dtype.is_floating_point or expr.arg.dtype is torch.bool):
            break
        expr = expr.arg
    return expr


def broadcast_of(node: fx.Node) -> fx.Node | None:
    """Return the operand that a call only broadcasts; None for any other call.

    >>> from fusion.inspect.examples import traced
    >>> (call,) = traced(lambda x: x.expand(3, 4), torch.empty(4)).graph.find_nodes(
    ...     op="call_function", target=torch.ops.aten.expand.default
    ... )
    >>> broadcast_of(call)
    x
    """
    source, _ = _viewed(node) or (None, ())
    value = value_of_call(node)
    if source is None or value is None:
        return None
    return source if place_of(source, value.shape) is without_units(value.expr, value.shape) else None


def is_rearranged(node: fx.Node) -> bool:
    """Return whether a call only rearranges one operand, all of whose elements it contains, possibly repeated."""
    source, _ = _viewed(node) or (None, ())
    return source is not None and bool(elements(node.meta["val"].shape) >= elements(source.meta["val"].shape))


def memories(node: fx.Node) -> set[int]:
    """Return the storages of the tensors that a node returns, as traced."""
    values = pytree.tree_leaves(node.meta.get("val"))
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def axis_order(node: fx.Node) -> list[int] | None:
    """Return the order of the operand's axes in the result of a call, without axes of size 1.

    None unless the call is a permutation: a load whose indices are distinct axes.
    """
    source, index = _viewed(node) or (None, ())
    if source is None:
        return None
    positions = {
        at: k for k, (at, size) in enumerate(zip(index, operand_value(source).shape, strict=True)) if size != 1
    }
    shape = sizes_of(node.meta["val"].shape)
    long = [axis for axis, size in zip(axes_of(shape), shape, strict=True) if size != 1]
    return [positions[axis] for axis in long] if set(positions) == set(long) else None


def _viewed(node: fx.Node) -> tuple[fx.Node, tuple[Index, ...]] | None:
    """Return the operand that a call only loads, and the index, if that is not itself loaded."""
    value = value_of_call(node)
    if value is None or not isinstance(value.expr, Load) or value.expr.children():
        return None
    load = value.expr
    return next(arg for arg in node.all_input_nodes if arg.name == load.buffer), load.index


def _is_at(expr: Expr, source: fx.Node, shape: Shape) -> bool:
    """Return whether an expression over axes of `shape` is the element of `source` at the same row-major position."""
    tensor = operand_value(source)
    if not isinstance(expr, Load) or expr.buffer != source.name or _count(tensor.shape) != _count(shape):
        return False
    return without_units(expr, shape) is without_units(reshape(tensor, shape).expr, shape)


def place_of(source: fx.Node, shape: Shape) -> Expr | None:
    """Return the element of a tensor for each element of a result of `shape`: in the same order, or broadcast."""
    tensor = operand_value(source)
    if _count(tensor.shape) == _count(shape):
        return without_units(reshape(tensor, shape).expr, shape)
    ends = shape[len(shape) - tensor.rank :]
    fits = tensor.rank <= len(shape) and all(size in (1, end) for size, end in zip(tensor.shape, ends, strict=True))
    return without_units(broadcast_to(tensor, shape).expr, shape) if fits else None


def without_units(expr: Expr, shape: Shape) -> Expr:
    """Substitute 0 for axes of size 1 in an expression."""
    units = {axis: ZERO for axis, size in zip(axes_of(shape), shape, strict=True) if size == 1}
    return substitute(expr, units, axis_bounds(shape)) if units else expr


def operand_value(node: fx.Node) -> Value:
    """Return the value of an operand of a call."""
    val = node.meta["val"]
    shape = sizes_of(val.shape)
    return Value(shape, val.dtype, val.device, Load(node.name, axes_of(shape), val.dtype))


def _count(shape: Shape) -> sympy.Expr:
    return sympy.Mul(*shape)


# Folds ----------------------------------------------------------------------------------------------------------------


def folds(node: fx.Node) -> list[Reduce]:
    """Return the reductions that a call computes from its operands."""
    call = lowered(node)
    return [] if call is None else [step for step in call.nodes if isinstance(step, Reduce)]


def fold_of(node: fx.Node) -> Reduce | None:
    """Return the reduction that a node computes of a tensor's elements; None if it computes anything else, too.

    Roundings are ignored.  One of several results is selected by its position.
    """
    source, position = cast("tuple[fx.Node, int]", node.args) if node.target is getitem else (node, None)
    call = lowered(source)
    result = None if call is None else call.result
    if isinstance(result, tuple) and position is not None:
        result = result[position]
    if call is None or not isinstance(result, Value):
        return None
    stored = {step.out: step for step in call.nodes if isinstance(step, (Map, Reduce))}
    expr = unrounded(result.expr)
    while isinstance(expr, Load) and expr.buffer in stored:
        step = stored[expr.buffer]
        if isinstance(step, Reduce):
            return step if isinstance(unrounded(step.args[0]), Load) else None
        expr = unrounded(step.expr)
    return None


def row_sum(node: fx.Node) -> tuple[fx.Node, sympy.Expr] | None:
    """Return the tensor whose last axis a call sums, and the number by which it divides: 1, or the length of a mean.

    None for any other call, and if the axis has the size 1.

    >>> from fusion.inspect.examples import traced
    >>> graph = traced(lambda x: (x.sum(-1), x.mean(-1), x.sum(0)), torch.empty(3, 4)).graph
    >>> [row_sum(node) for node in graph.nodes if node.op == "call_function"]
    [(x, 1), (x, 4), None]
    """
    call = lowered(node) if _shortens_rows(node) else None
    if call is None or not isinstance(call.result, Value):
        return None
    (source,) = node.all_input_nodes
    value = _computed(call.result, call) or call.result
    expr, length = unrounded(without_units(value.expr, value.shape)), sizes_of(source.meta["val"].shape)[-1]
    is_mean = isinstance(expr, Op) and expr.name == "truediv" and _is_number(expr.args[1], length)
    sums = unrounded(expr.children()[0]) if is_mean else expr
    for fold in folds(node):
        if fold.op == "sum" and _is_over_rows(fold, source) and _sums_at(fold, value) is sums:
            return source, length if is_mean else sympy.Integer(1)
    return None


def _sums_at(fold: Reduce, value: Value) -> Expr:
    """Return the element of a fold at the row-major position of each element of `value`, which has as many."""
    sizes = tuple(axis.size for axis in fold.axes)
    sums = Value(sizes, fold.dtype, value.device, Load(fold.out, axes_of(sizes), fold.dtype))
    return without_units(reshape(sums, value.shape).expr, value.shape)


def _is_over_rows(fold: Reduce, source: fx.Node) -> bool:
    """Return whether a fold reduces each row of a tensor to one number."""
    element, tensor = unrounded(fold.args[0]), operand_value(source)
    axes = [axis.symbol for axis in (*fold.axes, *fold.over)]
    if not isinstance(element, Load) or element.mask is not None or element.buffer != source.name:
        return False
    if len(axes) != tensor.rank or len(fold.over) != 1:
        return False
    return all(size == 1 or at == axis for at, axis, size in zip(element.index, axes, tensor.shape, strict=True))


def _is_number(expr: Expr, number: sympy.Expr) -> bool:
    """Return whether an expression equals a number at every point."""
    expr = expr.arg if isinstance(expr, Cast) else expr
    if isinstance(expr, Const):
        return bool(number.is_Integer) and int(number) == expr.value
    return isinstance(expr, IndexValue) and expr.index == number


def _shortens_rows(node: fx.Node) -> bool:
    """Return whether a call of one tensor of floats has the shape of sums over its last axis, which is not of size 1.

    Most calls do not, and need not be lowered.
    """
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    floats = [val for val in values if isinstance(val, torch.Tensor) and val.is_floating_point()]
    if len(values) != 2 or len(floats) != 2 or not floats[1].ndim:
        return False
    result, (*rows, row) = (sizes_of(val.shape) for val in floats)
    return row != 1 and tuple(size for size in result if size != 1) == tuple(size for size in rows if size != 1)


def averaged(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return the operands of which a call computes means over the last dimensions, each with the number of these.

    A mean is a sum that is divided by the same number everywhere.

    >>> from fusion.inspect.examples import traced
    >>> (mean,) = traced(lambda x: x.mean([1, 2]), torch.empty(3, 4, 5)).graph.find_nodes(
    ...     op="call_function", target=torch.ops.aten.mean.dim
    ... )
    >>> averaged(mean)
    [(x, 2)]
    """
    sums = {fold.out: fold for fold in folds(node) if fold.op == "sum"}
    averages = _divided(node).intersection(sums)
    operands = {arg.name: arg for arg in node.all_input_nodes}
    rows: dict[fx.Node, int] = {}
    for name, fold in sums.items():
        over = {axis.symbol for axis in fold.over}
        for load in loads(*fold.args) if name in averages else ():
            count = len(over)
            if load.buffer in operands and set(load.index[-count:]) == over and over.isdisjoint(load.index[:-count]):
                rows[operands[load.buffer]] = count
    return list(rows.items())


def _divided(node: fx.Node) -> set[str]:
    """Return the buffers of a call whose elements it divides by numbers that are the same everywhere."""
    call = lowered(node)
    steps = [] if call is None else [step for step in call.nodes if not isinstance(step, (Extern, Chunked))]
    operations = [expr for expr in postorder(*(expr for step in steps for expr in step.exprs)) if isinstance(expr, Op)]
    pairs = [operation.args for operation in operations if operation.name == "truediv"]
    return {over.buffer for over, under in pairs if isinstance(over, Load) and not list(loads(under))}


# Products and comparisons ---------------------------------------------------------------------------------------------


def matrices(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the operands [b?, m, k] and [b?, k, n] of a product of matrices of floats; None for any other call.

    >>> from fusion.inspect.examples import traced
    >>> graph = traced(lambda x, y: (x @ y).sin(), torch.empty(3, 4), torch.empty(4, 5)).graph
    >>> [matrices(node) for node in graph.nodes if node.op == "call_function"]
    [(x, y), None]
    """
    call = lowered(node) if _multiplies_shapes(node) else None
    if call is None or len(call.nodes) != 1 or not isinstance(call.result, Value):
        return None
    (product,) = call.nodes
    if not isinstance(product, Contract) or call.result.buffer() != product.out:
        return None
    *batch, row, column = (axis.symbol for axis in product.axes)
    (over,) = (axis.symbol for axis in product.over)
    indices = ((*batch, row, over), (*batch, over, column))
    operands = {arg.name: arg for arg in node.all_input_nodes}
    pairs = zip(product.exprs, indices, strict=True)
    names = [expr.buffer for expr, index in pairs if isinstance(expr, Load) and expr.index == index]
    return (operands[names[0]], operands[names[1]]) if len(names) == 2 else None


def _multiplies_shapes(node: fx.Node) -> bool:
    """Return whether a call has the shapes of a product of matrices, [b?, m, k] and [b?, k, n] to [b?, m, n].

    Most calls do not, and need not be lowered.
    """
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    floats = [val for val in values if isinstance(val, torch.Tensor) and val.is_floating_point()]
    ranks = {val.ndim for val in floats}
    if len(values) not in (2, 3) or len(floats) != len(values) or len(ranks) != 1 or min(ranks) < 2:
        return False
    result, left, right = (sizes_of(val.shape) for val in (floats[0], floats[1], floats[-1]))
    return result == (*left[:-1], right[-1]) and left[-1] == right[-2]


def compared(node: fx.Node, *names: ScalarName) -> list[fx.Node]:
    """Return the two tensors that a call compares, element by element; nothing for any other call.

    Args:
        names: the comparisons that count; without, those for equality.

    >>> from fusion.inspect.examples import traced
    >>> graph = traced(lambda x, y: (x != y).sum(), torch.empty(3), torch.empty(3)).graph
    >>> [compared(node) for node in graph.nodes if node.op == "call_function"]
    [[x, y], []]
    >>> compared(graph.find_nodes(op="call_function", target=torch.ops.aten.ne.Tensor)[0], "eq")
    []
    """
    val = node.meta.get("val")
    value = value_of_call(node) if isinstance(val, torch.Tensor) and val.dtype is torch.bool else None
    if value is None or not isinstance(value.expr, Op) or value.expr.name not in (names or ("eq", "ne")):
        return []
    operands = {arg.name: arg for arg in node.all_input_nodes}
    pair = [operands[side.buffer] for side in map(unrounded, value.expr.args) if isinstance(side, Load)]
    return pair if len(pair) == 2 else []
