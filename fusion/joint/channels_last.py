"""Chooses between channels first and channels last as the memory layout of a graph's images.

The library's convolutions on matrix units take and return images with channels last; for other strides they run kernels
that move each operand and result.  Pointwise kernels, reductions and pooling work with any strides.  So, where it pays
off, the convolutions of a graph get their operands with channels last, and the nodes in between follow as they do in
eager; copies are made at the edges.

Input: a functional graph, joint or for inference; it is changed in place and returns tensors of the strides it returned
before.  Unchanged: graphs whose convolutions have symbolic sizes, or gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from math import prod
from typing import cast

import torch
from torch import fx

from fusion.codegen.target import Layouts
from fusion.joint.factors import value_of
from fusion.joint.layout_plans import CONVOLUTIONS, NoLayout, Plan, Strides, bytes_of, is_known

aten = torch.ops.aten


def prefer_channels_last(
    graph: fx.GraphModule, layouts: Layouts, worth: Callable[[fx.Node], float] | None = None
) -> bool:
    """Run the convolutions of a graph with channels last, if that pays off; return whether it was done.

    Args:
        layouts: the costs of copies, and the library's convolutions.
        worth: the gain of a convolution with channels last, in bytes; `saved_bytes` by default.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import conv2d, empty
    >>> show_graph(
    ...     lambda graph: prefer_channels_last(graph, Layouts(0.0, (0.0, 0.0)), lambda call: 1e9),
    ...     lambda x, w, v: conv2d(conv2d(x, w), v),
    ...     empty(1, 2, 9, 9),
    ...     empty(3, 2, 3, 3),
    ...     empty(2, 3, 3, 3),
    ...     layouts=True,
    ... )
    + permute: f32[1, 9, 9, 2] strides (162, 9, 1, 81) = permute(x, [0, 2, 3, 1])
    + clone: f32[1, 9, 9, 2] = clone(permute, memory_format=torch.contiguous_format)
    + permute_1: f32[1, 2, 9, 9] strides (162, 1, 18, 2) = permute(clone, [0, 3, 1, 2])
    + permute_2: f32[3, 3, 3, 2] strides (18, 3, 1, 9) = permute(w, [0, 2, 3, 1])
    + clone_1: f32[3, 3, 3, 2] = clone(permute_2, memory_format=torch.contiguous_format)
    + permute_3: f32[3, 2, 3, 3] strides (18, 1, 6, 2) = permute(clone_1, [0, 3, 1, 2])
    - convolution: f32[1, 3, 7, 7] = convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    + convolution: f32[1, 3, 7, 7] strides (147, 1, 21, 3) = convolution(permute_1, permute_3, None, [1, 1], [0, 0],
            [1, 1], False, [0, 0], 1)
    + permute_4: f32[2, 3, 3, 3] strides (27, 3, 1, 9) = permute(v, [0, 2, 3, 1])
    + clone_2: f32[2, 3, 3, 3] = clone(permute_4, memory_format=torch.contiguous_format)
    + permute_5: f32[2, 3, 3, 3] strides (27, 1, 9, 3) = permute(clone_2, [0, 3, 1, 2])
    - convolution_1: f32[1, 2, 5, 5] = convolution(convolution, v, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    + convolution_1: f32[1, 2, 5, 5] strides (50, 1, 10, 2) = convolution(convolution, permute_5, None, [1, 1], [0,
            0], [1, 1], False, [0, 0], 1)
    - return convolution_1
    + clone_3: f32[1, 2, 5, 5] = clone(convolution_1, memory_format=torch.contiguous_format)
    + return clone_3
    """
    calls = [node for node in graph.graph.nodes if node.target in CONVOLUTIONS]
    if not calls or not all(map(_takes_images, calls)):
        return False
    gains = {call: worth(call) if worth else saved_bytes(call, layouts) for call in calls}
    gained = sum(gain for gain in gains.values() if gain > 0)
    if gained == 0:
        return False
    chosen = {call for call, gain in gains.items() if gain >= 0}
    plan = Plan(partial(_wanted, chosen), layouts.begins, lambda node: node.target in CONVOLUTIONS)
    try:
        plan.propagate(graph.graph)
    except NoLayout:
        return False
    if not plan.copies or gained <= plan.cost():
        return False
    plan.apply(graph)
    return True


def _wanted(calls: Collection[fx.Node], plan: Plan, node: fx.Node) -> dict[fx.Node, Strides]:
    """Return channels-last strides for the operands of `calls`."""
    operands = _operands(node) if node in calls else ()
    unlike = [arg for arg in operands if not _has_channels_last(plan.value_of(arg))]
    return {arg: _channels_last_strides(arg.meta["val"]) for arg in unlike}


def saved_bytes(call: fx.Node, layouts: Layouts) -> float:
    """Return the gain of a convolution with channels last, in bytes of memory traffic; negative if it loses.

    With channels first, a dense convolution with a window moves its operands and results by separate kernels; one
    without a window is a GEMM.  A depthwise one runs a kernel that takes its time for each multiplication.  Groups of
    several channels take twice as long with channels last.
    """
    images, weight = [value_of(node) for node in _images(call)], value_of(_operands(call)[-1])
    if not _on_matrix_units(images[0]):
        return 0.0
    window = prod(weight.shape[2:])
    if weight.shape[1] == 1 and _groups(call) > 1:
        multiplications = images[0].numel() if _is_backward(call) else sum(result.numel() for result in _results(call))
        return multiplications * window * layouts.multiplication[_is_backward(call)]
    if _groups(call) > 1:
        return -1.0
    if window == 1:
        return 0.0
    return 2.0 * sum(map(bytes_of, (*images, weight, *_results(call)))) + 2 * layouts.begins


def _takes_images(call: fx.Node) -> bool:
    """Return whether all operands are two-dimensional images or weights of static size."""
    values = [node.meta.get("val") for node in _operands(call)]
    return all(isinstance(val, torch.Tensor) and val.ndim == 4 and is_known(val) for val in values)


def _operands(call: fx.Node) -> tuple[fx.Node, ...]:
    return cast("tuple[fx.Node, ...]", call.args[: CONVOLUTIONS[call.target]])  # type: ignore[index]  # a convolution


def _images(call: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operands without the weight, which comes last."""
    return _operands(call)[:-1]


def _results(call: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the image that a convolution, or its gradient, returns."""
    result = call.meta["val"]
    first = result[0] if isinstance(result, (tuple, list)) else result
    if isinstance(first, torch.Tensor):
        yield first


def _groups(call: fx.Node) -> int:
    return cast(int, call.args[9 if _is_backward(call) else 8])


def _is_backward(call: fx.Node) -> bool:
    return call.target is aten.convolution_backward.default


def _on_matrix_units(image: torch.Tensor) -> bool:
    """Return whether cuDNN convolves an image on matrix units, with kernels that prefer channels last.

    Only 16-bit floats: with channels last, more of the kernels for float32 round their operands to TF32.
    """
    if image.device.type != "cuda" or not torch.backends.cudnn.enabled or torch.version.hip is not None:
        return False
    matrix_units = torch.cuda.is_available() and torch.cuda.get_device_capability(image.device) >= (8, 0)
    return matrix_units and image.dtype.itemsize == 2


def _has_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _channels_last_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    _, channels, height, width = tensor.shape
    return (channels * height * width, 1, width * channels, channels)
