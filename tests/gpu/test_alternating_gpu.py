"""Products whose groups of warps take turns, on a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.forms.alternating_product import AlternatingConfig
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.making import F16, F32, assert_same, expected, tensors
from tests.codegen.triton.test_alternating import gated_gradient, linear, projections, with_two_tiles
from tests.gpu.launched import build, check

pytestmark = pytest.mark.gpu

EXAMPLES = {
    "full blocks": linear(4096, 1024, 768),
    "half": linear(4096, 1024, 768, F16),
    "one step": linear(4096, 1024, 64),
    "as many steps as slots": linear(4096, 1024, 320),
    "odd sides": linear(3333, 1096, 1000, both=True),
    "few blocks": linear(256, 256, 512),
    "a tile is loaded": linear(4096, 1024, 768, tile=True),
    "a tile with odd sides is loaded": linear(4000, 1016, 768, both=True, tile=True),
    "two tiles are loaded": with_two_tiles(4096, 1024, 768),
    "two tiles with odd sides are loaded": with_two_tiles(3333, 1096, 1000),
    "two tiles of one step": with_two_tiles(4096, 1024, 64),
    "two tiles and two results": gated_gradient(4000, 1016, 768),
    "rows of even length": linear(4096, 1002, 768),
    "rows of odd length": linear(4096, 1001, 768),
    "a wide result": linear(4096, 1024, 768, results=F32),
    "a wide result of odd sides": linear(4001, 1032, 768, results=F32),
    "left columns": linear(2048, 1096, 520, turned=(True, False)),
    "right columns": linear(2050, 1096, 520, turned=(False, True)),
    "both columns": linear(2048, 1096, 520, F16, turned=(True, True)),
}


def in_turn(kernel: Kernel) -> AlternatingConfig:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("has no groups of warps")
    return next(each for each in TritonTarget().configs(kernel) if isinstance(each, AlternatingConfig))


@pytest.mark.parametrize("name", EXAMPLES)
def test_in_turn(name: str) -> None:
    check(EXAMPLES[name], in_turn(EXAMPLES[name]))


@pytest.mark.parametrize("make", [linear, with_two_tiles])
def test_every_launch_gives_the_same(make: Callable[[int, int, int], Kernel]) -> None:
    """A slot, or the memory of tiles, that is released too early would show in some of them."""
    kernel = make(8192, 2048, 448)
    args = [arg.cuda() for arg in tensors(kernel)]
    launch = build(kernel, in_turn(kernel))
    launch(*args)
    want = expected(kernel, [arg.cpu() for arg in args])[-1]
    first = args[-1].clone()
    torch.testing.assert_close(first.cpu(), want, rtol=1.6e-2, atol=1.6e-2)
    for _ in range(200):
        args[-1].fill_(float("nan"))
        launch(*args)
        assert torch.equal(args[-1], first)


@pytest.mark.parametrize("columns", [(768, 768, 768), (2048, 512, 512), (520, 520)], ids=str)
def test_products_of_the_same_rows(columns: tuple[int, ...]) -> None:
    kernel = projections(4096, 768, *columns)
    given = tensors(kernel)
    want = expected(kernel, given)
    got = [tensor.cuda() for tensor in given]
    source = TritonTarget().emit(kernel)
    assert "_multiply_in_turn" in source or torch.cuda.get_device_capability() != (9, 0)
    TritonTarget().build(kernel, source)(*got)
    assert_same(kernel, [tensor.cpu() for tensor in got], want, 4.0)
