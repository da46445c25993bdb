"""What attention is predicted to take: as a kernel of the library, and as what would be generated for its parts.

The library's time is the arithmetic of its products at the share of their speed that a target says its kernel reaches.
What would be generated is generated, up to its source: the call alone is traced, parted and scheduled as it would be in
its graph.  Each kernel takes the larger of its traffic and its products, these at the share that the target gives this
kernel, less the blocks that it skips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy
import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx

from codegen.target import AttentionSpeed, Capabilities, Shares, Target
from codegen.targets import DEFAULTS
from fusion.attention.call import Call
from fusion.capture import aot_backend
from fusion.compile import schedule_graph
from fusion.inspect.trace import Trace
from fusion.runtime import Boxed
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall
from lowering.errors import Unsupported
from lowering.evaluate import Scope, evaluate
from lowering.expr import Expr, free_axes, loads
from lowering.kernel import Fold, Kernel, Loop, Role, Stmt, spans, statements, values_of
from lowering.program import writes

FORWARD, BACKWARD, AGAIN = 2, 5, 7
"""Products of forward; of backward in one kernel; and in two kernels, of which each makes the scores."""
GENERATED = "generated"
BLOCK = 64
"""Rows and columns that are skipped together."""
BANDS = 16
"""Blocks of rows that are looked at for what they skip."""

KERNELS = (
    ("_flash_attention_for_cpu", "flash"),
    ("_flash_attention", "flash"),
    ("_efficient_attention", "efficient"),
    ("_cudnn_attention", "cudnn"),
)
"""Part of the name of an operation → the library's kernel."""


def library_kernel(call: Call, target: Target) -> str:
    """Which kernel the library would run: "flash", "efficient", "cudnn", or "math", its own parts one by one.

    For a device that is not the target's, what the library does where it can.
    """
    if DEFAULTS.get(call.query.device.type) != target.name:
        half = call.query.dtype.itemsize == 2
        plain = half and call.mask is None and call.widths[0] == call.widths[1]
        return "math" if call.query.dim() != 4 else "flash" if plain else "efficient"
    tensors = [*call.operands, *([] if call.mask is None else [call.mask])]

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **call.options)  # type: ignore[arg-type]

    graph = make_fx(whole)(*tensors)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return next((kernel for part, kernel in KERNELS if any(part in name for name in names)), "math")


def library_time(call: Call, kernel: str, capabilities: Capabilities) -> float:
    """Microseconds of the library's kernel, backward included in training.

    Raises:
        Unsupported: the target does not say how fast it is.
    """
    forward, backward = _shares(call, _speed(call, kernel, capabilities))
    product = _product(call, capabilities)
    total = capabilities.launch_us + FORWARD * product / forward
    return total + (capabilities.launch_us + BACKWARD * product / backward if call.training else 0.0)


def least_time(call: Call, capabilities: Capabilities) -> float:
    """Microseconds of generated kernels in one walk each; 0 where a mask that is computed may have them skip anything.

    Raises:
        Unsupported: the target does not say how fast they are.
    """
    forward, backward = _shares(call, _speed(call, GENERATED, capabilities))
    if call.computes_mask:
        return 0.0
    product = _product(call, capabilities)
    total = capabilities.launch_us + FORWARD * product / forward
    return total + (2 * capabilities.launch_us + AGAIN * product / backward if call.training else 0.0)


def _speed(call: Call, kernel: str, capabilities: Capabilities) -> AttentionSpeed:
    speed = capabilities.attention.get((kernel, call.query.dtype.itemsize))
    if speed is None:
        raise Unsupported(f"nothing is known of the speed of {kernel} attention in {call.query.dtype}")
    return speed


def _shares(call: Call, speed: AttentionSpeed) -> tuple[float, float]:
    shares = speed.masked if call.mask is not None else speed.skipping if call.is_causal else speed.plain
    return at_width(shares, max(call.widths))


def at_width(shares: Shares, width: int) -> tuple[float, float]:
    """What is known of heads of this width.

    >>> at_width({64: (0.5, 0.6), 128: (0.7, 0.7)}, 80)
    (0.7, 0.7)
    """
    return shares[min((limit for limit in shares if limit >= width), default=max(shares))]


def _product(call: Call, capabilities: Capabilities) -> float:
    """Microseconds of half the arithmetic of forward, at the speed of the library's products."""
    rate = capabilities.matrix_flops * capabilities.matrix_share[call.query.dtype.itemsize]
    return call.scores * sum(call.widths) * _causal(call) / rate


def _causal(call: Call) -> float:
    """The share of the blocks that `is_causal` leaves."""
    if not call.is_causal:
        return 1.0
    rows, columns = (-(-size // BLOCK) for size in (call.rows, call.columns))
    return sum(min(row + 1, columns) for row in range(rows)) / (rows * columns)


def generated_time(call: Call, target: Target) -> float:
    """Microseconds of the kernels that would be generated for the parts of a call.

    Raises:
        Unsupported: the scores would be written to memory, or be taken from there by the library.
    """
    schedules: list[Schedule] = []

    def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
        _, schedule = schedule_graph(graph, target, Trace(None, label, target))
        schedules.append(schedule)
        return _never_run

    inputs = [x.detach().requires_grad_(x.requires_grad) for x in call.inputs]
    apart = functorch_config.patch(force_non_lazy_backward_lowering=True)  # backward now, not when it is called
    plainly = torch.autocast(call.query.device.type, enabled=False)
    with tracing(None), apart, plainly, torch.set_grad_enabled(call.training):
        aot_backend(compile_one, lambda device: True)(call.graph, inputs)
    return sum(_time(schedule, target, call.scores) for schedule in schedules)


def _never_run(args: list[object]) -> tuple[object, ...]:
    raise AssertionError("what was compiled to be priced does not run")


def _time(schedule: Schedule, target: Target, scores: int) -> float:
    total, buffers = 0.0, schedule.program.buffers
    for step in schedule.steps:
        if isinstance(step, KernelCall):
            total += kernel_time(step, target)
            touched, who = step.written, "what is generated would write"
        elif not step.is_view:
            total += target.capabilities.launch_us
            touched, who = (*step.reads, *writes(step)), f"{step.target} would take"
        else:
            continue
        if any(buffers[name].numel >= scores for name in touched):
            raise Unsupported(f"{who} the scores whole")
    return total


def kernel_time(call: KernelCall, target: Target) -> float:
    """Microseconds of one launch of a kernel with fixed sizes, launch included."""
    capabilities, kernel = target.capabilities, call.kernel
    moved = (call.bytes_read + call.bytes_written) / capabilities.bandwidth
    dots = [stmt for stmt in statements(kernel.body) if isinstance(stmt, Fold) and stmt.op == "dot"]
    if not dots:
        return capabilities.launch_us + max(moved, call.flops / capabilities.flops)
    products = _products(kernel, capabilities) / _share(kernel, dots, capabilities)
    return capabilities.launch_us + max(moved, products / _busy(kernel, capabilities))


def _share(kernel: Kernel, dots: Sequence[Fold], capabilities: Capabilities) -> float:
    """The share of the library's speed at which the products of one kernel run."""
    speed = capabilities.attention[GENERATED, dots[0].args[0].dtype.itemsize]
    rows, columns = (frozenset(axis for dot in dots for axis in getattr(dot, side)) for side in ("rows", "columns"))
    walked = {axis for stmt in statements(kernel.body) if isinstance(stmt, Loop) for axis in stmt.axes}
    asked = [
        frozenset(index.free_symbols)
        for dot in dots
        for load in loads(*values_of(dot))
        for index in load.index
        if not isinstance(index, Expr)
    ]
    spread = (rows | columns) - walked - {axis.symbol for axis in kernel.with_role(Role.WHOLE)}
    found = [speed.plain]
    if any(not axes.isdisjoint(walked) and not axes.isdisjoint(spread) for axes in asked):
        found.append(speed.masked)
    if any(isinstance(stmt, Loop) and stmt.where is not None for stmt in statements(kernel.body)):
        found.append(speed.skipping)
    width = max((int(axis.size) for axis in kernel.with_role(Role.WHOLE)), default=1)
    return min(at_width(shares, width)[len(dots) > FORWARD] for shares in found)


def _products(kernel: Kernel, capabilities: Capabilities) -> float:
    """Microseconds of the products of a kernel at the library's speed, without the blocks that are skipped."""
    sizes = {axis.symbol: int(axis.size) for axis in kernel.axes}
    varies = spans(kernel)

    def of(body: Sequence[Stmt], share: float) -> float:
        total = 0.0
        for stmt in body:
            if isinstance(stmt, Loop):
                total += of(stmt.body, share if stmt.where is None else share * counted(kernel, stmt.where, stmt.axes))
            elif isinstance(stmt, Fold) and stmt.op == "dot":
                axes = frozenset(stmt.over).union(*(varies[arg] for arg in stmt.args))
                rate = capabilities.matrix_flops * capabilities.matrix_share[stmt.args[0].dtype.itemsize]
                total += 2 * share * math.prod(sizes[axis] for axis in axes) / rate
        return total

    return of(kernel.body, 1.0)


def counted(kernel: Kernel, where: Expr, walked: Sequence[sympy.Symbol]) -> float:
    """The share of the blocks in which a condition holds anywhere, as far as indices tell."""
    if any(True for _ in loads(where)):
        return 1.0
    sizes = {axis.symbol: int(axis.size) for axis in kernel.axes}
    asked = free_axes(where)
    spread = max((axis for axis in sizes if axis in asked and axis not in walked), key=sizes.__getitem__, default=None)
    blocks = 1 if spread is None else -(-sizes[spread] // BLOCK)
    first = sorted({band * blocks // min(BANDS, blocks) for band in range(min(BANDS, blocks))})
    shares = []
    for block in first:
        box = {axis: range(size if axis in walked else 1) for axis, size in sizes.items() if axis in asked}
        if spread is not None:
            box[spread] = range(block * BLOCK, min((block + 1) * BLOCK, sizes[spread]))
        (held,) = evaluate([where], box, Scope({}, {}, {}))
        keep = [k for k, axis in enumerate(box) if axis in walked]
        along = held.any(dim=tuple(k for k in range(held.dim()) if k not in keep)) if len(keep) < held.dim() else held
        flat = along.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK))
        shares.append(float(padded.view(-1, BLOCK).any(1).double().mean()))
    return sum(shares) / len(shares)


def _busy(kernel: Kernel, capabilities: Capabilities) -> float:
    """The share of the device that has something to do: a program takes a block of the last axis of the grid."""
    grid = [int(axis.size) for axis in kernel.with_role(Role.GRID)]
    programs = math.prod(grid[:-1]) * -(-grid[-1] // BLOCK) if grid else 1
    return min(1.0, 2 * programs / capabilities.parallelism)
