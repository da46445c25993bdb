"""A program in float64 in which each operation that rounds is off by a rounding.

Inputs that are off by a rounding show little of the roundings on the way: a small number that is added to a large one
is rounded as a large one.  A compiler may leave out any of these roundings, and then integers that depend on them
differ: where a number is truncated, and the positions of numbers that are close to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Roundings(TorchDispatchMode):
    """Each result that an operation computes is off by up to `step` of itself; equal results by equal amounts.

    Views and copies compute nothing, nor do selections, sorts and moves: all their results existed before.
    """

    def __init__(self, step: float, phase: float) -> None:
        super().__init__()
        self.step, self.phase = step, phase

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if _is_wide(leaf)]
        before = [tensor.detach().abs().flatten() for tensor in given]  # copies: the operands may be written
        results = function(*args, **(kwargs or {}))
        if before and not getattr(function, "is_view", False):
            known = torch.cat(before).nan_to_num()
            for result in tree_leaves(results):
                if _is_wide(result) and not torch.isin(result.abs().nan_to_num(), known).all():
                    result.mul_(self._factor(result))
        return results

    def _factor(self, tensor: Tensor) -> Tensor:
        """Return 1, off by up to `step`: the same for equal numbers, and independent for others."""
        digits = torch.frexp(tensor.abs().nan_to_num())[0] * 1e9
        return 1 + self.step * (2 * ((digits + self.phase) * 0.6180339887498949 % 1.0) - 1)


def _is_wide(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.dtype is torch.float64
