"""Emits C for the products of a block of weights with a row in fixed point, by one of two sets of instructions.

`products_NAME(at, x, &low, &high)` computes, in each lane, the sum of a block of weights at `at` times the terms of the
row at `x`, low + 256 · high, plus the sums that precede these.  The terms are those of `text/fixed_point`.

In AVX2 products of bytes are added in pairs to 16 bits, and weights of 8 bits are multiplied by terms of 16 bits.  In
VNNI of AVX-512 one instruction adds four products of bytes to a number of 32 bits: of weights without a sign and terms
with one.  So weights of 8 bits are read as those without a sign minus 128, and have terms of 8 bits, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instructions:
    """A set of instructions.

    Attributes:
        condition: under which a processor has it.
        register: the bytes of its registers.
        joined: the sum of `low` and `high`, as floats.
        total: the sum over blocks, with that of this block, times both scales.
        columns: bits of weights → the most columns whose sums, and what they are multiplied by, stay in registers.
    """

    condition: str
    register: int
    joined: str
    total: str
    columns: Mapping[int, int]


PAIRS_OF_BYTES = Instructions(
    "defined(__AVX2__) && !defined(__AVX512F__)",
    32,
    "256.0f * __builtin_convertvector(high, stream_float) + __builtin_convertvector(low, stream_float)",
    "total + scale * *(const float *)x * sum",
    {4: 4, 8: 2},
)
"""AVX2.  Where registers are wider, floats are faster without dot products of bytes."""

BYTE_DOTS = Instructions(
    "defined(__AVX512VNNI__) && defined(__AVX512BW__)",
    64,
    "plus_product(__builtin_convertvector(low, stream_float), __builtin_convertvector(high, stream_float), "
    "(stream_float){0} + 256.0f)",
    "plus_product(total, scale * *(const float *)x, sum)",
    {4: 4, 8: 4},
)
"""AVX-512 with VNNI (measured: docs/performance.md, `fixed_point_products`)."""

FIXED_POINT_TYPES = f"""\
#if {PAIRS_OF_BYTES.condition}
typedef int16_t fixed_short __attribute__((vector_size(32)));
typedef int32_t fixed_int __attribute__((vector_size(32)));
typedef uint8_t fixed_byte __attribute__((vector_size(32)));
typedef uint16_t fixed_half __attribute__((vector_size(32)));
typedef uint8_t loose_byte __attribute__((vector_size(32), aligned(1)));
INLINE fixed_short byte_products(fixed_byte w, const char *x) {{  // by signed bytes, in pairs
    fixed_short sums;
    __asm__("vpmaddubsw %2, %1, %0" : "=x"(sums) : "x"(w), "m"(*(const fixed_byte *)x));
    return sums;
}}
INLINE fixed_int short_products(fixed_short a, fixed_short b) {{  // in pairs
    fixed_int sums;
    __asm__("vpmaddwd %2, %1, %0" : "=x"(sums) : "x"(a), "xm"(b));
    return sums;
}}
#elif {BYTE_DOTS.condition}
typedef int32_t fixed_int __attribute__((vector_size(64)));
typedef uint8_t fixed_byte __attribute__((vector_size(64)));
typedef uint16_t fixed_half __attribute__((vector_size(64)));
typedef uint8_t loose_byte __attribute__((vector_size(64), aligned(1)));
INLINE fixed_int byte_dots(fixed_int sums, fixed_byte w, const char *x) {{  // plus products by signed bytes, of four
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(*(const fixed_byte *)x));
    return sums;
}}
INLINE stream_float plus_product(stream_float sum, stream_float a, stream_float b) {{
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}}
#endif"""

_PRODUCTS = """\
INLINE void products_{name}(const char *at, const char *x, fixed_int *restrict to_low, fixed_int *restrict to_high) {{
{products}    *to_low = low;
    *to_high = high;
}}"""

_HALVES = "const fixed_byte low = (word & 15){turned}, high = ((fixed_byte)((fixed_half)word >> 4) & 15){turned};"

_BYTE_PRODUCTS = """\
    fixed_short first = {{0}}, second = {{0}}, third = {{0}};
    #pragma GCC unroll 4
    for (int step = 0; step < {steps}; step++) {{
        const fixed_byte word = *(const loose_byte *)(at + 32 * step);
        {read}
        const char *const terms = x + {start} + {step} * step;
        first += byte_products(low, terms) + byte_products(high, terms + 32);
        second += byte_products(low, terms + 64) + byte_products(high, terms + 96);
{third}    }}
    const fixed_short ones = (fixed_short){{0}} + 1;
    const fixed_int lowest = short_products(first, ones);
    const fixed_int low = {low}, high = {high};
"""

_THIRD_PRODUCTS = "        third += byte_products(low, terms + 128) + byte_products(high, terms + 160);\n"

_SHORT_PRODUCTS = """\
    fixed_int low = {low}, high = {high};
    #pragma GCC unroll 4
    for (int step = 0; step < {steps}; step++) {{
        const fixed_short word = (fixed_short)*(const loose_byte *)(at + 32 * step);
        const fixed_short even = {even}, odd = {odd};
        const fixed_short *const terms = (const fixed_short *)(x + {start} + 128 * step);
        low += short_products(even, terms[0]) + short_products(odd, terms[1]);
        high += short_products(even, terms[2]) + short_products(odd, terms[3]);
    }}
"""

_DOTS = """\
    fixed_int first = {first}, second = {second}, third = {{0}};
    #pragma GCC unroll 4
    for (int step = 0; step < {steps}; step++) {{
        fixed_byte word = *(const loose_byte *)(at + 64 * step);
        __asm__("" : "+v"(word));  // read once
        {read}
        const char *const terms = x + {start} + {step} * step;
{dots}    }}
    const fixed_int low = {low}, high = {high};
"""


def products_text(
    using: Instructions, *, bits: int, signed: bool, terms: int, added: bool, words: Mapping[str, object]
) -> str:
    """Return the function for weights of so many bits, and a row of so many terms, before which are sums if `added`."""
    starts = [f"((const fixed_int *)x)[{place}]" if added else "(fixed_int){0}" for place in (1, 2)]
    if is_single(using, bits, terms):
        starts[1] = "(fixed_int){0}"
    products = (_dots if using is BYTE_DOTS else _pairs)(bits, signed, terms, starts, words)
    return _PRODUCTS.format(products=products, **words)


def is_single(using: Instructions, bits: int, terms: int) -> bool:
    """Return whether one number of 32 bits holds a sum, and `high` is zero."""
    return terms == 2 and (using is BYTE_DOTS or bits == 4)


def _pairs(bits: int, signed: bool, terms: int, starts: Sequence[str], words: Mapping[str, object]) -> str:
    if bits == 8:
        even = "(word << 8) >> 8" if signed else "word & 255"
        odd = "word >> 8" if signed else "(fixed_short)((fixed_half)word >> 8)"
        return _SHORT_PRODUCTS.format(even=even, odd=odd, low=starts[0], high=starts[1], **words)
    low, high = "lowest", "short_products(third, ones << 8) + short_products(second, ones)"
    if terms == 2:
        low, high = "lowest + short_products(second, ones << 8)", ""
    read, third = _HALVES.format(turned=" ^ 8" if signed else ""), "" if terms == 2 else _THIRD_PRODUCTS
    low, high = (" + ".join(filter(None, (start, sum))) for start, sum in zip(starts, (low, high), strict=True))
    return _BYTE_PRODUCTS.format(read=read, third=third, low=low, high=high, **words)


def _dots(bits: int, signed: bool, terms: int, starts: Sequence[str], words: Mapping[str, object]) -> str:
    names = ("low", "high") if bits == 4 else ("whole",)
    read = f"const fixed_byte whole = word{' ^ 128' if signed else ''};"
    if bits == 4:
        read = _HALVES.format(turned=" ^ 8" if signed else "")
    dots = "".join(
        f"        {total} = byte_dots({total}, {name}, terms + {64 * (number * len(names) + half)});\n"
        for number, total in enumerate(("first", "second", "third")[:terms])
        for half, name in enumerate(names)
    )
    low, high = ("first + (second << 8)", "{0}") if terms == 2 else ("first", "second + (third << 8)")
    return _DOTS.format(read=read, dots=dots, low=low, high=high, first=starts[0], second=starts[1], **words)
