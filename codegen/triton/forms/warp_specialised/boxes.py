"""Describes a matrix of a batch as blocks of its parameter, so that one descriptor serves all programs.

Input: a matrix; output: a `DescriptorBox`, or None where a descriptor cannot describe it.  A matrix may be one of a
batch of any shape: each index that selects it for a program (a head, a row of the batch) is a dimension of the
descriptor, of which a block has one point.  Rows and columns keep their own dimensions, so that elements past their
ends are loaded as zeros, and not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from fusion.codegen.triton.blocks import Blocked, Dim
from fusion.codegen.triton.expressions.code import PRODUCT, Code, Operand, as_code, compose, listed
from fusion.codegen.triton.expressions.matrices import Matrix
from fusion.codegen.triton.expressions.scalar_code import TYPES
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.indexing import ZERO, FloorDiv, Mod, bounds

_MOST_DIMS = 3
"""Dimensions that a descriptor has in addition to rows and columns."""

_MANY = sympy.Integer(2**30)
"""The assumed size of a batch of symbolic size: no program uses a point outside."""


@dataclass(frozen=True, slots=True)
class DescriptorBox:
    """A matrix within its parameter.

    Attributes:
        start: elements before the first matrix.
        outer: (index of the matrix, number of matrices, stride in elements) for each batch dimension.
    """

    matrix: Matrix
    start: sympy.Expr
    outer: tuple[tuple[sympy.Expr, sympy.Expr, sympy.Expr], ...]

    @property
    def dims(self) -> tuple[Dim, Dim]:
        """Return the dimensions of its matrix, rows first."""
        return self.matrix.rows, self.matrix.columns


def box_of(blocked: Blocked, matrix: Matrix) -> DescriptorBox | None:
    """Return the matrix within its parameter; None where a descriptor cannot describe it."""
    inside = {dim.symbol for dim in blocked.dims}
    start, outer = ZERO, []
    for term in sympy.Add.make_args(matrix.base):
        step, index = term.as_independent(*inside, as_Add=False)
        if not index.free_symbols:
            start += term
            continue
        span = bounds(index, blocked.sizes())
        if not step.is_positive or (span is None and not isinstance(index, (sympy.Symbol, FloorDiv, Mod))):
            return None
        if span is not None and span[0] < 0:
            return None
        outer.append((index, _MANY if span is None else span[1] + 1, step))
    return DescriptorBox(matrix, start, tuple(outer)) if len(outer) <= _MOST_DIMS else None


def describe(values: Values, name: str, box: DescriptorBox, block: Sequence[Code], slots: int) -> None:
    """Add the descriptor `name`_desc of blocks of this shape, and shared memory `name` for `slots` of them, if any."""
    matrix, layout = box.matrix, f"{name}_layout"
    element = TYPES[values.layout.blocked.kernel.param(matrix.param).dtype]
    ahead = [1] * len(box.outer)
    shape = compose("[{}]", listed([*ahead, *block]))
    values.line("{}: tl.constexpr = gl.NVMMASharedLayout.get_default_for({}, {})", layout, shape, element)
    pointer = as_code(values.pointer_name(matrix.param))
    if box.start != 0:
        pointer = compose("{} + {}", pointer, values.index_tile(box.start).code.at(PRODUCT))
    sizes = [*(count for _, count, _ in box.outer), matrix.rows.size, matrix.columns.size]
    steps = [*(step for _, _, step in box.outer), matrix.stride, sympy.Integer(1)]
    counts, strides = (
        compose("[{}]", listed(values.index_tile(each).code for each in axis)) for axis in (sizes, steps)
    )
    arguments = listed([pointer, counts, strides, shape, layout])
    values.line("{} = {}({})", f"{name}_desc", "hopper.tma.make_tensor_descriptor", arguments)
    if slots:
        ring = compose("[{}]", listed([slots, *ahead, *block]))
        values.line("{} = gl.allocate_shared_memory({}, {}, {})", name, element, ring, layout)


def corner(values: Values, box: DescriptorBox, rows: Operand, columns: Operand = 0) -> Code:
    """Return the corner of the block of the matrix that starts at `rows` and `columns` of it."""
    coordinates = [
        *(values.index_tile(index).code for index, _, _ in box.outer),
        as_code(rows),
        as_code(columns),
    ]
    narrow = not values.layout.wide and (values.layout.within_limit or not values.layout.blocked.kernel.sizes)
    return compose("[{}]", listed(code if narrow else compose("tl.cast({}, tl.int32)", code) for code in coordinates))
