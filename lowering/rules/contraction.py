"""Lowers matrix products to Contract nodes, with the bias and scale of `addmm` as pointwise work on the product.

A product with a vector is a sum of products: it is memory-bound, and has no reuse for matrix units.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder, load_of
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.registry import lowers
from fusion.lowering.rules.promotion import Argument, combine, pointwise, rounded, widen
from fusion.lowering.rules.recomputed import is_wide
from fusion.lowering.rules.reduction import fold
from fusion.lowering.value import Value, reshape

aten = torch.ops.aten


@lowers(aten.mm.default, aten.bmm.default)
def product(ctx: Builder, lhs: Value, rhs: Value) -> Value:
    """lhs [b?, m, k] · rhs [b?, k, n] → [b?, m, n]."""
    _check(lhs, rhs)
    node = ctx.current
    is_library = ctx.wanted.contractions is not None and node.name not in ctx.wanted.contractions
    if is_library and _is_small(ctx, lhs, rhs):
        return _summed(ctx, lhs, rhs)
    if lhs.dtype in HALVES and is_wide(node):
        wide = _wide_call(ctx, lhs, rhs) if is_library else ctx.contract(lhs, rhs, torch.float32)
        return rounded(wide, lhs.dtype)
    return ctx.contract(lhs, rhs, lhs.dtype)


def _is_small(ctx: Builder, lhs: Value, rhs: Value) -> bool:
    """Return whether the product has so few multiplications that a library call would take longer."""
    count = sympy.Mul(*lhs.shape, rhs.shape[-1])
    most = ctx.wanted.small.get(lhs.dtype.itemsize, 0) if lhs.dtype.is_floating_point else 0
    return bool(count.is_Integer and count <= most)


def _summed(ctx: Builder, lhs: Value, rhs: Value) -> Value:
    """A product as sums of products: lhs [b?, m, k, 1] · rhs [b?, 1, k, n], summed over k."""
    if (*rhs.shape[:-2], rhs.shape[-2]) != (*lhs.shape[:-2], lhs.shape[-1]):
        raise Unsupported(f"shapes {lhs.shape} and {rhs.shape} do not contract")
    rows = reshape(widen(lhs), (*lhs.shape, ONE))
    columns = reshape(widen(rhs), (*rhs.shape[:-2], ONE, *rhs.shape[-2:]))
    products = combine(lambda a, b: a * b, rows, columns)
    return rounded(fold(ctx, "sum", [products], [products.rank - 2]), lhs.dtype)


def _wide_call(ctx: Builder, lhs: Value, rhs: Value) -> Value:
    """Call the library's product in float32.

    One of forward and backward may generate a product that the other leaves to the library (see `recomputed`).
    """
    out = ctx.buffer(torch.float32, (*lhs.shape[:-1], rhs.shape[-1]), None, lhs.device)
    ctx.multiply_widened(out, lhs, rhs, "the other pass generates it in float32")
    return load_of(out)


def _check(lhs: Value, rhs: Value) -> None:
    if lhs.dtype is not rhs.dtype:
        raise Unsupported(f"matrix product of {lhs.dtype} and {rhs.dtype}")
    if not lhs.dtype.is_floating_point and lhs.dtype is not torch.int8:
        raise Unsupported(f"matrix product of {lhs.dtype}")


@lowers(aten._int_mm.default)
def integer_product(ctx: Builder, lhs: Value, rhs: Value) -> Value:
    """The product of int8 matrices as int32."""
    _check(lhs, rhs)
    return ctx.contract(lhs, rhs, torch.int32)


@lowers(aten.addmm.default, aten.baddbmm.default)
def product_plus(
    ctx: Builder, bias: Value, lhs: Value, rhs: Value, *, beta: Argument = 1, alpha: Argument = 1
) -> Value:
    """beta·bias + alpha·(lhs · rhs); a bias with beta = 0 is not read, so its NaNs do not matter."""
    if not lhs.dtype.is_floating_point:
        raise Unsupported(f"scaled matrix product of {lhs.dtype}")
    return _plus(bias, product(ctx, lhs, rhs), beta, alpha)


def _plus(bias: Value, result: Value, beta: Argument, alpha: Argument) -> Value:
    if alpha != 1:
        result = pointwise("mul", result, alpha)
    if beta == 0:
        return result
    scaled = bias if beta == 1 else pointwise("mul", bias, beta)
    return pointwise("add", result, scaled)


@lowers(aten.mv.default)
def matrix_vector(ctx: Builder, matrix: Value, vector: Value) -> Value:
    """matrix [m, k] · vector [k] → [m]."""
    if ctx.wanted.rounded:
        ctx.check_contraction()
    _check(matrix, vector)
    if not matrix.dtype.is_floating_point:
        raise Unsupported(f"matrix product of {matrix.dtype}")
    products = combine(lambda a, b: a * b, widen(matrix), widen(vector))
    return rounded(fold(ctx, "sum", [products], [products.rank - 1]), matrix.dtype)


@lowers(aten.addmv.default)
def matrix_vector_plus(
    ctx: Builder, bias: Value, matrix: Value, vector: Value, *, beta: Argument = 1, alpha: Argument = 1
) -> Value:
    """beta·bias + alpha·(matrix · vector)."""
    return _plus(bias, matrix_vector(ctx, matrix, vector), beta, alpha)


@lowers(aten.dot.default, aten.vdot.default)
def dot(ctx: Builder, lhs: Value, rhs: Value) -> Value:
    """Σ lhs·rhs of two vectors."""
    row = reshape(lhs, (sympy.Integer(1), *lhs.shape))
    return reshape(matrix_vector(ctx, row, rhs), ())
