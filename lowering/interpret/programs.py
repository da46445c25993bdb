"""Evaluates a Program: its nodes in order, over real tensors, in the dtypes as stated or in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.errors import VerifyError
from fusion.lowering.interpret.calls import as_double, call
from fusion.lowering.interpret.chunks import Body, run_chunks
from fusion.lowering.interpret.evaluate import (
    Scope,
    boxes,
    check_positions,
    evaluate,
    flat_view,
    fold_over,
    pieces,
    points_of,
    scan_along,
    update,
)
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import free_axes
from fusion.lowering.ir.program import Buffer, BufferRef, Contract, Extern, Map, Program, Reduce, Scan, Scatter
from fusion.lowering.ir.sizes import size_value


def run_program(
    program: Program, inputs: Sequence[torch.Tensor | int | None], *, exact: bool = True
) -> list[torch.Tensor | int | None]:
    """Evaluate a Program.

    Args:
        inputs: one per entry of `program.inputs`: a tensor, an integer for a size symbol, anything for None.
        exact: compute in the dtypes as stated, with the strides as stated; otherwise in float64.

    Returns:
        One per entry of `program.outputs`: tensors, integers and None.

    Raises:
        VerifyError: an input is not as declared, or the program reads outside a tensor.
    """
    sizes = bind_sizes(program, inputs)
    tensors = {name: t for name, t in zip(program.inputs, inputs, strict=True) if isinstance(name, str)}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in (*tensors.items(), *program.constants.items()):
        assert isinstance(tensor, torch.Tensor)
        values[name] = tensor if exact else as_double(tensor)
    with torch.no_grad():
        return _results(program, values, sizes, exact)


def _results(
    program: Program, values: dict[str, torch.Tensor], sizes: dict[sympy.Symbol, int], exact: bool
) -> list[torch.Tensor | int | None]:
    """Return the outputs of a Program, given its inputs and constants in `values`."""
    for node in program.nodes:
        match node:
            case Extern():
                values.update(call(program, node, values, sizes, exact))
            case Chunked():
                values.update(_in_chunks(program, node, values, sizes, exact))
            case Scatter():
                scope = Scope(values, sizes, {}, exact, program.buffers[node.out].device)
                values[node.out] = _scattered(node, scope, own=node.start in program.inputs)
            case Map() | Reduce() | Scan() | Contract():
                out = program.buffers[node.out]
                values[node.out] = _compute(node, out, Scope(values, sizes, {}, exact, out.device))
            case _:
                assert_never(node)
    results: list[torch.Tensor | int | None] = []
    for output in program.outputs:
        if output is None or isinstance(output, BufferRef):
            results.append(None if output is None else values[output.name])
        else:
            results.append(size_value(output, sizes))
    return results


def _in_chunks(
    program: Program,
    node: Chunked[Program],
    values: Mapping[str, torch.Tensor],
    sizes: Mapping[sympy.Symbol, int],
    exact: bool,
) -> dict[str, torch.Tensor]:
    """Return the tensors that a chunked region computes, by buffer."""

    def body_of(body: Program) -> Body:
        def run(args: list[object]) -> tuple[torch.Tensor, ...]:
            arguments = dict(zip(body.inputs, args, strict=True))
            tensors = {
                name: t for name, t in arguments.items() if isinstance(name, str) and isinstance(t, torch.Tensor)
            }
            known = {size: n for size, n in arguments.items() if isinstance(size, sympy.Symbol) and isinstance(n, int)}
            _check_tensors(body, tensors, known, exact)
            outputs = _results(body, tensors, known, exact)
            return tuple(tensor for tensor in outputs if isinstance(tensor, torch.Tensor))

        return run

    results: dict[str, torch.Tensor] = {}
    for name in node.outs:
        out = program.buffers[name]
        layout = [[size_value(size, sizes) for size in of] for of in (out.shape, out.strides)]
        dtype = out.dtype if exact or not out.dtype.is_floating_point else torch.float64
        results[name] = torch.empty_strided(*layout, dtype=dtype, device=out.device)
    tensors = [values[name] for name, _ in node.sliced]
    length, known_sizes = size_value(node.length, sizes), [size_value(size, sizes) for size in node.symbols]
    run_chunks(node, [body_of(body) for body in node.bodies], length, known_sizes, tensors, results)
    return results


def _check_tensors(
    program: Program, tensors: Mapping[str, torch.Tensor], sizes: Mapping[sympy.Symbol, int], exact: bool
) -> None:
    """Refuse tensors that differ from the declared inputs of a body."""
    for name, tensor in tensors.items():
        buffer = program.buffers[name]
        shape = tuple(size_value(size, sizes) for size in buffer.shape)
        if tensor.shape != shape or (exact and tensor.dtype is not buffer.dtype):
            raise VerifyError(
                f"{name} of a chunk is {tensor.dtype}{list(tensor.shape)}, not {buffer.dtype}{list(shape)}"
            )


def bind_sizes(program: Program, inputs: Sequence[torch.Tensor | int | None]) -> dict[sympy.Symbol, int]:
    """Return the values of the size symbols, from integer inputs and from the shapes and strides of tensor inputs.

    Raises:
        VerifyError: an input does not have the dtype or the shape that its buffer declares.
    """
    sizes: dict[sympy.Symbol, int] = {}
    tensors: list[tuple[Buffer, torch.Tensor]] = []
    for entry, value in zip(program.inputs, inputs, strict=True):
        if isinstance(entry, sympy.Symbol):
            assert isinstance(value, int)
            sizes[entry] = value
        elif entry is not None:
            assert isinstance(value, torch.Tensor)
            tensors.append((program.buffers[entry], value))
    for buffer, tensor in tensors:
        if tensor.ndim != len(buffer.shape):
            raise VerifyError(f"input {buffer.name} has {tensor.ndim} dimensions, not {len(buffer.shape)}")
        for expr, size in zip((*buffer.shape, *buffer.strides), (*tensor.shape, *tensor.stride()), strict=True):
            if isinstance(expr, sympy.Symbol):
                sizes.setdefault(expr, size)
    for buffer, tensor in tensors:
        shape = tuple(size_value(size, sizes) for size in buffer.shape)
        if tensor.dtype is not buffer.dtype or tensor.shape != shape:
            raise VerifyError(
                f"input {buffer.name} is {tensor.dtype}{list(tensor.shape)}, not {buffer.dtype}{list(shape)}"
            )
    return sizes


def _compute(node: Map | Reduce | Scan | Contract, out: Buffer, scope: Scope) -> torch.Tensor:
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
    match node:
        case Map():
            stated = node.expr.dtype
        case Reduce() | Scan():
            stated = node.dtype
        case Contract():
            stated = out.dtype
        case _:
            assert_never(node)
    if stated is not out.dtype:
        raise VerifyError(f"{node.out} holds {out.dtype}, its node gives {stated}")
    cut = {axis: span for axis, span in axes.items() if not isinstance(node, Scan) or axis != node.along}
    for cut_box in boxes(cut, pieces(points_of(varies, {**axes, **over}))):
        box = {axis: cut_box.get(axis, span) for axis, span in axes.items()}
        match node:
            case Map():
                value = evaluate([node.expr], box, scope, fresh=False)[0]
            case Scan():
                value = scan_along(node.op, node.args, node.along, box, scope)
            case Reduce() | Contract():
                op, inside = "dot" if isinstance(node, Contract) else node.op, {**box, **over}
                value = fold_over(op, node.exprs, list(over), inside, scope, points_of(varies, inside))
                value = value.reshape(value.shape[: len(box)])
            case _:
                assert_never(node)
        part = result[tuple(slice(span.start, span.stop) for span in box.values())]
        part.copy_(value.expand(part.shape))
    return result


def _scattered(node: Scatter, scope: Scope, *, own: bool) -> torch.Tensor:
    """Compute a scatter in the memory of its start, if that is the caller's `own` tensor, else in a copy."""
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
