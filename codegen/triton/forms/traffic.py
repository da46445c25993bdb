"""Finds the tensors that account for most of a kernel's memory traffic, and derives block sizes from them."""

from __future__ import annotations

from dataclasses import replace

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, power_of_two
from fusion.lowering.ir.expr import Expr, Load, Op, TileRef, free_axes, loads, postorder
from fusion.lowering.ir.kernel import Fold, Param, Role, Store, statements, values_of

SECTOR = 32
"""Bytes of the smallest memory request."""

MOST_IN_WARP = 2048
"""Padded elements of short rows or columns that one warp holds."""


def streams(blocked: Blocked) -> list[Param]:
    """Return the tensors that account for most of the traffic."""

    def weight(param: Param) -> int:
        return extent(param.extent) * param.dtype.itemsize

    params = blocked.kernel.params
    heaviest = max((weight(param) for param in params), default=0)
    return [param for param in params if weight(param) * 4 >= heaviest]


def row_loads(blocked: Blocked, r: Dim) -> list[Load]:
    """Return the loads along the rows of the reduced dimension `r`, except of data that all rows share."""
    rows = {dim.symbol for dim in blocked.grid()}
    every = dict.fromkeys(loads(*(value for stmt in statements(blocked.body) for value in values_of(stmt))))
    return [load for load in every if r.symbol in free_axes(load) and rows & free_axes(load)]


def bytes_of_row(blocked: Blocked, r: Dim) -> int:
    """Return the bytes that are read and written along each row of the reduced dimension `r`, without data that all
    rows share.
    """
    sizes = [load.dtype.itemsize for load in row_loads(blocked, r)]
    for store in statements(blocked.body, Store):
        spanned = free_axes(store.offset) if isinstance(store.offset, Expr) else store.offset.free_symbols
        if r.symbol in spanned:
            sizes.append(blocked.kernel.param(store.param).dtype.itemsize)
    return extent(r.size) * sum(sizes)


def widest(blocked: Blocked) -> int:
    """Return the bytes of the largest elements of those tensors."""
    return max((param.dtype.itemsize for param in streams(blocked)), default=4)


def narrowest(blocked: Blocked) -> int:
    """Return the bytes of the smallest elements of those tensors."""
    return min((param.dtype.itemsize for param in streams(blocked)), default=4)


def warps_for(elements: int, per_thread: int) -> int:
    """Return the number of warps with which each thread has about `per_thread` of `elements`."""
    return min(32, max(1, power_of_two(elements // (32 * per_thread))))


def neighbours(blocked: Blocked, default: Config) -> tuple[Config, ...]:
    """Return `default`, then half and twice as many warps, then each block half and twice as large."""
    configs = [default]
    for warps in (default.num_warps // 2, default.num_warps * 2):
        if 1 <= warps <= 32:
            configs.append(replace(default, num_warps=warps))
    for dim in blocked.dims:
        if blocked.single(dim):
            continue
        for size in (default.block(dim.name) // 2, default.block(dim.name) * 2):
            if dim.role is not Role.WHOLE and 1 <= size <= min(16384, power_of_two(extent(dim.size))):
                blocks = {**dict(default.blocks), dim.name: size}
                configs.append(replace(default, blocks=tuple(blocks.items())))
    return tuple(configs)


def matrix_itemsize(blocked: Blocked) -> int:
    """Return the bytes of an element of the matrix that is multiplied: the parameter with the most bytes."""
    return max(blocked.kernel.params, key=lambda param: extent(param.extent) * param.dtype.itemsize).dtype.itemsize


def first_folds(blocked: Blocked) -> list[Fold]:
    """Return the folds that do not read the results of others."""
    folds = list(statements(blocked.body, Fold))
    return [fold for fold in folds if not any(isinstance(node, TileRef) for node in postorder(*fold.args))]


def is_packed(blocked: Blocked) -> bool:
    """Return whether each element of the summed matrix packs several numbers."""
    return any(map(holds_several, first_folds(blocked)))


def holds_several(fold: Fold) -> bool:
    """Return whether several products are summed for each element."""
    return isinstance(fold.args[0], Op) and fold.args[0].name == "add"
