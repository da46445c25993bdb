"""Replaces convolutions on CPUs by products of the weight with the windows of the image, where that is faster.

The library brings an image into blocks of channels, and the result back, which for small images takes longer than the
multiplication; or it stores all windows.  A generated product packs the windows of a few pixels at a time, reads the
weight where it lies, and its epilogue fuses: bias, activation, residual.  Price decides: products of few rows, and
windows that few output channels share, stay the library's.

An image with channels last, which convolutions around it may prefer, is a matrix of pixels: windows of one pixel
multiply it by the weight.

Input: a functional graph for inference, whose layouts are chosen; it is changed in place, and each result keeps its
strides.  Unchanged: images of symbolic sizes or other layouts, larger windows of images with channels last, groups,
strides, dilation, and types whose generated products are not known to be as fast as the library's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import fx

from fusion.codegen.target import Capabilities
from fusion.joint.convolutions import each, image_of, operands, padded, pixels, settings, unfolded, window_of
from fusion.joint.layout_plans import is_known
from fusion.joint.writing import write

aten = torch.ops.aten

REGISTER_ROWS = 6
"""Rows of the weight that a generated product multiplies at a time."""

CLEARLY_FASTER = 0.95
"""The share of the library's predicted time below which a product replaces it."""


def multiply_columns(graph: fx.GraphModule, capabilities: Capabilities) -> None:
    """Replace convolutions by products of the weight and the columns of windows, where that is predicted to be faster.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import conv2d, empty
    >>> show_graph(
    ...     lambda graph: [_replace(graph, call, _columns) for call in convolutions(graph)],
    ...     lambda x, w: conv2d(x, w, padding=1),
    ...     empty(2, 3, 8, 8),
    ...     empty(5, 3, 3, 3),
    ... )
    - convolution = convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    - return convolution
    + constant_pad_nd = constant_pad_nd(x, [1, 1, 1, 1], 0.0)
    + unfold = unfold(constant_pad_nd, 2, 3, 1)
    + unfold_1 = unfold(unfold, 3, 3, 1)
    + permute = permute(unfold_1, [0, 1, 4, 5, 2, 3])
    + clone = clone(permute, memory_format=torch.contiguous_format)
    + view = view(clone, [2, 27, 64])
    + view_1 = view(w, [1, 5, 27])
    + expand = expand(view_1, [2, 5, 27])
    + bmm = bmm(expand, view)
    + view_2 = view(bmm, [2, 5, 8, 8])
    + return view_2
    """
    chosen = [call for call in convolutions(graph) if _is_plain(call) and _is_faster(call, capabilities)]
    writes = {call: _columns if _has_layout(call, torch.contiguous_format) else _pixels for call in chosen}
    for call, written in writes.items():
        _replace(graph, call, written)
    if chosen:
        graph.graph.lint()
        graph.recompile()


def convolutions(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the convolutions of a graph."""
    return list(graph.graph.find_nodes(op="call_function", target=aten.convolution.default))


def _is_plain(call: fx.Node) -> bool:
    """Return whether a convolution multiplies all channels of dense windows, or of pixels whose channels are last."""
    stride, padding, dilation, transposed, _, groups = settings(call)
    values = [node.meta["val"] for node in (*operands(call), call)]
    if any(value.ndim != 4 or not is_known(value) for value in values):
        return False
    if transposed or groups != 1 or {*each(stride, 2), *each(dilation, 2)} != {1}:
        return False
    if any(value.device.type != "cpu" or value.numel() == 0 for value in values):
        return False
    of_pixels = {*window_of(call)} == {1} and not any(each(padding, 2))
    return _has_layout(call, torch.contiguous_format) or (of_pixels and _has_layout(call, torch.channels_last))


def _has_layout(call: fx.Node, layout: torch.memory_format) -> bool:
    """Return whether image, weight and result are contiguous in a layout."""
    values = (node.meta["val"] for node in (*operands(call), call))
    return all(value.is_contiguous(memory_format=layout) for value in values)


def _is_faster(call: fx.Node, capabilities: Capabilities) -> bool:
    """Return whether a product is predicted to take less time than the library's convolution.

    The product packs each element of all windows, and fills whole blocks of rows of the weight.
    """
    image, weight, result = (node.meta["val"] for node in (*operands(call), call))
    itemsize, rates, layouts = result.dtype.itemsize, capabilities.rates, capabilities.layouts
    share = capabilities.lone_products.get(itemsize, 0.0)
    if not layouts.blocked_us or not result.dtype.is_floating_point or share < 1:
        return False
    outputs, terms = weight.shape[0], prod(weight.shape[1:])
    multiplied = rates.product_us_of(2.0 * result.numel() * terms, itemsize)
    filled = -(-outputs // REGISTER_ROWS) * REGISTER_ROWS / outputs
    packed = rates.scalar_us(rates.steps.packed * itemsize * terms * result.numel() / outputs)
    copied = rates.price(2.0 * image.numel() * itemsize).total if any(each(settings(call)[1], 2)) else 0.0
    generated = rates.launch_us + multiplied * filled / share + packed + copied
    return bool(generated < CLEARLY_FASTER * (rates.launch_us + multiplied + layouts.blocked_us))


def _replace(graph: fx.GraphModule, call: fx.Node, written: Callable[[fx.Node], fx.Node]) -> None:
    """Replace a convolution by a product, and by the addition of its bias."""
    bias, dims = call.args[2], call.meta["val"].ndim
    with graph.graph.inserting_before(call):
        result = written(call)
        if isinstance(bias, fx.Node):
            bias = write(call, aten.view.default, bias, [-1, *(1 for _ in range(dims - 2))])
            result = write(call, aten.add.Tensor, result, bias)
    call.replace_all_uses_with(result)
    graph.graph.erase_node(call)


def _columns(call: fx.Node) -> fx.Node:
    """Write the product of a weight [o, c · window] and columns [n, c · window, places]."""
    image, weight = operands(call)
    outputs, channels, *window = weight.meta["val"].shape
    batch, _, *places = call.meta["val"].shape
    terms = channels * prod(window)
    image = padded(call, image)
    if prod(window) > 1:
        image = write(call, aten.permute.default, unfolded(call, image), [0, 1, 4, 5, 2, 3])
        image = write(call, aten.clone.default, image, memory_format=torch.contiguous_format)
    columns = write(call, aten.view.default, image, [batch, terms, prod(places)])
    rows = write(call, aten.view.default, weight, [1, outputs, terms])
    rows = write(call, aten.expand.default, rows, [batch, outputs, terms])
    product = write(call, aten.bmm.default, rows, columns)
    return write(call, aten.view.default, product, [batch, outputs, *places])


def _pixels(call: fx.Node) -> fx.Node:
    """Write the product of pixels [n · places, c] and a weight [o, c], with channels last."""
    rows, weight = pixels(call)
    product = write(call, aten.mm.default, rows, write(call, aten.permute.default, weight, [1, 0]))
    return image_of(call, product)


__all__ = ["multiply_columns"]
