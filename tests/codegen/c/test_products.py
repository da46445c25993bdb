"""GEMMs in C with prologues and epilogues: other folds, row sums, running values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusion.lowering.ir.expr import Cast, IndexValue, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Store
from tests.codegen.c.kernels import BF16, F16, F32, F64, GRID, I64, LOOP, TARGET, WHOLE
from tests.codegen.c.launches import I8, check, d, e, g, i, j, s, u
from tests.codegen.kernels import products as shapes
from tests.codegen.kernels.attention import online_attention
from tests.codegen.kernels.making import kernel, load, param, tensors

# Products with prologues and epilogues --------------------------------------------------------------------------------


def log_sum_exp(rows: int, words: int, features: int, dtype: torch.dtype) -> Kernel:
    """log Σ exp(x · wᵀ + bias) in one loop over the words, each block of them a loop over the features"""
    x, weight = load("x", features * i + d, dtype), load("w", features * s + d, dtype)
    logits = Fold("logits", "dot", (x, weight), (d,), F32, (i,), (s,))
    value = op("add", logits.ref, load("bias", s))
    top = Fold("top", "max", (value,), (s,), F32)
    whole = Fold("whole", "sum", (op("exp", op("sub", value, top.ref)),), (s,), F32)
    whole = replace(whole, carry=op("mul", whole.before, op("exp", op("sub", top.before, top.ref))))
    params = (
        *(param("x", dtype, rows, features), param("w", dtype, words, features), param("bias", F32, words)),
        param("out", F32, rows, written=True),
    )
    axes = {i: (rows, GRID), s: (words, LOOP), d: (features, LOOP)}
    loop = Loop((s,), (Loop((d,), (logits,)), top, whole))
    return kernel("lse", params, axes, loop, Store("out", i, op("add", op("log", whole.ref), top.ref)))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_log_sum_exp_of_a_linear_map(dtype):
    x, w, bias, out = check(log_sum_exp(140, 1000, 300, dtype))
    torch.testing.assert_close(out, (x.float() @ w.float().T + bias).logsumexp(1), rtol=1e-5, atol=1e-4)
    check(log_sum_exp(3, 50, 7, dtype))


CONTRACTIONS = {
    "linear": shapes.linear(140, 300, 45, BF16),
    "gathered_rows": shapes.gathered_rows(9, 20, 21),
    "rms_linear": shapes.rms_linear(150, 35, 300),
    "gated": shapes.gated(20, 280, 45),
    "matmul_softmax": shapes.matmul_softmax(150, 270, 45),
    "matmul_top": shapes.matmul_top(20, 35, 45),
    "no depth": shapes.matmul(20, 35, 0, F32),
    "one row": shapes.matmul(1, 35, 45, F32),
    "one column": shapes.matmul(140, 1, 300, F32),
    **{
        f"{str(dtype)[6:]} {left:d}{right:d}": shapes.matmul(140, 33, 270, dtype, batch=2, turned=(left, right))
        for dtype in (F16, BF16, F32, F64, I8)
        for left in (False, True)
        for right in (False, True)
    },
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_a_product_with_prologue_and_epilogue(name):
    check(CONTRACTIONS[name])


def test_a_product_with_one_column_that_no_index_names():
    """w · max(a · bᵀ, 0) of one row w: the axis of the rows of w has one point, and the stored tensor lacks it."""
    rows, keys, width = 16, 64, 24
    scores = Fold("scores", "dot", (load("a", width * i + d), load("b", width * s + d)), (d,), F32, (i,), (s,))
    total = Fold("total", "dot", (op("maximum", scores.ref, const(0.0, F32)), load("w", s)), (s,), F32, (i,), (u,))
    params = param("a", F32, rows, width), param("b", F32, keys, width), param("w", F32, keys)
    axes = {i: (rows, GRID), s: (keys, LOOP), d: (width, WHOLE), u: (1, WHOLE)}
    store = Store("out", i, op("mul", total.ref, const(0.5, F32)))
    body = Loop((s,), (scores, total)), store
    a, b, w, out = check(kernel("indexed", (*params, param("out", F32, rows, written=True)), axes, *body))
    torch.testing.assert_close(out, (a @ b.T).relu() @ w * 0.5, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("role", [WHOLE, LOOP], ids=["whole", "loop"])
def test_every_fold_fused_with_a_product(role):
    """Folds over the columns of a product, and over its rows' terms."""
    m, n, k = 40, 70, 30
    dot = Fold("dot", "dot", (load("a", k * i + d), load("b", n * d + s)), (d,), F32, (i,), (s,))
    positive = op("gt", dot.ref, const(0.0, F32))
    folds = [Fold(name, name, (dot.ref,), (s,), F32) for name in ("sum", "prod", "max", "min")]
    folds += [Fold(name, name, (positive,), (s,), torch.bool) for name in ("any", "all")]
    folds += [Fold(name, name, (dot.ref, IndexValue(s)), (s,), I64) for name in ("argmax", "argmin")]
    folds.append(Fold("flag", "max", (positive,), (s,), torch.bool))
    folds.append(Fold("count", "sum", (Cast(positive, I64),), (s,), I64))
    params = [param("a", F32, m, k), param("b", F32, k, n)]
    params += [param(f"out_{fold.name}", fold.dtype, m, written=True) for fold in folds]
    stores = [Store(f"out_{fold.name}", i, fold.ref) for fold in folds]
    body = (dot, *folds) if role is WHOLE else (Loop((s,), (dot, *folds)),)
    example = kernel("folds", params, {i: (m, GRID), d: (k, WHOLE), s: (n, role)}, *body, *stores)
    a, c = torch.randn(m, k) * 0.3, torch.randn(k, n)
    a[3] = math.nan
    check(example, [a, c, *tensors(example)[2:]])


def test_a_sum_along_the_rows_of_a_product():
    """Column sums of a · b: the lanes run along the kept axis."""
    m, n, k = 300, 70, 30
    dot = Fold("dot", "dot", (load("a", k * s + d), load("b", n * d + i)), (d,), F32, (s,), (i,))
    total = Fold("total", "sum", (op("exp", dot.ref),), (s,), F32)
    params = (param("a", F32, m, k), param("b", F32, k, n), param("out", F32, n, written=True))
    axes = {i: (n, GRID), d: (k, WHOLE), s: (m, LOOP)}
    check(kernel("columns", params, axes, Loop((s,), (dot, total)), Store("out", i, total.ref)))


def test_a_product_over_two_axes():
    """A convolution as a product over channels and places, each side with two axes of its own."""
    m, n, c, p = 30, 20, 6, 9
    left, right = load("a", c * p * (2 * i + g) + p * d + e), load("b", n * (p * d + e) + j)
    for role in (WHOLE, LOOP):
        dot = Fold("dot", "dot", (left, right), (d, e), F32, (i, g), (j,))
        params = (param("a", F32, m, 2, c * p), param("b", F32, c * p, n), param("out", F32, m, 2, n, written=True))
        axes = {i: (m, GRID), g: (2, GRID), j: (n, GRID), d: (c, role), e: (p, role)}
        body = (dot,) if role is WHOLE else (Loop((d, e), (dot,)),)
        check(kernel("two_axes", params, axes, *body, Store("out", n * (2 * i + g) + j, dot.ref)))


def test_a_batch_inside_the_tile():
    """Products of every head of a row, with the heads held whole: one call per head."""
    m, heads, n, k = 40, 3, 20, 30
    left, right = load("a", heads * k * i + k * u + d), load("b", n * k * u + n * d + e)
    dot = Fold("dot", "dot", (left, right), (d,), F32, (i,), (e,))
    whole = Fold("whole", "max", (dot.ref,), (u,), F32)
    params = (param("a", F32, m, heads, k), param("b", F32, heads, k, n), param("out", F32, m, n, written=True))
    axes = {i: (m, GRID), u: (heads, WHOLE), d: (k, WHOLE), e: (n, WHOLE)}
    check(kernel("heads", params, axes, dot, whole, Store("out", n * i + e, whole.ref)))


def test_running_values_without_a_product():
    """An online softmax: its maximum and its sum in one loop."""
    n = 1000
    top = Fold("top", "max", (load("x", n * i + s),), (s,), F32)
    power = op("exp", op("sub", load("x", n * i + s), top.ref))
    whole = Fold("whole", "sum", (power,), (s,), F32)
    whole = replace(whole, carry=op("mul", whole.before, op("exp", op("sub", top.before, top.ref))))
    params = (param("x", F32, 70, n), param("out", F32, 70, n, written=True))
    store = Loop((s,), (Store("out", n * i + s, op("truediv", power, whole.ref)),))
    example = kernel("online", params, {i: (70, GRID), s: (n, LOOP)}, Loop((s,), (top, whole)), store)
    x, out = check(example)
    torch.testing.assert_close(out, x.softmax(1))


def test_running_values_over_two_axes():
    """The longer axis is looped over in blocks, the other point by point; carried values continue through both."""
    length, parts = 300, 5
    x = load("x", length * parts * i + length * u + s)
    top = Fold("top", "max", (x,), (u, s), F32)
    whole = Fold("whole", "sum", (op("exp", op("sub", x, top.ref)),), (u, s), F32)
    whole = replace(whole, carry=op("mul", whole.before, op("exp", op("sub", top.before, top.ref))))
    params = (param("x", F32, 70, parts, length), param("out", F32, 70, written=True))
    store = Store("out", i, op("add", op("log", whole.ref), top.ref))
    axes = {i: (70, GRID), u: (parts, LOOP), s: (length, LOOP)}
    x, out = check(kernel("two_axes", params, axes, Loop((u, s), (top, whole)), store))
    torch.testing.assert_close(out, x.logsumexp((1, 2)))


def test_a_fold_that_is_complete_in_each_block():
    """Rows are normalised by their own width inside a loop over others, and stored there."""
    total = Fold("total", "sum", (load("x", 2800 * i + 7 * s + d),), (d,), F32)
    share = op("truediv", load("x", 2800 * i + 7 * s + d), total.ref)
    params = (param("x", F32, 20, 400, 7), param("out", F32, 20, 400, 7, written=True))
    loop = Loop((s,), (total, Store("out", 2800 * i + 7 * s + d, share)))
    example = kernel("shares", params, {i: (20, GRID), s: (400, LOOP), d: (7, WHOLE)}, loop)
    x, out = check(example, [torch.rand(20, 400, 7) + 0.1, torch.empty(20, 400, 7)])
    torch.testing.assert_close(out, x / x.sum(-1, keepdim=True))


def test_a_fold_of_narrow_floats_that_carries():
    x = Cast(load("x", 300 * i + s, BF16), F32)
    top = Fold("top", "max", (load("x", 300 * i + s, BF16),), (s,), BF16)
    moved = op("exp", op("sub", Cast(top.before, F32), Cast(top.ref, F32)))
    whole = Fold("whole", "sum", (op("exp", op("sub", x, Cast(top.ref, F32))),), (s,), F32)
    whole = replace(whole, carry=op("mul", whole.before, moved))
    params = (param("x", BF16, 20, 300), param("out", F32, 20, written=True))
    check(
        kernel("narrow", params, {i: (20, GRID), s: (300, LOOP)}, Loop((s,), (top, whole)), Store("out", i, whole.ref))
    )


# Form -------------------------------------------------------------------------------------------------------------


def test_the_library_keeps_single_products():
    assert TARGET.efficiency(shapes.matmul(64, 64, 64, F32)) <= 0.05
    assert TARGET.efficiency(online_attention(1, 64, 64, 64, dtype=F32)) > 0.5


def test_threads_share_a_product_of_small_matrices():
    """Its operands are few, its multiplications are not."""
    assert "omp parallel" in TARGET.emit(shapes.matmul(128, 128, 128, F32))
    assert "omp parallel" not in TARGET.emit(shapes.matmul(32, 32, 32, F32))
