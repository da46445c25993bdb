"""Evaluates extern calls: the same call, with real tensors and sizes."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch

from fusion.lowering.errors import VerifyError
from fusion.lowering.ir.arguments import map_leaves
from fusion.lowering.ir.program import BufferRef, Extern, ExternArg, Program
from fusion.lowering.ir.sizes import size_value


def call(
    program: Program,
    node: Extern,
    values: Mapping[str, torch.Tensor],
    sizes: dict[sympy.Symbol, int],
    exact: bool,
) -> dict[str, torch.Tensor]:
    """Return the tensors that an extern returns, by buffer.

    In float64 a call may be refused, or change its meaning (`view.dtype`): if it fails or returns another shape, it is
    repeated in the dtypes as stated.
    """
    if not exact:
        try:
            return _called(program, node, values, sizes, True)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, VerifyError):
            values = {name: values[name].to(program.buffers[name].dtype) for name in node.reads}
    results = _called(program, node, values, sizes, False)
    return results if exact else {name: as_double(tensor) for name, tensor in results.items()}


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
        if double and isinstance(arg, torch.dtype) and arg.is_floating_point:
            return torch.float64
        return arg

    returned = node.target(*map_leaves(node.args, real), **map_leaves(node.kwargs, real))
    results = returned if node.multiple and isinstance(returned, (list, tuple)) else (returned,)
    results = results if node.outs or node.sizes else ()  # nothing is named: checks that are kept
    sizes.update(
        {size: results[place] if dim is None else results[place].shape[dim] for size, place, dim in node.sizes}
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, result in zip(node.outs, results, strict=True):
        if name is None:
            continue
        buffer = program.buffers[name]
        shape = [size_value(size, sizes) for size in buffer.shape]
        if not isinstance(result, torch.Tensor) or list(result.shape) != shape:
            raise VerifyError(f"{node.target} does not return a tensor of shape {shape} for {name}")
        if not double and result.dtype is not buffer.dtype:
            raise VerifyError(f"{node.target} returns {result.dtype} for {name}, not {buffer.dtype}")
        tensors[name] = as_double(result) if double else result
    return tensors


def as_double(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a float tensor to float64; return any other as it is."""
    return tensor.double() if tensor.is_floating_point() else tensor
