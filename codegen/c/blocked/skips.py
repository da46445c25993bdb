"""Decides whether a block of a loop can have an effect: `Loop.where` over a whole block, as a C condition.

Input: a bool expression and the range of each axis; output: a C text that is false only if the expression is false
throughout, and the lines that it needs before it.  Comparisons of affine indices are evaluated at their most favourable
corner of the block.  Values loaded along one axis of the block are intervals, from their least to their greatest value:
`==` does not hold if two of them are disjoint.  Other conditions on loaded values, such as a mask of rows and columns,
are read throughout the block, which costs little beside its products.  `and` and `or` combine their operands; anything
else counts as true.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from fusion.codegen.c.blocked.blocks import Blocks
from fusion.codegen.c.blocked.scope import TileScope
from fusion.codegen.c.text.indices import Names, affine, index_text
from fusion.lowering.indexing import coefficient, symbols_of
from fusion.lowering.ir.expr import Const, Expr, Op, Random, TileRef, loads, postorder
from fusion.lowering.ir.scalar_ops import INTEGERS, SCALAR_OPS, ScalarName

ALWAYS = "1"

_UPPER_BOUNDS: Mapping[ScalarName, str] = {"le": "<=", "lt": "<"}
_APART: Mapping[ScalarName, str] = {  # of the intervals {0} … {1} and {2} … {3}
    "eq": "({0} <= {3}) & ({2} <= {1})",
    "ne": "({0} != {3}) | ({2} != {1})",
    "lt": "{0} < {3}",
    "le": "{0} <= {3}",
    "gt": "{1} > {2}",
    "ge": "{1} >= {2}",
}


def possible(where: Expr, scope: TileScope) -> tuple[list[str], str]:
    """Return lines, and C text: may `where` be true somewhere in the current block?  `ALWAYS` if that cannot be
    decided.

    Each blocked axis `i` runs from `i_0` up to `i_end`; every other GRID or LOOP axis is at one point.
    """
    known, condition = dict(scope.known), _Possible(scope)
    text = condition.text(where)
    scope.known = known
    return condition.lines, text


class _Possible:
    """Writes one condition; `lines` go before it."""

    def __init__(self, scope: TileScope) -> None:
        self.scope, self.blocks, self.names = scope, scope.blocks, scope.names
        self.lines: list[str] = []

    def text(self, where: Expr) -> str:
        if isinstance(where, Const):
            return ALWAYS if where.value else "0"
        if isinstance(where, Op) and where.name in ("and", "or"):
            parts = [self.text(arg) for arg in where.args]
            if where.name == "or":
                return ALWAYS if ALWAYS in parts else f"({parts[0]} | {parts[1]})"
            kept = [part for part in parts if part != ALWAYS]
            return f"({' & '.join(kept)})" if len(kept) > 1 else kept[0] if kept else ALWAYS
        if isinstance(where, Op) and where.name in _APART and where.args[0].dtype in INTEGERS:
            left, right = (affine(arg) for arg in where.args)
            if left is not None and right is not None:
                return self._of_indices(where.name, left, right)
            if all(self._is_vector(arg) for arg in where.args):
                (low, high), (other_low, other_high) = (self._interval(arg) for arg in where.args)
                return f"({_APART[where.name].format(low, high, other_low, other_high)})"
        elif self._is_vector(where):
            return f"({self._interval(where)[1]} != 0)"
        return self._anywhere(where) if any(loads(where)) and self._is_known(where) else ALWAYS

    def _of_indices(self, name: ScalarName, left: sympy.Expr, right: sympy.Expr) -> str:
        blocks, names = self.blocks, self.names
        if name == "ne":
            return ALWAYS
        if name == "eq":
            return _both(_below(left - right, "<=", blocks, names), _below(right - left, "<=", blocks, names))
        mirror = SCALAR_OPS[name].mirror
        if name not in _UPPER_BOUNDS and mirror is not None:
            return _below(right - left, _UPPER_BOUNDS[mirror], blocks, names)
        return _below(left - right, _UPPER_BOUNDS[name], blocks, names)

    def _is_vector(self, expr: Expr) -> bool:
        """Return whether `expr` varies along at most one axis of a block, and depends only on loads and indices."""
        return expr.dtype in INTEGERS and len(self.scope.tiled(expr)) <= 1 and self._is_known(expr)

    def _is_known(self, expr: Expr) -> bool:
        """Return whether `expr` depends only on indices, and on tensors that the kernel does not change."""
        if any(isinstance(node, (TileRef, Random)) for node in postorder(expr)):
            return False
        return all(load.buffer not in self.scope.written for load in loads(expr))

    def _anywhere(self, where: Expr) -> str:
        """Return the name of the flag that is set where the condition holds at some point of the current block."""
        flag = self.scope.space.fresh("anywhere")
        nest = self.scope.nest([where], self.scope.tiled(where), named=frozenset([where]))
        nest.write(f"{flag} |= {nest.texts[0]};")
        nest.levels[-1].clauses.append(f"reduction(|:{flag})")
        if len(nest.levels) > 2:
            nest.levels[-2].after.append(f"if ({flag}) break;")
        self.lines += [f"int32_t {flag} = 0;", *nest.lines()]
        return flag

    def _interval(self, expr: Expr) -> tuple[str, str]:
        """Return the names of the least and the greatest value of `expr` in the current block."""
        axes = self.scope.tiled(expr)
        low, high = self.scope.space.fresh("least"), self.scope.space.fresh("greatest")
        nest = self.scope.nest([expr], axes, named=frozenset([expr]))
        (value,) = nest.texts
        nest.write(f"{low} = imin({low}, {value});", f"{high} = imax({high}, {value});")
        nest.levels[-1].clauses += [f"reduction(min:{low})", f"reduction(max:{high})"] if axes else []
        self.lines += [f"int64_t {low} = INT64_MAX, {high} = INT64_MIN;", *nest.lines()]
        return low, high


def _both(left: str, right: str) -> str:
    return right if left == ALWAYS else left if right == ALWAYS else f"({left} & {right})"


def _below(difference: sympy.Expr, sign: str, blocks: Blocks, names: Names) -> str:
    """Return C text: may `difference` be below zero (`<`), or not above it (`<=`)?"""
    least = _least(sympy.expand_mul(difference), blocks)
    if least is None:
        return ALWAYS
    ends = {symbol: symbol.name for symbol in least.free_symbols if symbol not in names}
    return f"({index_text(least, {**names, **ends})} {sign} 0)"


def _least(expr: sympy.Expr, blocks: Blocks) -> sympy.Expr | None:
    """Return the least value of `expr` in the current block; None if it is not affine."""
    corner: dict[sympy.Symbol, sympy.Expr] = {}
    for symbol in symbols_of(expr):
        block = blocks.of.get(symbol)
        if block is None or block.bound is None:
            continue
        weight = coefficient(expr, symbol)
        if weight is None or not (weight.is_nonnegative or weight.is_nonpositive):
            return None
        extent = block.extent
        after = block.axis.size if extent.first == 0 else sympy.Symbol(extent.end, integer=True)
        corner[symbol] = extent.first if weight.is_nonnegative else after - 1
    return sympy.expand_mul(expr.xreplace(corner))
