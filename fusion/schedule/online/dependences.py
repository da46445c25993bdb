"""Classifies expressions and terms by their dependences: the axes of a fold, incomplete folds, or neither.

Input: the axes and the folds; output: the `Kind` of any expression.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sympy

from fusion.lowering.ir.expr import Expr, TileRef, index_of, postorder
from fusion.lowering.ir.kernel import Fold
from fusion.schedule.online.terms import DeferredFactor, Kind, LoopTerm, Terms


class RunningDependences:
    """Classifies expressions; `over` are the axes of the fold, `running` the folds that are not complete."""

    def __init__(self, over: Collection[sympy.Symbol], running: Mapping[str, Fold]) -> None:
        self.over, self.running = frozenset(over), running
        self._kinds: dict[Expr, Kind] = {}

    def kind(self, expr: Expr) -> Kind:
        """Return the dependences of `expr`.  The result of a fold elsewhere may vary along any axis."""
        stack = [expr]
        while stack:
            node = stack[-1]
            missing = [child for child in node.children() if child not in self._kinds]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            kind = Kind.FIXED
            if isinstance(node, TileRef):
                kind = Kind.RUNNING if node.name in self.running else Kind.VARYING
            elif any(index.free_symbols & self.over for index in index_of(node)):
                kind = Kind.VARYING
            for child in node.children():
                kind |= self._kinds[child]
            self._kinds[node] = kind
        return self._kinds[expr]

    def is_fixed(self, term: LoopTerm) -> bool:
        """Return whether nothing in this term varies."""
        return term.loop is None or self.kind(term.loop) is Kind.FIXED

    def extremes_only(self, expr: Expr) -> bool:
        """Return whether all running values in `expr` are extremes."""
        refs = (node for node in postorder(expr) if isinstance(node, TileRef) and node.name in self.running)
        return all(self.running[ref.name].op in ("max", "min") for ref in refs)

    def is_extreme(self, term: LoopTerm) -> bool:
        """Return whether this term is an extreme value, up to a fixed factor."""
        if not self.is_fixed(term) or len(term.steps) != 1 or term.steps[0].name != "mul":
            return False
        return self.extremes_only(term.steps[0].value)


def undivided(dependences: RunningDependences, node: Expr) -> Terms:
    """Return an expression that is varying or running, but not both, as one term."""
    if dependences.kind(node) is Kind.RUNNING:
        return (LoopTerm(None, (DeferredFactor("mul", node),)),)
    return (LoopTerm(node),)
