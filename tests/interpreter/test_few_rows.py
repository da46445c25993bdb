"""Generated products of a few rows with plain and quantised weights, under Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.codegen.triton import Config, TritonTarget
from fusion.lowering.ir.kernel import Kernel
from fusion.schedule.library import split_k
from tests.codegen.kernels.making import BF16
from tests.codegen.kernels.products import matmul
from tests.codegen.triton.blocking import block
from tests.fusion.schedule.test_quantised import LINEARS, error, inputs, only_kernel

TARGET = TritonTarget("sm_90")


def run(kernel: Kernel, given: list[torch.Tensor], config: Config | None = None) -> torch.Tensor:
    m, n = given[0].shape[0], given[1].shape[0]
    out = torch.full((m, n), float("nan"), dtype=given[0].dtype)
    TARGET.build(kernel, TARGET.emit(kernel, config))(*given, out)
    return out


@pytest.mark.parametrize("m", [1, 3, 16, 40])
@pytest.mark.parametrize("name", LINEARS)
def test_quantised_linear(name: str, m: int) -> None:
    function = LINEARS[name]
    given = inputs(function, m, 72, 384)
    out = run(only_kernel(function, *given), given)
    assert error(out, function, given) <= 2 * error(function(*given), function, given)


def test_one_row_and_many_rows_of_packed_weights() -> None:
    """Then the matrix units process the one row, too."""
    function = LINEARS["packed"]
    given = inputs(function, 1, 8457, 64)
    kernel = only_kernel(function, *given)
    assert "tl.dot(" in TARGET.emit(kernel)
    assert error(run(kernel, given), function, given) <= 2 * error(function(*given), function, given)


@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize(
    ("name", "k", "shares"), [("packed", 2048, 0), ("packed_in_groups", 2048, 2), ("packed_in_groups", 4096, 4)]
)
def test_the_last_program_of_a_tile_adds_up_its_parts(
    name: str, k: int, shares: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the loop over groups is longer than two lines of memory, a program takes the groups of two lines."""
    monkeypatch.setattr(split_k, "_price", lambda *args: 0.0)
    monkeypatch.setattr(split_k, "MOST_PARTS", 4)
    function = LINEARS[name]
    given = inputs(function, m, 72, k)
    kernel = only_kernel(function, *given)
    assert [int(axis.size) for axis in kernel.awaited] == [4]
    assert [int(dim.size) for dim in block(kernel).dims if dim.name == "s"] == [shares] * (shares > 0)
    read, out = iter(given), torch.full((m, 72), float("nan"), dtype=BF16)
    passed = [next(read) if not param.written else out for param in kernel.params]
    (place,) = [k for k, param in enumerate(kernel.params) if param.written and param.dtype is torch.float32]
    result = kernel.params[place]
    parts = torch.empty_strided([int(size) for size in result.shape], [int(stride) for stride in result.strides])
    passed[place] = parts.fill_(torch.nan)
    launch = TARGET.build(kernel, TARGET.emit(kernel))
    for _ in range(2):
        launch(*passed)
        assert error(out, function, given) <= 2 * error(function(*given), function, given)


@pytest.mark.parametrize("m", [3, 16])
@pytest.mark.parametrize("group", [64, 128])
def test_warps_take_a_group_of_each_line(m: int, group: int) -> None:
    """A line is 256 weights of 4 bits."""
    function = LINEARS["packed_in_groups"]
    given = inputs(function, m, 72, 1024, group)
    kernel = only_kernel(function, *given)
    limit = 2 * error(function(*given), function, given)
    for config in TARGET.configs(kernel):
        assert config.block("s") == config.num_warps == 256 // group
        assert error(run(kernel, given, config), function, given) <= limit, config


@pytest.mark.parametrize("name", ["in_groups", "packed_in_groups"])
def test_every_configuration_gives_the_same(name: str) -> None:
    function = LINEARS[name]
    for m in (2, 16):
        given = inputs(function, m, 72, 256, group=64)
        kernel = only_kernel(function, *given)
        limit = 2 * error(function(*given), function, given)
        for config in TARGET.configs(kernel):
            assert error(run(kernel, given, config), function, given) <= limit, config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_vector_times_ragged_rows(dtype: torch.dtype) -> None:
    """Neither the rows nor the summed axis are a multiple of a block."""
    given = [torch.randn(1, 1531).to(dtype), torch.randn(277, 1531).to(dtype)]
    kernel = only_kernel(F.linear, *given)
    assert "tl.dot" not in TARGET.emit(kernel)
    assert error(run(kernel, given), F.linear, given) <= 2 * error(F.linear(*given), F.linear, given)


# Weights that are contiguous along the columns of the result, [k, n] --------------------------------------------------


def columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def bytes_in_columns(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x @ w.to(x.dtype)) * scale


def groups_in_columns(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    groups, n = scale.shape
    return x @ (w.to(x.dtype).view(groups, -1, n) * scale[:, None]).view(-1, n)


def four_bits_in_columns(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = torch.stack((w & 15, w >> 4), 1).reshape(-1, w.shape[1]).to(torch.int8) - 8
    return x @ (wide.to(x.dtype) * scale)


COLUMNS = (columns, bytes_in_columns, groups_in_columns, four_bits_in_columns)


def in_columns(function: Callable[..., torch.Tensor], m: int, n: int, k: int) -> list[torch.Tensor]:
    x = torch.randn(m, k).bfloat16()
    if function is columns:
        return [x, torch.randn(k, n).bfloat16()]
    packed, grouped = function is four_bits_in_columns, function is groups_in_columns
    w = torch.randint(0, 256, (k // 2, n), dtype=torch.uint8)
    w = w if packed else torch.randint(-128, 128, (k, n), dtype=torch.int8)
    return [x, w, (torch.rand((k // 64, n) if grouped else (n,)) / 50 + 0.01).bfloat16()]


@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("function", COLUMNS, ids=lambda function: function.__name__)
def test_weights_along_the_columns(function: Callable[..., torch.Tensor], m: int) -> None:
    """Every configuration, with columns and a sum that are not a multiple of a block."""
    for n, k in ((200, 192), (72, 320)):
        given = in_columns(function, m, n, k)
        kernel = generated(function, *given)
        assert ("tl.dot" in TARGET.emit(kernel)) == (m > 1 or function is columns)
        limit = 2 * error(function(*given), function, given)
        for config in TARGET.configs(kernel):
            out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
            TARGET.build(kernel, TARGET.emit(kernel, config))(*given, out)
            assert error(out, function, given) <= limit, config


def generated(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> Kernel:
    """The kernel of the product, even if the library could compute it."""
    return (
        only_kernel(function, *given)
        if function is not columns
        else matmul(len(given[0]), *reversed(given[1].shape), BF16)
    )
