"""Shares one copy among all library products that read a tensor in the same layout.

`Program → Program`.  Each product that is left to the library brings the copies that its call needs (`calls.py`).  The
gradients of a weight and of its other operand read one gradient, in the layout to which eager copied it: of equal
copies the first is kept, unless a call may write to the source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fusion.lowering.ir.arguments import map_leaves
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import (
    BufferRef,
    Call,
    Extern,
    ExternArg,
    Map,
    Node,
    Program,
    memory_of,
    reading,
    reads,
)


def merge_copies(program: Program, computed: Collection[str]) -> Program:
    """Remove the copies, among those `computed` for calls, that equal an earlier one."""
    bases = memory_of(program.nodes)
    calls = [node for node in program.nodes if isinstance(node, Extern) and node.impure]
    written = {bases.get(name, name) for call in calls for name in reads(call)}
    known: dict[tuple[object, ...], str] = {}
    instead: dict[str, str] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        node = _calling(node, instead) if isinstance(node, (Extern, Chunked)) else reading(node, instead)
        if (
            isinstance(node, Map)
            and node.out in computed
            and not written.intersection(bases.get(n, n) for n in reads(node))
        ):
            key = node.axes, node.expr, replace(program.buffers[node.out], name="")
            same = known.setdefault(key, node.out)
            if same != node.out:
                instead[node.out] = same
                continue
        nodes.append(node)
    return program.edited(nodes) if instead else program


def _calling(node: Call, names: Mapping[str, str]) -> Call:
    """Rename the operands of a call."""
    if not any(name in names for name in node.reads):
        return node

    if isinstance(node, Chunked):
        return replace(node, sliced=tuple((names.get(name, name), dimension) for name, dimension in node.sliced))

    def named(arg: ExternArg) -> ExternArg:
        return BufferRef(names.get(arg.name, arg.name)) if isinstance(arg, BufferRef) else arg

    return replace(node, args=map_leaves(node.args, named), kwargs=map_leaves(node.kwargs, named))
