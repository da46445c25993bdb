"""Names a kernel's parameters in its source, with their types, and writes calls between functions of a launch.

A tensor is passed as a pointer, a number of the host by value.
"""

from __future__ import annotations

import torch

from fusion.codegen.triton.expressions.code import Code, Operand, compose, listed
from fusion.codegen.triton.expressions.indices import Layout
from fusion.lowering.ir.kernel import Kernel, Param

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

COUNTER = "counter"
"""The parameter, after tensors and sizes, that points to the count of finished programs."""

PROGRAM = "program"
"""The parameter of one of several kernels of a launch that is the number of its program."""


def argument(param: Param) -> str:
    """Return the name of a parameter in the source."""
    return param.name if param.number else f"{param.name}_ptr"


def type_of(param: Param) -> str:
    """Return Triton's name of the type with which a parameter is passed."""
    pointer = POINTERS[param.dtype]
    if not param.number:
        return pointer
    return "u1" if param.dtype is torch.bool else pointer.removeprefix("*")


def on_device(kernel: Kernel) -> int:
    """Return the position of a parameter that is on the device: a parameter that is written."""
    return next((position for position, param in enumerate(kernel.params) if param.written), 0)


def call_of(name: str, layout: Layout, *leading: Operand) -> Code:
    """Return a call of the function `name` of a kernel with this layout; `leading` are its first arguments."""
    kernel = layout.blocked.kernel
    arguments = [*leading, *map(argument, kernel.params), *(size.name for size in kernel.sizes)]
    constants = [Code(f"{constant}={block}") for constant, block in layout.constants.items()]
    return compose("{}({})", name, listed([*arguments, *constants]))
