"""A program that updates means, which accompany variances, number by number from the other end.

Such a mean becomes infinite at an infinity, and NaN at the next number.  So an infinity in the last position is kept,
and the last position depends on the order of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Backwards(TorchDispatchMode):
    """Reverse rows before their mean and variance are computed."""

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if function in (aten.var_mean.correction, aten.std_mean.correction):
            row = args[0]
            assert isinstance(row, Tensor)
            args = (row.flip(tuple(range(row.dim()))), *args[1:])
            return tuple(result.flip(tuple(range(result.dim()))) for result in function(*args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))
