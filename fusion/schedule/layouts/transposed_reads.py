"""Copies tensors that the epilogues of products read often, across their rows.

    scores[b, h, i, j] + bias[i, j, h]      becomes      scores[b, h, i, j] + copy[h, i, j]

`Program → Program`, for targets that price memory requests (`Capabilities.sector`).  A tile of a product has rows and
columns of one matrix; a tensor whose neighbours are another axis, such as the heads of an attention, is read there
element by element, once for each matrix of the batch.  The copy is a map over the tensor, which is read and written in
rows, and is shared by all readers; clusters still take it in where their price says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import coefficient, flatten
from fusion.lowering.ir.expr import Expr, Load, rewrite
from fusion.lowering.ir.program import Buffer, Contract, Map, Node, Program, axis_sizes, reads
from fusion.lowering.ir.sizes import estimate
from fusion.schedule.clusters.across_memory import SMALLEST_CROSSED
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.iteration.dependences import bytes_of
from fusion.schedule.iteration.naming import unused
from fusion.schedule.layouts.scattered_operands import contiguous_copy

_OFTEN = 8
"""Points of a reader for each element of the tensor, from which on a copy pays: it is read and written once."""


def copy_transposed_reads(
    program: Program,
    capabilities: Capabilities,
    chains: Sequence[Cluster],
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[Program, tuple[Cluster, ...]]:
    """Copy such tensors for readers outside the chains `chains`; return the program, and the chains in it.

    >>> from dataclasses import replace
    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty
    >>> requests = replace(TARGET.capabilities, sector=32)
    >>> show_program(
    ...     lambda program: copy_transposed_reads(program, requests, ())[0],
    ...     lambda q, k, bias: q @ k + bias.permute(2, 0, 1),
    ...     empty(9, 2, 128, 64),
    ...     empty(9, 2, 64, 128),
    ...     empty(128, 128, 2),
    ... )
      input q: f32[9, 2, 128, 64]
      input k: f32[9, 2, 64, 128]
      input bias: f32[128, 128, 2]
      bmm: f32[18, 128, 128] = contract(i0:18, i1:128, i2:128 over r0:64; rows i1, columns i2; in f32) q[i0//2,
            i0%2, i1, r0], k[i0//2, i0%2, r0, i2]
    + bias_rows: f32[2, 128, 128] = map(i0:2, i1:128, i2:128) bias[i1, i2, i0]
    - add: f32[9, 2, 128, 128] = map(i0:9, i1:2, i2:128, i3:128) bmm[2*i0 + i1, i2, i3] + bias[i2, i3, i1]
    + add: f32[9, 2, 128, 128] = map(i0:9, i1:2, i2:128, i3:128) bmm[2*i0 + i1, i2, i3] + bias_rows[i1, i2, i3]
      return add
    """
    if not capabilities.sector:
        return program, tuple(chains)
    chained = {member for cluster in chains for member in cluster.members}
    copies, nodes, after = _Copies(program, hints or {}), list[Node](), set[str]()
    for position, node in enumerate(program.nodes):
        if isinstance(node, Contract):
            after.add(node.out)
        elif isinstance(node, Map) and not after.isdisjoint(reads(node)):
            after.add(node.out)
            if position not in chained:
                node = copies.read_in_rows(node, nodes)
        nodes.append(node)
    if not copies.buffers:
        return program, tuple(chains)
    copied = program.edited(nodes, buffers=copies.buffers, origins=copies.origins)
    return copied, positions_in(copied, program, chains)


@dataclass
class _Copies:
    """The copies of one program so far, by the tensor and the axes along which it is read."""

    program: Program
    hints: Mapping[sympy.Symbol, int]
    buffers: list[Buffer] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    names: dict[Expr, str] = field(default_factory=dict)

    def read_in_rows(self, node: Map, nodes: list[Node]) -> Map:
        """Return a map that reads copies of such tensors; new copies are appended to `nodes`."""

        def rule(expr: Expr) -> Expr | None:
            if not isinstance(expr, Load) or not self._is_across(node, expr):
                return None
            places = [index for index in expr.index if isinstance(index, sympy.Symbol)]
            axes = [axis for axis in node.axes if axis.symbol in places]
            name = unused(f"{expr.buffer}_rows", {*self.program.buffers, *self.origins})
            buffer, copy = contiguous_copy(name, expr, axes, self.program.buffers[node.out].device)
            if copy.expr not in self.names:
                self.buffers.append(buffer)
                self.origins[name], self.names[copy.expr] = node.out, name
                nodes.append(copy)
            return Load(self.names[copy.expr], tuple(axis.symbol for axis in axes), expr.dtype)

        (value,) = rewrite((node.expr,), rule)
        return node if value is node.expr else replace(node, expr=value)

    def _is_across(self, node: Map, load: Load) -> bool:
        """Return whether a node reads a whole tensor often, its rows across the tensor's."""
        buffer, out = self.program.buffers[load.buffer], self.program.buffers[node.out]
        symbols = [index for index in load.index if isinstance(index, sympy.Symbol)]
        if load.mask is not None or len(set(symbols)) < len(load.index):
            return False
        if bytes_of(buffer, self.hints) < SMALLEST_CROSSED:
            return False
        sizes = axis_sizes(node)
        points = sympy.Mul(*sizes.values())
        if estimate(points, self.hints) < _OFTEN * estimate(buffer.numel, self.hints):
            return False
        offset = flatten(load.index, buffer.strides, sizes)
        rows = [axis.symbol for axis, stride in zip(node.axes, out.strides, strict=True) if stride == 1]
        steps = [coefficient(offset, symbol) for symbol in rows] if not isinstance(offset, Expr) else []
        return any(step is not None and step.is_Integer and step > 1 for step in steps)


__all__ = ["copy_transposed_reads"]
