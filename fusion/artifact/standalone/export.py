"""Exports a program as a shared library that runs it without Python.

Input: a program and example inputs, as for `fusion.save`; output: a library, its header, and a file of weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fusion.api import options_for
from fusion.artifact.ahead import compiled
from fusion.artifact.capture import captured
from fusion.artifact.standalone.describe import standalone
from fusion.artifact.state import written_beside
from fusion.artifact.weights import pieces
from fusion.codegen.c.launcher import callee_of
from fusion.codegen.c.processor import NATIVE
from fusion.codegen.c.standalone.blas import blas_of
from fusion.codegen.c.standalone.library import HEADER, library, runner_files
from fusion.codegen.targets import TARGETS
from fusion.lowering.errors import Unsupported
from fusion.schedule.overrides import ONE_KERNEL, Overrides

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ALL_GENERATED = Overrides(products=ONE_KERNEL, attention=True, library=False)
"""Decisions for a program that has no library to call: everything is generated."""


def export_library(
    program: Callable[..., object] | ExportedProgram,
    path: str | os.PathLike[str],
    *,
    inputs: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    dynamic_shapes: object = None,
    arch: str = NATIVE,
    weights: str | os.PathLike[str] | None = None,
    blas: str | None = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Compile a program for CPUs to a shared library with a C interface, which needs neither Python nor PyTorch.

    The header `fusion.h` and the weights, in the safetensors format, are written beside it.  All operations are
    generated: matrix products, convolutions and attention too.  With `blas` the library links that, and calls it for
    products that are predicted to take longer as a kernel.

    Args:
        program: an `nn.Module` or a function, fused or not, or the result of `torch.export.export`.
        path: the library, such as "libmodel.so"; files that exist are replaced.
        inputs: example arguments; only their shapes, strides and dtypes matter, and values that are no tensors.
        kwargs: example arguments by keyword.
        dynamic_shapes: which sizes vary, as for `torch.export.export`.
        arch: the architecture to compile for: "native" (the CPU at hand), or on x86-64 a level, such as "x86-64-v3".
        weights: the name of a file in the folder of `path` that holds the weights already, such as an artifact of
            `fusion.save`; by default they are written to a file with the library's name.
        blas: the name of a library with the interface of CBLAS, such as "openblas", or its path; none by default.
        options: as for `fusion.fuse`; by default the options with which `program` was fused.

    Raises:
        TypeError: `program` cannot be called, or `inputs` is no sequence.
        Unsupported: an operation is not generated, or the program is not exported: the message lists every reason.
        FusionError: it cannot be compiled.
        OSError: a file cannot be written.
    """
    chosen = options_for(program, options)
    if chosen.target not in (None, "c"):
        raise Unsupported(f"the target c generates libraries, not {chosen.target}")
    target = TARGETS["c"](None, chosen.current_numerics)
    whole = captured(program, inputs, kwargs or {}, dynamic_shapes)
    linked = None if blas is None else blas_of(blas)
    compilation = compiled(
        whole, target, chosen, ALL_GENERATED if linked is None else replace(ALL_GENERATED, products="")
    )
    if compilation.device.type != "cpu":
        raise Unsupported(f"a library runs on CPUs, and the program is on {compilation.device.type}")
    place = Path(path)
    beside = Path(f"{place.stem.removeprefix('lib')}.safetensors" if weights is None else os.fspath(weights))
    callees = {kernel: callee_of(kernel) for kernel in compilation.sources}
    described, state = standalone(whole, compilation, callees, beside.name, has_blas=linked is not None)
    binary = library(described, arch, linked)
    if weights is not None:
        written_beside(place, beside, state)
    else:
        with (place.parent / beside).open("wb") as file:
            file.writelines(pieces(state))
    (place.parent / HEADER).write_text(runner_files()[HEADER], encoding="utf-8")
    place.write_bytes(binary)


__all__ = ["export_library"]
