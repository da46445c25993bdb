"""A program in which products over a dimension are computed from number to number.

Eager accumulates several products in parallel if the dimension is the innermost one, and otherwise one: which of the
intermediate products overflow depends on that order.  An infinity among them is NaN times a later 0, and a 0 times an
infinity, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

prod = torch.ops.aten.prod


class Products(TorchDispatchMode):
    """Compute each product over a dimension, or over all, from the first number to the last, in eager's precision."""

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = function(*args, **(kwargs or {}))
        if function not in (prod.default, prod.dim_int) or not (args[0].dim() and result.is_floating_point()):
            return result
        numbers = args[0].flatten() if function is prod.default else args[0].movedim(args[1], 0)
        precise = torch.promote_types(result.dtype, torch.float32)
        product = torch.ones(numbers.shape[1:], dtype=precise, device=result.device)
        for number in numbers.to(result.dtype).to(precise).unbind():
            product = product * number
        return product.to(result.dtype).view(result.shape)
