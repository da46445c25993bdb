"""Positions out of range on a GPU: an assertion of the device, as in eager, in a process that cannot go on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fusion
from tests.fusion.test_out_of_range import OPERATIONS, X

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch, fusion
table, words = torch.randn(9, 64, device="cuda"), torch.tensor([0, 8, {place}], device="cuda")
fused = fusion.fuse(lambda table, words: torch.nn.functional.embedding(words, table).exp())
fused(table, words)
torch.cuda.synchronize()
print("went on")
"""


@pytest.mark.parametrize("place", [8, 9, -1])
def test_the_device_asserts(place: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(place=place)], capture_output=True, text=True, check=False, timeout=300
    )
    if place == 8:
        assert "went on" in done.stdout, done.stderr
    else:
        assert done.returncode != 0 and "device-side assert" in done.stderr and "went on" not in done.stdout


@pytest.mark.parametrize("name", OPERATIONS)
def test_assertions_hold_where_eager_does_not_raise(name: str) -> None:
    function, dim, wraps = OPERATIONS[name]
    fused, x = fusion.fuse(function), X.cuda()
    for places in ([0, X.shape[dim] - 1, 1], [2, -X.shape[dim] if wraps else 0, 1]):
        at = torch.tensor(places, device="cuda")
        torch.testing.assert_close(fused(x, at), function(x, at))
    torch.cuda.synchronize()
