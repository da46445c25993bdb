"""Captures the regions of a program once, and compiles them as often as asked: Dynamo's tracing is most of the time.

Input: the graphs that Dynamo captures; output: a backend whose compiled regions may be compiled again by another one.
The program itself, its guards and the code between regions stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from fusion.backend import Backend

Run = Callable[..., object]


@dataclass(slots=True)
class _Region:
    """A region as it was captured, and as the current backend compiled it."""

    graph: fx.GraphModule
    inputs: Sequence[object]
    context: TracingContext | None
    compiled: Run | None = None


@dataclass(slots=True)
class Regions:
    """A Dynamo backend that compiles with another one, which may be replaced between calls of the program.

    Attributes:
        backend: compiles regions from now on, each at its first call.
    """

    backend: Backend
    _known: list[_Region] = field(default_factory=list)

    def use(self, backend: Backend) -> None:
        """Compile all regions anew with another backend."""
        self.backend = backend
        for region in self._known:
            region.compiled = None

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[object]) -> Run:
        """Compile a region that Dynamo captured."""
        region = _Region(_copied(graph), inputs, TracingContext.try_get())
        region.compiled = self.backend(graph, inputs)
        self._known.append(region)

        def run(*args: object) -> object:
            if region.compiled is None:
                with tracing(region.context) if region.context is not None else contextlib.nullcontext():
                    region.compiled = self.backend(_copied(region.graph), region.inputs)
            return region.compiled(*args)

        disable: Callable[..., Run] = torch.compiler.disable
        return disable(run, reason="it is compiled")


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph of its own, over the same attributes: passes change graphs in place."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    module = fx.GraphModule(graph, copied)
    module.meta.update(graph.meta)
    reason = "compile_subgraph_reason"
    if hasattr(graph, reason):
        setattr(module, reason, getattr(graph, reason))
    return module


__all__ = ["Regions"]
