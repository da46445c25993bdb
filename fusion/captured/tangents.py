"""Tangents: how the gradient of a result lies in memory that is given to backward.

AOTAutograd takes it that the gradient of a result has the strides of the result, and copies one that has others into
memory of those strides.  Where elements of the result share memory (windows of `unfold` that overlap), that memory
holds fewer numbers than the gradient has, and most are lost.  Of such graphs the gradients are contiguous.

What enters is Dynamo's graph; what leaves is a setting for as long as AOTAutograd traces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch._functorch import config


@contextmanager
def tangents_laid_out(graph: fx.GraphModule) -> Iterator[None]:
    """Within, AOTAutograd traces `graph` for gradients that can hold what they are given."""
    values = (node.meta.get("example_value") for node in graph.graph.output_node().all_input_nodes)
    if any(isinstance(value, torch.Tensor) and may_overlap(value) for value in values):
        with config.patch(guess_tangent_strides_as_outputs=False):
            yield
    else:
        yield


def may_overlap(tensor: torch.Tensor) -> bool:
    """May two elements share memory?  False for all that is cut out of something dense, in any order of dimensions.

    False also of symbolic sizes, of which AOTAutograd lays out gradients by memory format anyway.

    >>> may_overlap(torch.zeros(8).unfold(0, 3, 2)), may_overlap(torch.zeros(4, 6).t()[1:, ::2])
    (True, False)
    """
    if tensor.layout is not torch.strided or not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
        return False
    steps = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    reached = 0
    for stride, size in steps:
        if stride <= reached:
            return True
        reached += stride * (size - 1)
    return False
