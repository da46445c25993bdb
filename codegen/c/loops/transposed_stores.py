"""Transposes stores that are contiguous along a loop but not along its lanes, in tiles of full cache lines.

A norm over channels that are not the last dimension has lanes along the pixels, which it reads; its result with
channels last would be stored element by element.  The loop over the channels runs in chunks, whose elements are stored
into a tile in the order of the lanes; after a chunk the tile is transposed into the tensor.  Input: a sweep that only
stores; output: its innermost scalar axis and the stores to transpose.  Other stores stay unchanged: those that
combine with elements, have a condition or computed positions, or write tensors that the sweep reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from fusion.codegen.c.loops.grid import Array
from fusion.codegen.c.plan.lanes import TILE
from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.codegen.c.plan.prefetch import CACHE_LINE
from fusion.codegen.c.text.code import SUM, Code, element_of
from fusion.codegen.c.text.indices import Names, index_code, index_text
from fusion.codegen.c.text.nest import Extent, Level, flat
from fusion.codegen.c.text.storage import memory_type
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Load, postorder
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Store


@dataclass(frozen=True, slots=True)
class TransposedStores:
    """The stores of a sweep that are transposed, in chunks of `length` points of the loop over `axis`."""

    axis: KernelAxis
    stores: tuple[Store, ...]
    length: int


def find_transposed_stores(
    sweep: Sweep, order: Sequence[KernelAxis], lane: KernelAxis, kernel: Kernel
) -> TransposedStores | None:
    """Return the stores to transpose in a sweep with scalar loops over `order`; None if there are none."""
    if sweep.folds or sweep.scans or not order or not all(map(_fills_tile, (order[-1], lane))):
        return None
    axis, read = order[-1], {node.buffer for node in postorder(*sweep.roots) if isinstance(node, Load)}
    stores = tuple(store for store in sweep.stores if store.param not in read and _crosses(store, axis, lane))
    if not stores:
        return None
    least = min(kernel.param(store.param).dtype.itemsize for store in stores)
    return TransposedStores(axis, stores, max(TILE, CACHE_LINE // least))


def _fills_tile(axis: KernelAxis) -> bool:
    return not axis.size.is_Integer or bool(axis.size >= TILE)


def _crosses(store: Store, axis: KernelAxis, lane: KernelAxis) -> bool:
    """Return whether a store is contiguous along an axis, and has a stride along the lanes."""
    if store.op != "store" or store.axes is not None or store.where is not None:
        return False
    if not isinstance(store.offset, sympy.Expr) or coefficient(store.offset, axis.symbol) != 1:
        return False
    return coefficient(store.offset, lane.symbol) not in (None, 0, 1)


@dataclass(slots=True)
class Tiles:
    """The tiles of a sweep with transposed stores; `chunk` and `lanes` are the ranges of their rows and columns."""

    transposed: TransposedStores
    chunk: Extent
    lanes: Extent
    lane: sympy.Symbol
    after: Level

    def array(self, name: str, store: Store, kernel: Kernel) -> Array:
        """Return the tile of a store."""
        assert self.lanes.number is not None
        number = self.transposed.length * self.lanes.number
        return Array(name, memory_type(kernel.param(store.param).dtype), str(number), number)

    def element(self, name: str) -> Code:
        """Return the C expression of the current point's element in a tile."""
        return element_of(name, flat([self.chunk, self.lanes])[1])

    def finish(self, store: Store, kernel: Kernel, name: str, param: str, names: Names) -> None:
        """Emit, after each chunk, the call that transposes a tile into its tensor."""
        assert isinstance(store.offset, sympy.Expr)
        corner = {self.transposed.axis.symbol: self.chunk.first, self.lane: self.lanes.first}
        begun = {start: start.name for start in corner.values() if isinstance(start, sympy.Symbol)}
        start = index_code(sympy.expand_mul(store.offset.xreplace(corner)), {**names, **begun}).at(SUM)
        stride = coefficient(store.offset, self.lane)
        assert stride is not None
        step = index_text(stride, names)
        held = memory_type(kernel.param(store.param).dtype)
        rows, columns = (_points(extent) for extent in (self.chunk, self.lanes))
        self.after.after.append(
            f"turn_all_{held}({name}, {self.lanes.size}, {rows}, {columns}, {param} + {start}, {step});"
        )


def _points(extent: Extent) -> str:
    """Return the number of points of an axis in the tile."""
    return str(extent.size) if extent.filled else f"{extent.end} - {extent.start}"
