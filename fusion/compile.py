"""The whole path on one page: an ATen graph becomes a module of generated kernels.

    capture ── lower ── schedule ── generate ── build ── splice ── run

What enters is a functional ATen graph with fake tensors (`capture.py` makes it); what leaves is a callable that does
the same with generated kernels, and a `Report` of what was done.  Anything that cannot be generated is an extern call
inside the result; a failure of the compiler itself is raised, and whoever called decides what becomes of the region.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import sympy
from torch import fx

from codegen.target import Capabilities, Target
from codegen.targets import builder_for
from fusion.capture import main_device, size_hints
from fusion.inspect.report import Report
from fusion.inspect.trace import Trace
from fusion.options import Options
from fusion.runtime.splice import splice
from fusion.schedule import Schedule, grow, plan
from fusion.schedule.copies import positions_in
from fusion.schedule.inline import inline_cheap_maps
from fusion.schedule.kernels import KernelCall
from fusion.schedule.library import prefer_library
from fusion.schedule.split import split_reductions
from fusion.schedule.streams import stream
from lowering.lower import lower
from lowering.program import Contract, Program
from lowering.verify import verify_kernel, verify_program

Compiled = Callable[[list[object]], tuple[object, ...]]


def schedule_graph(
    graph: fx.GraphModule, target: Target, trace: Trace, hints: Mapping[sympy.Symbol, int] | None = None
) -> tuple[Program, Schedule]:
    """The first half of the path, which needs neither a device nor a compiler: lower and schedule.

    Returns:
        The program as lowered, and the schedule of what became of it.
    """
    capabilities = target.capabilities
    program = lower(graph, device=main_device(graph), contractions=_products(graph, capabilities, hints))
    lowered = trace.program("program", program)
    verify_program(program)

    for name, transform in (
        ("inlined", inline_cheap_maps),
        # after inlining, so that what feeds a split reduction is already part of it
        ("split", partial(split_reductions, capabilities=capabilities)),
    ):
        program = trace.program(name, transform(program))
        verify_program(program)

    program, streams = stream(program, capabilities, hints)
    verify_program(trace.program("streamed", program))
    clustering = grow(program, capabilities, hints, streams)
    left = prefer_library(program, clustering, target)
    if left is not program:
        program, clustering = left, grow(left, capabilities, hints, positions_in(left, program, streams))
    schedule = plan(program, trace.clustering(program, clustering))
    for step in schedule.steps:
        if isinstance(step, KernelCall):
            verify_kernel(step.kernel)
    return lowered, schedule


def _products(
    graph: fx.GraphModule, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int] | None
) -> Collection[str] | None:
    """The matrix products to lower as contractions, by the names of their nodes; None for all.

    Where the library multiplies faster than what is generated, only those that something walks at once.
    """
    if "dot" not in capabilities.fold_ops:
        return ()
    if capabilities.lone_products:
        return None
    program = inline_cheap_maps(lower(graph, device=main_device(graph)))
    program, streams = stream(program, capabilities, hints)
    members = (program.nodes[member] for cluster in streams for member in cluster.members)
    return {program.origins[node.out].name for node in members if isinstance(node, Contract)}


def compile_graph(graph: fx.GraphModule, options: Options, label: str = "graph") -> tuple[Compiled, Report]:
    """Compile one ATen graph.

    Args:
        graph: functional ATen calls; every node carries its fake tensor in `meta["val"]`.
        label: what the graph is ("forward", "backward", …), for dumps and the report.

    Returns:
        The compiled graph, called with its inputs in one list (which it empties), and the report.

    Raises:
        FusionError: the region cannot be compiled as a whole.
    """
    builder = builder_for(main_device(graph).type, options.target)
    hints = size_hints(graph)
    trace = Trace(options.dump, label, builder.target)
    trace.graph(graph)
    lowered, schedule = schedule_graph(graph, builder.target, trace, hints)

    calls = {k: step for k, step in enumerate(schedule.steps) if isinstance(step, KernelCall)}
    built = dict(zip(calls, builder.build([call.kernel for call in calls.values()]), strict=True))
    trace.kernels({k: (calls[k], built[k]) for k in calls})

    module = trace.module(splice(schedule, built))
    report = Report.of(label, lowered, schedule, built, builder.target.name, hints)
    trace.report(report)
    return partial(module.forward), report


__all__ = ["Compiled", "compile_graph", "schedule_graph"]
