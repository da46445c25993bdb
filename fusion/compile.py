"""The whole path on one page: an ATen graph becomes a module of generated kernels.

    capture ── lower ── schedule ── generate ── build ── splice ── run

What enters is a functional ATen graph with fake tensors (`capture.py` makes it); what leaves is a callable that does
the same with generated kernels, and a `Report` of what was done.  Anything that cannot be generated is an extern call
inside the result; a failure of the compiler itself is raised, and whoever called decides what becomes of the region.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import fx

from codegen.targets import builder_for
from fusion.capture import main_device, size_hints
from fusion.inspect.report import Report
from fusion.inspect.trace import Trace
from fusion.options import Options
from fusion.runtime.splice import splice
from fusion.schedule import grow, plan
from fusion.schedule.inline import inline_cheap_maps
from fusion.schedule.kernels import KernelCall
from fusion.schedule.library import prefer_library
from fusion.schedule.split import split_reductions
from lowering.lower import lower
from lowering.verify import verify_kernel, verify_program

Compiled = Callable[[list[object]], tuple[object, ...]]


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
    device, hints = main_device(graph), size_hints(graph)
    builder = builder_for(device.type, options.target)
    capabilities = builder.target.capabilities
    trace = Trace(options.dump, label, builder.target)
    trace.graph(graph)

    program = lower(graph, device=device, contractions="dot" in capabilities.fold_ops)
    trace.program("program", program)
    verify_program(program)

    lowered = program
    for name, transform in (
        ("inlined", inline_cheap_maps),
        # after inlining, so that what feeds a split reduction is already part of it
        ("split", partial(split_reductions, capabilities=capabilities)),
    ):
        program = trace.program(name, transform(program))
        verify_program(program)

    clustering = grow(program, capabilities, hints)
    left = prefer_library(program, clustering, builder.target)
    if left is not program:
        program, clustering = left, grow(left, capabilities, hints)
    trace.clustering(program, clustering)
    schedule = plan(program, clustering)
    calls = {k: step for k, step in enumerate(schedule.steps) if isinstance(step, KernelCall)}
    for call in calls.values():
        verify_kernel(call.kernel)

    built = dict(zip(calls, builder.build([call.kernel for call in calls.values()]), strict=True))
    trace.kernels({k: (calls[k], built[k]) for k in calls})

    module = trace.module(splice(schedule, built))
    report = Report.of(label, lowered, schedule, built, builder.target.name, hints)
    trace.report(report)
    return partial(module.forward), report


__all__ = ["Compiled", "compile_graph"]
