"""A program whose results have the memory layout of PyTorch's fake tensors.

The compiler uses the same layouts, which are not everywhere those of eager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only


class Faked(TorchDispatchMode):
    """Each new tensor has the strides of its fake, where there is one: not where only data say how large it is.

    One without elements has its shape, too.
    """

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        faked: object = None
        if not any(returned.alias_info for returned in function._schema.returns):
            with suppress(Exception), FakeTensorMode() as mode:
                given = tree_map_only(Tensor, mode.from_tensor, (tuple(args), dict(kwargs or {})))
                faked = function(*given[0], **given[1])
        results = function(*args, **(kwargs or {}))
        return results if faked is None else tree_map(_laid_out, results, faked)


def _laid_out(result: object, fake: object) -> object:
    if not isinstance(result, Tensor) or not isinstance(fake, Tensor):
        return result
    if not result.numel() and not fake.numel():
        return result.new_empty_strided(fake.shape, fake.stride())
    if result.shape != fake.shape or result.stride() == fake.stride():
        return result
    return torch.empty_strided(result.shape, fake.stride(), dtype=result.dtype, device=result.device).copy_(result)
