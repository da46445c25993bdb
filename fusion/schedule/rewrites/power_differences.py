"""Computes 1 minus a power as an `expm1`, which keeps the digits that the difference would cancel.

    1 - b ** t  =  0 - expm1(t · log b)      with b a positive number

`Program → Program`.  How far a running mean has come is such a difference, with a b near 1: after one step of Adam, of
0.999 rounded to float32, it is wrong by 1e-5 of itself.  An optimizer's step in eager has it in float64; compiled, it
is PyTorch that has it in float32.

The relative error of a large power is that of `t · log b` times as much as that is; of the power as it is written, that
of b times t.  Where b is rounded by less, as 2 and 10 are not rounded at all, large powers stay as they are.  A
difference of equal numbers is +0.0, whichever zero `expm1` gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fusion.lowering.expr import Const, Expr, Load, Op, const, make_op, postorder, rewrite
from fusion.lowering.live import without_dead_nodes
from fusion.lowering.program import Map, Node, Program, with_exprs
from fusion.schedule.rewrites.inline import inline


def exact_differences(program: Program) -> Program:
    """The program with such differences of its maps as `expm1`; the same object if there are none."""
    powers: dict[str, Map] = {}
    nodes: list[Node] = []
    taken_in = dict(program.inlined)
    for node in program.nodes:
        if isinstance(node, Map):
            if _exponent(node.expr) is not None:
                powers[node.out] = node
            elif names := _subtracted(node, powers):
                node = inline(node, {name: powers[name] for name in names})
                node = with_exprs(node, rewrite(node.exprs, _as_expm1))
                before = (name for power in names for name in (*taken_in.get(power, ()), power))
                taken_in[node.out] = tuple(dict.fromkeys((*taken_in.get(node.out, ()), *before)))
        nodes.append(node)
    if all(new is old for new, old in zip(nodes, program.nodes, strict=True)):
        return program
    return without_dead_nodes(program.edited(nodes, inlined=taken_in))


def _subtracted(node: Map, powers: Mapping[str, Map]) -> tuple[str, ...]:
    """The buffers of powers that `node` subtracts from 1, or 1 from them."""
    pairs = (pair for part in postorder(node.expr) if (pair := _difference(part)) is not None)
    return tuple(dict.fromkeys(x.buffer for x, _ in pairs if isinstance(x, Load) and x.buffer in powers))


def _as_expm1(expr: Expr) -> Expr | None:
    found = _difference(expr)
    exponent = None if found is None else _exponent(found[0])
    if found is None or exponent is None:
        return None
    value, zero = make_op("expm1", exponent), const(0.0, expr.dtype)
    exact = make_op("add", value, zero) if found[1] else make_op("sub", zero, value)
    if not _is_near(found[0]):
        return exact
    return make_op("where", make_op("gt", exponent, const(1.0, expr.dtype)), expr, exact)


def _difference(expr: Expr) -> tuple[Expr, bool] | None:
    """x, and whether it comes first, of x - 1, x + -1 and 1 - x."""
    if not (isinstance(expr, Op) and expr.name in ("sub", "add") and expr.dtype.is_floating_point):
        return None
    first, second = expr.args
    if isinstance(second, Const) and second.value == (1 if expr.name == "sub" else -1):
        return first, True
    if expr.name == "sub" and isinstance(first, Const) and first.value == 1:
        return second, False
    return None


def _exponent(expr: Expr) -> Expr | None:
    """t · log b of b ** t; None if `expr` is no power of a positive number other than 1."""
    if not (isinstance(expr, Op) and expr.name == "pow" and expr.dtype.is_floating_point):
        return None
    base, exponent = expr.args
    if not (isinstance(base, Const) and 0 < base.value < math.inf and base.value != 1):
        return None
    return make_op("mul", exponent, const(math.log(base.value), expr.dtype))


def _is_near(power: Expr) -> bool:
    """Is the base of a power rounded by less than its logarithm is?"""
    assert isinstance(power, Op)
    base, _ = power.args
    assert isinstance(base, Const)
    rounded = float(torch.tensor(base.value, dtype=base.dtype))
    return abs(rounded / base.value - 1) < abs(math.log(base.value)) * torch.finfo(base.dtype).eps / 2
