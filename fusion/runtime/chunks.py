"""Running in chunks: a region of a program, some points of an axis at a time.

What enters are the tensors that the region reads; what leaves are its results, put together: rows in their places,
products added up in place by the body itself, reductions joined as they are defined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from fusion.schedule.chunks import ADDED_UP, Chunks

Body = Callable[[list[object]], tuple[torch.Tensor, ...]]
"""The compiled program of a chunk: START, BETA, POINTS, sizes and tensors in one list."""


class InChunks:
    """Callable that computes a region.  `bodies` are those of `chunks`, compiled."""

    def __init__(self, chunks: Chunks, bodies: Sequence[Body]) -> None:
        self.chunks, self.bodies = chunks, bodies

    def __call__(self, *args: object) -> tuple[torch.Tensor, ...]:
        parts = self.chunks.cut
        tensors = cast("tuple[torch.Tensor, ...]", args[:-1])
        length, given, *layouts = cast("tuple[int, list[int], *tuple[tuple[list[int], list[int]], ...]]", args[-1])
        results = {
            buffer.name: torch.empty_strided(shape, strides, dtype=buffer.dtype, device=buffer.device)
            for buffer, (shape, strides) in zip(self.chunks.results, layouts, strict=True)
        }
        joins = {name: getattr(torch, ADDED_UP[op]) for name, op in parts.folds.items()}
        sums = [results[name] for name in parts.sums]
        for start, points, body in self.chunks.starts(length):
            slices = [
                tensor if dimension is None else tensor.narrow(dimension, start, points)
                for tensor, dimension in zip(tensors, parts.sliced.values(), strict=True)
            ]
            # taken from their list one by one, so that none is there while the next chunk runs
            made = [*reversed(self.bodies[body]([start, int(start > 0), points, *given, *slices, *sums]))]
            for name, dimension in parts.rows.items():
                results[name].narrow(dimension, start, points).copy_(made.pop())
            for name, join in joins.items():
                folded = made.pop()
                join(results[name], folded, out=results[name]) if start else results[name].copy_(folded)
        return tuple(results.values())
