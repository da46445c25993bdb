"""Benchmarks kernels around GEMMs on a GPU: epilogues, attention, losses, quantised weights, norms.

Each is written without a compiler in mind; PyTorch's operations that do the same in one call are its rivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.programs import Case, Draw, attention, causal_attention
from benchmarks.suite import run_suite

BF16, I8, U8, I64 = torch.bfloat16, torch.int8, torch.uint8, torch.int64
DEVICE = "cuda"

# GEMMs with epilogues --------------------------------------------------------------------------------------------


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(F.linear(x, weight, bias))


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + residual


PRODUCTS = (  # tokens, features in, features out
    (linear_gelu, ((8192, 768, 3072), (16384, 1024, 4096), (8192, 4096, 14336), (4096, 2048, 8192))),
    (linear_relu, ((8192, 1024, 4096), (4096, 4096, 16384), (16384, 768, 3072), (2048, 8192, 8192))),
    (linear_residual, ((8192, 3072, 768), (16384, 4096, 1024), (8192, 4096, 4096), (4096, 8192, 2048))),
)


def _products() -> Iterator[Case]:
    for program, shapes in PRODUCTS:
        for m, k, n in shapes:
            inputs = [Draw((m, k), BF16), Draw((n, k), BF16, k**-0.5), Draw((n,), BF16)]
            inputs += [Draw((m, n), BF16)] * (program is linear_residual)
            systems = ("eager", "inductor", "max-autotune", "fusion")
            yield Case(f"product: {program.__name__} {m}x{k}x{n}", program, tuple(inputs), systems=systems)


# Attention -------------------------------------------------------------------------------------------------------


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def fused_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


TOKENS = 16384


def _attention() -> Iterator[Case]:
    pairs = ((attention, fused_attention), (causal_attention, fused_causal_attention))
    for gradients, lengths in ((False, (1024, 2048, 4096, 16384)), (True, (1024, 4096))):
        for program, fused in pairs:
            for width in (64, 128):
                for length in lengths:
                    heads = 8 if length > 8192 or gradients else 16
                    shape = (TOKENS // length if not gradients else 2, heads, length, width)
                    kind = "attention with backward" if gradients else "attention"
                    name = f"{kind}: {program.__name__} {'x'.join(map(str, shape))}"
                    yield Case(name, program, (Draw(shape, BF16),) * 3, (("sdpa", fused),), gradients=gradients)


def softcapped_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention with scores bounded by 20 tanh(x / 20), and ALiBi penalties."""
    heads, length, width = q.shape[-3:]
    position = torch.arange(length, device=q.device)
    slope = torch.exp2(-8 / heads * torch.arange(1, heads + 1, device=q.device))[:, None, None]
    scores = q @ k.transpose(-2, -1) * width**-0.5
    scores = 20 * torch.tanh(scores / 20) - slope * (position[:, None] - position[None, :])
    return torch.softmax(scores.masked_fill(position[:, None] < position, float("-inf")), -1).to(v.dtype) @ v


def sliding_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention in which each position sees itself and the 511 before it."""
    position = torch.arange(q.shape[-2], device=q.device)
    distance = position[:, None] - position
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill((distance < 0) | (distance > 511), float("-inf")), -1) @ v


def within_documents(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    """Compute attention in which each position sees the earlier ones in its document."""
    position = torch.arange(q.shape[-2], device=q.device)
    visible = (document[:, None] == document) & (position[:, None] >= position)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), -1) @ v


def _flexible(score: Callable[..., Tensor] | None, mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return FlexAttention with a block mask that is created once."""
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks: list[object] = []

    def program(q: Tensor, k: Tensor, v: Tensor, *document: Tensor) -> Tensor:
        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mask(i, j, *document)

        if not blocks:
            blocks.append(create_block_mask(visible, None, None, q.shape[-2], k.shape[-2], device=q.device))
        result: Tensor = compiled(q, k, v, score_mod=score, block_mask=blocks[0])
        return result

    return program


def _masked() -> Iterator[Case]:
    shape = (1, 16, 8192, 64)

    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 20 * torch.tanh(value / 20) - torch.exp2(-8 / shape[1] * (h + 1)) * (i - j)

    inputs = (Draw(shape, BF16),) * 3
    causal = _flexible(score, lambda i, j: i >= j)
    window = _flexible(None, lambda i, j: (i >= j) & (i - j <= 511))
    documents = _flexible(None, lambda i, j, document: (document[i] == document[j]) & (i >= j))
    yield Case(
        "masked: softcapped_alibi 16x8192x64", softcapped_alibi, inputs, (("flex", causal),), ("eager", "fusion")
    )
    yield Case("masked: sliding_window 16x8192x64", sliding_window, inputs, (("flex", window),), ("eager", "fusion"))
    ids = Draw((shape[2],), I64, high=12)
    yield Case(
        "masked: within_documents 16x8192x64",
        lambda q, k, v, ids: within_documents(q, k, v, ids.sort().values),
        (*inputs, ids),
        (("flex", lambda q, k, v, ids: documents(q, k, v, ids.sort().values)),),
        ("eager", "fusion"),
    )


# Losses ----------------------------------------------------------------------------------------------------------


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def linear_wide_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the loss as libraries of language models do: from logits in float32."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def _losses() -> Iterator[Case]:
    for tokens, features, words in ((8192, 768, 50257), (8192, 2048, 128256)):
        inputs = (
            Draw((tokens, features), BF16),
            Draw((words, features), BF16, features**-0.5),
            Draw((tokens,), I64, high=words),
        )
        for program in (linear_cross_entropy, linear_wide_cross_entropy):
            yield Case(f"loss: {program.__name__} {tokens}x{features}x{words}", program, inputs, gradients=True)


# Quantised weights -----------------------------------------------------------------------------------------------


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype)) * scale


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack two numbers of [-8, 8) from each byte, the lower bits first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(dtype) - 8


def int4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, _unpacked(packed, x.dtype)) * scale


def int4_linear_in_groups(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    weight = _unpacked(packed, x.dtype).unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
    return F.linear(x, weight.flatten(-2))


GROUP = 128


def _quantised() -> Iterator[Case]:
    for n, k in ((14336, 4096), (4096, 14336)):
        for m in (1, 16):
            x, scale = Draw((m, k), BF16), Draw((n,), BF16, 0.01)
            whole, halves = Draw((n, k), I8, low=-127, high=128), Draw((n, k // 2), U8, high=256)
            for program, weight, factor in (
                (int8_linear, whole, scale),
                (int4_linear, halves, scale),
                (int4_linear_in_groups, halves, Draw((n, k // GROUP), BF16, 0.01)),
            ):
                yield Case(f"quantised: {program.__name__} {m}x{k}x{n}", program, (x, weight, factor))


# Norms before linears --------------------------------------------------------------------------------------------


def norm_qkv(x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a normalised input."""
    y = F.rms_norm(x, x.shape[-1:], gain)
    return F.linear(y, q), F.linear(y, k), F.linear(y, v)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _norms() -> Iterator[Case]:
    for m, k, query, key in (
        (4096, 2048, 2048, 512),
        (8192, 1024, 1024, 1024),
        (8192, 2048, 2048, 2048),
        (4096, 4096, 4096, 1024),
        (2048, 4096, 4096, 4096),
    ):
        weights = (Draw((n, k), BF16, k**-0.5) for n in (query, key, key))
        yield Case(f"norm: qkv {m}x{k}x{query},{key}", norm_qkv, (Draw((m, k), BF16), Draw((k,), BF16), *weights))
    for m, k, n in ((4096, 2048, 5632), (4096, 4096, 14336)):
        inputs = (Draw((m, k), BF16), *(Draw((n, k), BF16, k**-0.5),) * 2, Draw((k, n), BF16, n**-0.5))
        yield Case(f"norm: swiglu {m}x{k}x{n}", swiglu, inputs)


CASES = (*_products(), *_attention(), *_masked(), *_losses(), *_quantised(), *_norms())


def run(*, only: str, quick: bool) -> int:
    """Run all cases whose name contains `only`; cold compilations are not measured."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; device time, L2 cold; MiB beyond the inputs")
    return run_suite("contractions", CASES, DEVICE, rounds=20 if quick else 60, cold=False, only=only)
