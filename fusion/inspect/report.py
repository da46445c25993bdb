"""Reports a compilation: kernels, externs, refusals and traffic, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from fusion.codegen.price import Price
from fusion.codegen.target import Target
from fusion.codegen.tuning import Tuning
from fusion.inspect.breaks import Break
from fusion.inspect.graphs import DeviceReport, OperationReport, Tensors, operations_of, tensors_of, traffic_of
from fusion.inspect.memory import held_by_nodes, held_by_steps
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import Origin, Unsupported
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Call, Extern, Program, memory_of
from fusion.lowering.printer import format_bytes
from fusion.runner.passes import PassTime
from fusion.schedule import Refusal, Schedule
from fusion.schedule.kernels import KernelCall
from fusion.schedule.kernels.time import kernel_price

FAR_OFF = 2.0
"""The ratio of measured and predicted time, or its inverse, above which a report names a kernel."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts the bytes that one run moves, if every launch or call reads and writes each of its tensors once.

    Attributes:
        read: bytes read from memory.
        written: bytes written to memory.
    """

    read: int
    written: int

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Describes one launch of a generated kernel.

    Attributes:
        name: the name of the kernel, composed of its operations.
        source: its source in the language of the target.
        target: the name of the target: "c", "triton" or "reference".
        origins: the operations that it computes, with module and line of the program.
        bytes_read: bytes that one run reads from memory.
        bytes_written: bytes that one run writes to memory.
        flops: arithmetic of one run, counted in additions: an exponential is several, a multiply-add of a product two.
        predicted: the predicted microseconds of one run, launch included; None if the price does not know the kernel.
        measured: the measured microseconds (`explain(..., measure=True)`), else None.
        price: the predicted time by part.
        kernel: the block program.
        place: the tensors that it takes and makes, and its position among the steps of the graph.
    """

    name: str
    source: str
    target: str
    origins: tuple[Origin, ...]
    bytes_read: int
    bytes_written: int
    flops: int
    predicted: float | None = None
    measured: float | None = None
    price: Price | None = field(default=None, repr=False)
    kernel: Kernel | None = field(default=None, repr=False)
    place: Tensors = field(default=Tensors(), repr=False)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time; None where either is unknown."""
        return self.measured / self.predicted if self.measured and self.predicted else None

    @property
    def is_far_off(self) -> bool:
        """Whether the measured time differs from the predicted one by more than a factor of `FAR_OFF`."""
        return self.ratio is not None and not 1 / FAR_OFF <= self.ratio <= FAR_OFF


@dataclass(frozen=True, slots=True)
class ExternReport:
    """Describes one call that was left to PyTorch.

    Attributes:
        name: the operation, such as "aten.mm.default".
        reason: why no kernel computes it; empty where it has no rule.
        origin: module and line of the program.
        measured: the measured microseconds (`explain(..., measure=True)`); else None, also for operations outside ATen,
            which may have effects.
        traffic: the bytes that it moves.
        place: the tensors that it takes and makes, and its position among the steps of the graph.
    """

    name: str
    reason: str
    origin: Origin
    measured: float | None = None
    traffic: Traffic = field(default=Traffic(0, 0), repr=False)
    place: Tensors = field(default=Tensors(), repr=False)


@dataclass(frozen=True, slots=True)
class Report:
    """Describes how one ATen graph was compiled.

    Attributes:
        label: "forward", "backward" or "inference"; "captured" or "called" of a region that runs eagerly;
            "forward_body" of a graph that control flow calls in forward.
        operations: the number of pointwise, reduction and contraction nodes of the lowered graph.
        kernels: the launches of generated kernels, in order.
        externs: the calls that were left to PyTorch, in order.
        refusals: the data edges that were not fused, with reason and cost.
        traffic_before: the bytes that the operations would move, each by itself.
        traffic_after: the bytes that kernels and calls move.
        failure: why the whole region runs eagerly; empty if it was compiled.
        notes: decisions about the graph as a whole: chunks, attention, the cache, recording.
        graph_break: why the program's next operations are in another graph, or in none; None where the program ends.
        tunings: the predicted times of each product's alternatives; under `mode="max-autotune"` the measured ones, and
            the configurations that were tried for each kernel.
        passes: the time of each pass of its compilation, in this process; for the first graph of a region with the
            passes of the region before autograd.
        lowered: the operations of the lowered graph, before any fusion.
        device: the device's figures behind predicted times; None for a region that runs eagerly.
        memory_before: bytes of results and intermediate tensors, while each operation of the lowered graph runs.
        memory_after: the same of the launches and calls; symbolic sizes count as traced.
    """

    label: str
    operations: int
    kernels: tuple[KernelReport, ...]
    externs: tuple[ExternReport, ...]
    refusals: tuple[Refusal, ...]
    traffic_before: Traffic
    traffic_after: Traffic
    failure: str = ""
    notes: tuple[str, ...] = ()
    tunings: tuple[Tuning, ...] = ()
    graph_break: Break | None = None
    passes: tuple[PassTime, ...] = field(default=(), compare=False)
    lowered: tuple[OperationReport, ...] = field(default=(), repr=False)
    device: DeviceReport | None = field(default=None, repr=False)
    memory_before: tuple[int, ...] = field(default=(), repr=False)
    memory_after: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls,
        label: str,
        lowered: Program,
        schedule: Schedule,
        sources: Mapping[Kernel, str],
        target: Target,
        hints: Mapping[sympy.Symbol, int],
    ) -> Report:
        """Build the report of a compiled graph: `lowered` before any pass, `schedule` after all."""
        kernels: list[KernelReport] = []
        externs: list[ExternReport] = []
        notes: list[str] = []
        after = Traffic(0, 0)
        prefixes = {id(part): f"chunk {number}: " if number else "" for number, part in enumerate(_schedules(schedule))}
        memory = {id(part): memory_of(part.program.nodes) for part in _schedules(schedule)}
        for number, (part, step, runs) in enumerate(steps_of(schedule)):
            place = tensors_of(memory[id(part)], step, number, runs, prefixes[id(part)])
            if isinstance(step, KernelCall):
                kernels.append(_kernel_report(step, sources[step.kernel], target, place))
                after += Traffic(kernels[-1].bytes_read, kernels[-1].bytes_written)
                continue
            if isinstance(step, Chunked):
                notes.append(f"in chunks: {step.reason}")
                continue
            read, written = traffic_of(part.program, step, hints)
            traffic = Traffic(read * runs, written * runs)
            after += traffic
            if not step.is_view:
                out = next((name for name in step.outs if name is not None), "")
                origin = part.program.origins.get(out, lowered.origins.get(out, Origin(out)))
                externs.append(ExternReport(step.name, step.reason, origin, traffic=traffic, place=place))
        described = tuple(operations_of(lowered, hints))
        before = sum((Traffic(each.bytes_read, each.bytes_written) for each in described), Traffic(0, 0))
        operations = sum(not isinstance(node, (Extern, Chunked)) for node in lowered.nodes)
        refusals = tuple(refusal for part in _schedules(schedule) for refusal in part.refusals)
        choices = dict.fromkeys(choice for part in _schedules(schedule) for choice in part.choices)
        parts = tuple(kernels), tuple(externs), refusals, before, after
        report = cls(label, operations, *parts, notes=tuple(notes), tunings=tuple(choices))
        held = held_by_nodes(lowered, hints), held_by_steps(schedule.program, schedule.steps, hints)
        device = DeviceReport.of(target)
        return replace(report, lowered=described, device=device, memory_before=held[0], memory_after=held[1])

    @classmethod
    def eager(cls, label: str, graph: fx.GraphModule, failure: Exception) -> Report:
        """Build the report of a region that could not be compiled: every operation is an extern."""
        cause = _cause(failure)
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        externs = tuple(ExternReport(str(node.target), cause, origin_of(node)) for node in calls)
        return cls(label, 0, (), externs, (), Traffic(0, 0), Traffic(0, 0), cause)

    @classmethod
    def of_parts(cls, uncompiled: Mapping[fx.Node, Exception]) -> Report:
        """Build the report of a region that is compiled in parts, around operations that run eagerly, with the cause.

        Each part has its own reports, once it is called.
        """
        externs = tuple(
            ExternReport(getattr(node.target, "__name__", str(node.target)), _cause(cause), origin_of(node))
            for node, cause in uncompiled.items()
        )
        note = f"compiled in parts, around {_count(len(uncompiled), 'operation')}"
        return cls("captured", 0, (), externs, (), Traffic(0, 0), Traffic(0, 0), notes=(note,))

    def __str__(self) -> str:
        if self.failure:
            return "\n".join([f"{self.label}: eager ({self.failure})", *self._end()])
        lines = [
            f"{self.label}: {_count(self.operations, 'operation')} in {_count(len(self.kernels), 'kernel')}, "
            f"{_count(len(self.externs), 'extern call')}; "
            f"{format_bytes(self.traffic_before.total)} moved before, {format_bytes(self.traffic_after.total)} after"
        ]
        lines += [f"  {note}" for note in self.notes]
        for kernel in self.kernels:
            read, written = format_bytes(kernel.bytes_read), format_bytes(kernel.bytes_written)
            done = _count(len(kernel.origins), "operation")
            lines.append(f"  kernel {kernel.name}: reads {read}, writes {written}, {done}{_times(kernel)}")
        lines += [f"  {line}" for tuning in self.tunings for line in str(tuning).splitlines()]
        for extern in self.externs:
            measured = "" if extern.measured is None else f"; measured {extern.measured:.1f} µs"
            lines.append(f"  extern {extern.name}: {extern.reason or 'no rule'}; {extern.origin}{measured}")
        for refusal in sorted(self.refusals, key=lambda r: -r.bytes):
            lines.append(f"  not fused {refusal}")
        lines += [f"  off by {_off_by(kernel):.1f}x: kernel {kernel.name}{_times(kernel)}" for kernel in self.far_off]
        return "\n".join([*lines, *self._end()])

    @property
    def far_off(self) -> tuple[KernelReport, ...]:
        """The kernels whose measured time is far from the predicted one (`FAR_OFF`), the farthest first."""
        return farthest_first(self.kernels)

    def _end(self) -> list[str]:
        return [] if self.graph_break is None else [f"  {self.graph_break}"]


def farthest_first(kernels: Sequence[KernelReport]) -> tuple[KernelReport, ...]:
    """Return the kernels whose measured time is far from the predicted one, the farthest first."""
    return tuple(sorted((kernel for kernel in kernels if kernel.is_far_off), key=_off_by, reverse=True))


def _off_by(kernel: KernelReport) -> float:
    """Return the larger of a kernel's measured and predicted time over the smaller one."""
    ratio = kernel.ratio or 1.0
    return max(ratio, 1 / ratio)


def _times(kernel: KernelReport) -> str:
    """Return both times of a measured kernel, as the end of a line."""
    if kernel.measured is None:
        return ""
    predicted = "no price" if kernel.predicted is None else f"predicted {kernel.predicted:.1f} µs"
    return f", {predicted}, measured {kernel.measured:.1f} µs"


def _cause(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def _schedules(schedule: Schedule) -> Iterator[Schedule]:
    """Yield a schedule and the schedules of the bodies that it calls."""
    yield schedule
    for bodies in schedule.bodies.values():
        for body in bodies:
            yield from _schedules(body)


def steps_of(schedule: Schedule, runs: int = 1) -> Iterator[tuple[Schedule, KernelCall | Call, int]]:
    """Yield every step with its schedule and how often it runs."""
    for step in schedule.steps:
        yield schedule, step, runs
        if isinstance(step, Chunked):
            numbers = [body for _, _, body in step.starts(step.traced)]
            for number, body in enumerate(schedule.bodies[step]):
                yield from steps_of(body, runs * numbers.count(number))


def _kernel_report(call: KernelCall, source: str, target: Target, place: Tensors) -> KernelReport:
    """Return the report of a launch that runs `place.runs` times."""
    price, runs = _price(call, target), place.runs
    named = call.kernel.name, source, target.name, call.origins
    work = call.bytes_read * runs, call.bytes_written * runs, call.flops * runs
    predicted = None if price is None else price.total * runs
    return KernelReport(*named, *work, predicted, price=price, kernel=call.kernel, place=place)


def _price(call: KernelCall, target: Target) -> Price | None:
    """Return the predicted time of one launch; None if it has no price."""
    try:
        return kernel_price(call, target)
    except (TypeError, Unsupported, ValueError):  # attention in a dtype without a speed; a size that depends on data
        return None


def _count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> _count(1, "kernel"), _count(3, "kernel")
    ('1 kernel', '3 kernels')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
