"""Determines the scores that the mask of a call hides, from its lowered form, and drops redundant masks.

Input: the operations that compute a mask in Dynamo's graph; output: a `Mask`: its element as an expression of positions
and of tensors in memory.  By the bounds of the positions, it may hide nothing, as a mask
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
from fusion.lowering.algebra.positions import simplify_all
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import substitute
from fusion.lowering.ir.expr import Const, Expr, Load, const, free_axes, loads, make_op
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.program import Axis, BufferRef, Map
from fusion.lowering.lower import lower
from fusion.schedule.reductions.skipped_blocks import counts_where
from fusion.schedule.rewrites.inline import inline_cheap_maps

_FURTHER = sympy.Symbol("further", integer=True, nonnegative=True)
"""The distance between a query and a key."""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of scores [..., rows, columns].

    Attributes:
        tensor: the mask as the library would get it, without data.
        value: its element over `axes`: a flag, false where a score is hidden, or a number that is added to a score.
        axes: the dimensions of the mask; dimensions of size 1 broadcast.
        exact: whether `value` holds for all sizes that the program may run with.
    """

    tensor: Tensor
    value: Expr
    axes: tuple[Axis, ...]
    exact: bool

    @property
    def hides_nothing(self) -> bool:
        """Whether the mask changes no score, whatever the data."""
        return self.exact and _hides_none(self.value)

    @property
    def is_causal(self) -> bool:
        """Whether exactly the columns after each row are hidden, whatever the data."""
        *batch, row, column = self.axes
        if not self.exact or not free_axes(self.value).isdisjoint(axis.symbol for axis in batch):
            return False
        seen = self._at({row.symbol: column.symbol + _FURTHER}, {column.symbol: column.size, _FURTHER: row.size})
        hidden = self._at({column.symbol: row.symbol + 1 + _FURTHER}, {row.symbol: row.size, _FURTHER: column.size})
        return _hides_none(seen) and _hides_all(hidden)

    @property
    def loads(self) -> bool:
        """Whether it depends on data."""
        return any(True for _ in loads(self.value))

    @property
    def loads_each(self) -> bool:
        """Whether a number is loaded for every score, not one for a row or a column."""
        row, column = (axis.symbol for axis in self.axes[-2:])
        return any({row, column} <= free_axes(load) for load in loads(self.value))

    @property
    def where(self) -> Expr | None:
        """The condition under which a score counts, over values that decide whole blocks; None if all count."""
        score = Load("scores", tuple(axis.symbol for axis in self.axes), torch.float32)
        if self.value.dtype is torch.bool:
            masked = make_op("where", self.value, score, const(-math.inf, score.dtype))
        else:
            masked = make_op("add", score, self.value)
        fold = Fold("largest", "max", (masked,), (self.axes[-1].symbol,), score.dtype)
        return counts_where([fold], fold.over)

    def _at(self, places: Mapping[sympy.Symbol, sympy.Expr], sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
        """Return the element at some places, simplified by the bounds of the axes in them."""
        return simplify_all([substitute(self.value, places, sizes)], sizes)[0]


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
        traced = make_fx(lambda *inputs: _copied(parts(*inputs)), decomposition_table=decompositions(exact=False))(
            *recipe.values.values()
        )
    program = inline_cheap_maps(lower(traced))
    (result,) = program.outputs
    last = program.nodes[-1]
    if not isinstance(last, Map) or not isinstance(result, BufferRef) or result.name != last.out:
        raise Unsupported("a mask that is no function of its positions")
    return Mask(tensor, last.expr, last.axes, recipe.exact and not tensor.requires_grad)


def _copied(mask: Tensor) -> Tensor:
    """Return a mask in memory of its own, numbers in float32."""
    return mask.to(torch.bool if mask.dtype is torch.bool else torch.float32, copy=True)


def _hides_none(value: Expr) -> bool:
    return isinstance(value, Const) and value.value == (True if value.dtype is torch.bool else 0.0)


def _hides_all(value: Expr) -> bool:
    return isinstance(value, Const) and value.value == (False if value.dtype is torch.bool else -math.inf)
