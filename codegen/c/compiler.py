"""Finds the system's C compiler, and decides the flags that kernels are compiled with.

Input: `$CC` and the search path; output: a command, its version, its flags for an architecture, and its message when it
fails.  GCC and clang are recognised under any name.  GCC is preferred: it has lanes for the functions of the C library,
and its OpenMP run time is the library that PyTorch's builds for Linux have loaded.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fusion.codegen.c.processor import NATIVE
from fusion.lowering.errors import BuildError, Unsupported

GCC, CLANG = "gcc", "clang"

_TUNED = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
"""Machine → flags for the CPU at hand."""

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
        # Threading the jump of a choice into the addition that consumes its result puts one addition into each branch.
        # GCC then loads the lanes' sums under a mask, and of several vectors of lanes always the first (12 and 13:
        # wrong sums next to 16-bit floats).
        "-fno-thread-jumps",
        # Then partial redundancies would be moved into branches, and lanes lost there: a call has no form for some of
        # them.
        "-fno-tree-pre",
        # Where it makes memset of the loop that clears an array of sums, GCC 12 fills the array with one lane's sum if
        # the loop that adds up is short enough to be unrolled (a quarter of 540 small sums by computed position were
        # wrong).
        "-fno-tree-loop-distribute-patterns",
        # Expansion from expression trees moves a masked load of lanes behind the increment of its pointer (GCC 12: in a
        # kernel that also stores a masked copy of each row, the maxima of rows of 16-bit floats were those of the next
        # row).
        "-fno-tree-ter",
    ),
    CLANG: (),
}
"""Compiler → flags that the other one does not know, or does not need."""

# GCC may spill a 64-bit value to an MMX register, and does not clear the state of the floating-point unit after it: the
# next x87 instructions of the thread, in LAPACK or `long double` arithmetic, then give NaN.
_WITHOUT_MMX: Mapping[tuple[str, str], tuple[str, ...]] = {(GCC, "x86_64"): ("-mno-mmx",)}
"""Compiler, machine → flags."""

TIME_LIMIT = 300
"""Seconds after which the compiler counts as hung."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler.

    Attributes:
        version: its text.
        file: its file with size and age, which distinguishes it from others of that version.
        compiles_for: the machine and system that it compiles for, such as "x86_64-linux-gnu".
    """

    command: tuple[str, ...]
    version: str
    file: str
    compiles_for: str

    @property
    def machine(self) -> str:
        """The target architecture, as named by `platform.machine` on Linux."""
        machine = self.compiles_for.partition("-")[0]
        return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)

    @property
    def system(self) -> str:
        """The target operating system, as named by `platform.system`."""
        words = self.compiles_for
        return "Darwin" if "darwin" in words or "macos" in words else "Windows" if "windows" in words else "Linux"

    @property
    def is_cross(self) -> bool:
        """Whether the target has another architecture or operating system than this machine."""
        here = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
        return self.machine != here or self.system != platform.system()

    @property
    def kind(self) -> str:
        """`GCC` or `CLANG`; others count as GCC, whose flags they claim to know."""
        return CLANG if "clang" in self.version else GCC

    def flags(self, arch: str = NATIVE, *, threads: bool = True) -> tuple[str, ...]:
        """Return the flags with which the text of a kernel is compiled for `arch`.

        Args:
            threads: whether loops are spread over threads, by OpenMP; else only over lanes.

        >>> compiler = Compiler(("gcc",), "gcc (Debian 12.2.0-14) 12.2.0", "", "x86_64-linux-gnu")
        >>> "-march=x86-64-v3" in compiler.flags("x86-64-v3"), "-march=native" in compiler.flags("x86-64-v3")
        (True, False)
        """
        openmp = "-fopenmp" if threads else "-fopenmp-simd"
        general = "-std=gnu11", "-O3", *self.tuning(arch), "-fPIC", openmp
        return (*general, *_EXACT, *_ONLY[self.kind], *_WITHOUT_MMX.get((self.kind, self.machine), ()), *_CALLS)

    def tuning(self, arch: str) -> tuple[str, ...]:
        """Return the flags that choose instructions: none for another machine, unless `arch` is one of its levels."""
        if arch != NATIVE:
            return f"-march={arch}", "-mprefer-vector-width=512"
        return () if self.is_cross else _TUNED.get(self.machine, ())

    def call(self, *arguments: str) -> str:
        """Run the compiler, and return its standard output.

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
                target = _done([*command, "-dumpmachine"]).stdout.strip()
                here = f"{platform.machine()}-{platform.system().lower()}"
                compilers.append(Compiler(command, shown.stdout, file, target or here))
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
        Unsupported: the system is Windows, or the compiler's target is.
    """
    windows = platform.system() == "Windows"
    compiler = None if windows else _compiler(os.environ.get("CC") or None, os.environ.get("PATH"))
    if compiler is None or compiler.system == "Windows":
        raise Unsupported(
            "kernels in C are not built for Windows",
            hint="use Linux, or the Windows Subsystem for Linux (WSL); docs/platforms.md lists what is supported",
        )
    return compiler


@lru_cache(maxsize=8)
def has_threads(compiler: Compiler) -> bool:
    """Return whether a library that the compiler links can use OpenMP."""
    with tempfile.TemporaryDirectory(prefix="fusion-") as folder:
        source = Path(folder, "openmp.c")
        text = "#include <omp.h>\nint run(void) {\n#pragma omp parallel\n{}\nreturn omp_get_max_threads(); }\n"
        source.write_text(text, encoding="utf-8")
        flags = "-fopenmp", "-fPIC", "-shared", "-Wl,-z,defs" if compiler.system == "Linux" else "-Wl,-undefined,error"
        try:
            compiler.call(*flags, str(source), "-o", str(Path(folder, "openmp.so")))
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


__all__ = ["CLANG", "GCC", "TIME_LIMIT", "Compiler", "find_compiler", "has_threads"]
