"""The facts of the scalar operations, compared with numbers: the table claims exactly the facts that hold."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from fusion.lowering.ir.scalar_ops import COMPARISONS, FOLD_OPS, ORDERINGS, SCALAR_OPS, FoldName, joined_by

F64 = torch.float64
COUNT = 4000
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e300, -1e300, 5e-324, float("inf"), float("-inf"), float("nan")]
OF_INTEGERS = ("and", "or", "xor", "not", "shl", "shr", "checked", "bounded")
NAMES = sorted(set(SCALAR_OPS) - set(OF_INTEGERS))
DEGREES = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)


def drawn(count: int, seed: int) -> list[torch.Tensor]:
    """Numbers of both signs and many magnitudes within the domains of the operations."""
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(2, COUNT, generator=generator, dtype=F64) for _ in range(count)]
    return [sign * (3 * size).exp() for sign, size in normal]


def operands(name: str, seed: int) -> list[torch.Tensor]:
    args = drawn(SCALAR_OPS[name].arity, seed)
    return [args[0] > 0, *args[1:]] if name == "where" else args


def everywhere(name: str) -> list[torch.Tensor]:
    """Drawn operands, and all combinations of special numbers."""
    special = [torch.tensor(SPECIAL, dtype=F64)] * SCALAR_OPS[name].arity
    grids = [grid.flatten() for grid in torch.meshgrid(*special, indexing="ij")]
    grids = [grids[0] > 0, *grids[1:]] if name == "where" else grids
    return [torch.cat(pair) for pair in zip(operands(name, 0), grids, strict=True)]


def is_linear(name: str, group: tuple[int, ...]) -> bool:
    """Is f(s·x + y) = s·f(x) + f(y), where the arguments that are not in the group are the same in all three?"""
    meaning, first, second = SCALAR_OPS[name].meaning, operands(name, 1), operands(name, 2)
    if any(first[k].dtype is torch.bool for k in group):
        return False
    (scale,) = drawn(1, 3)
    other = [second[k] if k in group else x for k, x in enumerate(first)]
    both = [scale * x + other[k] if k in group else x for k, x in enumerate(first)]
    result = meaning(*both)
    if result.dtype is torch.bool:
        return False
    return torch.allclose(result, scale * meaning(*first) + meaning(*other), rtol=1e-9, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_is_linear_in_just_the_groups_that_its_row_names(name: str) -> None:
    row = SCALAR_OPS[name]
    groups = [group for count in range(1, row.arity + 1) for group in combinations(range(row.arity), count)]
    assert {group for group in groups if is_linear(name, group)} == set(row.linear)


@pytest.mark.parametrize("name", NAMES)
def test_the_result_for_a_nan_operand_agrees_with_the_table(name: str) -> None:
    row, args = SCALAR_OPS[name], everywhere(name)
    nan = torch.stack([arg.isnan() for arg in args if arg.dtype is F64]).any(0)
    results = row.meaning(*args)[nan]
    assert results.numel()
    if results.dtype is torch.bool:
        seen = results[0].item() if (results == results[0]).all() else None
    else:
        seen = "nan" if results.isnan().all() else None
    assert seen == row.of_nan


@pytest.mark.parametrize("name", [name for name in NAMES if SCALAR_OPS[name].result == "same"])
def test_results_fill_the_range_of_their_row_and_do_not_leave_it(name: str) -> None:
    row, args = SCALAR_OPS[name], everywhere(name)
    if name == "rsqrt":
        args = [torch.where(arg == 0, 0.0, arg) for arg in args]  # of -0.0 it is -∞
    results = row.meaning(*args)
    low, high = results[~results.isnan()].aminmax()
    assert row.low <= low <= max(row.low + 1e-3, -100) and min(row.high - 1e-3, 100) <= high <= row.high


@pytest.mark.parametrize("name", [name for name in NAMES if name != "where" and SCALAR_OPS[name].result == "same"])
def test_an_operation_is_homogeneous_of_just_the_degree_of_its_row(name: str) -> None:
    row, args = SCALAR_OPS[name], operands(name, 4)
    factor = drawn(1, 5)[0].abs()
    scaled, plain = row.meaning(*(factor * arg for arg in args)), row.meaning(*args)
    seen = [k for k in DEGREES if torch.allclose(scaled, plain * factor**k, rtol=1e-7, atol=1e-12, equal_nan=True)]
    assert seen == ([] if row.degree is None else [row.degree])


@pytest.mark.parametrize("name", [*OF_INTEGERS, *(name for name in NAMES if SCALAR_OPS[name].result == "bool")])
def test_nothing_is_claimed_of_the_algebra_of_bits_and_truths(name: str) -> None:
    row = SCALAR_OPS[name]
    assert (row.linear, row.degree, row.low, row.high) == ((), None, float("-inf"), float("inf"))
    assert name not in OF_INTEGERS or row.of_nan is None


@pytest.mark.parametrize("name", [n for n in NAMES if (SCALAR_OPS[n].arity, SCALAR_OPS[n].result) == (1, "same")])
def test_just_the_exponential_functions_make_products_of_sums_and_have_logarithms(name: str) -> None:
    row = SCALAR_OPS[name]
    x, y = torch.randn(2, COUNT, generator=torch.Generator().manual_seed(6), dtype=F64)
    results = row.meaning(x)
    is_exponential = torch.allclose(row.meaning(x + y), results * row.meaning(y), rtol=1e-12, atol=0)
    assert is_exponential == (row.logarithm is not None)
    if row.logarithm is not None:
        assert torch.allclose(SCALAR_OPS[row.logarithm].meaning(results), x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in NAMES if (SCALAR_OPS[n].arity, SCALAR_OPS[n].result) == (1, "same")])
def test_functions_are_even_or_odd_as_their_rows_say(name: str) -> None:
    row, args = SCALAR_OPS[name], everywhere(name)
    results, mirrored = row.meaning(*args), row.meaning(*(-arg for arg in args))
    signs = {"even": mirrored, "odd": -mirrored}
    seen = [parity for parity, other in signs.items() if torch.equal(results.nan_to_num(7), other.nan_to_num(7))]
    assert seen == ([] if row.parity is None else [row.parity])


@pytest.mark.parametrize("name", NAMES)
def test_just_the_comparisons_have_a_mirror_and_a_negation(name: str) -> None:
    row = SCALAR_OPS[name]
    if row.mirror is None or row.negation is None:
        assert row.mirror is row.negation is None and name not in COMPARISONS
        return
    x, y = everywhere(name)
    results, known = row.meaning(x, y), ~(x.isnan() | y.isnan())
    assert torch.equal(results, SCALAR_OPS[row.mirror].meaning(y, x))
    assert torch.equal(results[known], ~SCALAR_OPS[row.negation].meaning(x, y)[known])
    assert (name in ORDERINGS) == (not torch.equal(results, row.meaning(y, x)))


@pytest.mark.parametrize("name", sorted(name for name, row in FOLD_OPS.items() if row.joined_by))
def test_the_results_of_two_folds_are_joined_as_the_table_says(name: FoldName) -> None:
    if name == "dot":
        left, right = drawn(2, 8)
        parts = [torch.dot(left[k : k + COUNT // 2], right[k : k + COUNT // 2]) for k in (0, COUNT // 2)]
        together = torch.dot(left, right)
    else:
        fold = {"max": torch.amax, "min": torch.amin}.get(name, getattr(torch, name))
        (numbers,) = drawn(1, 8)
        values = numbers[:40] > 0 if name in ("any", "all") else numbers[:40]
        parts, together = [fold(values[:20], 0), fold(values[20:], 0)], fold(values, 0)
    torch.testing.assert_close(SCALAR_OPS[joined_by(name)].meaning(*parts), together)
