"""Compiles one region that Dynamo captured.

    CAPTURED ── PREPARED ── AOTAutograd: one graph, or a joint graph in two halves ── guards around each call

Input: Dynamo's graph with its inputs; output: the callable that replaces it.  A region that cannot be compiled runs
eagerly, with one warning; one with operations that PyTorch cannot trace is split into parts around them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback
from torch._guards import TracingContext

from fusion.attention import Chooser
from fusion.calls.callers import begun, noted_in
from fusion.calls.fallback import as_captured, first_line, for_the_caller, warn_of_some, with_checkpoints
from fusion.calls.reports import RegionReports
from fusion.calls.waiting import doing
from fusion.codegen.interpreter import for_compiling
from fusion.codegen.targets import DEFAULTS
from fusion.compilation.autograd import aot_backend
from fusion.compilation.graph_compiler import GraphCompiler
from fusion.dumps.trace import Trace
from fusion.dynamo.eager_parts import can_split, compile_in_parts
from fusion.dynamo.untraceable import NEEDS_DATA, untraceable
from fusion.graph_cache import keeps_graphs
from fusion.graph_cache.regions import Asked, CachedRegion, JointFacts
from fusion.inspect.breaks import break_after
from fusion.inspect.report import Report
from fusion.inspect.required import NotAsRequired
from fusion.lowering.errors import FusionError, Unsupported
from fusion.options import Options
from fusion.runner.contexts import Capturing
from fusion.runner.passes import PassLog, PassTime, run_stage
from fusion.runtime import Boxed
from fusion.runtime.guards import Guards
from fusion.runtime.recording import Recorder
from fusion.stages import CAPTURED, PREPARED

Run: TypeAlias = Callable[..., object]


@dataclass(slots=True)
class Noted:
    """Collects the data with which a compiled region is saved.

    Attributes:
        key: of its entry in the cache; empty if it has none.
        guards: around the compiled function; None if it runs eagerly.
    """

    key: str = ""
    guards: Guards | None = None

    def keep(self, key: str) -> None:
        """Note the key of an entry."""
        self.key = key


@dataclass(slots=True)
class RegionCompiler:
    """Compiles the regions of the programs that share a backend.

    Attributes:
        graphs: compiles the ATen graphs of a region.
        attention: decides which kernels compute attention.
        settings: the program's floats with which its graphs were compiled.
    """

    graphs: GraphCompiler
    attention: Chooser
    settings: dict[str, float] = field(default_factory=dict)

    @property
    def options(self) -> Options:
        """The options of the backend."""
        return self.graphs.options

    def compile(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[object],
        part_backend: Run,
        *,
        within: RegionReports | None = None,
        noted: Noted | None = None,
    ) -> Run:
        """Compile a region.

        Args:
            part_backend: the backend for the parts of a region that cannot be traced as a whole; it takes the region
                as `within`.
            within: the region that this one is a part of.
            noted: receives the data with which the region is saved.

        Raises:
            FusionError: the options promise numerics that there are not on the devices of the inputs.
        """
        self._refuse_numerics(inputs)
        with self.graphs.reports.region(break_after(graph), within) as region:
            if within is None:
                begun(region)
            run = self._compiled(graph, inputs, part_backend, region.times, noted or Noted(), alone=within is None)
        return run if within is not None else noted_in(region, run)

    def _compiled(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[object],
        part_backend: Run,
        times: list[PassTime],
        noted: Noted,
        *,
        alone: bool,
    ) -> Run:
        """Compile a region, with all that is eager beside it."""
        with ExitStack() as within:
            at = Capturing(
                self.options,
                inputs,
                self._choose_attention,
                self.settings,
                within,
                launched=self.graphs.launched,
                overrides=self.graphs.overrides,
            )
            try:
                log = self._log(times, "captured", graph)
                run_stage(CAPTURED, graph, at, log)
            except Unsupported as refusal:  # also under strict: nothing to compute, or eager reports the error
                self.graphs.gave_up(graph, "captured", refusal)
                return as_captured(graph)
            except Exception as failure:
                return self._without_trace(graph, failure, part_backend)
            return self._traced(graph, at, part_backend, log, noted, alone=alone)

    def _traced(
        self, graph: fx.GraphModule, at: Capturing, part_backend: Run, log: PassLog, noted: Noted, *, alone: bool
    ) -> Run:
        """Prepare a region, trace it with AOTAutograd, and add guards around the compiled function."""
        facts: list[JointFacts] = []
        try:
            doing("tracing")
            run_stage(PREPARED, graph, at, log)
            self._begin(at.inputs)
            with _compiling(), for_compiling(), log.timed("autograd", "trace"):
                # PyTorch treats each part as a call of its own, after which it overwrites earlier recordings.
                recorder = Recorder() if self.options.cudagraphs and alone else None
                compiled = self._aot(graph, at.inputs, facts, log, recorder, noted)(graph, at.inputs)
        except Exception as failure:  # AOTAutograd does not accept all that Dynamo captures
            return self._without_trace(graph, failure, part_backend)
        if not self.graphs.launched:
            return compiled
        noted.guards = Guards.of(graph, at.inputs, facts[0] if facts else (None, None))
        guarded = noted.guards.around(compiled, _Captured(self, graph))
        return _after_fake_call(compiled, guarded) if _is_called_with_fakes() else guarded

    def _choose_attention(self, graph: fx.GraphModule) -> None:
        for choice in self.attention(graph):
            self.graphs.reports.note(str(choice))

    def _without_trace(self, graph: fx.GraphModule, failure: Exception, part_backend: Run) -> Run:
        """Run a region that AOTAutograd cannot trace: in parts, or eagerly.

        Raises:
            Exception: the failure, under `strict`, and if Dynamo is to restart or has raised it already.
        """
        if isinstance(failure, (RestartAnalysis, ShortenTraceback)):
            raise failure
        if self.options.strict:
            raised = for_the_caller(failure, graph)
            if raised is failure:
                raise failure
            raise raised from failure
        reason = failure
        if isinstance(failure, NEEDS_DATA):
            try:
                if (parts := self._compile_in_parts(graph, part_backend)) is not None:
                    return parts
            except NotAsRequired:
                raise
            except Exception as defect:  # internal error: the whole region runs eagerly, and the report names it
                reason = defect
        self.graphs.gave_up(graph, "captured", reason)
        return as_captured(graph)

    def _compile_in_parts(self, graph: fx.GraphModule, part_backend: Run) -> Run | None:
        """Run `graph` in parts around untraceable operations; None if there are none, or it cannot be split."""
        inputs = graph.graph.find_nodes(op="placeholder")
        dynamic = any(isinstance(node.meta.get("example_value"), torch.SymInt) for node in inputs) or None
        within = self.graphs.reports.current
        compile_part = partial(torch.compile, backend=partial(part_backend, within=within), dynamic=dynamic)
        if not can_split(graph) or not (uncompiled := untraceable(graph)):
            return None
        parts = as_captured(compile_in_parts(graph, uncompiled, compile_part))
        report = Report.of_parts(uncompiled)
        warn_of_some(report.externs)
        self.graphs.add(report)
        return parts

    def _refuse_numerics(self, inputs: Sequence[object]) -> None:
        """Refuse batch-invariant numerics where the target has none: eager's kernels are not invariant either."""
        if not self.options.invariant:
            return
        for device in {value.device for value in inputs if isinstance(value, torch.Tensor)}:
            known = self.options.target is not None or device.type in DEFAULTS
            if not (known and self.graphs.target(device).capabilities.invariant):
                message = 'numerics="batch_invariant" needs the target c or triton'
                raise FusionError(message, hint="leave the option out")

    def _begin(self, inputs: Sequence[object]) -> None:
        """Create the accelerator's target, which prepares its tools while PyTorch traces."""
        devices = (value.device for value in inputs if isinstance(value, torch.Tensor))
        accelerator = next((device for device in devices if device.type != "cpu" and device.type in DEFAULTS), None)
        if accelerator is not None:
            self.graphs.target(accelerator)

    def _aot(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[object],
        facts: list[JointFacts],
        log: PassLog,
        recorder: Recorder | None,
        noted: Noted,
    ) -> Callable[[fx.GraphModule, Sequence[object]], Run]:
        """Return the Dynamo backend that derives gradients and compiles each half."""
        return aot_backend(
            self._compiling_graphs(recorder),
            lambda device: self.graphs.target(device).capabilities,
            self.options.workspace,
            exact=self.options.exact,
            on_facts=facts.append,
            region=self._kept(graph, inputs, facts, noted),
            log=lambda label, joint: self._log(log.times, label, joint),
            overrides=self.graphs.overrides,
        )

    def _compiling_graphs(self, recorder: Recorder | None) -> Callable[[fx.GraphModule, str], Boxed]:
        """Return the compiler of a region's graphs: PyTorch may ask for backward at its first call only."""
        region = self.graphs.reports.current

        def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
            with self.graphs.reports.again(region):
                return self.graphs.compile(recorder, graph, label)

        return compile_one

    def _kept(
        self, graph: fx.GraphModule, inputs: Sequence[object], facts: list[JointFacts], noted: Noted
    ) -> CachedRegion | None:
        """Return the cache entry of a region; None if it is not to be cached."""
        if not keeps_graphs(self.options) or self.options.cudagraphs:  # recording needs AOTAutograd's metadata
            return None
        asked, graphs = Asked(graph, inputs, self.options), self.graphs
        return CachedRegion(asked, graphs.target, facts, graphs.load, graphs.reports.note, noted.keep)

    def _log(self, times: list[PassTime], label: str, graph: fx.GraphModule) -> PassLog:
        """Return the log of the passes over a graph, with dumps if enabled."""
        trace = Trace(self.options.dump, label, times=times, observer=self.graphs.watch)
        trace.graph(graph)
        return trace.log


def _is_called_with_fakes() -> bool:
    """Return whether PyTorch calls the compiled function once with fake tensors.

    It splits DDP models by their buckets, and compiles each part for the results of the one before.
    """
    context = TracingContext.try_get()
    return context is not None and context.fakify_first_call


def _after_fake_call(compiled: Run, guarded: Run) -> Run:
    """Return `guarded` but for the first call, which AOTAutograd answers; fake tensors have no memory to compare."""
    calls = iter([compiled])

    def run(*args: object) -> object:
        return next(calls, guarded)(*args)

    return run


class _Captured:
    """Dynamo's graph of a region, run in eager."""

    def __init__(self, compiler: RegionCompiler, graph: fx.GraphModule) -> None:
        self._options, self._graph = compiler.options, with_checkpoints(graph)
        # The caller may do anything with a result, also under strict.
        self._gave_up = partial(compiler.graphs.gave_up, graph, "called")
        self._within = partial(compiler.graphs.reports.again, compiler.graphs.reports.current)
        self._line = first_line(graph)

    def __call__(self, *args: object) -> object:
        return self._graph(*args)

    def say(self, reason: Unsupported) -> None:
        """Warn, and report with the graphs of the region, that it runs eagerly."""
        with self._within():
            self._gave_up(reason)

    def instead(self, message: str, hint: str = "") -> Run:
        """Return the eager fallback, with one warning, for calls that the compiled graph is not for."""
        refusal = Unsupported(message, hint=hint, origin=self._line)
        known = False

        def run(*args: object) -> object:
            nonlocal known
            if self._options.strict:
                raise refusal
            if not known:
                known = True
                self.say(refusal)
            return self._graph(*args)

        return run


def compile_anew(program: Run, backend: Run, **settings: object) -> Run:
    """Make Dynamo compile `program` at its call, without its limit on recompilations."""

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[object]) -> object:
        """Compile a graph, with no state to be copied: Lightning's `torch.compile` copies its settings deeply."""
        return backend(graph, inputs)

    compiled = torch.compile(program, backend=compile_graph, **settings)  # type: ignore[call-overload]  # PyTorch tests the settings
    unlimited = torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16)
    return unlimited(compiled)  # type: ignore[no-any-return]  # not annotated in PyTorch


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Set PyTorch's flag for compilation, as later releases do themselves.

    Without it, a call of a compiled function in another thread during tracing is taken for a part of the trace, and
    refused.  Dynamo compiles in one thread at a time, so the previous value can be restored.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
