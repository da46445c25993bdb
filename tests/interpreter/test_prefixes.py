"""Scans in blocks, under Triton's interpreter, against the evaluator: the state between blocks."""

from __future__ import annotations

import pytest
import torch

from fusion.codegen.triton import Config, TritonTarget
from fusion.lowering.ir.kernel import Kernel, Role
from tests.codegen.kernels.making import assert_same, expected, tensors
from tests.codegen.kernels.rows import scan, scan_normalised

TARGET = TritonTarget()
NAMES = ("sum", "prod", "max", "min", "logsumexp")
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0, 1.0, -1.0)


def run(kernel: Kernel, given: list[torch.Tensor], config: Config) -> None:
    TARGET.build(kernel, TARGET.emit(kernel, config))(*given)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in NAMES for dtype in (torch.float32, torch.float64)),
        *((name, torch.int64) for name in NAMES[:-1]),
    ],
)
def test_blocks_of_a_row(name: str, dtype: torch.dtype) -> None:
    for length in (45, 48):
        kernel = scan(name, 3, length, Role.LOOP, dtype)
        given = tensors(kernel)
        want = expected(kernel, given)
        run(kernel, given, Config((("r", 16),)))
        assert_same(kernel, given, want)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_columns(name: str) -> None:
    kernel = scan(name, 45, 6, Role.LOOP, along=0)
    given = tensors(kernel)
    want = expected(kernel, given)
    run(kernel, given, Config((("r", 16), ("x", 4))))
    assert_same(kernel, given, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("along", [0, 1])
def test_special_values(name: str, along: int) -> None:
    """NaN wins and stays, the last of equals is the position, -0.0 after 0.0 is kept."""
    picks = torch.randint(0, len(SPECIAL), (40, 40), generator=torch.Generator().manual_seed(0))
    picks[20:] = torch.where(picks[20:] == 2, 0, picks[20:])  # most begin with NaN soon: some without
    picks[:, 20:] = torch.where(picks[:, 20:] == 2, 1, picks[:, 20:])
    for role, blocks in ((Role.WHOLE, 64), (Role.LOOP, 8)):
        kernel = scan(name, 40, 40, role, along=along)
        given = tensors(kernel)
        given[0] = torch.tensor(SPECIAL)[picks]
        want = expected(kernel, given)
        run(kernel, given, Config((("r", blocks), ("x", 4)) if along == 0 else (("x", 4), ("r", blocks))))
        assert_same(kernel, given, want)
        signed = name in ("max", "min") and role is Role.WHOLE  # numpy's sum, which stands for Triton's, drops -0.0
        for one, other in zip(given, want, strict=True) if signed else ():
            assert torch.equal(torch.signbit(one.nan_to_num(1)), torch.signbit(other.nan_to_num(1)))


def test_a_scan_between_folds() -> None:
    kernel = scan_normalised(3, 45, Role.LOOP)
    given = tensors(kernel)
    want = expected(kernel, given)
    run(kernel, given, Config((("r", 16),)))
    assert_same(kernel, given, want)
