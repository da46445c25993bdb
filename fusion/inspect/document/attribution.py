"""Narrows down which operations a line of a kernel's source computes.

Input: the source, and a launch with the operations that it computes; output: operations for each line, none where they
are not known.  A line computes the operations between the tensors and reductions that it reads, directly or through
names of the source, and the tensors and reductions to which it contributes.  That is read from the names of the block
program, in any language in which a line that begins with a name and `=` sets that name: tensors and reductions have
those names, or begin with them and `_`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

from fusion.inspect.graphs import OperationReport
from fusion.inspect.report import KernelReport
from fusion.lowering.ir.kernel import Fold, Kernel, Prefix, statements

_NAME = re.compile(r"[A-Za-z_]\w*")
_SET = re.compile(r"\s*(?:\w+\s+){0,3}([A-Za-z_]\w*)(?:\[.*?\])?\s*(?:[-+*/|&^]|<<|>>)?=(?!=)")


@dataclass(frozen=True, slots=True)
class Flow:
    """The tensors and reductions that a line reads, and the ones that depend on it; `loads`: it only loads a tensor."""

    reads: frozenset[str] = frozenset()
    leads: frozenset[str] = frozenset()
    loads: str = ""


@dataclass(frozen=True, slots=True)
class Attribution:
    """Attributes the lines of kernels to operations of one graph."""

    operations: Sequence[OperationReport]
    _flows: dict[tuple[str, frozenset[str]], list[Flow]] = field(default_factory=dict)

    def lines(self, launch: KernelReport, own: Sequence[int]) -> list[list[int]]:
        """Return, for each line of a launch's source, operations among `own`, by their position in the graph."""
        if launch.kernel is None:
            return [[] for _ in launch.source.splitlines()]
        between = _Between(self.operations, own, launch.kernel, launch.place.params)
        key = launch.source, frozenset(between.folds)
        if key not in self._flows:
            self._flows[key] = flows(launch.source, between.inputs, between.folds, between.outputs)
        known = {flow: between.operations_of(flow) for flow in dict.fromkeys(self._flows[key])}
        return [known[flow] for flow in self._flows[key]]


def flows(source: str, inputs: Collection[str], folds: Collection[str], outputs: Collection[str]) -> list[Flow]:
    """Return the buffers that each line of a source reads, and the buffers to which it contributes.

    >>> *_, last = flows("t = in0[i] + 1\\nsum0 += t * t\\nout0[i] = t / sum0", ["in0"], ["sum0"], ["out0"])
    >>> sorted(last.reads), sorted(last.leads)
    (['in0', 'sum0'], ['out0'])
    """
    ends = {*inputs, *folds, *outputs}
    graph: nx.DiGraph[str] = nx.DiGraph()
    lines: list[tuple[list[str], str]] = []
    for line in source.splitlines():
        names = [_end(name, ends) for name in _NAME.findall(line)]
        match = _SET.match(line)
        target = _end(match[1], ends) if match else next((name for name in names if name in outputs), "")
        lines.append(([name for name in names if name != target], target))
        graph.add_nodes_from([*names, target])
        graph.add_edges_from((name, target) for name in lines[-1][0] if target)
    return [_flow(names, target, graph, inputs, ends) for names, target in lines]


def _flow(
    names: Iterable[str], target: str, graph: nx.DiGraph[str], inputs: Collection[str], ends: Collection[str]
) -> Flow:
    if not target:
        return Flow()
    if target in inputs:
        return Flow(loads=target)
    leads = frozenset({target}) if target in ends else _reached([target], graph.successors, ends)
    return Flow(_reached(names, graph.predecessors, ends), leads)


def _reached(starts: Iterable[str], step: Callable[[str], Iterable[str]], ends: Collection[str]) -> frozenset[str]:
    """Return the ends that are reached from `starts`; nothing is followed beyond an end."""
    reached, seen, todo = set[str](), set[str](), [*starts]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in ends:
            reached.add(name)
        else:
            todo.extend(step(name))
    return frozenset(reached)


def _end(name: str, ends: Collection[str]) -> str:
    """Return the tensor or the reduction to which a name refers; the name itself if there is none."""
    first = name.partition("_")[0]
    return first if first in ends and name not in ends else name


class _Between:
    """The operations of a launch, and those at which tensors and reductions of its kernel begin and end."""

    def __init__(
        self, operations: Sequence[OperationReport], own: Sequence[int], kernel: Kernel, tensors: Sequence[str]
    ) -> None:
        views = {out: each.reads for each in operations if each.kind == "view" for out in each.writes}
        writer = {name: k for k in own for name in operations[k].writes}
        taken = {k: _through(operations[k].reads, views) for k in own}
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.graph.add_nodes_from(own)
        self.graph.add_edges_from((writer[name], k) for k in own for name in taken[k] if name in writer)
        pairs = [*zip(kernel.params, tensors, strict=False)]
        self.inputs = {p.name: {k for k in own if name in taken[k]} for p, name in pairs if not p.written}
        self.outputs = {p.name: {k for k in own if name in operations[k].writes} for p, name in pairs if p.written}
        self.folds = _known_folds(kernel, [(k, operations[k]) for k in own])
        self._folding = set[int]().union(*self.folds.values())

    def operations_of(self, flow: Flow) -> list[int]:
        """Return the operations between the operands and the results of a line; none if an end is not known."""
        if flow.loads:
            return sorted(self.inputs[flow.loads])
        starts = [self.inputs.get(name) or self._after(name) for name in flow.reads]
        stops = [self.folds.get(name) or self.outputs.get(name, set()) for name in flow.leads]
        if not starts or not all(starts) or not all(stops):
            return []
        ends = set[int]().union(*stops)
        ahead = self._spread(set[int]().union(*starts), self.graph.successors, set())
        return sorted((ahead & self._spread(ends, self.graph.predecessors, ends)) - (self._folding - ends))

    def _after(self, name: str) -> set[int]:
        """Return the operations that read a reduction, or a tensor that the kernel has written."""
        writers = self.folds.get(name) or self.outputs.get(name, set())
        return {reader for k in writers for reader in self.graph.successors(k)}

    def _spread(self, starts: set[int], step: Callable[[int], Iterable[int]], beyond: set[int]) -> set[int]:
        """Return all operations from `starts` on, up to reductions; those in `beyond` are no end."""
        seen, todo = set[int](), [*starts]
        while todo:
            k = todo.pop()
            if k not in seen:
                seen.add(k)
                todo.extend(step(k) if k not in self._folding or k in beyond else ())
        return seen


def _through(names: Iterable[str], views: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Return tensors with the bases of their views."""
    seen, todo = set[str](), [*names]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(views.get(name, ())[:1])
    return seen


def _known_folds(kernel: Kernel, own: Sequence[tuple[int, OperationReport]]) -> dict[str, set[int]]:
    """Return the operations of each fold and prefix whose kind no other operation of the launch has."""
    named = [
        (stmt.name, stmt.op)
        for part in kernel.launched
        for stmt in statements(part.body)
        if isinstance(stmt, (Fold, Prefix))
    ]
    known: dict[str, set[int]] = {}
    for name, op in named:
        doing = [(k, each) for k, each in own if each.fold == op]
        origins = {each.origin for _, each in doing}
        if len(origins) == 1 and len(doing) == sum(other == op for _, other in named):
            known[name] = {k for k, _ in doing}
    return known


__all__ = ["Attribution", "Flow", "flows"]
