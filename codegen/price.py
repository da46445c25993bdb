"""Predicts how long a launch takes: the one formula behind every decision.

Input: the work of a launch, counted by the scheduler, and the rates of a device; output: a `Price`, microseconds by
part.  Memory and arithmetic overlap; the launch, and an epilogue that no other program hides, do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

import torch

from fusion.lowering.ir.expr import Cast, Expr, Op, Random, postorder
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, ScalarName

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
        hidden: the time in which memory and arithmetic overlap.
        epilogue: arithmetic after the products that no other program hides.

    >>> price = Price(launch=4.0, memory=10.0, products=6.0, scalars=1.0, hidden=7.0, epilogue=2.0)
    >>> price.total, price.bound
    (16.0, 'memory')
    """

    launch: float = 0.0
    memory: float = 0.0
    products: float = 0.0
    scalars: float = 0.0
    hidden: float = 0.0
    epilogue: float = 0.0

    @property
    def busy(self) -> float:
        """The microseconds of memory and arithmetic, without launches and epilogue."""
        return self.memory + self.products + self.scalars - self.hidden

    @property
    def total(self) -> float:
        """The microseconds of the whole launch."""
        return self.launch + self.busy + self.epilogue

    @property
    def bound(self) -> str:
        """The name of the part that takes longest."""
        parts = (part.name for part in fields(self) if part.name != "hidden")
        return max(parts, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Steps:
    """The cost of work that SIMD lanes do not share, in additions; 0 on devices where it costs nothing beyond.

    Attributes:
        fold: combining the lanes of a row that is folded.
        together: the same for one of the sums of products of a row of a matrix, which are combined together.
        near: bytes of the other factor that stay in the nearest cache, and
        refetched: the factor of products with more of them.
        packed: a byte of an operand of a generated GEMM, which is brought into the order that blocks read.
        packed_by_library: the same of the library's.
        window: a loop along the results for one element of their short windows, which overlap others along the lanes or
            reach into padding, whose bounds differ from element to element.
        unbounded: the factor of that where all results have all elements.
        evaluated: the factor of all operations on the elements of such windows, with that.
        one_by_one: the same where the elements are of several tensors, and some are padding.
        shared: the factor of operations on a factor of products that all lanes of a sum share: one lane computes them.
        placed: an element that the position of an extreme is searched among.
        turned: an element that is read across the rows in which results are written.
        scanned: an element of a scan.
        logarithmic: elements of another scan that take as long as one of logarithms.
        across: an element of a scan whose lanes are neighbouring scans, relative to one along memory.
        updated: an element that a scatter updates.
        rows: the factor of that where whole rows are added to rows of a tensor: lanes share them.
        gathered: an element whose position depends on data that differs from lane to lane.
        requested: an element of these in a line of memory that no other lane reads.
        computed: an element whose position is computed, without data, from the lane's.
        looked_up: a row whose position depends on data, and that is folded with others.
        windowed: an element of a window: neighbours load it again, from a cache.
        shifted: the factor of that where lanes load at another distance than vectors do.
        strided: the same where lanes skip elements.
        wide: an operation, or a cast, of integers of 64 bits, beyond its cost in 32.
        converted: a cast between floats and integers of 64 bits, beyond that.
        widened: a float of 16 bits that is loaded, and
        narrowed: a float of 16 bits that is stored: conversions from and to 32 bits.
        attended: a number of 16 bits of the keys and values in the library's attention of a single query.
    """

    fold: float = 0.0
    together: float = 0.0
    near: float = math.inf
    refetched: float = 1.0
    packed: float = 0.0
    packed_by_library: float = 0.0
    window: float = 0.0
    unbounded: float = 1.0
    evaluated: float = 1.0
    one_by_one: float = 1.0
    shared: float = 1.0
    placed: float = 0.0
    turned: float = 0.0
    scanned: float = 0.0
    logarithmic: float = 1.0
    across: float = 1.0
    updated: float = 0.0
    rows: float = 1.0
    gathered: float = 0.0
    requested: float = 0.0
    computed: float = 0.0
    looked_up: float = 0.0
    windowed: float = 0.0
    shifted: float = 1.0
    strided: float = 1.0
    wide: float = 0.0
    converted: float = 0.0
    widened: float = 0.0
    narrowed: float = 0.0
    attended: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of a device, per microsecond.

    Attributes:
        launch_us: microseconds of one launch.
        bandwidth: bytes per microsecond to memory; or by the bytes that a launch touches, where caches hold them.
        flops: scalar operations per microsecond, in additions.
        matrix_flops: operations per microsecond of the library's GEMMs of 16-bit operands.
        matrix_share: bytes of an operand's element → the rate of the library's GEMMs, relative to that.
        product_us: fixed overhead of a library GEMM in microseconds, in addition to the launch.
        costs: scalar operations whose cost differs from `ScalarOp.cost`, in additions.
        steps: extra costs of accesses that do not vectorise (gathers, strides, windows).
        summed: the share of the rate of additions at which short sums of products run.
        overlap: p of the p-norm that combines memory and arithmetic time; infinite: the larger of the two.
        product_overlap: the same for launches with products.

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
    steps: Steps = Steps()
    summed: float = 0.5
    overlap: float = math.inf
    product_overlap: float = math.inf

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
        """Return the additions that take as long as evaluating expressions, loads excluded; shared parts count once."""
        return sum(map(self.cost_of, postorder(*exprs)))

    def cost_of(self, node: Expr) -> float:
        """Return the additions of one operation, without its operands."""
        return additions_of(node, self.costs, self.steps.wide, self.steps.converted)

    def cost_by_name(self, name: ScalarName) -> float:
        """Return the additions of one operation on floats."""
        return self.costs.get(name, SCALAR_OPS[name].cost)

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
            launches: the number of launches, or the part of a launch that is not hidden.
        """
        memory, products, scalars = self.memory_us(moved) / share, products / share, scalars / share
        exponent = self.product_overlap if products else self.overlap
        hidden = memory + products + scalars - _norm(memory, products + scalars, exponent)
        return Price(launches * self.launch_us, memory, products, scalars, hidden, epilogue)


def _norm(first: float, second: float, exponent: float) -> float:
    """Return the norm of two numbers: their sum if the exponent is 1, the larger one if it is infinite."""
    larger, smaller = max(first, second), min(first, second)
    if math.isinf(exponent) or not smaller:
        return larger
    return larger * float((1 + (smaller / larger) ** exponent) ** (1 / exponent))


RANDOM = 60
"""The cost of a random number, in additions: more than all readers may recompute, so that it is drawn once."""

WIDE = 3
"""Further additions for an operation, or cast, of integers of 64 bits, which GPUs compute by halves: an estimate."""


def additions_of(
    node: Expr, costs: Mapping[str, float] = MappingProxyType({}), wide: float = 0, converted: float = 0
) -> float:
    """Return the additions of one operation, without its operands, on a device with these costs.

    `wide` and `converted` are those of `Steps`.  Comparisons of indices are never wide: indices have 32 bits where that
    is enough.
    """
    if isinstance(node, Op):
        return costs.get(node.name, SCALAR_OPS[node.name].cost) + (wide if node.dtype is torch.int64 else 0)
    if isinstance(node, Cast):
        dtypes = node.dtype, node.arg.dtype
        if torch.int64 not in dtypes:
            return 0
        return wide + converted if any(dtype.is_floating_point for dtype in dtypes) else wide
    return costs.get("random", RANDOM) if isinstance(node, Random) else 0


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
