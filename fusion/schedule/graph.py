"""The dependence graph of a Program: who writes a buffer, who reads it, what must come before what.

What enters is a verified Program; what leaves is a networkx DiGraph over node positions with data edges, ordering edges
between impure externs, and look-ups by buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import networkx as nx
import sympy

from lowering.expr import Load, loads
from lowering.program import Compute, Extern, Node, Program, reads, writes

DEFAULT_SIZE = sympy.Integer(256)
"""What an unknown symbolic size is taken for when costs are estimated."""


class Dependences:
    """Look-ups over one Program.  Nodes are named by their position in `program.nodes`."""

    def __init__(self, program: Program, hints: Mapping[sympy.Symbol, int] | None = None) -> None:
        self.program = program
        self.hints = dict(hints or {})
        self.outputs = program.output_names()
        self.writer: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.loads: list[tuple[Load, ...]] = []
        last_impure: int | None = None
        for position, node in enumerate(program.nodes):
            self.graph.add_node(position)
            self.loads.append(() if isinstance(node, Extern) else tuple(loads(*node.exprs)))
            for name in reads(node):
                self.readers.setdefault(name, []).append(position)
                if name in self.writer:
                    self.graph.add_edge(self.writer[name], position)
            for name in writes(node):
                self.writer[name] = position
            if isinstance(node, Extern) and node.impure:
                if last_impure is not None:
                    self.graph.add_edge(last_impure, position)
                last_impure = position

    def node(self, position: int) -> Node:
        return self.program.nodes[position]

    def compute(self, position: int) -> Compute:
        """The node at `position`, which is known not to be an extern."""
        node = self.program.nodes[position]
        assert not isinstance(node, Extern)
        return node

    def producers(self, position: int) -> Iterator[int]:
        """The nodes that make what a node reads."""
        for name in reads(self.program.nodes[position]):
            if name in self.writer:
                yield self.writer[name]

    def stored(self, position: int, members: Collection[int]) -> bool:
        """Is a node's result needed outside `members`?"""
        out = self.compute(position).out
        return out in self.outputs or any(reader not in members for reader in self.readers.get(out, ()))

    def estimate(self, size: sympy.Expr) -> int:
        """`size` as a number, symbolic sizes at their hints."""
        if size.is_Integer:
            return int(size)
        known = {s: sympy.Integer(self.hints.get(s, DEFAULT_SIZE)) for s in size.free_symbols}
        return int(size.xreplace(known))

    def bytes(self, buffer: str) -> int:
        return self.estimate(self.program.buffers[buffer].numel) * self.program.buffers[buffer].dtype.itemsize
