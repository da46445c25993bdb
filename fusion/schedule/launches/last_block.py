"""Adds up the parts of a sum in the launch that computes them, by the program that ends last.

A product with few tiles is made in parts of its sum (`split_k.py`), which another kernel adds up: a launch for a few
numbers.  Input: the steps of a schedule; output: steps in which such a kernel follows the one that makes the parts,
tile by tile (`Kernel.then`), where the target can tell which program is the last of a tile.

A kernel may follow so if it does nothing but add up the parts and compute maps of their sum, where nothing else reads
them.  It adds them in their order, whoever is last: the result is always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import sympy

from fusion.codegen.target import Target
from fusion.lowering.expr import Expr, Load, Op, loads, rewrite
from fusion.lowering.indexing import ZERO, FloorDiv, Mod, coefficient, simplify, substitute_all
from fusion.lowering.kernel import Fold, Kernel, KernelAxis, Role, Store, statements, values_of, with_values
from fusion.lowering.program import Call, Extern, Program, reads
from fusion.schedule.iteration.space import Placement, place
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import join_earlier, share

MOST = 16
"""Parts of a sum above which a program alone would add them up for too long."""


def finish_tiles(steps: Sequence[KernelCall | Call], program: Program, target: Target) -> list[KernelCall | Call]:
    """The steps with kernels that add up parts in the launch of those that make them."""

    def joined(
        found: Sequence[KernelCall | Call], maker: Mapping[str, int], step: KernelCall
    ) -> tuple[int, KernelCall] | None:
        position = max((maker[name] for name in step.buffers if name in maker), default=-1)
        host = found[position] if position >= 0 else None
        ordered = any(isinstance(other, Extern) and other.impure for other in found[position + 1 :])
        call = _joined(host, step, program, target) if isinstance(host, KernelCall) and not ordered else None
        return None if call is None else (position, call)

    return join_earlier(steps, joined)


def part_axis(kernel: Kernel) -> KernelAxis | None:
    """The GRID axis along which a product lies in parts: both its operands span it."""
    dots = [stmt for stmt in statements(kernel.body, Fold) if stmt.op == "dot"]
    sides = {symbol for dot in dots for symbol in (*dot.rows, *dot.columns)}
    found = [axis for axis in kernel.with_role(Role.GRID) if axis.symbol not in sides and axis.size != 1]
    return found[0] if len(dots) == 1 and len(found) == 1 else None


def _joined(host: KernelCall, last: KernelCall, program: Program, target: Target) -> KernelCall | None:
    """One launch for both; None where the second is anything but the sum of the parts that the first one makes."""
    axis = part_axis(host.kernel)
    if axis is None or host.kernel.then is not None or not axis.size.is_Integer or axis.size > MOST:
        return None
    (made,) = host.written if len(host.written) == 1 and not host.over else (None,)
    if made is None or made in program.output_names() or last.buffers.count(made) != 1 or last.over:
        return None
    readers = [node for node in program.nodes if made in reads(node)]
    if len(readers) != 1 or not target.finishes(host.kernel, axis.symbol):
        return None
    call, kernel = share(host, last)
    following = _tile_by_tile(host.kernel, kernel, axis, call.kernel.params[host.buffers.index(made)].name)
    if following is None:
        return None
    name = f"{host.kernel.name}_{last.kernel.name}"
    return replace(call, kernel=replace(call.kernel, name=name, then=following))


def _tile_by_tile(first: Kernel, last: Kernel, axis: KernelAxis, made: str) -> Kernel | None:
    """`last`, which folds what `first` has `made` at each point of `axis`, over the other axes of `first`."""
    stores = list(statements(first.body, Store))
    folds = [stmt for stmt in last.body if isinstance(stmt, Fold)]
    plain = all(isinstance(stmt, Fold) or (isinstance(stmt, Store) and stmt.axes is None) for stmt in last.body)
    if len(stores) != 1 or len(folds) != 1 or not plain or first.sizes or last.sizes:
        return None
    (store,), (total,) = stores, folds
    moved = _moved(store, total, first, last, axis, made)
    if moved is None:
        return None
    sizes, (part,) = first.axis_sizes(), total.args
    (over,) = total.over
    numbers = [{**moved, over: sympy.Integer(number)} for number in range(int(axis.size))]
    parts = [substitute_all([part], number, sizes)[0] for number in numbers]
    whole = reduce(lambda left, right: Op("add", (left, right), total.dtype), parts)
    body = []
    for stmt in last.body:
        if not isinstance(stmt, Store):
            continue
        values = substitute_all(values_of(stmt), moved, sizes)
        if any(load.buffer == made for load in loads(*values)):
            return None
        stmt = with_values(stmt, rewrite(values, lambda node: whole if node is total.ref else None))
        body.append(stmt if isinstance(stmt.offset, Expr) else replace(stmt, offset=place(stmt.offset, moved, sizes)))
    kept = tuple(each for each in first.with_role(Role.GRID) if each != axis)
    return replace(last, axes=kept, body=tuple(body))


def _moved(store: Store, total: Fold, first: Kernel, last: Kernel, axis: KernelAxis, made: str) -> Placement | None:
    """The axes of `last` over those of `first`, so that `total` sums up what `store` writes; None where it does not."""
    read = _parts_read(total, made)
    if read is None or len(total.over) != 1 or isinstance(store.offset, Expr):
        return None
    (over,) = total.over
    if last.axis_sizes()[over] != axis.size:
        return None
    if coefficient(store.offset, axis.symbol) is None or coefficient(read, over) is None:
        return None
    sizes, found = first.axis_sizes(), {over: axis.symbol}
    offset = store.offset.xreplace({each.symbol: ZERO for each in first.axes if each.size == 1})
    written = offset.xreplace({axis.symbol: ZERO})
    for each in last.with_role(Role.GRID):
        stride = coefficient(read, each.symbol)
        if stride is None or (stride == 0 and each.size != 1):
            return None
        found[each.symbol] = simplify(Mod(FloorDiv(written, stride), each.size), sizes) if stride != 0 else ZERO
    here = simplify(read.xreplace(found), sizes)
    points = [sympy.Mul(*(each.size for each in kernel.with_role(Role.GRID))) for kernel in (first, last)]
    same = sympy.expand(here - offset) == 0 and points[0] == points[1] * axis.size
    return {symbol: index for symbol, index in found.items() if symbol != over} if same else None


def _parts_read(total: Fold, made: str) -> sympy.Expr | None:
    """Where a sum reads what is `made`; None if it sums up anything but this, as it is."""
    part = total.args[0]
    if total.op != "sum" or not isinstance(part, Load) or part.buffer != made or part.mask is not None:
        return None
    (offset,) = part.index
    return offset if part.dtype is total.dtype and not isinstance(offset, Expr) else None
