"""Emits products of few rows as C, which read their right factor once, where it lies in memory.

Bringing the right factor into panels (`products`) takes longer than multiplying it by a few rows, such as the queries
that share the keys and values of a head.

`dots_E(a, ra, b, cb, c, rc, rows, columns, depth, fresh)` adds a · b to c, or overwrites c if `fresh`.  Element (i, p)
of a is at `a[i*ra + p]`, element (p, j) of b at `b[j*cb + p]`: a sum for each column runs along memory.
`sums_E(a, ra, ca, b, rb, c, rc, rows, columns, depth, fresh)` reads `a[i*ra + p*ca]` and `b[p*rb + j]`: the columns lie
side by side.  E is the type of the elements of b in memory, all others are float.

A lane adds at most PART terms to one sum, as in `products`.
"""

from __future__ import annotations

import torch

from fusion.codegen.c.text.products import PART

ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16"}
"""Types of the elements of the right factor in memory."""

MOST_ROWS = 8
"""Rows up to which the right factor is read in place (measured: docs/performance.md, `MOST_ROWS`)."""

_TYPES = """\
typedef uint16_t loose_bf16 __attribute__((vector_size(PRODUCT_BYTES / 2), aligned(2)));
typedef uint32_t words_float __attribute__((vector_size(PRODUCT_BYTES)));
INLINE vector_float lanes_of_float(const float *x) { return *(const loose_float *)x; }
INLINE vector_float lanes_of_bf16(const uint16_t *x) {
    return (vector_float)(__builtin_convertvector(*(const loose_bf16 *)x, words_float) << 16);
}
INLINE float number_of_float(float x) { return x; }
INLINE float number_of_bf16(uint16_t x) { return bits_to_float((uint32_t)x << 16); }"""

_FOUR_SUMS = """\
INLINE void four_sums(const vector_float *x, float *to) {  // of the lanes of each
#ifdef __AVX__
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16), aligned(4)));
    eight each[4];
    #pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        union { vector_float whole; eight parts[PRODUCT_BYTES / 32]; } lanes = {x[k]};
        each[k] = lanes.parts[0];
        for (int n = 1; n < PRODUCT_BYTES / 32; n++) each[k] += lanes.parts[n];
    }
    const eight left = __builtin_ia32_haddps256(each[0], each[1]);
    const eight right = __builtin_ia32_haddps256(each[2], each[3]);
    union { eight whole; four parts[2]; } sums = {__builtin_ia32_haddps256(left, right)};
    *(four *)to = sums.parts[0] + sums.parts[1];
#else
    for (int k = 0; k < 4; k++) to[k] = lane_sum(x[k]);
#endif
}"""

_DOTS = """\
CONTRACTED static __attribute__((noinline)) void dots_{E}_{R}(const float *a, int64_t ra, const {M} *restrict b,
        int64_t cb, float *restrict c, int64_t rc, int64_t columns, int64_t depth, int fresh) {{
    const int64_t whole = depth / lanes_float * lanes_float;
    for (int64_t j = 0; j < columns; j += {C}) {{
        const {M} *at[{C}];
        vector_float sum[{C} * {R}];
        float total[{C} * {R}];
        #pragma GCC unroll 8
        for (int k = 0; k < {C}; k++) at[k] = b + (j + k < columns ? j + k : columns - 1) * cb;
        #pragma GCC unroll 8
        for (int s = 0; s < {C} * {R}; s++) sum[s] = (vector_float){{0}};
        for (int64_t p = 0; p < whole; p += lanes_float) {{
            vector_float left[{R}];
            #pragma GCC unroll 8
            for (int i = 0; i < {R}; i++) left[i] = *(const loose_float *)(a + i * ra + p);
            #pragma GCC unroll 8
            for (int k = 0; k < {C}; k++) {{
                const vector_float right = lanes_of_{E}(at[k] + p);
                #pragma GCC unroll 8
                for (int i = 0; i < {R}; i++) sum[k * {R} + i] += left[i] * right;
            }}
        }}
        #pragma GCC unroll 2
        for (int s = 0; s < {C} * {R}; s += 4) four_sums(sum + s, total + s);
        for (int64_t p = whole; p < depth; p++)
            for (int k = 0; k < {C}; k++)
                for (int i = 0; i < {R}; i++) total[k * {R} + i] += a[i * ra + p] * number_of_{E}(at[k][p]);
        const int count = columns - j < {C} ? columns - j : {C};
        for (int k = 0; k < count; k++) {{
            #pragma GCC unroll 8
            for (int i = 0; i < {R}; i++) {{
                float *const to = c + i * rc + j + k;
                *to = fresh ? total[k * {R} + i] : *to + total[k * {R} + i];
            }}
        }}
    }}
}}"""

_SUMS = """\
CONTRACTED static __attribute__((noinline)) void sums_{E}_{R}(const float *a, int64_t ra, int64_t ca,
        const {M} *restrict b, int64_t rb, float *restrict c, int64_t rc, int64_t columns, int64_t depth, int fresh) {{
    int64_t j = 0;
{vectors}    for (; j < columns; j++)
        for (int i = 0; i < {R}; i++) {{
            float total = 0;
            for (int64_t start = 0; start < depth; start += {part}) {{
                const int64_t end = depth - start < {part} ? depth : start + {part};
                float sum = 0;
                for (int64_t p = start; p < end; p++) sum += a[i * ra + p * ca] * number_of_{E}(b[p * rb + j]);
                total += sum;
            }}
            c[i * rc + j] = fresh ? total : c[i * rc + j] + total;
        }}
}}"""

_VECTORS = """\
    for (; j + {V} * lanes_float <= columns; j += {V} * lanes_float) {{
        vector_float total[{R}][{V}];
        #pragma GCC unroll 8
        for (int i = 0; i < {R}; i++) {{
            #pragma GCC unroll 4
            for (int v = 0; v < {V}; v++) total[i][v] = (vector_float){{0}};
        }}
        for (int64_t start = 0; start < depth; start += {part}) {{
            const int64_t end = depth - start < {part} ? depth : start + {part};
            vector_float sum[{R}][{V}];
            #pragma GCC unroll 8
            for (int i = 0; i < {R}; i++) {{
                #pragma GCC unroll 4
                for (int v = 0; v < {V}; v++) sum[i][v] = (vector_float){{0}};
            }}
            for (int64_t p = start; p < end; p++) {{
                vector_float right[{V}];
                #pragma GCC unroll 4
                for (int v = 0; v < {V}; v++) right[v] = lanes_of_{E}(b + p * rb + j + v * lanes_float);
                #pragma GCC unroll 8
                for (int i = 0; i < {R}; i++) {{
                    const float left = a[i * ra + p * ca];
                    #pragma GCC unroll 4
                    for (int v = 0; v < {V}; v++) sum[i][v] += left * right[v];
                }}
            }}
            #pragma GCC unroll 8
            for (int i = 0; i < {R}; i++) {{
                #pragma GCC unroll 4
                for (int v = 0; v < {V}; v++) total[i][v] += sum[i][v];
            }}
        }}
        #pragma GCC unroll 8
        for (int i = 0; i < {R}; i++) {{
            #pragma GCC unroll 4
            for (int v = 0; v < {V}; v++) {{
                loose_float *const to = (loose_float *)(c + i * rc + j + v * lanes_float);
                *to = fresh ? total[i][v] : *to + total[i][v];
            }}
        }}
    }}
"""

_ALL_DOTS = """\
static void dots_{E}(const float *a, int64_t ra, const {M} *b, int64_t cb, float *c, int64_t rc, int64_t rows,
        int64_t columns, int64_t depth, int fresh) {{
    int64_t i = 0;
    for (; rows - i >= 4; i += 4) dots_{E}_4(a + i * ra, ra, b, cb, c + i * rc, rc, columns, depth, fresh);
    for (; rows - i >= 2; i += 2) dots_{E}_2(a + i * ra, ra, b, cb, c + i * rc, rc, columns, depth, fresh);
    if (i < rows) dots_{E}_1(a + i * ra, ra, b, cb, c + i * rc, rc, columns, depth, fresh);
}}"""

_ALL_SUMS = """\
static void sums_{E}(const float *a, int64_t ra, int64_t ca, const {M} *b, int64_t rb, float *c, int64_t rc,
        int64_t rows, int64_t columns, int64_t depth, int fresh) {{
    int64_t i = 0;
    for (; rows - i >= 4; i += 4) sums_{E}_4(a + i * ra, ra, ca, b, rb, c + i * rc, rc, columns, depth, fresh);
    for (; rows - i >= 2; i += 2) sums_{E}_2(a + i * ra, ra, ca, b, rb, c + i * rc, rc, columns, depth, fresh);
    if (i < rows) sums_{E}_1(a + i * ra, ra, ca, b, rb, c + i * rc, rc, columns, depth, fresh);
}}"""


def definitions() -> dict[str, str]:
    """Return function → its definition, for the prelude; definitions come before their users."""
    functions = {f"lanes_of_{E}": _TYPES for E in ELEMENTS.values()} | {"four_sums": _FOUR_SUMS}
    for E in ELEMENTS.values():
        words: dict[str, object] = {"E": E, "M": "uint16_t" if E == "bf16" else E, "part": PART}
        dots = [_DOTS.format(R=R, C=8 // R, **words) for R in (4, 2, 1)]
        sums = [
            _SUMS.format(R=R, vectors="".join(_VECTORS.format(R=R, V=V, **words) for V in (8 // R, 1)), **words)
            for R in (4, 2, 1)
        ]
        functions[f"dots_{E}"] = "\n".join([*dots, _ALL_DOTS.format(**words)])
        functions[f"sums_{E}"] = "\n".join([*sums, _ALL_SUMS.format(**words)])
    return functions
