"""From a Kernel to the text of one C function.

What enters is a kernel; what leaves is a function of the same name that takes the data pointers of its params, its
sizes as int64_t and the number of threads, with the few definitions it needs before it.  The decisions are made
elsewhere, each in its own file: what shares a walk (`sweeps`), where the lanes run (`lanes`), what is kept (`scratch`),
whether threads pay (`threads`); this file puts the loops around them and prints.

Refused (BuildError): a loop inside a loop, dtypes and operations without a C form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from codegen.c.folds import ARG_LANES, CHUNK_ACROSS, CHUNK_PER_LANE, Place, write_fold
from codegen.c.indices import index_text
from codegen.c.lanes import TILE, choose_lanes, loop_order
from codegen.c.nest import Extent, Level, Namespace, flat, render, whole_extent
from codegen.c.prelude import prelude
from codegen.c.scratch import plan_scratch
from codegen.c.storage import HELD, loaded, memory_type, stored
from codegen.c.sweeps import Sweep, sums_of_products, sweeps_of
from codegen.c.threads import ENOUGH, work
from codegen.c.values import Speller
from lowering.errors import BuildError
from lowering.expr import Expr, Load, make_cast, postorder
from lowering.indexing import coefficient
from lowering.kernel import Fold, Kernel, KernelAxis, Param, Role, spans

STACK = 1 << 18
"""Bytes of scratch arrays of one thread that are put on its stack; more is taken from the heap."""


def emit_kernel(kernel: Kernel) -> str:
    """C source of `kernel`.  Equal kernels give equal text.

    Raises:
        BuildError: the kernel cannot be written in C.
    """
    function = _Function(sums_of_products(kernel)).text()
    origins = "".join(f"// {line}\n" for line in kernel.origins)
    return f"{prelude(function)}\n{origins}{function}"


@dataclass(slots=True)
class _Array:
    """A scratch array: elements of C type `held`, `count` of them (C text)."""

    name: str
    held: str
    count: str

    @property
    def bytes(self) -> int | None:
        """Its size, if known."""
        size = 1
        for factor in self.count.split("*"):
            if not factor.isdigit():
                return None
            size *= int(factor)
        return size * (8 if self.held in ("double", "int64_t") else 4)


class _Function:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.space = Namespace()
        self.name = self.space.exactly(kernel.name)
        self.params = {param.name: self.space.exactly(param.name) for param in kernel.params}
        symbols = (*kernel.sizes, *(axis.symbol for axis in kernel.axes))
        self.symbols = {symbol: self.space.exactly(symbol.name) for symbol in symbols}
        for name in self.symbols.values():  # the bounds of a block of the axis
            self.space.exactly(f"{name}_0"), self.space.exactly(f"{name}_end")
        self.where = dict(spans(kernel))
        sweeps = sweeps_of(kernel)
        self.lanes = choose_lanes(kernel, sweeps, self.where)
        self.sweeps = plan_scratch(sweeps, self.lanes, self.where, self.space.fresh)
        self.speller = Speller(self.where, self.space, self.symbols, self.params)
        written = {param.name for param in kernel.params if param.written}
        self.speller.unstable = frozenset(n.buffer for n in self.where if isinstance(n, Load)) & written
        self.arrays: list[_Array] = []
        self.extents = {axis.symbol: self._extent(axis) for axis in kernel.axes}

    # The function ------------------------------------------------------------------------------------------------

    def text(self) -> str:
        tile_lines, staged = self._stage_tiles()
        body = list(tile_lines)
        for sweep in self.sweeps:
            body += self._sweep(sweep, staged)
        heap = [array for array in self.arrays if not self._on_stack()]
        stack = [array for array in self.arrays if self._on_stack()]
        body = [*(f"_Alignas(64) {array.held} {array.name}[{array.count}];" for array in stack), *body]
        lines = self._programs(body, heap)
        signature = ", ".join([*map(self._parameter, self.kernel.params), *self._size_parameters(), "int threads"])
        return "\n".join([f"void {self.name}({signature}) {{", *(f"    {line}" for line in lines), "}", ""])

    def _parameter(self, param: Param) -> str:
        return f"{'' if param.written else 'const '}{memory_type(param.dtype)} *restrict {self.params[param.name]}"

    def _size_parameters(self) -> list[str]:
        return [f"int64_t {self.symbols[symbol]}" for symbol in self.kernel.sizes]

    def _on_stack(self) -> bool:
        sizes = [array.bytes for array in self.arrays]
        return all(size is not None for size in sizes) and sum(size or 0 for size in sizes) <= STACK

    def _programs(self, body: list[str], heap: list[_Array]) -> list[str]:
        """The loops over the grid around `body`, spread over threads."""
        loops, inside, before = self._grid_loops()
        body = [*inside, *body]
        amount = work(self.kernel, self.sweeps)
        parallel = ""
        streaming = self._streaming()
        if (loops or streaming) and (not amount.is_Integer or amount >= ENOUGH):
            parallel = "parallel"
            team = " num_threads(threads)"
            if not amount.is_Integer:
                team += f" if({index_text(amount, self.symbols)} >= {ENOUGH})"
        if streaming:  # one axis, no blocks: the lane loop itself is shared out
            return [line.replace("omp simd", f"omp parallel for simd{team}") if parallel else line for line in body]
        collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
        allocate = [f"{a.held} *restrict {a.name} = __builtin_malloc(sizeof({a.held}) * ({a.count}));" for a in heap]
        free = [f"__builtin_free({array.name});" for array in heap]
        nest = [*body]
        for depth in range(len(loops) - 1, -1, -1):
            nest = [f"{loops[depth]} {{", *(f"    {line}" for line in nest), "}"]
        if not parallel:
            return [*before, *allocate, *nest, *free]
        if not heap:
            return [*before, f"#pragma omp parallel for{team}{collapse}", *nest]
        region = [*allocate, f"#pragma omp for{collapse}", *nest, *free]
        return [*before, f"#pragma omp parallel{team}", "{", *(f"    {line}" for line in region), "}"]

    # The grid ----------------------------------------------------------------------------------------------------

    def _streaming(self) -> bool:
        return not self.lanes.block and self.lanes.axis is not None and len(self.kernel.with_role(Role.GRID)) == 1

    def _extent(self, axis: KernelAxis) -> Extent:
        """How far the loop over `axis` runs inside one program."""
        name, block = self.symbols[axis.symbol], self._block_of(axis)
        if block is None:
            return whole_extent(axis.symbol, axis.size, self.symbols)
        start = f"{name}_0"
        if not self._block_varies() and axis.size.is_Integer and axis.size % block == 0:
            return Extent(name, start, f"{start} + {block}", str(block), f"{name} - {start}")
        return Extent(name, start, f"{name}_end", str(block), f"{name} - {start}")

    def _block_of(self, axis: KernelAxis) -> int | None:
        if axis is self.lanes.tile:
            return TILE
        return self.lanes.block if axis is self.lanes.axis else None

    def _block_varies(self) -> bool:
        """Is the width of a block decided at launch, so that all threads find work?"""
        axis, block = self.lanes.axis, self.lanes.block
        if axis is None or block is None or self.lanes.tile is not None or not any(s.axes for s in self.sweeps):
            return False
        points = sympy.Mul(*(a.size for a in self.kernel.with_role(Role.GRID)))
        return block > TILE and not (points.is_Integer and points >= 64 * block)

    def _grid_loops(self) -> tuple[list[str], list[str], list[str]]:
        """Headers of the loops over the grid, what stands inside the innermost, and what stands before them."""
        loops: list[str] = []
        inside: list[str] = []
        before: list[str] = []
        blocked: list[KernelAxis] = []
        for axis in self.kernel.with_role(Role.GRID):
            if axis is self.lanes.axis or axis is self.lanes.tile:
                blocked.append(axis)
            else:
                loops.append(self.extents[axis.symbol].header)
        blocked.sort(key=lambda axis: axis is self.lanes.axis)
        for axis in blocked:
            block = self._block_of(axis)
            if block is None:
                continue
            name, size = self.symbols[axis.symbol], index_text(axis.size, self.symbols)
            step = str(block)
            if self._block_varies():
                points = sympy.Mul(*(a.size for a in self.kernel.with_role(Role.GRID)))
                share = f"{index_text(points, self.symbols)} / (2 * threads)"
                before.append(f"const int64_t width = imax({TILE}, imin({block}, {share} / {TILE} * {TILE}));")
                step = "width"
            loops.append(f"for (int64_t {name}_0 = 0; {name}_0 < {size}; {name}_0 += {step})")
            if self.extents[axis.symbol].end == f"{name}_end":
                inside.append(f"const int64_t {name}_end = imin({name}_0 + {step}, {size});")
        return loops, inside, before

    # Tiles of a transpose ----------------------------------------------------------------------------------------

    def _stage_tiles(self) -> tuple[list[str], dict[Load, str]]:
        """Loads that are contiguous along the tile's other axis, brought in turned by a whole tile at a time."""
        if self.lanes.tile is None or self.lanes.axis is None:
            return [], {}
        lines: list[str] = []
        staged: dict[Load, str] = {}
        across, along = self.lanes.tile, self.lanes.axis
        a, b = self.extents[across.symbol], self.extents[along.symbol]
        corner = {
            across.symbol: sympy.Symbol(a.start, integer=True),
            along.symbol: sympy.Symbol(b.start, integer=True),
        }
        names = {**self.symbols, **{symbol: symbol.name for symbol in corner.values()}}
        for node in postorder(*(root for sweep in self.sweeps for root in sweep.roots)):
            if not isinstance(node, Load) or node.mask is not None or isinstance(node.index[0], Expr):
                continue
            stride = coefficient(node.index[0], along.symbol)
            if coefficient(node.index[0], across.symbol) != 1 or stride in (None, 0, 1):
                continue
            held, buffer = memory_type(node.dtype), self.params[node.buffer]
            name = self.space.fresh(f"{buffer}_tile")
            start = index_text(sympy.expand_mul(node.index[0].xreplace(corner)), names)
            step = index_text(stride, self.symbols)
            counts = ", ".join(_difference(extent) for extent in (b, a))
            lines.append(f"_Alignas(64) {held} {name}[{TILE}][{TILE}];")
            lines.append(f"transpose_{held}({buffer} + {start}, {step}, {counts}, {name});")
            staged[node] = loaded(node.dtype, f"{name}[{a.slot}][{b.slot}]")
        return lines, staged

    # One sweep ---------------------------------------------------------------------------------------------------

    def _sweep(self, sweep: Sweep, staged: dict[Load, str]) -> list[str]:
        order, lane = loop_order(sweep, self.lanes, self.where)
        if self.lanes.tile is not None:
            order = (self.lanes.tile, *order)
        nest = self._open(sweep, order, lane)
        self.speller.open(nest.levels, nest.depth)
        for load, text in staged.items():
            self.speller.learn_here(load, text)
        values = [make_cast(store.value, self.kernel.param(store.param).dtype) for store in sweep.stores]
        for value, store in zip(values, sweep.stores, strict=True):
            self.where.setdefault(value, self.where[store.value])
        folded = [arg for fold in sweep.folds for arg in fold.args]
        offsets = [store.offset for store in sweep.stores if isinstance(store.offset, Expr)]
        kept = [keep.value for keep in sweep.keeps]
        found = self.speller.spell([*kept, *folded, *values, *offsets], named=frozenset(folded))
        texts = iter(found)
        inner = nest.levels[-1].before
        learned: list[tuple[Expr, str]] = []
        for keep in sweep.keeps:
            element = self._array(keep.name, HELD[keep.value.dtype], keep.axes)
            inner.append(f"{element} = {next(texts)};")
            learned.append((keep.value, element))
        for fold in sweep.folds:
            arguments = [next(texts) for _ in fold.args]
            learned.append((fold.ref, write_fold(fold, arguments, self._place(fold, nest), self.space)))
        statements = [f"{stored(value.dtype, next(texts))};" for value in values]
        for k, store in enumerate(sweep.stores):
            place = next(texts) if isinstance(store.offset, Expr) else self.speller.offset(store.offset)
            statements[k] = f"{self.params[store.param]}[{place}] = {statements[k]}"
        inner += statements
        for value, element in learned:
            self.speller.learn(value, element)
        return render(nest.levels)

    def _open(self, sweep: Sweep, order: tuple[KernelAxis, ...], lane: KernelAxis | None) -> _Nest:
        """The loops of a sweep, still empty."""
        across = lane is not None and lane.symbol in sweep.over
        folded = [axis for axis in order if axis.symbol in sweep.over]
        last = lane if across else folded[-1] if folded else None
        chunk = _Function._chunk(sweep, last, across)
        levels, depth = [Level()], {}
        outer: Level | None = None
        part: Level | None = None
        for axis in (*order, *((lane,) if lane is not None else ())):
            if outer is None and axis.symbol in sweep.over:
                outer = levels[-1]
            extent = self.extents[axis.symbol]
            header = extent.header
            if axis is last:
                if chunk is not None:
                    start, end = f"{extent.name}_0", f"{extent.name}_0 + {chunk}"
                    if not (axis.size.is_Integer and axis.size % chunk == 0):
                        end = f"imin({end}, {extent.end})"
                    levels.append(Level(f"for (int64_t {start} = 0; {start} < {extent.end}; {start} += {chunk})"))
                    header = f"for (int64_t {extent.name} = {start}; {extent.name} < {end}; {extent.name}++)"
                part = levels[-1]
            levels.append(Level(header))
            depth[axis.symbol] = len(levels) - 1
        scattered = any(isinstance(store.offset, Expr) for store in sweep.stores)
        if lane is not None and not scattered:
            levels[-1].simd = True
        kept = tuple(axis for axis in order if axis.symbol not in sweep.over)
        chunked = chunk is not None or (part is not None and part is not outer)
        return _Nest(levels, depth, outer or levels[-1], part or levels[-1], chunked, lane, across, kept)

    @staticmethod
    def _chunk(sweep: Sweep, last: KernelAxis | None, across: bool) -> int | None:
        """Elements of the innermost folded loop after which partial results are handed on; None for all."""
        if last is None:
            return None
        if any(fold.op in ("argmax", "argmin") for fold in sweep.folds) and across:
            return ARG_LANES
        if not any(fold.op == "sum" and HELD[fold.dtype] == "float" for fold in sweep.folds):
            return None
        most = CHUNK_ACROSS if across else CHUNK_PER_LANE
        return None if last.size.is_Integer and last.size <= most else most

    def _place(self, fold: Fold, nest: _Nest) -> Place:
        """Where the code of `fold` goes in `nest`."""
        lane = nest.lane
        per_lane = lane is not None and not nest.across
        extents = [self.extents[axis.symbol] for axis in nest.kept]
        cell: Callable[[str], str] | None = None
        if extents:
            axes = tuple(axis.symbol for axis in nest.kept) + ((lane.symbol,) if per_lane and lane else ())
            made: dict[str, str] = {}

            def cell(held: str) -> str:
                if held not in made:
                    made[held] = self._array(self.space.fresh("folded"), held, axes)
                return made[held]

        slot = ""
        if lane is not None and nest.across:
            name = self.extents[lane.symbol].name
            slot = f"{name} - {name}_0"
        lanes = self.extents[lane.symbol] if per_lane and lane else None
        return Place(nest.outer, nest.part, nest.levels[-1], nest.chunked, lanes, cell, slot)

    def _array(self, name: str, held: str, axes: tuple[sympy.Symbol, ...]) -> str:
        """A new scratch array over `axes`; returns the element of the current point."""
        count, position = flat([self.extents[symbol] for symbol in axes])
        self.arrays.append(_Array(name, held, count))
        return f"{name}[{position}]"


@dataclass(frozen=True, slots=True)
class _Nest:
    """The loops of one sweep: see `folds.Place` for `outer`, `part` and `chunked`; `kept` are the scalar loops that
    no fold folds; `across`: the lanes run along a folded axis."""

    levels: list[Level]
    depth: dict[sympy.Symbol, int]
    outer: Level
    part: Level
    chunked: bool
    lane: KernelAxis | None
    across: bool
    kept: tuple[KernelAxis, ...]


def _difference(extent: Extent) -> str:
    """The number of points of a block."""
    prefix = f"{extent.start} + "
    return extent.end.removeprefix(prefix) if extent.end.startswith(prefix) else f"{extent.end} - {extent.start}"


def check_params(kernel: Kernel) -> None:
    """Refuse element types that C has no form for.

    Raises:
        BuildError: names the param.
    """
    for param in kernel.params:
        if param.dtype not in HELD:
            raise BuildError(f"kernel {kernel.name}: param {param.name} has the element type {param.dtype}")
