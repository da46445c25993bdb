"""A table of larger kernels, with ragged sizes, for a device."""

from __future__ import annotations

import torch

from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.attention import attention, attention_dkv, attention_dq, linear_logsumexp, online_attention
from tests.codegen.kernels.making import BF16, F16, F32, F64, I8, LOOP, WHOLE, packed
from tests.codegen.kernels.pointwise import add, bias_gelu, causal, drawn, gather, padded, permuted, transposed_add
from tests.codegen.kernels.products import gated, gathered_rows, linear, matmul, matmul_softmax, residual, rms_linear
from tests.codegen.kernels.rows import (
    column_softmax,
    column_totals,
    fold,
    grouped_mean,
    layernorm,
    norm_backward,
    online_logsumexp,
    softmax,
    total,
)

LARGE: dict[str, Kernel] = {
    "add": add(1_000_003),
    "add f16": add(1 << 20, F16),
    "bias_gelu": bias_gelu(1000, 777, BF16),
    "transposed_add": transposed_add(1023, 2049),
    "permuted": permuted(12, 333, 64),
    "padded": padded(100_000, 17, 300),
    "gather": gather(3001, 770),
    "causal": causal(1500),
    "uniform": drawn(1_000_000, "uniform"),
    "normal": drawn(1_000_000, "normal"),
    "uniform neighbours": drawn(1_000_003, "uniform", 4),
    "normal neighbours": drawn(1_000_003, "normal", 2),
    **{f"softmax {n}": softmax(257, n, WHOLE) for n in (1, 2, 17, 128, 129, 781, 2048, 4096, 8191, 16384, 32768)},
    **{f"softmax loop {n}": softmax(9, n, LOOP) for n in (1000, 65_536, 131_071)},
    "softmax bf16": softmax(1000, 1000, WHOLE, BF16),
    "layernorm": layernorm(1001, 768, F32),
    "layernorm bf16": layernorm(257, 5120, BF16),
    "layernorm f16 odd": layernorm(257, 1023, F16),
    "column sum": fold("sum", 5000, 1001, LOOP, along=0),
    "column softmax": column_softmax(77, 1001),
    "column softmax, tall": column_softmax(5001, 333),
    "column max whole": fold("max", 33, 10_001, WHOLE, along=0),
    "argmax": fold("argmax", 300, 5001, WHOLE),
    "argmax loop": fold("argmax", 30, 100_001, LOOP),
    "argmin f16": fold("argmin", 300, 5001, LOOP, F16),
    "sum i64": fold("sum", 300, 5001, LOOP, torch.int64),
    "prod": fold("prod", 300, 33, WHOLE),
    "any": fold("any", 300, 5001, LOOP, torch.bool),
    "norm_backward": norm_backward(999, 768),
    "grouped_mean": grouped_mean(8, 32, 1000),
    "total": total(1 << 20, 512),
    "column_totals": column_totals(8192, 100, 64),
    **{
        f"matmul {str(dtype)[6:]} {left:d}{right:d}": matmul(257, 391, 523, dtype, turned=(left, right))
        for dtype in (F16, BF16, F32, F64, I8)
        for left in (False, True)
        for right in (False, True)
    },
    "matmul one row": matmul(1, 1000, 777, BF16, turned=(False, True)),
    "matmul batch": matmul(129, 250, 100, F16, batch=7),
    "matmul aligned": matmul(512, 768, 1024, BF16, batch=3, turned=(False, True)),
    "matmul batch, persistent": matmul(520, 776, 264, BF16, batch=9),
    "residual": residual(2000, 1032, 520, BF16),
    "residual in place": residual(2000, 1032, 520, F16, over=True),
    "linear": linear(1000, 700, 512, BF16),
    "gathered_rows": gathered_rows(300, 200, 100),
    "rms_linear": rms_linear(300, 500, 700),
    "gated": gated(300, 500, 700),
    "gated aligned": gated(1000, 1024, 512),
    "gated turned": gated(1000, 1024, 512, turned=True),
    "packed pointwise": packed("packed", add(100_000), bias_gelu(70, 400, F16), add(3), transposed_add(400, 50)),
    "packed rows": packed("packed", softmax(50, 300, WHOLE), layernorm(30, 700, BF16), softmax(9, 1000, WHOLE)),
    "packed products": packed("packed", matmul(200, 35, 45), matmul(40, 170, 33, batch=2), gated(20, 35, 45)),
    "packed persistent": packed(
        "packed", matmul(1024, 2048, 512, BF16, out=BF16), gated(1000, 1024, 256, turned=True), matmul(640, 1024, 512)
    ),
    "matmul_softmax": matmul_softmax(300, 500, 200),
    "attention": attention(6, 300, 128, 64),
    "online attention": online_attention(6, 300, 700, 64, scale=0.125),
    "online attention wide": online_attention(2, 300, 700, 256, dtype=BF16, causal=True, scale=0.06),
    "online attention causal": online_attention(4, 512, 512, 128, dtype=BF16, causal=True, group=2, scale=0.09),
    "online attention window": online_attention(2, 700, 700, 40, causal=True, window=100, prefix=30, scale=0.16),
    "online attention f32": online_attention(2, 300, 300, 64, dtype=F32, causal=True, scale=0.125),
    "online attention odd": online_attention(2, 300, 301, 33, scale=0.2),
    "online attention one query": online_attention(6, 1, 700, 64, scale=0.125),
    "attention_dkv": attention_dkv(4, 512, 700, 24),
    "attention_dkv causal": attention_dkv(4, 512, 512, 24, dtype=BF16, causal=True),
    "attention_dq": attention_dq(4, 512, 700, 24),
    "attention_dq causal": attention_dq(4, 512, 512, 24, dtype=BF16, causal=True),
    "linear_logsumexp": linear_logsumexp(300, 5000, 512),
    "online_logsumexp": online_logsumexp(300, 50_000),
}
