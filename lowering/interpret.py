"""The reference evaluator: what a Program and a Kernel mean.

What enters is a Program or a Kernel with real tensors; what leaves are the values that every target must give.  Large
spaces are walked in boxes that keep temporaries bounded.  It is also a bounds checker: reading or writing outside a
tensor, an argument that is not as declared, or a value of another dtype than stated raises `VerifyError`.

With `exact=False` all floating-point values are float64 and conversions between float types do nothing: the yardstick
that rounding errors are measured against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from lowering.errors import VerifyError
from lowering.evaluate import (
    CPU,
    Ranges,
    Scope,
    boxes,
    check_positions,
    evaluate,
    flat_view,
    fold,
    fold_over,
    pieces,
    points_of,
    scan_along,
    scatter,
    size_value,
    update,
)
from lowering.expr import Expr, IndexValue, free_axes
from lowering.indexing import symbols_of
from lowering.kernel import (
    Fold,
    Kernel,
    Loop,
    Prefix,
    Role,
    Stmt,
    Store,
    running,
    spans,
    statements,
    values_of,
    walked_folds,
)
from lowering.program import (
    Buffer,
    BufferRef,
    Compute,
    Contract,
    Extern,
    ExternArg,
    Map,
    Program,
    Reduce,
    Scan,
    Scatter,
)
from lowering.scalar_ops import identity

# Programs -------------------------------------------------------------------------------------------------------------


def run_program(
    program: Program, inputs: Sequence[torch.Tensor | int | None], *, exact: bool = True
) -> list[torch.Tensor | int | None]:
    """Call a Program.

    Args:
        inputs: one per entry of `program.inputs`: a tensor, an integer for a size symbol, anything for None.
        exact: compute in the dtypes as stated, with the strides as stated; otherwise in float64.

    Returns:
        One per entry of `program.outputs`: tensors, integers and None.

    Raises:
        VerifyError: an input is not as declared, or the program reads outside a tensor.
    """
    sizes = bind_sizes(program, inputs)
    given = {name: t for name, t in zip(program.inputs, inputs, strict=True) if isinstance(name, str)}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in (*given.items(), *program.constants.items()):
        assert isinstance(tensor, torch.Tensor)
        values[name] = tensor if exact else _as_double(tensor)
    with torch.no_grad():
        for node in program.nodes:
            if isinstance(node, Extern):
                values.update(_call(program, node, values, sizes, exact))
            else:
                out = program.buffers[node.out]
                scope = Scope(values, sizes, {}, exact, out.device)
                values[node.out] = (
                    _scattered(node, scope, own=node.start in given)
                    if isinstance(node, Scatter)
                    else _compute(node, out, scope)
                )
    results: list[torch.Tensor | int | None] = []
    for output in program.outputs:
        if output is None or isinstance(output, BufferRef):
            results.append(None if output is None else values[output.name])
        else:
            results.append(size_value(output, sizes))
    return results


def bind_sizes(program: Program, inputs: Sequence[torch.Tensor | int | None]) -> dict[sympy.Symbol, int]:
    """The values of the size symbols, from integer inputs and from the shapes and strides of tensor inputs.

    Raises:
        VerifyError: an input does not have the dtype or the shape that its buffer declares.
    """
    sizes: dict[sympy.Symbol, int] = {}
    tensors: list[tuple[Buffer, torch.Tensor]] = []
    for entry, given in zip(program.inputs, inputs, strict=True):
        if isinstance(entry, sympy.Symbol):
            assert isinstance(given, int)
            sizes[entry] = given
        elif entry is not None:
            assert isinstance(given, torch.Tensor)
            tensors.append((program.buffers[entry], given))
    for buffer, tensor in tensors:
        if tensor.ndim != len(buffer.shape):
            raise VerifyError(f"input {buffer.name} has {tensor.ndim} dimensions, not {len(buffer.shape)}")
        for expr, size in zip((*buffer.shape, *buffer.strides), (*tensor.shape, *tensor.stride()), strict=True):
            if expr.is_Symbol:
                sizes.setdefault(expr, size)
    for buffer, tensor in tensors:
        shape = tuple(size_value(size, sizes) for size in buffer.shape)
        if tensor.dtype is not buffer.dtype or tensor.shape != shape:
            raise VerifyError(
                f"input {buffer.name} is {tensor.dtype}{list(tensor.shape)}, not {buffer.dtype}{list(shape)}"
            )
    return sizes


def _compute(node: Compute, out: Buffer, scope: Scope) -> torch.Tensor:
    shape = [size_value(size, scope.sizes) for size in out.shape]
    strides = [size_value(stride, scope.sizes) for stride in out.strides]
    result = torch.empty_strided(shape, strides, dtype=scope.dtype(out.dtype), device=out.device)
    axes = {axis.symbol: range(size_value(axis.size, scope.sizes)) for axis in node.axes}
    over = {axis.symbol: range(size_value(axis.size, scope.sizes)) for axis in node.over}
    if [len(span) for span in axes.values()] != shape:
        raise VerifyError(f"{node.out} has shape {shape}, its node runs over {[len(span) for span in axes.values()]}")
    if result.numel() == 0:
        return result
    varies = [free_axes(expr) | over.keys() for expr in node.exprs]
    if not isinstance(node, Contract):
        varies = [frozenset().union(*varies)]
    varies.append(frozenset(axes))
    made = node.dtype if isinstance(node, (Reduce, Scan)) else out.dtype
    stated = node.expr.dtype if isinstance(node, Map) else made
    if stated is not out.dtype:
        raise VerifyError(f"{node.out} holds {out.dtype}, its node gives {stated}")
    cut = {axis: span for axis, span in axes.items() if not isinstance(node, Scan) or axis != node.along}
    for cut_box in boxes(cut, pieces(points_of(varies, {**axes, **over}))):
        box = {axis: cut_box.get(axis, span) for axis, span in axes.items()}
        if isinstance(node, Map):
            value = evaluate([node.expr], box, scope)[0]
        elif isinstance(node, Scan):
            value = scan_along(node.op, node.args, node.along, box, scope)
        else:
            op, inside = "dot" if isinstance(node, Contract) else node.op, {**box, **over}
            value = fold_over(op, node.exprs, list(over), inside, scope, points_of(varies, inside))
            value = value.reshape(value.shape[: len(box)])
        part = result[tuple(slice(span.start, span.stop) for span in box.values())]
        part.copy_(value.expand(part.shape))
    return result


def _scattered(node: Scatter, scope: Scope, *, own: bool) -> torch.Tensor:
    """The result in the memory of its start, which is the caller's `own` tensor, or in a copy."""
    result = scope.buffers[node.start]
    if not own:
        like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
        result = like.copy_(result)
    axes = {axis.symbol: range(size_value(axis.size, scope.sizes)) for axis in node.axes}
    if any(not len(span) for span in axes.values()):
        return result
    flat = flat_view(result)
    for box in boxes(axes, pieces(points_of([frozenset(axes)], axes))):
        value, *rest = evaluate(node.exprs, box, scope)
        held = rest.pop() if node.where is not None else None
        offset = torch.zeros([len(span) for span in box.values()], dtype=torch.int64, device=scope.device)
        for position, size, stride, index in zip(rest, result.shape, result.stride(), node.index, strict=True):
            check_positions(node.out, [index], position, size, held)
            offset = offset + position * stride
        update(node.op, flat, offset, value, held)
    return result


def _call(
    program: Program,
    node: Extern,
    values: Mapping[str, torch.Tensor],
    sizes: dict[sympy.Symbol, int],
    exact: bool,
) -> dict[str, torch.Tensor]:
    """The tensors an extern returns, by buffer.

    In float64 the call may be one that only takes other types, or change what it means (`view.dtype`): what fails or
    has another shape is called again in the dtypes as stated.
    """
    if not exact:
        try:
            return _called(program, node, values, sizes, True)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, VerifyError):
            values = {name: values[name].to(program.buffers[name].dtype) for name in node.reads}
    found = _called(program, node, values, sizes, False)
    return found if exact else {name: _as_double(tensor) for name, tensor in found.items()}


def _called(
    program: Program,
    node: Extern,
    values: Mapping[str, torch.Tensor],
    sizes: dict[sympy.Symbol, int],
    double: bool,
) -> dict[str, torch.Tensor]:
    def real(arg: ExternArg) -> object:
        if isinstance(arg, BufferRef):
            return values[arg.name]
        if isinstance(arg, sympy.Expr):
            return size_value(arg, sizes)
        if isinstance(arg, (list, tuple)):
            return type(arg)(real(part) for part in arg)
        if isinstance(arg, Mapping):
            return {key: real(part) for key, part in arg.items()}
        if double and isinstance(arg, torch.dtype) and arg.is_floating_point:
            return torch.float64
        return arg

    args = [real(arg) for arg in node.args]
    returned = node.target(*args, **{key: real(arg) for key, arg in node.kwargs.items()})
    results = returned if node.multiple and isinstance(returned, (list, tuple)) else (returned,)
    sizes.update(
        {size: results[place] if dim is None else results[place].shape[dim] for size, place, dim in node.sizes}
    )
    found: dict[str, torch.Tensor] = {}
    for name, result in zip(node.outs, results, strict=True):
        if name is None:
            continue
        buffer = program.buffers[name]
        shape = [size_value(size, sizes) for size in buffer.shape]
        if not isinstance(result, torch.Tensor) or list(result.shape) != shape:
            raise VerifyError(f"{node.target} does not return a tensor of shape {shape} for {name}")
        if not double and result.dtype is not buffer.dtype:
            raise VerifyError(f"{node.target} returns {result.dtype} for {name}, not {buffer.dtype}")
        found[name] = _as_double(result) if double else result
    return found


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# Kernels --------------------------------------------------------------------------------------------------------------


def run_kernel(kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> None:
    """Run a Kernel on the tensors of its params, in their order; what it stores is written in place.

    Raises:
        VerifyError: a tensor is not as its param declares, or a load or store reaches outside.
    """
    known = _kernel_sizes(kernel, tensors, sizes)
    with torch.no_grad():
        _run_grid(kernel, tensors, known)
    at = {param.name: tensor for param, tensor in zip(kernel.params, tensors, strict=True)}
    parts, last = list(kernel.beside), kernel.then
    while last is not None:  # each over parameters of the whole launch, not of the one before it
        parts.append(replace(last, then=None))
        last = last.then
    for part in parts:
        run_kernel(part, [at[p.name] for p in part.params], [known[s] for s in part.sizes])


def _run_grid(kernel: Kernel, tensors: Sequence[torch.Tensor], known: Mapping[sympy.Symbol, int]) -> None:
    axes = {axis.symbol: range(size_value(axis.size, known)) for axis in kernel.axes}
    grid = {axis.symbol: axes[axis.symbol] for axis in kernel.with_role(Role.GRID)}
    if any(not len(span) for span in grid.values()):
        return
    flats = {param.name: flat_view(tensor) for param, tensor in zip(kernel.params, tensors, strict=True)}
    device = next((t.device for p, t in zip(kernel.params, tensors, strict=True) if p.written), CPU)
    found = spans(kernel)
    varies = {stmt: _varies(stmt, found) for stmt in statements(kernel.body) if not isinstance(stmt, Loop)}
    cost = max((points_of(spanned, axes) for spanned in varies.values()), default=0)
    for box in boxes(grid, pieces(cost)):
        _run_body(kernel, kernel.body, {**axes, **box}, Scope(flats, known, {}, True, device), varies)


_RUNNING_BLOCKS = 3
"""Blocks in which a loop with running values is walked, so that what is carried is carried more than once."""


def _run_body(
    kernel: Kernel,
    body: Sequence[Stmt],
    axes: Ranges,
    scope: Scope,
    varies: Mapping[Fold | Prefix | Store, list[frozenset[sympy.Symbol]]],
    walked: frozenset[str] = frozenset(),
) -> dict[str, torch.Tensor]:
    """Run statements over a box; returns the tiles of `scope` and those of the folds that ran.

    `walked` are folds whose loop is walked in blocks, of which the box is one.
    """
    tiles = dict(scope.tiles)
    scope = replace(scope, tiles=tiles)
    for stmt in body:
        if isinstance(stmt, Loop):
            if not running(stmt):
                tiles.update(_run_body(kernel, stmt.body, axes, scope, varies))
                continue
            own = {fold.name: fold for fold in walked_folds(stmt)}
            tiles.update({name: _identity_of(fold, len(axes), scope.device) for name, fold in own.items()})
            for part in boxes({stmt.axes[0]: axes[stmt.axes[0]]}, _RUNNING_BLOCKS):
                tiles.update({f"{name}'": tiles[name] for name in own})
                tiles.update(_run_body(kernel, stmt.body, {**axes, **part}, scope, varies, frozenset(own)))
        elif isinstance(stmt, Fold):
            value = fold_over(stmt.op, stmt.args, stmt.over, axes, scope, points_of(varies[stmt], axes))
            if stmt.name in walked:
                old = evaluate([stmt.carry or stmt.before], axes, scope)[0]
                both = torch.stack([old.expand(value.shape), value.to(stmt.dtype)])
                value = fold("sum" if stmt.op == "dot" else stmt.op, [both], [0])[0][0]
            tiles[stmt.name] = value.to(stmt.dtype)
        elif isinstance(stmt, Prefix):
            tiles[stmt.name] = scan_along(stmt.op, stmt.args, stmt.along, axes, scope)
        elif points_of(varies[stmt], axes):
            _store(kernel, stmt, axes, scope)
    return tiles


def _identity_of(stmt: Fold, rank: int, device: torch.device) -> torch.Tensor:
    return torch.full([1] * rank, identity(stmt.op, stmt.dtype), dtype=stmt.dtype, device=device)


def _kernel_sizes(kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> dict[sympy.Symbol, int]:
    """The size symbols of a kernel and of the shapes of its params; refuses tensors that are not as declared."""
    known = dict(zip(kernel.sizes, sizes, strict=True))
    for param, tensor in zip(kernel.params, tensors, strict=True):
        if tensor.ndim != len(param.shape):
            raise VerifyError(
                f"kernel {kernel.name}: {param.name} has {tensor.ndim} dimensions, not {len(param.shape)}"
            )
        for expr, size in zip((*param.shape, *param.strides), (*tensor.shape, *tensor.stride()), strict=True):
            if expr.is_Symbol:
                known.setdefault(expr, size)
    for param, tensor in zip(kernel.params, tensors, strict=True):
        if any(symbol not in known for expr in (*param.shape, *param.strides) for symbol in symbols_of(expr)):
            continue  # a size that only the shape holds and nothing in the kernel needs
        shape = [size_value(size, known) for size in param.shape]
        strides = [size_value(stride, known) for stride in param.strides]
        layout = zip(shape, strides, tensor.stride(), strict=True)
        moved = tensor.numel() > 0 and any(size != 1 and ours != theirs for size, ours, theirs in layout)
        if tensor.dtype is not param.dtype or list(tensor.shape) != shape or moved:
            raise VerifyError(
                f"kernel {kernel.name}: {param.name} is {tensor.dtype}{list(tensor.shape)} with strides "
                f"{list(tensor.stride())}, not {param.dtype}{shape} with strides {strides}"
            )
    return known


def _varies(stmt: Stmt, found: Mapping[Expr, frozenset[sympy.Symbol]]) -> list[frozenset[sympy.Symbol]]:
    """The axes of the values that a statement holds at once: the operands of a product are never joined."""
    each = [found[value] for value in values_of(stmt)]
    if isinstance(stmt, Fold):
        each = [axes.union(stmt.over) for axes in each]
        return each if stmt.op == "dot" else [frozenset().union(*each)]
    if isinstance(stmt, Prefix):
        return [frozenset({stmt.along}).union(*each)]
    assert isinstance(stmt, Store)
    each.append(frozenset(stmt.axes or ()))
    if not isinstance(stmt.offset, Expr):
        each.append(frozenset(stmt.offset.free_symbols))
    return [frozenset().union(*each)]


def _store(kernel: Kernel, stmt: Store, axes: Ranges, scope: Scope) -> None:
    target = stmt.offset if isinstance(stmt.offset, Expr) else IndexValue(stmt.offset)
    value, offset, *rest = evaluate([stmt.value, target, *([] if stmt.where is None else [stmt.where])], axes, scope)
    held = rest[0] if rest else None
    flat = scope.buffers[stmt.param]
    if value.dtype is not flat.dtype:
        raise VerifyError(f"kernel {kernel.name}: {value.dtype} is stored to {stmt.param}, which holds {flat.dtype}")
    spread = stmt.axes is None and any(n not in (1, m) for n, m in zip(value.shape, offset.shape, strict=True))
    if spread:
        raise VerifyError(f"kernel {kernel.name}: the value stored to {stmt.param} varies where its offset does not")
    check_positions(stmt.param, [stmt.offset], offset, flat.numel(), held)
    if stmt.axes is None:
        scatter(flat, offset, value)
        return
    points = [len(span) if axis in stmt.axes else 1 for axis, span in axes.items()]
    if any(n not in (1, m) for n, m in zip(offset.shape, points, strict=True)):
        raise VerifyError(f"kernel {kernel.name}: the offset into {stmt.param} varies where it is not updated")
    update(stmt.op, flat, offset.expand(points), value, held)
