"""Watches the passes of every stage while a program is compiled, and evaluates their subjects in float64.

`watching` replaces the runner of stages by one that keeps the subject before the first pass and after each pass that
changed it.  Subjects are evaluated once the numbers of a call are known: Dynamo's graph and the graphs of forward,
backward and inference on their own inputs, the joint graph on the inputs of its two halves, and the body of a chunk on
random numbers.  No machine code is generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import fx

import fusion.compilation.graph_compiler
from fusion.backend import Backend
from fusion.calls.fallback import as_it_is
from fusion.codegen.numerics import current
from fusion.codegen.targets import builder_for
from fusion.compilation import autograd, compile, region, scheduling
from fusion.compilation.compile import prepare, schedule_graph
from fusion.compilation.graphs import donated_inputs, main_device, size_hints
from fusion.dumps.trace import Trace
from fusion.inspect.report import Report
from fusion.joint import channels_last, columns, patches
from fusion.options import Options
from fusion.runner import passes
from fusion.runner.contexts import ForwardBackward, Joint, Planned, Scheduled
from fusion.runner.passes import Pass, PassLog, Stage
from fusion.runtime import Boxed
from tests.fusion.runner.evaluated import (
    Values,
    differences,
    drawn_inputs,
    of_captured,
    of_graph,
    of_joint,
    of_partitioned,
    of_planned,
    of_program,
    wide,
)

Subject = Any
"""The subject of a stage: one of the types of `fusion.runner.contexts`."""


@dataclass
class Passage:
    """One run of a stage: its subject at first, under no name, and after each pass that changed it."""

    stage: str
    subjects: list[tuple[str, Subject]] = field(default_factory=list)

    def evaluate(self, evaluate: Callable[[Subject], Values]) -> Iterator[str]:
        """Yield each pass that changed the values, with the difference."""
        before: Values | None = None
        for name, subject in self.subjects:
            after = evaluate(subject)
            if before is not None:
                for difference in differences(before, after):
                    yield f"{self.stage}/{name}: {difference}"
            before = after


@dataclass
class Watch:
    """A record of the passes.

    Attributes:
        changed: how often each pass, as `stage/name`, changed its subject.
        faults: the passes that changed the values.
        evaluated: how many subjects were compared with the one before them, by stage.
        apart: passes that change values on purpose; the next ones are compared with these.
    """

    apart: frozenset[str] = frozenset()
    changed: Counter[str] = field(default_factory=Counter)
    evaluated: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _open: list[Passage] = field(default_factory=list)

    def run_stage(self, stage: Stage[Subject, Any], subject: Subject, context: Any, log: PassLog) -> Subject:
        """Run a stage as `passes.run_stage` does, and keep its subjects."""
        passage = Passage(stage.name, [("", _kept(subject))])
        self._open.append(passage)
        text = _text(stage, subject)

        def watched(each: Pass[Subject, Any]) -> Pass[Subject, Any]:
            name = f"{stage.name}/{each.name}"

            def run(given: Subject, at: Any) -> Subject:
                nonlocal text
                result = each.run(given, at)
                if result is None:
                    before, text = text, _text(stage, given)
                    changed = text != before
                else:
                    changed = _differ(given, result)
                    self.faults += [f"{name}: {fault}" for fault in _untold(stage, given, result)]
                if changed:
                    self.changed[name] += 1
                    if name in self.apart:
                        passage.subjects.clear()
                    passage.subjects.append((each.name, _kept(given if result is None else result)))
                return result

            return replace(each, run=run)

        return passes.run_stage(replace(stage, passes=tuple(map(watched, stage.passes))), subject, context, log)

    def take(self, *stages: str) -> list[Passage]:
        """Remove and return the subjects of these stages that wait for numbers."""
        taken = [passage for passage in self._open if passage.stage in stages]
        self._open = [passage for passage in self._open if passage.stage not in stages]
        return taken

    def compare(self, passages: Sequence[Passage], evaluate: Callable[[Subject], Values]) -> None:
        """Evaluate subjects, unless no pass changed them."""
        for passage in passages:
            if len(passage.subjects) > 1:
                with torch.random.fork_rng(), torch.no_grad():
                    self.faults += passage.evaluate(evaluate)
                self.evaluated[passage.stage] += len(passage.subjects) - 1


def _text(stage: Stage[Subject, Any], subject: Subject) -> list[tuple[str, str]]:
    """Return the dumped text of the subject, with the marks of inputs, which dumps omit."""
    texts = list(stage.text(subject))
    if isinstance(subject, ForwardBackward):
        marked = [node.name for node in subject.backward.graph.find_nodes(op="placeholder") if node.meta.get("donated")]
        texts.append(("marks", " ".join(marked)))
    return texts


def _differ(before: Subject, after: Subject) -> bool:
    """Did a pass change its subject?  The alternatives that it weighed are no change."""
    if isinstance(before, Scheduled):
        before, after = replace(before, choices=()), replace(after, choices=())
        return any(getattr(before, each) is not getattr(after, each) for each in ("program", "chains", "clustering"))
    return before is not after


def _untold(stage: Stage[Subject, Any], before: Subject, after: Subject) -> Iterator[str]:
    """Yield what is wrong where a pass returns another object without a change, or a change that no dump shows."""
    if before is after:
        return
    if isinstance(before, Scheduled):
        known = ("program", "chains", "clustering", "choices")
        if all(getattr(before, each) == getattr(after, each) for each in known):
            yield "another object without a change"
    elif isinstance(before, Planned):
        if before == after:
            yield "another object without a change"
        if before.steps != after.steps and _text(stage, before) == _text(stage, after):
            yield "a change of launches that their text does not show"


def _kept(subject: Subject) -> Subject:
    """Return the subject in its current state: graphs are changed in place, and copied."""
    match subject:
        case fx.GraphModule():
            return _copied(subject)
        case Joint():
            return replace(subject, graph=_copied(subject.graph), kept=list(subject.kept))
        case ForwardBackward():
            return replace(subject, forward=_copied(subject.forward), backward=_copied(subject.backward))
    assert isinstance(subject, (Scheduled, Planned))
    return subject


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    copied = fx.Graph()
    output = copied.graph_copy(graph.graph, {})
    copied.output(output)
    return fx.GraphModule(graph, copied)


def _numbers(graph: fx.GraphModule) -> Iterator[tuple[str, object]]:
    """The inputs that are numbers: a pass may write them into the graph."""
    for node in graph.graph.find_nodes(op="placeholder"):
        example = getattr(node.meta.get("grapharg"), "example", None)
        if isinstance(example, float) or (isinstance(example, torch.Tensor) and not example.ndim):
            yield node.name, example


# A region, while it is compiled and called ----------------------------------------------------------------------------


@dataclass
class Region:
    """The compilations and calls of one region.

    Attributes:
        joint: the subjects of the joint graph and of its halves, which wait for the call of backward.
        given: the arguments of forward and backward, by the names of their inputs.
    """

    watch: Watch
    options: Options
    joint: list[Passage] = field(default_factory=list)
    given: dict[str, object] = field(default_factory=dict)

    def compile_graph(
        self, graph: fx.GraphModule, options: Options, label: str = "graph", *others: object
    ) -> tuple[Boxed, Report]:
        """Replace `compile.compile_graph`: schedule, and run the graph's own operations."""
        device = main_device(graph)
        target = builder_for(device.type, options.target, current(strict=options.exact)).target
        trace = Trace(None, label)
        self.joint += self.watch.take("joint", "partitioned")
        prepare(graph, label, target, options, trace.log)
        hints = size_hints(graph)
        program, schedule = schedule_graph(graph, target, trace, hints, options.workspace, None, donated_inputs(graph))
        graphs, rest = self.watch.take("inference"), self.watch.take("program", "clusters", "launches")
        whole = [each for each in rest if _program_of(each).inputs == program.inputs]
        bodies = [each for each in rest if _program_of(each).inputs != program.inputs]
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        run = as_it_is(graph)
        waiting = [True]

        def call(args: list[object]) -> tuple[object, ...]:
            if waiting:
                waiting.clear()
                self.given |= {name: wide(arg) for name, arg in zip(names, args, strict=True)}
                self.watch.compare(graphs, lambda subject: of_graph(subject, args))
                self.watch.compare(whole, lambda subject: _of_scheduled(subject, args))
            return run(args)

        for body in bodies:
            inputs = drawn_inputs(_program_of(body), hints)
            self.watch.compare([body], lambda subject, inputs=inputs: _of_scheduled(subject, inputs))
        sources = {launch.kernel: "" for launch in schedule.launches()}
        return call, Report.of(label, program, schedule, sources, target, hints)

    def finish(self) -> None:
        """Evaluate the joint graph and its halves on the recorded arguments."""
        for passage in self.joint:
            self.watch.compare([passage], self._evaluated)
        if self.joint:  # the partition, and the repair of its saved values
            ends = [("", self.joint[0].subjects[-1][1]), ("all passes", self.joint[-1].subjects[-1][1])]
            self.watch.compare([Passage("partitioned", ends)], self._evaluated)

    def _evaluated(self, subject: Joint | ForwardBackward) -> Values:
        return of_joint(subject, self.given) if isinstance(subject, Joint) else of_partitioned(subject, self.given)


def _program_of(passage: Passage) -> Any:
    return passage.subjects[0][1].program


def _of_scheduled(subject: Scheduled | Planned, args: Sequence[object]) -> Values:
    if isinstance(subject, Planned) and subject.steps:
        return of_planned(subject, args)
    return of_program(subject.program, args)


@contextmanager
def watching(watch: Watch) -> Iterator[Callable[..., Callable[..., object]]]:
    """Watch the compilations of the yielded function, which has the signature of `torch.compile` with options."""
    regions: dict[int, Region] = {}

    def compile_graph(graph: fx.GraphModule, options: Options, *others: Any) -> tuple[Boxed, Report]:
        return regions[id(options)].compile_graph(graph, options, *others)  # backward may be compiled at its call

    with pytest.MonkeyPatch.context() as patch:
        for module in (region, autograd, compile, scheduling):
            patch.setattr(module, "run_stage", watch.run_stage)
        for module in (channels_last, patches):  # as a GPU's library does
            patch.setattr(module, "on_matrix_units", lambda image: True)
        wide = torch.float64
        patch.setattr(columns, "_is_faster", lambda call, capabilities: call.meta["val"].dtype is wide)
        patch.setattr(fusion.compilation.graph_compiler, "guard_dispatch", lambda run, *others: run)
        patch.setattr(fusion.compilation.graph_compiler, "compile_graph", compile_graph)

        def compiled(function: Callable[..., object], dynamic: bool | None = None, **settings: Any) -> Any:
            def begin(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
                options = Options(strict=True, graph_cache=False, **settings)
                regions[id(options)] = Region(watch, options)
                settings_of_program = dict(_numbers(graph))
                run = Backend(options)(graph, inputs)
                captured, waiting = watch.take("captured", "prepared"), [True]
                names = [node.name for node in graph.graph.find_nodes(op="placeholder")]

                def call(*args: object) -> object:
                    if waiting:
                        waiting.clear()
                        given = {**settings_of_program, **dict(zip(names, args, strict=True))}
                        watch.compare(captured, lambda subject: of_captured(subject, given))
                    return run(*args)

                return call

            torch._dynamo.reset()
            return torch.compile(function, backend=begin, dynamic=dynamic)

        yield compiled
        for each in regions.values():
            each.finish()


__all__ = ["Watch", "watching"]
