"""Ownership: whether a tensor that forward kept is backward's own, to be written over.

Input: a tensor; output: the same one if nobody else can see it, else a copy.  Others see it where the caller keeps the
graph for another backward, where hooks on saved tensors keep what they were given, and where a view of it is held.
Whatever is not known to be the only reference is copied; so is what a CUDA graph records, which is played again when
others may see it.
"""

from __future__ import annotations

import sys

import torch
from torch.utils._python_dispatch import _disable_current_modes


def take_over(tensor: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """`tensor`, which one variable of the caller holds, as a tensor of our own, once `after` is known if that is given.

    Outside of a backward, somebody else may always want it.

    >>> kept = torch.ones(3)
    >>> take_over(kept, torch.ones(())) is kept
    False
    """
    found, alone = _references(tensor), _alone()
    recorded = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if found != alone or recorded or torch._C._autograd._get_current_graph_task_keep_graph():
        return tensor.clone(memory_format=torch.preserve_format)
    return tensor


def _references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How often a tensor is referred to from Python and from C++, and how many tensors lie in its memory."""
    storages = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), storages  # type: ignore[attr-defined]  # has no stub


def _alone() -> tuple[int, int, int]:
    """The same of a tensor that one variable holds, seen from a function that is given it.

    Each time anew: while Dynamo looks at frames, a call holds its arguments twice.
    """
    with _disable_current_modes():
        fresh = torch.empty(0)
    return _given(fresh)


def _given(tensor: torch.Tensor) -> tuple[int, int, int]:
    return _references(tensor)
