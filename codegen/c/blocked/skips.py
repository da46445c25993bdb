"""Decides whether a block of a loop can have an effect: `Loop.where` over a whole block, as a C condition.

Input: a bool expression and the range of each axis; output: a C text that is false only if the expression is false
throughout, and the lines that it needs before it.  Comparisons of affine indices are evaluated at their most favourable
corner of the block.  Values loaded along one axis of the block are intervals, from their least to their greatest value:
`==` does not hold if two of them are disjoint.  Other conditions on loaded values, such as a mask of rows and columns,
are read throughout the block, which costs little beside its products.  `and` and `or` combine their operands; anything
else counts as true.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import sympy

from fusion.codegen.c.blocked.scope import TileScope
from fusion.codegen.c.plan.loop_fusion import extend_spans
from fusion.codegen.c.text.indices import affine, index_text
from fusion.codegen.c.text.nest import indented
from fusion.lowering.algebra.conditions import negated
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


def possible(where: Expr, scope: TileScope) -> tuple[list[str], str, dict[Op, str]]:
    """Return lines, and C text: may `where` be true somewhere in the current block?  `ALWAYS` if that cannot be
    decided.  With the names of flags that are set where the block is within the inner bounds of a part.

    Each blocked axis `i` runs from `i_0` up to `i_end`; every other GRID or LOOP axis is at one point.
    """
    known, condition = dict(scope.known), Possible(scope)
    text = condition.text(where)
    scope.known = known
    return condition.lines, text, condition.whole


class Possible:
    """Writes conditions in the current block.

    Attributes:
        lines: what goes before them.
        whole: conditions with bounds → the flag that is set where the block is within the inner ones.
        kept: axes of which they hold at one point, the current one.
    """

    def __init__(self, scope: TileScope, kept: Set[sympy.Symbol] = frozenset()) -> None:
        self.scope, self.blocks, self.names, self.kept = scope, scope.blocks, scope.names, kept
        self.lines: list[str] = []
        self.whole: dict[Op, str] = {}

    def text(self, where: Expr) -> str:
        """Return C text: may a condition hold somewhere?"""
        if isinstance(where, Const):
            return ALWAYS if where.value else "0"
        if isinstance(where, Op) and where.name == "bounded":
            return self.of_bounded(where)
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
            if all(self.is_vector(arg) for arg in where.args):
                (low, high), (other_low, other_high) = (self.interval(arg) for arg in where.args)
                return f"({_APART[where.name].format(low, high, other_low, other_high)})"
        elif self.is_vector(where):
            return f"({self.interval(where)[1]} != 0)"
        return self.anywhere(where) if any(loads(where)) and self._is_known(where) else ALWAYS

    def of_bounded(self, where: Op) -> str:
        """Return the text of a condition with bounds: it is evaluated in blocks that the inner ones do not contain."""
        condition, outer, inner = where.args
        fails = negated(inner)
        extend_spans(self.scope.where, [fails])
        outside = self.text(fails)
        if outside == ALWAYS:
            within = "0"
        else:
            within = self.whole[where] = self.scope.space.fresh("whole")
            self.lines.append(f"const int32_t {within} = !{outside};")
        return _both(self.text(outer), self.anywhere(condition, within) if self._is_known(condition) else ALWAYS)

    def _of_indices(self, name: ScalarName, left: sympy.Expr, right: sympy.Expr) -> str:
        if name == "ne":
            return ALWAYS
        if name == "eq":
            return _both(self._below(left - right, "<="), self._below(right - left, "<="))
        mirror = SCALAR_OPS[name].mirror
        if name not in _UPPER_BOUNDS and mirror is not None:
            return self._below(right - left, _UPPER_BOUNDS[mirror])
        return self._below(left - right, _UPPER_BOUNDS[name])

    def _below(self, difference: sympy.Expr, sign: str) -> str:
        """Return C text: may `difference` be below zero (`<`), or not above it (`<=`)?"""
        corner = self.least(sympy.expand_mul(difference))
        return ALWAYS if corner is None else f"({corner} {sign} 0)"

    def least(self, expr: sympy.Expr) -> str | None:
        """Return C text of the least value of `expr` in the current block; None if it is not affine."""
        corner: dict[sympy.Symbol, sympy.Expr] = {}
        for symbol in symbols_of(expr):
            block = self.blocks.of.get(symbol)
            if block is None or block.bound is None or symbol in self.kept:
                continue
            weight = coefficient(expr, symbol)
            if weight is None or not (weight.is_nonnegative or weight.is_nonpositive):
                return None
            extent = block.extent
            after = block.axis.size if extent.first == 0 else sympy.Symbol(extent.end, integer=True)
            corner[symbol] = extent.first if weight.is_nonnegative else after - 1
        found = sympy.expand_mul(expr.xreplace(corner))
        ends = {symbol: symbol.name for symbol in found.free_symbols if symbol not in self.names}
        return index_text(found, {**self.names, **ends})

    def is_vector(self, expr: Expr) -> bool:
        """Return whether `expr` varies along at most one axis of a block, and depends only on loads and indices."""
        return expr.dtype in INTEGERS and len(self.scope.tiled(expr)) <= 1 and self._is_known(expr)

    def _is_known(self, expr: Expr) -> bool:
        """Return whether `expr` depends only on indices, and on tensors that the kernel does not change."""
        if any(isinstance(node, (TileRef, Random)) for node in postorder(expr)):
            return False
        return all(load.buffer not in self.scope.written for load in loads(expr))

    def anywhere(self, where: Expr, known: str = "0") -> str:
        """Return the name of a flag that is set where the condition holds at some point of the current block.

        It is not evaluated where it is `known` to hold.
        """
        flag = self.scope.space.fresh("anywhere")
        nest = self.scope.nest([where], self.scope.tiled(where), named=frozenset([where]))
        nest.write(f"{flag} |= {nest.texts[0]};")
        nest.levels[-1].clauses.append(f"reduction(|:{flag})")
        if len(nest.levels) > 2:
            nest.levels[-2].after.append(f"if ({flag}) break;")
        lines = nest.lines() if known == "0" else [f"if (!{flag}) {{", *indented(nest.lines()), "}"]
        self.lines += [f"int32_t {flag} = {known};", *lines]
        return flag

    def interval(self, expr: Expr) -> tuple[str, str]:
        """Return the least and the greatest value of a vector in the current block."""
        index = affine(expr)
        if index is not None:
            low, opposite = self.least(sympy.expand_mul(index)), self.least(sympy.expand_mul(-index))
            if low is not None and opposite is not None:
                return f"({low})", f"(-({opposite}))"
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
