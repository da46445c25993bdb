"""The C target: kernels with contractions and running values, against the evaluator and against eager."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import sympy
import torch

from lowering.expr import Cast, Expr, IndexValue, const
from lowering.indexing import FloorDiv, axis_symbol, over_symbol
from lowering.kernel import Fold, Kernel, Loop, Store
from lowering.verify import verify_kernel
from tests.codegen.c_kernels import BF16, F16, F32, F64, GRID, I64, LOOP, TARGET, WHOLE, load, op
from tests.codegen.kernels import products as shapes
from tests.codegen.kernels.attention import attention, online_attention
from tests.codegen.kernels.making import assert_same, expected, kernel, param, tensors

b, i, j, g = (axis_symbol(k) for k in range(4))
d, e, s, u, w = (over_symbol(k) for k in range(5))
LOW = const(-math.inf, F32)
I32, I8 = torch.int32, torch.int8


def check(made: Kernel, given: list[torch.Tensor] | None = None, sizes: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Run `made` and compare with the evaluator; returns the tensors after the launch."""
    verify_kernel(made)
    known = dict(zip(made.sizes, sizes, strict=True))
    given = tensors(made, sizes=known) if given is None else given
    source = TARGET.emit(made)
    assert source == TARGET.emit(made)
    got = [tensor.clone() for tensor in given]
    TARGET.build(made, source)(*got, *sizes)
    assert_same(made, got, expected(made, given, sizes), factor=4.0)
    return got


# Attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [12, 40, 64, 80, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_in_one_walk(width, causal):
    check(online_attention(2, 37, 50, width, dtype=F32, causal=causal))
    check(online_attention(1, 150, 301, width, dtype=F32, causal=causal))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_of_narrow_floats(dtype, causal):
    check(online_attention(2, 140, 270, 40, dtype=dtype, causal=causal))


def test_a_product_in_a_loop_of_its_own_inside_the_loop():
    check(online_attention(2, 140, 300, 300, dtype=F32, causal=True, step=16))


def test_attention_with_all_keys_held():
    check(attention(2, 150, 270, 24))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 700), (700, 1), (6, 16), (133, 257)])
def test_attention_of_few_queries_or_keys(queries, keys):
    check(online_attention(3, queries, keys, 16, dtype=F32))


def test_nothing_is_read_beyond_a_tensor():
    """The tensors end where their memory does: reading past them would find what makes results NaN."""
    made = online_attention(1, 7, 9, 5, dtype=F32)
    given = tensors(made)
    room = [torch.full((tensor.numel() + 64,), math.nan) for tensor in given]
    for tensor, wide in zip(given, room, strict=True):
        wide[: tensor.numel()] = tensor.flatten()
    framed = [wide[: t.numel()].view(t.shape) for t, wide in zip(given, room, strict=True)]
    TARGET.build(made, TARGET.emit(made))(*framed)
    assert_same(made, framed, expected(made, given))
    assert all(wide[-64:].isnan().all() for wide in room)


def masked_attention(queries: int, keys: int, width: int) -> Kernel:
    """Attention under a bool mask in memory: rows may see nothing, and are 0 then."""
    query, key = load("q", width * i + d), load("k", width * s + d)
    scores = Fold("scores", "dot", (query, key), (d,), F32, (i,), (s,))
    scaled = op("where", load("mask", keys * i + s, torch.bool), scores.ref, LOW)
    top = Fold("top", "max", (scaled,), (s,), F32)
    safe = op("where", op("eq", top.ref, LOW), const(0.0, F32), top.ref)
    moved = op("where", op("eq", top.before, top.ref), const(1.0, F32), op("exp", op("sub", top.before, top.ref)))
    power = op("exp", op("sub", scaled, safe))
    whole = Fold("whole", "sum", (power,), (s,), F32)
    whole = replace(whole, carry=op("mul", whole.before, moved))
    mixed = Fold("mixed", "dot", (power, load("v", width * s + e)), (s,), F32, (i,), (e,))
    mixed = replace(mixed, carry=op("mul", mixed.before, moved))
    share = op("truediv", mixed.ref, op("where", op("eq", whole.ref, const(0.0, F32)), const(1.0, F32), whole.ref))
    params = (
        *(param("q", F32, queries, width), param("k", F32, keys, width), param("v", F32, keys, width)),
        *(param("mask", torch.bool, queries, keys), param("out", F32, queries, width, written=True)),
    )
    axes = {i: (queries, GRID), d: (width, WHOLE), e: (width, WHOLE), s: (keys, LOOP)}
    loop = Loop((s,), (scores, top, whole, mixed))
    return kernel("masked", params, axes, loop, Store("out", width * i + e, share))


def test_rows_that_see_nothing_are_zero():
    made = masked_attention(140, 300, 20)
    given = tensors(made)
    given[3][[0, 17, 139]] = False
    out = check(made, given)[-1]
    assert not out[[0, 17, 139]].any()
    assert out[1].any()


def test_infinities_and_nan_stay_in_their_rows():
    made = masked_attention(140, 300, 20)
    given = tensors(made)
    given[3][:] = True
    given[0][5, 3] = math.nan
    given[0][9] = 0.0
    given[0][9, 0] = -math.inf
    out = check(made, given)[-1]
    assert out[5].isnan().all()
    assert out[9].isnan().all()
    assert not out[6:9].isnan().any()
    given[0][5, 3] = given[0][9, 0] = 1.0
    given[2][299, 2] = math.inf
    out = check(made, given)[-1]
    assert (out[:, 2] == math.inf).all()
    assert out[:, :2].isfinite().all()


def test_values_of_masked_keys_do_not_count():
    """Blocks of keys past the diagonal are skipped: what lies there is not even looked at."""
    made = online_attention(1, 600, 600, 16, dtype=F32, causal=True)
    given = tensors(made)
    given[1][:, 400:] = math.nan
    source = TARGET.emit(made)
    assert "continue;" in source
    TARGET.build(made, source)(*given)
    q, k, v, out = given
    first = q[:, :130] @ k[:, :130].mT * 0.5
    first = first.masked_fill(~torch.ones(130, 130, dtype=torch.bool).tril(), -math.inf)
    torch.testing.assert_close(out[:, :130], first.softmax(-1) @ v[:, :130])


WINDOWS = {
    "window": op("and", op("le", IndexValue(s), IndexValue(i)), op("gt", IndexValue(s + 90), IndexValue(i))),
    "two bands": op("or", op("lt", IndexValue(s), const(40, I64)), op("ge", IndexValue(s - i), const(0, I64))),
    "strided": op("lt", IndexValue(s), op("mul", IndexValue(i), const(2, I64))),
    "equal": op("eq", op("sub", IndexValue(i), IndexValue(s)), const(7, I64)),
    "int32": op("le", IndexValue(s, I32), Cast(IndexValue(i + 100), I32)),
    "not affine": op("eq", IndexValue(FloorDiv(s, 50)), IndexValue(FloorDiv(i, 50))),
    "never": op("lt", IndexValue(s + 5), IndexValue(s)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_skipping_blocks_changes_nothing(name):
    queries, keys = 400, 700
    visible = WINDOWS[name]
    scores = op("where", visible, load("x", keys * i + s), const(0.0, F32))
    total = Fold("total", "dot", (scores, load("y", 24 * s + e)), (s,), F32, (i,), (e,))
    params = (param("x", F32, queries, keys), param("y", F32, keys, 24), param("out", F32, queries, 24, written=True))
    axes = {i: (queries, GRID), e: (24, WHOLE), s: (keys, LOOP)}
    made = kernel("band", params, axes, Loop((s,), (total,), visible), Store("out", 24 * i + e, total.ref))
    check(made)
    assert ("continue;" in TARGET.emit(made)) == (name != "not affine")


def test_heads_side_by_side_and_shared_keys():
    """[batch, length, heads, width] in memory, several query heads per key head: any strides, and a point axis."""
    batch, length, groups, shared, width = 2, 140, 2, 3, 20
    heads, rows = groups * shared, axis_symbol(4)
    at = width * (heads * (length * b + rows) + shared * g + j)

    def held(name: str, column: sympy.Symbol) -> Expr:
        return load(name, width * (groups * (length * b + s) + g) + column)

    scores = Fold("scores", "dot", (load("q", at + d), held("k", d)), (d,), F32, (j, rows), (s,))
    top = Fold("top", "max", (scores.ref,), (s,), F32)
    power = op("exp", op("sub", scores.ref, top.ref))
    moved = op("exp", op("sub", top.before, top.ref))
    whole = Fold("whole", "sum", (power,), (s,), F32)
    whole = replace(whole, carry=op("mul", whole.before, moved))
    mixed = Fold("mixed", "dot", (power, held("v", e)), (s,), F32, (j, rows), (e,))
    mixed = replace(mixed, carry=op("mul", mixed.before, moved))
    params = (
        *(param("q", F32, batch, length, heads, width), param("k", F32, batch, length, groups, width)),
        *(param("v", F32, batch, length, groups, width), param("out", F32, batch, length, heads, width, written=True)),
    )
    axes = {b: (batch, GRID), g: (groups, GRID), j: (shared, GRID), rows: (length, GRID)}
    store = Store("out", at + e, op("truediv", mixed.ref, whole.ref))
    loop = Loop((s,), (scores, top, whole, mixed))
    made = kernel("grouped", params, {**axes, d: (width, WHOLE), e: (width, WHOLE), s: (length, LOOP)}, loop, store)
    q, k, v, out = check(made)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    torch.testing.assert_close(out.transpose(1, 2), (q @ k.mT).softmax(-1) @ v, rtol=1e-4, atol=1e-5)


def test_sizes_given_at_the_call():
    queries, keys, width = (sympy.Symbol(f"s{k}", integer=True, positive=True) for k in range(3))
    made = online_attention(2, queries, keys, width, dtype=F32, causal=True)
    for sizes in ((3, 5, 8), (140, 300, 33)):
        check(made, sizes=sizes)


# Their gradients ---------------------------------------------------------------------------------------------------


def backward(queries: int, keys: int, width: int, *, dtype: torch.dtype, of_keys: bool) -> Kernel:
    """The gradients of causal attention: of keys and values in a walk over queries, or of queries in one over keys."""
    row, column = width * (queries * b + i), width * (keys * b + s)
    seen = op("le", IndexValue(s), IndexValue(i))
    scores = Fold("scores", "dot", (load("q", row + d, dtype), load("k", column + d, dtype)), (d,), F32, (i,), (s,))
    slope = Fold("slope", "dot", (load("dout", row + e, dtype), load("v", column + e, dtype)), (e,), F32, (i,), (s,))
    power = op("exp", op("sub", op("mul", scores.ref, const(0.3, F32)), load("lse", queries * b + i)))
    share = op("where", seen, power, const(0.0, F32))
    change = op("mul", share, op("sub", slope.ref, load("delta", queries * b + i)))
    change = op("mul", change, const(0.3, F32))
    rounded, narrow = (x if dtype is F32 else Cast(x, dtype) for x in (share, change))
    inputs = [param("q", dtype, 2, queries, width), param("dout", dtype, 2, queries, width)]
    inputs += [param("k", dtype, 2, keys, width), param("v", dtype, 2, keys, width)]
    inputs += [param("lse", F32, 2, queries), param("delta", F32, 2, queries)]
    axes = {b: (2, GRID), s: (keys, GRID if of_keys else LOOP), i: (queries, LOOP if of_keys else GRID)}
    axes |= dict.fromkeys((d, e, u, w), (width, WHOLE))
    if not of_keys:
        dq = Fold("dq", "dot", (narrow, load("k", column + u, dtype)), (s,), F32, (i,), (u,))
        outputs = (param("dq", F32, 2, queries, width, written=True),)
        loop = Loop((s,), (scores, slope, dq), seen)
        return kernel("backward_queries", [*inputs, *outputs], axes, loop, Store("dq", row + u, dq.ref))
    dv = Fold("dv", "dot", (rounded, load("dout", row + w, dtype)), (i,), F32, (s,), (w,))
    dk = Fold("dk", "dot", (narrow, load("q", row + u, dtype)), (i,), F32, (s,), (u,))
    outputs = (param("dk", F32, 2, keys, width, written=True), param("dv", F32, 2, keys, width, written=True))
    stores = (Store("dk", column + u, dk.ref), Store("dv", column + w, dv.ref))
    return kernel("backward_keys", [*inputs, *outputs], axes, Loop((i,), (scores, dv, slope, dk), seen), *stores)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("width", [12, 64])
@pytest.mark.parametrize("of_keys", [True, False], ids=["keys", "queries"])
def test_gradients_of_attention(dtype, width, of_keys):
    check(backward(150, 270, width, dtype=dtype, of_keys=of_keys))


def test_gradients_agree_with_autograd():
    length, width = 150, 24
    q, k, v, dout = (torch.randn(2, length, width, generator=torch.Generator().manual_seed(n)) for n in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    scores = (q @ k.mT * 0.3).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    out = scores.softmax(-1) @ v
    wanted = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        lse, delta = scores.logsumexp(-1), (out * dout).sum(-1)
        inputs = [x.detach() for x in (q, dout, k, v, lse, delta)]
        dq, dk, dv = (torch.empty(2, length, width) for _ in range(3))
        for of_keys, outputs in ((True, (dk, dv)), (False, (dq,))):
            made = backward(length, length, width, dtype=F32, of_keys=of_keys)
            TARGET.build(made, TARGET.emit(made))(*inputs, *outputs)
    for got, want in zip((dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# Products with what stands around them --------------------------------------------------------------------------------


def log_sum_exp(rows: int, words: int, features: int, dtype: torch.dtype) -> Kernel:
    """log Σ exp(x · wᵀ + bias) in one walk over the words, each block of them a walk over the features"""
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
def test_a_product_with_what_stands_around_it(name):
    check(CONTRACTIONS[name])


@pytest.mark.parametrize("role", [WHOLE, LOOP], ids=["whole", "loop"])
def test_every_fold_beside_a_product(role):
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
    made = kernel("folds", params, {i: (m, GRID), d: (k, WHOLE), s: (n, role)}, *body, *stores)
    a, c = torch.randn(m, k) * 0.3, torch.randn(k, n)
    a[3] = math.nan
    check(made, [a, c, *tensors(made)[2:]])


def test_a_sum_along_the_rows_of_a_product():
    """Column sums of a · b: the lanes run along what is kept."""
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
    """An online softmax: its maximum and its sum in one walk."""
    n = 1000
    top = Fold("top", "max", (load("x", n * i + s),), (s,), F32)
    power = op("exp", op("sub", load("x", n * i + s), top.ref))
    whole = Fold("whole", "sum", (power,), (s,), F32)
    whole = replace(whole, carry=op("mul", whole.before, op("exp", op("sub", top.before, top.ref))))
    params = (param("x", F32, 70, n), param("out", F32, 70, n, written=True))
    store = Loop((s,), (Store("out", n * i + s, op("truediv", power, whole.ref)),))
    made = kernel("online", params, {i: (70, GRID), s: (n, LOOP)}, Loop((s,), (top, whole)), store)
    x, out = check(made)
    torch.testing.assert_close(out, x.softmax(1))


def test_running_values_over_two_axes():
    """The longer axis is walked in blocks, the other point by point; what is carried goes on through both."""
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
    """Rows are normalised by their own width inside a walk over others, and stored there."""
    total = Fold("total", "sum", (load("x", 2800 * i + 7 * s + d),), (d,), F32)
    share = op("truediv", load("x", 2800 * i + 7 * s + d), total.ref)
    params = (param("x", F32, 20, 400, 7), param("out", F32, 20, 400, 7, written=True))
    loop = Loop((s,), (total, Store("out", 2800 * i + 7 * s + d, share)))
    made = kernel("shares", params, {i: (20, GRID), s: (400, LOOP), d: (7, WHOLE)}, loop)
    x, out = check(made, [torch.rand(20, 400, 7) + 0.1, torch.empty(20, 400, 7)])
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


def test_what_a_loop_does_not_change_stands_before_it():
    source = TARGET.emit(backward(150, 270, 64, dtype=BF16, of_keys=True))
    body = source[source.rindex("void backward_keys") :]
    before, loop = body.split("for (int64_t i1_0 = 0;")
    assert before.count("pack_float(") == 2  # keys and values
    assert loop.count("pack_float(") == 2  # queries and their gradients
    assert loop.count("exp_float(") == 1


@pytest.mark.parametrize("length", [1000, 8448, 100_000])
def test_memory_does_not_grow_with_the_length(length):
    source = TARGET.emit(online_attention(8, length, length, 64, dtype=F32))
    counts = [int(count) for count in re.findall(r"aligned_alloc\(64, \((\d+)\*sizeof\(float\)", source)]
    assert len(counts) > 4
    assert 4 * sum(counts) < 1 << 19


def test_threads_share_the_blocks():
    source = TARGET.emit(online_attention(8, 600, 600, 64, dtype=F32))
    assert "#pragma omp for collapse(2)" in source
    assert "#pragma omp parallel" not in TARGET.emit(online_attention(1, 6, 8, 4, dtype=F32))


def test_the_library_keeps_single_products():
    assert TARGET.efficiency(shapes.matmul(64, 64, 64, F32)) <= 0.05
    assert TARGET.efficiency(online_attention(1, 64, 64, 64, dtype=F32)) > 0.5
