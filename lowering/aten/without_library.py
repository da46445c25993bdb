"""Decomposes operations that are the library's otherwise, for programs that have no library: a runner without PyTorch.

Input: a call of a convolution or of attention; output: the same result from views, padding, products and maps, which
have rules.  A convolution is a product of the weight with the windows of the padded image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm, suggest_memory_format

from fusion.lowering.aten.attention import attention

aten = torch.ops.aten


def convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Compute a convolution of [n, c, …] images by [o, c / groups, …] weights as a product with windows.

    A transposed one is a convolution of the image, with zeros between its points, by the weight backwards.

    >>> image, weight, settings = torch.rand(2, 4, 9), torch.rand(6, 2, 3), ([2], [1], [1], False, [0], 2)
    >>> expected = aten.convolution(image, weight, None, *settings)
    >>> torch.testing.assert_close(convolution(image, weight, None, *settings), expected)
    >>> weight, settings = torch.rand(4, 3, 3), ([2], [1], [2], True, [1], 2)
    >>> expected = aten.convolution(image, weight, None, *settings)
    >>> torch.testing.assert_close(convolution(image, weight, None, *settings), expected)
    """
    spatial = image.dim() - 2
    stride, padding, dilation, output_padding = (
        [*each] * (spatial // len(each)) for each in (stride, padding, dilation, output_padding)
    )
    reach = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
    before = list(padding)
    after = before
    if transposed:
        image, weight = _spread(image, stride), _backwards(weight, groups)
        before = [whole - cut for whole, cut in zip(reach, padding, strict=True)]
        after = [start + more for start, more in zip(before, output_padding, strict=True)]
        stride = [1] * spatial
    ends = [end for pair in zip(reversed(before), reversed(after), strict=True) for end in pair]
    windows = aten.constant_pad_nd.default(image, ends) if any(ends) else image
    for dim in range(spatial):
        windows = windows.unfold(2 + dim, reach[dim] + 1, stride[dim])[..., :: dilation[dim]]
    result = _products(windows, weight, groups)
    if bias is not None:
        result = result + bias.view(-1, *(1,) * spatial)
    return result.contiguous(memory_format=suggest_memory_format(image))


def _products(windows: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Multiply windows [n, c, places…, points…] by weights [o, c / groups, points…], as [n, o, places…]."""
    spatial = weight.dim() - 2
    batch, channels = windows.shape[:2]
    places = windows.shape[2 : 2 + spatial]
    terms = math.prod(weight.shape[1:])
    parts = windows.reshape(batch, groups, channels // groups, *windows.shape[2:])
    # [n, groups, c / groups, places…, points…] → [n, groups, c / groups, points…, places…]
    order = [0, 1, 2, *range(3 + spatial, 3 + 2 * spatial), *range(3, 3 + spatial)]
    columns = parts.permute(order).reshape(batch * groups, terms, math.prod(places))
    rows = weight.reshape(1, groups, -1, terms).expand(batch, -1, -1, -1).reshape(batch * groups, -1, terms)
    return torch.bmm(rows, columns).reshape(batch, weight.shape[0], *places)


def _spread(image: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Put `step - 1` zeros between neighbours along each dimension of an image."""
    for dim, step in enumerate(stride, 2):
        if step > 1:
            size = image.shape[dim]
            apart = aten.constant_pad_nd.default(image.unsqueeze(dim + 1).transpose(dim + 1, -1), [0, step - 1])
            apart = apart.transpose(dim + 1, -1)
            image = apart.reshape(*image.shape[:dim], size * step, *image.shape[dim + 1 :])
            image = image.narrow(dim, 0, (size - 1) * step + 1)
    return image


def _backwards(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a weight [c, o / groups, …] of a transposed convolution as [o, c / groups, …], points reversed."""
    parts = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2)
    return parts.reshape(-1, weight.shape[0] // groups, *weight.shape[2:]).flip([*range(2, weight.dim())])


def attention_for_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention from products, and the logarithm of each row's sum, in the layouts of the library's results."""
    order: list[int] = compute_elementwise_output_logical_to_physical_perm(query)[0]
    result = attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, order=order)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.mT).to(wide) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        seen = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if seen else scores + attn_mask
    return result, scores.logsumexp(-1).transpose(1, 2).contiguous().transpose(1, 2)


WITHOUT_LIBRARY: dict[OpOverload, Callable[..., object]] = {
    aten.convolution.default: convolution,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_for_cpu,
}
"""Operations → their decompositions."""

__all__ = ["WITHOUT_LIBRARY"]
