"""Live: what of a program is computed at all.

A node stays where the caller gets what it makes, where one that stays reads it, or where its call has an effect.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.lowering.program import Extern, Node, Program, reads, writes


def without_dead_nodes(program: Program) -> Program:
    """The program without nodes nothing reads; the same object where each is read.

    Rules may compute results that the graph does not use, and passes find that a value needs none of what it read.
    """
    live = set(program.output_names())
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if live.intersection(writes(node)) or (isinstance(node, Extern) and node.impure):
            kept.append(node)
            live.update(reads(node))
            live.update(name for out in writes(node) for call in program.library.get(out, ()) for name in reads(call))
    return program.edited(reversed(kept))


def without_dead_buffers(program: Program) -> Program:
    """The program without buffers of no node, nor of a library's call instead of one."""
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
    """The buffers of nodes and of library's calls instead of them, of inputs and of outputs."""
    calls = [call for steps in program.library.values() for call in steps]
    used = {name for node in (*program.nodes, *calls) for name in (*reads(node), *writes(node))}
    used.update(name for name in program.inputs if isinstance(name, str))
    return used | program.output_names()


__all__ = ["named_buffers", "without_dead_buffers", "without_dead_nodes"]
