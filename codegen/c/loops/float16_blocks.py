"""Converts float16 numbers along the lanes in blocks, with the machine's own instruction.

C has no such instruction in lanes: each conversion is a dozen operations there.  Input: the one sweep of a kernel
without inner axes; output: the lines before and after it, and elements of float arrays that replace its loads and
stores.  Left alone: sweeps with masks, whose lanes are split instead, and tensors that are read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from fusion.codegen.c.plan.lanes import Lanes, in_blocks
from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.codegen.c.text.code import Code
from fusion.codegen.c.text.indices import Names, index_text
from fusion.codegen.c.text.nest import Extent
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Cast, Expr, Index, Load, make_cast, postorder
from fusion.lowering.ir.kernel import Kernel, Store

CONVERTED_BLOCK = 1024
"""Numbers that are converted at once: an array of as many floats stays in the L1 cache."""


SHORTEST_AXIS = 16
"""The shortest axis whose blocks are converted: one register."""


@dataclass(frozen=True, slots=True)
class Conversions:
    """The conversions of a sweep that are done in blocks.

    Attributes:
        loads: conversions of a loaded number to float.
        stores: those whose last step is a conversion from float.
    """

    loads: tuple[Cast, ...] = ()
    stores: tuple[Store, ...] = ()


@dataclass(frozen=True, slots=True)
class Converted:
    """Lines before and after a sweep; conversion → element of an array; param that is stored to → the same."""

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    loads: dict[Expr, Code] = field(default_factory=dict)
    stores: dict[str, Code] = field(default_factory=dict)


def find_conversions(kernel: Kernel, sweeps: Sequence[Sweep], lanes: Lanes) -> Conversions:
    """Return the conversions of a kernel to do in blocks of its lanes."""
    if len(sweeps) != 1 or sweeps[0].axes or lanes.axis is None or lanes.tile is not None:
        return Conversions()
    if lanes.axis.size.is_Integer and lanes.axis.size < SHORTEST_AXIS:
        return Conversions()
    (sweep,), lane = sweeps, lanes.axis.symbol
    order = postorder(*sweep.roots)
    if any(isinstance(node, Load) and node.mask is not None for node in order):
        return Conversions()
    written = [store.param for store in sweep.stores]
    casts = (node for node in order if isinstance(node, Cast) and node.dtype is torch.float32)
    loads = tuple(
        node
        for node in casts
        if isinstance(node.arg, Load)
        and node.arg.dtype is torch.float16
        and node.arg.buffer not in written
        and _along(node.arg.index[0], lane)
    )
    stores = tuple(
        store
        for store in sweep.stores
        if narrowed_value(kernel, store) is not None
        and store.op == "store"
        and store.axes is None
        and store.where is None
        and written.count(store.param) == 1
        and _along(store.offset, lane)
    )
    return Conversions(loads, stores)


def narrowed_value(kernel: Kernel, store: Store) -> Expr | None:
    """Return the float that a store rounds to float16, if it does."""
    value = make_cast(store.value, kernel.param(store.param).dtype)
    rounds = isinstance(value, Cast) and value.dtype is torch.float16 and value.arg.dtype is torch.float32
    return value.arg if isinstance(value, Cast) and rounds else None


def _along(offset: Index, lane: sympy.Symbol) -> bool:
    return not isinstance(offset, Expr) and coefficient(offset, lane) == 1


def lanes_for(kernel: Kernel, lanes: Lanes, conversions: Conversions, *, shared: bool) -> Lanes:
    """Return the lanes in blocks that are converted at once; unchanged if there are no conversions."""
    return (
        in_blocks(kernel, lanes, CONVERTED_BLOCK, shared=shared) if conversions.loads or conversions.stores else lanes
    )


def convert_in_blocks(
    conversions: Conversions,
    lanes: Lanes,
    extent: Extent,
    names: Names,
    params: Mapping[str, str],
    array: Callable[[], tuple[str, Code]],
) -> Converted:
    """Return the lines that convert blocks; `array` returns the name of a new float array and the current lane's
    element of it.
    """
    done = Converted()
    if lanes.axis is None or not (conversions.loads or conversions.stores):
        return done
    known = {**names, **{symbol: symbol.name for symbol in extent.first.free_symbols}}
    count = f"{extent.end} - {extent.start}"

    def start(param: str, offset: Index) -> str:
        assert isinstance(offset, sympy.Expr) and lanes.axis is not None
        at = sympy.expand_mul(offset.xreplace({lanes.axis.symbol: extent.first}))
        return f"{params[param]} + {index_text(at, known)}"

    for load in conversions.loads:
        assert isinstance(load.arg, Load)
        name, done.loads[load] = array()
        place = start(load.arg.buffer, load.arg.index[0])
        done.before.append(f"widen_halves({place}, {name}, {count});")
    for store in conversions.stores:
        name, done.stores[store.param] = array()
        place = start(store.param, store.offset)
        done.after.append(f"narrow_halves({name}, {place}, {count});")
    return done
