"""Rewriting bodies: rewrites without effect return the same object, others preserve the meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.expr import Const, Load, rewrite
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    Loop,
    Role,
    Stmt,
    Store,
    map_statements,
    map_values,
    rename,
    statements,
    values_of,
    with_values,
)
from fusion.lowering.verify import verify_kernel
from tests.lowering.building import F32, I0, R0, kernel, param

TOTAL = Fold("total", "sum", (Load("x", (7 * I0 + R0,), F32),), (R0,), F32)


def rows() -> Kernel:
    """Rows over their sums, both looped over."""
    share = Store("out", 7 * I0 + R0, op("truediv", Load("x", (7 * I0 + R0,), F32), TOTAL.ref))
    return kernel(
        [param("x", (4, 7)), param("out", (4, 7), written=True)],
        {I0: (4, Role.GRID), R0: (7, Role.LOOP)},
        Loop((R0,), (TOTAL,)),
        Loop((R0,), (share,)),
    )


def run(example: Kernel) -> torch.Tensor:
    verify_kernel(example)
    x, out = torch.arange(1.0, 29.0).view(4, 7), torch.empty(4, 7)
    run_kernel(example, [x, out])
    return out


def test_a_body_that_stays_is_the_same_object() -> None:
    body = rows().body
    assert map_statements(body, lambda stmt: stmt) is body
    assert map_values(body, list) is body
    assert rename(body, {"x": "x", "out": "out"}) is body
    assert map_statements(list(body), lambda stmt: stmt) == body


def test_loops_that_hold_no_change_are_kept() -> None:
    first, second = rows().body
    changed = map_statements((first, second), lambda s: replace(s, param="y") if isinstance(s, Store) else s)
    assert changed[0] is first and changed[1] != second
    assert [store.param for store in statements(changed, Store)] == ["y"]


def test_renamed_parameters_mean_the_same() -> None:
    result = rows()
    names = {"x": "a", "out": "b"}
    params = tuple(replace(each, name=names[each.name]) for each in result.params)
    torch.testing.assert_close(run(replace(result, params=params, body=rename(result.body, names))), run(result))


def test_several_statements_for_one_mean_the_same() -> None:
    """A sum as two sums of half the elements."""
    result = rows()
    half = op("mul", TOTAL.args[0], Const(0.5, F32))
    halves = tuple(replace(TOTAL, name=f"half{k}", args=(half,)) for k in range(2))

    def split(stmt: Stmt) -> Stmt | tuple[Stmt, ...]:
        if stmt == TOTAL:
            return halves
        whole = op("add", halves[0].ref, halves[1].ref)
        return with_values(stmt, rewrite(values_of(stmt), {TOTAL.ref: whole}.get))

    parts = replace(result, body=map_statements(result.body, split))
    assert [fold.name for fold in statements(parts.body, Fold)] == ["half0", "half1"]
    torch.testing.assert_close(run(parts), run(result))


@pytest.mark.parametrize("kind", [Fold, Loop, Store])
def test_statements_of_one_kind(kind: type[Stmt]) -> None:
    body = rows().body
    assert list(statements(body, kind)) == [stmt for stmt in statements(body) if isinstance(stmt, kind)]
