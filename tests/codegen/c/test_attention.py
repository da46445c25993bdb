"""Attention and its gradients in C: masks, windows, shared keys, infinities."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import sympy
import torch

from fusion.lowering.indexing import FloorDiv, axis_symbol
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Store
from tests.codegen.c.kernels import BF16, F16, F32, GRID, I64, LOOP, TARGET, WHOLE
from tests.codegen.c.launches import I32, b, check, d, e, g, i, j, s, u, w
from tests.codegen.kernels.attention import attention, online_attention
from tests.codegen.kernels.making import assert_same, expected, kernel, load, param, tensors

LOW = const(-math.inf, F32)


# Attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [12, 40, 64, 80, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_in_one_loop(width, causal):
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


@pytest.mark.parametrize(("keys", "most"), [(1024, 6e-7), (8192, 8e-7)])
def test_a_mean_over_many_keys_is_as_exact_as_sums_of_parts(keys, most):
    """In a single running sum each number is added to ever larger ones, and rounded in the same direction each time."""
    example = online_attention(1, 6, keys, 64, dtype=F32)
    query, key, value, out = tensors(example)
    same = value.select(-2, 0).clone().unsqueeze(-2)
    launch = TARGET.build(example, TARGET.emit(example))
    launch(query.zero_(), key, value.copy_(same.expand_as(value)), out)
    assert (out - same).norm() <= most * same.expand_as(out).norm()


def test_nothing_is_read_beyond_a_tensor():
    """The tensors end where their memory does: reading past them would give NaN results."""
    example = online_attention(1, 7, 9, 5, dtype=F32)
    given = tensors(example)
    room = [torch.full((tensor.numel() + 64,), math.nan) for tensor in given]
    for tensor, wide in zip(given, room, strict=True):
        wide[: tensor.numel()] = tensor.flatten()
    framed = [wide[: t.numel()].view(t.shape) for t, wide in zip(given, room, strict=True)]
    TARGET.build(example, TARGET.emit(example))(*framed)
    assert_same(example, framed, expected(example, given))
    assert all(wide[-64:].isnan().all() for wide in room)


def masked_attention(queries: int, keys: int, width: int, repeated: str = "", mask: torch.dtype = torch.bool) -> Kernel:
    """Attention under a mask in memory, of flags or of numbers to add: rows whose keys are all masked out are 0.

    In q, k and v, those named in `repeated` repeat their first row.
    """
    starts = {name: 0 if name in repeated else width * row for name, row in (("q", i), ("k", s), ("v", s))}
    query, key = load("q", starts["q"] + d), load("k", starts["k"] + d)
    scores = Fold("scores", "dot", (query, key), (d,), F32, (i,), (s,))
    masked = load("mask", keys * i + s, mask)
    flags = mask is torch.bool
    scaled = op("where", masked, scores.ref, LOW) if flags else op("add", scores.ref, Cast(masked, F32))
    top = Fold("top", "max", (scaled,), (s,), F32)
    safe = op("where", op("eq", top.ref, LOW), const(0.0, F32), top.ref)
    moved = op("where", op("eq", top.before, top.ref), const(1.0, F32), op("exp", op("sub", top.before, top.ref)))
    power = op("exp", op("sub", scaled, safe))
    whole = Fold("whole", "sum", (power,), (s,), F32)
    whole = replace(whole, carry=op("mul", whole.before, moved))
    mixed = Fold("mixed", "dot", (power, load("v", starts["v"] + e)), (s,), F32, (i,), (e,))
    mixed = replace(mixed, carry=op("mul", mixed.before, moved))
    share = op("truediv", mixed.ref, op("where", op("eq", whole.ref, const(0.0, F32)), const(1.0, F32), whole.ref))
    params = (
        *(param("q", F32, queries, width), param("k", F32, keys, width), param("v", F32, keys, width)),
        *(param("mask", mask, queries, keys), param("out", F32, queries, width, written=True)),
    )
    axes = {i: (queries, GRID), d: (width, WHOLE), e: (width, WHOLE), s: (keys, LOOP)}
    loop = Loop((s,), (scores, top, whole, mixed))
    return kernel("masked", params, axes, loop, Store("out", width * i + e, share))


def test_rows_that_see_nothing_are_zero():
    example = masked_attention(140, 300, 20)
    given = tensors(example)
    given[3][[0, 17, 139]] = False
    out = check(example, given)[-1]
    assert not out[[0, 17, 139]].any()
    assert out[1].any()


@pytest.mark.parametrize("mask", [torch.bool, torch.int8, BF16], ids=str)
def test_narrow_numbers_are_widened_before_the_lanes(mask):
    """Lanes are as many as scores fill a register, not flags: GCC computes what is left of a block one by one."""
    example = masked_attention(60, 197, 20, mask=mask)
    reads = [line for line in TARGET.emit(example).splitlines() if "mask[" in line]
    widened = [line for line in reads if re.fullmatch(r" *wide\d\[.*\] = mask\[.*\];", line)]
    assert len(reads) == 1 and len(widened) == (mask is torch.bool), reads  # not for an addition alone
    check(example)


@pytest.mark.parametrize("repeated", ["q", "k", "v", "qk", "kv", "qkv"])
def test_rows_that_are_one(repeated):
    """A product varies only along the rows or columns of its factors, and is not computed per block otherwise."""
    check(masked_attention(140, 300, 20, repeated))


def test_infinities_and_nan_stay_in_their_rows():
    example = masked_attention(140, 300, 20)
    given = tensors(example)
    given[3][:] = True
    given[0][5, 3] = math.nan
    given[0][9] = 0.0
    given[0][9, 0] = -math.inf
    out = check(example, given)[-1]
    assert out[5].isnan().all()
    assert out[9].isnan().all()
    assert not out[6:9].isnan().any()
    given[0][5, 3] = given[0][9, 0] = 1.0
    given[2][299, 2] = math.inf
    out = check(example, given)[-1]
    assert (out[:, 2] == math.inf).all()
    assert out[:, :2].isfinite().all()


def test_values_of_masked_keys_do_not_count():
    """Blocks of keys past the diagonal are skipped: their memory is not even read."""
    example = online_attention(1, 600, 600, 16, dtype=F32, causal=True)
    given = tensors(example)
    given[1][:, 400:] = math.nan
    source = TARGET.emit(example)
    assert "continue;" in source
    TARGET.build(example, source)(*given)
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
    example = kernel("band", params, axes, Loop((s,), (total,), visible), Store("out", 24 * i + e, total.ref))
    check(example)
    assert ("continue;" in TARGET.emit(example)) == (name != "not affine")


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
    example = kernel("grouped", params, {**axes, d: (width, WHOLE), e: (width, WHOLE), s: (length, LOOP)}, loop, store)
    q, k, v, out = check(example)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    torch.testing.assert_close(out.transpose(1, 2), (q @ k.mT).softmax(-1) @ v, rtol=1e-4, atol=1e-5)


def test_sizes_given_at_the_call():
    queries, keys = (sympy.Symbol(f"s{k}", integer=True, positive=True) for k in range(2))
    for width, *sizes in ((8, 3, 5), (33, 140, 300)):
        check(online_attention(2, queries, keys, width, dtype=F32, causal=True), sizes=sizes)


# Their gradients ---------------------------------------------------------------------------------------------------


def backward(queries: int, keys: int, width: int, *, dtype: torch.dtype, of_keys: bool) -> Kernel:
    """The gradients of causal attention: of keys and values in a loop over queries, or of queries in one over keys."""
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
            example = backward(length, length, width, dtype=F32, of_keys=of_keys)
            TARGET.build(example, TARGET.emit(example))(*inputs, *outputs)
    for got, want in zip((dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# Form -------------------------------------------------------------------------------------------------------------


def test_loop_invariants_are_computed_before_the_loop():
    source = TARGET.emit(backward(150, 270, 64, dtype=BF16, of_keys=True))
    body = source[source.rindex("int backward_keys") :]
    before, loop = re.split(r"for \(int64_t i1_0 = i1_first\d+; i1_0 < i1_last\d+;", body)
    assert before.count("pack_float(") == 2  # keys and values
    assert loop.count("pack_float(") == 2  # queries and their gradients
    assert loop.count("exp_float(") == 1


@pytest.mark.parametrize("length", [1000, 8448, 100_000])
def test_memory_does_not_grow_with_the_length(length):
    source = TARGET.emit(online_attention(8, length, length, 64, dtype=F32))
    counts = [int(count) for count in re.findall(r"aligned_alloc\(64, [^;\d]*(\d+)\*sizeof\(float\)", source)]
    assert len(counts) > 4
    assert 4 * sum(counts) < 1 << 19


def test_threads_share_the_blocks():
    source = TARGET.emit(online_attention(8, 600, 600, 64, dtype=F32))
    assert "#pragma omp for collapse(2)" in source
    assert "#pragma omp parallel" not in TARGET.emit(online_attention(1, 6, 8, 4, dtype=F32))
