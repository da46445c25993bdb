"""Programs against torch, and evaluation errors."""

from __future__ import annotations

import math

import pytest
import sympy
import torch

from fusion.lowering.errors import VerifyError
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.interpret import evaluate as evaluator
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.expr import Cast, IndexValue, Load
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.program import BufferRef, Contract, Extern, Map, Node, Program, Reduce
from tests.lowering.building import BF16, F32, F64, I0, I1, I64, LENGTH, R0, R1, axis, buffer, program
from tests.lowering.lowered import same

aten = torch.ops.aten


def softmax_of_product(dtype: torch.dtype = F32) -> Program:
    """softmax(x · w) over the last dimension, x [6, 10], w [10, 4], in four nodes."""
    m, k, n = 6, 10, 4
    over = Load("s", (I0, R0), F32)
    exp = op("exp", op("sub", Load("s", (I0, I1), F32), Load("top", (I0,), F32)))
    exp_over = op("exp", op("sub", over, Load("top", (I0,), F32)))
    return program(
        [
            *(buffer("x", (m, k), dtype), buffer("w", (k, n), dtype), buffer("s", (m, n)), buffer("top", (m,))),
            *(buffer("total", (m,)), buffer("out", (m, n), dtype, strides=(1, m))),
        ],
        [
            Contract(
                *("s", (axis(I0, m), axis(I1, n)), (axis(R0, k),)),
                *(Load("x", (I0, R0), dtype), Load("w", (R0, I1), dtype), (I0,), (I1,), F32),
            ),
            Reduce("top", (axis(I0, m),), (axis(R0, n),), "max", (over,), F32),
            Reduce("total", (axis(I0, m),), (axis(R0, n),), "sum", (exp_over,), F32),
            Map(
                *("out", (axis(I0, m), axis(I1, n))),
                Cast(op("truediv", exp, Load("total", (I0,), F32)), dtype)
                if dtype is not F32
                else op("truediv", exp, Load("total", (I0,), F32)),
            ),
        ],
        ["x", "w"],
        "out",
    )


@pytest.mark.parametrize("points", [1, 7, 64, 1 << 22])
def test_a_program_in_boxes_of_any_size(points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "BOX_POINTS", points)
    x, w = torch.randn(6, 10), torch.randn(10, 4)
    (result,) = run_program(softmax_of_product(), [x, w])
    assert isinstance(result, torch.Tensor)
    assert result.stride() == (1, 6)
    torch.testing.assert_close(result, torch.softmax(x @ w, 1))


def test_inexact_means_float64_throughout() -> None:
    x, w = torch.randn(6, 10, dtype=BF16), torch.randn(10, 4, dtype=BF16)
    (result,) = run_program(softmax_of_product(BF16), [x, w], exact=False)
    torch.testing.assert_close(result, torch.softmax(x.double() @ w.double(), 1), rtol=1e-13, atol=1e-15)
    (rounded,) = run_program(softmax_of_product(BF16), [x, w])
    assert isinstance(rounded, torch.Tensor)
    assert rounded.dtype is BF16


@pytest.mark.parametrize("points", [5, 1 << 22])
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "argmax", "argmin"])
def test_reductions_over_two_axes(name: str, points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "BOX_POINTS", points)
    x = torch.randint(-3, 4, (4, 3, 5)).to(F64)
    x[1, 2, 3] = float("nan")
    arg = Load("x", (R1, I0, R0), F64)
    args = (arg, IndexValue(5 * R1 + R0)) if name.startswith("arg") else (arg,)
    dtype = I64 if name.startswith("arg") else F64
    node = Reduce("out", (axis(I0, 3),), (axis(R0, 5), axis(R1, 4)), name, args, dtype)
    (actual,) = run_program(
        program([buffer("x", (4, 3, 5), F64), buffer("out", (3,), dtype)], [node], ["x"], "out"), [x]
    )
    flat = x.transpose(0, 1).reshape(3, 20)
    expected = {
        "sum": flat.sum(1), "prod": flat.prod(1), "max": flat.amax(1), "min": flat.amin(1),
        "argmax": flat.argmax(1), "argmin": flat.argmin(1),
    }[name]  # fmt: skip
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_reductions_over_nothing_give_the_identity() -> None:
    cases = [
        ("sum", F32, 0.0),
        ("prod", F32, 1.0),
        ("max", F32, -math.inf),
        ("any", torch.bool, False),
        ("min", I64, 2**63 - 1),
    ]
    for name, dtype, expected in cases:
        node = Reduce("out", (axis(I0, 2),), (axis(R0, 0),), name, (Load("x", (I0, R0), dtype),), dtype)
        (actual,) = run_program(
            program([buffer("x", (2, 0), dtype), buffer("out", (2,), dtype)], [node], ["x"], "out"),
            [torch.empty(2, 0, dtype=dtype)],
        )
        same(actual, torch.full((2,), expected, dtype=dtype))


def test_operands_constant_along_a_reduced_axis_count_each_time() -> None:
    total = Reduce("out", (axis(I0, 3),), (axis(R0, 5),), "sum", (Load("x", (I0,), F32),), F32)
    product = Contract(
        "dot",
        (axis(I0, 3), axis(I1, 3)),
        (axis(R0, 5),),
        Load("x", (I0,), F32),
        Load("x", (I1,), F32),
        (I0,),
        (I1,),
        F32,
    )
    buffers = [buffer("x", (3,)), buffer("out", (3,)), buffer("dot", (3, 3))]
    x = torch.arange(3.0)
    actual = run_program(program(buffers, [total, product], ["x"], "out", "dot"), [x])
    torch.testing.assert_close(actual, [5 * x, 5 * x[:, None] * x])


def test_empty_results_and_scalars() -> None:
    nodes = [
        Map("none", (axis(I0, 0), axis(I1, 3)), Load("x", (I1 + 100,), F32)),
        Map("one", (), op("neg", Load("x", (sympy.Integer(2),), F32))),
    ]
    actual = run_program(
        program([buffer("x", (3,)), buffer("none", (0, 3)), buffer("one", ())], nodes, ["x"], "none", "one"),
        [torch.arange(3.0)],
    )
    same(actual, [torch.empty(0, 3), torch.tensor(-2.0)])


def test_symbolic_sizes_come_from_shapes_and_integers() -> None:
    n = sympy.Symbol("s1", integer=True, positive=True)
    flat = FloorDiv(I0, n)
    node = Map(
        "out", (axis(I0, LENGTH * n),), op("mul", Load("x", (flat, Mod(I0, n)), F32), Cast(IndexValue(LENGTH + n), F32))
    )
    example = program(
        [buffer("x", (LENGTH, n)), buffer("out", (LENGTH * n,))], [node], [n, "x", None], "out", LENGTH * n, None
    )
    for shape in ((2, 3), (5, 1)):
        x = torch.randn(shape)
        actual = run_program(example, [shape[1], x, object()])  # type: ignore[list-item]
        same(actual, [x.flatten() * sum(shape), shape[0] * shape[1], None])


def test_inputs_must_be_as_declared() -> None:
    example = program([buffer("x", (3, LENGTH)), buffer("y", (LENGTH,))], [], ["x", "y"], "x")
    run_program(example, [torch.randn(3, 2), torch.randn(2)])
    for bad in (
        [torch.randn(4, 2), torch.randn(2)],
        [torch.randn(3, 2), torch.randn(3)],
        [torch.randn(3, 2).double(), torch.randn(2)],
        [torch.randn(3), torch.randn(2)],
    ):
        with pytest.raises(VerifyError, match="input"):
            run_program(example, bad)


def test_externs_are_called_as_they_are() -> None:
    nodes: list[Node] = [
        Extern(("values", "places"), aten.topk.default, (BufferRef("x"), LENGTH), {"largest": False}, multiple=True),
        Extern(("joined",), aten.cat.default, ([BufferRef("values"), BufferRef("x")], 1)),
        Extern(("view",), aten.t.default, (BufferRef("joined"),), is_view=True),
    ]
    buffers = [
        buffer("x", (3, 5)),
        buffer("values", (3, LENGTH)),
        buffer("places", (3, LENGTH), I64),
        buffer("joined", (3, LENGTH + 5)),
        buffer("view", (LENGTH + 5, 3)),
    ]
    x = torch.randn(3, 5)
    actual = run_program(program(buffers, nodes, [LENGTH, "x"], "places", "view"), [2, x])
    values, places = x.topk(2, largest=False)
    same(actual, [places, torch.cat([values, x], 1).t()])
    with pytest.raises(VerifyError, match="does not return a tensor of shape"):
        run_program(
            program(
                [buffer("x", (3, 5)), buffer("y", (3, 5))],
                [Extern(("y",), aten.t.default, (BufferRef("x"),))],
                ["x"],
                "y",
            ),
            [x],
        )


def test_inexact_externs_run_in_float64_where_they_can() -> None:
    x = torch.randn(4)
    nodes: list[Node] = [
        Extern(("cast",), aten._to_copy.default, (BufferRef("x"),), {"dtype": BF16}),
        Extern(("bits",), aten.view.dtype, (BufferRef("x"), torch.int32)),  # has a meaning only in the stated dtype
    ]
    buffers = [buffer("x", (4,)), buffer("cast", (4,), BF16), buffer("bits", (4,), torch.int32)]
    actual = run_program(program(buffers, nodes, ["x"], "cast", "bits"), [x], exact=False)
    same(actual, [x.double(), x.view(torch.int32)])


def test_constants_are_read() -> None:
    table = torch.randn(3)
    node = Map("out", (axis(I0, 3),), Load("table", (I0,), F32))
    example = Program(
        (),
        {b.name: b for b in (buffer("table", (3,)), buffer("out", (3,)))},
        (node,),
        (BufferRef("out"),),
        constants={"table": table},
    )
    same(run_program(example, []), [table])
