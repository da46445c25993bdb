"""Results of which only a part is read, but whose computation checks data: eager computes, and checks, all of it.

Input: a graph, in reverse, and the numbers of elements of its results; output: the calls whose result has elements that
certainly nothing reads, because the results computed from it have fewer.  Reads of overlapping parts may be counted as
if they read everything; then what is left out is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

import torch
from torch import fx

from fusion.lowering.checks import CHECKED
from fusion.lowering.expr import Expr, Op, free_axes, make_op, postorder
from fusion.lowering.indexing import ONE
from fusion.lowering.sizes import elements
from fusion.lowering.value import Value, axes_of


def partly_read(graph: fx.Graph, reads_all: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield the calls whose result, one tensor, has elements that nothing reads, in reverse order.

    Args:
        reads_all: whether a call reads its operands whole, however much of its own result is read.  The others are
            taken to read, of each operand, an element for each element of theirs.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph = make_fx(lambda x: (x.exp() + 1)[:2].sum(), tracing_mode="fake")(torch.ones(3)).graph
    >>> [node.name for node in partly_read(graph, lambda node: "sum" in node.name)]
    ['add', 'exp']
    """
    read: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if node.op == "call_function" and is_tensor and node in read and read[node] < _elements_of(node):
            yield node
        if node.op == "output" or (node.op == "call_function" and reads_all(node)):
            read.update({source: _elements_of(source) for source in node.all_input_nodes})
        elif node in read:
            for source in node.all_input_nodes:
                read[source] = min(_elements_of(source), read.get(source, 0) + read[node])


def _elements_of(node: fx.Node) -> int:
    val = node.meta.get("val")
    parts = val if isinstance(val, (tuple, list)) else (val,)
    return sum(elements(part.shape) for part in parts if isinstance(part, torch.Tensor))


def own_checks(results: Iterable[Value], operands: Iterable[Value]) -> Iterator[Value]:
    """Yield, for each result that checks more than the operands do, the sum of its checked values (int64).

    A dimension along which no check varies has one element.
    """
    inherited = set[Expr]().union(*(_checks_in(operand.expr) for operand in operands))
    for result in results:
        checks = _checks_in(result.expr)
        if len(checks) <= len(inherited):
            continue
        first, *others = (check for check in checks if check not in inherited)
        total: Expr = first
        for check in others:
            total = make_op("add", total, check)
        varying = free_axes(total)
        axes = zip(axes_of(result.shape), result.shape, strict=True)
        shape = tuple(size if symbol in varying else ONE for symbol, size in axes)
        yield replace(result, shape=shape, dtype=torch.int64, expr=total)


def _checks_in(expr: Expr) -> Collection[Expr]:
    return dict.fromkeys(part for part in postorder(expr) if isinstance(part, Op) and part.name == CHECKED)
