"""Predicts the time of a kernel, and the form that the target chooses for one whose loop has several products.

A kernel takes the larger of its memory time and its product time, at the share of the library's speed that the target
states: for one product the share of its configuration, for several the share of the form, without skipped blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fusion.codegen.chained import FORWARD, ChainShape, with_narrow_factors
from fusion.codegen.price import Price, Rates
from fusion.codegen.target import Capabilities, Target, in_waves
from fusion.codegen.tuning import Trial, Tuning
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.expr import Expr, free_axes, loads
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Stmt, outer_axes, spans, statements, values_of
from fusion.lowering.ir.sizes import with_values
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.kernels import KernelCall, kernel_of
from fusion.schedule.reductions.skipped_share import SKIPPED_BLOCK, share_of_blocks


def kernel_time(call: KernelCall, target: Target, form: str = "") -> float:
    """Return the microseconds of one launch, overhead included; with several products, in this form or the default one.

    Symbolic sizes are taken as they were when the graph was traced.
    """
    return kernel_price(call, target, form).total


def kernel_price(call: KernelCall, target: Target, form: str = "") -> Price:
    """Return the predicted time of one launch, by part; see `kernel_time`."""
    capabilities, kernel = target.capabilities, _as_traced(call.kernel)
    rates, moved = capabilities.rates, call.moved
    multiplying = [part for part in kernel.parts if _dots(part)]
    if not multiplying:
        return rates.price(moved, scalars=rates.scalar_us(call.flops))
    if multiplying == [kernel] and len(_dots(kernel)) == 1:
        kernel = _as_multiplied(kernel, capabilities)
        counted = {loop: _counted(kernel, loop) for loop in statements(kernel.body, Loop)}
        return rates.price(moved, products=_products(kernel, counted, rates), share=target.efficiency(kernel))
    return rates.price(moved, products=sum(_products_us(part, target, form) for part in multiplying))


def _products_us(kernel: Kernel, target: Target, form: str) -> float:
    """Return the microseconds of the products of one kernel of a launch, at the speed that they reach."""
    kernel = _as_multiplied(kernel, target.capabilities)
    rates, dots = target.capabilities.rates, _dots(kernel)
    counted = {loop: _counted(kernel, loop) for loop in statements(kernel.body, Loop)}
    multiplied = _products(kernel, counted, rates)
    if len(dots) == 1 or not _is_chained(kernel, dots):
        return multiplied / target.efficiency(kernel)
    chain = _chain(kernel, dots, _columns_per_row(kernel, counted))
    share = _known_share(chain, target, form or target.forms(kernel)[0].name)
    return multiplied / share / _busy(kernel, target.capabilities)


def share_of_chain(prices: Prices, cluster: Cluster, target: Target) -> float:
    """Return the efficiency of a chain's contractions in the form that its kernel takes, relative to the library's.

    The form that a prologue or an epilogue rules out is part of its price: a warp-specialised kernel loads its operands
    through tensor descriptors, so it has no prologue.
    """
    kernel = _as_multiplied(_as_traced(kernel_of(prices, cluster).kernel), target.capabilities)
    chain = _chain(kernel, _dots(kernel), _columns_per_row(kernel, dict.fromkeys(statements(kernel.body, Loop), 1.0)))
    return _known_share(chain, target, target.forms(kernel)[0].name)


def _known_share(chain: ChainShape, target: Target, form: str) -> float:
    """Return the efficiency of a chain in a form: as measured, or the target's default for unmeasured operands."""
    try:
        return target.chained_share(chain, form)
    except Unsupported:
        return target.capabilities.chained


def weighed_forms(calls: Iterable[KernelCall], target: Target) -> Iterator[Tuning]:
    """Yield, for each kernel with more than one form, the forms with prices, and reasons against refused ones."""
    for call in calls:
        forms = target.forms(call.kernel) if len(_dots(call.kernel)) > 1 else ()
        if len(forms) > 1:
            prices = [math.inf if form.refused else kernel_time(call, target, form.name) for form in forms]
            trials = (Trial(form.name, us, refused=form.refused) for form, us in zip(forms, prices, strict=True))
            yield Tuning(call.kernel.name, tuple(trials))


def _dots(kernel: Kernel) -> list[Fold]:
    return [stmt for stmt in statements(kernel.body, Fold) if stmt.op == "dot"]


def _is_chained(kernel: Kernel, dots: Sequence[Fold]) -> bool:
    """Return whether a loop runs over rows or columns of a product, as in attention; other products share a loop."""
    looped = {axis.symbol for axis in kernel.axes if axis.role is Role.LOOP}
    return any(not looped.isdisjoint((*dot.rows, *dot.columns)) for dot in dots)


def _as_traced(kernel: Kernel) -> Kernel:
    known = dict(kernel.traced)
    return replace(kernel, axes=tuple(replace(axis, size=with_values(axis.size, known)) for axis in kernel.axes))


def _as_multiplied(kernel: Kernel, capabilities: Capabilities) -> Kernel:
    """Return the kernel with the factors of its products converted to the dtype of the device's matrix units."""
    return replace(kernel, body=with_narrow_factors(kernel.body)) if capabilities.narrow else kernel


def _chain(kernel: Kernel, dots: Sequence[Fold], columns: float) -> ChainShape:
    """Return the shape of a chain of products, which determines its efficiency; `columns`: columns per row."""
    rows, others = (frozenset(axis for dot in dots for axis in getattr(dot, side)) for side in ("rows", "columns"))
    looped = {axis for stmt in statements(kernel.body, Loop) for axis in stmt.axes} - outer_axes(kernel)
    asked = [
        frozenset(index.free_symbols)
        for dot in dots
        for load in loads(*values_of(dot))
        for index in load.index
        if not isinstance(index, Expr)
    ]
    spread = (rows | others) - looped - {axis.symbol for axis in kernel.with_role(Role.WHOLE)}
    masked = any(not axes.isdisjoint(looped) and not axes.isdisjoint(spread) for axes in asked)
    skipping = any(isinstance(stmt, Loop) and stmt.where is not None for stmt in statements(kernel.body))
    return ChainShape(
        dtype=dots[0].args[0].dtype,
        width=max((int(axis.size) for axis in kernel.with_role(Role.WHOLE)), default=1),
        loops=("plain", *(("masked",) if masked else ()), *(("skipping",) if skipping else ())),
        columns=columns,
        backward=len(dots) > FORWARD,
        fetched=_fetched(kernel, dots),
    )


def _fetched(kernel: Kernel, dots: Sequence[Fold]) -> float:
    """Return how many blocks a step of the loop loads for each operand that it loads at all."""
    looped, held = (
        {axis.symbol for axis in kernel.with_role(role) if axis.size != 1} for role in (Role.LOOP, Role.WHOLE)
    )
    blocks = (
        [load for load in loads(operand) if looped & free_axes(load) and held & free_axes(load)]
        for operand in {arg for dot in dots for arg in dot.args}
    )
    counts = [len(each) for each in blocks if each]
    return sum(counts) / len(counts) if counts else 1.0


def _columns_per_row(kernel: Kernel, counted: Mapping[Loop, float]) -> float:
    """Return how many columns a row loops over, without skipped ones."""
    sizes = {axis.symbol: int(axis.size) for axis in kernel.axes}
    counts = (share * math.prod(sizes[axis] for axis in loop.axes) for loop, share in counted.items())
    return max(counts, default=math.inf)


def _products(kernel: Kernel, counted: Mapping[Loop, float], rates: Rates) -> float:
    """Return the microseconds of a kernel's products at the library's speed, without skipped blocks."""
    sizes = {axis.symbol: int(axis.size) for axis in kernel.axes}
    varies = spans(kernel)

    def of(body: Sequence[Stmt], share: float) -> float:
        total = 0.0
        for stmt in body:
            if isinstance(stmt, Loop):
                total += of(stmt.body, share * counted[stmt])
            elif isinstance(stmt, Fold) and stmt.op == "dot":
                axes = frozenset(stmt.over).union(*(varies[arg] for arg in stmt.args))
                operations = 2 * share * math.prod(sizes[axis] for axis in axes)
                total += rates.product_us_of(operations, stmt.args[0].dtype.itemsize)
        return total

    return of(kernel.body, 1.0)


def _counted(kernel: Kernel, loop: Loop) -> float:
    """Return the share of a loop's blocks in which its condition holds anywhere, as far as indices determine it."""
    sizes = {axis.symbol: int(axis.size) for axis in kernel.axes}
    return share_of_blocks(loop.where, loop.axes, sizes, dict(kernel.traced))


def _busy(kernel: Kernel, capabilities: Capabilities) -> float:
    """Return the occupancy, as a share of the device: a program takes a block of the last grid axis."""
    grid = [int(axis.size) for axis in kernel.with_role(Role.GRID)]
    if outer_axes(kernel):  # a program takes all rows
        return in_waves(math.prod(grid), capabilities.parallelism)
    programs = math.prod(grid[:-1]) * -(-grid[-1] // SKIPPED_BLOCK) if grid else 1
    return min(1.0, capabilities.programs_per_multiprocessor * programs / capabilities.parallelism)
