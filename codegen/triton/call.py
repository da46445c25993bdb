"""Call: the line with which one function of a launch runs another, on the tensors, sizes and blocks of its kernel."""

from __future__ import annotations

from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.expressions.indices import Layout

COUNTER = "counter"
"""The parameter, after tensors and sizes, that points to the number of finished programs."""

PROGRAM = "program"
"""The parameter of one of several kernels of a launch that says which of its programs runs."""


def call_of(name: str, layout: Layout, *told: str) -> str:
    """A call of the function `name` of a kernel that is laid out so; `told` are its arguments before all others."""
    kernel = layout.blocked.kernel
    given = [*told, *map(argument, kernel.params), *(size.name for size in kernel.sizes)]
    given += [f"{constant}={block}" for constant, block in layout.constants.items()]
    return f"{name}({', '.join(given)})"
