"""Adds autocast's casts to calls that PyTorch's tracing decomposes above autocast.

    interpolate(x)      becomes      interpolate(widened(x))

On a GPU autocast resizes images in float32.  It applies below `interpolate`, which is Python code under a trace that
computes in its operand's dtype, and so would stay in 16 bits.  Input: Dynamo's graph, with the graphs that it calls; it
is changed in place.  The trace knows whether autocast is on: without it `widened` does nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional as F

WITH_MODE = frozenset({F.interpolate, F.upsample})
"""Functions whose fourth argument, `mode`, selects how an image is resized."""
RESIZES = WITH_MODE | {
    *(F.upsample_nearest, F.upsample_bilinear),
    *(getattr(torch._C._nn, name) for name in dir(torch._C._nn) if "upsample" in name and "backward" not in name),
}
"""Functions that resize the image that is their first argument.

They are named because the repair has to precede PyTorch's trace of them, and so any lowered form.
"""


def widen_resized_images(graph: fx.GraphModule) -> None:
    """Widen images before they are resized, where autocast is on.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> show_captured(widen_resized_images, lambda x: F.interpolate(x, scale_factor=2.0), empty(1, 1, 3, 3))
    + widened = widened(l_x_)
    - interpolate = interpolate(l_x_, scale_factor=2.0)
    + interpolate = interpolate(widened, scale_factor=2.0)
      return interpolate
    """
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            _widen(module)


def _widen(graph: fx.GraphModule) -> None:
    changed = False
    for node in list(graph.graph.nodes):
        image = node.args[0] if node.args else node.kwargs.get("input")
        if node.op != "call_function" or node.target not in RESIZES or not isinstance(image, fx.Node) or _pools(node):
            continue
        with graph.graph.inserting_before(node):
            wide = graph.graph.call_function(widened, (image,))
        wide.meta = dict(node.meta)
        wide.meta.pop("example_value", None)
        node.replace_input_with(image, wide)
        changed = True
    if changed:
        graph.recompile()


def _pools(node: fx.Node) -> bool:
    """Return whether this averages areas, which autocast leaves unchanged."""
    mode = node.args[3] if len(node.args) > 3 else node.kwargs.get("mode")
    return node.target in WITH_MODE and mode == "area"


def widened(image: Tensor) -> Tensor:
    """Cast an operand as autocast does for operations in float32."""
    if image.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return image
    return image.float() if image.is_floating_point() and image.dtype is not torch.float64 else image
