"""Chunks: a product too large to keep is made a few rows at a time, and all that reads it runs on these rows.

    Program → Program

The logits of a language model are the case in mind: eight thousand tokens times a hundred thousand words, read by a
softmax, and by the two products of its gradient.  Nothing here knows of them.  A contraction whose result exceeds the
workspace becomes part of a *region* (`region.py`), all of which can run for some points of one axis at a time; the
region becomes one call whose target is `Chunks`, with a Program of its own for a chunk (`body.py`), scheduled as any
other.  The result that was too large is then never there; what is left of it, rows, sums and extremes, is put together.

Tiles that a kernel walks where it makes them (`streams/`) need no memory at all, and are left to it.  A product with
a long axis cannot be one: made again in each tile it would cost more than memory does.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import networkx as nx
import sympy
import torch

from fusion.codegen.target import Capabilities
from fusion.lowering.expr import Expr, Load, free_axes
from fusion.lowering.live import named_buffers
from fusion.lowering.printer import format_bytes
from fusion.lowering.program import Buffer, BufferRef, Contract, Extern, Node, Program, axis_sizes
from fusion.lowering.sizes import given_by
from fusion.schedule.chunks.body import POINTS, Cut, body_of, cut, symbols_in
from fusion.schedule.chunks.collapse import collapse
from fusion.schedule.chunks.matrices import Copies, strided_view, with_matrices
from fusion.schedule.chunks.region import ADDED_UP, Region, find_region, is_short
from fusion.schedule.graph import Dependences

ROWS = 16
"""Chunks start at multiples of this, so that slices are as aligned as what they are slices of."""

MAX_ROUNDED = 8
"""Into how many chunks a region is cut at most where sums over them are rounded to half precision each time."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The target of a call that runs a region in chunks.

    It is called with the tensors in the order of `cut.sliced` and one list: the length of the cut axis, the sizes in
    the order of `symbols`, and the shape and the strides of each result.

    Attributes:
        bodies: the program of a chunk, and that of a last, shorter one; or one program for any number of points.
        traced: points of the cut axis when the graph was traced.
        fitting: points that fit into the workspace.
        most: how many chunks there are at most, where sums over them are rounded each time.
        cut: how tensors are cut and results are put together; results come in the order of `cut.rows`, `cut.sums`,
            `cut.folds`.
        symbols: size symbols that the bodies take.
        results: the layout of each result.
    """

    bodies: tuple[Program, ...]
    traced: int
    fitting: int
    most: int
    cut: Cut
    symbols: tuple[sympy.Symbol, ...]
    results: tuple[Buffer, ...]

    __name__ = "in_chunks"

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise AssertionError("chunks run once their bodies are built")

    def even(self, length: int) -> int:
        """Points of a chunk, of about equal size."""
        return even(length, self.fitting, self.most)

    def starts(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Each chunk: its first point, how many it has, and which of the bodies computes it."""
        step = self.even(length)
        for start in range(0, length, step):
            points = min(step, length - start)
            yield start, points, int(points < step) % len(self.bodies)


def even(length: int, fitting: int, most: int) -> int:
    """Points of a chunk if no more than `fitting` fit: chunks are of about equal size, and no more than `most`.

    >>> even(280, 100, 100), even(280, 100, 2), even(0, 100, 2)
    (96, 144, 16)
    """
    count = max(1, min(-(-length // fitting), most))
    return max(ROWS, -(-length // (count * ROWS)) * ROWS)


def in_chunks(
    program: Program, capabilities: Capabilities, workspace: int, hints: Mapping[sympy.Symbol, int] | None = None
) -> Program:
    """`program` with regions of products larger than `workspace` bytes in chunks; else the same object."""
    streams = "dot" in capabilities.fold_ops
    refused: set[str] = set()
    while (seed := _too_large(program, workspace, streams, refused, hints)) is not None:
        for form in (program, collapse(program, seed)):
            changed = _cut_at(Dependences(form, hints), seed, workspace, capabilities.alignment)
            if changed is not None:
                program = changed
                break
        else:
            refused.add(seed)
    return program


def _too_large(
    program: Program,
    workspace: int,
    streams: bool,
    refused: Collection[str],
    hints: Mapping[sympy.Symbol, int] | None,
) -> str | None:
    """The first contraction with a result of more than `workspace` bytes; symbolic sizes are as they were traced."""
    dependences = Dependences(program, hints)
    for node in program.nodes:
        if not isinstance(node, Contract) or node.out in refused or (streams and is_short(node)):
            continue
        known = all(given_by(axis.size) <= dependences.hints.keys() for axis in (*node.axes, *node.over))
        if known and node.out not in dependences.outputs and dependences.bytes(node.out) > workspace:
            return node.out
    return None


def _cut_at(dependences: Dependences, seed: str, workspace: int, alignment: int) -> Program | None:
    region = find_region(dependences, dependences.writer[seed])
    return None if region is None else _replaced(dependences, region, workspace, alignment)


def _replaced(dependences: Dependences, region: Region, workspace: int, alignment: int) -> Program | None:
    """The program with the region as one call; None if a product in it is not one that the library computes."""
    members = region.axes.keys()
    before = set[int]().union(*(nx.ancestors(dependences.graph, member) for member in members)) - members
    dependences, views = _with_views(dependences, region, alignment)
    program = dependences.program
    parts = cut(dependences, region)
    traced = dependences.estimate(region.length)
    fitting, most = max(ROWS, workspace * traced // region.bytes), sys.maxsize
    if any(program.buffers[name].dtype.itemsize < 4 for name in parts.sums):
        most = MAX_ROUNDED
    points: tuple[sympy.Expr, ...] = (POINTS,)
    if region.length.is_Integer:
        step = even(traced, fitting, most)
        points = (sympy.Integer(step), sympy.Integer(traced % step))
    made = [body_of(dependences, region, parts, size, alignment) for size in points if size != 0]
    bodies = tuple(body for body in made if body is not None)
    if len(bodies) < len(made):
        return None
    outs = (*parts.rows, *parts.sums, *parts.folds)
    results = tuple(program.buffers[out] for out in outs)
    chunks = Chunks(bodies, traced, fitting, most, parts, symbols_in(dependences, region), results)
    reason = f"a product of {format_bytes(region.bytes)} is made {chunks.even(traced)} rows at a time"
    sizes = [region.length, [*chunks.symbols], *([[*buffer.shape], [*buffer.strides]] for buffer in results)]
    call = Extern(outs, chunks, (*map(BufferRef, parts.sliced), sizes), multiple=True, reason=reason)
    first = [node for position, node in enumerate(program.nodes) if position in before]
    last = [node for position, node in enumerate(program.nodes) if position not in before and position not in members]
    return _without_unread(program.edited((*first, *views, call, *last)))


def _with_views(dependences: Dependences, region: Region, alignment: int) -> tuple[Dependences, list[Node]]:
    """Operands that are read at the cut axis through a split of it, as in hidden[i // S, i % S], as matrices; others
    that are computed, or lie in no even steps, are copied into matrices.

    Returns:
        The program in which the region's contractions read these, and the nodes that make them.
    """
    program = dependences.program
    nodes, buffers = list(program.nodes), dict(program.buffers)
    origins: dict[str, str] = {}
    inside = {dependences.compute(position).out for position in region.axes}
    views: list[Node] = []
    copies: Copies = {}
    for position, axis in region.axes.items():
        node = nodes[position]
        if not isinstance(node, Contract):
            continue
        operands: list[Expr] = []
        for operand in (node.lhs, node.rhs):
            inner = tuple(a.symbol for a in (*node.axes, *node.over) if a.symbol in free_axes(operand))
            view = None
            if isinstance(operand, Load) and axis in inner and axis not in operand.index:
                view = strided_view(operand, inner, axis_sizes(node), buffers, f"{operand.buffer}_rows")
            if view is None:
                operands.append(operand)
                continue
            (name,) = view.outs
            assert isinstance(operand, Load) and name is not None
            views.append(view)
            origins[name] = operand.buffer
            operands.append(Load(name, inner, operand.dtype))
        node = replace(node, lhs=operands[0], rhs=operands[1])
        nodes[position], made = with_matrices(node, buffers, copies, alignment, later=inside)
        origins.update((copy.out, node.out) for copy in made)
        views += made
    if not views:
        return dependences, []
    changed = program.edited(nodes, buffers=buffers.values(), origins=origins)
    return Dependences(changed, dependences.hints), views


def _without_unread(program: Program) -> Program:
    """The program with the buffers that its nodes, inputs and outputs name."""
    used = named_buffers(program) | program.constants.keys()
    buffers = {name: buffer for name, buffer in program.buffers.items() if name in used}
    return replace(program, buffers=buffers)


__all__ = ["ADDED_UP", "Chunks", "in_chunks"]
