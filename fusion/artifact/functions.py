"""Lists the functions that a step may call, and finds PyTorch's operations by name.

Input: a name; output: a function.  Whatever is not listed, and is no operation of PyTorch, is not called.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch._ops import OpOverload

from fusion.runtime.memory import allocator, empty_hidden, empty_large, in_memory_of
from fusion.runtime.results import as_traced

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)

_OF_TORCH: Mapping[str, Callable[..., object]] = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("empty_strided", "as_strided", "mm", "bmm", "addmm", "baddbmm", "convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
    if hasattr(torch, name)
}
"""Functions with the names and arguments of operations, which cost less to call."""

STEP_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "empty": allocator(_CPU, _CPU) or torch.empty_strided,
    "empty_large": empty_large,
    "empty_hidden": empty_hidden,
    "empty_cuda": allocator(_CUDA, _CUDA) or torch.empty_strided,
    "in_memory_of": in_memory_of,
    "as_traced": as_traced,
    **{f"operator.{name}": getattr(operator, name) for name in ("add", "mul", "floordiv", "mod", "pow", "getitem")},
    **{f"torch.Tensor.{name}": getattr(torch.Tensor, name) for name in ("size", "stride", "storage_offset")},
    **_OF_TORCH,
}
"""Name → a function that steps may call."""

NAMES: Mapping[Callable[..., object], str] = {function: name for name, function in STEP_FUNCTIONS.items()}

_OPERATION = re.compile(r"[A-Za-z]\w*\.\w+\.\w+")


def operation(name: str) -> OpOverload:
    """Return the operation of PyTorch with this name, such as "aten.mm.default".

    Raises:
        LookupError: this process has none.
    """
    try:
        target: object = reduce(getattr, name.split("."), torch.ops) if _OPERATION.fullmatch(name) else None
    except AttributeError as error:
        raise LookupError(f"there is no operation {name}") from error
    if not isinstance(target, OpOverload):
        raise LookupError(f"there is no operation {name}")
    return target


def schema_of(name: str) -> str:
    """Return the signature of an operation of PyTorch, or of a function of the same name; empty for other functions.

    Raises:
        LookupError: this process has no such operation.
    """
    if name in STEP_FUNCTIONS:
        overloads: object = getattr(torch.ops.aten, name.removeprefix("torch."), None) if name in _OF_TORCH else None
        return str(overloads.default._schema) if hasattr(overloads, "default") else ""
    return str(operation(name)._schema)


__all__ = ["NAMES", "STEP_FUNCTIONS", "operation", "schema_of"]
