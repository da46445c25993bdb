"""Launch: two kernels under one call, with one list of parameters.

What enters are two calls; what leaves is the first, called with the buffers of both, and the kernel of the second over
the parameters of the joint call.  What the second then is to the first, one that follows or one beside it, is for
`chain` and `pack` to say.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.schedule.kernels import KernelCall
from lowering.errors import by_place
from lowering.kernel import Kernel, Param, rename


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


__all__ = ["share"]
