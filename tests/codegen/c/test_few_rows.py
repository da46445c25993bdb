"""Products of few rows read their right factor where it lies, in every layout and at every length."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor

import fusion
from fusion.codegen.c.text.few_rows import MOST_ROWS

OPTIONS = {"target": "c", "strict": True}


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.3, -1) @ v


def decoded(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
    """One query for each head, over the filled part of a cache."""
    mask = torch.arange(k.shape[-2])[None] <= last
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize(("keys", "width"), [(700, 64), (333, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_every_number(rows: int, keys: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(24, n, width).to(dtype) for n in (rows, keys, keys))
    explanation = fusion.explain(attended, options=OPTIONS)(q, k, v)
    (kernel,) = [kernel for kernel in explanation.kernels if "multiply_" in kernel.source or "dots_" in kernel.source]
    element = "bf16" if dtype is torch.bfloat16 else "float"
    few = rows <= MOST_ROWS
    assert (f"dots_{element}(" in kernel.source, f"sums_{element}(" in kernel.source) == (few, few)
    assert ("pack_float(" in kernel.source) is not few
    result, exact = fusion.fuse(attended, options=OPTIONS)(q, k, v), attended(q.double(), k.double(), v.double())
    assert error(result, exact) <= 2 * error(attended(q, k, v), exact)


def test_keys_whose_columns_lie_side_by_side() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(24, 4, 64), torch.randn(24, 64, 500).mT, torch.randn(24, 72, 500).mT
    (kernel,) = fusion.explain(attended, options=OPTIONS)(q, k, v).kernels
    calls = re.findall(r"(\w+)_float\(", kernel.source[kernel.source.rindex("\nint ") :])
    # Keys lie side by side along the columns of their product, values along its terms.
    assert [call for call in calls if call in ("dots", "sums", "multiply")] == ["sums", "dots"]
    exact = attended(q.double(), k.double(), v.double())
    assert error(fusion.fuse(attended, options=OPTIONS)(q, k, v), exact) <= 2 * error(attended(q, k, v), exact)


@pytest.mark.parametrize("last", [0, 63, 64, 255])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_a_query_over_the_filled_part_of_a_cache_is_one_kernel(last: int, groups: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 16, 1, 64).bfloat16()
    k, v = (torch.randn(1, groups, 256, 64).bfloat16() for _ in range(2))
    k[..., last + 1 :, :], v[..., last + 1 :, :] = 1e4, 1e4  # what was never written
    position = torch.tensor(last)
    (kernel,) = fusion.explain(decoded, options=OPTIONS)(q, k, v, position).kernels
    assert ("dots_bf16(" in kernel.source) == (16 // groups <= MOST_ROWS)
    result = fusion.fuse(decoded, options=OPTIONS)(q, k, v, position)
    k, v = k[..., : last + 1, :], v[..., : last + 1, :]
    exact = decoded(q.double(), k.double(), v.double(), position)
    assert error(result, exact) <= 2 * max(error(decoded(q, k, v, position), exact), 2**-9)


def test_a_query_before_a_narrow_layer_is_one_kernel() -> None:
    """The layer has few rows, and a short sum, as the products of the query have; it reads all of these."""

    def f(q: Tensor, k: Tensor, v: Tensor, w: Tensor, last: Tensor) -> Tensor:
        return decoded(q, k, v, last).transpose(1, 2).reshape(1, -1) @ w

    q, w = torch.randn(1, 4, 1, 32).bfloat16(), torch.randn(128, 96).bfloat16()
    k, v = (torch.randn(1, 2, 2048, 32).bfloat16() for _ in range(2))
    explanation = fusion.explain(f, options=OPTIONS)(q, k, v, w, torch.tensor(1500))
    attention = [kernel for kernel in explanation.kernels if "dots_bf16(" in kernel.source]
    assert len(attention) == 1 and "sums_bf16(" in attention[0].source
    assert len(explanation.kernels) + len(explanation.externs) <= 3
