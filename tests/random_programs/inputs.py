"""The inputs of random programs: shapes by named sizes, every common memory layout, numbers by kind.

Equal arguments give equal numbers on every machine and device.  A tensor may be created in float64 with the numbers of
its own dtype, and those may be shifted a little, to see how much a result depends on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8)

LAYOUTS = ("contiguous", "transposed", "reversed", "stepped", "padded", "offset", "expanded", "overlapping")
"""The layout of the elements: in order; the last two dimensions, or all, reversed; every second element; rows with a
gap between them; with a storage offset; one row that is expanded to all; rows that begin inside the row before.
"""

SHARED = ("expanded", "overlapping")
"""Layouts in which several elements share memory."""

VALUES = ("normal", "positive", "grid", "special", "wide")
"""Kinds of numbers: about ±2; 0.5 to 2; multiples of a quarter, with many ties and zeros; the same with −0, NaN and
infinities; integers that wrap around when multiplied."""


LEAST = 5e-3
"""A larger shift stands for other inputs, a smaller one for other roundings."""

PLAIN = {"layout": "contiguous", "values": "normal", "grad": False}


@dataclass(frozen=True)
class Input:
    """One tensor argument.  `dims` are names of sizes, or sizes."""

    name: str
    dims: tuple[str | int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    values: str = "normal"
    grad: bool = False

    def __str__(self) -> str:
        rest = [f"{name}={getattr(self, name)!r}" for name, plain in PLAIN.items() if getattr(self, name) != plain]
        return f"Input({', '.join([repr(self.name), repr(self.dims), str(self.dtype), *rest])})"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for these sizes."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)

    def tensor(
        self,
        sizes: Mapping[str, int],
        seed: int,
        device: str = "cpu",
        *,
        wide: bool = False,
        shift: float = 0.0,
        apart: bool = False,
    ) -> Tensor:
        """The argument, off by up to `shift` of each number; with `wide`, in float64.

        A shift that its own dtype can hold is rounded to it in both.  With `apart`, elements in one place in memory get
        places of their own and are off by different amounts, so that equal rows do not look harmless; other layouts
        stay, for a program may view them as no other can be viewed.
        """
        shape = self.shape(sizes)
        held, strides, offset = placed(shape, self.layout)
        generator = torch.Generator().manual_seed(seed)
        numbers = _numbers(held, self.dtype, self.values, generator)
        if self.dtype.is_floating_point and apart and self.layout in SHARED:
            numbers = numbers.as_strided(shape, strides, offset).flatten()
            held, strides, offset = placed(shape, "contiguous")
        if self.dtype.is_floating_point:
            noise_of = torch.Generator().manual_seed(seed + int(abs(shift) * 2**40))
            noise = torch.rand(held, generator=noise_of, dtype=torch.float64) * 2 - 1
            shifted = numbers.double() * (1 + shift * noise)
            numbers = shifted if abs(shift) < LEAST else shifted.to(self.dtype)
            numbers = numbers.double() if wide else numbers.to(self.dtype)
        result = numbers.to(device).as_strided(shape, strides, offset)
        return result.detach().requires_grad_(self.grad)


def placed(shape: tuple[int, ...], layout: str) -> tuple[int, tuple[int, ...], int]:
    """How many elements the memory of a layout holds, and the strides and the offset of the tensor in it.

    >>> placed((2, 3), "transposed"), placed((2, 3), "stepped"), placed((2, 3), "overlapping")
    ((6, (1, 2), 0), (12, (6, 2), 0), (5, (2, 1), 0))
    """
    order = list(range(len(shape)))
    gap, offset = (2 if layout == "padded" else 0), (3 if layout == "offset" else 0)
    if layout == "transposed" and len(shape) > 1:
        order[-2:] = reversed(order[-2:])
    if layout == "reversed":
        order.reverse()
    strides = [0] * len(shape)
    step = 2 if layout == "stepped" else 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * max(shape[dim], 1) + (gap if dim == order[-1] else 0)
    if layout == "expanded" and shape:
        strides[0] = 0
    if layout == "overlapping" and len(shape) > 1 and shape[-1] > 2:
        strides[-2] = shape[-1] - 1
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    held = last + 1 if layout != "stepped" else max(last + 1, 2 * math.prod(shape))
    return held + offset, tuple(strides), offset


def _numbers(count: int, dtype: torch.dtype, values: str, generator: torch.Generator) -> Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if not dtype.is_floating_point:
        low, high = (0, 256) if dtype is torch.uint8 else (-(2**30), 2**30) if values == "wide" else (-6, 7)
        return torch.randint(low, high, (count,), generator=generator).to(dtype)
    if values == "positive":
        return (torch.rand(count, generator=generator, dtype=torch.float32) * 1.5 + 0.5).to(dtype)
    if values == "normal":
        return torch.randn(count, generator=generator, dtype=torch.float32).clamp(-3, 3).to(dtype)
    grid = torch.randint(-8, 9, (count,), generator=generator).to(torch.float32) / 4
    if values == "special":
        odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=torch.float32)
        chosen = torch.randint(0, 40, (count,), generator=generator)
        grid = torch.where(chosen < 4, odd[chosen.clamp(max=3)], grid)
    return grid.to(dtype)
