"""Removes dead nodes and buffers from a program (dead-code elimination).

A node is live if its result is returned or read by a live node, or if its call has an effect.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.lowering.ir.program import Extern, Node, Program, reads, writes


def eliminate_dead_code(program: Program) -> Program:
    """Remove nodes whose results are not read; the same object if there are none.

    Rules may compute results that the graph does not use, and passes may remove the last read of a value.
    """
    live = set(program.output_names())
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if live.intersection(writes(node)) or (isinstance(node, Extern) and node.impure):
            kept.append(node)
            live.update(reads(node))
            live.update(name for out in writes(node) for call in program.library.get(out, ()) for name in reads(call))
    return program.edited(reversed(kept))


def eliminate_dead_buffers(program: Program) -> Program:
    """Remove buffers that neither a node nor a library alternative of a node uses."""
    used = named_buffers(program)
    if used.issuperset(program.buffers):
        return program
    return replace(
        program,
        buffers={name: buffer for name, buffer in program.buffers.items() if name in used},
        origins={name: origin for name, origin in program.origins.items() if name in used},
        constants={name: tensor for name, tensor in program.constants.items() if name in used},
    )


def named_buffers(program: Program) -> set[str]:
    """Return the buffers of nodes and of their library alternatives, of inputs and of outputs."""
    calls = [call for steps in program.library.values() for call in steps]
    used = {name for node in (*program.nodes, *calls) for name in (*reads(node), *writes(node))}
    used.update(name for name in program.inputs if isinstance(name, str))
    return used | program.output_names()


__all__ = ["eliminate_dead_buffers", "eliminate_dead_code", "named_buffers"]
