"""Declares the functions of the C library that a kernel's text may call: scalar, and in lanes.

<math.h> is not included: declaring the few functions used is quicker to compile, and lets each be declared with its
vector forms, if the vector math library (libmvec) of this machine has them.

A function of equal numbers must be equal wherever it is computed.  Eager's are, within a tensor, and comparisons of
numbers that were computed twice rely on it: ties of extremes, flags of a row's maximum, positions in a sort.  But
libmvec's form for 16 lanes differs from that for 8 in last bits, both from libm's scalar one, and which of them a
compiler calls depends on the other types of a loop, and on its remainder.  So all of them are computed with the widest
form.  Its call takes about as long as one of libm's; narrower forms in lanes take up to twice as long.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Collection
from functools import lru_cache

C_FLOATS = {"float": "f", "double": ""}
"""C types → the suffix of their functions."""

_ONE_ARGUMENT = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
_TWO_ARGUMENTS = ("pow", "atan2", "fmod")

LIBRARY: dict[str, str] = {
    f"{name}{f}": declaration.format(T=T, name=f"{name}{f}")
    for T, f in C_FLOATS.items()
    for name, declaration in {
        **dict.fromkeys(_ONE_ARGUMENT, "{T} {name}({T})"),
        **dict.fromkeys(_TWO_ARGUMENTS, "{T} {name}({T}, {T})"),
    }.items()
} | {"lgamma_r": "double lgamma_r(double, int *)"}
LIBRARY["aligned_alloc"] = "void *aligned_alloc(unsigned long, unsigned long)"
LIBRARY["omp_get_thread_num"] = "int omp_get_thread_num(void)"
LIBRARY["omp_get_num_threads"] = "int omp_get_num_threads(void)"
"""Function of the C library → its declaration."""

_ALIKE = """\
// What libmvec has for few lanes, and libm for one number, differs in last bits from what it has for the most lanes.
// So that a function of equal numbers is equal wherever it is computed, all of these are the form for the most lanes.
#if !defined(__x86_64__) || defined(__clang__)
#define ALIKE(T, v, f, n64, n32, n16)
#else
#if defined(__AVX512F__)
#define WIDEST 64
#define ALIKE(T, v, f, n64, n32, n16) ONE(T, v, f, _ZGVeN##n64##v##_##f) \\
    FEW(T##_32, T, v, _ZGVdN##n32##v##_##f, _ZGVeN##n64##v##_##f) \\
    FEW(T##_16, T, v, _ZGVbN##n16##v##_##f, _ZGVeN##n64##v##_##f)
#elif defined(__AVX2__)
#define WIDEST 32
#define ALIKE(T, v, f, n64, n32, n16) ONE(T, v, f, _ZGVdN##n32##v##_##f) \\
    FEW(T##_16, T, v, _ZGVbN##n16##v##_##f, _ZGVdN##n32##v##_##f)
#else
#define WIDEST 16
#define ALIKE(T, v, f, n64, n32, n16) ONE(T, v, f, _ZGVbN##n16##v##_##f)
#endif
#define ONE(T, v, f, most) T##_all most(GIVEN_##v(T##_all)); \\
    OWN T f##_alone(GIVEN_##v(T)) __asm__(#f); \\
    OWN T f##_alone(GIVEN_##v(T)) { return most(ALL_##v(T))[0]; }
#define FEW(few, T, v, f, most) OWN few f(GIVEN_##v(few)) { return FIRST(few, T, most(REPEATED_##v(few, T))); }
#define OWN __attribute__((visibility("hidden")))
#define GIVEN_v(T) T x
#define GIVEN_vv(T) T x, T y
#define ALL_v(T) x - (T##_all){}
#define ALL_vv(T) x - (T##_all){}, y - (T##_all){}
#define REPEATED(few, T, x) (union { few parts[4]; T##_all all; }){{x, x, x, x}}.all
#define REPEATED_v(few, T) REPEATED(few, T, x)
#define REPEATED_vv(few, T) REPEATED(few, T, x), REPEATED(few, T, y)
#define FIRST(few, T, x) (union { T##_all all; few first; }){x}.first
#define LANES(T, name, bytes) typedef T T##_##name __attribute__((vector_size(bytes)))
LANES(float, 16, 16); LANES(float, 32, 32); LANES(float, all, WIDEST);
LANES(double, 16, 16); LANES(double, 32, 32); LANES(double, all, WIDEST);
#endif"""

_VECTOR = """\
#ifdef __x86_64__
#define VECTOR __attribute__((const, simd("notinbranch")))  // libmvec has this one for vectors
#else
#define VECTOR __attribute__((const))
#endif"""

DEFINED = frozenset(
    ("VECTOR", *re.findall(r"#define (\w+)", _ALIKE), *(f"{T}_{n}" for T in C_FLOATS for n in ("16", "32", "all")))
)
"""Names that declarations define in addition to functions."""

_WIDTHS = {"float": (16, 8, 4), "double": (8, 4, 2)}
"""C type → the numbers of lanes in 64, 32 and 16 bytes."""


@lru_cache(maxsize=1)
def vector_functions() -> frozenset[str]:
    """Return the functions of `LIBRARY` that libmvec vectorises on this machine (none without libmvec).

    Only the functions for x86-64 are supported here; on other processors libm computes each number.
    """
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        library = ctypes.CDLL("libmvec.so.1")
    except OSError:
        return frozenset()

    def variant(name: str) -> str:
        return f"_ZGVbN{_WIDTHS[_held(name)][-1]}{_vectors(name)}_{name}"

    return frozenset(name for name in LIBRARY if not name.endswith("_r") and hasattr(library, variant(name)))


def declarations(names: Collection[str]) -> list[str]:
    """Return the lines that declare the library functions `names`, in a fixed order."""
    wanted = [name for name in LIBRARY if name in names]
    vector = [name for name in wanted if name in vector_functions()]
    lines = []
    if vector:  # GCC vectorises a call in a loop only if it knows that the function has no side effects
        lines.append(_VECTOR)
    lines += [f"{'VECTOR ' if name in vector else ''}{LIBRARY[name]};" for name in wanted]
    if vector:
        lines.append(_ALIKE)
    widths = {name: ", ".join(map(str, _WIDTHS[_held(name)])) for name in vector}
    lines += [f"ALIKE({_held(name)}, {_vectors(name)}, {name}, {widths[name]})" for name in vector]
    return lines


def _held(name: str) -> str:
    """Return the type of a library function's arguments and result."""
    return "float" if LIBRARY[name].startswith("float") else "double"


def _vectors(name: str) -> str:
    """Return the parameters in the names of a function's vector forms: a letter for each."""
    return "v" * (LIBRARY[name].count(",") + 1)
