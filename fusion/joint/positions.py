"""Saves positions that backward needs in as few bytes as possible.

The gradient of a maximum over windows goes to the position of the largest element, which eager saves as an int64 for
each window: four times the memory of a 16-bit float.  Positions in an image of 112 by 112 fit into 16 bits.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.writing import convert

aten = torch.ops.aten

GRADIENTS = {
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 3,
    aten.fractional_max_pool2d_backward.default: 2,
    aten.fractional_max_pool3d_backward.default: 3,
}
"""Gradients with arguments (…, an image, …, positions in its last dimensions) → the number of these dimensions.

They are recognised by name because their lowered form does not bound the positions: it compares them with the position
of an element, or scatters to them, and fractional windows begin at random numbers.
"""


def narrow_positions(joint: fx.GraphModule) -> list[fx.Node]:
    """Have forward save bounded positions as narrow integers; return the converted nodes.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def f(x, g):
    ...     y, at = aten.max_pool2d_with_indices(x, [2, 2])
    ...     return aten.max_pool2d_with_indices_backward(g, x, [2, 2], [], [0, 0], [1, 1], False, at)
    >>> show_graph(narrow_positions, f, empty(1, 1, 4, 4), empty(1, 1, 2, 2))
      max_pool2d_with_indices = max_pool2d_with_indices(x, [2, 2])
      getitem = getitem(max_pool2d_with_indices, 0)
      getitem_1 = getitem(max_pool2d_with_indices, 1)
    + _to_copy = _to_copy(getitem_1, dtype=torch.int8)   # save
    + _to_copy_1 = _to_copy(_to_copy, dtype=torch.int64)
    - max_pool2d_with_indices_backward = max_pool2d_with_indices_backward(g, x, [2, 2], [], [0, 0], [1, 1], False,
            getitem_1)
    + max_pool2d_with_indices_backward = max_pool2d_with_indices_backward(g, x, [2, 2], [], [0, 0], [1, 1], False,
            _to_copy_1)
      return max_pool2d_with_indices_backward
    """
    narrowed: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in joint.graph.nodes:
        if node.target not in GRADIENTS or node.args[-1].target is not operator.getitem:
            continue
        positions, image = cast(fx.Node, node.args[-1]), cast(torch.Tensor, node.args[1].meta["val"])
        dtype = _narrowest(image.shape[-GRADIENTS[node.target] :])
        if dtype is None or positions.meta["val"].dtype is not torch.int64:
            continue
        if positions not in narrowed:
            with joint.graph.inserting_after(positions):
                narrow = convert(positions, dtype)
            with joint.graph.inserting_after(narrow):
                narrowed[positions] = narrow, convert(narrow, torch.int64)
            narrow.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.replace_input_with(positions, narrowed[positions][1])
    joint.recompile()
    return [narrow for narrow, _ in narrowed.values()]


def _narrowest(sizes: torch.Size) -> torch.dtype | None:
    """Return the narrowest integer dtype for all positions in `sizes`; None if these are symbolic or too large."""
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        count *= size
    fitting = (dtype for dtype in (torch.int8, torch.int16, torch.int32) if count - 1 <= torch.iinfo(dtype).max)
    return next(fitting, None)
