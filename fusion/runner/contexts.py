"""Defines the subjects of each stage's passes, and the contexts that passes may query.

| stage | subject | context |
|---|---|---|
| CAPTURED, PREPARED | Dynamo's fx graph | `Capturing` |
| JOINT; PARTITIONED; INFERENCE | `Joint`; `ForwardBackward`; an fx graph | `Deriving` |
| PROGRAM, CLUSTERS; LAUNCHES | `Scheduled`; `Planned` | `Scheduling` |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from fusion.codegen.target import Capabilities, Layouts, Target
from fusion.codegen.tuning import Tuning
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Program
from fusion.lowering.verify import Verified
from fusion.options import WORKSPACE, Options
from fusion.schedule import Clustering, Refusal, Step
from fusion.schedule.clusters.alternatives import Measure
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.overrides import PRICED, Overrides

# Dynamo's graph -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Capturing:
    """The context of passes over Dynamo's graph.

    Attributes:
        inputs: the example inputs, without settings of the program.
        choose_attention: decomposes calls of attention for which generated kernels are faster than the library's.
        settings: the program's floats with which earlier graphs were compiled.
        within: contexts entered here are left once the region is compiled.
        launched: whether the kernels are to run in this process; False ahead of time, over fake tensors.
        overrides: decisions that are imposed instead of priced.
    """

    options: Options
    inputs: Sequence[object]
    choose_attention: Callable[[fx.GraphModule], None]
    settings: dict[str, float]
    within: ExitStack
    launched: bool = True
    overrides: Overrides = PRICED


# The joint graph, and other ATen graphs ---------------------------------------------------------------------------


@dataclass(slots=True)
class Joint:
    """A joint graph.

    Attributes:
        results: the number of its results that are forward's.
        kept: nodes that forward has to compute and save, though only backward needs them.
        returned: the number of results that forward returns, `kept` included.
    """

    graph: fx.GraphModule
    results: int
    kept: list[fx.Node] = field(default_factory=list)
    returned: int = 0


@dataclass(frozen=True, slots=True)
class Deriving:
    """The context of passes over ATen graphs.

    Attributes:
        capabilities: the capabilities and costs of the graph's device.
        workspace: bytes above which a product is computed in chunks.
        exact: compute as eager does.
        overrides: decisions that are imposed instead of priced.
    """

    capabilities: Capabilities
    workspace: int = WORKSPACE
    exact: bool = False
    overrides: Overrides = PRICED

    @property
    def layouts(self) -> Layouts:
        """The costs of other tensor layouts."""
        return self.capabilities.layouts

    @property
    def can_chain(self) -> bool:
        """Whether contractions can be part of generated kernels, and so be recomputed where they are needed."""
        return "dot" in self.capabilities.fold_ops


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Forward and backward after the partition; forward returns extra results until these are dropped."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    results: int
    returned: int


# The Program, and its launches -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The context of passes over a Program and its launches.

    Attributes:
        target: None plans launches without a target.
        hints: size symbol → its traced value.
        measure: times the alternatives of a product; without it, predictions decide.
        workspace: bytes above which a product is computed in chunks.
        donated: inputs that may be overwritten once they are taken over.
        overrides: decisions that are imposed instead of priced.
        verified, kernels: the nodes and kernels that are verified already.
    """

    target: Target | None
    hints: Mapping[sympy.Symbol, int] | None = None
    measure: Measure | None = None
    workspace: int = sys.maxsize
    donated: Collection[str] = ()
    overrides: Overrides = PRICED
    verified: Verified = field(default_factory=Verified)
    kernels: set[Kernel] = field(default_factory=set)

    @property
    def invariant(self) -> bool:
        """Whether the order of operations in a row may depend on the row alone."""
        return self.target is not None and self.target.numerics.invariant

    @property
    def machine(self) -> Target:
        """The target, which must be given."""
        assert self.target is not None
        return self.target

    @property
    def capabilities(self) -> Capabilities:
        """The target's capabilities and costs."""
        return self.machine.capabilities


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A Program before and after clustering.

    Attributes:
        chains: chains of nodes that one loop computes, as clusters of positions in the program.
        clustering: None before clusters are grown.
        choices: the alternatives of each product, with their prices.
    """

    program: Program
    chains: tuple[Cluster, ...] = ()
    clustering: Clustering | None = None
    choices: tuple[Tuning, ...] = ()

    def changed(self, program: Program) -> Scheduled:
        """Return this with another program, in which the nodes of the chains may have other positions."""
        if program is self.program:
            return self
        return replace(self, program=program, chains=positions_in(program, self.program, self.chains))

    def with_chains(self, program: Program, chains: Sequence[Cluster]) -> Scheduled:
        """Return this with another program and the chains in it; the same object if both are unchanged."""
        if program is self.program and tuple(chains) == self.chains:
            return self
        return replace(self, program=program, chains=tuple(chains))


@dataclass(frozen=True, slots=True)
class Planned:
    """Launches and calls in execution order, the program whose buffers they use, and the edges that were not fused."""

    program: Program
    clustering: Clustering
    steps: tuple[Step, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def changed(
        self, steps: Sequence[Step], program: Program | None = None, refusals: tuple[Refusal, ...] | None = None
    ) -> Planned:
        """Return this with other steps, and the other values that are passed; the same object if all are equal."""
        changed = replace(
            self,
            steps=tuple(steps),
            program=self.program if program is None else program,
            refusals=self.refusals if refusals is None else refusals,
        )
        same = (changed.steps, changed.refusals) == (self.steps, self.refusals) and changed.program is self.program
        return self if same else changed
