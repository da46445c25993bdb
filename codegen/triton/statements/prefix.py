"""Emits scans as lines of Triton.

Input: a `Prefix` over tiles; output: lines.  Along a dimension held whole it is one `tl.cumsum` or
`tl.associative_scan`.  In a loop each block is scanned by itself and combined with the result of all blocks before it,
which is the last lane of the previous combination.  Lanes past the end of an axis come last and need no mask.

Extremes keep the later of equals and let NaN win, as eager does.  A log-sum-exp is carried as the largest value so far
and the sum of the exponentials relative to it: one exponential combines two of these, and none can overflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import COMPARE, FOLD_OPERATORS, Code, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import expand
from fusion.codegen.triton.expressions.scalar_code import TYPES, literal, scalar_code, typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.ir.expr import IndexValue, Scalar
from fusion.lowering.ir.kernel import Loop, Prefix, Role, Stmt
from fusion.lowering.ir.scalar_ops import SCAN_OPS, ScanName, identity, keeps_position

_WHOLE: Mapping[ScanName, str] = {"sum": "tl.cumsum", "prod": "tl.cumprod"}
_COMBINE: Mapping[ScanName, str] = {
    "max": "_later_maximum",
    "min": "_later_minimum",
    "argmax": "_later_argmax",
    "argmin": "_later_argmin",
    "logsumexp": "_log_sum",
}


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the numbers that a scan carries: its preferred name, a full tile of it, its dtype, its initial value."""

    wish: str
    tile: Tile
    dtype: torch.dtype
    start: Scalar


def scan_now(values: Values, prefix: Prefix) -> None:
    """Add the lines of a scan, and bind its value in the current scope."""
    if values.find(prefix.ref) is not None:  # scanned together with another one
        return
    along = values.layout.blocked.of((prefix.along,))
    if not along:  # an axis of size 1
        values.bind(prefix.ref, values.value(prefix.args[-1]))
        return
    (dim,) = along
    whole, extremes = _together(values, prefix)
    parts = _scanned(values, whole, _operands(values, whole, dim), dim)
    if dim.role is Role.LOOP:
        parts = _joined(values, whole, parts, dim)
    values.bind(whole.ref, _result(values, whole, parts))
    for extreme in extremes:
        values.bind(extreme.ref, parts[0].tile)


def _together(values: Values, prefix: Prefix) -> tuple[Prefix, list[Prefix]]:
    """Return the scan to emit, and the scans of extremes that it computes along with their positions.

    Each scan is emitted once: emitted again in a loop, it would have state of its own for the next block.
    """
    (body,) = (body for body in _bodies(values.layout.blocked.body) if prefix in body)
    own = [stmt for stmt in body if isinstance(stmt, Prefix)]
    alike = [stmt for stmt in own if stmt.args[0] is prefix.args[0] and stmt.along == prefix.along]
    positions = [stmt for stmt in alike if stmt.op.startswith("arg") and isinstance(stmt.args[1], IndexValue)]
    chosen = prefix
    if not prefix.op.startswith("arg"):
        pending = (stmt for stmt in positions if stmt.op == f"arg{prefix.op}" and values.find(stmt.ref) is None)
        chosen = next(pending, prefix)
    if chosen not in positions:
        return chosen, []
    extremes = [stmt for stmt in alike if f"arg{stmt.op}" == chosen.op and values.find(stmt.ref) is None]
    return chosen, extremes


def _bodies(body: Sequence[Stmt]) -> Iterator[Sequence[Stmt]]:
    """Yield `body` and the bodies of the loops in it."""
    yield body
    for stmt in body:
        if isinstance(stmt, Loop):
            yield from _bodies(stmt.body)


def _operands(values: Values, prefix: Prefix, dim: Dim) -> list[_Part]:
    """Return the operands as full tiles over the same dimensions; a log-sum-exp starts as each value and 1."""
    tiles = [values.value(arg) for arg in prefix.args]
    tiles[0] = values.widened(tiles[0])
    dims = values.join([*(tile.dims for tile in tiles), (dim,)])
    dtypes = [torch.int32 if tile.narrow else arg.dtype for tile, arg in zip(tiles, prefix.args, strict=True)]
    pairs = zip(tiles, dtypes, strict=True)
    tiles = [values.broadcast(replace(tile, code=typed(tile.code, dtype)), dims) for tile, dtype in pairs]
    first = _Part(prefix.name, tiles[0], dtypes[0], identity(prefix.op, dtypes[0]))
    if keeps_position(prefix.op):
        value = replace(first, wish=f"{prefix.name}_value")
        return [value, _Part(prefix.name, tiles[1], dtypes[1], 0)]
    if prefix.op == "logsumexp":
        one = compose("tl.full({}, 1.0, {})", values.layout.shape(dims), TYPES[dtypes[0]])
        largest = replace(first, wish=f"{prefix.name}_largest")
        return [largest, _Part(f"{prefix.name}_total", replace(tiles[0], code=one), dtypes[0], 0.0)]
    return [first]


def _scanned(values: Values, prefix: Prefix, parts: Sequence[_Part], dim: Dim) -> list[_Part]:
    """Return the inclusive scan of the block."""
    depth = max(part.tile.depth for part in parts)
    axis = parts[0].tile.dims.index(dim)
    operands = listed(part.tile.code for part in parts)
    operands = operands if len(parts) == 1 else compose("({})", operands)
    if prefix.op in _WHOLE:
        return _named(values, parts, compose("{}({}, {})", _WHOLE[prefix.op], operands, axis), depth)
    return _named(values, parts, compose("tl.associative_scan({}, {}, {})", operands, axis, _COMBINE[prefix.op]), depth)


def _named(values: Values, parts: Sequence[_Part], code: Code, depth: int) -> list[_Part]:
    """Bind names to the results of the expression `code`, one for each of `parts`, and return the parts with them."""
    names = [values.fresh(part.wish, depth) for part in parts]
    values.line("{} = {}", listed(names), code, depth=depth)
    pairs = zip(parts, names, strict=True)
    return [replace(part, tile=replace(part.tile, code=as_code(name), depth=depth)) for part, name in pairs]


def _result(values: Values, prefix: Prefix, parts: Sequence[_Part]) -> Tile:
    """Return the value of the scan."""
    if prefix.op != "logsumexp":
        return parts[-1].tile
    largest, total = (part.tile for part in parts)
    log = scalar_code("log", [total.code], prefix.dtype, values.fast)
    code = scalar_code("add", [log, largest.code], prefix.dtype, values.fast)
    return values.name(prefix.name, replace(largest, code=code))


# In a loop ------------------------------------------------------------------------------------------------------------


def _joined(values: Values, prefix: Prefix, parts: Sequence[_Part], dim: Dim) -> list[_Part]:
    """Return the block combined with all blocks before it, and keep the result of its last lane for the next one."""
    dims = parts[0].tile.dims
    rest = tuple(other for other in dims if other is not dim)
    states = [_state(values, part, rest) for part in parts]
    before = [expand(state.code, rest, dims) for state in states]
    if sign := SCAN_OPS[prefix.op].sign:
        binds = FOLD_OPERATORS[sign]
        code = listed([before[0].at(binds), parts[0].tile.code.at(binds + 1)], f" {sign} ")
    else:
        operands = (*before, *(part.tile.code for part in parts))
        code = compose("{}({})", _COMBINE[prefix.op], listed(operands))
    joined = _named(values, parts, code, values.depth)
    last = expand(_last_lane(values, dim), (dim,), dims)
    for state, part in zip(states, joined, strict=True):
        zero = Code("-0.0" if part.dtype.is_floating_point else "0")
        chosen = compose("tl.where({}, {}, {})", last, part.tile.code, zero)
        values.line("{} = tl.sum({}, {})", state.code, chosen, dims.index(dim))
    return joined


def _state(values: Values, part: _Part, rest: Sequence[Dim]) -> Tile:
    """Return the result of all blocks so far, which starts as the identity."""
    start = literal(part.start, part.dtype)
    code = compose("tl.full({}, {}, {})", values.layout.shape(rest), start, TYPES[part.dtype])
    return values.accumulator(f"{part.wish}_before", Tile(code, tuple(rest), values.depth - 1, part.tile.narrow))


def _last_lane(values: Values, dim: Dim) -> Code:
    """Return a mask of the last lane of a block, the same for all blocks of a loop."""
    known = values.find(("last", dim))
    if known is None:
        lanes = Tile(compose("tl.arange(0, {0}) == {0} - 1", dim.constant, binds=COMPARE), (dim,), values.depth - 1)
        known = values.bind(("last", dim), values.name(f"{dim.name}_last", lanes))
    return known.code
