"""Substitutes other indices for axes; where a loaded value replaces an axis, the index becomes an expression."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.indexing.intervals import Sizes
from fusion.lowering.indexing.laws import simplify
from fusion.lowering.ir.affine import symbols_of
from fusion.lowering.ir.division import FloorDiv, Mod
from fusion.lowering.ir.expr import (
    AxisMap,
    Cast,
    Const,
    Expr,
    Index,
    IndexValue,
    Load,
    Op,
    Random,
    TileRef,
    concrete,
    make_cast,
    rewrite,
)
from fusion.lowering.ir.scalar_ops import ScalarName


def substitute(root: Expr, axes: AxisMap, sizes: Sizes) -> Expr:
    """Replace axis symbols in `root`; a loaded value may replace an axis (a gather).

    `sizes` are the bounds of the symbols that appear in the replacements; they are used to simplify.
    """
    return substitute_all([root], axes, sizes)[0]


def substitute_all(roots: Sequence[Expr], axes: AxisMap, sizes: Sizes) -> list[Expr]:
    """Apply `substitute` to several roots that share parts."""
    if all(symbol is value or symbol == value for symbol, value in axes.items()):
        return list(roots)
    memo: dict[sympy.Expr, Index] = {}

    def replace(index: sympy.Expr) -> Index:
        if index not in memo:
            memo[index] = replace_axes(index, axes, sizes)
        return memo[index]

    def rule(node: Expr) -> Expr | None:
        match concrete(node):
            case Load(buffer, old, dtype, mask):
                index = tuple(i if isinstance(i, Expr) else replace(i) for i in old)
                if all(new is old_index for new, old_index in zip(index, old, strict=True)):
                    return None
                return Load(buffer, index, dtype, mask)
            case IndexValue(old_index, dtype):
                value = replace(old_index)
                return make_cast(value, dtype) if isinstance(value, Expr) else IndexValue(value, dtype)
            case Random(kind, seed, offset):
                counter = replace(offset)
                assert not isinstance(counter, Expr), "a random number cannot be read at a gathered position"
                return Random(kind, seed, counter)
            case Op() | Const() | Cast() | TileRef():
                return None
            case unknown:
                assert_never(unknown)

    return rewrite(roots, rule)


def replace_axes(index: sympy.Expr, axes: AxisMap, sizes: Sizes) -> Index:
    """Replace symbols in `index`, which becomes an `Expr` if one of the replacements is one."""
    replaced = {s: axes[s] for s in symbols_of(index) if s in axes}
    replacements = {s: value for s, value in replaced.items() if not isinstance(value, Expr)}
    if len(replacements) < len(replaced):
        return _lift(index, replaced, sizes)
    return simplify(index.xreplace(replacements) if replacements else index, sizes)


def as_expr(index: Index) -> Expr:
    """Return an index as an int64 expression."""
    return index if isinstance(index, Expr) else IndexValue(index)


def _lift(index: sympy.Expr, axes: AxisMap, sizes: Sizes) -> Expr:
    """Return `index` as an int64 expression: above a replaced axis, sympy's operators become scalar operations."""
    if isinstance(index, sympy.Symbol):
        return as_expr(axes.get(index, index))
    if not any(isinstance(axes.get(s), Expr) for s in symbols_of(index)):
        return as_expr(replace_axes(index, axes, sizes))
    names: dict[type, ScalarName] = {
        sympy.Add: "add",
        sympy.Mul: "mul",
        sympy.Pow: "mul",
        FloorDiv: "floordiv",
        Mod: "remainder",
    }
    name = names[index.func]
    args = (index.base,) * int(index.exp) if isinstance(index, sympy.Pow) else index.args
    result, *others = (_lift(arg, axes, sizes) for arg in args)
    for other in others:
        result = Op(name, (result, other), torch.int64)
    return result
