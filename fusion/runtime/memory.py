"""Allocates tensors, and reinterprets memory with another shape, at the least cost.

Called once for each result of each kernel of each step, PyTorch's general functions cost as much as a launch: they
parse names, look up a device and go through a dispatcher.  Inductor's allocators do not; they are used here.

The C library maps large tensors of a CPU anew each time, and the kernel zeroes each page when it is first written to:
with pages of 4 KB this takes longer than most kernels that write them.  For such tensors huge pages are requested, and
those that no program sees are in memory of earlier ones (`recycled`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch

from fusion.runtime import Boxed
from fusion.runtime.recycled import recycled


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


LARGE = 32 << 20
"""Bytes of allocations that glibc maps whatever came before, and returns to the system when they are freed
(measured: docs/performance.md, `LARGE`)."""


def _find_advice() -> Callable[[int, int], object] | None:
    """Return the function that requests huge pages for an address range; None where the system has none."""
    request = getattr(mmap, "MADV_HUGEPAGE", None)
    if request is None:
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return lambda begin, size: advise(begin, size, request)  # a system that refuses leaves the pages as they are


_advise = _find_advice()


def _empty_large(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor on the CPU, in huge pages if it is large."""
    tensor = _native._empty_strided_cpu(shape, strides, dtype)
    memory = tensor.untyped_storage()
    if memory.nbytes() >= LARGE and _advise is not None:
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        _advise(first, end // mmap.PAGESIZE * mmap.PAGESIZE - first)
    return tensor


def _empty_hidden(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor on the CPU, in recycled memory if it is large; it cannot be resized."""
    count = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    vector = recycled(count, dtype) if count * dtype.itemsize >= LARGE else None
    return _empty_large(shape, strides, dtype) if vector is None else in_memory_of(vector, shape, strides)


empty_large = _called("empty_large", _empty_large)
empty_hidden = _called("empty_hidden", _empty_hidden)

_ALLOCATORS = {
    "cpu": _called("empty", _native._empty_strided_cpu),
    "cuda": _called("empty", _native._empty_strided_cuda),
}


def allocator(
    device: torch.device, main: torch.device | None, size: int | None = 0, *, hidden: bool = False
) -> Callable[..., torch.Tensor] | None:
    """Return an allocator on `device` for (shape, strides, dtype), where `main` is current if it is an accelerator.

    None if only PyTorch's own can be used.

    Args:
        size: the bytes that it allocates; None if each call has its own.
        hidden: whether no program sees the tensor, so that it need not be resizable.

    >>> allocator(torch.device("cpu"), torch.device("cpu"))((2, 3), (3, 1), torch.int8).shape
    torch.Size([2, 3])
    """
    if device.type == "cpu":
        large = empty_hidden if hidden else empty_large
        return large if size is None or size >= LARGE else _ALLOCATORS["cpu"]
    return _ALLOCATORS[device.type] if device == main and device.type in _ALLOCATORS else None


def allocator_device(function: object) -> str | None:
    """Return the type of device on which `function`, one of `allocator`'s results, allocates; None of any other.

    >>> allocator_device(allocator(torch.device("cpu"), None)), allocator_device(torch.empty)
    ('cpu', None)
    """
    if function in (empty_large, empty_hidden):
        return "cpu"
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
