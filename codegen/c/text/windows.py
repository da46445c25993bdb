"""Defines how lanes gather elements that are near to each other: as a permutation of two full vectors.

A gather instruction reads its elements one by one.  The positions of a block of lanes are known before the loops, as a
table; where they are within one vector or two, these are loaded and permuted instead, which takes a third of the time
(measured: docs/performance.md, `windows`).
"""

from __future__ import annotations

WINDOW_LANES = 16
"""The most positions of one window."""

FIND = """\
enum {
#ifdef __AVX512F__
    WINDOW = 16  // elements of four bytes in one vector
#else
    WINDOW = 8
#endif
};
// For each block of `lanes` positions: where two vectors begin that hold them, or INT64_MIN if none do, and which of
// their elements are at them; the two are one where that is enough for all blocks.  Between the first and the last
// position of all is memory that may be read.
static void find_windows(const int64_t *place, int64_t count, int64_t lanes, int64_t *begin, int32_t *order) {
    int64_t least = place[0], most = place[0];
    for (int64_t i = 1; i < count; i++) least = imin(least, place[i]), most = imax(most, place[i]);
    int64_t widest = 0;
    for (int64_t first = 0; first < count; first += lanes) {
        int64_t low = place[first], high = place[first];
        const int64_t end = imin(first + lanes, count);
        for (int64_t i = first; i < end; i++) low = imin(low, place[i]), high = imax(high, place[i]);
        widest = imax(widest, high - low);
    }
    const int64_t room = most - least + 1 - lanes;
    const int64_t second = imin(widest < lanes ? 0 : lanes, room);  // where the second vector begins in a window
    begin[0] = second;
    for (int64_t block = 0; block * lanes < count; block++) {
        const int64_t first = block * lanes, end = imin(first + lanes, count);
        int64_t low = place[first], high = place[first];
        for (int64_t i = first; i < end; i++) low = imin(low, place[i]), high = imax(high, place[i]);
        low = imin(low, most + 1 - lanes - second);
        const _Bool near = second >= 0 && high - low < lanes + second;
        begin[1 + block] = near ? low : INT64_MIN;
        for (int64_t i = first; i < first + lanes; i++) {
            const int64_t at = near && i < end ? place[i] - low : 0;
            order[i] = (int32_t)(at < lanes ? at : at + lanes - second);
        }
    }
}"""

_GATHER = """\
// Writes whole vectors, past `end` too.
static void gather_{T}(
    const {T} *from, const int64_t *place, const int64_t *begin, const int32_t *order,
    int64_t start, int64_t end, {T} *to
) {{
#if {vectors} && !defined(__clang__)
    typedef {T} vector __attribute__((vector_size({lanes} * sizeof({T})), aligned(sizeof({T}))));
    typedef {I} choice __attribute__((vector_size({lanes} * sizeof({T}))));
    typedef int32_t words __attribute__((vector_size({lanes} * 4), aligned(4)));
    for (int64_t i = start; i < end; i += {lanes}) {{
        const int64_t first = begin[1 + i / {lanes}];
        if (first != INT64_MIN) {{
            const vector left = *(const vector *)(from + first), right = *(const vector *)(from + first + begin[0]);
            const choice chosen = __builtin_convertvector(*(const words *)(order + i), choice);
            if (begin[0] == 0)
                *(vector *)(to + i - start) = __builtin_shuffle(left, chosen);
            else
                *(vector *)(to + i - start) = __builtin_shuffle(left, right, chosen);
        }} else {{
            for (int64_t k = i; k < imin(i + {lanes}, end); k++) to[k - start] = from[place[k]];
        }}
    }}
#else
    for (int64_t i = start; i < end; i++) to[i - start] = from[place[i]];
#endif
}}"""

_VECTORS = {
    1: "defined(__AVX512VBMI__) && defined(__AVX512VL__)",
    2: "defined(__AVX512BW__) && defined(__AVX512VL__)",
    4: "defined(__AVX2__)",
    8: "defined(__AVX512F__)",
}
"""Bytes of an element → the condition that one instruction permutes two vectors of them."""

_TYPES = {
    **dict(zip(("uint8_t", "uint16_t", "float", "double"), (1, 2, 4, 8), strict=True)),
    **{f"int{8 * size}_t": size for size in (1, 2, 4, 8)},
}
"""Type in memory → its bytes."""


_LANES = {1: ("16", 16), 2: ("16", 16), 4: ("WINDOW", 8), 8: ("8", 8)}
"""Bytes of an element → how many are gathered at once, in C, and at least."""


def lanes_of(held: str) -> tuple[str, int]:
    """Return how many elements of a C type are gathered at once, in C, and the least this can be."""
    return _LANES[_TYPES[held]]


def definitions() -> dict[str, str]:
    """Return function → its definition."""
    gathers = {
        f"gather_{T}": _GATHER.format(T=T, I=f"int{8 * size}_t", lanes=lanes_of(T)[0], vectors=_VECTORS[size])
        for T, size in _TYPES.items()
    }
    return {"find_windows": FIND, **gathers}
