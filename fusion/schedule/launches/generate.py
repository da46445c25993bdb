"""Generates a launch, or an extern call, for each cluster.

Input: a program and its clusters; output: steps in execution order, and a refusal for each edge inside a cluster that
the target cannot generate as one kernel: each of its nodes becomes a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusion.codegen.target import Target
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Call, Extern, Program, writes
from fusion.schedule.clusters.growth import Clustering, Refusal, refusals_of
from fusion.schedule.clusters.legality import Cluster, single
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.kernels import KernelCall, kernel_of


def kernels_of(
    program: Program, clustering: Clustering, target: Target | None
) -> tuple[tuple[KernelCall | Call, ...], tuple[Refusal, ...]]:
    """Build a launch or a call for each cluster, in order; return them with the edges that were not fused.

    Args:
        target: is asked whether it can generate each kernel; None generates anything.

    >>> from fusion.inspect.examples import TARGET, lowered
    >>> from fusion.lowering.printer import format_kernel
    >>> from fusion.schedule.clusters.growth import grow
    >>> from torch import empty
    >>> program = lowered(lambda x: (x + 1).sum(-1), empty(3, 5))
    >>> steps, _ = kernels_of(program, grow(program, TARGET.capabilities), TARGET)
    >>> print(format_kernel(steps[0].kernel).partition("   #")[0])
    kernel add_sum(in0: f32[3, 5], out0: f32[3] written)
      grid  i0: 3
      whole r0: 5
      sum0 = sum over r0 of in0[5*i0 + r0] + 1.0
      store out0[i0] = sum0
    """
    steps: list[KernelCall | Call] = []
    refusals = [*clustering.refusals]
    for cluster in clustering.clusters:
        node = program.nodes[cluster.members[0]]
        if isinstance(node, (Extern, Chunked)):
            steps.append(node)
            continue
        call = kernel_of(clustering.prices, cluster)
        why = target.refuses(call.kernel) if target is not None else ""
        steps.extend(_one_by_one(clustering.prices, cluster) if why else [call])
        refusals.extend(_inside(clustering.prices, cluster, why) if why else ())
    return tuple(steps), tuple(refusals)


def refusals_of_steps(refusals: Sequence[Refusal], steps: Sequence[KernelCall | Call]) -> tuple[Refusal, ...]:
    """Keep the refusals of edges through memory: those whose producer some step reads or writes."""
    held = {
        name
        for step in steps
        for name in (step.buffers if isinstance(step, KernelCall) else (*step.reads, *writes(step)))
    }
    return tuple(refusal for refusal in refusals if refusal.producer in held)


def _one_by_one(prices: Prices, cluster: Cluster) -> Iterator[KernelCall]:
    """Yield a kernel for each node of a cluster that cannot be generated as one kernel."""
    for member in cluster.members:
        yield kernel_of(prices, single(prices.dependences, prices.capabilities, member))


def _inside(prices: Prices, cluster: Cluster, why: str) -> Iterator[Refusal]:
    """Return a refusal for each edge inside a cluster that was split."""
    members = frozenset(cluster.members)
    return refusals_of(
        prices.dependences, prices.capabilities, lambda writer, reader: why if {writer, reader} <= members else None
    )
