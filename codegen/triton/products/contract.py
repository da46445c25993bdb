"""Emits contractions on the matrix units: Σ over k of lhs[m, k] · rhs[k, n].

Input: a `dot` fold over block dimensions (b, m, k, n); output: lines.  Operands may be any expression that spans [m, k]
or [k, n]: casts, masks, gathers and pointwise prologues are computed on the tile between its load and the `tl.dot`.
Ragged edges are masked in m, n and k.  Sums are accumulated in float32 (int32 for int8, float64 for float64).  Operand
types without a matrix instruction are multiplied and summed.

float32 keeps its precision on the matrix units of sm_80 and later: each operand is split into two parts of 19 bits, and
three of their four products are summed (`tf32x3`).  On an H200 that is more exact than multiplying in float32, and
faster.  Sums of up to SHORT_SUM terms are then less exact, and no faster: these are multiplied in float32, except in
chained products, where attention with heads of 16 would take 2.5 times as long.

Where an operand is infinite or NaN its lower part is NaN; Triton drops a correction that is NaN, so the sum equals
eager's.  Only where finite operands overflow (a product or, in 19 bits, an operand beyond 3.4e38) may an infinity
become NaN.

Operands come through pointers, with one block of the result per program, or, where `descriptors` supports every
operand, through tensor descriptors in persistent programs.  `block_order` assigns the block of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions import bit_fields
from fusion.codegen.triton.expressions.code import ATOM, PRODUCT, SUM, Code, compose, listed
from fusion.codegen.triton.expressions.indices import expand, start_symbol
from fusion.codegen.triton.expressions.scalar_code import TYPES, cast, literal, scalar_code, typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.fixed_order import in_pairs
from fusion.codegen.triton.rewrites.totals import Total, total_of
from fusion.codegen.triton.rewrites.vectors import NARROW_ROWS
from fusion.lowering.algebra.hoist import Hoisted, Scale, hoist
from fusion.lowering.indexing import ZERO, substitute_all
from fusion.lowering.ir.expr import Cast, Expr, Load, loads, make_cast, rewrite
from fusion.lowering.ir.kernel import Fold, Stmt, statements, values_of
from fusion.lowering.ir.scalar_ops import accumulator

SHORT_SUM = 16
"""Terms of a sum of float32 up to which splitting gains nothing: the least depth of a block.

(measured: docs/performance.md, `SHORT_SUM`)
"""

# The fold -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DotProduct:
    """The computation of one `dot`.

    Attributes:
        factors: the operands, lhs first, with their dimensions in the order of the product.
        spans: the dimensions of each of them, in that order.
        over: the dimension that is summed over.
        dims: dimensions of the result, in tile order.
        sums: the type of the accumulator.
        matrix: computed by `tl.dot`; otherwise multiplied and summed, in tile order.
        precision: the `input_precision` of `tl.dot` for float32 operands.
    """

    factors: tuple[Code, Code]
    spans: tuple[tuple[Dim, ...], ...]
    over: Dim
    dims: tuple[Dim, ...]
    sums: torch.dtype
    matrix: bool
    precision: str = ""

    def code(self, values: Values, running: Code | None = None) -> Code:
        """Return the product of one pair of blocks, added to `running` if there is one."""
        a, b = self.factors
        if not self.matrix:
            wants = values.join(self.spans)
            first, second = (expand(code, dims, wants) for code, dims in zip(self.factors, self.spans, strict=True))
            terms = compose("{} * {}", first.at(PRODUCT), second.at(PRODUCT), binds=PRODUCT)
            if values.layout.blocked.invariant and self.sums.is_floating_point:
                code = in_pairs(values.layout, terms, wants, self.over)
            else:
                code = compose("tl.sum({}, {})", terms, wants.index(self.over))
            return code if running is None else compose("{} + {}", running, code)
        inputs = [a, b, *([] if running is None else [running])]
        if self.precision:
            inputs.append(Code(f'input_precision="{self.precision}"'))
        if self.sums is not torch.float32:
            inputs.append(compose("out_dtype={}", TYPES[self.sums]))
        return compose("tl.dot({})", listed(inputs))


def product(values: Values, fold: Fold) -> DotProduct:
    """Add the lines that compute the factors, and return the product of the current blocks.

    The result is in tile order: where the rows come after the columns, the operands are exchanged and transposed.
    """
    dtype = fold.args[0].dtype
    rows, columns, over = values.layout.blocked.sides(fold)
    lhs, rhs = fold.args
    dims = values.join(((rows, columns),))
    if dims[0] is columns:
        rows, columns, lhs, rhs = columns, rows, rhs, lhs
    sums = accumulator("dot", dtype) if dtype.is_floating_point or dtype is torch.int8 else fold.dtype
    matrix = values.device.on_matrix_units(dtype) and not is_widened_to_float64(fold, values.layout.blocked.body)
    group_dims = tuple(dim for dim in values.layout.blocked.dims if dim.name == "s")
    left, right, dims = (*group_dims, rows, over), (*group_dims, over, columns), (*group_dims, *dims)
    if not matrix:
        left, right = values.join((left,)), values.join((right,))
    a, b = operand(values, lhs, left, over, "lhs"), operand(values, rhs, right, over, "rhs")
    if not matrix:
        a, b = cast(a, dtype, sums), cast(b, dtype, sums)
    precision = _precision(values) if matrix and dtype is torch.float32 else ""
    return DotProduct((a, b), (left, right), over, dims, sums, matrix, precision)


def is_widened_to_float64(fold: Fold, body: Sequence[Stmt]) -> bool:
    """Return whether a product of float64, in this body, may have operands that are computed from narrower loads.

    Triton lays an operand out for the narrowest value that is loaded for it, and has no layout of float64 for values of
    less than 32 bits: with Triton 3.6 and 3.7 such a `tl.dot` does not compile.
    """
    if fold.args[0].dtype is not torch.float64:
        return False
    return any(load.dtype.itemsize < 4 for stmt in statements(body) for load in loads(*values_of(stmt)))


def _precision(values: Values) -> str:
    """Return the precision of float32: not split in kernels of short sums only, none of them in a chained product."""
    blocked = values.layout.blocked
    precision = values.device.input_precision(values.layout.config.tf32)
    sizes = [blocked.sides(dot)[2].size for dot in blocked.dots]
    short = not blocked.chained and all(size.is_Integer and size <= SHORT_SUM for size in sizes)
    return "ieee" if precision == "tf32x3" and short else precision


def dot_in_loop(values: Values, fold: Fold) -> Callable[[], None]:
    """Accumulate in the current loop; return a function that binds the result after it.

    Products of which only the sum is needed share one accumulator; if they are scaled, the last one scales their sum.
    """
    hoisted = _hoisted(values, fold)
    if any(dim.name == "s" for dim in values.layout.blocked.dims):
        _prefetch_scales(values, hoisted.scales, values.layout.blocked.sides(fold)[2])
    bit_fields.convert(values, hoisted.operands)
    dot = product(values, replace(fold, args=hoisted.operands))
    total = total_of(values.layout.blocked.body, fold)
    if total is None or not dot.matrix or dot.sums is not fold.dtype or not _scaled_alike(values, total):
        total = Total(fold.ref, (fold,))
    running = values.accumulator(total.folds[0].name, zeros(values, dot, values.depth - 1))
    name, place = running.code, total.folds.index(fold)
    if hoisted.scales:
        before = values.find(("product", total.folds[place - 1])) if place > 0 else None
        code = dot.code(values, None if before is None else before.code)
        if fold is total.folds[-1]:
            values.line("{} += {}", name, _scaled(values, dot, code, hoisted.scales))
        else:
            values.bind(("product", fold), values.name("product", Tile(code, dot.dims, values.depth)))
    elif dot.matrix:
        values.line("{} = {}", name, dot.code(values, name))
    else:
        values.line("{} += {}", name, dot.code(values))
    return lambda: bind(values, total.value, fold.dtype, dot, running) if fold is total.folds[-1] else None


def _prefetch_scales(values: Values, scales: Sequence[Scale], over: Dim) -> None:
    """Load the scales of the next step before this one is multiplied, since no other load takes as long to arrive."""
    layout, depth = values.layout, values.depth
    for load in loads(*(factor for _, factor in scales)):
        index = load.index[0]
        if isinstance(index, Expr) or over not in layout.within(index) or values.find(load) is not None:
            continue
        if over.symbol in layout.by_block(index).free_symbols or load.mask is not None:
            continue
        first = replace(load, index=(index.xreplace({over.symbol: ZERO}),))
        first_scale = replace(values.load_at(first, over, Code("0")), depth=depth - 1)
        ahead = values.name(f"{load.buffer}_next", first_scale).code
        values.bind(load, values.name(load.buffer, replace(first_scale, code=ahead, depth=depth)))
        last = values.index_tile(over.size - layout.config.block(over.name)).code
        step = Tile(compose("tl.minimum({} + {}, {})", values.starts[over], over.constant, last), (), depth)
        start = values.name(f"{over.name}_next", step).code
        values.line("{} = {}", ahead, values.load_at(load, over, start).code)


def _scaled_alike(values: Values, total: Total) -> bool:
    """Return whether the same factors scale all products."""
    return len({_hoisted(values, fold).scales for fold in total.folds}) == 1


def _hoisted(values: Values, fold: Fold) -> Hoisted:
    """Return the operands of a narrow product without factors that are constant in a block of the summed axis, and
    these.

    Such a factor is the scale of a group of weights: a block of the result has fewer elements to scale than one of the
    operand.
    """
    layout = values.layout
    rows, columns, over = layout.blocked.sides(fold)
    narrow = min(layout.config.block(dim.name) for dim in (rows, columns)) <= NARROW_ROWS

    def at_start(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or isinstance(node.index[0], Expr):
            return None
        return replace(node, index=(layout.by_block(node.index[0]),))

    at_block_start = tuple(rewrite(fold.args, at_start))
    if not narrow or layout.blocked.chained or at_block_start == fold.args or fold.dtype is not torch.float32:
        return Hoisted(fold.args)
    without_factors, sizes = hoist(at_block_start, (over.symbol,)), layout.blocked.sizes()
    index = {start_symbol(over): over.symbol}
    operands = substitute_all(without_factors.operands, index, sizes)
    factors = substitute_all([factor for _, factor in without_factors.scales], index, sizes)
    return Hoisted(tuple(operands), tuple(zip((name for name, _ in without_factors.scales), factors, strict=True)))


def _scaled(values: Values, dot: DotProduct, code: Code, scales: Sequence[Scale]) -> Code:
    """Return the product of one pair of blocks, `code`, times its scales."""
    code = replace(code, binds=ATOM if dot.matrix else SUM)
    for name, factor in scales:
        tile = values.value(make_cast(factor, dot.sums))
        code = scalar_code(name, [code, expand(tile.code, tile.dims, dot.dims)], dot.sums)
    return code


def dot_now(values: Values, fold: Fold) -> None:
    """Add the lines of a contraction over a dimension held whole, or over the current block alone."""
    dot = product(values, fold)
    result = values.name(fold.name, Tile(dot.code(values), dot.dims, values.depth))
    bind(values, fold.ref, fold.dtype, dot, result)


def zeros(values: Values, dot: DotProduct, depth: int) -> Tile:
    """Return the initial value of the accumulator."""
    return Tile(compose("tl.zeros({}, {})", values.layout.shape(dot.dims), TYPES[dot.sums]), dot.dims, depth)


def bind(values: Values, value: Expr, dtype: torch.dtype, dot: DotProduct, result: Tile) -> None:
    """Define `value`, of this type, as `result`, within its scope."""
    values.bind(value, replace(result, code=cast(result.code, dot.sums, dtype)))


def operand(values: Values, expr: Expr, dims: tuple[Dim, ...], over: Dim, wish: str) -> Code:
    """Return a full tile with `dims` in this order, 0 in lanes past the end of the contracted axis."""
    tile = values.widened(values.value(expr))
    tile = replace(tile, code=typed(tile.code, expr.dtype))
    assert set(tile.dims) <= set(dims), "an operand of a contraction is a matrix"
    if not (_zero_past_the_end(expr) and over in tile.dims):
        mask = values.masks((over,))
        if mask is not None:
            tile = values.select(mask, tile, Tile(literal(0, expr.dtype)))
    order = values.join((dims,))
    tile = values.broadcast(tile, order)
    code = tile.code
    if order != dims:
        code = compose("{}.T", code.at(ATOM)) if len(dims) == 2 else compose("tl.permute({}, 0, 2, 1)", code)
    return code if code.is_name else values.name(wish, replace(tile, code=code)).code


def _zero_past_the_end(expr: Expr) -> bool:
    """Return whether a value is a load, perhaps converted, whose masked lanes are 0."""
    while isinstance(expr, Cast):
        expr = expr.arg
    return isinstance(expr, Load)
