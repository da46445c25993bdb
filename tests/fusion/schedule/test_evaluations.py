"""The price of a prologue: how many programs evaluate it decides whether it becomes part of a product's kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion
from fusion.inspect.examples import lowered
from fusion.lowering.ir.program import Contract, Program
from fusion.schedule.chained import chain_products
from fusion.schedule.clusters.growth import grow
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Space
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
    program, chains = chain_products(program, GPU)
    assert chains
    clusters = grow(program, GPU, given=chains).clusters
    (keys,) = (m for m, node in enumerate(program.nodes) if getattr(node, "out", "") == "cos")
    (own,) = (cluster for cluster in clusters if keys in cluster.members)
    assert not any(isinstance(program.nodes[member], Contract) for member in own.members)


def test_a_row_that_many_sums_share_is_computed_before_them() -> None:
    """Each of the 256 sums of a head would compute the row again."""

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return q.sin().mul(2) @ k.mT

    q, k = torch.randn(16, 1, 64), torch.randn(16, 256, 64)
    explanation = fusion.explain(scores, options={"target": "c"})(q, k)
    assert len(explanation.kernels) == 2 and not explanation.externs, str(explanation)


def test_few_rows_are_multiplied_with_weights_that_are_converted_once() -> None:
    """The kernel converts each weight once for both rows, and does not store it."""
    x, w = torch.randn(2, 4096), torch.randint(-128, 128, (512, 4096), dtype=torch.int8)
    explanation = fusion.explain(lambda x, w: (x * 2 + 1) @ w.float().t(), options={"target": "c"})(x, w)
    assert len(explanation.kernels) == 1 and not explanation.externs, str(explanation)


def shifted(x: Tensor) -> Tensor:
    y = expensive(x)
    return y[1:] + y[:-1] * y[1:]


def one_cluster(program: Program) -> tuple[Prices, Cluster]:
    """Return prices, and all nodes as one cluster whose readers are at the last node's axes."""
    prices = Prices(Dependences(program), GPU)
    axes = program.nodes[-1].axes
    here = {axis.symbol: axis.symbol for axis in axes}
    return prices, Cluster.of(Space(axes, ()), dict.fromkeys(range(len(program.nodes)), here))


def test_a_value_that_is_read_at_two_places_is_evaluated_twice() -> None:
    program = lowered(shifted, torch.empty(1024))
    prices, cluster = one_cluster(program)
    (cos,) = (m for m, node in enumerate(program.nodes) if getattr(node, "out", "") == "cos")
    assert prices.evaluations.copies(cluster)[cos] == 2


def test_a_value_that_is_read_twice_at_one_place_is_evaluated_once() -> None:
    program = lowered(lambda x: expensive(x) * expensive(x).exp(), torch.empty(1024))
    prices, cluster = one_cluster(program)
    assert not prices.evaluations.copies(cluster)


def doubling(x: Tensor) -> Tensor:
    """Add neighbours at distances 1, 2, 4, ...: a scan in parallel steps."""
    for k in range(8):
        x = torch.cat([x[: 1 << k], x[1 << k :] * x[: -(1 << k)].tanh()])
    return x


def test_steps_of_a_scan_are_not_evaluated_exponentially_often() -> None:
    """In one kernel the first step would be evaluated at 256 places for each element."""
    x = torch.randn(1 << 16)
    explanation = fusion.explain(doubling, options={"target": "c"})(x)
    assert 2 <= len(explanation.kernels) <= 8, str(explanation)
