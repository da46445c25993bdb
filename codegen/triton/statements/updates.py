"""Updates: operations on elements of memory at points whose indices may collide, within a program or between programs.

Input: a store with `axes`, the points at which it happens; output: its line, an atomic operation with one address for
each point.  A NaN is given the sign with which it wins, because maxima and minima of floats compare their bits.
"""

from __future__ import annotations

from fusion.codegen.triton.expressions.indices import expand
from fusion.codegen.triton.expressions.scalar_code import Code, typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.kernel import Store

ATOMIC = {"sum": "tl.atomic_add", "max": "tl.atomic_max", "min": "tl.atomic_min"}
"""Triton's atomic function for each operation of a store."""


def update(values: Values, stmt: Store) -> None:
    """Add the line of `stmt`."""
    assert stmt.axes is not None
    dims = values.join((values.layout.blocked.of(stmt.axes),))
    dims = tuple(dim for dim in dims if dim in values.layout.tiled)
    condition = None if stmt.where is None else values.value(stmt.where)
    value = values.widened(values.value(stmt.value))
    value = Tile(typed(value.code, stmt.value.dtype), value.dims, value.depth)
    if stmt.op in ("max", "min") and stmt.value.dtype.is_floating_point:
        value = values.name(stmt.op, value)
        nan = "float('nan')" if stmt.op == "max" else "-float('nan')"
        text = f"tl.where({value.code.text} != {value.code.text}, {nan}, {value.code.text})"
        value = Tile(Code(text), value.dims, value.depth)
    pointer = values.pointer(stmt.param, stmt.offset)
    text = ", ".join(values.broadcast(tile, dims).code.text for tile in (pointer, value))
    mask = values.masks(dims, condition)
    if mask is not None:
        text += f", mask={expand(mask.code, mask.dims, dims).text}"
    values.line(f"tl.store({text})" if stmt.op == "store" else f'{ATOMIC[stmt.op]}({text}, sem="relaxed")')
    values.stored(stmt.param)
