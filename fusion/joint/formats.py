"""Formats: whether the images of a graph lie in memory with their channels first or last.

The library's convolutions on matrix units take and give images with channels last; between those of other strides they
run kernels that move each operand and result.  Pointwise kernels, reductions and pooling follow whatever strides they
meet.  So, where it pays, the convolutions of a graph get their operands with channels last, and what lies between them
follows as it does in eager; copies are made at the edges.

What enters is a functional graph, joint or for inference; it is changed in place and returns tensors of the strides it
returned before.  Left as they are: graphs whose convolutions have symbolic sizes, or gain nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from math import prod
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusion.joint.factors import value_of
from fusion.joint.layout import is_dense, with_strides

aten = torch.ops.aten

OPERANDS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""Convolution → how many of its first arguments are images or weights."""
LAUNCH = 8e6
"""Bytes that could be moved while a kernel begins and ends."""
OF_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default})
"""What reads memory by strides, whatever it is given."""


def prefer_channels_last(graph: fx.GraphModule, worth: Callable[[fx.Node], float] | None = None) -> bool:
    """Run the convolutions of a graph with channels last, if that pays; was it done?

    Args:
        worth: what a convolution gains with channels last, in bytes; `saved_bytes` if not given.
    """
    calls = [node for node in graph.graph.nodes if node.target in OPERANDS]
    if not calls or not all(map(_takes_images, calls)):
        return False
    gains = {call: (worth or saved_bytes)(call) for call in calls}
    gained = sum(gain for gain in gains.values() if gain > 0)
    if gained == 0:
        return False
    plan = _Plan(frozenset(call for call, gain in gains.items() if gain >= 0))
    try:
        plan.walk(graph.graph)
    except _Refused:
        return False
    if not plan.copies or gained <= plan.cost():
        return False
    plan.apply(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return True


def saved_bytes(call: fx.Node) -> float:
    """What a convolution gains with channels last, as the bytes that could be moved meanwhile; less than 0 if it loses.

    As measured on an H200 with cuDNN 9.  With channels first, a dense one with a window moves its operands and results
    by kernels of its own; one without a window is a product as it is.  One of a channel each runs elsewhere, by a
    kernel that takes its time for each multiplication.  Groups of several channels take twice as long with them last.
    """
    images, weight = [value_of(node) for node in _images(call)], value_of(_operands(call)[-1])
    if not _on_matrix_units(images[0]):
        return 0.0
    window = prod(weight.shape[2:])
    if weight.shape[1] == 1 and _groups(call) > 1:
        multiplications = images[0].numel() if _is_backward(call) else sum(made.numel() for made in _made(call))
        return multiplications * window * (8.0 if _is_backward(call) else 1.5)
    if _groups(call) > 1:
        return -1.0
    if window == 1:
        return 0.0
    return 2.0 * sum(map(_bytes, (*images, weight, *_made(call)))) + 2 * LAUNCH


class _Refused(Exception):
    """A tensor cannot be given back the strides that it had."""


class _Plan:
    """Which tensors get other strides, and where copies are needed."""

    def __init__(self, calls: frozenset[fx.Node]) -> None:
        self.calls = calls  # the convolutions that run with channels last; others keep the strides that they have
        self.values: dict[fx.Node, object] = {}  # what becomes of each node that changes
        self.copies: dict[tuple[fx.Node, bool], torch.Tensor] = {}  # (of what, with channels last?) → the copy
        self.read: dict[fx.Node, list[tuple[fx.Node, bool]]] = {}  # reader → which copies it reads instead

    def walk(self, graph: fx.Graph) -> None:
        """Plan for all nodes in their order.

        Raises:
            _Refused: something must have its strides back, and cannot.
        """
        for node in graph.nodes:
            changed = [arg for arg in node.all_input_nodes if arg in self.values]
            if node in self.calls:
                for arg in _operands(node):
                    if not _has_channels_last(self.value_of(arg)):
                        self._copy(node, arg, last=True)
                if not self._follow(node):
                    raise _Refused
            elif changed and (node.target in OPERANDS or not (_takes_any_strides(node) and self._follow(node))):
                for arg in changed:
                    self._copy(node, arg, last=False)

    def cost(self) -> float:
        """Bytes that the copies move.  What a kernel makes anyway is written once more, or only there."""
        made = [(copy, _is_generated(node)) for (node, _), copy in self.copies.items()]
        return sum(_bytes(copy) if generated else 2 * _bytes(copy) + LAUNCH for copy, generated in made)

    def apply(self, graph: fx.Graph) -> None:
        """Make the copies, and say of all nodes which strides they have."""
        for node, value in self.values.items():
            node.meta["val"] = value
            node.meta.pop("tensor_meta", None)
        made: dict[tuple[fx.Node, bool], fx.Node] = {}
        for reader, copies in self.read.items():
            for copy in copies:
                if copy not in made:
                    with graph.inserting_before(reader):
                        made[copy] = with_strides(copy[0], self.copies[copy].stride())
                reader.replace_input_with(copy[0], made[copy])

    def value_of(self, node: fx.Node) -> torch.Tensor:
        return cast(torch.Tensor, self.values.get(node, node.meta["val"]))

    def _copy(self, reader: fx.Node, arg: fx.Node, *, last: bool) -> None:
        before = arg.meta["val"]
        if not isinstance(before, torch.Tensor) or not (last or is_dense(before)):
            raise _Refused
        if (arg, last) not in self.copies:
            strides = _channels_last_strides(before) if last else before.stride()
            self.copies[arg, last] = before.new_empty_strided(before.shape, strides)
        self.read.setdefault(reader, []).append((arg, last))

    def _follow(self, node: fx.Node) -> bool:
        """Note the strides of what `node` gives, from those of its operands.  False if it does not take them."""
        copied = {copy[0]: self.copies[copy] for copy in self.read.get(node, ())}
        given = {arg: copied.get(arg, self.values.get(arg, arg.meta.get("val"))) for arg in node.all_input_nodes}
        args, kwargs = pytree.tree_map_only(fx.Node, given.__getitem__, (node.args, node.kwargs))
        try:
            with torch.no_grad():
                result = cast("Callable[..., object]", node.target)(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError):  # a view that these strides do not allow
            return False
        pairs = list(zip(_tensors(result), _tensors(node.meta["val"]), strict=True))
        if any(made.shape != before.shape or made.dtype != before.dtype for made, before in pairs):
            return False
        if any(made.stride() != before.stride() for made, before in pairs):
            self.values[node] = result
        return True


def _takes_images(call: fx.Node) -> bool:
    """Are all operands images or weights of two dimensions and known size?"""
    found = [node.meta.get("val") for node in _operands(call)]
    return all(isinstance(val, torch.Tensor) and val.ndim == 4 and _is_known(val) for val in found)


def _takes_any_strides(node: fx.Node) -> bool:
    """May operands lie otherwise, with the same numbers as the result, and nothing else changed?"""
    if node.target is operator.getitem:
        return True
    known = isinstance(node.target, OpOverload) and not node.target._schema.is_mutable
    return known and node.target not in OF_STRIDES and all(map(_is_known, _tensors(node.meta.get("val"))))


def _is_generated(node: fx.Node) -> bool:
    """Is this made by a kernel that can write it in another order just as well?"""
    return node.op == "call_function" and node.target not in OPERANDS and node.target is not operator.getitem


def _operands(call: fx.Node) -> tuple[fx.Node, ...]:
    return cast("tuple[fx.Node, ...]", call.args[: OPERANDS[call.target]])  # type: ignore[index]  # a convolution


def _images(call: fx.Node) -> tuple[fx.Node, ...]:
    """The operands but the weight, which comes last."""
    return _operands(call)[:-1]


def _made(call: fx.Node) -> Iterator[torch.Tensor]:
    """The images that a convolution, or its gradient, gives."""
    result = call.meta["val"]
    first = result[0] if isinstance(result, (tuple, list)) else result
    if isinstance(first, torch.Tensor):
        yield first


def _groups(call: fx.Node) -> int:
    return cast(int, call.args[9 if _is_backward(call) else 8])


def _is_backward(call: fx.Node) -> bool:
    return call.target is aten.convolution_backward.default


def _on_matrix_units(image: torch.Tensor) -> bool:
    """Does cuDNN convolve it on matrix units, with kernels that want channels last?

    Halves alone: with channels last, more of the kernels for float32 round their operands to TF32.
    """
    if image.device.type != "cuda" or not torch.backends.cudnn.enabled or torch.version.hip is not None:
        return False
    matrix_units = torch.cuda.is_available() and torch.cuda.get_device_capability(image.device) >= (8, 0)
    return matrix_units and image.dtype.itemsize == 2


def _bytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


def _has_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _channels_last_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    _, channels, height, width = tensor.shape
    return (channels * height * width, 1, width * channels, channels)


def _is_known(tensor: torch.Tensor) -> bool:
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def _tensors(result: object) -> Iterator[torch.Tensor]:
    for part in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(part, torch.Tensor):
            yield part
