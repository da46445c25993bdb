"""The Dynamo backend: `torch.compile(model, backend="fusion", mode=…, options={…})`.

A region that the compiler cannot handle runs eagerly, with one warning that names the cause; with `FUSION_STRICT=1` the
cause is raised instead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import CodeType
from typing import ClassVar, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback

import fusion.beginning  # Dynamo is to know before it traces, of this and of what follows
import fusion.captured.hints  # noqa: F401
from fusion.attention import Chooser
from fusion.bodies import compile_bodies
from fusion.capture import aot_backend, boxed
from fusion.captured.autocast import widen_resized_images
from fusion.captured.parts import can_part, in_parts
from fusion.captured.regions import inline_regions
from fusion.captured.settings import settings_fixed
from fusion.captured.shared_writes import refuse_shared_writes
from fusion.captured.strides import keep_strides
from fusion.captured.unread import skip_unread_rows
from fusion.captured.untraceable import NEEDS_DATA, untraceable
from fusion.captured.windows import separate_written_windows
from fusion.codegen.interpreter import for_compiling
from fusion.codegen.numerics import current
from fusion.codegen.target import Target
from fusion.codegen.targets import DEFAULTS, builder_for
from fusion.compile import compile_graph, load_finished
from fusion.fallback import (
    FusionWarning,
    as_captured,
    as_it_is,
    evaluated,
    first_line,
    for_the_caller,
    located,
    warn_of_some,
    warn_once,
)
from fusion.graphs import holds_tensors, main_device
from fusion.inspect.breaks import Break, break_after
from fusion.inspect.report import Report
from fusion.joint.formats import prefer_channels_last
from fusion.joint.pairs import part_complex_numbers
from fusion.joint.rows import prefer_rows
from fusion.joint.seeds import has_seeds
from fusion.joint.widths import fix_widths
from fusion.lowering.errors import BuildError, Unsupported
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.runtime.checkpoints import with_checkpoints
from fusion.runtime.overlaps import watch_overlaps
from fusion.runtime.recording import Recorder, forget_recordings
from fusion.runtime.second_derivatives import watch_derivatives
from fusion.runtime.splice import Watch
from fusion.runtime.surroundings import refuse_odd_inputs, watch_surroundings
from fusion.warm import Finished, eager_graph, keeps_graphs
from fusion.warm.interface import tangents_of
from fusion.warm.regions import KEY, Asked, Region, Told

Refused: TypeAlias = Callable[[BuildError], object]

MOST_REPORTS = 1 << 10
"""Of so many graphs a backend keeps the reports, sources of kernels among them; then those of the oldest go."""


class Backend:
    """A Dynamo backend with its options, begun at `since`.  `reports` lists every graph compiled so far, in order.
    `watch` gives what is called instead of what launches a kernel.

    Dynamo keeps compiled code with the code object it came from, for each backend, and gives up after a few of them:
    so everything fused from the same code under the same options shares one backend, and what it has compiled.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[CodeType, Options], Backend]] = WeakValueDictionary()
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def shared(cls, code: CodeType | None, options: Options) -> Backend:
        """The backend of everything fused from `code` under `options`; a new one where there is no Python code."""
        if code is None:
            return cls(options)
        with cls._sharing:
            return cls._shared.setdefault((code, options), cls(options))

    def __init__(self, options: Options, watch: Watch | None = None) -> None:
        self.__name__ = "fusion"  # what Dynamo calls a backend in its messages
        self.options, self._watch = options, watch
        self.since = time.time()
        self.reports: list[Report] = []
        self._lock = threading.Lock()
        self._settings: dict[str, float] = {}
        self._attention = Chooser(self._target, strict=options.strict, kept=options.graph_cache)
        self._noted = threading.local()

    def __reduce__(self) -> tuple[type[Backend], tuple[Options]]:
        """Pickled as its options: a module saved with `torch.save` compiles anew where it is loaded."""
        return Backend, (self.options,)

    def reset(self) -> None:
        """Called by `torch._dynamo.reset`, which forgets what was compiled."""
        if self.options.cudagraphs:
            forget_recordings()

    def __call__(
        self, graph: fx.GraphModule, example_inputs: Sequence[object], *, alone: bool = True
    ) -> Callable[..., object]:
        """What runs `graph`, which is not `alone` if it is a part of one that Dynamo captured before."""
        inline_regions(graph)
        try:
            refuse_odd_inputs(graph)
            refuse_shared_writes(graph)
            separate_written_windows(graph)
            keep_strides(graph)
        except Unsupported as refusal:  # also under strict: there is nothing to compute, or eager says what
            self._gave_up(graph, "captured", refusal)
            return as_captured(graph)
        with settings_fixed(graph, example_inputs, self._settings) as inputs:
            return self._compiled(graph, inputs, alone)

    def _compiled(self, graph: fx.GraphModule, example_inputs: Sequence[object], alone: bool) -> Callable[..., object]:
        widen_resized_images(graph)
        choices = () if self.options.exact else self._attention(graph)
        self._noted.first = tuple(map(str, choices)), break_after(graph)
        try:
            if not self.options.exact:
                skip_unread_rows(graph, self.options.workspace)
            self._begin(example_inputs)
            told: list[Told] = []
            region = self._region(graph, example_inputs, told)
            with _compiling(), for_compiling():
                compiled = self._aot(told.append, region, alone)(graph, example_inputs)
        except (RestartAnalysis, ShortenTraceback):  # Dynamo is asked to begin anew, or has it raised already
            raise
        except Exception as failure:  # AOTAutograd does not take all that Dynamo captures
            if self.options.strict:
                raised = for_the_caller(failure, graph)
                if raised is failure:
                    raise
                raise raised from failure
            reason = failure
            if isinstance(failure, NEEDS_DATA):
                try:
                    if (parts := self._in_parts(graph)) is not None:
                        return parts
                except Exception as defect:  # of ours: the program runs on, as a whole, and the report names it
                    reason = defect
            self._gave_up(graph, "captured", reason)
            return as_captured(graph)
        # What is asked of a result is the caller's wish, also under strict.
        say = partial(self._gave_up, graph, "called")
        dependence, draws = told[0] if told else (None, None)
        captured = with_checkpoints(graph)
        compiled = watch_derivatives(compiled, captured, example_inputs, dependence, draws, say)
        return watch_overlaps(compiled, self._of_other_inputs(captured), example_inputs)

    def _in_parts(self, graph: fx.GraphModule) -> Callable[..., object] | None:
        """`graph` around operations that PyTorch cannot trace; None if there are none, or it cannot be parted."""
        inputs = graph.graph.find_nodes(op="placeholder")
        dynamic = any(isinstance(node.meta.get("example_value"), torch.SymInt) for node in inputs) or None
        compile_part = partial(torch.compile, backend=partial(self, alone=False), dynamic=dynamic)
        if not can_part(graph) or not (apart := untraceable(graph)):
            return None
        parts = as_captured(in_parts(graph, apart, compile_part))
        report = Report.in_parts(apart)
        warn_of_some(report.externs)
        self._report(report)
        return parts

    def _begin(self, inputs: Sequence[object]) -> None:
        """Have the target of an accelerator begin what its builds need, while PyTorch traces."""
        devices = (given.device for given in inputs if isinstance(given, torch.Tensor))
        found = next((device for device in devices if device.type != "cpu" and device.type in DEFAULTS), None)
        if found is not None:
            self._target(found)

    def _aot(
        self, tell: Callable[[Told], None], region: Region | None, alone: bool
    ) -> Callable[[fx.GraphModule, Sequence[object]], Callable[..., object]]:
        """What compiles one captured region; the arguments are as `aot_backend` says."""
        # To PyTorch each part is a call of its own, after which it plays over what earlier ones have recorded.
        compile_one = partial(self._compile, Recorder() if self.options.cudagraphs and alone else None)
        workspace, exact = self.options.workspace, self.options.exact
        return aot_backend(compile_one, self._streams, workspace, exact=exact, tell=tell, region=region)

    def _region(self, graph: fx.GraphModule, inputs: Sequence[object], told: list[Told]) -> Region | None:
        """What is kept of a region for the next process; None where nothing is to be."""
        if not keeps_graphs(self.options) or self.options.cudagraphs:  # a recording asks what AOTAutograd knows
            return None
        return Region(Asked(graph, inputs, self.options), self._target, told, self._load, self._note)

    def _load(self, graphs: Sequence[Finished]) -> list[Boxed]:
        """What runs graphs that an earlier process compiled."""
        found: list[tuple[Boxed, Report]] = []
        for made in graphs:
            graph = cache(partial(eager_graph, made))
            load = partial(load_finished, made, self.options)
            found.append(self._watched(made.interface.label, made.interface.tangents, graph, load))
        for _, report in found:
            self._report(report)
        return [boxed(run) for run, _ in found]

    def _target(self, device: torch.device) -> Target:
        return builder_for(device.type, self.options.target, current(strict=self.options.exact)).target

    def _streams(self, device: torch.device) -> bool:
        return "dot" in self._target(device).capabilities.fold_ops

    def _compile(self, recorder: Recorder | None, graph: fx.GraphModule, label: str) -> Boxed:
        if not holds_tensors(graph):  # sizes alone: nothing is computed on any device
            return as_it_is(graph)
        compile_bodies(graph, partial(self._compile_body, label))
        keys: list[str] = []

        def compiled(refused: Refused | None) -> tuple[Boxed, Report]:
            return compile_graph(graph, self.options, label, recorder, refused, keys.append, self._watch)

        try:
            if label == "inference" and not self.options.exact:  # others were one joint graph, and prepared
                part_complex_numbers(graph)
                prefer_channels_last(graph)
                prefer_rows(graph)
                if self._streams(main_device(graph)):
                    fix_widths(graph)
            with for_compiling():
                run, report = self._watched(label, tangents_of(graph), lambda: graph, compiled)
        except Exception as failure:  # any defect of ours must leave the user's program running
            if self.options.strict:
                raised = located(failure, graph)
                if raised is failure:
                    raise
                raise raised from failure
            return self._eagerly(graph, label, failure)
        self._report(report)
        if keys and not has_seeds(graph):  # to draw the same numbers eagerly takes more than its operations
            setattr(run, KEY, keys[0])
        return run

    def _compile_body(self, label: str, body: fx.GraphModule) -> Boxed:
        """What is called by control flow in the graph that `label` says; what is known of a region goes with that."""
        first, self._noted.first = getattr(self._noted, "first", None), None
        compiled = self._compile(None, body, f"{label}_body")
        self._noted.first = first
        return compiled

    def _watched(
        self,
        label: str,
        tangents: Sequence[int],
        graph: Callable[[], fx.GraphModule],
        compiled: Callable[[Refused | None], tuple[Boxed, Report]],
    ) -> tuple[Boxed, Report]:
        """What `compiled` gives, but where its `graph` is to run eagerly; also under strict, as that is the caller's
        wish, but for launches that are refused.
        """
        instead: list[Boxed] = []

        def eagerly(reason: Exception) -> Boxed:
            return self._eagerly(graph(), f"{label}, called", reason)

        def refused(refusal: BuildError) -> None:
            if not instead:
                instead.append(eagerly(refusal))

        run, report = compiled(None if self.options.strict else refused)
        return watch_surroundings(run, tangents, eagerly, instead), report

    def _eagerly(self, graph: fx.GraphModule, label: str, failure: Exception) -> Boxed:
        """The operations of a graph as they are, once that is said."""
        self._gave_up(graph, label, failure)
        return evaluated(graph) if has_seeds(graph) else as_it_is(graph)

    def _of_other_inputs(self, graph: fx.GraphModule) -> Callable[..., object]:
        """What runs at calls whose inputs lie over one another otherwise than at compilation."""
        message = (
            "the inputs overlap otherwise than those that this was compiled for, are views of no common tensor, or one"
            " is changed that is part of other memory, and a result is a view of it"
        )
        refusal = Unsupported(message, hint="give it copies (clone) of what overlaps", origin=first_line(graph))
        known = False

        def run(*args: object) -> object:
            nonlocal known
            if self.options.strict:
                raise refusal
            if not known:
                known = True
                self._gave_up(graph, "called", refusal)
            return graph(*args)

        return run

    def _gave_up(self, graph: fx.GraphModule, label: str, failure: Exception) -> None:
        warn_once(f"running eagerly: {type(failure).__name__}: {failure}")
        self._report(Report.eager(label, graph, failure))

    def _note(self, note: str) -> None:
        """Add a note to the report of the region at hand."""
        first = getattr(self._noted, "first", None)
        if first is not None:
            self._noted.first = (*first[0], note), first[1]
            return
        with self._lock:
            if self.reports:
                self.reports[-1] = replace(self.reports[-1], notes=(*self.reports[-1].notes, note))

    def _report(self, report: Report) -> None:
        """Add a report; what is known of a region goes with its first graph."""
        nothing: tuple[tuple[str, ...], Break | None] = (), None
        notes, graph_break = getattr(self._noted, "first", None) or nothing
        self._noted.first = None
        with self._lock:
            self.reports.append(replace(report, notes=(*notes, *report.notes), graph_break=graph_break))
            del self.reports[:-MOST_REPORTS]


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Say that PyTorch compiles, as later releases do themselves.

    While one thread traces, the call of a compiled function in another one is else taken for a part of what is traced,
    and refused.  Dynamo has one thread compile at a time, so that what was said before can be restored.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def fusion_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Entry point for `torch.compile(backend="fusion")`; see `Options.read` for `mode` and `options`."""
    return Backend(Options.read(mode, options))(graph, example_inputs)


__all__ = ["Backend", "FusionWarning", "fusion_backend"]
