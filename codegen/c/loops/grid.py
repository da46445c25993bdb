"""Turns the points of a grid into programs: the loops around a kernel's body, over blocks and threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.codegen.c.plan.lanes import TILE, Lanes
from fusion.codegen.c.text.indices import Names, index_text
from fusion.codegen.c.text.nest import Extent, Namespace, block_extent, indented, whole_extent
from fusion.codegen.c.text.scratch import Scratch, on_heap
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Role

STACK = 1 << 14
"""The most bytes of a thread's scratch arrays on its stack, which may be of 64 KiB; larger ones are on the heap."""


@dataclass(frozen=True, slots=True)
class Array:
    """A scratch array of one thread: `count` (C text) elements of C type `held`; `number` of them, where known."""

    name: str
    held: str
    count: str
    number: int | None

    @property
    def declaration(self) -> str:
        """Its declaration on the stack."""
        return f"_Alignas(64) {self.held} {self.name}[{self.count}];"

    @property
    def bytes(self) -> int | None:
        """Its size, if known."""
        return None if self.number is None else self.number * (8 if self.held in ("double", "int64_t") else 4)


@dataclass(frozen=True, slots=True)
class Tabled:
    """Arrays that all threads read, and the lines that fill them."""

    arrays: Sequence[Array] = ()
    lines: Sequence[str] = ()


def fit_on_stack(arrays: Sequence[Array]) -> bool:
    """Return whether arrays are small enough for a stack."""
    sizes = [array.bytes for array in arrays]
    return all(size is not None for size in sizes) and sum(size or 0 for size in sizes) <= STACK


class Grid:
    """The loops over the grid of one kernel.

    Attributes:
        extents: the range of each axis of the kernel inside one program.
    """

    def __init__(self, kernel: Kernel, lanes: Lanes, space: Namespace, names: Names, team: str) -> None:
        """Take `team`, the clauses of a parallel region, "" for none."""
        self._lanes, self._space, self._names, self._team = lanes, space, names, team
        self._axes = kernel.with_role(Role.GRID)
        self.extents = {axis.symbol: self._extent(axis) for axis in kernel.axes}

    def shorten(self, ends: Mapping[sympy.Symbol, sympy.Expr]) -> list[str]:
        """End the loops over axes inside of programs at most after so many points; return lines with these ends."""
        lines = []
        for symbol, end in ends.items():
            extent, name = self.extents[symbol], self._space.fresh(f"{self._names[symbol]}_end")
            lines.append(f"const int64_t {name} = imin({extent.end}, {index_text(end, self._names)});")
            self.extents[symbol] = replace(extent, end=name, filled=False)
        return lines

    def lane_pragma(self) -> str:
        """Return the pragma before a loop over lanes."""
        if self._lanes.streams and self._team:
            return f"#pragma omp parallel for simd {self._team}"
        return "#pragma omp simd"

    def around(self, body: Sequence[str], arrays: Sequence[Array], tables: Tabled) -> list[str]:
        """Return `body`, which uses `arrays` of its thread and `tables`, in loops over every point of the grid."""
        loops, inside, before = self._loops()
        nest = [*inside, *body]
        scratch: list[Scratch] = []
        if fit_on_stack(tables.arrays):
            before += [array.declaration for array in tables.arrays]
        else:
            scratch += [Scratch(array.name, array.held, f"({array.count})", common=True) for array in tables.arrays]
        alone = self._lanes.streams or not (self._team and loops)
        if fit_on_stack(arrays):
            nest = [*(array.declaration for array in arrays), *nest]
        else:
            scratch += [Scratch(array.name, array.held, f"({array.count})") for array in arrays]
        heap = on_heap(scratch, self._space, shared=not alone)
        before = [*before, *heap.before, *tables.lines]
        for header in reversed(loops):
            nest = [f"{header} {{", *indented(nest), "}"]
        if alone:
            return [*before, *nest, *heap.after]
        collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
        if not heap.inside:
            return [*before, f"#pragma omp parallel for {self._team}{collapse}", *nest, *heap.after]
        region = [f"#pragma omp parallel {self._team}", "{"]
        region += [*indented([*heap.inside, f"#pragma omp for{collapse}", *nest]), "}"]
        return [*before, *region, *heap.after]

    def _block_of(self, axis: KernelAxis) -> int | None:
        if axis is self._lanes.tile:
            return TILE
        return self._lanes.block if axis is self._lanes.axis else None

    def _extent(self, axis: KernelAxis) -> Extent:
        block = self._block_of(axis)
        if block is None:
            return whole_extent(axis.symbol, axis.size, self._names)
        name = self._names[axis.symbol]
        start, end = f"{name}_0", f"{name}_end"
        filled = not self._lanes.varies and axis.size.is_Integer and bool(axis.size % block == 0)
        return block_extent(name, start, f"{start} + {block}" if filled else end, block, filled=filled)

    def _loops(self) -> tuple[list[str], list[str], list[str]]:
        """Return headers of the loops, the first lines inside the innermost, and the lines before them all."""
        lanes = self._lanes
        loops = [
            self.extents[axis.symbol].header for axis in self._axes if axis is not lanes.axis and axis is not lanes.tile
        ]
        inside: list[str] = []
        before: list[str] = []
        for axis in (lanes.tile, lanes.axis):
            block = None if axis is None else self._block_of(axis)
            if axis is None or block is None:
                continue
            extent, size, step = self.extents[axis.symbol], index_text(axis.size, self._names), str(block)
            if lanes.varies:
                points = index_text(sympy.Mul(*(a.size for a in self._axes)), self._names)
                share = f"{points} / threads / {TILE} * {TILE}"
                before.append(f"const int64_t width = imax({TILE}, imin({block}, {share}));")
                step = "width"
            loops.append(f"for (int64_t {extent.start} = 0; {extent.start} < {size}; {extent.start} += {step})")
            if not extent.filled:
                inside.append(f"const int64_t {extent.end} = imin({extent.start} + {step}, {size});")
        return loops, inside, before
