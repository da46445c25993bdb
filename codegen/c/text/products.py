"""Emits the small GEMM of blocked kernels as C: operands that fit the caches, one thread.

`multiply_T(a, ra, ca, b, c, rc, rows, columns, depth, block, fresh)` adds a · b to c, or overwrites c if `fresh`.
Element (i, p) of a is at `a[i*ra + p*ca]`: its numbers are broadcast one by one, so any strides are allowed.  b was
packed by `pack_T(b, rb, cb, depth, columns, packed)` into panels, each with the columns of one register block, padded
with zeros.  c has rows of `rc` numbers and room for `rows` rounded up to `ROW_BLOCK` and `columns` rounded up to
`COLUMN_BLOCK`; `multiply_into_T` writes nothing beyond `rows` and `columns`.

`pack_apart_T(b, rows, columns, depth, count, packed)` packs a b whose element (p, j) is at `b[rows[p] + columns[j]]`.

The registers hold ROW_BLOCK × (up to four vectors) sums, which saturates two units of 512-bit multiply-adds; panels
share the columns evenly, since a narrow last one would be latency-bound.  Long sums are sums of partial sums, whose
rounding errors accumulate less: within a block of PART terms, at no measured cost (twice as many parts, 2 to 6%), and
of blocks.  Each call, and each `block` terms of a call, start from zero, so that a sum in one call has the bits of one
in a loop over such blocks.  A mean of 1,000 equal numbers is off by 8 units of 2⁻²⁴ then, by 4 in parts of half as many
terms, by 130 in a single one.
"""

from __future__ import annotations

import torch

ROW_BLOCK = 6
COLUMN_BLOCK = 16

PART = 64
"""The most terms that are summed sequentially: the roundings of equal terms are equal, and accumulate."""

_TYPES = """\
#if defined(__AVX512F__)
#define PRODUCT_BYTES 64
#elif defined(__AVX__)
#define PRODUCT_BYTES 32
#else
#define PRODUCT_BYTES 16
#endif
#ifdef __clang__
#pragma clang fp contract(fast)
#define CONTRACTED
#else
#define CONTRACTED __attribute__((optimize("fp-contract=fast")))
#endif
"""

_VECTORS = """\
typedef {T} vector_{T} __attribute__((vector_size(PRODUCT_BYTES)));
typedef {T} loose_{T} __attribute__((vector_size(PRODUCT_BYTES), aligned(sizeof({T}))));
enum {{ lanes_{T} = PRODUCT_BYTES / sizeof({T}), panel_{T} = PRODUCT_BYTES == 64 ? 16 / sizeof({T}) : 1 }};"""

_BLOCK = """\
CONTRACTED static __attribute__((noinline)) void product_{T}_{P}(const {T} *a, int64_t ra, int64_t ca,
        const {T} *restrict b, {T} *restrict c, int64_t rc, int64_t rows, int64_t depth, int fresh) {{
    enum {{ count = {P} * {columns} / lanes_{T} }};
    const {T} *row[{rows}];
    vector_{T} sum[{rows}][count], before[{rows}][count];
    #pragma GCC unroll 16
    for (int i = 0; i < {rows}; i++) row[i] = a + (i < rows ? i : rows - 1) * ra;
    for (int64_t start = 0;; start += {part}) {{
        const int64_t end = depth - start < {part} ? depth : start + {part};
        #pragma GCC unroll 16
        for (int i = 0; i < {rows}; i++) {{
            #pragma GCC unroll 16
            for (int v = 0; v < count; v++) sum[i][v] = (vector_{T}){{0}};
        }}
        for (int64_t p = start; p < end; p++, b += count * lanes_{T}) {{
            vector_{T} right[count];
            #pragma GCC unroll 16
            for (int v = 0; v < count; v++) right[v] = *(const loose_{T} *)(b + v * lanes_{T});
            #pragma GCC unroll 16
            for (int i = 0; i < {rows}; i++) {{
                const {T} left = row[i][p * ca];
                #pragma GCC unroll 16
                for (int v = 0; v < count; v++) sum[i][v] += left * right[v];
            }}
        }}
        if (start > 0) {{
            #pragma GCC unroll 16
            for (int i = 0; i < {rows}; i++) {{
                #pragma GCC unroll 16
                for (int v = 0; v < count; v++) sum[i][v] += before[i][v];
            }}
        }}
        if (end == depth) break;
        #pragma GCC unroll 16
        for (int i = 0; i < {rows}; i++) {{
            #pragma GCC unroll 16
            for (int v = 0; v < count; v++) before[i][v] = sum[i][v];
        }}
    }}
    #pragma GCC unroll 16
    for (int i = 0; i < {rows}; i++) {{
        #pragma GCC unroll 16
        for (int v = 0; v < count; v++) {{
            loose_{T} *const to = (loose_{T} *)(c + i * rc + v * lanes_{T});
            *to = fresh ? sum[i][v] : *to + sum[i][v];
        }}
    }}
}}"""

# `wide` is the number of 16-column groups of a panel.
_MULTIPLY = """\
static __attribute__((noinline)) void multiply_{into}{T}(const {T} *a, int64_t ra, int64_t ca, const {T} *b, {T} *c,
        int64_t rc, int64_t rows, int64_t columns, int64_t depth, int64_t block, int fresh) {{
    const int64_t groups = (columns + {columns} - 1) / {columns};
    for (int64_t left = (groups + panel_{T} - 1) / panel_{T}, done = 0; left > 0; left--) {{
        const int64_t wide = (groups - done + left - 1) / left;
        for (int64_t i = 0; i < rows; i += {rows}) {{
            {T} *to = c + i * rc + done * {columns};
{edge}            for (int64_t start = 0; start < depth; start += block) {{
                const {T} *from = a + i * ra + start * ca, *by = b + start * wide * {columns};
                const int64_t terms = depth - start < block ? depth - start : block;
                const int first = fresh && start == 0;
                if (wide == 1) product_{T}_1(from, ra, ca, by, {to}, rows - i, terms, first);
#if PRODUCT_BYTES == 64
                else if (wide == 2) product_{T}_2(from, ra, ca, by, {to}, rows - i, terms, first);
{wider}#endif
            }}
{copied}        }}
        b += depth * wide * {columns};
        done += wide;
    }}
}}"""

# Blocks that reach beyond the rows or columns of c are summed apart.
_EDGE = """\
            const int64_t beyond = columns - done * {columns}, width = wide * {columns};
            const int64_t held = beyond < width ? beyond : width;
            const int64_t high = rows - i < {rows} ? rows - i : {rows};
            const int whole = high == {rows} && held == width;
            {T} edge[{rows} * panel_{T} * {columns}], *const at = whole ? to : edge;
            const int64_t step = whole ? rc : width;
            if (!whole && !fresh)
                for (int64_t k = 0; k < high; k++)
                    for (int64_t j = 0; j < held; j++) edge[k * step + j] = to[k * rc + j];
"""

_COPIED = """\
            if (!whole)
                for (int64_t k = 0; k < high; k++)
                    for (int64_t j = 0; j < held; j++) to[k * rc + j] = edge[k * step + j];
"""

_WIDER = "                else if (wide == {P}) product_{T}_{P}(from, ra, ca, by, {to}, rows - i, terms, first);\n"

# 16 columns at a time, those of a panel side by side.
_PACK = """\
static __attribute__((noinline)) void {function}_{T}(const {T} *b, {places},
        int64_t depth, int64_t columns, {T} *restrict to) {{
    const int64_t groups = (columns + {columns} - 1) / {columns};
    for (int64_t left = (groups + panel_{T} - 1) / panel_{T}, done = 0; left > 0; left--) {{
        const int64_t wide = (groups - done + left - 1) / left, step = wide * {columns};
        for (int64_t g = 0; g < wide; g++) {{
            const int64_t first = (done + g) * {columns};
            const int64_t count = columns - first < {columns} ? columns - first : {columns};
            {T} *at = to + g * {columns};
{group}        }}
        to += depth * step;
        done += wide;
    }}
}}"""

# Rows of b are copied, columns of it are transposed 16 × 16 at a time.
_GROUP = """\
            const {T} *from = b + first * cb;
            int64_t p = 0;
            if (count == {columns} && cb == 1) {{
                for (; p < depth; p++)
                    for (int v = 0; v < {columns}; v += lanes_{T})
                        *(loose_{T} *)(at + p * step + v) = *(const loose_{T} *)(from + p * rb + v);
            }} else if (count == {columns} && rb == 1) {{
                for (; p + 16 <= depth; p += 16) turn_{T}(from + p, cb, 16, 16, at + p * step, step);
            }}
            for (; p < depth; p++)
                for (int64_t j = 0; j < {columns}; j++) at[p * step + j] = j < count ? from[p * rb + j * cb] : 0;
"""

# Element (p, j) of b is at `b[rows[p] + places[j]]`: neighbours among 16 columns are loaded together.
_GROUP_APART = """\
            const int64_t *const place = places + first;
{runs}            for (int64_t p = 0; p < depth; p++, at += step)
                for (int64_t j = 0; j < {columns}; j++) at[j] = j < count ? b[rows[p] + place[j]] : 0;
"""

_RUNS = """\
#if PRODUCT_BYTES == 64 && !defined(__clang__)
            typedef float lanes __attribute__((vector_size(64)));
            int64_t begin[16];
            uint16_t within[16];
            int runs = 0;
            for (int j = 0; j < count; j++) {
                if (j == 0 || place[j] != place[j - 1] + 1) begin[runs] = place[j] - j, within[runs++] = 0;
                within[runs - 1] |= 1 << j;
            }
            if (runs <= 3) {
                for (; runs < 3; runs++) begin[runs] = 0, within[runs] = 0;
                for (int64_t p = 0; p < depth; p++, at += step) {
                    const float *const row = b + rows[p];
                    lanes x = __builtin_ia32_loadups512_mask(row + begin[0], (lanes){0}, within[0]);
                    if (within[1]) x = __builtin_ia32_loadups512_mask(row + begin[1], x, within[1]);
                    if (within[2]) x = __builtin_ia32_loadups512_mask(row + begin[2], x, within[2]);
                    *(loose_float *)at = (vector_float)x;
                }
                continue;
            }
#endif
"""

FACTORS = {torch.float32: "float", torch.float64: "double", torch.int32: "int32_t"}
"""Types with a GEMM, in C."""


def definitions() -> dict[str, str]:
    """Return function → its definition, for the prelude; definitions come before their users."""
    functions: dict[str, str] = {}
    for T in FACTORS.values():
        panels = 2 if T == "double" else 4
        words: dict[str, object] = {"T": T, "rows": ROW_BLOCK, "columns": COLUMN_BLOCK, "part": PART}
        blocks = [_BLOCK.format(P=panel, **words) for panel in range(1, panels + 1)]
        wide = "\n".join(["#if PRODUCT_BYTES == 64", *blocks[1:], "#endif"])
        functions[f"vector_{T}"] = _VECTORS.format(**words)
        strides = {"function": "pack", "places": "int64_t rb, int64_t cb", "group": _GROUP.format(**words)}
        functions[f"pack_{T}"] = _PACK.format(**words, **strides)
        tile = {"into": "", "to": "to, rc", "edge": "", "copied": ""}
        exact = {"into": "into_", "to": "at, step", "edge": _EDGE.format(**words), "copied": _COPIED}
        texts = []
        for parts in (tile, exact):
            wider = "".join(_WIDER.format(P=panel, **words, **parts) for panel in range(3, panels + 1))
            texts.append(_MULTIPLY.format(wider=wider, **words, **parts))
        apart = _GROUP_APART.format(runs=_RUNS if T == "float" else "", **words)
        tables = {"function": "pack_apart", "places": "const int64_t *rows, const int64_t *places", "group": apart}
        functions[f"pack_apart_{T}"] = _PACK.format(**words, **tables)
        functions[f"product_{T}_1"] = "\n".join([blocks[0], wide])
        functions[f"multiply_{T}"], functions[f"multiply_into_{T}"] = texts
    return {"product_types": _TYPES.rstrip(), **functions}
