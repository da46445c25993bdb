"""Every pass of every stage preserves the values of its subject, in float64, on random and chosen programs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusion import stages
from fusion.lowering.ir.expr import make_op
from fusion.lowering.ir.program import Map
from fusion.runner.contexts import Joint, Scheduled, Scheduling
from fusion.runner.passes import Pass
from tests.fusion.runner.programs import CASES, Case, given
from tests.fusion.runner.watched import Watch, watching
from tests.random_programs.grammar import generate
from tests.random_programs.runs import run

DRAWN, MORE = 6, 120
"""Random programs of a usual run, and of a slow one."""

APART = {
    "joint/share_seeds": "a call with a seed draws other random numbers than one without",
    "partitioned/keep_unchanged": "before it, backward reads inputs that the program has changed meanwhile",
}
"""Passes that change values on purpose.  Passes after the second one are compared with the joint graph's values."""

UNCHANGED = {
    "captured/refuse_fake_inputs": "refuses a graph, and changes none",
    "captured/refuse_negated_inputs": "refuses a graph, and changes none",
    "captured/refuse_shared_writes": "refuses a graph, and changes none",
    "prepared/choose_attention": "decomposes calls on a GPU alone",
    "program/bound_masks": "folds a mask where that takes little beside its scores: more than are evaluated here",
    "launches/reduce_in_last_block": "needs the parts of a product of more numbers than are evaluated here",
}
"""Passes that change none of these programs, with the reason."""


def watch_case(watch: Watch, case: Case) -> None:
    with watching(watch) as compiled, torch.set_grad_enabled(case.backward):
        function = compiled(case.function, dynamic=case.dynamic, **case.options)
        results = [each for each in tree_leaves(function(*given(case))) if isinstance(each, Tensor)]
        if case.backward:
            torch.stack([each.double().sin().sum() for each in results if each.requires_grad]).sum().backward()


def watch_drawn(watch: Watch, number: int) -> None:
    program = generate(random.Random(f"passes/{number}"), number)
    before = len(watch.faults)
    with watching(watch) as compiled:
        run(compiled(program.function(), target="triton"), program.arguments(0), program.backward)
    watch.faults[before:] = [f"{fault}\n{program}" for fault in watch.faults[before:]]


def test_passes_keep_values_and_each_changes_a_program() -> None:
    watch = Watch(frozenset(APART))
    for name, case in CASES.items():
        before = len(watch.faults)
        watch_case(watch, case)
        watch.faults[before:] = [f"{name}: {fault}" for fault in watch.faults[before:]]
    assert not watch.faults, "\n".join(watch.faults)
    every = {f"{stage.name}/{each.name}" for stage in stages.STAGES for each in stage.passes}
    assert every >= UNCHANGED.keys() | APART.keys()
    assert every - watch.changed.keys() == UNCHANGED.keys()
    assert watch.evaluated.keys() == {stage.name for stage in stages.STAGES}


@pytest.mark.filterwarnings("ignore::UserWarning")  # eager's own, about what a random program does
def test_passes_keep_the_values_of_random_programs() -> None:
    watch = Watch(frozenset(APART))
    for number in range(DRAWN):
        watch_drawn(watch, number)
    assert not watch.faults, "\n".join(watch.faults)
    assert watch.evaluated["program"] >= DRAWN and watch.evaluated["joint"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_passes_keep_the_values_of_many_random_programs() -> None:
    watch = Watch(frozenset(APART))
    for number in range(DRAWN, DRAWN + MORE):
        watch_drawn(watch, number)
    assert not watch.faults, "\n".join(watch.faults)


# What is not kept is seen -------------------------------------------------------------------------------------------


def negated(scheduled: Scheduled, at: Scheduling) -> Scheduled:
    """The program with the value of its last map of floats negated."""
    nodes = list(scheduled.program.nodes)
    place = max(k for k, n in enumerate(nodes) if isinstance(n, Map) and n.expr.dtype.is_floating_point)
    last = nodes[place]
    assert isinstance(last, Map)
    nodes[place] = replace(last, expr=make_op("neg", last.expr))
    return scheduled.changed(scheduled.program.edited(nodes))


def without_sines(joint: Joint, at: object) -> None:
    """The graph with the operand of each sine in place of the sine."""
    for node in joint.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.replace_all_uses_with(node.args[0])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("PROGRAM", Pass("wrong", negated)), ("JOINT", Pass("wrong", without_sines))],
)
def test_a_pass_that_changes_values_is_named(name: str, wrong: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = getattr(stages, name)
    broken = replace(stage, passes=(wrong, *stage.passes))
    for module in ("autograd", "scheduling"):
        if hasattr(__import__(f"fusion.compilation.{module}", fromlist=[name]), name):
            monkeypatch.setattr(f"fusion.compilation.{module}.{name}", broken)
    watch = Watch()
    watch_case(watch, CASES["computed maximum"])
    assert watch.faults and all(fault.startswith(f"{stage.name}/wrong: ") for fault in watch.faults), watch.faults
