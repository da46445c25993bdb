"""Scatters into memory that is there already, without copies that nobody needs.

`Program → Program`.  A scatter begins with a tensor of its own.  It needs no copy of what is made only for it: sums
scattered one after the other, expert by expert, go to one tensor.  Two sums that begin at zero and are then added up
are one sum, in the memory of the first: the gradient of an interpolation.  And what is copied back to an input of the
caller, as a cache is, takes place in that input.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import sympy

from fusion.lowering.chunks import Chunked
from fusion.lowering.expr import Cast, Const, Expr, Load, Op, postorder, rewrite
from fusion.lowering.live import without_dead_nodes
from fusion.lowering.program import Buffer, BufferRef, Extern, Map, Node, Program, Scatter, reads, writes
from fusion.lowering.updates import copied
from fusion.schedule.rewrites.inline import inline


def own_destinations(program: Program) -> Program:
    """The program with fewer copies and fewer tensors; the same object when nothing changes."""
    if not any(isinstance(node, Scatter) for node in program.nodes):
        return program
    return _without_copies(_added_up(program))


def _readers(program: Program) -> Counter[str]:
    """How many nodes read each buffer; the caller counts as one."""
    found = Counter(name for node in program.nodes for name in reads(node))
    found.update(program.output_names())
    return found


def _alike(a: Buffer, b: Buffer) -> bool:
    return (a.dtype, a.shape, a.strides, a.device) == (b.dtype, b.shape, b.strides, b.device)


# Sums that are added up -----------------------------------------------------------------------------------------------


class _Sums:
    """The scattered sums so far that have one reader, and the maps that are nothing but one of them."""

    def __init__(self, program: Program) -> None:
        self.program, self.readers = program, _readers(program)
        self.made: dict[str, Node] = {}
        self.order: dict[str, int] = {}
        self.plain: dict[str, Map] = {}

    def joined(self, node: Map) -> Map:
        """`node` with one term for each two that are scattered sums."""
        axes = tuple(axis.symbol for axis in node.axes)
        children = (child for part in postorder(node.expr) for child in part.children())
        uses = Counter(child.buffer for child in children if isinstance(child, Load))

        def rule(expr: Expr) -> Expr | None:
            if not (isinstance(expr, Op) and expr.name == "add"):
                return None
            terms = [term for term in expr.args if isinstance(term, Load) and self._is_own(term, axes)]
            if len(terms) < 2 or any(uses[term.buffer] > 1 for term in terms):  # one of them is wanted by itself too
                return None
            first, second = sorted(terms, key=lambda term: self.order[term.buffer])
            return second if self._begin(second.buffer, first.buffer) else None

        expr = rewrite([node.expr], rule)[0]
        return node if expr is node.expr else replace(node, expr=expr)

    def result(self, out: BufferRef | sympy.Expr | None) -> BufferRef | sympy.Expr | None:
        """An output, or the sum that it is nothing but a copy of."""
        made = self.plain.get(out.name) if isinstance(out, BufferRef) else None
        if made is None or not isinstance(out, BufferRef) or not isinstance(made.expr, Load):
            return out
        buffers, source = self.program.buffers, made.expr.buffer
        return BufferRef(source) if self.readers[source] == 1 and _alike(buffers[source], buffers[made.out]) else out

    def _is_own(self, term: Load, axes: tuple[object, ...]) -> bool:
        made = self.made.get(term.buffer)
        sums = isinstance(made, Scatter) and made.op == "sum"
        return sums and self.readers[term.buffer] == 1 and term.mask is None and term.index == axes

    def _begin(self, name: str, start: str) -> bool:
        """Let the scatter that makes `name` begin with what is in `start`, if it begins with zeros."""
        node = self.made[name]
        assert isinstance(node, Scatter)
        zeros = self.made.get(node.start)
        none = isinstance(zeros, Map) and isinstance(zeros.expr, Const) and zeros.expr.value == 0
        if not none or not _alike(self.program.buffers[start], self.program.buffers[node.start]):
            return False
        del self.made[node.start]
        self.made[name] = replace(node, start=start)
        return True


def _added_up(program: Program) -> Program:
    sums = _Sums(program)
    changed = False
    for position, node in enumerate(program.nodes):
        if not isinstance(node, (Extern, Chunked)) and node.out not in program.library:
            node = inline(node, sums.plain)
        if isinstance(node, Map):
            joined = sums.joined(node)
            changed |= joined is not node
            value = joined.expr.arg if isinstance(joined.expr, Cast) and joined.expr.implicit else joined.expr
            if joined is not node and isinstance(value, Load):
                sums.plain[joined.out] = joined
                sums.readers[value.buffer] = sums.readers[joined.out]
            node = joined
        for name in writes(node):
            sums.order[name] = position
        sums.made[next(iter(writes(node)), f"call {position}")] = node
    if not changed:
        return program
    return without_dead_nodes(program.edited(sums.made.values(), outputs=map(sums.result, program.outputs)))


# Copies ---------------------------------------------------------------------------------------------------------------


def _without_copies(program: Program) -> Program:
    readers = _readers(program)
    made: dict[str, Node] = {name: node for node in program.nodes for name in writes(node)}
    begun: dict[str, str] = {}  # copy → what it is a copy of
    dropped: set[int] = set()
    for node in program.nodes:
        source = _copied(program, made.get(node.start)) if isinstance(node, Scatter) else None
        if source is None:
            continue
        assert isinstance(node, Scatter)
        back = _copied_back(program, source, node.out) if source in program.inputs else None
        own = source in made and not isinstance(made[source], (Extern, Chunked)) and readers[source] == 1
        if own or (back is not None and readers[source] == 2):
            begun[node.start] = source
            dropped |= {id(made[node.start])} if back is None else {id(made[node.start]), id(back)}
    if not begun:
        return program
    nodes = [
        replace(node, start=begun.get(node.start, node.start)) if isinstance(node, Scatter) else node
        for node in program.nodes
        if id(node) not in dropped
    ]
    return program.edited(nodes)


def _copied(program: Program, node: Node | None) -> str | None:
    """What a map is a copy of, element for element."""
    if not isinstance(node, Map) or not isinstance(node.expr, Load) or node.expr.mask is not None:
        return None
    same = node.expr.index == tuple(axis.symbol for axis in node.axes)
    source = node.expr.buffer
    return source if same and _alike(program.buffers[source], program.buffers[node.out]) else None


def _copied_back(program: Program, target: str, source: str) -> Extern | None:
    """The call that copies `source` into the input `target`, if nobody else can tell the two apart."""
    back: Extern | None = None
    kept = program.output_names()
    for node in program.nodes:
        if not isinstance(node, Extern) or source not in node.reads:
            continue
        into = copied(node, program) == (target, source)
        if node.is_view or (into and not kept.isdisjoint(writes(node))):
            return None
        back = node if into else back
    return None if source in kept or target in kept else back


__all__ = ["own_destinations"]
