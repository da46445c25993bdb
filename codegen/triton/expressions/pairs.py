"""Pairs: a tile summed, or multiplied, two elements at a time, in an order that no layout changes (`fixed_order`)."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import PRODUCT, Code, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout


def in_pairs(layout: Layout, code: Code, dims: Sequence[Dim], over: Dim, *, product: bool = False) -> Code:
    """Return a tile over `dims` summed (or multiplied) over one of them."""
    position = list(dims).index(over)
    before, after = dims[:position], dims[position + 1 :]
    sizes = [listed([layout.width(dim) for dim in part] or [as_code(1)], " * ", PRODUCT) for part in (before, after)]
    function = "_product_in_pairs" if product else "_sum_in_pairs"
    result = compose("{}({}, {}, {}, {})", function, code, sizes[0], layout.width(over), sizes[1])
    if not (before or after):
        return compose("tl.sum(tl.reshape({}, [1]), 0)", result)
    return compose("tl.reshape({}, {})", result, layout.shape((*before, *after)))
