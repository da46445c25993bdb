"""Compiles and links a program as a shared library.

Input: a `Standalone` and an architecture; output: the bytes of a library with the functions of `fusion.h`.  It links
the C library, and OpenMP's where the compiler has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from fusion.codegen.c.build import link_library
from fusion.codegen.c.compiler import find_compiler
from fusion.codegen.c.processor import NATIVE, required_by
from fusion.codegen.c.standalone.blas import Blas
from fusion.codegen.c.standalone.program import kernel_text, program_text
from fusion.codegen.standalone import Standalone

FOLDER = Path(__file__).parent
HEADER = "fusion.h"
"""The interface of every library."""

_RUNNER = ("checks.c", "layouts.c", "model.c", "random.c", "run.c", "weights.c", "program.h", "runner.h", HEADER)

PRODUCTS_FILE = "products.c"
"""Calls a BLAS."""


@lru_cache(maxsize=1)
def runner_files() -> Mapping[str, str]:
    """Return the files of the code that runs a program: name → text."""
    return {name: (FOLDER / name).read_text(encoding="utf-8") for name in _RUNNER}


def source_files(program: Standalone, needs: Iterable[str] = (), blas: Blas | None = None) -> dict[str, str]:
    """Return all files of a program: name → text.

    Args:
        needs: features of the CPU that the kernels use.
        blas: that is linked, if any is.

    Raises:
        Unsupported: it has no form in C.
    """
    kernels = {f"kernel_{k}.c": kernel_text(k, source) for k, source in enumerate(program.sources)}
    products = {
        name: (FOLDER / name).read_text(encoding="utf-8") for name in (() if blas is None else (PRODUCTS_FILE,))
    }
    linked = {} if blas is None else {"blas.h": blas.header, **products}
    return {**runner_files(), **linked, "program.c": program_text(program, needs), **kernels}


def library(program: Standalone, arch: str = NATIVE, blas: Blas | None = None) -> bytes:
    """Return a shared library, which links `blas` if one is given.

    With a cross compiler in `$CC` and "native" it is for any machine that this compiles for.

    Raises:
        Unsupported: the program has no form in C, or nothing can be compiled for `arch` here.
        BuildError: no compiler, or its message.
    """
    with ThreadPoolExecutor(os.cpu_count() or 1, "fusion-library") as workers:
        needs = () if arch == NATIVE and find_compiler().is_cross else required_by(arch)
        flags = () if blas is None else blas.flags
        return link_library(source_files(program, needs, blas), arch, workers.map, flags)


__all__ = ["HEADER", "library", "runner_files", "source_files"]
