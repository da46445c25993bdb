"""What a region in chunks means: its body for some points of an axis at a time, and what these give put together.

Rows go to their places, products are added up in place by the body itself, reductions are joined as they are defined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from fusion.lowering.chunks import ADDED_UP, Chunked
from fusion.lowering.program import Program

Body: TypeAlias = "Callable[[list[object]], tuple[torch.Tensor, ...]]"
"""Computes a chunk: START, BETA, POINTS, sizes and tensors in one list."""


def run_chunks(
    node: Chunked[Program],
    bodies: Sequence[Body],
    length: int,
    sizes: Sequence[int],
    tensors: Sequence[torch.Tensor],
    results: Mapping[str, torch.Tensor],
) -> None:
    """Runs a region, one chunk after the other, into its `results`.

    Args:
        bodies: what computes each of `node.bodies`.
        length: points of the axis that is cut.
        sizes: what `node.symbols` stand for.
        tensors: those of `node.sliced`, whole.
    """
    joins = {name: getattr(torch, ADDED_UP[op]) for name, op in node.folds.items()}
    sums = [results[name] for name in node.sums]
    for start, points, body in node.starts(length):
        slices = [
            tensor if dimension is None else tensor.narrow(dimension, start, points)
            for tensor, (_, dimension) in zip(tensors, node.sliced, strict=True)
        ]
        # taken from their list one by one, so that none is there while the next chunk runs
        made = [*reversed(bodies[body]([start, int(start > 0), points, *sizes, *slices, *sums]))]
        for name, dimension in node.rows.items():
            results[name].narrow(dimension, start, points).copy_(made.pop())
        for name, join in joins.items():
            folded = made.pop()
            join(results[name], folded, out=results[name]) if start else results[name].copy_(folded)
