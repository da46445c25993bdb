"""The price of a prologue: how many programs evaluate it decides whether it becomes part of a product's kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion.inspect.examples import lowered
from fusion.lowering.program import Contract
from fusion.schedule.chained import stream
from fusion.schedule.clusters.growth import grow
from tests.fusion.schedule.test_schedule import GPU

LONG, SHORT = 1 << 16, 128
"""Rows and columns of a product: 512 tiles and one."""


def expensive(x: Tensor) -> Tensor:
    return x.sin().exp().tanh().cos()


def is_prologue(program: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Whether the result of `expensive` is computed in the kernel of the product."""
    nodes = lowered(program, *inputs)
    (cluster,) = (c for c in grow(nodes, GPU).clusters if any(isinstance(nodes.nodes[m], Contract) for m in c.members))
    return len(cluster.members) > 1


@pytest.mark.parametrize("turned", [False, True], ids=["rows are long", "columns are long"])
def test_an_operand_is_evaluated_once_for_each_tile_of_the_other_side(turned: bool) -> None:
    long, short = torch.empty(LONG, 512), torch.empty(512, SHORT)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return w.T @ x.T if turned else x @ w

    assert is_prologue(lambda x, w: product(expensive(x), w), long, short)  # one tile on the other side
    assert not is_prologue(lambda x, w: product(x, expensive(w)), long, short)  # 512 of them


def test_a_weight_of_all_batches_is_evaluated_for_each_of_them() -> None:
    x, w = torch.empty(512, 128, 128), torch.empty(128, 128)
    assert not is_prologue(lambda x, w: torch.bmm(x, expensive(w).expand(512, 128, 128)), x, w)


def test_keys_are_computed_before_the_loop_over_them() -> None:
    """Each block of queries would compute them again."""
    q, k, v = (torch.empty(8, 4096, 64) for _ in range(3))
    program = lowered(lambda q, k, v: (q @ expensive(k).mT).softmax(-1) @ v, q, k, v)
    program, chains = stream(program, GPU)
    assert chains
    clusters = grow(program, GPU, given=chains).clusters
    (keys,) = (m for m, node in enumerate(program.nodes) if getattr(node, "out", "") == "cos")
    (own,) = (cluster for cluster in clusters if keys in cluster.members)
    assert not any(isinstance(program.nodes[member], Contract) for member in own.members)
