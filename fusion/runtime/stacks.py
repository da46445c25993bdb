"""Stores tensors where they are concatenated, on a CPU.

Input: a spliced module; output: the same module, in which launches write the parts of a stack or a concatenation into
its memory, and no call copies them there.  So the states of a loop over time steps are stored once.

A part is stored in the whole if it is all of an allocation, its elements have the same strides there, and only launches
before the concatenation touch it.  A few other parts (an input, or a state that is returned, too) are copied.  Refused:
symbolic sizes, parts of other dtypes, and a concatenation with parts of unknown sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeAlias, cast

import torch
from torch import fx
from typing_extensions import TypeIs

from fusion.lowering.ir.program import Buffer
from fusion.runtime.memory import allocator, allocator_device, in_memory_of

aten = torch.ops.aten

RESULT = "fusion_result"
"""The key of the metadata of a node that calls an operation: the buffer that is its result."""

MOST_COPIED = 4
"""Of so many parts, one may be copied by itself (measured: docs/performance.md, `MOST_COPIED`)."""

Sizes: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a part in its whole: its shape and strides there, and its first element."""

    shape: Sizes
    strides: Sizes
    begin: int


def stored_in_stacks(module: fx.GraphModule, launches: Callable[[fx.Node], bool]) -> fx.GraphModule:
    """Return a module whose launches write parts into their wholes; the module itself if there are none.

    Args:
        launches: whether a node is a launch, which touches nothing but the elements of its tensors.
    """
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    chosen = {node: stored for node in order if (stored := _stored_parts(node, launches, order))}
    if not chosen:
        return module
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for node, stored in chosen.items():
        _store(graph, copies[node], {copies[part] for part in stored})
    graph.set_codegen(module.graph._codegen)
    return fx.GraphModule(module, graph)


def _stored_parts(
    node: fx.Node, launches: Callable[[fx.Node], bool], order: Mapping[fx.Node, int]
) -> Sequence[fx.Node]:
    """Return the parts of a concatenation that can be stored in it, in order; none if there are too few."""
    parts, places = _parts(node)
    count = Counter(parts)

    def only_launches(users: Iterable[fx.Node]) -> bool:
        return all(
            user is node
            or (order[user] < order[node] and (launches(user) or (_is_view(user) and only_launches(user.users))))
            for user in users
        )

    stored = [
        part
        for part, place in zip(parts, places, strict=False)
        if count[part] == 1 and _fits(part, place, _result(node).dtype) and only_launches(part.users)
    ]
    return stored if (len(parts) - len(stored)) * MOST_COPIED <= len(parts) else []


def _parts(node: fx.Node) -> tuple[Sequence[fx.Node], Sequence[_Place]]:
    """Return the parts of a concatenation, and their places in it; no places if these are not known."""
    if node.target not in (aten.stack.default, aten.cat.default) or RESULT not in node.meta:
        return (), ()
    whole = _result(node)
    parts, dim = cast("Sequence[fx.Node]", node.args[0]), (*node.args, *node.kwargs.values(), 0)[1]
    if not all(size.is_Integer for size in (*whole.shape, *whole.strides)) or whole.numel == 0:
        return parts, ()
    (shape, strides), dim = _layout(whole), cast("int", dim) % len(whole.shape)
    if node.target is aten.stack.default:
        inside = _without(shape, dim), _without(strides, dim)
        return parts, [_Place(*inside, k * strides[dim]) for k in range(len(parts))]
    shapes = [part.args[0] if _is_allocation(part) else None for part in parts]
    if not all(_static(each) and len(each) == len(shape) for each in shapes):
        return parts, ()
    known = cast("Sequence[Sizes]", shapes)
    starts = accumulate((each[dim] for each in known), initial=0)
    return parts, [_Place(each, strides, start * strides[dim]) for each, start in zip(known, starts, strict=False)]


def _result(node: fx.Node) -> Buffer:
    return cast("Buffer", node.meta[RESULT])


def _layout(buffer: Buffer) -> tuple[Sizes, Sizes]:
    return tuple(map(int, buffer.shape)), tuple(map(int, buffer.strides))


def _fits(part: fx.Node, place: _Place, dtype: object) -> bool:
    """Return whether a part is an allocation with the layout of its place."""
    if not _is_allocation(part) or part.args[0] != place.shape or part.args[2] is not dtype or 0 in place.shape:
        return False
    strides = cast("Sizes", part.args[1])
    return all(size == 1 or a == b for size, a, b in zip(place.shape, strides, place.strides, strict=True))


def _is_allocation(node: fx.Node) -> bool:
    return allocator_device(node.target) == "cpu" and not node.all_input_nodes


def _is_view(node: fx.Node) -> bool:
    return node.target is in_memory_of and len(node.all_input_nodes) == 1


def _static(sizes: object) -> TypeIs[Sizes]:
    return isinstance(sizes, tuple) and all(isinstance(size, int) for size in sizes)


def _without(sizes: Sizes, dim: int) -> Sizes:
    return (*sizes[:dim], *sizes[dim + 1 :])


def _store(graph: fx.Graph, node: fx.Node, stored: set[fx.Node]) -> None:
    """Replace a concatenation by an allocation before the first of the parts that are stored in it."""
    (shape, strides), dtype = _layout(_result(node)), _result(node).dtype
    parts, places = _parts(node)
    empty = allocator(torch.device("cpu"), None, prod(shape) * dtype.itemsize)
    assert empty is not None
    with graph.inserting_before(next(each for each in graph.nodes if each in stored)):
        whole = graph.call_function(empty, (shape, strides, dtype))
    for part, place in zip(parts, places, strict=True):
        with graph.inserting_before(part if part in stored else node):
            layout = part.args[:2] if part in stored else (place.shape, place.strides)
            inside = graph.call_function(in_memory_of, (whole, *layout, place.begin))
            if part not in stored:
                graph.call_function(aten.copy_.default, (inside, part))
        if part in stored:
            part.replace_all_uses_with(inside)
            graph.erase_node(part)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


__all__ = ["RESULT", "stored_in_stacks"]
