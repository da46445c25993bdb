"""Programs whose decisions are recorded: plain PyTorch at the sizes people use, one kernel family each.

Nothing is computed: tensors carry shapes, strides and dtypes alone, so that sizes cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

F32, BF16, I8, U8, I64, BOOL = torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool


@dataclass(frozen=True, slots=True)
class Given:
    """One input: its shape and dtype.  `gradient`: it requires a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    gradient: bool = False

    def tensor(self) -> Tensor:
        """Allocate it; under a fake mode without memory."""
        return torch.empty(self.shape, dtype=self.dtype).requires_grad_(self.gradient)


@dataclass(frozen=True, slots=True)
class Program:
    """A function and its inputs.

    Attributes:
        backward: go backward from the results to the inputs that require gradients.
        dynamic: compile for symbolic sizes.
    """

    function: Callable[..., object]
    inputs: tuple[Given, ...]
    backward: bool = False
    dynamic: bool = False


# Maps and reductions ----------------------------------------------------------------------------------------------


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def gelu_chain(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(F.gelu(x * scale) + 0.5) * torch.sigmoid(x)


def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return x.t() + y


def softmax(x: Tensor) -> Tensor:
    numerator = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return numerator / numerator.sum(dim=-1, keepdim=True)


def column_sum(x: Tensor) -> Tensor:
    return x.float().sum(0)


def row_maximum(x: Tensor) -> Tensor:
    return x.amax(1)


def running_sum(x: Tensor) -> Tensor:
    return torch.cumsum(x.float(), -1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight, total


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def embedding_layer_norm(ids: Tensor, table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, table), weight.shape, weight, bias)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def max_pool_rows(x: Tensor) -> Tensor:
    return F.max_pool1d(x, 8, stride=1, dilation=3)


def convolution_pooled(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sigmoid(F.avg_pool2d(F.conv2d(x, weight), 4)).sum((1, 2, 3))


def dropout_gelu(x: Tensor) -> Tensor:
    return F.dropout(F.gelu(x), 0.1)


def largest_place(x: Tensor) -> Tensor:
    return x.argmax(-1)


def scattered(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return x.index_add(0, index, values)


def adam(*tensors: Tensor) -> tuple[Tensor, ...]:
    """One step of Adam over a quarter of the tensors: parameters, gradients, first and second moments."""
    count = len(tensors) // 4
    results: list[Tensor] = []
    for k in range(count):
        weight, gradient, first, second = (tensors[k + part * count] for part in range(4))
        first = first.lerp(gradient, 0.1)
        second = second * 0.999 + gradient.square() * 0.001
        results += [weight - 1e-3 * first / (second.sqrt() + 1e-8), first, second]
    return tuple(results)


# Products ---------------------------------------------------------------------------------------------------------


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def matmul_relu(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ b)


def linear_residual_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
    total = F.linear(x, weight, bias) + residual
    return F.layer_norm(total, gain.shape, gain)


def matmul_softmax(a: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(a @ b, -1)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype)) * scale


def int4_grouped_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(x.dtype) - 8
    groups = halves.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)
    return F.linear(x, groups.flatten(-2))


def norm_qkv(x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * gain
    return F.linear(normed, q), F.linear(normed, k), F.linear(normed, v)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def recurrent(x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    for step in range(4):
        hidden = torch.tanh(F.linear(torch.cat([x[step], hidden], 1), weight, bias))
    return hidden


# Attention --------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def alibi_softcap_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    places = torch.arange(q.shape[-2], device=q.device)
    apart = places[:, None] - places[None, :]
    scores = 20 * torch.tanh(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 / 20) - slopes[:, None, None] * apart
    return torch.softmax(scores.masked_fill(apart < 0, float("-inf")), -1).to(v.dtype) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotary_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries, keys and values [batch, length, heads, width], rotated and attended causally."""

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

    q, k, v = (x.transpose(1, 2) for x in (rotated(q), rotated(k), v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def decoding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query a sequence over a cache whose heads are shared by groups of queries."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def relative_softmax(scores: Tensor, near: Tensor, far: Tensor, distances: Tensor) -> Tensor:
    """Scores of pairs, with values of each row and each column that distances select: disentangled attention."""
    places, width = distances.long(), near.shape[-1]
    of_rows, of_columns = ((places * sign + width // 2).clamp(0, width - 1).expand_as(scores) for sign in (1, -1))
    return (scores + near.gather(-1, of_rows) + far.gather(-1, of_columns).transpose(1, 2)).softmax(-1)


def _qkv(*shape: int, dtype: torch.dtype = BF16, gradient: bool = False) -> tuple[Given, ...]:
    return (Given(shape, dtype, gradient),) * 3


def _rows(
    rows: int, columns: int, vectors: int = 0, *, dtype: torch.dtype = BF16, gradient: bool = False
) -> tuple[Given, ...]:
    return (Given((rows, columns), dtype, gradient), *(Given((columns,), dtype, gradient),) * vectors)


def _linear(m: int, k: int, n: int, *more: Given, gradient: bool = False) -> tuple[Given, ...]:
    return (Given((m, k), BF16, gradient), Given((n, k), BF16, gradient), *more)


PROGRAMS: dict[str, Program] = {
    "add_67108864": Program(add, (Given((1 << 26,), F32),) * 2),
    "add_98431": Program(add, (Given((98_431,), F32),) * 2),
    "gelu_chain_8192x4096": Program(gelu_chain, _rows(8192, 4096, 1)),
    "transposed_add_4096x4096": Program(transposed_add, (Given((4096, 4096), F32),) * 2),
    "softmax_4096x781": Program(softmax, _rows(4096, 781, dtype=F32)),
    "softmax_4096x16384": Program(softmax, _rows(4096, 16384, dtype=F32)),
    "softmax_4096x65536": Program(softmax, _rows(4096, 65536)),
    "softmax_16x1048576": Program(softmax, _rows(16, 1 << 20, dtype=F32)),
    "relative_softmax_192x256x256": Program(
        relative_softmax,
        (Given((192, 256, 256)), Given((192, 256, 512)), Given((192, 256, 512)), Given((256, 256), F32)),
    ),
    "relative_softmax_128x1024x1024": Program(
        relative_softmax,
        (Given((128, 1024, 1024)), Given((128, 1024, 128)), Given((128, 1024, 128)), Given((1024, 1024), F32)),
    ),
    "softmax_dynamic": Program(softmax, _rows(1823, 781, dtype=F32), dynamic=True),
    "column_sum_65536x1024": Program(column_sum, _rows(65536, 1024)),
    "row_maximum_128x4096x4096": Program(row_maximum, (Given((128, 4096, 4096), F32),)),
    "running_sum_1024x32768": Program(running_sum, _rows(1024, 32768)),
    "layer_norm_8192x4096": Program(layer_norm, _rows(8192, 4096, 2)),
    "layer_norm_8192x4096_training": Program(layer_norm, _rows(8192, 4096, 2, gradient=True), backward=True),
    "add_rms_norm_8192x4096": Program(add_rms_norm, (Given((8192, 4096)), *_rows(8192, 4096, 1))),
    "group_norm_silu_16x512x64x64": Program(group_norm_silu, (Given((16, 512, 64, 64)), *(Given((512,)),) * 2)),
    "batch_norm_64x64x256x256_training": Program(
        batch_norm, (Given((64, 64, 256, 256), F32, True), *(Given((64,), F32, True),) * 2), backward=True
    ),
    "embedding_layer_norm_16x512x768": Program(
        embedding_layer_norm, (Given((16, 512), I64), Given((30522, 768)), *(Given((768,)),) * 2)
    ),
    "cross_entropy_8192x50257_training": Program(
        cross_entropy, (Given((8192, 50257), BF16, True), Given((8192,), I64)), backward=True
    ),
    "max_pool_rows_64x192x65536": Program(max_pool_rows, (Given((64, 192, 65536), F32),)),
    "convolution_pooled_128x8x384x384": Program(
        convolution_pooled, (Given((128, 8, 384, 384), F32), Given((64, 8, 3, 3), F32))
    ),
    "dropout_gelu_8192x4096_training": Program(dropout_gelu, _rows(8192, 4096, gradient=True), backward=True),
    "largest_place_128x32000": Program(largest_place, _rows(128, 32000)),
    "scattered_100000x64": Program(
        scattered, (Given((100_000, 64), F32), Given((500_000,), I64), Given((500_000, 64), F32))
    ),
    "adam_12_tensors": Program(adam, (Given((1024, 768), F32), Given((768,), F32), Given((3, 5, 7), F32)) * 4),
    "linear_gelu_8192x768x3072": Program(linear_gelu, _linear(8192, 768, 3072, Given((3072,)))),
    "linear_gelu_8192x768x3072_training": Program(
        linear_gelu, _linear(8192, 768, 3072, Given((3072,), BF16, True), gradient=True), backward=True
    ),
    "matmul_relu_4096": Program(matmul_relu, (Given((4096, 4096)),) * 2),
    "matmul_relu_4096_float32": Program(matmul_relu, (Given((4096, 4096), F32),) * 2),
    "matmul_relu_1000x1001x1003": Program(matmul_relu, (Given((1000, 1001)), Given((1001, 1003)))),
    "linear_residual_norm_8192x1024": Program(
        linear_residual_norm, _linear(8192, 1024, 1024, Given((1024,)), Given((8192, 1024)), Given((1024,)))
    ),
    "matmul_softmax_4096x512x1024": Program(matmul_softmax, (Given((4096, 512)), Given((512, 1024)))),
    "int8_linear_1x4096x14336": Program(int8_linear, (Given((1, 4096)), Given((14336, 4096), I8), Given((14336,)))),
    "int8_linear_16x4096x14336": Program(int8_linear, (Given((16, 4096)), Given((14336, 4096), I8), Given((14336,)))),
    "int4_grouped_linear_16x4096x14336": Program(
        int4_grouped_linear, (Given((16, 4096)), Given((14336, 2048), U8), Given((14336, 32)))
    ),
    "norm_qkv_8192x4096": Program(
        norm_qkv, (*_rows(8192, 4096, 1), Given((4096, 4096)), Given((1024, 4096)), Given((1024, 4096)))
    ),
    "swiglu_8192x2048x5632": Program(swiglu, _linear(8192, 2048, 5632, Given((5632, 2048)), Given((2048, 5632)))),
    "linear_cross_entropy_8192x2048x128256_training": Program(
        linear_cross_entropy, _linear(8192, 2048, 128256, Given((8192,), I64), gradient=True), backward=True
    ),
    "recurrent_256x16384": Program(
        recurrent, (Given((4, 256, 1024), F32), Given((256, 256), F32), Given((256, 1280), F32), Given((256,), F32))
    ),
    "attention_2x16x4096x128": Program(attention, _qkv(2, 16, 4096, 128)),
    "attention_2x16x2048x64_float32": Program(attention, _qkv(2, 16, 2048, 64, dtype=F32)),
    "causal_attention_2x16x4096x128": Program(causal_attention, _qkv(2, 16, 4096, 128)),
    "causal_attention_2x16x2048x64_training": Program(
        causal_attention, _qkv(2, 16, 2048, 64, gradient=True), backward=True
    ),
    "masked_attention_2x16x4096x128": Program(masked_attention, (*_qkv(2, 16, 4096, 128), Given((4096, 4096), BOOL))),
    "masked_attention_2x16x2048x128_training": Program(
        masked_attention, (*_qkv(2, 16, 2048, 128, gradient=True), Given((2048, 2048), BOOL)), backward=True
    ),
    "alibi_softcap_attention_2x16x4096x64": Program(
        alibi_softcap_attention, (*_qkv(2, 16, 4096, 64), Given((16,), F32))
    ),
    "fused_attention_2x16x4096x128": Program(fused_attention, _qkv(2, 16, 4096, 128)),
    "fused_attention_8x12x1024x64_training": Program(
        fused_attention, _qkv(8, 12, 1024, 64, gradient=True), backward=True
    ),
    "rotary_attention_2x4096x16x128": Program(
        rotary_attention, (*_qkv(2, 4096, 16, 128), Given((4096, 128)), Given((4096, 128)))
    ),
    "decoding_8x32x1x128_4096": Program(
        decoding, (Given((8, 32, 1, 128)), Given((8, 8, 4096, 128)), Given((8, 8, 4096, 128)))
    ),
}
