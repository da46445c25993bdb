"""Rows: configurations of kernels without contraction, pointwise ones and those that fold or scan their rows.

What enters is a kernel over block dimensions; what leaves is one `Config`, picked from sizes alone so that the same
kernel always gets the same one, and `candidates` to time where that is wanted.  The numbers come from measurements on
an H200: enough 16-byte accesses in flight per thread for pointwise kernels, one warp per row for short rows, a few
dozen elements per thread for long ones.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, power_of_two, row_block
from fusion.codegen.triton.blocks.dims import WORD
from fusion.lowering.expr import Load, postorder
from fusion.lowering.kernel import Fold, Loop, Param, Prefix, Role, Store, statements, values_of
from fusion.lowering.scalar_ops import HALVES


def configure(blocked: Blocked) -> Config:
    """The default configuration of a kernel without contraction."""
    reduced = [dim for dim in blocked.dims if dim.role is not Role.GRID]
    grid = {dim.name: dim for dim in blocked.grid()}
    if not reduced:
        if "y" in grid:
            return _tile(blocked, grid["y"], grid["x"])
        return _by_rows(blocked, grid["b"], grid["x"]) if "b" in grid else _pointwise(blocked, grid.get("x"))
    if len(reduced) > 1:
        return _several(reduced)
    if blocked.dims[-1] is not reduced[0]:
        return _columns(blocked, reduced[0], grid["x"], extent(grid["b"].size) if "b" in grid else 1)
    return _rows(blocked, reduced[0], grid.get("x"))


def candidates(blocked: Blocked) -> tuple[Config, ...]:
    """Configurations worth timing, the default first: other numbers of warps, and blocks half and twice as large."""
    default = configure(blocked)
    found = [default]
    for warps in (default.num_warps // 2, default.num_warps * 2):
        if 1 <= warps <= 32:
            found.append(replace(default, num_warps=warps))
    for dim in blocked.dims:
        if blocked.single(dim):
            continue
        for size in (default.block(dim.name) // 2, default.block(dim.name) * 2):
            if dim.role is not Role.WHOLE and 1 <= size <= min(16384, power_of_two(extent(dim.size))):
                blocks = {**dict(default.blocks), dim.name: size}
                found.append(replace(default, blocks=tuple(blocks.items())))
    return tuple(found)


# Pointwise ------------------------------------------------------------------------------------------------------------


def _itemsize(blocked: Blocked, *, least: bool = False) -> int:
    """Bytes of the largest (or smallest) elements among the tensors that most of the traffic consists of."""
    return (min if least else max)((param.dtype.itemsize for param in _streams(blocked)), default=4)


def _streams(blocked: Blocked) -> list[Param]:
    """The tensors that most of the traffic consists of."""

    def weight(param: Param) -> int:
        return extent(param.extent) * param.dtype.itemsize

    params = blocked.kernel.params
    heaviest = max((weight(param) for param in params), default=0)
    return [param for param in params if weight(param) * 4 >= heaviest]


def _warps(elements: int, per_thread: int) -> int:
    """Warps so that each thread has about `per_thread` of `elements`."""
    return min(32, max(1, power_of_two(elements // (32 * per_thread))))


def _pointwise(blocked: Blocked, x: Dim | None) -> Config:
    """Each thread moves two 16-byte words of every tensor (one, of many tensors), and every processor has work."""
    if x is None:
        return Config((), num_warps=1)
    block, warps = _line(blocked, extent(x.size), max(len(blocked.kernel.params), _points_read(blocked)))
    return Config((("x", block),), num_warps=warps)


def _points_read(blocked: Blocked) -> int:
    """At how many points the tensor is read that is read at most: those of a window are all held at once."""
    roots = [value for stmt in statements(blocked.body) for value in values_of(stmt)]
    read = Counter(part.buffer for part in postorder(*roots) if isinstance(part, Load))
    return max(read.values(), default=0)


def _by_rows(blocked: Blocked, b: Dim, x: Dim) -> Config:
    """As many elements as of a line: of one row, or of a few short ones."""
    rows, columns = extent(b.size), extent(x.size)
    block, warps = _line(blocked, rows * columns, len(_streams(blocked)))
    held = row_block(x.size, block)
    return Config((("b", min(block // held, power_of_two(rows))), ("x", held)), num_warps=warps)


def _line(blocked: Blocked, size: int, tensors: int) -> tuple[int, int]:
    """How many elements of a line of `size` a program takes of each of so many tensors, on how many warps."""
    per_thread = min(16, 32 // _itemsize(blocked)) if tensors <= 6 else 8
    per_thread = max(per_thread, 4)
    block = 128 * per_thread
    while block > 256 and -(-size // block) < 4 * blocked.device.multiprocessors:
        block //= 2
    each = 4 if block <= 512 else min(per_thread, 8)  # little to do: as many threads as there are 16-byte words
    block = min(block, power_of_two(size))
    return block, min(4, _warps(block, each))


def _tile(blocked: Blocked, y: Dim, x: Dim) -> Config:
    """Rows of 128 bytes on both sides of the transposition."""
    side = 32 if _itemsize(blocked, least=True) >= 4 else 64
    blocks = (("y", min(side, power_of_two(extent(y.size)))), ("x", min(side, power_of_two(extent(x.size)))))
    return Config(blocks, num_warps=_warps(blocks[0][1] * blocks[1][1], 8 if side == 32 else 16))


# Reductions -----------------------------------------------------------------------------------------------------------

SECTOR = 32
"""Bytes: the least that memory is asked for."""

_LEAST_SPLIT = 4
"""Blocks of a row that are worth two loops in the place of one."""

_ROW_WARPS = {1024: 2, 2048: 2, 4096: 8, 8192: 8, 16384: 16}  # padded length of a row held whole → warps; above: 32


_MANY_ROWS = 4
"""From so many rows per multiprocessor on, rows that are walked again are fastest one to a multiprocessor."""

_ALONE = (16384, 32)
"""Elements and warps of a step where a program has a multiprocessor to itself: no more rows are under way than the
cache holds until they are walked again.  (H200, bf16, softmax of 4096 rows of 65536: 297 µs, in steps of 4096 with 4
warps 391; log-softmax of 8192 rows of 50264: 440 and 626; 1024 rows of 131072 in float32: 374, with 16 warps 385.)"""

_IN_PLACE = (8192, 16)
"""The same for rows of halves that are overwritten where they lie: the cache holds more of them, and what is computed
for a gradient leaves registers for one program of 32 warps only, so that nothing is done while it waits.  (H200, bf16,
loss and gradient of 4096 rows of 50257: 307 µs, by 32 warps 371, by 4 in steps of 4096 333; of 2048 rows of 128256:
415, 433, 453.  With loads of the next steps under way, through shared memory: 315 to 475, and 432 to 556.)"""


def _rows(blocked: Blocked, r: Dim, x: Dim | None) -> Config:
    """The reduced axis is contiguous."""
    length = power_of_two(extent(r.size))
    rows = extent(x.size) if x is not None else 1
    if r.role is Role.LOOP and length > 1024:
        block, warps = _steps(blocked, length, rows)
        return Config((("r", min(length, block)),), num_warps=warps, split=_is_split(blocked, r, block))
    if length <= 128:  # several rows per warp
        block = max(1, min(2048 // length, power_of_two(rows)))
        while block > 1 and -(-rows // block) < 2 * blocked.device.multiprocessors:
            block //= 2
        return Config((("x", block), ("r", length)), num_warps=min(4, _warps(block * length, 8)))
    warps = 1 if length <= 512 else _ROW_WARPS.get(length, 32)
    if rows < 4 * blocked.device.multiprocessors:  # too few rows to hide latency behind other programs
        warps = max(warps, min(16, _warps(length, 8)))
    return Config((("r", length),), num_warps=warps)


def _is_split(blocked: Blocked, r: Dim, block: int) -> bool:
    """Is the end of a row a loop of its own, so that blocks before it have no masks?

    A mask that ends within 16 bytes has each thread store one element at a time, in every block in which it stands.
    (H200, bf16, loss and gradient of 4096 rows of 50257, 50304 apart: 1050 µs in one loop of blocks of 16384, 406 in
    blocks of 4096 with an end of its own.  Of 2048 rows of 128256, which ends with a word: 418 and 406.)
    """
    if _scans(blocked):
        return False
    least = 1 if _ends_within_word(blocked, r) else _LEAST_SPLIT
    return not (r.size.is_Integer and int(r.size) < least * block)


def _ends_within_word(blocked: Blocked, r: Dim) -> bool:
    """Is a row stored that ends within 16 bytes?"""
    loops = [stmt for stmt in statements(blocked.body, Loop) if blocked.of(stmt.axes) == (r,)]
    stored = [blocked.kernel.param(stmt.param) for loop in loops for stmt in loop.body if isinstance(stmt, Store)]
    return any(r.size.is_Integer and int(r.size) * param.dtype.itemsize % WORD for param in stored)


def _steps(blocked: Blocked, length: int, rows: int) -> tuple[int, int]:
    """Elements and warps of each step along a row.

    Of many rows small blocks, since others go on where one waits, in few warps for a running value.  Of few rows as
    much as can be under way at once.  (H200, bf16, maximum and sum of exponentials of 8192 rows of 50264: 295 µs in
    steps of 4096 with 4 warps, 370 in steps of 8192 with 16; of 132 rows of 400000: 139 and 89.)
    """
    warps = 16 if length >= 16384 else 8
    if _scans(blocked):
        return warps * 1024, warps  # the blocks of a scan wait for each other
    if rows >= _MANY_ROWS * blocked.device.multiprocessors and length >= 4 * _ALONE[0] and _is_walked_again(blocked):
        return _IN_PLACE if all(param.written and param.dtype in HALVES for param in _streams(blocked)) else _ALONE
    if rows < 8 * blocked.device.multiprocessors:
        return warps * 512, warps
    running = any(isinstance(stmt, Fold) and stmt.carry is not None for stmt in statements(blocked.body))
    return (4096, 4) if running else (2048, 8)


def _is_walked_again(blocked: Blocked) -> bool:
    """Is a walk that follows a running value followed by another one, of tensors few enough for the registers?"""
    loops = [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    running = len(loops) > 1 and any(isinstance(stmt, Fold) and stmt.carry is not None for stmt in loops[0].body)
    return running and len(_streams(blocked)) <= 3


def _columns(blocked: Blocked, r: Dim, x: Dim, times: int) -> Config:
    """The grid axis is contiguous: neighbouring threads take neighbouring columns, at least 64 bytes of them.

    Programs take blocks of them so many `times`.  Of few columns they take less, where processors had nothing to do.
    """
    columns, length = extent(x.size), power_of_two(extent(r.size))
    if length >= 256 and _scans(blocked):  # many rows at once: the next ones wait for them
        block = min(max(1, SECTOR // _itemsize(blocked, least=True)), power_of_two(columns))
        steps = length if r.role is Role.WHOLE else 256
        return Config((("r", steps), ("x", block)), num_warps=max(4, steps * block // 1024))
    wanted = min(1024, 4096 // length) if r.role is Role.WHOLE else 256 // _itemsize(blocked)
    least = 32 if r.role is not Role.WHOLE or length <= 512 else SECTOR // _itemsize(blocked, least=True)
    block = min(max(least, wanted), power_of_two(columns))
    while block > 32 and -(-columns // block) * times < 2 * blocked.device.multiprocessors:
        block //= 2
    while (
        block > SECTOR // _itemsize(blocked, least=True)
        and -(-columns // block) * times < blocked.device.multiprocessors // 4
    ):
        block //= 2
    steps = length if r.role is Role.WHOLE else min(length, max(1, 4096 // block))
    return Config((("r", steps), ("x", block)), num_warps=min(16, _warps(steps * block, 16)))


def _scans(blocked: Blocked) -> bool:
    """Does the kernel scan?"""
    return any(isinstance(stmt, Prefix) for stmt in statements(blocked.body))


def _several(reduced: list[Dim]) -> Config:
    """Folds over different axes: a whole tile per program, what is looped in steps that keep it small."""
    room = 8192
    blocks: list[tuple[str, int]] = []
    for dim in sorted(reduced, key=lambda dim: dim.role is Role.LOOP):
        length = power_of_two(extent(dim.size))
        if dim.role is Role.LOOP:
            length = min(length, max(1, room))
        room = max(1, room // length)
        blocks.append((dim.name, length))
    elements = math.prod(length for _, length in blocks)
    return Config(tuple(blocks), num_warps=min(16, _warps(elements, 16)))
