"""Lists the forms of a C kernel, in the order in which they are tried.

| form      | kernels                                                             |
|-----------|---------------------------------------------------------------------|
| `empty`   | a grid without points: nothing is stored                            |
| `streams` | products of a few rows with weights, each of which is read once |
| `blocked` | products, running values, loops inside loops: computed tile by tile |
| `loops`   | all others: loops over the grid and the folded axes                 |

There is nothing to configure: the compiler chooses registers, and threads and lanes follow from sizes.  So a form only
says whether it applies, and writes the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusion.codegen.c.blocked import blocked_function, needs_blocks
from fusion.codegen.c.frame import Frame
from fusion.codegen.c.loops.function import loops_function
from fusion.codegen.c.streams import plan_of, stream_functions
from fusion.lowering.kernel import Kernel, Role


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write a kernel.

    Attributes:
        applies: does the form compute this kernel, and does no earlier one?
        emit: the texts of its C functions, its own last; raises BuildError for dtypes and operations without a C form.
    """

    name: str
    applies: Callable[[Kernel], bool]
    emit: Callable[[Kernel], tuple[str, ...]]


def _is_empty(kernel: Kernel) -> bool:
    return any(axis.size == 0 for axis in kernel.with_role(Role.GRID))


FORMS = (
    Form("empty", _is_empty, lambda kernel: (Frame(kernel).function([]),)),
    Form("streams", lambda kernel: plan_of(kernel) is not None, stream_functions),
    Form("blocked", needs_blocks, lambda kernel: (blocked_function(kernel),)),
    Form("loops", lambda kernel: True, lambda kernel: (loops_function(kernel),)),
)


def form_of(kernel: Kernel) -> Form:
    """Return the first form that applies."""
    return next(form for form in FORMS if form.applies(kernel))
