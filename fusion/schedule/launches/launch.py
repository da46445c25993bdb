"""Joins two kernels under one call, with one list of parameters.

Input: two calls; output: the first, called with the buffers of both, and the kernel of the second over the parameters
of the joint call.  `chain`, `last_block` and `pack` decide whether the second follows the first or runs beside it; the
dependences of steps are determined by the tensors they take and write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fusion.lowering.errors import by_place
from fusion.lowering.ir.kernel import Kernel, Param, rename
from fusion.lowering.ir.program import Call, writes
from fusion.schedule.kernels import KernelCall


def takes(step: KernelCall | Call) -> tuple[str, ...]:
    """Return the tensor arguments of a step; a launch is called with its results, too."""
    return step.buffers if isinstance(step, KernelCall) else step.reads


def makes(step: KernelCall | Call) -> tuple[str, ...]:
    """Return the tensors that a step defines: new ones, and new values of others."""
    return (*step.written, *step.over) if isinstance(step, KernelCall) else tuple(writes(step))


def join_earlier(
    steps: Sequence[KernelCall | Call],
    joined: Callable[[Sequence[KernelCall | Call], Mapping[str, int], KernelCall], tuple[int, KernelCall] | None],
) -> list[KernelCall | Call]:
    """Move kernels into the launches of earlier steps.

    Args:
        joined: takes the steps so far, the position of the step that defines each tensor, and the next launch; returns
            the position of the step that it joins and the joint call, or None if it stays separate.
    """
    result: list[KernelCall | Call] = []
    maker: dict[str, int] = {}
    for step in steps:
        joint = joined(result, maker, step) if isinstance(step, KernelCall) else None
        if joint is None:
            position = len(result)
            result.append(step)
        else:
            position, result[position] = joint
        maker.update(dict.fromkeys(makes(step), position))
    return result


def share(first: KernelCall, second: KernelCall) -> tuple[KernelCall, Kernel]:
    """Return `first` with the buffers, sizes and origins of both, and the kernel of `second` over joint parameters."""
    known = dict(zip(first.buffers, first.kernel.params, strict=True))
    names: dict[str, str] = {}  # parameter of the second kernel → of the joint call
    params: list[Param] = []
    added: dict[str, Param] = {}
    for buffer, param in zip(second.buffers, second.kernel.params, strict=True):
        if buffer not in known:
            stem = "out" if param.written else "in"
            count = sum(p.name.startswith(stem) for p in (*first.kernel.params, *added.values()))
            known[buffer] = added[buffer] = replace(param, name=f"{stem}{count}")
        names[param.name] = known[buffer].name
        params.append(known[buffer])
    kernel = first.kernel
    joint = replace(
        kernel,
        params=(*kernel.params, *added.values()),
        sizes=tuple(sorted({*kernel.sizes, *second.kernel.sizes}, key=str)),
        origins=by_place((*first.origins, *second.origins)),
    )
    call = KernelCall(
        joint,
        (*first.buffers, *added),
        (*first.written, *second.written),
        (*first.origins, *second.origins),
        first.bytes_read + second.bytes_read,
        first.bytes_written + second.bytes_written,
        first.flops + second.flops,
        first.excess + second.excess,
        {**first.over, **second.over},
    )
    return call, replace(second.kernel, params=tuple(params), body=rename(second.kernel.body, names), origins=())


__all__ = ["join_earlier", "makes", "share", "takes"]
