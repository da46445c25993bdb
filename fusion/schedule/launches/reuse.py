"""Reuses memory by liveness: a result overwrites an operand whose live range has ended.

Input: the steps of a schedule; output: steps in which kernels write such results into the memory of an operand.  A row
of logits is replaced by a row of their gradient, and half of the memory is enough.

A result reuses the operand's memory only if all of these hold: the operand was computed in the same program, is read by
no later step and has no views, both tensors have the same layout, and the kernel loads and stores at the same index,
load first.  So one program loads and stores each element; a fold over a row in between waits for all its loads.
Tensors that forward saved for backward alone qualify once they are taken over (`operations/ownership.py`): logits are
replaced by their gradient, if there is no other reference to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import loads
from fusion.lowering.ir.kernel import Fold, Kernel, Store, statements, values_of
from fusion.lowering.ir.program import Buffer, BufferRef, Call, Extern, Program, writes
from fusion.operations.ownership import take_over
from fusion.operations.products import aligned_product
from fusion.schedule.iteration.naming import unused
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.updates import redirected, written_into

FRESH = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, aligned_product, take_over)
"""Calls whose results are new tensors, without other views.

They are named because calls are opaque, and schemas do not tell: that of `_unsafe_view` declares no alias of its
operand.
"""

LEAST_BYTES = 1 << 16
"""Bytes below which saved memory is not worth a kernel of its own."""


LARGE = 1 << 22
"""Bytes below which it is not worth checking who else refers to a saved tensor."""


def reuse_memory(
    steps: Sequence[KernelCall | Call], program: Program, donated: Collection[str] = ()
) -> tuple[tuple[KernelCall | Call, ...], Program]:
    """Write results over operands where that is certain to change nothing.

    Args:
        donated: inputs that the caller no longer uses, unless another reference is detected at run time.

    >>> from fusion.inspect.examples import show_launches
    >>> from torch import empty
    >>> def f(x, w):
    ...     return (x @ w).softmax(-1)
    >>> show_launches(lambda steps, program: reuse_memory(steps, program)[0], f, empty(256, 300), empty(300, 512))
      launch matmul(x, w, mm)
    - launch amax_sub_exp_sum_div(mm, div)
    + launch amax_sub_exp_sum_div(mm)
    """
    last: dict[str, int] = {}  # buffer → the last step that reads it
    allocated: set[str] = set()  # buffers that a step allocates
    kept = set(program.output_names())
    for position, step in enumerate(steps):
        for name in _read(step):
            last[name] = position
        if isinstance(step, KernelCall) or (isinstance(step, Extern) and step.target in FRESH):
            allocated.update(_written(step))
        if isinstance(step, Chunked) or (isinstance(step, Extern) and (step.is_view or step.impure or step.multiple)):
            kept.update(step.reads)
    large_donated = {name for name in donated if _bytes(program.buffers[name]) >= LARGE} - kept
    result: list[KernelCall | Call] = []
    buffers = dict(program.buffers)
    for position, step in enumerate(steps):
        if isinstance(step, KernelCall):
            dying = {name for name in _read(step) if last[name] == position}
            step = _over(buffers, step, (dying & allocated) - kept)
            step, taken = _taking_over(buffers, _over(buffers, step, dying & large_donated), large_donated)
            buffers.update({out: replace(buffers[name], name=out) for out, name in taken.items()})
            result += [Extern((out,), take_over, (BufferRef(name),)) for out, name in taken.items()]
        result.append(step)
    return tuple(result), program.edited(buffers=buffers.values())


def _taking_over(
    buffers: Mapping[str, Buffer], call: KernelCall, given: Collection[str]
) -> tuple[KernelCall, dict[str, str]]:
    """Rename the inputs that a call overwrites; return the call and new name → input."""
    new_names = {name: unused(f"{name}_taken", buffers) for name in call.over.values() if name in given}
    if not new_names:
        return call, {}
    over = {out: new_names.get(name, name) for out, name in call.over.items()}
    call = replace(call, buffers=tuple(new_names.get(name, name) for name in call.buffers), over=over)
    return call, {taken: name for name, taken in new_names.items()}


def _read(step: KernelCall | Call) -> Iterable[str]:
    if not isinstance(step, KernelCall):
        return step.reads
    return [name for name in step.buffers if name not in step.written]


def _written(step: KernelCall | Call) -> Iterable[str]:
    return step.written if isinstance(step, KernelCall) else writes(step)


def _over(buffers: Mapping[str, Buffer], call: KernelCall, dying: set[str]) -> KernelCall:
    """Write results of a call over operands."""
    for out in call.written:
        for name in sorted(dying - set(call.over.values())):
            kernel = _into(call, out, name) if _alike(buffers[out], buffers[name]) else None
            if kernel is not None:
                left = tuple(buffer for buffer in call.buffers if buffer != out)
                written = tuple(buffer for buffer in call.written if buffer != out)
                call = replace(call, kernel=kernel, buffers=left, written=written, over={**call.over, out: name})
                break
    return call


def _into(call: KernelCall, out: str, operand: str) -> Kernel | None:
    """Return the kernel that writes to the parameter of `operand` instead of `out`'s; None if it is unsafe."""
    kernel = call.kernel
    if kernel.beside:
        moved = written_into(call, operand, out)
        return None if moved is None else moved.kernel
    names = dict(zip(call.buffers, (param.name for param in kernel.params), strict=True))
    new, old = names[out], names[operand]
    every = list(statements(kernel.body))
    if kernel.then is not None or any(isinstance(stmt, Fold) and stmt.op == "dot" for stmt in every):
        return None
    stores = [position for position, stmt in enumerate(every) if isinstance(stmt, Store) and stmt.param == new]
    if len(stores) != 1:
        return None
    store = every[stores[0]]
    assert isinstance(store, Store)
    for position, stmt in enumerate(every):
        read = [load for load in loads(*values_of(stmt)) if load.buffer == old]
        if any(load.index != (store.offset,) for load in read) or (read and position > stores[0]):
            return None
    return redirected(kernel, new, old)


def _alike(a: Buffer, b: Buffer) -> bool:
    same = (a.dtype, a.shape, a.strides, a.device) == (b.dtype, b.shape, b.strides, b.device)
    return same and _bytes(a) >= LEAST_BYTES


def _bytes(buffer: Buffer) -> int:
    """Return the size of a buffer in bytes if it is static; else 0."""
    return int(buffer.numel) * buffer.dtype.itemsize if buffer.numel.is_Integer else 0
