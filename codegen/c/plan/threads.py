"""Decides whether a kernel runs on several threads: only if there is enough work.

A parallel region costs a few microseconds even if its threads are already spinning, as long as some tens of thousands
of element-wise operations on one thread.  All threads take part or none: a team of another size would make the OpenMP
run time start and stop threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from typing_extensions import assert_never

from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.codegen.c.text.indices import Names, index_text
from fusion.lowering.indexing import ZERO
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, Random, TileRef, concrete, postorder
from fusion.lowering.ir.kernel import Kernel, Role
from fusion.lowering.ir.scalar_ops import SCALAR_OPS

ENOUGH = 1 << 18
"""The least work (loads, stores, units of `ScalarOp.cost`) for a parallel region
(measured: docs/performance.md, `ENOUGH`)."""

RANDOM_COST = 40


def cost_of(node: Expr) -> int:
    """Return the cost of evaluating `node` itself, in additions."""
    match concrete(node):
        case Op(name):
            return SCALAR_OPS[name].cost
        case Random():
            return RANDOM_COST
        case Load():
            return 1
        case Const() | IndexValue() | Cast() | TileRef():
            return 0
        case unknown:
            assert_never(unknown)


def work(kernel: Kernel, sweeps: Sequence[Sweep]) -> sympy.Expr:
    """Return the work of one launch, in additions; symbolic if the sizes are."""
    points = sympy.Mul(*(axis.size for axis in kernel.with_role(Role.GRID)))
    per_point = ZERO
    for sweep in sweeps:
        each = len(sweep.stores) + sum(map(cost_of, postorder(*sweep.roots)))
        per_point += each * sympy.Mul(*(axis.size for axis in sweep.axes))
    return points * per_point


def may_share(kernel: Kernel, sweeps: Sequence[Sweep]) -> bool:
    """Return whether there may be enough work for several threads."""
    amount = work(kernel, sweeps)
    return bool(kernel.with_role(Role.GRID)) and (not amount.is_Integer or bool(amount >= ENOUGH))


def team(kernel: Kernel, sweeps: Sequence[Sweep], names: Names) -> str:
    """Return the clauses of a parallel region: the number of threads and, if sizes are unknown, the condition."""
    amount = work(kernel, sweeps)
    condition = "" if amount.is_Integer else f" if({index_text(amount, names)} >= {ENOUGH})"
    return f"num_threads(threads){condition}"
