"""What is kept between forward and backward, and how exactly.

A forward kernel has the maximum or the sum of a row in float32; where the row is of halves, eager stores it as a half.
There it is as exact as the row, which was stored as well.  Here backward makes the row again, to float32, and a maximum
that was rounded is not the maximum of that row: exp(s - m) would be off by up to exp(|m| / 256), and the whole row with
it.  So statistics of rows of halves are kept in float32.  So are those that a norm gives beside its result, which
eager's kernels of the CPU round: backward subtracts the mean from the row, and a row that is a statistic itself, of one
number, is that mean.

A running log-sum-exp is a statistic of the row up to each point, as large as the row: one of 10000 that was rounded is
off by up to 4, and exp(x - it) by a factor of 50.  As a rule it is a result of the program as well, which is a half:
what is computed and kept is one of the row in float32, of which the half is made.

An input that backward needs is kept as it was when forward began.  The partition may choose an input where eager keeps
what was made of it; if the program changes the input in place, that would be another one by then.

What is kept in memory of its own, of which neither the caller nor anything else that is kept has a part, is marked as
`SPARE`: backward may write over it.

Input: the graphs of forward and backward, as they were parted, and both are changed in place.  What is no statistic of
a row, or no half, or is given to the graph and stays what it is, is kept as it is.
"""

from __future__ import annotations

from collections import Counter
from operator import getitem
from typing import cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

from fusion.joint.factors import is_tensor, value_of
from fusion.joint.facts import folds, value_of_call
from fusion.joint.writing import convert, write
from fusion.lowering.rules.conversion import ONLY_STORED
from fusion.lowering.scalar_ops import HALVES
from fusion.lowering.sizes import elements

aten = torch.ops.aten

RUNNING = aten.logcumsumexp.default
"""The operation whose result is at each point the statistic of the row up to there."""

SPARE = "spare"
"""The mark of an input of backward that nobody else is to see."""

MIN_ROW = 4
"""How many times as large as its statistic a row must be for the statistic to count as small."""


def widen_statistics(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Keep statistics of rows of halves in float32.

    Args:
        outputs: how many results of forward are the program's own; those that follow are kept for backward.
    """
    output = forward.graph.output_node()
    results = list(cast("list[fx.Node]", output.args[0]))
    taken = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    changed = False
    for place, node in enumerate(results):
        if place < outputs or not is_tensor(node) or node.name not in taken or not _is_statistic(node):
            continue
        if node.target is RUNNING:
            results[place], narrow = _rounded_last(node)
            results[:] = [narrow if result is node else result for result in results]
        else:
            with forward.graph.inserting_before(output):
                results[place] = convert(node, torch.float32)
        _take_wide(taken[node.name], value_of(results[place]))
        changed = True
    if changed:
        output.args = (tuple(results),)
        for graph in (forward, backward):
            graph.graph.lint()
            graph.recompile()


def keep_unchanged(forward: fx.GraphModule, outputs: int) -> None:
    """Keep copies of those inputs that the program changes in place, and of views of them.

    Args:
        outputs: how many results of forward are the program's own; those that follow are kept for backward.
    """
    changed = _changed_inputs(forward)
    output = forward.graph.output_node()
    results = list(cast("list[fx.Node]", output.args[0]))
    places = [k for k in range(outputs, len(results)) if _memory_of(results[k]) in changed] if changed else []
    for place in places:
        node = results[place]
        with forward.graph.inserting_after(node):  # which is before the change: that comes last
            results[place] = write(node, aten.clone.default, node)
    if places:
        output.args = (tuple(results),)
        forward.graph.lint()
        forward.recompile()


def mark_spare(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Mark what backward alone gets.

    Args:
        outputs: how many results of forward are the program's own; those that follow are kept for backward.
    """
    results = cast("list[fx.Node | None]", forward.graph.output_node().args[0])
    given = {_memory(node) for node in forward.graph.find_nodes(op="placeholder")}
    shared = Counter(map(_memory, results))
    alone = {
        node.name
        for node in results[outputs:]
        if node is not None and _memory(node) is not None and shared[_memory(node)] == 1 and _memory(node) not in given
    }
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in alone and is_tensor(node):
            node.meta[SPARE] = True


def _memory(node: fx.Node | None) -> int | None:
    """What tells the memory of a tensor from that of others, as it was traced."""
    return value_of(node).untyped_storage()._cdata if node is not None and is_tensor(node) else None


def _changed_inputs(forward: fx.GraphModule) -> set[fx.Node]:
    """Inputs that the graph copies to, and those of which it returns what the caller copies to them."""
    holders = forward.graph.find_nodes(op="placeholder")
    copies = forward.graph.find_nodes(op="call_function", target=aten.copy_.default)
    described = forward.graph.output_node().meta.get("desc", ())
    later = [desc.mutated_input for desc in described if isinstance(desc, InputMutationAOTOutput)]
    return {cast(fx.Node, copy.args[0]) for copy in copies} | {
        node for node in holders if node.meta.get("desc") in later
    }


def _memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one lies in."""
    while isinstance(node, fx.Node) and (node.target is getitem or getattr(node.target, "is_view", False)):
        node = cast(fx.Node, node.args[0])
    return node


def _rounded_last(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """A running statistic in float32, and the half made of it that takes its place."""
    row, *rest = node.args
    graph = node.graph
    with graph.inserting_before(node):
        wide_row = convert(cast(fx.Node, row), torch.float32)
        wide = write(node, RUNNING, wide_row, *rest)
        narrow = convert(wide, value_of(node).dtype)
    narrow.meta[ONLY_STORED] = True
    node.replace_all_uses_with(narrow)
    graph.erase_node(node)
    return wide, narrow


def _take_wide(given: fx.Node, wide: torch.Tensor) -> None:
    """Let backward take a statistic in float32, and read it as the half that eager has."""
    dtype = value_of(given).dtype
    users = list(given.users)
    given.meta = {**given.meta, "val": wide}
    given.meta.pop("tensor_meta", None)
    with given.graph.inserting_after(given):
        narrow = convert(given, dtype)
    narrow.meta[ONLY_STORED] = True
    for user in users:
        user.replace_input_with(given, narrow)


def _is_statistic(node: fx.Node) -> bool:
    """Is this a half: running, given by a norm beside its result, or made by maps of reductions of larger tensors?"""
    if value_of(node).dtype not in HALVES:
        return False
    if node.target is RUNNING:
        return True
    if node.target is getitem and _stands_beside(node):
        return True
    size = elements(value_of(node).shape)
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        source = cast(fx.Node, node.args[0]) if node.target is getitem else node
        if folds(source):
            row = next(filter(is_tensor, source.all_input_nodes))
            small = elements(value_of(row).shape) >= MIN_ROW * max(size, elements(value_of(node).shape))
            if small and row.op != "placeholder" and value_of(row).dtype.is_floating_point:
                return True
        elif value_of_call(node) is not None:
            fresh = [arg for arg in node.all_input_nodes if is_tensor(arg) and arg not in seen]
            seen.update(fresh)
            todo += fresh
    return False


def _stands_beside(statistic: fx.Node) -> bool:
    """Is this a fold that a call gives beside a first result as large as its operand, as norms do?"""
    norm, place = cast("tuple[fx.Node, int]", statistic.args)
    first = norm.meta["val"][0]
    row = next(filter(is_tensor, norm.all_input_nodes))
    whole = isinstance(first, torch.Tensor) and elements(first.shape) == elements(value_of(row).shape)
    return whole and place > 0 and bool(folds(norm))
