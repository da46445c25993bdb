"""Emits reductions: a fold as lines of Triton.

Input: a fold over tiles; output: lines.  A fold over dimensions held whole is one `tl.reduce`.  A fold inside a loop
keeps one accumulator per lane of the tile and is reduced after the loop, so that the loop itself needs no
synchronisation; where the loop needs the running value, see `running_folds`.  Lanes past the end of an axis hold the
identity of the fold.

`max` and `min` propagate NaN, `argmax` and `argmin` let NaN win and then the lower index, as eager does; Triton's own
`tl.max` and `tl.argmax` do neither, so the prelude defines combine functions for them.  `dot` is in `contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from fusion.codegen.triton.blocks import Dim, LaneDim
from fusion.codegen.triton.expressions.code import (
    AND,
    ATOM,
    COMPARE,
    FOLD_OPERATORS,
    OR,
    SUM,
    UNARY,
    Code,
    as_code,
    compose,
    listed,
)
from fusion.codegen.triton.expressions.indices import expand
from fusion.codegen.triton.expressions.scalar_code import TYPES, cast, literal, typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.fixed_order import depends_on_order, in_pairs
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import FOLD_OPS, HALVES, FoldName, identity

_COMBINE: Mapping[FoldName, str] = {
    "max": "_maximum",
    "min": "_minimum",
    "prod": "_multiply",
    "argmax": "_argmax",
    "argmin": "_argmin",
}
_BELOW_32_BITS = (torch.bool, torch.uint8, torch.int8, torch.int16)


def fold_now(values: Values, fold: Fold, over: Sequence[Dim]) -> None:
    """Add the lines that reduce over dimensions held whole (or over none: axes of size 1)."""
    tiles = _operands(values, fold, over)
    if not over and fold.op == "sum" and fold.dtype.is_floating_point:  # a sum starts with 0: the sum of -0.0 is 0.0
        tiles = [replace(tile, code=compose("{} + 0.0", tile.code.at(SUM), binds=SUM)) for tile in tiles]
    _finish(values, fold, tiles, over)


def block_value(values: Values, fold: Fold, over: Sequence[Dim]) -> tuple[Tile, torch.dtype]:
    """Return a fold of one operand over the current block of `over`, and the type of its accumulator."""
    tiles = [values.widened(tile) for tile in _operands(values, fold, over)]
    carried = _carrier(fold, 0, tiles[0])
    return _reduced(values, fold, tiles, over), carried


def lane_value(values: Values, fold: Fold, over: Dim, lanes: LaneDim) -> tuple[Tile, torch.dtype]:
    """Return a fold of one operand over each thread's part of the current block, and the type of its accumulator."""
    (tile,) = (values.widened(tile) for tile in _operands(values, fold, (over,)))
    codes = [compose("{}({}, {}, {})", "_by_lane", tile.code, lanes.count, lanes.word)]
    for position in (2, 0):
        codes = _reduce(values, fold, codes, position, tile.depth)
    return Tile(codes[0], (lanes,), tile.depth, tile.narrow), _carrier(fold, 0, tile)


def of_all_lanes(values: Values, fold: Fold, tile: Tile) -> Tile:
    """Return the values of all threads, combined."""
    return replace(tile, code=_reduce(values, fold, [tile.code], 0, tile.depth)[0], dims=())


def combined(fold: Fold, before: Code, block: Code) -> Code:
    """Return the fold of `before` and `block`, which are its values over two parts."""
    if sign := FOLD_OPS[fold.op].sign:
        binds = FOLD_OPERATORS[sign]
        return listed([before.at(binds), block.at(binds + 1)], f" {sign} ", binds)
    return compose("{}({}, {})", _COMBINE[fold.op], before, block)


def fold_in_loop(values: Values, fold: Fold, over: Sequence[Dim]) -> Callable[[], None]:
    """Add the lines that accumulate in the current loop; return a function that reduces the lanes, to be called after
    the loop.
    """
    tiles = [_operand(values, fold, position, over) for position in range(len(fold.args))]
    dims = values.join([*(tile.dims for tile in tiles), over])
    lanes: list[Tile] = []
    for position, tile in enumerate(tiles):
        dtype = _carrier(fold, position, tile)
        start = literal(_identity(fold, position, dtype), dtype)
        code = compose("tl.full({}, {}, {})", values.layout.shape(dims), start, TYPES[dtype])
        wish = f"{fold.name}_lanes" if position == len(tiles) - 1 else f"{fold.name}_values"
        lanes.append(values.accumulator(wish, Tile(code, dims, values.depth - 1, tile.narrow)))
    values.line("{}", _accumulate(fold, lanes, [expand(tile.code, tile.dims, dims) for tile in tiles]))
    return lambda: _finish(values, fold, lanes, over)


def _accumulate(fold: Fold, lanes: Sequence[Tile], codes: Sequence[Code]) -> Code:
    names = listed(tile.code for tile in lanes)
    if sign := FOLD_OPS[fold.op].sign:
        return listed([names, codes[0]], f" {sign}= ")
    return compose("{0} = {1}({0}, {2})", names, _COMBINE[fold.op], listed(codes))


def _finish(values: Values, fold: Fold, tiles: Sequence[Tile], over: Sequence[Dim]) -> None:
    """Reduce full tiles over `over`, and bind the value of the fold."""
    tile = _reduced(values, fold, tiles, over)
    last = tiles[-1]
    if not last.narrow:
        tile = replace(tile, code=cast(tile.code, _carrier(fold, len(tiles) - 1, last), fold.dtype))
    values.bind(fold.ref, tile if tile.code.is_name else values.name(fold.name, tile))


def _reduced(values: Values, fold: Fold, tiles: Sequence[Tile], over: Sequence[Dim]) -> Tile:
    """Return full tiles reduced over `over`, in the type of the accumulator."""
    dims = list(tiles[0].dims)
    depth = max(tile.depth for tile in tiles)
    codes = [tile.code for tile in tiles]
    logical = fold.op in ("any", "all") and bool(over)
    if logical:
        codes = [compose("{}.to(tl.int32)", codes[0].at(ATOM))]
    fixed = values.layout.blocked.invariant and depends_on_order(fold)
    for dim in sorted(over, key=dims.index, reverse=True):
        if fixed:
            codes = [in_pairs(values.layout, codes[0], dims, dim, product=fold.op == "prod")]
        else:
            codes = _reduce(values, fold, codes, dims.index(dim), depth)
        dims.remove(dim)
    code = compose("{} != 0", codes[0].at(COMPARE + 1), binds=COMPARE) if logical else codes[-1]
    return Tile(code, tuple(dims), depth, tiles[-1].narrow)


def _reduce(values: Values, fold: Fold, codes: Sequence[Code], position: int, depth: int) -> list[Code]:
    if fold.op in ("sum", "any", "all"):
        function = {"sum": "tl.sum", "any": "tl.max", "all": "tl.min"}[fold.op]
        return [compose("{}({}, {})", function, codes[0], position)]
    if len(codes) == 1:
        return [compose("tl.reduce({}, {}, {})", codes[0], position, _COMBINE[fold.op])]
    names = [values.fresh(f"{fold.name}_value", depth), values.fresh(fold.name, depth)]
    values.line("{} = tl.reduce(({}), {}, {})", listed(names), listed(codes), position, _COMBINE[fold.op], depth=depth)
    return [as_code(name) for name in names]


# Operands -------------------------------------------------------------------------------------------------------------


def _operands(values: Values, fold: Fold, over: Sequence[Dim]) -> list[Tile]:
    """Return every operand as a full tile."""
    tiles = [_operand(values, fold, position, over) for position in range(len(fold.args))]
    dims = values.join([*(tile.dims for tile in tiles), over])
    return [values.broadcast(tile, dims) for tile in tiles]


def _operand(values: Values, fold: Fold, position: int, over: Sequence[Dim]) -> Tile:
    """Return an operand in the type of the accumulator, with the identity in lanes past the end of `over`."""
    tile, dtype = values.value(fold.args[position]), fold.args[position].dtype
    if fold.op in ("sum", "prod"):
        tile = values.widened(tile)
    carried = _carrier(fold, position, tile)
    dtype = torch.int32 if tile.narrow else dtype
    tile = replace(tile, code=cast(typed(tile.code, dtype), dtype, carried))
    mask = values.masks(over)
    if mask is None:
        return tile
    if fold.op in ("any", "all"):
        dims = values.join((tile.dims, mask.dims))
        operand, inside = expand(tile.code, tile.dims, dims), expand(mask.code, mask.dims, dims)
        code = compose("{} & {}", operand.at(AND), inside.at(AND + 1), binds=AND)
        if fold.op == "all":
            code = compose("{} | ~{}", operand.at(OR), inside.at(UNARY), binds=OR)
        return Tile(code, dims, max(tile.depth, mask.depth))
    other = Tile(literal(_identity(fold, position, carried), carried))
    return replace(values.select(mask, tile, other), narrow=tile.narrow)


def _carrier(fold: Fold, position: int, tile: Tile) -> torch.dtype:
    """Return the type of a fold's accumulator."""
    dtype = fold.args[position].dtype
    if fold.op in ("any", "all"):
        return torch.bool
    if dtype in HALVES:
        return torch.float32
    return torch.int32 if dtype in _BELOW_32_BITS or tile.narrow else dtype


def _identity(fold: Fold, position: int, carried: torch.dtype) -> bool | int | float:
    if position == 1:  # the index of argmax and argmin: above every valid one, so that a valid one wins a tie
        return torch.iinfo(carried).max
    dtype = fold.args[0].dtype
    return identity(fold.op, carried if dtype is torch.int64 else dtype)  # int64 may be accumulated in fewer bits
