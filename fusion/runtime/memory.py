"""Allocates tensors, and reinterprets memory with another shape, at the least cost.

Called once for each result of each kernel of each step, PyTorch's general functions cost as much as a launch: they
parse names, look up a device and go through a dispatcher.  Inductor's allocators do not; they are used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch

from fusion.runtime import Boxed


class _Native(Protocol):
    """The functions of `torch._C._dynamo.guards` that its stub lacks."""

    def _empty_strided_cpu(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def _empty_strided_cuda(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def _reinterpret_tensor(
        self, tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> torch.Tensor: ...


_native = cast("_Native", torch._C._dynamo.guards)


def _called(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give `function` a name of its own, so that the generated code is readable."""
    named = partial(function)
    named.__name__, named.__module__ = name, "memory"  # type: ignore[attr-defined]  # partials take attributes
    return named


_ALLOCATORS = {
    "cpu": _called("empty", _native._empty_strided_cpu),
    "cuda": _called("empty", _native._empty_strided_cuda),
}


def allocator(device: torch.device, main: torch.device | None) -> Callable[..., torch.Tensor] | None:
    """Return an allocator on `device` for (shape, strides, dtype), where `main` is current if it is an accelerator.

    None if only PyTorch's own can be used.

    >>> allocator(torch.device("cpu"), torch.device("cpu"))((2, 3), (3, 1), torch.int8).shape
    torch.Size([2, 3])
    """
    if device.type == "cpu" or (device == main and device.type in _ALLOCATORS):
        return _ALLOCATORS[device.type]
    return None


def allocator_device(function: object) -> str | None:
    """Return the type of device on which `function`, one of `allocator`'s results, allocates; None of any other.

    >>> allocator_device(allocator(torch.device("cpu"), None)), allocator_device(torch.empty)
    ('cpu', None)
    """
    return next((device for device, each in _ALLOCATORS.items() if each is function), None)


in_memory_of = _called("in_memory_of", _native._reinterpret_tensor)
"""Returns a tensor of (shape, strides) with the same start as another one, which does not count as a view of it."""


def on_device(compiled: Boxed, main: torch.device) -> Boxed:
    """Run `compiled` with `main` as the current device of its type."""
    if main.type != "cuda" or main.index is None:
        return compiled
    index, current = main.index, torch._C._cuda_getDevice

    def run(args: list[object]) -> tuple[object, ...]:
        if current() == index:
            return compiled(args)
        with torch.cuda.device(index):
            return compiled(args)

    return run
