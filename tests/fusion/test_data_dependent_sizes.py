"""Data-dependent sizes, and sizes that are not passed as numbers: all else is compiled, and correct."""

from __future__ import annotations

import pytest
import torch

from tests.fusion.test_dynamic import Program, Tensors, fused, normal


def positions(x: torch.Tensor, n: torch.Tensor) -> Tensors:
    return x.nonzero() * 2, x.sum(0) * 2 + 1


def selected(x: torch.Tensor, n: torch.Tensor) -> Tensors:
    kept = torch.masked_select(x, x > 0)
    return (kept * 2 + 1).sum(), torch.relu(kept - 1)


def chosen(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x[x[:, 0] > 0] * 2, -1) + 1


def repeated(x: torch.Tensor, n: torch.Tensor) -> Tensors:
    rows = x.repeat_interleave(n.expand(x.shape[0]), 0)
    return torch.tanh(rows) * 2, (rows * 3).sum(0)


def distinct(x: torch.Tensor, n: torch.Tensor) -> Tensors:
    result, place = torch.unique(x.round().long()[:, 0], return_inverse=True)
    return result * 2 + 1, place + 1


def counted(x: torch.Tensor, n: torch.Tensor) -> Tensors:
    count = int(n.item())
    torch._check(count <= x.shape[0])  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    return x[:count] * 2 + torch.arange(count)[:, None], torch.ones(count, 3) + 1


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("program", [positions, selected, chosen, repeated, distinct, counted])
def test_data_dependent_sizes(program: Program, captured: bool) -> None:
    """The operations around them are compiled; if Dynamo captures them, in one graph."""
    with torch._dynamo.config.patch(capture_scalar_outputs=captured, capture_dynamic_output_shape_ops=captured):
        ours, reports = fused(program, None)
        for size in (5, 8, 9):
            given = normal(size, 6), torch.tensor(size - 4)
            torch.testing.assert_close(ours(*given), program(*given))
        none = -normal(7, 6).abs(), torch.tensor(0)  # nothing is selected, no row is repeated
        torch.testing.assert_close(ours(*none), program(*none))
    assert sum(len(report.kernels) for report in reports) >= 2
    if captured:
        assert len(reports) <= 3  # a size of 1 is compiled for itself


def test_sizes_behind_a_break_are_read_off_tensors() -> None:
    """Dynamo passes sizes that it met before; the tensors after the break have symbols of their own."""

    def program(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        same = y.to(torch.float32)
        _, lower = torch.unbind(same[:2])
        spread = x.unsqueeze(-1).expand(*x.shape, 2)
        result = x.nonzero()
        return lower, spread, result, (y * 1).transpose(0, -1) + 1, same

    ours, _ = fused(program, True)
    for size in (40, 7):
        given = torch.tensor(1.5), normal(size, size)
        torch.testing.assert_close(ours(*given), program(*given))


def test_checks_of_data_dependent_sizes_are_kept() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        ours, _ = fused(counted, None)
        ours(normal(5, 6), torch.tensor(3))
        with pytest.raises(RuntimeError):
            ours(normal(5, 6), torch.tensor(9))
