"""Predicts which configuration of a persistent product is the fastest.

Input: contractions to which the form applies; output: configurations, the best first, and the share of the library's
speed that each is predicted to reach.  A block takes the time of its sum, and of `end` more elements of the sum: during
its epilogue the matrix units wait.  The length of the epilogue depends on the operations for each element (`work`) and
on whether tiles are loaded for it.  Two programs on a multiprocessor hide part of it behind each other's products.  The
numbers are the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from fusion.codegen.triton.blocks import Blocked, Config, extent, full_rounds, programs
from fusion.codegen.triton.devices import PersistentShape, speeds
from fusion.codegen.triton.forms.persistent_product.config import PersistentConfig, divided, fitted
from fusion.codegen.triton.products.descriptors import loads_tiles, target_of, tile_loads
from fusion.codegen.triton.products.stacked import stack_of
from fusion.codegen.triton.rewrites.sigmoids import as_sigmoids
from fusion.lowering.ir.expr import Expr, Op, TileRef, postorder
from fusion.lowering.ir.kernel import Store, values_of
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.ir.sizes import with_values

_Shapes: TypeAlias = "dict[PersistentConfig, PersistentShape]"
"""For each configuration of one product, the shape that it has, with its speed."""


def of_config(blocked: Blocked, config: Config) -> float:
    """Return the predicted share of the library's speed for a configuration, on the blocks of this kernel."""
    count = len(blocked.dots)
    shares = _shares([blocked])
    return max(shares[form] * _used([blocked], form) for form in shares if divided(form, count) == config)


def reached(blocked: Blocked) -> float:
    """Return the predicted share of the library's speed for the best configuration, if the last round were full."""
    best = ranked([blocked])[0]
    share, known = _shares([blocked])[best], speeds(blocked.device).persistent
    if _bytes(blocked, best) <= blocked.device.cache:
        return share
    length = extent(blocked.of(blocked.dots[0].over)[0].size)
    return share * min(1.0, known.streamed * (length + known.end) / (length + known.streamed_end))


def _shapes(parts: Sequence[Blocked]) -> _Shapes:
    """Return the configurations of the device that fit its multiprocessors with these products.

    Where two programs of one shape do not fit, one is used.
    """
    shapes: _Shapes = {}
    for shape in speeds(parts[0].device).persistent.shapes:
        for each in dict.fromkeys((shape.each, 1)):
            cut = [fitted(part, divided(_config(shape, each), len(part.dots))) for part in parts]
            if all(cut):
                stages = min(config.num_stages for config in cut if config is not None)
                shapes.setdefault(replace(_config(shape, each), num_stages=stages), shape)
                break
    return shapes


def _config(shape: PersistentShape, each: int) -> PersistentConfig:
    blocks = (("m", shape.m), ("k", shape.k), ("n", shape.n))
    return PersistentConfig(blocks, shape.warps, shape.stages, per_processor=each, parts=shape.parts)


def _bytes(blocked: Blocked, config: Config) -> int:
    """Return the bytes of the largest result, in full blocks; unknown sizes are assumed to be as traced."""
    widths = [stmt.value.dtype.itemsize for stmt in blocked.body if isinstance(stmt, Store)]
    blocks = programs(blocked, config, dict(blocked.kernel.traced))
    return blocks * config.block("m") * config.block("n") * max(widths, default=0)


def ranked(parts: Sequence[Blocked], *, joined: bool = False) -> list[PersistentConfig]:
    """Return configurations for one product, best first."""
    shares = _shares(parts, joined=joined)
    return sorted(shares, key=lambda form: shares[form] * _used(parts, form), reverse=True)


def best(parts: Sequence[Blocked], *, joined: bool = False) -> float:
    """Return the predicted share of the library's speed for the best configuration of products of one launch."""
    shares = _shares(parts, joined=joined)
    return max((shares[form] * _used(parts, form) for form in shares), default=0.0)


def _shares(parts: Sequence[Blocked], *, joined: bool = False) -> dict[PersistentConfig, float]:
    """Return, for each configuration of one product, the share of the library's speed on a busy device."""
    single = all(len(part.dots) == 1 for part in parts)
    one = all(len(part.dots) == 1 or stack_of(part) for part in parts)
    length = min(extent(part.of(part.dots[0].over)[0].size) for part in parts)
    work, loading, more = max(map(work_of, parts)), any(map(loads_tiles, parts)), max(map(further, parts))
    known, shares = speeds(parts[0].device).persistent, {}
    scattered = known.by_threads if any(map(_stores_by_threads, parts)) else 0
    for config, shape in _shapes(parts).items():
        if single or shape.parts == 1:
            end = shape.end + shape.slope * work + (shape.loading if loading else 0) + shape.further * more + scattered
            share = shape.apart if not one else (shape.joined if joined else 0.0) or shape.share
            share *= known.two_stages if config.num_stages == 2 < shape.stages else 1.0
            shares[config] = share * (length + known.library_end) / (length + end)
    return shares


def _used(parts: Sequence[Blocked], form: PersistentConfig) -> float:
    """Return `filled` for the blocks of one configuration."""
    return filled([(part, divided(form, len(part.dots))) for part in parts], form.per_processor)


def filled(divisions: Sequence[tuple[Blocked, Config]], each: int) -> float:
    """Return the share of the device's multiplications that contribute to results.

    The last round of blocks leaves some multiprocessors idle, and blocks reach beyond the last row and column.

    Args:
        divisions: the products of a launch, each with its blocks.
        each: programs per multiprocessor.
    """
    blocks = sum(programs(part, config, dict(part.kernel.traced)) for part, config in divisions)
    count = divisions[0][0].device.multiprocessors
    if blocks < count:  # few rows when traced: calls with more rows take longer, and decide
        blocks = sum(programs(part, config) for part, config in divisions)
    columns = [(_columns(part), config.block("n")) for part, config in divisions]
    inside = sum(count for count, _ in columns) / max(1, sum(-(-count // width) * width for count, width in columns))
    return inside * full_rounds(blocks, count * each)


def _columns(blocked: Blocked) -> int:
    """Return the columns of the results; unknown sizes are assumed to be as traced."""
    (dim,) = (dim for dim in blocked.grid() if dim.name == "n")
    return extent(with_values(dim.size, dict(blocked.kernel.traced)))


def _stores_by_threads(blocked: Blocked) -> bool:
    """Return whether a result of 16 bits does not leave by a descriptor."""
    halves = (stmt for stmt in blocked.body if isinstance(stmt, Store) and stmt.value.dtype in HALVES)
    return any(target_of(blocked, stmt) is None for stmt in halves)


def further(blocked: Blocked) -> float:
    """Return the bits of the results of an element, in 16 bits, beyond the first 16 of each product."""
    stored = sum(stmt.value.dtype.itemsize for stmt in blocked.body if isinstance(stmt, Store))
    return max(0.0, stored / 2 - len(blocked.dots))


def work_of(blocked: Blocked) -> int:
    """Return the operations for each element of the results, in additions, beyond the few that its store hides.

    Operations on loaded tiles count like operations on the sums; operations on a row or column of numbers do not.
    """
    stores = [stmt for stmt in as_sigmoids(blocked.body) if isinstance(stmt, Store)]
    nodes = list(postorder(*(value for stmt in stores for value in values_of(stmt))))
    varying: set[Expr] = set(tile_loads(blocked, nodes))
    known, total = speeds(blocked.device).persistent, 0
    for node in nodes:
        if isinstance(node, TileRef) or any(child in varying for child in node.children()):
            varying.add(node)
            if isinstance(node, Op):
                total += known.cost(node.name)
    return max(0, total - known.free)
