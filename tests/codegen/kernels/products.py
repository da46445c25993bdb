"""GEMM kernels with prologues and epilogues."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from fusion.lowering.indexing import ZERO, FloorDiv, Mod
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Store
from tests.codegen.kernels.making import (
    F16,
    F32,
    F64,
    GRID,
    I8,
    I32,
    I64,
    LOOP,
    WHOLE,
    b,
    i,
    j,
    kernel,
    load,
    param,
    q,
    r,
)


def matmul(
    m: int | sympy.Expr,
    n: int,
    k: int | sympy.Expr,
    dtype: torch.dtype = F16,
    *,
    batch: int | sympy.Expr = 1,
    turned: tuple[bool, bool] = (False, False),
    out: torch.dtype | None = None,
) -> Kernel:
    """relu(a · b), any of the operands transposed in memory"""
    sums = I32 if dtype is I8 else F64 if dtype is F64 else F32
    a = load("a", m * k * b + (m * r + i if turned[0] else k * i + r), dtype)
    c = load("b", n * k * b + (k * j + r if turned[1] else n * r + j), dtype)
    dot = Fold("acc", "dot", (a, c), (r,), sums, (i,), (j,))
    value = op("maximum", dot.ref, const(0, sums))
    result = out or (I32 if dtype is I8 else dtype)
    params = (
        param("a", dtype, batch, *((k, m) if turned[0] else (m, k))),
        param("b", dtype, batch, *((n, k) if turned[1] else (k, n))),
        param("out", result, batch, m, n, written=True),
    )
    axes: dict[sympy.Symbol, tuple[object, Role]] = {b: (batch, GRID), i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("out", m * n * b + n * i + j, value if result is sums else Cast(value, result))
    return kernel("matmul", params, axes, Loop((r,), (dot,)), store)


def linear(m: int, n: int, k: int, dtype: torch.dtype) -> Kernel:
    """silu(x · wᵀ + bias) + residual, x scaled by a norm, rows over two axes: prologue, epilogue, merged axes"""
    half = m // 2
    row = half * i + b
    scaled = op("mul", Cast(load("x", k * row + r, dtype), F32), load("scale", row))
    lhs, rhs = Cast(scaled, dtype), load("w", k * j + r, dtype)
    dot = Fold("acc", "dot", (lhs, rhs), (r,), F32, (i, b), (j,))
    y = op("add", dot.ref, Cast(load("bias", j, dtype), F32))
    gate = op("truediv", y, op("add", const(1.0, F32), op("exp", op("neg", y))))
    value = op("add", gate, Cast(load("residual", n * row + j, dtype), F32))
    params = (
        *(param("x", dtype, m, k), param("scale", F32, m), param("w", dtype, n, k), param("bias", dtype, n)),
        *(param("residual", dtype, m, n), param("out", dtype, m, n, written=True)),
    )
    axes = {i: (2, GRID), b: (half, GRID), j: (n, GRID), r: (k, LOOP)}
    return kernel("linear", params, axes, Loop((r,), (dot,)), Store("out", n * row + j, Cast(value, dtype)))


def residual(m: int | sympy.Expr, n: int, k: int, dtype: torch.dtype = F16, *, over: bool = False) -> Kernel:
    """a · bᵀ + bias + c, perhaps in the memory of c"""
    dot = Fold("acc", "dot", (load("a", k * i + r, dtype), load("b", k * j + r, dtype)), (r,), F32, (i,), (j,))
    terms = (Cast(load("bias", j, dtype), F32), Cast(load("c", n * i + j, dtype), F32))
    total = op("add", op("add", dot.ref, terms[0]), terms[1])
    params = [param("a", dtype, m, k), param("b", dtype, n, k), param("bias", dtype, n)]
    params += [param("c", dtype, m, n, written=over), *([] if over else [param("out", dtype, m, n, written=True)])]
    axes: dict[sympy.Symbol, tuple[object, Role]] = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("c" if over else "out", n * i + j, Cast(total, dtype))
    return kernel("residual", params, axes, Loop((r,), (dot,)), store)


def gathered_rows(m: int, n: int, k: int) -> Kernel:
    """table[ids] · b with exp as prologue: masked lanes would not be 0 by themselves"""
    row = op("mul", load("ids", i, I64), const(k, I64))
    lhs = op("exp", load("table", op("add", row, IndexValue(r))))
    dot = Fold("acc", "dot", (lhs, load("b", n * r + j)), (r,), F32, (i,), (j,))
    params = (
        *(param("ids", I64, m), param("table", F32, 4, k), param("b", F32, k, n)),
        param("out", F32, m, n, written=True),
    )
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    return kernel("gathered_rows", params, axes, Loop((r,), (dot,)), Store("out", n * i + j, dot.ref))


def gathered_scores(batch: int, m: int, k: int, width: int) -> Kernel:
    """a · bᵀ + table[places]: each column has a row of the table, whose element is read at a place stored across"""
    dot = Fold("acc", "dot", (load("a", m * k * b + k * i + r, F16), load("b", m * k * b + k * j + r, F16)), (r,), F32)
    dot = replace(dot, rows=(i,), columns=(j,))
    place = op("add", Cast(load("places", m * j + i, I32), I64), IndexValue(m * width * b + width * j))
    total = op("add", dot.ref, Cast(load("table", place, F16), F32))
    params = (
        *(param("a", F16, batch, m, k), param("b", F16, batch, m, k), param("places", I32, m, m)),
        *(param("table", F16, batch, m, width), param("out", F16, batch, m, m, written=True)),
    )
    axes = {b: (batch, GRID), i: (m, GRID), j: (m, GRID), r: (k, LOOP)}
    store = Store("out", m * m * b + m * i + j, Cast(total, F16))
    return kernel("gathered_scores", params, axes, Loop((r,), (dot,)), store)


def rms_linear(m: int, n: int, k: int) -> Kernel:
    """(x · w) · rsqrt(mean x²): a sum of squares and a product in the same loop"""
    x = load("x", k * i + r, F16)
    wide = Cast(x, F32)
    dot = Fold("acc", "dot", (x, load("w", n * r + j, F16)), (r,), F32, (i,), (j,))
    squares = Fold("squares", "sum", (op("mul", wide, wide),), (r,), F32)
    scale = op("rsqrt", op("add", op("mul", squares.ref, const(1 / k, F32)), const(1e-6, F32)))
    params = (param("x", F16, m, k), param("w", F16, k, n), param("out", F32, m, n, written=True))
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("out", n * i + j, op("mul", dot.ref, scale))
    return kernel("rms_linear", params, axes, Loop((r,), (dot, squares)), store)


def gated(m: int, n: int, k: int, *, turned: bool = False) -> Kernel:
    """(x · u) ∗ (x · v): two products share an operand; the others may be transposed in memory"""
    x, place = load("x", k * i + r, F16), k * j + r if turned else n * r + j
    first = Fold("up", "dot", (x, load("u", place, F16)), (r,), F32, (i,), (j,))
    second = Fold("gate", "dot", (x, load("v", place, F16)), (r,), F32, (i,), (j,))
    shape = (n, k) if turned else (k, n)
    params = (
        *(param("x", F16, m, k), param("u", F16, *shape), param("v", F16, *shape)),
        param("out", F32, m, n, written=True),
    )
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("out", n * i + j, op("mul", first.ref, second.ref))
    return kernel("gated", params, axes, Loop((r,), (first, second)), store)


def matmul_softmax(m: int, n: int, k: int) -> Kernel:
    """softmax(a · b) along the columns, which are held whole"""
    a, c = load("a", k * i + r, F16), load("b", n * r + q, F16)
    dot = Fold("acc", "dot", (a, c), (r,), F32, (i,), (q,))
    top = Fold("top", "max", (dot.ref,), (q,), F32)
    power = op("exp", op("sub", dot.ref, top.ref))
    whole = Fold("whole", "sum", (power,), (q,), F32)
    params = (param("a", F16, m, k), param("b", F16, k, n), param("out", F32, m, n, written=True))
    axes = {i: (m, GRID), q: (n, WHOLE), r: (k, LOOP)}
    store = Store("out", n * i + q, op("truediv", power, whole.ref))
    return kernel("matmul_softmax", params, axes, Loop((r,), (dot,)), top, whole, store)


def matmul_top(m: int, n: int, k: int) -> Kernel:
    """relu(a · b), then the largest of its elements"""
    first = matmul(m, n, k, F16)
    out, top = first.params[-1], param("top", F16, written=True)
    largest = Fold("largest", "max", (load("out", r, F16),), (r,), F16)
    last = kernel("last", (out, top), {r: (m * n, WHOLE)}, largest, Store("top", ZERO, largest.ref))
    return replace(first, name="matmul_top", params=(*first.params, top), then=last)


def matmul_in_parts(m: int, n: int, k: int, parts: int) -> Kernel:
    """relu(a · bᵀ), as products of parts of the sum and, tile by tile, their sum"""
    step = k // parts
    x, w = load("a", k * i + step * b + r, F16), load("b", k * j + step * b + r, F16)
    dot = Fold("acc", "dot", (x, w), (r,), F32, (i,), (j,))
    params = (
        *(param("a", F16, m, k), param("b", F16, n, k)),
        *(param("made", F32, parts, m, n, written=True), param("out", F16, m, n, written=True)),
    )
    axes = {i: (m, GRID), j: (n, GRID), b: (parts, GRID), r: (step, LOOP)}
    first = kernel("product", params, axes, Loop((r,), (dot,)), Store("made", m * n * b + n * i + j, dot.ref))
    whole: Expr = load("made", n * i + j)
    for number in range(1, parts):
        whole = op("add", whole, load("made", m * n * number + n * i + j))
    store = Store("out", n * i + j, Cast(op("maximum", whole, const(0.0, F32)), F16))
    last = kernel("whole", params[2:], {i: (m, GRID), j: (n, GRID)}, store)
    return replace(first, then=last)


def transposed(batch: int, m: int, n: int, k: int, *, back: bool = False, flat: bool = True) -> Kernel:
    """c + x[b]ᵀ · wᵀ + bias, of matrices x[b] [k, m]; the result is [b, m, n], or `back` [b, n, m], as c is.

    `flat`: its rows are the rows of all matrices, one axis.
    """
    rows, size = (i, batch * m) if flat else (m * b + i, m)
    matrix, row = (FloorDiv(i, sympy.Integer(m)), Mod(i, sympy.Integer(m))) if flat else (b, i)
    x, w = load("x", k * m * matrix + m * r + row, torch.bfloat16), load("w", k * j + r, torch.bfloat16)
    dot = Fold("acc", "dot", (x, w), (r,), F32, (i,) if flat else (b, i), (j,))
    place = n * m * matrix + m * j + row if back else n * rows + j
    value = op(
        "add",
        op("add", dot.ref, Cast(load("c", place, torch.bfloat16), F32)),
        Cast(load("bias", j, torch.bfloat16), F32),
    )
    shape = (batch, n, m) if back else (batch, m, n)
    params = (
        param("x", torch.bfloat16, batch, k, m),
        param("w", torch.bfloat16, n, k),
        param("bias", torch.bfloat16, n),
        param("c", torch.bfloat16, *shape),
    )
    axes = {**({} if flat else {b: (batch, GRID)}), i: (size, GRID), j: (n, GRID), r: (k, LOOP)}
    body = Loop((r,), (dot,)), Store("out", place, Cast(value, torch.bfloat16))
    return kernel("transposed", (*params, param("out", torch.bfloat16, *shape, written=True)), axes, *body)
