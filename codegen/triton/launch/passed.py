"""Passed: tensor descriptors that the host makes and a launch passes, where a source has a function `descriptors`.

What enters is an imported source; what leaves is the type of each descriptor, and what is passed for it.  A descriptor
that a program makes takes it 0.85 µs on an H200, before it fetches anything: three of them are 2 of 60 µs of a product,
seven 6 of 79.  One that is passed takes nothing, and is kept for the next launch on the same addresses and sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from fusion.codegen.triton.arguments import POINTERS
from fusion.lowering.kernel import Kernel

MOST = 1024
"""Addresses, and sizes, for which descriptors are kept."""


@dataclass(frozen=True, slots=True)
class _Address:
    """A tensor of which nothing more is known."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def types(kernel: Kernel, module: ModuleType) -> list[str]:
    """Triton's names for the types of the descriptors of a source."""
    if not hasattr(module, "descriptors"):
        return []
    made = made_of(kernel, module, [0] * len(kernel.params) + [1] * len(kernel.sizes))
    return [f"tensordesc<{POINTERS[each.base.dtype][1:]}{list(each.block_shape)}>" for each in made]


def made_of(kernel: Kernel, module: ModuleType, args: Sequence[int]) -> tuple[Any, ...]:
    """The descriptors for addresses and sizes."""
    count = len(kernel.params)
    tensors = [_Address(address, param.dtype) for address, param in zip(args, kernel.params, strict=False)]
    made: tuple[Any, ...] = module.descriptors(*tensors, *args[count:])
    return made


class Kept:
    """What a launch on addresses and sizes passes for its descriptors, as the driver takes them.

    Args:
        forms: in which the compiler wants the descriptors.
    """

    def __init__(self, kernel: Kernel, module: ModuleType, forms: Sequence[Any]) -> None:
        self._kernel, self._module, self._forms = kernel, module, forms
        self._of_sizes: dict[tuple[int, ...], list[_Slot]] = {}

    def __call__(self, args: Sequence[int]) -> list[Any]:
        sizes = tuple(args[len(self._kernel.params) :])
        given: list[Any] = []
        for slot in self._of_sizes.get(sizes) or self._slots(sizes):
            address = args[slot.position]
            given += slot.found.get(address) or slot.at(address)
        return given

    def _slots(self, sizes: tuple[int, ...]) -> list[_Slot]:
        positions = [16 * position for position in range(len(self._kernel.params))]
        made = made_of(self._kernel, self._module, [*positions, *sizes])
        if len(self._of_sizes) >= MOST:
            self._of_sizes.clear()
        slots = [_Slot(each.base.address // 16, each, form) for each, form in zip(made, self._forms, strict=True)]
        self._of_sizes[sizes] = slots
        return slots


@dataclass(slots=True)
class _Slot:
    """One descriptor, of the tensor at a position, and what has been passed for it by address."""

    position: int
    described: Any
    form: Any
    found: dict[int, list[Any]] = field(default_factory=dict)

    def at(self, address: int) -> list[Any]:
        from triton.backends.nvidia.driver import make_tensordesc_arg  # no other backend has it

        if len(self.found) >= MOST:
            self.found.clear()
        made = replace(self.described, base=_Address(address, self.described.base.dtype))
        self.found[address] = make_tensordesc_arg(made, self.form)
        return self.found[address]


def stub_of(launch: Callable[..., None]) -> Callable[..., None]:
    """Triton's launching stub that takes what a descriptor is for the driver, below what makes it at each launch."""
    stub: Callable[..., None] = inspect.getclosurevars(launch).nonlocals["launcher"]
    return stub
