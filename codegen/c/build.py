"""Builds C text into shared objects: the system's compiler, and a cache of objects.

Input: source text; output: an object, loaded by the caller.  It is kept under the hash of all that decides its content:
the text, the compiler's command with its flags, its version and its file, and the CPU it is tuned for.  One that cannot
be kept (a full disk) is loaded all the same; one that cannot be loaded is built again.

OpenMP: the object is linked against no OpenMP library.  Its calls bind to the one that PyTorch has loaded, so both use
one thread pool; two pools would compete for the cores.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from fusion.codegen.c.processor import NATIVE
from fusion.codegen.cache import Damaged, digest, get, put
from fusion.lowering.errors import BuildError

Loaded = TypeVar("Loaded")
"""What an object is loaded as."""

TUNED = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
"""Machine → flags for the CPU at hand."""

_WITHOUT_MMX = {"x86_64": ("-mno-mmx",)}

# No -ffast-math, and no fused multiply-add across operations: NaN, infinities, -0.0 and each rounding are as in eager.
FLAGS = (
    *("-std=gnu11", "-O3", *TUNED.get(platform.machine(), ()), "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-w"),
    # GCC 12 loses the `!= 0` of a loaded bool that is an index, where it moves a condition out of the loop around it.
    "-fno-unswitch-loops",
    # Where a condition holds up to some point of a loop (a causal mask), GCC makes two loops, the second without lanes.
    "-fno-split-loops",
    # Threading a jump from a choice to what adds its result up puts one addition into each branch.  GCC then loads the
    # lanes' sums under a mask, and of several vectors of lanes always the first (12 and 13: wrong sums beside halves).
    "-fno-thread-jumps",
    # Then partial redundancies would be moved into branches, and lanes lost there: a call has no form for some of them.
    "-fno-tree-pre",
    # Where it makes memset of the loop that clears an array of sums, GCC 12 fills the array with one lane's sum if the
    # loop that adds up is short enough to be unrolled (a quarter of 540 small sums by computed position were wrong).
    "-fno-tree-loop-distribute-patterns",
    # Expansion from expressions as trees moves a masked load of lanes behind the increment of the pointer that it reads
    # by (GCC 12: maxima of rows of 16-bit floats, each beside a masked copy of it, were those of the next row).
    "-fno-tree-ter",
    # GCC may spill a 64-bit value to an MMX register, and does not clear the state of the floating-point unit after it:
    # the next x87 instructions of the thread, in LAPACK or `long double` arithmetic, then give NaN.
    *_WITHOUT_MMX.get(platform.machine(), ()),
    # A sine and a cosine of the same number would become one call that gives both, and that lanes have no form of.
    *("-fno-builtin-sin", "-fno-builtin-cos", "-fno-builtin-sinf", "-fno-builtin-cosf"),
)
LINK_FLAGS = ("-shared", "-nostdlib")

TIME_LIMIT = 300
"""Seconds after which the compiler counts as hung."""

_bind_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler, its version text, and what tells it from others of that version: its file, with size and age."""

    command: tuple[str, ...]
    version: str
    file: str


@lru_cache(maxsize=8)
def _compiler(chosen: str | None, path: str | None) -> Compiler:
    candidates = [chosen] if chosen else ["cc", "gcc", "clang"]
    compilers: list[Compiler] = []
    for candidate in candidates:
        command = _words(candidate)
        program = shutil.which(command[0], path=path) if command else None
        if program is not None:
            shown = _done([*command, "--version"])
            if shown.returncode == 0:
                status = os.stat(program)
                file = f"{os.path.realpath(program)} {status.st_size} {status.st_mtime_ns}"
                compilers.append(Compiler(command, shown.stdout, file))
    if compilers:  # clang, under whatever name, calls another OpenMP run time than the one PyTorch has loaded
        return min(compilers, key=lambda compiler: "clang" in compiler.version)
    raise BuildError(
        f"no C compiler found (tried {', '.join(candidates)})", hint="install gcc, or name a compiler in $CC"
    )


def _words(command: str) -> tuple[str, ...]:
    """Return the words of a command, in which quotes are as in a shell; the path of a program may have spaces."""
    if shutil.which(command):
        return (command,)
    try:
        return tuple(shlex.split(command))
    except ValueError:  # a quote is missing
        return tuple(command.split())


def find_compiler() -> Compiler:
    """Return `$CC`, else `cc`, `gcc` or `clang`.

    Raises:
        BuildError: there is none.
    """
    return _compiler(os.environ.get("CC") or None, os.environ.get("PATH"))


@lru_cache(maxsize=1)
def cpu_identity() -> str:
    """Return the identity of this machine's CPU for `-march=native`: its model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(line for line in lines if line.startswith(telling))


def flags_for(arch: str) -> tuple[str, ...]:
    """Return the flags with which the text of a kernel is compiled for `arch`.

    >>> "-march=native" in flags_for("x86-64-v3"), "-march=x86-64-v3" in flags_for("x86-64-v3")
    (False, True)
    """
    if arch == NATIVE:
        return FLAGS
    return (*(flag for flag in FLAGS if flag not in TUNED.get(platform.machine(), ())), *_for_level(arch))


def _for_level(arch: str) -> tuple[str, ...]:
    return f"-march={arch}", "-mprefer-vector-width=512"


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
    compiler, flags = find_compiler(), flags_for(arch)
    command = " ".join((*compiler.command, *flags, *LINK_FLAGS))
    entry = f"{digest(source, command, compiler.version, compiler.file, cpu_identity())}.so"
    bind_openmp()
    with suppress(Damaged, OSError, AttributeError):  # the entry, or its object, is not what it was: build it again
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
        lines = "-g1", f"-fdebug-prefix-map={os.getcwd()}=."
        text = _run(find_compiler(), source, folder, "-S", "kernel.s", (*FLAGS, *lines)).read_text(encoding="utf-8")
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
        beside_torch = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
        for candidate in (*map(str, beside_torch), ctypes.util.find_library("gomp")):
            if candidate:
                ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
                return
    raise BuildError("no OpenMP run time library (libgomp) found", hint="install gcc's libgomp")


def _compile(compiler: Compiler, source: str, flags: Sequence[str]) -> bytes:
    with _temporary_folder() as folder:
        compiled = _run(compiler, source, folder, "-c", "kernel.o", flags)
        linked = folder / "kernel.so"
        # Linked separately: with -fopenmp the linker would choose an OpenMP library.
        _call(compiler, *LINK_FLAGS, str(compiled), "-o", str(linked), "-lm", "-lc")
        return linked.read_bytes()


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="fusion-") as folder:
            yield Path(folder)
    except OSError as error:
        hint = "set TMPDIR to a directory that can be written"
        raise BuildError(f"nothing can be compiled: {error}", hint=hint) from error


def _run(compiler: Compiler, source: str, folder: Path, action: str, result: str, flags: Sequence[str] = FLAGS) -> Path:
    (folder / "kernel.c").write_text(source, encoding="utf-8")
    _call(compiler, *flags, action, str(folder / "kernel.c"), "-o", str(folder / result))
    return folder / result


def _call(compiler: Compiler, *arguments: str) -> None:
    try:
        done = _done([*compiler.command, *arguments])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C compiler could not be run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"the C compiler {compiler.command[0]} failed:\n{done.stderr.strip()}")


def _done(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; its output may name files that are not UTF-8."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="backslashreplace",
        check=False,
        timeout=TIME_LIMIT,
    )
