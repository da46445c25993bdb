"""Keeps the strides of inputs that are changed in place.

    x.index_add_(1, i, y)      becomes      x.copy_(x.index_add(1, i, y))

where the operation's own result has another layout than x.  In the functional graph that result replaces x, and views
of it have its strides.  Under symbolic sizes AOTAutograd recreates returned views, by their strides, in the memory of
x: they would contain other elements.  The result of `copy_` has the layout of x.

Input: Dynamo's graph; it is changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion.dynamo.writes import memory_of, name_of, written_by


def keep_strides(graph: fx.GraphModule) -> None:
    """Keep the strides of inputs that are changed in place under symbolic sizes, if views of them are returned.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> def f(x, i, y):
    ...     x.index_add_(0, i, y)
    ...     return x.t()
    >>> show_captured(keep_strides, f, empty(4, 5).t(), empty(2, dtype=int), empty(2, 4), dynamic=True)
    - index_add_ = index_add_(l_x_, 0, l_i_, l_y_)
    + index_add_ = written_with_its_strides(index_add, l_x_, 0, l_i_, l_y_)
      t = t(l_x_)
      return t
    """
    inputs = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    if not any(isinstance(value, torch.SymInt) for value in inputs):
        return
    returned = graph.graph.output_node().all_input_nodes
    views = _memories(node.meta.get("example_value") for node in returned if node.op != "placeholder")
    memories = _memories(inputs) & views
    for node in graph.graph.nodes if memories else ():
        written = written_by(node) if node.op in ("call_method", "call_function") else None
        value = None if written is None else written.meta.get("example_value")
        if not isinstance(value, FakeTensor) or memory_of(value) not in memories:
            continue
        name = _functional(node)
        if name and _has_others(name, node, value):
            node.op, node.target, node.args = "call_function", written_with_its_strides, (name, *node.args)
    graph.recompile()


def _memories(values: Iterable[object]) -> set[int | None]:
    return {memory_of(value) for value in values if isinstance(value, FakeTensor)}


def written_with_its_strides(name: str, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Set x to the result of the operation of that name."""
    return x.copy_(getattr(torch.ops.aten, name)(x, *args, **kwargs))


def _functional(node: fx.Node) -> str:
    """Return the functional name of an in-place call; empty if there is none, or if it draws random numbers."""
    name = name_of(node)
    if not name.endswith("_") or "out" in node.kwargs:
        return ""
    packets = [getattr(torch.ops.aten, each, None) for each in (name, name[:-1])]
    existing = [packet for packet in packets if isinstance(packet, OpOverloadPacket)]
    overloads: list[OpOverload] = [getattr(packet, each) for packet in existing for each in packet._overload_names]
    drawn = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    return "" if drawn or len(existing) < 2 else name[:-1]


def _has_others(name: str, node: fx.Node, x: FakeTensor) -> bool:
    """Return whether the result of the functional operation is a new tensor with other strides than x."""
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["example_value"])
        with x.fake_mode:
            result: object = getattr(torch.ops.aten, name)(*args, **kwargs)
    except Exception:  # it takes other arguments, or one is unknown: the write stays as it is in the program
        return False
    if not isinstance(result, Tensor) or result.ndim != x.ndim or memory_of(result) == memory_of(x):
        return False
    return not all(statically_known_true(one == other) for one, other in zip(result.stride(), x.stride(), strict=True))
