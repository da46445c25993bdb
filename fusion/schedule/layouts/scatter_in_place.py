"""Scatters into existing memory, without unnecessary copies.

`Program → Program`.  A scatter starts from a separate tensor.  It needs no copy of a tensor that is computed only for
it: sums scattered one after the other, expert by expert, go to one tensor.  Two sums that start at zero and are then
added are one sum, in the memory of the first: the gradient of an interpolation.  And a result that is copied back to an
input of the caller, such as a cache, is scattered directly into that input.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import sympy

from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Cast, Const, Expr, Load, Op, postorder, rewrite
from fusion.lowering.ir.program import (
    Buffer,
    BufferRef,
    Extern,
    Map,
    Node,
    Program,
    Scatter,
    copied,
    reads,
    returning,
    writes,
)
from fusion.schedule.rewrites.inline import inline


def scatter_in_place(program: Program) -> Program:
    """Remove copies and tensors that scatters do not need; the same object when nothing changes.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import empty
    >>> def f(x, y):
    ...     x.copy_(x.slice_scatter(y, 0, 1))
    ...     return y + 1
    >>> show_program(scatter_in_place, f, empty(3), empty(2))
      input x: f32[3]
      input y: f32[2]
    - slice_scatter: f32[3] = map(i0:3) x[i0]
    - slice_scatter_1: f32[3] = scatter(i0:2; into slice_scatter) [index(i0 + 1)] = y[i0]
    + slice_scatter_1: f32[3] = scatter(i0:2; into x) [index(i0 + 1)] = y[i0]
      add: f32[2] = map(i0:2) y[i0] + 1.0
    - copy_: f32[3] = aten.copy_.default(x, slice_scatter_1)  (impure; what is changed in place is copied there at
            the end)
      return add
    """
    if not any(isinstance(node, Scatter) for node in program.nodes):
        return program
    return _without_copies(_merge_sums(program))


def _readers(program: Program) -> Counter[str]:
    """Count the readers of each buffer; the caller counts as one."""
    counts = Counter(name for node in program.nodes for name in reads(node))
    counts.update(program.output_names())
    return counts


def _alike(a: Buffer, b: Buffer) -> bool:
    return (a.dtype, a.shape, a.strides, a.device) == (b.dtype, b.shape, b.strides, b.device)


# Sums of scattered sums -----------------------------------------------------------------------------------------------


class _Sums:
    """The scattered sums so far that have one reader, and the maps that only copy one of them."""

    def __init__(self, program: Program) -> None:
        self.program, self.readers = program, _readers(program)
        self.nodes: dict[str, Node] = {}
        self.order: dict[str, int] = {}
        self.copies_of_sums: dict[str, Map] = {}

    def joined(self, node: Map) -> Map:
        """Merge each two terms of `node` that are scattered sums into one."""
        axes = tuple(axis.symbol for axis in node.axes)
        children = (child for part in postorder(node.expr) for child in part.children())
        uses = Counter(child.buffer for child in children if isinstance(child, Load))

        def rule(expr: Expr) -> Expr | None:
            if not (isinstance(expr, Op) and expr.name == "add"):
                return None
            terms = [term for term in expr.args if isinstance(term, Load) and self._is_own(term, axes)]
            if len(terms) < 2 or any(uses[term.buffer] > 1 for term in terms):  # one of them is also read by itself
                return None
            first, second = sorted(terms, key=lambda term: self.order[term.buffer])
            return second if self._start_at(second.buffer, first.buffer) else None

        expr = rewrite([node.expr], rule)[0]
        return node if expr is node.expr else replace(node, expr=expr)

    def result(self, out: BufferRef | sympy.Expr | None) -> BufferRef | sympy.Expr | None:
        """Return an output, or the sum of which it is only a copy."""
        copy = self.copies_of_sums.get(out.name) if isinstance(out, BufferRef) else None
        if copy is None or not isinstance(out, BufferRef) or not isinstance(copy.expr, Load):
            return out
        buffers, source = self.program.buffers, copy.expr.buffer
        return BufferRef(source) if self.readers[source] == 1 and _alike(buffers[source], buffers[copy.out]) else out

    def _is_own(self, term: Load, axes: tuple[object, ...]) -> bool:
        producer = self.nodes.get(term.buffer)
        sums = isinstance(producer, Scatter) and producer.op == "sum"
        return sums and self.readers[term.buffer] == 1 and term.mask is None and term.index == axes

    def _start_at(self, name: str, start: str) -> bool:
        """Let the scatter that computes `name` start from `start`, if it starts from zeros."""
        node = self.nodes[name]
        assert isinstance(node, Scatter)
        zeros = self.nodes.get(node.start)
        none = isinstance(zeros, Map) and isinstance(zeros.expr, Const) and zeros.expr.value == 0
        if not none or not _alike(self.program.buffers[start], self.program.buffers[node.start]):
            return False
        del self.nodes[node.start]
        self.nodes[name] = replace(node, start=start)
        return True


def _merge_sums(program: Program) -> Program:
    sums = _Sums(program)
    changed = False
    for position, node in enumerate(program.nodes):
        if not isinstance(node, (Extern, Chunked)) and node.out not in program.library:
            node = inline(node, sums.copies_of_sums)
        if isinstance(node, Map):
            joined = sums.joined(node)
            changed |= joined is not node
            value = joined.expr.arg if isinstance(joined.expr, Cast) and joined.expr.implicit else joined.expr
            if joined is not node and isinstance(value, Load):
                sums.copies_of_sums[joined.out] = joined
                sums.readers[value.buffer] = sums.readers[joined.out]
            node = joined
        for name in writes(node):
            sums.order[name] = position
        sums.nodes[next(iter(writes(node)), f"call {position}")] = node
    if not changed:
        return program
    return eliminate_dead_code(program.edited(sums.nodes.values(), outputs=map(sums.result, program.outputs)))


# Copies ---------------------------------------------------------------------------------------------------------------


def _without_copies(program: Program) -> Program:
    readers = _readers(program)
    producers: dict[str, Node] = {name: node for node in program.nodes for name in writes(node)}
    copies: dict[str, str] = {}  # copy → its source
    dropped: set[int] = set()
    updated = program
    for node in program.nodes:
        source = _copied(program, producers.get(node.start)) if isinstance(node, Scatter) else None
        if source is None:
            continue
        assert isinstance(node, Scatter)
        back = _copied_back(program, source, node.out) if source in program.inputs else None
        own = source in producers and not isinstance(producers[source], (Extern, Chunked)) and readers[source] == 1
        if own or (back is not None and readers[source] == 2):
            copies[node.start] = source
            dropped.add(id(producers[node.start]))
            if back is not None:
                dropped.add(id(back))
                updated = returning(updated, back, source)
    if not copies:
        return program
    nodes = [
        replace(node, start=copies.get(node.start, node.start)) if isinstance(node, Scatter) else node
        for node in program.nodes
        if id(node) not in dropped
    ]
    return updated.edited(nodes)


def _copied(program: Program, node: Node | None) -> str | None:
    """Return the source of a map that is a copy, element for element."""
    if not isinstance(node, Map) or not isinstance(node.expr, Load) or node.expr.mask is not None:
        return None
    same = node.expr.index == tuple(axis.symbol for axis in node.axes)
    source = node.expr.buffer
    return source if same and _alike(program.buffers[source], program.buffers[node.out]) else None


def _copied_back(program: Program, target: str, source: str) -> Extern | None:
    """Return the call that copies `source` into the input `target`, if nothing else can tell the two apart."""
    back: Extern | None = None
    kept = program.output_names()
    for node in program.nodes:
        if back is not None and not set(writes(back)).isdisjoint(reads(node)):
            return None
        if not isinstance(node, Extern) or source not in node.reads:
            continue
        if node.is_view:
            return None
        back = node if copied(node, program) == (target, source) else back
    return None if source in kept or target in kept else back


__all__ = ["scatter_in_place"]
