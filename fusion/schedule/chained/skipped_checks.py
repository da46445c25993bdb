"""Adds checks of data in blocks that a chain's loop may skip: eager checks them, too.

`Program → Program`, for targets whose launches report a failed check (`Capabilities.reports`).  A loop skips the blocks
that a mask excludes for all of its rows (`reductions/skipped_blocks.py`), and with them the checks of the positions at
which elements are gathered there, such as keys of a paged cache.  Each of these checks is folded over its own axes, a
few bytes for each row that is gathered, and the fold is kept.  Chains with the same check, such as the layers of a
model, share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import sympy
import torch

from fusion.codegen.target import Capabilities
from fusion.lowering.checks.unused import KEEP
from fusion.lowering.indexing import over_symbol, substitute
from fusion.lowering.ir.expr import Expr, Op, TileRef, free_axes, loads, postorder
from fusion.lowering.ir.program import Axis, Buffer, BufferRef, Extern, Map, Node, Program, Reduce
from fusion.lowering.ir.scalar_ops import CHECKED
from fusion.schedule.clusters.expand import values_of
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.naming import unused
from fusion.schedule.reductions.one_loop import follow
from fusion.schedule.reductions.skipped_blocks import counts_where


def keep_skipped_checks(
    program: Program,
    capabilities: Capabilities,
    chains: Sequence[Cluster],
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[Program, tuple[Cluster, ...]]:
    """Fold the checks in loops that skip blocks; return the program (the same object if there are none) and the chains.

    >>> from dataclasses import replace
    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from fusion.schedule.chained import chain_products
    >>> from torch import arange, empty, int64, where
    >>> capabilities = replace(TARGET.capabilities, reports=True)
    >>> def kept(program):
    ...     chained, chains = chain_products(program, capabilities)
    ...     return keep_skipped_checks(chained, capabilities, chains)[0]
    >>> show_program(
    ...     kept,
    ...     lambda q, k, at: where(arange(256) < arange(9999)[:, None], q @ k[at].t(), -float("inf")).amax(-1),
    ...     empty(9999, 4),
    ...     empty(50, 4),
    ...     empty(256, dtype=int64),
    ... )
      input q: f32[9999, 4]
      input k: f32[50, 4]
      input at: i64[256]
    + mm_checks: i64[] = max(over r0:256) checked(at[r0], 50, 49, 0)
    +  = fusion.keep.default(mm_checks)  (impure; keeps the checks of blocks that a loop skips)
      mm: f32[9999, 256] = contract(i0:9999, i1:256 over r0:4; rows i0, columns i1; in f32) q[i0, r0],
            k[checked(at[i1], 50, 49, 0), r0]
    - where: f32[9999, 256] = map(i0:9999, i1:256) where(index(i1) < index(i0), mm[i0, i1], -inf)
    + amax: f32[9999] = max(i0:9999 over r0:256) where(index(r0) < index(i0), mm[i0, r0], -inf)
    - amax: f32[9999] = max(i0:9999 over r0:256) where[i0, r0]
      return amax
    """
    if not capabilities.reports or not chains:
        return program, tuple(chains)
    dependences, found = Dependences(program, hints), dict[Expr, tuple[int, tuple[Axis, ...], str]]()
    for chain in chains:
        for check, axes in _skipped(dependences, chain):
            after = max((dependences.writer.get(load.buffer, -1) for load in loads(check)), default=-1)
            found.setdefault(check, (after, axes, dependences.compute(chain.members[0]).out))
    if not found:
        return program, tuple(chains)
    nodes: list[list[Node]] = [[], *([node] for node in program.nodes)]
    buffers: list[Buffer] = []
    for check, (after, axes, reader) in found.items():
        name = unused(f"{reader}_checks", {*program.buffers, *(buffer.name for buffer in buffers)})
        buffers.append(Buffer(name, torch.int64, (), (), program.buffers[reader].device))
        fold = Reduce(name, (), axes, "max", (check,), torch.int64) if axes else Map(name, (), check)
        reason = "keeps the checks of blocks that a loop skips"
        nodes[after + 1] += [fold, Extern((), KEEP, (BufferRef(name),), impure=True, reason=reason)]
    origins = {buffer.name: reader for buffer, (_, _, reader) in zip(buffers, found.values(), strict=True)}
    kept = program.edited([node for part in nodes for node in part], buffers=buffers, origins=origins)
    return kept, positions_in(kept, program, chains)


def _skipped(dependences: Dependences, chain: Cluster) -> Iterator[tuple[Expr, tuple[Axis, ...]]]:
    """Yield (check, axes) for each check in the chain's loop, if it may skip blocks; the axes are renamed copies."""
    looped = [axis.symbol for axis in chain.space.reduced]
    folds = values_of(dependences, chain)[0]
    followed = follow(folds, looped, ())
    if isinstance(followed, str) or counts_where(tuple(followed.running.values()), looped) is None:
        return
    for node in postorder(*(arg for fold in folds for arg in fold.args)):
        if isinstance(node, Op) and node.name == CHECKED and not any(isinstance(n, TileRef) for n in postorder(node)):
            varying = [symbol for symbol in chain.space.sizes if symbol in free_axes(node)]
            axes = tuple(Axis(over_symbol(k), chain.space.sizes[symbol]) for k, symbol in enumerate(varying))
            names = {symbol: axis.symbol for symbol, axis in zip(varying, axes, strict=True)}
            yield substitute(node, names, chain.space.sizes), axes
