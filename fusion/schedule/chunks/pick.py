"""Replaces a load of one element of a row by a masked sum over the row.

    x[i, e(i)]      becomes      Σ_r where(r == e(i), x[i, r], 0)

Input: the nodes of a chunk and the tensors that exist only there; output: nodes in which these are read only at the
index at which they are computed.  The kernel that reads the row anyway computes the element too, and may overwrite the
row.  An e outside the row gives 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from fusion.lowering.indexing import axis_symbol, over_symbol, substitute
from fusion.lowering.ir.expr import Expr, IndexValue, Load, Op, const, free_axes, make_cast, make_op, rewrite
from fusion.lowering.ir.program import Axis, Buffer, Compute, Map, Reduce, axis_sizes
from fusion.lowering.value import contiguous_strides
from fusion.schedule.iteration.naming import unused


def pick(nodes: Sequence[Compute], rows: Collection[str], buffers: dict[str, Buffer]) -> list[Compute]:
    """Replace loads of single elements of the tensors `rows`; new tensors are added to `buffers`."""
    result: list[Compute] = []
    for node in nodes:
        sums: list[Reduce] = []

        def rule(expr: Expr, sums: list[Reduce] = sums, node: Compute = node) -> Expr | None:
            if not isinstance(expr, Load) or expr.buffer not in rows:
                return None
            picked = _picked(expr, axis_sizes(node), buffers)
            if picked is None:
                return None
            reduce, load = picked
            sums.append(reduce)
            return make_cast(load, expr.dtype)

        if isinstance(node, Map):
            node = replace(node, expr=rewrite([node.expr], rule)[0])
        result += [*sums, node]
    return result


def _picked(
    load: Load, sizes: Mapping[sympy.Symbol, sympy.Expr], buffers: dict[str, Buffer]
) -> tuple[Reduce, Load] | None:
    """Return the sum that computes the element of `load`, and the load of its result; None for another load."""
    indirect = [k for k, index in enumerate(load.index) if isinstance(index, Expr)]
    affine = [index for index in load.index if isinstance(index, sympy.Symbol)]
    if len(indirect) != 1 or load.mask is not None or not load.dtype.is_floating_point:
        return None
    (position,) = indirect
    element = load.index[position]
    if not isinstance(element, Expr) or len(set(affine)) != len(load.index) - 1 or not sizes.keys() >= set(affine):
        return None
    if not free_axes(element) <= set(affine):
        return None
    axes = tuple(Axis(axis_symbol(k), sizes[symbol]) for k, symbol in enumerate(affine))
    moved = {old: axis.symbol for old, axis in zip(affine, axes, strict=True)}
    source = buffers[load.buffer]
    over = Axis(over_symbol(0), source.shape[position])
    inner = {axis.symbol: axis.size for axis in (*axes, over)}
    symbols = [axis.symbol for axis in axes]
    index = (*symbols[:position], over.symbol, *symbols[position:])
    here = make_op("eq", IndexValue(over.symbol), substitute(element, moved, inner))
    dtype = torch.float64 if load.dtype is torch.float64 else torch.float32
    value = make_cast(Load(load.buffer, index, load.dtype), dtype)
    name = unused(f"{load.buffer}_picked", buffers)
    shape = tuple(axis.size for axis in axes)
    buffers[name] = Buffer(name, dtype, shape, contiguous_strides(shape), source.device)
    term = Op("where", (here, value, const(0, dtype)), dtype)
    reduce = Reduce(name, axes, (over,), "sum", (term,), dtype)
    return reduce, Load(name, tuple(affine), dtype)
