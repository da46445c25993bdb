"""Evaluates a chunked region: its body for a chunk of an axis at a time, and the combination of the results.

Rows are written to their slices, products are accumulated in place by the body, reductions are combined by their own
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Program
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, joined_by

Body: TypeAlias = "Callable[[list[object]], tuple[torch.Tensor, ...]]"
"""Computes a chunk from START, BETA, POINTS, sizes and tensors in one list."""


def run_chunks(
    node: Chunked[Program],
    bodies: Sequence[Body],
    length: int,
    sizes: Sequence[int],
    tensors: Sequence[torch.Tensor],
    results: Mapping[str, torch.Tensor],
) -> None:
    """Run a region, one chunk after the other, into its `results`.

    Args:
        bodies: a function for each of `node.bodies`.
        length: points of the axis that is cut.
        sizes: the values of `node.symbols`.
        tensors: the full tensors of `node.sliced`.
    """
    joins = {name: SCALAR_OPS[joined_by(op)].meaning for name, op in node.folds.items()}
    sums = [results[name] for name in node.sums]
    for start, points, body in node.starts(length):
        slices = [
            tensor if dimension is None else tensor.narrow(dimension, start, points)
            for tensor, (_, dimension) in zip(tensors, node.sliced, strict=True)
        ]
        # popped one by one, so that none is alive while the next chunk runs
        outputs = [*reversed(bodies[body]([start, int(start > 0), points, *sizes, *slices, *sums]))]
        for name, dimension in node.rows.items():
            results[name].narrow(dimension, start, points).copy_(outputs.pop())
        for name, join in joins.items():
            folded = outputs.pop()
            join(results[name], folded, out=results[name]) if start else results[name].copy_(folded)
