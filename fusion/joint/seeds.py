"""Turns the seeds of random calls that backward recomputes into values of the graph.

A checkpoint requires that all its calls are recomputed in backward, including dropout.  AOTAutograd would save the
state of the generator around each such call, which leaves the call opaque.  Here it gets a seed, drawn once and saved,
and gives the same numbers wherever it is computed.

Attention without dropout is tagged as random all the same; the tag is hidden during the partition.

Input: a joint graph, which is changed in place.  Calls with a generator of the caller's own are left.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from fusion.lowering.random.seeded import LIMITS, draws, seeded

AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def share_seeds(joint: fx.GraphModule) -> None:
    """Give a seed to each random call that is marked for recomputation.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty, rand_like
    >>> def marked(graph):
    ...     for node in graph.graph.nodes:
    ...         node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    ...     share_seeds(graph)
    >>> show_graph(marked, lambda x: rand_like(x) * x, empty(3))
    - rand_like = rand_like(x, pin_memory=False)
    + randint_low = randint.low(-4611686018427387904, 4611686018427387904, [], dtype=torch.int64, device=cpu)
    + seeded = seeded(rand_like.default, randint_low, x, pin_memory=False)
    - mul = mul.Tensor(rand_like, x)
    + mul = mul.Tensor(seeded, x)
      return mul
    """
    drawn = [node for node in joint.graph.nodes if _is_drawn_again(node)]
    for node in drawn:
        _give_seed(joint.graph, node)
    if drawn:
        joint.graph.lint()
        joint.recompile()


def has_seeds(graph: fx.GraphModule) -> bool:
    """Return whether the graph holds a call with an explicit seed, which another graph may share."""
    return any(node.target is seeded for node in graph.graph.nodes)


def hide_unused_random(joint: fx.GraphModule) -> None:
    """Hide the random tag of calls that are marked for recomputation and draw nothing.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def f(q):
    ...     return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]
    >>> def marked(graph):
    ...     for node in graph.graph.nodes:
    ...         node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    ...     hide_unused_random(graph)
    >>> show_graph(marked, f, empty(1, 2, 3, 4))
    - _scaled_dot_product_flash_attention_for_cpu = _scaled_dot_product_flash_attention_for_cpu(q, q, q)
    + _scaled_dot_product_flash_attention_for_cpu = undrawn(_scaled_dot_product_flash_attention_for_cpu.default, q,
            q, q)
      getitem = getitem(_scaled_dot_product_flash_attention_for_cpu, 0)
      getitem_1 = getitem(_scaled_dot_product_flash_attention_for_cpu, 1)
      return getitem
    """
    covered = [node for node in joint.graph.nodes if _is_marked(node) and not _draws(node)]
    for node in covered:
        node.args, node.target = (node.target, *node.args), undrawn
    if covered:
        joint.recompile()


def restore_unused_random(graph: fx.GraphModule) -> None:
    """Undo `hide_unused_random`.

    >>> from fusion.inspect.examples import show_graph, traced
    >>> from torch import empty
    >>> graph = traced(lambda x: undrawn(torch.ops.aten.sin.default, x), empty(3))
    >>> for node in graph.graph.nodes:
    ...     if node.op == "call_function":
    ...         node.args, node.target = (node.target, *node.args), undrawn
    >>> show_graph(restore_unused_random, graph)
    - sin = undrawn(sin.default, x)
    + sin = sin(x)
      return sin
    """
    covered = graph.graph.find_nodes(op="call_function", target=undrawn)
    for node in covered:
        (target, *args) = node.args
        node.args, node.target = tuple(args), target
    if covered:
        graph.recompile()


def undrawn(call: OpOverload, *args: object, **kwargs: object) -> object:
    """Make a call that draws nothing."""
    return call(*args, **kwargs)


def _is_drawn_again(node: fx.Node) -> bool:
    return _is_marked(node) and _draws(node) and node.kwargs.get("generator") is None


def _is_marked(node: fx.Node) -> bool:
    """Return whether a call is marked for recomputation, and tagged as random."""
    again = node.op == "call_function" and node.meta.get("recompute") in AGAIN
    return again and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _draws(node: fx.Node) -> bool:
    return draws(node.target, node.args, node.kwargs)


def _give_seed(graph: fx.Graph, node: fx.Node) -> None:
    assert isinstance(node.target, OpOverload)
    result = node.meta["val"]
    first = result[0] if isinstance(result, (tuple, list)) else result
    with graph.inserting_before(node):
        options = {"dtype": torch.int64, "device": first.device}
        seed = graph.call_function(torch.ops.aten.randint.low, (*LIMITS, []), options)
        seed.meta = {key: value for key, value in node.meta.items() if key in ("stack_trace", "nn_module_stack")}
        seed.meta["val"] = first.new_empty((), dtype=torch.int64)
        call = graph.call_function(seeded, (node.target, seed, *node.args), node.kwargs)
        call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)
