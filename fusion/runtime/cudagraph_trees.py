"""Records graphs by TorchInductor's CUDA graph trees (`torch._inductor.cudagraph_trees`).

Input: a compiled graph and facts about its ATen graph (`recording.py`); output: a callable that records and replays it.
Importing TorchInductor takes seconds, so `recording.py` loads this module once a graph is to be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx
from torch._inductor.compile_fx import cudagraphify
from torch._inductor.cudagraph_trees import get_manager
from torch._inductor.cudagraph_utils import get_placeholder_info
from torch._inductor.utils import count_tangents, get_first_incompatible_cudagraph_node

from fusion.runtime import Boxed


def unrecordable(graph: fx.GraphModule) -> fx.Node | None:
    """Return the first node that waits for the device, or has a size that only data tell; None if there is none."""
    return get_first_incompatible_cudagraph_node(graph)


def saved_inputs(backward: fx.GraphModule) -> list[int]:
    """Return the inputs of a backward graph that its forward has saved."""
    return list(range(count_tangents(backward)))


def recorded(
    compiled: Boxed,
    graph: fx.GraphModule,
    label: str,
    device: int,
    *,
    fixed: Sequence[int],
    changed: Sequence[int],
    constants: Sequence[torch.Tensor],
) -> Boxed:
    """Return a callable that records `compiled` at its first calls, and replays it.

    Args:
        fixed: the inputs with fixed addresses, or whose move is detected.
        changed: the inputs whose memory an operation writes to.
        constants: the tensors that the graph holds.
    """
    results = cast("Sequence[object]", graph.graph.output_node().args[0])
    run: Boxed = cudagraphify(
        compiled,
        fixed,
        device_index=device,
        stack_traces=[node.stack_trace if isinstance(node, fx.Node) else None for node in results],
        is_backward=label == "backward",
        is_inference=label == "inference",
        constants=tuple(constants),
        placeholders=tuple(get_placeholder_info(graph.graph)),
        mutated_input_idxs=tuple(changed),
    )
    return run


def on_its_stream(recorded: Boxed, device: int) -> Boxed:
    """Call `recorded` with the stream of the recordings as the current one, after the work before it.

    A recording begins by writing to the memory from which its replays take the generator's state, on its own stream.
    The first replay writes there too, on the current stream, without synchronisation: if the recording's write came
    last, the numbers were those of the first draw after seeding (PyTorch 2.11).
    """

    def run(args: list[object]) -> tuple[object, ...]:
        manager = get_manager(device)
        assert manager is not None, "the first call creates one"
        current = torch.cuda.current_stream(device)
        manager.stream.wait_stream(current)
        with torch.cuda.stream(manager.stream):
            results = recorded(args)
        current.wait_stream(manager.stream)
        return results

    return run


def announced(compiled: Boxed, device: int) -> Boxed:
    """Return a backward that is not recorded, and announces when it runs: its recorded forward waits for a backward."""

    def run(args: list[object]) -> tuple[object, ...]:
        manager = get_manager(device, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
        return compiled(args)

    return run


__all__ = ["announced", "on_its_stream", "recorded", "saved_inputs", "unrecordable"]
