"""A program in which the means of layer norms are off by a rounding.

Eager brings these means from number to number, and that of equal numbers is exact.  A rounded sum is not, which is what
they are here in rows that are made of more than plain loads (docs/numerics.md): then what is left of each number is not
0, and the factor of the norm makes it large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Means(TorchDispatchMode):
    """Each mean is off by `step` of itself, and so is what it is subtracted from."""

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
