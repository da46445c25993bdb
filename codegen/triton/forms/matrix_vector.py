"""Generates GEMVs: products with up to four vectors, as sums of products without matrix units.

All time is spent loading the matrix: the number of its bytes in flight decides.  (`skinny.py` is for more vectors, on
the matrix units.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import Self

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, power_of_two
from fusion.codegen.triton.blocks.dims import WORD
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.traffic import first_folds, holds_several, matrix_itemsize
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Op, loads
from fusion.lowering.ir.kernel import Fold, Prefix, Role, statements

# (rows of the matrix, bytes along each, words of 16 bytes that each thread loads in a step); fastest on an H200 first.
_BYTES = ((1, 2048, 1), (4, 2048, 4), (2, 2048, 2), (2, 1024, 1))
_HALVES = ((1, 2048, 1), (2, 4096, 2), (4, 2048, 2), (2, 1024, 2))
_ROW_CONFIGS = ((2, 1024, 2), (2, 4096, 2), (4, 2048, 4), (1, 2048, 1))  # times several rows
_GROUP_CONFIGS = ((4, 2048, 4), (2, 2048, 2), (2, 1024, 1), (2, 1024, 4))
_PACKED = ((8, 1024, 4), (8, 1024, 8), (4, 2048, 8), (4, 1024, 8))


@dataclass(frozen=True)
class MatrixVector(Form):
    """The plan for a kernel that sums products of vectors and the rows, or columns, of a matrix in a loop."""

    name = "matrix-vector"

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept one GRID dimension and one loop of sums of products only."""
        blocked, dims = task.blocked, {dim.name: dim for dim in task.blocked.dims}
        if blocked.contraction or list(dims) not in (["r", "x"], ["x", "r"], ["r", "x", "q"]):
            return Refused("it is not one loop over rows or columns of a matrix")
        if dims["r"].role is not Role.LOOP or not _is_product(blocked):
            return Refused("it sums something else than products with a matrix")
        return cls(task)

    def configs(self) -> tuple[Config, ...]:
        """Return configurations of several rows, which share the vector, its conversion and, for packed weights, its
        parts.

        A program that requests all of its data at once waits once.
        """
        blocked, dims = self.blocked, {dim.name: dim for dim in self.blocked.dims}
        if list(dims) == ["r", "x"]:
            return _columns(blocked, dims["r"], dims["x"])
        size = matrix_itemsize(blocked)
        held = power_of_two(extent(dims["q"].size)) if "q" in dims else 1
        configs = []
        for rows, along, words in _shapes(first_folds(blocked), size, grouped=held * size > WORD):
            rows = min(rows, power_of_two(extent(dims["x"].size)))
            while rows > 1 and (
                extent(dims["x"].size) < rows * blocked.device.multiprocessors or blocked.single(dims["x"])
            ):
                rows //= 2
            steps = max(1, min(along // size // held, power_of_two(extent(dims["r"].size))))
            blocks = {"x": rows, "r": steps, "q": held}
            warps = min(8, max(1, rows * steps * held * size // (WORD * words * 32)))
            configs.append(Config(tuple((name, blocks[name]) for name in dims), num_warps=warps))
        return tuple(dict.fromkeys(configs))


def _shapes(sums: Sequence[Fold], size: int, *, grouped: bool) -> tuple[tuple[int, int, int], ...]:
    """Return the table for a matrix of elements of `size` bytes, in `grouped` words or one by one."""
    if any(map(holds_several, sums)):
        return _PACKED
    if grouped:
        return _GROUP_CONFIGS
    if len(sums) > 1:
        return _ROW_CONFIGS
    return _BYTES if size == 1 else _HALVES


# (rows, bytes along each, warps) of a matrix whose columns are summed; fastest on an H200 first.
_COLUMNS = ((128, 32, 8), (256, 16, 8), (512, 32, 16))


def _columns(blocked: Blocked, r: Dim, x: Dim) -> tuple[Config, ...]:
    """Return configurations in which neighbouring threads take neighbouring columns; narrow blocks where programs are
    few.
    """
    configs, size = [], matrix_itemsize(blocked)
    for rows, along, warps in _COLUMNS:
        blocks = (
            ("r", min(rows, power_of_two(extent(r.size)))),
            ("x", min(along // size, power_of_two(extent(x.size)))),
        )
        configs.append(Config(blocks, num_warps=warps))
    if extent(x.size) < 2 * blocked.device.multiprocessors * configs[0].block("x"):
        configs[:2] = configs[1::-1]
    return tuple(dict.fromkeys(configs))


def _is_product(blocked: Blocked) -> bool:
    """Return whether a kernel only sums products of vectors and the rows of a matrix, contiguous along the last
    dimension.
    """
    grid, last = {dim.symbol for dim in blocked.grid()}, blocked.dims[-1].symbol
    if any(isinstance(stmt, Prefix) for stmt in statements(blocked.body)):
        return False
    sums = first_folds(blocked)
    for fold in sums:
        if fold.op != "sum" or not all(isinstance(term, Op) and term.name == "mul" for term in _terms(fold.args[0])):
            return False
        offsets = [load.index[0] for load in loads(*fold.args) if not isinstance(load.index[0], Expr)]
        rows = [offset for offset in offsets if grid & offset.free_symbols]
        if len(rows) == len(offsets) or not any(coefficient(offset, last) == 1 for offset in rows):
            return False
    return bool(sums)


def _terms(expr: Expr) -> Iterator[Expr]:
    """Yield the terms of the sum `expr`."""
    if isinstance(expr, Op) and expr.name == "add":
        for arg in expr.args:
            yield from _terms(arg)
    else:
        yield expr
