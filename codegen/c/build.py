"""Builds C text into shared objects: the system's compiler, and a cache of objects.

Input: source text; output: an object, loaded by the caller.  It is kept under the hash of all that decides its content:
the text, the compiler's command with its flags, its version and its file, and the CPU it is tuned for.  An object that
cannot be kept (a full disk) is loaded all the same; an object that cannot be loaded is built again.

OpenMP: the object is linked against no OpenMP library.  Its calls bind to the library that PyTorch loaded, so both use
one thread pool; two pools would compete for the cores.  Clang calls another library than GCC; where PyTorch has not
loaded that one, loops that clang compiles run on one thread.

`link_library` builds a library for programs without PyTorch, which links an OpenMP library of its own.  The objects of
its files are kept, too: most of them are the same in every library.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from fusion.codegen.c.compiler import GCC, Compiler, find_compiler, has_threads
from fusion.codegen.c.processor import NATIVE
from fusion.codegen.cache import Damaged, digest, get, put
from fusion.lowering.errors import BuildError, Unsupported

Loaded = TypeVar("Loaded")
"""The type as which an object is loaded."""

LINK_FLAGS = ("-shared", "-nostdlib")
"""For objects that PyTorch's process loads."""

_DENSE: Mapping[str, tuple[str, ...]] = {"Linux": ("-Wl,-z,noseparate-code",)}
"""System → flags that place constants next to the code, in one segment.

On separate pages, constants that are only read under masks are never paged in, and each load with a false mask takes
hundreds of cycles (measured: docs/performance.md, `_DENSE`).
"""

# Not libc: every process has loaded it, and reading its symbols would take most of the linker's time.  libm has both
# old and new versions of functions, and names libmvec, which no process has loaded.
_LIBRARIES: Mapping[str, tuple[str, ...]] = {"Darwin": ("-undefined", "dynamic_lookup", "-lSystem")}
"""System → the libraries that objects are linked with, for others than Linux."""

_bind_lock = threading.Lock()


@lru_cache(maxsize=1)
def cpu_identity() -> str:
    """Return the identity of this machine's CPU for `-march=native`: its model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(line for line in lines if line.startswith(telling))


def build_object(
    source: str,
    name: str,
    loaded: Callable[[bytes], Loaded],
    unkept: Callable[[str], object] = lambda reason: None,
    arch: str = NATIVE,
) -> Loaded:
    """Return `loaded` of the object that was compiled from `source`, now or before.

    Args:
        name: of the kernel, for messages.
        loaded: loads an object; with an OSError or AttributeError it says that this is not the right one.
        unkept: is called with the reason why the object cannot be kept for later processes.
        arch: the architecture to compile for (`processor.py`).

    Raises:
        BuildError: no compiler, the compiler's message, or that of `loaded` about an object that was just compiled.
    """
    compiler = find_compiler()
    if compiler.is_cross:
        raise BuildError(
            f"{compiler.command[0]} compiles for {compiler.compiles_for}, which is not this machine", hint="change $CC"
        )
    bind_openmp()
    flags = compiler.flags(arch, threads=spreads_loops(compiler))
    command = " ".join((*compiler.command, *flags, *LINK_FLAGS, *_DENSE.get(compiler.system, ())))
    entry = f"{digest(source, command, compiler.version, compiler.file, cpu_identity())}.so"
    with suppress(Damaged, OSError, AttributeError):  # the entry, or its object, is damaged or gone: build it again
        if (binary := get("c", entry)) is not None:
            return loaded(binary)
    binary = _compile(compiler, source, flags)
    try:
        put("c", entry, binary)
    except BuildError as error:
        unkept(error.message)
    try:
        return loaded(binary)
    except (OSError, AttributeError) as error:
        hint = "TMPDIR has to lie where files may be executed"
        raise BuildError(f"kernel {name} cannot be loaded: {error}", hint=hint) from error


def assembly(source: str) -> str:
    """Return the assembly text of `source`, in which `.loc` directives name its lines; other debug data is left out.

    Raises:
        BuildError: no compiler, or the compiler's message.
    """
    with _temporary_folder() as folder:
        compiler, lines = find_compiler(), ("-g1", f"-fdebug-prefix-map={os.getcwd()}=.")
        flags = *compiler.flags(threads=spreads_loops(compiler)), *lines
        text = _run(compiler, source, folder, (*flags, "-S"), "kernel.s").read_text(encoding="utf-8")
    return _without_debug_sections(text).replace(str(folder) + os.sep, "").replace(str(folder), ".")


def _without_debug_sections(text: str) -> str:
    """Remove the debug sections from an assembly text.

    >>> _without_debug_sections("\\t.text\\n\\tret\\n\\t.section\\t.debug_info\\n\\t.byte\\t1\\n\\t.ident\\t'x'\\n")
    "\\t.text\\n\\tret\\n\\t.ident\\t'x'\\n"
    """
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        word = line.split()[0] if line.strip() else ""
        if word in (".section", ".text", ".data", ".ident"):
            inside = ".debug_" in line
        if not inside:
            kept.append(line)
    return "".join(kept)


def bind_openmp() -> None:
    """Make sure that the OpenMP calls of a kernel find PyTorch's own run time library.

    Raises:
        BuildError: there is no OpenMP run time in this process and none to load.
    """
    with _bind_lock:
        if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
            return
        libraries = Path(torch.__file__).parent / "lib"
        beside_torch = sorted((*libraries.glob("libgomp*.so*"), *libraries.glob("libomp*.dylib")))
        for candidate in (*map(str, beside_torch), *map(ctypes.util.find_library, ("gomp", "omp"))):
            if candidate:
                ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
                return
    hint = "brew install libomp" if platform.system() == "Darwin" else "install gcc's libgomp"
    raise BuildError("no OpenMP run time library (libgomp, or libomp) found", hint=hint)


def spreads_loops(compiler: Compiler) -> bool:
    """Return whether the loops of kernels run on several threads, PyTorch's own pool."""
    return compiler.kind == GCC or hasattr(ctypes.CDLL(None), "__kmpc_fork_call")


def lacking_threads() -> str:
    """Return why kernels run on one thread; empty if they do not, or without a compiler."""
    try:
        compiler = find_compiler()
    except (BuildError, Unsupported):
        return ""
    if spreads_loops(compiler):
        return ""
    return (
        f"kernels run on one thread: {compiler.command[0]} is clang, which calls another OpenMP run time than the one"
        " that PyTorch has loaded; install gcc"
    )


def link_library(
    files: Mapping[str, str],
    arch: str,
    over: Callable[..., Iterable[object]] = map,
    libraries: Sequence[str] = (),
) -> bytes:
    """Return a shared library of files in C, which links the C library, OpenMP's, and others.

    Args:
        files: name → text; names in .c are compiled, the ones that begin with "kernel" for `arch`, the others for
            any CPU of its kind: they say so where the kernels cannot run.
        over: maps a function over files, as `map` does, or several at a time.
        libraries: flags of the linker.

    Raises:
        BuildError: no compiler, or its message.
    """
    compiler = find_compiler()
    threads = has_threads(compiler)
    flags = *compiler.flags(arch, threads=threads), "-fvisibility=hidden"
    plain = [flag for flag in flags if flag not in compiler.tuning(arch)]
    headers = [part for name, text in sorted(files.items()) if not name.endswith(".c") for part in (name, text)]

    def compile_unit(unit: Path) -> None:
        chosen = flags if unit.name.startswith("kernel") else plain
        unit.with_suffix(".o").write_bytes(_compiled_unit(compiler, unit, chosen, headers))

    with _temporary_folder() as folder:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        units = [folder / name for name in files if name.endswith(".c")]
        for _ in over(compile_unit, units):
            pass
        objects = [str(unit.with_suffix(".o")) for unit in units]
        library = folder / "library.so"
        # Each kernel may hold the same form of a function of the C library for one number (see `text/library.py`).
        merged = ["-Wl,-z,muldefs"] if compiler.kind == GCC and compiler.system == "Linux" else []
        openmp = ["-fopenmp"] if threads else []
        own = ["-Wl,-Bsymbolic", "-lm", "-ldl", "-lpthread"] if compiler.system == "Linux" else []
        dense = _DENSE.get(compiler.system, ())
        compiler.call("-shared", *openmp, *dense, *merged, *objects, "-o", str(library), *libraries, *own)
        return library.read_bytes()


def _compiled_unit(compiler: Compiler, unit: Path, flags: Sequence[str], headers: Sequence[str]) -> bytes:
    """Return the object of one file of a library, compiled now or before: most files are those of every program.

    Args:
        headers: names and texts of the files that it may include.
    """
    identity = " ".join((*compiler.command, *flags)), compiler.version, compiler.file, cpu_identity()
    entry = f"{digest(unit.read_text(encoding='utf-8'), *headers, *identity)}.o"
    with suppress(Damaged, BuildError):
        if (kept := get("c", entry)) is not None:
            return kept
    compiler.call(*flags, "-c", str(unit), "-o", str(unit.with_suffix(".o")))
    binary = unit.with_suffix(".o").read_bytes()
    with suppress(BuildError):  # it cannot be kept
        put("c", entry, binary)
    return binary


def _compile(compiler: Compiler, source: str, flags: Sequence[str]) -> bytes:
    # The compiler proper alone reads -fopenmp: with it, the linker would choose an OpenMP library.
    known = [word for flag in flags for word in (("-Xpreprocessor", flag) if flag == "-fopenmp" else (flag,))]
    libraries = _LIBRARIES.get(compiler.system, ("-lm",))
    linked = *LINK_FLAGS, *_DENSE.get(compiler.system, ())
    with _temporary_folder() as folder:
        return _run(compiler, source, folder, (*known, *linked), "kernel.so", libraries).read_bytes()


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="fusion-") as folder:
            yield Path(folder)
    except OSError as error:
        hint = "set TMPDIR to a directory that can be written"
        raise BuildError(f"nothing can be compiled: {error}", hint=hint) from error


def _run(
    compiler: Compiler, source: str, folder: Path, flags: Sequence[str], result: str, libraries: Sequence[str] = ()
) -> Path:
    (folder / "kernel.c").write_text(source, encoding="utf-8")
    compiler.call(*flags, str(folder / "kernel.c"), "-o", str(folder / result), *libraries)
    return folder / result
