"""Records the launches of a compiled graph as a CUDA graph, which one call replays later.

Input: a compiled graph with its ATen graph; output: a callable that records and replays it by PyTorch's own
`torch._inductor.cudagraph_trees`, as `torch.compile(mode="reduce-overhead")` does: one memory pool for all graphs of a
device, one recording for each set of sizes, inputs copied into memory of the recording unless they are parameters,
buffers, or results of another recording.  So results are valid until the next step begins.

Refused, with a reason: operations that wait for the device, data-dependent sizes, tensors on the CPU, inputs that are
changed in place and may be elsewhere at the next call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import fx
from torch._guards import TracingContext
from torch._ops import OpOverload

from fusion.lowering.ir.program import Extern, writes
from fusion.lowering.random.seeded import seeded
from fusion.runtime import Boxed
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall

aten = torch.ops.aten

_REBINDING = frozenset(
    (
        aten.set_.default,
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor,
        aten.set_.source_Tensor_storage_offset,
    )
)


class Trees(Protocol):
    """Records CUDA graphs by TorchInductor, as `cudagraph_trees.py` does."""

    def unrecordable(self, graph: fx.GraphModule) -> fx.Node | None:
        """Return the first node that waits for the device, or has a data-dependent size."""

    def saved_inputs(self, backward: fx.GraphModule) -> list[int]:
        """Return the inputs of a backward graph that its forward has saved."""

    def recorded(
        self,
        compiled: Boxed,
        graph: fx.GraphModule,
        label: str,
        device: int,
        *,
        fixed: Sequence[int],
        changed: Sequence[int],
        constants: Sequence[torch.Tensor],
    ) -> Boxed:
        """Return a callable that records a compiled graph, and replays it."""

    def on_its_stream(self, recorded: Boxed, device: int) -> Boxed:
        """Return a callable that runs a recording on the stream of recordings."""

    def announced(self, compiled: Boxed, device: int) -> Boxed:
        """Return a backward that is not recorded, and announces when it runs."""


def _trees() -> Trees:
    """Load TorchInductor, which takes seconds that only recorded graphs are to cost."""
    return cast(Trees, import_module("fusion.runtime.cudagraph_trees"))


class Recorder:
    """Records the graphs of one captured region: forward, and the backward that follows it, or an inference graph."""

    def __init__(self) -> None:
        self._device: int | None = None  # on which forward was recorded

    def record(self, compiled: Boxed, graph: fx.GraphModule, schedule: Schedule, label: str) -> tuple[Boxed, str]:
        """Return a replacement for `compiled`, and a note whether it is recorded.

        Must be called in the tracing context of the region.  `compiled` computes `graph`, and runs `schedule`.
        """
        backward = label == "backward"
        reason = "its forward is not"
        if not backward or self._device is not None:
            reason = refusal(graph, schedule, backward=backward)
        if reason:
            unrecorded = compiled if self._device is None else _trees().announced(compiled, self._device)
            return unrecorded, f"not recorded as a CUDA graph: {reason}"
        device = _devices(schedule)[0].index
        assert device is not None, "a graph's tensors are on a device with a number"
        if label == "forward":
            self._device = device
        return _recorded(compiled, graph, label, device), "recorded as a CUDA graph"


def refusal(graph: fx.GraphModule, schedule: Schedule, *, backward: bool) -> str:
    """Return why `graph`, run by `schedule`, cannot be recorded; empty if it can."""
    devices = _devices(schedule)
    others = [device for device in devices if device.type != "cuda"]
    if others:
        return f"it has tensors on {others[0]}"
    if len(devices) != 1:
        return f"it has tensors on {' and '.join(map(str, devices)) or 'no device'}"
    inputs = graph.graph.find_nodes(op="placeholder")
    if any(not isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt, int)) for node in inputs):
        return "an input is neither a tensor nor a size"
    moved = next((node for node in graph.graph.nodes if node.target in _REBINDING), None)
    if moved is not None:
        return f"{moved.target} gives an input other memory"
    changed = sorted(_changed(graph) - set(_fixed(graph, backward=backward)))
    if changed:
        return f"it changes its input {inputs[changed[0]].name} in place, which may lie elsewhere at the next call"
    called = next((step for step in schedule.steps if isinstance(step, Extern) and step.target is seeded), None)
    if called is not None:
        return f"{called.args[0]} draws from a seed that the host reads"
    node = _trees().unrecordable(graph)
    return "" if node is None else f"{node.target} waits for the device, or has a size that only data tell"


def forget_recordings() -> None:
    """Free the memory of all recordings of this process, by any compiler; none of them may run again."""
    if "torch._inductor.cudagraph_trees" in sys.modules:
        sys.modules["torch._inductor.cudagraph_trees"].reset_cudagraph_trees()


def _recorded(compiled: Boxed, graph: fx.GraphModule, label: str, device: int) -> Boxed:
    trees, changed = _trees(), sorted(_changed(graph))
    fixed, constants = _fixed(graph, backward=label == "backward"), list(_constants(graph))
    recorded = trees.recorded(compiled, graph, label, device, fixed=fixed, changed=changed, constants=constants)
    return trees.on_its_stream(recorded, device) if draws(graph) else recorded


def _fixed(graph: fx.GraphModule, *, backward: bool) -> list[int]:
    """Return the inputs with fixed addresses, or whose move is detected.

    For a forward graph these are parameters, buffers, and tensors that the user marked as static; for a backward graph
    the tensors saved by its forward, which is recorded too.
    """
    if backward:
        return _trees().saved_inputs(graph)
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    return [] if known is None else list(known.static_input_indices or ())


def draws(graph: fx.GraphModule) -> bool:
    """Return whether a call of `graph`, or of a graph that it calls, draws from a generator."""
    parts = (part for part in graph.modules() if isinstance(part, fx.GraphModule))
    targets = (node.target for part in parts for node in part.graph.nodes)
    return any(isinstance(each, OpOverload) and torch.Tag.nondeterministic_seeded in each.tags for each in targets)


def _devices(schedule: Schedule) -> list[torch.device]:
    """Return the devices of all inputs, intermediate tensors and results, in order of appearance."""
    program = schedule.program
    names = [name for name in program.inputs if isinstance(name, str)]
    for step in schedule.steps:
        names += step.buffers if isinstance(step, KernelCall) else (*step.reads, *writes(step))
    names += program.output_names()
    return list(dict.fromkeys(program.buffers[name].device for name in names))


def _changed(graph: fx.GraphModule) -> set[int]:
    """Return the inputs whose memory an operation writes to."""
    memory: dict[int, set[int]] = {}
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if isinstance(node.meta.get("val"), torch.Tensor):
            memory.setdefault(_memory(node), set()).add(position)
    written = (_memory(node) for node in _written(graph))
    return {position for place in written for position in memory.get(place, ())}


def _written(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the tensors that operations write to."""
    for node in graph.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                argument_value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
                parts = argument_value if isinstance(argument_value, (tuple, list)) else (argument_value,)
                yield from (part for part in parts if isinstance(part, fx.Node))


def _memory(node: fx.Node) -> int:
    """Return an identifier of a tensor's storage."""
    return int(node.meta["val"].untyped_storage()._cdata)


def _constants(graph: fx.GraphModule) -> Iterator[torch.Tensor]:
    """Yield the tensors that the graph holds."""
    for node in graph.graph.find_nodes(op="get_attr"):
        held = graph
        for name in str(node.target).split("."):
            held = getattr(held, name)
        if isinstance(held, torch.Tensor):
            yield held
