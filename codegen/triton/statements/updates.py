"""Emits atomic operations on memory, at points whose indices may collide within or between programs.

Input: a store with `axes`, the points at which it happens; output: its line, an atomic operation with one address for
each point.  A NaN is given the sign with which it wins, because maxima and minima of floats compare their bits.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.codegen.triton.expressions.code import Code, compose, listed
from fusion.codegen.triton.expressions.indices import expand
from fusion.codegen.triton.expressions.scalar_code import typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.ir.kernel import Store

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
        nan = Code("float('nan')" if stmt.op == "max" else "-float('nan')")
        value = replace(value, code=compose("tl.where({0} != {0}, {1}, {0})", value.code, nan))
    pointer = values.pointer(stmt.param, stmt.offset)
    arguments = [values.broadcast(tile, dims).code for tile in (pointer, value)]
    mask = values.masks(dims, condition)
    if mask is not None:
        arguments.append(compose("mask={}", expand(mask.code, mask.dims, dims)))
    if stmt.op != "store":
        arguments.append(Code('sem="relaxed"'))
    values.line("{}({})", "tl.store" if stmt.op == "store" else ATOMIC[stmt.op], listed(arguments))
    values.stored(stmt.param)
