"""Completes a kernel: its parameters, its name, and the arguments of its call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from fusion.lowering.errors import Origin, by_place
from fusion.lowering.ir.expr import loads
from fusion.lowering.ir.kernel import (
    Kernel,
    KernelAxis,
    Param,
    Stmt,
    Store,
    rename,
    statements,
    values_of,
)
from fusion.lowering.ir.program import Buffer, Scatter
from fusion.lowering.ir.sizes import given_by
from fusion.schedule.clusters.alike import words_of
from fusion.schedule.clusters.expand import FLAT, Expanded
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.iteration.axes import indices_of
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.naming import limited
from fusion.schedule.kernels.bodies import offset_symbols


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch: the kernel, its buffers and sizes, and figures for the report.

    `written` are the buffers that it allocates; `over` maps other results to the operand whose memory they take;
    `excess` are the bytes of memory requests beyond the elements, also of those that a cache answers.
    """

    kernel: Kernel
    buffers: tuple[str, ...]
    written: tuple[str, ...]
    origins: tuple[Origin, ...]
    bytes_read: int
    bytes_written: int
    flops: int
    excess: int = 0
    over: Mapping[str, str] = field(default_factory=dict)

    @property
    def moved(self) -> int:
        """The bytes that count in the price of the launch."""
        return self.bytes_read + self.bytes_written + self.excess

    def renamed(self, names: Mapping[str, str], origins: tuple[Origin, ...]) -> KernelCall:
        """Return the call of the same kernel with other buffers, for the operations at `origins`."""
        return replace(
            self,
            kernel=replace(self.kernel, origins=by_place(origins)),
            buffers=tuple(names[name] for name in self.buffers),
            written=tuple(names[name] for name in self.written),
            origins=origins,
            over={names[out]: names[start] for out, start in self.over.items()},
        )


def finished(
    prices: Prices,
    cluster: Cluster,
    axes: tuple[KernelAxis, ...],
    body: tuple[Stmt, ...],
    expanded: Expanded,
) -> KernelCall:
    """Return the kernel with canonical parameters, and its call."""
    dependences = prices.dependences
    over = _destinations(dependences, cluster)
    written = tuple(dict.fromkeys(over.get(write.buffer, write.buffer) for write in expanded.writes))
    loaded = tuple(dict.fromkeys(load.buffer for stmt in statements(body) for load in loads(*values_of(stmt))))
    names = {name: f"in{k}" for k, name in enumerate(loaded)} | {name: f"out{k}" for k, name in enumerate(written)}
    buffers = (*(name.removeprefix(FLAT) for name in loaded), *written)
    origins = origins_of(dependences, cluster)
    sizes = _sizes(axes, body)
    kernel = Kernel(
        _name(dependences, cluster),
        _params(dependences, dict(zip(names.values(), buffers, strict=True)), written),
        sizes,
        axes,
        rename(body, {**names, **{out: names[start] for out, start in over.items()}}),
        traced=tuple((s, dependences.estimate(s)) for s in sizes if given_by(s) <= dependences.hints.keys()),
        origins=by_place(origins),
    )
    allocated = tuple(name for name in written if name not in over.values())
    traffic = prices.traffic(cluster)
    excess = prices.moved(cluster) - sum(traffic)
    return KernelCall(kernel, buffers, allocated, origins, *traffic, prices.flops(cluster), excess, over)


def origins_of(dependences: Dependences, cluster: Cluster) -> tuple[Origin, ...]:
    """Return the origins of all operations of a cluster, each once."""
    program = dependences.program
    names = (name for member in cluster.members for name in program.operations_of(dependences.compute(member).out))
    return tuple(dict.fromkeys(program.origins[name] for name in names))


def _params(dependences: Dependences, buffers_by_param: Mapping[str, str], written: Sequence[str]) -> tuple[Param, ...]:
    """Return the parameters of a kernel, given parameter name → buffer name."""
    program = dependences.program
    results = [program.buffers[name] for name in written]
    params = []
    for param, name in buffers_by_param.items():
        buffer, stored = program.buffers[name], name in written
        number = not stored and _is_host_number(buffer, results)
        later = stored and name in dependences.rounded_later
        params.append(
            Param(param, buffer.dtype, buffer.shape, buffer.strides, stored, number=number, rounded_later=later)
        )
    return tuple(params)


def _sizes(axes: Sequence[KernelAxis], body: Sequence[Stmt]) -> tuple[sympy.Symbol, ...]:
    """Return the size symbols of a kernel's axes and indices, sorted by name."""
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    used = {symbol for index in indices_of(roots) for symbol in index.free_symbols}
    used |= {symbol for stmt in statements(body, Store) for symbol in offset_symbols(stmt.offset)}
    used |= {symbol for axis in axes for symbol in axis.size.free_symbols}
    return tuple(sorted(used - {axis.symbol for axis in axes}, key=str))


def _is_host_number(buffer: Buffer, written: Sequence[Buffer]) -> bool:
    """Return whether this is a number on the host that is passed to a kernel of another device."""
    here = buffer.device.type == "cpu" and not buffer.shape
    return here and any(other.device != buffer.device for other in written)


def _destinations(dependences: Dependences, cluster: Cluster) -> dict[str, str]:
    """Return scattered results → the earlier tensor whose memory they take."""
    memory: dict[str, str] = {}
    for node in map(dependences.compute, cluster.members):
        if isinstance(node, Scatter):
            memory[node.out] = memory.get(node.start, node.start)
    return memory


def _name(dependences: Dependences, cluster: Cluster) -> str:
    """Join the operations inside, in order and each once: `addmm_gelu`, `amax_sub_exp_sum_div`."""
    words: dict[str, None] = {}
    for member in cluster.members:
        words.update(dict.fromkeys(words_of(dependences, member)))
    picked = list(words)
    if len(picked) > 5:
        picked = [*picked[:3], *picked[-2:]]
    return limited("_".join(picked))
