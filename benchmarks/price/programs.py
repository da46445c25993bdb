"""Programs of every kind of kernel, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Maps -------------------------------------------------------------------------------------------------------------


def outer_sum(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] + y[None, :]


def exponentials(x: Tensor) -> Tensor:
    return torch.exp(-x.abs()) * torch.log1p(x.square()) + torch.sin(x)


def quotient(x: Tensor, y: Tensor) -> Tensor:
    return x / (y.abs() + 1)


def power(x: Tensor) -> Tensor:
    return x.abs() ** 1.7


def selected(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, x, 0.5 * y).clamp(-1, 1)


def widened(x: Tensor) -> Tensor:
    return x.double() if x.dtype is torch.float32 else x.float()


def narrowed(x: Tensor) -> Tensor:
    return x.bfloat16()


def integers(x: Tensor, y: Tensor) -> Tensor:
    return (x * 3 + y) & 15


def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return x.t() + y


def transposed_copy(x: Tensor) -> Tensor:
    return x.t().contiguous()


def channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous() * 2


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def every_second(x: Tensor) -> Tensor:
    return x[:, ::2] + 1


def concatenated(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y.sigmoid()], 1)


def stacked(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x + y, x - y], -1)


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1)) * 2


def reflected(x: Tensor) -> Tensor:
    return F.pad(x, (2, 2, 2, 2), mode="reflect")


def flipped(x: Tensor) -> Tensor:
    return x.flip(-1) + x


def rolled(x: Tensor) -> Tensor:
    return x.roll(3, -1) - x


def lower_triangle(x: Tensor) -> Tensor:
    return x.tril() * 0.5


def dropout_gelu(x: Tensor) -> Tensor:
    return F.dropout(F.gelu(x), 0.1)


def enlarged(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0)


def bilinear(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear")


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def swiglu_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def adam(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute one step of Adam over a quarter of the tensors: parameters, gradients, first and second moments."""
    count = len(tensors) // 4
    results: list[Tensor] = []
    for k in range(count):
        weight, gradient, first, second = (tensors[k + part * count] for part in range(4))
        first = first.lerp(gradient, 0.1)
        second = second * 0.999 + gradient.square() * 0.001
        results += [weight - 1e-3 * first / (second.abs().sqrt() + 1e-8), first, second]
    return tuple(results)


# Reductions -------------------------------------------------------------------------------------------------------


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def log_sum_exp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def row_maximum(x: Tensor) -> Tensor:
    return x.amax(-1)


def row_sum(x: Tensor) -> Tensor:
    return x.float().sum(-1)


def largest_place(x: Tensor) -> Tensor:
    return x.argmax(-1)


def row_variance(x: Tensor) -> Tensor:
    return x.float().var(-1)


def unit_rows(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight, total


def column_sum(x: Tensor) -> Tensor:
    return x.float().sum(0)


def column_maximum(x: Tensor) -> Tensor:
    return x.amax(0)


def column_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


def middle_mean(x: Tensor) -> Tensor:
    return x.mean(1)


def total(x: Tensor) -> Tensor:
    return x.float().sum()


def squared_error(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y)


def image_mean(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 8, weight, bias))


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def running_sum(x: Tensor) -> Tensor:
    return torch.cumsum(x.float(), -1)


def running_column_sum(x: Tensor) -> Tensor:
    return torch.cumsum(x, 0)


def running_product(x: Tensor) -> Tensor:
    return torch.cumprod(1 + 1e-3 * x, -1)


def running_log_sum(x: Tensor) -> Tensor:
    return torch.logcumsumexp(x, -1)


def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def average_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2)


def max_pool_rows(x: Tensor) -> Tensor:
    return F.max_pool1d(x, 8, stride=1, dilation=3)


def pooled_squares(x: Tensor) -> Tensor:
    return F.avg_pool2d(x.square(), 5, 1, 2)


# Gathers and scatters ---------------------------------------------------------------------------------------------


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table)


def embedding_layer_norm(ids: Tensor, table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, table), weight.shape, weight, bias)


def bag_of_embeddings(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).sum(1)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index) * 2


def added_rows(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return x.index_add(0, index, values)


def scattered(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return x.scatter_add(1, index, values)


def histogram(ids: Tensor) -> Tensor:
    return torch.zeros(1024, device=ids.device).index_add(0, ids, torch.ones(ids.shape, device=ids.device))


# Products ---------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + residual


def linear_residual_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, weight, bias) + residual, gain.shape, gain)


def relu_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(torch.relu(x), weight)


def norm_linear(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return F.linear((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * gain, weight)


def norm_qkv(x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * gain
    return F.linear(normed, q), F.linear(normed, k), F.linear(normed, v)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def transposed_product(x: Tensor, y: Tensor) -> Tensor:
    return x.t() @ y


def matmul_softmax(a: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(a @ b, -1)


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ b)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype)) * scale


def int4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(x.dtype) - 8
    groups = halves.view(*scale.shape, -1) * scale.unsqueeze(-1)
    return F.linear(x, groups.flatten(-2))


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def distances(x: Tensor, y: Tensor) -> Tensor:
    return (x.square().sum(-1)[:, None] + y.square().sum(-1)[None] - 2 * x @ y.t()).amin(-1)


def recurrent(x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    for step in range(len(x)):
        hidden = torch.tanh(F.linear(torch.cat([x[step], hidden], 1), weight, bias))
    return hidden


# Attention --------------------------------------------------------------------------------------------------------


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def softcapped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 20 * torch.tanh(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 / 20)
    return torch.softmax(scores, -1).to(v.dtype) @ v


def windowed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    position = torch.arange(q.shape[-2], device=q.device)
    distance = position[:, None] - position
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill((distance < 0) | (distance > 255), float("-inf")), -1) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def fused_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fused_masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def rotary_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def decoding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of one query a sequence, over a cache whose heads are shared by groups of queries."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v
