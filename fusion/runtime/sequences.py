"""Joins launches of small kernels on a CPU that follow each other into one call.

Input: a spliced module; output: the same module, in which launches in a row, with the allocations between them, are one
call of C (`sequence_calls`).  Tensors that only these launches see become parts of a workspace, which they share as
their lives allow.

Intermediate tensors and inputs live until the last launch of a sequence, and its results are allocated before the
first; so only sequences that allocate little are joined, in which the calls matter, and not the memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeAlias, cast

import sympy
import torch
from torch import fx

from fusion.codegen.c.sequence import MOST_TENSORS, in_sequence
from fusion.runtime.memory import allocator_device, in_memory_of
from fusion.runtime.names import named
from fusion.runtime.sequence_calls import NativeLaunch, Part, Places, native_call
from fusion.runtime.stacks import stored_in_stacks
from fusion.runtime.workspaces import Alive, planned

IN_C = "fusion_in_c"
"""The key of the metadata of a node that launches a kernel by a function in C: its `NativeLaunch`."""

MOST_ALLOCATED = 4 << 20
"""The most bytes of the workspace and the results of a sequence: larger tensors are freed, and given to others, as
early as they can be."""

ALIGNMENT = 64
"""The alignment of tensors in bytes, as PyTorch allocates them."""

Launches: TypeAlias = "Sequence[fx.Node]"
"""The nodes of a sequence that launch kernels, in order."""


def joined(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module with joined launches, whose results are stored where they are concatenated (`stacks`)."""

    def call(launches: Launches, places: Places, size: int) -> Callable[..., None] | None:
        return native_call([cast("NativeLaunch", node.meta[IN_C]) for node in launches], places, size, in_sequence())

    return joined_by(module, lambda node: IN_C in node.meta, call)


def joined_by(
    module: fx.GraphModule,
    launches: Callable[[fx.Node], bool],
    call: Callable[[Launches, Places, int], Callable[..., None] | None],
) -> fx.GraphModule:
    """Return a module in which sequences of launches are calls; the module itself if nothing changes.

    Args:
        launches: whether a node is a launch that may be joined: of tensors alone.
        call: returns the call of some launches, whose tensors have these places, with a workspace of so many bytes; its
            arguments are tensors.  None leaves them as they are.
    """
    module = stored_in_stacks(module, launches)
    runs = [run for run in _runs(module.graph, launches) if sum(map(launches, run)) > 1]
    if not runs:
        return module
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    changed = False
    for run in runs:
        changed |= _join(graph, [copies[node] for node in run], launches, call)
    if not changed:
        return module
    graph.set_codegen(module.graph._codegen)
    return fx.GraphModule(module, graph)


def _runs(graph: fx.Graph, launches: Callable[[fx.Node], bool]) -> Iterator[list[fx.Node]]:
    """Yield the nodes of each sequence: launches, allocations, and other shapes of their memory."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if _joins(node, launches):
            run.append(node)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _joins(node: fx.Node, launches: Callable[[fx.Node], bool]) -> bool:
    if launches(node):
        return len(node.args) <= MOST_TENSORS
    if node.target is in_memory_of:
        return len(node.all_input_nodes) == 1
    return allocator_device(node.target) == "cpu" and not node.all_input_nodes


def _join(
    graph: fx.Graph,
    run: Sequence[fx.Node],
    launches: Callable[[fx.Node], bool],
    call: Callable[[Launches, Places, int], Callable[..., None] | None],
) -> bool:
    """Replace a run by one call, unless it allocates too much."""
    inside = set(run)
    launching = [node for node in run if launches(node)]
    starts = _starts(run)
    kept = {root for node, (root, _) in starts.items() if not inside.issuperset(node.users)}
    own = {node: root for node, (root, _) in starts.items() if root not in kept}
    offsets, bytes_ = _workspace(launching, own)
    if bytes_ + sum(map(_bytes, kept)) > MOST_ALLOCATED:
        return False
    outer: dict[fx.Node, int] = {}

    def place(arg: object) -> int | Part:
        node = cast("fx.Node", arg)
        root, start = starts.get(node, (node, 0))
        if root in kept and root is not node:
            return _part(node, root, start, outer.setdefault(root, len(outer)))
        return _part(node, root, offsets[root] + start) if node in own else outer.setdefault(node, len(outer))

    places = [[place(arg) for arg in node.args] for node in launching]
    called = call(launching, places, bytes_)
    if called is None:
        return False
    with graph.inserting_after(run[-1]):
        graph.call_function(named(called, f"launch_{len(launching)}"), tuple(outer))
    for node in reversed(run):
        if node in launching or not node.users:
            graph.erase_node(node)
    return True


def _starts(run: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, int]]:
    """Return for each allocation of a run, and each tensor in its memory: the allocation, and the first byte in it."""
    starts = {node: (node, 0) for node in run if allocator_device(node.target) == "cpu"}
    for node in run:
        if node.target is in_memory_of and node.args[0] in starts:
            root, start = starts[cast("fx.Node", node.args[0])]
            elements = cast("int", node.args[3] if len(node.args) > 3 else 0)
            starts[node] = root, start + elements * cast("torch.dtype", root.args[2]).itemsize
    return starts


def _part(node: fx.Node, root: fx.Node, begin: int, of: int | None = None) -> Part:
    shape, strides = node.args[1:3] if node.target is in_memory_of else node.args[:2]
    return Part(
        begin, cast("tuple[int, ...]", shape), cast("tuple[int, ...]", strides), cast("torch.dtype", root.args[2]), of
    )


def _workspace(launches: Sequence[fx.Node], own: Mapping[fx.Node, fx.Node]) -> tuple[dict[fx.Node, int], int]:
    """Return where each allocation begins in the workspace, and the size of that."""
    lives: dict[fx.Node, list[int]] = {}
    for number, node in enumerate(launches):
        for arg in node.args:
            if (root := own.get(cast("fx.Node", arg))) is not None:
                lives.setdefault(root, []).append(number)
    alive = [Alive(root.name, sympy.Integer(_bytes(root)), steps[0], steps[-1]) for root, steps in lives.items()]
    plan = planned(alive, {})
    begins, end = [], 0
    for sizes in plan.sizes:
        begins.append(end)
        end += max(map(int, sizes))
    return {root: begins[plan.slots[root.name]] for root in lives} | {r: 0 for r in own.values() if r not in lives}, end


def _bytes(root: fx.Node) -> int:
    """Return the size of an allocation, in whole lines."""
    shape, strides, dtype = root.args
    sizes = cast("tuple[int, ...]", shape)
    last = sum(map(operator.mul, (size - 1 for size in sizes), cast("tuple[int, ...]", strides)))
    elements = last + 1 if prod(sizes) else 0
    return -(-elements * cast("torch.dtype", dtype).itemsize // ALIGNMENT) * ALIGNMENT


__all__ = ["IN_C", "joined", "joined_by"]
