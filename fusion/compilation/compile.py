"""Compiles one ATen graph to a module of generated kernels; `fusion/stages.py` has the passes of each stage.

    INFERENCE ── lower ── PROGRAM ── CLUSTERS ── LAUNCHES ── generate ── build ── splice ── run

Input: a functional ATen graph with fake tensors (`autograd.py`); output: a callable that computes the same with
generated kernels, and a `Report`.  Anything that cannot be generated is an extern call inside the result; a failure of
the compiler itself is raised, and the caller decides how the region runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import sympy
import torch
from torch import fx

from fusion.calls.waiting import doing
from fusion.codegen.build import Built, Evaluating, KernelBuilder
from fusion.codegen.target import Target
from fusion.codegen.targets import builder_for, tuner_for
from fusion.codegen.tuning import Tuner, Tuning, Untuned
from fusion.compilation.choose_externs import lower_for
from fusion.compilation.graphs import donated_inputs, kept_for_backward, main_device, size_hints
from fusion.compilation.scheduling import schedule_program
from fusion.compilation.trials.close_calls import CloseCalls
from fusion.compilation.trials.measure import Trials
from fusion.dumps.override import Overridden, overridden
from fusion.dumps.trace import Trace
from fusion.graph_cache import HIT, Finished, WarmStart
from fusion.graph_cache.interface import Interface
from fusion.inspect.report import Report
from fusion.inspect.watch import Watch
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Program
from fusion.options import WORKSPACE, Options
from fusion.runner.contexts import Deriving, Scheduling
from fusion.runner.passes import PassLog, run_stage
from fusion.runtime import Boxed
from fusion.runtime.memory import on_device
from fusion.runtime.profiled import in_ranges, while_profiled
from fusion.runtime.recording import Recorder
from fusion.runtime.sequences import joined
from fusion.runtime.splice import splice
from fusion.schedule import Schedule
from fusion.schedule.clusters.alternatives import Measure
from fusion.schedule.overrides import PRICED, Overrides
from fusion.stages import INFERENCE


def compile_graph(
    graph: fx.GraphModule,
    options: Options,
    label: str = "graph",
    recorder: Recorder | None = None,
    refused: Callable[[BuildError], object] | None = None,
    kept: Callable[[str], object] = lambda key: None,
    watch: Watch | None = None,
    overrides: Overrides = PRICED,
) -> tuple[Boxed, Report]:
    """Compile one ATen graph.

    Args:
        graph: functional ATen calls; every node has its fake tensor in `meta["val"]`.
        label: "forward", "backward", …, for dumps and the report.
        recorder: records the launches as a CUDA graph, if given.
        refused: is called with the reason why a kernel cannot be launched, which then runs in the reference evaluator;
            without it, the error is raised.
        kept: is called with the cache key of the compilation, if it is cached.
        watch: observes the steps of the compiled graph.
        overrides: decisions that are imposed instead of priced; such a graph must not be cached.

    Returns:
        The compiled graph, which takes its inputs in one list and empties it, and the report.

    Raises:
        FusionError: the region cannot be compiled.
    """
    doing(f"scheduling {label}")
    main = main_device(graph)
    builder = builder_for(main.type, options.target, options.current_numerics)
    if overrides.evaluated:
        builder = Evaluating(builder.target)
    trace = Trace(options.dump, label, observer=watch)
    trace.graph(graph)
    prepare(graph, label, builder.target, options, trace.log, overrides)
    interface = Interface.of(graph, label, main, kept_for_backward(graph))
    with trace.log.timed("cache", "find"):
        warm = WarmStart(graph, interface, options, builder.target)
        compilation = warm.find()
    building: Callable[[], Mapping[Kernel, Built]]
    if compilation is not None:
        begun = builder.begin(list(compilation.sources), compilation.sources)
        doing(lambda: f"kernels of {label}: {begun}")
        building = begun.wait
    else:
        compilation, building = _compiled_anew(graph, options, interface, builder, trace, overrides)
        with trace.log.timed("cache", "keep"):
            warm.keep(compilation)  # while its kernels are being built
    if warm.kept:
        kept(warm.kept)

    with trace.log.timed("build", "wait"):
        built = building()
    with trace.log.timed("run", "splice"):
        compiled = _spliced(compilation, built, trace, refused, watch)
    notes = _notes(compilation, builder, warm.note, options)
    if recorder is not None:
        compiled, note = recorder.record(compiled, graph, compilation.schedule, label)
        notes.append(note)
    report = replace(compilation.report, notes=(*compilation.report.notes, *notes), passes=tuple(trace.log.times))
    trace.report(report)
    if watch is not None:
        watch.compiled(report, compilation.schedule)
    return compiled, report


def prepare(
    graph: fx.GraphModule,
    label: str,
    target: Target,
    options: Options,
    log: PassLog,
    overrides: Overrides = PRICED,
) -> None:
    """Run the passes over a graph without gradients; the halves of a joint graph have had theirs."""
    if label == "inference":
        run_stage(INFERENCE, graph, Deriving(target.capabilities, options.workspace, options.exact, overrides), log)


def load_finished(
    compilation: Finished, options: Options, refused: Callable[[BuildError], object] | None = None
) -> tuple[Boxed, Report]:
    """Return `compile_graph`'s result for a graph that an earlier process compiled, without the graph."""
    label, device = compilation.interface.label, compilation.interface.device
    builder = builder_for(device.type, options.target, options.current_numerics)
    building = builder.begin(list(compilation.sources), compilation.sources)
    compiled = _spliced(compilation, building.wait(), Trace(None, label), refused)
    return compiled, replace(
        compilation.report, notes=(*compilation.report.notes, *_notes(compilation, builder, HIT, options))
    )


def _notes(compilation: Finished, builder: KernelBuilder, start: str, options: Options) -> list[str]:
    """Return notes: the outcome of the cache, the target's lacks in this process, and library calls that may vary."""
    lacking = builder.target.missing_tools() if compilation.sources else ""
    calls = sorted({str(each.name) for each in compilation.report.externs}) if options.invariant else []
    varying = f"the results of library calls may depend on the batch: {', '.join(calls)}" if calls else ""
    return [note for note in (start, lacking, varying) if note]


def _spliced(
    compilation: Finished,
    built: Mapping[Kernel, Built],
    trace: Trace,
    refused: Callable[[BuildError], object] | None,
    watch: Watch | None = None,
) -> Boxed:
    """Return the callable module of a compilation whose kernels are built."""
    main = compilation.interface.device
    module = splice(compilation.schedule, built, main, refused, compilation.interface.kept, watch)
    trace.module(module, compilation.schedule)
    return while_profiled(
        on_device(partial(joined(module).forward), main), lambda: on_device(partial(in_ranges(module).forward), main)
    )


def _compiled_anew(
    graph: fx.GraphModule,
    options: Options,
    interface: Interface,
    builder: KernelBuilder,
    trace: Trace,
    overrides: Overrides,
) -> tuple[Finished, Callable[[], Mapping[Kernel, Built]]]:
    """Compile a graph that is not in the cache; return the compilation, and a function that waits for its kernels."""
    hints, target = size_hints(graph), builder.target
    tuner = tuner_for(interface.device, builder) if options.mode == "max-autotune" else None
    measure = _measure(options, interface.device, builder, hints, tuner)
    # Recorded graphs are replayed, and their inputs copied.
    donated = () if options.cudagraphs else donated_inputs(graph)
    lowered, schedule = schedule_graph(graph, target, trace, hints, options.workspace, measure, donated, overrides)
    kernels = list(dict.fromkeys(call.kernel for call in schedule.launches()))
    tunings: list[Tuning] = []
    if tuner is None:
        with trace.log.timed("build", "generate"):
            building = builder.begin(kernels)
            doing(lambda: f"kernels of {interface.label}: {building}")
        sources, wait = building.sources, building.wait
    else:
        doing(f"tuning {len(kernels)} kernels of {interface.label}")
        with trace.log.timed("build", "tune"):
            tuned = tuner.build(kernels)
        built, tunings = {each.kernel: each for each, _ in tuned}, [tuning for _, tuning in tuned]
        sources, wait = {kernel: each.source for kernel, each in built.items()}, lambda: built
    edits = _edits(options, sources, target, interface.device)
    edited = {kernel: each.built.source for kernel, each in edits.items()}
    trace.kernels(schedule.launches(), sources, target, edited)
    sources = {**sources, **edited}
    report = Report.of(interface.label, lowered, schedule, sources, target, hints)
    notes = (*report.notes, *map(str, edits.values()))
    report = replace(report, tunings=(*report.tunings, *tunings), notes=notes)
    return Finished(schedule, sources, report, interface), lambda: {**wait(), **{k: e.built for k, e in edits.items()}}


def _edits(
    options: Options, sources: Mapping[Kernel, str], target: Target, device: torch.device
) -> dict[Kernel, Overridden]:
    """Return the kernels whose sources are overridden."""
    return (
        {} if options.override is None else overridden(options.override, sources, target, device, strict=options.strict)
    )


def _measure(
    options: Options,
    device: torch.device,
    builder: KernelBuilder,
    hints: Mapping[sympy.Symbol, int] | None,
    tuner: Tuner | None,
) -> Measure | None:
    """Return the function that times the alternatives of products; None if predictions decide."""
    if tuner is not None:
        return Trials(builder.target, tuner, hints)
    if not options.close_calls:
        return None
    return CloseCalls(Trials(builder.target, Untuned(builder, device), hints), builder.target.capabilities)


def schedule_graph(
    graph: fx.GraphModule,
    target: Target,
    trace: Trace,
    hints: Mapping[sympy.Symbol, int] | None = None,
    workspace: int = WORKSPACE,
    measure: Measure | None = None,
    donated: Collection[int] = (),
    overrides: Overrides = PRICED,
) -> tuple[Program, Schedule]:
    """Lower and schedule a graph: the first half of the path, which needs neither a device nor a compiler.

    Args:
        workspace: bytes above which a product is computed in chunks.
        measure: times the alternatives of a product; without it, predictions decide.
        donated: the positions of inputs that may be overwritten, as long as nobody else holds them.
        overrides: decisions that are imposed instead of priced.

    Returns:
        The program as lowered, and its schedule.
    """
    limit = sys.maxsize if target.numerics.strict else workspace
    at = Scheduling(target, hints, measure, limit, overrides=overrides)
    with trace.log.timed("program", "lower"):
        program = lower_for(graph, at, trace)
    names = {name for k in donated if isinstance(name := program.inputs[k], str)}
    return program, schedule_program(program, replace(at, donated=names), trace)


__all__ = ["compile_graph", "load_finished", "prepare", "schedule_graph"]
