"""Computes 1 minus a power as an `expm1`, which avoids cancellation.

    1 - b ** t  =  0 - expm1(t · log b)      with b a positive number

`Program → Program`.  The bias correction of a running mean is such a difference, with a b near 1: after one step of
Adam, with 0.999 rounded to float32, its relative error is 1e-5.  An optimizer's step in eager computes it in float64;
compiled, PyTorch computes it in float32.

The relative error of a large power is that of `t · log b` times `t · log b`; of the power as written, that of b times
t. If b is rounded by less, as 2 and 10 are exact, large powers stay as they are.  A difference of equal numbers is
+0.0, whichever zero `expm1` gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.ir.expr import Const, Expr, Load, Op, const, make_op, postorder, rewrite
from fusion.lowering.ir.program import Map, Node, Program, with_exprs
from fusion.schedule.rewrites.inline import inline


def subtract_exactly(program: Program) -> Program:
    """Replace differences of 1 and a power in maps by `expm1`; the same object if there are none.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import empty
    >>> show_program(subtract_exactly, lambda t: 1 - 0.5**t, empty(3))
      input t: f32[3]
    - pow_1: f32[3] = map(i0:3) 0.5**t[i0]
    - rsub: f32[3] = map(i0:3) 1.0 - pow_1[i0]
    +   %1 = t[i0] * -0.6931471805599453
    + rsub: f32[3] = map(i0:3) where(%1 > 1.0, 1.0 - 0.5**t[i0], 0.0 - expm1(%1))
      return rsub
    """
    powers: dict[str, Map] = {}
    nodes: list[Node] = []
    inlined_names = dict(program.inlined)
    for node in program.nodes:
        if isinstance(node, Map):
            if _exponent(node.expr) is not None:
                powers[node.out] = node
            elif names := _subtracted(node, powers):
                node = inline(node, {name: powers[name] for name in names})
                node = with_exprs(node, rewrite(node.exprs, _as_expm1))
                before = (name for power in names for name in (*inlined_names.get(power, ()), power))
                inlined_names[node.out] = tuple(dict.fromkeys((*inlined_names.get(node.out, ()), *before)))
        nodes.append(node)
    if all(new is old for new, old in zip(nodes, program.nodes, strict=True)):
        return program
    return eliminate_dead_code(program.edited(nodes, inlined=inlined_names))


def _subtracted(node: Map, powers: Mapping[str, Map]) -> tuple[str, ...]:
    """Return the buffers of powers that `node` subtracts from 1, or 1 from them."""
    pairs = (pair for part in postorder(node.expr) if (pair := _difference(part)) is not None)
    return tuple(dict.fromkeys(x.buffer for x, _ in pairs if isinstance(x, Load) and x.buffer in powers))


def _as_expm1(expr: Expr) -> Expr | None:
    difference = _difference(expr)
    exponent = None if difference is None else _exponent(difference[0])
    if difference is None or exponent is None:
        return None
    value, zero = make_op("expm1", exponent), const(0.0, expr.dtype)
    exact = make_op("add", value, zero) if difference[1] else make_op("sub", zero, value)
    if not _is_near(difference[0]):
        return exact
    return make_op("where", make_op("gt", exponent, const(1.0, expr.dtype)), expr, exact)


def _difference(expr: Expr) -> tuple[Expr, bool] | None:
    """Return x, and whether it comes first, of x - 1, x + -1 and 1 - x."""
    if not (isinstance(expr, Op) and expr.name in ("sub", "add") and expr.dtype.is_floating_point):
        return None
    first, second = expr.args
    if isinstance(second, Const) and second.value == (1 if expr.name == "sub" else -1):
        return first, True
    if expr.name == "sub" and isinstance(first, Const) and first.value == 1:
        return second, False
    return None


def _exponent(expr: Expr) -> Expr | None:
    """Return t · log b of b ** t; None if `expr` is not a power of a positive number other than 1."""
    if not (isinstance(expr, Op) and expr.name == "pow" and expr.dtype.is_floating_point):
        return None
    base, exponent = expr.args
    if not (isinstance(base, Const) and 0 < base.value < math.inf and base.value != 1):
        return None
    return make_op("mul", exponent, const(math.log(base.value), expr.dtype))


def _is_near(power: Expr) -> bool:
    """Return whether the base of a power is rounded by less than its logarithm."""
    assert isinstance(power, Op)
    base, _ = power.args
    assert isinstance(base, Const)
    rounded = float(torch.tensor(base.value, dtype=base.dtype))
    return abs(rounded / base.value - 1) < abs(math.log(base.value)) * torch.finfo(base.dtype).eps / 2
