"""Turns a Kernel into the text of one C function, in the first form that applies.

Input: a kernel; output: a function of the same name that takes the data pointers of its params, its sizes as int64_t
and the number of threads, with the few definitions it needs before it.  The forms, in the order in which they are
tried:

| form      | kernels                                                             |
|-----------|---------------------------------------------------------------------|
| `empty`   | a grid without points: nothing is stored                            |
| `skinny`  | products of a few rows with weights, each of which is read once |
| `blocked` | products, running values, loops inside loops: computed tile by tile |
| `loops`   | all others: loops over the grid and the folded axes                 |

There is nothing to configure: the compiler chooses registers, and threads and lanes follow from sizes.  So a form only
says whether it applies, and writes the function.

Refused (BuildError): dtypes and operations without a C form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusion.codegen.c.blocked import blocked_function, needs_blocks
from fusion.codegen.c.frame import Frame, called_by
from fusion.codegen.c.loops.function import loops_function
from fusion.codegen.c.skinny import plan_of, skinny_functions
from fusion.codegen.c.text.prelude import prelude
from fusion.lowering.ir.kernel import Kernel, Role


@dataclass(frozen=True, slots=True)
class CForm:
    """One way to write a kernel.

    Attributes:
        applies: does the form compute this kernel, and does no earlier one?
        emit: the texts of its C functions, its own last; raises BuildError for dtypes and operations without a C form.
            Its second argument says whether the sums of few rows may have another order than those of many.
    """

    name: str
    applies: Callable[[Kernel], bool]
    emit: Callable[[Kernel, bool], tuple[str, ...]]


def _is_empty(kernel: Kernel) -> bool:
    return any(axis.size == 0 for axis in kernel.with_role(Role.GRID))


FORMS = (
    CForm("empty", _is_empty, lambda kernel, few_rows: (Frame(kernel).function([]),)),
    CForm("skinny", lambda kernel: plan_of(kernel) is not None, lambda kernel, few_rows: skinny_functions(kernel)),
    CForm("blocked", needs_blocks, lambda kernel, few_rows: (blocked_function(kernel, few_rows=few_rows),)),
    CForm("loops", lambda kernel: True, lambda kernel, few_rows: (loops_function(kernel),)),
)


def form_of(kernel: Kernel) -> CForm:
    """Return the first form that applies."""
    return next(form for form in FORMS if form.applies(kernel))


def emit_kernel(kernel: Kernel, *, few_rows: bool = True) -> str:
    """Return the C source of `kernel`.  Equal kernels give equal text.

    Args:
        few_rows: whether products of few rows have functions of their own, which sum in another order.

    Raises:
        BuildError: the kernel cannot be written in C.
    """
    *called, launched = _functions(kernel, few_rows)
    origins = "".join(f"// {' '.join(line.split())}\n" for line in kernel.origins)
    return "\n".join([prelude("".join([*called, launched])), *called, origins + launched])


def _functions(kernel: Kernel, few_rows: bool) -> list[str]:
    """Return the C functions of a launch, each above its callers."""
    functions: list[str] = []
    for part in called_by(kernel):
        functions += map(_static, _functions(part, few_rows))
    return list(dict.fromkeys([*functions, *form_of(kernel).emit(kernel, few_rows)]))


def _static(function: str) -> str:
    """Return a function that no other object sees."""
    return f"static {function}" if function.startswith(("int ", "int64_t ")) else function
