"""Finds views whose shape, strides and offset are known at compile time.

Such a view is created from its base by one call where it is used, whatever chain of views led to it. (`mm(x.view(-1,
768), w.t())` was three calls of operations; the two views cost more than the GEMM.)  Input: the steps of a schedule;
output: answers about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import sympy
import torch
from torch._ops import OpOverload

from fusion.lowering.ir.program import Buffer, BufferRef, Call, Extern, Program, memory_of
from fusion.schedule.kernels import KernelCall

aten = torch.ops.aten

# Here and in `starts`, operations are recognised by name: the call in a schedule has no lowered form whose index at 0
# would be the offset, and PyTorch computes offsets of fake tensors only for static sizes.  Other views have an unknown
# offset.
_AT_START = frozenset(
    (
        *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default),
        *(aten.t.default, aten.transpose.int, aten.permute.default),
        *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    )
)


def starts(call: Extern, buffers: Mapping[str, Buffer]) -> tuple[int, ...]:
    """Return the offsets of the views that a call returns, in elements from the start of their base.

    Empty if an offset is unknown.  Calls without a lowering rule are left out: their tensors may be sparse.
    """
    if not call.is_view or call.reason or call.kwargs:
        return ()
    if call.target in _AT_START:
        return (0,)
    args = [int(arg) if isinstance(arg, sympy.Integer) else arg for arg in call.args[1:]]
    base = buffers[call.reads[0]]
    if call.target is aten.split_with_sizes.default:
        sizes, dim = args[0], args[1] if len(args) > 1 else 0
        places = list(accumulate(sizes, initial=0))[:-1] if isinstance(sizes, (list, tuple)) else []
    elif call.target is aten.split.Tensor:
        (size, dim) = (*args, 0)[:2]
        places = [k * size for k in range(len(call.outs))] if isinstance(size, int) else []
    elif call.target is aten.unbind.int:
        dim, places = args[0] if args else 0, list(range(len(call.outs)))
    elif call.target is aten.select.int:
        dim, places = args[0], [args[1]]
    elif call.target is aten.slice.Tensor:
        (dim, start) = (*args, *(0, None)[len(args) :])[:2]
        places = [0 if start is None else start]
    else:
        return ()
    return _from(base, dim, places)


def _from(base: Buffer, dim: object, places: Sequence[object]) -> tuple[int, ...]:
    """Return the offsets of positions in a dimension of `base`; empty if one is unknown."""
    assert isinstance(dim, int)
    size, stride = base.shape[dim], base.strides[dim]
    if not (size.is_Integer and stride.is_Integer):
        return ()
    known = [int(place) for place in places if isinstance(place, (int, sympy.Integer))]
    if len(known) != len(places):
        return ()
    return tuple(min(max(place + int(size) if place < 0 else place, 0), int(size)) * int(stride) for place in known)


def only_reads(call: Extern) -> bool:
    """Return whether the call neither mutates nor returns an operand."""
    if call.is_view or not isinstance(call.target, OpOverload) or call.target._schema.is_mutable:
        return False
    return all(result.alias_info is None for result in call.target._schema.returns)


def unaliased_results(
    program: Program, steps: Sequence[KernelCall | Call], fresh: Collection[object], kept: Collection[int]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the results that nobody can tell from tensors that own their memory.

    First the results whose memory is allocated here and shared with no other result; then results that only backward
    gets, in memory of which the caller gets no part that it could mutate.

    Args:
        fresh: the targets of calls that return new tensors.
        kept: the positions of results that only backward gets.
    """
    shared = {name for step in steps if isinstance(step, KernelCall) for pair in step.over.items() for name in pair}
    allocated = {name for step in steps if isinstance(step, KernelCall) for name in step.written}
    calls = [step for step in steps if isinstance(step, Extern)]
    allocated |= {name for call in calls if call.target in fresh for name in call.outs if name is not None}
    whole = memory_of(calls)
    results = [out.name for out in program.outputs if isinstance(out, BufferRef)]
    roots = {name: whole.get(name, name) for name in results}
    own = {name for name, root in roots.items() if root in allocated - shared}
    count = Counter(roots[name] for name in results)
    visible = [out.name for k, out in enumerate(program.outputs) if isinstance(out, BufferRef) and k not in kept]
    returned = {roots[name] for name in visible}
    unaliased = frozenset(name for name in own if count[roots[name]] == 1)
    return unaliased, frozenset(name for name in own if roots[name] not in returned)


def seen_by_caller(program: Program, steps: Sequence[KernelCall | Call], kept: Collection[int]) -> frozenset[str]:
    """Return the buffers whose memory the caller gets, in results that are not for backward alone (`kept`)."""
    whole = memory_of([step for step in steps if isinstance(step, Extern)])
    seen = {out.name for k, out in enumerate(program.outputs) if isinstance(out, BufferRef) and k not in kept}
    seen |= {whole.get(name, name) for name in seen}
    for step in reversed(steps):
        if isinstance(step, KernelCall):
            operands = [operand for result, operand in step.over.items() if result in seen]
            seen.update(operands, (whole.get(operand, operand) for operand in operands))
    return frozenset(seen)
