"""Guards integers of the program that do not fit into 64 bits, in which compiled code computes.

A Python integer that differs between calls is an argument of the compiled graph.  Eager computes with it exactly, and
then converts it to an element of 64 bits, signed or unsigned, or raises an error.  Input: a compiled graph, with the
graph that Dynamo captured; output: a callable that runs the captured graph in eager if an integer of the call, or a
number that the graph computes from such integers, needs more than a signed 64-bit integer.  Graphs without such
arguments are returned as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch import fx

Call: TypeAlias = Callable[..., object]

WIDE_FROM = 1 << 31
"""Integers below are not looked at further, unless the graph computes with a constant that is not below."""


@dataclass(frozen=True, slots=True)
class Integers:
    """The integers of a call, and the integers that its graph computes from them.

    Attributes:
        symbols: the symbols of the integers among the inputs, by their positions.
        computed: the integers as expressions of the symbols, which are among them.
    """

    symbols: Mapping[int, sympy.Expr]
    computed: tuple[sympy.Expr, ...]

    @classmethod
    def of(cls, graph: fx.GraphModule) -> Integers:
        """Return the integers of Dynamo's graph."""
        inputs = graph.graph.find_nodes(op="placeholder")
        symbols = {k: expr for k, node in enumerate(inputs) if (expr := _expression(node)) is not None}
        symbols = {k: expr for k, expr in symbols.items() if expr.is_Symbol}
        return cls(symbols, _computed(graph, frozenset(symbols.values())) if symbols else ())

    def around(self, compiled: Call, captured: Call) -> Call:
        """Return `compiled`, or a callable that decides at each call between it and `captured`, the same program run
        operation by operation.
        """
        places, symbols, computed = tuple(self.symbols), self.symbols.values(), self.computed
        if not places:
            return compiled
        always = any(abs(number) >= WIDE_FROM for expr in computed for number in expr.atoms(sympy.Integer))

        def run(*args: object) -> object:
            numbers = [number if isinstance(number := args[k], int) else 0 for k in places]  # a nested tensor's is none
            narrow = not always and all(-WIDE_FROM <= number < WIDE_FROM for number in numbers)
            if narrow or _fit(computed, dict(zip(symbols, numbers, strict=True))):
                return compiled(*args)
            return captured(*args)

        return run


def _expression(node: fx.Node) -> sympy.Expr | None:
    """Return the expression of a symbolic integer."""
    value = node.meta.get("example_value")
    return value.node.expr if isinstance(value, torch.SymInt) else None


def _computed(graph: fx.GraphModule, symbols: frozenset[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """Return the integers that the graph computes from integers of the call alone, including the latter."""
    expressions = (_expression(node) for node in graph.graph.nodes)
    return tuple(dict.fromkeys(expr for expr in expressions if expr is not None and expr.free_symbols <= symbols))


def _fit(computed: Sequence[sympy.Expr], numbers: Mapping[sympy.Expr, int]) -> bool:
    """Return whether all expressions are signed 64-bit integers; an expression without value is left to the graph."""
    values = (expr.xreplace({symbol: sympy.Integer(number) for symbol, number in numbers.items()}) for expr in computed)
    return all(-(1 << 63) <= int(value) < 1 << 63 for value in values if value.is_Integer)
