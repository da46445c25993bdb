"""Softmax and norms in C, over rows and over columns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import sympy
import torch

from fusion.codegen.c.blocked import needs_blocks
from fusion.codegen.c.plan.loop_fusion import with_held_parts
from fusion.lowering.ir.expr import const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Loop, Role, Stmt, Store
from tests.codegen.c.kernels import (
    F32,
    LOOP,
    REDUCED,
    TARGET,
    WHOLE,
    ZERO,
    assert_close_to_exact,
    axis,
    i0,
    in_loops,
    kernel,
    r0,
    r1,
    run,
)
from tests.codegen.kernels.making import BF16, F64, I8, I64, assert_same, expected, load, packed, tensors
from tests.codegen.kernels.rows import column_shift


def softmax_body(role: Role, index: sympy.Expr, written: sympy.Expr | None = None) -> tuple[Stmt, ...]:
    x = load("x", index)
    m = Fold("m", "max", (x,), (r0,), F32)
    e = op("exp", op("sub", x, m.ref))
    s = Fold("s", "sum", (e,), (r0,), F32)
    return in_loops(
        role, (r0,), [m], [s], [Store("out", index if written is None else written, op("truediv", e, s.ref))]
    )


@REDUCED
@pytest.mark.parametrize("columns", [1, 5, 16, 33, 781, 1024, 5000])
def test_softmax_of_rows(role, columns):
    x = torch.randn(37, columns)
    out = torch.empty_like(x)
    run({"x": x}, {"out": out}, [axis(i0, 37), axis(r0, columns, role)], *softmax_body(role, columns * i0 + r0))
    assert_close_to_exact(out, x.softmax(1), x.double().softmax(1))


@REDUCED
@pytest.mark.parametrize("columns", [1, 7, 64, 300])
def test_softmax_of_columns(role, columns):
    x = torch.randn(50, columns)
    out = torch.empty_like(x)
    run({"x": x}, {"out": out}, [axis(i0, columns), axis(r0, 50, role)], *softmax_body(role, columns * r0 + i0))
    assert_close_to_exact(out, x.softmax(0), x.double().softmax(0))


@pytest.mark.parametrize("dtype", [F32, F64, BF16, I8, I64], ids=str)
def test_columns_are_transposed_in_tiles(dtype):
    """Lanes along the columns would store each element by itself; a tensor that keeps its order has no tile."""
    shifted = packed("packed", *(column_shift(*shape, dtype) for shape in ((16, 16), (17, 300), (70, 33), (64, 512))))
    source = TARGET.emit(shifted)
    assert len(re.findall(r" turn_all_\w+\(out_\d_tile0", source)) == 4
    assert not re.search(r"same_\d_tile", source)
    given = tensors(shifted)
    want = expected(shifted, given)
    TARGET.build(shifted, source)(*given)
    assert_same(shifted, given, want)


def test_columns_that_change_in_place_have_no_tile():
    """What another column reads may not wait for the end of a chunk."""
    source = TARGET.emit(column_shift(40, 50))
    assert "turn_all_float(" in source
    same = column_shift(40, 50)
    body = tuple(replace(stmt, param="x") if isinstance(stmt, Store) else stmt for stmt in same.body)
    params = tuple(replace(param, written=param.name == "x") for param in same.params)
    assert "turn_all_float(" not in TARGET.emit(replace(same, params=params, body=body[:-1]))


def test_few_columns_or_rows_fill_no_tile():
    for shape in ((15, 300), (300, 15)):
        assert "turn_all_float(" not in TARGET.emit(column_shift(*shape))


@pytest.mark.parametrize("columns", [70, 300])
def test_blocks_of_columns_are_narrowed_so_that_every_thread_has_one(columns):
    x = torch.randn(2000, columns)
    out = torch.empty_like(x)
    axes = [axis(i0, columns), axis(r0, 2000, WHOLE)]
    source = run({"x": x}, {"out": out}, axes, *softmax_body(WHOLE, columns * r0 + i0))
    assert_close_to_exact(out, x.softmax(0), x.double().softmax(0))
    assert "const int64_t width = " in source


@pytest.mark.parametrize("columns", [5, 40])
def test_a_fold_that_is_the_same_for_all_lanes(columns):
    """It shares a loop with a fold that varies per lane, so it is accumulated per lane, and read inside the lanes."""
    x, y, out = torch.randn(6, columns), torch.randn(6), torch.empty(columns)
    total = Fold("total", "sum", (load("x", columns * r0 + i0),), (r0,), F32)
    most = Fold("most", "max", (load("y", r0),), (r0,), F32)
    scaled = op("mul", total.ref, op("exp", most.ref))
    axes = [axis(i0, columns), axis(r0, 6, WHOLE)]
    run({"x": x, "y": y}, {"out": out}, axes, total, most, Store("out", i0, scaled))
    assert_close_to_exact(out, x.sum(0) * y.max().exp(), x.double().sum(0) * y.double().max().exp())


def test_scratch_of_a_long_row_comes_from_the_heap():
    x = torch.randn(5, 100_000)
    out = torch.empty_like(x)
    axes = [axis(i0, 5), axis(r0, 100_000, WHOLE)]
    source = run({"x": x}, {"out": out}, axes, *softmax_body(WHOLE, 100_000 * i0 + r0))
    assert_close_to_exact(out, x.softmax(1), x.double().softmax(1))
    assert "__builtin_free(kept0_all);" in source


def test_softmax_of_a_row_that_is_masked_out_is_nan_and_nan_stays_in_its_row():
    x = torch.randn(4, 100)
    x[1] = -torch.inf
    x[2, 50] = torch.nan
    x[3, 7] = torch.inf
    out = torch.empty_like(x)
    run({"x": x}, {"out": out}, [axis(i0, 4), axis(r0, 100, WHOLE)], *softmax_body(WHOLE, 100 * i0 + r0))
    torch.testing.assert_close(out, x.softmax(1), equal_nan=True)


def test_the_exponential_of_a_softmax_is_computed_once_and_in_vectors():
    x = torch.randn(64, 1024)
    example = kernel({"x": x}, {"out": x}, [axis(i0, 64), axis(r0, 1024, WHOLE)], *softmax_body(WHOLE, 1024 * i0 + r0))
    source = TARGET.emit(example)
    assert source.count("exp_float(x[") == 1
    ((suffix, text),) = TARGET.stages(example, source)
    assert suffix == "s"
    assert isinstance(text, str)
    assert re.search(r"pslld\s|\bshl\s+v", text)  # the exponents of the results, put in their places in a vector


@REDUCED
@pytest.mark.parametrize(
    ("rows", "columns", "apart", "fetched"),
    [
        (300, 1000, 1000, True),
        (300, 1000, 1003, True),  # rows with a gap between them
        (200, 1000, 1000, False),  # less than a megabyte stays in the cache
        (300, 1000, 1, False),  # rows that overlap
        (8, 40_000, 40_000, False),  # two rows are too long for the cache
    ],
)
def test_the_second_sweep_over_a_row_fetches_the_next_one(role, rows, columns, apart, fetched):
    x = torch.randn(max(300_000, rows * apart)).as_strided((rows, columns), (apart, 1))
    out = torch.empty(rows, columns)
    body = softmax_body(role, apart * i0 + r0, columns * i0 + r0)
    source = run({"x": x}, {"out": out}, [axis(i0, rows), axis(r0, columns, role)], *body)
    assert source.count("__builtin_prefetch(x + ") == fetched
    assert_close_to_exact(out, x.softmax(1), x.double().softmax(1))


def norm_body(role: Role, n: int, row: sympy.Expr, weight: sympy.Expr) -> tuple[Stmt, ...]:
    x, w, b = load("x", row), load("w", weight), load("b", weight)
    scale = const(1 / n, F32)
    total = Fold("total", "sum", (x,), (r0,), F32)
    centred = op("sub", x, op("mul", total.ref, scale))
    square = Fold("square", "sum", (op("mul", centred, centred),), (r0,), F32)
    rstd = op("rsqrt", op("add", op("mul", square.ref, scale), const(1e-5, F32)))
    result = op("add", op("mul", op("mul", centred, rstd), w), b)
    return in_loops(role, (r0,), [total], [square], [Store("out", row, result)])


@REDUCED
@pytest.mark.parametrize("columns", [10, 512, 1031])
def test_layer_norm(role, columns):
    x, w, b = torch.randn(20, columns) + 3, torch.randn(columns), torch.randn(columns)
    out = torch.empty_like(x)
    body = norm_body(role, columns, columns * i0 + r0, r0)
    run({"x": x, "w": w, "b": b}, {"out": out}, [axis(i0, 20), axis(r0, columns, role)], *body)
    norm = torch.nn.functional.layer_norm
    exact = norm(x.double(), (columns,), w.double(), b.double())
    assert_close_to_exact(out, norm(x, (columns,), w, b), exact)


def test_norm_over_columns_computes_the_reciprocal_once_per_column():
    x, w, b = torch.randn(200, 70) + 3, torch.randn(200), torch.randn(200)
    out = torch.empty_like(x)
    body = norm_body(WHOLE, 200, 70 * r0 + i0, r0)
    source = run({"x": x, "w": w, "b": b}, {"out": out}, [axis(i0, 70), axis(r0, 200, WHOLE)], *body)
    norm = torch.nn.functional.layer_norm
    exact = norm(x.double().T, (200,), w.double(), b.double()).T
    assert_close_to_exact(out, norm(x.T, (200,), w, b).T, exact)
    sqrt = next(line for line in source.splitlines() if "sqrtf" in line)
    assert "kept" in sqrt.split("=")[0]


@pytest.mark.parametrize("shape", [(3, 100_000), (300, 4096), (7, 1023)])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_sums_are_as_accurate_as_eager(shape, shift):
    x = torch.rand(shape) - shift
    rows, columns = shape
    out = torch.empty(rows)
    total = Fold("total", "sum", (load("x", columns * i0 + r0),), (r0,), F32)
    run(
        {"x": x},
        {"out": out},
        [axis(i0, rows), axis(r0, columns, LOOP)],
        Loop((r0,), (total,)),
        Store("out", i0, total.ref),
    )
    assert_close_to_exact(out, x.sum(1), x.double().sum(1))
    out = torch.empty(columns)
    total = Fold("total", "sum", (load("x", columns * r0 + i0),), (r0,), F32)
    run(
        {"x": x},
        {"out": out},
        [axis(i0, columns), axis(r0, rows, LOOP)],
        Loop((r0,), (total,)),
        Store("out", i0, total.ref),
    )
    assert_close_to_exact(out, x.sum(0), x.double().sum(0))


@pytest.mark.parametrize("columns", [4, 2000])
def test_a_long_column_sum(columns):
    x = torch.rand(30_000 // columns * 100, columns)
    out = torch.empty(columns)
    total = Fold("total", "sum", (load("x", columns * r0 + i0),), (r0,), F32)
    axes = [axis(i0, columns), axis(r0, x.shape[0], LOOP)]
    run({"x": x}, {"out": out}, axes, Loop((r0,), (total,)), Store("out", i0, total.ref))
    assert_close_to_exact(out, x.sum(0), x.double().sum(0))


@pytest.mark.parametrize("held", [True, False], ids=["columns", "products"])
def test_rows_are_held_in_parts_only_if_the_columns_that_they_fold_are_summed(held: bool) -> None:
    """The second of two products does not keep the columns: all rows of a long loop would be kept for each result."""
    x, y = torch.randn(6, 5), torch.randn(6)
    rows = Fold("rows", "sum", (load("x", 5 * r0 + r1),), (r1,), F32)
    factor = load("x", 5 * r0 + r1) if held else load("y", r0)
    sums = Fold("sums", "sum", (op("mul", rows.ref, factor),), (r0,), F32)
    store = Store("out", r1 if held else ZERO, sums.ref)
    axes = [axis(r0, 6, LOOP), axis(r1, 5, WHOLE)]
    out = torch.empty(5 if held else 1)
    made = kernel({"x": x, "y": y}, {"out": out}, axes, Loop((r0,), (rows, sums)), store)
    assert (with_held_parts(made) is not made) is held and needs_blocks(made) is not held
    run({"x": x, "y": y}, {"out": out}, axes, Loop((r0,), (rows, sums)), store)
    torch.testing.assert_close(out, (x.sum(1, keepdim=True) * (x if held else y[:, None])).sum(0))
