"""Scatters in both IRs: semantics, refusals, text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import sympy
import torch

from fusion.lowering.errors import VerifyError
from fusion.lowering.indexing import FloorDiv
from fusion.lowering.interpret import run_kernel, run_program
from fusion.lowering.ir.expr import Cast, Const, IndexValue, Load, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Kernel, Role, Store
from fusion.lowering.ir.program import Map, Program, Scatter
from fusion.lowering.printer import format_kernel, format_program
from fusion.lowering.verify import verify_kernel, verify_program
from tests.lowering.building import F32, F64, I0, I1, I64, R0, axis, buffer, kernel, param, program

AT = Load("at", (I0,), I64)
SCATTER = Scatter(
    "out", (axis(I0, 6), axis(I1, 3)), "start", "sum", (AT, IndexValue(I1)), Load("x", (I0, I1), F32), None
)
BELOW = op("lt", AT, const(3, I64))


def scattering(node: Scatter = SCATTER) -> Program:
    """4 × 3 ones, to which six rows of x are added at the rows that `at` holds."""
    return program(
        [buffer("x", (6, 3)), buffer("at", (6,), I64), buffer("start", (4, 3)), buffer("out", (4, 3))],
        [Map("start", (axis(I0, 4), axis(I1, 3)), Const(1.0, F32)), node],
        ["x", "at"],
        "out",
    )


ROWS = torch.tensor([2, 0, 2, 2, 3, 0])
X = torch.arange(18.0).view(6, 3) - 8

MEANING = {"sum": "sum", "prod": "prod", "max": "amax", "min": "amin"}


@pytest.mark.parametrize("op", MEANING)
@pytest.mark.parametrize("exact", [True, False])
def test_sources_are_combined_with_the_initial_values(op, exact):
    example = scattering(replace(SCATTER, op=op))
    verify_program(example)
    (result,) = run_program(example, [X, ROWS], exact=exact)
    want = torch.ones(4, 3).scatter_reduce(0, ROWS[:, None].expand(-1, 3), X, MEANING[op])
    torch.testing.assert_close(result, want if exact else want.double())


def test_points_outside_the_condition_are_not_written():
    example = scattering(replace(SCATTER, op="store", where=BELOW))
    verify_program(example)
    (result,) = run_program(example, [X, torch.tensor([1, 7, 0, 3, -0, 5]) * torch.tensor([1, 1, 1, 1, 9, 1])])
    assert result[1].equal(X[0]) and result[3].eq(1).all() and result[2].eq(1).all()


def test_places_outside_are_refused():
    with pytest.raises(VerifyError, match=re.escape("reaches 4, outside [0, 4)")):
        run_program(scattering(), [X, torch.tensor([0, 1, 2, 3, 4, 0])])


def test_an_initial_value_that_is_an_input_is_written_in_place():
    example = program(
        [buffer("x", (6, 3)), buffer("at", (6,), I64), buffer("start", (4, 3)), buffer("out", (4, 3))],
        [SCATTER],
        ["x", "at", "start"],
        "out",
    )
    verify_program(example)
    start = torch.zeros(4, 3)
    run_program(example, [X, ROWS, start])
    torch.testing.assert_close(start, torch.zeros(4, 3).index_add(0, ROWS, X))


@pytest.mark.parametrize(
    ("node", "rule"),
    [
        (replace(SCATTER, start="x"), "it begins as x, which has another layout"),
        (replace(SCATTER, start="out"), "out is read before it is written"),
        (replace(SCATTER, op="mean"), "a scatter has no operation mean"),
        (replace(SCATTER, value=Cast(SCATTER.value, F64)), "torch.float64 is written to a buffer of torch.float32"),
        (replace(SCATTER, index=(AT,)), "it has 1 indices into out"),
        (replace(SCATTER, index=(AT, IndexValue(I1, torch.int32))), "an index is no int64"),
        (replace(SCATTER, where=AT), "its condition is no bool"),
        (replace(SCATTER, value=Load("start", (I0, I1), F32)), "start is accessed at"),
    ],
)
def test_broken_scatters_are_refused(node, rule):
    with pytest.raises(VerifyError, match=re.escape(rule)):
        verify_program(scattering(node))


def test_an_overwritten_buffer_has_no_other_reader():
    example = scattering()
    reader = Map("again", (axis(I0, 4), axis(I1, 3)), Load("start", (I0, I1), F32))
    buffers = {**example.buffers, "again": buffer("again", (4, 3))}
    with pytest.raises(VerifyError, match="start is needed elsewhere, but is overwritten"):
        verify_program(replace(example, buffers=buffers, nodes=(*example.nodes, reader)))


def test_axes_along_which_points_may_collide():
    assert [str(each.symbol) for each in SCATTER.colliding] == ["i0"]
    shifted = replace(SCATTER, index=(AT, IndexValue(I1 + 1)))
    assert [str(each.symbol) for each in shifted.colliding] == ["i0"]
    halved = replace(SCATTER, index=(AT, IndexValue(FloorDiv(I1, sympy.Integer(2)))))
    assert [str(each.symbol) for each in halved.colliding] == ["i0", "i1"]
    both = replace(SCATTER, index=(AT, IndexValue(I0 + I1)))
    assert [str(each.symbol) for each in both.colliding] == ["i0", "i1"]


# Kernels --------------------------------------------------------------------------------------------------------------

OFFSET = op("add", op("mul", Load("at", (R0,), I64), const(3, I64)), IndexValue(I0))
UPDATE = Store("out", OFFSET, Load("x", (3 * R0 + I0,), F32), "sum", (I0, R0))


def updating(store: Store = UPDATE) -> Kernel:
    params = (param("x", (6, 3)), param("at", (6,), I64), param("out", (4, 3), written=True))
    return kernel(params, {I0: (3, Role.GRID), R0: (6, Role.WHOLE)}, store)


def test_a_kernel_updates_its_argument():
    verify_kernel(updating())
    out = torch.ones(4, 3)
    run_kernel(updating(), [X, ROWS, out])
    torch.testing.assert_close(out, torch.ones(4, 3).index_add(0, ROWS, X))


@pytest.mark.parametrize(
    ("store", "rule"),
    [
        (replace(UPDATE, axes=None), "an update of elements does not name its axes"),
        (replace(UPDATE, op="any"), "a store has no operation any"),
        (replace(UPDATE, axes=(I0,)), "the value varies along an axis that the offset does not"),
        (replace(UPDATE, where=Load("at", (R0,), I64)), "its condition is no bool"),
    ],
)
def test_broken_updates_are_refused(store, rule):
    with pytest.raises(VerifyError, match=re.escape(rule)):
        verify_kernel(updating(store))


def test_how_they_read():
    text = format_program(scattering(replace(SCATTER, where=BELOW)))
    assert "out: f32[4, 3] = scatter(i0:6, i1:3; into start) [at[i0], index(i1)] += x[i0, i1] where at[i0] < 3" in text
    text = format_kernel(updating(replace(UPDATE, op="max", where=op("lt", Load("at", (R0,), I64), const(3, I64)))))
    assert "store out[at[r0] * 3 + index(i0)] max= x[3*r0 + i0]   at each i0 r0 where at[r0] < 3" in text
