"""Running in chunks: a region of a program, some points of an axis at a time.

What enters are the tensors that the region reads; what leaves are its results, put together: rows in their places,
products added up in place by the body itself, reductions joined as they are defined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusion.schedule.chunks import ADDED_UP, Chunks
from lowering.program import Buffer

Body = Callable[[list[object]], tuple[torch.Tensor, ...]]
"""The compiled program of a chunk: START, BETA and tensors in one list."""


class InChunks:
    """Callable that computes a region.  `bodies` are those of `chunks`, compiled."""

    def __init__(self, chunks: Chunks, bodies: Sequence[Body]) -> None:
        self.chunks, self.bodies = chunks, bodies

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = self.chunks.cut
        results = {buffer.name: _empty(buffer) for buffer in self.chunks.results}
        joins = {name: getattr(torch, ADDED_UP[op]) for name, op in parts.folds.items()}
        sums = [results[name] for name in parts.sums]
        for start, points, body in self.chunks.starts():
            slices = [
                tensor if dimension is None else tensor.narrow(dimension, start, points)
                for tensor, dimension in zip(tensors, parts.sliced.values(), strict=True)
            ]
            made = iter(self.bodies[body]([start, int(start > 0), *slices, *sums]))
            for name, dimension in parts.rows.items():
                results[name].narrow(dimension, start, points).copy_(next(made))
            for name, join in joins.items():
                folded = next(made)
                join(results[name], folded, out=results[name]) if start else results[name].copy_(folded)
        return tuple(results.values())


def _empty(buffer: Buffer) -> torch.Tensor:
    shape, strides = [*map(int, buffer.shape)], [*map(int, buffer.strides)]
    return torch.empty_strided(shape, strides, dtype=buffer.dtype, device=buffer.device)
