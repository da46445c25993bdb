"""Decides which kernels can be alternating products, and names their matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import sympy

from fusion.codegen.triton.blocks import Blocked
from fusion.codegen.triton.expressions.matrices import Matrix
from fusion.codegen.triton.forms import persistent_product
from fusion.codegen.triton.forms.alternating_product.config import arriving, columns, configurations, leaving
from fusion.codegen.triton.forms.form import Task
from fusion.codegen.triton.forms.persistent_product.rule import factors
from fusion.codegen.triton.forms.traffic import SECTOR
from fusion.codegen.triton.forms.warp_groups import groups
from fusion.codegen.triton.products.descriptors import matrix_of, target_of, tile_loads
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Index, Load, Random, TileRef, loads, postorder, rewrite
from fusion.lowering.ir.kernel import Loop, Role, Store, statements, values_of


@dataclass(frozen=True, slots=True)
class Moved:
    """The matrices that pass through shared memory.

    Attributes:
        left, right: the operands.
        results: by parameter, the results that leave by a descriptor.
        tiles: the tiles of the epilogue that arrive by descriptors.
        by_rows: by parameter, the results that leave through shared memory and no descriptor holds; how many elements
            a thread stores at once.
    """

    left: Matrix
    right: Matrix
    results: dict[str, Matrix]
    tiles: dict[Load, Matrix]
    by_rows: dict[str, int]


def refusal(task: Task) -> str:
    """Return why a kernel cannot be an alternating product; empty if it can."""
    kernel, blocked = task.kernel, task.blocked
    if not groups.run_on(task.device) or not configurations(task.device):
        return f"{task.device.arch} does not multiply in groups of warps"
    if kernel.beside or kernel.then is not None:
        return "it is launched with others"
    why = persistent_product.rule.refusal(blocked)
    if why:
        return why
    if len(blocked.dots) != 1 or any(dim.name == "b" for dim in blocked.dims):
        return "it is several products, or a batch of them"
    looped = next(dim for dim in blocked.dims if dim.role is Role.LOOP)
    if not looped.size.is_Integer or looped.size == 0 or any(loop.where is not None for loop in _loops(blocked)):
        return "the length of its sum is unknown, or it skips parts of it"
    return _ending(blocked)


def _loops(blocked: Blocked) -> list[Loop]:
    return [stmt for stmt in blocked.body if isinstance(stmt, Loop)]


def _ending(blocked: Blocked) -> str:
    """Return why the epilogue is not one of this form; empty if it is."""
    stores = [stmt for stmt in blocked.body if isinstance(stmt, Store)]
    values = [value for stmt in stores for value in values_of(stmt)]
    if any(isinstance(node, Random) for node in postorder(*values)):
        return "it draws random numbers, by functions that create tiles without a layout"
    if any(stmt.axes is not None or not _in_rows(blocked, stmt.offset) for stmt in stores):
        return "the elements of a row of a result are not side by side"
    if not all(stmt in leaving(blocked) or _fills_sectors(blocked, stmt) for stmt in stores):
        return "a wide result has rows that do not start at a sector of memory"
    tiles = arriving(blocked)
    if any(load not in tiles for load in tile_loads(blocked, values)):
        return "its epilogue loads many tiles, or elements that no descriptor holds"
    written = {stmt.param: stmt.offset for stmt in stores}
    read = loads(*(value for stmt in statements(blocked.body) for value in values_of(stmt)))
    if any(load.buffer in written and load.index[0] != written[load.buffer] for load in read):
        return "it overwrites what other programs read"
    operands = _operands(blocked)
    return "" if all(matrix.base == 0 for matrix in operands) else "a matrix begins inside of its tensor"


def _in_rows(blocked: Blocked, index: Index) -> bool:
    """Return whether neighbours along the columns of a block are neighbours in memory."""
    return not isinstance(index, Expr) and coefficient(index, blocked.named("n").symbol) == 1


def _operands(blocked: Blocked) -> list[Matrix]:
    """Return the matrices of both operands."""
    described = (matrix_of(blocked, factor, *sides) for factor, sides in factors(blocked) if isinstance(factor, Load))
    return [matrix for matrix in described if matrix is not None]


def _fills_sectors(blocked: Blocked, stmt: Store) -> bool:
    """Return whether the rows of a result start at multiples of a sector."""
    return _row_alignment(blocked, stmt) % SECTOR == 0


def _row_alignment(blocked: Blocked, stmt: Store) -> int:
    """Return the bytes of which the starts of all rows of a result are multiples; at most a sector."""
    assert not isinstance(stmt.offset, Expr), "it lies in rows"
    param, column = blocked.kernel.param(stmt.param), blocked.named("n").symbol
    if not param.aligned:
        return param.dtype.itemsize
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand(stmt.offset))]
    return math.gcd(SECTOR, *(int(step) * param.dtype.itemsize for step, rest in terms if rest != column))


def moved_by(blocked: Blocked) -> Moved:
    """Return the matrices of a kernel that `refusal` accepts; results leave by descriptors if all of them can."""
    left, right = _operands(blocked)
    stores = leaving(blocked)
    targets = [target_of(blocked, stmt) for stmt in stores]
    described = {matrix.param: matrix for matrix in targets if matrix is not None and matrix.base == 0}
    if len(described) == len(stores) and all(matrix.rows.name == "m" for matrix in described.values()):
        return Moved(left, right, described, arriving(blocked), {})
    return Moved(left, right, {}, arriving(blocked), {stmt.param: _together(blocked, stmt) for stmt in stores})


def _together(blocked: Blocked, stmt: Store) -> int:
    """Return the neighbours that a thread stores at once: as many as are aligned, at most a warp's share of a row."""
    return min(_row_alignment(blocked, stmt) // stmt.value.dtype.itemsize, columns(blocked.device) // 32)


def epilogue_params(blocked: Blocked) -> list[str]:
    """Return the parameters that the epilogue loads from and stores to, in order."""
    names = list[str]()
    for stmt in blocked.body:
        if isinstance(stmt, Store):
            names += [*(load.buffer for load in loads(*values_of(stmt))), stmt.param]
    return list(dict.fromkeys(names))


def common(blocked: Blocked) -> object:
    """Return the properties that products of one launch must share; None for a product that must be alone.

    These have the same rows, and results computed in the same way from tensors that lie in the same way; only results
    that leave by descriptors may differ in their columns.
    """
    moved, (dot,) = moved_by(blocked), blocked.dots
    if moved.by_rows:
        return None
    known = {dim.symbol: sympy.Symbol(dim.name) for dim in blocked.dims}
    numbers = {name: f"param{number}" for number, name in enumerate(epilogue_params(blocked))}

    def placed(index: Index) -> Index:
        return index if isinstance(index, Expr) else index.xreplace(known)

    def canonical(node: Expr) -> Expr | None:
        if node == dot.ref:
            return TileRef("sum", dot.dtype)
        if isinstance(node, Load):
            return replace(node, buffer=numbers[node.buffer], index=tuple(map(placed, node.index)))
        return None

    stores = [stmt for stmt in blocked.body if isinstance(stmt, Store)]
    computed = tuple(rewrite([stmt.value for stmt in stores], canonical))
    offsets = tuple(None if stmt.param in moved.results else placed(stmt.offset) for stmt in stores)
    types = tuple(blocked.kernel.param(name).dtype for name in (moved.right.param, *(stmt.param for stmt in stores)))
    width = blocked.named("n").size
    edge = None if width % columns(blocked.device) == 0 else width
    arrives = tuple(numbers[load.buffer] for load in moved.tiles)
    left, sizes = moved.left, tuple(dim.size for dim in blocked.dims if dim.name in ("m", "k"))
    sides = left.param, left.stride, left.rows.name, moved.right.rows.name
    return computed, offsets, arrives, types, edge, sides, sizes
