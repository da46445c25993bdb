"""Sets the memory layout of gradients of results for AOTAutograd.

AOTAutograd of PyTorch 2.13 assumes that the gradient of a result has the strides of the result, and copies others into
memory with those strides (2.11 assumes contiguous gradients).  If elements of the result share memory (overlapping
windows of `unfold`), that memory holds fewer elements than the gradient, and most are lost.  The gradients of such
graphs are contiguous.

Input: Dynamo's graph; output: a setting for as long as AOTAutograd traces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch._functorch import config

from fusion.dynamo.shared_writes import Place


@contextmanager
def tangents_laid_out(graph: fx.GraphModule) -> Iterator[None]:
    """Let AOTAutograd trace `graph` with gradients whose memory holds all their elements."""
    values = (node.meta.get("example_value") for node in graph.graph.output_node().all_input_nodes)
    places = [Place.of(value) for value in values if isinstance(value, torch.Tensor)]
    if any(place is not None and place.overlaps_itself for place in places):
        with config.patch(guess_tangent_strides_as_outputs=False):
            yield
    else:
        yield
