"""Finds the BLAS that a library links: the linker's option, and the names and integers of its functions.

Input: its name, such as "openblas", or the path of a shared object; output: a `Blas`.  Builds of OpenBLAS with 64-bit
integers, or for one package alone, have functions of other names.
"""

from __future__ import annotations

import ctypes
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from fusion.lowering.errors import Unsupported

_NAMES = (
    ("cblas_{}gemm", "int32_t"),
    ("cblas_{}gemm64_", "int64_t"),
    ("scipy_cblas_{}gemm", "int32_t"),
    ("scipy_cblas_{}gemm64_", "int64_t"),
)
"""The names of a product, with "s" or "d" for the dtype, and the type of its sizes."""


@dataclass(frozen=True, slots=True)
class Blas:
    """A BLAS.

    Attributes:
        flags: of the linker.
        header: the text of `blas.h`, which names its functions.
    """

    flags: tuple[str, ...]
    header: str


def blas_of(name: str) -> Blas:
    """Return the BLAS with this name, or at this path.

    Raises:
        Unsupported: there is none, or it has no products by the names of CBLAS.
    """
    path = Path(name)
    is_file = path.is_file()
    place = str(path.resolve()) if is_file else find_library(name)
    hint = 'install one, such as libopenblas-dev, or give the path of a shared object: blas="…/libopenblas.so"'
    if place is None:
        raise Unsupported(f"there is no BLAS called {name!r}", hint=hint)
    try:
        loaded = ctypes.CDLL(place)
    except OSError as error:
        raise Unsupported(f"the BLAS {place} cannot be loaded: {error}", hint=hint) from error
    for pattern, integer in _NAMES:
        if hasattr(loaded, pattern.format("s")):
            flags = (place, f"-Wl,-rpath,{Path(place).parent}") if is_file else (f"-l{name}",)
            return Blas(flags, _header(pattern, integer))
    raise Unsupported(f"{place} has no cblas_sgemm", hint=hint)


def _header(pattern: str, integer: str) -> str:
    defined = (f"#define FUSION_{kind.upper()}GEMM {pattern.format(kind)}" for kind in ("s", "d"))
    lines = ["/* The functions of the BLAS that is linked. */", "", "#include <stdint.h>", ""]
    return "\n".join([*lines, f"#define FUSION_INT {integer}", *defined, ""])


__all__ = ["Blas", "blas_of"]
