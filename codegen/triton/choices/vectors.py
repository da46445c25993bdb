"""Products: configurations for a matrix with a few vectors, as sums of products (`vectors`) and as narrow contractions.

What enters is a kernel over block dimensions; what leaves are configurations, the default first, or none where the
kernel is something else.  All time goes into loading the matrix: what counts is how many of its bytes are under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from codegen.triton.blocks import PROGRAMS, Blocked, Config, Dim, extent, power_of_two, programs
from codegen.triton.rewrites.groups import WORD
from codegen.triton.rewrites.vectors import NARROW
from lowering.expr import Expr, Load, Op, TileRef, index_of, loads, postorder
from lowering.indexing import coefficient, split_points
from lowering.kernel import Fold, Prefix, Role, statements
from lowering.scalar_ops import HALVES

# (rows of the matrix, bytes along each, words of 16 bytes that each thread loads in a step); fastest on an H200 first.
_BYTES = ((1, 2048, 1), (4, 2048, 4), (2, 2048, 2), (2, 1024, 1))
_HALVES = ((1, 2048, 1), (2, 4096, 2), (4, 2048, 2), (2, 1024, 2))
_ROWS = ((2, 1024, 2), (2, 4096, 2), (4, 2048, 4), (1, 2048, 1))  # times several rows
_GROUPS = ((4, 2048, 4), (2, 2048, 2), (2, 1024, 1), (2, 1024, 4))
_PACKED = ((8, 1024, 4), (8, 1024, 8), (4, 2048, 8), (4, 1024, 8))


def candidates(blocked: Blocked) -> tuple[Config, ...]:
    """Configurations worth timing, the default first; none where this is not the walk of such a product.

    Rows in a step share the vector, its conversion and, where several weights share a byte, its parts.  A program that
    asks for all that it needs at once waits once.
    """
    dims = {dim.name: dim for dim in blocked.dims}
    if list(dims) == ["r", "x"] and dims["r"].role is Role.LOOP and _is_product(blocked):
        return _columns(dims["r"], dims["x"], _itemsize(blocked))
    if list(dims) not in (["x", "r"], ["r", "x", "q"]) or dims["r"].role is not Role.LOOP or not _is_product(blocked):
        return ()
    size = _itemsize(blocked)
    held = power_of_two(extent(dims["q"].size)) if "q" in dims else 1
    shapes = _shapes(_sums(blocked), size, grouped=held * size > WORD)
    found = []
    for rows, along, words in shapes:
        rows = min(rows, power_of_two(extent(dims["x"].size)))
        while rows > 1 and (extent(dims["x"].size) < rows * PROGRAMS or blocked.single(dims["x"])):
            rows //= 2
        steps = max(1, min(along // size // held, power_of_two(extent(dims["r"].size))))
        blocks = {"x": rows, "r": steps, "q": held}
        warps = min(8, max(1, rows * steps * held * size // (WORD * words * 32)))
        found.append(Config(tuple((name, blocks[name]) for name in dims), num_warps=warps))
    return tuple(dict.fromkeys(found))


def is_packed(blocked: Blocked) -> bool:
    """Are several numbers taken of each element of the matrix that is summed?"""
    return any(map(_of_several, _sums(blocked)))


def _of_several(fold: Fold) -> bool:
    return isinstance(fold.args[0], Op) and fold.args[0].name == "add"


def _shapes(sums: Sequence[Fold], size: int, *, grouped: bool) -> tuple[tuple[int, int, int], ...]:
    """The table for a matrix of elements of `size` bytes, in `grouped` words or one by one."""
    if any(map(_of_several, sums)):
        return _PACKED
    if grouped:
        return _GROUPS
    if len(sums) > 1:
        return _ROWS
    return _BYTES if size == 1 else _HALVES


# (rows, bytes along each, warps) of a matrix whose columns are summed; fastest on an H200 first.
_COLUMNS = ((128, 32, 8), (256, 16, 8), (512, 32, 16))


def _columns(r: Dim, x: Dim, size: int) -> tuple[Config, ...]:
    """Neighbouring threads take neighbouring columns, a word each; narrow blocks where there are few programs."""
    found = []
    for rows, along, warps in _COLUMNS:
        blocks = (
            ("r", min(rows, power_of_two(extent(r.size)))),
            ("x", min(along // size, power_of_two(extent(x.size)))),
        )
        found.append(Config(blocks, num_warps=warps))
    if extent(x.size) < 2 * PROGRAMS * found[0].block("x"):
        found[:2] = found[1::-1]
    return tuple(dict.fromkeys(found))


# (rows of the matrix, bytes along each, warps, stages); fastest on an H200 first.  Where warps share rows (32 rows and
# 4 warps, each with 8 of the columns), each of them converts the matrix for itself.
_NARROW_SHAPES = ((32, 256, 2, 4), (32, 256, 4, 5), (64, 256, 4, 4), (32, 256, 2, 3), (16, 256, 4, 6), (64, 128, 4, 5))
# (columns of the matrix, rows of it, warps, stages), where it is contiguous along its columns, [k, n].
_ACROSS_BYTES = ((128, 64, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (64, 32, 4, 6))
_ACROSS_HALVES = ((64, 128, 4, 4), (32, 128, 4, 5), (64, 64, 4, 5), (32, 256, 4, 3))
# Of bytes, all take 8 columns of the result where there are no more; of two matrices the last of groups is best then.
# Two warps: each takes the words of a few rows as the matrix units do, with which 64 rows of four warps would differ.
_PACKED_SHAPES = ((64, 256, 2, 4), (64, 256, 2, 5), (64, 512, 2, 3), (32, 256, 1, 5), (32, 256, 2, 6))
_PACKED_GROUPS = ((32, 256, 2, 6), (64, 256, 2, 5), (64, 256, 2, 7), (32, 256, 1, 6))

_LINE = 128  # bytes that memory brings best at once: of steps that are half as long or shorter, two are taken together


def narrow(blocked: Blocked) -> tuple[Config, ...]:
    """Configurations of contractions whose result has few columns and is thus as tall as the larger operand."""
    dims = {dim.name: dim for dim in blocked.dims}
    if [name for name in dims if name not in ("b", "s")] != ["m", "k", "n"]:
        return ()
    if dims["k"].role is not Role.LOOP or dims["n"].role is not Role.GRID:
        return ()
    columns, rows, along = (extent(dims[name].size) for name in ("n", "m", "k"))
    if columns > NARROW or rows <= NARROW or any(dot.args[0].dtype not in HALVES for dot in blocked.dots):
        return ()
    if "s" in dims:
        return _in_shares(blocked, dims)
    operands = [load for dot in blocked.dots for load in loads(*dot.args)]
    if not _along(operands, dims["m"], dims["k"]):
        return _across(blocked, dims["k"]) if _along(operands, dims["m"], dims["m"]) else ()
    size, group = _itemsize(blocked), _group(blocked, dims["k"])
    least, matrices = 8 if size == 1 else 16, _matrices(blocked, dims["m"])
    shapes: tuple[tuple[int, int, int, int], ...] = _NARROW_SHAPES
    share = 1
    if len(blocked.dots) > 1:
        shapes, share = _PACKED_SHAPES, power_of_two(max(2, len(blocked.dots) // matrices))
        if group < _PACKED_SHAPES[0][1] // len(blocked.dots):
            shapes = _PACKED_GROUPS if columns > least or matrices == 1 else _PACKED_GROUPS[::-1]
    found = []
    for m, k, warps, stages in shapes:
        k = max(16, min(k // size // share, power_of_two(along), group))
        blocks = (("m", m), ("k", k), ("n", max(least, power_of_two(columns))))
        config = Config(blocks, num_warps=warps, num_stages=stages)
        if matrices == 1 and 2 * k * size <= _LINE and 2 * k <= along:
            config = replace(config, num_stages=stages // 2 + 1, unrolled=2)
        found.append(config)
    if len(blocked.dots) == 1 and programs(blocked, found[0]) < 2 * PROGRAMS:
        found[:2] = found[1::-1]  # alone on its multiprocessor, a program needs more warps and more under way
    return tuple(dict.fromkeys(found))


# (rows of the matrix, stages) of a program whose warps have a group of each line each; fastest on an H200 first.
_SHARED_SHAPES = ((32, 4), (32, 5), (32, 3), (16, 5), (64, 3))
_SHARED_LINES = ((32, 3), (64, 3), (32, 4), (16, 4))  # of two lines: with more under way, fewer programs run at once


def _in_shares(blocked: Blocked, dims: Mapping[str, Dim]) -> tuple[Config, ...]:
    """Configurations of a product in shares."""
    shares, columns = extent(dims["s"].size), max(8, power_of_two(extent(dims["n"].size)))
    group = _group(blocked, dims["k"])
    found = []
    for m, stages in _SHARED_LINES if shares * group > _LINE else _SHARED_SHAPES:
        blocks = (("s", shares), ("m", m), ("k", group), ("n", columns))
        found.append(Config(blocks, num_warps=shares, num_stages=stages))
    return tuple(found)


def _matrices(blocked: Blocked, rows: Dim) -> int:
    """How many matrices are multiplied, of which an element may be several numbers: each has products of its own."""
    size, wide = _itemsize(blocked), set[str]()
    for load in (load for dot in blocked.dots for load in loads(*dot.args) if load.dtype.itemsize == size):
        offset = load.index[0]
        if not isinstance(offset, Expr) and rows.symbol in offset.free_symbols:
            wide.add(load.buffer)
    return max(1, len(wide))


def _across(blocked: Blocked, k: Dim) -> tuple[Config, ...]:
    """Configurations for a matrix that is contiguous along its columns, the first that keeps the device busy first."""
    columns = blocked.named("n")
    group = _group(blocked, k)
    found = []
    for m, rows, warps, stages in _ACROSS_BYTES if _itemsize(blocked) == 1 else _ACROSS_HALVES:
        rows = max(16, min(rows // power_of_two(len(blocked.dots)), power_of_two(extent(k.size)), group))
        blocks = (("m", m), ("k", rows), ("n", max(16, power_of_two(extent(columns.size)))))
        found.append(Config(blocks, num_warps=warps, num_stages=stages))
    return tuple(dict.fromkeys(sorted(found, key=lambda config: programs(blocked, config) * 10 < PROGRAMS * 7)))


def _along(found: Iterable[Load], rows: Dim, along: Dim) -> bool:
    """Is some load of the matrix contiguous along `along`?"""
    plain = [load.index[0] for load in found if not isinstance(load.index[0], Expr)]
    wide = [offset for offset in plain if rows.symbol in offset.free_symbols]
    return any(coefficient(offset, along.symbol) == 1 for offset in wide)


def _group(blocked: Blocked, dim: Dim) -> int:
    """How many neighbours along `dim` always share what varies in groups along it, as the scale of weights does."""
    nodes = postorder(*(arg for dot in blocked.dots for arg in dot.args))
    indices = [index for node in nodes for index in index_of(node)]
    points = [point for point in split_points(indices, dim.symbol, dim.size) if point >= 16]
    return points[0] & -points[0] if points else 1 << 30


def _itemsize(blocked: Blocked) -> int:
    """Bytes of an element of the matrix: of the parameter that most of the traffic is for."""
    return max(blocked.kernel.params, key=lambda param: extent(param.extent) * param.dtype.itemsize).dtype.itemsize


def _is_product(blocked: Blocked) -> bool:
    """Does a kernel only sum products of vectors and the rows of a matrix, contiguous along the last dimension?"""
    grid, last = {dim.symbol for dim in blocked.grid()}, blocked.dims[-1].symbol
    if any(isinstance(stmt, Prefix) for stmt in statements(blocked.body)):
        return False
    sums = _sums(blocked)
    for fold in sums:
        if fold.op != "sum" or not all(isinstance(term, Op) and term.name == "mul" for term in _terms(fold.args[0])):
            return False
        plain = [load.index[0] for load in loads(*fold.args) if not isinstance(load.index[0], Expr)]
        rows = [offset for offset in plain if grid & offset.free_symbols]
        if len(rows) == len(plain) or not any(coefficient(offset, last) == 1 for offset in rows):
            return False
    return bool(sums)


def _sums(blocked: Blocked) -> list[Fold]:
    """The folds that are not over the results of others."""
    found = [stmt for stmt in statements(blocked.body) if isinstance(stmt, Fold)]
    return [fold for fold in found if not any(isinstance(node, TileRef) for node in postorder(*fold.args))]


def _terms(expr: Expr) -> Iterator[Expr]:
    """The summands of `expr`."""
    if isinstance(expr, Op) and expr.name == "add":
        for arg in expr.args:
            yield from _terms(arg)
    else:
        yield expr
