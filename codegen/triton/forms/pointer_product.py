"""Generates contractions whose operands are loaded through pointers.

The default has the largest blocks that still keep the device busy and that the result fills about as well as any, with
as many stages as shared memory holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from typing_extensions import Self

from fusion.codegen.numerics import Numerics
from fusion.codegen.price import additions_of
from fusion.codegen.triton import fixed_order
from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, full_rounds, keeps_busy, power_of_two, programs
from fusion.codegen.triton.forms import efficiency, windows
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.limits import shortest_pipeline, stages_within
from fusion.codegen.triton.products.contract import SHORT_SUM
from fusion.codegen.triton.products.descriptors import tile_loads
from fusion.codegen.triton.rewrites.totals import total_of
from fusion.lowering.indexing import ZERO, FloorDiv
from fusion.lowering.ir.expr import Cast, Expr, Load, free_axes, loads, postorder
from fusion.lowering.ir.kernel import Role, Store, values_of
from fusion.lowering.ir.scalar_ops import HALVES

# (m, n, k) blocks, warps, stages, for operands of 16 bits; k counts bytes / 2, so that it doubles for int8.
_SHAPES = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 64, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (32, 64, 64, 4, 5),
    (16, 64, 128, 4, 5),
)
_SHORT_SHAPES = {128: (64, 64, 32, 4, 3), 256: (128, 64, 32, 4, 3)}
"""Shapes for sums of up to this many terms: several programs share a multiprocessor, and one stores while others load.
(measured: docs/performance.md, `_SHORT_SHAPES`)
"""
_SPLIT_SHAPES = ((128, 64, 64, 4, 3), (64, 64, 64, 4, 3), (32, 64, 64, 4, 3), (16, 64, 64, 4, 3))  # split float32
_EXACT_SHAPES = ((64, 64, 16, 8, 3), (32, 64, 16, 4, 3), (32, 32, 16, 4, 3), (16, 32, 16, 4, 3))  # float32, float64


_CROWDED, _CROWDED_TILES, _ROOMY = 24, 3, 64
"""The cost of an epilogue in additions, or the tiles that it loads, from which on a thread has at most `_ROOMY`
accumulators: with 128 of them it spills.  (measured: docs/performance.md, `_CROWDED`)
"""

_SHORT_COLUMNS = 64
"""Columns of a block of sums that one step of `SHORT_SUM` terms covers."""

_LEAST_STEP = 32
"""The least depth of a step that is taken for its vectors: two instructions of the matrix units.
(measured: docs/performance.md, `_LEAST_STEP`)
"""

_ADDRESS = 8
"""Bytes of an address."""

_COMPUTED_SHAPES, _SHORT_OR_NARROW = ((64, 128, 64, 4, 3), (64, 64, 64, 4, 3)), 512
"""Shapes for computed rows, and the terms of sums, or columns, up to which they are taken: one program computes while
others on its multiprocessor multiply.  (measured: docs/performance.md, `_COMPUTED_SHAPES`)
"""

_FULL = 0.9
"""Blocks filled this much less by the result than others are as fast, if larger: they load operands less often."""

_FULL_OF_COMPUTED = 0.7
"""The same where the rows' operand is computed, which each block of columns repeats.
(measured: docs/performance.md, `_FULL_OF_COMPUTED`)
"""


@dataclass(frozen=True)
class PointerProduct(Form):
    """The plan for contractions with operands loaded through pointers; results are stored once complete."""

    name = "pointer product"

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept any contraction without further folds of its rows or columns, except those with a group per warp."""
        if not task.blocked.contraction or task.blocked.chained:
            return Refused("it is no product, or folds products")
        if any(dim.name == "s" for dim in task.blocked.dims):
            return Refused("warps share the lines of its matrix")
        return cls(task)

    def configs(self) -> tuple[Config, ...]:
        """Return configurations, the default first: the largest blocks that still keep the device busy."""
        blocked, numerics, dots = self.blocked, self.task.numerics, self.blocked.dots
        dtype = dots[0].args[0].dtype
        if not blocked.device.on_matrix_units(dtype):
            return (_fitted(blocked, (16, 16, 16, 4, 1), dtype, numerics),)
        shapes = _with_room(_shapes(blocked, dtype, numerics), _accumulators(blocked))
        shapes = _uncrowded(shapes, blocked)
        shapes = fixed_order.shapes(shapes, blocked) if blocked.invariant else _narrow(shapes, blocked)
        shapes = (*windows.shapes(blocked), *_computed(blocked, dtype), *shapes)
        room = blocked.device.shared_per_program
        fitted = [windows.written_out(blocked, _fitted(blocked, shape, dtype, numerics)) for shape in shapes]
        possible = list(dict.fromkeys(_within_memory(blocked, config, dtype) for config in fitted))
        widest, least = _widest_of_epilogue(blocked), shortest_pipeline(blocked.device)
        possible = [each for each in possible if each.block("m") * each.block("n") * widest <= room] or possible[-1:]
        deep = [config for config in possible if config.num_stages >= least] or possible
        busy = [config for config in deep if keeps_busy(blocked, config)]
        best = max((_filled(blocked, config) for config in busy), default=0.0)
        full = [config for config in busy if _filled(blocked, config) >= _full(blocked) * best]
        default = full[0] if full else max(deep, key=lambda config: programs(blocked, config))
        if (shape := _short(blocked, dtype)) is not None:
            short = _within_memory(blocked, _fitted(blocked, shape, dtype, numerics), dtype)
            default = short if keeps_busy(blocked, short) else default
        return (default, *(config for config in possible if config != default))

    def efficiency(self) -> float:
        """Return a share below the library's: threads compute addresses and masks."""
        config = self.configs()[0]
        occupied = efficiency.occupied(self.blocked, self.task.numerics, config)
        return efficiency.of_product(self.blocked, self.task.numerics, config, occupied)

    @property
    def exposes_epilogue(self) -> bool:
        """Whether the matrix units wait during the epilogue: true of dtypes multiplied at the speed of 16-bit floats.

        So a product with an expensive epilogue is slower than the library's product and a kernel for the rest
        (measured: docs/performance.md, `pointer_product`).
        """
        others = efficiency.other_dtypes(self.blocked.device, self.task.numerics)
        return self.blocked.dots[0].args[0].dtype not in others


def _full(blocked: Blocked) -> float:
    """Return how much less than others the result may fill larger blocks that are taken."""
    return _FULL_OF_COMPUTED if _computes_rows(blocked) else _FULL


def _computes_rows(blocked: Blocked) -> bool:
    """Return whether the rows' operand is computed, or guarded by conditions on its positions, as padded windows are:
    each block of columns repeats that.
    """
    rows = blocked.dots[0].args[0]
    while isinstance(rows, Cast):
        rows = rows.arg
    return not isinstance(rows, Load) or rows.mask is not None


def _computed(blocked: Blocked, dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """Return the shapes for rows that are computed, if these are, and are not needed by many blocks of long sums."""
    if blocked.invariant or dtype not in HALVES or not _computes_rows(blocked):
        return ()
    columns = min(extent(dim.size) for dim in blocked.dims if dim.name == "n")
    least = min(columns, extent(blocked.sides(blocked.dots[0])[2].size))
    return _COMPUTED_SHAPES if least <= _SHORT_OR_NARROW else ()


def _short(blocked: Blocked, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Return the shape for a product of few terms; None if it has more, or computes or gathers its rows."""
    terms = blocked.sides(blocked.dots[0])[2].size
    if windows.are_rows(blocked):
        return None
    if dtype not in HALVES or len(blocked.dots) > 2 or blocked.invariant or _computes_rows(blocked):
        return None
    return next((shape for most, shape in _SHORT_SHAPES.items() if terms.is_Integer and terms <= most), None)


def _filled(blocked: Blocked, config: Config) -> float:
    """Return the share of a block's products that contribute to the result; less for small blocks, which load operands
    more often.
    """
    share = min(1.0, math.sqrt(config.block("m") * config.block("n")) / 128)
    for dim in blocked.dims:
        if dim.name in ("m", "n") and extent(dim.size) > 0:
            share *= full_rounds(extent(dim.size), config.block(dim.name))
    return share


def _shapes(blocked: Blocked, dtype: torch.dtype, numerics: Numerics) -> tuple[tuple[int, ...], ...]:
    if dtype is torch.float32:
        precision = blocked.device.input_precision(numerics.tf32)
        return {"tf32": _SHAPES, "tf32x3": _SPLIT_SHAPES, "ieee": _EXACT_SHAPES}[precision]
    return _EXACT_SHAPES if dtype is torch.float64 else _SHAPES


def _with_room(shapes: Sequence[tuple[int, ...]], count: int) -> Sequence[tuple[int, ...]]:
    """Return the `shapes` in which `count` contractions have no more accumulators per warp than one ever has."""
    if count == 1:
        return shapes
    room = max(m * n // warps for m, n, _, warps, _ in shapes)
    return [shape for shape in shapes if count * shape[0] * shape[1] // shape[3] <= room] or shapes[-1:]


def _uncrowded(shapes: Sequence[tuple[int, ...]], blocked: Blocked) -> Sequence[tuple[int, ...]]:
    """Return the shapes that leave registers to an epilogue of many tiles, or of much arithmetic."""
    stored = [value for stmt in blocked.body if isinstance(stmt, Store) for value in values_of(stmt)]
    tiles = len(set(tile_loads(blocked, stored)))
    if tiles < _CROWDED_TILES and sum(additions_of(node) for node in postorder(*stored)) < _CROWDED:
        return shapes
    lanes = blocked.device.warp
    return [shape for shape in shapes if shape[0] * shape[1] <= _ROOMY * lanes * shape[3]] or shapes


def _narrow(shapes: Sequence[tuple[int, ...]], blocked: Blocked) -> Sequence[tuple[int, ...]]:
    """Return the shapes whose warps are as many as the columns need, which is faster for the windows of an image.

    These are sums of products, with blocks not wider than the result, or have so few terms that the stores of a narrow
    block are sooner done.  (measured: docs/performance.md, `pointer_product`)
    """
    columns = next((power_of_two(extent(dim.size)) for dim in blocked.dims if dim.name == "n"), 0)
    if extent(blocked.sides(blocked.dots[0])[2].size) <= SHORT_SUM:
        columns = min(columns, _SHORT_COLUMNS)
    elif len(blocked.dots) == 1:
        return shapes
    return [shape for shape in shapes if shape[1] <= max(columns, shapes[-1][1])] or shapes


def _fitted(blocked: Blocked, shape: tuple[int, ...], dtype: torch.dtype, numerics: Numerics) -> Config:
    """Return a shape cut to the sizes of the kernel, with WHOLE dimensions held and no block below 16."""
    m, n, k, warps, stages = shape
    least_k = 32 if dtype.itemsize == 1 else 16
    wanted = {"m": m, "n": n, "k": max(least_k, k * 2 // dtype.itemsize if k > 16 else k)}
    blocks: dict[str, int] = {}
    for dim in blocked.dims:
        length = power_of_two(extent(dim.size))
        if dim.name == "s":
            blocks[dim.name] = length
        elif blocked.invariant and dim.name in ("m", "n"):
            blocks[dim.name] = wanted[dim.name]
        elif dim.role is Role.WHOLE:
            blocks[dim.name] = max(least_k if dim.name == "k" else 16, length)
        elif dim.name == "k":
            longest = max(least_k, min(wanted["k"], length))
            blocks[dim.name] = _step(blocked, dim, longest)
            stages *= longest // blocks[dim.name]  # as many bytes in flight
        elif dim.name != "b":
            blocks[dim.name] = max(16, min(wanted.get(dim.name, 64), length))
    if blocks["n"] > n and blocks["m"] * blocks["n"] > 128 * 256:  # a whole row in the epilogue
        blocks["m"] = max(16, 128 * 256 // blocks["n"])
        warps = 8
    return Config(tuple(blocks.items()), num_warps=warps, num_stages=stages, tf32=numerics.tf32)


def _step(blocked: Blocked, k: Dim, wanted: int) -> int:
    """Return the block of a loop in which each row's number of a group is one, rather than one for each element.

    Such as the statistics of a norm whose rows are patches, at (row, k // channels): a step that divides the channels
    loads a vector of them, any other step as many numbers as elements.
    """
    lengths: set[int] = set()
    for load in loads(*(arg for dot in blocked.dots for arg in dot.args)):
        if isinstance(load.index[0], Expr) or k.symbol not in load.index[0].free_symbols:
            continue
        quotients = [atom for atom in load.index[0].atoms(FloorDiv) if atom.args[0] == k.symbol]
        rest = load.index[0].xreplace(dict.fromkeys(quotients, ZERO)).free_symbols
        if k.symbol not in rest and rest:
            lengths.update(int(atom.args[1]) for atom in quotients if atom.args[1].is_Integer)
    masks = (load.mask for dot in blocked.dots for load in loads(*dot.args) if load.mask is not None)
    of_elements = (free_axes(mask).intersection(dim.symbol for dim in blocked.dims) for mask in masks)
    if any(k.symbol in axes and len(axes) > 1 for axes in of_elements):  # padded windows, not joined rows
        return min(wanted, _LEAST_STEP)  # each element has an address and a condition in registers
    step = math.gcd(wanted, *lengths)
    return step if step >= _LEAST_STEP else wanted


def _widest_of_epilogue(blocked: Blocked) -> int:
    """Return the bytes of the widest element of the tiles that the epilogue loads or stores.

    Such a tile goes through shared memory where its layout differs from the accumulator's, or from the next tile's.  So
    do the addresses of a tile whose positions are loaded, too: the layouts of both loads differ.
    """
    widths = [0]
    for stmt in blocked.body:
        if isinstance(stmt, Store):
            for load in tile_loads(blocked, values_of(stmt)):
                positions = [index for index in load.index if isinstance(index, Expr)]
                widths.append(_ADDRESS if any(tile_loads(blocked, positions)) else load.dtype.itemsize)
            widths.append(stmt.value.dtype.itemsize)
    return max(widths)


def _within_memory(blocked: Blocked, config: Config, dtype: torch.dtype) -> Config:
    """Return `config` with as many stages as shared memory holds; several products take shorter steps to have two."""
    left, right = (len({dot.args[side] for dot in blocked.dots}) for side in (0, 1))
    across = (left * config.block("m") + right * config.block("n")) * dtype.itemsize
    stages = min(config.num_stages, stages_within(blocked.device, across * config.block("k")))
    if stages < shortest_pipeline(blocked.device) and len(blocked.dots) > 1 and config.block("k") > 16:
        shorter = {**dict(config.blocks), "k": config.block("k") // 2}
        return _within_memory(blocked, replace(config, blocks=tuple(shorter.items())), dtype)
    return replace(config, num_stages=stages)


def _accumulators(blocked: Blocked) -> int:
    """Return the number of accumulators: products of which only the sum is needed share one."""
    return len({total_of(blocked.body, dot) or dot for dot in blocked.dots})
