"""Shows each kernel to a profiler, by its name and the first of the program's lines that it computes.

While `torch.profiler`, or `torch.autograd.profiler.emit_nvtx`, observes the process, launches run within ranges of
`record_function`; kernels of a CPU are not visible otherwise, and ranges are NVTX ranges under `emit_nvtx`.  Without a
profiler a call costs one look at PyTorch's flag.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from torch import fx
from torch.autograd import profiler

from fusion.runtime import Boxed
from fusion.runtime.splice import LAUNCH
from fusion.schedule.kernels import KernelCall


def while_profiled(compiled: Boxed, in_ranges: Callable[[], Boxed]) -> Boxed:
    """Return a callable that runs `compiled`, or, under a profiler, the result of `in_ranges`, which is called once."""
    named: list[Boxed] = []

    def run(args: list[object]) -> tuple[object, ...]:
        if not profiler._is_profiler_enabled:
            return compiled(args)
        if not named:
            named.append(in_ranges())
        return named[0](args)

    return run


def in_ranges(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a spliced module whose launches are in ranges of `record_function`."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(module.graph._codegen)
    for node in graph.nodes:
        if LAUNCH in node.meta and callable(node.target):
            node.target = _in_range(node.target, launch_name(node.meta[LAUNCH]))
    return fx.GraphModule(module, graph)


def _in_range(run: Callable[..., object], name: str) -> Callable[..., object]:
    @wraps(run)
    def ranged(*args: object) -> object:
        with profiler.record_function(name):
            return run(*args)

    return ranged


def launch_name(call: KernelCall) -> str:
    """Return the name of a launch for a profiler: "softmax_add (model.py:12)"."""
    place = next((origin.place for origin in call.origins if origin.place), "")
    return f"{call.kernel.name} ({place})" if place else call.kernel.name
