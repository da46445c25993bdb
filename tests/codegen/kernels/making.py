"""Helpers for hand-written kernels: parts, operands, and the comparison of results.

The helpers keep a kernel to about ten lines.  All float sums run in float32 or wider, as in lowered kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import sympy
import torch

from fusion.lowering.indexing import axis_symbol, over_symbol
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.expr import Cast, Expr, Load
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Param, Role, Stmt, rename
from fusion.lowering.ir.scalar_ops import SCALAR_OPS

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


I8, I32, I64, BOOL = torch.int8, torch.int32, torch.int64, torch.bool


GRID, LOOP, WHOLE = Role.GRID, Role.LOOP, Role.WHOLE


def param(
    name: str, dtype: torch.dtype, *shape: int | sympy.Expr, written: bool = False, aligned: bool = True
) -> Param:
    """A contiguous tensor parameter."""
    sizes = tuple(sympy.sympify(size) for size in shape)
    strides = tuple(sympy.Mul(*sizes[k + 1 :]) for k in range(len(sizes)))
    return Param(name, dtype, sizes, strides, written, aligned)


def load(name: str, offset: sympy.Expr | Expr | int, dtype: torch.dtype = F32, mask: Expr | None = None) -> Load:
    return Load(name, (offset if isinstance(offset, Expr) else sympy.sympify(offset),), dtype, mask)


def narrowed(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` in `dtype`."""
    return value if value.dtype is dtype else Cast(value, dtype)


def kernel(name: str, params: Sequence[Param], axes: dict[sympy.Symbol, tuple[object, Role]], *body: Stmt) -> Kernel:
    """A kernel; sizes are the free symbols of its axes."""
    listed = tuple(KernelAxis(symbol, sympy.sympify(size), role) for symbol, (size, role) in axes.items())
    sizes = sorted({s for axis in listed for s in axis.size.free_symbols}, key=str)
    return Kernel(name, tuple(params), tuple(sizes), listed, body)


def tensors(
    kernel: Kernel, device: str = "cpu", seed: int = 0, sizes: dict[sympy.Symbol, int] | None = None
) -> list[torch.Tensor]:
    """Random tensors for the params, integers in [0, 4) so that any of them is an index; written ones are empty."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for p in kernel.params:
        shape = [int(size.subs(sizes or {})) for size in p.shape]
        if p.dtype is BOOL:
            value = torch.rand(shape, generator=generator) > 0.5
        elif p.dtype.is_floating_point:
            value = torch.randn(shape, generator=generator, dtype=F64).to(p.dtype)
        else:
            value = torch.randint(0, 4, shape, generator=generator, dtype=p.dtype)
        results.append(value.to(device))
    return results


def special(name: str, dtype: torch.dtype, n: int) -> list[torch.Tensor] | None:
    """Operands for scalar operation `name` with all values that are easy to get wrong; None where eager has none.

    Excluded are cases that eager leaves undefined: integer division by zero, and of the least integer by -1.
    """
    generator = torch.Generator().manual_seed(0)
    operands = []
    for k in range(SCALAR_OPS[name].arity):
        if dtype is BOOL or (name == "where" and k == 0):
            operands.append(torch.rand(n, generator=generator) > 0.5)
        elif dtype.is_floating_point:
            x = torch.randn(n, generator=generator, dtype=F64) * 3
            picks = torch.randint(0, len(_FLOATS), (n,), generator=generator)
            operands.append(torch.where(torch.arange(n) % 2 == 0, torch.tensor(_FLOATS)[picks].double(), x).to(dtype))
        else:
            info = torch.iinfo(dtype)
            x = torch.randint(-20 if info.min < 0 else 0, 20, (n,), generator=generator).to(dtype)
            x[k::7], x[3 + k :: 11] = info.max, info.min
            operands.append(x)
    if name in ("floordiv", "truncdiv", "remainder", "fmod") and not dtype.is_floating_point:
        if dtype is BOOL:
            return None
        bad = (operands[1] == 0) | ((operands[1] == -1) if torch.iinfo(dtype).min < 0 else False)
        operands[1] = torch.where(bad, 1, operands[1])
    if dtype is BOOL and name in ("pow", "shl", "shr"):
        return None
    try:
        result = SCALAR_OPS[name].meaning(*operands)
    except (RuntimeError, NotImplementedError):
        return None
    kept = BOOL if SCALAR_OPS[name].result == "bool" else dtype
    return operands if result.dtype is kept else None


_FLOATS = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 0.5, 2.5, -2.5, 80.0, -80.0, 3.0, -3.0, 1.5]


def expected(kernel: Kernel, given: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
    """Return the values of `given` after a launch, as the evaluator computes them."""
    results = [tensor.clone() for tensor in given]
    known = dict(zip(kernel.sizes, sizes, strict=True))
    at = {p.name: tensor for p, tensor in zip(kernel.params, results, strict=True)}
    step: Kernel | None = kernel
    while step is not None:
        of = [at[p.name] for p in step.params]
        run_kernel(replace(step, then=None), of, [known[size] for size in step.sizes])
        step = step.then
    return results


TOLERANCE = {F16: 2e-3, BF16: 1.6e-2, F32: 2e-6, F64: 1e-13}


def assert_same(kernel: Kernel, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], factor: float = 1.0) -> None:
    """Check that tensors agree to the last few bits of their dtype, and sums to those of their terms.

    A sum of n numbers of size 1 is of size √n.  Results beyond that are products of sums: one that is near 0, because a
    factor is, still has the error of that factor times the other one.
    """
    reduced = [int(axis.size) for axis in kernel.axes if axis.role is not GRID and axis.size.is_Integer]
    sums = math.sqrt(math.prod(reduced))
    for p, a, b in zip(kernel.params, got, want, strict=True):
        rtol = atol = TOLERANCE.get(p.dtype, 0.0) * factor * (1 + sums)
        if p.written and b.is_floating_point() and b.isfinite().any():
            size = float(b[b.isfinite()].double().square().mean().sqrt())
            atol *= max(1.0, size / max(1.0, sums))
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, p=p: f"{p.name}: {m}")


# Pointwise ------------------------------------------------------------------------------------------------------------


i, j, b = axis_symbol(0), axis_symbol(1), axis_symbol(2)


r, q = over_symbol(0), over_symbol(1)


# Contractions ---------------------------------------------------------------------------------------------------------


def packed(name: str, *kernels: Kernel) -> Kernel:
    """Independent kernels in one launch; the parameters of each get its number."""
    parts = []
    for number, one in enumerate(kernels):
        names = {p.name: f"{p.name}_{number}" for p in one.params}
        params = tuple(replace(p, name=names[p.name]) for p in one.params)
        parts.append(replace(one, params=params, body=rename(one.body, names)))
    params = tuple(p for part in parts for p in part.params)
    sizes = tuple(sorted({size for part in parts for size in part.sizes}, key=str))
    return replace(parts[0], name=name, params=params, sizes=sizes, beside=tuple(parts[1:]))
