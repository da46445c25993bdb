"""Chooses between channels first and channels last as the memory layout of a graph's images.

The library's convolutions on matrix units, and oneDNN's on CPUs, take and return images with channels last; for other
strides they run kernels that move each operand and result.  Pointwise kernels, reductions and pooling work with any
strides.  So, where it pays off, the convolutions of a graph get their operands with channels last, and the nodes in
between follow; copies are at the ends of each chain of convolutions, which is changed only if it gains more than they
cost.  An operation that returns channels first whatever its operands have, in eager, is written with channels last.  At
the ends, a convolution that gains nothing is part of the chain where that saves copies.

Input: a functional graph, joint or for inference; it is changed in place and returns tensors of the strides it returned
before.  Unchanged: graphs whose convolutions have symbolic sizes, or gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import prod
from typing import cast

import networkx as nx
import torch
from torch import fx

from fusion.codegen.target import Layouts
from fusion.joint.factors import value_of
from fusion.joint.layout_plans import (
    CONVOLUTIONS,
    Copy,
    LayoutPlan,
    NoLayout,
    Strides,
    bytes_of,
    is_generated,
    is_known,
    is_view,
)

aten = torch.ops.aten

_GROUP_NORMS = (aten.native_group_norm.default, aten.native_group_norm_backward.default)
"""Norms over groups of channels, by name: other calls that fold an image over its points and some channels at once do
not split the channels into groups, which is what lanes along the channels would run across.
"""

_TRIED = 8
"""The most convolutions at the ends of chains for which both layouts are planned."""

_TF32_CHANNELS = 4
"""With channels last, cuDNN has fast kernels of float32 for multiples of this many output channels.

(measured: docs/performance.md, `_TF32_CHANNELS`)
"""

_ROUNDED_CHANNELS, _ROUNDED_MULTIPLICATIONS = 32, 1 << 27
"""The channels, and multiplications, from which cuDNN computes a convolution of float32 in TF32 with channels first,
too.  A graph without such convolutions keeps its layout, since it would lose precision.
"""


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
    if max(gains.values()) <= 0 or (worth is None and not layouts.blocks and not any(map(_keeps_precision, calls))):
        return False
    try:
        plan = _best_plan(graph.graph, gains, layouts)
    except NoLayout:
        return False
    if plan is None or not plan.copies:
        return False
    plan.apply(graph)
    return True


def _best_plan(graph: fx.Graph, gains: Mapping[fx.Node, float], layouts: Layouts) -> LayoutPlan | None:
    """Return a plan for the convolutions that gain more than the copies at the ends of their chain cost.

    Args:
        gains: convolution → its gain with channels last, in bytes.

    Raises:
        NoLayout: a tensor must get its old strides back, and cannot.
    """
    chosen = {call for call, gain in gains.items() if gain >= 0}
    plan = _plan(graph, chosen, gains, layouts)
    entries = (call for call, gain in gains.items() if gain == 0 and _reads_copies(plan, call))
    for call in [*islice(entries, _TRIED)]:
        with suppress(NoLayout):
            other = _plan(graph, chosen - {call}, gains, layouts)
            if other.cost() < plan.cost():
                plan, chosen = other, chosen - {call}
    chains = [chain for chain in _chains(graph, plan, chosen) if chain.copies]
    lossy = [chain for chain in chains if _gain(plan, chain, gains) <= 0]
    if lossy:
        chosen = chosen.difference(*(chain.calls for chain in lossy))
        plan = _plan(graph, chosen, gains, layouts)
    return plan if sum(gains[call] for call in chosen) > plan.cost() else None


def _plan(graph: fx.Graph, chosen: Collection[fx.Node], calls: Collection[fx.Node], layouts: Layouts) -> LayoutPlan:
    """Plan for `chosen` with channels last, and the other `calls` as they are."""

    def is_fixed(node: fx.Node) -> bool:
        slower = layouts.blocks and node.target in _GROUP_NORMS  # lanes would run across their groups
        return slower or (node in calls and node not in chosen)

    plan = LayoutPlan(partial(_wanted, chosen), layouts.begins, is_fixed)
    plan.propagate(graph)
    return plan


@dataclass(slots=True)
class _Chain:
    """Convolutions, with the nodes between them that follow, and the copies at its ends."""

    calls: set[fx.Node] = field(default_factory=set)
    copies: set[Copy] = field(default_factory=set)


def _chains(graph: fx.Graph, plan: LayoutPlan, chosen: Collection[fx.Node]) -> list[_Chain]:
    """Return the chains of `chosen`: nodes that read each other's changed results, or the same copy."""
    parts: nx.Graph[fx.Node | Copy] = nx.Graph()
    for node in graph.nodes:
        if node.op == "output":
            continue
        changed = [arg for arg in node.all_input_nodes if plan.is_changed(arg)]
        parts.add_edges_from((node, end) for end in (*changed, *plan.copies_read_by(node)))
    parts.add_nodes_from(chosen)
    parts.add_edges_from((copy, copy[0]) for copy in plan.copies if plan.is_changed(copy[0]))
    return [
        _Chain(
            {part for part in whole if isinstance(part, fx.Node) and part in chosen},
            {part for part in whole if not isinstance(part, fx.Node)},
        )
        for whole in nx.connected_components(parts)
    ]


def _gain(plan: LayoutPlan, chain: _Chain, gains: Mapping[fx.Node, float]) -> float:
    """Return the bytes that a chain saves with channels last."""
    return sum(gains[call] for call in chain.calls) - sum(map(plan.cost_of, chain.copies))


def _reads_copies(plan: LayoutPlan, call: fx.Node) -> bool:
    """Return whether a convolution reads copies of images that are not generated."""
    images = _images(call)
    return any(source in images and not is_generated(source) for source, _ in plan.copies_read_by(call))


def _wanted(calls: Collection[fx.Node], plan: LayoutPlan, node: fx.Node) -> dict[fx.Node, Strides]:
    """Return channels-last strides for the operands of `calls`, and for images that lost them on the way there."""
    if node in calls:
        operands: Sequence[fx.Node] = _operands(node)
    elif node.target in CONVOLUTIONS:
        return {}
    else:
        operands = [arg for arg in node.all_input_nodes if _is_lost(plan, arg)]
    unlike = [arg for arg in operands if not _has_channels_last(plan.value_of(arg))]
    wanted = {arg: _channels_last_strides(arg.meta["val"]) for arg in unlike}
    return wanted if node in calls or not wanted or plan.accepts(node, wanted) else {}


def _is_lost(plan: LayoutPlan, node: fx.Node) -> bool:
    """Return whether a generated image is stored with channels first, though an operand has them last by the plan.

    Its strides are the strides that the operation returns in eager, some operations whatever their operands'.
    """
    image = plan.value_of(node) if isinstance(node.meta.get("val"), torch.Tensor) else None
    if image is None or not _is_image(image) or _has_channels_last(image) or not is_generated(node) or is_view(node):
        return False
    read = (plan.read_by(node, arg) for arg in node.all_input_nodes if plan.is_changed(arg))
    return any(isinstance(arg, torch.Tensor) and _is_image(arg) and _has_channels_last(arg) for arg in read)


def _is_image(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the dimensions of images, and more than one pixel and channel."""
    return tensor.ndim == 4 and is_known(tensor) and tensor.shape[1] > 1 and tensor.shape[2] * tensor.shape[3] > 1


def saved_bytes(call: fx.Node, layouts: Layouts) -> float:
    """Return the gain of a convolution with channels last, in bytes of memory traffic; negative if it loses.

    With channels first, a dense convolution with a window moves its operands and results by separate kernels; one
    without a window is a GEMM, except on CPUs.  A depthwise one runs a kernel that takes its time for each
    multiplication.  Groups of several channels take twice as long with channels last.
    """
    images, weight = [value_of(node) for node in _images(call)], value_of(_operands(call)[-1])
    if _is_blocked(images[0], layouts) and (_groups(call) == 1 or weight.shape[1] == 1):
        return sum(map(bytes_of, (*images, *_results(call))), 2 * layouts.begins)  # moved within the cache
    if not on_matrix_units(images[0]):
        return 0.0
    window = prod(weight.shape[2:])
    if images[0].dtype is torch.float32 and any(size % _TF32_CHANNELS for size in weight.shape[:1]):
        return -1.0
    if weight.shape[1] == 1 and _groups(call) > 1:
        multiplications = images[0].numel() if _is_backward(call) else sum(result.numel() for result in _results(call))
        return multiplications * window * layouts.multiplication[_is_backward(call)]
    if _groups(call) > 1:
        return -1.0
    if window == 1:
        return 0.0
    return 2.0 * sum(map(bytes_of, (*images, weight, *_results(call)))) + 2 * layouts.begins


def _keeps_precision(call: fx.Node) -> bool:
    """Return whether a convolution is rounded as much with channels first: float32 to TF32, where that pays off."""
    image, weight = value_of(_images(call)[0]), value_of(_operands(call)[-1])
    if image.dtype is not torch.float32:
        return True
    multiplications = sum(result.numel() for result in _results(call)) * prod(weight.shape[1:])
    return min(weight.shape[:2]) >= _ROUNDED_CHANNELS and multiplications >= _ROUNDED_MULTIPLICATIONS


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


def on_matrix_units(image: torch.Tensor) -> bool:
    """Return whether cuDNN convolves an image on matrix units, with kernels that prefer channels last.

    Those of float32 round their operands to TF32, as PyTorch permits unless it is set otherwise.
    """
    if image.device.type != "cuda" or not torch.backends.cudnn.enabled or torch.version.hip is not None:
        return False
    matrix_units = torch.cuda.is_available() and torch.cuda.get_device_capability(image.device) >= (8, 0)
    # PyTorch does not annotate the setting.
    rounded = image.dtype is torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return matrix_units and (rounded or image.dtype.itemsize == 2)


def _is_blocked(image: torch.Tensor, layouts: Layouts) -> bool:
    """Return whether the library copies an image with channels first into blocks of channels, and its result back.

    Channels last avoids both copies (measured: docs/performance.md, `channels_last`).
    """
    return layouts.blocks and image.dtype in (torch.float32, torch.bfloat16) and torch._C._get_mkldnn_enabled()


def _has_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory has the order of images with channels last."""
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _channels_last_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    _, channels, height, width = tensor.shape
    return (channels * height * width, 1, width * channels, channels)
