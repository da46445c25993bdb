"""The C target: every element type, every scalar operation, casts and random numbers, against eager."""

from __future__ import annotations

import platform
from itertools import product

import numpy as np
import pytest
import torch

from fusion.codegen.c.text.operations import OPERATIONS
from fusion.codegen.c.text.storage import MEMORY
from fusion.lowering.builder import GENERATED_DTYPES
from fusion.lowering.ir.expr import Cast, IndexValue, Random, const, make_cast
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Store
from fusion.lowering.ir.scalar_ops import SCALAR_OPS
from tests.codegen.c.kernels import BF16, F16, F32, F64, I64, WHOLE, ZERO, assert_close_to_exact, axis, i0, r0, run
from tests.codegen.kernels.making import load

# Element types ---------------------------------------------------------------------------------------------------

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
    *("floor", "ceil", "trunc", "round", "isnan", "isinf", "abs"),
}
TRAPS = {"floordiv", "truncdiv", "remainder", "fmod"}  # eager raises, or dies, where an integer division cannot be done


def dtypes_of(name: str) -> list[torch.dtype]:
    result = [] if name in ONLY_INTEGERS else [F32, F64, BF16, F16]
    if name not in NO_INTEGERS:
        result += [torch.int8, torch.int16, torch.int32, I64, torch.uint8]
        result += [] if name in NO_BOOLS else [torch.bool]
    return result


@pytest.mark.parametrize("name", [name for name in SCALAR_OPS if name not in ("where", "checked", "bounded")])
def test_every_scalar_operation_on_edge_values(name):
    row = SCALAR_OPS[name]
    length = 400
    inputs, outputs, expected, stores = {}, {}, {}, []
    for dtype in dtypes_of(name):
        operands = [edge_values(dtype)]
        if row.arity == 2:
            operands = [grid.reshape(-1) for grid in torch.meshgrid(*operands, *operands, indexing="ij")]
        if name in TRAPS and not dtype.is_floating_point:
            sound = (operands[1] != 0) & ~((operands[1] == -1) & (operands[0] == torch.iinfo(dtype).min))
            operands = [operand[sound] for operand in operands]
        operands = [operand.repeat(-(-length // operand.numel()))[:length].contiguous() for operand in operands]
        word = str(dtype).split(".")[1]
        names = [f"{letter}_{word}" for letter in "xy"[: row.arity]]
        inputs.update(zip(names, operands, strict=True))
        expected[word] = row.meaning(*operands)
        value = op(name, *(load(each, i0, dtype) for each in names))
        outputs[word] = torch.empty(length, dtype=value.dtype)
        stores.append(Store(word, i0, value))
    run(inputs, outputs, [axis(i0, length)], *stores)
    for word, out in outputs.items():
        if out.dtype.is_floating_point:
            rtol = {F64: 1e-13, F32: 1e-6, F16: 1e-3, BF16: 1e-2}[out.dtype]
            atol = {F64: 1e-30, F32: 1e-12}.get(out.dtype, 1e-7)  # eager's erf of a narrow float loses tiny values
            torch.testing.assert_close(out, expected[word], rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert torch.equal(out, expected[word]), word


@pytest.mark.parametrize("name", ["exp", "erf", "lgamma"])
def test_own_functions_are_within_two_units_in_the_last_place(name):
    """Of numbers of all magnitudes, NaN of any bits, and where results are nearly too large or too small."""
    patterns = torch.arange(0, 2**31, 4001).to(torch.int32).view(F32)  # the last 2000 are NaN
    edges = torch.cat([torch.linspace(-105, -86, 50_000), torch.linspace(88, 90, 50_000)])
    ordinary = torch.cat([torch.linspace(-1, 1, 100_000), torch.linspace(0.99, 2.01, 100_000), torch.randn(100_000)])
    x = torch.cat([patterns, -patterns, edges, ordinary, torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    out = torch.empty_like(x)
    run({"x": x}, {"out": out}, [axis(i0, x.numel())], Store("out", i0, op(name, load("x", i0))))
    exact = getattr(torch, name)(x.double())
    finite = exact.float().isfinite()
    unit = torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)) - exact.float().abs()
    near_zero = (x < 0) & (exact.abs() < 0.5) if name == "lgamma" else torch.zeros_like(finite)
    error = (out.double() - exact).abs()
    assert (error / unit)[finite & ~near_zero].max() < 2
    assert (error[near_zero] < 3e-8).all()  # between negative poles zeros lie anywhere
    assert torch.equal(out[~finite].nan_to_num(7), exact[~finite].float().nan_to_num(7))


@pytest.mark.parametrize(("dtype", "bits"), [(F32, torch.int32), (F64, I64)])
def test_rests_of_floats_are_exact(dtype, bits):
    """Of any two bit patterns, of neighbouring multiples, and of ordinary numbers."""
    info = torch.iinfo(bits)
    patterns = torch.randint(info.min, info.max, (2, 50_000), dtype=bits).view(dtype)
    factors, ordinary = torch.randint(-99, 99, (50_000,)), torch.randn(2, 50_000, dtype=dtype)
    x = torch.cat([patterns[0], factors * ordinary[1], ordinary[0]])
    y = torch.cat([patterns[1], ordinary[1], ordinary[1]])
    out = torch.empty_like(x)
    value = op("fmod", load("x", i0, dtype), load("y", i0, dtype))
    run({"x": x, "y": y}, {"out": out}, [axis(i0, x.numel())], Store("out", i0, value))
    with np.errstate(invalid="ignore"):
        exact = torch.from_numpy(np.fmod(x.numpy(), y.numpy()))
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.nan_to_num(7).view(bits), exact.nan_to_num(7).view(bits))


@pytest.mark.parametrize("count", [2**16, 1000 + 2**16, 40, 17, 5])
def test_16_bit_floats_convert_in_blocks_as_one_by_one(count):
    """All bit patterns, and float32 numbers between two of them; ends of blocks included."""
    x = torch.arange(count).to(torch.int16).view(F16)
    wide, narrow, moved = torch.empty(count), torch.empty(count, dtype=F16), torch.empty(count, dtype=F16)
    y = torch.cat([x[: 2**16].float() * 1.0007, torch.tensor([65519.0, 65520.0, 5.9e-8, 2.9e-8, -0.0])])[:count]
    y = torch.cat([y, torch.randn(count - len(y)) * 1e-4])
    exact = make_cast(load("x", i0, F16), F32)
    source = run(
        {"x": x, "y": y},
        {"wide": wide, "narrow": narrow, "moved": moved},
        [axis(i0, count)],
        Store("wide", i0, exact),
        Store("narrow", i0, make_cast(load("y", i0), F16)),
        Store("moved", i0, make_cast(op("mul", exact, const(0.5, F32)), F16)),
    )
    assert ("widen_halves(x" in source) is (count >= 16)
    torch.testing.assert_close(wide, x.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(narrow, y.half(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(moved, (x.float() * 0.5).half(), rtol=0, atol=0, equal_nan=True)
    zero = x == 0
    assert torch.equal(wide[zero].signbit(), x[zero].signbit())


def test_integer_division_that_has_no_answer_does_not_end_the_process():
    x = torch.tensor([5, -(2**31), 0], dtype=torch.int32)
    y = torch.tensor([0, -1, 0], dtype=torch.int32)
    for name in sorted(TRAPS):
        out = torch.empty(3, dtype=torch.int32)
        run(
            {"x": x, "y": y},
            {"out": out},
            [axis(i0, 3)],
            Store("out", i0, op(name, load("x", i0, x.dtype), load("y", i0, x.dtype))),
        )


def test_where():
    c, x, y = torch.rand(100) > 0.5, torch.randn(100), torch.randn(100)
    out = torch.empty(100)
    value = op("where", load("c", i0, torch.bool), load("x", i0), load("y", i0))
    run({"c": c, "x": x, "y": y}, {"out": out}, [axis(i0, 100)], Store("out", i0, value))
    assert torch.equal(out, torch.where(c, x, y))


ALL = [F32, F64, BF16, F16, torch.int8, torch.int16, torch.int32, I64, torch.uint8, torch.bool]


@pytest.mark.parametrize("source", ALL, ids=str)
def test_casts(source):
    inputs, outputs, stores = {}, {}, []
    for target in ALL:
        x = edge_values(source)
        if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
            limit = 120 if target is torch.uint8 else torch.iinfo(target).max
            low = 0 if target is torch.uint8 else -limit
            x = x[(x.double() <= limit) & (x.double() >= low)]  # outside, C says nothing
        word = str(target).split(".")[1]
        inputs[f"x_{word}"] = x.repeat(40)[:40].contiguous()
        outputs[word] = torch.empty(40, dtype=target)
        stores.append(Store(word, i0, make_cast(load(f"x_{word}", i0, source), target)))
    run(inputs, outputs, [axis(i0, 40)], *stores)
    for word, out in outputs.items():
        expected = inputs[f"x_{word}"].to(out.dtype)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="out-of-range conversions differ between architectures")
@pytest.mark.parametrize("source", [F32, F64], ids=str)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_constants_convert_to_integers_as_at_run_time(source, count):
    """A conversion of a constant that no integer can represent is folded by the compiler, not by an instruction."""
    large = op("mul", make_cast(IndexValue(i0), source), const(-1e19, source))
    values = [const(number, source) for number in (*SPECIAL, 3e9, -1e19, 1e19)]
    values += [
        large,
        op("neg", large),
        op("where", op("lt", IndexValue(i0), const(2, I64)), const(torch.nan, source), large),
    ]
    outputs, stores = {}, []
    for k, (value, target) in enumerate(product(values, (torch.int16, torch.int32, I64, torch.uint8))):
        outputs[f"out{k}"] = torch.empty(count, dtype=target)
        stores.append(Store(f"out{k}", i0, make_cast(value, target)))
    run({}, outputs, [axis(i0, count)], *stores)
    at = torch.arange(count)
    line = at.to(source) * -1e19
    given = [torch.full((count,), number, dtype=source) for number in (*SPECIAL, 3e9, -1e19, 1e19)]
    given += [line, -line, torch.where(at < 2, torch.nan, line)]
    for (x, _), out in zip(product(given, range(4)), outputs.values(), strict=True):
        assert torch.equal(out, x.to(out.dtype)), (x, out)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_narrow_floats_round_as_eager(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = torch.empty(every.shape)
    run({"x": every}, {"out": wide}, [axis(i0, 65536)], Store("out", i0, make_cast(load("x", i0, dtype), F32)))
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    between = torch.cat(
        [(wide[1:] + wide[:-1]) / 2, torch.nextafter(wide, torch.tensor(torch.inf)), torch.randn(65536)]
    )
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


def test_moving_narrow_floats_changes_no_bit():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)  # every NaN among them
    for dtype in (BF16, F16):
        out = torch.empty(65536, dtype=dtype)
        value = op("where", op("ge", IndexValue(i0), const(0, I64)), load("x", i0, dtype), const(0.0, dtype))
        run({"x": x.view(dtype)}, {"out": out}, [axis(i0, 65536)], Store("out", i0, value))
        assert torch.equal(out.view(torch.int16), x)


def test_integers_wrap():
    x = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    out = torch.empty(2, dtype=torch.int32)
    value = op("mul", op("add", load("x", i0, x.dtype), const(1, x.dtype)), const(3, x.dtype))
    run({"x": x}, {"out": out}, [axis(i0, 2)], Store("out", i0, value))
    assert torch.equal(out, (x + 1) * 3)


# Random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("seed", [0, 1234567890123456789])
def test_random_numbers_are_philox(kind, seed):
    from fusion.lowering.random import philox

    n = 1000
    out = torch.empty(n)
    value = Random(kind, load("seed", ZERO, I64), i0 + 2**32 - 500)
    run({"seed": torch.tensor(seed)}, {"out": out}, [axis(i0, n)], Store("out", i0, value))
    expected = getattr(philox, kind)(torch.tensor(seed), torch.arange(n) + 2**32 - 500)
    torch.testing.assert_close(
        out, expected, rtol=0 if kind == "uniform" else 1e-5, atol=0 if kind == "uniform" else 1e-6
    )


def test_every_operation_is_written_in_every_dtype():
    assert {*OPERATIONS, "checked"} == set(SCALAR_OPS)  # a check takes statements of its own
    assert set(MEMORY) == GENERATED_DTYPES
