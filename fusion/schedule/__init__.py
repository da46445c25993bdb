"""Schedules a Program: it becomes an ordered list of kernel launches and extern calls.

`fusion/stages.py` lists the passes in order: PROGRAM (equal programs that fuse better), CLUSTERS (`legality`: nodes
that may share a kernel, `profit`: nodes that gain from it, `library`: products that the library computes faster) and
LAUNCHES (`kernels` of clusters, and the `launches` and memory that they share).  Edges that were not fused are returned
as refusals with reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from fusion.codegen.tuning import Tuning
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Call, Program
from fusion.schedule.clusters.growth import Clustering, Refusal, grow
from fusion.schedule.kernels import KernelCall

Step: TypeAlias = "KernelCall | Call"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in execution order over the buffers of `program`.

    `refusals` are the data edges that were not fused.  `choices` are the alternatives for each product and the forms of
    loops, with their prices.  `bodies` holds, for each chunked call among the steps, the schedules of its bodies.
    """

    program: Program
    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...]
    choices: tuple[Tuning, ...] = ()
    bodies: Mapping[Chunked[Program], tuple[Schedule, ...]] = field(default_factory=dict)

    def launches(self) -> Iterator[KernelCall]:
        """Yield every kernel call, also those inside chunks."""
        for step in self.steps:
            if isinstance(step, KernelCall):
                yield step
        for bodies in self.bodies.values():
            for body in bodies:
                yield from body.launches()


__all__ = ["Clustering", "Refusal", "Schedule", "Step", "grow"]
