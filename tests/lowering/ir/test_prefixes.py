"""Scans in both IRs: refusals, text, and their place in a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion.lowering.errors import VerifyError
from fusion.lowering.interpret import run_kernel, run_program
from fusion.lowering.ir.expr import Expr, IndexValue, Load
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Prefix, Role, Stmt, Store
from fusion.lowering.ir.prefixes import placed
from fusion.lowering.ir.program import Program, Scan
from fusion.lowering.printer import format_kernel, format_program
from fusion.lowering.verify import verify_kernel, verify_program
from tests.lowering.building import BF16, F32, F64, I0, I1, I64, R0, R1, axis, buffer, kernel, param, program

# Programs -------------------------------------------------------------------------------------------------------------

X = Load("x", (I0, I1), F32)
SCAN = Scan("out", (axis(I0, 4), axis(I1, 6)), I1, "sum", (X,), F32)


def scanned(node: Scan, dtype: torch.dtype = F32) -> Program:
    buffers = [buffer("x", (4, 6)), buffer("h", (4, 6), BF16), buffer("out", (4, 6), dtype)]
    return program(buffers, [node], ["x", "h"], "out")


def test_a_program_with_a_scan() -> None:
    example = scanned(SCAN)
    verify_program(example)
    assert "out: f32[4, 6] = running sum(i0:4, i1:6 along i1) x[i0, i1]" in format_program(example)
    x, h = torch.randn(4, 6), torch.zeros(4, 6, dtype=BF16)
    assert torch.equal(run_program(example, [x, h])[0], x.cumsum(1))  # type: ignore[arg-type]
    assert torch.equal(run_program(scanned(replace(SCAN, along=I0)), [x, h])[0], x.cumsum(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "dtype", "rule"),
    [
        (replace(SCAN, op="mean"), F32, "no scan 'mean'"),
        (replace(SCAN, along=R0), F32, "it runs along r0, which is no axis of it"),
        (replace(SCAN, dtype=F64), F64, "sum of torch.float32 gives torch.float32, not torch.float64"),
        (SCAN, F64, "torch.float32 is written to a buffer of torch.float64"),
        (replace(SCAN, op="argmax", dtype=I64), I64, "argmax takes 2 values, not 1"),
        (replace(SCAN, op="argmax", args=(X, X), dtype=I64), I64, "the index of argmax is torch.float32"),
        (
            replace(SCAN, args=(Load("h", (I0, I1), BF16),), dtype=BF16),
            BF16,
            "values of torch.bfloat16 are not scanned",
        ),
        (replace(SCAN, op="logsumexp", args=(IndexValue(I0),), dtype=I64), I64, "logsumexp of torch.int64"),
    ],
)
def test_broken_scans_are_refused(node: Scan, dtype: torch.dtype, rule: str) -> None:
    with pytest.raises(VerifyError, match=rule):
        verify_program(scanned(node, dtype))


# Kernels --------------------------------------------------------------------------------------------------------------

P = Prefix("p", "sum", (Load("x", (6 * I0 + R0,), F32),), R0, F32)
TOTAL = Fold("total", "sum", (P.ref,), (R0,), F32)
OUT = Store("out", 6 * I0 + R0, op("truediv", P.ref, TOTAL.ref))


def rows(*body: Stmt, role: Role = Role.WHOLE) -> Kernel:
    params = [param("x", (4, 6)), param("out", (4, 6), written=True)]
    return kernel(params, {I0: (4, Role.GRID), R0: (6, role), R1: (6, role)}, *body)


def test_a_kernel_with_a_scan() -> None:
    whole = rows(*placed([TOTAL, OUT], [P]))
    assert whole.body == (P, TOTAL, OUT)
    assert "p = running sum along r0 of x[6*i0 + r0]" in format_kernel(whole)
    walks = rows(*placed([Loop((R0,), (TOTAL,)), Loop((R0,), (OUT,))], [P]), role=Role.LOOP)
    first, second = walks.body
    assert isinstance(first, Loop) and isinstance(second, Loop)
    assert first.body == (P, TOTAL) and second.body[0] == replace(P, name="p_1")
    x = torch.rand(4, 6)
    for result in (whole, walks):
        verify_kernel(result)
        out = torch.empty(4, 6)
        run_kernel(result, [x, out])
        torch.testing.assert_close(out, x.cumsum(1) / x.cumsum(1).sum(1, keepdim=True))


def test_scans_of_scans_come_in_their_order() -> None:
    outer = Prefix("outer", "max", (P.ref,), R0, F32)
    store = replace(OUT, value=outer.ref)
    assert placed([store], [outer, P]) == (P, outer, store)
    loop = Loop((R0,), (store,))
    (once, again) = placed([loop, loop], [P, outer])
    assert isinstance(once, Loop) and isinstance(again, Loop)
    assert once.body == (P, outer, store)
    renamed: list[Expr] = [stmt.ref for stmt in again.body if isinstance(stmt, Prefix)]
    assert again.body[1] == Prefix("outer_1", "max", (renamed[0],), R0, F32)


def test_the_condition_of_an_update_names_the_scan_of_its_own_loop() -> None:
    update = Store("out", 6 * I0 + R0, P.ref, "sum", (I0, R0), op("lt", P.ref, Load("x", (I0,), F32)))
    _, second = placed([Loop((R0,), (TOTAL,)), Loop((R0,), (update,))], [P])
    assert isinstance(second, Loop)
    own, stored = second.body
    assert isinstance(own, Prefix) and own.name == "p_1"
    assert stored == replace(update, value=own.ref, where=op("lt", own.ref, Load("x", (I0,), F32)))


@pytest.mark.parametrize(
    ("body", "role", "rule"),
    [
        ((TOTAL, OUT), Role.WHOLE, "p is named before its fold"),
        ((P, P, TOTAL, OUT), Role.WHOLE, "scan p: two folds have the same name"),
        ((replace(P, along=I0), TOTAL, OUT), Role.WHOLE, "scan p: it runs along an axis that is not reduced"),
        ((replace(P, op="any"), TOTAL, OUT), Role.WHOLE, "scan p: no scan 'any'"),
        ((P, Loop((R0,), (TOTAL, OUT))), Role.LOOP, "scan p: a scan along a loop axis stands in a loop over exactly"),
        ((Loop((R0, R1), (P, replace(OUT, value=P.ref))),), Role.LOOP, "stands in a loop over exactly this axis"),
        ((Loop((R0,), (P, TOTAL)), Loop((R0,), (OUT,))), Role.LOOP, "p is named after the loop in which it is known"),
        ((Loop((R0,), (P, TOTAL, OUT)),), Role.LOOP, "a scan stands beside running values"),
    ],
)
def test_broken_kernels_are_refused(body: tuple[Stmt, ...], role: Role, rule: str) -> None:
    with pytest.raises(VerifyError, match=rule):
        verify_kernel(rows(*body, role=role))
