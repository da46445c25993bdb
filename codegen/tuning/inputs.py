"""Creates inputs to try a kernel on.

Input: a kernel with known sizes and a device; output: a tensor for each of its parameters, with the declared shape and
strides.  Floating-point numbers are normally distributed, not zeros: a device that multiplies zeros draws less power
and runs faster.  Integers may be indices: they are drawn from the largest range for which the evaluator finds every
access in bounds.  The user's generators are not touched.

Refused, by `Unsupported`: unknown sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import sympy
import torch

from fusion.lowering.errors import CheckFailed, Unsupported, VerifyError
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.expr import Expr, Load, Op, index_of, loads, postorder
from fusion.lowering.ir.kernel import Kernel, Loop, Store, statements, values_of
from fusion.lowering.ir.sizes import size_value

_SEED = 20
CPU = torch.device("cpu")


def expected(kernel: Kernel, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return tensors to call `kernel` with, and the same after the evaluator has run it.

    Raises:
        Unsupported: a size is unknown, or no range of integers is safe.
    """
    every = (
        size for part in (kernel, *kernel.beside) for param in part.params for size in (*param.shape, *param.strides)
    )
    if kernel.sizes or not all(size.is_Integer for size in every):
        raise Unsupported(f"{kernel.name} has sizes that are not known")
    positions, bounds = any(map(_positions, kernel.launched)), open_bounds(kernel, {})
    for limit in limits(size for param in kernel.params for size in param.shape) if positions else (None,):
        inputs = [
            drawn(param.shape, param.strides, param.dtype, CPU if param.number else device, limit)
            for param in kernel.params
        ]
        for param, tensor in zip(kernel.params, inputs, strict=True):
            if param.name in bounds:
                tensor.fill_(bounds[param.name])
        after = [clone(tensor) for tensor in inputs]
        try:
            run_kernel(kernel, after)
        except (VerifyError, CheckFailed):  # an index out of bounds
            continue
        return inputs, after
    raise Unsupported(f"{kernel.name} is called with positions of which nothing is known")


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, gaps included."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def limits(sizes: Iterable[sympy.Expr]) -> list[int]:
    """Return ends of ranges for integers that may be indices along axes of these sizes, the largest first."""
    return sorted({int(size) for size in sizes} | {1}, reverse=True)


def _positions(kernel: Kernel) -> bool:
    """Return whether a loaded number is an index of a load or store."""
    for stmt in statements(kernel.body):
        offsets = [index for load in loads(*values_of(stmt)) for index in load.index]
        offsets += [stmt.offset] if isinstance(stmt, Store) else []
        if any(isinstance(offset, Expr) and any(index_of(load) for load in loads(offset)) for offset in offsets):
            return True
    return False


def drawn(
    shape: Sequence[sympy.Expr],
    strides: Sequence[sympy.Expr],
    dtype: torch.dtype,
    device: torch.device,
    limit: int | None = None,
) -> torch.Tensor:
    """Return a tensor of random numbers, the same each time; integers below `limit`, or any small ones."""
    generator = torch.Generator(device).manual_seed(_SEED)
    sizes, steps = [int(size) for size in shape], [int(stride) for stride in strides]
    result = torch.empty_strided(sizes, steps, dtype=dtype, device=device)
    extent = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) if 0 not in sizes else 0
    flat = result.as_strided((extent,), (1,))
    if dtype.is_floating_point:
        flat.normal_(generator=generator)
    elif dtype is torch.bool:
        flat.random_(0, 2, generator=generator)
    else:
        info = torch.iinfo(dtype)
        low, high = (0, min(limit, info.max)) if limit is not None else (max(info.min, -128), min(info.max, 127) + 1)
        flat.random_(low, max(high, 1), generator=generator)
    return result


def open_bounds(kernel: Kernel, sizes: Mapping[sympy.Symbol, int]) -> dict[str, int]:
    """Return the parameters that hold bounds of a condition, with a number for each such that these bounds always hold.

    Inputs drawn for a kernel, to time it or to check it, cannot be the folds of a mask that is drawn as well.  With
    these numbers the outer bounds leave nothing out and the inner ones are empty, so that every point asks the
    condition.

    Args:
        sizes: a value for each size symbol of the kernel.
    """
    bounds: dict[str, int] = {}
    for part in kernel.launched:
        lengths = part.axis_sizes()
        for loop in statements(part.body, Loop):
            last = max((size_value(lengths[axis], sizes) for axis in loop.axes), default=0)
            for node in postorder(*([] if loop.where is None else [loop.where])):
                if isinstance(node, Op) and node.name == "bounded":
                    bounds.update(dict(_first_and_end(node.args[1], 0, last)))
                    bounds.update(dict(_first_and_end(node.args[2], last, 0)))
    return bounds


def _first_and_end(condition: Expr, first: int, end: int) -> Iterator[tuple[str, int]]:
    """Yield the buffers that `first <= point < end` reads, with these numbers."""
    for node in postorder(condition):
        if isinstance(node, Op) and node.name in ("ge", "lt") and isinstance(bound := node.args[1], Load):
            yield bound.buffer, first if node.name == "ge" else end
