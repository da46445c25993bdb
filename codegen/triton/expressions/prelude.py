"""Provides the small device functions that a generated file contains when its kernel calls them.

Operations that take more than one line of Triton, or that a reduction needs as a function, are written here once, as
text, because every generated file must be self-contained.  `needed` selects the functions among the names that a
kernel reads, including their callees, as a linker does.
"""

from __future__ import annotations

from collections.abc import Iterable

import triton

_RENAMED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)

# Gluon's names for the copies between global and shared memory.
LOAD = "hopper.tma.async_load" if _RENAMED else "hopper.tma.async_copy_global_to_shared"
STORE = "hopper.tma.async_store" if _RENAMED else "hopper.tma.async_copy_shared_to_global"


def _bits_to_half(name: str, pair: str, bits: int, word: str) -> str:
    """Return the function that converts bits to 16-bit floats: each byte of `word` is the upper byte of 2^`bits`, whose
    fraction takes the bits.
    """
    return f"""
def _bits_to_{name}(x, shift: tl.constexpr, mask: tl.constexpr, flip: tl.constexpr, offset: tl.constexpr):
    # Bits of bytes, plus a constant; each byte that is left is put under the exponent of 2^{bits}.
    return tl.inline_asm_elementwise(
        '''{{
            .reg .b32 s, f, a, b;
            and.b32 s, $3, 31;
            shr.u32 f, $2, s;
            and.b32 f, f, $4;
            xor.b32 f, f, $5;
            prmt.b32 a, f, {word}, 0x4140;
            prmt.b32 b, f, {word}, 0x4342;
            fma.rn.{pair} $0, a, $6, $8;
            fma.rn.{pair} $1, b, $7, $9;
        }}''',
        constraints="=r,=r,r,r,r,r,r,r,r,r",
        args=[
            x,
            tl.full([], shift, tl.uint8),
            tl.full([], mask, tl.uint8),
            tl.full([], flip, tl.uint8),
            tl.full([], 1, tl.{name}),
            tl.full([], offset - {1 << bits}, tl.{name}),
        ],
        dtype=tl.{name},
        is_pure=True,
        pack=4,
    )
"""


_GROUPS = {  # of warp-specialised programs (`forms/warp_groups/groups.py`)
    "_barriers": """
def _barriers(count: tl.constexpr, arrivals: tl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        hopper.mbarrier.init(barriers.index(i), count=arrivals)
    return barriers
""",
    "_next_slot": """
def _next_slot(slot, phase, depth: tl.constexpr):
    wraps = slot == depth - 1
    return tl.where(wraps, 0, slot + 1), tl.where(wraps, phase ^ 1, phase)
""",
    "_zigzag": """
def _zigzag(turn, section):
    # Every second turn goes backwards through the programs, so that each has long blocks and short ones.
    programs = tl.num_programs(0)
    return turn * programs + tl.where((turn + section) % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
""",
    "_zigzag_turns": """
def _zigzag_turns(blocks, section):
    full = blocks // tl.num_programs(0)
    return full + tl.where(_zigzag(full, section) < blocks, 1, 0)
""",
    "_begin_product": """
def _begin_product(left, right, over_first: tl.constexpr, layout: tl.constexpr):
    if not over_first:
        right = right.permute((1, 0))
    zeros = gl.full([left.shape[0], right.shape[1]], 0.0, gl.float32, layout)
    return hopper.warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
""",
    "_multiply_in_turn": """
def _multiply_in_turn(
    left, right, filled, emptied, turns, group, turn, first, steps,
    left_turned: tl.constexpr, right_turned: tl.constexpr, depth: tl.constexpr, layout: tl.constexpr,
):
    # Block `first` of the ring and those that follow it; the other group's turn comes when the last product has begun.
    hopper.mbarrier.wait(turns.index(group), turn)
    slot, phase = first % depth, first // depth % 2
    hopper.mbarrier.wait(filled.index(slot), phase)
    started = _begin_product(_slot(left, slot, left_turned), _slot(right, slot, right_turned), True, layout)
    sums = hopper.warpgroup_mma_wait(1, deps=(started,))
    for _ in range(1, steps):
        behind = slot
        slot, phase = _next_slot(slot, phase, depth)
        hopper.mbarrier.wait(filled.index(slot), phase)
        begun = hopper.warpgroup_mma(
            _slot(left, slot, left_turned), _slot(right, slot, right_turned), sums, is_async=True
        )
        sums = hopper.warpgroup_mma_wait(1, deps=(begun,))
        hopper.mbarrier.arrive(emptied.index(behind), count=1)
    hopper.mbarrier.arrive(turns.index(1 - group), count=1)
    sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
    hopper.mbarrier.arrive(emptied.index(slot), count=1)
    return sums
""",
    "_slot": """
def _slot(ring, slot, turned: tl.constexpr):
    block = ring.index(slot)
    if turned:
        block = block.permute((1, 0))
    return block
""",
    "_send": f"""
def _send(matrix, staged, corner, value):
    # What left from here before has been read.
    hopper.tma.store_wait(0)
    staged.reshape(value.shape).store(value)
    hopper.fence_async_shared()
    {STORE}(matrix, corner, staged)
""",
}


_RANDOM = {  # the generator of `lowering/random/philox.py`
    "_philox": """
def _philox(seed, counter):
    # Philox4x32-10: four words.  Both halves of a product come from one instruction.
    seed = tl.cast(seed, tl.int64)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c1, c3 = c2, c2
    if counter.dtype.primitive_bitwidth > 32:
        c1 = (counter >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3
""",
    "_unit_interval": """
def _unit_interval(word):
    word = word.to(tl.int32, bitcast=True)
    return tl.where(word < 0, ~word, word).to(tl.float32) * 4.6566127342e-10
""",
    "_uniform": """
def _uniform(seed, counter):
    a, b, c, d = _philox(seed, counter >> 2)
    even = tl.where((counter & 2) == 0, a, c)
    return _unit_interval(tl.where((counter & 1) == 0, even, tl.where((counter & 2) == 0, b, d)))
""",
    "_uniform_by_four": """
def _uniform_by_four(seed, counter):
    # Four neighbours share the words of one evaluation.
    pairs, _ = tl.split(tl.reshape(counter, [counter.numel // 4, 2, 2]))
    first, _ = tl.split(pairs)
    a, b, c, d = _philox(seed, first >> 2)
    return _unit_interval(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), counter.shape))
""",
    "_box_muller": """
def _box_muller(first, second):
    radius = tl.sqrt(-2.0 * tl.log(tl.maximum(_unit_interval(first), 1.0e-7)))
    return radius * tl.cos(6.283185307179586 * _unit_interval(second))
""",
    "_normal": """
def _normal(seed, counter):
    a, b, c, d = _philox(seed, counter >> 1)
    return _box_muller(tl.where((counter & 1) == 0, a, c), tl.where((counter & 1) == 0, b, d))
""",
    "_normal_by_two": """
def _normal_by_two(seed, counter):
    # Two neighbours share the words of one evaluation.
    first, _ = tl.split(tl.reshape(counter, [counter.numel // 2, 2]))
    a, b, c, d = _philox(seed, first >> 1)
    return tl.reshape(_box_muller(tl.join(a, c), tl.join(b, d)), counter.shape)
""",
}


FUNCTIONS: dict[str, str] = {
    **_GROUPS,
    **_RANDOM,
    "_maximum": """
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_by_lane": """
def _by_lane(x, lanes: tl.constexpr, word: tl.constexpr):
    # Neighbouring words go to neighbouring threads.
    return tl.reshape(x, [x.shape[0] // (lanes * word), lanes, word])
""",
    "_of_lanes": """
def _of_lanes(x, size: tl.constexpr, lanes: tl.constexpr, word: tl.constexpr):
    # What belongs to a thread, at each element of a block that it takes.
    return tl.reshape(tl.broadcast_to(x[None, :, None], [size // (lanes * word), lanes, word]), [size])
""",
    "_minimum": """
def _minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_multiply": """
def _multiply(a, b):
    return a * b
""",
    "_sum_in_pairs": """
def _sum_in_pairs(x, outer: tl.constexpr, length: tl.constexpr, inner: tl.constexpr):
    # Two numbers at a time, so that no layout changes the order: neighbours, which a thread holds, then halves.
    for step in tl.static_range(16):
        if length >> step > 1:
            if step < 2:
                x = tl.sum(tl.reshape(x, [outer, length >> (step + 1), 2, inner]), 2)
            else:
                x = tl.sum(tl.reshape(x, [outer, 2, length >> (step + 1), inner]), 1)
    return tl.reshape(x, [outer, inner])
""",
    "_product_in_pairs": """
def _product_in_pairs(x, outer: tl.constexpr, length: tl.constexpr, inner: tl.constexpr):
    # See _sum_in_pairs.
    for step in tl.static_range(16):
        if length >> step > 1:
            if step < 2:
                x = tl.reduce(tl.reshape(x, [outer, length >> (step + 1), 2, inner]), 2, _multiply)
            else:
                x = tl.reduce(tl.reshape(x, [outer, 2, length >> (step + 1), inner]), 1, _multiply)
    return tl.reshape(x, [outer, inner])
""",
    "_argmax": """
def _argmax(a, i, b, j):
    # NaN is above everything; among equals the lower index wins.
    tie = (a == b) | ((a != a) & (b != b))
    left = (a > b) | ((a != a) & (b == b)) | (tie & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)
""",
    "_argmin": """
def _argmin(a, i, b, j):
    # NaN is below everything; among equals the lower index wins.
    tie = (a == b) | ((a != a) & (b != b))
    left = (a < b) | ((a != a) & (b == b)) | (tie & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)
""",
    "_later_maximum": """
def _later_maximum(a, b):
    return tl.where((b >= a) | (b != b), b, a)
""",
    "_later_minimum": """
def _later_minimum(a, b):
    return tl.where((b <= a) | (b != b), b, a)
""",
    "_later_argmax": """
def _later_argmax(a, i, b, j):
    # NaN is above everything; among equals the later one wins.
    later = (b >= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, j, i)
""",
    "_later_argmin": """
def _later_argmin(a, i, b, j):
    # NaN is below everything; among equals the later one wins.
    later = (b <= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, j, i)
""",
    "_log_sum": """
def _log_sum(a, s, b, t):
    # s is Σ exp(x - a), t is Σ exp(x - b).  Of equal infinities the difference is 0.
    scale = tl.where(a == b, 1.0, tl.exp(-tl.abs(a - b)))
    return tl.where(b > a, b, a), tl.where(b > a, s * scale + t, s + t * scale)
""",
    "_divide": """
def _divide(a, b):
    # Rounded to nearest; Triton's `/` of float32 is two units off.
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)
""",
    "_isnan": """
def _isnan(x):
    return x != x
""",
    "_inside": """
def _inside(i, last, here):
    # Compiled if CONFIG says "debug"; it is the nearest position in any case, so that nothing else is touched.
    tl.device_assert((i >= 0) & (i <= last), "index out of bounds", mask=here)
    return tl.minimum(tl.maximum(i, 0), last)
""",
    "_wrapped": """
def _wrapped(i, size, last, here):
    return _inside(tl.where(i < 0, i + size, i), last, here)
""",
    "_sign": """
def _sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
""",
    "_floordiv": """
def _floordiv(a, b):
    quotient = a // b  # truncates
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)
""",
    "_remainder": """
def _remainder(a, b):
    rest = a % b  # has the sign of a
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
""",
    "_float_floordiv": """
def _float_floordiv(a, b):
    # The quotient is formed from an exact remainder, so that it never rounds up to the next integer.
    rest = libdevice.fmod(a, b)
    quotient = _divide(a - rest, b)
    quotient = tl.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
    floor = tl.floor(quotient)
    floor = tl.where(quotient - floor > 0.5, floor + 1, floor)
    floor = tl.where(quotient == 0, _divide(a, b) * 0.0, floor)  # a zero with the sign of a / b
    return tl.where(b == 0, _divide(a, b), floor)
""",
    "_float_remainder": """
def _float_remainder(a, b):
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)
""",
    "_quick_tanh": """
def _quick_tanh(x):
    # To the last bits of float32 in absolute terms; near 0, where that is not enough, by the series.
    square = x * x
    series = x * (1.0 - square * (0.33333333 - square * 0.13333333))
    return tl.where(tl.abs(x) < 0.0625, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
""",
    "_halves": """
def _halves(x):
    # The first and the last columns.
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
""",
    "_quick_erfc": """
def _quick_erfc(x):
    # t · 2^(p(t) - x² · log₂e) to 2.4e-5, with p fitted to the logarithm; below 0 by symmetry.
    t = libdevice.fast_dividef(1.0, tl.fma(tl.abs(x), 0.54, 1.0))
    p = 0.33769274 + t * (-0.8387584 + t * 0.31031334)
    p = -1.7147636 + t * (1.4462627 + t * (0.45927024 + t * p))
    right = t * tl.exp2(p - x * x * 1.4426950408889634)
    return tl.where(x < 0, 2.0 - right, right)
""",
    "_bits_to_float32": """
def _bits_to_float32(x, shift: tl.constexpr, mask: tl.constexpr, flip: tl.constexpr, offset: tl.constexpr):
    # Bits of bytes, plus a constant; each byte that is left is put under the exponent of 2^23.
    bits = tl.inline_asm_elementwise(
        '''{
            .reg .b32 s, f;
            and.b32 s, $5, 31;
            shr.u32 f, $4, s;
            and.b32 f, f, $6;
            xor.b32 f, f, $7;
            prmt.b32 $0, f, 0x4b000000, 0x7440;
            prmt.b32 $1, f, 0x4b000000, 0x7441;
            prmt.b32 $2, f, 0x4b000000, 0x7442;
            prmt.b32 $3, f, 0x4b000000, 0x7443;
        }''',
        constraints="=r,=r,=r,=r,r,r,r,r",
        args=[x, tl.full([], shift, tl.uint8), tl.full([], mask, tl.uint8), tl.full([], flip, tl.uint8)],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )
    return bits + (offset - 8388608.0)
""",
    "_bits_to_float16": _bits_to_half("float16", "f16x2", 10, "0x64646464"),
    "_bits_to_bfloat16": _bits_to_half("bfloat16", "bf16x2", 7, "0x43434343"),
    "_power": """
def _power(base, exponent):
    result = base * 0 + exponent * 0 + 1
    square = base
    left = exponent
    for _ in range(base.dtype.primitive_bitwidth):
        result = tl.where((left & 1) != 0, result * square, result)
        square = square * square
        left = left >> 1
    # 1 / base is an integer only for 1 and -1.
    odd = (exponent & 1) != 0
    inverse = tl.where((base == 1) | (base + 1 == 0), tl.where(odd, base, 1), 0)
    return tl.where(exponent < 0, inverse, result)
""",
    "_shift_left": """
def _shift_left(a, b):
    return tl.where((b >= 0) & (b < a.dtype.primitive_bitwidth), a << b, 0)
""",
    "_shift_right": """
def _shift_right(a, b):
    # Past the width only copies of the sign are left.
    return tl.where((b >= 0) & (b < a.dtype.primitive_bitwidth), a >> b, 0 - (a < 0).to(a.dtype))
""",
}


READS: dict[str, tuple[str, ...]] = {
    "_zigzag_turns": ("_zigzag",),
    "_wrapped": ("_inside",),
    "_uniform": ("_philox", "_unit_interval"),
    "_uniform_by_four": ("_philox", "_unit_interval"),
    "_box_muller": ("_unit_interval",),
    "_normal": ("_philox", "_box_muller"),
    "_normal_by_two": ("_philox", "_box_muller"),
    "_product_in_pairs": ("_multiply",),
    "_float_floordiv": ("libdevice.fmod", "_divide"),
    "_float_remainder": ("libdevice.fmod",),
    "_quick_erfc": ("libdevice.fast_dividef",),
    "_multiply_in_turn": ("_begin_product", "_slot", "_next_slot"),
}
"""The functions that a function calls, of this table and of libraries that a file imports for them."""


def needed(reads: Iterable[str]) -> dict[str, str]:
    """Return the sources of the functions among the names `reads`, by name, callees first.

    >>> list(needed(["a", "_float_remainder", "_float_floordiv"]))
    ['_float_remainder', '_divide', '_float_floordiv']
    """
    sources: dict[str, str] = {}
    for name in reads:
        if name in FUNCTIONS and name not in sources:
            sources |= needed(READS.get(name, ()))
            sources[name] = f"@triton.jit{FUNCTIONS[name]}"
    return sources
