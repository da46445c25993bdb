"""Adapts functions to passes: hands each of them the parts of a subject and of a context that it takes.

Input: the functions that `fusion/stages.py` lists; output: functions of a subject and a context (`contexts.py`), which
return the changed subject, the same object if nothing changes, or None if it is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from fusion.dynamo.constant_floats import settings_fixed
from fusion.joint.results import add_results, drop_results
from fusion.joint.seeds import restore_unused_random
from fusion.lowering.ir.program import Program
from fusion.lowering.verify import verify_kernel
from fusion.runner.contexts import Capturing, Deriving, ForwardBackward, Joint, Planned, Scheduled, Scheduling
from fusion.schedule import Step
from fusion.schedule.clusters.growth import grow
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.kernels import KernelCall
from fusion.schedule.kernels.time import share_of_chain
from fusion.schedule.launches import reuse, updates
from fusion.schedule.launches.generate import kernels_of, refusals_of_steps
from fusion.schedule.library.choice import prefer_library

# fx graphs -----------------------------------------------------------------------------------------------------------


def fix_constant_floats(graph: fx.GraphModule, at: Capturing) -> None:
    """Write the program's unchanged floats into a graph, until its region is compiled."""
    at.inputs = at.within.enter_context(settings_fixed(graph, at.inputs, at.settings))


def lint(graph: fx.GraphModule, at: object) -> None:
    """Raise if an fx graph is malformed."""
    graph.graph.lint()


def keep(kept: Callable[[fx.GraphModule, Deriving], Collection[fx.Node]]) -> Callable[[Joint, Deriving], None]:
    """Adapt a function that returns the nodes of a joint graph which forward has to save."""

    def run(joint: Joint, at: Deriving) -> None:
        joint.kept += kept(joint.graph, at)

    return run


def return_saved_values(joint: Joint, at: Deriving) -> None:
    """Add the nodes that forward has to save to its results."""
    joint.returned = joint.results + add_results(joint.graph, joint.kept, joint.results)


def drop_saved_results(halves: ForwardBackward, at: Deriving) -> None:
    """Remove the results of `return_saved_values` from forward; backward still gets those that it needs."""
    drop_results(halves.forward, halves.results, halves.returned)


def restore_in_both(halves: ForwardBackward, at: Deriving) -> None:
    """Undo `hide_unused_random` in forward and in backward."""
    restore_unused_random(halves.forward)
    restore_unused_random(halves.backward)


def on_saved(
    edit: Callable[[fx.GraphModule, fx.GraphModule, int], None],
) -> Callable[[ForwardBackward, Deriving], None]:
    """Adapt a function of forward, backward, and the number of forward's own results."""
    return lambda halves, at: edit(halves.forward, halves.backward, halves.results)


# The Program ---------------------------------------------------------------------------------------------------------


def on_program(change: Callable[[Program, Scheduling], Program]) -> Callable[[Scheduled, Scheduling], Scheduled]:
    """Adapt a function that changes a Program."""
    return lambda scheduled, at: scheduled.changed(change(scheduled.program, at))


def with_chains(
    change: Callable[[Scheduled, Scheduling], tuple[Program, Sequence[Cluster]]],
) -> Callable[[Scheduled, Scheduling], Scheduled]:
    """Adapt a function that returns a Program and its chains."""
    return lambda scheduled, at: scheduled.with_chains(*change(scheduled, at))


def on_chains(change: Callable[..., tuple[Program, tuple[Cluster, ...]]]) -> Callable[..., Scheduled]:
    """Adapt a function that changes a Program together with its chains."""
    return lambda scheduled, at: scheduled.with_chains(
        *change(scheduled.program, at.capabilities, scheduled.chains, at.hints)
    )


def grow_clusters(scheduled: Scheduled, at: Scheduling) -> Scheduled:
    """Grow clusters from the nodes of a Program, or anew if it has some."""
    share = None if at.target is None else partial(share_of_chain, target=at.target)
    chains, joins = scheduled.chains, at.overrides.joins
    clustering = grow(
        scheduled.program,
        at.capabilities,
        at.hints,
        chains,
        chained_share=share,
        joins=joins,
        before=scheduled.clustering,
    )
    return replace(scheduled, clustering=clustering)


def choose_library(scheduled: Scheduled, at: Scheduling) -> Scheduled:
    """Choose the products that the library computes, and grow the clusters without them."""
    assert scheduled.clustering is not None
    measure = at.overrides.choose if at.overrides.products else at.measure
    program, choices = prefer_library(scheduled.program, scheduled.clustering, at.machine, measure)
    weighed = replace(scheduled, choices=choices) if choices else scheduled
    return weighed if program is scheduled.program else grow_clusters(weighed.changed(program), at)


# Launches ------------------------------------------------------------------------------------------------------------


def make_kernels(planned: Planned, at: Scheduling) -> Planned:
    """Make a kernel of each cluster."""
    steps, refusals = kernels_of(planned.program, planned.clustering, at.target)
    return planned.changed(steps, refusals=refusals)


def update_in_place(planned: Planned, at: Scheduling) -> Planned:
    """Write results into the memory of the tensors that they update."""
    steps, program = updates.update_in_place(planned.steps, planned.program)
    return planned.changed(steps, program, refusals_of_steps(planned.refusals, steps))


def reuse_memory(planned: Planned, at: Scheduling) -> Planned:
    """Write results into memory that is read for the last time."""
    return planned.changed(*reuse.reuse_memory(planned.steps, planned.program, at.donated))


def on_steps(
    change: Callable[[Planned, Scheduling], Sequence[Step]],
) -> Callable[[Planned, Scheduling], Planned]:
    """Adapt a function that changes the steps of a schedule."""
    return lambda planned, at: planned.changed(change(planned, at))


def verify_kernels(planned: Planned, at: Scheduling) -> None:
    """Check the kernels that no earlier pass has left.

    Raises:
        VerifyError: a kernel breaks a rule of its IR.
    """
    for step in planned.steps:
        if isinstance(step, KernelCall) and step.kernel not in at.kernels:
            verify_kernel(step.kernel)
            at.kernels.add(step.kernel)
