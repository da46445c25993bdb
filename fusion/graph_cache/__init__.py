"""Caches finished compilations of graphs in the cache directory, for later processes.

Input: a graph about to be compiled; output: the finished compilation, which makes lowering, scheduling and code
generation unnecessary, or None.  An entry holds the steps of the schedule with their kernels, the kernels' sources, the
report, and the graph's interface to its caller (`interface.py`); the module is spliced and the kernels are loaded anew.
`key.py` computes the cache key, `serialise.py` serialises, `store.py` holds the files.  `regions.py` caches
AOTAutograd's result for the region that Dynamo captured.

Not cached, with a note in the report, are graphs that cannot be serialised in full, and compilations that change their
own key: a guard that lowering added would be missing at the next start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import fx

from fusion.codegen.price import Price
from fusion.codegen.target import Target
from fusion.codegen.tuning.record import Trial, Tuning
from fusion.graph_cache.interface import EarlierResult, Interface, Operation, graph_of, operations_of
from fusion.graph_cache.key import key_and_facts, key_of
from fusion.graph_cache.serialise import Unwritten, read, write
from fusion.graph_cache.store import get, put
from fusion.inspect.graphs import DeviceReport, OperationReport, Tensors
from fusion.inspect.report import ExternReport, KernelReport, Report, Traffic
from fusion.lowering.errors import BuildError, Origin
from fusion.lowering.ir import expr, kernel, program
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.kernel import Kernel
from fusion.options import Options
from fusion.schedule import Refusal, Schedule
from fusion.schedule.kernels import KernelCall


@dataclass(frozen=True, slots=True)
class Finished:
    """A compilation: the schedule, the source of each of its kernels, and the report.

    Attributes:
        operations: the serialised operations of the graph, for calls that run eagerly; only cached entries have it.
    """

    schedule: Schedule
    sources: Mapping[Kernel, str]
    report: Report
    interface: Interface
    operations: str = ""


KINDS = {
    kind.__name__: kind
    for kind in (
        *(expr.Load, expr.Const, expr.IndexValue, expr.Op, expr.Cast, expr.Random, expr.TileRef),
        *(kernel.Role, kernel.KernelAxis, kernel.Param, kernel.Fold, kernel.Prefix, kernel.Loop, kernel.Store, Kernel),
        *(program.Axis, program.Buffer, program.BufferRef, program.Map, program.Reduce, program.Scan),
        *(program.Contract, program.Scatter, program.Extern, program.Program),
        *(Chunked, Origin, KernelCall, Schedule, Refusal, Tuning, Trial),
        *(Report, KernelReport, ExternReport, Traffic, Price, DeviceReport, OperationReport, Tensors),
        *(Finished, Interface, Operation, EarlierResult),
    )
}
"""The dataclasses that an entry consists of."""


HIT = "from the cache"
"""The report's note for a graph that comes from the cache."""

DAMAGED = "its entry in the cache was damaged"
"""The report's note for an entry that cannot be read."""


class WarmStart:
    """The cache entry of one graph.  `note` is the outcome for the report; `kept` is the key of an existing entry."""

    def __init__(self, graph: fx.GraphModule, interface: Interface, options: Options, target: Target) -> None:
        self._asked = graph, interface.label, options, target, interface.kept
        self._key, self._may_change, self.note, self.kept = "", False, "", ""
        if not keeps_graphs(options):
            return
        try:
            self._key, self._may_change = key_and_facts(*self._asked)
        except Exception as refusal:  # also an internal error: a program without cache entry still runs
            self.note = not_kept(refusal)

    def find(self) -> Finished | None:
        """Return the cached compilation of the graph, or None."""
        if not self._key:
            return None
        try:
            cached = finished(self._key)
        except BuildError as refusal:
            self.note = not_read(refusal)
            return None
        except Exception:  # the entry is damaged
            self.note = DAMAGED
            return None
        if cached is not None:
            self.note, self.kept = HIT, self._key
        return cached

    def keep(self, compilation: Finished) -> None:
        """Store a compilation, if the next start may use it unchanged."""
        if not self._key:
            return
        try:
            operations = write(operations_of(self._asked[0]), KINDS)
            text = write(replace(compilation, schedule=_of_steps(compilation.schedule), operations=operations), KINDS)
            if self._may_change and key_of(*self._asked) != self._key:
                raise Unwritten("guards on its sizes were added while it was compiled")
            if write(read(text, KINDS), KINDS) != text:
                raise Unwritten("it does not deserialise to what was serialised")
            put(self._key, text)
            self.kept = self._key
        except Exception as refusal:
            self.note = not_kept(refusal)


def eager_graph(compilation: Finished) -> fx.GraphModule:
    """Return the graph of a compilation, of ATen operations."""
    return graph_of(cast("tuple[Operation, ...]", read(compilation.operations, KINDS)))


def keeps_graphs(options: Options) -> bool:
    """Return whether compilations are cached: not with a dump, which shows every stage, edited kernels or tuning."""
    shown = options.dump is not None or options.override is not None
    return options.graph_cache and not shown and options.mode != "max-autotune"


def finished(key: str) -> Finished | None:
    """Return the entry of a key, or None.

    Raises:
        Exception: the entry is damaged.
    """
    text = get(key)
    entry = None if text is None else read(text, KINDS)
    return entry if isinstance(entry, Finished) else None


def not_read(refusal: BuildError) -> str:
    """Return the report's note where the cache directory is refused."""
    return f"not taken from the cache: {refusal.message}"


def not_kept(refusal: Exception) -> str:
    """Return the report's note for a compilation that is not cached."""
    if isinstance(refusal, BuildError):
        return f"not kept in the cache: {refusal.message}"
    kind = "" if isinstance(refusal, Unwritten) else f"{type(refusal).__name__}: "
    return f"not kept in the cache: {kind}{refusal}"


def _of_steps(schedule: Schedule) -> Schedule:
    """Return a schedule without the nodes behind its steps and without data for the report alone."""
    own = replace(schedule.program, nodes=(), origins={}, inlined={})
    bodies = {chunks: tuple(map(_of_steps, each)) for chunks, each in schedule.bodies.items()}
    return replace(schedule, program=own, refusals=(), choices=(), bodies=bodies)


__all__ = [
    "DAMAGED",
    "HIT",
    "Finished",
    "WarmStart",
    "eager_graph",
    "finished",
    "keeps_graphs",
    "not_kept",
    "not_read",
]
