"""Folds in C: every operation in every dtype, ties, NaN, several axes."""

from __future__ import annotations

import pytest
import sympy
import torch

from fusion.lowering.indexing import Mod
from fusion.lowering.ir.expr import Cast, IndexValue, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Loop, Store
from tests.codegen.c.kernels import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    I64,
    INTEGERS,
    LOOP,
    REDUCED,
    WHOLE,
    ZERO,
    assert_close_to_exact,
    axis,
    i0,
    i1,
    i2,
    in_loops,
    r0,
    r1,
    run,
    sample,
)
from tests.codegen.kernels.making import load

s0 = sympy.Symbol("s0", integer=True, positive=True)

# Folds ---------------------------------------------------------------------------------------------------


FOLDS = {
    "sum": lambda t, d: t.sum(d),
    "prod": lambda t, d: t.prod(d),
    "max": lambda t, d: t.amax(d),
    "min": lambda t, d: t.amin(d),
    "any": lambda t, d: t.any(d),
    "all": lambda t, d: t.all(d),
}


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize(
    ("across", "length"),
    [(True, 70), (True, 64), (True, 300), (False, 70)],
    ids=["across", "across_few_shares", "across_shares_and_a_rest", "per_lane"],
)
def test_every_fold_in_every_dtype(name, across, length):
    rows, columns, index = (20, length, length * i0 + r0) if across else (length, 20, length * r0 + i0)
    inputs, outputs, folds, stores = {}, {}, [], []
    for dtype in (torch.bool,) if name in ("any", "all") else (*FLOATS, *INTEGERS):
        word = str(dtype).split(".")[1]
        inputs[f"x_{word}"], outputs[word] = sample((20, length), dtype), torch.empty(rows, dtype=dtype)
        folds.append(Fold(f"fold_{word}", name, (load(f"x_{word}", index, dtype),), (r0,), dtype))
        stores.append(Store(word, i0, folds[-1].ref))
    run(inputs, outputs, [axis(i0, rows), axis(r0, columns, WHOLE)], *folds, *stores)
    for word, out in outputs.items():
        x = inputs[f"x_{word}"]
        wide = x.float() if x.dtype in (BF16, F16) else x  # eager rounds every step of a product
        expected = FOLDS[name](wide, 1 if across else 0).to(x.dtype)
        rtol = {F16: 1e-3, BF16: 1e-2}.get(x.dtype, 1e-5)
        torch.testing.assert_close(out, expected, rtol=rtol if x.dtype.is_floating_point else 0, atol=0)


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("across", [True, False], ids=["across", "per_lane"])
@pytest.mark.parametrize("columns", [50, 300])
def test_max_and_min_give_nan_if_there_is_one(name, across, columns):
    x = torch.randn(9, columns) * torch.tensor(torch.inf).reciprocal().add(1)
    x[3, 17] = torch.nan
    x[5] = torch.inf if name == "min" else -torch.inf
    x[6, 0] = x[7, columns - 1] = torch.nan
    index = columns * i0 + r0
    data = x if across else x.T.contiguous()
    out = torch.empty(9)
    fold = Fold("fold", name, (load("x", index if across else 9 * r0 + i0),), (r0,), F32)
    run({"x": data}, {"out": out}, [axis(i0, 9), axis(r0, columns, WHOLE)], fold, Store("out", i0, fold.ref))
    torch.testing.assert_close(out, FOLDS[name](x, 1), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("columns", "shares"), [(64, "l < 32"), (200, "reduction(+:total)"), (1024, "l < 64"), (1000, "l < 1000 - r0_")]
)
def test_sums_of_rows_have_shares_in_several_registers(columns, shares):
    """One register would wait for each addition; with whole numbers of lanes per step, compilers unroll the others."""
    x, out = torch.randint(-9, 9, (5, columns)).float(), torch.empty(5)
    total = Fold("total", "sum", (load("x", columns * i0 + r0),), (r0,), F32)
    source = run({"x": x}, {"out": out}, [axis(i0, 5), axis(r0, columns, WHOLE)], total, Store("out", i0, total.ref))
    assert torch.equal(out, x.sum(1))
    assert shares in source


def test_several_sums_of_rows_share_the_registers():
    x, outs = torch.randint(-9, 9, (5, 512)).float(), {name: torch.empty(5) for name in ("sums", "squares")}
    row = load("x", 512 * i0 + r0)
    folds = [Fold("first", "sum", (row,), (r0,), F32), Fold("second", "sum", (op("mul", row, row),), (r0,), F32)]
    stores = [Store(name, i0, fold.ref) for name, fold in zip(outs, folds, strict=True)]
    source = run({"x": x}, outs, [axis(i0, 5), axis(r0, 512, WHOLE)], *folds, *stores)
    assert torch.equal(outs["sums"], x.sum(1)) and torch.equal(outs["squares"], x.square().sum(1))
    assert "l < 32" in source and "l < 64" not in source


@pytest.mark.parametrize("columns", [1024, 1025, 5000, 100_000])
def test_long_rows_are_added_up_in_chunks(columns):
    x, out = torch.rand(3, columns), torch.empty(3)
    total = Fold("total", "sum", (load("x", columns * i0 + r0),), (r0,), F32)
    source = run({"x": x}, {"out": out}, [axis(i0, 3), axis(r0, columns, WHOLE)], total, Store("out", i0, total.ref))
    assert_close_to_exact(out, x.sum(1), x.double().sum(1))
    assert ("double total_total" in source) is (columns > 1024)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("across", [True, False], ids=["across", "per_lane"])
def test_argmax_takes_nan_then_the_lowest_index(name, across):
    index = 200 * i0 + r0 if across else 30 * r0 + i0
    inputs, outputs, expected, folds, stores = {}, {}, {}, [], []
    for dtype in (*FLOATS, *INTEGERS):
        x = torch.randint(0, 5, (30, 200)).to(dtype)
        if dtype.is_floating_point:
            x[4, 100] = x[4, 150] = x[7, 0] = x[8, 199] = torch.nan
            x[9] = -torch.inf
            x[10] = torch.inf
        word = str(dtype).split(".")[1]
        inputs[f"x_{word}"] = x if across else x.T.contiguous()
        outputs[word], expected[word] = torch.empty(30, dtype=I64), getattr(torch, name)(x, 1)
        folds.append(Fold(f"fold_{word}", name, (load(f"x_{word}", index, dtype), IndexValue(r0)), (r0,), I64))
        stores.append(Store(word, i0, folds[-1].ref))
    run(inputs, outputs, [axis(i0, 30), axis(r0, 200, WHOLE)], *folds, *stores)
    for word, out in outputs.items():
        assert torch.equal(out, expected[word]), word


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("stored", FLOATS)
def test_sums_of_selections_in_a_loop_that_also_stores(dtype, stored):
    """With lanes of several widths, GCC must not branch on a selection: it would sum only the first vector of lanes."""
    x = torch.randn(9, 517, dtype=dtype)
    total, out = torch.empty(9, dtype=dtype), torch.empty(9, 517, dtype=stored)
    read, zero, one = load("x", 517 * i0 + r0, dtype), const(0.0, dtype), const(1.0, dtype)
    cube = op("mul", op("mul", read, read), read)
    chosen = op("where", op("lt", read, const(-1.0, dtype)), zero, cube)
    chosen = op("where", op("isnan", read), zero, op("where", op("gt", read, one), one, chosen))
    fold = Fold("total", "sum", (chosen,), (r0,), dtype)
    shown = chosen if stored is dtype else Cast(chosen, stored)
    loop = Loop((r0,), (fold, Store("out", 517 * i0 + r0, shown)))
    axes = [axis(i0, 9), axis(r0, 517, LOOP)]
    run({"x": x}, {"total": total, "out": out}, axes, loop, Store("total", i0, fold.ref))
    expected = torch.where(x > 1, 1, torch.where(x < -1, 0, x * x * x))
    torch.testing.assert_close(total, expected.sum(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out, expected.to(stored))


@REDUCED
def test_folds_over_several_axes(role):
    x = torch.randn(4, 6, 5, 9)
    out, largest = torch.empty(6), torch.empty(6)
    index = 270 * r0 + 45 * i0 + r1
    total = Fold("total", "sum", (load("x", index),), (r0, r1), F32)
    high = Fold("high", "max", (load("x", index),), (r0, r1), F32)
    stores = Store("out", i0, total.ref), Store("largest", i0, high.ref)
    axes = [axis(i0, 6), axis(r0, 4, role), axis(r1, 45, role)]
    run({"x": x}, {"out": out, "largest": largest}, axes, *in_loops(role, (r0, r1), [total, high]), *stores)
    torch.testing.assert_close(out, x.sum((0, 2, 3)))
    assert torch.equal(largest, x.amax((0, 2, 3)))


def test_a_fold_may_keep_a_whole_axis():
    """Squeeze and excite: a mean over the picture, then a softmax over the channels."""
    x = torch.randn(3, 8, 50)
    out = torch.empty(3, 8)
    channels, places = r0, r1
    mean = Fold("mean", "sum", (load("x", 400 * i0 + 50 * channels + places),), (places,), F32)
    e = op("exp", mean.ref)
    s = Fold("s", "sum", (e,), (channels,), F32)
    store = Store("out", 8 * i0 + channels, op("truediv", e, s.ref))
    run({"x": x}, {"out": out}, [axis(i0, 3), axis(r0, 8, WHOLE), axis(r1, 50, WHOLE)], mean, s, store)
    torch.testing.assert_close(out, x.sum(2).softmax(1))
    channels_last = x.transpose(1, 2).contiguous()
    out.zero_()
    mean = Fold("mean", "sum", (load("x", 400 * i0 + channels + 8 * places),), (places,), F32)
    e = op("exp", mean.ref)
    s = Fold("s", "sum", (e,), (channels,), F32)
    store = Store("out", 8 * i0 + channels, op("truediv", e, s.ref))
    run({"x": channels_last}, {"out": out}, [axis(i0, 3), axis(r0, 8, WHOLE), axis(r1, 50, WHOLE)], mean, s, store)
    torch.testing.assert_close(out, x.sum(2).softmax(1))


def test_sums_of_rows_whose_length_is_a_remainder():
    size, width = Mod(s0, 5), 3
    x, out = torch.randn(4, 40, 6, width), torch.empty(4, 6, width)
    fold = Fold("total", "sum", (load("x", 240 * size * i0 + 6 * size * r0 + size * i1 + i2),), (r0,), F32)
    axes = [axis(i0, 4), axis(i1, 6, WHOLE), axis(i2, size, WHOLE), axis(r0, 40, LOOP)]
    run({"x": x}, {"out": out}, axes, fold, Store("out", 6 * size * i0 + size * i1 + i2, fold.ref), sizes={s0: 13})
    torch.testing.assert_close(out, x.sum(1))


def test_dot_is_a_sum_of_products():
    a, b = torch.randn(17, 40), torch.randn(40, 23)
    out = torch.empty(17, 23)
    dot = Fold("dot", "dot", (load("a", 40 * i0 + r0), load("b", 23 * r0 + i1)), (r0,), F32, (i0,), (i1,))
    axes = [axis(i0, 17), axis(i1, 23), axis(r0, 40, LOOP)]
    run({"a": a, "b": b}, {"out": out}, axes, Loop((r0,), (dot,)), Store("out", 23 * i0 + i1, dot.ref))
    torch.testing.assert_close(out, a @ b)


def test_a_full_reduction_has_no_grid():
    x = torch.randn(100_000)
    out = torch.empty(())
    total = Fold("total", "sum", (load("x", r0),), (r0,), F32)
    run(
        {"x": x},
        {"out": out},
        [axis(r0, 100_000, LOOP)],
        Loop((r0,), (total,)),
        Store("out", ZERO, total.ref),
    )
    assert_close_to_exact(out, x.sum(), x.double().sum())


# Element-wise work ---------------------------------------------------------------------------------------------------


def test_a_reduced_axis_of_size_zero_gives_the_identity():
    out, low = torch.ones(5), torch.ones(5)
    total = Fold("total", "sum", (load("x", r0),), (r0,), F32)
    high = Fold("high", "max", (load("x", r0),), (r0,), F32)
    stores = Store("out", i0, total.ref), Store("low", i0, high.ref)
    run({"x": torch.empty(0)}, {"out": out, "low": low}, [axis(i0, 5), axis(r0, 0, WHOLE)], total, high, *stores)
    assert torch.equal(out, torch.zeros(5))
    assert torch.equal(low, torch.full((5,), -torch.inf))


@pytest.mark.parametrize("dtype", [F32, F64, BF16, torch.int32])
@pytest.mark.parametrize("rows", [9, 300])
def test_few_lanes_are_added_up_once(dtype, rows):
    """Lanes of contiguous groups of channels are summed once: a sum of four lanes per row took nine times as long."""
    x, out = sample((6, rows, 5, 4), dtype), torch.empty((6, 5), dtype=torch.float32 if dtype is BF16 else dtype)
    row = load("x", 20 * rows * i0 + 20 * r0 + 4 * i1 + r1, dtype)
    fold = Fold("fold", "sum", (Cast(row, F32) if dtype is BF16 else row,), (r0, r1), out.dtype)
    axes = [axis(i0, 6), axis(i1, 5), axis(r0, rows, WHOLE), axis(r1, 4, WHOLE)]
    source = run({"x": x}, {"out": out}, axes, fold, Store("out", 5 * i0 + i1, fold.ref))
    assert "reduction" not in source
    torch.testing.assert_close(out.double(), x.double().sum((1, 3)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("few", [2, 3, 4])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("rows", [3, 70])
def test_lanes_along_groups_of_few(name, few, kept, rows):
    """The loop over a group's elements is inside the lanes if it is reduced, and outside if it is kept."""
    dtype = torch.bool if name in ("any", "all") else F32
    x = torch.rand(3, rows, 17, few) > 0.02 if dtype is torch.bool else torch.randn(3, rows, 17, few)
    row = load("x", 17 * few * (rows * i0 + r0) + few * i1 + (i2 if kept else r1), dtype)
    fold = Fold("fold", name, (row,), (r0,) if kept else (r0, r1), dtype)
    out = torch.empty((3, 17, few) if kept else (3, 17), dtype=dtype)
    axes = [axis(i0, 3), axis(i1, 17), axis(i2, few) if kept else axis(r1, few, WHOLE), axis(r0, rows, WHOLE)]
    place = few * (17 * i0 + i1) + i2 if kept else 17 * i0 + i1
    source = run({"x": x}, {"out": out}, axes, fold, Store("out", place, fold.ref))
    assert "#pragma omp simd\n" in source and "for (int64_t i1 = 0; i1 < 17; i1++) fold" in source
    want = FOLDS[name](x, 1) if kept else FOLDS[name](x.mT.reshape(3, -1, 17), 1)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
