"""Arguments: what the parameters of a kernel are called in its source, and the types they are passed with.

A tensor is passed as a pointer, a number of the host as itself.
"""

from __future__ import annotations

import torch

from fusion.lowering.kernel import Kernel, Param

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


def argument(param: Param) -> str:
    """The name of a parameter in the source."""
    return param.name if param.number else f"{param.name}_ptr"


def type_of(param: Param) -> str:
    """Triton's name for the type that a parameter is passed with."""
    pointer = POINTERS[param.dtype]
    if not param.number:
        return pointer
    return "u1" if param.dtype is torch.bool else pointer.removeprefix("*")


def on_device(kernel: Kernel) -> int:
    """The position of a parameter that is on the device: one that is written."""
    return next((position for position, param in enumerate(kernel.params) if param.written), 0)
