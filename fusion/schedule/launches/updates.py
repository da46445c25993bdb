"""Writes results into overwritten tensors of the caller in place, without a copy.

A step of an optimizer, a cache that grows, a running mean: the functional graph computes the new value and ends with a
copy of it into the input.  Input: the steps of a schedule; output: steps in which kernels write their results directly
into the inputs where that is safe; the remaining copies at the end become one call.

A kernel may write into an input if the two have the same layout, nothing else needs the result as a tensor of its own
or the input afterwards, and each point of the input is read, if at all, only at and before its own store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import torch

from fusion.lowering.ir.expr import Expr, loads
from fusion.lowering.ir.kernel import Kernel, Param, Role, Stmt, Store, loaded, rename, statements, stored, values_of
from fusion.lowering.ir.program import BufferRef, Call, Extern, Program, copied, memory_of, returning, writes
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import takes

aten = torch.ops.aten


def update_in_place(
    steps: Sequence[KernelCall | Call], program: Program
) -> tuple[tuple[KernelCall | Call, ...], Program]:
    """Remove copies into inputs that kernels can write directly, and merge the others into one call.

    The program returns the input where it returned the result of a removed copy.

    >>> from fusion.inspect.examples import show_launches
    >>> from torch import empty
    >>> show_launches(
    ...     lambda steps, program: update_in_place(steps, program)[0], lambda x, y: x.copy_(x + y), empty(3), empty(3)
    ... )
    - launch add(x, y, add)
    + launch add(x, y)
    - call aten.copy_.default(x, add) → copy_
    """
    updated = list(steps)
    for copy in steps:
        if not isinstance(copy, Extern) or (names := copied(copy, program)) is None:
            continue
        written = _written_in_place(updated, program, copy, *names)
        if written is not None:
            position, call = written
            updated[position] = call
            updated.remove(copy)
            program = returning(program, copy, names[0])
    return tuple(_as_one_call(updated, program)), program


def _is_copy(step: KernelCall | Call, program: Program) -> bool:
    """Return whether this is a copy into an input whose result is not returned."""
    if not isinstance(step, Extern) or copied(step, program) is None:
        return False
    return program.output_names().isdisjoint(writes(step))


def _written_in_place(
    steps: Sequence[KernelCall | Call], program: Program, copy: Extern, target: str, source: str
) -> tuple[int, KernelCall] | None:
    """Return the step that writes `source`, by position, changed to write `target`; None where that is not safe."""
    old, new = program.buffers[target], program.buffers[source]
    alike = (old.dtype, old.shape, old.strides, old.device) == (new.dtype, new.shape, new.strides, new.device)
    if not alike or source in program.output_names() or target in program.output_names():
        return None
    position = _maker(steps, copy, target, source)
    if position is None:
        return None
    host = steps[position]
    assert isinstance(host, KernelCall)
    call = written_into(host, target, source)
    return None if call is None else (position, call)


def _maker(steps: Sequence[KernelCall | Call], copy: Extern, target: str, source: str) -> int | None:
    """Return the position of the launch that writes `source`, if it may write `target` instead.

    It may not if another step than the copy reads `source`, or the copy's result, or `target` afterwards; nor if it
    reads a view of `target`.
    """
    position_of_maker, views = None, {target}
    private = {source, *writes(copy)}
    for position, step in enumerate(steps):
        touched = set() if step is copy else set(takes(step))
        if isinstance(step, KernelCall) and source in step.written:
            if touched & (views - {target}):
                return None
            position_of_maker = position
        elif touched & private or (position_of_maker is not None and touched & views):
            return None
        elif isinstance(step, Extern) and step.is_view and touched & views:
            views.update(writes(step))
    return position_of_maker


def written_into(call: KernelCall, target: str, source: str) -> KernelCall | None:
    """Write to `target` instead of `source` in `call`; None where that would change its operands."""
    names = dict(zip(call.buffers, (param.name for param in call.kernel.params), strict=True))
    written = tuple(name for name in call.written if name != source)
    if target not in names:
        buffers = tuple(target if name == source else name for name in call.buffers)
        return replace(call, buffers=buffers, written=written)
    kernel, old, new = call.kernel, names[target], names[source]
    touching = [part for part in kernel.parts if {old, new} & (loaded(part) | stored(part))]
    if len(touching) != 1 or kernel.then is not None:
        return None
    part = _part_into(touching[0], old, new)
    if part is None:
        return None
    params = params_without(kernel.params, new, old)
    if touching[0].params == kernel.parts[0].params and touching[0].body == kernel.body:
        kernel = replace(kernel, params=params, body=part.body)
    else:
        others = tuple(part if other is touching[0] else other for other in kernel.beside)
        kernel = replace(kernel, params=params, beside=others)
    return replace(call, kernel=kernel, buffers=tuple(b for b in call.buffers if b != source), written=written)


def _part_into(part: Kernel, old: str, new: str) -> Kernel | None:
    """Return a kernel that writes to the parameter `old` instead of `new`, after all its reads; None if impossible."""
    writing = [stmt for stmt in statements(part.body, Store) if stmt.param == new]
    if len(writing) != 1 or writing[0] not in part.body or isinstance(writing[0].offset, Expr):
        return None
    offset = writing[0].offset
    own = {axis.symbol for axis in part.with_role(Role.GRID) if axis.size != 1}
    if not own <= offset.free_symbols:  # a program would read an element that another one has written
        return None
    read = [load for stmt in statements(part.body) for load in loads(*values_of(stmt)) if load.buffer == old]
    if any(load.index != (offset,) for load in read):
        return None
    moved = redirected(part, new, old)
    first = next((k for k, stmt in enumerate(part.body) if isinstance(stmt, Store)), len(part.body))
    ordered = _readers_first(moved.body[first:], {p.name for p in moved.params if p.written})
    return None if ordered is None else replace(moved, body=(*moved.body[:first], *ordered))


def _readers_first(body: Sequence[Stmt], written: set[str]) -> tuple[Stmt, ...] | None:
    """Order stores so that no written param is read afterwards; None without such an order, or with a non-store."""
    stores = [stmt for stmt in body if isinstance(stmt, Store)]
    if len(stores) != len(body):
        return None
    read = [{load.buffer for load in loads(*values_of(stmt))} & written for stmt in stores]
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(stores)))
    for first, names in enumerate(read):
        graph.add_edges_from((first, k) for k, stmt in enumerate(stores) if k != first and stmt.param in names)
    if not nx.is_directed_acyclic_graph(graph):
        return None
    return tuple(stores[k] for k in nx.lexicographical_topological_sort(graph))


def _as_one_call(steps: list[KernelCall | Call], program: Program) -> list[KernelCall | Call]:
    """Merge the copies at the end of `steps` into one call, if there are several and no source is overwritten."""
    count = 0
    while count < len(steps) and _is_copy(steps[-1 - count], program):
        count += 1
    pairs = [step.args for step in steps[len(steps) - count :] if isinstance(step, Extern)]
    targets, sources = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    memory = memory_of(program.nodes)
    overwritten = {target.name for target in targets if isinstance(target, BufferRef)}
    read = {memory.get(source.name, source.name) for source in sources if isinstance(source, BufferRef)}
    if count < 2 or read & overwritten:
        return steps
    last = steps[-1]
    assert isinstance(last, Extern)
    call = replace(last, outs=(), target=aten._foreach_copy_.default, args=(targets, sources))
    return [*steps[: len(steps) - count], call]


def redirected(kernel: Kernel, new: str, old: str) -> Kernel:
    """Return the kernel that writes to the parameter `old` instead of `new`, and does not take `new`."""
    names = {param.name: old if param.name == new else param.name for param in kernel.params}
    return replace(kernel, params=params_without(kernel.params, new, old), body=rename(kernel.body, names))


def params_without(params: Sequence[Param], new: str, old: str) -> tuple[Param, ...]:
    """Return the parameters of a launch that writes `old` in place of `new`."""
    return tuple(replace(p, written=p.written or p.name == old) for p in params if p.name != new)


__all__ = ["redirected", "update_in_place", "written_into"]
