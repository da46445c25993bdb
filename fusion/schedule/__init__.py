"""Scheduling: a Program becomes an ordered list of kernel launches and extern calls.

`inline` cheap maps, `split` reductions with too few rows, `grow` clusters, and turn each into a Kernel.  What was not
fused comes back as refusals with reasons.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from fusion.schedule.chain import chain_last_steps
from fusion.schedule.clusters import Clustering, Refusal, grow
from fusion.schedule.kernels import KernelCall, kernel_of
from lowering.program import Contract, Extern, Program, writes

Step: TypeAlias = "KernelCall | Extern"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in execution order over the buffers of `program`, and the edges that were not fused."""

    program: Program
    steps: tuple[Step, ...]
    clustering: Clustering

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        return self.clustering.refusals


def plan(program: Program, clustering: Clustering) -> Schedule:
    """Turn clusters into steps: a kernel each, or the call of an extern or of the library."""
    steps: list[Step] = []
    made = {name for name in program.inputs if isinstance(name, str)} | set(program.constants)
    for cluster in clustering.clusters:
        node = program.nodes[cluster.members[0]]
        if isinstance(node, Extern):
            steps.append(node)
        elif isinstance(node, Contract) and len(cluster.members) == 1 and _callable(node, made):
            steps.extend(part for part in node.library if isinstance(part, Extern))
        else:
            steps.append(kernel_of(clustering.prices, cluster))
        last = steps[-1]
        made.update(last.written if isinstance(last, KernelCall) else writes(last))
    return Schedule(program, tuple(chain_last_steps(steps)), clustering)


def _callable(node: Contract, made: Collection[str]) -> bool:
    """Is there a library call for a contraction that nothing was fused with, and are its operands in memory?"""
    inside = {name for part in node.library for name in writes(part)}
    return bool(node.library) and all(
        isinstance(part, Extern) and all(name in made or name in inside for name in part.reads) for part in node.library
    )


__all__ = ["Clustering", "Refusal", "Schedule", "Step", "grow", "plan"]
