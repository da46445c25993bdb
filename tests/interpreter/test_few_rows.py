"""Generated products of a few rows with plain and quantised weights, under Triton's interpreter, against float64.

Triton decides on import whether it interprets, so these run only in a process started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)
pytest.importorskip("triton")

import torch
import torch.nn.functional as F  # the name everyone knows it by

from codegen.triton import Config, TritonTarget
from lowering.kernel import Kernel
from tests.fusion.test_quantised import LINEARS, error, inputs, only_kernel

TARGET = TritonTarget("sm_90")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on the lanes that are masked


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
    """Neither the rows nor what is summed are a multiple of a block."""
    given = [torch.randn(1, 1531).to(dtype), torch.randn(277, 1531).to(dtype)]
    kernel = only_kernel(F.linear, *given)
    assert "tl.dot" not in TARGET.emit(kernel)
    assert error(run(kernel, given), F.linear, given) <= 2 * error(F.linear(*given), F.linear, given)
