"""Contractions: Σ over k of lhs[m, k] · rhs[k, n] on the matrix units.

What enters is a `dot` fold over block dimensions (b, m, k, n); what leaves are lines.  Operands may be any expression
that spans [m, k] or [k, n]: casts, masks, gathers and pointwise work are computed on the tile between its load and
the `tl.dot`.  Ragged edges are masked in m, n and k.  Sums are kept in float32 (int32 for int8, float64 for float64).
Operand types without a matrix instruction are multiplied and summed.

Programs are numbered so that neighbours share operands in the L2 cache.  Two forms: pointers, one block of the result
per program; and, where `descriptors` finds that every operand allows it, tensor descriptors in persistent programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from codegen.triton.blocks import Blocked, Dim
from codegen.triton.configs import PROGRAMS, Config, extent, power_of_two
from codegen.triton.indices import expand
from codegen.triton.spell import HALF, PRODUCT, TYPES, UNARY, Code, cast, literal, typed
from codegen.triton.values import Tile, Values
from lowering.expr import Cast, Expr, Load
from lowering.kernel import Fold, Role, statements
from lowering.scalar_ops import accumulator

SHARED_MEMORY = {"sm_80": 163_840, "sm_86": 101_376, "sm_89": 101_376, "gfx942": 65_536}
"""Bytes of shared memory that one program may use; newer NVIDIA architectures have `_SHARED_MEMORY_NEW`."""
_SHARED_MEMORY_NEW = 232_448


def shared_memory(arch: str) -> int:
    """Bytes of shared memory that one program may use on `arch`."""
    return SHARED_MEMORY.get(arch, _SHARED_MEMORY_NEW if arch.startswith("sm_") else SHARED_MEMORY["gfx942"])


def operands(fold: Fold) -> tuple[Expr, Expr]:
    """The two factors in the narrowest type that gives the same products.

    Two 16-bit floats that are only widened before they are multiplied are left narrow: their product is exact in
    float32, which is what the matrix units compute.
    """
    lhs, rhs = fold.args
    if isinstance(lhs, Cast) and isinstance(rhs, Cast) and lhs.dtype is torch.float32 is rhs.dtype:
        narrow = lhs.arg.dtype
        if narrow in HALF and rhs.arg.dtype is narrow:
            return lhs.arg, rhs.arg
    return lhs, rhs


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
_EXACT_SHAPES = ((64, 64, 16, 8, 3), (32, 64, 16, 4, 3), (32, 32, 16, 4, 3), (16, 32, 16, 4, 3))  # float32, float64


def candidates(blocked: Blocked, arch: str, *, tf32: bool = False) -> tuple[Config, ...]:
    """Configurations worth timing, the default first: the largest blocks that still keep the device busy."""
    dots = [stmt for stmt in statements(blocked.body) if isinstance(stmt, Fold) and stmt.op == "dot"]
    dtype = operands(dots[0])[0].dtype
    if not on_matrix_units(dtype, arch):
        return (_fitted(blocked, (16, 16, 16, 4, 1), dtype, tf32),)
    exact = dtype is torch.float64 or (dtype is torch.float32 and not tf32)
    shapes = [shape for shape in (_EXACT_SHAPES if exact else _SHAPES) if len(dots) == 1 or shape[1] <= 128]
    room = shared_memory(arch)
    fitted = [_fitted(blocked, shape, dtype, tf32) for shape in shapes]
    possible = list(dict.fromkeys(_shallower(config, dtype, len(dots), room) for config in fitted))
    deep = [config for config in possible if config.num_stages > 1] or possible
    busy = [config for config in deep if programs(blocked, config) * 10 >= PROGRAMS * 7]
    default = busy[0] if busy else max(deep, key=lambda config: programs(blocked, config))
    return (default, *(config for config in possible if config != default))


def programs(blocked: Blocked, config: Config) -> int:
    """How many blocks the result has."""
    count = 1
    for dim in blocked.grid():
        count *= -(-extent(dim.size) // config.block(dim.name))
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
            counts[name] = values.name(f"{name}_blocks", Tile(code, depth=values.depth)).code.text
    if "b" in grid:
        both = " * ".join(counts.values()) or "1"
        values.starts[grid["b"]] = _wide(values, grid["b"], Code(f"{number} // ({both})", PRODUCT))
        number = values.name("block", Tile(Code(f"{number} % ({both})", PRODUCT), depth=values.depth)).code.text
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
    for name, block in blocks.items():
        start = _wide(values, grid[name], Code(block))
        text = Code(f"{start} * {grid[name].constant}", PRODUCT)
        values.starts[grid[name]] = values.name(f"{name}0", Tile(text, depth=values.depth)).code.text


def _wide(values: Values, dim: Dim, code: Code) -> str:
    if dim not in values.layout.wide:
        return code.text
    return f"{code.at(UNARY + 1)}.to(tl.int64)"


# The fold -------------------------------------------------------------------------------------------------------------


def dot_in_loop(values: Values, fold: Fold, over: Sequence[Dim], arch: str) -> Callable[[], None]:
    """Accumulate over the current loop; the function returned makes the result known after it."""
    dims, dtype = _result_dims(values, fold, over), operands(fold)[0].dtype
    sums = accumulator("dot", dtype)
    zeros = Code(f"tl.zeros({values.layout.shape(dims)}, {TYPES[sums]})")
    running = values.name(fold.name, Tile(zeros, dims, values.depth - 1))
    product = _product(values, fold, over, arch, running.code.text)
    values.line(f"{running.code.text} {product}")
    return lambda: _bind(values, fold, running, sums)


def dot_now(values: Values, fold: Fold, over: Sequence[Dim], arch: str) -> None:
    """A contraction over a dimension that is held whole."""
    dims, dtype = _result_dims(values, fold, over), operands(fold)[0].dtype
    text = _product(values, fold, over, arch, "").lstrip("+= ")
    result = values.name(fold.name, Tile(Code(text), dims, values.depth))
    _bind(values, fold, result, accumulator("dot", dtype))


def _result_dims(values: Values, fold: Fold, over: Sequence[Dim]) -> tuple[Dim, ...]:
    first, second = _sides(values, fold, over)
    return tuple(dim for dim in values.join((first, second)) if dim not in over)


def _sides(values: Values, fold: Fold, over: Sequence[Dim]) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The dimensions of the two operands, each in tile order."""
    layout = values.layout
    names = {dim.name: dim for dim in layout.blocked.dims}
    rows = layout.blocked.of(fold.rows) or (names["m"],)
    columns = layout.blocked.of(fold.columns) or (names["n"],)
    return values.join((rows, over)), values.join((over, columns))


def _bind(values: Values, fold: Fold, result: Tile, dtype: torch.dtype) -> None:
    values.bind(fold.ref, replace(result, code=cast(result.code, dtype, fold.dtype)))


def _product(values: Values, fold: Fold, over: Sequence[Dim], arch: str, running: str) -> str:
    """`= tl.dot(lhs, rhs, running, …)`, or `+= ` the sum of products."""
    (left, right), (lhs, rhs) = _sides(values, fold, over), operands(fold)
    a, b = _operand(values, lhs, left, over, "lhs"), _operand(values, rhs, right, over, "rhs")
    sums = accumulator("dot", lhs.dtype)
    if not on_matrix_units(lhs.dtype, arch):
        wants = values.join((left, right))
        first = expand(cast(a.code, lhs.dtype, sums), left, wants)
        second = expand(cast(b.code, rhs.dtype, sums), right, wants)
        return f"+= tl.sum({first.text} * {second.text}, {wants.index(over[0])})"
    inputs = [a.code.text, b.code.text, *([running] if running else [])]
    if lhs.dtype is torch.float32:
        inputs.append(f'input_precision="{"tf32" if values.layout.config.tf32 else "ieee"}"')
    if sums is not torch.float32:
        inputs.append(f"out_dtype={TYPES[sums]}")
    return f"= tl.dot({', '.join(inputs)})"


def _operand(values: Values, expr: Expr, dims: tuple[Dim, ...], over: Sequence[Dim], wish: str) -> Tile:
    """A full tile over `dims`, 0 in lanes past the end of the contracted axis."""
    tile = values.widened(values.value(expr))
    tile = replace(tile, code=typed(tile.code, expr.dtype))
    if not (_zero_past_the_end(expr) and set(over) <= set(tile.dims)):
        mask = values.masks(over)
        if mask is not None:
            tile = values.select(mask, tile, Tile(literal(0, expr.dtype)))
    tile = values.spread(tile, dims)
    return tile if tile.code.text.isidentifier() else values.name(wish, tile)


def _zero_past_the_end(expr: Expr) -> bool:
    """Is this a load, whose masked lanes are 0, perhaps converted?"""
    while isinstance(expr, Cast):
        expr = expr.arg
    return isinstance(expr, Load)
