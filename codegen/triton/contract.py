"""Contractions: Σ over k of lhs[m, k] · rhs[k, n] on the matrix units.

What enters is a `dot` fold over block dimensions (b, m, k, n); what leaves are lines.  Operands may be any expression
that spans [m, k] or [k, n]: casts, masks, gathers and pointwise work are computed on the tile between its load and
the `tl.dot`.  Ragged edges are masked in m, n and k.  Sums are kept in float32 (int32 for int8, float64 for float64).
Operand types without a matrix instruction are multiplied and summed.

float32 keeps its precision on the matrix units of sm_80 and later: each operand is split into two parts of 19 bits, and
three of their four products are summed (`tf32x3`).  On an H200 that is more exact than multiplying in float32, and
faster.  Where an operand is infinite or NaN its lower part is NaN; Triton drops a correction that is NaN, so the sum is
what eager gives.  Only where finite operands overflow (a product or, in 19 bits, an operand beyond 3.4e38) may an
infinity come out as NaN.

Programs are numbered so that neighbours share operands in the L2 cache.  Two forms: pointers, one block of the result
per program; and, where `descriptors` finds that every operand allows it, tensor descriptors in persistent programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import sympy
import torch

from codegen.triton.blocks import Blocked, Dim
from codegen.triton.configs import PROGRAMS, Config, extent, power_of_two
from codegen.triton.indices import expand, start_symbol
from codegen.triton.scopes import Tile
from codegen.triton.skips import longer_for_later_rows
from codegen.triton.spell import ATOM, PRODUCT, SUM, TYPES, Code, cast, literal, spell, typed
from codegen.triton.values import Values
from codegen.triton.vectors import NARROW
from lowering.errors import Unsupported
from lowering.expr import Cast, Expr, Load, make_cast, rewrite
from lowering.hoist import Hoisted, hoist
from lowering.indexing import substitute_all
from lowering.kernel import Fold, Role
from lowering.scalar_ops import accumulator
from lowering.sizes import with_values

SHARED_MEMORY = {"sm_80": 163_840, "sm_86": 101_376, "sm_89": 101_376, "gfx942": 65_536}
"""Bytes of shared memory that one program may use; newer NVIDIA architectures have `_SHARED_MEMORY_NEW`."""
_SHARED_MEMORY_NEW = 232_448


def shared_memory(arch: str) -> int:
    """Bytes of shared memory that one program may use on `arch`."""
    return SHARED_MEMORY.get(arch, _SHARED_MEMORY_NEW if arch.startswith("sm_") else SHARED_MEMORY["gfx942"])


def on_matrix_units(dtype: torch.dtype, arch: str) -> bool:
    """Has `tl.dot` an instruction for operands of `dtype`?"""
    if dtype is torch.float64:
        return arch.startswith("sm_")
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8)


# Configurations -------------------------------------------------------------------------------------------------------

# (m, n, k) blocks, warps, stages, for operands of 16 bits; k counts bytes / 2, so that it doubles for int8.
_SHAPES = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 64, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (32, 64, 64, 4, 5),
    (16, 64, 128, 4, 5),
)
_SPLIT_SHAPES = ((128, 64, 64, 4, 3), (64, 64, 64, 4, 3), (32, 64, 64, 4, 3), (16, 64, 64, 4, 3))  # split float32
_EXACT_SHAPES = ((64, 64, 16, 8, 3), (32, 64, 16, 4, 3), (32, 32, 16, 4, 3), (16, 32, 16, 4, 3))  # float32, float64


def candidates(blocked: Blocked, arch: str, *, tf32: bool = False) -> tuple[Config, ...]:
    """Configurations worth timing, the default first: the largest blocks that still keep the device busy."""
    dots = blocked.dots
    dtype = dots[0].args[0].dtype
    if not on_matrix_units(dtype, arch):
        return (_fitted(blocked, (16, 16, 16, 4, 1), dtype, tf32),)
    shapes = _with_room(_shapes(dtype, arch, tf32), len(dots))
    room = shared_memory(arch)
    fitted = [_fitted(blocked, shape, dtype, tf32) for shape in shapes]
    possible = list(dict.fromkeys(_shallower(config, dtype, len(dots), room) for config in fitted))
    deep = [config for config in possible if config.num_stages > 1] or possible
    busy = [config for config in deep if programs(blocked, config) * 10 >= PROGRAMS * 7]
    default = busy[0] if busy else max(deep, key=lambda config: programs(blocked, config))
    return (default, *(config for config in possible if config != default))


def _shapes(dtype: torch.dtype, arch: str, tf32: bool) -> tuple[tuple[int, ...], ...]:
    if dtype is torch.float32:
        return {"tf32": _SHAPES, "tf32x3": _SPLIT_SHAPES, "ieee": _EXACT_SHAPES}[input_precision(arch, tf32)]
    return _EXACT_SHAPES if dtype is torch.float64 else _SHAPES


def _with_room(shapes: Sequence[tuple[int, ...]], count: int) -> Sequence[tuple[int, ...]]:
    """Those of `shapes` in which `count` contractions have no more sums per warp than one of them has in any."""
    if count == 1:
        return shapes
    room = max(m * n // warps for m, n, _, warps, _ in shapes)
    return [shape for shape in shapes if count * shape[0] * shape[1] // shape[3] <= room] or shapes[-1:]


def input_precision(arch: str, tf32: bool) -> str:
    """How `tl.dot` takes float32 operands: rounded if that is allowed, else split in two, else one by one.

    >>> input_precision("sm_90", False), input_precision("sm_75", False), input_precision("gfx942", False)
    ('tf32x3', 'ieee', 'ieee')
    """
    if tf32:
        return "tf32"
    return "tf32x3" if arch.startswith("sm_") and int(arch[3:].rstrip("a")) >= 80 else "ieee"


def full_rounds(blocks: int, slots: int) -> float:
    """The share of the device that so many blocks keep busy, of which so many run at once.

    >>> full_rounds(264, 132), full_rounds(198, 132)
    (1.0, 0.75)
    """
    return blocks / (slots * -(-blocks // slots)) if blocks else 1.0


def programs(blocked: Blocked, config: Config, known: Mapping[sympy.Symbol, int] = MappingProxyType({})) -> int:
    """How many blocks the result has, with symbolic sizes that are not `known` taken to be large."""
    count = 1
    for dim in blocked.grid():
        count *= -(-extent(with_values(dim.size, known)) // config.block(dim.name))
    return count


def _fitted(blocked: Blocked, shape: tuple[int, ...], dtype: torch.dtype, tf32: bool) -> Config:
    """A shape cut down to the sizes of the kernel, whole dimensions held whole, and no block below 16."""
    m, n, k, warps, stages = shape
    least_k = 32 if dtype.itemsize == 1 else 16
    wanted = {"m": m, "n": n, "k": max(least_k, k * 2 // dtype.itemsize if k > 16 else k)}
    blocks: dict[str, int] = {}
    for dim in blocked.dims:
        length = power_of_two(extent(dim.size))
        if dim.role is Role.WHOLE:
            blocks[dim.name] = max(least_k if dim.name == "k" else 16, length)
        elif dim.name != "b":
            blocks[dim.name] = max(least_k if dim.name == "k" else 16, min(wanted.get(dim.name, 64), length))
    if blocks["n"] > n and blocks["m"] * blocks["n"] > 128 * 256:  # a whole row in the epilogue
        blocks["m"] = max(16, 128 * 256 // blocks["n"])
        warps = 8
    return Config(tuple(blocks.items()), num_warps=warps, num_stages=stages, tf32=tf32)


def _shallower(config: Config, dtype: torch.dtype, dots: int, room: int) -> Config:
    """`config` with as many stages as shared memory holds."""
    per_stage = (config.block("m") + dots * config.block("n")) * config.block("k") * dtype.itemsize
    return replace(config, num_stages=max(1, min(config.num_stages, room // max(1, per_stage))))


# Which block a program computes ---------------------------------------------------------------------------------------


def place(values: Values, number: str) -> None:
    """Add the lines that find the block of program `number`, and set the starts of the GRID dimensions."""
    layout = values.layout
    grid = {dim.name: dim for dim in layout.blocked.grid()}
    counts = {}
    for name in ("m", "n"):
        if name in grid:
            size = values.index_tile(grid[name].size).code.text
            code = Code(f"tl.cdiv({size}, {grid[name].constant})")
            code = as_int32(code, known=grid[name].size.is_Integer or not layout.config.persistent)
            counts[name] = values.name(f"{name}_blocks", Tile(code, depth=values.depth)).code.text
    if "b" in grid and len(counts) == 1 and layout.config.group > 1 and layout.blocked.chained:
        number = _in_turn(values, grid["b"], next(iter(counts.values())), number)
    elif "b" in grid:
        both = Code(" * ".join(counts.values()) or "1", PRODUCT if len(counts) == 2 else ATOM).at(ATOM)
        _start_batch(values, grid["b"], Code(f"{number} // {both}", PRODUCT))
        number = values.name("block", Tile(Code(f"{number} % {both}", PRODUCT), depth=values.depth)).code.text
    if len(counts) == 2:
        m, n = counts["m"], counts["n"]
        values.line("# Down a few blocks of rows before the next block of columns: these share operands in the cache.")
        m_block, n_block = (values.fresh(f"{name}_block", values.depth) for name in ("m", "n"))
        values.line(
            f"{m_block}, {n_block} = tl.swizzle2d({number} // {n}, {number} % {n}, {m}, {n}, {layout.config.group})"
        )
        blocks = {"m": m_block, "n": n_block}
    else:
        blocks = dict.fromkeys(counts, number)
    if set(blocks) == {"m"} and longer_for_later_rows(layout.blocked):
        values.line("# The blocks of rows that take longest come first.")
        block = f"{counts['m']} - 1 - {Code(number, PRODUCT).at(PRODUCT)}"
        blocks = {"m": values.name("m_block", Tile(Code(block), depth=values.depth)).code.text}
    for name, block in blocks.items():
        text = Code(f"{block} * {grid[name].constant}", PRODUCT)
        values.starts[grid[name]] = values.name(f"{name}0", Tile(text, depth=values.depth)).code.text


def as_int32(count: Code, *, known: bool) -> Code:
    """A count of blocks, which an int32 holds where a descriptor has counted the rows; one of known sizes is one."""
    return count if known else Code(f"tl.cast({count.text}, tl.int32)")


def _in_turn(values: Values, batch: Dim, blocks: str, number: str) -> str:
    """Add the lines by which a few points of `batch` take their blocks in turn; returns the block."""
    group = values.layout.config.group
    values.line("# The first blocks of all that fit the cache together, then their second blocks, and so on.")
    size = values.index_tile(batch.size).code
    if extent(batch.size) <= group:
        _start_batch(values, batch, Code(f"{number} % {size.at(ATOM)}", PRODUCT))
        return values.name("block", Tile(Code(f"{number} // {size.at(ATOM)}", PRODUCT), depth=values.depth)).code.text
    point, block = (values.fresh(name, values.depth) for name in ("batch", "block"))
    where = f"{number} // {blocks}, {number} % {blocks}"
    values.line(f"{point}, {block} = tl.swizzle2d({where}, {size.text}, {blocks}, {group})")
    _start_batch(values, batch, Code(point))
    return block


def _start_batch(values: Values, batch: Dim, point: Code) -> None:
    wide = batch in values.layout.wide
    values.starts[batch] = f"{point.at(ATOM)}.to(tl.int64)" if wide else point.text


# The fold -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Product:
    """How one `dot` is computed.

    Attributes:
        factors: the operands as text, lhs first, in the order in which the product needs their dimensions.
        spans: the dimensions of each of them, in that order.
        over: the dimension that is summed over.
        dims: dimensions of the result, in tile order.
        sums: the type that sums are kept in.
        matrix: computed by `tl.dot`; otherwise multiplied and summed, in tile order.
        precision: how `tl.dot` takes float32 operands.
    """

    factors: tuple[Code, Code]
    spans: tuple[tuple[Dim, ...], ...]
    over: Dim
    dims: tuple[Dim, ...]
    sums: torch.dtype
    matrix: bool
    precision: str = ""

    def text(self, values: Values, running: str | None = None) -> str:
        """The product of one pair of blocks; with `running`, that plus this product."""
        a, b = self.factors
        if not self.matrix:
            wants = values.join(self.spans)
            first, second = (expand(code, dims, wants) for code, dims in zip(self.factors, self.spans, strict=True))
            text = f"tl.sum({first.text} * {second.text}, {wants.index(self.over)})"
            return text if running is None else f"{running} + {text}"
        inputs = [a.text, b.text, *([] if running is None else [running])]
        if self.precision:
            inputs.append(f'input_precision="{self.precision}"')
        if self.sums is not torch.float32:
            inputs.append(f"out_dtype={TYPES[self.sums]}")
        return f"tl.dot({', '.join(inputs)})"


def product(values: Values, fold: Fold, arch: str) -> Product:
    """The product of the current blocks, after adding the lines that compute its factors.

    The result comes in tile order: where the rows come after the columns, the operands change places, transposed.
    """
    dtype = fold.args[0].dtype
    rows, columns, over = values.layout.blocked.sides(fold)
    lhs, rhs = fold.args
    dims = values.join(((rows, columns),))
    if dims[0] is columns:
        rows, columns, lhs, rhs = columns, rows, rhs, lhs
    sums = accumulator("dot", dtype) if dtype.is_floating_point or dtype is torch.int8 else fold.dtype
    matrix = on_matrix_units(dtype, arch)
    left: tuple[Dim, ...] = (rows, over)
    right: tuple[Dim, ...] = (over, columns)
    if not matrix:
        left, right = values.join((left,)), values.join((right,))
    a, b = operand(values, lhs, left, over, "lhs"), operand(values, rhs, right, over, "rhs")
    if not matrix:
        a, b = cast(a, dtype, sums), cast(b, dtype, sums)
    precision = input_precision(arch, values.layout.config.tf32) if matrix and dtype is torch.float32 else ""
    return Product((a, b), (left, right), over, dims, sums, matrix, precision)


def dot_in_loop(values: Values, fold: Fold, arch: str) -> Callable[[], None]:
    """Accumulate over the current loop; the function returned makes the result known after it."""
    hoisted = _hoisted(values, fold)
    found = product(values, replace(fold, args=hoisted.operands), arch)
    running = values.accumulator(fold.name, zeros(values, found, values.depth - 1))
    name = running.code.text
    if hoisted.scales:
        values.line(f"{name} += {_scaled(values, found, hoisted.scales)}")
    elif found.matrix:
        values.line(f"{name} = {found.text(values, name)}")
    else:
        values.line(f"{name} += {found.text(values)}")
    return lambda: bind(values, fold, found, running)


def _hoisted(values: Values, fold: Fold) -> Hoisted:
    """The operands of a narrow product without factors that are the same for a whole block of what is summed over.

    Such is the scale of a group of weights: a block of the result has less elements to scale than one of the operand.
    """
    layout = values.layout
    rows, columns, over = layout.blocked.sides(fold)
    narrow = min(layout.config.block(dim.name) for dim in (rows, columns)) <= NARROW

    def at_start(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or isinstance(node.index[0], Expr):
            return None
        return replace(node, index=(layout.by_block(node.index[0]),))

    given = tuple(rewrite(fold.args, at_start))
    if not narrow or layout.blocked.chained or given == fold.args or fold.dtype is not torch.float32:
        return Hoisted(fold.args)
    found, sizes = hoist(given, (over.symbol,)), layout.blocked.sizes()
    walked = {start_symbol(over): over.symbol}
    operands = substitute_all(found.operands, walked, sizes)
    factors = substitute_all([factor for _, factor in found.scales], walked, sizes)
    return Hoisted(tuple(operands), tuple(zip((name for name, _ in found.scales), factors, strict=True)))


def _scaled(values: Values, found: Product, scales: Sequence[tuple[str, Expr]]) -> str:
    """The product of one pair of blocks times what it is scaled by."""
    code = Code(found.text(values), ATOM if found.matrix else SUM)
    for name, factor in scales:
        tile = values.value(make_cast(factor, found.sums))
        code = spell(name, [code, expand(tile.code, tile.dims, found.dims)], found.sums)
    return code.text


def dot_now(values: Values, fold: Fold, arch: str) -> None:
    """A contraction over a dimension that is held whole, or of the current block alone."""
    found = product(values, fold, arch)
    bind(values, fold, found, values.name(fold.name, Tile(Code(found.text(values)), found.dims, values.depth)))


def zeros(values: Values, found: Product, depth: int) -> Tile:
    """What nothing has been added to yet."""
    return Tile(Code(f"tl.zeros({values.layout.shape(found.dims)}, {TYPES[found.sums]})"), found.dims, depth)


def bind(values: Values, fold: Fold, found: Product, result: Tile) -> None:
    """From here on, within the scope of `result`, it is the value of the fold."""
    values.bind(fold.ref, replace(result, code=cast(result.code, found.sums, fold.dtype)))


def operand(values: Values, expr: Expr, dims: tuple[Dim, ...], over: Dim, wish: str) -> Code:
    """A full tile with `dims` in this order, 0 in lanes past the end of the contracted axis."""
    tile = values.widened(values.value(expr))
    tile = replace(tile, code=typed(tile.code, expr.dtype))
    if not set(tile.dims) <= set(dims):
        raise Unsupported(f"{values.layout.blocked.kernel.name}: an operand of a contraction is more than a matrix")
    if not (_zero_past_the_end(expr) and over in tile.dims):
        mask = values.masks((over,))
        if mask is not None:
            tile = values.select(mask, tile, Tile(literal(0, expr.dtype)))
    order = values.join((dims,))
    tile = values.spread(tile, order)
    code = tile.code if order == dims else Code(f"{tile.code.at(ATOM)}.T")
    return code if code.text.isidentifier() else values.name(wish, replace(tile, code=code)).code


def _zero_past_the_end(expr: Expr) -> bool:
    """Is this a load, whose masked lanes are 0, perhaps converted?"""
    while isinstance(expr, Cast):
        expr = expr.arg
    return isinstance(expr, Load)
