"""Scheduling: a Program becomes an ordered list of kernel launches and extern calls.

program → sources, differences, inline, destinations, select, chunks, scans, windows, streams, narrow, split, alignment
        → clusters (`legality`: may nodes share a kernel, `profit`: should they), less what the `library` does better
        → plan: `kernels` of clusters, and the `launches` and memory that they share

What was not fused comes back as refusals with reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fusion.codegen.target import Target
from fusion.codegen.tuning import Tuning
from fusion.lowering.program import Extern, Program, writes
from fusion.schedule.chunks import Chunks
from fusion.schedule.clusters import Clustering, Refusal, grow, refusals_of
from fusion.schedule.kernels import KernelCall, kernel_of
from fusion.schedule.launches.chain import chain_last_steps
from fusion.schedule.launches.pack import pack_launches
from fusion.schedule.launches.pivots import about_pivots
from fusion.schedule.launches.reuse import reuse
from fusion.schedule.launches.tiles import finish_tiles
from fusion.schedule.launches.updates import update
from fusion.schedule.legality import Cluster, single
from fusion.schedule.profit import Prices

Step: TypeAlias = "KernelCall | Extern"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in execution order over the buffers of `program`.

    `refusals` are the data edges that were not fused.  `choices` are the ways to compute each product and the forms
    of walks, with their prices.  `bodies` holds, for each call in chunks among the steps, the schedules of its bodies.
    """

    program: Program
    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...]
    choices: tuple[Tuning, ...] = ()
    bodies: Mapping[Chunks, tuple[Schedule, ...]] = field(default_factory=dict)

    def launches(self) -> Iterator[KernelCall]:
        """Every kernel call, also those inside chunks."""
        for step in self.steps:
            if isinstance(step, KernelCall):
                yield step
        for bodies in self.bodies.values():
            for body in bodies:
                yield from body.launches()


def plan(
    program: Program, clustering: Clustering, target: Target | None = None, spare: Collection[str] = ()
) -> Schedule:
    """Turn clusters into steps: a kernel each, or the call of an extern.

    With a target, parts are added up in the launch that makes them, and independent kernels that can run side by side
    share a launch, where it can do that.

    Args:
        spare: inputs that may be overwritten once they are taken over.
    """
    found: list[Step] = []
    came_apart: list[Refusal] = []
    for cluster in clustering.clusters:
        node = program.nodes[cluster.members[0]]
        if isinstance(node, Extern):
            found.append(node)
            continue
        call = kernel_of(clustering.prices, cluster)
        why = target.refuses(call.kernel) if target is not None else ""
        found.extend(_one_by_one(clustering.prices, cluster) if why else [call])
        came_apart.extend(_inside(clustering.prices, cluster, why) if why else ())
    if target is not None:
        found = finish_tiles(found, program, target)
    found = chain_last_steps(found)
    if target is not None:
        found = list(pack_launches(found, program, target))
    updated, program = update(about_pivots(found), program)
    held = _held(updated)  # what a kernel writes where it is to lie does not flow to a copy any more
    refusals = tuple(refusal for refusal in (*clustering.refusals, *came_apart) if refusal.producer in held)
    steps, program = reuse(updated, program, spare)
    return Schedule(program, steps, refusals)


def _one_by_one(prices: Prices, cluster: Cluster) -> Iterator[KernelCall]:
    """The nodes of a cluster that cannot be generated as one kernel, each in a kernel of its own."""
    for member in cluster.members:
        yield kernel_of(prices, single(prices.dependences, prices.capabilities, member))


def _inside(prices: Prices, cluster: Cluster, why: str) -> Iterator[Refusal]:
    """A refusal for each edge inside a cluster that came apart."""
    members = frozenset(cluster.members)
    return refusals_of(
        prices.dependences, prices.capabilities, lambda writer, reader: why if {writer, reader} <= members else None
    )


def _held(steps: Sequence[Step]) -> set[str]:
    """The buffers that any step reads or writes."""
    return {
        name
        for step in steps
        for name in (step.buffers if isinstance(step, KernelCall) else (*step.reads, *writes(step)))
    }


__all__ = ["Clustering", "Refusal", "Schedule", "Step", "grow", "plan"]
