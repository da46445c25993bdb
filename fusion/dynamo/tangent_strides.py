"""Tells AOTAutograd how the gradients of results will lie in memory.

AOTAutograd is to take it that the gradient of a result has the strides of the result, and to copy one that has others
into memory of those strides: gradients that are computed from it then lie as in eager, which a library call may rely
on.  PyTorch 2.11 takes them to be contiguous unless it is told so.  Where elements of the result share memory (windows
of `unfold` that overlap), memory of those strides holds fewer numbers than the gradient has, and most would be lost.
Of such graphs the gradients are contiguous.

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
    """Within, AOTAutograd traces `graph` for gradients that can hold what they are given."""
    values = (node.meta.get("example_value") for node in graph.graph.output_node().all_input_nodes)
    places = [Place.of(value) for value in values if isinstance(value, torch.Tensor)]
    meet = any(place is not None and place.meets for place in places)
    with config.patch(guess_tangent_strides_as_outputs=not meet):
        yield
