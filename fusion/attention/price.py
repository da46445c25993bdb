"""Predicts the time of attention: as a kernel of the library, and as generated kernels.

Either is the arithmetic of its GEMMs at the target's efficiency of that kernel, relative to the library's GEMMs; or the
traffic of its operands, where that takes longer.  Generated kernels skip the tiles that a mask hides by positions.
Where the scores are in memory, as in the calls that PyTorch decomposes, the time consists of GEMMs and of the trips of
the scores through memory.

A single query, as in the generation of text, reads keys and values once for few scores.  On CPUs the library takes many
times as long for keys and values of 16 bits.
"""

from __future__ import annotations

import math

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.attention.call import Call
from fusion.codegen.chained import FORWARD, GENERATED, ChainShape, Loop
from fusion.codegen.target import Capabilities, Target, busy, in_waves
from fusion.codegen.targets import DEFAULTS
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.scalar_ops import ScalarName
from fusion.schedule.chained.candidates import LEAST_SHARE, LEAST_TILE
from fusion.schedule.chained.occupancy import SHORTEST_PART
from fusion.schedule.chained.place_producers import LONGEST_HELD_AXIS
from fusion.schedule.chained.rows import MATRIX_UNIT_ROWS
from fusion.schedule.reductions.skipped_share import SKIPPED_BLOCK, UNKNOWN_SHARE, share_of_blocks

BACKWARD, AGAIN = 5, 7
"""GEMMs of backward in one kernel, and in two kernels, which both compute the scores."""

TILES, TILES_BACKWARD = 4, 7
"""Tensors of scores that one loop does not store, without a mask."""

OPERATIONS: tuple[ScalarName, ...] = ("mul", "mul", "sub", "exp", "truediv")
"""The scalar operations for each score, without a mask."""

FURTHER = 9
"""Additions that backward takes for each score beyond those."""

TRIPS, TRIPS_BACKWARD = 4, 7
"""Trips of scores through memory.  Forward writes them, reads and writes them in one kernel for softmax, and reads them
again.
"""

IN_MEMORY = 2.0
"""Backward with the scores in memory has to be this many times as fast as the library's, which needs no such memory."""

KERNELS = (
    ("_flash_attention_for_cpu", "flash"),
    ("_flash_attention", "flash"),
    ("_efficient_attention", "efficient"),
    ("_cudnn_attention", "cudnn"),
)
"""Part of the name of an operation → the library's kernel."""


def _is_single(call: Call, capabilities: Capabilities) -> bool:
    """Return whether a call has one query for each head, for which the library is known to be slow."""
    return (
        call.rows == 1
        and call.query.dtype.itemsize == 2
        and not call.training
        and not call.options.get("dropout_p")
        and capabilities.rates.steps.attended > 0
    )


def stores_scores(call: Call, target: Target) -> bool:
    """Return whether generated kernels of a single query store its scores: its heads are too wide for one kernel."""
    return _is_single(call, target.capabilities) and max(call.widths) > LONGEST_HELD_AXIS


def refuse_small(call: Call, target: Target) -> None:
    """Refuse a call whose scores are few, unless it is a single query, or of a type, that the library is slow for.

    Raises:
        Unsupported: it is not worth generating kernels.
    """
    faster = target.capabilities.lone_products.get(call.query.dtype.itemsize, 0.0) > 1
    if _is_few(call, target.capabilities) and not faster and not _is_single(call, target.capabilities):
        raise Unsupported("few scores, not worth a loop over tiles")


def _is_few(call: Call, capabilities: Capabilities) -> bool:
    """Return whether the scores are so few that they are stored, between products of their own."""
    return call.scores < LEAST_TILE * capabilities.least_tile


def library_kernel(call: Call, target: Target) -> str:
    """Return the kernel that the library would run: "flash", "efficient", "cudnn", or "math" (decomposed).

    For a device that is not the target's, the library's choice is assumed by dtype and shape.
    """
    if DEFAULTS.get(call.query.device.type) != target.name:
        half = call.query.dtype.itemsize == 2
        plain = half and call.mask is None and call.widths[0] == call.widths[1]
        apart = any(x.shape[-1] != 1 and x.stride(-1) != 1 for x in call.tensors)
        return "math" if call.query.dim() != 4 or apart else "flash" if plain else "efficient"

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **call.options)  # type: ignore[arg-type]  # options of the traced call

    graph = make_fx(whole)(*call.tensors)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return next((kernel for part, kernel in KERNELS if any(part in name for name in names)), "math")


def library_time(call: Call, kernel: str, target: Target) -> float:
    """Return the microseconds of the library's kernel, with backward in training.

    Raises:
        Unsupported: the target has no efficiency for it.
    """
    capabilities, total = target.capabilities, 0.0
    loop: Loop = "masked" if call.mask is not None else "skipping" if call.is_causal else "plain"
    left = _tiles(call) if call.is_causal else 1.0
    for backward in _directions(call):
        if kernel == "math":
            total += _stored_time(call, capabilities, backward)
            continue
        share = target.chained_share(_chain(call, (loop,), left, backward=backward), kernel)
        products = (BACKWARD if backward else FORWARD) * left * _product(call, call.query.dtype, capabilities) / share
        if _is_single(call, capabilities):
            rates = capabilities.rates
            products = max(products, rates.scalar_us(rates.steps.attended * call.scores * sum(call.widths)))
        total += capabilities.rates.launch_us + max(products, _moved(call, capabilities, backward))
    return total


def generated_time(call: Call, kernel: str, target: Target) -> float:
    """Return the microseconds of the kernels that would be generated for a decomposed call.

    The gradient of a mask needs the gradients of all scores, which are stored for it.

    Args:
        kernel: the library's, which may store them, too.

    Raises:
        Unsupported: the target has no efficiency for them, or the scores would be in memory.
    """
    capabilities, left, mask, total = target.capabilities, _expected(call), call.mask, 0.0
    if _is_single(call, capabilities):
        return _single_time(call, capabilities)
    _refuse_stored_scores(call, capabilities)
    masked = mask is not None and mask.loads_each
    skips = call.is_causal or (mask is not None and mask.where is not None)
    loops: tuple[Loop, ...] = ("plain", *(("masked",) if masked else ()), *(("skipping",) if skips else ()))
    form = GENERATED if mask is not None and mask.loads else ""  # other forms compute masks, they do not load them
    product = _product(call, call.query.dtype, capabilities) * left * _padding(call.rows) * _padding(call.columns)
    for backward in _directions(call):
        chained_us, stored_us = _apart(call, capabilities, backward)
        if chained_us >= stored_us or _is_few(call, capabilities) or (backward and call.mask_is_trained):
            total += stored_us if kernel == "math" and call.mask_is_trained else IN_MEMORY * stored_us
            continue
        share = target.chained_share(_chain(call, loops, left, backward=backward), form)
        kernels = _kernels(call, capabilities, backward)
        loops_us = sum(_loop_time(n * product / share, counts, capabilities) for n, counts in kernels)
        launches = len(kernels) + backward  # before the kernels of backward, one computes a number for each row
        total += launches * capabilities.rates.launch_us + max(loops_us, _moved(call, capabilities, backward))
    return total


def _single_time(call: Call, capabilities: Capabilities) -> float:
    """Return the microseconds of a single query: its products with keys, softmax, and its products with values."""
    rates = capabilities.rates
    operations = sum(map(rates.cost_by_name, OPERATIONS)) + 2 * sum(call.widths)
    computed = rates.scalar_us(operations * call.scores)
    return rates.launch_us * (FORWARD + 1) + max(computed, _moved(call, capabilities, False))


def _padding(size: int) -> float:
    """Return how many rows or columns of whole blocks are computed for each of these."""
    return -(-size // SKIPPED_BLOCK) * SKIPPED_BLOCK / size if size > SKIPPED_BLOCK else 1.0


def _loop_time(busy_us: float, counts: tuple[int, int], capabilities: Capabilities) -> float:
    """Return the microseconds of a loop that takes `busy_us` on a busy device, as one loop or in merged parts."""
    share = capabilities.programs_per_multiprocessor
    whole, split = (min(1.0, share * count / capabilities.parallelism) for count in (counts[0], math.prod(counts)))
    return min(busy_us / whole, busy_us / split + capabilities.rates.launch_us)


def _refuse_stored_scores(call: Call, capabilities: Capabilities) -> None:
    """Refuse a call whose decomposition would write its scores to memory, by the rules of `schedule/chained/`."""
    query, key, _ = call.operands
    if max(call.widths) > LONGEST_HELD_AXIS:
        raise Unsupported("heads too wide to be held")
    if LEAST_SHARE * call.scores <= query.numel() + key.numel() and min(call.rows, call.columns) > MATRIX_UNIT_ROWS:
        raise Unsupported("fewer scores than operands, not worth a loop over tiles")
    chained_us, stored_us = _apart(call, capabilities, False)
    if chained_us >= stored_us and not _is_few(call, capabilities):
        raise Unsupported("generated kernels would write the scores to memory")


def _apart(call: Call, capabilities: Capabilities, backward: bool) -> tuple[float, float]:
    """Return the microseconds of the products in loops, and in kernels of their own, as `chained/` compares them."""
    size, slots, rates = call.query.dtype.itemsize, capabilities.parallelism, capabilities.rates
    apart, tiles = (BACKWARD, TILES_BACKWARD) if backward else (FORWARD, TILES)
    operations = sum(map(rates.cost_by_name, OPERATIONS)) + backward * FURTHER
    if call.mask is not None or call.is_causal:
        tiles += 1
        operations += (1 + backward) * (1 if call.mask is None else rates.cost(call.mask.value))
    kernels, product = (
        _kernels(call, capabilities, backward),
        capabilities.product_us(call.scores * sum(call.widths), size),
    )
    share = UNKNOWN_SHARE if call.mask is not None and call.mask.loads_each else _tiles(call)
    held = [1 << (width - 1).bit_length() if capabilities.padded else width for width in call.widths]
    computed = rates.scalar_us(operations * call.scores) / len(kernels)
    operands = sum(x.numel() for x in call.operands) * size
    each = product * sum(held) / sum(call.widths) / capabilities.chained
    loops = 0.0
    for products, (blocks, parts) in kernels:
        whole, split = (busy(min(count, slots), slots) for count in (blocks, blocks * parts))
        merged = rates.price(2 * 4 * parts * blocks * SKIPPED_BLOCK * call.widths[1]).total
        loop = rates.price(operands, products=share * products * each, scalars=share * computed).busy
        loops += rates.launch_us + min(loop / whole, loop / split + merged)
    trips = tiles * call.scores * (size + max(size, 4))  # products in their dtype, maps wider
    maps = rates.price(trips, scalars=rates.scalar_us(operations * call.scores), launches=tiles)
    return loops, apart * product + maps.total


def _directions(call: Call) -> tuple[bool, ...]:
    """Return whether each direction is backward: forward alone, or forward and backward in training."""
    return (False, True) if call.training else (False,)


def _chain(call: Call, loops: tuple[Loop, ...], left: float, *, backward: bool) -> ChainShape:
    return ChainShape(call.query.dtype, max(call.widths), loops, call.columns * left, backward)


def _stored_time(call: Call, capabilities: Capabilities, backward: bool) -> float:
    """Return the microseconds of either direction where the scores are in memory, in float32 or wider."""
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    dtype = call.query.dtype if reduced else torch.promote_types(call.query.dtype, torch.float32)
    products, trips = (BACKWARD - 1, TRIPS_BACKWARD) if backward else (FORWARD, TRIPS)
    moved = capabilities.rates.memory_us(trips * call.scores * dtype.itemsize) + _moved(call, capabilities, backward)
    return (products + 1) * capabilities.rates.launch_us + products * _product(call, dtype, capabilities) + moved


def _product(call: Call, dtype: torch.dtype, capabilities: Capabilities) -> float:
    """Return the microseconds of half of forward's arithmetic, the mean of its two products, by the library."""
    return capabilities.rates.product_us_of(call.scores * sum(call.widths), dtype.itemsize)


def _tiles(call: Call) -> float:
    """Return the share of the tiles of scores that a mask leaves, as far as positions determine it."""
    if call.is_causal:
        rows, columns = (-(-size // SKIPPED_BLOCK) for size in (call.rows, call.columns))
        return sum(min(row + 1, columns) for row in range(rows)) / (rows * columns)
    if call.mask is None:
        return 1.0
    sizes = {axis.symbol: int(axis.size) for axis in call.mask.axes}
    return share_of_blocks(call.mask.where, [call.mask.axes[-1].symbol], sizes)


def _expected(call: Call) -> float:
    """Return the share of the tiles of scores that a mask is expected to leave: of flags in memory not all, while
    numbers may be a bias that hides nothing.
    """
    if call.mask is not None and call.mask.loads_each and call.mask.value.dtype is torch.bool:
        return UNKNOWN_SHARE
    return _tiles(call)


def _moved(call: Call, capabilities: Capabilities, backward: bool) -> float:
    """Return the microseconds of the traffic of the operands and the result; backward has as many gradients."""
    result = call.scores // call.columns * call.widths[1]
    elements = (sum(x.numel() for x in call.operands) + result) * (2 if backward else 1)
    return capabilities.rates.memory_us(elements * call.query.dtype.itemsize)


def _kernels(call: Call, capabilities: Capabilities, backward: bool) -> list[tuple[float, tuple[int, int]]]:
    """Return the kernels with chained products: their products, and the blocks of rows, with parts of their loop.

    In backward, the gradient of the queries has the rows of forward, the gradients of keys and values have its columns
    as rows; or one kernel computes all of a head, more slowly by the share of the device that it leaves idle.
    """
    heads, slots = call.scores // (call.rows * call.columns), capabilities.parallelism
    if backward and capabilities.outer_block:
        used = in_waves(heads, slots)
        if BACKWARD / used < AGAIN / min(1.0, heads * -(-call.columns // SKIPPED_BLOCK) / slots):
            return [(BACKWARD / used, (slots, 1))]
    sizes = [(AGAIN // 2, call.rows, call.columns), (AGAIN - AGAIN // 2, call.columns, call.rows)]
    kernels: list[tuple[float, tuple[int, int]]] = []
    for products, rows, columns in sizes if backward else [(FORWARD, call.rows, call.columns)]:
        blocks = heads * -(-rows // SKIPPED_BLOCK)
        parts = max(1, min(capabilities.parallelism // blocks, columns // SHORTEST_PART))
        kernels.append((products, (blocks, parts)))
    return kernels
