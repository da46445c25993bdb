"""Determines whether a tensor that forward saved belongs to backward alone, and so may be overwritten.

Input: a tensor; output: the same tensor if nobody else can read it, else a copy.  There are other readers if the caller
keeps the graph for another backward, if hooks on saved tensors keep them, and if a view is alive.  Whenever it is not
certain that there is one reference, the tensor is copied.

A graph that is captured is replayed when there may be other readers, so under capture a tensor is copied, too, unless
the same capture holds the forward that computed it: then each replay computes it anew before it is overwritten.
"""

from __future__ import annotations

import sys

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fusion.operations.captures import COMPUTED


def take_over(tensor: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """Return `tensor`, which one variable of the caller holds, or a copy if it has other readers.

    `after`: a tensor that must be computed before, if any.  Outside of a backward there may always be other readers.

    >>> kept = torch.ones(3)
    >>> take_over(kept, torch.ones(())) is kept
    False
    """
    references, sole = _references(tensor), _sole_references()
    replayed_alone = tensor.is_cuda and torch.cuda.is_current_stream_capturing() and not COMPUTED.has(tensor)
    if references != sole or replayed_alone or torch._C._autograd._get_current_graph_task_keep_graph():
        return tensor.clone(memory_format=torch.preserve_format)
    return tensor


def _references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the reference counts of a tensor in Python and in C++, and the number of tensors in its storage."""
    storages = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), storages  # type: ignore[attr-defined]  # has no stub


def _sole_references() -> tuple[int, int, int]:
    """Return the reference counts that a callee sees for a tensor that only one variable of its caller holds.

    They are measured at each call, because a call holds its arguments twice while Dynamo evaluates frames.
    """
    with _disable_current_modes():
        fresh = torch.empty(0)
    return _references_as_argument(fresh)


def _references_as_argument(tensor: torch.Tensor) -> tuple[int, int, int]:
    return _references(tensor)
