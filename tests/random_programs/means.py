"""A program in which the means of layer norms are off by a rounding.

Eager updates these means number by number, and the mean of equal numbers is exact.  A rounded sum is not, and these
means are rounded sums in rows that are computed from more than plain loads (docs/numerics.md): then the differences are
not 0, and the factor of the norm makes them large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Means(TorchDispatchMode):
    """Each mean is off by `step` of itself, and so is the value that it is subtracted from."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        results = function(*args, **(kwargs or {}))
        if function is not torch.ops.aten.native_layer_norm.default:
            return results
        (norm, mean, factor), weight = results, args[2]
        off = self.step * mean * factor
        return norm - (off if weight is None else off * weight), mean * (1 + self.step), factor
