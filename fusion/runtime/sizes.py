"""Computes sizes in a spliced module: each is a number, or a node of the graph.

Input: expressions over the symbols of a program; output: nodes.  A symbol is an input of the module, a value
that a call returned, or a size or stride of an input tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import sympy
import torch
from torch import fx

from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.program import Program
from fusion.lowering.ir.sizes import Computed, calculation
from fusion.runtime.names import named

COMPUTED = "fusion_computed"
"""The key of the metadata of a node that computes a size by a function of its own: the size, a `Computed`."""

_FUNCTIONS: tuple[tuple[type[sympy.Basic], Callable[[int, int], int]], ...] = (
    (sympy.Add, operator.add),
    (sympy.Mul, operator.mul),
    (FloorDiv, operator.floordiv),
    (Mod, operator.mod),
)


class Sizes:
    """Computes the sizes of `program` by nodes of `graph`.

    `tensors` maps buffers to the nodes that hold them.  `nodes` caches the values so far: whoever creates the node of a
    symbol that is passed or returned adds it.
    """

    def __init__(self, graph: fx.Graph, program: Program, tensors: Mapping[str, fx.Node]) -> None:
        self.graph, self.program, self.tensors = graph, program, tensors
        self.nodes: dict[sympy.Expr, fx.Node | int] = {}

    def of(self, expr: sympy.Expr) -> fx.Node | int:
        """Return a size as an int, or as the node that computes it."""
        if expr.is_Integer:
            return int(expr)
        if expr not in self.nodes:
            self.nodes[expr] = self._compute(expr)
        return self.nodes[expr]

    def known(self, expr: sympy.Expr) -> fx.Node | int | None:
        """Return a size that is a polynomial of the symbols known so far, as `of` does; None for others."""
        if expr.is_Integer or (expr.free_symbols <= self.nodes.keys() and expr.is_polynomial(*expr.free_symbols)):
            return self.of(expr)
        return None

    def _compute(self, expr: sympy.Expr) -> fx.Node:
        if isinstance(expr, Computed):
            node = self.graph.call_function(named(calculation(expr), expr.name), tuple(map(self.of, expr.given)))
            node.meta[COMPUTED] = expr
            return node
        if expr.is_Symbol:
            return self._read_off(expr)
        for kind, function in _FUNCTIONS:
            if isinstance(expr, kind):
                result = self.of(expr.args[0])
                for arg in expr.args[1:]:
                    result = self.graph.call_function(function, (result, self.of(arg)))
                assert isinstance(result, fx.Node), "operations have two operands"
                return result
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return self.graph.call_function(operator.pow, (self.of(expr.base), int(expr.exp)))
        raise AssertionError(f"size {expr} is computed from no input")

    def _read_off(self, symbol: sympy.Expr) -> fx.Node:
        """Read a size that is not passed as a number off a tensor: after a graph break PyTorch does not pass it."""
        for name in self.program.inputs:
            if isinstance(name, str):
                buffer = self.program.buffers[name]
                for read, numbers in ((torch.Tensor.size, buffer.shape), (torch.Tensor.stride, buffer.strides)):
                    if symbol in numbers:
                        return self.graph.call_function(read, (self.tensors[name], numbers.index(symbol)))
        raise AssertionError(f"size {symbol} is computed from no input")
