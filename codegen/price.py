"""Predicts how long a launch takes: the one formula behind every decision.

Input: the work of a launch, counted by the scheduler, and the rates of a device; output: a `Price`, microseconds by
part.  Memory and arithmetic overlap; the launch, and an epilogue that no other program hides, do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TypeAlias

from fusion.lowering.expr import Expr, Op, Random, postorder
from fusion.lowering.scalar_ops import SCALAR_OPS

Curve: TypeAlias = tuple[tuple[float, float], ...]
"""Bytes that a launch touches → bytes per microsecond, in ascending order: caches are faster than memory."""

MATRIX_RATES: Mapping[int, float] = {1: 2.0, 2: 1.0, 4: 0.07, 8: 0.08}
"""Bytes of an operand's element → rate of the library's GEMMs, relative to 16-bit operands: a GPU's."""


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted microseconds of a launch, by part.

    Attributes:
        launch: the launches, idle.
        memory: the traffic to and from memory, or the cache that holds the tensors.
        products: GEMMs.
        scalars: all other arithmetic.
        epilogue: arithmetic after the products that no other program hides.

    >>> price = Price(launch=4.0, memory=10.0, products=6.0, scalars=1.0, epilogue=2.0)
    >>> price.total, price.bound
    (16.0, 'memory')
    """

    launch: float = 0.0
    memory: float = 0.0
    products: float = 0.0
    scalars: float = 0.0
    epilogue: float = 0.0

    @property
    def busy(self) -> float:
        """The microseconds without launches and epilogue: the larger of memory and arithmetic."""
        return max(self.memory, self.products + self.scalars)

    @property
    def total(self) -> float:
        """The microseconds of the whole launch."""
        return self.launch + self.busy + self.epilogue

    @property
    def bound(self) -> str:
        """The name of the part that takes longest."""
        return max((part.name for part in fields(self)), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a microsecond.

    Attributes:
        launch_us: microseconds of one launch.
        bandwidth: bytes per microsecond to memory; or by the bytes that a launch touches, where caches hold them.
        flops: scalar operations per microsecond, in additions.
        matrix_flops: operations per microsecond of the library's GEMMs of 16-bit operands.
        matrix_share: bytes of an operand's element → the rate of the library's GEMMs, relative to that.
        product_us: microseconds of the library's smallest GEMM beside its launch.
        costs: scalar operations whose cost differs from `ScalarOp.cost`, in additions.
        fold: additions that take as long as combining the lanes of one folded row.

    >>> round(Rates(2.0, ((1e6, 1e5), (1e8, 1e4)), 1e4, 1e5).memory_us(1e7))
    316
    """

    launch_us: float
    bandwidth: float | Curve
    flops: float
    matrix_flops: float
    matrix_share: Mapping[int, float] = field(default_factory=lambda: MATRIX_RATES, hash=False)
    product_us: float = 0.0
    costs: Mapping[str, float] = field(default_factory=dict, hash=False)
    fold: float = 0.0

    def memory_us(self, touched: float) -> float:
        """Return the microseconds of moving bytes to or from memory."""
        return touched / (along(self.bandwidth, touched) if isinstance(self.bandwidth, tuple) else self.bandwidth)

    def scalar_us(self, additions: float) -> float:
        """Return the microseconds of scalar operations, given in additions."""
        return additions / self.flops

    def product_us_of(self, operations: float, itemsize: int) -> float:
        """Return the microseconds of the library's GEMMs of this many operations on elements of `itemsize` bytes."""
        return operations / (self.matrix_flops * self.matrix_share[itemsize])

    def cost(self, *exprs: Expr) -> float:
        """Return the additions that take as long as evaluating expressions, loads excluded."""
        return sum(map(self._cost_of, postorder(*exprs)))

    def _cost_of(self, node: Expr) -> float:
        if isinstance(node, Op):
            return self.costs.get(node.name, SCALAR_OPS[node.name].cost)
        return self.costs.get("random", RANDOM) if isinstance(node, Random) else 0.0

    def price(
        self,
        moved: float = 0.0,
        *,
        products: float = 0.0,
        scalars: float = 0.0,
        epilogue: float = 0.0,
        share: float = 1.0,
        launches: float = 1.0,
    ) -> Price:
        """Return the price of a launch.

        Args:
            moved: bytes to and from memory.
            products: microseconds of its GEMMs, at the speed that they reach.
            scalars: microseconds of its other arithmetic.
            epilogue: microseconds that nothing hides.
            share: the share of the device that it occupies, which memory and arithmetic have.
            launches: the number of launches, or the part of one that is not hidden.
        """
        launch, memory = launches * self.launch_us, self.memory_us(moved)
        return Price(launch, memory / share, products / share, scalars / share, epilogue)


RANDOM = 60
"""The cost of a random number, in additions: more than all readers may recompute, so that it is drawn once."""


def along(curve: Curve, touched: float) -> float:
    """Return the bandwidth at this many bytes, between the points of a curve on logarithmic scales.

    >>> along(((1e6, 100.0), (1e8, 1.0)), 1e5), round(along(((1e6, 100.0), (1e8, 1.0)), 1e7), 6)
    (100.0, 10.0)
    """
    if touched <= curve[0][0]:
        return curve[0][1]
    for (least, fast), (most, slow) in pairwise(curve):
        if touched <= most:
            part = math.log(touched / least) / math.log(most / least)
            return math.exp((1 - part) * math.log(fast) + part * math.log(slow))
    return curve[-1][1]
