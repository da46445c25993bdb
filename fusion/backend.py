"""The Dynamo backend: `torch.compile(model, backend="fusion", mode=…, options={…})`.

A region that the compiler cannot handle runs eagerly, with one warning that names the cause; with `FUSION_STRICT=1` the
cause is raised instead.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import CodeType
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import fx

from codegen.targets import builder_for
from fusion.attention import Chooser
from fusion.capture import Boxed, aot_backend
from fusion.compile import compile_graph
from fusion.inspect.report import Report
from fusion.options import Options
from lowering.builder import origin_of
from lowering.errors import FusionError


class FusionWarning(UserWarning):
    """A region of the program runs eagerly because it could not be compiled."""


class Backend:
    """A Dynamo backend with its options.  `reports` lists every graph compiled so far, in order.

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

    def __init__(self, options: Options) -> None:
        self.options = options
        self.reports: list[Report] = []
        self._lock = threading.Lock()
        self._attention = Chooser(lambda device: builder_for(device.type, options.target).target, strict=options.strict)
        self._noted = threading.local()
        self._aot = aot_backend(self._compile, self._streams, options.workspace)

    def __reduce__(self) -> tuple[type[Backend], tuple[Options]]:
        """Pickled as its options: a module saved with `torch.save` compiles anew where it is loaded."""
        return Backend, (self.options,)

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        choices = self._attention(graph)
        self._noted.notes = tuple(map(str, choices))
        return self._aot(graph, example_inputs)

    def _streams(self, device: torch.device) -> bool:
        return "dot" in builder_for(device.type, self.options.target).target.capabilities.fold_ops

    def _compile(self, graph: fx.GraphModule, label: str) -> Boxed:
        try:
            compiled, report = compile_graph(graph, self.options, label)
        except Exception as failure:  # any defect of ours must leave the user's program running
            if self.options.strict:
                located = _located(failure, graph)
                if located is failure:
                    raise
                raise located from failure
            _warn_once(f"running eagerly: {type(failure).__name__}: {failure}")
            with self._lock:
                self.reports.append(Report.eager(label, graph, failure))
            return _boxed(graph)
        notes, self._noted.notes = getattr(self._noted, "notes", ()), ()  # of the first graph of a region
        with self._lock:
            self.reports.append(replace(report, notes=(*notes, *report.notes)))
        return compiled


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    """One warning per cause and process, however many regions share the cause (a missing compiler, say)."""
    warnings.warn(message, FusionWarning, stacklevel=3)


def _boxed(graph: fx.GraphModule) -> Boxed:
    def run(args: list[object]) -> tuple[object, ...]:
        inputs = tuple(args)
        args.clear()
        result: tuple[object, ...] = graph(*inputs)
        return result

    return run


def _located(failure: Exception, graph: fx.GraphModule) -> Exception:
    """The failure with a line of the user's program: its own, else that of the first operation of the region."""
    if isinstance(failure, FusionError):
        return failure
    lines = (origin_of(node) for node in graph.graph.nodes if node.op == "call_function")
    origin = next((line for line in lines if line.line), None)
    return FusionError(f"{type(failure).__name__}: {failure}", origin=origin)


def fusion_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Entry point for `torch.compile(backend="fusion")`; see `Options.read` for `mode` and `options`."""
    return Backend(Options.read(mode, options))(graph, example_inputs)
