"""The C target: kernels built by hand, compiled, run and compared with eager."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import sympy
import torch

from codegen.c import CTarget
from codegen.c.build import bind_openmp
from codegen.c.indices import index_text
from codegen.cache import cache_dir, digest, publish
from lowering.errors import BuildError
from lowering.expr import Cast, Expr, Index, IndexValue, Load, Op, Random, const, make_cast
from lowering.indexing import FloorDiv, Mod, axis_symbol, over_symbol
from lowering.kernel import Fold, Kernel, KernelAxis, Loop, Param, Role, Stmt, Store
from lowering.scalar_ops import SCALAR_OPS, result_dtype

F32, F64, I64, BF16, F16 = torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16
i0, i1, i2 = (axis_symbol(k) for k in range(3))
r0, r1 = (over_symbol(k) for k in range(2))
TARGET = CTarget()
GRID, LOOP, WHOLE = Role.GRID, Role.LOOP, Role.WHOLE
REDUCED = pytest.mark.parametrize("role", [WHOLE, LOOP], ids=["whole", "loop"])


def axis(symbol: sympy.Symbol, size: int | sympy.Expr, role: Role = GRID) -> KernelAxis:
    return KernelAxis(symbol, sympy.sympify(size), role)


def load(name: str, index: Index, dtype: torch.dtype = F32, mask: Expr | None = None) -> Load:
    return Load(name, (index if isinstance(index, Expr) else sympy.sympify(index),), dtype, mask)


def op(name: str, *args: Expr) -> Op:
    return Op(name, args, result_dtype(name, args[-1].dtype))


def param(name: str, tensor: torch.Tensor, written: bool = False) -> Param:
    shape, strides = (tuple(map(sympy.Integer, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return Param(name, tensor.dtype, shape, strides, written)


def kernel(
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    axes: Sequence[KernelAxis],
    *body: Stmt,
    sizes: Sequence[sympy.Symbol] = (),
) -> Kernel:
    params = [param(name, tensor) for name, tensor in inputs.items()]
    params += [param(name, tensor, written=True) for name, tensor in outputs.items()]
    return Kernel("kernel", tuple(params), tuple(sizes), tuple(axes), body)


def run(
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    axes: Sequence[KernelAxis],
    *body: Stmt,
    sizes: dict[sympy.Symbol, int] | None = None,
) -> str:
    """Emit, build and launch; returns the source."""
    made = kernel(inputs, outputs, axes, *body, sizes=tuple(sizes or ()))
    source = TARGET.emit(made)
    assert source == TARGET.emit(made)
    TARGET.build(made, source)(*inputs.values(), *outputs.values(), *(sizes or {}).values())
    return source


def walked(role: Role, axes: tuple[sympy.Symbol, ...], *sweeps: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """The statements of each sweep, in loops if the role says so."""
    if role is WHOLE:
        return tuple(stmt for sweep in sweeps for stmt in sweep)
    return tuple(Loop(axes, tuple(sweep)) for sweep in sweeps)


def assert_close_to_exact(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from the float64 result than twice eager, and a little."""
    error, allowed = (got.double() - exact).abs(), (eager.double() - exact).abs().max() * 2 + 1e-6
    assert (error <= allowed).all(), f"error {error.max():.3g}, eager's {(allowed - 1e-6) / 2:.3g}"


# Rows --------------------------------------------------------------------------------------------------------------------


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
    made = kernel(
        {"x": x}, {"out": x}, [axis(i0, 64), axis(r0, 1024, WHOLE)], *softmax_body(WHOLE, 1024 * i0 + r0)
    )
    source = TARGET.emit(made)
    assert source.count("expf(x") == 1
    ((suffix, text),) = TARGET.stages(made, source)
    assert suffix == "s"
    assert isinstance(text, str)
    assert "_ZGV" in text  # a vector variant of expf is called


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


# Folds -------------------------------------------------------------------------------------------------------------------

FOLDS = {
    "sum": lambda t, d: t.sum(d),
    "prod": lambda t, d: t.prod(d),
    "max": lambda t, d: t.amax(d),
    "min": lambda t, d: t.amin(d),
    "any": lambda t, d: t.any(d),
    "all": lambda t, d: t.all(d),
}


def sample(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.02
    if dtype.is_floating_point:
        return (torch.randn(shape) * 0.1 + 1).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -9, 9, shape, dtype=dtype)


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("across", [True, False], ids=["across", "per_lane"])
def test_every_fold_in_every_dtype(name, across):
    floats = (F32, F64, BF16, F16)
    integers = (torch.int8, torch.int16, torch.int32, I64, torch.uint8)
    for dtype in (torch.bool,) if name in ("any", "all") else (*floats, *integers):
        x = sample((20, 70), dtype)
        rows, columns, index = (20, 70, 70 * i0 + r0) if across else (70, 20, 70 * r0 + i0)
        out = torch.empty(rows, dtype=dtype)
        fold = Fold("fold", name, (load("x", index, dtype),), (r0,), dtype)
        run({"x": x}, {"out": out}, [axis(i0, rows), axis(r0, columns, WHOLE)], fold, Store("out", i0, fold.ref))
        expected = FOLDS[name](x, 1 if across else 0).to(dtype)
        rtol = {F16: 2e-3, BF16: 2e-2}.get(dtype, 1e-5)
        torch.testing.assert_close(out, expected, rtol=rtol if dtype.is_floating_point else 0, atol=0)


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
@pytest.mark.parametrize("dtype", [F32, F64, torch.int32, I64, BF16, torch.uint8], ids=str)
def test_argmax_takes_nan_then_the_lowest_index(name, across, dtype):
    x = torch.randint(0, 5, (30, 200)).to(dtype)
    if dtype.is_floating_point:
        x[4, 100] = x[4, 150] = x[7, 0] = x[8, 199] = torch.nan
        x[9] = -torch.inf
        x[10] = torch.inf
    data = x if across else x.T.contiguous()
    out = torch.empty(30, dtype=I64)
    index = 200 * i0 + r0 if across else 30 * r0 + i0
    fold = Fold("fold", name, (load("x", index, dtype), IndexValue(r0)), (r0,), I64)
    run({"x": data}, {"out": out}, [axis(i0, 30), axis(r0, 200, WHOLE)], fold, Store("out", i0, fold.ref))
    assert torch.equal(out, getattr(torch, name)(x, 1))


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
    run({"x": x}, {"out": out}, [axis(r0, 100_000, LOOP)], Loop((r0,), (total,)), Store("out", sympy.Integer(0), total.ref))
    assert_close_to_exact(out, x.sum(), x.double().sum())


# Element-wise work -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 7, 100_003])
def test_vector_add(n):
    x, y = torch.randn(n), torch.randn(n)
    out = torch.empty(n)
    source = run({"x": x, "y": y}, {"out": out}, [axis(i0, n)], Store("out", i0, op("add", load("x", i0), load("y", i0))))
    assert torch.equal(out, x + y)
    assert ("parallel" in source) == (n > 50_000)
    assert "out[i0] = x[i0] + y[i0];" in source


def test_no_axes_at_all():
    x, out = torch.tensor(2.5), torch.empty(())
    zero = sympy.Integer(0)
    run({"x": x}, {"out": out}, [], Store("out", zero, op("mul", load("x", zero), const(3.0, F32))))
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
    source = run({"x": x}, {"out": out}, [axis(i0, 5), axis(i1, 33), axis(i2, 40)], Store("out", 1320 * i0 + 40 * i1 + i2, value))
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
    params = (Param("x", F32, shape, (n, sympy.Integer(1)), False), Param("out", F32, shape, (n, sympy.Integer(1)), True))
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
    made = Kernel("exp", (param("double", x), param("expf", out, written=True)), (), (axis(i0, 10),), (Store("expf", i0, value),))
    TARGET.build(made, TARGET.emit(made))(x, out)
    torch.testing.assert_close(out, x.exp())


def test_ten_thousand_operations_in_a_chain():
    x, out = torch.rand(10), torch.empty(10)
    value: Expr = load("x", i0)
    for k in range(10_000):
        value = op(("add", "sub")[k % 2], value, const(1.0, F32))
    source = TARGET.emit(kernel({"x": x}, {"out": out}, [axis(i0, 10)], Store("out", i0, value)))
    assert max(map(len, source.splitlines())) < 200


# Element types -----------------------------------------------------------------------------------------------------------

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.7, -3.7, 1e-8, 88.0, -90.0, 100.3, 1e30, -1e30]
SPECIAL = [torch.inf, -torch.inf, torch.nan]


def edge_values(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor([*EDGES, *SPECIAL], dtype=dtype)
    info = torch.iinfo(dtype)
    near = [0, 1, 2, 3, 7, 31, 63, 100] + ([-1, -2, -3, -7] if info.min else [])
    return torch.tensor([*near, info.max, info.max - 1, info.min, info.min + 1], dtype=dtype)


NO_INTEGERS = {"truediv", "sqrt", "rsqrt"} | {
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma"),
}
ONLY_INTEGERS = {"and", "or", "xor", "not", "shl", "shr"}
NO_BOOLS = {
    *("sub", "floordiv", "truncdiv", "remainder", "fmod", "pow", "neg", "shl", "shr"),
    *("floor", "ceil", "trunc", "round", "isnan", "isinf"),
}
TRAPS = {"floordiv", "truncdiv", "remainder", "fmod"}  # eager raises, or dies, where an integer division cannot be done


def dtypes_of(name: str) -> list[torch.dtype]:
    found = [] if name in ONLY_INTEGERS else [F32, F64, BF16, F16]
    if name not in NO_INTEGERS:
        found += [torch.int8, torch.int16, torch.int32, I64, torch.uint8]
        found += [] if name in NO_BOOLS else [torch.bool]
    return found


@pytest.mark.parametrize("name", [name for name in SCALAR_OPS if name != "where"])
def test_every_scalar_operation_on_edge_values(name):
    row = SCALAR_OPS[name]
    for dtype in dtypes_of(name):
        values = edge_values(dtype)
        if row.arity == 1:
            operands = [values]
        else:
            operands = [grid.reshape(-1).contiguous() for grid in torch.meshgrid(values, values, indexing="ij")]
        if name in TRAPS and not dtype.is_floating_point:
            sound = (operands[1] != 0) & ~((operands[1] == -1) & (operands[0] == torch.iinfo(dtype).min))
            operands = [operand[sound] for operand in operands]
        n = operands[0].numel()
        expected = row.meaning(*operands)
        out = torch.empty(n, dtype=expected.dtype)
        names = ["x", "y"][: row.arity]
        value = op(name, *(load(each, i0, dtype) for each in names))
        assert out.dtype is value.dtype
        run(dict(zip(names, operands, strict=True)), {"out": out}, [axis(i0, n)], Store("out", i0, value))
        if dtype.is_floating_point and expected.is_floating_point():
            rtol = {F64: 1e-13, F32: 1e-6, F16: 1e-3, BF16: 1e-2}[dtype]
            torch.testing.assert_close(out, expected, rtol=rtol, atol=1e-30 if dtype is F64 else 1e-12, equal_nan=True)
        else:
            assert torch.equal(out, expected), (name, dtype)


def test_integer_division_that_has_no_answer_does_not_end_the_process():
    x = torch.tensor([5, -(2**31), 0], dtype=torch.int32)
    y = torch.tensor([0, -1, 0], dtype=torch.int32)
    for name in sorted(TRAPS):
        out = torch.empty(3, dtype=torch.int32)
        run({"x": x, "y": y}, {"out": out}, [axis(i0, 3)], Store("out", i0, op(name, load("x", i0, x.dtype), load("y", i0, x.dtype))))


def test_where():
    c, x, y = torch.rand(100) > 0.5, torch.randn(100), torch.randn(100)
    out = torch.empty(100)
    value = op("where", load("c", i0, torch.bool), load("x", i0), load("y", i0))
    run({"c": c, "x": x, "y": y}, {"out": out}, [axis(i0, 100)], Store("out", i0, value))
    assert torch.equal(out, torch.where(c, x, y))


ALL = [F32, F64, BF16, F16, torch.int8, torch.int16, torch.int32, I64, torch.uint8, torch.bool]


@pytest.mark.parametrize("source", ALL, ids=str)
def test_casts(source):
    values = edge_values(source)
    for target in ALL:
        x = values
        if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
            limit = 120 if target is torch.uint8 else torch.iinfo(target).max
            low = 0 if target is torch.uint8 else -limit
            x = values[(values.double() <= limit) & (values.double() >= low)]  # outside, C says nothing
        out = torch.empty(x.shape, dtype=target)
        run({"x": x}, {"out": out}, [axis(i0, x.numel())], Store("out", i0, make_cast(load("x", i0, source), target)))
        torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_narrow_floats_round_as_eager(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = torch.empty(every.shape)
    run({"x": every}, {"out": wide}, [axis(i0, 65536)], Store("out", i0, make_cast(load("x", i0, dtype), F32)))
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    between = torch.cat([(wide[1:] + wide[:-1]) / 2, torch.nextafter(wide, torch.tensor(torch.inf)), torch.randn(65536)])
    out = torch.empty(between.shape, dtype=dtype)
    run({"x": between}, {"out": out}, [axis(i0, between.numel())], Store("out", i0, make_cast(load("x", i0), dtype)))
    torch.testing.assert_close(out, between.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_softmax_of_narrow_floats(dtype):
    x = torch.randn(33, 300).to(dtype)
    out = torch.empty_like(x)
    wide = make_cast(load("x", 300 * i0 + r0, dtype), F32)
    m = Fold("m", "max", (wide,), (r0,), F32)
    e = op("exp", op("sub", wide, m.ref))
    s = Fold("s", "sum", (e,), (r0,), F32)
    store = Store("out", 300 * i0 + r0, Cast(op("truediv", e, s.ref), dtype))
    run({"x": x}, {"out": out}, [axis(i0, 33), axis(r0, 300, WHOLE)], m, s, store)
    assert_close_to_exact(out, x.softmax(1), x.double().softmax(1))


def test_integers_wrap():
    x = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    out = torch.empty(2, dtype=torch.int32)
    value = op("mul", op("add", load("x", i0, x.dtype), const(1, x.dtype)), const(3, x.dtype))
    run({"x": x}, {"out": out}, [axis(i0, 2)], Store("out", i0, value))
    assert torch.equal(out, (x + 1) * 3)


# Random numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("seed", [0, 1234567890123456789])
def test_random_numbers_are_those_of_philox(kind, seed):
    from lowering import philox

    n = 1000
    out = torch.empty(n)
    value = Random(kind, load("seed", sympy.Integer(0), I64), i0 + 2**32 - 500)
    run({"seed": torch.tensor(seed)}, {"out": out}, [axis(i0, n)], Store("out", i0, value))
    expected = getattr(philox, kind)(torch.tensor(seed), torch.arange(n) + 2**32 - 500)
    torch.testing.assert_close(out, expected, rtol=0 if kind == "uniform" else 1e-5, atol=0 if kind == "uniform" else 1e-6)


# Building ----------------------------------------------------------------------------------------------------------------


def simple() -> tuple[Kernel, str, torch.Tensor]:
    x = torch.randn(64)
    made = kernel({"x": x}, {"out": x}, [axis(i0, 64)], Store("out", i0, op("mul", load("x", i0), const(2.0, F32))))
    return made, TARGET.emit(made), x


def test_the_compilers_message_is_reported():
    made, source, _ = simple()
    with pytest.raises(BuildError, match="undeclared"):
        TARGET.build(made, source.replace("x[i0]", "y[i0]"))


def test_a_compiler_that_is_not_there(monkeypatch):
    made, source, _ = simple()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        TARGET.build(made, source)


def test_a_damaged_object_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    made, source, x = simple()
    TARGET.build(made, source)
    (path,) = (tmp_path / "cache" / "c").iterdir()
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b"?"):
        publish(path, damaged)
        out = torch.empty_like(x)
        TARGET.build(made, source)(x, out)
        assert torch.equal(out, x * 2)
        assert len(path.read_bytes()) == len(whole)


def test_an_edited_kernel_is_what_runs():
    made, source, x = simple()
    out = torch.empty_like(x)
    TARGET.build(made, source.replace("2.0f", "5.0f"))(x, out)
    assert torch.equal(out, x * 5)


def test_loops_inside_loops_and_unknown_dtypes_are_refused():
    fold = Fold("total", "sum", (load("x", 4 * r0 + r1),), (r1,), F32)
    x = torch.randn(4, 4)
    nested = Loop((r0,), (Loop((r1,), (fold,)),))
    with pytest.raises(BuildError, match="one loop at a time"):
        TARGET.emit(kernel({"x": x}, {"out": x}, [axis(r0, 4, LOOP), axis(r1, 4, LOOP)], nested))
    odd = torch.empty(4, dtype=torch.complex64)
    with pytest.raises(BuildError, match="complex64"):
        TARGET.emit(kernel({"x": odd}, {"out": x}, [axis(i0, 4)], Store("out", i0, load("x", i0))))


def test_one_openmp_run_time_in_the_process():
    bind_openmp()
    made, source, _ = simple()
    TARGET.build(made, source)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        libraries = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line or "libomp" in line}
    assert len(libraries) == 1


def test_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "a"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("FUSION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fusion"
    publish(tmp_path / "fusion" / "deep" / "file", b"content")
    assert (tmp_path / "fusion" / "deep" / "file").read_bytes() == b"content"
    assert [path.name for path in (tmp_path / "fusion" / "deep").iterdir()] == ["file"]
    assert digest("a", b"b") != digest("ab", b"")
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "plain" / "below"))
    with pytest.raises(BuildError, match="FUSION_CACHE_DIR"):
        cache_dir()


def test_another_process_finds_what_was_built(tmp_path):
    script = (
        "import sys; sys.path.insert(0, '.');"
        "import importlib.util as u; s = u.spec_from_file_location('t', sys.argv[1]); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); made, source, x = m.simple(); m.TARGET.build(made, source)"
    )
    environment = {**os.environ, "FUSION_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, str(Path(__file__).resolve())]
    subprocess.run(command, env=environment, cwd=root, check=True)
    (built,) = (tmp_path / "c").iterdir()
    first = built.stat().st_mtime_ns
    broken = {**environment, "CC": "false"} if False else environment
    subprocess.run(command, env=broken, cwd=root, check=True)
    assert built.stat().st_mtime_ns == first
