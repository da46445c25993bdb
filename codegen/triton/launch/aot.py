"""Ahead of time: a generated file compiled for a named architecture, with or without its hardware.

What enters is a kernel, its source and an architecture such as "sm_90", "sm_80" or "gfx942"; what leaves is Triton's
compiled kernel, or the ladder of its stages as text (TTIR, TTGIR, LLVM IR, PTX or AMD assembly) and bytes (the binary).
Types and alignments come from the kernel, so nothing is specialised when it is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fusion.codegen.target import Stage
from fusion.codegen.triton.architecture import capability
from fusion.codegen.triton.launch.beginning import begin
from fusion.codegen.triton.launch.load import Generated, alignment, load, signature
from fusion.codegen.triton.products.matrix_units import shared_memory
from fusion.lowering.errors import BuildError
from fusion.lowering.kernel import Kernel
from fusion.lowering.scalar_ops import HALVES

_LADDERS = {"cuda": ("ttir", "ttgir", "llir", "ptx", "cubin"), "hip": ("ttir", "ttgir", "llir", "amdgcn", "hsaco")}


def target_of(arch: str) -> Any:
    """Triton's name for an architecture.

    >>> target_of("sm_90").arch, target_of("gfx942").warp_size
    (90, 64)

    Raises:
        BuildError: no such architecture.
    """
    if capability(arch):
        return GPUTarget("cuda", capability(arch), 32)
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise BuildError(f"unknown architecture {arch!r}", hint='name one like "sm_90" or "gfx942"')


def arch_of(target: Any) -> str:
    """Our name for one of Triton's targets."""
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def compile_for(generated: Generated, target: Any, multiples: tuple[bool, ...] = (), *, aligned: bool = True) -> Any:
    """Triton's `CompiledKernel` for one of its targets.

    `multiples` says of each size whether it is a multiple of 16, `aligned` whether pointers are as promised.  Where a
    kernel needs more shared memory than the target has, it is compiled again with a shorter pipeline.

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
    options = dict(generated.options)
    begin().hashing.join()
    if any(param.written and param.dtype not in HALVES for param in generated.kernel.params):
        options.setdefault("enable_reflect_ftz", False)  # the math library keeps denormals, as it does in eager
    while True:
        try:
            compiled = triton.compile(source, target=target, options=options)
        except Exception as error:
            raise BuildError(f"Triton cannot compile {name}: {_message(error)}") from error
        limit = shared_memory(arch_of(target))
        if compiled.metadata.shared <= limit:
            return compiled
        if options.get("num_stages", 1) <= 1:
            raise BuildError(
                f"{name} needs {compiled.metadata.shared} bytes of shared memory, {arch_of(target)} has {limit}",
                hint="take smaller blocks in CONFIG",
            )
        options["num_stages"] -= 1


def _language(generated: Generated) -> Any:
    """What Triton reads a function with; that of Gluon is imported by those that are written in it."""
    if not generated.function.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _message(error: BaseException) -> str:
    """The error and what caused it, where Triton says more."""
    causes = []
    seen: BaseException | None = error
    while seen is not None:
        causes.append(str(seen) or repr(seen))
        seen = seen.__cause__
    return "\n".join(dict.fromkeys(causes))


def stages(kernel: Kernel, source: str, arch: str) -> Iterator[Stage]:
    """The artefacts on the way from `source` to a binary for `arch`, in order.

    Raises:
        BuildError: Triton cannot compile it.
    """
    target = target_of(arch)
    compiled = compile_for(load(kernel, source), target)
    for name in _LADDERS[target.backend]:
        if name in compiled.asm:  # Gluon has no stage before the layouts are known
            yield name, compiled.asm[name]
