"""The C target: rows, folds and element-wise kernels, compiled, run and compared with eager."""

from __future__ import annotations

import pytest
import sympy
import torch

from codegen.c.indices import index_text
from lowering.errors import BuildError
from lowering.expr import Expr, IndexValue, const
from lowering.indexing import FloorDiv, Mod
from lowering.kernel import Fold, Kernel, Loop, Param, Role, Stmt, Store
from tests.codegen.c_kernels import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    I64,
    INTEGERS,
    LOOP,
    REDUCED,
    TARGET,
    WHOLE,
    ZERO,
    assert_close_to_exact,
    axis,
    i0,
    i1,
    i2,
    kernel,
    load,
    op,
    param,
    r0,
    r1,
    run,
    sample,
    walked,
)
from tests.codegen.kernels.making import expected, tensors
from tests.codegen.kernels.rows import scattered

# Updates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64, *INTEGERS])
@pytest.mark.parametrize("name", ["store", "sum", "prod", "max", "min"])
def test_sources_that_meet_are_taken_in_their_order(name, dtype):
    """As the evaluator, which takes them one after the other too."""
    kernel = scattered(name, 60, 5, 300, dtype, LOOP)
    given = tensors(kernel)
    if dtype.is_floating_point:
        given[0][::20, 1] = torch.nan
    want = expected(kernel, given)
    TARGET.build(kernel, TARGET.emit(kernel))(*given)
    torch.testing.assert_close(given[2], want[2], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_narrow_floats_are_not_summed_up_in_memory():
    with pytest.raises(BuildError, match="joined in 32 bits"):
        TARGET.emit(scattered("sum", 60, 5, 300, BF16, LOOP))


# Rows ---------------------------------------------------------------------------------------------------


def softmax_body(role: Role, index: sympy.Expr) -> tuple[Stmt, ...]:
    x = load("x", index)
    m = Fold("m", "max", (x,), (r0,), F32)
    e = op("exp", op("sub", x, m.ref))
    s = Fold("s", "sum", (e,), (r0,), F32)
    return walked(role, (r0,), [m], [s], [Store("out", index, op("truediv", e, s.ref))])


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
    """It shares a walk with one that is not, so it is accumulated per lane, and is read inside the lanes."""
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
    assert "__builtin_free(kept0);" in source


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
    made = kernel({"x": x}, {"out": x}, [axis(i0, 64), axis(r0, 1024, WHOLE)], *softmax_body(WHOLE, 1024 * i0 + r0))
    source = TARGET.emit(made)
    assert source.count("exp_float(x[") == 1
    ((suffix, text),) = TARGET.stages(made, source)
    assert suffix == "s"
    assert isinstance(text, str)
    assert "vrndscaleps" in text or "vroundps" in text or "frintn" in text  # the exponential's rounding, of a vector


def norm_body(role: Role, n: int, row: sympy.Expr, weight: sympy.Expr) -> tuple[Stmt, ...]:
    x, w, b = load("x", row), load("w", weight), load("b", weight)
    scale = const(1 / n, F32)
    total = Fold("total", "sum", (x,), (r0,), F32)
    centred = op("sub", x, op("mul", total.ref, scale))
    square = Fold("square", "sum", (op("mul", centred, centred),), (r0,), F32)
    rstd = op("rsqrt", op("add", op("mul", square.ref, scale), const(1e-5, F32)))
    result = op("add", op("mul", op("mul", centred, rstd), w), b)
    return walked(role, (r0,), [total], [square], [Store("out", row, result)])


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
@pytest.mark.parametrize("across", [True, False], ids=["across", "per_lane"])
def test_every_fold_in_every_dtype(name, across):
    rows, columns, index = (20, 70, 70 * i0 + r0) if across else (70, 20, 70 * r0 + i0)
    inputs, outputs, folds, stores = {}, {}, [], []
    for dtype in (torch.bool,) if name in ("any", "all") else (*FLOATS, *INTEGERS):
        word = str(dtype).split(".")[1]
        inputs[f"x_{word}"], outputs[word] = sample((20, 70), dtype), torch.empty(rows, dtype=dtype)
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
def test_max_and_min_give_nan_if_there_is_one(name, across):
    x = torch.randn(9, 50) * torch.tensor(torch.inf).reciprocal().add(1)
    x[3, 17] = torch.nan
    x[5] = torch.inf if name == "min" else -torch.inf
    x[6, 0] = x[7, 49] = torch.nan
    index = 50 * i0 + r0 if across else 50 * r0 + i0
    data = x if across else x.T.contiguous()
    out = torch.empty(9)
    fold = Fold("fold", name, (load("x", index if across else 9 * r0 + i0),), (r0,), F32)
    run({"x": data}, {"out": out}, [axis(i0, 9), axis(r0, 50, WHOLE)], fold, Store("out", i0, fold.ref))
    torch.testing.assert_close(out, FOLDS[name](x, 1), equal_nan=True, rtol=0, atol=0)


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


@REDUCED
def test_folds_over_several_axes(role):
    x = torch.randn(4, 6, 5, 9)
    out, largest = torch.empty(6), torch.empty(6)
    index = 270 * r0 + 45 * i0 + r1
    total = Fold("total", "sum", (load("x", index),), (r0, r1), F32)
    high = Fold("high", "max", (load("x", index),), (r0, r1), F32)
    stores = Store("out", i0, total.ref), Store("largest", i0, high.ref)
    axes = [axis(i0, 6), axis(r0, 4, role), axis(r1, 45, role)]
    run({"x": x}, {"out": out, "largest": largest}, axes, *walked(role, (r0, r1), [total, high]), *stores)
    torch.testing.assert_close(out, x.sum((0, 2, 3)))
    assert torch.equal(largest, x.amax((0, 2, 3)))


def test_a_fold_may_keep_an_axis_that_is_held_whole():
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


@pytest.mark.parametrize("n", [0, 1, 7, 100_003])
def test_vector_add(n):
    x, y = torch.randn(n), torch.randn(n)
    out = torch.empty(n)
    source = run(
        {"x": x, "y": y}, {"out": out}, [axis(i0, n)], Store("out", i0, op("add", load("x", i0), load("y", i0)))
    )
    assert torch.equal(out, x + y)
    assert ("parallel" in source) == (n > 50_000)
    assert ("out[i0] = x[i0] + y[i0];" in source) == (n > 0)  # of nothing, no loop is made


def test_no_axes_at_all():
    x, out = torch.tensor(2.5), torch.empty(())
    run({"x": x}, {"out": out}, [], Store("out", ZERO, op("mul", load("x", ZERO), const(3.0, F32))))
    assert out.item() == 7.5


@pytest.mark.parametrize("shape", [(5, 9), (16, 16), (64, 100), (130, 257), (300, 512)])
@pytest.mark.parametrize("dtype", [F32, BF16, F64, torch.int8, I64, torch.bool], ids=str)
def test_transposed_add(shape, dtype):
    rows, columns = shape
    x, y = sample(shape, dtype), sample((columns, rows), dtype)
    out = torch.empty_like(x)
    here, there = columns * i0 + i1, rows * i1 + i0
    name = "xor" if dtype is torch.bool else "add"
    value = op(name, load("x", here, dtype), load("y", there, dtype))
    run({"x": x, "y": y}, {"out": out}, [axis(i0, rows), axis(i1, columns)], Store("out", here, value))
    assert torch.equal(out, x ^ y.T if dtype is torch.bool else x + y.T)


def test_transposing_copy_of_a_batch():
    x = torch.randn(5, 40, 33)
    out = torch.empty(5, 33, 40)
    value = load("x", 1320 * i0 + 33 * i2 + i1)
    source = run(
        {"x": x}, {"out": out}, [axis(i0, 5), axis(i1, 33), axis(i2, 40)], Store("out", 1320 * i0 + 40 * i1 + i2, value)
    )
    assert torch.equal(out, x.transpose(1, 2))
    assert "transpose_float(" in source


def test_concatenation_reads_only_what_is_inside():
    x, y = torch.randn(10, 3), torch.randn(10, 5)
    out = torch.empty(10, 8)
    inside = op("lt", IndexValue(i1), const(3, I64))
    left = load("x", 3 * i0 + i1, mask=inside)
    right = load("y", 5 * i0 + i1 - 3, mask=op("not", inside))
    value = op("where", inside, left, right)
    run({"x": x, "y": y}, {"out": out}, [axis(i0, 10), axis(i1, 8)], Store("out", 8 * i0 + i1, value))
    assert torch.equal(out, torch.cat([x, y], 1))


def test_a_loop_is_cut_where_a_concatenation_changes_sides():
    parts = torch.randn(10, 30), torch.randn(10, 50), torch.randn(10, 21)
    out = torch.empty(10, 105)
    first = op("lt", IndexValue(i1), const(30, I64))
    second = op("and", op("not", first), op("gt", const(80, I64), IndexValue(i1)))
    third = op("and", op("ge", IndexValue(i1), const(80, I64)), op("le", IndexValue(i1 - 2), const(98, I64)))
    value: Expr = const(7.0, F32)
    for name, inside, index in (
        ("x", first, 30 * i0 + i1),
        ("y", second, 50 * i0 + i1 - 30),
        ("z", third, 21 * i0 + i1 - 80),
    ):
        value = op("where", inside, load(name, index, mask=inside), value)
    inputs = dict(zip("xyz", parts, strict=True))
    source = run(inputs, {"out": out}, [axis(i0, 10), axis(i1, 105)], Store("out", 105 * i0 + i1, value))
    assert torch.equal(out, torch.cat([*parts, torch.full((10, 4), 7.0)], 1))
    assert "?" not in source
    assert source.count("#pragma omp simd") == 4


def test_a_masked_load_touches_no_memory_where_the_mask_is_false():
    """The mask keeps offsets far outside the tensor from being read; reading one would end the process."""
    x = torch.randn(64)
    out = torch.empty(1000)
    inside = op("lt", IndexValue(i0), const(64, I64))
    value = load("x", 1_000_003 * i0, mask=op("and", inside, op("eq", IndexValue(i0), const(0, I64))))
    run({"x": x}, {"out": out}, [axis(i0, 1000)], Store("out", i0, value))
    assert out[0] == x[0]
    assert not out[1:].any()


def test_gather_with_a_loaded_index_and_negative_indices():
    table, index = torch.randn(11, 6), torch.randint(-11, 11, (20,))
    out = torch.empty(20, 6)
    row = load("index", i0, I64)
    wrapped = op("where", op("lt", row, const(0, I64)), op("add", row, const(11, I64)), row)
    offset = op("add", op("mul", wrapped, const(6, I64)), IndexValue(i1))
    value = load("table", offset)
    run({"table": table, "index": index}, {"out": out}, [axis(i0, 20), axis(i1, 6)], Store("out", 6 * i0 + i1, value))
    assert torch.equal(out, table[index])


def test_a_store_at_a_computed_offset():
    x, order = torch.randn(500), torch.randperm(500)
    out = torch.empty(500)
    run({"x": x, "order": order}, {"out": out}, [axis(i0, 500)], Store("out", load("order", i0, I64), load("x", i0)))
    expected = torch.empty(500)
    expected[order] = x
    assert torch.equal(out, expected)


def test_index_arithmetic_with_division():
    out = torch.empty(4, 30, dtype=I64)
    value = IndexValue(FloorDiv(30 * i0 + i1, 7) * 3 + Mod(i1 + 5, 11) - 2)
    run({}, {"out": out}, [axis(i0, 4), axis(i1, 30)], Store("out", 30 * i0 + i1, value))
    a, b = torch.arange(4)[:, None], torch.arange(30)[None]
    assert torch.equal(out, (30 * a + b) // 7 * 3 + (b + 5) % 11 - 2)


def test_index_text_keeps_the_order_of_division_and_product():
    names = {i0: "i0", i1: "i1"}
    for expr in (3 * FloorDiv(i0, 4) * i1, FloorDiv(i0 * i1, 3 + i1), Mod(i0, 5) * FloorDiv(i1, 2) + i0**2 - 7):
        text = index_text(expr, names).replace("/", "//")
        for a, b in ((23, 9), (7, 0), (100, 31)):
            assert eval(text, {"i0": a, "i1": b}) == expr.xreplace({i0: sympy.Integer(a), i1: sympy.Integer(b)})


def test_a_size_given_at_the_call():
    n = sympy.Symbol("s0", integer=True, positive=True)
    x = load("x", n * i0 + r0)
    m = Fold("m", "max", (x,), (r0,), F32)
    e = op("exp", op("sub", x, m.ref))
    s = Fold("s", "sum", (e,), (r0,), F32)
    body = (m, s, Store("out", n * i0 + r0, op("truediv", e, s.ref)))
    shape = (sympy.Integer(6), n)
    params = (
        Param("x", F32, shape, (n, sympy.Integer(1)), False),
        Param("out", F32, shape, (n, sympy.Integer(1)), True),
    )
    made = Kernel("rows", params, (n,), (axis(i0, 6), axis(r0, n, WHOLE)), body)
    launch = TARGET.build(made, TARGET.emit(made))
    for columns in (1, 3, 100, 70_001):
        data = torch.randn(6, columns)
        out = torch.empty_like(data)
        launch(data, out, columns)
        torch.testing.assert_close(out, data.softmax(1))


def test_grid_sizes_given_at_the_call():
    n, k = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
    shapes = (n, k), (k, n)
    params = (
        Param("x", F32, shapes[0], (k, sympy.Integer(1)), False),
        Param("y", F32, shapes[1], (n, sympy.Integer(1)), False),
        Param("out", F32, shapes[0], (k, sympy.Integer(1)), True),
    )
    value = op("add", load("x", k * i0 + i1), load("y", n * i1 + i0))
    made = Kernel("add", params, (n, k), (axis(i0, n), axis(i1, k)), (Store("out", k * i0 + i1, value),))
    total = Fold("total", "sum", (load("x", k * r0 + i0),), (r0,), F32)
    column = Param("out", F32, (k,), (sympy.Integer(1),), True)
    body = (Loop((r0,), (total,)), Store("out", i0, total.ref))
    sums = Kernel("sums", (params[0], column), (n, k), (axis(i0, k), axis(r0, n, LOOP)), body)
    launch, launch_sums = (TARGET.build(made, TARGET.emit(made)) for made in (made, sums))
    for rows, columns in ((1, 1), (5, 40), (40, 17), (200, 300), (0, 3)):
        x, y = torch.randn(rows, columns), torch.randn(columns, rows)
        out = torch.empty(rows, columns)
        launch(x, y, out, rows, columns)
        assert torch.equal(out, x + y.T)
        out = torch.empty(columns)
        launch_sums(x, out, rows, columns)
        torch.testing.assert_close(out, x.sum(0))


def test_a_reduced_axis_of_size_zero_gives_the_identity():
    out, low = torch.ones(5), torch.ones(5)
    total = Fold("total", "sum", (load("x", r0),), (r0,), F32)
    high = Fold("high", "max", (load("x", r0),), (r0,), F32)
    stores = Store("out", i0, total.ref), Store("low", i0, high.ref)
    run({"x": torch.empty(0)}, {"out": out, "low": low}, [axis(i0, 5), axis(r0, 0, WHOLE)], total, high, *stores)
    assert torch.equal(out, torch.zeros(5))
    assert torch.equal(low, torch.full((5,), -torch.inf))


def test_a_param_that_is_read_and_written():
    x = torch.randn(1000)
    before = x.clone()
    old = load("x", i0)
    y = torch.empty(1000)
    made = Kernel(
        "update",
        (param("x", x, written=True), param("y", y, written=True)),
        (),
        (axis(i0, 1000),),
        (Store("x", i0, op("add", old, const(1.0, F32))), Store("y", i0, old)),
    )
    TARGET.build(made, TARGET.emit(made))(x, y)
    assert torch.equal(x, before + 1)
    assert torch.equal(y, before)


def test_names_that_c_has_taken():
    x, out = torch.randn(10), torch.empty(10)
    value = op("exp", load("double", i0))
    made = Kernel(
        "exp", (param("double", x), param("expf", out, written=True)), (), (axis(i0, 10),), (Store("expf", i0, value),)
    )
    TARGET.build(made, TARGET.emit(made))(x, out)
    torch.testing.assert_close(out, x.exp())


def test_ten_thousand_operations_in_a_chain():
    x, out = torch.rand(10), torch.empty(10)
    value: Expr = load("x", i0)
    for k in range(10_000):
        value = op(("add", "sub")[k % 2], value, const(1.0, F32))
    source = TARGET.emit(kernel({"x": x}, {"out": out}, [axis(i0, 10)], Store("out", i0, value)))
    assert max(map(len, source.splitlines())) < 200
