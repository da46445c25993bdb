"""Descriptors: contractions whose operands are fetched by the tensor memory accelerator of sm_90 and later.

What enters is a contraction over block dimensions; what leaves is a persistent form of it: one or two programs per
multiprocessor walk the blocks of the result, operands come through `tl.make_tensor_descriptor`, so that no thread
computes an address or a mask, and a 16-bit result leaves the same way.  On an H200 this is as fast as the library,
which pointers never are.

The rule, all of it in `applies`: two 16-bit operands loaded as they are, each a matrix whose rows are contiguous and
start at multiples of 16 bytes; known sizes, no batch axes; enough blocks to keep the device busy.

Contractions whose rows or columns are walked have a form of their own: one block of the result per program, as with
pointers, but every operand that allows it (`matrices`) comes through a descriptor, which begins at the matrix of this
program's batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from codegen.triton.blocks import Blocked, Dim
from codegen.triton.configs import PROGRAMS, Config
from codegen.triton.contract import place, programs
from codegen.triton.scopes import Tile, Transfer
from codegen.triton.spell import HALF, Code
from codegen.triton.values import Values
from lowering.expr import Expr, Load, loads
from lowering.indexing import coefficient
from lowering.kernel import Fold, Loop, Role, Store, statements, values_of

_LARGE = Config((("m", 128), ("k", 64), ("n", 256)), num_warps=8, num_stages=3, persistent=True)
_SMALL = Config((("m", 128), ("k", 64), ("n", 128)), num_warps=8, num_stages=4, persistent=True)
_WIDE = Config((("m", 64), ("k", 64), ("n", 256)), num_warps=4, num_stages=4, persistent=True)
_NARROW = Config((("m", 64), ("k", 64), ("n", 128)), num_warps=4, num_stages=4, persistent=True, per_processor=2)
_SPEEDS = {_LARGE: 1.0, _SMALL: 0.93, _WIDE: 0.92, _NARROW: 0.85}
"""Configuration → speed with every multiprocessor busy, as measured on an H200 over the shapes of transformer layers.
An epilogue that loads tiles leaves the largest block too few registers: it falls to 0.6."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter seen as base + rows · stride + columns; `base` is one number per program."""

    param: str
    rows: Dim
    columns: Dim
    stride: sympy.Expr
    base: sympy.Expr


def candidates(blocked: Blocked, arch: str) -> tuple[Config, ...]:
    """Configurations of the persistent form, best first; none where the rule does not hold.

    Ranked by the speed of each on a full device, times the share of the device that the last round of blocks leaves
    busy.
    """
    if not applies(blocked, arch):
        return ()
    speeds = {**_SPEEDS, _LARGE: 0.6} if loads_tiles(blocked) else _SPEEDS

    def speed(config: Config) -> float:
        blocks, slots = programs(blocked, config), PROGRAMS * config.per_processor
        return speeds[config] * blocks / (slots * -(-blocks // slots))

    return tuple(sorted(speeds, key=speed, reverse=True))


def loads_tiles(blocked: Blocked) -> bool:
    """Does the epilogue load whole tiles, rather than a row or column of numbers?"""
    grid = {dim.symbol for dim in blocked.grid()}
    values = [value for stmt in blocked.body if isinstance(stmt, Store) for value in values_of(stmt)]
    spans = (
        {symbol for index in load.index if not isinstance(index, Expr) for symbol in index.free_symbols}
        for load in loads(*values)
    )
    return any(len(span & grid) > 1 for span in spans)


def applies(blocked: Blocked, arch: str) -> bool:
    """Does the persistent form compute this kernel, and is it worth it?"""
    if not on_tensor_memory(arch):
        return False
    grid = {dim.name: dim for dim in blocked.grid()}
    contracted = [dim for dim in blocked.dims if dim.role is not Role.GRID]
    if set(grid) != {"m", "n"} or len(contracted) != 1 or contracted[0].role is not Role.LOOP:
        return False
    if not all(dim.size.is_Integer and int(dim.size) >= 128 for dim in blocked.dims):
        return False
    loops = [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    folds = [fold for loop in loops for fold in loop.body]
    if len(folds) != 1 or not isinstance(folds[0], Fold) or folds[0].op != "dot" or folds[0].carry is not None:
        return False
    sides = ((grid["m"], contracted[0]), (contracted[0], grid["n"]))
    for factor, (first, second) in zip(folds[0].args, sides, strict=True):
        if factor.dtype not in HALF or not isinstance(factor, Load) or _matrix(blocked, factor, first, second) is None:
            return False
    return programs(blocked, _NARROW) * 2 >= PROGRAMS


def _matrix(blocked: Blocked, load: Load, first: Dim, second: Dim) -> Matrix | None:
    if load.mask is not None or isinstance(load.index[0], Expr):
        return None
    return _as_matrix(blocked, load.buffer, load.index[0], first, second)


def _as_matrix(blocked: Blocked, name: str, offset: sympy.Expr, first: Dim, second: Dim) -> Matrix | None:
    """`name[offset]` as a matrix over two dimensions, in either order; None where a descriptor cannot hold it."""
    param = blocked.kernel.param(name)
    for rows, columns in ((first, second), (second, first)):
        stride = coefficient(offset, rows.symbol)
        if stride is None or coefficient(offset, columns.symbol) != 1:
            continue
        base = sympy.expand(offset - stride * rows.symbol - columns.symbol)
        known = stride.is_Integer and rows.size.is_Integer and columns.size.is_Integer
        if not (param.aligned and known and _one_each(blocked, base) and _starts_aligned(base, param.dtype.itemsize)):
            continue
        step, height, width, size = int(stride), int(rows.size), int(columns.size), param.dtype.itemsize
        if step >= width and step * size % 16 == 0 and width * size >= 16 and max(height, width) < 2**31:
            return Matrix(name, rows, columns, stride, base)
    return None


def _one_each(blocked: Blocked, base: sympy.Expr) -> bool:
    """Is this index one number per program?"""
    batch = {dim.symbol for dim in blocked.dims if dim.name == "b"}
    return bool(base.free_symbols <= batch)


def _starts_aligned(base: sympy.Expr, size: int) -> bool:
    """Is `base`, counted in elements of `size` bytes, a multiple of 16 bytes?"""
    return all(int(term.as_coeff_Mul()[0]) * size % 16 == 0 for term in sympy.Add.make_args(base))


def matrices(blocked: Blocked, arch: str) -> dict[Load, Matrix]:
    """The operands that can come through descriptors in a kernel that walks rows or columns of a contraction."""
    if not on_tensor_memory(arch) or not blocked.chained:
        return {}
    found: dict[Load, Matrix] = {}
    for dot in blocked.dots:
        rows, columns, over = blocked.sides(dot)
        for factor, (first, second) in zip(dot.args, ((rows, over), (over, columns)), strict=True):
            if isinstance(factor, Load) and factor.dtype in HALF and factor not in found:
                matrix = _matrix(blocked, factor, first, second)
                if matrix is not None:
                    found[factor] = matrix
    return found


def on_tensor_memory(arch: str) -> bool:
    """Has this architecture a tensor memory accelerator?"""
    return arch.startswith("sm_") and int(arch[3:].rstrip("a")) >= 90


def _target(blocked: Blocked, stmt: Store, m: Dim, n: Dim) -> Matrix | None:
    """The matrix that `stmt` can write through a descriptor: 16-bit results, so that the tile fits shared memory."""
    read = {load.buffer for inner in statements(blocked.body) for load in loads(*values_of(inner))}
    if isinstance(stmt.offset, Expr) or stmt.param in read:
        return None
    if blocked.kernel.param(stmt.param).dtype not in HALF or stmt.value.dtype not in HALF:
        return None
    return _as_matrix(blocked, stmt.param, stmt.offset, m, n)


# Lines ----------------------------------------------------------------------------------------------------------------


def open_program(values: Values) -> str:
    """Add the descriptors, open the walk over blocks and place each of them; returns the header of that loop."""
    blocked = values.layout.blocked
    m, n = (next(dim for dim in blocked.dims if dim.name == name) for name in ("m", "n"))
    loop = next(stmt for stmt in blocked.body if isinstance(stmt, Loop))
    k, fold = blocked.of(loop.axes)[0], loop.body[0]
    assert isinstance(fold, Fold)
    made: dict[Matrix, Transfer] = {}
    for factor, (first, second) in zip(fold.args, ((m, k), (k, n)), strict=True):
        assert isinstance(factor, Load)
        matrix = _matrix(blocked, factor, first, second)
        assert matrix is not None, "asked of a kernel that `applies` refuses"
        if matrix not in made:
            made[matrix] = _describe(values, matrix)
        values.load_through[factor] = made[matrix]
    for stmt in blocked.body:
        target = _target(blocked, stmt, m, n) if isinstance(stmt, Store) else None
        if target is not None:
            values.store_through[target.param] = _describe(values, target)
    total = " * ".join(f"tl.cdiv({dim.size}, {dim.constant})" for dim in (m, n))
    blocks = values.name("blocks", Tile(Code(total))).code.text
    number = values.open("block")
    place(values, number)
    return f"for {number} in tl.range(tl.program_id(0), {blocks}, tl.num_programs(0), flatten=True):"


def describe_operands(values: Values, arch: str) -> None:
    """Add the descriptors of every operand that allows it; from here on these are loaded through them."""
    made: dict[Matrix, Transfer] = {}
    for load, matrix in matrices(values.layout.blocked, arch).items():
        if matrix not in made:
            made[matrix] = _describe(values, matrix)
        values.load_through[load] = made[matrix]


def _describe(values: Values, matrix: Matrix) -> Transfer:
    """Add the line that makes the descriptor of `matrix`."""
    shape = f"[{matrix.rows.size}, {matrix.columns.size}], [{matrix.stride}, 1]"
    block = values.layout.shape((matrix.rows, matrix.columns))
    pointer = values.pointer(matrix.param, matrix.base).code.text
    text = f"tl.make_tensor_descriptor({pointer}, {shape}, {block})"
    name = values.name(f"{matrix.param}_desc", Tile(Code(text))).code.text
    return Transfer(name, matrix.rows, matrix.columns)
