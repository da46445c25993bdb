"""Small Programs and Kernels, for the tests of everything that takes one."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from fusion.lowering.indexing import axis_symbol, over_symbol
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Param, Role, Stmt
from fusion.lowering.ir.program import Axis, Buffer, BufferRef, Node, Program

I0, I1, R0, R1 = axis_symbol(0), axis_symbol(1), over_symbol(0), over_symbol(1)
LENGTH = sympy.Symbol("s0", integer=True, positive=True)  # a size that is not known
F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
CPU = torch.device("cpu")


def size(*sizes: int | sympy.Expr) -> tuple[sympy.Expr, ...]:
    return tuple(map(sympy.sympify, sizes))


def buffer(
    name: str, shape: Sequence[int | sympy.Expr], dtype: torch.dtype = F32, strides: Sequence[int] | None = None
) -> Buffer:
    running, row_major = sympy.Integer(1), []
    for extent in reversed(shape):
        row_major.insert(0, running)
        running = running * extent
    return Buffer(name, dtype, size(*shape), size(*strides) if strides else tuple(row_major), CPU)


def program(
    buffers: Sequence[Buffer], nodes: Sequence[Node], inputs: Sequence[str | sympy.Symbol | None], *outputs: object
) -> Program:
    returned = tuple(BufferRef(o) if isinstance(o, str) else o for o in outputs)
    return Program(tuple(inputs), {b.name: b for b in buffers}, tuple(nodes), returned)  # type: ignore[arg-type]


def axis(symbol: sympy.Symbol, n: int | sympy.Expr) -> Axis:
    return Axis(symbol, sympy.sympify(n))


def param(
    name: str,
    shape: Sequence[int | sympy.Expr],
    dtype: torch.dtype = F32,
    written: bool = False,
    strides: Sequence[int] | None = None,
) -> Param:
    result = buffer(name, shape, dtype, strides)
    return Param(name, dtype, result.shape, result.strides, written)


def kernel(
    params: Sequence[Param],
    axes: dict[sympy.Symbol, tuple[int | sympy.Expr, Role]],
    *body: Stmt,
    sizes: tuple[sympy.Symbol, ...] = (),
) -> Kernel:
    return Kernel(
        "k", tuple(params), sizes, tuple(KernelAxis(s, sympy.sympify(n), role) for s, (n, role) in axes.items()), body
    )
