"""Sums the parts of split-K in the launch that computes them, by the last program of each tile.

A product with few tiles is computed in parts of its sum (`split_k.py`), which another kernel adds: a launch for few
numbers.  Input: the steps of a schedule; output: steps in which that kernel follows the producer of the parts,
tile by tile (`Kernel.then`), if the target can tell which program is the last of a tile.

A kernel may follow like this if it only adds the parts and computes maps of their sum, and nothing else reads them.  It
adds them in order, whichever program is last: the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import sympy

from fusion.codegen.target import Target
from fusion.lowering.indexing import ZERO, FloorDiv, Mod, coefficient, simplify, substitute_all
from fusion.lowering.ir.expr import Expr, Load, Op, loads, rewrite
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Role, Store, statements, values_of, with_values
from fusion.lowering.ir.program import Call, Extern, Program, reads
from fusion.schedule.iteration.naming import limited
from fusion.schedule.iteration.space import Placement, place
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import join_earlier, share

MOST_PARTS = 16
"""Parts of a sum above which one program would add them for too long."""


def reduce_in_last_block(
    steps: Sequence[KernelCall | Call], program: Program, target: Target
) -> list[KernelCall | Call]:
    """Move kernels that add parts into the launch that computes these.

    >>> from fusion.inspect.examples import TARGET, show_launches
    >>> from torch import empty
    >>> def f(x, w):
    ...     return (x @ w).sum(0).relu()
    >>> show_launches(
    ...     lambda steps, program: reduce_in_last_block(steps, program, TARGET),
    ...     f,
    ...     empty(4, 64, 1024),
    ...     empty(4, 1024, 64),
    ... )
    - launch matmul(x, w, bmm)
    - launch sum_relu(bmm, relu)
    + launch matmul_sum_relu(x, w, bmm, relu)
    """

    def joined(
        earlier: Sequence[KernelCall | Call], maker: Mapping[str, int], step: KernelCall
    ) -> tuple[int, KernelCall] | None:
        position = max((maker[name] for name in step.buffers if name in maker), default=-1)
        host = earlier[position] if position >= 0 else None
        ordered = any(isinstance(other, Extern) and other.impure for other in earlier[position + 1 :])
        call = _joined(host, step, program, target) if isinstance(host, KernelCall) and not ordered else None
        return None if call is None else (position, call)

    return join_earlier(steps, joined)


def part_axis(kernel: Kernel) -> KernelAxis | None:
    """Return the GRID axis of a product's parts: both its operands span it; None if there is not exactly one."""
    dots = [stmt for stmt in statements(kernel.body, Fold) if stmt.op == "dot"]
    sides = {symbol for dot in dots for symbol in (*dot.rows, *dot.columns)}
    candidates = [axis for axis in kernel.with_role(Role.GRID) if axis.symbol not in sides and axis.size != 1]
    return candidates[0] if len(dots) == 1 and len(candidates) == 1 else None


def _joined(host: KernelCall, last: KernelCall, program: Program, target: Target) -> KernelCall | None:
    """Return one launch for both; None unless the second only sums the parts that the first one computes."""
    axis = part_axis(host.kernel)
    if axis is None or host.kernel.then is not None or not axis.size.is_Integer or axis.size > MOST_PARTS:
        return None
    (parts_buffer,) = host.written if len(host.written) == 1 and not host.over else (None,)
    if (
        parts_buffer is None
        or parts_buffer in program.output_names()
        or last.buffers.count(parts_buffer) != 1
        or last.over
    ):
        return None
    readers = [node for node in program.nodes if parts_buffer in reads(node)]
    if len(readers) != 1 or not target.can_reduce_in_last_block(host.kernel, axis.symbol):
        return None
    call, kernel = share(host, last)
    following = _tile_by_tile(host.kernel, kernel, axis, call.kernel.params[host.buffers.index(parts_buffer)].name)
    if following is None:
        return None
    name = limited(f"{host.kernel.name}_{last.kernel.name}")
    return replace(call, kernel=replace(call.kernel, name=name, then=following))


def _tile_by_tile(first: Kernel, last: Kernel, axis: KernelAxis, parts_buffer: str) -> Kernel | None:
    """Return `last`, which folds `parts_buffer` along `axis`, over the other axes of `first`, which writes it."""
    stores = list(statements(first.body, Store))
    folds = [stmt for stmt in last.body if isinstance(stmt, Fold)]
    only_folds_and_stores = all(
        isinstance(stmt, Fold) or (isinstance(stmt, Store) and stmt.axes is None) for stmt in last.body
    )
    if len(stores) != 1 or len(folds) != 1 or not only_folds_and_stores or first.sizes or last.sizes:
        return None
    (store,), (total,) = stores, folds
    moved = _moved(store, total, first, last, axis, parts_buffer)
    if moved is None:
        return None
    sizes, (part,) = first.axis_sizes(), total.args
    (over,) = total.over
    numbers = [{**moved, over: sympy.Integer(number)} for number in range(int(axis.size))]
    parts = [substitute_all([part], number, sizes)[0] for number in numbers]
    sum_of_parts = reduce(lambda left, right: Op("add", (left, right), total.dtype), parts)
    body = []
    for stmt in last.body:
        if not isinstance(stmt, Store):
            continue
        values = substitute_all(values_of(stmt), moved, sizes)
        if any(load.buffer == parts_buffer for load in loads(*values)):
            return None
        stmt = with_values(stmt, rewrite(values, lambda node: sum_of_parts if node is total.ref else None))
        body.append(stmt if isinstance(stmt.offset, Expr) else replace(stmt, offset=place(stmt.offset, moved, sizes)))
    kept = tuple(each for each in first.with_role(Role.GRID) if each != axis)
    return replace(last, axes=kept, body=tuple(body))


def _moved(
    store: Store, total: Fold, first: Kernel, last: Kernel, axis: KernelAxis, parts_buffer: str
) -> Placement | None:
    """Return each axis of `last` as an index over the axes of `first`, such that `total` reads the elements that
    `store` writes; None if there are no such indices.
    """
    read = _parts_read(total, parts_buffer)
    if read is None or len(total.over) != 1 or isinstance(store.offset, Expr):
        return None
    (over,) = total.over
    if last.axis_sizes()[over] != axis.size:
        return None
    if coefficient(store.offset, axis.symbol) is None or coefficient(read, over) is None:
        return None
    sizes = first.axis_sizes()
    axes: dict[sympy.Symbol, sympy.Expr] = {over: axis.symbol}
    offset = store.offset.xreplace({each.symbol: ZERO for each in first.axes if each.size == 1})
    written = offset.xreplace({axis.symbol: ZERO})
    for each in last.with_role(Role.GRID):
        stride = coefficient(read, each.symbol)
        if stride is None or (stride == 0 and each.size != 1):
            return None
        axes[each.symbol] = simplify(Mod(FloorDiv(written, stride), each.size), sizes) if stride != 0 else ZERO
    here = simplify(read.xreplace(axes), sizes)
    points = [sympy.Mul(*(each.size for each in kernel.with_role(Role.GRID))) for kernel in (first, last)]
    same = sympy.expand(here - offset) == 0 and points[0] == points[1] * axis.size
    return {symbol: index for symbol, index in axes.items() if symbol != over} if same else None


def _parts_read(total: Fold, parts_buffer: str) -> sympy.Expr | None:
    """Return the offset at which a sum reads `parts_buffer`; None unless it sums just that."""
    part = total.args[0]
    if total.op != "sum" or not isinstance(part, Load) or part.buffer != parts_buffer or part.mask is not None:
        return None
    (offset,) = part.index
    return offset if part.dtype is total.dtype and not isinstance(offset, Expr) else None
