"""The verifier on Programs: accepts well-formed ones, and names the node and the rule of each error."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import given

from fusion.lowering.errors import Origin, VerifyError
from fusion.lowering.indexing import FloorDiv, Mod, bounds
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, Random, TileRef, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.program import Axis, BufferRef, Contract, Extern, Map, Node, Program, Reduce
from fusion.lowering.verify import Verified, verify_program
from tests.lowering.building import BF16, F32, F64, I0, I1, I64, LENGTH, R0, axis, buffer, program
from tests.lowering.random_indices import Box, Built, boxes, expressions, points

aten = torch.ops.aten


def x(*index: sympy.Expr | Expr, dtype: torch.dtype = F32, mask: Expr | None = None) -> Expr:
    return Load("x", index or (I0, I1), dtype, mask)


def one_map(expr: Expr, dtype: torch.dtype | None = None, rows: int = 4) -> Program:
    """x [4, 6], where [4] int64, seed []  →  out [rows, 6] = expr."""
    return program(
        [
            *(buffer("x", (4, 6)), buffer("where", (4,), I64), buffer("seed", (), I64)),
            buffer("out", (rows, 6), dtype or expr.dtype),
        ],
        [Map("out", (axis(I0, rows), axis(I1, 6)), expr)],
        ["x", "where", "seed"],
        "out",
    )


def two_step(**changes: object) -> Program:
    """A Program with one node of each kind; `changes` replaces fields of it."""
    example = program(
        [
            *(buffer("x", (4, 6)), buffer("w", (6, 3)), buffer("y", (4, 6)), buffer("z", (4, 3))),
            *(buffer("total", (4,)), buffer("t", (3, 4), strides=(1, 3))),
        ],
        [
            Map("y", (axis(I0, 4), axis(I1, 6)), op("exp", x())),
            Contract(
                *("z", (axis(I0, 4), axis(I1, 3)), (axis(R0, 6),)),
                *(Load("y", (I0, R0), F32), Load("w", (R0, I1), F32), (I0,), (I1,), F32),
            ),
            Reduce("total", (axis(I0, 4),), (axis(R0, 3),), "sum", (Load("z", (I0, R0), F32),), F32),
            Extern(("t",), aten.t.default, (BufferRef("z"),), is_view=True),
        ],
        ["x", "w"],
        *("total", "t"),
    )
    return replace(example, **changes)  # type: ignore[arg-type]


def with_node(position: int, change: Callable[[Node], Node]) -> Program:
    kernel = two_step()
    nodes = list(kernel.nodes)
    nodes[position] = change(nodes[position])
    return replace(kernel, nodes=tuple(nodes))


def changed(position: int, **fields: object) -> Program:
    return with_node(position, lambda node: replace(node, **fields))  # type: ignore[arg-type]


def with_library(**calls: Node) -> Program:
    return replace(two_step(), library={out: (call,) for out, call in calls.items()})


def refused(example: Program, rule: str) -> VerifyError:
    with pytest.raises(VerifyError, match=re.escape(rule)) as caught:
        verify_program(example)
    return caught.value


@pytest.mark.parametrize(
    "expr",
    [
        x(),
        x(3 - I0, FloorDiv(I1, 2)),
        op("where", op("lt", x(), Const(0.0, F32)), x(), op("mul", x(), Const(2.0, F32))),
        x(I0 - 2, I1, mask=op("ge", IndexValue(I0), const(2, I64))),
        Load("x", (Load("where", (I0,), I64), I1), F32),
        Cast(IndexValue(6 * I0 + I1), F32),
        Random("normal", Load("seed", (), I64), 6 * I0 + I1),
        op("floordiv", IndexValue(I0), const(3, I64)),
    ],
    ids=["load", "reversed", "where", "masked", "gather", "index", "random", "integers"],
)
def test_well_formed_expressions_pass(expr: Expr) -> None:
    verify_program(one_map(expr))


@pytest.mark.parametrize(
    ("expr", "rule"),
    [
        (Op("frobnicate", (x(),), F32), "no scalar operation 'frobnicate'"),
        (Op("add", (x(),), F32), "add takes 2 operands, not 1"),
        (Op("add", (x(), Const(1.0, F64)), F32), "operands of add differ: torch.float32, torch.float64"),
        (Op("lt", (x(), x()), F32), "lt of torch.float32 gives torch.bool, not torch.float32"),
        (Op("exp", (x(),), F64), "exp of torch.float32 gives torch.float32, not torch.float64"),
        (Op("exp", (IndexValue(I0),), I64), "exp is not defined on torch.int64"),
        (Op("truediv", (IndexValue(I0), IndexValue(I1)), I64), "truediv is not defined on torch.int64"),
        (Op("and", (x(), x()), F32), "and is not defined on torch.float32"),
        (Op("where", (x(), x(), x()), F32), "where chooses by a bool, not by torch.float32"),
        (Const(1, F32), "the constant 1 has dtype torch.float32"),
        (Const(1.5, I64), "the constant 1.5 has dtype torch.int64"),
        (Random("poisson", Load("seed", (), I64), I0), "no random distribution 'poisson'"),
        (Random("normal", x(), I0), "a seed is int64, not torch.float32"),
        (TileRef("t", F32), "t names a tile, outside of any kernel"),
        (Load("nowhere", (I0,), F32), "nowhere is unknown"),
        (x(dtype=BF16), "x holds torch.float32, it is loaded as torch.bfloat16"),
        (x(I0), "x has 2 dimensions, its index has 1"),
        (x(x(), I1), "an index into x is not int64"),
        (x(mask=x()), "the mask of a load of x is no bool"),
        (x(R0, I1), "r0 is neither an axis nor a size"),
        (IndexValue(LENGTH), "s0 is neither an axis nor a size"),
        (IndexValue(sympy.floor(I0 / 2)), "an index has no operation floor"),
        (x(I0 + 1, I1), "x is accessed at i0 + 1, which takes values from 1 to 4, outside [0, 4)"),
        (x(I0, I1 - 1), "x is accessed at i1 - 1, which takes values from -1 to 4, outside [0, 6)"),
        (x(I0, sympy.Integer(6)), "x is accessed at 6, which takes values from 6 to 6, outside [0, 6)"),
        (x(I1, I0), "x is accessed at i1, which takes values from 0 to 5, outside [0, 4)"),
        (x(Mod(I0 - I1, 3) + 4, I1), "x is accessed at Mod(i0 - i1, 3) + 4, which takes values from 4 to 6"),
    ],
)
def test_broken_expressions_are_refused(expr: Expr, rule: str) -> None:
    error = refused(one_map(expr), rule)
    assert error.message.startswith("node out: ")


def test_a_python_number_is_no_index() -> None:
    verify_program(one_map(x(sympy.Integer(3), I1)))  # an equal one that was good before does not help
    refused(one_map(Load("x", (3, I1), F32)), "the index 3 is no sympy expression")  # type: ignore[arg-type]


def test_nothing_is_out_of_bounds_where_there_are_no_points() -> None:
    verify_program(one_map(x(I0 + 100, I1), rows=0))


def test_indices_that_may_be_in_bounds_are_accepted() -> None:
    for index in (I0 + I0 - 3 * FloorDiv(I0, 2), Mod(7 * I0, 6) - 2, Mod(I0, 8) + I0 - I0):
        verify_program(one_map(x(sympy.Integer(0), index)))


@given(expressions(), boxes())
def test_only_real_accesses_outside_are_refused(built: Built, box: Box) -> None:
    """Whenever the verifier speaks, some point is outside; and where bounds are sharp it misses none."""
    result = bounds(built[0], box)
    assert result is not None
    for length in {1, 4, max(1, int(result[1])), max(1, int(result[1]) + 1)}:
        shape = [int(size) for size in box.values()]
        example = program(
            [buffer("x", (length,)), buffer("out", shape)],
            [Map("out", tuple(Axis(a, n) for a, n in box.items()), Load("x", (built[0],), F32))],
            ["x"],
            "out",
        )
        inside = all(0 <= built[1].at(point) < length for point in points(box))
        try:
            verify_program(example)
        except VerifyError:
            assert not inside
        else:
            symbols = [part for part in sympy.preorder_traversal(built[0]) if part.is_Symbol]
            sharp = len(symbols) == len(set(symbols)) and not built[0].has(Mod)
            assert inside or not sharp


def test_a_whole_program_passes() -> None:
    verify_program(two_step())


@pytest.mark.parametrize(
    ("example", "rule"),
    [
        (changed(0, axes=(axis(I0, 4),)), "it has 1 axes, its buffer 2 dimensions"),
        (changed(0, axes=(axis(I0, 4), axis(I1, 5))), "its axes have sizes [4, 5], its buffer has shape [4, 6]"),
        (changed(0, axes=(axis(I0, 4), axis(I0, 6))), "an axis occurs twice"),
        (changed(0, expr=Cast(x(), F64)), "torch.float64 is written to a buffer of torch.float32"),
        (changed(0, expr=Load("z", (I0, sympy.Integer(0)), F32)), "z is read before it is written"),
        (changed(0, expr=Load("y", (I0, I1), F32)), "y is read before it is written"),
        (changed(0, out="x"), "x is written twice, or is an input"),
        (changed(0, out="q"), "q is not among the buffers"),
        (changed(1, accumulate=BF16), "dot of torch.float32 gives torch.float32, not torch.bfloat16"),
        (changed(1, lhs=Cast(Load("y", (I0, R0), F32), BF16)), "factors of a product differ"),
        (changed(1, rows=(I1,), columns=(I0,)), "i1 is a row axis of a product, but its right side varies along it"),
        (changed(1, rows=(), columns=(I0,)), "i0 is a column axis of a product, but its left side varies along it"),
        (changed(1, rows=(R0,)), "r0 is no parallel axis, it cannot be a row or column of a product"),
        (with_library(z=Extern(("t",), aten.t.default, (BufferRef("y"),))), "its library form gives other"),
        (with_library(z=Extern(("z",), aten.t.default, (BufferRef("t"),))), "its library form reads t too early"),
        (
            with_library(z=Map("z", (axis(I0, 4), axis(I1, 3)), x(I0, I1 + 4))),
            "takes values from 4 to 6, outside [0, 6)",
        ),
        (
            with_library(total=Extern(("total",), aten.t.default, (BufferRef("z"),))),
            "stands beside no product: total",
        ),
        (changed(2, op="mean"), "no reduction 'mean'"),
        (changed(2, op="dot"), "a dot is a Contract, not a Reduce"),
        (changed(2, op="any"), "any takes bools, not torch.float32"),
        (changed(2, op="argmax"), "argmax takes 2 values, not 1"),
        (changed(2, dtype=F64), "sum of torch.float32 gives torch.float32, not torch.float64"),
        (changed(2, over=(axis(I0, 3),)), "an axis occurs twice"),
        (changed(3, outs=("total",)), "total is written twice"),
        (changed(3, args=(BufferRef("t"),)), "t is read before it is written"),
        (changed(3, args=(BufferRef("z"), [LENGTH])), "the size s0 is unknown"),
        (two_step(outputs=(BufferRef("y"), BufferRef("q"))), "q is read before it is written"),
        (two_step(outputs=(LENGTH,)), "the size s0 is unknown"),
        (two_step(inputs=("x", "x")), "x is written twice, or is an input"),
        (two_step(inputs=("x",)), "w is read before it is written"),
        (two_step(buffers={**two_step().buffers, "x": buffer("other", (4, 6))}), "buffer other is filed under x"),
    ],
)
def test_broken_programs_are_refused(example: Program, rule: str) -> None:
    refused(example, rule)


def laid_out(example: Program, name: str, strides: tuple[int, ...]) -> Program:
    """The program with one buffer in another layout, as a pass may choose where kernels alone touch it."""
    whole = example.buffers[name]
    return replace(
        example, buffers={**example.buffers, name: replace(whole, strides=tuple(map(sympy.Integer, strides)))}
    )


CHANGED: list[tuple[Callable[[Program], Program], str]] = [
    (lambda example: replace(example, nodes=example.nodes[::-1]), "z is read before it is written"),
    (lambda example: replace(example, nodes=example.nodes[1:]), "y is read before it is written"),
    (lambda example: replace(example, nodes=(*example.nodes, example.nodes[0])), "y is written twice"),
    (
        lambda example: replace(example, buffers={**example.buffers, "x": buffer("x", (4, 6), F64)}),
        "x holds torch.float64",
    ),
    (lambda example: replace(example, buffers={**example.buffers, "x": buffer("x", (4, 5))}), "outside \\[0, 5"),
    (
        lambda example: replace(example, buffers={**example.buffers, "y": buffer("y", (4, 6), F64)}),
        "torch.float32 is written to",
    ),
    (lambda example: replace(example, inputs=example.inputs[:1]), "w is read before it is written"),
    (lambda example: laid_out(example, "z", (1, 4)), "z has another layout than when the call was made"),
    (lambda example: laid_out(example, "t", (4, 1)), "t has another layout than when the call was made"),
]


@pytest.mark.parametrize(("change", "rule"), CHANGED)
def test_nodes_that_passed_are_refused_where_their_buffers_or_their_place_have_changed(change, rule) -> None:
    kernel, before = two_step(), Verified()
    verify_program(kernel, before)
    verify_program(kernel, before)
    with pytest.raises(VerifyError, match=rule):
        verify_program(change(kernel), before)


def test_a_node_that_passed_is_refused_where_a_size_is_unknown() -> None:
    reported = Map("out", (axis(I0, 4),), IndexValue(LENGTH))
    example, before = program([buffer("out", (4,), I64)], [reported], [LENGTH], "out"), Verified()
    verify_program(example, before)
    with pytest.raises(VerifyError, match="s0"):
        verify_program(replace(example, inputs=()), before)


def test_the_origin_is_part_of_the_error() -> None:
    origins = {"total": Origin("sum_1", "model.head", "model.py:7")}
    error = refused(replace(changed(2, dtype=F64), origins=origins), "node total: sum of")
    assert error.origin == origins["total"]
    assert "model.py:7" in str(error)


def test_symbolic_sizes_agree_when_they_are_equal_as_numbers() -> None:
    def doubled(extent: sympy.Expr) -> Program:
        node = Map("out", (axis(I0, extent),), Load("x", (FloorDiv(I0, 2),), F32))
        return program([buffer("x", (LENGTH,)), buffer("out", (2 * LENGTH + 2,))], [node], ["x"], "out", LENGTH + 1)

    verify_program(doubled(2 * (LENGTH + 1)))
    refused(doubled(2 * LENGTH), "its axes have sizes")


@pytest.mark.parametrize("index", [I0, Mod(I0 + 1, 4)], ids=["plain", "computed"])
def test_ten_thousand_nodes_are_verified_in_seconds(index: sympy.Expr) -> None:
    count = 10_000
    names = ["x", *(f"b{k}" for k in range(count))]
    nodes = [
        Map(out, (axis(I0, 4), axis(I1, 6)), op("exp", op("add", Load(source, (index, I1), F32), Const(float(k), F32))))
        for k, (source, out) in enumerate(itertools.pairwise(names))
    ]
    example = program([buffer(name, (4, 6)) for name in names], nodes, ["x"], names[-1])
    start = time.perf_counter()
    verify_program(example)
    assert time.perf_counter() - start < 10  # 0.3 s on an idle machine


def test_one_expression_ten_thousand_operations_deep() -> None:
    root = x()
    for k in range(10_000):
        root = op("add", root, Const(float(k), F32))
    verify_program(one_map(root))
