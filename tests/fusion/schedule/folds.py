"""Folds over one axis, of which later ones depend on earlier ones, and their operands."""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.indexing import axis_symbol, over_symbol
from fusion.lowering.ir.expr import Expr, Load, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold

ROWS, COLUMNS, LENGTH = 6, 4, 12


ROW, COLUMN, S = axis_symbol(0), axis_symbol(1), over_symbol(0)


F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


INF = float("inf")


class Body:
    """Operands in one dtype, and folds of them."""

    def __init__(self, dtype: torch.dtype = F64) -> None:
        self.dtype = dtype
        self.x, self.y, self.g = (self.load(name, LENGTH * ROW + S) for name in "xyg")
        self.v = self.load("v", COLUMNS * S + COLUMN)
        self.w = self.load("w", S)  # positive

    def load(self, name: str, offset: sympy.Expr) -> Load:
        return Load(name, (offset,), self.dtype)

    def c(self, value: float) -> Expr:
        return const(value, self.dtype)

    def fold(self, name: str, op: str, *args: Expr) -> Fold:
        sides = ((ROW,), (COLUMN,)) if op == "dot" else ((), ())
        dtype = F32 if op == "dot" and args[0].dtype.itemsize < 4 else args[0].dtype
        return Fold(name, op, args, (S,), dtype, *sides)

    # What many bodies have in common

    def top(self, x: Expr | None = None) -> Fold:
        return self.fold("m", "max", self.x if x is None else x)

    def softmax(self, x: Expr | None = None) -> tuple[Fold, Fold, Expr]:
        """The maximum, the sum of exponentials, the exponential."""
        x = self.x if x is None else x
        top = self.top(x)
        power = exp(sub(x, top.ref))
        return top, self.fold("l", "sum", power), power

    def squares(self) -> tuple[Fold, Expr]:
        """A sum of squares, and the reciprocal root of their mean."""
        total = self.fold("q", "sum", mul(self.x, self.x))
        return total, op("rsqrt", add(div(total.ref, self.c(LENGTH)), self.c(1e-6)))

    def mean(self) -> tuple[Fold, Expr]:
        total = self.fold("t", "sum", self.x)
        return total, div(total.ref, self.c(LENGTH))


def add(a: Expr, b: Expr) -> Expr:
    return op("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return op("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return op("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return op("truediv", a, b)


def exp(a: Expr) -> Expr:
    return op("exp", a)


def where(mask: Expr, a: Expr, b: Expr) -> Expr:
    return op("where", mask, a, b)


Folds = tuple[Fold, ...]
