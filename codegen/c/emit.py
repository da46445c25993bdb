"""Turns a Kernel into the text of one C function.

Input: a kernel; output: a function of the same name that takes the data pointers of its params, its sizes as int64_t
and the number of threads, with the few definitions it needs before it.  Its form (`forms`) writes it.

Refused (BuildError): dtypes and operations without a C form.
"""

from __future__ import annotations

from fusion.codegen.c.forms import form_of
from fusion.codegen.c.frame import called_by
from fusion.codegen.c.text.prelude import prelude
from fusion.lowering.kernel import Kernel


def emit_kernel(kernel: Kernel) -> str:
    """Return the C source of `kernel`.  Equal kernels give equal text.

    Raises:
        BuildError: the kernel cannot be written in C.
    """
    *called, launched = _functions(kernel)
    origins = "".join(f"// {' '.join(line.split())}\n" for line in kernel.origins)
    return "\n".join([prelude("".join([*called, launched])), *called, origins + launched])


def _functions(kernel: Kernel) -> list[str]:
    """Return the C functions of a launch, each above its callers."""
    functions: list[str] = []
    for part in called_by(kernel):
        *inner, last = _functions(part)
        functions += [*inner, f"static {last}"]
    return list(dict.fromkeys([*functions, *form_of(kernel).emit(kernel)]))
