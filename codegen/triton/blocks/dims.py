"""Defines block dimensions, and a kernel over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from fusion.codegen.triton.devices.device import Device
from fusion.lowering.indexing import ONE, ZERO, FloorDiv, Mod
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Role, Stmt, statements

WORD = 16
"""Bytes of the widest access of a thread, at addresses that are a multiple of it."""


@dataclass(frozen=True, slots=True)
class Dim:
    """Axes that form one linear index, outermost first.

    `shift` is the linear index of the first point of a row (`shifted`): `0 ≤ shift ≤ symbol < shift + size`; it is
    below WORD.
    """

    name: str
    axes: tuple[KernelAxis, ...]
    role: Role
    shift: sympy.Expr = ZERO

    @property
    def size(self) -> sympy.Expr:
        """Return the number of points of all its axes together."""
        return sympy.Mul(*(axis.size for axis in self.axes))

    @property
    def symbol(self) -> sympy.Symbol:
        """Return the linear index, `0 ≤ symbol < reach`."""
        return sympy.Symbol(f"{self.name}i", integer=True, nonnegative=True)

    @property
    def reach(self) -> sympy.Expr:
        """Return the exclusive upper bound of the linear index."""
        return self.size if self.shift == 0 else self.size + WORD - 1

    @property
    def constant(self) -> str:
        """Return the name of its block size in the source."""
        return f"{self.name.upper()}BLOCK"

    def digits(self) -> dict[sympy.Symbol, sympy.Expr]:
        """Return each axis as a digit of the linear index; for a dimension without points, the index itself, whose mask
        is never true.
        """
        if self.size == 0:
            return {axis.symbol: self.symbol for axis in self.axes}
        digits: dict[sympy.Symbol, sympy.Expr] = {}
        weight = ONE
        for position, axis in reversed(list(enumerate(self.axes))):
            digit = FloorDiv(self.symbol, weight)
            digits[axis.symbol] = digit if position == 0 else Mod(digit, axis.size)
            weight = weight * axis.size
        return digits


@dataclass(frozen=True, slots=True)
class LaneDim(Dim):
    """The threads of a program, of which each reads `word` neighbours of a block at a time
    (`statements/running_folds.py`).

    A tile over this dimension represents a tile over all elements that the threads read.
    """

    count: int = 0
    word: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """A kernel over block dimensions, for a device.

    Attributes:
        dims: in the order in which tiles are laid out.
        body: the statements of the kernel, over the linear indices of `dims`; `over`, `rows`, `columns` and the axes
            of loops are still axes.
        invariant: sums are added in the order that `fixed_order` describes.
    """

    kernel: Kernel
    dims: tuple[Dim, ...]
    body: tuple[Stmt, ...]
    device: Device
    invariant: bool = False

    def sizes(self) -> dict[sympy.Symbol, sympy.Expr]:
        """Return the extent of each block dimension's linear index, by symbol."""
        return {dim.symbol: dim.reach for dim in self.dims}

    def named(self, name: str) -> Dim:
        """Return the dimension that has this name."""
        return next(dim for dim in self.dims if dim.name == name)

    def of(self, axes: Sequence[sympy.Symbol]) -> tuple[Dim, ...]:
        """Return the dimensions that hold `axes`, in tile order."""
        return tuple(dim for dim in self.dims if any(axis.symbol in axes for axis in dim.axes))

    def grid(self) -> tuple[Dim, ...]:
        """Return the dimensions spread over programs, outermost first."""
        spread = [dim for dim in self.dims if dim.role is Role.GRID]
        return tuple(sorted(spread, key=lambda dim: "byxmn".index(dim.name)))

    def single(self, dim: Dim) -> bool:
        """Return whether a program has one point of `dim` only, because a loop starts at a different index for each."""
        return any(dim.symbol in other.shift.free_symbols for other in self.dims)

    @property
    def dots(self) -> tuple[Fold, ...]:
        """Return the contractions, in order."""
        return dots_of(self.body)

    @property
    def contraction(self) -> bool:
        """Whether the kernel multiplies matrices."""
        return bool(self.dots)

    @property
    def chained(self) -> bool:
        """Whether a loop runs over the rows or columns of some contraction, to fold them or to contract them again."""
        return any(dim.role is Role.LOOP for dot in self.dots for dim in self.sides(dot)[:2])

    def sides(self, dot: Fold) -> tuple[Dim, Dim, Dim]:
        """Return the dimensions of the rows, the columns and the summed axes of a dot.

        A side without axes is a dimension without axes: the dimension of the first dot, if that has no axes
        either.
        """
        dims_of = [tuple(dim for dim in self.of(axes) if dim.name != "b") for axes in sides_of(dot)]
        empty = [dim for dim in self.dims if not dim.axes]
        sides: list[Dim] = []
        for dims, name in zip(dims_of, "mnk", strict=True):
            if not dims:
                dims = tuple(sorted(empty, key=lambda dim: dim.name != name)[:1])
                empty.remove(dims[0])
            sides.append(dims[0])
        rows, columns, over = sides
        return rows, columns, over


def constant_quotients(index: sympy.Expr, dim: Dim, block: int) -> tuple[sympy.Expr, ...]:
    """Return the quotients of `dim` in an index that are constant in blocks of this size, such as the group of a scale.

    >>> from fusion.lowering.ir.kernel import KernelAxis
    >>> k = Dim("k", (KernelAxis(sympy.Symbol("r0"), sympy.Integer(384), Role.LOOP),), Role.LOOP)
    >>> [str(each) for each in constant_quotients(FloorDiv(k.symbol, 96) + FloorDiv(k.symbol, 128), k, 64)]
    ['ki//128']
    """
    return tuple(
        atom for atom in index.atoms(FloorDiv) if atom.args[0] == dim.symbol and (atom.args[1] / block).is_integer
    )


def dots_of(body: Sequence[Stmt]) -> tuple[Fold, ...]:
    """Return the contractions of a body, in order."""
    return tuple(stmt for stmt in statements(body, Fold) if stmt.op == "dot")


def sides_of(dot: Fold) -> tuple[tuple[sympy.Symbol, ...], ...]:
    """Return the axes of the rows, of the columns and of the sum of a contraction."""
    return dot.rows, dot.columns, dot.over
