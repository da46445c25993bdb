"""Runs a region of a program in chunks, some points of an axis at a time.

Input: the tensors that the region reads; output: its combined results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from fusion.lowering.interpret.chunks import Body, run_chunks
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Buffer, Program
from fusion.runtime.memory import empty_large


class InChunks:
    """Callable that computes a region.  `bodies` are the compiled bodies of `node`; `results` its result buffers.

    It takes the tensors in the order of `node.sliced` and one list: the length of the cut axis, the sizes in the order
    of `node.symbols`, and the shape and the strides of each result.
    """

    def __init__(self, node: Chunked[Program], results: Sequence[Buffer], bodies: Sequence[Body]) -> None:
        self.node, self.results, self.bodies = node, tuple(results), bodies

    def __call__(self, *args: object) -> tuple[torch.Tensor, ...]:
        tensors = cast("tuple[torch.Tensor, ...]", args[:-1])
        length, sizes, *layouts = cast("tuple[int, list[int], *tuple[tuple[list[int], list[int]], ...]]", args[-1])
        results = {
            buffer.name: _empty(shape, strides, buffer)
            for buffer, (shape, strides) in zip(self.results, layouts, strict=True)
        }
        run_chunks(self.node, self.bodies, length, sizes, tensors, results)
        return tuple(results.values())


def _empty(shape: Sequence[int], strides: Sequence[int], buffer: Buffer) -> torch.Tensor:
    if buffer.device.type == "cpu":
        return empty_large(tuple(shape), tuple(strides), buffer.dtype)
    return torch.empty_strided(shape, strides, dtype=buffer.dtype, device=buffer.device)
