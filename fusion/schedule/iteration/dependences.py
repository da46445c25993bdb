"""Builds the dependence graph of a Program: writers, readers, and the order between them.

Input: a verified Program; output: a networkx DiGraph over node positions with data edges, ordering edges between impure
externs and from readers of a tensor to the nodes that overwrite it, and look-ups by buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import networkx as nx
import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.algebra.last_bits import to_integers
from fusion.lowering.ir.arguments import leaves
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Load, index_of, loads, postorder
from fusion.lowering.ir.program import (
    Buffer,
    Compute,
    Contract,
    Extern,
    Map,
    Node,
    Program,
    Reduce,
    Scan,
    Scatter,
    axis_sizes,
    copies,
    memory_of,
    reads,
    writes,
)
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.ir.sizes import estimate, given_by


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
        self.read: list[frozenset[str]] = []  # buffers that a node's expressions load
        self.reads: list[tuple[str, ...]] = []  # operands of a node, in order
        self.outs: list[str] = []  # the result of a node; empty for an extern
        self._bytes: dict[str, int] = {}
        self.generated = frozenset(k for k, node in enumerate(program.nodes) if not isinstance(node, (Extern, Chunked)))
        order = _Order(program)
        for position, node in enumerate(program.nodes):
            self.graph.add_node(position)
            self.loads.append(() if isinstance(node, (Extern, Chunked)) else tuple(loads(*node.exprs)))
            self.read.append(frozenset(load.buffer for load in self.loads[-1]))
            self.reads.append(tuple(reads(node)))
            self.outs.append("" if isinstance(node, (Extern, Chunked)) else node.out)
            for name in self.reads[-1]:
                self.readers.setdefault(name, []).append(position)
                if name in self.writer:
                    self.graph.add_edge(self.writer[name], position)
            self.graph.add_edges_from((before, position) for before in order.before(position, self.reads[-1]))
            self.writer.update(dict.fromkeys(writes(node), position))

    def node(self, position: int) -> Node:
        """Return the node at `position`."""
        return self.program.nodes[position]

    def compute(self, position: int) -> Compute:
        """Return the node at `position`, which must not be a call."""
        node = self.program.nodes[position]
        assert not isinstance(node, (Extern, Chunked))
        return node

    def producers(self, position: int) -> Iterator[int]:
        """Yield the nodes that compute the operands of a node."""
        for name in self.reads[position]:
            if name in self.writer:
                yield self.writer[name]

    def stored(self, position: int, members: Collection[int]) -> bool:
        """Return whether a node's result is needed outside `members`."""
        out = self.outs[position]
        return out in self.outputs or any(reader not in members for reader in self.readers.get(out, ()))

    def rounded(self, members: Collection[int]) -> frozenset[int]:
        """Return the members whose rounded results other nodes read, from their own buffer or from a copy."""
        positions = set[int]()
        for position in sorted(members, reverse=True):
            if position in positions or self.stored(position, members):
                positions.add(position)
                copied = copies(self.program.nodes[position])
                positions.update(self.writer[name] for name in copied if self.writer.get(name) in members)
        return frozenset(positions)

    @cached_property
    def rounded_anyway(self) -> frozenset[int]:
        """The nodes that are `rounded` even if all generated nodes share a kernel."""
        return self.rounded(self.generated)

    @cached_property
    def rounded_later(self) -> frozenset[str]:
        """The float32 buffers from which only 16-bit floats are computed, perhaps through other such buffers."""
        later = set[str]()
        for position in reversed(range(len(self.program.nodes))):
            out = self.outs[position]
            readers = self.readers.get(out, ())
            if not out or out in self.outputs or not readers or self.program.buffers[out].dtype is not torch.float32:
                continue
            if all(_rounds(self.program, self.node(reader), later) for reader in readers):
                later.add(out)
        return frozenset(later)

    def estimate(self, size: sympy.Expr) -> int:
        """Evaluate `size`, with symbolic sizes at their hints."""
        return estimate(size, self.hints)

    def bytes(self, buffer: str) -> int:
        """Return the size of a buffer in bytes."""
        if (known := self._bytes.get(buffer)) is not None:
            return known
        self._bytes[buffer] = count = bytes_of(self.program.buffers[buffer], self.hints)
        return count


def _rounds(program: Program, node: Node, later: Collection[str]) -> bool:
    """Return whether a node rounds its result to 16 bits, or its readers do, and it rounds no float to an integer."""
    if not isinstance(node, (Map, Reduce)) or not (program.buffers[node.out].dtype in HALVES or node.out in later):
        return False
    return not to_integers(*node.exprs)


def bytes_of(buffer: Buffer, hints: Mapping[sympy.Symbol, int]) -> int:
    """Return the size of a buffer in bytes, with symbolic sizes at their hints."""
    return estimate(buffer.numel, hints) * buffer.dtype.itemsize


class _Order:
    """Finds the nodes that must run before a node for other reasons than data, asked for in program order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory = memory_of(program.nodes)
        self.touching: dict[str, list[int]] = {}  # memory → the nodes that read or overwrite it
        self.overwriter: dict[str, int] = {}
        self.size_source: dict[sympy.Symbol, int] = {}  # size → the call whose result determines it
        self.last_impure: int | None = None

    def before(self, position: int, taken: Sequence[str]) -> Iterator[int]:
        """Yield the nodes that must run before this one, which has these operands.

        These are: nodes that overwrote one of them, readers of memory that it overwrites, calls that determine a size
        that it needs; and, if it is impure, the last impure node.
        """
        node = self.program.nodes[position]
        for memory in (self.memory.get(name, name) for name in taken):
            self.touching.setdefault(memory, []).append(position)
            if memory in self.overwriter:
                yield self.overwriter[memory]
        if self.size_source:
            yield from (self.size_source[size] for size in _sizes(self.program, node) & self.size_source.keys())
        if not isinstance(node, Extern):
            return
        for memory in (self.memory.get(name, name) for name in node.overwrites):
            yield from (reader for reader in self.touching[memory] if reader != position)
            self.overwriter[memory], self.touching[memory] = position, [position]
        self.size_source.update((size, position) for size, _, _ in node.sizes)
        if node.impure:
            if self.last_impure is not None:
                yield self.last_impure
            self.last_impure = position


def _sizes(program: Program, node: Node) -> set[sympy.Symbol]:
    """Return the size symbols that must be known before a node runs."""
    buffers = (program.buffers[name] for name in writes(node))
    sizes = [size for buffer in buffers for size in (*buffer.shape, *buffer.strides)]
    match node:
        case Chunked():
            sizes += [node.length, *node.symbols]
        case Extern():
            sizes += [arg for arg in leaves((node.args, node.kwargs)) if isinstance(arg, sympy.Expr)]
        case Map() | Reduce() | Scan() | Contract() | Scatter():
            sizes += [*axis_sizes(node).values()]
            sizes += [index for expr in postorder(*node.exprs) for index in index_of(expr)]
        case _:
            assert_never(node)
    return set().union(*(given_by(size) for size in sizes))


def read_through_maps(program: Program) -> list[frozenset[str]]:
    """Return for each node the tensors that it reads, itself or through maps."""
    through: dict[str, frozenset[str]] = {}
    tensors: list[frozenset[str]] = []
    for node in program.nodes:
        names = frozenset(reads(node)).union(*(through.get(name, ()) for name in reads(node)))
        tensors.append(names)
        if isinstance(node, Map):
            through[node.out] = names
    return tensors
