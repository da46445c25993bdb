"""Launch: two kernels under one call, with one list of parameters.

Input: two calls; output: the first, called with the buffers of both, and the kernel of the second over the parameters
of the joint call.  What the second then is to the first, one that follows or one beside it, is for `chain`, `tiles` and
`pack` to say; what one step needs of another is told by what they take and make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fusion.lowering.errors import by_place
from fusion.lowering.kernel import Kernel, Param, rename
from fusion.lowering.program import Call, writes
from fusion.schedule.kernels import KernelCall


def takes(step: KernelCall | Call) -> tuple[str, ...]:
    """The tensors that a step is called with; of a launch also those that it writes."""
    return step.buffers if isinstance(step, KernelCall) else step.reads


def makes(step: KernelCall | Call) -> tuple[str, ...]:
    """The tensors that are there once a step has run: new ones, and new values of others."""
    return (*step.written, *step.over) if isinstance(step, KernelCall) else tuple(writes(step))


def join_earlier(
    steps: Sequence[KernelCall | Call],
    joined: Callable[[Sequence[KernelCall | Call], Mapping[str, int], KernelCall], tuple[int, KernelCall] | None],
) -> list[KernelCall | Call]:
    """The steps with kernels in the launches of those before them.

    Args:
        joined: given the steps so far, which of them makes each tensor, and the next launch: the position of the one
            that it joins, and both as one; None where it stays by itself.
    """
    result: list[KernelCall | Call] = []
    maker: dict[str, int] = {}
    for step in steps:
        found = joined(result, maker, step) if isinstance(step, KernelCall) else None
        if found is None:
            position = len(result)
            result.append(step)
        else:
            position, result[position] = found
        maker.update(dict.fromkeys(makes(step), position))
    return result


def share(first: KernelCall, second: KernelCall) -> tuple[KernelCall, Kernel]:
    """`first` with the buffers, sizes and origins of both, and the kernel of `second` over the joint parameters."""
    known = dict(zip(first.buffers, first.kernel.params, strict=True))
    names: dict[str, str] = {}  # of the second kernel's parameters → of the joint call's
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
        {**first.over, **second.over},
    )
    return call, replace(second.kernel, params=tuple(params), body=rename(second.kernel.body, names), origins=())


__all__ = ["join_earlier", "makes", "share", "takes"]
