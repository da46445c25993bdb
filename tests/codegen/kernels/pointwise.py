"""Kernels that compute each element alone: arithmetic, casts, views, gathers, random numbers."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.expr import Cast, IndexValue, Random, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Kernel, Store
from fusion.lowering.ir.scalar_ops import SCALAR_OPS
from tests.codegen.kernels.making import BF16, BOOL, F32, F64, GRID, I64, b, i, j, kernel, load, param


def add(n: int | sympy.Expr, dtype: torch.dtype = F32) -> Kernel:
    """out = x + y"""
    value = op("add", load("x", i, dtype), load("y", i, dtype))
    params = (param("x", dtype, n), param("y", dtype, n), param("out", dtype, n, written=True))
    return kernel("add", params, {i: (n, GRID)}, Store("out", i, value))


def scalar(name: str, dtype: torch.dtype, n: int) -> Kernel:
    """out = op(x, y, …) with scalar operation `name`"""
    arity = SCALAR_OPS[name].arity
    dtypes = [BOOL, dtype, dtype] if name == "where" else [dtype] * arity
    args = [load(f"x{k}", i, d) for k, d in enumerate(dtypes)]
    value = op(name, *args)
    params = [param(f"x{k}", d, n) for k, d in enumerate(dtypes)]
    return kernel(
        f"op_{name}", [*params, param("out", value.dtype, n, written=True)], {i: (n, GRID)}, Store("out", i, value)
    )


def convert(source: torch.dtype, target: torch.dtype, n: int) -> Kernel:
    """out = x converted"""
    params = (param("x", source, n), param("out", target, n, written=True))
    return kernel("convert", params, {i: (n, GRID)}, Store("out", i, Cast(load("x", i, source), target)))


def by_numbers(n: int) -> Kernel:
    """out = x * a + (b if flag else 0), with numbers of the host, a in double"""
    flag = load("flag", 0, BOOL)
    value = op("add", op("mul", load("x", i), Cast(load("a", 0, F64), F32)), Cast(load("b", 0, BF16, flag), F32))
    numbers = [replace(param(name, dtype), number=True) for name, dtype in (("a", F64), ("b", BF16), ("flag", BOOL))]
    params = [*numbers, param("x", F32, n), param("out", F32, n, written=True)]
    return kernel("by_numbers", params, {i: (n, GRID)}, Store("out", i, value))


def bias_gelu(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    """A row is added to each row, then a tanh GELU: one row broadcast, shared sub-expressions, 16-bit storage"""
    x = op("add", Cast(load("x", columns * i + j, dtype), F32), Cast(load("bias", j, dtype), F32))
    cube = op("mul", op("mul", x, x), x)
    inner = op("mul", op("add", x, op("mul", cube, const(0.044715, F32))), const(0.7978845608, F32))
    value = op("mul", op("mul", x, const(0.5, F32)), op("add", op("tanh", inner), const(1.0, F32)))
    params = (param("x", dtype, rows, columns), param("bias", dtype, columns))
    params = (*params, param("out", dtype, rows, columns, written=True))
    axes = {i: (rows, GRID), j: (columns, GRID)}
    return kernel("bias_gelu", params, axes, Store("out", columns * i + j, Cast(value, dtype)))


def normalised(rows: int | sympy.Expr, columns: int | sympy.Expr, dtype: torch.dtype) -> Kernel:
    """exp(x - top) / total: two numbers per row"""
    x = op("sub", Cast(load("x", columns * i + j, dtype), F32), load("top", i))
    value = Cast(op("truediv", op("exp", x), load("total", i)), dtype)
    params = (param("x", dtype, rows, columns), param("top", F32, rows), param("total", F32, rows))
    params = (*params, param("out", dtype, rows, columns, written=True))
    return kernel("normalised", params, {i: (rows, GRID), j: (columns, GRID)}, Store("out", columns * i + j, value))


def transposed_add(rows: int, columns: int) -> Kernel:
    """out = x + yᵀ"""
    value = op("add", load("x", columns * i + j), load("y", rows * j + i))
    params = (
        param("x", F32, rows, columns),
        param("y", F32, columns, rows),
        param("out", F32, rows, columns, written=True),
    )
    axes = {i: (rows, GRID), j: (columns, GRID)}
    return kernel("transposed_add", params, axes, Store("out", columns * i + j, value))


def permuted(heads: int, length: int, width: int) -> Kernel:
    """[length, heads, width] → [heads, length, width]: digits of a linear index"""
    value = load("x", heads * width * j + width * i + b)
    params = (param("x", F32, length, heads, width), param("out", F32, heads, length, width, written=True))
    axes = {i: (heads, GRID), j: (length, GRID), b: (width, GRID)}
    return kernel("permuted", params, axes, Store("out", length * width * i + width * j + b, value))


def subsampled(channels: int, side: int) -> Kernel:
    """[2 side, 2 side, channels] → [channels, side, side], every second pixel: rows shorter than a tile"""
    value = load("x", 4 * side * channels * j + 2 * channels * b + i)
    params = (param("x", F32, 2 * side, 2 * side, channels), param("out", F32, channels, side, side, written=True))
    axes = {i: (channels, GRID), j: (side, GRID), b: (side, GRID)}
    return kernel("subsampled", params, axes, Store("out", side * side * i + side * j + b, value))


def padded(n: int, before: int, after: int) -> Kernel:
    """x with zeros before and after: a masked load"""
    position = IndexValue(i - before)
    inside = op("and", op("ge", position, const(0, I64)), op("lt", position, const(n, I64)))
    value = op("add", load("x", i - before, F32, inside), const(1.0, F32))
    total = n + before + after
    return kernel(
        "padded",
        (param("x", F32, n), param("out", F32, total, written=True)),
        {i: (total, GRID)},
        Store("out", i, value),
    )


def gather(rows: int, width: int) -> Kernel:
    """out[i] = table[ids[i]]"""
    row = op("mul", load("ids", i, I64), const(width, I64))
    value = load("table", op("add", row, IndexValue(j)))
    params = (param("ids", I64, rows), param("table", F32, 4, width), param("out", F32, rows, width, written=True))
    axes = {i: (rows, GRID), j: (width, GRID)}
    return kernel("gather", params, axes, Store("out", width * i + j, value))


def sampled(rows: int, n: int, columns: int, step: int, dtype: torch.dtype = F32) -> Kernel:
    """out[i, j] = x[i, ((j + 3) * step / 4) mod n]: positions that vary along the columns alone"""
    place = Mod(FloorDiv((j + 3) * step, 4), n)
    return kernel(
        "sampled",
        (param("x", dtype, rows, n), param("out", dtype, rows, columns, written=True)),
        {i: (rows, GRID), j: (columns, GRID)},
        Store("out", columns * i + j, load("x", n * i + place, dtype)),
    )


def flipped(n: int) -> Kernel:
    """out[n - 1 - i] = x[i]: a store at computed positions"""
    position = op("sub", const(n - 1, I64), IndexValue(i))
    return kernel(
        "flipped",
        (param("x", F32, n), param("out", F32, n, written=True)),
        {i: (n, GRID)},
        Store("out", position, load("x", i)),
    )


def causal(n: int) -> Kernel:
    """x where the column is not after the row, else -inf: positions are compared in int32"""
    visible = op("le", IndexValue(j), IndexValue(i))
    value = op("where", visible, load("x", n * i + j), const(float("-inf"), F32))
    params = (param("x", F32, n, n), param("out", F32, n, n, written=True))
    return kernel("causal", params, {i: (n, GRID), j: (n, GRID)}, Store("out", n * i + j, value))


def drawn(n: int, kind: str, first: int = 5) -> Kernel:
    """Random numbers from a seed in memory, at counters from `first` on"""
    value = Random(kind, load("seed", 0, I64), i + first)
    return kernel(
        "drawn", (param("seed", I64), param("out", F32, n, written=True)), {i: (n, GRID)}, Store("out", i, value)
    )


def in_place(n: int) -> Kernel:
    """x = x + y, then out = the new x"""
    params = (param("x", F32, n, written=True), param("y", F32, n), param("out", F32, n, written=True))
    first = Store("x", i, op("add", load("x", i), load("y", i)))
    return kernel("in_place", params, {i: (n, GRID)}, first, Store("out", i, op("mul", load("x", i), const(2.0, F32))))
