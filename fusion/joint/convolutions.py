"""Reads the arguments of convolutions, and writes their images as windows and as pixels.

Input: calls of `aten.convolution` with a known number of dimensions, and of its gradient; written nodes come before the
call at the current place of insertion.  `n` is the batch, `c` the channels of the image, `o` those of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

import torch
from torch import fx

from fusion.joint.layout_plans import is_known
from fusion.joint.writing import write

aten = torch.ops.aten


def operands(call: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the image and the weight of a convolution, or of its gradient."""
    first = 1 if call.target is aten.convolution_backward.default else 0
    return cast("tuple[fx.Node, fx.Node]", call.args[first : first + 2])


def settings(call: fx.Node) -> tuple[object, ...]:
    """Return stride, padding, dilation, transposed, output padding and groups; both operations have a bias before."""
    first = 4 if call.target is aten.convolution_backward.default else 3
    return call.args[first : first + 6]


def each(setting: object, dims: int) -> list[int]:
    """Return a setting for each of `dims` dimensions; it may be given once for all."""
    values = [*cast("Sequence[int]", setting)]
    return values * dims if len(values) == 1 else values


def window_of(call: fx.Node) -> list[int]:
    """Return the kernel size of a convolution per dimension; 0 for symbolic sizes."""
    weight = operands(call)[1].meta["val"]
    return [*weight.shape[2:]] if is_known(weight) else [0]


def has_channels_last(image: object) -> bool:
    """Return whether an image, or a volume, has its channels last."""
    assert isinstance(image, fx.Node)
    value = image.meta["val"]
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.ndim)
    return order is not None and value.is_contiguous(memory_format=order)


def last_order(dims: int) -> list[int]:
    """Return the order of dimensions that moves the channels of an image behind its `dims` others."""
    return [0, *range(2, dims + 2), 1]


def first_order(dims: int) -> list[int]:
    """Return the order of dimensions that moves the channels of an image back."""
    return [0, dims + 1, *range(1, dims + 1)]


def as_matrix(call: fx.Node, node: fx.Node, rows: int, columns: int) -> fx.Node:
    """View a tensor, or where that is not possible a copy, as a matrix."""
    if not node.meta["val"].is_contiguous():
        node = write(call, aten.clone.default, node, memory_format=torch.contiguous_format)
    return write(call, aten.view.default, node, [rows, columns])


def padded(call: fx.Node, image: fx.Node) -> fx.Node:
    """Write an image with the zeros that the convolution pads it with."""
    padding = each(settings(call)[1], image.meta["val"].ndim - 2)
    if not any(padding):
        return image
    around = [side for size in reversed(padding) for side in (size, size)]
    return write(call, aten.constant_pad_nd.default, image, around, 0.0)


def unfolded(call: fx.Node, image: fx.Node) -> fx.Node:
    """View a padded image as its windows, [n, c, places…, window…]."""
    window = window_of(call)
    for dim, (size, step) in enumerate(zip(window, each(settings(call)[0], len(window)), strict=True), 2):
        image = write(call, aten.unfold.default, image, dim, size, step)
    return image


def pixels(call: fx.Node) -> tuple[fx.Node, fx.Node]:
    """View the pixels of an image with channels last as rows [n · places, c], and the weight as [o, c]."""
    image, weight = operands(call)
    batch, channels, *sides = image.meta["val"].shape
    image = write(call, aten.permute.default, image, last_order(len(sides)))
    return (
        write(call, aten.view.default, image, [batch * prod(sides), channels]),
        as_matrix(call, weight, weight.meta["val"].shape[0], channels),
    )


def image_of(call: fx.Node, rows: fx.Node) -> fx.Node:
    """View the rows [n · places, o] of a result as an image with channels last."""
    batch, channels, *places = call.meta["val"].shape
    rows = write(call, aten.view.default, rows, [batch, *places, channels])
    return write(call, aten.permute.default, rows, first_order(len(places)))


__all__ = [
    "as_matrix",
    "each",
    "first_order",
    "has_channels_last",
    "image_of",
    "last_order",
    "operands",
    "padded",
    "pixels",
    "settings",
    "unfolded",
    "window_of",
]
