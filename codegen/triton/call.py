"""Calls: the line with which one function of a launch calls another, on the tensors, sizes and blocks of its kernel."""

from __future__ import annotations

from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.expressions.indices import Layout

COUNTER = "counter"
"""The parameter, after tensors and sizes, that points to the count of finished programs."""

PROGRAM = "program"
"""The parameter of one of several kernels of a launch that is the number of its program."""


def call_of(name: str, layout: Layout, *leading: str) -> str:
    """Return a call of the function `name` of a kernel with this layout; `leading` are its first arguments."""
    kernel = layout.blocked.kernel
    arguments = [*leading, *map(argument, kernel.params), *(size.name for size in kernel.sizes)]
    arguments += [f"{constant}={block}" for constant, block in layout.constants.items()]
    return f"{name}({', '.join(arguments)})"
