"""The verifier on Kernels: accepts well-formed ones, and names the statement and the rule of each error."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import sympy
import torch

from fusion.lowering.errors import VerifyError
from fusion.lowering.ir.expr import Cast, Const, IndexValue, Load, Op, TileRef
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Store
from fusion.lowering.verify import verify_kernel
from tests.lowering.building import F32, F64, I0, I1, LENGTH, R0, R1, kernel, param

LOAD = Load("x", (6 * I0 + R0,), F32)


TOP = Fold("top", "max", (LOAD,), (R0,), F32)


TOTAL = Fold("total", "sum", (op("exp", op("sub", LOAD, TOP.ref)),), (R0,), F32)


OUT = Store("out", 6 * I0 + R0, op("truediv", op("exp", op("sub", LOAD, TOP.ref)), TOTAL.ref))


ROWS = Store("rows", I0, TOTAL.ref)


def rows_kernel(*body: object, role: Role = Role.WHOLE, sizes: tuple[sympy.Symbol, ...] = ()) -> Kernel:
    """x [4, 6] → out [4, 6], rows [4]; axes i0:4 on the grid, r0:6 and r1:6 in `role`."""
    params = [param("x", (4, 6)), param("out", (4, 6), written=True), param("rows", (4,), written=True)]
    axes = {I0: (4, Role.GRID), R0: (6, role), R1: (6, role)}
    return kernel(params, axes, *body, sizes=sizes)  # type: ignore[arg-type]


def refused_kernel(example: Kernel, rule: str) -> VerifyError:
    with pytest.raises(VerifyError, match=re.escape(rule)) as caught:
        verify_kernel(example)
    return caught.value


def test_well_formed_kernels_pass() -> None:
    verify_kernel(rows_kernel(TOP, TOTAL, OUT, ROWS))
    verify_kernel(rows_kernel(Loop((R0,), (TOP,)), Loop((R0,), (TOTAL,)), Loop((R0,), (OUT,)), ROWS, role=Role.LOOP))


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ((TOTAL, TOP, OUT, ROWS), "fold total: top is named before its fold"),
        ((TOP, TOP, TOTAL, OUT, ROWS), "fold top: two folds have the same name"),
        ((TOP, TOTAL, OUT), "header: rows is to be written, but nothing stores to it"),
        ((Loop((R0,), (TOP,)), TOTAL, OUT, ROWS), "loop over r0: r0 is no loop axis"),
        ((replace(TOP, over=(I0,)), TOTAL, OUT, ROWS), "fold top: it folds an axis that is not reduced"),
        ((replace(TOP, over=(R0, R0)), TOTAL, OUT, ROWS), "fold top: it folds an axis twice"),
        ((replace(TOP, op="mode"), TOTAL, OUT, ROWS), "fold top: no reduction 'mode'"),
        ((replace(TOP, dtype=F64), TOTAL, OUT, ROWS), "fold top: max of torch.float32 gives torch.float32"),
        ((TOP, TOTAL, OUT, replace(ROWS, param="x")), "header: rows is to be written"),
        ((TOP, TOTAL, OUT, ROWS, replace(ROWS, param="x")), "store to x: x is not a param that may be written"),
        ((TOP, TOTAL, OUT, ROWS, replace(ROWS, param="y")), "store to y: y is no param"),
        ((TOP, TOTAL, OUT, replace(ROWS, value=Cast(TOTAL.ref, F64))), "torch.float64 is stored to a param of"),
        ((TOP, TOTAL, OUT, replace(ROWS, value=TileRef("total", F64))), "total is torch.float32, it is named as"),
        ((TOP, TOTAL, OUT, replace(ROWS, value=LOAD)), "store to rows: the value varies along an axis that the offset"),
        ((TOP, TOTAL, OUT, replace(ROWS, offset=IndexValue(I0, torch.int32))), "its offset is torch.int32, not int64"),
        ((TOP, TOTAL, OUT, replace(ROWS, offset=I0 + 1)), "rows is accessed at i0 + 1, which takes values from 1 to 4"),
        ((TOP, TOTAL, OUT, replace(ROWS, offset=I1)), "i1 is neither an axis nor a size"),
        ((TOP, TOTAL, replace(OUT, value=Load("x", (7 * I0 + R0,), F32)), ROWS), "x is accessed at 7*i0 + r0"),
        ((TOP, TOTAL, replace(OUT, value=Load("x", (I0, R0), F32)), ROWS), "x has 1 dimensions, its index has 2"),
        ((TOP, TOTAL, replace(OUT, value=Load("y", (I0,), F32)), ROWS), "y is unknown"),
    ],
)
def test_broken_kernels_are_refused(body: tuple[object, ...], rule: str) -> None:
    error = refused_kernel(rows_kernel(*body), rule)
    assert error.message.startswith("kernel k, ")


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ((TOP, Loop((R0,), (TOTAL, OUT)), ROWS), "fold top: a fold over loop axes stands in a loop over exactly these"),
        ((Loop((R1,), (TOP,)), OUT, ROWS), "fold top: a fold over loop axes stands in a loop over exactly these"),
        ((Loop((R0, R1), (TOP,)), OUT, ROWS), "fold top: a fold over loop axes stands in a loop over exactly these"),
        ((Loop((R0,), (TOP, TOTAL)), OUT, ROWS), "fold total: it depends on running values, but carries nothing"),
        ((Loop((R0,), (Loop((R0,), (TOP,)),)), OUT, ROWS), "an axis is looped over inside its own loop"),
        ((Loop((R0,), (TOP,)), Loop((R0,), (TOTAL,)), OUT, ROWS), "store to out: it varies along r0, which has values"),
        (
            (
                Loop((R0,), (replace(TOP, args=(Load("x", (R1,), F32),)),)),
                Loop((R0,), (TOTAL,)),
                Loop((R0,), (OUT,)),
                ROWS,
            ),
            "fold top: it varies along r1, which has values only inside a loop",
        ),
    ],
)
def test_broken_loops_are_refused(body: tuple[object, ...], rule: str) -> None:
    refused_kernel(rows_kernel(*body, role=Role.LOOP), rule)


def test_a_fold_takes_axes_of_one_role() -> None:
    params = [param("x", (6,)), param("out", (6,), written=True)]
    fold = Fold("f", "sum", (Load("x", (R0,), F32),), (R0,), F32)
    axes = {R0: (6, Role.WHOLE), R1: (6, Role.LOOP)}
    store = Loop((R1,), (Store("out", R1, fold.ref),))
    verify_kernel(kernel(params, axes, fold, store))
    verify_kernel(kernel(params, axes, Loop((R1,), (fold, *store.body))))
    both = replace(fold, over=(R0, R1))
    refused_kernel(kernel(params, axes, Loop((R1,), (both,)), store), "it folds whole and loop axes at once")


def test_running_values_are_carried() -> None:
    factor = Op("sub", (TOP.before, TOP.ref), F32)
    total = replace(TOTAL, carry=Op("mul", (TOTAL.before, factor), F32))
    loop = Loop((R0,), (TOP, total))
    out = Loop((R0,), (OUT,))
    verify_kernel(rows_kernel(loop, out, ROWS, role=Role.LOOP))
    for body, rule in (
        ((Loop((R0,), (TOP, total, OUT)), ROWS), "store to out: it depends on running values, but carries nothing"),
        ((Loop((R0,), (total, TOP)), out, ROWS), "fold total: top is named before its fold"),
        ((loop, out, replace(ROWS, value=TOTAL.before)), "total is named as it was before a block, outside"),
        ((Loop((R0,), (TOP, replace(total, carry=Cast(factor, F64)))), out, ROWS), "it carries torch.float64"),
        ((Loop((R0,), (TOP, total), where=factor), out, ROWS), "it is skipped by torch.float32, no bool"),
    ):
        refused_kernel(rows_kernel(*body, role=Role.LOOP), rule)
    whole = (TOP, total, OUT, ROWS)
    refused_kernel(rows_kernel(*whole), "it carries, but stands in no loop of its own axes")


def test_the_sides_of_a_product() -> None:
    def product(rows: tuple[sympy.Symbol, ...], columns: tuple[sympy.Symbol, ...]) -> Kernel:
        dot = Fold(
            "acc", "dot", (Load("a", (8 * I0 + R0,), F32), Load("b", (5 * R0 + I1,), F32)), (R0,), F32, rows, columns
        )
        return kernel(
            [param("a", (4, 8)), param("b", (8, 5)), param("out", (4, 5), written=True)],
            {I0: (4, Role.GRID), I1: (5, Role.GRID), R0: (8, Role.LOOP)},
            Loop((R0,), (dot,)),
            Store("out", 5 * I0 + I1, dot.ref),
        )

    verify_kernel(product((I0,), (I1,)))
    refused_kernel(product((I1,), ()), "i1 is a row axis of a product, but its right side varies along it")
    refused_kernel(product((), (I0,)), "i0 is a column axis of a product, but its left side varies along it")
    refused_kernel(product((R0,), ()), "r0 is no parallel axis")


def test_sizes_must_be_passed() -> None:
    def reversing(sizes: tuple[sympy.Symbol, ...]) -> Kernel:
        params = [param("x", (LENGTH,)), param("out", (LENGTH,), written=True)]
        return kernel(
            params, {I0: (LENGTH, Role.GRID)}, Store("out", I0, Load("x", (LENGTH - 1 - I0,), F32)), sizes=sizes
        )

    verify_kernel(reversing((LENGTH,)))
    refused_kernel(reversing(()), "header: the size s0 of axis i0 is not passed")


def test_a_following_kernel_has_no_grid_and_no_parameters_of_its_own() -> None:
    first = rows_kernel(TOP, TOTAL, OUT)
    total = Fold("all", "sum", (Load("out", (R0,), F32),), (R0,), F32)
    store = Store("rows", sympy.Integer(0), total.ref)
    last = kernel(first.params[1:], {R0: (24, Role.WHOLE)}, total, store)
    verify_kernel(replace(first, then=last))
    refused_kernel(first, "rows is to be written, but nothing stores to it")
    own = kernel([*last.params, param("y", (4,))], {R0: (24, Role.WHOLE)}, total, store)
    refused_kernel(replace(first, then=own), "header: it follows in a launch that does not take y")
    grid = kernel(last.params, {I0: (4, Role.GRID)}, replace(ROWS, value=Const(0.0, F32)))
    refused_kernel(replace(first, then=grid), "its grid axes are not some of those of what it follows")


def test_a_kernel_that_follows_tile_by_tile_reads_its_own_tile() -> None:
    def added(offset: sympy.Expr, grid: int = 4) -> Kernel:
        total = Fold("all", "sum", (Load("made", (offset,), F32),), (R0,), F32)
        return kernel(params[1:], {I0: (grid, Role.GRID), R0: (3, Role.WHOLE)}, total, Store("out", I0, total.ref))

    params = [param("x", (4, 3)), param("made", (3, 4), written=True), param("out", (4,), written=True)]
    store = Store("made", 4 * I1 + I0, Load("x", (3 * I0 + I1,), F32))
    first = kernel(params, {I0: (4, Role.GRID), I1: (3, Role.GRID)}, store)
    example = replace(first, then=added(4 * R0 + I0))
    verify_kernel(example)
    assert [axis.symbol for axis in example.awaited] == [I1] and not first.awaited
    refused_kernel(replace(first, then=added(R0)), "it reads made where other tiles are written")
    refused_kernel(replace(first, then=added(4 * R0 + I0, 2)), "its grid axes are not some of those of what it follows")
    last = kernel(params[2:], {R0: (4, Role.WHOLE)}, Store("out", sympy.Integer(0), Const(0.0, F32)))
    refused_kernel(replace(first, then=replace(example.then, then=last)), "it follows what follows tile by tile")


def test_kernels_that_share_a_launch_are_independent_and_take_its_parameters() -> None:
    def scaled(source: str, target: str, size: int) -> Kernel:
        value = Op("mul", (Load(source, (I0,), F32), Const(2.0, F32)), F32)
        params = [param(source, (size,)), param(target, (size,), written=True)]
        return kernel(params, {I0: (size, Role.GRID)}, Store(target, I0, value))

    one, two, three = scaled("x", "a", 4), scaled("x", "b", 4), scaled("y", "c", 9)
    params = (*one.params, two.params[1], *three.params)
    whole = replace(one, params=params, beside=(two, three))
    verify_kernel(whole)
    assert [part.params for part in whole.parts] == [one.params, two.params, three.params]
    refused_kernel(replace(whole, params=params[:-1]), "it runs beside others in a launch that does not take c")
    refused_kernel(replace(one, params=params, beside=(two, scaled("b", "c", 4))), "one of them writes b")
    refused_kernel(replace(whole, beside=(two, two, three)), "it runs beside itself")
    refused_kernel(replace(whole, beside=(two, replace(two, name="again"), three)), "one of them writes b")
    refused_kernel(replace(one, params=params, beside=(replace(two, beside=(three,)), three)), "others run beside it")
    last = kernel(three.params, {R0: (9, Role.WHOLE)}, Store("c", sympy.Integer(0), Const(0.0, F32)))
    refused_kernel(replace(whole, then=last), "it runs beside others in a launch that goes on")


def test_names_in_the_header_are_distinct() -> None:
    store = Store("out", I0, Load("x", (I0,), F32))
    params = [param("x", (4,)), param("out", (4,), written=True)]
    refused_kernel(kernel([*params, params[0]], {I0: (4, Role.GRID)}, store), "two params have the same name")
    twice = kernel(params, {I0: (4, Role.GRID)}, store)
    refused_kernel(replace(twice, axes=twice.axes * 2), "an axis occurs twice")


def test_an_overwritten_element_is_read_before_at_the_same_index() -> None:
    """A mean that is recomputed after the norm of its row, and a row relative to its first element."""
    params = [param("x", (3, 4), written=True), param("out", (3,), written=True)]
    axes = {I0: (3, Role.GRID), R0: (4, Role.WHOLE)}
    over = Store("x", 4 * I0 + R0, op("exp", Load("x", (4 * I0 + R0,), F32)))
    first = Store("out", I0, Load("x", (4 * I0,), F32))
    verify_kernel(kernel(params, axes, first, over))
    refused_kernel(kernel(params, axes, over, first), "store to out: it reads x, which was overwritten")
    apart = Store("x", 4 * I0 + R0, op("sub", Load("x", (4 * I0 + R0,), F32), Load("x", (4 * I0,), F32)))
    refused_kernel(kernel(params, axes, first, apart), "store to x: it overwrites x at another place than it reads")
