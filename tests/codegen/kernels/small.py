"""A table of small kernels of every kind."""

from __future__ import annotations

import torch

from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.attention import (
    attention,
    attention_dkv,
    attention_dq,
    linear_logsumexp,
    linear_logsumexp_parts,
    online_attention,
)
from tests.codegen.kernels.making import BF16, BOOL, F16, F32, F64, I8, I32, I64, LOOP, WHOLE, packed
from tests.codegen.kernels.pointwise import (
    add,
    bias_gelu,
    by_numbers,
    causal,
    drawn,
    flipped,
    gather,
    in_place,
    normalised,
    padded,
    permuted,
    sampled,
    subsampled,
    transposed_add,
)
from tests.codegen.kernels.products import gated, gathered_rows, linear, matmul, matmul_softmax, rms_linear
from tests.codegen.kernels.rows import (
    column_shift,
    column_softmax,
    column_totals,
    count,
    dropped,
    fold,
    grouped_mean,
    layernorm,
    norm_backward,
    online_logsumexp,
    partial_sums,
    running_folds,
    scan,
    scan_normalised,
    shifted_softmax,
    softmax,
    total,
    two_folds,
)

SMALL: dict[str, Kernel] = {
    "add 7": add(7),
    "add 98432": add(98432),
    "add bf16": add(1000, BF16),
    "normalised": normalised(5, 72, F32),
    "normalised odd": normalised(3, 1501, F16),
    "numbers of the host": by_numbers(1000),
    "bias_gelu f32": bias_gelu(5, 24, F32),
    "bias_gelu bf16": bias_gelu(5, 24, BF16),
    "transposed_add": transposed_add(40, 50),
    "permuted": permuted(3, 5, 8),
    "subsampled": subsampled(40, 6),
    "padded": padded(20, 3, 6),
    "gather": gather(9, 12),
    "sampled": sampled(33, 40, 75, 3),
    "flipped": flipped(21),
    "causal": causal(13),
    "uniform": drawn(300, "uniform"),
    "normal": drawn(300, "normal"),
    "uniform neighbours": drawn(300, "uniform", 8),
    "normal neighbours": drawn(301, "normal", 2**33),
    "dropped": dropped(6, 60, WHOLE),
    "dropped odd": dropped(6, 61, WHOLE),
    "dropped loop": dropped(2, 3000, LOOP),
    "in_place": in_place(100),
    "softmax whole": softmax(6, 30, WHOLE),
    "softmax one warp": softmax(3, 200, WHOLE),
    "softmax f16": softmax(6, 32, WHOLE, F16),
    "softmax loop": softmax(2, 3000, LOOP),
    "softmax of parts of rows": shifted_softmax(3, 8193, 8211, 8195, 3, BF16),
    "softmax of odd rows": shifted_softmax(3, 8193, 8201, 8193, 8, BF16),
    "layernorm f32": layernorm(6, 40, F32),
    "layernorm bf16": layernorm(6, 300, BF16),
    "column sum": fold("sum", 300, 40, LOOP, along=0),
    "column max": fold("max", 10, 40, WHOLE, along=0),
    "column softmax": column_softmax(12, 20),
    "column softmax, tall": column_softmax(1030, 3),
    "column shift": column_shift(40, 50),
    "count": count(5, 12),
    "scan of columns": scan("sum", 37, 12, WHOLE, along=0),
    "scan of columns, tall": scan("max", 1030, 2, WHOLE, along=0),
    "scan of columns, looped over": scan("logsumexp", 90, 5, LOOP, along=0),
    "scan of one": scan("max", 5, 1, WHOLE),
    "scan, normalised": scan_normalised(5, 70, WHOLE),
    "scan, normalised, looped over": scan_normalised(3, 70, LOOP),
    **{
        f"scan {name} {str(dtype)[6:]} {role.value}": scan(name, 5, 70, role, dtype)
        for role in (WHOLE, LOOP)
        for name, dtype in (
            *(("sum", F32), ("sum", F64), ("sum", I32), ("sum", I64), ("prod", F32), ("prod", I64)),
            *(("max", F32), ("min", F64), ("max", I32), ("min", I64), ("logsumexp", F32), ("logsumexp", F64)),
        )
    },
    "two_folds": two_folds(6, 10),
    "norm_backward": norm_backward(20, 12),
    "grouped_mean": grouped_mean(3, 4, 10),
    "total": total(4096, 8),
    "column_totals": column_totals(96, 20, 8),
    "matmul ragged": matmul(20, 35, 45),
    "matmul batch": matmul(20, 35, 45, batch=3, turned=(False, True)),
    "matmul row": matmul(1, 35, 45, F32),
    "matmul one k": matmul(20, 35, 1, F32),
    "linear": linear(20, 35, 45, BF16),
    "gathered_rows": gathered_rows(9, 20, 21),
    "rms_linear": rms_linear(20, 35, 45),
    "gated": gated(20, 35, 45),
    "gated turned": gated(20, 35, 45, turned=True),
    "packed pointwise": packed("packed", add(1000), bias_gelu(7, 40, F16), add(3), transposed_add(40, 50)),
    "packed rows": packed("packed", softmax(5, 300, WHOLE), layernorm(3, 700, BF16), fold("sum", 7, 21, WHOLE)),
    "packed walks": packed("packed", softmax(5, 300, LOOP), fold("max", 7, 2100, LOOP)),
    "packed products": packed("packed", matmul(20, 35, 45), matmul(40, 17, 33, batch=2), gated(20, 35, 45)),
    "matmul_softmax": matmul_softmax(20, 35, 45),
    "attention": attention(2, 20, 21, 12),
    "online attention": online_attention(2, 20, 150, 12),
    "online attention bf16": online_attention(2, 33, 70, 40, dtype=BF16),
    "online attention f32": online_attention(2, 20, 41, 24, dtype=F32, causal=True),
    "online attention causal": online_attention(2, 90, 150, 12, causal=True),
    "online attention, more queries": online_attention(1, 150, 70, 12, causal=True),
    "online attention window": online_attention(2, 150, 150, 12, window=20, prefix=5),
    "online attention groups": online_attention(4, 20, 70, 12, group=2),
    "online attention step": online_attention(2, 20, 70, 40, step=1),
    "online attention one query": online_attention(2, 1, 70, 12),
    "online attention one key": online_attention(2, 20, 1, 12),
    "attention_dkv": attention_dkv(2, 70, 37, 12),
    "attention_dkv causal": attention_dkv(2, 150, 90, 12, dtype=BF16, causal=True),
    "attention_dq": attention_dq(2, 37, 70, 12),
    "attention_dq causal": attention_dq(2, 90, 150, 12, dtype=BF16, causal=True),
    "linear_logsumexp": linear_logsumexp(20, 150, 45),
    "linear_logsumexp, parts": linear_logsumexp_parts(20, 3, 70, 24),
    "linear_logsumexp, parts, one feature": linear_logsumexp_parts(70, 2, 37, 1, F32),
    "online_logsumexp": online_logsumexp(5, 3000),
    "partial_sums": partial_sums(40, 60, 7),
    "running_folds": running_folds(6, 10),
    **{
        f"matmul {str(dtype)[6:]} {left:d}{right:d}": matmul(18, 33, 40, dtype, turned=(left, right))
        for dtype in (F16, BF16, F32, F64, I8)
        for left in (False, True)
        for right in (False, True)
    },
    **{
        f"{name} {str(dtype)[6:]} {role.value}": fold(name, 7, 21, role, dtype)
        for role in (WHOLE, LOOP)
        for name, dtype in (
            *(("sum", F32), ("sum", F64), ("sum", I64), ("sum", I32), ("prod", F32), ("prod", I64)),
            *(("max", F32), ("min", F32), ("max", BF16), ("min", I64), ("max", I8), ("max", torch.uint8)),
            *(("any", BOOL), ("all", BOOL), ("argmax", F32), ("argmin", F32), ("argmax", I64), ("argmin", F16)),
        )
    },
}
"""Kernels that Triton's interpreter runs in well under a second each."""
