"""Writes a kernel of products: the function that computes the rows it multiplies, and the loop over the columns.

Input: a kernel with a plan; output: the texts of its C functions.  A separate kernel computes x into scratch memory;
that is arranged in the order in which a register gives out the weights (`text/skinny`).  Each column is then one call
for all rows.  What depends on the sums follows once those of a block of columns are known, in lanes.

Threads share the columns.  Rows that one thread arranges in little time are arranged by each of them: then none waits
for another, and the kernel is divided into shares (`Frame.shared`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import sympy
import torch

from fusion.codegen.c.calls import NO_MEMORY, REGION
from fusion.codegen.c.frame import Frame
from fusion.codegen.c.loops.function import loops_function
from fusion.codegen.c.loops.grid import Array, fit_on_stack
from fusion.codegen.c.plan.loop_fusion import extend_spans
from fusion.codegen.c.plan.scatters import scatters
from fusion.codegen.c.plan.threads import ENOUGH
from fusion.codegen.c.skinny.plan import SkinnyPlan, SkinnyProduct, plan_of, scaled
from fusion.codegen.c.text.code import Code, element_of
from fusion.codegen.c.text.folds import store_statement
from fusion.codegen.c.text.nest import WRONG, Extent, Level, chunks_of, indented, render, whole_extent
from fusion.codegen.c.text.scratch import ParallelLines, Scratch, on_heap
from fusion.codegen.c.text.skinny import Stream, stream_text
from fusion.codegen.c.text.values import ValueWriter
from fusion.lowering.checks.checked import has_checks
from fusion.lowering.indexing import ZERO
from fusion.lowering.ir.expr import Expr, make_cast
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Param, Role, Stmt, Store, loaded, spans

MOST_ON_ONE_THREAD = 1 << 15
"""Elements that are arranged on one thread."""

MOST_LANES = 16
"""Floats of the widest registers."""

_COSTLY = (REGION, "aligned_alloc(", "_Alignas(")
"""Text of staging that one thread does not repeat for itself: loops for several threads, and scratch arrays."""

PADDING = 16
"""Scales that may be read past the last one."""


def skinny_functions(kernel: Kernel) -> tuple[str, ...]:
    """Return the texts of the C functions of a kernel that has a plan, the kernel's own last.

    Raises:
        BuildError: a dtype or operation without a C form.
    """
    plan = plan_of(kernel)
    assert plan is not None, "the form applies"
    streams = dict.fromkeys(stream_text(product.stream) for product in plan.products)
    staged = loops_function(staging_kernel(plan))
    return (*streams, f"static {staged}", *_Function(plan).texts(plain=not any(mark in staged for mark in _COSTLY)))


def _order(plan: SkinnyPlan) -> tuple[KernelAxis, ...]:
    return plan.products[0].order


def _position(axes: Sequence[KernelAxis]) -> sympy.Expr:
    """Return the place of a point in an array over `axes`."""
    place: sympy.Expr = ZERO
    for axis in axes:
        place = place * axis.size + axis.symbol
    return sympy.expand(place)


def _factors(plan: SkinnyPlan) -> dict[Expr, str]:
    """Return the distinct factors, each with the name of its array."""
    distinct = dict.fromkeys((product.factor, product.order) for product in plan.products)
    return {factor: f"staged{number}" for number, (factor, _) in enumerate(distinct)}


def staging_kernel(plan: SkinnyPlan) -> Kernel:
    """Return the prologue kernel, which stores the weights' scales and the row reductions in arrays for the GEMM."""
    kernel, arrays = plan.kernel, _factors(plan)
    stores: list[Store] = []
    for product in plan.products:
        place = _position((*plan.rows, *product.order))
        stores.append(Store(arrays[product.factor], place, product.factor))
    stores += [Store(_folded(fold.name), _position(plan.rows), fold.ref) for fold in plan.before]
    body: tuple[Stmt, ...] = (*plan.before, *dict.fromkeys(stores))
    lengths = dict.fromkeys(arrays.values(), plan.count * plan.depth)
    lengths |= {_folded(fold.name): plan.count for fold in plan.before}
    written = tuple(
        Param(name, torch.float32, (sympy.Integer(length),), (sympy.Integer(1),), written=True)
        for name, length in lengths.items()
    )
    inner = Role.WHOLE if plan.before else Role.GRID
    over = {axis.symbol for axis in _order(plan)}.union(*(fold.over for fold in plan.before))
    axes = (*plan.rows, *(replace(axis, role=inner) for axis in kernel.axes if axis.symbol in over))
    whole = replace(kernel, axes=axes, body=body, beside=(), then=None, origins=())
    read = tuple(param for param in kernel.params if param.name in loaded(whole))
    return replace(whole, name=f"{kernel.name}_staged", params=(*read, *written))


def _stages_apart(plan: SkinnyPlan) -> bool:
    """Return whether nothing that the kernel stores is read where factors are staged."""
    written = {param.name for param in plan.kernel.params if param.written}
    return written.isdisjoint(param.name for param in staging_kernel(plan).params)


def _folded(name: str) -> str:
    return f"rows_{name}"


class _Function:
    def __init__(self, plan: SkinnyPlan) -> None:
        self.plan, self.kernel = plan, plan.kernel
        self.frame = Frame(self.kernel)
        self.space, self.names, self.params = self.frame.space, self.frame.names, self.frame.params
        self.where = dict(spans(self.kernel))
        self.writer = self._writer()
        self.extents = {axis.symbol: whole_extent(axis.symbol, axis.size, self.names) for axis in self.kernel.axes}
        self.arrays = {name: self.space.exactly(name) for name in _factors(plan).values()}
        self.folded = {fold.name: self.space.exactly(_folded(fold.name)) for fold in plan.before}
        self.arranged = {(product.factor, product.stream): self.space.fresh("arranged") for product in plan.products}

    def texts(self, *, plain: bool) -> tuple[str, ...]:
        """Return the texts of the functions, the kernel's own last; `plain`: the factors are staged at little cost."""
        plan = self.plan
        arrays = self._scratch()
        scratch = [Scratch(array.name, array.held, array.count) for array in arrays]
        width = prod(int(axis.size) for axis in plan.columns)
        shared = width * plan.count * plan.depth * len(plan.products) >= ENOUGH
        together = any(self._arranges_together(stream) for _, stream in self.arranged)
        if shared and plain and not together and _stages_apart(plan):
            staged = f"{WRONG} |= {self._staging()};" if has_checks(self.kernel) else f"{self._staging()};"
            lines = [staged, *self._arrange(shared=False), *self._columns("#pragma omp for nowait")]
            return self.frame.shared(lines, scratch)
        heap = on_heap(scratch, self.space, shared=False)
        if not shared and fit_on_stack(arrays):
            heap = ParallelLines([array.declaration for array in arrays], [], [])
        region = "#pragma omp parallel for num_threads(threads)" if shared else ""
        lines = [*self._stage(heap.after), *self._arrange(shared), *self._columns(region)]
        return (self.frame.function([*heap.before, *lines, *heap.after]),)

    def _scratch(self) -> list[Array]:
        """Return the scratch arrays, with the most elements that they have with any instructions."""
        count, depth = self.plan.count, self.plan.depth
        arrays = [Array(name, "float", str(count * depth), count * depth) for name in self.arrays.values()]
        arrays += [Array(name, "float", str(count), count) for name in self.folded.values()]
        for (_, stream), name in self.arranged.items():
            held = f"({self._steps(stream.per_word)}*{self._step(stream.per_word)}*{count})"
            most = (depth + stream.per_word * MOST_LANES) * count
            if stream.fixed_point is not None:
                most = stream.fixed_point.words(depth)
                held = str(most)
            arrays.append(Array(name, "float", held, most))
        return arrays

    def _arranges_together(self, stream: Stream) -> bool:
        """Return whether threads share the arrangement of a factor, if they share the columns.

        Whether fixed point will do is known of the whole row.
        """
        return self.plan.count * self.plan.depth > MOST_ON_ONE_THREAD and stream.fixed_point is None

    def _writer(self) -> ValueWriter:
        written = frozenset(param.name for param in self.kernel.params if param.written)
        return ValueWriter(self.where, self.space, self.names, self.params, written)

    def _step(self, per_word: int) -> str:
        return f"{per_word}*stream_lanes"

    def _steps(self, per_word: int) -> str:
        step = self._step(per_word)
        return f"(({self.plan.depth} + {step} - 1)/({step}))"

    def _staging(self) -> str:
        """Return the call that computes the factors."""
        staging = staging_kernel(self.plan)
        own = {**self.params, **self.arrays, **{_folded(name): array for name, array in self.folded.items()}}
        arguments = [own[param.name] for param in staging.params] + [self.names[size] for size in staging.sizes]
        return f"{staging.name}({', '.join([*arguments, 'threads'])})"

    def _stage(self, release: Sequence[str]) -> Iterator[str]:
        """Yield the lines that compute the factors."""
        name = self.space.fresh("failed")
        yield f"const int {name} = {self._staging()};"
        yield f"if ({name} & {NO_MEMORY}) {{"
        yield from indented([*release, f"return {name};"])
        yield "}"
        if has_checks(self.kernel):
            yield f"{WRONG} |= {name};"

    def _arrange(self, shared: bool) -> Iterator[str]:
        """Yield the lines that arrange the factors."""
        factors = _factors(self.plan)
        for (factor, stream), name in self.arranged.items():
            array, steps = self.arrays[factors[factor]], self._steps(stream.per_word)
            call = f"arranged_{stream.name}({array}, {self.plan.depth}, "
            if not (shared and self._arranges_together(stream)):
                yield f"{call}0, {steps}, {name});"
                continue
            yield "#pragma omp parallel for num_threads(threads)"
            yield f"for (int64_t step = 0; step < {steps}; step++) {call}step, step + 1, {name});"

    def _columns(self, pragma: str) -> list[str]:
        """Return the loops over the columns, in blocks: first the sums of a block, then the results, in lanes.

        Each thread has a range of the innermost axis, since whole blocks would not be distributed as evenly.

        Args:
            pragma: spreads a loop over threads; empty: one thread computes all columns.
        """
        *outer, inner = self.plan.columns
        columns, lines = self.extents[inner.symbol], list[str]()
        headers = [self.extents[axis.symbol].header for axis in outer]
        if pragma:
            part = self.space.fresh("part")
            headers.append(f"for (int64_t {part} = 0; {part} < threads; {part}++)")
            lines, columns = self._range(columns, part)
        header, block = chunks_of(columns, inner.size, self.plan.block)
        sums = {product.fold.name: self.space.exactly(product.fold.name) for product in self.plan.products}
        inside = [f"_Alignas(64) float {name}[{self.plan.count * self.plan.block}];" for name in sums.values()]
        if not block.filled:
            inside.append(f"const int64_t {block.name}_end = {block.end};")
            block = replace(block, end=f"{block.name}_end")
        inside += [*self._sums(block, sums), *self._results(block, sums)]
        lines += [f"{header} {{", *indented(inside), "}"]
        for each in reversed(headers):
            lines = [f"{each} {{", *indented(lines), "}"]
        collapse = f" collapse({len(headers)})" if len(headers) > 1 else ""
        return [*([f"{pragma}{collapse}"] if pragma else []), *lines]

    def _range(self, columns: Extent, part: str) -> tuple[list[str], Extent]:
        """Return lines, and the range of columns that is one of `threads` parts, in whole turns."""
        size, together = self.plan.columns[-1].size, self.plan.together
        first, last = self.space.fresh("first"), self.space.fresh("last")
        turns, each = -(-size // together), f"*{together}" if together > 1 else ""
        end = f"{turns}*({part} + 1)/threads{each}"
        lines = [
            f"const int64_t {first} = {turns}*{part}/threads{each};",
            f"const int64_t {last} = {end if size % together == 0 else f'imin({end}, {size})'};",
        ]
        return lines, replace(columns, start=first, end=last, filled=False)

    def _sums(self, block: Extent, sums: Mapping[str, str]) -> list[str]:
        """Return the loop that computes the sums of a block of columns, those that are multiplied in turn at once."""
        turn, header = block, block.header
        if (together := self.plan.together) > 1:
            start = f"{block.name}_step"
            header = f"for (int64_t {start} = {block.start}; {start} < {block.end}; {start} += {together})"
            turn = replace(block, start=start, end=f"imin({start} + {together}, {block.end})", filled=False)
        self.extents[self.plan.columns[-1].symbol] = turn
        self.writer = self._writer()
        first = turn.start if together > 1 else turn.name
        lines = [
            line
            for product in self.plan.products
            for line in self._product(product, f"{sums[product.fold.name]} + ({first} - {block.start})")
        ]
        return [f"{header} {{", *indented(lines), "}"]

    def _each_column(self, lines: Sequence[str]) -> list[str]:
        """Return lines of one column in a loop over those that are multiplied in turn; no others see their names."""
        if self.plan.together == 1:
            return [*lines]
        self.writer = self._writer()
        return [f"{self.extents[self.plan.columns[-1].symbol].header} {{", *indented(lines), "}"]

    def _number(self) -> str:
        """Return the number of a column among those that are multiplied in turn."""
        inner = self.extents[self.plan.columns[-1].symbol]
        return f"({inner.name} - {inner.start})" if self.plan.together > 1 else "0"

    def _product(self, product: SkinnyProduct, sums: str) -> list[str]:
        """Return the lines that compute the sums of the columns that are multiplied in turn."""
        stream, depth = product.stream, self.plan.depth
        lines, scales, pitch = list[str](), "0", 0
        if product.scale is not None and product.groups:
            scales = self.space.fresh("scales")
            pitch = prod(int(axis.size) for axis in product.groups) + PADDING
            lines.append(f"_Alignas(64) float {scales}[{stream.columns * pitch}];")
            lines += self._each_column(self._scales(product, scales, pitch))
        level = Level()
        self.writer.open([level], {})
        inside = {axis.symbol: ZERO for axis in product.order}
        place = self.writer.position(sympy.expand(product.weights.offset.xreplace(inside)))
        weights = f"{self.params[product.weights.buffer]} + {place}"
        arranged = self.arranged[product.factor, stream]
        if stream.fixed_point is None:
            call = f"sums_{stream.name}({arranged}, {weights}, {scales}, {depth}, {self.plan.block}, {sums});"
            return [*lines, *render([level]), call]
        inner = self.extents[self.plan.columns[-1].symbol]
        together, name = self.plan.together > 1, inner.name
        count, first = (f"{inner.end} - {name}", f"{name} = {inner.start}") if together else ("1", "")
        call = f"columns_{stream.name}({arranged}, {weights}, {count}, {scales}, {pitch}, {depth}, {sums});"
        self.writer = self._writer()
        return [*lines, "{", *indented([*([f"const int64_t {first};"] if first else []), *render([level]), call]), "}"]

    def _scales(self, product: SkinnyProduct, scales: str, pitch: int) -> list[str]:
        """Return the lines that compute the scales of the groups of one column."""
        assert product.scale is not None
        extend_spans(self.where, [product.scale])
        levels, depth = self._levels(product.groups)
        self.writer.open(levels, depth)
        (value,) = self.writer.write([product.scale])
        place = self.writer.position(_position(product.groups))
        own = self.space.fresh("scales")
        levels[-1].before.append(f"{element_of(own, place)} = {value};")
        levels[-1].pragma = "#pragma omp simd"
        padding = f"for (int l = 0; l < {PADDING}; l++) {own}[{pitch - PADDING} + l] = 0.0f;"
        return [f"float *const {own} = {scales} + {self._number()} * {pitch};", padding, *render(levels)]

    def _levels(self, axes: Sequence[KernelAxis]) -> tuple[list[Level], dict[sympy.Symbol, int]]:
        levels = [Level(), *(Level(self.extents[axis.symbol].header) for axis in axes)]
        return levels, {axis.symbol: number for number, axis in enumerate(axes, 1)}

    def _results(self, block: Extent, sums: Mapping[str, str]) -> list[str]:
        """Return the loops that store the results of a block of columns: one over each row's columns, in lanes."""
        inner, stores = self.plan.columns[-1], [replace(store, value=self._stored(store)) for store in self.plan.stores]
        offsets = [store.offset for store in stores if isinstance(store.offset, Expr)]
        conditions = [store.where for store in stores if store.where is not None]
        values = scaled(self.plan, [*(store.value for store in stores), *offsets, *conditions])
        extend_spans(self.where, values)
        self.extents[inner.symbol], self.writer = block, self._writer()
        levels, depth = self._levels((*self.plan.rows, inner))
        if not any(scatters(store) for store in stores):
            levels[-1].pragma = "#pragma omp simd"
        self.writer.open(levels, depth)
        row = _position(self.plan.rows)
        place = Code(f"{self.writer.position(self.plan.block * row)} + {block.slot}" if row != 0 else block.slot.text)
        for product in self.plan.products:
            self.writer.learn_here(product.fold.ref, element_of(sums[product.fold.name], place))
        for fold in self.plan.before:
            self.writer.learn_here(fold.ref, element_of(self.folded[fold.name], self.writer.position(row)))
        texts = iter(self.writer.write(values))
        written = [next(texts) for _ in stores]
        positions = [next(texts) if isinstance(s.offset, Expr) else self.writer.position(s.offset) for s in stores]
        for store, text, position in zip(stores, written, positions, strict=True):
            mask: Code | None = None if store.where is None else next(texts)
            element = element_of(self.params[store.param], position)
            line = store_statement(store, self.kernel.param(store.param).dtype, element, text, mask)
            levels[-1].before.append(line)
        return render(levels)

    def _stored(self, store: Store) -> Expr:
        return make_cast(store.value, self.kernel.param(store.param).dtype)
