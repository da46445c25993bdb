"""Defines the functions that a kernel's text may call: small inline ones, and C library functions (`library`).

`prelude(text)` returns the definitions that `text` needs, with those they need in turn, in a fixed order.
Called names are read from the text, as a linker reads them, because definitions are text themselves and call each
other: a list of calls beside each would state them twice.
"""

from __future__ import annotations

import re
from itertools import product

from fusion.codegen.c.text.few_rows import ELEMENTS
from fusion.codegen.c.text.few_rows import definitions as few_rows
from fusion.codegen.c.text.fixed_point_products import FIXED_POINT_TYPES
from fusion.codegen.c.text.functions import FUNCTIONS
from fusion.codegen.c.text.library import C_FLOATS, LIBRARY, declarations
from fusion.codegen.c.text.products import FACTORS, definitions
from fusion.codegen.c.text.skinny import LANE_SUM
from fusion.codegen.c.text.turns import turns
from fusion.codegen.c.text.windows import definitions as windows

INLINE = "static inline __attribute__((always_inline))"

_BITS = """\
INLINE float bits_to_float(uint32_t u) { union { uint32_t u; float f; } word = {u}; return word.f; }
INLINE uint32_t float_to_bits(float f) { union { float f; uint32_t u; } word = {f}; return word.u; }"""

# Under -fno-trapping-math GCC replaces a conversion to an integer and back by one truncation, which gives -0.0 for -0.5
# and keeps NaN and numbers beyond the integers' range.  A barrier, which costs nothing, hides the pair from it.
_APART = """\
#if __GNUC__ >= 12 && !defined(__clang__)
#define APART(x) __builtin_assoc_barrier(x)
#else
#define APART(x) (x)
#endif"""

# The instruction of x86 converts NaN, and numbers beyond the integers' range, to the least integer, as eager does.  GCC
# folds such a constant to 0 or to the largest integer.  (Alone in a loop, a conversion takes 4 to 15% longer.)
_REACHED = """\
#if defined(__x86_64__) && defined(__clang__)  // to which a conversion of what no integer can be is undefined
#define REACHED(x, end, other, whole) (((x) >= -(end)) & ((x) < (end)) ? (whole) : (other))
#elif defined(__x86_64__)
#define REACHED(x, end, other, whole) ((x) < (end) ? (whole) : (other))
#else
#define REACHED(x, end, other, whole) (whole)
#endif"""

# In lanes, clang begins a maximum at the least finite number: that of -inf alone would be finite.
_EXTREME = """\
#ifdef __clang__
#pragma omp declare reduction(max_of_lanes : float, double : omp_out = omp_in > omp_out ? omp_in : omp_out) \\
    initializer(omp_priv = -__builtin_inff())
#pragma omp declare reduction(min_of_lanes : float, double : omp_out = omp_in < omp_out ? omp_in : omp_out) \\
    initializer(omp_priv = __builtin_inff())
#define EXTREME(op) op##_of_lanes
#else
#define EXTREME(op) op
#endif"""

_FROM_BF16 = "INLINE float from_bf16(uint16_t x) { return bits_to_float((uint32_t)x << 16); }"

_TO_BF16 = """\
INLINE uint16_t to_bf16(float x) {  // to nearest, ties to even
    const uint32_t u = float_to_bits(x);
    return (uint16_t)(x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}"""

# The exponent of a half, moved to where a float has its own, is 112 too small: one multiplication repairs it and turns
# subnormal halves into normal floats.
_FROM_HALF = """\
INLINE float from_half(uint16_t x) {
    const uint32_t u = (uint32_t)(int16_t)x << 13 & 0x8fffe000;
    const uint32_t value = float_to_bits(bits_to_float(u) * 0x1p112f);
    return bits_to_float((u & 0x0f800000) == 0x0f800000 ? value | 0x7f800000 : value);  // infinity and NaN
}"""

# Adding 2^13 times a number's power of two rounds its significand to the eleven bits of a half and leaves them below.
_TO_HALF = """\
INLINE uint16_t to_half(float x) {  // to nearest, ties to even
    uint32_t u = float_to_bits(x) & 0x7fffffff;
    u = u < 0x47800000 ? u : 0x47800000;  // 2^16 stands for all that is too large
    const uint32_t exponent = (u & 0x7f800000) > 0x38800000 ? u & 0x7f800000 : 0x38800000;
    const uint32_t unit = exponent + (13 << 23);
    const uint32_t significand = float_to_bits(bits_to_float(unit) + bits_to_float(u)) - unit;
    const uint32_t magnitude = x != x ? 0x7e00 : (exponent >> 13) + significand - (113 << 10);
    return (uint16_t)(float_to_bits(x) >> 16 & 0x8000 | magnitude);
}"""

# For blocks: in lanes, a conversion is written as above.
_HALVES = """\
#if defined(__AVX512F__) && !defined(__clang__)
typedef float float_halves __attribute__((vector_size(64), aligned(4)));
typedef short short_halves __attribute__((vector_size(32), aligned(2)));
#define HALVES 16
#define WIDENED(x) __builtin_ia32_vcvtph2ps512_mask(x, (float_halves){0}, -1, 4)
#define NARROWED(x) __builtin_ia32_vcvtps2ph512_mask(x, 0, (short_halves){0}, -1)
#elif defined(__F16C__) && !defined(__clang__)
typedef float float_halves __attribute__((vector_size(32), aligned(4)));
typedef short short_halves __attribute__((vector_size(16), aligned(2)));
#define HALVES 8
#define WIDENED(x) __builtin_ia32_vcvtph2ps256(x)
#define NARROWED(x) __builtin_ia32_vcvtps2ph256(x, 0)
#endif
static void widen_halves(const uint16_t *restrict from, float *restrict to, int64_t count) {
    int64_t i = 0;
#ifdef HALVES
    for (; i + HALVES <= count; i += HALVES) *(float_halves *)(to + i) = WIDENED(*(short_halves *)(from + i));
    if (i > 0 && i < count) {  // some of the last ones once more
        i = count;
        *(float_halves *)(to + i - HALVES) = WIDENED(*(short_halves *)(from + i - HALVES));
    }
#endif
    for (; i < count; i++) to[i] = from_half(from[i]);
}
static void narrow_halves(const float *restrict from, uint16_t *restrict to, int64_t count) {
    int64_t i = 0;
#ifdef HALVES
    for (; i + HALVES <= count; i += HALVES) *(short_halves *)(to + i) = NARROWED(*(float_halves *)(from + i));
    if (i > 0 && i < count) {
        i = count;
        *(short_halves *)(to + i - HALVES) = NARROWED(*(float_halves *)(from + i - HALVES));
    }
#endif
    for (; i < count; i++) to[i] = to_half(from[i]);
}"""

_PHILOX = """\
INLINE void philox(int64_t seed, uint64_t counter, uint32_t *words) {  // Philox4x32-10
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
    #pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53 * c0, b = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0, c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1, c3 = (uint32_t)a;
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}
INLINE float unit_interval(uint32_t word) {
    return (float)(int32_t)(word >> 31 ? ~word : word) * 4.6566127342e-10f;
}"""

_RANDOM_UNIFORM = """\
INLINE float random_uniform(int64_t seed, int64_t offset) {  // a word for each of four neighbours
    uint32_t words[4];
    philox(seed, (uint64_t)(offset >> 2), words);
    const uint32_t place = (uint32_t)offset & 3, even = place & 2 ? words[2] : words[0];
    return unit_interval(place & 1 ? (place & 2 ? words[3] : words[1]) : even);
}"""

_RANDOM_NORMAL = """\
INLINE float random_normal(int64_t seed, int64_t offset) {  // Box-Muller, two words for each of two neighbours
    uint32_t words[4];
    philox(seed, (uint64_t)(offset >> 1), words);
    const uint32_t place = (uint32_t)offset & 1, first = place ? words[2] : words[0];
    const float u = unit_interval(first), angle = 6.2831855f * unit_interval(place ? words[3] : words[1]);
    return __builtin_sqrtf(-2.0f * logf(u > 1.0e-7f ? u : 1.0e-7f)) * cosf(angle);
}"""

# x86 has an instruction for the choice, which gives b where one is NaN.  For `(a > b) | (a != a)` GCC has branches
# outside of lanes, and in lanes two comparisons that wait for the result before (a pool of 3 × 3: 2.3 times as slow).
_EXTREME_OF_FLOATS = """\
    const {T} extreme = a {better} b ? a : b;
    return a != a ? a : extreme;"""

_TAKES = """\
INLINE _Bool {op}_takes_{T}({T} a, int64_t i, {T} best, int64_t at) {{  // NaN before any number, then the lowest index
    return (a {better} best) | ((a == best) & (i < at)) | ((a != a) & ((best == best) | (i < at)));
}}"""
_TAKES_INTEGER = """\
INLINE _Bool {op}_takes_{T}({T} a, int64_t i, {T} best, int64_t at) {{
    return (a {better} best) | ((a == best) & (i < at));
}}"""

# Of candidates with their positions, whose halves are compared until one is left; `count` is a power of two.
_TAKEN = """\
INLINE int64_t {op}_of_{T}({T} *best, int64_t *at, int count) {{
    #pragma GCC unroll 7
    for (int half = count / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) {{
            const _Bool takes = {op}_takes_{T}(best[l + half], at[l + half], best[l], at[l]);
            best[l] = takes ? best[l + half] : best[l];
            at[l] = takes ? at[l + half] : at[l];
        }}
    return at[0];
}}"""

_SIGNED = {"int8_t": "uint8_t", "int16_t": "uint16_t", "int32_t": "uint32_t", "int64_t": "uint64_t"}
_INTEGERS = {**_SIGNED, "uint8_t": "uint8_t"}

# Division by zero would end the process; eager raises, so no program relies on the value given here.
_INTEGER_TEMPLATES = {
    "truncdiv": "return b == 0 ? 0 : b == ({T})-1 ? ({T}){minus_a} : ({T})(a / b);",
    "fmod": "return b == 0 || b == ({T})-1 ? {rest} : ({T})(a % b);",
    "floordiv": """\
    const {T} quotient = truncdiv_{T}(a, b);
    return (({T})(a - quotient * b) != 0) & ((a < 0) != (b < 0)) & (b != 0) ? ({T})(quotient - 1) : quotient;""",
    "remainder": """\
    const {T} rest = fmod_{T}(a, b);
    return (rest != 0) & ((rest < 0) != (b < 0)) ? ({T})(rest + b) : rest;""",
    "pow": """\
    if (b < 0) return a == 1 ? 1 : a == ({T})-1 ? (b & 1 ? a : 1) : 0;
    {T} result = 1;
    for (; b > 0; b >>= 1, a = ({T})(a * a))
        if (b & 1) result = ({T})(result * a);
    return result;""",
    "shl": "return b < 0 || b >= {bits} ? 0 : ({T})(({U})a << b);",
    "shr": "return ({T})(a >> (b < 0 || b >= {value_bits} ? {value_bits} : b));",
}

# A quotient leaves a rest that needs no more bits than a and b have, and that one multiplication and addition gives
# exactly.  Of doubles that holds while the quotient is a whole number that a double can be.  Of floats, in doubles,
# each quotient of 50 bits leaves such a rest of the next; the largest has 277.
_FMOD = """\
INLINE float fmod_float(float a, float b) {
#ifdef __FMA__
    const double divisor = __builtin_fabsf(b), inverse = 1.0 / divisor;
    double rest = __builtin_fabsf(a);
    #pragma GCC unroll 6
    for (int bits = 0; bits < 300; bits += 50)
        rest = __builtin_fma(-__builtin_trunc(rest * inverse), divisor, rest);
    rest += rest < 0.0 ? divisor : 0.0;
    rest -= rest >= divisor ? divisor : 0.0;
    return __builtin_fabsf(a) < __builtin_fabsf(b) ? a : __builtin_copysignf((float)rest, a);
#else
    return fmodf(a, b);
#endif
}
INLINE double fmod_double(double a, double b) {
#ifdef __FMA__
    const double size = __builtin_fabs(a), divisor = __builtin_fabs(b), quotient = __builtin_trunc(size / divisor);
    if (size < divisor) return a;
    if (quotient < 0x1p53) {
        const double rest = __builtin_fma(-quotient, divisor, size);
        return __builtin_copysign(rest < 0.0 ? rest + divisor : rest, a);
    }
#endif
    return fmod(a, b);
}"""

_FLOAT_TEMPLATES = {
    "remainder": """\
    const {T} rest = fmod_{T}(a, b);
    return (rest != 0) & ((rest < 0) != (b < 0)) ? rest + b : rest;""",
    "floordiv": """\
    if (b == 0) return a / b;
    const {T} rest = fmod_{T}(a, b);
    const {T} quotient = (a - rest) / b - ((rest != 0) & ((rest < 0) != (b < 0)));
    if (quotient == 0) return __builtin_copysign{f}(0, a / b);
    const {T} floor = __builtin_floor{f}(quotient);
    return quotient - floor > ({T})0.5 ? floor + 1 : floor;""",
}


# The shares of a fold, whose halves are combined until one is left; `count` is a power of two.  None of them is NaN.
_OF_SHARES = """\
INLINE {T} {op}_of_{T}({T} *shares, int count) {{
    #pragma GCC unroll 7
    for (int half = count / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) shares[l] = {combined};
    return shares[0];
}}"""
_COMBINED = {
    "sum": "shares[l] + shares[l + half]",
    "prod": "shares[l] * shares[l + half]",
    "any": "shares[l] | shares[l + half]",
    "all": "shares[l] & shares[l + half]",
    "max": "shares[l + half] > shares[l] ? shares[l + half] : shares[l]",
    "min": "shares[l + half] < shares[l] ? shares[l + half] : shares[l]",
}


def _function(name: str, T: str, body: str, parameters: str = "{T} a, {T} b", **words: str) -> str:
    filled = body.format(T=T, **words)
    if filled.startswith("return") and "\n" not in filled:
        return f"INLINE {T} {name}_{T}({parameters.format(T=T)}) {{ {filled} }}"
    return f"INLINE {T} {name}_{T}({parameters.format(T=T)}) {{\n    {filled.strip()}\n}}"


def _of_integers(T: str) -> dict[str, str]:
    """Return integer arithmetic that is undefined in C, or rounds differently."""
    bits, signed = int(re.sub(r"\D", "", T)), T in _SIGNED
    words = {
        "U": _INTEGERS[T],
        "bits": str(bits),
        "value_bits": str(bits - signed),
        "minus_a": "-a" if signed else "(a == b)",  # for an unsigned type the greatest value is not minus one
        "rest": "0" if signed else "(b == 0 || a == b ? 0 : a)",
    }
    functions = {f"{name}_{T}": _function(name, T, text, **words) for name, text in _INTEGER_TEMPLATES.items()}
    return {**functions, f"abs_{T}": _function("abs", T, "return ({T})(a < 0 ? -a : a);", "{T} a")}


def _of_floats(T: str) -> dict[str, str]:
    """Return the quotients and remainders of floats."""
    return {f"{name}_{T}": _function(name, T, text, f=C_FLOATS[T]) for name, text in _FLOAT_TEMPLATES.items()}


def _of_order(T: str) -> dict[str, str]:
    """Return comparisons of two numbers: maximum and minimum, where NaN wins, the sign, and positions of extremes."""
    takes = _TAKES_INTEGER if T in _INTEGERS else _TAKES
    functions = {"sign": _function("sign", T, "return ({T})((a > 0) - (a < 0));", "{T} a")}
    for end, better in (("max", ">"), ("min", "<")):
        extreme = f"return a {better} b ? a : b;" if T in _INTEGERS else _EXTREME_OF_FLOATS
        functions[f"{end}imum"] = _function(f"{end}imum", T, extreme, better=better)
        functions[f"arg{end}_takes"] = takes.format(op=f"arg{end}", T=T, better=better)
        functions[f"arg{end}_of"] = _TAKEN.format(op=f"arg{end}", T=T)
    return {f"{name}_{T}": text for name, text in functions.items()}


def _of_shares(T: str) -> dict[str, str]:
    """Return the functions that combine the partial results of folds."""
    whole = _COMBINED if T in _INTEGERS else {op: text for op, text in _COMBINED.items() if op not in ("any", "all")}
    return {f"{op}_of_{T}": _OF_SHARES.format(op=op, T=T, combined=text.format(T=T)) for op, text in whole.items()}


_LANES = {"float": "int32_t", "double": "int64_t", "uint8_t": "int8_t", "uint16_t": "int16_t"}
"""Types that are no signed integers → the integers of the same width that number their lanes."""


def _definitions() -> dict[str, str]:
    types = (*_INTEGERS, *C_FLOATS)
    functions = {
        "APART": _APART,
        "REACHED": _REACHED,
        "EXTREME": _EXTREME,
        "bits_to_float": _BITS,
        "float_to_bits": _BITS,
        "from_bf16": _FROM_BF16,
        "to_bf16": _TO_BF16,
        "from_half": _FROM_HALF,
        "to_half": _TO_HALF,
        "widen_halves": _HALVES,
        "narrow_halves": _HALVES,
        "imin": "INLINE int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }",
        "imax": "INLINE int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }",
    }
    for T, whole in product(C_FLOATS, ("int32_t", "int64_t")):
        end, other = ("0x1p31f", "INT32_MIN") if whole == "int32_t" else ("0x1p63f", "INT64_MIN")
        text = f"return REACHED(x, {end}, {other}, APART(({whole})x));"
        functions[f"{T}_to_{whole}"] = f"INLINE {whole} {T}_to_{whole}({T} x) {{ {text} }}"
    functions["fmod_float"] = functions["fmod_double"] = _FMOD
    for of_type, those in ((_of_integers, _INTEGERS), (_of_order, types), (_of_floats, C_FLOATS), (_of_shares, types)):
        for T in those:
            functions |= of_type(T)
    functions |= FUNCTIONS
    functions["philox"] = functions["unit_interval"] = _PHILOX
    functions["random_uniform"] = _RANDOM_UNIFORM
    functions["random_normal"] = _RANDOM_NORMAL
    for T in (*types, "uint16_t"):
        functions |= turns(T, _LANES.get(T, T))
    fixed = dict.fromkeys(("byte_products", "short_products", "byte_dots"), FIXED_POINT_TYPES)
    return functions | windows() | definitions() | {"lane_sum": LANE_SUM} | few_rows() | fixed


INLINES: dict[str, str] = _definitions()
"""Inline function → its definition.  A definition comes after those it calls."""

_TYPES_OF = {
    **{
        f"{name}_{T}": ("product_types", f"vector_{T}")
        for T in FACTORS.values()
        for name in ("pack", "pack_apart", "multiply", "multiply_into")
    },
    **{f"{name}_{E}": ("product_types", "vector_float") for E in ELEMENTS.values() for name in ("dots", "sums")},
    "lane_sum": ("product_types",),
}
"""Functions → the definitions of the types that they use."""


def prelude(text: str) -> str:
    """Return all definitions that `text` needs.

    >>> print(prelude("y = to_bf16(x);").splitlines()[0])
    #include <stdint.h>
    """
    needed: dict[str, None] = {}
    pending = [text]
    while pending:
        for name in re.findall(r"\b(\w+)\(", pending.pop()):
            if name in needed:
                continue
            if name in INLINES:
                needed[name] = None
                pending.append(INLINES[name])
                needed.update(dict.fromkeys(_TYPES_OF.get(name, ())))
            elif name in LIBRARY:
                needed[name] = None
    inlines = list(dict.fromkeys(definition for name, definition in INLINES.items() if name in needed))
    lines = ["#include <stdint.h>", ""]
    if inlines:
        lines.append(f"#define INLINE {INLINE}")
    lines += [*declarations(needed), *inlines]
    return "\n".join([*lines, ""]) if len(lines) > 2 else "\n".join(lines)
