"""Emits C for skinny GEMMs that read each weight once: one row of weights against up to `MOST_SKINNY_ROWS` rows.

`sums_NAME(x, w, scales, depth, apart, sums)` computes, for each row m of x, sums[m * apart] =
Σ_k scale(k) · x[m, k] · value(w, k).
The weights are `depth` numbers in consecutive bits: bfloat16, float32, or integers of 8 or 4 bits plus a constant.
`arranged_NAME(x, depth, from, to, width)` brings the steps `from` to `to` of `depth` × rows floats into the order in
which the weights come out of a register.  Of one row times integers (`fixed_point`), the sums are those of
`columns_NAME(x, w, count, scales, pitch, depth, sums)`, for up to `columns` rows of weights, one behind the other,
whose scales are `pitch` floats apart.

A register is read as words of 32 bits.  Its lane l holds the weights P·l to P·l + P - 1 of a step, P being the number
of weights in a word, so a shift and a conversion give every P-th of them in all lanes.  Each lane belongs to one group,
if groups have at least P members: its scale is applied to its sum over the step, or over all steps of the group.

Where there are products of pairs of bfloat16 (AVX-512), and x holds such numbers, the integers are looked up as
bfloat16 by 4 bits at a time: integers of 8 bits are the sum of two, which share their factor.  The products are exact
and added in float32.  Numbers below 2^-126 count as zero there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fusion.codegen.c.text.fixed_point import EVERY_INSTRUCTIONS, FLOAT_COLUMNS, FixedPoint, fixed_point_text

MOST_SKINNY_ROWS = 16
"""Rows whose sums stay in registers."""

RUN = 64
"""The most terms that a lane adds to one sum, before that is added to another: errors of equal terms add up."""

SUMS = 8
"""Sums that hide the latency of multiply-adds."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The form of the weights, and of the rows they multiply.

    Attributes:
        bits: of a weight: 32 (float32), 16 (bfloat16), 8 or 4 (integers).
        signed: integers have a sign.
        high: of two weights in a byte, the first is in the high bits.
        offset: is added to each integer.
        rows: of the other factor.
        group: the number of weights with the same scale; None: the sums are not scaled.
        pairs: how many bfloat16 numbers add up to a number of the other factor, up to 2^-16 of it; 0: use floats.
        columns: the most rows of weights, one behind the other, that are multiplied in turn (in fixed point).
        coarse: the sums are only read as bfloat16 (in fixed point).
    """

    bits: int
    rows: int
    signed: bool = False
    high: bool = False
    offset: int = 0
    group: int | None = None
    pairs: int = 0
    columns: int = 1
    coarse: bool = False

    @property
    def name(self) -> str:
        """An identifier that differs for different streams."""
        kind = {32: "float", 16: "bf16"}.get(self.bits, f"{'' if self.signed else 'u'}int{self.bits}")
        offset = f"_{'minus' if self.offset < 0 else 'plus'}{abs(self.offset)}" if self.offset else ""
        order = "_high" if self.high else ""
        group = f"_by{self.group}" if self.group else ""
        columns = f"_by{self.columns}columns" if self.columns > 1 else ""
        columns += "_coarse" if self.coarse else ""
        return f"{kind}{order}{offset}{group}_{('floats', 'pairs', 'two_pairs')[self.pairs]}_{self.rows}{columns}"

    @property
    def per_word(self) -> int:
        """The number of weights in 32 bits."""
        return 32 // self.bits

    @property
    def fixed_point(self) -> FixedPoint | None:
        """The form in fixed point, of one row whose sums may lose as much as those of float32; None: there is none."""
        if self.rows > 1 or self.bits not in (4, 8) or not self.pairs:
            return None
        of = (self.bits, self.signed, self.high, self.offset, self.group, self.columns, self.coarse)
        return FixedPoint(self.name, f"{self.name}_floats", *of)

    def shift(self, number: int) -> int:
        """Return the position of a weight of a word, in bits from its lowest."""
        return self.bits * (number ^ 1 if self.high and self.bits == 4 else number)


LANE_SUM = """\
typedef float stream_float __attribute__((vector_size(PRODUCT_BYTES)));
typedef int32_t stream_int __attribute__((vector_size(PRODUCT_BYTES)));
typedef uint32_t stream_word __attribute__((vector_size(PRODUCT_BYTES)));
typedef uint32_t loose_word __attribute__((vector_size(PRODUCT_BYTES), aligned(1)));
typedef float loose_float __attribute__((vector_size(PRODUCT_BYTES), aligned(4)));
typedef uint16_t stream_half __attribute__((vector_size(PRODUCT_BYTES)));
enum { stream_lanes = PRODUCT_BYTES / 4 };
#ifdef __AVX512BF16__
INLINE stream_half looked_up(stream_half table, stream_half bits) {  // by the lowest 5 bits
    stream_half found;
    __asm__("vpermw %1, %2, %0" : "=v"(found) : "vm"(table), "v"(bits));
    return found;
}
#endif
INLINE float lane_sum(stream_float each) {
    float lanes[stream_lanes];
    *(loose_float *)lanes = each;
    #pragma GCC unroll 7
    for (int half = stream_lanes / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}"""


_ARRANGED = """\
static void arranged_{name}(const float *restrict x, int64_t depth, int64_t from, int64_t to,
        void *restrict arranged) {{
    for (int64_t step = from; step < to; step++)
        for (int m = 0; m < {rows}; m++) {{
            const float *row = x + m * depth + step * {per_word} * stream_lanes;
            const int64_t rest = depth - step * {per_word} * stream_lanes;
            float last[{per_word} * stream_lanes] = {{0}};
            if (rest < {per_word} * stream_lanes) row = __builtin_memcpy(last, row, rest * sizeof(float));
{pairs}            float *const at = (float *)arranged + (step * {rows} + m) * {per_word} * stream_lanes;
            for (int j = 0; j < {per_word}; j++)
                for (int l = 0; l < stream_lanes; l++) at[j * stream_lanes + l] = row[l * {per_word} + j];
{end}        }}
}}"""

_ARRANGED_PAIRS = """\
#ifdef __AVX512BF16__
            uint16_t *const at = (uint16_t *)arranged + (step * {rows} + m) * {pairs} * {per_word} * stream_lanes;
            for (int j = 0; j < {vectors}; j++)
                for (int l = 0; l < 2 * stream_lanes; l++) {{
                    const float number = row[l * {vectors} + j];
                    uint16_t *const to = at + j * {pairs} * 2 * stream_lanes + l;
{each}                }}
#else
"""

_ONE = "                    to[0] = (uint16_t)(float_to_bits(number) >> 16);\n"

_TWO = """\
                    const float most = bits_to_float(float_to_bits(number) & 0xffff0000);
                    const float rest = number - most;  // of an infinity, NaN
                    to[0] = number != number ? 0x7fc0 : (uint16_t)(float_to_bits(most) >> 16);
                    to[2 * stream_lanes] = rest != rest ? 0 : to_bf16(rest);
"""

_SUMS = """\
CONTRACTED static __attribute__((noinline)) void sums_{name}(const void *restrict x, const void *restrict w,
        const float *restrict scales, int64_t depth, int64_t apart, float *restrict sums) {{
    enum {{ weights = {per_word} * stream_lanes }};
    const int64_t whole = depth / weights, steps = (depth + weights - 1) / weights;
    const char *const from = w;
    stream_float total[{rows}];
    #pragma GCC unroll 16
    for (int m = 0; m < {rows}; m++) total[m] = (stream_float){{0}};
{before}    int64_t step = 0;
{body}    if (step < steps) {{
        uint8_t last[PRODUCT_BYTES] = {{0}};
        __builtin_memcpy(last, from + step * PRODUCT_BYTES, (depth - step * weights) * {bits} / 8);
        stream_float part[{rows}][1];
        #pragma GCC unroll 16
        for (int m = 0; m < {rows}; m++) part[m][0] = (stream_float){{0}};
        STEP_{name}(last, step, 0, 1);
{scaled}    }}
    #pragma GCC unroll 16
    for (int m = 0; m < {rows}; m++) sums[m * apart] = lane_sum(total[m]);
}}"""

_RUNS = """\
    while (step < whole) {{
        const int64_t end = whole - step < {run} ? whole : step + {run};
        stream_float part[{rows}][{parts}];
        #pragma GCC unroll 16
        for (int m = 0; m < {rows}; m++) {{
            #pragma GCC unroll 16
            for (int p = 0; p < {parts}; p++) part[m][p] = (stream_float){{0}};
        }}
        for (; step + {unroll} <= end; step += {unroll}) {{
            #pragma GCC unroll 8
            for (int u = 0; u < {unroll}; u++) __builtin_prefetch(from + (step + u) * PRODUCT_BYTES + {ahead});
            #pragma GCC unroll 8
            for (int u = 0; u < {unroll}; u++)
                STEP_{name}(from + (step + u) * PRODUCT_BYTES, step + u, u, {parts});
        }}
        for (; step < end; step++) STEP_{name}(from + step * PRODUCT_BYTES, step, 0, {parts});
        #pragma GCC unroll 16
        for (int m = 0; m < {rows}; m++) {{
            #pragma GCC unroll 16
            for (int p = 1; p < {parts}; p++) part[m][0] += part[m][p];
            total[m] += part[m][0];
        }}
    }}
"""

_GROUPS = """\
    #pragma GCC unroll 2
    for (; step < whole; step++) {{
        stream_float part[{rows}][1];
        __builtin_prefetch(from + step * PRODUCT_BYTES + {ahead});
        #pragma GCC unroll 16
        for (int m = 0; m < {rows}; m++) part[m][0] = (stream_float){{0}};
        STEP_{name}(from + step * PRODUCT_BYTES, step, 0, 1);
{scaled}    }}
"""

_FLOAT_STEP = """\
#define STEP_{name}(at, number, u, parts) do {{ \\
    const stream_word word = *(const loose_word *)(at); \\
    const float *const factors = (const float *)x + (number) * {rows} * weights; \\
{values}    }} while (0)"""

_FLOAT_VALUE = """\
    {{ \\
        const stream_float value = {value}; \\
        _Pragma("GCC unroll 16") \\
        for (int m = 0; m < {rows}; m++) \\
            part[m][({j} + {per_word} * (u)) % (parts)] += \\
                value * *(const stream_float *)(factors + (m * {per_word} + {j}) * stream_lanes); \\
    }} \\
"""

_PAIR_STEP = """\
#define STEP_{name}(at, number, u, parts) do {{ \\
    const stream_half word = (stream_half)*(const loose_word *)(at); \\
    const uint16_t *const factors = (const uint16_t *)x + (number) * {rows} * {pairs} * weights; \\
{values}    }} while (0)"""

_PAIR_VALUE = """\
    {{ \
        const stream_half value = {value}; \
        _Pragma("GCC unroll 16") \
        for (int m = 0; m < {rows}; m++) {{ \
            _Pragma("GCC unroll 2") \
            for (int n = 0; n < {pairs}; n++) \
                __asm__("vdpbf16ps %2, %1, %0" : "+v"(part[m][({j} + {looked} * (u)) % (parts)]) : "v"(value), \
                    "m"(*(const stream_half *)(factors + \
                        ((m * {vectors} + {vector}) * {pairs} + n) * 2 * stream_lanes))); \
        }} \
    }} \
"""

_SCALES = """\
        {{  // lane l belongs to group l / {lanes} of these
            const stream_float scale = {scale};
            #pragma GCC unroll 16
            for (int m = 0; m < {rows}; m++) total[m] += scale * part[m][0];
        }}
"""

_PLAIN = """\
        #pragma GCC unroll 16
        for (int m = 0; m < {rows}; m++) total[m] += part[m][0];
"""

AHEAD = 2048
"""Bytes before their use at which weights are fetched: a processor's own prefetching ends at each page, and a core
reads about as much in the time that memory takes to answer (measured: docs/performance.md, `AHEAD`)."""


def _value(stream: Stream, number: int) -> str:
    """Return a weight of each word, as floats."""
    at, bits = stream.shift(number), stream.bits
    if bits == 32:
        return "(stream_float)word"
    if bits == 16:
        return "(stream_float)(word << 16)" if number == 0 else "(stream_float)(word & 0xffff0000)"
    if stream.signed:
        left = f"(stream_int)(word << {32 - bits - at})" if 32 - bits - at else "(stream_int)word"
        whole = f"{left} >> {32 - bits}"
    else:
        whole = f"(stream_int)(word >> {at} & {(1 << bits) - 1})"
    value = f"__builtin_convertvector({whole}, stream_float)"
    return f"{value} + {float(stream.offset)}f" if stream.offset else value


def _tables(stream: Stream) -> list[list[int]]:
    """Return the integers, as a sum over the 4 bits of a weight from the lowest on: bits → its term."""
    parts = stream.bits // 4
    tables = [[bits << 4 * part for bits in range(16)] for part in range(parts)]
    if stream.signed:
        tables[-1] = [term - (1 << stream.bits if term >> (stream.bits - 1) & 1 else 0) for term in tables[-1]]
    tables[-1] = [term + stream.offset for term in tables[-1]]
    return tables


def _bf16(number: int) -> int:
    """Return the bits of an integer as bfloat16, which holds it.

    >>> hex(_bf16(1)), hex(_bf16(-8))
    ('0x3f80', '0xc100')
    """
    (bits,) = struct.unpack("<I", struct.pack("<f", float(number)))
    assert bits & 0xFFFF == 0, f"bfloat16 does not hold {number}"
    return int(bits) >> 16


def holds_pairs(stream: Stream) -> bool:
    """Return whether bfloat16 holds the weights, or all terms of the tables."""
    return stream.bits == 16 or (stream.bits < 16 and -256 <= stream.offset <= 128)


def _lookups(stream: Stream) -> list[tuple[int, int, int]]:
    """Return for each lookup of a word of 16 bits: its shift, its table, and the number of the weight in the word."""
    tables = stream.bits // 4
    return [
        (stream.shift(number) + 4 * table, table, number)
        for number in range(16 // stream.bits)
        for table in range(tables)
    ]


@lru_cache(maxsize=64)
def stream_text(stream: Stream) -> str:
    """Return the definitions of `arranged_NAME` and `sums_NAME` for a form of weights."""
    fixed = stream.fixed_point
    words: dict[str, object] = {
        "name": stream.name if fixed is None else fixed.floats,
        "rows": stream.rows,
        "bits": stream.bits,
        "per_word": stream.per_word,
        "vectors": max(1, stream.per_word // 2),
    }
    floats = _float_sums(stream, words)
    if (
        fixed is not None or not stream.pairs
    ):  # what does not fit in fixed point, such as an infinity, is no pair either
        plain = _ARRANGED.format(pairs="", end="", **words), floats
        return "\n".join(plain if fixed is None else [*plain, *_fixed_sums(stream, fixed)])
    each = _TWO if stream.pairs == 2 else _ONE
    arranged_pairs = _ARRANGED_PAIRS.format(pairs=stream.pairs, each=each, **words)
    arranged = _ARRANGED.format(pairs=arranged_pairs, end="#endif\n", **words)
    return "\n".join([arranged, "#ifdef __AVX512BF16__", _pair_sums(stream, words), "#else", floats, "#endif"])


def _fixed_sums(stream: Stream, fixed: FixedPoint) -> Sequence[str]:
    """Return the functions of a row in fixed point where the processor has its instructions, elsewhere as floats."""
    before, scale = "", "(stream_float){0} + 1.0f"
    if stream.group is not None:
        lines, scale = _scale(stream, stream.group)
        before = "".join(f"    {line}\n" for line in lines)
    floats = FLOAT_COLUMNS.format(name=fixed.name, floats=fixed.floats, bits=fixed.bits)
    texts = list[str]()
    for using in EVERY_INSTRUCTIONS:
        texts.append(f"#{'elif' if texts else 'if'} {using.condition}")
        texts.append(fixed_point_text(replace(fixed, using=using), before, scale, AHEAD))
    return *texts, "#else", floats, "#endif"


def _scale(stream: Stream, group: int) -> tuple[list[str], str]:
    """Return lines, and the scale of each lane of a step; lane l belongs to group l / lanes of these."""
    lanes = group // stream.per_word
    before = ["stream_int member;", f"for (int l = 0; l < stream_lanes; l++) member[l] = l / {lanes};"]
    several = f"__builtin_shuffle(*(const loose_float *)(scales + step * weights / {group}), member)"
    one = f"scales[step * weights / {group}] - (stream_float){{0}}"
    return before, f"{group} < weights ? {several} : {one}"


def _float_sums(stream: Stream, words: Mapping[str, object]) -> str:
    values = "".join(
        _FLOAT_VALUE.format(j=number, value=_value(stream, number), **words) for number in range(stream.per_word)
    )
    step = _FLOAT_STEP.format(values=values, **words)
    return f"{step}\n{_sums(stream, words, stream.per_word, [])}"


def _pair_sums(stream: Stream, words: Mapping[str, object]) -> str:
    lookups = _lookups(stream) if stream.bits < 16 else [(0, 0, 0)]
    values = ""
    for number, (shift, table, vector) in enumerate(lookups):
        value = "word" if stream.bits == 16 else f"looked_up(table{table}, word >> {shift})"
        values += _PAIR_VALUE.format(
            pairs=stream.pairs, j=number, value=value, vector=vector, looked=len(lookups), **words
        )
    tables = []
    for number, terms in enumerate(_tables(stream) if stream.bits < 16 else []):
        numbers = ", ".join(f"{_bf16(term):#x}" for term in 2 * terms)  # an index has 5 bits
        tables.append(f"const stream_half table{number} = {{{numbers}}};")
    step = _PAIR_STEP.format(pairs=stream.pairs, values=values, **words)
    return f"{step}\n{_sums(stream, words, len(lookups), tables)}"


def _sums(stream: Stream, words: Mapping[str, object], terms: int, tables: Sequence[str]) -> str:
    """Return the function; `terms`: vectors that a step adds to the sums of a row."""
    wanted = max(1, SUMS // stream.rows)
    unroll = max(1, wanted // terms)
    before, scaled = [*tables], _PLAIN.format(**words)
    parts = min(wanted, terms * unroll)
    body = _RUNS.format(run=RUN * parts // terms, parts=parts, unroll=unroll, ahead=AHEAD, **words)
    if stream.group is not None:
        lines, scale = _scale(stream, stream.group)
        before += lines
        scaled = _SCALES.format(lanes=stream.group // stream.per_word, scale=scale, **words)
        body = _GROUPS.format(ahead=AHEAD, scaled=scaled, **words)
    return _SUMS.format(before="".join(f"    {line}\n" for line in before), body=body, scaled=scaled, **words)
