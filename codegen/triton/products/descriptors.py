"""Descriptors: contractions whose operands are fetched by the tensor memory accelerator of sm_90 and later.

What enters is a contraction over block dimensions; what leaves is a persistent form of it: one or two programs per
multiprocessor walk the blocks of the result, operands come through tensor descriptors, so that no thread computes an
address or a mask, and a 16-bit result leaves the same way.  The host makes them (`launch/passed.py`), where a launch
has one function.  On an H200 this is as fast as the library,
which pointers never are.

The rule, all of it in `applies`: 16-bit operands loaded as they are, each a matrix whose rows are contiguous and start
at multiples of 16 bytes; rows of known length, however many; enough blocks to keep the device busy.  The matrices of a
batch, or the parts of a long sum, lie evenly apart and come through one descriptor of three dimensions.  Several
products of one loop share an operand, and the columns of the block between them; two of them may be one (`stacked`).

Contractions whose rows or columns are walked have a form of their own: one block of the result per program, as with
pointers, but every operand that allows it (`matrices`) comes through a descriptor, which begins at the matrix of this
program's batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, programs
from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.matrices import Hosted, Matrix, Stack
from fusion.codegen.triton.expressions.scopes import Tile, Transfer
from fusion.codegen.triton.expressions.spell import PRODUCT, Code
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.products.place import as_int32, place
from fusion.lowering.expr import Expr, Load, loads
from fusion.lowering.indexing import coefficient
from fusion.lowering.kernel import Fold, Loop, Role, Store, statements, values_of
from fusion.lowering.scalar_ops import HALVES

NARROWEST = Config((("m", 64), ("k", 64), ("n", 128)), persistent=True)
"""The smallest blocks."""


LONG_ROW = 256
"""Bytes: of rows as long there are fewer than 2³¹ in any memory, so that an int32 counts them."""


def loads_tiles(blocked: Blocked) -> bool:
    """Does the epilogue load whole tiles, rather than a row or column of numbers?"""
    values = [value for stmt in blocked.body if isinstance(stmt, Store) for value in values_of(stmt)]
    return any(tile_loads(blocked, values))


def tile_loads(blocked: Blocked, values: Sequence[Expr]) -> Iterator[Load]:
    """The loads below `values` that differ from row to row as well as from column to column."""
    grid = {dim.symbol for dim in blocked.grid() if dim.name != "b"}
    for load in loads(*values):
        symbols = {s for index in load.index if not isinstance(index, Expr) for s in index.free_symbols}
        if len(symbols & grid) > 1:
            yield load


def loaded_tiles(blocked: Blocked) -> dict[Load, Matrix]:
    """The loads of whole tiles after a contraction that can come through descriptors."""
    grid = {dim.name: dim for dim in blocked.grid()}
    found: dict[Load, Matrix] = {}
    for stmt in blocked.body:
        for load in loads(*values_of(stmt)) if isinstance(stmt, Store) else ():
            if load.dtype in HALVES and (matrix := matrix_of(blocked, load, grid["m"], grid["n"])) is not None:
                found |= {load: matrix} if _steps_evenly(blocked, matrix) else {}
    return found


def applies(blocked: Blocked) -> bool:
    """Does the persistent form compute this kernel, and is it worth it?"""
    if not allows(blocked):
        return False
    return programs(blocked, divided(NARROWEST, len(blocked.dots))) * 2 >= blocked.device.multiprocessors


def allows(blocked: Blocked) -> bool:
    """Can the persistent form compute this kernel?"""
    if (
        not blocked.device.has(Feature.TENSOR_COPIES) or blocked.kernel.awaited
    ):  # what goes through tensor memory is stored later
        return False
    return _walks_products(blocked) and all(_is_fetched(blocked, *factor) for factor in factors(blocked))


def _walks_products(blocked: Blocked) -> bool:
    """Is the kernel one walk along one axis, of products that share an operand, and are all sides long?"""
    grid = {dim.name for dim in blocked.grid()}
    contracted = [dim for dim in blocked.dims if dim.role is not Role.GRID]
    if grid - {"b"} != {"m", "n"} or len(contracted) != 1 or contracted[0].role is not Role.LOOP:
        return False
    if any(extent(dim.size) < 128 and dim.name != "b" for dim in blocked.dims):
        return False
    loops = [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    folds = [stmt for loop in loops for stmt in loop.body]
    if len(loops) != 1 or not all(isinstance(fold, Fold) and fold.carry is None for fold in folds):
        return False
    operands = {factor for dot in blocked.dots for factor in dot.args}
    if set(folds) != set(blocked.dots) or len(operands) != 1 + len(folds):
        return False  # products that share no operand would need larger tiles than fit
    return "b" not in grid or len(folds) == 1


def _is_fetched(blocked: Blocked, factor: Expr, sides: tuple[Dim, Dim]) -> bool:
    """Does an operand come through a descriptor, whichever matrix of a batch it is?"""
    if factor.dtype not in HALVES or not isinstance(factor, Load):
        return False
    matrix = matrix_of(blocked, factor, *sides)
    return matrix is not None and _steps_evenly(blocked, matrix)


def factors(blocked: Blocked) -> Iterator[tuple[Expr, tuple[Dim, Dim]]]:
    """The operands of the contractions, each with its dimensions."""
    for dot in blocked.dots:
        rows, columns, over = blocked.sides(dot)
        yield from zip(dot.args, ((rows, over), (over, columns)), strict=True)


def divided(config: Config, count: int) -> Config:
    """`config` with as many columns for each of `count` contractions as there are registers for."""
    columns = max(16, 1 << (config.block("n") // count).bit_length() - 1)
    return replace(config, blocks=tuple((name, columns if name == "n" else size) for name, size in config.blocks))


def matrix_of(blocked: Blocked, load: Load, first: Dim, second: Dim, *, long: int = LONG_ROW) -> Matrix | None:
    """The matrix over two dimensions that `load` reads; None if no descriptor can; `long`: see `LONG_ROW`."""
    if load.mask is not None or isinstance(load.index[0], Expr):
        return None
    return as_matrix(blocked, load.buffer, load.index[0], first, second, long=long)


def stack_of(blocked: Blocked) -> Stack | None:
    """The two products of a kernel as one; None where they are not two, or do not lie alike in memory."""
    if len(blocked.dots) != 2:
        return None
    first, second = blocked.dots
    sides = {dim.name: dim for dim in blocked.sides(first)}
    shared = [arg for arg in first.args if arg in second.args]
    others = [arg for dot in blocked.dots for arg in dot.args if arg not in shared]
    if len(shared) != 1 or len(others) != 2 or set(sides) != {"m", "n", "k"}:
        return None
    rows, columns, over = sides["m"], sides["n"], sides["k"]
    found = [matrix_of(blocked, arg, columns, over) for arg in others if isinstance(arg, Load)]
    matrices = [matrix for matrix in found if matrix is not None and matrix.rows is columns]
    if len(matrices) != 2 or matrices[0].stride != matrices[1].stride or others[0].dtype is not others[1].dtype:
        return None
    return Stack((first, second), shared[0], (matrices[0], matrices[1]), rows, columns, over)


def as_matrix(
    blocked: Blocked, name: str, offset: sympy.Expr, first: Dim, second: Dim, *, long: int = LONG_ROW
) -> Matrix | None:
    """`name[offset]` as a matrix over two dimensions, in either order; None where a descriptor cannot hold it."""
    param = blocked.kernel.param(name)
    for rows, columns in ((first, second), (second, first)):
        stride = coefficient(offset, rows.symbol)
        if stride is None or coefficient(offset, columns.symbol) != 1:
            continue
        base = sympy.expand(offset - stride * rows.symbol - columns.symbol)
        known = stride.is_Integer and columns.size.is_Integer
        if not (param.aligned and known and _one_each(blocked, base) and _starts_aligned(base, param.dtype.itemsize)):
            continue
        step, width, size = int(stride), int(columns.size), param.dtype.itemsize
        few = extent(rows.size) < 2**31 if rows.size.is_Integer else step * size >= long
        if step >= width and step * size % 16 == 0 and width * size >= 16 and width < 2**31 and few:
            return Matrix(name, rows, columns, stride, base)
    return None


def _one_each(blocked: Blocked, base: sympy.Expr) -> bool:
    """Is this index one number per program?"""
    varied = {dim.symbol for dim in blocked.dims if dim.name != "b"}
    return not base.free_symbols & varied


def _starts_aligned(base: sympy.Expr, size: int) -> bool:
    """Is `base`, counted in elements of `size` bytes, a multiple of 16 bytes?"""
    return all(int(term.as_coeff_Mul()[0]) * size % 16 == 0 for term in sympy.Add.make_args(base))


def matrices(blocked: Blocked) -> dict[Load, Matrix]:
    """The operands that can come through descriptors in a kernel that walks rows or columns of a contraction."""
    if not blocked.device.has(Feature.TENSOR_COPIES) or not blocked.chained:
        return {}
    found: dict[Load, Matrix] = {}
    for dot in blocked.dots:
        rows, columns, over = blocked.sides(dot)
        for factor, (first, second) in zip(dot.args, ((rows, over), (over, columns)), strict=True):
            if isinstance(factor, Load) and factor.dtype in HALVES and factor not in found:
                matrix = matrix_of(blocked, factor, first, second)
                if matrix is not None:
                    found[factor] = matrix
    return found


def _batch(blocked: Blocked, matrix: Matrix) -> tuple[Dim, sympy.Expr | None] | None:
    """The batch dimension that a matrix varies along, and how far apart its matrices lie (None: not evenly)."""
    varied = [dim for dim in blocked.dims if dim.symbol in matrix.base.free_symbols]
    return (varied[0], coefficient(matrix.base, varied[0].symbol)) if varied else None


def _steps_evenly(blocked: Blocked, matrix: Matrix) -> bool:
    """Can one descriptor hold a matrix for every point of the batch?"""
    batch = _batch(blocked, matrix)
    size = blocked.kernel.param(matrix.param).dtype.itemsize
    if batch is None:
        return True
    return batch[1] is not None and bool(batch[1].is_positive) and _starts_aligned(batch[1], size)


def target_of(blocked: Blocked, stmt: Store) -> Matrix | None:
    """The matrix that `stmt` can write through a descriptor: 16-bit results, so that the tile fits shared memory."""
    if isinstance(stmt.offset, Expr):
        return None
    tiles = loaded_tiles(blocked)
    reading = [load for s in statements(blocked.body) for load in loads(*values_of(s)) if load.buffer == stmt.param]
    if any(load not in tiles or load.index[0] != stmt.offset for load in reading):
        return None  # what is read has to be there before it is written over
    if blocked.kernel.param(stmt.param).dtype not in HALVES or stmt.value.dtype not in HALVES:
        return None
    grid = {dim.name: dim for dim in blocked.grid()}
    found = as_matrix(blocked, stmt.param, stmt.offset, grid["m"], grid["n"])
    return found if found is not None and _steps_evenly(blocked, found) else None


# Lines ----------------------------------------------------------------------------------------------------------------


def open_program(values: Values) -> str:
    """Add the descriptors, open the walk over blocks and place each of them; returns the header of that loop."""
    blocked = values.layout.blocked
    _describe_all(values)
    counts = [values.index_tile(dim.size).code.at(PRODUCT) for dim in blocked.dims if dim.name == "b"]
    counts += [f"tl.cdiv({_text(values, dim.size)}, {dim.constant})" for dim in map(blocked.named, ("m", "n"))]
    total = as_int32(Code(" * ".join(counts), PRODUCT), known=all(dim.size.is_Integer for dim in blocked.grid()))
    blocks = values.name("blocks", Tile(total)).code.text
    number = values.open("block")
    place(values, number)
    for dim in blocked.dims:
        if dim.name == "b":
            values.starts[dim] = values.name("batch", Tile(Code(values.starts[dim]), depth=values.depth)).code.text
    return walk_over(values, number, blocks)


def _describe_all(values: Values) -> None:
    """Add the descriptors of the operands, and of the tiles that are loaded and stored at the end of a block."""
    blocked, made = values.layout.blocked, _Described(values)
    end = values.layout.in_parts(blocked.named("n"))
    for factor, sides in factors(blocked):
        assert isinstance(factor, Load)
        if factor not in values.load_through:
            matrix = matrix_of(blocked, factor, *sides)
            assert matrix is not None, "asked of a kernel that `applies` refuses"
            values.load_through[factor] = made.of(matrix, values.layout)
    for load, matrix in loaded_tiles(blocked).items():
        values.load_through[load] = made.of(matrix, end)
    for stmt in blocked.body:
        target = target_of(blocked, stmt) if isinstance(stmt, Store) else None
        if target is not None:
            values.store_through[target.param] = made.of(target, end)


def walk_over(values: Values, number: str, blocks: str) -> str:
    """The header of the loop in which programs walk so many blocks."""
    return f"for {number} in tl.range({values.program}, {blocks}, tl.num_programs(0), flatten=True):"


def describe_operands(values: Values) -> None:
    """Add the descriptors of every operand that allows it; from here on these are loaded through them."""
    made = _Described(values)
    for load, matrix in matrices(values.layout.blocked).items():
        values.load_through[load] = made.of(matrix, values.layout)


class _Described:
    """The descriptors of one kernel: each matrix has one, in the blocks in which it was asked for first."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._made: dict[Matrix, Transfer] = {}

    def of(self, matrix: Matrix, layout: Layout) -> Transfer:
        if matrix not in self._made:
            self._made[matrix] = describe(self._values, matrix, layout)
        return self._made[matrix]


def _text(values: Values, size: sympy.Expr) -> str:
    return values.index_tile(size).code.text


def describe(values: Values, matrix: Matrix, layout: Layout) -> Transfer:
    """A descriptor of `matrix`, in the blocks of `layout`: one that is passed, or one that a line makes."""
    batch = _batch(values.layout.blocked, matrix) if values.layout.config.persistent else None
    dims, base, strides = (matrix.rows, matrix.columns), matrix.base, f"{matrix.stride}, 1"
    sizes = [dim.size for dim in dims]
    block = layout.shape(dims)
    if batch is not None and batch[1] is not None:  # programs walk the matrices, which one descriptor holds
        base = sympy.expand(base - batch[1] * batch[0].symbol)
        sizes, strides, block = [batch[0].size, *sizes], f"{_text(values, batch[1])}, {strides}", f"[1, {block[1:]}"
    shape = ", ".join(_text(values, size) for size in sizes)
    if values.hosted is not None and base == 0:
        name = values.fresh(f"{matrix.param}_desc", 0)
        values.hosted[name] = Hosted(matrix.param, f"[{shape}]", f"[{strides}]", block)
    else:
        pointer = values.pointer(matrix.param, base).code.text
        text = f"tl.make_tensor_descriptor({pointer}, [{shape}], [{strides}], {block})"
        name = values.name(f"{matrix.param}_desc", Tile(Code(text))).code.text
    return Transfer(name, *dims, batch[0] if batch is not None and batch[1] is not None else None)
