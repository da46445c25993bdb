"""Compiles one ATen graph to generated kernels, with eager as the fallback.

Input: a graph of AOTAutograd; output: a callable, and a report.  After an internal error of the compiler the graph's
operations run eagerly, with one warning that names the error; under `strict` the error is raised.  Built kernels may
still be refused at a call: if tensors have state beyond their memory (`runtime/dispatch_guards.py`), or if a binary
cannot be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import ClassVar, TypeAlias

import torch
from torch import fx

from fusion.calls.fallback import as_it_is, evaluated, located, warn_once
from fusion.calls.reports import Reports
from fusion.calls.waiting import waiting
from fusion.codegen.interpreter import for_compiling
from fusion.codegen.target import Target
from fusion.codegen.targets import builder_for
from fusion.compilation.autograd import boxed
from fusion.compilation.compile import compile_graph, load_finished
from fusion.compilation.control_flow import compile_bodies
from fusion.compilation.graphs import holds_tensors, main_device
from fusion.graph_cache import Finished, eager_graph
from fusion.graph_cache.interface import tangents_of
from fusion.graph_cache.regions import KEY
from fusion.inspect.report import Report
from fusion.inspect.required import check
from fusion.inspect.watch import Watch
from fusion.joint.seeds import has_seeds
from fusion.lowering.errors import BuildError
from fusion.operations.captures import noting_captures
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.runtime.dispatch_guards import guard_dispatch
from fusion.runtime.recording import Recorder
from fusion.schedule.overrides import PRICED, Overrides

OnRefusal: TypeAlias = Callable[[BuildError], object]


class GraphCompiler:
    """Compiles ATen graphs under some options.  `watch` observes their steps, `overrides` imposes decisions."""

    launched: ClassVar[bool] = True
    """Whether the kernels run in this process."""

    def __init__(
        self, options: Options, reports: Reports, watch: Watch | None = None, overrides: Overrides = PRICED
    ) -> None:
        self.options, self.reports = options, reports
        self.watch, self.overrides = watch, overrides

    def target(self, device: torch.device) -> Target:
        """Return the target of a device, or the target that the options name."""
        return builder_for(device.type, self.options.target, self.options.current_numerics).target

    def compile(self, recorder: Recorder | None, graph: fx.GraphModule, label: str) -> Boxed:
        """Compile a graph; `recorder` records its launches as a CUDA graph.

        Raises:
            FusionError: under `strict`, with a line of the user's program; a requirement is not met.
        """
        if not holds_tensors(graph):  # only sizes: nothing is computed on a device
            return as_it_is(graph)
        compile_bodies(graph, partial(self._compile_body, label))
        keys: list[str] = []

        def compiled(refused: OnRefusal | None) -> tuple[Boxed, Report]:
            decided = refused, keys.append, self.watch, self.overrides
            return compile_graph(graph, self.options, label, recorder, *decided)

        try:
            with for_compiling(), waiting(f"compiling {label}"):
                run, report = self._watched(label, tangents_of(graph), lambda: graph, compiled)
        except Exception as failure:  # the user's program must run on after any internal error
            if self.options.strict:
                raised = located(failure, graph)
                if raised is failure:
                    raise
                raise raised from failure
            return self._eagerly(graph, label, failure)
        self.add(report)
        run = _noting(run, label, main_device(graph))
        if keys and not has_seeds(graph):  # eager operations would draw other random numbers
            setattr(run, KEY, keys[0])
        return run

    def load(self, graphs: Sequence[Finished]) -> list[Boxed]:
        """Load graphs that an earlier process compiled."""
        loaded: list[tuple[Boxed, Report]] = []
        for compilation in graphs:
            graph = cache(partial(eager_graph, compilation))
            load = partial(load_finished, compilation, self.options)
            interface = compilation.interface
            run, report = self._watched(interface.label, interface.tangents, graph, load)
            loaded.append((_noting(run, interface.label, interface.device), report))
        for _, report in loaded:
            self.add(report)
        return [boxed(run) for run, _ in loaded]

    def gave_up(self, graph: fx.GraphModule, label: str, failure: Exception) -> None:
        """Warn, and report, that a graph runs eagerly.

        Raises:
            NotAsRequired: there is a requirement.
        """
        report = Report.eager(label, graph, failure)
        check(report, self.options.require)
        warn_once(f"running eagerly: {type(failure).__name__}: {failure}")
        self.reports.add(report)

    def add(self, report: Report) -> None:
        """Check, and keep, the report of a graph.

        Raises:
            NotAsRequired: the graph does not meet a requirement.
        """
        check(self.reports.add(report), self.options.require)

    def _compile_body(self, label: str, body: fx.GraphModule) -> Boxed:
        """Compile a body of control flow in the graph with this label."""
        with self.reports.nested():
            return self.compile(None, body, f"{label}_body")

    def _watched(
        self,
        label: str,
        tangents: Sequence[int],
        graph: Callable[[], fx.GraphModule],
        compiled: Callable[[OnRefusal | None], tuple[Boxed, Report]],
    ) -> tuple[Boxed, Report]:
        """Call `compiled`, and add guards that run `graph` eagerly at calls for which the kernels are wrong.

        Such calls are legal, so they run eagerly under strict, too; launches that are refused raise there.
        """
        instead: list[Boxed] = []
        region = self.reports.current

        def eagerly(reason: Exception) -> Boxed:
            with self.reports.again(region):
                return self._eagerly(graph(), f"{label}, called", reason)

        def refused(refusal: BuildError) -> None:
            if not instead:
                instead.append(eagerly(refusal))

        run, report = compiled(None if self.options.strict else refused)
        return guard_dispatch(run, tangents, eagerly, instead), report

    def _eagerly(self, graph: fx.GraphModule, label: str, failure: Exception) -> Boxed:
        """Warn, and return a function that runs the operations of a graph eagerly."""
        self.gave_up(graph, label, failure)
        return evaluated(graph) if has_seeds(graph) else as_it_is(graph)


def _noting(run: Boxed, label: str, device: torch.device) -> Boxed:
    """Let a forward on a GPU note that a capture holds it, for the memory that backward takes over."""
    return noting_captures(run) if label == "forward" and device.type == "cuda" else run
