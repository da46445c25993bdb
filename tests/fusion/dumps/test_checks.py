"""What counts as right: errors that rounding explains, and no others."""

from __future__ import annotations

import pytest
import torch

from fusion.dumps.checks import is_close

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("ours", "rounded", "exact", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0001], [1.0, 2.0], [1.0, 2.0], False),
        ([1.0, 2.0001], [1.0, 2.0001], [1.0, 2.0], True),  # the dtypes explain it
        ([1.0, NAN], [1.0, 2.0], [1.0, 2.0], False),
        ([1.0, NAN], [1.0, NAN], [1.0, NAN], True),
        ([INF, 1.0], [INF, 1.0], [1e39, 1.0], True),  # the dtypes do not hold it
        ([1e38, 1.0], [INF, 1.0], [1e39, 1.0], False),
        ([-INF, 1.0], [INF, 1.0], [INF, 1.0], False),
    ],
)
def test_errors_of_floats(ours: list[float], rounded: list[float], exact: list[float], expected: bool) -> None:
    right, _, _ = is_close(torch.tensor(ours), torch.tensor(rounded), torch.tensor(exact, dtype=torch.float64))
    assert right is expected


def test_errors_of_integers() -> None:
    exact = torch.arange(100_000)
    few, many = exact.clone(), exact.clone()
    few[:5] += 1
    many[:50] += 1
    assert is_close(few, exact, exact)[0] and not is_close(many, exact, exact)[0]
