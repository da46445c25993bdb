"""Defines functions of floats in C, where C's libraries have none for lanes or a slower one.

Branches are selects, so that lanes compute both sides.  Each polynomial is a minimax fit, or interpolates at Chebyshev
nodes.
"""

from __future__ import annotations

_MADD = """\
#ifdef __FMA__
#define MADD __builtin_fmaf
#define MADD_DOUBLE __builtin_fma
#else
#define MADD(a, b, c) ((a) * (b) + (c))
#define MADD_DOUBLE(a, b, c) ((a) * (b) + (c))
#endif"""

# libmvec leaves its fast path for each exponential that underflows, as masks of -inf make it; this does not.
# e^x = 2^n e^r with |r| <= ln(2)/2; results are within 1 ulp.  Adding 1.5 2^23 rounds, and leaves n in the lowest bits,
# which go to the exponent.  A subnormal result is a count of 2^-149, which adding 2^23 rounds: a multiplication with a
# subnormal result takes a processor some 150 cycles, even where it underflows to 0.  As unsigned integers, negative
# numbers are the larger the smaller they are, and the minimum of two integers is one instruction.
_EXP = """\
INLINE float exp_float(float x) {
    const uint32_t given = float_to_bits(x);
    const float bounded = bits_to_float(given < 0xc2d00000 ? given : 0xc2d00000);  // -104 at least
    const float shifted = MADD(bounded, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;
    const float r = MADD(n, -1.42860682e-6f, MADD(n, -0.693145752f, bounded));
    float p = MADD(1.39508070e-3f, r, 8.36907327e-3f);
    p = MADD(p, r, 4.16662022e-2f);
    p = MADD(p, r, 1.66665167e-1f);
    p = MADD(p, r, 0.5f);
    p = MADD(p, r, 1.0f);
    p = MADD(p, r, 1.0f);
    const uint32_t bits = float_to_bits(p) + (float_to_bits(shifted) << 23);
    const uint32_t count = float_to_bits(bits_to_float(bits + (149u << 23)) + 0x1p23f) - 0x4b000000;
    const float result = bits_to_float((int32_t)bits < 0x800000 ? count : bits);
    return x <= 88.7228317f ? result : x + __builtin_inff();  // too large, or NaN
}"""

# 1 - e^-q with q = -log(erfc(t)); q/t - 1 is a polynomial, and e^r - 1 with |r| <= ln(2)/2 another, so that small
# results keep their digits.  Adding 1.5 2^23 rounds, and leaves the number in the lowest bits.  Terms are evaluated in
# pairs: in a single chain each operation would wait for the one before it, and so would the loads of the next lanes.
_ERF = """\
INLINE float erf_float(float x) {
    const float magnitude = __builtin_fabsf(x), t = magnitude > 4.0f ? 4.0f : magnitude, t2 = t * t;
    const float p1 = MADD(1.02777830e-1f, t, 6.36619382e-1f), p3 = MADD(-1.60396442e-4f, t, -1.91530637e-2f);
    const float p5 = MADD(-6.32837036e-4f, t, 1.66702781e-3f), p7 = MADD(-9.25627037e-6f, t, 1.17641320e-4f);
    const float p = MADD(MADD(MADD(p7, t2, p5), t2, p3), t2, p1);
    const float q = MADD(MADD(p, t, 1.28379172e-1f), t, t);
    const float shifted = MADD(q, -1.44269504f, 12582912.0f), n = shifted - 12582912.0f;
    const float r = MADD(n, -0.693147182f, -q), r2 = r * r;
    const float e1 = MADD(4.16662842e-2f, r, 1.66665435e-1f), e3 = MADD(1.39464275e-3f, r, 8.36657174e-3f);
    const float less = MADD(MADD(MADD(e3, r2, e1), r, 0.5f), r2, r);
    const float power = bits_to_float((float_to_bits(shifted) << 23) + 0x3f800000);  // 2^n
    return __builtin_copysignf(MADD(-power, less, 1.0f - power), x);
}"""

# In double, which has digits enough near the zeros at 1 and 2 too: on [1, 2] (t - 1) (t - 2) times a
# polynomial, below 3 moved there, beyond Stirling's series, and left of 0 the reflection, by a polynomial of sin(pi r).
_LGAMMA = """\
INLINE float lgamma_float(float a) {
    const double x = a, size = __builtin_fabs(x);
    const double t = size < 1.0 ? size + 1.0 : size < 2.0 ? size : size - 1.0, u = t - 1.5;
    double p = MADD_DOUBLE(9.3493312778748667e-4, u, -1.5244858346622184e-3);
    p = MADD_DOUBLE(p, u, 1.8638849491948337e-3);
    p = MADD_DOUBLE(p, u, -3.1169820596948637e-3);
    p = MADD_DOUBLE(p, u, 5.453080503264046e-3);
    p = MADD_DOUBLE(p, u, -9.436288268733021e-3);
    p = MADD_DOUBLE(p, u, 1.679679922060099e-2);
    p = MADD_DOUBLE(p, u, -3.1308005354291572e-2);
    p = MADD_DOUBLE(p, u, 6.2911404835583163e-2);
    p = MADD_DOUBLE(p, u, -1.4595990197047849e-1);
    p = MADD_DOUBLE(p, u, 4.8312895054098089e-1);
    const double l = log(size < 1.0 || size >= 3.0 ? size : size < 2.0 ? 1.0 : size - 1.0);
    const double near = (t - 1.0) * (t - 2.0) * p + (size < 1.0 ? -l : l);
    const double s = 1.0 / size, s2 = s * s;
    double q = MADD_DOUBLE(5.0453187173438122e-4, s2, -5.6718140415355668e-4);
    q = MADD_DOUBLE(q, s2, 7.9261127965677863e-4);
    q = MADD_DOUBLE(q, s2, -2.7777637763430791e-3);
    q = MADD_DOUBLE(q, s2, 8.333333330240195e-2);
    const double far = MADD_DOUBLE(size - 0.5, l - 1.0, MADD_DOUBLE(q, s, 0.41893853320467274));
    const double right = size < 3.0 ? near : far;
    const double bounded = size < 0x1p24 ? size : 0x1p24, r = bounded - __builtin_rint(bounded), r2 = r * r;
    double w = MADD_DOUBLE(-7.028303855203096e-3, r2, 8.2050350201472475e-2);
    w = MADD_DOUBLE(w, r2, -5.9925218653158298e-1);
    w = MADD_DOUBLE(w, r2, 2.5501633179384269);
    w = MADD_DOUBLE(w, r2, -5.167712764593);
    w = MADD_DOUBLE(w, r2, 3.141592653536132);
    const double turned = 1.1447298858494002 - log(size * __builtin_fabs(r * w)) - right;
    return (float)(x < 0.0 ? (r == 0.0 ? __builtin_inf() : turned) : right);
}"""

_LGAMMA_DOUBLE = "INLINE double lgamma_double(double a) { int sign; return lgamma_r(a, &sign); }"

FUNCTIONS: dict[str, str] = {
    "MADD": _MADD,
    "MADD_DOUBLE": _MADD,
    "exp_float": _EXP,
    "erf_float": _ERF,
    "lgamma_float": _LGAMMA,
    "lgamma_double": _LGAMMA_DOUBLE,
}
"""Function → its definition."""
