"""Finds the system's C compiler, and decides the flags that kernels are compiled with.

Input: `$CC` and the search path; output: a command, its version, its flags for an architecture, and what it says when
it fails.  GCC and clang are known, under whatever name.  GCC is preferred: it has lanes for the functions of the C
library, and its OpenMP run time is the one that PyTorch's builds for Linux have loaded.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fusion.codegen.c.processor import NATIVE
from fusion.lowering.errors import BuildError, Unsupported

GCC, CLANG = "gcc", "clang"

TUNED = {"x86_64": ("-march=native", "-mprefer-vector-width=512")}
"""Machine → flags for the CPU at hand, where they are not those of ARM."""

# No -ffast-math, and no fused multiply-add across operations: NaN, infinities, -0.0 and each rounding are as in eager.
_EXACT = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-w")

# A sine and a cosine of the same number would become one call that gives both, and that lanes have no form of.
_CALLS = ("-fno-builtin-sin", "-fno-builtin-cos", "-fno-builtin-sinf", "-fno-builtin-cosf")

_ONLY: Mapping[str, tuple[str, ...]] = {
    GCC: (
        # GCC 12 loses the `!= 0` of a loaded bool that is an index, where it moves a condition out of the loop around.
        "-fno-unswitch-loops",
        # Where a condition holds up to some point of a loop (a causal mask), GCC makes two loops, the second without
        # lanes.
        "-fno-split-loops",
        # Threading a jump from a choice to what adds its result up puts one addition into each branch.  GCC then loads
        # the lanes' sums under a mask, and of several vectors of lanes always the first (12 and 13: wrong sums beside
        # halves).
        "-fno-thread-jumps",
        # Then partial redundancies would be moved into branches, and lanes lost there: a call has no form for some of
        # them.
        "-fno-tree-pre",
        # Where it makes memset of the loop that clears an array of sums, GCC 12 fills the array with one lane's sum if
        # the loop that adds up is short enough to be unrolled (a quarter of 540 small sums by computed position were
        # wrong).
        "-fno-tree-loop-distribute-patterns",
        # Expansion from expressions as trees moves a masked load of lanes behind the increment of the pointer that it
        # reads by (GCC 12: maxima of rows of 16-bit floats, each beside a masked copy of it, were those of the next
        # row).
        "-fno-tree-ter",
    ),
    CLANG: (),
}
"""Compiler → flags that the other one does not know, or does not need."""

TIME_LIMIT = 300
"""Seconds after which the compiler counts as hung."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler, its version text, and what tells it from others of that version: its file, with size and age."""

    command: tuple[str, ...]
    version: str
    file: str

    @property
    def kind(self) -> str:
        """`GCC` or `CLANG`; others count as GCC, whose flags they claim to know."""
        return CLANG if "clang" in self.version else GCC

    def flags(self, arch: str = NATIVE, *, threads: bool = True) -> tuple[str, ...]:
        """Return the flags with which the text of a kernel is compiled for `arch`.

        Args:
            threads: whether loops are spread over threads, by OpenMP; else only over lanes.

        >>> compiler = Compiler(("gcc",), "gcc (Debian 12.2.0-14) 12.2.0", "")
        >>> "-march=x86-64-v3" in compiler.flags("x86-64-v3"), "-march=native" in compiler.flags("x86-64-v3")
        (True, False)
        """
        openmp = "-fopenmp" if threads else "-fopenmp-simd"
        general = "-std=gnu11", "-O3", *tuning(arch), "-fPIC", openmp
        return (*general, *_EXACT, *_ONLY[self.kind], *_CALLS)

    def call(self, *arguments: str) -> str:
        """Run the compiler, and return what it writes.

        Raises:
            BuildError: it failed, with its message.
        """
        try:
            done = _done([*self.command, *arguments])
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the C compiler could not be run: {error}") from error
        if done.returncode != 0:
            raise BuildError(f"the C compiler {self.command[0]} failed:\n{done.stderr.strip()}")
        return done.stdout


def tuning(arch: str) -> tuple[str, ...]:
    """Return the flags that choose instructions."""
    if arch != NATIVE:
        return f"-march={arch}", "-mprefer-vector-width=512"
    return TUNED.get(platform.machine(), ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ())


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
    if compilers:
        return min(compilers, key=lambda compiler: compiler.kind == CLANG)
    raise BuildError(f"no C compiler found (tried {', '.join(candidates)})", hint=_remedy())


def _remedy() -> str:
    """Return what to do where there is no compiler."""
    if platform.system() == "Darwin":
        return "install Apple's command line tools (xcode-select --install), or name a compiler in $CC"
    return "install gcc, or name a compiler in $CC"


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
        Unsupported: the system is Windows.
    """
    refuse_windows()
    return _compiler(os.environ.get("CC") or None, os.environ.get("PATH"))


def refuse_windows() -> None:
    """Refuse to compile on Windows.

    Raises:
        Unsupported: the system is Windows.
    """
    if platform.system() == "Windows":
        raise Unsupported(
            "kernels in C are not built on Windows",
            hint="use Linux, or the Windows Subsystem for Linux (WSL); docs/platforms.md lists what is supported",
        )


def has_threads(compiler: Compiler) -> bool:
    """Return whether a program that the compiler links can use OpenMP."""
    return _links_openmp(compiler)


@lru_cache(maxsize=8)
def _links_openmp(compiler: Compiler) -> bool:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="fusion-") as folder:
        source = Path(folder, "openmp.c")
        source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n", encoding="utf-8")
        try:
            compiler.call("-fopenmp", str(source), "-o", str(Path(folder, "openmp")))
        except BuildError:
            return False
    return True


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


__all__ = ["CLANG", "GCC", "TIME_LIMIT", "Compiler", "find_compiler", "has_threads", "refuse_windows", "tuning"]
