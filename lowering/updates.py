"""Copies into inputs, at the end of a functional graph whose program overwrites its arguments."""

from __future__ import annotations

import torch

from fusion.lowering.program import BufferRef, Extern, Node, Program

COPY = torch.ops.aten.copy_.default


def copied(node: Node | None, program: Program) -> tuple[str, str] | None:
    """Return (target, source) of a copy into an input; None for any other node."""
    if not isinstance(node, Extern) or node.target is not COPY or node.kwargs or len(node.args) != 2:
        return None
    target, source = node.args
    if not isinstance(target, BufferRef) or not isinstance(source, BufferRef) or target.name not in program.inputs:
        return None
    return target.name, source.name
