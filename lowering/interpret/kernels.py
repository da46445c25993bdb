"""Evaluates a Kernel: its statements run over boxes of its grid, and in blocks in loops with running values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.errors import VerifyError
from fusion.lowering.indexing import symbols_of
from fusion.lowering.interpret.evaluate import (
    CPU,
    Ranges,
    Scope,
    boxes,
    check_positions,
    evaluate,
    flat_view,
    fold_over,
    pieces,
    points_of,
    scan_along,
    scatter,
    update,
)
from fusion.lowering.interpret.folds import fold
from fusion.lowering.interpret.strided import overlaps, strided_view
from fusion.lowering.ir.expr import Expr, IndexValue, Op, postorder
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    Loop,
    Prefix,
    Role,
    Spans,
    Stmt,
    Store,
    loop_folds,
    running,
    spans,
    statements,
    values_of,
)
from fusion.lowering.ir.scalar_ops import identity
from fusion.lowering.ir.sizes import size_value


def run_kernel(
    kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), *, exact: bool = True
) -> None:
    """Run a Kernel on the tensors of its params, in their order; stores are written in place.

    Args:
        exact: compute in the dtypes as stated; otherwise in float64, which the tensors of float params must then hold.

    Raises:
        VerifyError: a tensor is not as its param declares, or a load or store reaches outside.
    """
    known = _kernel_sizes(kernel, tensors, sizes, exact)
    with torch.no_grad():
        _run_grid(kernel, tensors, known, exact)
    at = {param.name: tensor for param, tensor in zip(kernel.params, tensors, strict=True)}
    parts, last = list(kernel.beside), kernel.then
    while last is not None:  # each has parameters of the whole launch, not of the kernel before it
        parts.append(replace(last, then=None))
        last = last.then
    for part in parts:
        run_kernel(part, [at[p.name] for p in part.params], [known[s] for s in part.sizes], exact=exact)


def _run_grid(kernel: Kernel, tensors: Sequence[torch.Tensor], known: Mapping[sympy.Symbol, int], exact: bool) -> None:
    axes = {axis.symbol: range(size_value(axis.size, known)) for axis in kernel.axes}
    grid = {axis.symbol: axes[axis.symbol] for axis in kernel.with_role(Role.GRID)}
    if any(not len(span) for span in grid.values()):
        return
    device = next((t.device for p, t in zip(kernel.params, tensors, strict=True) if p.written), CPU)
    flats = {
        param.name: flat_view(tensor.to(device) if param.number else tensor)
        for param, tensor in zip(kernel.params, tensors, strict=True)
    }
    axes_of_values = spans(kernel)
    varies = {stmt: _varies(stmt, axes_of_values) for stmt in statements(kernel.body) if not isinstance(stmt, Loop)}
    cost = max((points_of(spanned, axes) for spanned in varies.values()), default=0)
    for box in boxes(grid, pieces(cost)):
        _run_body(kernel, kernel.body, {**axes, **box}, Scope(flats, known, {}, exact, device), varies)


_RUNNING_BLOCKS = 3
"""Blocks of a loop with running values, so that a carried value is carried more than once."""


def _run_body(
    kernel: Kernel,
    body: Sequence[Stmt],
    axes: Ranges,
    scope: Scope,
    varies: Mapping[Fold | Prefix | Store, list[frozenset[sympy.Symbol]]],
    running_folds: frozenset[str] = frozenset(),
) -> dict[str, torch.Tensor]:
    """Run statements over a box; return the tiles of `scope` and those of the folds that ran.

    `running_folds` are the folds of the enclosing loop, of whose blocks the box is one.
    """
    tiles = dict(scope.tiles)
    scope = replace(scope, tiles=tiles)
    for stmt in body:
        match stmt:
            case Loop():
                evaluate(_bounded_in(stmt), axes, scope)  # refuses bounds that do not hold
                if not running(stmt):
                    tiles.update(_run_body(kernel, stmt.body, axes, scope, varies))
                    continue
                own = {fold.name: fold for fold in loop_folds(stmt)}
                tiles.update({name: _identity_of(fold, len(axes), scope) for name, fold in own.items()})
                for part in boxes({stmt.axes[0]: axes[stmt.axes[0]]}, _RUNNING_BLOCKS):
                    tiles.update({f"{name}'": tiles[name] for name in own})
                    tiles.update(_run_body(kernel, stmt.body, {**axes, **part}, scope, varies, frozenset(own)))
            case Fold():
                value = fold_over(stmt.op, stmt.args, stmt.over, axes, scope, points_of(varies[stmt], axes))
                if stmt.name in running_folds:
                    old = evaluate([stmt.carry or stmt.before], axes, scope)[0]
                    both = torch.stack([old.expand(value.shape), value.to(scope.dtype(stmt.dtype))])
                    value = fold("sum" if stmt.op == "dot" else stmt.op, [both], [0])[0][0]
                tiles[stmt.name] = value.to(scope.dtype(stmt.dtype))
            case Prefix():
                tiles[stmt.name] = scan_along(stmt.op, stmt.args, stmt.along, axes, scope)
            case Store():
                if points_of(varies[stmt], axes):
                    _store(kernel, stmt, axes, scope)
            case _:
                assert_never(stmt)
    return tiles


def _bounded_in(loop: Loop) -> list[Expr]:
    """Return the parts of a loop's condition that have bounds."""
    parts = [] if loop.where is None else postorder(loop.where)
    return [part for part in parts if isinstance(part, Op) and part.name == "bounded"]


def _identity_of(stmt: Fold, rank: int, scope: Scope) -> torch.Tensor:
    first = identity(stmt.op, stmt.dtype)
    return torch.full([1] * rank, first, dtype=scope.dtype(stmt.dtype), device=scope.device)


def _kernel_sizes(
    kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int], exact: bool
) -> dict[sympy.Symbol, int]:
    """Return the size symbols of a kernel and of its params' shapes; refuse tensors that differ from declarations."""
    known = dict(zip(kernel.sizes, sizes, strict=True))
    for param, tensor in zip(kernel.params, tensors, strict=True):
        if tensor.ndim != len(param.shape):
            raise VerifyError(
                f"kernel {kernel.name}: {param.name} has {tensor.ndim} dimensions, not {len(param.shape)}"
            )
        for expr, size in zip((*param.shape, *param.strides), (*tensor.shape, *tensor.stride()), strict=True):
            if isinstance(expr, sympy.Symbol):
                known.setdefault(expr, size)
    for param, tensor in zip(kernel.params, tensors, strict=True):
        if any(symbol not in known for expr in (*param.shape, *param.strides) for symbol in symbols_of(expr)):
            continue  # a size that only the shape holds and nothing in the kernel needs
        shape = [size_value(size, known) for size in param.shape]
        strides = [size_value(stride, known) for stride in param.strides]
        layout = zip(shape, strides, tensor.stride(), strict=True)
        moved = tensor.numel() > 0 and any(size != 1 and ours != theirs for size, ours, theirs in layout)
        dtype = param.dtype if exact or not param.dtype.is_floating_point else torch.float64
        if tensor.dtype is not dtype or list(tensor.shape) != shape or moved:
            raise VerifyError(
                f"kernel {kernel.name}: {param.name} is {tensor.dtype}{list(tensor.shape)} with strides "
                f"{list(tensor.stride())}, not {dtype}{shape} with strides {strides}"
            )
    return known


def _varies(stmt: Fold | Prefix | Store, spans_of: Spans) -> list[frozenset[sympy.Symbol]]:
    """Return the axes of each value that a statement holds at once; operands of a product are never broadcast."""
    each = [spans_of[value] for value in values_of(stmt)]
    match stmt:
        case Fold():
            each = [axes.union(stmt.over) for axes in each]
            return each if stmt.op == "dot" else [frozenset().union(*each)]
        case Prefix():
            return [frozenset({stmt.along}).union(*each)]
        case Store():
            each.append(frozenset(stmt.axes or ()))
            if not isinstance(stmt.offset, Expr):
                each.append(frozenset(stmt.offset.free_symbols))
            return [frozenset().union(*each)]
        case _:
            assert_never(stmt)


def _is_stored_at_once(kernel: Kernel, stmt: Store, axes: Ranges, scope: Scope) -> bool:
    """Store all points of a box as one copy, and return whether that was possible: their offsets form a view."""
    if stmt.axes is not None or stmt.where is not None or isinstance(stmt.offset, Expr):
        return False
    flat = scope.buffers[stmt.param]
    view = strided_view(flat, [stmt.offset], axes, scope.sizes)
    if view is None or overlaps(view):
        return False
    (value,) = evaluate([stmt.value], axes, scope)
    _check_stored(kernel, stmt, value, flat, view.shape)
    view.copy_(value)
    return True


def _check_stored(kernel: Kernel, stmt: Store, value: torch.Tensor, flat: torch.Tensor, points: Sequence[int]) -> None:
    """Refuse a value of another dtype, and a value that varies where its offset, which has `points`, does not."""
    if value.dtype is not flat.dtype:
        raise VerifyError(f"kernel {kernel.name}: {value.dtype} is stored to {stmt.param}, which holds {flat.dtype}")
    if stmt.axes is None and any(n not in (1, m) for n, m in zip(value.shape, points, strict=True)):
        raise VerifyError(f"kernel {kernel.name}: the value stored to {stmt.param} varies where its offset does not")


def _store(kernel: Kernel, stmt: Store, axes: Ranges, scope: Scope) -> None:
    if _is_stored_at_once(kernel, stmt, axes, scope):
        return
    target = stmt.offset if isinstance(stmt.offset, Expr) else IndexValue(stmt.offset)
    value, offset, *rest = evaluate([stmt.value, target, *([] if stmt.where is None else [stmt.where])], axes, scope)
    held = rest[0] if rest else None
    flat = scope.buffers[stmt.param]
    _check_stored(kernel, stmt, value, flat, offset.shape)
    check_positions(stmt.param, [stmt.offset], offset, flat.numel(), held)
    if stmt.axes is None:
        scatter(flat, offset, value)
        return
    points = [len(span) if axis in stmt.axes else 1 for axis, span in axes.items()]
    if any(n not in (1, m) for n, m in zip(offset.shape, points, strict=True)):
        raise VerifyError(f"kernel {kernel.name}: the offset into {stmt.param} varies where it is not updated")
    update(stmt.op, flat, offset.expand(points), value, held)
