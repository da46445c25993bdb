"""How one ATen graph becomes a module of generated kernels; `stages.py` has the passes of each stage.

    INFERENCE ── lower ── PROGRAM ── CLUSTERS ── LAUNCHES ── generate ── build ── splice ── run

Input: a functional ATen graph with fake tensors (`autograd.py` makes it); output: a callable that does the same with
generated kernels, and a `Report` of what was done.  Anything that cannot be generated is an extern call inside the
result; a failure of the compiler itself is raised, and whoever called decides what becomes of the region.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import sympy
from torch import fx

from fusion.choose_externs import lower_for
from fusion.codegen.build import Builder, Built
from fusion.codegen.numerics import current
from fusion.codegen.target import Target
from fusion.codegen.targets import builder_for, tuner_for
from fusion.codegen.tuning import Tuning
from fusion.graph_cache import FOUND, Finished, WarmStart
from fusion.graph_cache.interface import Interface
from fusion.graphs import kept_for_backward, main_device, size_hints, spare_inputs
from fusion.inspect.report import Report
from fusion.inspect.trace import Trace
from fusion.lowering.errors import BuildError
from fusion.lowering.kernel import Kernel
from fusion.lowering.program import Program
from fusion.options import WORKSPACE, Options
from fusion.passes import PassLog, run_stage
from fusion.runtime import Boxed
from fusion.runtime.memory import on_device
from fusion.runtime.recording import Recorder
from fusion.runtime.splice import Watch, splice
from fusion.schedule import Schedule
from fusion.schedule.clusters.alternatives import Measure
from fusion.scheduling import schedule_program
from fusion.stages import INFERENCE
from fusion.subjects import Deriving, Scheduling
from fusion.trials import Trials


def compile_graph(
    graph: fx.GraphModule,
    options: Options,
    label: str = "graph",
    recorder: Recorder | None = None,
    refused: Callable[[BuildError], object] | None = None,
    kept: Callable[[str], object] = lambda key: None,
    watch: Watch | None = None,
) -> tuple[Boxed, Report]:
    """Compile one ATen graph.

    Args:
        graph: functional ATen calls; every node carries its fake tensor in `meta["val"]`.
        label: what the graph is ("forward", "backward", …), for dumps and the report.
        recorder: what records its launches as a CUDA graph, if that is wanted.
        refused: is told at a call why a kernel cannot be launched, which is then evaluated; without it, that is raised.
        kept: is told what the next process finds the compilation by, where it is kept.
        watch: gives what is called instead of what launches a kernel.

    Returns:
        The compiled graph, called with its inputs in one list (which it empties), and the report.

    Raises:
        FusionError: the region cannot be compiled as a whole.
    """
    main = main_device(graph)
    builder = builder_for(main.type, options.target, current(strict=options.exact))
    trace = Trace(options.dump, label)
    trace.graph(graph)
    prepare(graph, label, builder.target, options, trace.log)
    interface = Interface.of(graph, label, main, kept_for_backward(graph))
    with trace.log.timed("cache", "find"):
        warm = WarmStart(graph, interface, options, builder.target)
        made = warm.find()
    building: Callable[[], Mapping[Kernel, Built]]
    if made is not None:
        building = builder.begin(list(made.sources), made.sources).wait
    else:
        made, building = _made(graph, options, interface, builder, trace)
        with trace.log.timed("cache", "keep"):
            warm.keep(made)  # while its kernels are being built
    if warm.kept:
        kept(warm.kept)

    with trace.log.timed("build", "wait"):
        built = building()
    with trace.log.timed("run", "splice"):
        compiled = _spliced(made, built, trace, refused, watch)
    notes = _notes(made, builder, warm.note)
    if recorder is not None:
        compiled, note = recorder.record(compiled, graph, made.schedule, label)
        notes.append(note)
    report = replace(made.report, notes=(*made.report.notes, *notes), passes=tuple(trace.log.times))
    trace.report(report)
    return compiled, report


def prepare(graph: fx.GraphModule, label: str, target: Target, options: Options, log: PassLog) -> None:
    """Run the passes that a graph without gradients needs; the halves of a joint graph have had them."""
    if label == "inference":
        run_stage(INFERENCE, graph, Deriving(target.capabilities, options.workspace, options.exact), log)


def load_finished(
    made: Finished, options: Options, refused: Callable[[BuildError], object] | None = None
) -> tuple[Boxed, Report]:
    """What `compile_graph` gives of a graph that an earlier process compiled, without the graph."""
    label, device = made.interface.label, made.interface.device
    builder = builder_for(device.type, options.target, current(strict=options.exact))
    building = builder.begin(list(made.sources), made.sources)
    compiled = _spliced(made, building.wait(), Trace(None, label), refused)
    return compiled, replace(made.report, notes=(*made.report.notes, *_notes(made, builder, FOUND)))


def _notes(made: Finished, builder: Builder, start: str) -> list[str]:
    """What the report says of this process: what became of the start, and what its launches lack."""
    lacking = builder.target.lacking() if made.sources else ""
    return [note for note in (start, lacking) if note]


def _spliced(
    made: Finished,
    built: Mapping[Kernel, Built],
    trace: Trace,
    refused: Callable[[BuildError], object] | None,
    watch: Watch | None = None,
) -> Boxed:
    """What runs a compilation whose kernels are built."""
    main = made.interface.device
    module = trace.module(splice(made.schedule, built, main, refused, made.interface.kept, watch))
    for name, body in module.named_children():
        assert isinstance(body, fx.GraphModule)
        trace.within(name).module(body)
    return on_device(partial(module.forward), main)


def _made(
    graph: fx.GraphModule, options: Options, interface: Interface, builder: Builder, trace: Trace
) -> tuple[Finished, Callable[[], Mapping[Kernel, Built]]]:
    """What becomes of a graph that was not compiled before, and what waits for its kernels."""
    hints, target = size_hints(graph), builder.target
    tuner = tuner_for(interface.device, builder) if options.mode == "max-autotune" else None
    measure = None if tuner is None else Trials(target, tuner, hints)
    spare = () if options.cudagraphs else spare_inputs(graph)  # what is recorded is played again, and copied
    lowered, schedule = schedule_graph(graph, target, trace, hints, options.workspace, measure, spare)
    kernels = list(dict.fromkeys(call.kernel for call in schedule.launches()))
    tunings: list[Tuning] = []
    if tuner is None:
        with trace.log.timed("build", "generate"):
            building = builder.begin(kernels)
        sources, wait = building.sources, building.wait
    else:
        with trace.log.timed("build", "tune"):
            found = tuner.build(kernels)
        built, tunings = {each.kernel: each for each, _ in found}, [tuning for _, tuning in found]
        sources, wait = {kernel: each.source for kernel, each in built.items()}, lambda: built
    trace.kernels(sources, target)
    report = Report.of(interface.label, lowered, schedule, sources, target.name, hints)
    report = replace(report, tunings=(*report.tunings, *tunings))
    return Finished(schedule, sources, report, interface), wait


def schedule_graph(
    graph: fx.GraphModule,
    target: Target,
    trace: Trace,
    hints: Mapping[sympy.Symbol, int] | None = None,
    workspace: int = WORKSPACE,
    measure: Measure | None = None,
    spare: Collection[int] = (),
) -> tuple[Program, Schedule]:
    """The first half of the path, which needs neither a device nor a compiler: lower and schedule.

    Args:
        workspace: bytes above which a product is made in chunks.
        measure: what times the ways to compute a product; without it, predictions decide.
        spare: the positions of inputs that may be written over, as long as nobody else holds them.

    Returns:
        The program as lowered, and the schedule of what became of it.
    """
    with trace.log.timed("program", "lower"):
        program = lower_for(graph, target, hints, workspace)
    limit = sys.maxsize if target.numerics.strict else workspace
    names = {name for k in spare if isinstance(name := program.inputs[k], str)}
    return program, schedule_program(program, Scheduling(target, hints, measure, limit, names), trace)


__all__ = ["compile_graph", "load_finished", "prepare", "schedule_graph"]
