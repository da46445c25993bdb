"""Builds the program that computes one chunk of a region.

Input: a region and the number of points of a chunk; output: a Program over slices: tensors that are read at the cut
axis alone are sliced along it, others are read whole, at the chunk's start plus the axis.  Products over the cut axis
are accumulated into their result by the library, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.indexing import simplify
from fusion.lowering.ir.chunks import BETA, POINTS, START
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, Random, TileRef, concrete, rewrite
from fusion.lowering.ir.program import (
    Axis,
    Buffer,
    BufferRef,
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
    reads,
    with_exprs,
)
from fusion.lowering.ir.scalar_ops import FoldName
from fusion.operations.products import add_aligned_product
from fusion.schedule.chunks.matrices import Copies, aligned_strides, product_calls, with_matrices
from fusion.schedule.chunks.pick import pick
from fusion.schedule.chunks.region import ChunkedRegion
from fusion.schedule.iteration.axes import indices_of
from fusion.schedule.iteration.dependences import Dependences

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RegionCut:
    """Describes the cut of a region: the sliced tensors, and how results are combined.

    Attributes:
        sliced: buffers read from outside → the dimension that is sliced, or None.
        rows: results written in slices → the dimension.
        sums: results of products, accumulated in place.
        folds: results of reductions → the reduction that combines chunks.
    """

    sliced: Mapping[str, int | None]
    rows: Mapping[str, int]
    sums: tuple[str, ...]
    folds: Mapping[str, FoldName]


def cut_region(dependences: Dependences, region: ChunkedRegion) -> RegionCut:
    """Return how each tensor that a region reads is sliced, and how each of its results is combined over chunks."""
    written_by = {dependences.compute(position).out: position for position in region.axes}
    loads = [(load, axis) for position, axis in region.axes.items() for load in dependences.loads[position]]
    sliced: dict[str, int | None] = {}
    for load, axis in loads:
        if load.buffer in written_by:
            continue
        dimension = _dimension(load, axis)
        sliced[load.buffer] = dimension if sliced.setdefault(load.buffer, dimension) == dimension else None
    rows: dict[str, int] = {}
    folds: dict[str, FoldName] = {}
    sums: list[str] = []
    for out, position in written_by.items():
        node, axis = dependences.compute(position), region.axes[position]
        if not dependences.stored(position, region.axes.keys()):
            continue
        symbols = [each.symbol for each in node.axes]
        if axis in symbols:
            rows[out] = symbols.index(axis)
        elif isinstance(node, Reduce):
            folds[out] = node.op
        else:
            sums.append(out)
    return RegionCut(sliced, rows, tuple(sums), folds)


def symbols_in(dependences: Dependences, region: ChunkedRegion) -> tuple[sympy.Symbol, ...]:
    """Return the size symbols that the nodes of a region name."""
    symbols: set[sympy.Symbol] = set()
    for position in region.axes:
        node = dependences.compute(position)
        buffers = (dependences.program.buffers[name] for name in (*reads(node), node.out))
        sizes = [size for buffer in buffers for size in (*buffer.shape, *buffer.strides)]
        own = axis_sizes(node)
        sizes += [*own.values()]
        symbols.update(symbol for index in indices_of(node.exprs) for symbol in index.free_symbols if symbol not in own)
        symbols.update(symbol for size in sizes for symbol in size.free_symbols)
    return tuple(sorted(symbols, key=str))


def _dimension(load: Load, axis: sympy.Symbol) -> int | None:
    """Return the dimension that a load reads at the cut axis, if no other index depends on the axis."""
    at = [k for k, index in enumerate(load.index) if index == axis]
    others = [index for k, index in enumerate(load.index) if k not in at]
    affine = [index for index in others if not isinstance(index, Expr)]
    return at[0] if len(at) == 1 and not any(axis in index.free_symbols for index in affine) else None


def body_of(
    dependences: Dependences, region: ChunkedRegion, parts: RegionCut, points: sympy.Expr, alignment: int
) -> Program | None:
    """Return the program of a chunk of `points` points; None if the library does not compute one of its products.

    `alignment`: see `Capabilities`.

    Its inputs are START, BETA and POINTS, the symbolic sizes in the order of `symbols_in`, the tensors it reads in the
    order of `parts.sliced`, and the sums so far; its outputs are slices in the order of `parts.rows`, and then the
    folds of this chunk.
    """
    return _Body(dependences, region, parts, points, alignment).run()


class _Body:
    def __init__(
        self, dependences: Dependences, region: ChunkedRegion, parts: RegionCut, points: sympy.Expr, alignment: int
    ) -> None:
        self.program, self.dependences = dependences.program, dependences
        self.region, self.parts, self.points, self.alignment = region, parts, points, alignment
        self.cut = dict(parts.sliced)
        for position, axis in region.axes.items():
            node = dependences.compute(position)
            symbols = [each.symbol for each in node.axes]
            self.cut[node.out] = symbols.index(axis) if axis in symbols else None
        self.buffers: dict[str, Buffer] = {}
        self.nodes: list[Node] = []
        self.library: dict[str, tuple[Node, ...]] = {}

    def run(self) -> Program | None:
        for name in self.parts.sliced:
            self.buffers[name] = self._sliced(self.program.buffers[name], dense=False)
        for position in sorted(self.region.axes):
            node = self.dependences.compute(position)
            self.buffers[node.out] = self._sliced(self.program.buffers[node.out], dense=True)
        origins = dict(self.program.origins)
        nodes = [self._node(position) for position in sorted(self.region.axes)]
        rows = {node.out for node in nodes if self.cut[node.out] is not None and len(node.axes) > 1}
        copies: Copies = {}
        for node in pick(nodes, rows, self.buffers):
            if node.out not in origins:  # an element that is picked where its row is read
                origins[node.out] = origins[next(name for name in reads(node) if name in rows)]
            if not isinstance(node, Contract):
                self.nodes.append(node)
                continue
            node, copied = with_matrices(node, self.buffers, copies, self.alignment)
            origins.update((copy.out, origins[node.out]) for copy in copied)
            self.nodes += copied
            library = product_calls(node, self.buffers, self.alignment)
            if not library:
                return None
            if node.out in self.parts.sums:
                *views, call = library
                assert isinstance(call, Extern)
                self.nodes += [*views, _added(call, node.out)]
            else:
                self.nodes.append(node)
                self.library[node.out] = library
        outputs = tuple(BufferRef(name) for name in (*self.parts.rows, *self.parts.folds))
        inputs: tuple[str | sympy.Symbol | None, ...]
        inputs = (START, BETA, POINTS, *symbols_in(self.dependences, self.region), *self.parts.sliced, *self.parts.sums)
        inlined = self.program.inlined
        return Program(inputs, self.buffers, tuple(self.nodes), outputs, origins, inlined=inlined, library=self.library)

    def _sliced(self, buffer: Buffer, *, dense: bool) -> Buffer:
        """Return a buffer with a chunk's points along its cut dimension; `dense` if the chunk computes it."""
        dimension = self.cut[buffer.name]
        if dimension is None:
            return buffer
        shape = tuple(self.points if k == dimension else size for k, size in enumerate(buffer.shape))
        strides = aligned_strides(buffer, shape, self.alignment) if dense else buffer.strides
        return replace(buffer, shape=shape, strides=strides)

    def _node(self, position: int) -> Compute:
        node, axis = self.dependences.compute(position), self.region.axes[position]
        sizes = {**axis_sizes(node), axis: self.points}
        moved = {axis: axis + START}

        def at(index: sympy.Expr) -> sympy.Expr:
            return simplify(index.xreplace(moved), sizes) if axis in index.free_symbols else index

        def rule(expr: Expr) -> Expr | None:
            match concrete(expr):
                case Load(buffer, old, dtype, mask):
                    kept = self.cut.get(buffer)
                    index = tuple(i if k == kept or isinstance(i, Expr) else at(i) for k, i in enumerate(old))
                    return Load(buffer, index, dtype, mask)
                case IndexValue(place, dtype):
                    return IndexValue(at(place), dtype)
                case Random(kind, seed, offset):
                    return Random(kind, seed, at(offset))
                case Op() | Const() | Cast() | TileRef():
                    return None
                case unknown:
                    assert_never(unknown)

        def shorter(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple(replace(each, size=sizes[each.symbol]) for each in axes)

        node = with_exprs(node, rewrite(node.exprs, rule))
        match node:
            case Map():
                return replace(node, axes=shorter(node.axes))
            case Reduce():
                return replace(node, axes=shorter(node.axes), over=shorter(node.over))
            case Contract():
                return replace(node, axes=shorter(node.axes), over=shorter(node.over))
            case Scan() | Scatter():
                raise AssertionError("regions hold no scans and no scatters")
            case _:
                assert_never(node)


def _added(call: Extern, out: str) -> Extern:
    """Turn the call of a product into a call that accumulates into `out`, or overwrites it in the first chunk."""
    into: Callable[..., object] = add_aligned_product
    if call.target in (aten.mm.default, aten.bmm.default):
        into = aten.addmm_.default if call.target is aten.mm.default else aten.baddbmm_.default
    args = (BufferRef(out), *call.args[:2])
    reason = "chunks are added up in place"
    return replace(call, outs=(None,), target=into, args=args, kwargs={"beta": BETA}, impure=True, reason=reason)
