"""Fills the tables of a kernel before its loops, and writes the gathers that read by one.

Input: the tables that `plan.tables` found; output: arrays with the lines that fill them, the code of tabled values, and
for each sweep the lines, just outside its lanes, that gather elements into an array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusion.codegen.c.loops.grid import Array, Tabled
from fusion.codegen.c.plan.lanes import Lanes, in_blocks
from fusion.codegen.c.plan.tables import Gather, Tables
from fusion.codegen.c.text.code import SUM, element_of
from fusion.codegen.c.text.indices import Names, index_text
from fusion.codegen.c.text.nest import Extent, Level, Namespace, render, whole_extent
from fusion.codegen.c.text.storage import VALUE_TYPES, loaded, memory_type
from fusion.codegen.c.text.values import ValueWriter
from fusion.codegen.c.text.windows import WINDOW_LANES, lanes_of
from fusion.lowering.indexing import FloorDiv
from fusion.lowering.ir.expr import Expr
from fusion.lowering.ir.kernel import Kernel, KernelAxis

GATHERED_BLOCK = 1024
"""The most lanes of a block whose elements are gathered: arrays of a block stay in the L1 cache."""


def lanes_that_gather(kernel: Kernel, lanes: Lanes, tables: Tables, *, shared: bool) -> Lanes:
    """Return the lanes in blocks whose elements can be gathered; unchanged if there are none, or they are few."""
    axis = lanes.axis
    if axis is None or not tables.gathers or (axis.size.is_Integer and axis.size <= GATHERED_BLOCK):
        return lanes
    return (
        lanes
        if lanes.block is not None and lanes.block <= GATHERED_BLOCK
        else in_blocks(kernel, lanes, GATHERED_BLOCK, shared=shared)
    )


@dataclass(frozen=True, slots=True)
class TableNames:
    """The names of the tables of one position: of itself, of where its windows begin, of which element it takes."""

    place: str
    begin: str
    order: str


@dataclass(slots=True)
class TableWriter:
    """The tables of one kernel over `lane`.

    Attributes:
        places: position that varies along the lanes alone, and lanes of a window → its tables.
        tables: all tables.
        arrays: of gathered elements, for one thread.
    """

    lane: KernelAxis
    space: Namespace
    names: Names
    params: Mapping[str, str]
    places: dict[tuple[Expr, str], TableNames] = field(default_factory=dict)
    tables: list[Array] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)

    def fill(self, wanted: Tables, writer: ValueWriter) -> Tabled:
        """Return the tables that are wanted and the lines that fill them; `writer` learns the values."""
        extent = whole_extent(self.lane.symbol, self.lane.size, self.names)
        levels = [Level(), Level(extent.header)]
        writer.open(levels, {self.lane.symbol: 1})
        places = list(dict.fromkeys(gather.place for gather in wanted.gathers))
        roots = [*wanted.values, *places]
        texts = writer.write(roots)
        stems = [*("table" for _ in wanted.values), *("place" for _ in places)]
        held = [self._table(stem, VALUE_TYPES[root.dtype]) for stem, root in zip(stems, roots, strict=True)]
        elements = [element_of(name, extent.name) for name in held]
        levels[-1].before += [f"{element} = {text};" for element, text in zip(elements, texts, strict=True)]
        for value, element in zip(wanted.values, elements, strict=False):
            writer.learn(value, element)
        named = dict(zip(places, held[len(wanted.values) :], strict=True))
        lines = [self._windows(gather, named[gather.place]) for gather in wanted.gathers]
        return Tabled(self.tables, [*render(levels), *(line for line in lines if line)])

    def _windows(self, gather: Gather, place: str) -> str:
        """Return the line that finds the windows of a gather from its positions; empty if another gather has it."""
        lanes, least = lanes_of(memory_type(gather.load.dtype))
        if (gather.place, lanes) in self.places:
            return ""
        begin, order = self._table("begin", "int64_t", least), self._table("order", "int32_t", 1, WINDOW_LANES)
        self.places[gather.place, lanes] = TableNames(place, begin, order)
        return f"find_windows({place}, {index_text(self.lane.size, self.names)}, {lanes}, {begin}, {order});"

    def _table(self, stem: str, held: str, each: int = 1, rounded: int = 1) -> str:
        """Add a table and return its name: one element for every `each` lanes, and one more; or one for each lane.

        `rounded`: the length of a table with one element for each lane is a multiple of this.
        """
        if each > 1:
            count = FloorDiv(self.lane.size + each - 1, each) + 1
        else:
            count = self.lane.size if rounded == 1 else FloorDiv(self.lane.size + rounded - 1, rounded) * rounded
        name = self.space.fresh(stem)
        self.tables.append(Array(name, held, index_text(count, self.names), int(count) if count.is_Integer else None))
        return name

    def gather(self, gathers: Sequence[Gather], extent: Extent, around: Level, writer: ValueWriter) -> None:
        """Gather elements into arrays `around` the lanes, whose range is `extent`; `writer` learns them."""
        bases = writer.write([gather.base for gather in gathers])
        for gather, base in zip(gathers, bases, strict=True):
            load = gather.load
            held, buffer = memory_type(load.dtype), self.params[load.buffer]
            name = self.space.fresh(f"{buffer}_near")
            assert extent.number is not None
            number = -(-extent.number // WINDOW_LANES) * WINDOW_LANES
            self.arrays.append(Array(name, held, str(number), number))
            by = self.places[gather.place, lanes_of(held)[0]]
            position = buffer if base.text == "0" else f"{buffer} + {base.at(SUM)}"
            arguments = f"{position}, {by.place}, {by.begin}, {by.order}, {extent.start}, {extent.end}, {name}"
            around.before.append(f"gather_{held}({arguments});")
            writer.learn_here(load, loaded(load.dtype, element_of(name, extent.slot)))


__all__ = ["GATHERED_BLOCK", "TableWriter", "lanes_that_gather"]
