"""Subjects: what the passes of each stage work on, and the contexts that say what they may ask.

| stage | subject | context |
|---|---|---|
| CAPTURED, PREPARED | Dynamo's fx graph | `Capturing` |
| JOINT; PARTED; INFERENCE | `Joint`; `Halves`; an fx graph | `Deriving` |
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
from fusion.lowering.kernel import Kernel
from fusion.lowering.program import Program
from fusion.lowering.verify import Verified
from fusion.options import WORKSPACE, Options
from fusion.schedule import Clustering, Refusal, Step
from fusion.schedule.clusters.alternatives import Measure
from fusion.schedule.clusters.legality import Cluster, positions_in

# Dynamo's graph -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Capturing:
    """What the passes over Dynamo's graph may ask.

    Attributes:
        inputs: the example inputs; settings of the program leave them.
        choose_attention: replaces calls of attention whose parts are faster than the library's kernel.
        settings: the floats of the program that earlier graphs were compiled for.
        within: what is entered here is left once the region is compiled.
        launched: whether the kernels are to run in this process; False ahead of time, over fake tensors.
    """

    options: Options
    inputs: Sequence[object]
    choose_attention: Callable[[fx.GraphModule], None]
    settings: dict[str, float]
    within: ExitStack
    launched: bool = True


# The joint graph, and other ATen graphs ---------------------------------------------------------------------------


@dataclass(slots=True)
class Joint:
    """A joint graph.

    Attributes:
        results: how many of its results are those of forward.
        kept: nodes that forward has to compute and keep, though only backward needs them.
        returned: how many results forward returns, `kept` included.
    """

    graph: fx.GraphModule
    results: int
    kept: list[fx.Node] = field(default_factory=list)
    returned: int = 0


@dataclass(frozen=True, slots=True)
class Deriving:
    """What the passes over ATen graphs may ask.

    Attributes:
        capabilities: what can be generated for the device of the graph, and what it costs there.
        workspace: bytes above which a product is made in chunks.
        exact: compute as eager does.
    """

    capabilities: Capabilities
    workspace: int = WORKSPACE
    exact: bool = False

    @property
    def layouts(self) -> Layouts:
        """What it costs to have tensors lie in memory otherwise."""
        return self.capabilities.layouts

    @property
    def streams(self) -> bool:
        """Can contractions be part of generated kernels, and so be made again where they are needed?"""
        return "dot" in self.capabilities.fold_ops


@dataclass(frozen=True, slots=True)
class Halves:
    """Forward and backward after the partition; forward returns more than its results until these are dropped."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    results: int
    returned: int


# The Program, and what is launched of it -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What the passes over a Program and its launches may ask.

    Attributes:
        target: None plans launches for no target in particular.
        hints: size symbol → its value when the graph was traced.
        measure: times the ways to compute a product; without it, predictions decide.
        workspace: bytes above which a product is made in chunks.
        spare: inputs that may be written over once they are taken over.
        verified, kernels: remember what was verified already.
    """

    target: Target | None
    hints: Mapping[sympy.Symbol, int] | None = None
    measure: Measure | None = None
    workspace: int = sys.maxsize
    spare: Collection[str] = ()
    verified: Verified = field(default_factory=Verified)
    kernels: set[Kernel] = field(default_factory=set)

    @property
    def machine(self) -> Target:
        """The target, where there has to be one."""
        assert self.target is not None
        return self.target

    @property
    def capabilities(self) -> Capabilities:
        """What the target can generate, and what it costs."""
        return self.machine.capabilities


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A Program on its way to clusters.

    Attributes:
        streams: the nodes that one walk computes together, as clusters by position in the program.
        clustering: once clusters are grown.
        choices: the ways to compute each product, with their prices.
    """

    program: Program
    streams: tuple[Cluster, ...] = ()
    clustering: Clustering | None = None
    choices: tuple[Tuning, ...] = ()

    def changed(self, program: Program) -> Scheduled:
        """The same with another program, in which the nodes of the streams may stand elsewhere."""
        if program is self.program:
            return self
        return replace(self, program=program, streams=positions_in(program, self.program, self.streams))


@dataclass(frozen=True, slots=True)
class Planned:
    """Launches and calls in execution order, the program whose buffers they use, and the edges that were not fused."""

    program: Program
    clustering: Clustering
    steps: tuple[Step, ...] = ()
    refusals: tuple[Refusal, ...] = ()
