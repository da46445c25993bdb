"""Kernels written by hand for the tests of the C target: short names for the IR, and a way to run it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sympy
import torch

from fusion.codegen.c.target import CTarget
from fusion.lowering.indexing import axis_symbol, over_symbol
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Loop, Param, Role, Stmt

F32, F64, I64, BF16, F16 = torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16
i0, i1, i2 = (axis_symbol(k) for k in range(3))
r0, r1 = (over_symbol(k) for k in range(2))
TARGET = CTarget()
FLOATS = (F32, F64, BF16, F16)
INTEGERS = (torch.int8, torch.int16, torch.int32, I64, torch.uint8)
ZERO = sympy.Integer(0)
GRID, LOOP, WHOLE = Role.GRID, Role.LOOP, Role.WHOLE
REDUCED = pytest.mark.parametrize("role", [WHOLE, LOOP], ids=["whole", "loop"])


def axis(symbol: sympy.Symbol, size: int | sympy.Expr, role: Role = GRID) -> KernelAxis:
    return KernelAxis(symbol, sympy.sympify(size), role)


def param(name: str, tensor: torch.Tensor, written: bool = False) -> Param:
    shape, strides = (tuple(map(sympy.Integer, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return Param(name, tensor.dtype, shape, strides, written)


def kernel(
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    axes: Sequence[KernelAxis],
    *body: Stmt,
    sizes: Sequence[sympy.Symbol] = (),
) -> Kernel:
    params = [param(name, tensor) for name, tensor in inputs.items()]
    params += [param(name, tensor, written=True) for name, tensor in outputs.items()]
    return Kernel("kernel", tuple(params), tuple(sizes), tuple(axes), body)


def run(
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    axes: Sequence[KernelAxis],
    *body: Stmt,
    sizes: dict[sympy.Symbol, int] | None = None,
) -> str:
    """Emit, build and launch; returns the source."""
    example = kernel(inputs, outputs, axes, *body, sizes=tuple(sizes or ()))
    source = TARGET.emit(example)
    assert source == TARGET.emit(example)
    TARGET.build(example, source)(*inputs.values(), *outputs.values(), *(sizes or {}).values())
    return source


def in_loops(role: Role, axes: tuple[sympy.Symbol, ...], *sweeps: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return the statements of each sweep, in loops if the role is LOOP."""
    if role is WHOLE:
        return tuple(stmt for sweep in sweeps for stmt in sweep)
    return tuple(Loop(axes, tuple(sweep)) for sweep in sweeps)


def assert_close_to_exact(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from the float64 result than twice eager, and a little."""
    error, allowed = (got.double() - exact).abs(), (eager.double() - exact).abs().max() * 2 + 1e-6
    assert (error <= allowed).all(), f"error {error.max():.3g}, eager's {(allowed - 1e-6) / 2:.3g}"


def sample(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.02
    if dtype.is_floating_point:
        return (torch.randn(shape) * 0.1 + 1).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -9, 9, shape, dtype=dtype)
