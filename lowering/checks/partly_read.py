"""Finds results that are read only in part, but whose computation checks data: eager computes, and checks, all of it.

Input: a graph, and the calls that check data; output: those whose result has elements that may not be read.  A call is
left out only where its result is certainly read whole (`read_boxes.py`), by one call or by several together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import fx

from fusion.lowering.builder import Builder
from fusion.lowering.checks.read_boxes import WHOLE, Box, Boxes, boxes_read, merged
from fusion.lowering.checks.unused import keep
from fusion.lowering.indexing import ONE
from fusion.lowering.ir.expr import Expr, Op, free_axes, make_op, postorder
from fusion.lowering.ir.program import Extern, Map, Node
from fusion.lowering.ir.scalar_ops import CHECKED
from fusion.lowering.ir.sizes import sizes_of
from fusion.lowering.value import FxValue, Shape, Value, axes_of


@dataclass(frozen=True, slots=True)
class Effect:
    """Holds one call, lowered by itself: its results by position, the nodes that compute them, the tensors' shapes.

    Operands have the names of their fx nodes.
    """

    results: Mapping[int, Value]
    nodes: Sequence[Node]
    shapes: Mapping[str, Shape]

    def reads(self, boxes: Mapping[int, Sequence[Box]]) -> Boxes:
        """Return the boxes of operands that are read if these boxes of the results are; others are not computed."""
        return boxes_read([(self.results[k], boxes[k]) for k in boxes if k in self.results], self.nodes, self.shapes)


def keep_checks(
    graph: fx.Graph,
    builder: Builder,
    values: Mapping[fx.Node, FxValue],
    added: Mapping[fx.Node, Sequence[Node]],
    effect_of: Callable[[fx.Node], Effect],
) -> None:
    """Fold the checks of results of which only a part may be read, over all of their points, and keep the fold.

    Args:
        builder: receives the folds.
        values: the value of each call.
        added: the nodes that each call has added.  One without any entry reads its operands whole.
        effect_of: the effect of a call that adds no call of PyTorch's operations.
    """
    known = lru_cache(lambda node: None if node not in added or calls_library(added[node]) else effect_of(node))
    own = {
        node: [*own_checks(_computed_by(values[node], builder, nodes), _operands_of(node, values))]
        for node, nodes in added.items()
    }
    checking = {node: checks for node, checks in own.items() if checks}
    for node in partly_read(graph, checking, known):
        builder.current = node
        for checks in checking[node]:
            varying = [k for k, size in enumerate(checks.shape) if size != ONE]
            fold = builder.reduce("max", [checks], varying) if varying else builder.map(checks)
            builder.nodes.append(keep(fold))


def calls_library(nodes: Iterable[Node]) -> bool:
    """Return whether a tensor is passed to one of PyTorch's operations, which reads it whole."""
    return any(isinstance(node, Extern) and node.reads for node in nodes)


def _computed_by(result: FxValue, builder: Builder, added: Iterable[Node]) -> Iterator[Value]:
    """Return the results of a call, and the values it stores."""
    yield from _parts(result)
    for each in added:
        if isinstance(each, Map):
            out = builder.buffers[each.out]
            yield Value(out.shape, out.dtype, out.device, each.expr)


def _operands_of(node: fx.Node, values: Mapping[fx.Node, FxValue]) -> Iterator[Value]:
    return (part for source in node.all_input_nodes for part in _parts(values[source]))


def _parts(value: FxValue) -> Iterator[Value]:
    return (part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Value))


def partly_read(
    graph: fx.Graph, checking: Collection[fx.Node], effect_of: Callable[[fx.Node], Effect | None]
) -> Iterator[fx.Node]:
    """Yield the calls with one tensor as result of which some elements may be unread, in reverse order.

    Args:
        checking: the calls in question.
        effect_of: the effect of a call; None if it reads its operands whole.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> from fusion.lowering.lower import effect
    >>> graph = make_fx(lambda x: (x.exp() + 1)[:2].sum(), tracing_mode="fake")(torch.ones(3)).graph
    >>> [node.name for node in partly_read(graph, graph.nodes, effect)]
    ['add', 'exp']
    """
    reads = _Reads(effect_of)
    pending = [node for node in checking if node.op == "call_function"]
    while pending:
        node = pending.pop()
        if node not in reads.known and not reads.is_whole_anyway(node):
            reads.known[node] = {}
            pending += [user for user in node.users if user.op == "call_function"]
    for node in reversed(graph.nodes):
        if node in reads.known:
            reads.join(node)
            if node in checking and node.users and _shapes_of(node).keys() == {0} and reads.known[node][0] != [WHOLE]:
                yield node


class _Reads:
    """The boxes of results that are certainly read, by position: a single result has position 0."""

    def __init__(self, effect_of: Callable[[fx.Node], Effect | None]) -> None:
        self.effect_of = effect_of
        self.known: dict[fx.Node, dict[int, Sequence[Box]]] = {}

    def is_whole_anyway(self, node: fx.Node) -> bool:
        """Return whether a call reads a result whole, however little of its own results is read."""
        if _shapes_of(node).keys() != {0}:
            return False
        return any(WHOLE in self._read_by(user, node, dict.fromkeys(_shapes_of(user), ())) for user in node.users)

    def join(self, node: fx.Node) -> None:
        """Join the boxes of a node that its users read."""
        shapes, parts = _shapes_of(node), self.known[node]
        for user in node.users:
            position = user.args[1] if user.target is operator.getitem else 0
            assert isinstance(position, int)
            boxes = self._read_by(user, node, self.known.get(user, dict.fromkeys(_shapes_of(user), (WHOLE,))))
            parts[position] = [*parts.get(position, ()), *boxes]
        parts.update({k: list(merged(boxes, shapes[k])) for k, boxes in parts.items() if k in shapes})

    def _read_by(self, user: fx.Node, source: fx.Node, boxes: Mapping[int, Sequence[Box]]) -> Sequence[Box]:
        """Return the boxes of a source that a user reads of whose results these boxes are read."""
        if user.op != "call_function":
            return [WHOLE]
        if user.target is operator.getitem:
            return boxes.get(0, ())
        effect = self.effect_of(user)
        return [WHOLE] if effect is None else effect.reads(boxes).get(source.name, ())


def _shapes_of(node: fx.Node) -> dict[int, Shape]:
    """Return the shapes of the results of a call, by position."""
    val = node.meta.get("val")
    parts = val if isinstance(val, (tuple, list)) else (val,)
    return {k: sizes_of(part.shape) for k, part in enumerate(parts) if isinstance(part, torch.Tensor)}


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
