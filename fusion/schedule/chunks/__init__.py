"""Splits a product too large to keep into chunks of a few rows, and runs its readers on each chunk.

    Program → Program

The typical case are the logits of a language model: eight thousand tokens times a vocabulary of a hundred thousand,
read by a softmax, and by the two products of its gradient.  Nothing here is specific to them.  A contraction whose
result exceeds the workspace becomes part of a *region* (`region.py`), all of which can run for some points of one axis
at a time; the region becomes one node, a `Chunked`, which contains a Program for a chunk (`body.py`), scheduled like
any other.  The large result then never exists; rows, sums and extremes computed from it are combined. Tiles that a
kernel loops over where it computes them (`chained/`) need no memory, and are left to it.  A product with a long axis is
not among them: recomputed in each tile it would cost more than memory does.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace

import networkx as nx
import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.algebra.dead_code import named_buffers
from fusion.lowering.ir.chunks import POINTS, ROW_MULTIPLE, Chunked, even
from fusion.lowering.ir.expr import Expr, Load, free_axes
from fusion.lowering.ir.program import Contract, Node, Program, axis_sizes
from fusion.lowering.ir.sizes import given_by
from fusion.lowering.printer import format_bytes
from fusion.schedule.chunks.body import body_of, cut_region, symbols_in
from fusion.schedule.chunks.collapse import collapse
from fusion.schedule.chunks.matrices import Copies, strided_view, with_matrices
from fusion.schedule.chunks.region import ChunkedRegion, find_region, is_short
from fusion.schedule.iteration.dependences import Dependences

MAX_ROUNDED = 8
"""Largest number of chunks if sums over them are rounded to half precision each time."""


def chunk_products(
    program: Program, capabilities: Capabilities, workspace: int, hints: Mapping[sympy.Symbol, int] | None = None
) -> Program:
    """Split regions of products larger than `workspace` bytes into chunks; the same object if there are none.

    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty
    >>> show_program(
    ...     lambda program: chunk_products(program, TARGET.capabilities, 1 << 15),
    ...     lambda x, w: (x @ w).sin().sum(-1),
    ...     empty(70, 260),
    ...     empty(260, 303),
    ... )
      input x: f32[70, 260]
      input w: f32[260, 303]
    + sum_1: f32[70] = in_chunks(70 points of x cut along 0, w)  (a product of 82.9 KiB is made 32 rows at a time)
    - mm: f32[70, 303] = contract(i0:70, i1:303 over r0:260; rows i0, columns i1; in f32) x[i0, r0], w[r0, i1]
    - sin: f32[70, 303] = map(i0:70, i1:303) sin(mm[i0, i1])
    - sum_1: f32[70] = sum(i0:70 over r0:303) sin[i0, r0]
      return sum_1
    """
    has_chains = "dot" in capabilities.fold_ops
    refused: set[str] = set()
    while (seed := _too_large(program, workspace, has_chains, refused, hints)) is not None:
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
    has_chains: bool,
    refused: Collection[str],
    hints: Mapping[sympy.Symbol, int] | None,
) -> str | None:
    """Return the first contraction with a result of more than `workspace` bytes; symbolic sizes are as traced."""
    dependences = Dependences(program, hints)
    for node in program.nodes:
        if not isinstance(node, Contract) or node.out in refused or (has_chains and is_short(node)):
            continue
        known = all(given_by(axis.size) <= dependences.hints.keys() for axis in (*node.axes, *node.over))
        if known and node.out not in dependences.outputs and dependences.bytes(node.out) > workspace:
            return node.out
    return None


def _cut_at(dependences: Dependences, seed: str, workspace: int, alignment: int) -> Program | None:
    region = find_region(dependences, dependences.writer[seed])
    return None if region is None else _replaced(dependences, region, workspace, alignment)


def _replaced(dependences: Dependences, region: ChunkedRegion, workspace: int, alignment: int) -> Program | None:
    """Replace a region by one call; None if the library does not compute one of its products."""
    members = region.axes.keys()
    before = set[int]().union(*(nx.ancestors(dependences.graph, member) for member in members)) - members
    dependences, views = _with_views(dependences, region, alignment)
    program = dependences.program
    parts = cut_region(dependences, region)
    traced = dependences.estimate(region.length)
    fitting, most = max(ROW_MULTIPLE, workspace * traced // region.bytes), sys.maxsize
    if any(program.buffers[name].dtype.itemsize < 4 for name in parts.sums):
        most = MAX_ROUNDED
    points: tuple[sympy.Expr, ...] = (POINTS,)
    if region.length.is_Integer:
        step = even(traced, fitting, most)
        points = (sympy.Integer(step), sympy.Integer(traced % step))
    variants = [body_of(dependences, region, parts, size, alignment) for size in points if size != 0]
    bodies = tuple(body for body in variants if body is not None)
    if len(bodies) < len(variants):
        return None
    symbols = symbols_in(dependences, region)
    rows = even(traced, fitting, most)
    reason = f"a product of {format_bytes(region.bytes)} is made {rows} rows at a time"
    call = Chunked(
        *(bodies, region.length, tuple(parts.sliced.items()), parts.rows, parts.sums, parts.folds),
        *(symbols, traced, fitting, most, reason),
    )
    first = [node for position, node in enumerate(program.nodes) if position in before]
    last = [node for position, node in enumerate(program.nodes) if position not in before and position not in members]
    return _without_unread(program.edited((*first, *views, call, *last)))


def _with_views(dependences: Dependences, region: ChunkedRegion, alignment: int) -> tuple[Dependences, list[Node]]:
    """Give the region's contractions operands that are matrices.

    An operand that is read through a split of the chunked axis, as hidden[i // S, i % S], becomes a view; any other
    operand that is computed, or has no uniform strides, is copied.

    Returns:
        The program in which the region's contractions read these, and the nodes that compute them.
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
        nodes[position], copied = with_matrices(node, buffers, copies, alignment, later=inside)
        origins.update((copy.out, node.out) for copy in copied)
        views += copied
    if not views:
        return dependences, []
    changed = program.edited(nodes, buffers=buffers.values(), origins=origins)
    return Dependences(changed, dependences.hints), views


def _without_unread(program: Program) -> Program:
    """Drop the buffers that no node, input or output names."""
    used = named_buffers(program) | program.constants.keys()
    buffers = {name: buffer for name, buffer in program.buffers.items() if name in used}
    return replace(program, buffers=buffers)


__all__ = ["chunk_products"]
