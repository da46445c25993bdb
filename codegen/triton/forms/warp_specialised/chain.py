"""Decides whether the warp-specialised form computes a kernel, as two products of one loop, and names its parts.

Input: a kernel over block dimensions; output: a `WarpSpecialisedChain`, or the reason why the form does not apply.  It
applies to:

- two products, of which the second multiplies values computed from the first; both of 16-bit matrices, each with
  constant strides in one parameter;
- widths of 33 to 256, which are held in blocks of 64, 128 or 256;
- between the products only folds of rows, and loads that are constant along the loop;
- a sum whose carry is a factor per row;
- one 16-bit matrix as result, and besides it at most numbers of each row.

Other kernels that loop over a product have the form that Triton pipelines (`chained.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.codegen.triton.blocks import Blocked, Dim, extent, power_of_two
from fusion.codegen.triton.forms.warp_specialised.boxes import DescriptorBox, box_of
from fusion.codegen.triton.loops import skips
from fusion.codegen.triton.products import descriptors
from fusion.lowering.ir.expr import Expr, Load, Op, Random, loads, postorder
from fusion.lowering.ir.kernel import Fold, Loop, Role, Store, statements, values_of
from fusion.lowering.ir.scalar_ops import HALVES

NARROW, WIDE, WIDEST = WIDTHS = (64, 128, 256)
"""Columns that are held."""

STEP = {NARROW: 128, WIDE: 128, WIDEST: 64}
"""For the columns held of the wider operand, the columns of a step of the loop."""

SM90_LONG_ROW = 128
"""Bytes of a row above which any device of sm_90 has memory for fewer than 2³¹ rows."""


@dataclass(frozen=True, slots=True)
class WarpSpecialisedChain:
    """The parts of such a kernel.

    Attributes:
        loop: the loop.
        first, second: the products.
        m, n, e: the dimensions of rows, of the loop, of the columns of the second product.
        left, right: the operands of the first product; `other`: the second operand of the second one.
        store, result: the store of the result, and its matrix.
        in_place: is the result staged in the slots of `left`, since both are too wide to have slots of their own?
    """

    loop: Loop
    first: Fold
    second: Fold
    m: Dim
    n: Dim
    e: Dim
    left: DescriptorBox
    right: DescriptorBox
    other: DescriptorBox
    store: Store
    result: DescriptorBox
    in_place: bool = False


def chain_of(blocked: Blocked) -> WarpSpecialisedChain | str:
    """Return the parts of a kernel in this form, or the reason why it has none."""
    kernel, loops = blocked.kernel, [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    stores = [stmt for stmt in blocked.body if isinstance(stmt, Store)]
    if len(blocked.dots) != 2:
        return f"its loop has {len(blocked.dots)} products, not two"
    if kernel.then is not None or kernel.beside:
        return "it shares its launch"
    if len(loops) != 1 or len(loops) + len(stores) < len(blocked.body):
        return "it is more than one loop and the stores after it"
    (loop,), (first, second) = loops, blocked.dots
    if not all(isinstance(stmt, Fold) for stmt in loop.body) or loop.body[0] is not first:
        return "its loop does not begin with the first product, or has other statements than folds"
    dims = _dims(blocked, loop, first, second)
    if isinstance(dims, str):
        return dims
    if loop.where is not None and skips.needs_lookup(loop.where):
        return "which blocks count is looked up in memory"
    return _over(dims, blocked, loop, stores)


def _dims(blocked: Blocked, loop: Loop, first: Fold, second: Fold) -> tuple[Dim, Dim, Dim, Dim] | str:
    """Return the dimensions of rows, of the loop, of the first sum, of the columns; or the reason to refuse them."""
    (m, n, k), (rows, e, over) = blocked.sides(first), blocked.sides(second)
    spread = {dim.name for dim in blocked.dims if dim.role is Role.GRID}
    if blocked.of(loop.axes) != (n,) or rows is not m or over is not n or len({m, n, k, e}) < 4:
        return "the second product does not multiply the results of the first along the loop"
    if m.role is not Role.GRID or not spread <= {"b", "m"} or {k.role, e.role} != {Role.WHOLE} or n.shift != 0:
        return "rows are not spread over programs, or widths are not held whole"
    if any(power_of_two(extent(dim.size)) not in WIDTHS for dim in (k, e)):
        return f"heads are {k.size} and {e.size} wide"
    return m, n, k, e


def _over(
    dims: tuple[Dim, Dim, Dim, Dim], blocked: Blocked, loop: Loop, stores: list[Store]
) -> WarpSpecialisedChain | str:
    """Return the chain over dimensions that fit; or the reason to refuse its sums, its memory or its matrices."""
    first, second = blocked.dots
    m, n, k, e = dims
    wide = [store for store in stores if isinstance(store.offset, Expr) or e.symbol in store.offset.free_symbols]
    if factor_of(second) is None:
        return "its sums are not carried by a factor"
    if len(wide) != 1 or not _keeps(blocked, stores):
        return "it stores more than one matrix and numbers of each row, or overwrites its inputs"
    elsewhere = _looked_up(blocked, n, e, loop)
    if elsewhere:
        return elsewhere
    left, right = _flat(blocked, first.args[0], m, k), _flat(blocked, first.args[1], n, k)
    other, out = _flat(blocked, second.args[1], n, e), _result(blocked, wide[0], m, e)
    if left is None or right is None or other is None or out is None:
        return "its matrices are not of 16 bits, or do not lie evenly in memory"
    if second.args[0].dtype is not second.args[1].dtype or left.matrix.rows is not m or out.matrix.rows is not m:
        return "its matrices differ in type, or in how their rows lie"
    inside = [node for stmt in loop.body if stmt is not second for node in postorder(*values_of(stmt))]
    if second.ref in inside or second.before in inside or second.ref not in postorder(wide[0].value):
        return "its sums are read before the loop is done"
    in_place = all(power_of_two(extent(dim.size)) == WIDEST for dim in (k, e))
    types = {blocked.kernel.param(box.matrix.param).dtype for box in (left, out)}
    if in_place and (len(types) > 1 or len(left.outer) != len(out.outer)):
        return "its result is not like the rows of its first product, in whose place it would have to be staged"
    return WarpSpecialisedChain(loop, first, second, m, n, e, left, right, other, wide[0], out, in_place)


def factor_of(second: Fold) -> Expr | None:
    """Return the factor by which the carry of a sum multiplies it; None if the carry is anything else."""
    carry = second.carry
    if not isinstance(carry, Op) or carry.name != "mul" or second.before not in carry.args:
        return None
    factor = next((arg for arg in carry.args if arg is not second.before), None)
    return factor if factor is not None and second.before not in postorder(factor) else None


def _flat(blocked: Blocked, factor: Expr, along: Dim, other: Dim) -> DescriptorBox | None:
    if not isinstance(factor, Load) or factor.dtype not in HALVES:
        return None
    matrix = descriptors.matrix_of(blocked, factor, along, other, long=SM90_LONG_ROW)
    return None if matrix is None else box_of(blocked, matrix)


def _result(blocked: Blocked, store: Store, m: Dim, e: Dim) -> DescriptorBox | None:
    halves = blocked.kernel.param(store.param).dtype in HALVES and store.value.dtype in HALVES
    if isinstance(store.offset, Expr) or not halves:
        return None
    matrix = descriptors.as_matrix(blocked, store.param, store.offset, m, e, long=SM90_LONG_ROW)
    return None if matrix is None else box_of(blocked, matrix)


def _keeps(blocked: Blocked, stores: list[Store]) -> bool:
    """Return whether every store writes each element once, to memory that the kernel does not read."""
    read = {load.buffer for stmt in statements(blocked.body) for load in loads(*values_of(stmt))}
    return all(store.axes is None and store.param not in read for store in stores)


def _looked_up(blocked: Blocked, n: Dim, e: Dim, loop: Loop) -> str:
    """Return why other data is read or drawn along the loop or the result's columns; empty if none is.

    A mask whose bounds are known is read in the blocks that its bounds do not decide.
    """
    operands = {arg for dot in blocked.dots for arg in dot.args}
    operands |= {*loads(*(() if loop.where is None else skips.bounded_in(loop.where)))}
    roots = [value for stmt in statements(blocked.body) for value in values_of(stmt)]
    if any(isinstance(node, Random) for node in postorder(*roots)):
        return "it draws random numbers"
    varying = {n.symbol, e.symbol}
    for load in loads(*roots):
        if load not in operands and (isinstance(load.index[0], Expr) or varying & load.index[0].free_symbols):
            return f"{load.buffer} is read along the loop or the result's columns"
    return ""
