"""Benchmarks scheduling: how compile time grows with the graph, without code generation.

Synthetic graphs of one to ten thousand nodes are built directly as fx graphs and taken through lowering, verification,
the passes, clustering and planning.  The last columns show the growth of the total: seconds per node against the
smallest graph of the kind, and the exponent (1 is linear).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion.codegen.targets import builder_for
from fusion.compile import schedule_graph
from fusion.inspect.trace import Trace

aten = torch.ops.aten


class _Graph:
    """An fx graph under construction, with fake tensors of one shape [64, 256] and its row statistics [64, 1]."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        with FakeTensorMode():
            self.full, self.rows = torch.empty(64, 256), torch.empty(64, 1)
        self.count = 0

    def input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.full
        return node

    def call(self, target: object, *args: object, rows: bool = False) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = self.rows if rows else self.full
        self.count += 1
        return node

    def finish(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def chain(size: int) -> fx.GraphModule:
    """Return a chain of pointwise operations."""
    graph = _Graph()
    x, y = graph.input("x"), graph.input("y")
    operations = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)
    while graph.count < size:
        for operation in operations:
            x = graph.call(operation, x, y)
        x = graph.call(aten.tanh.default, x)
    return graph.finish(x)


def layers(size: int) -> fx.GraphModule:
    """Return residual layers: a softmax-like normalisation, a gate and an addition, each reading its predecessor."""
    graph = _Graph()
    x, gate = graph.input("x"), graph.input("gate")
    while graph.count < size:
        top = graph.call(aten.amax.default, x, [-1], True, rows=True)
        powers = graph.call(aten.exp.default, graph.call(aten.sub.Tensor, x, top))
        total = graph.call(aten.sum.dim_IntList, powers, [-1], True, rows=True)
        share = graph.call(aten.div.Tensor, powers, total)
        gated = graph.call(aten.mul.Tensor, share, graph.call(aten.sigmoid.default, gate))
        x = graph.call(aten.add.Tensor, x, gated)
    return graph.finish(x)


def siblings(size: int) -> fx.GraphModule:
    """Return many small independent updates, like an optimizer's."""
    graph = _Graph()
    step = graph.input("step")
    outputs = []
    while graph.count < size:
        weight, gradient = graph.input(f"w{graph.count}"), graph.input(f"g{graph.count}")
        scaled = graph.call(aten.mul.Tensor, gradient, step)
        decayed = graph.call(aten.mul.Tensor, weight, 0.99)
        outputs.append(graph.call(aten.sub.Tensor, decayed, scaled))
    return graph.finish(*outputs)


KINDS: tuple[Callable[[int], fx.GraphModule], ...] = (chain, layers, siblings)
STAGES = ("lower", "program", "clusters", "launches")


def timed(graph: fx.GraphModule) -> tuple[dict[str, float], int]:
    """Return the seconds of each stage, with the checks of its passes, and the number of kernels planned."""
    trace = Trace(None, "scheduling")
    _, schedule = schedule_graph(graph, builder_for("cpu").target, trace)
    seconds = dict.fromkeys(STAGES, 0.0)
    for each in trace.log.times:
        seconds["lower" if each.name == "lower" else each.stage] += each.seconds
    return seconds, len(schedule.steps)


def run(*, only: str, quick: bool) -> int:
    sizes = (300, 1000) if quick else (1000, 3000, 10_000)
    print(f"{'graph':<10}{'nodes':>8}{'kernels':>9}" + "".join(f"{stage:>10}" for stage in STAGES), end="")
    print(f"{'total s':>10}{'ms/node':>10}{'exponent':>10}")
    for kind in KINDS:
        if only not in kind.__name__:
            continue
        timed(kind(50))  # imports and caches of sympy
        first: tuple[int, float] | None = None
        for size in sizes:
            seconds, kernels = timed(kind(size))
            total = sum(seconds.values())
            first = first or (size, total)
            exponent = math.log(total / first[1]) / math.log(size / first[0]) if size > first[0] else math.nan
            cells = "".join(f"{seconds[stage]:>10.2f}" for stage in STAGES)
            growth = f"{total / size * 1e3:>10.2f}" + (f"{exponent:>10.2f}" if size > first[0] else f"{'-':>10}")
            print(f"{kind.__name__:<10}{size:>8}{kernels:>9}{cells}{total:>10.2f}{growth}", flush=True)
    return 0
