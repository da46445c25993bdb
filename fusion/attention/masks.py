"""Reads what the mask of a call hides, from its lowered form, and drops masks that say nothing of their own.

Input: the operations that compute a mask in Dynamo's graph; output: a `Mask`: the number that is added to each score,
as an expression of positions and of tensors in memory.  By the bounds of the positions, it may hide nothing, as a mask
that a model makes for a batch without padding; or exactly the keys after each query.  Such a call needs no mask:
`settle` changes it, so that kernels that take none compute it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.attention.recipe import Recipe, tensor_of, without_data
from fusion.lowering.decompositions import decompositions
from fusion.lowering.errors import Unsupported
from fusion.lowering.expr import Const, Expr, free_axes
from fusion.lowering.indexing import substitute
from fusion.lowering.lower import lower
from fusion.lowering.positions import simplify_all
from fusion.lowering.program import Axis, BufferRef, Map
from fusion.schedule.rewrites.inline import inline_cheap_maps

_FURTHER = sympy.Symbol("further", integer=True, nonnegative=True)
"""The distance between a query and a key."""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of scores [..., rows, columns].

    Attributes:
        tensor: the mask as the library would get it, without data.
        bias: the number that is added to a score, -inf where it is hidden; over `axes`.
        axes: the dimensions of the mask; those of size 1 broadcast.
        exact: whether `bias` holds for all sizes that the program may run with.
    """

    tensor: Tensor
    bias: Expr
    axes: tuple[Axis, ...]
    exact: bool

    @property
    def hides_nothing(self) -> bool:
        """Whether all scores stay as they are, whatever the data."""
        return self.exact and _is(self.bias, 0.0)

    @property
    def is_causal(self) -> bool:
        """Whether exactly the columns after each row are hidden, whatever the data."""
        *batch, row, column = self.axes
        if not self.exact or not free_axes(self.bias).isdisjoint(axis.symbol for axis in batch):
            return False
        seen = self._at({row.symbol: column.symbol + _FURTHER}, {column.symbol: column.size, _FURTHER: row.size})
        hidden = self._at({column.symbol: row.symbol + 1 + _FURTHER}, {row.symbol: row.size, _FURTHER: column.size})
        return _is(seen, 0.0) and _is(hidden, -math.inf)

    def _at(self, places: Mapping[sympy.Symbol, sympy.Expr], sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
        """Return the bias at some places, simplified by the bounds of what these are written with."""
        return simplify_all([substitute(self.bias, places, sizes)], sizes)[0]


def read_mask(node: object, mode: FakeTensorMode, autocast: torch.dtype | None) -> Mask:
    """Return the mask that a node computes, with tensors created in `mode`.

    Raises:
        Unsupported: it is not understood.
    """
    recipe = Recipe(mode, autocast)
    recipe.graph.output(recipe.copy(node))
    tensor = without_data(tensor_of(node), mode, autocast)
    if tensor.dtype is not torch.bool and not tensor.dtype.is_floating_point:
        raise Unsupported(f"a mask of {tensor.dtype}")
    if tensor.dim() < 2:
        raise Unsupported("a mask that is no matrix")
    parts = fx.GraphModule({}, recipe.graph)
    with mode, torch.no_grad():
        traced = make_fx(lambda *inputs: _bias(parts(*inputs)), decomposition_table=decompositions(exact=False))(
            *recipe.values.values()
        )
    program = inline_cheap_maps(lower(traced))
    (result,) = program.outputs
    last = program.nodes[-1]
    if not isinstance(last, Map) or not isinstance(result, BufferRef) or result.name != last.out:
        raise Unsupported("a mask that is no function of its positions")
    return Mask(tensor, last.expr, last.axes, recipe.exact and not tensor.requires_grad)


def _bias(mask: Tensor) -> Tensor:
    """Return what a mask adds to the scores."""
    if mask.dtype is torch.bool:
        return torch.where(mask, 0.0, -math.inf)
    return mask.to(torch.promote_types(mask.dtype, torch.float32), copy=True)


def _is(expr: Expr, number: float) -> bool:
    return isinstance(expr, Const) and expr.value == number
