"""Compiles the bodies of control flow (branches, loops, scans) as separate graphs.

    cond(p, true_graph, false_graph, (x,))      calls the compiled version of either graph

PyTorch decides which body runs and how often; nothing is fused across its edge.  Input: an ATen graph, whose subgraphs
are replaced in place by calls of compiled ones.

A body runs eagerly if it mutates memory, draws random numbers, computes nothing, or takes tensors with symbolic or zero
strides.  A tensor whose layout differs from the traced one is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import fx

from fusion.runtime import Boxed
from fusion.runtime.names import named
from fusion.runtime.results import as_traced

CALLS = frozenset({torch.ops.higher_order.cond, torch.ops.higher_order.while_loop, torch.ops.higher_order.scan})
"""Operations that call graphs with tensors of the traced shapes."""

Laid: TypeAlias = tuple[tuple[int | None, ...], tuple[int, ...]]
"""The shape and strides of a tensor; None for sizes that are symbols."""


def compile_bodies(graph: fx.GraphModule, compile_one: Callable[[fx.GraphModule], Boxed]) -> None:
    """Replace calls of subgraphs in `graph` by calls of their compiled forms, which `compile_one` returns."""
    for node in graph.graph.nodes:
        if node.target not in CALLS:
            continue
        for name in [str(arg.target) for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]:
            body = getattr(graph, name)
            if isinstance(body, fx.GraphModule) and (laid := _taken(body)) is not None:
                setattr(graph, name, _calling(body, compile_one, laid))


def _taken(body: fx.GraphModule) -> list[Laid | None] | None:
    """Return the layouts of a body's inputs (None for a number); None if the body must run eagerly."""
    calls = [node for node in body.graph.nodes if node.op == "call_function"]
    if not calls or any("val" not in node.meta or _writes_or_draws(node.target) for node in calls):
        return None
    laid: list[Laid | None] = []
    for node in body.graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            laid.append(None)
        elif all(isinstance(stride, int) and stride > 0 for stride in val.stride()):
            laid.append((tuple(size if isinstance(size, int) else None for size in val.shape), val.stride()))
        else:
            return None
    return laid


def _writes_or_draws(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return target not in CALLS and isinstance(target, torch._ops.HigherOrderOperator)
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def _calling(
    body: fx.GraphModule, compile_one: Callable[[fx.GraphModule], Boxed], laid: list[Laid | None]
) -> fx.GraphModule:
    """Return a graph that only calls the compiled body."""
    output = body.graph.output_node()
    results = output.args[0]
    single = isinstance(results, fx.Node)
    if single:
        output.args = ((results,),)
        body.recompile()
    run = partial(_run, compile_one(body), laid, single)
    graph = fx.Graph()
    inputs = [graph.placeholder(node.name) for node in body.graph.find_nodes(op="placeholder")]
    graph.output(graph.call_function(named(run, "compiled_body"), tuple(inputs)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _run(compiled: Boxed, laid: list[Laid | None], single: bool, *args: object) -> object:
    inputs = [
        as_traced(arg, "the caller of a body", *layout) if layout is not None and isinstance(arg, torch.Tensor) else arg
        for arg, layout in zip(args, laid, strict=True)
    ]
    results = compiled(inputs)
    return results[0] if single else results
