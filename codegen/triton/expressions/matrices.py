"""Describes operands of matrix products that come through descriptors, and pairs of them that are one load."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from fusion.codegen.triton.blocks import Dim
from fusion.lowering.ir.expr import Expr
from fusion.lowering.ir.kernel import Fold


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter as a matrix: base + row · stride + column; `base` is one number per program."""

    param: str
    rows: Dim
    columns: Dim
    stride: sympy.Expr
    base: sympy.Expr


@dataclass(frozen=True, slots=True)
class Hosted:
    """A tensor descriptor that the host creates, in text: of a parameter, with sizes, strides and the block's size.

    `layout`: the layout of a block in shared memory, for programs in Gluon.
    """

    param: str
    shape: str
    strides: str
    block: str
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Stack:
    """Two folds as one product.

    Attributes:
        shared: the operand of both, over `rows` and `over`.
        matrices: the other operands, rows along `columns`.
        descriptor, swapped: names of the descriptor of both matrices, and of the flag that the second one comes first.
    """

    folds: tuple[Fold, Fold]
    shared: Expr
    matrices: tuple[Matrix, Matrix]
    rows: Dim
    columns: Dim
    over: Dim
    descriptor: str = ""
    swapped: str = ""
