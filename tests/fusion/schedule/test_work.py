"""The additions that each node takes per point, by the rates of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusion import fuse
from fusion.codegen.c.target import CTarget
from fusion.codegen.price import MATRIX_RATES, Rates, Steps
from fusion.inspect.examples import TARGET, lowered
from fusion.lowering.ir.program import Program, Reduce, Scatter
from fusion.schedule.clusters.growth import grow
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.clusters.work import additions_in_tiles, additions_per_point, is_split_window
from fusion.schedule.iteration.contiguity import window_loads
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.rewrites.inline import inline_cheap_maps
from fusion.schedule.rewrites.vector_products import sum_few_rows
from fusion.schedule.rewrites.windows import unroll_windows

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


@pytest.mark.parametrize(
    ("size", "stride", "padding", "split"), [(3, 1, 1, True), (3, 2, 0, True), (3, 1, 0, False), (2, 2, 0, False)]
)
def test_windows_are_split_that_reach_into_padding_or_overlap_with_gaps(
    size: int, stride: int, padding: int, split: bool
) -> None:
    x = torch.empty(1, 2, 8, 8)
    program = lowered(lambda x: torch.nn.functional.max_pool2d(x, size, stride, padding), x)
    assert any(is_split_window(program, node) for node in program.nodes) == split


def test_a_program_without_points_has_a_price() -> None:
    """Its windows have no results that could share the start of a loop."""

    def scattered(x: Tensor, y: Tensor) -> Tensor:
        return x.select_scatter(x.select(0, 0) * 2, 0, -1) @ y

    x, y = torch.empty(8, 0, 5, 5), torch.ones(5, requires_grad=True)
    got = fuse(scattered, options={"strict": True})(x, y)
    got.sum().backward()
    assert got.shape == (8, 0, 5) and y.grad is not None and not y.grad.any()


@pytest.mark.parametrize(("stride", "padding", "loop"), [(1, 1, 64.0), (2, 0, 16.0)])
def test_each_element_of_a_window_is_a_loop_along_the_results(stride: int, padding: int, loop: float) -> None:
    """Long rows share its start; where no bounds have to be computed it is shorter."""

    def each(width: int) -> float:
        x = torch.empty(1, 2, 8, stride * (width - 1) + 3 - 2 * padding)

        def pool(x: Tensor) -> Tensor:
            return torch.nn.functional.avg_pool2d(x, 3, stride, padding)

        return total(pool, x, window=64.0, unbounded=0.25) - total(pool, x)

    assert [each(8), each(16)] == [pytest.approx(loop / 8), pytest.approx(loop / 16)]


def test_the_lanes_of_sums_of_products_are_combined_together() -> None:
    matrix, capabilities = torch.empty(128, 128), replace(TARGET.capabilities, few_rows=16)
    program, _ = sum_few_rows(lowered(lambda w, x: w @ x, matrix, torch.empty(128)), (), capabilities)
    rates = replace(RATES, steps=Steps(fold=1280.0, together=128.0))
    (node,) = program.nodes
    assert isinstance(node, Reduce)
    assert additions_per_point(program, node, rates) == 2 * rates.flops / rates.matrix_flops / MATRIX_RATES[4] + 1


def test_a_looked_up_row_costs_once() -> None:
    table, i = torch.empty(64, 32), torch.empty(16, 5, dtype=torch.int64)
    bags = lambda table, i: table[i].sum(1)  # noqa: E731
    assert total(bags, table, i, looked_up=64.0) - total(bags, table, i) == 2


def added(bins: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    return table.index_add(0, bins, rows)


@pytest.mark.parametrize("count", [64, 4096])
def test_rows_that_are_added_to_a_table_are_shared_by_lanes(count: int) -> None:
    given = torch.empty(1 << 14, dtype=torch.int64), torch.empty(1 << 14, 64), torch.empty(count, 64)
    assert total(added, *given, updated=8.0, rows=0.25) - total(added, *given, rows=0.25) == 2


def test_elements_that_are_added_one_by_one_are_not() -> None:
    given = torch.empty(1 << 17, dtype=torch.int64), torch.empty(1 << 17), torch.empty(64)
    assert total(added, *given, updated=8.0, rows=0.25) - total(added, *given, rows=0.25) == 8


@pytest.mark.parametrize(("count", "ordered", "moved"), [(64, True, 64), (64, False, 1 << 14), (4096, True, 1 << 14)])
def test_a_table_that_is_held_moves_once(count: int, ordered: bool, moved: int) -> None:
    """Each update reads and writes a row, in a cache if the core that runs the loop keeps the table there."""
    given = torch.empty(1 << 14, dtype=torch.int64), torch.empty(1 << 14, 64), torch.empty(count, 64)
    program, capabilities = lowered(added, *given), replace(CTarget().capabilities, ordered=ordered)
    (updating,) = (k for k, node in enumerate(program.nodes) if isinstance(node, Scatter))
    (cluster,) = (each for each in grow(program, capabilities).clusters if updating in each.members)
    assert cluster.members == (updating,)
    _, written = Prices(Dependences(program), capabilities).traffic(cluster)
    assert written == 2 * 4 * 64 * moved


def test_a_chain_of_operations_stays_before_padded_windows_that_repeat_it() -> None:
    """Each element is in nine windows."""

    def pooled(x: Tensor, scale: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d((x * scale[:, None, None]).exp().relu(), 3, 1, 1)

    program = lowered(pooled, torch.empty(8, 64, 56, 56), torch.empty(64))
    assert len(grow(program, CTarget().capabilities).clusters) == 2


@pytest.mark.parametrize(("padding", "clusters"), [(1, 2), (0, 1)])
def test_padded_windows_of_several_tensors_are_loaded_one_by_one(padding: int, clusters: int) -> None:
    """Those of one tensor in lanes, from the first result to the last whose element counts."""

    def pooled(x: Tensor, scale: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(torch.relu(x * scale[:, None, None]), 3, 2, padding)

    def of_one(x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(torch.relu(x), 3, 2, padding)

    x, capabilities = torch.empty(8, 64, 56, 56), CTarget().capabilities
    assert len(grow(lowered(pooled, x, torch.empty(64)), capabilities).clusters) == clusters
    assert len(grow(lowered(of_one, x), capabilities).clusters) == 1


def test_data_that_choose_between_values_do_not_bound_windows() -> None:
    """Each lane selects its value, as in the gradient of a pool."""

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x.unfold(1, 3, 1) > y.unfold(1, 3, 1), x.unfold(1, 3, 1), 0.0).sum(-1)

    program = lowered(chosen, torch.empty(64, 64), torch.empty(64, 64))
    assert not any(isinstance(node, Reduce) and is_split_window(program, node) for node in program.nodes)


def unrolled(program: Callable[[Tensor], Tensor], *shape: int) -> Program:
    return unroll_windows(lowered(program, torch.empty(shape)), TARGET.capabilities)


@pytest.mark.parametrize(
    ("pool", "counts"),
    [
        (lambda x: x.unfold(1, 3, 1).amax(-1), (0, 3, 0)),  # x[i], x[i + 1], x[i + 2]
        (lambda x: x.unfold(1, 3, 2).amax(-1), (0, 0, 3)),  # x[2 i], …
        (lambda x: x.unfold(0, 3, 1).amax(-1), (3, 0, 0)),  # whole rows
        (lambda x: x + x.roll(1, 0), (0, 0, 0)),  # a row that wraps is at no fixed distance
        (lambda x: x * 2 + x, (0, 0, 0)),
    ],
)
def test_loads_of_windows_are_told_apart_by_how_lanes_read(
    pool: Callable[[Tensor], Tensor], counts: tuple[int, int, int]
) -> None:
    program = unrolled(pool, 64, 64)
    assert window_loads(program, program.nodes[-1]) == counts
    free, priced = RATES, replace(RATES, steps=Steps(windowed=8.0, shifted=2.0, strided=5.0))
    extra = additions_per_point(program, program.nodes[-1], priced) - additions_per_point(
        program, program.nodes[-1], free
    )
    assert extra == 8 * counts[0] + 16 * counts[1] + 40 * counts[2]


def test_a_window_reads_every_element_that_it_covers() -> None:
    """Four elements for each result: one per point would be a quarter of the tensor."""
    program = unrolled(lambda x: torch.nn.functional.avg_pool2d(x, 2), 1, 8, 32, 32)
    (cluster,) = grow(program, TARGET.capabilities).clusters
    read, written = Prices(Dependences(program), TARGET.capabilities).traffic(cluster)
    assert (read, written) == (4 * 8 * 32 * 32, 4 * 8 * 16 * 16)


def test_conversions_of_16_bit_floats_count_where_they_are_loaded_and_stored() -> None:
    """A value that passes from one member to another is converted in no kernel."""

    def conversions(dtype: torch.dtype) -> float:
        program = lowered(lambda x: x.sin().exp() * 2, torch.empty(64, 64, dtype=dtype))
        (cluster,) = grow(program, TARGET.capabilities).clusters
        free = Prices(Dependences(program), TARGET.capabilities).price(cluster).scalars
        rates = replace(TARGET.capabilities.rates, steps=Steps(widened=2.0, narrowed=6.0))
        priced = Prices(Dependences(program), replace(TARGET.capabilities, rates=rates)).price(cluster).scalars
        return (priced - free) * rates.flops / 64**2

    assert conversions(torch.bfloat16) == pytest.approx(8.0)
    assert conversions(torch.float32) == 0.0


def test_a_copy_of_16_bit_floats_converts_nothing() -> None:
    program = lowered(lambda x: x.t().contiguous(), torch.empty(64, 64, dtype=torch.bfloat16))
    (cluster,) = grow(program, TARGET.capabilities).clusters
    rates = replace(TARGET.capabilities.rates, steps=Steps(widened=2.0, narrowed=6.0))
    free, priced = (
        Prices(Dependences(program), replace(TARGET.capabilities, rates=each)).price(cluster).scalars
        for each in (TARGET.capabilities.rates, rates)
    )
    assert priced == free


def test_a_random_number_that_two_results_need_is_drawn_once() -> None:
    """A kernel of both takes less than two of its draws more than one of either."""

    def dropped(x: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_dropout(x, 0.5, True)

    program, capabilities = lowered(dropped, torch.empty(1 << 16)), CTarget().capabilities
    program = inline_cheap_maps(program)
    (cluster,) = (each for each in grow(program, capabilities).clusters if len(each.members) > 1)
    times = Prices(Dependences(program), capabilities).scalar_times(cluster)
    drawn = capabilities.rates.scalar_us(capabilities.rates.costs["random"] * (1 << 16))
    assert drawn < sum(times.values()) < 1.5 * drawn


def test_casts_between_floats_and_long_integers_cost_what_the_device_says() -> None:
    def cast(source: torch.dtype, to: torch.dtype) -> float:
        return total(lambda x: x.to(to), torch.empty(8, dtype=source), wide=3.0, converted=40.0)

    assert cast(torch.float32, torch.int64) == cast(torch.int64, torch.float64) == 43
    assert cast(torch.int32, torch.int64) == 3
    assert cast(torch.float32, torch.int32) == 1  # no map costs less


def test_lanes_that_read_lines_of_their_own_cost_a_request_each() -> None:
    """Along a row, 32 lanes of 16-bit numbers share two lines; across rows, each has its own."""
    x, i = torch.empty(64, 128, dtype=torch.bfloat16), torch.empty(64, 64, dtype=torch.int64)

    def along(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.gather(x, 1, i)

    def across(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.gather(x.t(), 0, i)

    requests = [total(each, x, i, gathered=1.0, requested=256.0) - total(each, x, i) for each in (along, across)]
    assert requests == [16, 256]
    assert total(across, x, i, gathered=300.0, requested=256.0) - total(across, x, i) == 300
