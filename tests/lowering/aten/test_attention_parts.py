"""Decomposed attention equals eager in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.lowering.aten.attention import attention

KINDS = ("none", "causal", "bool", "float", "one row", "empty rows", "empty rows, float")


def mask_of(kind: str, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
    """A mask for 2 × 4 heads of 13 rows and 17 columns."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(2, 1, 13, 17, generator=generator) > 0.4
    if kind.startswith("empty rows"):
        kept[0, 0, 3], kept[1, 0, 12] = False, False
    if kind == "float":
        return torch.randn(1, 4, 13, 17, generator=generator, dtype=dtype)
    if kind.endswith("float"):
        return torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, float("-inf"))
    if kind == "one row":
        return kept[0, :, :1].clone()
    return kept if kind in ("bool", "empty rows") else None


def operands(grouped: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = 2 if grouped else 4
    shapes = ((2, 4, 13, 8), (2, heads, 17, 8), (2, heads, 17, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, grouped: bool) -> None:
    mask = mask_of(kind)
    results = []
    for function in (F.scaled_dot_product_attention, attention):
        leaves = [x.requires_grad_() for x in operands(grouped)]
        if mask is not None and mask.is_floating_point():
            mask = mask.detach().requires_grad_()
            leaves.append(mask)
        out = function(*leaves[:3], attn_mask=mask, is_causal=kind == "causal", enable_gqa=grouped)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        results.append((out, *torch.autograd.grad(out, leaves, weights)))
    for eager, mine in zip(*results, strict=True):
        assert mine.shape == eager.shape
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)
    assert not any(x.isnan().any() for x in results[1])


def test_a_scale_and_broadcast_batches() -> None:
    query, key, value = operands(False)
    want = F.scaled_dot_product_attention(query, key[:1], value[0], scale=0.3)
    torch.testing.assert_close(attention(query, key[:1], value[0], scale=0.3), want, rtol=1e-12, atol=1e-12)


def test_matrices_without_a_batch() -> None:
    query, key, value = (x[0, 0] for x in operands(False))
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attention(query, key, value, is_causal=True), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 3, 1)])
def test_the_layout_of_the_result(order: tuple[int, ...]) -> None:
    out = attention(*operands(False), order=order)
    assert out.permute(order).is_contiguous()
    assert torch.equal(out, attention(*operands(False)))


def test_autocast_converts_the_operands_that_eager_converts() -> None:
    inputs = [x.float() for x in operands(False)]
    mask = mask_of("float", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, eager = attention(*inputs, mask), F.scaled_dot_product_attention(*inputs, mask)
        double = attention(*operands(False))
    assert got.dtype is eager.dtype is torch.bfloat16 and double.dtype is torch.float64
    torch.testing.assert_close(got, eager, rtol=2e-2, atol=2e-2)


def test_dropout() -> None:
    """Weights are dropped or scaled; all of them at 1; the same ones forward and backward."""
    query, key, _ = operands(False)
    value = torch.eye(17, dtype=torch.float64).expand(2, 4, 17, 17).clone().requires_grad_()
    torch.manual_seed(0)
    weights = attention(query, key, value, dropout_p=0.25)
    kept = weights != 0
    assert 0.6 < float(kept.double().mean()) < 0.9
    whole = attention(query, key, value)
    torch.testing.assert_close(weights[kept], whole[kept] / 0.75)
    (slopes,) = torch.autograd.grad(weights, value, torch.ones_like(weights))
    torch.testing.assert_close(slopes, weights.detach().sum(-2, keepdim=True).mT.expand_as(slopes))
    assert not attention(query, key, value, dropout_p=1.0).any()
