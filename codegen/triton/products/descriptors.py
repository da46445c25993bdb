"""Creates tensor descriptors of matrices, for the tensor memory accelerator (TMA) of sm_90 and later.

Input: a load or a store over block dimensions; output: the matrix that a tensor descriptor can describe, if there is
one, and the lines that create the descriptor.  Such a matrix has contiguous rows that start at multiples of 16 bytes.
The matrices of a batch, or the parts of split-K, have a constant stride and share one descriptor of three dimensions.
The host creates descriptors (`launch/host_descriptors.py`) where a launch has one function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from fusion.codegen.triton.blocks import Blocked, Dim, extent
from fusion.codegen.triton.expressions.code import as_code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.matrices import Hosted, Matrix
from fusion.codegen.triton.expressions.scopes import Tile, Transfer
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Load, free_axes, loads
from fusion.lowering.ir.kernel import Store, statements, values_of
from fusion.lowering.ir.scalar_ops import HALVES

LONG_ROW = 256
"""Bytes of a row above which a device has memory for fewer than 2³¹ rows, so that an int32 counts them."""


def loads_tiles(blocked: Blocked) -> bool:
    """Return whether the epilogue loads full tiles, rather than a row or column of numbers."""
    values = [value for stmt in blocked.body if isinstance(stmt, Store) for value in values_of(stmt)]
    return any(tile_loads(blocked, values))


def tile_loads(blocked: Blocked, values: Sequence[Expr]) -> Iterator[Load]:
    """Yield the loads below `values` that vary both from row to row and from column to column, gathered ones too."""
    grid = {dim.symbol for dim in blocked.grid() if dim.name != "b"}
    yield from (load for load in loads(*values) if len(free_axes(load) & grid) > 1)


def loaded_tiles(blocked: Blocked) -> dict[Load, Matrix]:
    """Return the loads of full tiles in the epilogue that descriptors can describe."""
    grid = {dim.name: dim for dim in blocked.grid()}
    tiles: dict[Load, Matrix] = {}
    for stmt in blocked.body:
        for load in loads(*values_of(stmt)) if isinstance(stmt, Store) else ():
            if load.dtype in HALVES and (matrix := matrix_of(blocked, load, grid["m"], grid["n"])) is not None:
                tiles |= {load: matrix} if has_even_strides(blocked, matrix) else {}
    return tiles


def matrix_of(blocked: Blocked, load: Load, first: Dim, second: Dim, *, long: int = LONG_ROW) -> Matrix | None:
    """Return the matrix over two dimensions that `load` reads; None if no descriptor can; `long`: see `LONG_ROW`."""
    if load.mask is not None or isinstance(load.index[0], Expr):
        return None
    return as_matrix(blocked, load.buffer, load.index[0], first, second, long=long)


def as_matrix(
    blocked: Blocked, name: str, offset: sympy.Expr, first: Dim, second: Dim, *, long: int = LONG_ROW
) -> Matrix | None:
    """Return `name[offset]` as a matrix over two dimensions, in either order; None if no descriptor can describe it."""
    param = blocked.kernel.param(name)
    for rows, columns in ((first, second), (second, first)):
        stride = coefficient(offset, rows.symbol)
        if stride is None or coefficient(offset, columns.symbol) != 1:
            continue
        base = sympy.expand(offset - stride * rows.symbol - columns.symbol)
        known = stride.is_Integer and columns.size.is_Integer
        if not (param.aligned and known and _is_uniform(blocked, base) and _starts_aligned(base, param.dtype.itemsize)):
            continue
        step, width, size = int(stride), int(columns.size), param.dtype.itemsize
        few = extent(rows.size) < 2**31 if rows.size.is_Integer else step * size >= long
        if step >= width and step * size % 16 == 0 and width * size >= 16 and width < 2**31 and few:
            return Matrix(name, rows, columns, stride, base)
    return None


def _is_uniform(blocked: Blocked, base: sympy.Expr) -> bool:
    """Return whether this index is one number per program."""
    varying = {dim.symbol for dim in blocked.dims if dim.name != "b"}
    return not base.free_symbols & varying


def _starts_aligned(base: sympy.Expr, size: int) -> bool:
    """Return whether `base`, counted in elements of `size` bytes, is a multiple of 16 bytes."""
    return all(int(term.as_coeff_Mul()[0]) * size % 16 == 0 for term in sympy.Add.make_args(base))


def _batch(blocked: Blocked, matrix: Matrix) -> tuple[Dim, sympy.Expr | None] | None:
    """Return the batch dimension along which a matrix varies, and the stride of its matrices (None if not constant)."""
    varying = [dim for dim in blocked.dims if dim.symbol in matrix.base.free_symbols]
    return (varying[0], coefficient(matrix.base, varying[0].symbol)) if varying else None


def has_even_strides(blocked: Blocked, matrix: Matrix) -> bool:
    """Return whether one descriptor can describe the matrices of all points of the batch."""
    batch = _batch(blocked, matrix)
    size = blocked.kernel.param(matrix.param).dtype.itemsize
    if batch is None:
        return True
    return batch[1] is not None and bool(batch[1].is_positive) and _starts_aligned(batch[1], size)


def target_of(blocked: Blocked, stmt: Store) -> Matrix | None:
    """Return the matrix that `stmt` can write through a descriptor: 16-bit results, so that the tile fits shared
    memory.
    """
    if isinstance(stmt.offset, Expr):
        return None
    tiles = loaded_tiles(blocked)
    reading = [load for s in statements(blocked.body) for load in loads(*values_of(s)) if load.buffer == stmt.param]
    if any(load not in tiles or load.index[0] != stmt.offset for load in reading):
        return None  # it must be read before it is overwritten
    if blocked.kernel.param(stmt.param).dtype not in HALVES or stmt.value.dtype not in HALVES:
        return None
    grid = {dim.name: dim for dim in blocked.grid()}
    matrix = as_matrix(blocked, stmt.param, stmt.offset, grid["m"], grid["n"])
    return matrix if matrix is not None and has_even_strides(blocked, matrix) else None


# Lines ----------------------------------------------------------------------------------------------------------------


class Descriptors:
    """The descriptors of one kernel: each matrix has one, with the blocks of its first use."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._created: dict[Matrix, Transfer] = {}

    def of(self, matrix: Matrix, layout: Layout) -> Transfer:
        """Return the descriptor of a matrix, created at its first use."""
        if matrix not in self._created:
            self._created[matrix] = describe(self._values, matrix, layout)
        return self._created[matrix]


def describe(values: Values, matrix: Matrix, layout: Layout) -> Transfer:
    """Return a descriptor of `matrix`, in the blocks of `layout`: passed, or created by a line."""
    batch = _batch(values.layout.blocked, matrix) if values.layout.grid_depth else None
    dims, base = (matrix.rows, matrix.columns), matrix.base
    sizes, strides = [dim.size for dim in dims], [as_code(int(matrix.stride)), as_code(1)]
    block = layout.shape(dims)
    if batch is not None and batch[1] is not None:  # one descriptor holds the matrices that programs loop over
        base = sympy.expand(base - batch[1] * batch[0].symbol)
        sizes, strides = [batch[0].size, *sizes], [values.index_tile(batch[1]).code, *strides]
        block = layout.shape(dims, 1)
    shape = compose("[{}]", listed(values.index_tile(size).code for size in sizes))
    steps = compose("[{}]", listed(strides))
    if values.hosted is not None and base == 0:
        name = values.fresh(f"{matrix.param}_desc", 0)
        values.hosted[name] = Hosted(matrix.param, shape.text, steps.text, block.text)
    else:
        pointer = values.pointer(matrix.param, base).code
        code = compose("{}({}, {}, {}, {})", "tl.make_tensor_descriptor", pointer, shape, steps, block)
        name = values.name(f"{matrix.param}_desc", Tile(code)).code.text
    return Transfer(name, *dims, batch[0] if batch is not None and batch[1] is not None else None)
