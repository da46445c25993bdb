"""Folds over an outer loop in a loop inside it: the gradients of queries, keys and values in one loop nest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch

from fusion.lowering.errors import VerifyError
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Store, crossing_folds
from fusion.lowering.verify import verify_kernel
from tests.codegen.c.kernels import BF16, F16, F32, GRID, LOOP, TARGET, WHOLE
from tests.codegen.c.launches import b, check, d, e, i, s, u, w
from tests.codegen.kernels.making import kernel, load, param

ZERO = const(0.0, F32)


def gradients(
    queries: int | sympy.Symbol, keys: int | sympy.Symbol, width: int, *, dtype: torch.dtype = F32, window: int = 0
) -> Kernel:
    """The gradients of causal attention in a loop over keys around one over queries; dq is summed over the outer one.

    `window`: a query attends to that many keys, to all before it if 0.
    """
    row, column = width * (queries * b + i), width * (keys * b + s)
    seen = op("le", IndexValue(s), IndexValue(i))
    if window:
        seen = op("and", seen, op("gt", IndexValue(s + window), IndexValue(i)))
    scores = Fold("scores", "dot", (load("k", column + d, dtype), load("q", row + d, dtype)), (d,), F32, (s,), (i,))
    slope = Fold("slope", "dot", (load("v", column + e, dtype), load("dout", row + e, dtype)), (e,), F32, (s,), (i,))
    power = op("exp", op("sub", op("mul", scores.ref, const(0.3, F32)), load("lse", queries * b + i)))
    share = op("where", seen, power, ZERO)
    change = op("mul", share, op("sub", slope.ref, load("delta", queries * b + i)))
    rounded, narrow = (_narrowed(x, dtype) for x in (share, change))
    dv = Fold("dv", "dot", (rounded, load("dout", row + w, dtype)), (i,), F32, (s,), (w,))
    dk = Fold("dk", "dot", (narrow, load("q", row + u, dtype)), (i,), F32, (s,), (u,))
    dq = Fold("dq", "dot", (narrow, load("k", column + u, dtype)), (s,), F32, (i,), (u,))
    inner = Loop((i,), (scores, slope, dv, dk, dq), seen)
    outer = Loop((s,), (inner, _stored("dk", column + u, dk, dtype), _stored("dv", column + w, dv, dtype)))
    params = [param(name, dtype, 2, queries, width) for name in ("q", "dout")]
    params += [param(name, dtype, 2, keys, width) for name in ("k", "v")]
    params += [param("lse", F32, 2, queries), param("delta", F32, 2, queries)]
    params += [param(name, dtype, 2, keys, width, written=True) for name in ("dk", "dv")]
    params += [param("dq", dtype, 2, queries, width, written=True)]
    axes = {b: (2, GRID), s: (keys, LOOP), i: (queries, LOOP)} | dict.fromkeys((d, e, u, w), (width, WHOLE))
    last = Loop((i,), (_stored("dq", row + u, dq, dtype),))
    return kernel("gradients", params, axes, outer, last)


def _narrowed(value: Expr, dtype: torch.dtype) -> Expr:
    return value if dtype is F32 else Cast(value, dtype)


def _stored(name: str, offset: sympy.Expr, fold: Fold, dtype: torch.dtype) -> Store:
    return Store(name, offset, _narrowed(fold.ref, dtype))


# Numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("queries", "keys", "width"), [(1, 1, 4), (7, 400, 12), (401, 5, 64), (270, 150, 40)])
def test_rows_and_columns_are_summed_in_one_nest(queries, keys, width, dtype):
    check(gradients(queries, keys, width, dtype=dtype))


@pytest.mark.parametrize("window", [3, 70, 256])
def test_blocks_outside_a_window_are_skipped(window):
    check(gradients(701, 701, 16, window=window))


def test_sizes_that_are_known_at_the_call():
    queries, keys = (sympy.Symbol(f"s{k}", integer=True, positive=True) for k in range(2))
    for width, *sizes in ((8, 3, 5), (33, 300, 140)):
        check(gradients(queries, keys, width), sizes=tuple(sizes))


def test_a_sum_that_is_no_product():
    """The column sums of a product's exponentials are added up beside the row sums."""
    tile = Fold("tile", "dot", (load("x", 5 * s + d), load("y", 5 * i + d)), (d,), F32, (s,), (i,))
    power = op("exp", tile.ref)
    rows, columns = (Fold(name, "sum", (power,), (over,), F32) for name, over in (("rows", i), ("columns", s)))
    outer = Loop((s,), (Loop((i,), (tile, rows, columns)), Store("of_rows", s, rows.ref)))
    params = (param("x", F32, 230, 5), param("y", F32, 410, 5))
    params += (param("of_rows", F32, 230, written=True), param("of_columns", F32, 410, written=True))
    axes = {s: (230, LOOP), i: (410, LOOP), d: (5, WHOLE)}
    check(kernel("sums", params, axes, outer, Loop((i,), (Store("of_columns", i, columns.ref),))))


# Form --------------------------------------------------------------------------------------------------------------


def test_five_products_of_two_blocks():
    source = TARGET.emit(gradients(600, 600, 64))
    body = source[source.rindex("int gradients") :]
    assert body.count("multiply_float(") == 5
    assert body.count("exp_float(") == 1
    assert "aligned_alloc(64, threads*((38400*sizeof(float)" in body  # all queries of a head
    assert "#pragma omp for schedule(dynamic)" in body
    before = body[: body.index("for (int64_t i1_0 = i1_first")]
    assert before.count("pack_float(") == 1  # the keys of a block, for all queries


def test_a_thread_adds_in_the_order_of_the_loops():
    """The result does not depend on the number of threads."""
    example = gradients(400, 500, 24)
    source = TARGET.emit(example)
    assert "i0_0" not in source[source.rindex("int gradients") :]  # heads are not blocked
    first = check(example)
    second = check(example)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


# Verification ------------------------------------------------------------------------------------------------------


def test_crossing_folds_are_those_over_the_outer_loop():
    outer = gradients(20, 30, 4).body[0]
    assert isinstance(outer, Loop)
    assert [fold.name for fold in crossing_folds(outer)] == ["dq"]


def test_a_crossing_fold_has_no_value_inside_its_loop():
    example = gradients(20, 30, 4)
    outer, last = example.body
    assert isinstance(outer, Loop)
    assert isinstance(last, Loop)
    with pytest.raises(VerifyError, match="dq is named before the loop that it folds is over"):
        verify_kernel(replace(example, body=(replace(outer, body=(*outer.body, last)),)))


def test_a_crossing_fold_stands_beside_no_running_values():
    example = gradients(20, 30, 4)
    outer, last = example.body
    assert isinstance(outer, Loop)
    inner, *stores = outer.body
    assert isinstance(inner, Loop)
    top = Fold("top", "max", (load("lse", 20 * b + i),), (i,), F32)
    whole = Fold("whole", "sum", (top.ref,), (i,), F32)
    whole = replace(whole, carry=op("mul", whole.before, op("sub", top.before, top.ref)))
    running = replace(inner, body=(*inner.body, top, whole))
    with pytest.raises(VerifyError, match="a fold over an outer loop stands beside running values"):
        verify_kernel(replace(example, body=(replace(outer, body=(running, *stores)), last)))
