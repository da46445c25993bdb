"""Packs independent kernels into one launch, each on separate programs (horizontal fusion).

The leaves of an optimizer step, the queries, keys and values of a layer with grouped heads, a weight gradient and a
bias gradient: independent kernels over different axes.  `growth.py` merges small pointwise work over equal axes into
one body; here bodies stay separate, and the launch is saved, with the idle time between the end of one kernel and the
start of the next one.

Input: steps in order; output: fewer steps, in an order that respects their dependences.  Two kernels are packed if no
path leads from one to the other, if the target says that they need about the same resources, and if a launch costs more
than sharing may slow them down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import networkx as nx

from fusion.codegen.build import is_idle
from fusion.codegen.target import Capabilities, Target
from fusion.lowering.ir.kernel import Fold, Kernel, statements
from fusion.lowering.ir.program import Call, Extern, Program
from fusion.schedule.clusters.profit import EARLY
from fusion.schedule.iteration.dependences import bytes_of
from fusion.schedule.iteration.naming import limited
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import makes, share, takes

WINDOW = 64
"""How many steps apart kernels with small results may be: early results occupy memory until they are needed."""

MOST_KERNELS = 16
"""Kernels in one launch.  More save little and make one long compilation."""

MOST_STEPS_APART = 8
"""The number of steps that kernels may be apart without regard to the size of their results, which are needed soon."""

OPEN = 8
"""How many launches of other kinds a kernel is compared with."""


def pack_launches(
    steps: Sequence[KernelCall | Call], program: Program, target: Target
) -> tuple[KernelCall | Call, ...]:
    """Pack independent kernels into shared launches; the order is unchanged if nothing is packed.

    >>> from fusion.inspect.examples import TARGET, show_launches
    >>> from torch import empty
    >>> show_launches(
    ...     lambda steps, program: pack_launches(steps, program, TARGET),
    ...     lambda x, y: (x.sum(-1), y.sum(-1)),
    ...     empty(300, 70),
    ...     empty(200, 50),
    ... )
    - launch sum(x, sum_1)
    + launch sum_x2(x, sum_1, y, sum_2)
    - launch sum(y, sum_2)
    """
    return _Packing(steps, program, target).run()


@dataclass(slots=True)
class _Packing:
    """The state of one packing: the steps, and their dependences."""

    steps: Sequence[KernelCall | Call]
    program: Program
    target: Target
    graph: nx.DiGraph[int] = field(default_factory=nx.DiGraph)
    calls: dict[int, KernelCall] = field(default_factory=dict)  # position of its first kernel → the launch

    def run(self) -> tuple[KernelCall | Call, ...]:
        self._order()
        self.calls = {number: step for number, step in enumerate(self.steps) if isinstance(step, KernelCall)}
        open_launches: deque[int] = deque(maxlen=OPEN)
        for number, call in list(self.calls.items()):
            if is_idle(call.kernel):  # never launched: there is no block size to choose
                continue
            host = next((h for h in open_launches if number - h <= WINDOW and self._fits(h, number)), None)
            if host is None:
                if call.kernel.then is None:
                    open_launches.appendleft(number)
                continue
            self._merge(host, number)
        order = nx.lexicographical_topological_sort(self.graph)
        return tuple(self.calls.get(number, self.steps[number]) for number in order)

    def _order(self) -> None:
        """Add edges from writers to readers; an impure step keeps its position among all steps."""
        ready: dict[str, int] = {}
        fence: int | None = None
        for number, step in enumerate(self.steps):
            self.graph.add_node(number)
            for name in takes(step):
                if name in ready:
                    self.graph.add_edge(ready[name], number)
            if fence is not None:
                self.graph.add_edge(fence, number)
            if isinstance(step, Extern) and step.impure:
                self.graph.add_edges_from((before, number) for before in range(fence or 0, number))
                fence = number
            ready.update(dict.fromkeys(makes(step), number))

    def _fits(self, host: int, number: int) -> bool:
        first, second = self.calls[host], self.calls[number]
        if second.kernel.then is not None or len(first.kernel.beside) + 2 > MOST_KERNELS:
            return False
        if self._device(first) != self._device(second):
            return False
        if number - host > MOST_STEPS_APART and self._bytes_held(second) > EARLY:
            return False
        capabilities = self.target.capabilities
        if len({*first.buffers, *second.buffers}) > capabilities.max_params:
            return False
        if capabilities.rates.launch_us < capabilities.crowding * (
            _time(first, capabilities) + _time(second, capabilities)
        ):
            return False
        # Predecessors of the host run before the kernels in it, and these before this one: no path leads back.
        if nx.has_path(self.graph, host, number):
            return False
        return self.target.can_share_launch(first.kernel.parts[0], second.kernel)

    def _bytes_held(self, call: KernelCall) -> int:
        """Return the bytes that are live from this call on, without inputs and constants."""
        external = {*self.program.inputs, *self.program.constants}
        allocated = {*call.written, *call.over.values()} - external
        return sum(bytes_of(self.program.buffers[name], {}) for name in allocated)

    def _device(self, call: KernelCall) -> object:
        return self.program.buffers[next(iter((*call.written, *call.over)))].device

    def _merge(self, host: int, number: int) -> None:
        self.calls[host] = _packed(self.calls[host], self.calls.pop(number))
        self.graph.add_edges_from((before, host) for before in self.graph.predecessors(number))
        self.graph.add_edges_from((host, after) for after in self.graph.successors(number))
        self.graph.remove_node(number)


def _packed(first: KernelCall, second: KernelCall) -> KernelCall:
    call, kernel = share(first, second)
    beside = (*first.kernel.beside, kernel)
    return replace(call, kernel=replace(call.kernel, name=limited(_name(first.kernel, second.kernel)), beside=beside))


def _name(first: Kernel, second: Kernel) -> str:
    """Name a packed launch: `matmul_matmul`; many kernels of one name with their number: `mul_add_x12`."""
    if not first.beside:
        return f"{first.name}_x2" if first.name == second.name else f"{first.name}_{second.name}"
    stem, _, count = first.name.rpartition("_x")
    if stem == second.name and count.isdigit():
        return f"{stem}_x{int(count) + 1}"
    return f"{first.name}_{second.name}" if len(first.beside) < 3 else first.name


def _time(call: KernelCall, capabilities: Capabilities) -> float:
    """Return the microseconds of a launch that packing may lengthen; 0 for contractions, which lose nothing."""
    if any(isinstance(stmt, Fold) and stmt.op == "dot" for stmt in statements(call.kernel.body)):
        return 0.0
    rates = capabilities.rates
    return rates.price(call.moved, scalars=rates.scalar_us(call.flops)).busy


__all__ = ["pack_launches"]
