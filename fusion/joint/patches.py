"""Replaces convolutions by GEMMs where windows do not overlap, have one pixel, or see few channels.

A convolution whose stride is its window (the patches of a vision transformer, the stems and steps of convolutional
networks, also of videos and signals) multiplies each patch of the image by the weight.  As a product it takes the
matrix units at their full rate, however few channels the image has, its epilogue fuses, and its result may have
channels last.  The patches are one copy of the image, which fuses with the conversion of its dtype.
(measured: docs/performance.md, `patches`)

An image of few channels, as the first of a convolutional network, is convolved slowly by the library, which pads the
channels to 16 bytes.  As a product it needs no padding, although its windows overlap.  The gradient of its weight stays
the library's: for that product the windows would have to be stored.

A window of one pixel multiplies the pixels themselves: with channels last they are the rows of a matrix in memory.

Input: a functional graph, joint or for inference; it is changed in place, and each result keeps its strides.
Unchanged: images of symbolic sizes, groups, other overlapping or padded windows, and dtypes other than 16-bit floats,
for whose products and convolutions PyTorch has different settings of precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.channels_last import on_matrix_units
from fusion.joint.convolutions import (
    as_matrix,
    each,
    first_order,
    has_channels_last,
    image_of,
    last_order,
    operands,
    padded,
    pixels,
    settings,
    unfolded,
    window_of,
)
from fusion.joint.layout import with_strides
from fusion.joint.layout_plans import is_known
from fusion.joint.writing import write
from fusion.lowering.ir.scalar_ops import HALVES

aten = torch.ops.aten

FEW_CHANNELS, SHORT_WINDOW = 4, 8
"""Channels, and pixels along the last dimension, up to which windows that overlap are rows of a matrix.  The rows are
not stored: the GEMM loads its operand from the image (`codegen.triton.forms.windows`).
(measured: docs/performance.md, `FEW_CHANNELS`)
"""


def multiply_patches(graph: fx.GraphModule) -> None:
    """Replace convolutions of windows that do not overlap, and the gradients of their weights, by products.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import conv2d, empty
    >>> show_graph(
    ...     lambda graph: _replace(graph, lambda call: True, _patches),
    ...     lambda x, w: conv2d(x, w, stride=4),
    ...     empty(2, 3, 8, 8),
    ...     empty(5, 3, 4, 4),
    ... )
    - convolution = convolution(x, w, None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    - return convolution
    + view = view(x, [2, 3, 2, 4, 2, 4])
    + permute = permute(view, [0, 2, 4, 1, 3, 5])
    + clone = clone(permute, memory_format=torch.contiguous_format)
    + view_1 = view(clone, [8, 48])
    + view_2 = view(w, [5, 48])
    + permute_1 = permute(view_2, [1, 0])
    + mm = mm(view_1, permute_1)
    + view_3 = view(mm, [2, 2, 2, 5])
    + permute_2 = permute(view_3, [0, 3, 1, 2])
    + clone_1 = clone(permute_2, memory_format=torch.contiguous_format)
    + return clone_1
    """
    _replace(graph, lambda call: prod(window_of(call)) > 1 and _is_product(call), _patches)
    for call in graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        image, weight = call.args[1:3]
        with_bias = cast("Sequence[bool]", call.args[-1])[2]
        if not with_bias and prod(window_of(call)) > 1 and _is_product(call) and _covers(image, weight):
            _differentiate(call)
    graph.graph.lint()
    graph.recompile()


def multiply_windows(graph: fx.GraphModule) -> None:
    """Replace convolutions of few channels by products with the windows of the image, in the layouts of their results.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import conv2d, empty
    >>> show_graph(
    ...     lambda graph: _replace(graph, lambda call: True, _windows),
    ...     lambda x, w: conv2d(x, w, stride=2, padding=1),
    ...     empty(2, 3, 9, 9),
    ...     empty(5, 3, 3, 3),
    ... )
    - convolution = convolution(x, w, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    - return convolution
    + constant_pad_nd = constant_pad_nd(x, [1, 1, 1, 1], 0.0)
    + unfold = unfold(constant_pad_nd, 2, 3, 2)
    + unfold_1 = unfold(unfold, 3, 3, 2)
    + permute = permute(unfold_1, [0, 2, 3, 1, 4, 5])
    + clone = clone(permute, memory_format=torch.contiguous_format)
    + view = view(clone, [50, 27])
    + view_1 = view(w, [5, 27])
    + permute_1 = permute(view_1, [1, 0])
    + mm = mm(view, permute_1)
    + view_2 = view(mm, [2, 5, 5, 5])
    + permute_2 = permute(view_2, [0, 3, 1, 2])
    + clone_1 = clone(permute_2, memory_format=torch.contiguous_format)
    + return clone_1
    """
    _replace(graph, _sees_few_channels, _windows)


def multiply_pixels(graph: fx.GraphModule) -> None:
    """Replace convolutions of one pixel, of images with channels last, by products.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import channels_last, conv2d, empty
    >>> show_graph(
    ...     lambda graph: _replace(graph, lambda call: True, pixels),
    ...     lambda x, w: conv2d(x, w),
    ...     empty(2, 3, 8, 8).to(memory_format=channels_last),
    ...     empty(5, 3, 1, 1),
    ...     layouts=True,
    ... )
    - convolution: f32[2, 5, 8, 8] strides (320, 1, 40, 5) = convolution(x, w, None, [1, 1], [0, 0], [1, 1], False,
            [0, 0], 1)
    - return convolution
    + permute: f32[2, 8, 8, 3] = permute(x, [0, 2, 3, 1])
    + view: f32[128, 3] = view(permute, [128, 3])
    + view_1: f32[5, 3] = view(w, [5, 3])
    + permute_1: f32[3, 5] strides (1, 3) = permute(view_1, [1, 0])
    + mm: f32[128, 5] = mm(view, permute_1)
    + view_2: f32[2, 8, 8, 5] = view(mm, [2, 8, 8, 5])
    + permute_2: f32[2, 5, 8, 8] strides (320, 1, 40, 5) = permute(view_2, [0, 3, 1, 2])
    + return permute_2
    """
    _replace(graph, _multiplies_pixels, pixels)


def _replace(
    graph: fx.GraphModule, chosen: Callable[[fx.Node], bool], rows_of: Callable[[fx.Node], tuple[fx.Node, fx.Node]]
) -> None:
    """Replace the chosen convolutions by the product of the rows of image and weight that `rows_of` writes."""
    for call in graph.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if call.args[2] is not None or not chosen(call):
            continue
        biased = _with_bias(call)
        result = biased or call
        with graph.graph.inserting_before(result):
            rows, weights = rows_of(call)
            terms = rows, write(call, aten.permute.default, weights, [1, 0])
            if biased is None:
                product = write(call, aten.mm.default, *terms)
                product.meta.setdefault("recompute", CheckpointPolicy.PREFER_SAVE)  # its rows would be gathered again
            else:
                bias = write(biased, aten.view.default, biased.args[1], [call.meta["val"].shape[1]])
                product = write(biased, aten.addmm.default, bias, *terms)
            image = image_of(call, product)
            if image.meta["val"].stride() != result.meta["val"].stride():
                image = with_strides(image, result.meta["val"].stride())
        result.replace_all_uses_with(image)
        graph.graph.erase_node(result)
        if biased is not None:
            graph.graph.erase_node(call)
    graph.graph.lint()
    graph.recompile()


def _with_bias(call: fx.Node) -> fx.Node | None:
    """Return the sum of a convolution and a number for each channel, if nothing else reads the convolution.

    As one operation with the product they have one result to be stored, and to be saved.
    """
    (*readers,) = call.users
    if len(readers) != 1 or readers[0].target is not aten.add.Tensor or readers[0].kwargs:
        return None
    image, bias = readers[0].args
    if image is not call or not isinstance(bias, fx.Node):
        return None
    value, vector = call.meta["val"], bias.meta["val"]
    of_channels = vector.shape == (value.shape[1], *(1,) * (value.ndim - 2)) and vector.dtype is value.dtype
    return readers[0] if of_channels else None


def _differentiate(call: fx.Node) -> None:
    """Replace the gradients of a convolution of patches: each is a product with the gradient of its rows."""
    wanted = cast("Sequence[bool]", call.args[-1])
    with call.graph.inserting_before(call):
        rows, weights = _patches(call)
        outputs = weights.meta["val"].shape[0]
        gradient = write(call, aten.permute.default, call.args[0], last_order(len(window_of(call))))
        gradient = as_matrix(call, gradient, rows.meta["val"].shape[0], outputs)
        gradients = (
            _image(call, write(call, aten.mm.default, gradient, weights)) if wanted[0] else None,
            _weight(call, write(call, aten.mm.default, write(call, aten.permute.default, gradient, [1, 0]), rows))
            if wanted[1]
            else None,
        )
    for user in [*call.users]:
        replacement = gradients[cast(int, user.args[1])] if cast(int, user.args[1]) < 2 else None
        if replacement is not None:
            with call.graph.inserting_before(user):
                if replacement.meta["val"].stride() != user.meta["val"].stride():
                    replacement = with_strides(replacement, user.meta["val"].stride())
            user.replace_all_uses_with(replacement)
        if not user.users:
            call.graph.erase_node(user)
    call.graph.erase_node(call)


def _image(call: fx.Node, rows: fx.Node) -> fx.Node:
    """Put rows of patches, as `_patches` writes them, back into an image."""
    image, window = operands(call)[0], window_of(call)
    batch, channels, *sides = image.meta["val"].shape
    places, dims = [side // size for side, size in zip(sides, window, strict=True)], len(window)
    is_last = has_channels_last(image)
    shape = [batch, *places, *window, channels] if is_last else [batch, *places, channels, *window]
    rows = write(call, aten.view.default, rows, shape)
    first = dims + 1 if is_last else dims + 2
    order = [dim for k in range(dims) for dim in (1 + k, first + k)]
    rows = write(call, aten.permute.default, rows, [0, 2 * dims + 1 if is_last else dims + 1, *order])
    rows = write(call, aten.clone.default, rows, memory_format=torch.contiguous_format)
    return write(call, aten.view.default, rows, [batch, channels, *sides])


def _weight(call: fx.Node, rows: fx.Node) -> fx.Node:
    """View rows of weights, in the order that `_patches` gives them, as a weight."""
    image, weight = operands(call)
    outputs, channels, *window = weight.meta["val"].shape
    if not has_channels_last(image):
        return write(call, aten.view.default, rows, [outputs, channels, *window])
    rows = write(call, aten.view.default, rows, [outputs, *window, channels])
    return write(call, aten.permute.default, rows, first_order(len(window)))


def _patches(call: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Write the patches of an image as rows [n · places, c · window], and the weight as [o, c · window].

    The order within a row is the image's in memory: channels last come last.
    """
    image, weight = operands(call)
    outputs, channels, *window = weight.meta["val"].shape
    batch, _, *sides = image.meta["val"].shape
    places, dims, is_last = (
        [side // size for side, size in zip(sides, window, strict=True)],
        len(window),
        has_channels_last(image),
    )
    for dim, (side, place, size) in enumerate(zip(sides, places, window, strict=True), 2):
        if side > place * size:  # pixels that fill no window
            image = write(call, aten.slice.Tensor, image, dim, 0, place * size)
    if is_last:
        image, weight = (write(call, aten.permute.default, each, last_order(dims)) for each in (image, weight))
    pixels = [size for both in zip(places, window, strict=True) for size in both]
    image = write(call, aten.view.default, image, [batch, *pixels, channels] if is_last else [batch, channels, *pixels])
    first = 1 if is_last else 2
    across, within = range(first, first + 2 * dims, 2), range(first + 1, first + 1 + 2 * dims, 2)
    order = [0, *across, *within, 2 * dims + 1] if is_last else [0, *across, 1, *within]
    image = write(call, aten.permute.default, image, order)
    terms = channels * prod(window)
    return as_matrix(call, image, batch * prod(places), terms), as_matrix(call, weight, outputs, terms)


def _windows(call: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Write the windows of an image as rows [n · places, c · window], and the weight as [o, c · window]."""
    image, weight = map(_before_copy, operands(call))
    outputs, channels, *window = weight.meta["val"].shape
    dims, is_last = len(window), has_channels_last(image)
    image = unfolded(call, padded(call, image))
    places, within = range(2, dims + 2), range(dims + 2, 2 * dims + 2)
    batch, _, *sides = image.meta["val"].shape[: dims + 2]
    image = write(call, aten.permute.default, image, [0, *places, *within, 1] if is_last else [0, *places, 1, *within])
    if is_last:
        weight = write(call, aten.permute.default, weight, last_order(dims))
    terms = channels * prod(window)
    return as_matrix(call, image, batch * prod(sides), terms), as_matrix(call, weight, outputs, terms)


def _before_copy(node: fx.Node) -> fx.Node:
    """Return the tensor of which another one is a copy with channels last, or the tensor itself."""
    match node:
        case fx.Node(
            target=aten.permute.default,
            args=[fx.Node(target=aten.clone.default, args=[fx.Node(target=aten.permute.default) as moved]), list(back)],
        ) if [cast("list[int]", moved.args[1])[dim] for dim in back] == sorted(back):
            return cast(fx.Node, moved.args[0])
        case _:
            return node


def _is_product(call: fx.Node) -> bool:
    """Return whether a convolution is one product of matrices on matrix units: each pixel is in at most one window."""
    if not _is_dense(call):
        return False
    window = window_of(call)
    stride, padding = (each(setting, len(window)) for setting in settings(call)[:2])
    return stride == window and not any(padding)


def _multiplies_pixels(call: fx.Node) -> bool:
    """Return whether a convolution multiplies each pixel of an image with channels last, on matrix units."""
    return prod(window_of(call)) == 1 and _is_product(call) and has_channels_last(call.args[0])


def _sees_few_channels(call: fx.Node) -> bool:
    """Return whether a convolution on matrix units has so few channels that its windows are worth rows of a matrix."""
    if not _is_dense(call) or prod(window_of(call)) == 1:
        return False
    channels, *window = map(int, operands(call)[1].meta["val"].shape[1:])
    in_line = channels * prod(window) == window[-1]  # one after another in memory
    return channels <= FEW_CHANNELS and (window[-1] <= SHORT_WINDOW or in_line)


def _is_dense(call: fx.Node) -> bool:
    """Return whether a convolution of 16-bit floats on matrix units multiplies all channels, without gaps."""
    *_, dilation, transposed, _, groups = settings(call)
    values = [operand.meta["val"] for operand in operands(call)]
    if not all(value.ndim > 2 and is_known(value) and value.dtype in HALVES for value in values):
        return False
    spread = {*each(dilation, len(window_of(call)))} != {1}
    return not transposed and groups == 1 and not spread and on_matrix_units(values[0])


def _covers(image: object, weight: object) -> bool:
    """Return whether each pixel of an image is in a window."""
    sides = [cast(fx.Node, operand).meta["val"].shape[2:] for operand in (image, weight)]
    return all(side % size == 0 for side, size in zip(*sides, strict=True))
