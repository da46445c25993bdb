"""Views in one call: which of them begin where the tensor begins that they are views of.

Such a view is known by its shape and strides, whatever views of views led to it: one call makes it, where it is needed.
(`mm(x.view(-1, 768), w.t())` of two tensors was three calls of operations; the two views cost more than the product.)
What enters are the steps of a schedule; what leaves are answers about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch._ops import OpOverload

from fusion.schedule.kernels import KernelCall
from lowering.program import BufferRef, Extern, Program, memory_of

aten = torch.ops.aten

_AT_START = frozenset(
    (
        *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default),
        *(aten.t.default, aten.transpose.int, aten.permute.default),
        *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    )
)


def begins_at_start(call: Extern) -> bool:
    """Is the result a view that begins where its tensor does?  Those that have no rule may be of sparse tensors."""
    return call.is_view and not call.multiple and not call.reason and call.target in _AT_START


def only_reads(call: Extern) -> bool:
    """Does the call neither change nor return what it is given?"""
    if call.impure or call.is_view or not isinstance(call.target, OpOverload):
        return False
    return all(result.alias_info is None for result in call.target._schema.returns)


def lone_results(program: Program, steps: Sequence[KernelCall | Extern], fresh: Collection[object]) -> frozenset[str]:
    """The results that nobody can tell from tensors of their own: made here, in memory of which no other is a part.

    Args:
        fresh: the targets of calls that return tensors of their own.
    """
    shared = {name for step in steps if isinstance(step, KernelCall) for pair in step.over.items() for name in pair}
    made = {name for step in steps if isinstance(step, KernelCall) for name in step.written}
    calls = [step for step in steps if isinstance(step, Extern)]
    made |= {name for call in calls if call.target in fresh for name in call.outs if name is not None}
    whole = memory_of(calls)
    results = [out.name for out in program.outputs if isinstance(out, BufferRef)]
    count = Counter(whole.get(name, name) for name in results)
    roots = {name: whole.get(name, name) for name in results}
    return frozenset(name for name, root in roots.items() if root in made - shared and count[root] == 1)
