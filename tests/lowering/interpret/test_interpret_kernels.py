"""Kernels against torch, and evaluation errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch

from fusion.lowering.errors import VerifyError
from fusion.lowering.interpret import evaluate as evaluator
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.expr import Cast, Const, IndexValue, Load
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Stmt, Store
from tests.lowering.building import BF16, F32, F64, I0, I1, I64, LENGTH, R0, R1, kernel, param
from tests.lowering.lowered import same


def softmax_kernel(role: Role, rows: int | sympy.Expr = 5, length: int = 11) -> Kernel:
    x = Load("x", (length * I0 + R0,), F32)
    top = Fold("top", "max", (x,), (R0,), F32)
    exp = op("exp", op("sub", x, top.ref))
    total = Fold("total", "sum", (exp,), (R0,), F32)
    store = Store("out", length * I0 + R0, op("truediv", exp, total.ref))
    body: tuple[Stmt, ...] = (top, total, store)
    if role is Role.LOOP:
        body = tuple(Loop((R0,), (stmt,)) for stmt in body)
    sizes = (rows,) if isinstance(rows, sympy.Symbol) else ()
    return kernel(
        [param("x", (rows, length)), param("out", (rows, length), written=True)],
        {I0: (rows, Role.GRID), R0: (length, role)},
        *body,
        sizes=sizes,
    )


@pytest.mark.parametrize("points", [1, 30, 1 << 22])
@pytest.mark.parametrize("role", [Role.WHOLE, Role.LOOP])
def test_a_kernel_over_rows(role: Role, points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "BOX_POINTS", points)
    x, out = torch.randn(5, 11), torch.empty(5, 11)
    run_kernel(softmax_kernel(role), [x, out])
    torch.testing.assert_close(out, torch.softmax(x, 1))


@pytest.mark.parametrize("role", [Role.WHOLE, Role.LOOP])
def test_in_float64_nothing_is_rounded(role: Role) -> None:
    x, out = torch.randn(5, 11, dtype=torch.float64), torch.empty(5, 11, dtype=torch.float64)
    run_kernel(softmax_kernel(role), [x, out], exact=False)
    torch.testing.assert_close(out, torch.softmax(x, 1), rtol=1e-14, atol=0)
    with pytest.raises(VerifyError, match=r"x is torch.float32.*not torch.float64"):
        run_kernel(softmax_kernel(role), [x.float(), out], exact=False)


@pytest.mark.parametrize("points", [1, 30, 1 << 22])
def test_a_loop_with_running_values(points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "BOX_POINTS", points)
    load = Load("x", (11 * I0 + R0,), F32)
    top = Fold("top", "max", (load,), (R0,), F32)
    moved = op("exp", op("sub", top.before, top.ref))
    total = Fold("total", "sum", (op("exp", op("sub", load, top.ref)),), (R0,), F32)
    total = replace(total, carry=op("mul", total.before, moved))
    store = Store("out", I0, op("add", top.ref, op("log", total.ref)))
    params = [param("x", (5, 11)), param("out", (5,), written=True)]
    example = kernel(params, {I0: (5, Role.GRID), R0: (11, Role.LOOP)}, Loop((R0,), (top, total)), store)
    x, out = torch.randn(5, 11) * 10, torch.empty(5)
    run_kernel(example, [x, out])
    torch.testing.assert_close(out, torch.logsumexp(x, 1))


def test_a_kernel_takes_its_sizes() -> None:
    x, out = torch.randn(3, 11), torch.empty(3, 11)
    run_kernel(softmax_kernel(Role.WHOLE, LENGTH), [x, out], [3])
    torch.testing.assert_close(out, torch.softmax(x, 1))


def test_a_kernel_writes_through_storage_offsets_and_strides() -> None:
    example = kernel(
        [param("x", (2, 3), strides=(1, 2)), param("out", (3, 2), written=True, strides=(5, 1))],
        {I0: (2, Role.GRID), I1: (3, Role.GRID)},
        Store("out", 5 * I1 + I0, op("neg", Load("x", (2 * I1 + I0,), F32))),
    )
    memory = torch.zeros(40)
    x, out = torch.randn(3, 2).t(), memory[7:].as_strided((3, 2), (5, 1), 7)
    run_kernel(example, [x, out])
    same(out.contiguous(), -x.t().contiguous())
    assert memory.count_nonzero() == 6


@pytest.mark.parametrize("points", [1, 50, 1 << 22])
def test_a_kernel_with_a_product_and_an_epilogue(points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "BOX_POINTS", points)
    m, n, k = 4, 6, 50
    dot = Fold(
        "acc", "dot", (Load("a", (k * I0 + R0,), BF16), Load("b", (n * R0 + I1,), BF16)), (R0,), F32, (I0,), (I1,)
    )
    example = kernel(
        [param("a", (m, k), BF16), param("b", (k, n), BF16), param("out", (m, n), BF16, written=True)],
        {I0: (m, Role.GRID), I1: (n, Role.GRID), R0: (k, Role.LOOP)},
        Loop((R0,), (dot,)),
        Store("out", n * I0 + I1, Cast(op("maximum", dot.ref, Const(0.0, F32)), BF16)),
    )
    a, b, out = torch.randn(m, k, dtype=BF16), torch.randn(k, n, dtype=BF16), torch.empty(m, n, dtype=BF16)
    run_kernel(example, [a, b, out])
    torch.testing.assert_close(out, (a.float() @ b.float()).relu().to(BF16))


@pytest.mark.parametrize("points", [1, 5, 1 << 22])
def test_a_tile_that_is_folded_again(points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "BOX_POINTS", points)
    x, out = torch.randn(2, 7, 3), torch.empty(2)
    inner = Fold("inner", "sum", (Load("x", (21 * I0 + 3 * R1 + R0,), F32),), (R0,), F32)
    outer = Fold("outer", "max", (op("add", inner.ref, Load("x", (21 * I0 + 3 * R1,), F32)),), (R1,), F32)
    axes = {I0: (2, Role.GRID), R0: (3, Role.WHOLE), R1: (7, Role.WHOLE)}
    params = [param("x", (2, 7, 3)), param("out", (2,), written=True)]
    run_kernel(kernel(params, axes, inner, outer, Store("out", I0, outer.ref)), [x, out])
    torch.testing.assert_close(out, (x.sum(2) + x[:, :, 0]).amax(1))


def test_the_following_kernel_of_a_launch_runs_after_the_whole_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "BOX_POINTS", 4)
    params = [param("x", (6, 3)), param("rows", (6,), written=True), param("total", (), written=True)]
    row = Fold("row", "sum", (Load("x", (3 * I0 + R0,), F32),), (R0,), F32)
    total = Fold("total", "sum", (Load("rows", (R0,), F32),), (R0,), F32)
    last = kernel(params[1:], {R0: (6, Role.WHOLE)}, total, Store("total", sympy.Integer(0), total.ref))
    first = kernel(params, {I0: (6, Role.GRID), R0: (3, Role.WHOLE)}, row, Store("rows", I0, row.ref))
    x, rows, out = torch.randn(6, 3), torch.empty(6), torch.empty(())
    run_kernel(replace(first, then=last), [x, rows, out])
    torch.testing.assert_close(out, x.sum())


def test_the_kernels_beside_another_in_a_launch_run_too() -> None:
    params = [param("x", (6,)), param("a", (6,), written=True), param("y", (2, LENGTH)), param("b", (2,), written=True)]
    total = Fold("total", "sum", (Load("y", (LENGTH * I0 + R0,), F32),), (R0,), F32)
    sums = kernel(params[2:], {I0: (2, Role.GRID), R0: (LENGTH, Role.WHOLE)}, total, Store("b", I0, total.ref))
    sums = replace(sums, sizes=(LENGTH,))
    first = kernel(params, {I0: (6, Role.GRID)}, Store("a", I0, op("neg", Load("x", (I0,), F32))))
    x, a, y, b = torch.randn(6), torch.empty(6), torch.randn(2, 5), torch.empty(2)
    run_kernel(replace(first, sizes=(LENGTH,), beside=(sums,)), [x, a, y, b], [5])
    torch.testing.assert_close(a, -x)
    torch.testing.assert_close(b, y.sum(1))


def test_the_following_kernel_may_read_other_tensors() -> None:
    params = [param("x", (6,)), *(param(name, (), written=True) for name in ("total", "top"))]
    total = Fold("total", "sum", (Load("x", (R0,), F32),), (R0,), F32)
    sums = kernel(params[:2], {R0: (6, Role.WHOLE)}, total, Store("total", sympy.Integer(0), total.ref))
    most = Fold("most", "max", (Load("x", (R0,), F32),), (R0,), F32)
    last = kernel([params[0], params[2]], {R0: (6, Role.WHOLE)}, most, Store("top", sympy.Integer(0), most.ref))
    whole = kernel(params, {R0: (6, Role.WHOLE)}, total, Store("total", sympy.Integer(0), total.ref))
    x, out, top = torch.randn(6), torch.empty(()), torch.empty(())
    run_kernel(replace(whole, then=replace(sums, then=last)), [x, out, top])
    torch.testing.assert_close([out, top], [x.sum(), x.max()])


def test_a_kernel_that_scatters() -> None:
    example = kernel(
        [param("where", (5,), I64), param("out", (5,), written=True)],
        {I0: (5, Role.GRID)},
        Store("out", Load("where", (I0,), I64), Cast(IndexValue(I0), F32)),
    )
    where, out = torch.randperm(5), torch.empty(5)
    run_kernel(example, [where, out])
    same(out, torch.argsort(where).float())
    with pytest.raises(VerifyError, match=r"out.* reaches 5"):
        run_kernel(example, [where + 1, out])


def test_a_kernel_over_an_empty_axis() -> None:
    for role in (Role.GRID, Role.WHOLE):
        example = kernel(
            [param("x", (0,)), param("out", (0,), written=True), param("total", (), written=True)],
            {I0: (0, Role.GRID)} if role is Role.GRID else {R0: (0, Role.WHOLE)},
            *(
                []
                if role is Role.GRID
                else [
                    f := Fold("f", "sum", (Load("x", (R0,), F32),), (R0,), F32),
                    Store("total", sympy.Integer(0), f.ref),
                ]
            ),
            Store("out", I0 if role is Role.GRID else R0, Load("x", (I0 if role is Role.GRID else R0,), F32)),
        )
        total = torch.tensor(7.0)
        run_kernel(example, [torch.empty(0), torch.empty(0), total])
        assert total == (7 if role is Role.GRID else 0)


def test_kernels_that_reach_outside_are_refused() -> None:
    for load, store in ((I0 + 1, I0), (I0, I0 + 1), (I0 - 1, I0), (I0, 2 * I0)):
        example = kernel(
            [param("x", (4,)), param("out", (4,), written=True)],
            {I0: (4, Role.GRID)},
            Store("out", store, Load("x", (load,), F32)),
        )
        with pytest.raises(VerifyError, match="outside"):
            run_kernel(example, [torch.randn(8)[:4], torch.empty(8)[:4]])


def test_a_stored_value_varies_no_more_than_its_offset_and_has_the_dtype_of_the_param() -> None:
    params = [param("x", (4,)), param("out", (4,), written=True)]
    wide = kernel(params, {I0: (4, Role.GRID)}, Store("out", sympy.Integer(0), Load("x", (I0,), F32)))
    with pytest.raises(VerifyError, match="varies where"):
        run_kernel(wide, [torch.randn(4), torch.empty(4)])
    other = kernel(params, {I0: (4, Role.GRID)}, Store("out", I0, Cast(Load("x", (I0,), F32), F64)))
    with pytest.raises(VerifyError, match="float64 is stored"):
        run_kernel(other, [torch.randn(4), torch.empty(4)])


@pytest.mark.parametrize(
    "x",
    [torch.randn(5, 12), torch.randn(5, 11).double(), torch.randn(11, 5).t(), torch.randn(55)],
    ids=["shape", "dtype", "strides", "rank"],
)
def test_arguments_of_a_kernel_must_be_as_declared(x: torch.Tensor) -> None:
    with pytest.raises(VerifyError, match="kernel k: x"):
        run_kernel(softmax_kernel(Role.WHOLE), [x, torch.empty(5, 11)])
