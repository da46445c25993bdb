"""Predicts the time of attention: as a kernel of the library, and as generated kernels.

The library's time is the arithmetic of its GEMMs at the target's efficiency of that kernel, relative to the library's
GEMMs; where PyTorch has no kernel for the call, that of its GEMMs, and of the trips of the scores through memory.
Generated kernels are generated up to their source: the call alone is traced, partitioned and scheduled as it
would be in its graph.  Each kernel takes the maximum of its traffic and its GEMMs, at the target's efficiency of
attention kernels, without the tiles that it skips.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.attention.call import Call
from fusion.autograd import aot_backend
from fusion.codegen.chained import FORWARD, Chain, Loop
from fusion.codegen.target import Capabilities, Target
from fusion.codegen.targets import DEFAULTS
from fusion.compile import schedule_graph
from fusion.inspect.trace import Trace
from fusion.lowering.chunks import Chunked
from fusion.lowering.errors import Unsupported
from fusion.lowering.program import writes
from fusion.runtime import Boxed
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall
from fusion.schedule.kernels.time import BLOCK, kernel_time

BACKWARD, AGAIN = 5, 7
"""GEMMs of backward in one kernel, and in two kernels, which both compute the scores."""

KERNELS = (
    ("_flash_attention_for_cpu", "flash"),
    ("_flash_attention", "flash"),
    ("_efficient_attention", "efficient"),
    ("_cudnn_attention", "cudnn"),
)
"""Part of the name of an operation → the library's kernel."""


def library_kernel(call: Call, target: Target) -> str:
    """Return the kernel that the library would run: "flash", "efficient", "cudnn", or "math" (decomposed).

    For a device that is not the target's, the library's choice is assumed by dtype and shape.
    """
    tensors = [*call.operands, *([] if call.mask is None else [call.mask])]
    if DEFAULTS.get(call.query.device.type) != target.name:
        half = call.query.dtype.itemsize == 2
        plain = half and call.mask is None and call.widths[0] == call.widths[1]
        apart = any(x.shape[-1] != 1 and x.stride(-1) != 1 for x in tensors)
        return "math" if call.query.dim() != 4 or apart else "flash" if plain else "efficient"

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **call.options)  # type: ignore[arg-type]  # as the call had them

    graph = make_fx(whole)(*tensors)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return next((kernel for part, kernel in KERNELS if any(part in name for name in names)), "math")


def library_time(call: Call, kernel: str, target: Target) -> float:
    """Return the microseconds of the library's kernel, with backward in training.

    Raises:
        Unsupported: the target has no efficiency for it.
    """
    capabilities = target.capabilities
    if kernel == "math":
        return sum(_math_time(call, capabilities, backward) for backward in (False, True)[: 1 + call.training])
    forward, backward = _shares(call, kernel, target)
    product = _product(call, capabilities)
    total = capabilities.launch_us + FORWARD * product / forward
    return total + (capabilities.launch_us + BACKWARD * product / backward if call.training else 0.0)


def _math_time(call: Call, capabilities: Capabilities, backward: bool) -> float:
    """Return the microseconds of either direction where the scores are in memory, in float32 or wider.

    Forward writes the scores, reads and writes them in one kernel for softmax, and reads them again.
    """
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]  # torch
    dtype = call.query.dtype if reduced else torch.promote_types(call.query.dtype, torch.float32)
    products, trips = (BACKWARD - 1, 7) if backward else (FORWARD, 4)
    multiplied = products * call.scores * sum(call.widths) / _rate(dtype, capabilities)
    moved = trips * call.scores * dtype.itemsize / capabilities.bandwidth
    return (products + 1) * capabilities.launch_us + multiplied + moved


def least_time(call: Call, target: Target) -> float:
    """Return a lower bound of the microseconds of generated kernels; 0 if a computed mask may make them skip tiles.

    Raises:
        Unsupported: the target has no efficiency for them.
    """
    capabilities = target.capabilities
    forward, backward = _shares(call, "", target)
    if call.computes_mask:
        return 0.0
    product = _product(call, capabilities)
    total = capabilities.launch_us + FORWARD * product / forward
    return total + (2 * capabilities.launch_us + AGAIN * product / backward if call.training else 0.0)


def _shares(call: Call, kernel: str, target: Target) -> tuple[float, float]:
    """Return the efficiencies of forward and backward of a call in a kernel, relative to the library's GEMMs.

    `kernel`: the library's kernel, or empty for generated ones.
    """
    loop: Loop = "masked" if call.mask is not None else "skipping" if call.is_causal else "plain"
    columns = call.columns * _causal(call)
    chain = Chain(call.query.dtype, max(call.widths), (loop,), columns, backward=False)
    return target.chained_share(chain, kernel), target.chained_share(replace(chain, backward=True), kernel)


def _product(call: Call, capabilities: Capabilities) -> float:
    """Return the microseconds of half the arithmetic of forward, at the speed of the library's GEMMs."""
    return call.scores * sum(call.widths) * _causal(call) / _rate(call.query.dtype, capabilities)


def _rate(dtype: torch.dtype, capabilities: Capabilities) -> float:
    """Return the operations per microsecond of the library's GEMMs."""
    return capabilities.matrix_flops * capabilities.matrix_share[dtype.itemsize]


def _causal(call: Call) -> float:
    """Return the share of the tiles that remain under `is_causal`."""
    if not call.is_causal:
        return 1.0
    rows, columns = (-(-size // BLOCK) for size in (call.rows, call.columns))
    return sum(min(row + 1, columns) for row in range(rows)) / (rows * columns)


def generated_time(call: Call, target: Target) -> float:
    """Return the microseconds of the kernels that would be generated for a decomposed call.

    Raises:
        Unsupported: the scores would be written to memory, or read from it by the library.
    """
    schedules: list[Schedule] = []

    def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
        _, schedule = schedule_graph(graph, target, Trace(None, label))
        schedules.append(schedule)
        return _never_run

    inputs = [x.detach().requires_grad_(x.requires_grad) for x in call.inputs]
    eager_backward = functorch_config.patch(
        force_non_lazy_backward_lowering=True
    )  # backward now, not when it is called
    plainly = torch.autocast(call.query.device.type, enabled=False)
    with tracing(None), eager_backward, plainly, torch.set_grad_enabled(call.training):
        aot_backend(compile_one, lambda device: target.capabilities)(call.graph, inputs)
    return sum(_time(schedule, target, call.scores) for schedule in schedules)


def _never_run(args: list[object]) -> tuple[object, ...]:
    raise AssertionError("a compilation for pricing does not run")


def _time(schedule: Schedule, target: Target, scores: int) -> float:
    total, buffers = 0.0, schedule.program.buffers
    for step in schedule.steps:
        if isinstance(step, KernelCall):
            total += kernel_time(step, target)
            touched, who = step.written, "what is generated would write"
        elif isinstance(step, Chunked) or not step.is_view:
            total += target.capabilities.launch_us
            touched, who = (*step.reads, *writes(step)), f"{step.name} would take"
        else:
            continue
        if any(buffers[name].numel >= scores for name in touched):
            raise Unsupported(f"{who} the scores whole")
    return total
