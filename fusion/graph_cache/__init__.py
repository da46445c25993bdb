"""Finds the finished compilation of a graph in the cache directory, where an earlier process kept it.

Input: a graph about to be compiled; output: the finished compilation, with which lowering, scheduling and code
generation are skipped, or None.  What is kept are the steps of the schedule with their kernels, the sources of these,
the report, and what its caller has to know of the graph (`interface.py`); the module is spliced and the kernels are
loaded anew.  `key.py` says what a graph is found by, `form.py` how it is written, `store.py` where it lies.
`regions.py` keeps beside it what AOTAutograd made of the region that Dynamo captured.

Refused, with a note in the report, are graphs that cannot be told in full, and compilations that change what they were
found by: a guard that lowering added would be missing at the next start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import fx

from fusion.codegen.target import Target
from fusion.codegen.tuning.record import Trial, Tuning
from fusion.graph_cache.form import Unwritten, read, write
from fusion.graph_cache.interface import Interface, Operation, Place, graph_of, operations_of
from fusion.graph_cache.key import key_of
from fusion.graph_cache.store import get, put
from fusion.inspect.report import ExternReport, KernelReport, Report, Traffic
from fusion.lowering import expr, kernel, program
from fusion.lowering.chunks import Chunked
from fusion.lowering.errors import BuildError, Origin
from fusion.lowering.kernel import Kernel
from fusion.options import Options
from fusion.schedule import Refusal, Schedule
from fusion.schedule.kernels import KernelCall


@dataclass(frozen=True, slots=True)
class Finished:
    """A compilation: what is to run, the source of each of its kernels, and the report of how it came about.

    Attributes:
        operations: the text of those of the graph, for calls that run eagerly; only what is kept has it.
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
        *(Report, KernelReport, ExternReport, Traffic, Finished, Interface, Operation, Place),
    )
}
"""What an entry is made of."""


FOUND = "from the cache"
"""What the report says of a graph that was found."""

DAMAGED = "its entry in the cache was damaged"
"""What it says of what could not be read."""


class WarmStart:
    """The entry of one graph.  `note` says, for the report, what became of it; `kept` is its key, if it is there."""

    def __init__(self, graph: fx.GraphModule, interface: Interface, options: Options, target: Target) -> None:
        self._asked = graph, interface.label, options, target, interface.kept
        self._key, self.note, self.kept = "", "", ""
        if not keeps_graphs(options):
            return
        try:
            self._key = key_of(*self._asked)
        except Exception as refusal:  # also a defect of ours: to keep nothing leaves the program running
            self.note = not_kept(refusal)

    def find(self) -> Finished | None:
        """What was made of the graph before."""
        if not self._key:
            return None
        try:
            found = finished(self._key)
        except Exception:  # whatever is found there, it is not what was written
            self.note = DAMAGED
            return None
        if found is not None:
            self.note, self.kept = FOUND, self._key
        return found

    def keep(self, made: Finished) -> None:
        """Keep what was made, if the next start may take it as it is."""
        if not self._key:
            return
        try:
            operations = write(operations_of(self._asked[0]), KINDS)
            text = write(replace(made, schedule=_of_steps(made.schedule), operations=operations), KINDS)
            if key_of(*self._asked) != self._key:
                raise Unwritten("more is known of its sizes since it was compiled")
            if write(read(text, KINDS), KINDS) != text:
                raise Unwritten("it reads back otherwise than it was written")
            put(self._key, text)
            self.kept = self._key
        except Exception as refusal:
            self.note = not_kept(refusal)


def eager_graph(made: Finished) -> fx.GraphModule:
    """The graph that a compilation was made of, of operations as they are."""
    return graph_of(cast("tuple[Operation, ...]", read(made.operations, KINDS)))


def keeps_graphs(options: Options) -> bool:
    """Is what is compiled to be kept?  A dump shows every stage, and what is measured has records of its own."""
    return options.graph_cache and options.dump is None and options.mode != "max-autotune"


def finished(key: str) -> Finished | None:
    """What is kept under a key.

    Raises:
        Exception: whatever is found there, it is not what was written.
    """
    text = get(key)
    found = None if text is None else read(text, KINDS)
    return found if isinstance(found, Finished) else None


def not_kept(refusal: Exception) -> str:
    """What the report says of what is compiled anew at the next start."""
    kind = "" if isinstance(refusal, (Unwritten, BuildError)) else f"{type(refusal).__name__}: "
    return f"not kept in the cache: {kind}{refusal}"


def _of_steps(schedule: Schedule) -> Schedule:
    """A schedule without the nodes that its steps were made of, and what only the report tells."""
    own = replace(schedule.program, nodes=(), origins={}, inlined={})
    bodies = {chunks: tuple(map(_of_steps, each)) for chunks, each in schedule.bodies.items()}
    return replace(schedule, program=own, refusals=(), choices=(), bodies=bodies)


__all__ = ["DAMAGED", "FOUND", "Finished", "WarmStart", "eager_graph", "finished", "keeps_graphs", "not_kept"]
