"""Compiles a captured program for a target, without running it.

Input: the captured graph; output: the module that `splice` generates from its schedule, with the source of each kernel
in place of its launcher, and AOTAutograd's record of results that are inputs, or views of inputs.  The stages are those
of every compilation (`fusion/stages.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from sys import maxsize

import sympy
import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._guards import TracingContext, tracing

from fusion.artifact.capture import CapturedProgram, sizes_from_one
from fusion.attention import Chooser
from fusion.calls.fallback import as_it_is, located
from fusion.calls.reports import Reports
from fusion.codegen.build import Built, is_idle
from fusion.codegen.target import Target
from fusion.compilation.compile import prepare, schedule_graph
from fusion.compilation.graph_compiler import GraphCompiler
from fusion.compilation.graphs import holds_tensors, main_device, size_hints
from fusion.compilation.region import RegionCompiler
from fusion.dumps.trace import Trace
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.kernel import Kernel
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.runtime.recording import Recorder
from fusion.runtime.splice import splice
from fusion.schedule import Schedule
from fusion.schedule.overrides import PRICED, Overrides


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A compiled graph.

    Attributes:
        module: the spliced module; its launches do nothing.
        sources: kernel → its source, without kernels that launch nothing.
        metadata: AOTAutograd's record of mutations and aliases.
        device: on which it computes.
        results: the traced values of its results.
        schedule: the schedule of the module.
        hints: size symbol → its traced value.
    """

    module: fx.GraphModule
    sources: Mapping[Kernel, str]
    metadata: ViewAndMutationMeta
    device: torch.device
    results: tuple[object, ...]
    schedule: Schedule
    hints: Mapping[sympy.Symbol, int]


def compiled(
    program: CapturedProgram, target: Target, options: Options, overrides: Overrides = PRICED
) -> CompiledGraph:
    """Compile a captured program ahead of time.

    Args:
        overrides: decisions that are imposed, in place of those by predicted time.

    Raises:
        FusionError: it cannot be compiled as one graph, or cannot be saved.
    """
    ahead = _Ahead(target, replace(options, strict=True, graph_cache=False, cudagraphs=False), overrides)
    regions = RegionCompiler(ahead, Chooser(ahead.target, generated=overrides.attention))
    context, asserted = TracingContext(program.mode), _asserted(program)
    with tracing(context), torch.no_grad(), sizes_from_one():
        regions.compile(program.graph, program.inputs, _refuse_parts)
    if unstated := _asserted(program) - asserted:  # those before are operations of the graph
        raise Unsupported(f"a program in which sizes that depend on data have to satisfy {min(unstated)} is not saved")
    if not ahead.graphs:
        raise Unsupported("a program that computes nothing is not saved")
    if len(ahead.graphs) > 1:
        raise Unsupported("a program with several graphs, such as branches on data, is not saved")
    ((graph, module, sources, schedule),) = ahead.graphs
    assert context.fw_metadata is not None
    values = tuple(node.meta.get("val") if isinstance(node, fx.Node) else node for node in _results(graph))
    return CompiledGraph(module, sources, context.fw_metadata, main_device(graph), values, schedule, size_hints(graph))


def _asserted(program: CapturedProgram) -> set[str]:
    """Return the assumptions about sizes that depend on data."""
    shapes = program.mode.shape_env
    return (
        set() if shapes is None else {str(each.expr) for of in shapes.deferred_runtime_asserts.values() for each in of}
    )


def _results(graph: fx.GraphModule) -> Sequence[object]:
    results = graph.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return results


def _refuse_parts(graph: fx.GraphModule, inputs: Sequence[object], **within: object) -> object:
    raise Unsupported("a program that PyTorch cannot trace as a whole is not saved")


class _Ahead(GraphCompiler):
    """Schedules graphs; they run eagerly, over fake tensors.  `graphs`: each with its module, sources and schedule."""

    launched = False

    def __init__(self, machine: Target, options: Options, overrides: Overrides) -> None:
        super().__init__(options, Reports(), overrides=overrides)
        self.machine = machine
        self.graphs: list[tuple[fx.GraphModule, fx.GraphModule, Mapping[Kernel, str], Schedule]] = []

    def target(self, device: torch.device) -> Target:
        """Return the target that was chosen."""
        return self.machine

    def compile(self, recorder: Recorder | None, graph: fx.GraphModule, label: str) -> Boxed:
        """Schedule a graph, and return a function that runs its operations eagerly."""
        if not holds_tensors(graph):
            return as_it_is(graph)
        trace = Trace(None, label)
        prepare(graph, label, self.machine, self.options, trace.log, self.overrides)
        # Chunks would need more than a list of steps.
        hints = size_hints(graph)
        _, schedule = schedule_graph(graph, self.machine, trace, hints, maxsize, overrides=self.overrides)
        kernels = list(dict.fromkeys(call.kernel for call in schedule.launches()))
        built = {kernel: Built(kernel, "", _Nothing()) for kernel in kernels}
        module = splice(schedule, built, main_device(graph))
        sources = {kernel: self.machine.emit(kernel) for kernel in kernels if not is_idle(kernel)}
        self.graphs.append((graph, module, sources, schedule))
        return as_it_is(graph)

    def gave_up(self, graph: fx.GraphModule, label: str, failure: Exception) -> None:
        """Raise: a program that is saved has no eager fallback."""
        raise located(failure, graph)


class _Nothing:
    """A launcher that does nothing."""

    def __call__(self, *args: object) -> None:
        """Do nothing."""


__all__ = ["CompiledGraph", "compiled"]
