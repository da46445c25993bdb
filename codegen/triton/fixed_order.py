"""Fixes the order in which rows are summed and multiplied, for batch-invariant numerics.

The order in which `tl.sum` adds depends on the layout of its tile, which Triton chooses from everything else in the
kernel, and so on fusion, on the number of rows and on the number of warps.  Under these numerics a sum is written as
additions of two numbers each (`_sum_in_pairs` in `expressions/prelude.py`): no layout changes their order, and a sum of
two numbers does not depend on theirs.  The length of a row determines which elements are added:

    up to HELD_ELEMENTS      the row is held whole, padded to a power of two
    longer, or not known     a loop in steps of STEP elements, one accumulator for each, which are summed after it

A product is computed by one shape of instruction whatever its rows: in blocks of BLOCK_ROWS or more rows by
BLOCK_COLUMNS columns, with the same number of warps (four on sm_90, which multiply 64 rows together).  Blocks are not
cut to the size of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.blocks.config import extent
from fusion.codegen.triton.blocks.dims import Blocked
from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.expressions.code import PRODUCT, Code, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout
from fusion.lowering.ir.kernel import Fold, Prefix, statements

HELD_ELEMENTS, STEP = 1 << 12, 1 << 10

BLOCK_ROWS, BLOCK_COLUMNS = 64, 64

MOST_HELD = 1 << 15
"""Elements of the columns that a program holds whole: 32 for each of 1024 threads."""


def depends_on_order(fold: Fold) -> bool:
    """Return whether the result of a fold without a product depends on the order in which its elements are combined."""
    return fold.op in ("sum", "prod") and fold.dtype.is_floating_point


def shapes(known: Sequence[tuple[int, ...]], blocked: Blocked) -> Sequence[tuple[int, ...]]:
    """Return the shapes (m, n, k, …) in `known` that multiply by one instruction of the device.

    On sm_90 four warps multiply twice as many rows by the same instruction, twice; elsewhere it may be another one.
    """
    many = extent(blocked.named("m").size) > BLOCK_ROWS and blocked.device.has(Feature.WARP_GROUPS)
    return [shape for shape in known if shape[0] in (BLOCK_ROWS, 2 * BLOCK_ROWS * many) and shape[1] == BLOCK_COLUMNS]


def refused(blocked: Blocked) -> str:
    """Return why the order of additions would depend on the other results of a kernel; empty if it does not."""
    every = list(statements(blocked.body))
    folds = [stmt for stmt in every if isinstance(stmt, Fold)]
    if blocked.contraction and len(folds) > 1:
        return "under batch-invariant numerics a product is computed without other folds"
    if any(isinstance(stmt, Prefix) for stmt in every) and any(map(depends_on_order, folds)):
        return "under batch-invariant numerics a sum is computed in steps of its own, without a scan"
    return ""


def in_pairs(layout: Layout, code: Code, dims: Sequence[Dim], over: Dim, *, product: bool = False) -> Code:
    """Return a tile over `dims` summed (or multiplied) over one of them, two elements at a time."""
    position = list(dims).index(over)
    before, after = dims[:position], dims[position + 1 :]
    sizes = [listed([layout.width(dim) for dim in part] or [as_code(1)], " * ", PRODUCT) for part in (before, after)]
    function = "_product_in_pairs" if product else "_sum_in_pairs"
    result = compose("{}({}, {}, {}, {})", function, code, sizes[0], layout.width(over), sizes[1])
    if not (before or after):
        return compose("tl.sum(tl.reshape({}, [1]), 0)", result)
    return compose("tl.reshape({}, {})", result, layout.shape((*before, *after)))
