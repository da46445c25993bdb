"""Computes the memory that a graph holds while it runs: its results and intermediate tensors.

Input: the nodes of a lowered Program, or the steps of a schedule, in order; output: the bytes held while each runs.
Inputs belong to the caller and do not count.  A tensor is live from the step that computes it to the last step that
reads it, a result to the end; a view, and a result in the memory of an operand, hold nothing of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sympy

from fusion.lowering.ir.program import Program, memory_of, reads, writes
from fusion.schedule import Step
from fusion.schedule.iteration.dependences import bytes_of
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import makes


def held_by_nodes(program: Program, hints: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """Return the bytes held while each node runs by itself.

    >>> import torch
    >>> from fusion.inspect.examples import lowered
    >>> held_by_nodes(lowered(lambda x: (x * 2 + 1).sum(0), torch.empty(8, 8)), {})
    (256, 512, 288)
    """
    touched = [(reads(node), writes(node)) for node in program.nodes]
    return _held(program, touched, memory_of(program.nodes), hints)


def held_by_steps(program: Program, steps: Sequence[Step], hints: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """Return the bytes held while each launch or call runs; a call in chunks counts with its operands and results."""
    memory = memory_of(program.nodes)
    for step in steps:
        if isinstance(step, KernelCall):
            memory |= {name: memory.get(operand, operand) for name, operand in step.over.items()}
    touched = [(step.buffers if isinstance(step, KernelCall) else step.reads, makes(step)) for step in steps]
    return _held(program, touched, memory, hints)


def _held(
    program: Program,
    touched: Sequence[tuple[Iterable[str], Iterable[str]]],
    memory: Mapping[str, str],
    hints: Mapping[sympy.Symbol, int],
) -> tuple[int, ...]:
    end = len(touched)
    given = {name for name in program.inputs if isinstance(name, str)} | program.constants.keys()
    births: dict[str, int] = {}
    last = {memory.get(name, name): end for name in program.output_names()}
    for number, (read, written) in enumerate(touched):
        for name in (*read, *written):
            base = memory.get(name, name)
            births.setdefault(base, number)
            last[base] = max(last.get(base, 0), number)
    held = [0] * end
    for name, first in births.items():
        if name in given or name not in program.buffers:
            continue
        size = bytes_of(program.buffers[name], hints)
        for number in range(first, min(last[name], end - 1) + 1):
            held[number] += size
    return tuple(held)


__all__ = ["held_by_nodes", "held_by_steps"]
