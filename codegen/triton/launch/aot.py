"""Compiles a generated file ahead of time for a named architecture, with or without its hardware.

Input: a kernel, its source and an architecture such as "sm_90", "sm_80" or "gfx942"; output: Triton's compiled kernel,
or its stages as text (TTIR, TTGIR, LLVM IR, PTX and SASS, or AMD assembly) and bytes (the binary).  Types and
alignments come from the kernel, so nothing is specialised when it is launched.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fusion.codegen.binary import Binary, Callee
from fusion.codegen.cache import cache_dir, digest, publish
from fusion.codegen.target import Stage
from fusion.codegen.triton.devices import Device, capability
from fusion.codegen.triton.launch.carried import offer, pack
from fusion.codegen.triton.launch.load import Generated, alignment, load, signature
from fusion.codegen.triton.launch.multiples import sizes_that_matter
from fusion.codegen.triton.launch.preparations import start
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.scalar_ops import HALVES

_LADDERS = {"cuda": ("ttir", "ttgir", "llir", "ptx", "cubin"), "hip": ("ttir", "ttgir", "llir", "amdgcn", "hsaco")}


def target_of(device: Device) -> Any:
    """Return Triton's name for a device.

    >>> from fusion.codegen.triton.devices import device_of
    >>> target_of(device_of("sm_90")).arch, target_of(device_of("gfx942")).warp_size
    (90, 64)
    """
    number = capability(device.arch)
    return GPUTarget("cuda", number, device.warp) if number else GPUTarget("hip", device.arch, device.warp)


def compile_for(generated: Generated, device: Device, multiples: tuple[bool, ...] = (), *, aligned: bool = True) -> Any:
    """Return Triton's `CompiledKernel` for a device.

    `multiples` marks the sizes that are multiples of 16; `aligned`: pointers have the alignment that the kernel
    declares.  If a kernel needs more shared memory than the device has, it is compiled again with a shorter pipeline.

    Raises:
        BuildError: with Triton's own message.
    """
    name = generated.kernel.name
    if not isinstance(generated.function, JITFunction):
        raise BuildError(
            f"{name} cannot be compiled while Triton interprets", hint="unset TRITON_INTERPRET and start again"
        )
    known = alignment(generated, multiples, aligned=aligned)
    source = _language(generated)(generated.function, signature(generated), generated.constants, known)
    options, target = dict(generated.options), target_of(device)
    start().hashing.join()
    if any(param.written and param.dtype not in HALVES for param in generated.kernel.params):
        options.setdefault("enable_reflect_ftz", False)  # the math library keeps denormals, as it does in eager
    while True:
        try:
            compiled = triton.compile(source, target=target, options=options)
            if "cubin" in compiled.asm and (safe := in_halves(_ptx(compiled))) != compiled.asm["ptx"]:
                compiled = triton.compile(source, target=target, options={**options, "ir_override": _published(safe)})
        except BuildError:
            raise
        except Exception as error:
            raise BuildError(f"Triton cannot compile {name}: {_message(error)}") from error
        limit = device.shared_per_program
        if compiled.metadata.shared <= limit:
            offer(compiled)
            return compiled
        if options.get("num_stages", 1) <= 1:
            raise BuildError(
                f"{name} needs {compiled.metadata.shared} bytes of shared memory, {device.arch} has {limit}",
                hint="use smaller blocks in CONFIG",
            )
        options["num_stages"] -= 1


def _ptx(compiled: Any) -> str:
    """Return the PTX of a compiled kernel.

    Raises:
        BuildError: Triton does not keep it, so its assembly by `ptxas` cannot be checked.
    """
    if "ptx" not in compiled.asm:
        raise BuildError("Triton keeps binaries only", hint="unset TRITON_STORE_BINARY_ONLY")
    ptx: str = compiled.asm["ptx"]
    return ptx


def _published(ptx: str) -> str:
    """Write PTX to the cache, and return its path."""
    name = f"{digest(ptx)[:32]}.ptx"
    publish("triton", name, ptx.encode())
    return str(cache_dir() / "triton" / name)


def _language(generated: Generated) -> Any:
    """Return Triton's reader of a function; Gluon's is imported only for functions in Gluon."""
    if not generated.function.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _message(error: BaseException) -> str:
    """Return the messages of the error and its causes."""
    causes = []
    seen: BaseException | None = error
    while seen is not None:
        causes.append(str(seen) or repr(seen))
        seen = seen.__cause__
    return "\n".join(dict.fromkeys(causes))


def binary_of(kernel: Kernel, source: str, device: Device, *, strict: bool = False) -> Binary:
    """Return the binary of a kernel for a device, with the settings of its launch; `strict`: under strict numerics.

    Raises:
        BuildError: Triton cannot compile it.
    """
    generated = load(kernel, source)
    compiled = compile_for(generated, device)
    relevant = tuple(sizes_that_matter(kernel))
    others = [compile_for(generated, device, relevant)] if any(relevant) else []  # for sizes that are multiples of 16
    backend = target_of(device).backend
    suffix, metadata = _LADDERS[backend][-1], compiled.metadata
    callee = Callee(kernel.name, metadata.name, len(kernel.params), len(kernel.sizes))
    launch = {"num_warps": metadata.num_warps, "shared": metadata.shared, "strict": int(strict)}
    return Binary(callee, suffix, compiled.asm[suffix], (backend, device.arch), launch, pack(compiled, *others))


def stages(kernel: Kernel, source: str, device: Device) -> Iterator[Stage]:
    """Yield the artefacts on the way from `source` to a binary for a device, in order; for NVIDIA also its SASS.

    Raises:
        BuildError: Triton cannot compile it.
    """
    compiled = compile_for(load(kernel, source), device)
    for name in _LADDERS[target_of(device).backend]:
        if name in compiled.asm:  # Gluon has no stage before the layouts are known
            yield name, compiled.asm[name]
    if "cubin" in compiled.asm and (text := disassembly(compiled.asm["cubin"])):
        yield "sass", text


TIME_LIMIT = 60
"""Seconds after which `nvdisasm` counts as hung."""


def disassembly(cubin: bytes) -> str:
    """Return the SASS of a cubin; empty where there is no `nvdisasm` (Triton brings one).

    Comments in it name the lines of the source (`//## File "…", line 7`).

    Raises:
        BuildError: with the tool's own message.
    """
    try:
        tool = knobs.nvidia.nvdisasm.path
    except RuntimeError:  # Triton finds none
        return ""
    with tempfile.TemporaryDirectory(prefix="fusion-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [tool, "--print-code", "--print-line-info", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"nvdisasm could not be run: {error}") from error
    if done.returncode:
        raise BuildError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


_PACKED = re.compile(r"^(\s*)add\.[su]16x2\s+(%\w+),\s*([^,;]+),\s*([^,;]+);", re.MULTILINE)

_HALVES = r"""\1{ .reg .b16 a, b, c, d; mov.b32 {a, b}, \3; mov.b32 {c, d}, \4;
\1  add.s16 a, a, c; add.s16 b, b, d; mov.b32 \2, {a, b}; }"""


def in_halves(ptx: str) -> str:
    """Return PTX in which no instruction adds two pairs of 16-bit integers.

    `ptxas` of CUDA 12.8 to 13.0 assembles `add.s16x2` with a constant as an addition of 0, from `-O1` on, where only
    one half of the result is used (sm_90).  LLVM writes such instructions for positions that it knows to fit into 16
    bits.

    >>> print(in_halves("    add.s16x2 %r3, %r1, %r2;"))
        { .reg .b16 a, b, c, d; mov.b32 {a, b}, %r1; mov.b32 {c, d}, %r2;
          add.s16 a, a, c; add.s16 b, b, d; mov.b32 %r3, {a, b}; }
    """
    return _PACKED.sub(_HALVES, ptx) if "16x2" in ptx else ptx
