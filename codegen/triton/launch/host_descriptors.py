"""Creates tensor descriptors on the host, for sources that have a function `descriptors`.

Input: an imported source; output: the type of each descriptor, and the value that is passed for it.  A program
that creates descriptors cannot load anything before, which takes a few percent of the time of a product (measured:
docs/performance.md, `host_descriptors`).  A descriptor that is passed takes no time, and is kept for the next launch on
the same addresses and sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from fusion.codegen.triton.arguments import POINTERS
from fusion.lowering.ir.kernel import Kernel

MOST_CACHED = 1024
"""The most addresses, and the most sizes, for which descriptors are cached."""


@dataclass(frozen=True, slots=True)
class _Address:
    """A tensor of which only the address and the dtype are known."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def types(kernel: Kernel, module: ModuleType) -> list[str]:
    """Return the descriptors' types in Triton's notation."""
    if not hasattr(module, "descriptors"):
        return []
    descriptors = descriptors_of(kernel, module, [0] * len(kernel.params) + [1] * len(kernel.sizes))
    return [
        f"tensordesc<{POINTERS[each.base.dtype][1:]}{list(each.block_shape)}{_layout(each)}>" for each in descriptors
    ]


def _layout(descriptor: Any) -> str:
    """Return the layout of a block in shared memory, which descriptors have in Gluon."""
    layout = getattr(descriptor, "layout", None)
    return "" if layout is None else f",{layout!r}"


def descriptors_of(kernel: Kernel, module: ModuleType, args: Sequence[int]) -> tuple[Any, ...]:
    """Return the tensor descriptors of a source for these addresses and sizes."""
    count = len(kernel.params)
    tensors = [_Address(address, param.dtype) for address, param in zip(args, kernel.params, strict=False)]
    descriptors: tuple[Any, ...] = module.descriptors(*tensors, *args[count:])
    return descriptors


class DescriptorCache:
    """Caches the driver arguments of tensor descriptors by addresses and sizes.

    Args:
        forms: the compiler's description of each descriptor.
    """

    def __init__(self, kernel: Kernel, module: ModuleType, forms: Sequence[Any]) -> None:
        self._kernel, self._module, self._forms = kernel, module, forms
        self._of_sizes: dict[tuple[int, ...], list[_Slot]] = {}

    def __call__(self, args: Sequence[int]) -> list[Any]:
        sizes = tuple(args[len(self._kernel.params) :])
        arguments: list[Any] = []
        for slot in self._of_sizes.get(sizes) or self._slots(sizes):
            address = args[slot.position]
            arguments += slot.by_address.get(address) or slot.at(address)
        return arguments

    def _slots(self, sizes: tuple[int, ...]) -> list[_Slot]:
        positions = [16 * position for position in range(len(self._kernel.params))]
        descriptors = descriptors_of(self._kernel, self._module, [*positions, *sizes])
        if len(self._of_sizes) >= MOST_CACHED:
            self._of_sizes.clear()
        slots = [
            _Slot(each.base.address // 16, each, form) for each, form in zip(descriptors, self._forms, strict=True)
        ]
        self._of_sizes[sizes] = slots
        return slots


@dataclass(slots=True)
class _Slot:
    """One descriptor, of the tensor at a position, and its arguments by address."""

    position: int
    described: Any
    form: Any
    by_address: dict[int, list[Any]] = field(default_factory=dict)

    def at(self, address: int) -> list[Any]:
        from triton.backends.nvidia.driver import make_tensordesc_arg  # no other backend has it

        if len(self.by_address) >= MOST_CACHED:
            self.by_address.clear()
        descriptor = replace(self.described, base=_Address(address, self.described.base.dtype))
        self.by_address[address] = make_tensordesc_arg(descriptor, self.form)
        return self.by_address[address]


def stub_of(launch: Callable[..., None]) -> Callable[..., None]:
    """Return Triton's launching stub below the code that creates descriptors at each launch."""
    stub: Callable[..., None] = inspect.getclosurevars(launch).nonlocals["launcher"]
    return stub
