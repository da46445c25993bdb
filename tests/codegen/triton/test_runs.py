"""Columns that are contiguous in runs, such as heads of 64, are processed by neighbouring threads."""

from __future__ import annotations

import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.blocks.contiguous import within_run
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.indexing import FloorDiv, Mod, axis_symbol
from fusion.schedule.kernels import KernelCall
from tests.codegen.triton.blocking import block


def concatenated_heads(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, heads, length, 64] twice → [batch · length, 2 · heads · 64] and its sum over rows."""
    rows = q.shape[0] * q.shape[2]
    both = torch.cat([x.transpose(1, 2).reshape(rows, -1) for x in (q, k)], 1)
    return both, both.sum(0)


def test_a_sum_over_rows_takes_neighbouring_columns_together() -> None:
    given = [torch.empty(4, 6, 512, 64, dtype=torch.bfloat16) for _ in range(2)]
    graph = make_fx(concatenated_heads, tracing_mode="fake", decomposition_table=decompositions())(*given)
    target = TritonTarget("sm_90")
    steps = schedule_graph(graph, target, Trace(None, "graph"))[1].steps
    first = next(step for step in steps if isinstance(step, KernelCall))
    assert [dim.name for dim in block(first.kernel).dims] == ["r", "x"]
    assert target.configs(first.kernel)[0].block("x") >= 32


def test_runs() -> None:
    i, j = axis_symbol(0), axis_symbol(1)
    assert within_run(65536 * FloorDiv(i, 64) + Mod(i, 64) + 7 * j, i) == i + 7 * j
    assert within_run(65536 * Mod(FloorDiv(i, 64), 36) + Mod(i, 64), i) == i
    short = 8 * FloorDiv(i, 4) + Mod(i, 4)
    assert within_run(short, i) == short
    assert within_run(FloorDiv(j, 64) + i, i) == FloorDiv(j, 64) + i
    n = sympy.Symbol("n", integer=True, positive=True)
    assert within_run(Mod(i, n), i) == Mod(i, n)
