"""Element-wise kernels in C: vectors, transposes, masks, gathers, updates, symbolic sizes."""

from __future__ import annotations

import ctypes
import platform

import pytest
import sympy
import torch

import fusion
from fusion.codegen.c.text.indices import index_text
from fusion.lowering.errors import BuildError
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.expr import Expr, IndexValue, const, make_cast
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Param, Store
from tests.codegen.c.kernels import (
    BF16,
    F32,
    F64,
    I64,
    INTEGERS,
    LOOP,
    TARGET,
    WHOLE,
    ZERO,
    axis,
    i0,
    i1,
    i2,
    kernel,
    param,
    r0,
    run,
    sample,
)
from tests.codegen.kernels.making import expected, load, tensors
from tests.codegen.kernels.rows import scattered

# Updates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64, *INTEGERS])
@pytest.mark.parametrize("name", ["store", "sum", "prod", "max", "min"])
def test_colliding_sources_are_processed_in_order(name, dtype):
    """The evaluator processes them one after the other, too."""
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
    assert ("out[i0] = x[i0] + y[i0];" in source) == (n > 0)  # without elements there is no loop


def exponentials(x: torch.Tensor) -> tuple[Kernel, torch.Tensor]:
    """The kernel that computes the exponentials of `x`, and its output tensor."""
    out = torch.empty_like(x)
    return kernel({"x": x}, {"out": out}, [axis(i0, len(x))], Store("out", i0, op("exp", load("x", i0)))), out


def test_exponentials_that_are_no_normal_numbers():
    x = torch.linspace(-105.0, -86.0, 5000)
    result, out = exponentials(x)
    TARGET.build(result, TARGET.emit(result))(x, out)
    want = x.double().exp()
    assert ((out.double() - want).abs() <= torch.where(want < 2.0**-126, 2.0**-149, want * 2.0**-23)).all()
    assert (out[x < -103.98] == 0).all() and ((out > 0) & (out < 2.0**-126)).any()


def test_exponentials_of_nan_and_out_of_range_numbers():
    """The lower bound of the argument is compared by its bits: there NaN of either sign lies beyond all numbers."""
    numbers = torch.tensor([torch.inf, -torch.inf, -1e38, -103.9, -104.1, 88.72, 88.73, 0.0, -0.0])
    both = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    x = torch.cat([both, numbers]).repeat(4)
    result, out = exponentials(x)
    TARGET.build(result, TARGET.emit(result))(x, out)
    torch.testing.assert_close(out, x.double().exp().float(), equal_nan=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag of an underflow is read by its number")
def test_exponentials_of_masked_elements_do_not_underflow():
    """Each underflow, of any intermediate result, costs as much time as some hundred exponentials."""
    x = torch.tensor([-torch.inf, torch.finfo(torch.float32).min, -200.0, -90.0, 0.0, 20.0, 80.0] * 9)
    result, out = exponentials(x)
    launch, library, underflow = TARGET.build(result, TARGET.emit(result)), ctypes.CDLL("libm.so.6"), 0x10
    library.feclearexcept(underflow)
    launch(x, out)
    assert library.fetestexcept(underflow) == 0
    torch.testing.assert_close(out, x.exp())


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


def test_concatenation_reads_only_inside_its_operands():
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


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [F32, F64, torch.uint8])
def test_neighbours_read_under_one_mask(dtype, count):
    """GCC would read several vectors of them, all under the mask of the first one."""
    x, kept = sample((66, count), dtype), torch.arange(66) & 8 == 0
    outputs = {f"out{word}": torch.empty(66, count, dtype=to) for word, to in enumerate((torch.uint8, F32, I64))}
    mask = op("eq", op("and", IndexValue(i0), const(8, I64)), const(0, I64))
    for name, out in outputs.items():
        at = [count * i0 + k for k in range(count)]
        values = [load("x", index, dtype, mask) for index in at]
        stores = [Store(name, index, make_cast(value, out.dtype)) for index, value in zip(at, values, strict=True)]
        run({"x": x}, {name: out}, [axis(i0, 66)], *stores)
        assert torch.equal(out, torch.where(kept[:, None], x, 0).to(out.dtype)), name


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("dtype", [F32, F64, torch.uint8])
def test_neighbours_read_in_a_short_loop_inside_lanes(dtype, count):
    """GCC unrolls the short loop before it vectorises the outer one."""
    x, y = torch.randint(9, (3, 33, count)).to(dtype), torch.randint(9, (3, 66, count)).to(F64)

    def doubled(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([x, x], 1) + y, y.sum((0, 2))

    got = fusion.fuse(doubled, options={"target": "c", "strict": True})(x, y)
    torch.testing.assert_close(got, doubled(x, y), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.uint8])
@pytest.mark.parametrize(
    "position",
    [
        lambda bools, small: bools.long(),
        lambda bools, small: torch.where(bools, 1, 0),
        lambda bools, small: (small < 2).long(),
        lambda bools, small: bools.long() * 3 + 1,
    ],
)
def test_a_condition_as_an_index(position, dtype):
    """GCC would read at the masks of lanes."""
    table, bools = torch.arange(1, 6).to(dtype), torch.rand(2052) > 0.5
    small = torch.randint(4, (2052,), dtype=torch.uint8)

    def taken(table: torch.Tensor, bools: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
        return table.take(position(bools, small))

    got = fusion.fuse(taken, options={"target": "c", "strict": True})(table, bools, small)
    assert torch.equal(got, table[position(bools, small)])


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
    example = Kernel("rows", params, (n,), (axis(i0, 6), axis(r0, n, WHOLE)), body)
    launch = TARGET.build(example, TARGET.emit(example))
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
    example = Kernel("add", params, (n, k), (axis(i0, n), axis(i1, k)), (Store("out", k * i0 + i1, value),))
    total = Fold("total", "sum", (load("x", k * r0 + i0),), (r0,), F32)
    column = Param("out", F32, (k,), (sympy.Integer(1),), True)
    body = (Loop((r0,), (total,)), Store("out", i0, total.ref))
    sums = Kernel("sums", (params[0], column), (n, k), (axis(i0, k), axis(r0, n, LOOP)), body)
    launch, launch_sums = (TARGET.build(example, TARGET.emit(example)) for example in (example, sums))
    for rows, columns in ((1, 1), (5, 40), (40, 17), (200, 300), (0, 3)):
        x, y = torch.randn(rows, columns), torch.randn(columns, rows)
        out = torch.empty(rows, columns)
        launch(x, y, out, rows, columns)
        assert torch.equal(out, x + y.T)
        out = torch.empty(columns)
        launch_sums(x, out, rows, columns)
        torch.testing.assert_close(out, x.sum(0))


def test_a_param_that_is_read_and_written():
    x = torch.randn(1000)
    before = x.clone()
    old = load("x", i0)
    y = torch.empty(1000)
    example = Kernel(
        "update",
        (param("x", x, written=True), param("y", y, written=True)),
        (),
        (axis(i0, 1000),),
        (Store("x", i0, op("add", old, const(1.0, F32))), Store("y", i0, old)),
    )
    TARGET.build(example, TARGET.emit(example))(x, y)
    assert torch.equal(x, before + 1)
    assert torch.equal(y, before)


def test_names_that_c_has_taken():
    x, out = torch.randn(10), torch.empty(10)
    value = op("exp", load("double", i0))
    example = Kernel(
        "exp", (param("double", x), param("expf", out, written=True)), (), (axis(i0, 10),), (Store("expf", i0, value),)
    )
    TARGET.build(example, TARGET.emit(example))(x, out)
    torch.testing.assert_close(out, x.exp())


def test_ten_thousand_operations_in_a_chain():
    x, out = torch.rand(10), torch.empty(10)
    value: Expr = load("x", i0)
    for k in range(10_000):
        value = op(("add", "sub")[k % 2], value, const(1.0, F32))
    source = TARGET.emit(kernel({"x": x}, {"out": out}, [axis(i0, 10)], Store("out", i0, value)))
    assert max(map(len, source.splitlines())) < 200
