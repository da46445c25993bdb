"""Emits the transposition of blocks of numbers as C, through registers where GCC has shuffles of vectors.

`turn_T(from, stride, rows, columns, to, step)` transposes up to 16 × 16 numbers, `transpose_T` into an array,
and `turn_all_T` a matrix.
"""

from __future__ import annotations

# A 16 × 16 block goes through registers: four rounds of interleaving rows i and i + 8 transpose it.  Registers of eight
# numbers are interleaved within their halves, twice, and exchange halves then.
_EIGHTS = """\
#elif defined(__AVX__) && !defined(__clang__)
    typedef {T} row __attribute__((vector_size(8 * sizeof({T})), aligned(sizeof({T}))));
    typedef {I} order __attribute__((vector_size(8 * sizeof({T}))));
    if (rows == 16 && columns == 16) {{
        const order ones = {{0, 8, 1, 9, 4, 12, 5, 13}}, twos = {{0, 1, 8, 9, 4, 5, 12, 13}};
        const order first = {{0, 1, 2, 3, 8, 9, 10, 11}}, last = first + 4;
        for (int half = 0; half < 4; half++) {{
            const {T} *const block = from + half / 2 * 8 * stride + half % 2 * 8;
            {T} *const turned = to + half % 2 * 8 * step + half / 2 * 8;
            row r[3][8];
            #pragma GCC unroll 8
            for (int i = 0; i < 8; i++) r[0][i] = *(const row *)(block + i * stride);
            #pragma GCC unroll 4
            for (int i = 0; i < 8; i += 2) {{
                r[1][i] = __builtin_shuffle(r[0][i], r[0][i + 1], ones);
                r[1][i + 1] = __builtin_shuffle(r[0][i], r[0][i + 1], ones + 2);
            }}
            #pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {{
                const int at = i / 2 * 4 + i % 2, pair = at + i % 2;
                r[2][pair] = __builtin_shuffle(r[1][at], r[1][at + 2], twos);
                r[2][pair + 1] = __builtin_shuffle(r[1][at], r[1][at + 2], twos + 2);
            }}
            #pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {{
                *(row *)(turned + i * step) = __builtin_shuffle(r[2][i], r[2][i + 4], first);
                *(row *)(turned + (i + 4) * step) = __builtin_shuffle(r[2][i], r[2][i + 4], last);
            }}
        }}
        return;
    }}
"""
_TURN = """\
INLINE void turn_{T}(const {T} *from, int64_t stride, int64_t rows, int64_t columns, {T} *to, int64_t step) {{
#if defined(__AVX512BW__) && !defined(__clang__)
    typedef {T} row __attribute__((vector_size(16 * sizeof({T})), aligned(sizeof({T}))));
    typedef {I} order __attribute__((vector_size(16 * sizeof({T}))));
    if (rows == 16 && columns == 16) {{
        const order low = {{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}}, high = low + 8;
        row r[5][16];
        #pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[0][i] = *(const row *)(from + i * stride);
        #pragma GCC unroll 4
        for (int round = 0; round < 4; round++) {{
            #pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {{
                r[round + 1][2 * i] = __builtin_shuffle(r[round][i], r[round][i + 8], low);
                r[round + 1][2 * i + 1] = __builtin_shuffle(r[round][i], r[round][i + 8], high);
            }}
        }}
        #pragma GCC unroll 16
        for (int i = 0; i < 16; i++) *(row *)(to + i * step) = r[4][i];
        return;
    }}
{eights}#endif
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) to[j * step + i] = from[i * stride + j];
}}"""
_TRANSPOSE = """\
INLINE void transpose_{T}(const {T} *from, int64_t stride, int64_t rows, int64_t columns, {T} to[16][16]) {{
    turn_{T}(from, stride, rows, columns, to[0], 16);
}}"""
_TURN_ALL = """\
static void turn_all_{T}(const {T} *from, int64_t stride, int64_t rows, int64_t columns, {T} *to, int64_t step) {{
    for (int64_t j = 0; j < columns; j += 16)
        for (int64_t i = 0; i < rows; i += 16)
            turn_{T}(from + i * stride + j, stride, imin(16, rows - i), imin(16, columns - j), to + j * step + i, step);
}}"""

_FOUR_BYTES = ("float", "int32_t")


def turns(T: str, lanes: str) -> dict[str, str]:
    """Return function → its definition, for numbers of C type `T`; integers of type `lanes` are as wide."""
    words = {"T": T, "I": lanes}
    eights = _EIGHTS.format(**words) if T in _FOUR_BYTES else ""
    texts = (("turn", _TURN), ("transpose", _TRANSPOSE), ("turn_all", _TURN_ALL))
    return {f"{name}_{T}": text.format(**words, eights=eights) for name, text in texts}
