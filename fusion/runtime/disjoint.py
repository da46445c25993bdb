"""Decides whether tensors that are changed in place share memory with others.

Input: the arguments of a call, and which of them are changed; output: whether the changed ones are disjoint from all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

_storage_address = cast("Callable[[object], int]", torch._C._storage_address)  # type: ignore[attr-defined]  # no stub
"""Returns where the storage of a tensor is described, without an object of Python for it: a program with many weights
has just read other memory, and each object that it looks at costs it a cache miss."""


@dataclass(frozen=True, slots=True)
class Disjoint:
    """Inputs of which the `changed` ones are disjoint from all `others`, which include them."""

    changed: frozenset[int]
    others: tuple[int, ...]

    def holds(self, args: Sequence[object]) -> bool:
        """Return whether that holds for these inputs; in most calls no two of them share a storage, a fast check."""
        memories = {_storage_address(args[k]) for k in self.others}
        if len(memories) == len(self.others):
            return True
        spans = spans_of(args, self.others)
        reached = reached_by_changed = 0
        for k in sorted(self.others, key=spans.__getitem__):
            start, stop = spans[k]
            if start < stop and start < (reached if k in self.changed else reached_by_changed):
                return False
            reached = max(reached, stop)
            if k in self.changed:
                reached_by_changed = max(reached_by_changed, stop)
        return True


def spans_of(args: Sequence[object], tensors: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the first byte and the end of each tensor's elements in memory."""
    spans = {}
    for k in tensors:
        tensor = args[k]
        assert isinstance(tensor, torch.Tensor)
        start = tensor.data_ptr()
        if tensor.is_contiguous():
            spans[k] = (start, start + tensor.nbytes)
        else:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans[k] = (start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)
    return spans
