"""Implements the Dynamo backend: `torch.compile(model, backend="fusion", mode=…, options={…})`.

A region that the compiler cannot handle runs eagerly, with one warning that names the cause; with `FUSION_STRICT=1` the
cause is raised instead.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import fx

from fusion.attention import Chooser
from fusion.calls.callers import context_of
from fusion.calls.prewarm import ours
from fusion.calls.reports import RegionReports, Reports
from fusion.compilation.graph_compiler import GraphCompiler
from fusion.compilation.region import RegionCompiler
from fusion.compilation.trials.close_calls import CLOCK
from fusion.graph_cache.carried import take_part
from fusion.inspect.report import Report
from fusion.inspect.watch import Watch
from fusion.lowering.aten.mistraced import traced_as_eager
from fusion.lowering.errors import FusionWarning
from fusion.options import Options
from fusion.precompiled import Precompiled, is_asked_for, precompile
from fusion.runtime.recording import forget_recordings
from fusion.schedule.overrides import PRICED, Overrides


@ours
class Backend:
    """Compiles the graphs of a program as a Dynamo backend, and keeps their `reports`.

    Args:
        options: the options of all its compilations.
        watch: observes the steps of compiled graphs.
        overrides: decisions that are imposed instead of priced; no graph is then kept in the cache.

    Dynamo caches compiled code per code object and backend, and gives up after a few backends: so all programs fused
    from the same code under the same options share one backend, with its compilations.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[CodeType, Options, bool], Backend]] = WeakValueDictionary()
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def shared(cls, code: CodeType | None, options: Options, fullgraph: bool = False) -> Backend:
        """Return the backend of all programs fused from `code` under `options`; a new one if there is no Python code.

        A `fullgraph` program does not share a backend with others: their compilations may have graph breaks.
        """
        if code is None:
            return cls(options)
        with cls._sharing:
            return cls._shared.setdefault((code, options, fullgraph), cls(options))

    def __init__(self, options: Options, watch: Watch | None = None, overrides: Overrides = PRICED) -> None:
        if overrides != PRICED:
            options = replace(options, graph_cache=False)
        self.__name__ = "fusion"  # the name in Dynamo's messages
        self.options = options
        self.since = time.time()
        self._log = Reports()
        graphs = GraphCompiler(options, self._log, watch, overrides)
        chooser = Chooser(graphs.target, strict=options.strict, generated=overrides.attention)
        self._regions = RegionCompiler(graphs, chooser)

    @classmethod
    def of(cls, regions: RegionCompiler) -> Backend:
        """Return the backend whose regions are compiled by `regions`."""
        backend = cls(regions.options)
        backend._log, backend._regions = regions.graphs.reports, regions
        return backend

    @property
    def reports(self) -> list[Report]:
        """The report of every graph compiled so far, in order."""
        return self._log.all

    def __reduce__(self) -> tuple[type[Backend], tuple[Options]]:
        """Pickle the options: a module saved with `torch.save` is compiled again where it is loaded."""
        return Backend, (self.options,)

    def reset(self) -> None:
        """Forget CUDA graph recordings; called by `torch._dynamo.reset`, which forgets compiled code."""
        if self.options.cudagraphs:
            forget_recordings()

    @traced_as_eager()
    def __call__(
        self, graph: fx.GraphModule, example_inputs: Sequence[object], *, within: RegionReports | None = None
    ) -> Callable[..., object]:
        """Compile a region that Dynamo captured; `within`: the region, captured before, that it is a part of."""
        with CLOCK.compiling():
            if within is None and is_asked_for():
                return precompile(self._regions, graph, example_inputs, self)
            return self._regions.compile(graph, example_inputs, self, within=within)


@ours
def fusion_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Compile one graph of `torch.compile(…, backend="fusion")`; Dynamo calls it.

    Args:
        graph: the graph that Dynamo captured.
        example_inputs: its inputs at the first call, as fake or real tensors.
        mode: as for `fuse`.
        options: as for `fuse`.

    Returns:
        The callable that takes the place of `graph`.

    Raises:
        ValueError: unknown mode, option or value of an option.
        TypeError: an option has the wrong type.
    """
    read = Options.read(mode, options)
    caller = sys._getframe(1).f_locals.get("self")  # Dynamo passes nothing that tells one compiled program from another
    if not isinstance(caller, torch._TorchCompileWrapper):
        return Backend(read)(graph, example_inputs)
    if not hasattr(caller, KEPT):
        setattr(caller, KEPT, Backend(read))
    backend: Backend = getattr(caller, KEPT)
    return backend(graph, example_inputs)


def backend_of(compiled: object) -> Backend | None:
    """Return the backend of a program that `fuse`, `torch.compile(…, backend="fusion")` or `Module.compile` returned.

    One of `torch.compile` for which nothing was compiled, as yet or because the code of an equal program was, has no
    backend, so that an unused one is returned.  None for anything else.
    """
    own = getattr(compiled, KEPT, None)
    if isinstance(own, Backend):
        return own
    precompiled = getattr(getattr(compiled, "_artifacts", None), "compiled_fn", None)  # of Dynamo's `aot_compile`
    if isinstance(precompiled, Precompiled):
        return Backend.of(precompiled.regions)
    wrapper = getattr(context_of(compiled), "callback", None)
    while wrapper is not None and not isinstance(wrapper, torch._TorchCompileWrapper):
        wrapper = getattr(wrapper, "_torchdynamo_orig_backend", None)
    if wrapper is None or wrapper.compiler_fn is not fusion_backend:
        return None
    kept = getattr(wrapper, KEPT, None)
    return kept if isinstance(kept, Backend) else Backend(Options.read(**wrapper.kwargs))


take_part()

KEPT = "_fusion_backend"
"""The attribute that holds the backend, on results of `fuse` and on PyTorch's wrapper of a backend."""


__all__ = ["KEPT", "Backend", "FusionWarning", "backend_of", "fusion_backend"]
