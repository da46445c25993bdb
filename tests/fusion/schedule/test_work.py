"""The additions that each node takes per point, by the rates of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusion.codegen.c import CTarget
from fusion.codegen.price import Rates, Steps
from fusion.inspect.examples import lowered
from fusion.schedule.clusters.growth import grow
from fusion.schedule.clusters.work import additions_in_tiles, additions_per_point, is_padded_window
from fusion.schedule.rewrites.inline import inline_cheap_maps

RATES = Rates(1.0, 1e6, 1e6, 1e6, costs={"exp": 10.0})


def total(program: Callable[..., Tensor], *inputs: Tensor, **steps: float) -> float:
    lowered_program = lowered(program, *inputs)
    rates = replace(RATES, steps=Steps(**steps))
    return sum(additions_per_point(lowered_program, node, rates) for node in lowered_program.nodes)


def test_operations_cost_what_the_device_says() -> None:
    assert total(lambda x: x.exp() * 2, torch.empty(8)) == 11


def test_a_part_that_fewer_axes_decide_is_evaluated_less_often() -> None:
    program = lowered(lambda x, row: x * torch.exp(row), torch.empty(16, 4), torch.empty(4))
    inlined = lowered(lambda row: torch.exp(row).expand(16, 4).contiguous(), torch.empty(4))
    inlined = inline_cheap_maps(inlined)
    assert total(lambda x, row: x + row, torch.empty(16, 4), torch.empty(4)) == 1
    assert sum(additions_per_point(program, node, RATES) for node in program.nodes) == 11
    (node,) = inlined.nodes[-1:]
    assert additions_per_point(inlined, node, RATES) <= additions_in_tiles(inlined, node, RATES)


def test_folding_a_row_combines_its_lanes_once() -> None:
    rows, columns = (lambda x: x.sum(1)), (lambda x: x.sum(0))
    x = torch.empty(128, 128)
    assert total(rows, x, fold=1280.0) - total(rows, x) == 10
    assert total(columns, x, fold=1280.0) == total(columns, x)


@pytest.mark.parametrize(
    ("step", "slow", "fast", "inputs"),
    [
        ("turned", lambda x: x.t().contiguous() + 1, lambda x: x + 1, [torch.empty(8, 16)]),
        ("scanned", lambda x: x.cumsum(1), lambda x: x * 2, [torch.empty(8, 16)]),
        ("wide", lambda i: i * 3 + i, lambda i: i.int() * 0, [torch.empty(16, dtype=torch.int64)]),
        (
            "gathered",
            lambda table, i: table[i],
            lambda table, i: table[:16] + 1,
            [torch.empty(64), torch.empty(16, dtype=torch.int64)],
        ),
    ],
)
def test_work_that_lanes_do_not_share_costs_its_step(
    step: str, slow: Callable[..., Tensor], fast: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    assert total(slow, *inputs, **{step: 7.0}) >= total(slow, *inputs) + 7
    if step != "wide":
        assert total(fast, *inputs, **{step: 7.0}) == total(fast, *inputs)


def test_only_windows_that_reach_into_padding_are_padded() -> None:
    def windows(padding: int) -> list[bool]:
        x = torch.empty(1, 2, 8, 8)
        program = lowered(lambda x: torch.nn.functional.max_pool2d(x, 3, 1, padding), x)
        return [is_padded_window(node) for node in program.nodes]

    assert any(windows(1)) and not any(windows(0))


def test_a_chain_of_operations_stays_before_padded_windows_that_repeat_it() -> None:
    """Each element is in nine windows."""

    def pooled(x: Tensor, scale: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d((x * scale[:, None, None]).exp().relu(), 3, 1, 1)

    program = lowered(pooled, torch.empty(8, 64, 56, 56), torch.empty(64))
    assert len(grow(program, CTarget().capabilities).clusters) == 2
