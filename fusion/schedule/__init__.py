"""Scheduling: a Program becomes an ordered list of kernel launches and extern calls.

`inline` cheap maps, `split` reductions with too few rows, `grow` clusters, leave to the `library` what it does better,
and turn each cluster into a Kernel.  What was not
fused comes back as refusals with reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fusion.schedule.chain import chain_last_steps
from fusion.schedule.clusters import Clustering, Refusal, grow
from fusion.schedule.kernels import KernelCall, kernel_of
from lowering.program import Extern, Program

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
    """Turn clusters into steps: a kernel each, or the call of an extern."""
    steps: list[Step] = []
    for cluster in clustering.clusters:
        node = program.nodes[cluster.members[0]]
        if isinstance(node, Extern):
            steps.append(node)
        else:
            steps.append(kernel_of(clustering.prices, cluster))
    return Schedule(program, tuple(chain_last_steps(steps)), clustering)


__all__ = ["Clustering", "Refusal", "Schedule", "Step", "grow", "plan"]
