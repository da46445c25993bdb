"""Creates the tensors that a dumped file runs on.

Input: shape, strides and dtype of each tensor, as the file states them; output: tensors of random numbers, the same in
each run.  Floats are normally distributed, or between 0 and 1 if the kernel refuses others (probabilities).  Integers
are in the range that the file states; without one they may still be positions, so that a file is tried with smaller and
smaller numbers until every access is in bounds (`attempts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fusion.lowering.interpret.evaluate import flat_view

_SEED = 20
_LARGEST_DRAWN = 127
"""The largest drawn integer that is not known to be a position."""

UNWRITTEN = -77
"""The content of a written tensor of integers before the launch."""


@dataclass(slots=True)
class Draw:
    """Draws the tensors of one attempt.

    Attributes:
        device: where they are created, but for numbers that the host passes.
        limit: integers without a range are drawn from 0 up to it, exclusive; None: they are small, of either sign.
        unit: floats are uniform in [0, 1).
        unranged: whether integers without a range were drawn.
    """

    device: torch.device
    limit: int | None = None
    unit: bool = False
    unranged: bool = False
    _drawn: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the attempts that follow draw the same numbers."""
        return self.unit and not self.unranged

    def normal(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        *,
        host: bool = False,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Return floats, by default of this standard deviation; on the host if they are passed by value."""
        tensor, flat, generator = self._new(shape, strides, dtype, host)
        drawn = torch.float32 if dtype.itemsize == 1 else dtype  # floats of 8 bits are converted
        if self.unit:
            flat.copy_(torch.rand(flat.shape, dtype=drawn, device=flat.device, generator=generator))
        else:
            flat.copy_(torch.randn(flat.shape, dtype=drawn, device=flat.device, generator=generator) * scale)
        return tensor

    def integers(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        low: int | None = None,
        high: int | None = None,
        *,
        host: bool = False,
    ) -> torch.Tensor:
        """Return integers from `low` to `high`, inclusive."""
        tensor, flat, generator = self._new(shape, strides, dtype, host)
        info = torch.iinfo(dtype)
        if low is None or high is None:
            self.unranged = True
            low, high = (-_LARGEST_DRAWN - 1, _LARGEST_DRAWN) if self.limit is None else (0, self.limit - 1)
        low, high = max(low, info.min), min(high, info.max)
        drawn = torch.randint(low, max(high, low) + 1, flat.shape, device=flat.device, generator=generator)
        flat.copy_(drawn)
        return tensor

    def booleans(self, shape: Sequence[int], strides: Sequence[int], *, host: bool = False) -> torch.Tensor:
        """Return booleans, each with even chances."""
        tensor, flat, generator = self._new(shape, strides, torch.bool, host)
        flat.random_(0, 2, generator=generator)
        return tensor

    def result(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of a result that is not read: full of NaN, or of a number, where nothing is stored."""
        tensor, flat, _ = self._new(shape, strides, dtype, False)
        flat.fill_(float("nan") if dtype.is_floating_point else UNWRITTEN % 256 if dtype is torch.uint8 else UNWRITTEN)
        return tensor

    def _new(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, host: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
        """Return an empty tensor, its memory as a vector, and a generator in the same state in each run."""
        device = torch.device("cpu") if host else self.device
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        self._drawn += 1
        return tensor, flat_view(tensor), torch.Generator(device).manual_seed(_SEED + self._drawn)


def attempts(device: torch.device, sizes: Iterable[int]) -> Iterator[Draw]:
    """Yield ways to draw: integers of any size, then positions along dimensions of these sizes, the largest first."""
    for limit in (None, *sorted({*sizes, 1} - {0}, reverse=True)):
        yield Draw(device, limit)
        yield Draw(device, limit, unit=True)


__all__ = ["UNWRITTEN", "Draw", "attempts"]
