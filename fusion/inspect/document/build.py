"""Builds the document of a report: plain data in the structure of `structure.py`, for JSON and for the page.

Input: the reports of graphs; output: a `Document`, in which equal kernels are one entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import fusion
from fusion.codegen.price import Price
from fusion.codegen.tuning import Trial, Tuning
from fusion.inspect.breaks import Break
from fusion.inspect.certificate import Certificate
from fusion.inspect.document.attribution import Attribution
from fusion.inspect.document.certified import certificate_entry
from fusion.inspect.document.edges import Edges
from fusion.inspect.document.files import Files
from fusion.inspect.document.remedies import remedy, remedy_of_call
from fusion.inspect.document.structure import (
    VERSION,
    Artefact,
    BreakEntry,
    CountedNames,
    DeviceEntry,
    Document,
    FindingEntry,
    GraphEntry,
    KernelEntry,
    OperationEntry,
    PassEntry,
    PriceEntry,
    RefusalEntry,
    StepEntry,
    TrafficEntry,
    TrialEntry,
    TuningEntry,
)
from fusion.inspect.graphs import DeviceReport, OperationReport
from fusion.inspect.report import ExternReport, KernelReport, Report, Traffic
from fusion.lowering.errors import Origin
from fusion.lowering.printer import format_kernel
from fusion.runner.passes import PassTime

MOST_NAMES = 40
"""The names that an entry of a pass lists, of the parts that it changed."""

Artefacts = Mapping[tuple[str, str], tuple[list[Artefact], str]]
"""The target's name and the source of a kernel → its artefacts, and why others are missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds the outcome of a command beyond the reports of graphs: of a comparison, a search, a measurement.

    Attributes:
        command: its name, such as "verify".
        good: whether it exits with 0.
        text: its output, laid out for letters of equal width.
    """

    command: str
    good: bool
    text: str


def document_of(
    graphs: Sequence[Report],
    other_breaks: Sequence[Break],
    artefacts: Artefacts,
    certificate: Certificate | None = None,
    finding: Finding | None = None,
) -> Document:
    """Return the document of a program's graphs.

    Args:
        other_breaks: where the program leaves its graphs without ending one.
        artefacts: the artefacts of kernels; none are fine.
        certificate: the checks of the compiled program, if there were any.
        finding: the outcome of a command, if there is one.
    """
    building = _Building(artefacts)
    entries = [building.graph(number, report) for number, report in enumerate(graphs)]
    breaks = [building.graph_break(each) for each in other_breaks]
    return Document(
        version=VERSION,
        fusion=fusion.__version__,
        graphs=entries,
        kernels=list(building.kernels.values()),
        files=building.files.sources(),
        other_breaks=breaks,
        certificate=None if certificate is None else certificate_entry(certificate),
        finding=None
        if finding is None
        else FindingEntry(command=finding.command, good=finding.good, text=finding.text),
    )


@dataclass(slots=True)
class _Building:
    """A document being built; `kernels` are its entries by target and source."""

    artefacts: Artefacts
    files: Files = field(default_factory=Files)
    kernels: dict[tuple[str, str], KernelEntry] = field(default_factory=dict)

    def graph(self, number: int, report: Report) -> GraphEntry:
        """Return the entry of a graph, and add its launches to the entries of their kernels."""
        steps = _in_order(report)
        edges, attribution = Edges(report.lowered, steps), Attribution(report.lowered)
        return GraphEntry(
            label=report.label,
            failure=report.failure,
            notes=list(report.notes),
            traffic_before=_traffic(report.traffic_before),
            traffic_after=_traffic(report.traffic_after),
            memory_before=list(report.memory_before),
            memory_after=list(report.memory_after),
            device=None if report.device is None else _device(report.device),
            operations=[self.operation(each, edges.steps[k]) for k, each in enumerate(report.lowered)],
            steps=[self.step(step, edges, attribution, (number, k)) for k, step in enumerate(steps)],
            refusals=self.refusals(report, edges),
            tunings=[_tuning(each) for each in report.tunings],
            passes=[_pass(each) for each in report.passes],
            graph_break=None if report.graph_break is None else self.graph_break(report.graph_break),
        )

    def operation(self, operation: OperationReport, steps: Sequence[int]) -> OperationEntry:
        """Return the entry of an operation."""
        return OperationEntry(
            name=next(iter(operation.writes), operation.origin.name),
            kind=operation.kind,
            text=operation.text,
            place=self.files.place(operation.origin),
            reads=list(operation.reads),
            writes=list(operation.writes),
            bytes_read=operation.bytes_read,
            bytes_written=operation.bytes_written,
            steps=list(steps),
        )

    def step(
        self, step: KernelReport | ExternReport, edges: Edges, attribution: Attribution, launch: tuple[int, int]
    ) -> StepEntry:
        """Return the entry of a launch or a call; `launch` is its graph and its position there."""
        place, is_kernel, operations = step.place, isinstance(step, KernelReport), edges.operations[launch[1]]
        return StepEntry(
            kind="kernel" if is_kernel else "call",
            name=step.name,
            kernel=self.kernel(step, launch) if isinstance(step, KernelReport) else None,
            reason="" if isinstance(step, KernelReport) else step.reason or "no rule",
            remedy="" if isinstance(step, KernelReport) else remedy_of_call(step.reason),
            place=self.files.place(_origin_of(step)),
            operations=operations,
            lines=attribution.lines(step, operations) if isinstance(step, KernelReport) else [],
            reads=list(place.reads),
            writes=list(place.writes),
            params=list(place.params),
            runs=place.runs,
            bytes_read=step.bytes_read if isinstance(step, KernelReport) else step.traffic.read,
            bytes_written=step.bytes_written if isinstance(step, KernelReport) else step.traffic.written,
            flops=step.flops if isinstance(step, KernelReport) else 0,
            predicted=step.predicted if isinstance(step, KernelReport) else None,
            measured=step.measured,
            price=_price(step.price) if isinstance(step, KernelReport) and step.price else None,
        )

    def kernel(self, kernel: KernelReport, launch: tuple[int, int]) -> int:
        """Return the position of a kernel's entry, and add a launch to it."""
        key = kernel.target, kernel.source
        if key not in self.kernels:
            stages, failed = self.artefacts.get(key, ([], ""))
            self.kernels[key] = KernelEntry(
                name=kernel.name,
                target=kernel.target,
                source=kernel.source,
                program="" if kernel.kernel is None else format_kernel(kernel.kernel),
                launches=[],
                artefacts=stages,
                failed=failed,
            )
        self.kernels[key]["launches"].append([*launch])
        return list(self.kernels).index(key)

    def refusals(self, report: Report, edges: Edges) -> list[RefusalEntry]:
        """Return the edges that were not fused, the most expensive first."""
        entries = []
        for refusal in sorted(report.refusals, key=lambda each: -each.microseconds):
            start, end = edges.ends(refusal.producer, refusal.consumer, refusal.origin)
            entry = RefusalEntry(
                producer=refusal.producer,
                consumer=refusal.consumer,
                reason=refusal.reason,
                remedy=remedy(refusal.reason),
                place=self.files.place(refusal.origin),
                bytes=refusal.bytes,
                microseconds=refusal.microseconds,
                from_step=start,
                to_step=end,
            )
            entries.append(entry)
        return entries

    def graph_break(self, each: Break) -> BreakEntry:
        """Return the entry of a graph break."""
        return BreakEntry(reason=each.reason, place=self.files.place(each.origin), whole=each.whole)


def _in_order(report: Report) -> list[KernelReport | ExternReport]:
    """Return launches and calls in the order in which they run; a graph that runs eagerly has calls alone."""
    return sorted((*report.kernels, *report.externs), key=lambda step: step.place.step)


def _origin_of(step: KernelReport | ExternReport) -> Origin:
    """Return the origin of a step: for a kernel, the origin of its last operation, whose result it stores."""
    if isinstance(step, ExternReport):
        return step.origin
    return step.origins[-1] if step.origins else Origin(step.name)


def _traffic(traffic: Traffic) -> TrafficEntry:
    return TrafficEntry(read=traffic.read, written=traffic.written)


def _device(device: DeviceReport) -> DeviceEntry:
    return DeviceEntry(
        name=device.name,
        launch_us=device.launch_us,
        bandwidth=[list(point) for point in device.bandwidth],
        flops=device.flops,
        matrix_flops=device.matrix_flops,
        matrix_shares=[list(share) for share in device.matrix_shares],
    )


def _price(price: Price) -> PriceEntry:
    return PriceEntry(
        launch=price.launch,
        memory=price.memory,
        products=price.products,
        scalars=price.scalars,
        hidden=price.hidden,
        epilogue=price.epilogue,
        bound=price.bound,
    )


def _tuning(tuning: Tuning) -> TuningEntry:
    trials = [_trial(trial) for trial in tuning.trials]
    return TuningEntry(subject=tuning.subject, trials=trials, chosen=tuning.chosen, reason=tuning.reason)


def _trial(trial: Trial) -> TrialEntry:
    predicted = trial.predicted if math.isfinite(trial.predicted) else None
    return TrialEntry(name=trial.name, predicted=predicted, measured=trial.measured, refused=trial.refused)


def _pass(each: PassTime) -> PassEntry:
    change = each.change
    return PassEntry(
        stage=each.stage,
        name=each.name,
        milliseconds=each.seconds * 1e3,
        changed=True if change else each.changed,
        added=_names(change.added),
        removed=_names(change.removed),
        edited=_names(change.edited),
    )


def _names(names: Sequence[str]) -> CountedNames:
    return CountedNames(count=len(names), names=list(names[:MOST_NAMES]))


__all__ = ["document_of"]
