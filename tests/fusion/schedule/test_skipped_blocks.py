"""The condition under which a loop may skip blocks: none where masked points may count."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.lowering.indexing import axis_symbol, over_symbol
from fusion.lowering.ir.expr import Expr, IndexValue, Load, const, make_op
from fusion.lowering.ir.kernel import Fold
from fusion.schedule.reductions.skipped_blocks import counts_where

F32 = torch.float32
ROW, KEY = over_symbol(0), axis_symbol(0)


def loaded(name: str, *index: object) -> Load:
    return Load(name, index, F32)  # type: ignore[arg-type]  # symbols are indices


def weights(masked: float) -> Expr:
    """Softmax's from scores and their saved maxima and sums; later keys are masked by a number."""
    later = make_op("gt", IndexValue(KEY), IndexValue(ROW))
    scores = make_op("where", later, const(masked, F32), loaded("scores", ROW, KEY))
    shifted = make_op("sub", scores, loaded("maxima", ROW))
    return make_op("truediv", make_op("exp", shifted), loaded("sums", ROW))


def product(*args: Expr) -> Fold:
    return Fold("dot0", "dot", args, (ROW,), F32)


VALUES = loaded("values", ROW)


def test_points_at_minus_infinity_are_skipped() -> None:
    assert counts_where([product(weights(-math.inf), VALUES)], [ROW]) is not None


@pytest.mark.parametrize("least", [torch.finfo(F32).min, -1e4])
def test_points_at_a_finite_number_count_where_it_is_the_maximum_of_their_row(least: float) -> None:
    """Each key of a row that is masked as a whole has the weight 1 / n."""
    assert counts_where([product(weights(least), VALUES)], [ROW]) is None


@pytest.mark.parametrize("least", [torch.finfo(F32).min, -math.inf])
def test_points_whose_factor_is_selected_to_be_zero_are_skipped(least: float) -> None:
    later = make_op("gt", IndexValue(KEY), IndexValue(ROW))
    chosen = make_op("where", later, const(0.0, F32), make_op("mul", weights(least), loaded("upstream", ROW, KEY)))
    assert counts_where([product(chosen, VALUES)], [ROW]) is not None


def test_numbers_that_are_added_hide_points_where_they_are_minus_infinity() -> None:
    mask = loaded("mask", ROW, KEY)
    scores = make_op("add", loaded("scores", ROW, KEY), mask)
    weighted = product(make_op("exp", make_op("sub", scores, loaded("maxima", KEY))), VALUES)
    assert counts_where([weighted], [ROW], added=True) == make_op(
        "and",
        make_op("ne", loaded("scores", ROW, KEY), const(-math.inf, F32)),
        make_op("ne", mask, const(-math.inf, F32)),
    )
    assert counts_where([weighted], [ROW]) is None
    assert counts_where([product(scores, VALUES)], [ROW], added=True) is None
