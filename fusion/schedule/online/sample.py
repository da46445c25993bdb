"""Draws numeric samples for the leaves of a fold's values, to check the claims of a rule.

Input: expressions; output: their values, floats in float64, at a few points: loads, random numbers, indices and folds
are drawn, conversions between float types do nothing, everything else is evaluated.  The numbers are the same in every
run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from fusion.lowering.ir.expr import Cast, Const, Expr, Op, TileRef
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import SCALAR_OPS

Values = dict[Expr, torch.Tensor]

_DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")


def leaves(roots: Sequence[Expr], cut: Collection[Expr] = ()) -> list[Expr]:
    """Return the leaves of `roots`, with the expressions in `cut` as leaves too, in a fixed order."""
    return [node for node in _order(roots, cut) if node in cut or not isinstance(node, (Op, Cast, Const))]


def _order(roots: Sequence[Expr], cut: Collection[Expr]) -> list[Expr]:
    """Return operands before their users, not descending into indices of loads and seeds of random numbers."""
    seen: set[Expr] = set()
    order: list[Expr] = []
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if isinstance(node, (Op, Cast)) and node not in cut:
                stack.extend((child, False) for child in reversed(node.children()))
    return order


def evaluate(roots: Sequence[Expr], given: Mapping[Expr, torch.Tensor]) -> list[torch.Tensor]:
    """Evaluate `roots`, with `given` values for their leaves."""
    values: Values = {}
    for node in _order(roots, given.keys()):
        known = given.get(node)
        if known is not None:
            values[node] = known
        elif isinstance(node, Const):
            values[node] = torch.tensor(node.value, dtype=wide(node.dtype))
        elif isinstance(node, Cast):
            values[node] = values[node.arg].to(wide(node.dtype))
        else:
            assert isinstance(node, Op), "a leaf without a value"
            args = [values[arg] for arg in node.args]
            if node.name in _DIVISIONS and not args[1].is_floating_point():
                args[1] = torch.where(args[1] == 0, 1, args[1])  # torch raises, and no correct program divides by 0
            values[node] = SCALAR_OPS[node.name].meaning(*args)
    return [values[root] for root in roots]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are sampled."""
    return torch.float64 if dtype.is_floating_point else dtype


class Sampler:
    """Draws numbers, reproducibly."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def varying(self, leaf: Expr, count: int, positive: bool = False) -> torch.Tensor:
        """Draw a column of values of several magnitudes and, unless `positive`, both signs."""
        shape = (count, 1)
        if leaf.dtype is torch.bool:
            return torch.rand(shape, generator=self._generator) < 0.5
        if not leaf.dtype.is_floating_point:
            return torch.randint(0, 9, shape, generator=self._generator).to(leaf.dtype)
        value = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        value *= torch.tensor([0.3, 1.0, 3.0], dtype=torch.float64).repeat(count)[:count, None]
        return value.abs() if positive else value

    def running(self, fold: Fold, count: int, positive: bool = False) -> torch.Tensor:
        """Draw a row of values that a fold may have: any for an extreme value, positive ones for a sum."""
        value = self.varying(fold.ref, count).reshape(1, count)
        if fold.dtype.is_floating_point and (positive or fold.op not in ("max", "min")):
            return value.abs() + 0.1
        return value


def rank(values: torch.Tensor) -> int:
    """Return the numerical rank of the finite rows and columns of a matrix; 0 if too few of them are left."""
    values = values[:, values.isfinite().double().mean(dim=0) > 0.5]
    values = values[values.isfinite().all(dim=1)]
    if min(values.shape) < 6:
        return 0
    for dim in (1, 0):
        values = values / values.abs().amax(dim=dim, keepdim=True).clamp(min=1e-300)
    sizes = torch.linalg.svdvals(values)
    return int((sizes > 1e-9 * sizes[0]).sum())


def running_leaves(roots: Sequence[Expr], running: Mapping[str, Fold]) -> list[TileRef]:
    """Return the running values that `roots` name."""
    return [leaf for leaf in leaves(roots) if isinstance(leaf, TileRef) and leaf.name in running]
