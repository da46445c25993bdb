"""Benchmarks scheduling: how compile time grows with the graph.

Synthetic graphs of one to ten thousand nodes are built directly as fx graphs and taken through lowering, verification,
the passes, clustering and planning, without code generation.  The last columns show the growth of the total: seconds
per node against the smallest graph of the kind, and the exponent (1 is linear).

Models are compiled with empty caches, for a CPU.  Their operations have a budget: a multiple of the time of a synthetic
node on the same machine.  A model beyond its budget is named, and the benchmark fails.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion
from benchmarks.harness import Refused
from benchmarks.price.measured import of_model
from benchmarks.scheduled_models import CheckedNetwork, ResizedTransformer
from benchmarks.small_models import Model
from benchmarks.small_models import models as price_models
from fusion.codegen.targets import builder_for
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.runner.passes import PassTime

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


def _stage(each: PassTime) -> str:
    """Return the column of a pass: which products to lower is decided while a graph is lowered."""
    return "lower" if each.name == "lower" or each.stage.startswith("preview") else each.stage


def timed(graph: fx.GraphModule) -> tuple[dict[str, float], int]:
    """Return the seconds of each stage, with the checks of its passes, and the number of kernels planned."""
    trace = Trace(None, "scheduling")
    _, schedule = schedule_graph(graph, builder_for("cpu").target, trace)
    seconds = dict.fromkeys(STAGES, 0.0)
    for each in trace.log.times:
        seconds[_stage(each)] += each.seconds
    return seconds, len(schedule.steps)


def run(*, only: str, quick: bool) -> int:
    grown = _synthetic(only, quick)
    over = _models(only, quick, grown)
    for name in over:
        print(f"{name} takes longer than its budget")
    return 1 if over else 0


def _synthetic(only: str, quick: bool) -> float:
    """Print the times of synthetic graphs; return the milliseconds of a node of the smallest graph of layers."""
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
    timed(layers(50))
    seconds, _ = timed(layers(sizes[0]))
    return sum(seconds.values()) / sizes[0] * 1e3


# Models ---------------------------------------------------------------------------------------------------------------

BUDGET = 8.0
"""Synthetic nodes that take as long as an operation of a model may: its sizes differ, and so do its indices."""
QUICK = 3
"""The number of models of a quick run."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """How a model was compiled: seconds by stage, and in all from the first call to its result, the call included."""

    graphs: int
    operations: int
    kernels: int
    seconds: dict[str, float]
    building: float
    total: float

    @property
    def per_operation(self) -> float:
        """Milliseconds of lowering and scheduling for each operation."""
        return sum(self.seconds.values()) / self.operations * 1e3


def models() -> tuple[Model, ...]:
    """Return the models that are compiled, the smallest first."""
    pixels = partial(_pixels, 224)
    return (
        Model("VoVNet with breaks", CheckedNetwork, pixels),
        Model("ViT, resized", ResizedTransformer, partial(_pixels, 256)),
        Model("VoVNet, training", CheckedNetwork, pixels, training=True),
        *(model for model in price_models("cpu") if model.name in ("ResNet, training", "Llama", "BERT, training")),
    )


def _pixels(size: int, device: str) -> dict[str, torch.Tensor]:
    return {"pixels": torch.randn(1, 3, size, size, device=device)}


def compiled(model: Model) -> Compiled:
    """Compile a model with empty caches."""
    torch._dynamo.reset()
    backend = fusion.Backend(fusion.Options.read(options={"graph_cache": False, "target": "c"}))
    call = of_model(model).prepare("cpu")(lambda program: torch.compile(program, backend=backend, dynamic=False))
    kept = os.environ.get("FUSION_CACHE_DIR")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["FUSION_CACHE_DIR"] = empty
        try:
            start = time.perf_counter()
            call()
            total = time.perf_counter() - start
        finally:
            if kept is None:
                del os.environ["FUSION_CACHE_DIR"]
            else:
                os.environ["FUSION_CACHE_DIR"] = kept
    reports = backend.reports
    for report in reports:
        if report.failure:
            raise Refused(f"{model.name} fell back to eager: {report.failure}")
    times = [each for report in reports for each in report.passes]
    seconds = dict.fromkeys(STAGES, 0.0)
    for each in times:
        stage = _stage(each)
        if stage in seconds:
            seconds[stage] += each.seconds
    building = sum(each.seconds for each in times if each.stage == "build")
    kernels = sum(len(report.kernels) for report in reports)
    return Compiled(len(reports), sum(r.operations for r in reports), kernels, seconds, building, total)


def _models(only: str, quick: bool, node: float) -> list[str]:
    """Print the compile times of models, and return the names of those beyond the budget."""
    chosen = [model for model in models() if only in model.name][: QUICK if quick else None]
    if not chosen:
        return []
    print(f"{'model':<20}{'graphs':>8}{'nodes':>8}{'kernels':>9}" + "".join(f"{stage:>10}" for stage in STAGES), end="")
    print(f"{'build':>10}{'total s':>10}{'ms/node':>10}{'budget':>10}")
    over = []
    for model in chosen:
        found = compiled(model)
        budget = BUDGET * node
        cells = "".join(f"{found.seconds[stage]:>10.2f}" for stage in STAGES)
        print(f"{model.name:<20}{found.graphs:>8}{found.operations:>8}{found.kernels:>9}{cells}", end="")
        print(f"{found.building:>10.2f}{found.total:>10.2f}{found.per_operation:>10.2f}{budget:>10.2f}", flush=True)
        over += [model.name] if found.per_operation > budget else []
    return over
