"""The text form: readable, the same for equal things, different for different ones, never longer than the data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import given

from fusion.lowering.errors import Origin
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Random, TileRef, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Store
from fusion.lowering.ir.program import BufferRef, Contract, Extern, Map, Program, Reduce
from fusion.lowering.printer import format_expr, format_index, format_kernel, format_program
from tests.lowering.building import BF16, F32, F64, I0, I1, I64, LENGTH, R0, R1, axis, buffer, kernel, param, program
from tests.lowering.random_indices import Box, Built, boxes, expressions, some_points

aten = torch.ops.aten
X, Y, B = Load("x", (I0,), F32), Load("y", (), F32), Load("m", (I0,), torch.bool)
N, M = Load("n", (I0,), I64), Load("k", (), I64)
ONE = Const(1.0, F32)


# Indices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (R0 + 781 * I0, "781*i0 + r0"),
        (I0 - 3, "i0 - 3"),
        (7 - I0, "7 - i0"),
        (-I0 - 2, "-i0 - 2"),
        (2 * FloorDiv(3 * I0 + 1, 4), "2*((3*i0 + 1)//4)"),
        (Mod(FloorDiv(I0, 8), 4) + 4 * Mod(I1, 8), "4*(i1%8) + (i0//8)%4"),
        (FloorDiv(I0 * I1, LENGTH), "(i0*i1)//s0"),
        (LENGTH * I0 + I1, "i0*s0 + i1"),
        (I0**2 + LENGTH * (I1 + 1), "s0*(i1 + 1) + i0**2"),
        (sympy.Integer(0), "0"),
    ],
)
def test_indices(index: sympy.Expr, text: str) -> None:
    assert format_index(index) == text


@given(expressions(symbolic=True), boxes(symbolic=True))
def test_the_text_of_an_index_is_python(built: Built, box: Box) -> None:
    text = format_index(built[0])
    for point in some_points(box, 3)[:10]:
        assert eval(text, {str(symbol): n for symbol, n in point.items()}) == built[1].at(point)


# Expressions ----------------------------------------------------------------------------------------------------------

EXPRESSIONS: list[tuple[Expr, str]] = [
    (X, "x[i0]"),
    (Y, "y[]"),
    (Load("x", (I0 - 3, 2 * I1), F32, op("ge", IndexValue(I0), const(3, I64))), "x[i0 - 3, 2*i1 if index(i0) >= 3]"),
    (Load("t", (N, I1), F32), "t[n[i0], i1]"),
    (Const(-0.0, F32), "-0.0"),
    (Const(float("inf"), F32), "inf"),
    (Const(float("nan"), F32), "nan"),
    (Const(1.0, BF16), "1.0_bf16"),
    (Const(1.0, F64), "1.0_f64"),
    (Const(1, I64), "1"),
    (Const(1, torch.uint8), "1_u8"),
    (Const(True, torch.bool), "true"),
    (IndexValue(I0 + 1), "index(i0 + 1)"),
    (IndexValue(I0, torch.int32), "index_i32(i0)"),
    (Cast(X, BF16), "bf16(x[i0])"),
    (Cast(X, BF16, implicit=True), "~bf16(x[i0])"),
    (Random("uniform", N, 4 * I0), "uniform(n[i0], 4*i0)"),
    (TileRef("max0", F32), "max0"),
    (op("sub", X, op("sub", Y, ONE)), "x[i0] - (y[] - 1.0)"),
    (op("sub", op("sub", X, Y), ONE), "x[i0] - y[] - 1.0"),
    (op("mul", op("add", X, Y), op("neg", X)), "(x[i0] + y[]) * -x[i0]"),
    (op("truediv", X, op("mul", Y, ONE)), "x[i0] / (y[] * 1.0)"),
    (op("neg", op("add", X, Y)), "-(x[i0] + y[])"),
    (op("neg", ONE), "-(1.0)"),
    (op("pow", op("neg", X), op("pow", Y, ONE)), "(-x[i0])**(y[]**1.0)"),
    (op("neg", op("pow", X, Y)), "-x[i0]**y[]"),
    (op("and", op("lt", X, Y), op("or", B, op("not", B))), "(x[i0] < y[]) & (m[i0] | not(m[i0]))"),
    (op("eq", op("eq", X, Y), B), "(x[i0] == y[]) == m[i0]"),
    (op("where", B, X, Y), "where(m[i0], x[i0], y[])"),
    (op("floordiv", op("remainder", N, M), op("truncdiv", N, M)), "n[i0] % k[] // truncdiv(n[i0], k[])"),
    (op("shl", N, op("add", M, M)), "n[i0] << k[] + k[]"),
    (op("rsqrt", op("add", X, Const(1e-05, F32))), "rsqrt(x[i0] + 1e-05)"),
]


@pytest.mark.parametrize(("expr", "text"), EXPRESSIONS, ids=[text for _, text in EXPRESSIONS])
def test_expressions(expr: Expr, text: str) -> None:
    assert format_expr(expr) == text


def test_different_expressions_have_different_text() -> None:
    texts = [format_expr(expr) for expr, _ in EXPRESSIONS]
    assert len(set(texts)) == len(texts)
    names = ("add", "sub", "mul", "truediv", "pow")
    trees = [op(f, op(g, X, Y), ONE) for f, g in itertools.product(names, names)]
    trees += [op(f, X, op(g, Y, ONE)) for f, g in itertools.product(names, names)]
    assert len({format_expr(tree) for tree in trees}) == len(trees)


def test_shared_expressions_are_named_once() -> None:
    centred = op("sub", X, op("mul", Y, Const(0.5, F32)))
    assert format_expr(op("mul", centred, centred)) == "%1 = x[i0] - y[] * 0.5\n%1 * %1"
    assert format_expr(op("mul", X, X)) == "x[i0] * x[i0]"


def test_text_is_linear_in_the_data() -> None:
    doubled: Expr = X
    for _ in range(200):  # 2²⁰⁰ leaves if it were a tree
        doubled = op("add", op("exp", doubled), doubled)
    assert len(format_expr(doubled)) < 200 * 60
    deep: Expr = X
    for k in range(10_000):
        deep = op("add", deep, Const(float(k), F32))
    text = format_expr(deep)
    assert len(text) < 10_000 * 20
    assert max(map(len, text.splitlines())) < 160


# Programs -------------------------------------------------------------------------------------------------------------


def example() -> Program:
    exp = op("exp", op("sub", Load("s", (I0, I1), F32), Load("top", (I0,), F32)))
    printed = program(
        [
            *(buffer("x", (LENGTH, 8), BF16), buffer("w", (8, 4), BF16, strides=(1, 8)), buffer("s", (LENGTH, 4))),
            *(
                buffer("top", (LENGTH,)),
                buffer("out", (LENGTH, 4)),
                buffer("v", (LENGTH, 2)),
                buffer("at", (LENGTH, 2), I64),
            ),
        ],
        [
            Contract(
                *("s", (axis(I0, LENGTH), axis(I1, 4)), (axis(R0, 8),)),
                *(Load("x", (I0, R0), BF16), Load("w", (R0, I1), BF16), (I0,), (I1,), F32),
            ),
            Reduce("top", (axis(I0, LENGTH),), (axis(R0, 4),), "max", (Load("s", (I0, R0), F32),), F32),
            Map("out", (axis(I0, LENGTH), axis(I1, 4)), op("mul", exp, op("add", exp, ONE))),
            Extern(
                *(("v", "at"), aten.topk.default, (BufferRef("out"), 2, [LENGTH, None])),
                *({"largest": False, "dtype": BF16}, True),
                reason="no rule",
            ),
        ],
        [LENGTH, "x", "w", None],
        *("at", LENGTH + 1, None),
    )
    return replace(printed, origins={"top": Origin("amax", "model.attention", "model.py:12")})


def test_a_program() -> None:
    assert (
        format_program(example())
        == """\
program on cpu
  input size s0
  input x: bf16[s0, 8]
  input w: bf16[8, 4] strides (1, 8)
  input unused
  s: f32[s0, 4] = contract(i0:s0, i1:4 over r0:8; rows i0, columns i1; in f32) x[i0, r0], w[r0, i1]
  top: f32[s0] = max(i0:s0 over r0:4) s[i0, r0]   # amax (model.attention, model.py:12)
    %1 = exp(s[i0, i1] - top[i0])
  out: f32[s0, 4] = map(i0:s0, i1:4) %1 * (%1 + 1.0)
  v: f32[s0, 2], at: i64[s0, 2] = aten.topk.default(out, 2, [s0, None], largest=False, dtype=bf16)  (no rule)
  return at, s0 + 1, None"""
    )


def test_devices_and_constants() -> None:
    printed = program([buffer("x", (3,)), buffer("c", (3,)), buffer("far", ())], [], ["x", "far"], "x")
    buffers = {**printed.buffers, "far": replace(printed.buffers["far"], device=torch.device("meta"))}
    text = format_program(replace(printed, buffers=buffers, constants={"c": torch.zeros(3)}))
    assert text.splitlines() == [
        *("program on cpu", "  input x: f32[3]", "  input far: f32[] on meta", "  constant c: f32[3]", "  return x"),
    ]


# Kernels --------------------------------------------------------------------------------------------------------------


def softmax() -> Kernel:
    x = Load("x", (781 * I0 + R0,), F32)
    top = Fold("max0", "max", (x,), (R0,), F32)
    exp = op("exp", op("sub", x, top.ref))
    total = Fold("sum1", "sum", (exp,), (R0,), F32)
    store = Store("out", 781 * I0 + R0, op("truediv", exp, total.ref))
    return kernel(
        [param("x", (4096, 781)), param("out", (4096, 781), written=True)],
        {I0: (4096, Role.GRID), R0: (781, Role.LOOP)},
        Loop((R0,), (top,)),
        Loop((R0,), (total,)),
        Loop((R0,), (store,)),
    )


def test_a_kernel() -> None:
    assert (
        format_kernel(softmax())
        == """\
kernel k(x: f32[4096, 781], out: f32[4096, 781] written)
  grid  i0: 4096
  loop  r0: 781
  loop r0
    max0 = max over r0 of x[781*i0 + r0]
  loop r0
    %1 = exp(x[781*i0 + r0] - max0)
    sum1 = sum over r0 of %1
  loop r0
    store out[781*i0 + r0] = %1 / sum1"""
    )


def test_a_kernel_with_a_product() -> None:
    dot = Fold(
        "acc", "dot", (Load("a", (8 * I0 + R0,), BF16), Load("b", (5 * R0 + I1,), BF16)), (R0,), F32, (I0,), (I1,)
    )
    printed = kernel(
        [
            param("a", (LENGTH, 8), BF16),
            replace(param("b", (8, 5), BF16), aligned=False),
            param("out", (5,), written=True),
        ],
        {I0: (LENGTH, Role.GRID), I1: (5, Role.GRID), R0: (8, Role.WHOLE), R1: (3, Role.WHOLE)},
        dot,
        Fold("n", "argmax", (dot.ref, IndexValue(R1)), (R0, R1), torch.int32),
        Store("out", Load("at", (I1,), I64), dot.ref),
        sizes=(LENGTH,),
    )
    assert (
        format_kernel(printed)
        == """\
kernel k(a: bf16[s0, 8], b: bf16[8, 5] unaligned, out: f32[5] written, size s0)
  grid  i0: s0
  grid  i1: 5
  whole r0: 8
  whole r1: 3
  acc = dot over r0 of a[8*i0 + r0], b[5*r0 + i1]   rows i0, columns i1
  n = argmax over r0 r1 of acc, index(r1)   in i32
  store out[at[i1]] = acc"""
    )


def test_a_kernel_that_follows_in_a_launch() -> None:
    total = Fold("sum0", "sum", (Load("out", (R0,), F32),), (R0,), F32)
    store = Store("out", sympy.Integer(0), total.ref)
    last = kernel(softmax().params[1:], {R0: (8, Role.WHOLE)}, total, store)
    assert (
        format_kernel(replace(softmax(), then=last))
        == format_kernel(softmax())
        + """
then k(out)
  whole r0: 8
  sum0 = sum over r0 of out[r0]
  store out[0] = sum0"""
    )


def test_kernels_beside_another_in_a_launch() -> None:
    store = Store("out", 5 * I0, Load("x", (I0,), F32))
    other = replace(kernel(softmax().params, {I0: (8, Role.GRID)}, store), name="other")
    assert (
        format_kernel(replace(softmax(), beside=(other,)))
        == format_kernel(softmax())
        + """
beside other(x, out)
  grid  i0: 8
  store out[5*i0] = x[i0]"""
    )


def test_equal_kernels_have_equal_text_and_different_ones_do_not() -> None:
    assert softmax() == softmax()
    assert format_kernel(softmax()) == format_kernel(softmax())
    assert format_kernel(replace(softmax(), origins=("softmax (model.py:3)",))) == format_kernel(softmax())
    first = softmax()
    x, out = first.params
    columns = replace(x, strides=(sympy.Integer(1), sympy.Integer(4096)))
    different = [
        first,
        replace(first, name="other"),
        replace(first, axes=first.axes[:1]),
        replace(first, body=first.body[:2]),
        replace(first, params=(columns, out)),
        replace(first, params=(replace(x, dtype=BF16), out)),
        replace(first, then=replace(first, params=first.params[1:])),
        replace(first, beside=(replace(first, params=first.params[1:]),)),
    ]
    assert len({format_kernel(result) for result in different}) == len(different)
