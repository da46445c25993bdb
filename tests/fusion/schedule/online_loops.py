"""Each body as two kernels: one loops once per fold, the other once for all, by the online rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy
import torch

from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.expr import Expr, TileRef, rewrite
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Loop, Param, Role, Stmt, Store, running
from fusion.lowering.verify import verify_kernel
from fusion.schedule.online import Online, online
from tests.fusion.schedule.folds import COLUMN, COLUMNS, F64, INF, LENGTH, ROW, ROWS, Folds, S


def chained(folds: Sequence[Fold]) -> tuple[Folds, Expr, Online]:
    """One loop: its accumulators, the value of the last fold, and the online rule's result for that fold."""
    values: dict[str, Expr] = {}
    looped: dict[str, Fold] = {}
    actual = Online((), folds[-1].ref)
    for fold in folds:
        args = rewrite(fold.args, lambda node: values.get(node.name) if isinstance(node, TileRef) else None)
        result = online(replace(fold, args=tuple(args)), looped)
        assert isinstance(result, Online), result
        looped.update({each.name: each for each in result.folds})
        values[fold.name] = result.value
        actual = result
    return tuple(looped.values()), actual.value, actual


def kernel_of(body: Sequence[Stmt], value: Expr, dtype: torch.dtype, products: torch.dtype) -> Kernel:
    shapes = {**dict.fromkeys("xyg", (ROWS, LENGTH)), "v": (LENGTH, COLUMNS), "w": (LENGTH,)}
    params = [_param(name, products if name == "v" else dtype, shape, False) for name, shape in shapes.items()]
    params.append(_param("out", value.dtype, (ROWS, COLUMNS), True))
    axes = ((ROW, ROWS, Role.GRID), (COLUMN, COLUMNS, Role.GRID), (S, LENGTH, Role.LOOP))
    listed = tuple(KernelAxis(symbol, sympy.Integer(size), role) for symbol, size, role in axes)
    return Kernel("k", tuple(params), (), listed, (*body, Store("out", COLUMNS * ROW + COLUMN, value)))


def _param(name: str, dtype: torch.dtype, shape: tuple[int, ...], written: bool) -> Param:
    sizes = tuple(sympy.Integer(size) for size in shape)
    strides = tuple(sympy.Mul(*sizes[k + 1 :]) for k in range(len(sizes)))
    return Param(name, dtype, sizes, strides, written)


def inputs(special: str = "") -> dict[str, torch.Tensor]:
    """Operands in float64.  Blocks are of 4 elements, so that the first ones have a block of their own."""
    generator = torch.Generator().manual_seed(1)
    shapes = {**dict.fromkeys("xyg", (ROWS, LENGTH)), "v": (LENGTH, COLUMNS), "w": (LENGTH,)}
    results = {name: torch.randn(shape, generator=generator, dtype=F64) for name, shape in shapes.items()}
    results["w"] = results["w"].abs() + 0.1
    x = results["x"]
    if special == "rising":
        x += torch.arange(LENGTH) * 40.0
    elif special == "low":
        x -= 1000.0
    elif special == "masked":
        x[0], x[1, :5], x[2, 5:], x[3, 3] = -INF, -INF, -INF, -INF
    elif special == "infinite":
        x[0, 5], x[1, 11], x[2, 0] = INF, INF, INF
        x[3, :4], x[3, 6] = -INF, INF
    elif special == "nan":
        x[0, 5], x[1, 11], x[2, 0] = (float("nan"),) * 3
        x[3, :4], x[3, 6] = -INF, float("nan")
    return results


def run(
    body: Sequence[Stmt], value: Expr, given: dict[str, torch.Tensor], dtype: torch.dtype, products: torch.dtype
) -> torch.Tensor:
    kernel = kernel_of(body, value, dtype, products)
    verify_kernel(kernel)
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=value.dtype)
    run_kernel(kernel, [*(t.to(products if name == "v" else dtype) for name, t in given.items()), out])
    return out


def in_one_loop(folds: Folds, given: dict[str, torch.Tensor], dtype: torch.dtype = F64, products: torch.dtype = F64):
    accumulators, value, _ = chained(folds)
    loop = Loop((S,), accumulators)
    assert running(loop) or all(fold.carry is None for fold in accumulators)
    return run((loop,), value, given, dtype, products)


def loop_by_loop(folds: Folds, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return run([Loop((S,), (fold,)) for fold in folds], folds[-1].ref, given, F64, F64)
