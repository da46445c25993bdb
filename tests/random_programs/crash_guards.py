"""Programs that crash eager, which cannot be judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Survived(TorchDispatchMode):
    """Raises where eager would crash the process.

    PyTorch's group norm with channels last writes the gradient of its input even if it is not requested, at address 0
    (2.13 and before, on a CPU).  Its attention divides by the number of heads, which may be 0 (2.11).
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.native_group_norm_backward.default:
            x, asked = args[1], args[-1]
            if not asked[0] and suggest_memory_format(x) is not torch.contiguous_format:
                raise RuntimeError("eager writes a gradient that is not asked for")
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default and args[0].shape[1] == 0:
            raise RuntimeError("eager divides by a number of heads")
        return func(*args, **(kwargs or {}))
