"""Computes complex numbers that only the program sees as pairs of real and imaginary parts.

    view_as_real(view_as_complex(x) · f)      becomes      stack(x₀·f₀ − x₁·f₁, x₀·f₁ + x₁·f₀)

Rotary embeddings are often written like this.  Complex numbers are not generated; their parts are, fused with their
producers and consumers.  A complex value is replaced if all its readers can be expressed by its parts; a complex tensor
that a library computes or reads (a Fourier transform), or that is returned, stays.

The tables below are rules, one for each operation of complex numbers: complex dtypes are not generated, so no lowered
form exists from which pairs could be derived.

Input: a functional ATen graph, which is changed in place.  Parts are computed as in eager: a real operand is a complex
one with imaginary part zero, so that infinities give the same NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument, Target

from fusion.joint.writing import write

aten = torch.ops.aten

Part: TypeAlias = "fx.Node | float"
Pair: TypeAlias = tuple[Part, Part]
"""A real and an imaginary part; a number for a real operand, or for a constant."""

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Complex dtype → dtype of its parts."""

VIEWS = frozenset(
    (
        *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
        *(aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.slice.Tensor),
        *(aten.select.int, aten.clone.default, aten.detach.default, aten.sum.dim_IntList, aten.neg.default),
        *(aten.slice_backward.default, aten.select_backward.default),
    )
)
"""Operations that apply to each part separately: views, copies, and linear operations over the real numbers."""


@dataclass(frozen=True, slots=True)
class PairWriter:
    """Adds real operations to a graph, in place of a node and with its origin."""

    place: fx.Node

    def call(self, target: OpOverload, *args: object, **kwargs: object) -> fx.Node:
        """Add a call that is recomputed in backward if the replaced node is."""
        with self.place.graph.inserting_before(self.place):
            call = write(self.place, target, *args, **kwargs)
        if "recompute" in self.place.meta:
            call.meta["recompute"] = self.place.meta["recompute"]
        return call

    def combined(self, target: OpOverload, a: Part, b: Part) -> Part:
        """Add `target` of two parts, each of which may be a number."""
        if isinstance(a, fx.Node):
            return self.call(target, a, b)
        if isinstance(b, fx.Node):
            return self.call(target, self.call(aten.full_like.default, b, a), b)
        return NUMBERS[target](a, b)


def split_complex_numbers(graph: fx.GraphModule) -> None:
    """Replace complex numbers that are only read as real ones by their parts.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty, view_as_complex, view_as_real
    >>> def f(x, y):
    ...     return view_as_real(view_as_complex(x) * view_as_complex(y))
    >>> show_graph(split_complex_numbers, f, empty(3, 2), empty(3, 2))
    - view_as_complex = view_as_complex(x)
    - view_as_complex_1 = view_as_complex(y)
    - mul = mul.Tensor(view_as_complex, view_as_complex_1)
    - view_as_real = view_as_real(mul)
    - return view_as_real
    + select = select.int(x, -1, 0)
    + select_1 = select.int(x, -1, 1)
    + select_2 = select.int(y, -1, 0)
    + select_3 = select.int(y, -1, 1)
    + mul_1 = mul.Tensor(select, select_2)
    + mul_2 = mul.Tensor(select, select_3)
    + mul_3 = mul.Tensor(select_1, select_2)
    + mul_4 = mul.Tensor(select_1, select_3)
    + sub = sub.Tensor(mul_1, mul_4)
    + add = add.Tensor(mul_2, mul_3)
    + stack = stack([sub, add], -1)
    + return stack
    """
    replaceable = _replaceable(graph.graph)
    if not any(node.target in ARITHMETIC for node in replaceable):
        return
    pairs: dict[fx.Node, Pair] = {}
    for node in list(graph.graph.nodes):
        writer = PairWriter(node)
        if node in replaceable:
            pairs[node] = _pair(writer, node, pairs)
        elif node.target in READERS and node.args[0] in replaceable:
            real = READERS[node.target](writer, pairs[node.args[0]])
            real.meta["val"] = node.meta["val"]  # in eager's strides
            node.replace_all_uses_with(real)
    for node in reversed(list(graph.graph.nodes)):
        if not node.users and (node in replaceable or (node.target in READERS and node.args[0] in replaceable)):
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()


def _replaceable(graph: fx.Graph) -> set[fx.Node]:
    """Return the complex values that can be replaced by their parts."""
    known = {node for node in graph.nodes if node.op == "call_function" and _has_parts(node)}
    while True:
        accepted: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if node in known and all(user in accepted or user.target in READERS for user in node.users):
                accepted.add(node)
        hidden = {node for node in accepted if any(_hides(arg) for arg in node.all_input_nodes if arg not in accepted)}
        if not hidden:
            return accepted
        known -= hidden


def _has_parts(node: fx.Node) -> bool:
    """Return whether this is a complex value whose parts are functions of its operands' parts."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in REAL:
        return False
    if node.target in VIEWS:
        return "dtype" not in node.kwargs
    if (node.target not in ARITHMETIC and node.target not in MAKERS) or node.kwargs:
        return False
    operands = [arg.meta["val"] for arg in node.all_input_nodes]
    if not all(isinstance(each, torch.Tensor) for each in operands):  # an unknown number
        return False
    if any(each.dtype not in (value.dtype, REAL[value.dtype]) for each in operands if each.ndim):
        return False
    return node.target not in SUMS or all(each.is_complex() or each.shape == value.shape for each in operands)


def _hides(operand: fx.Node) -> bool:
    """Return whether this is a complex tensor with a conjugate or negative bit, whose memory differs from its parts."""
    value = operand.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex() and (value.is_conj() or value.is_neg())


def _pair(writer: PairWriter, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    def read(arg: object) -> Pair:
        if isinstance(arg, fx.Node) and arg in pairs:
            return pairs[arg]
        if not isinstance(arg, fx.Node):
            number = complex(cast(complex, arg))
            return number.real, number.imag
        if not arg.meta["val"].is_complex():
            return arg, 0.0
        halves = writer.call(aten.view_as_real.default, arg)
        pairs[arg] = writer.call(aten.select.int, halves, -1, 0), writer.call(aten.select.int, halves, -1, 1)
        return pairs[arg]

    if node.target in MAKERS:
        return MAKERS[node.target](writer, *node.args)
    operands = [read(arg) for arg in node.args[: 1 if node.target in VIEWS else 2]]
    if node.target in VIEWS:
        first, second = operands[0]
        target, rest = cast(OpOverload, node.target), node.args[1:]
        return writer.call(target, first, *rest, **node.kwargs), writer.call(target, second, *rest, **node.kwargs)
    return ARITHMETIC[node.target](writer, *operands)


def _multiply(writer: PairWriter, a: Pair, b: Pair) -> Pair:
    products = [[writer.combined(aten.mul.Tensor, x, y) for y in b] for x in a]
    real = writer.combined(aten.sub.Tensor, products[0][0], products[1][1])
    return real, writer.combined(aten.add.Tensor, products[0][1], products[1][0])


def _add(writer: PairWriter, a: Pair, b: Pair) -> Pair:
    first, second = _multiply(writer, (1.0, 0.0), b)
    return writer.combined(aten.add.Tensor, a[0], first), writer.combined(aten.add.Tensor, a[1], second)


def _subtract(writer: PairWriter, a: Pair, b: Pair) -> Pair:
    first, second = _multiply(writer, (1.0, 0.0), b)
    return writer.combined(aten.sub.Tensor, a[0], first), writer.combined(aten.sub.Tensor, a[1], second)


def _conjugate(writer: PairWriter, a: Pair) -> Pair:
    if isinstance(a[0], fx.Node):
        return a[0], writer.call(aten.neg.default, a[1])
    value, parts = writer.place.meta["val"], (a[0], -cast(float, a[1]))  # of a number
    options = {"dtype": REAL[value.dtype], "device": value.device}
    return writer.call(aten.full.default, [], parts[0], **options), writer.call(
        aten.full.default, [], parts[1], **options
    )


def _halves(writer: PairWriter, x: Argument) -> Pair:
    return writer.call(aten.select.int, x, -1, 0), writer.call(aten.select.int, x, -1, 1)


def _polar(writer: PairWriter, radius: Argument, angle: Argument) -> Pair:
    cosine, sine = writer.call(aten.cos.default, angle), writer.call(aten.sin.default, angle)
    return writer.call(aten.mul.Tensor, radius, cosine), writer.call(aten.mul.Tensor, radius, sine)


MAKERS: dict[Target, Callable[..., Pair]] = {
    aten.view_as_complex.default: _halves,
    aten.polar.default: _polar,
}
"""Operations from real to complex numbers."""

ARITHMETIC: dict[Target, Callable[..., Pair]] = {
    aten.mul.Tensor: _multiply,
    aten.mul.Scalar: _multiply,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _subtract,
    aten._conj.default: _conjugate,
    aten._conj_physical.default: _conjugate,
}

NUMBERS: dict[OpOverload, Callable[[float, float], float]] = {
    aten.mul.Tensor: operator.mul,
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
}

SUMS = (aten.add.Tensor, aten.sub.Tensor)
"""Operations that leave the imaginary part unchanged for a real operand, which must have the shape of the result."""

READERS: dict[Target, Callable[[PairWriter, Pair], fx.Node]] = {
    aten.view_as_real.default: lambda writer, pair: writer.call(aten.stack.default, list(pair), -1),
    aten.abs.default: lambda writer, pair: writer.call(aten.hypot.default, *pair),
}
"""Operations from complex to real numbers."""
