"""Emits C for products of one row with integers of 8 or 4 bits, in integer arithmetic of AVX2, or of AVX-512 with VNNI.

A block of the row, up to 128 numbers, is rounded to integers of 22 bits and a sign, times a power of two: at most
2^-22 of the block's largest number is lost, as much as additions in float32 lose.  These integers are split into terms
that an instruction multiplies by weights and adds in pairs or by four, exactly: three terms of 8 bits, or two of 16
(`fixed_point_products`).  An integer instruction multiplies two or four times as many weights as one of float32, and
the weights are not converted.

Where sums are only read as bfloat16 and terms have 8 bits, 15 bits and a sign are tried first: two terms.  They hold
numbers of 8 bits exactly down to 2^-8 of the largest.

`arranged_NAME` and `columns_NAME` are those of `text/skinny`.  A row's first word says how many terms it has.  One that
is no good in fixed point is arranged as floats: one with an infinity or NaN, or of which more than an eighth of a block
is smaller than 2^-14 of the block's largest number and would be rounded.  For two terms, at most half of a block may be
smaller than 2^-6 and be rounded, by which it may lose `LOST`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.codegen.c.text.fixed_point_products import (
    BYTE_DOTS,
    PAIRS_OF_BYTES,
    Instructions,
    is_single,
    products_text,
)

HEADER_WORDS = 16
"""The words before an arranged row: the first says whether it is in fixed point."""

LONGEST_BLOCK = 128
"""The most numbers with one exponent: so many products of 4 bits and terms of 8 bits add up to 16 bits."""

COARSE_DIGITS = 15
"""The bits of a row's integers, which two terms of 8 bits hold, without the sign (measured: docs/performance.md,
`COARSE_DIGITS`)."""

ABOVE = 0x10100
"""Is added to the bits of a block's largest number: one that would become 32639.5 or more, which two terms do not hold,
gets the next power of two."""

LOST = 24
"""A block of two terms may lose 2^-24 of its mean size, squared: with any weights that do not know the row, 2^-12 of a
result that is rounded to bfloat16, by 2^-10 in the mean."""

_ARRANGED = """\
static _Bool fixed_{name}(const float *restrict x, int64_t depth, char *restrict to) {{
    _Bool fits = 1;
    enum {{ part_size = {weights} / {halves} }};
    for (int64_t from = 0; from < depth; from += {block}, to += {bytes}) {{
        const float *row = x + from;
        float last[{block}] = {{0}};
        if (depth - from < {block}) row = __builtin_memcpy(last, row, (depth - from) * sizeof(float));
        _Alignas(64) float numbers[{block}];{order}
        int32_t most = 22 << 23;  // of a smaller one, the power of two below would be too small
        #pragma omp simd reduction(max: most)
        for (int k = 0; k < {block}; k++) {{
            const int32_t bits = float_to_bits(numbers[k]) & 0x7fffffff;
            most = bits > most ? bits : most;
        }}
        if (most > 0x7f7fffff) return 0;
        const int32_t exponent = (most + {above}) >> 23;
        const float up = bits_to_float((uint32_t)(253 + {digits} - exponent) << 23);
        _Alignas(64) int32_t whole[{block}];  // smaller than 2^{digits}
{rounding}        *(float *)to = bits_to_float((uint32_t)(exponent + 1 - {digits}) << 23);
        for (int part = 0; part < {halves} * {steps}; part++) {{
            const int32_t *const of = whole + part_size * part;
{terms}        }}
{added}    }}
    return fits;
}}
"""

_EVEN_AND_ODD = """  // of a register, those with even places and those with odd ones
        for (int step = 0; step < {steps}; step++)
            for (int k = 0; k < part_size; k++) {{
                numbers[{weights} * step + {first} * part_size + k] = row[{weights} * step + 2 * k];
                numbers[{weights} * step + {second} * part_size + k] = row[{weights} * step + 2 * k + 1];
            }}"""

_IN_ORDER = """
        __builtin_memcpy(numbers, row, sizeof numbers);"""

_FINE = """\
        int32_t rounded = 0;
        #pragma omp simd reduction(+: rounded)
        for (int k = 0; k < {block}; k++) {{
            const float number = numbers[k] * up, shifted = number + 12582912.0f;
            const int32_t n = float_to_bits(shifted) - 0x4b400000, size = n < 0 ? -n : n;
            rounded += (size < 256) & (shifted - 12582912.0f != number);
            whole[k] = n;
        }}
        fits &= rounded <= {block} / 8;
"""

_COARSE = """\
        float sizes = 0, lost = 0;
        int32_t rounded = 0;
        #pragma omp simd reduction(+: sizes, lost, rounded)
        for (int k = 0; k < {block}; k++) {{
            const float number = numbers[k] * up, shifted = number + 12582912.0f;
            const float rest = number - (shifted - 12582912.0f), size = __builtin_fabsf(number);
            whole[k] = float_to_bits(shifted) - 0x4b400000;
            rounded += (size < 256) & (rest != 0);
            sizes += size;
            lost += rest * rest;
        }}
        fits &= rounded <= {block} / 2 && lost * {block} * 0x1p{lost} <= sizes * sizes;
"""

_CHOICE = """\
static void arranged_{name}(const float *restrict x, int64_t depth, int64_t from, int64_t to,
        void *restrict arranged) {{
    char *const blocks = (char *)arranged + 4 * {header};
    const int32_t terms = {choice}0;
    *(int32_t *)arranged = terms;
    if (!terms) arranged_{floats}(x, depth, from, to, blocks);
}}
INLINE void columns_{name}(const void *restrict x, const void *restrict w, int64_t count,
        const float *restrict scales, int64_t pitch, int64_t depth, float *restrict sums) {{
    const char *const blocks = (const char *)x + 4 * {header};
    const int32_t terms = *(const int32_t *)x;
{calls}    else
        for (int c = 0; c < count; c++)
            sums_{floats}(blocks, (const char *)w + c * (depth * {bits} / 8), scales + c * pitch, depth, 1, sums + c);
}}"""

_BYTE_TERMS = """\
            int8_t *const at = (int8_t *)to + {start} + part / {halves} * {step} + part % {halves} * part_size;
            #pragma omp simd
            for (int k = 0; k < part_size; k++) {{
                at[k] = (int8_t)of[k];
                at[{apart} + k] = (int8_t)((of[k] + 0x80) >> 8);
{third}            }}
"""

_THIRD_TERM = "                at[2 * {apart} + k] = (int8_t)((of[k] + 0x8080) >> 16);\n"

_SHORT_TERMS = """\
            int16_t *const at = (int16_t *)(to + {start} + part / 2 * 128 + part % 2 * 32);
            #pragma omp simd
            for (int k = 0; k < 16; k++) {{
                at[k] = of[k] & 255;
                at[32 + k] = of[k] >> 8;
            }}
"""

_ADDED = """\
        uint8_t ones[{held}];
        __builtin_memset(ones, {one}, {held});
        fixed_int *const sums = (fixed_int *)to + 1, low, high;
        sums[0] = sums[1] = (fixed_int){{0}};
        products_{name}((const char *)ones, to, &low, &high);
        sums[0] = low * {offset};
        sums[1] = high * {offset};
"""

_SUMS = """\
INLINE stream_float block_{name}(stream_float total, const char *restrict at, const char *restrict x,
        stream_float scale) {{
    fixed_int low, high;
    products_{name}(at, x, &low, &high);
    const stream_float sum = {sum};
    return {total};
}}
static __attribute__((noinline)) void fixed_sums_{name}(const char *restrict x, const char *restrict w, int64_t count,
        const float *restrict scales_of, int64_t pitch, int64_t depth, float *restrict sums) {{
    enum {{ weights = {block} }};
    const int64_t whole = depth / weights, row = depth * {bits} / 8;
    const char *at[{columns}];
    int64_t first[{columns}];
    stream_float total[{columns}];
    #pragma GCC unroll {columns}
    for (int c = 0; c < {columns}; c++) {{  // columns that do not exist are the first one once more
        at[c] = w + (c < count ? c : 0) * row;
        first[c] = (c < count ? c : 0) * pitch;
        total[c] = (stream_float){{0}};
    }}
    const char *fetched = w + {ahead} + ({columns} - 1) * row;
{before}    int64_t step = 0;
    for (; step < whole; step++, x += {bytes}, fetched += {columns} * {held}) {{
        for (int line = 0; line < {columns} * {held}; line += 64) __builtin_prefetch(fetched + line);
        #pragma GCC unroll {columns}
        for (int c = 0; c < {columns}; c++) {{
            const float *const scales = scales_of + first[c];
            total[c] = block_{name}(total[c], at[c] + step * {held}, x, {scale});
        }}
    }}
    #pragma GCC unroll {columns}
    for (int c = 0; c < {columns}; c++) {{
        if (step * weights < depth) {{
            const float *const scales = scales_of + first[c];
            uint8_t last[{held}] = {{0}};
            __builtin_memcpy(last, at[c] + step * {held}, (depth - step * weights) * {bits} / 8);
            total[c] = block_{name}(total[c], (const char *)last, x, {scale});
        }}
        if (c < count) sums[c] = lane_sum(total[c]);
    }}
}}"""

FLOAT_COLUMNS = """\
#define arranged_{name} arranged_{floats}
INLINE void columns_{name}(const void *restrict x, const void *restrict w, int64_t count,
        const float *restrict scales, int64_t pitch, int64_t depth, float *restrict sums) {{
    for (int c = 0; c < count; c++)
        sums_{floats}(x, (const char *)w + c * (depth * {bits} / 8), scales + c * pitch, depth, 1, sums + c);
}}"""
"""The same functions for processors without the instructions."""

EVERY_INSTRUCTIONS = (PAIRS_OF_BYTES, BYTE_DOTS)
"""The sets of instructions for which a row has a form in fixed point; a processor uses at most one."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """The arrangements of a row that multiply integers.

    Attributes:
        name: of the functions; `floats`: of those in floats.
        bits, signed, high, offset, group, columns, coarse: as in `Stream`.
        using: the instructions.
    """

    name: str
    floats: str
    bits: int
    signed: bool
    high: bool
    offset: int
    group: int | None
    columns: int
    coarse: bool
    using: Instructions = PAIRS_OF_BYTES

    @property
    def weights(self) -> int:
        """Weights in a register."""
        return self.using.register * 8 // self.bits

    @property
    def bytewise(self) -> bool:
        """Whether terms have 8 bits."""
        return self.bits == 4 or self.using is BYTE_DOTS

    @property
    def halves(self) -> int:
        """The parts of a register that are multiplied: weights with even places, and those with odd ones; or all."""
        return 1 if self.bits == 8 and self.bytewise else 2

    @property
    def at_once(self) -> int:
        """The columns that are multiplied in turn with these instructions."""
        return min(self.columns, self.using.columns[self.bits])

    @property
    def steps(self) -> int:
        """Registers in a block, whose weights have one scale."""
        block = LONGEST_BLOCK if self.group is None else min(LONGEST_BLOCK, self.group)
        return max(1, block // self.weights)

    @property
    def block(self) -> int:
        """Numbers in a block."""
        return self.steps * self.weights

    @property
    def added(self) -> int:
        """What is added to each integer: bytes and their halves are read as those without a sign."""
        return self.offset - (1 << (self.bits - 1)) if self.signed and self.bytewise else self.offset

    @property
    def one(self) -> int:
        """A byte whose weights are read as 1, before anything is added."""
        sign = (1 << (self.bits - 1)) if self.signed and self.bytewise else 0
        return (1 ^ sign) * (0x11 if self.bits == 4 else 1)

    @property
    def start(self) -> int:
        """The place of a block's first term, in bytes: after the factor, and the sums times what is added."""
        return (3 if self.added else 1) * self.using.register

    @property
    def terms(self) -> tuple[int, ...]:
        """The numbers of terms to try, the fewest first."""
        most = 3 if self.bytewise else 2
        return (2, most) if self.coarse and self.bytewise else (most,)

    def bytes(self, terms: int) -> int:
        """Return the bytes of an arranged block."""
        return self.start + self.steps * self.step(terms)

    def step(self, terms: int) -> int:
        """Return the bytes of the terms that a register is multiplied by."""
        return self.weights * terms * (1 if self.bytewise else 2)

    def words(self, depth: int) -> int:
        """Return how many words of 32 bits a row needs with any instructions, in fixed point or as floats."""
        return HEADER_WORDS + max(replace(self, using=using)._block_words(depth) for using in EVERY_INSTRUCTIONS)

    def _block_words(self, depth: int) -> int:
        blocks = -(-depth // LONGEST_BLOCK) * (LONGEST_BLOCK // self.block)
        return blocks * max(self.bytes(max(self.terms)) // 4, self.block)


def fixed_point_text(form: FixedPoint, before: str, scale: str, ahead: int) -> str:
    """Return the functions of a form whose floats are defined already.

    Args:
        before, scale: lines, and the scale of each lane in terms of `step` and `weights`.
        ahead: bytes before their use at which weights are fetched.
    """
    words: dict[str, object] = {
        **{key: getattr(form, key) for key in ("floats", "bits", "weights", "steps", "block", "start")},
        "columns": form.at_once,
        "halves": form.halves,
        "apart": form.halves * form.using.register,
        "offset": form.added,
        "header": HEADER_WORDS,
        "held": form.steps * form.using.register,
        "before": before,
        "scale": scale,
        "ahead": ahead,
    }
    texts, choice, calls = list[str](), "", ""
    for terms in form.terms:
        own = f"{form.name}_{terms}"
        texts += _of_terms(form, terms, {"name": own, "bytes": form.bytes(terms), "step": form.step(terms), **words})
        choice += f"fixed_{own}(x, depth, blocks) ? {terms} : "
        calls += f"    {'else ' if calls else ''}if (terms == {terms}) {_call(form, own)}\n"
    return "\n".join([*texts, _CHOICE.format(name=form.name, choice=choice, calls=calls, **words)])


def _call(form: FixedPoint, name: str) -> str:
    """Return the statement that computes the sums of `count` columns."""
    if form.columns == form.at_once:
        return f"fixed_sums_{name}(blocks, w, count, scales, pitch, depth, sums);"
    return f"""
        for (int64_t c = 0; c < count; c += {form.at_once})
            fixed_sums_{name}(blocks, (const char *)w + c * (depth * {form.bits} / 8),
                count - c < {form.at_once} ? count - c : {form.at_once}, scales + c * pitch, pitch, depth, sums + c);"""


def _of_terms(form: FixedPoint, terms: int, words: Mapping[str, object]) -> Sequence[str]:
    """Return the functions for rows that are the sums of so many terms."""
    single = is_single(form.using, form.bits, terms)
    low = "__builtin_convertvector(low, stream_float)"
    sums = _SUMS.format(sum=low if single else form.using.joined, total=form.using.total, **words)
    products = products_text(
        form.using, bits=form.bits, signed=form.signed, terms=terms, added=bool(form.added), words=words
    )
    return products, _arranged(form, single, words), sums


def _arranged(form: FixedPoint, coarse: bool, words: Mapping[str, object]) -> str:
    third = "" if coarse else _THIRD_TERM.format(**words)
    terms = (_BYTE_TERMS if form.bytewise else _SHORT_TERMS).format(third=third, **words)
    return _ARRANGED.format(
        order=(_EVEN_AND_ODD if form.halves == 2 else _IN_ORDER).format(
            first=int(form.high), second=int(not form.high), **words
        ),
        terms=terms,
        added=_ADDED.format(one=form.one, **words) if form.added else "",
        digits=COARSE_DIGITS if coarse else 22,
        above=hex(ABOVE) if coarse else 0,
        rounding=(_COARSE.format(lost=LOST, **words) if coarse else _FINE.format(**words)),
        **words,
    )
