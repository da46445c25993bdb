"""Determines whether a call of an ATen graph is linear in some of its operands.

Input: an fx node; the nodes of its lowered form (`facts.py`) are classified in order: each element is 0, fixed, linear
or anything else.  Which scalar operations are linear is a column of `lowering/ir/scalar_ops.py`; sums, matrix products
and scattered sums are linear as the scalar operations that they repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto

from torch import fx
from typing_extensions import assert_never

from fusion.joint.facts import constant_of, lowered
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, Random, TileRef, concrete, postorder
from fusion.lowering.ir.program import Contract, Extern, Map, Node, Reduce, Scan, Scatter, writes
from fusion.lowering.ir.scalar_ops import SCALAR_OPS
from fusion.lowering.value import Value


class _Kind(Enum):
    """The dependence of an element on the operands in question."""

    ZERO = auto()
    FIXED = auto()
    LINEAR = auto()
    OTHER = auto()


_CONSTANT = (_Kind.ZERO, _Kind.FIXED)
_HOMOGENEOUS = (_Kind.ZERO, _Kind.LINEAR)


def is_linear(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Return whether a call has one result, which is jointly linear in its operands `inside`; others count as constant.

    Up to rounding; a result that is always 0 is linear, too.
    """
    call = lowered(node)
    if call is None or not isinstance(call.result, Value):
        return False
    kinds = {arg.name: _operand(arg, inside) for arg in node.all_input_nodes}
    for step in call.nodes:
        kinds.update(dict.fromkeys(writes(step), _kind_of_node(step, kinds)))
    return _kind(call.result.expr, kinds) in _HOMOGENEOUS


def _operand(arg: fx.Node, inside: Collection[fx.Node]) -> _Kind:
    if arg in inside:
        return _Kind.LINEAR
    return _Kind.ZERO if constant_of(arg) == 0 else _Kind.FIXED


def _kind_of_node(step: Node, kinds: Mapping[str, _Kind]) -> _Kind:
    match step:
        case Extern() | Chunked():
            return _Kind.FIXED if all(kinds[name] in _CONSTANT for name in step.reads) else _Kind.OTHER
        case Map():
            return _kind(step.expr, kinds)
        case Reduce() | Scan():
            return _of_operation([_kind(arg, kinds) for arg in step.args], ((0,),) if step.op == "sum" else ())
        case Contract():
            return _of_operation([_kind(expr, kinds) for expr in step.exprs], SCALAR_OPS["mul"].linear)
        case Scatter():
            start, value, *others = kinds[step.start], *(_kind(expr, kinds) for expr in step.exprs)
            adds_up = step.op in ("sum", "store") and all(kind in _CONSTANT for kind in others)
            return _of_operation([start, value], ((0, 1),) if adds_up else ())
        case _:
            assert_never(step)


def _kind(root: Expr, kinds: Mapping[str, _Kind]) -> _Kind:
    known: dict[Expr, _Kind] = {}
    for expr in postorder(root):
        below = [known[child] for child in expr.children()]
        match concrete(expr):
            case Const(value=value):
                known[expr] = _Kind.ZERO if value == 0 else _Kind.FIXED
            case Load(buffer=buffer):
                known[expr] = kinds[buffer] if all(kind in _CONSTANT for kind in below) else _Kind.OTHER
            case Op(name=name):
                known[expr] = _of_operation(below, SCALAR_OPS[name].linear)
            case Cast(arg=arg, dtype=dtype):
                floats = dtype.is_floating_point and arg.dtype.is_floating_point
                known[expr] = _of_operation(below, ((0,),) if floats else ())
            case IndexValue() | Random() | TileRef():
                known[expr] = _of_operation(below, ())
            case unknown:
                assert_never(unknown)
    return known[root]


def _of_operation(args: Sequence[_Kind], linear: Sequence[Sequence[int]]) -> _Kind:
    """Return the kind of an operation that is linear in these groups of its arguments."""
    for group in linear:
        moving = [args[k] for k in group]
        rest = [kind for k, kind in enumerate(args) if k not in group]
        if all(kind in _HOMOGENEOUS for kind in moving) and all(kind in _CONSTANT for kind in rest):
            return _Kind.LINEAR if _Kind.LINEAR in moving else _Kind.ZERO
    return _Kind.FIXED if all(kind in _CONSTANT for kind in args) else _Kind.OTHER


def is_gradient(node: fx.Node) -> bool:
    """Return whether an operation is, by its schema, a derivative, linear in its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and "_backward" in schema.name and schema.arguments[0].name.startswith("grad")
