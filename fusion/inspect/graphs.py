"""Describes graphs for reports: the operations of a lowered program, the tensors that each step reads and writes, and
the device.

Input: a Program, the steps of a schedule, a target; output: plain data, which is kept with the report in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy

from fusion.codegen.price import along
from fusion.codegen.target import Target
from fusion.lowering.errors import Origin
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.kernel import only_stored
from fusion.lowering.ir.program import Contract, Extern, Node, Program, Reduce, Scan, reads, writes
from fusion.lowering.printer import format_nodes
from fusion.schedule import Step
from fusion.schedule.iteration.dependences import bytes_of
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import makes


@dataclass(frozen=True, slots=True)
class OperationReport:
    """Describes a node of the lowered program.

    Attributes:
        kind: "map", "reduce", "scan", "contract", "scatter", "extern", "chunked", or "view", which moves nothing.
        text: the node as it is printed.
        reads: the tensors that it reads.
        writes: the tensors that it computes.
        origin: the operation, with module and line of the program.
        bytes_read: bytes that it reads if it runs by itself.
        bytes_written: bytes that it writes.
        fold: the fold of a reduction or a scan, "dot" of a contraction; else empty.
    """

    kind: str
    text: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    origin: Origin
    bytes_read: int
    bytes_written: int
    fold: str = ""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The figures of the device from which the times of a report are predicted, in bytes and additions per microsecond.

    Attributes:
        name: the machine, as the first line of the target's identity names it.
        launch_us: microseconds of a launch.
        bandwidth: bytes that a launch touches → bytes per microsecond, ascending; one entry if it does not vary.
        flops: scalar operations.
        matrix_flops: operations of the library's GEMMs of 16-bit operands.
        matrix_shares: bytes of an operand's element → the relative speed of GEMMs.
    """

    name: str
    launch_us: float
    bandwidth: tuple[tuple[float, float], ...]
    flops: float
    matrix_flops: float
    matrix_shares: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, target: Target) -> DeviceReport:
        """Describe the device of a target."""
        rates = target.capabilities.rates
        curve = rates.bandwidth if isinstance(rates.bandwidth, tuple) else ((1.0, rates.bandwidth),)
        shares = tuple(sorted(rates.matrix_share.items()))
        name = target.identity.partition("\n")[0].rpartition(": ")[2]  # "model name\t: AMD EPYC"
        return cls(name, rates.launch_us, curve, rates.flops, rates.matrix_flops, shares)

    def allows(self, moved: int, operations: int) -> float:
        """Return the microseconds of the roofline: in which these bytes are moved, and these operations computed."""
        return max(moved / along(self.bandwidth, moved), operations / self.matrix_flops) if moved else 0.0


@dataclass(frozen=True, slots=True)
class Tensors:
    """The position of a step in its graph, and its tensors.

    Attributes:
        step: its position among the launches and calls of the graph.
        runs: how often it runs in a call of the graph: more than once inside chunks.
        reads: the tensors that it takes; views have the names of the tensors whose memory they share.
        writes: the tensors that it creates or changes.
        params: for each parameter of a kernel, its argument.
    """

    step: int = 0
    runs: int = 1
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    params: tuple[str, ...] = ()


def operations_of(program: Program, hints: Mapping[sympy.Symbol, int]) -> Iterator[OperationReport]:
    """Yield a description of each node."""
    for node, text in zip(program.nodes, format_nodes(program), strict=True):
        outs = writes(node)
        origin = next((program.origins[name] for name in outs if name in program.origins), Origin(_label(node)))
        moved = traffic_of(program, node, hints)
        yield OperationReport(_kind(node), text, reads(node), outs, origin, *moved, _fold(node))


def traffic_of(program: Program, node: Node, hints: Mapping[sympy.Symbol, int]) -> tuple[int, int]:
    """Return the bytes that a node reads and writes if it runs by itself."""
    if isinstance(node, Extern) and node.is_view:
        return 0, 0
    read, written = (sum(bytes_of(program.buffers[name], hints) for name in of(node)) for of in (reads, writes))
    return read, written


def tensors_of(memory: Mapping[str, str], step: Step, number: int, runs: int, prefix: str = "") -> Tensors:
    """Return the place of a step.

    Args:
        memory: the base of each view (`program.memory_of`).
        prefix: goes before the names of tensors, inside chunks.
    """

    def named(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(prefix + memory.get(name, name) for name in names))

    if not isinstance(step, KernelCall):
        return Tensors(number, runs, named(step.reads), named(makes(step)))
    unread = only_stored(step.kernel)
    pairs = zip(step.kernel.params, step.buffers, strict=True)
    taken = tuple(name for param, name in pairs if param.name not in unread)
    return Tensors(number, runs, named(taken), named(makes(step)), tuple(prefix + name for name in step.buffers))


def _kind(node: Node) -> str:
    return "view" if isinstance(node, Extern) and node.is_view else type(node).__name__.lower()


def _fold(node: Node) -> str:
    if isinstance(node, (Reduce, Scan)):
        return node.op
    return "dot" if isinstance(node, Contract) else ""


def _label(node: Node) -> str:
    return node.name if isinstance(node, (Extern, Chunked)) else node.out


__all__ = ["DeviceReport", "OperationReport", "Tensors", "operations_of", "tensors_of", "traffic_of"]
