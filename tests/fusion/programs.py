"""Programs for the tests: a name, a function, and a function that creates its inputs.

Shapes are ragged on purpose, layouts are not always contiguous, and every program states its expected kernel count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # the name everyone knows it by


@dataclass(frozen=True)
class Case:
    """A function of tensors, its inputs, and the number of kernels it becomes without a contraction (None: any)."""

    name: str
    function: Callable[..., object]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    kernels: int | None = 1


def _r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def softmax(x: torch.Tensor) -> torch.Tensor:
    shifted = x - x.max(dim=1)[0][:, None]
    numerator = torch.exp(shifted)
    return numerator / numerator.sum(dim=1)[:, None]


def rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * weight, h


def gelu_bias(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x + b
    return 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y**3)))


CASES = (
    Case("vector add", lambda a, b: a + b, lambda: (_r(7), _r(7))),
    Case("vector add, long", lambda a, b: a + b, lambda: (_r(98432), _r(98432))),
    Case("broadcast", lambda a, b, c: a * b + c, lambda: (_r(5, 1, 9), _r(3, 1), _r(9))),
    Case("chain", lambda x: torch.sin(x).mul(2).add(1).relu().sigmoid(), lambda: (_r(33, 17),)),
    Case("two outputs", lambda x: (x.exp(), x.exp() + 1), lambda: (_r(13, 7),)),
    Case("softmax, naive", softmax, lambda: (_r(37, 781),)),
    Case("softmax", lambda x: F.softmax(x, -1), lambda: (_r(5, 7, 129),)),
    Case("softmax, strided", lambda x: F.softmax(x, 1), lambda: (_r(5, 37, 19),)),
    Case("softmax, long", lambda x: F.softmax(x, -1), lambda: (_r(3, 70_001),), kernels=None),
    Case("log_softmax, bf16", lambda x: F.log_softmax(x, -1), lambda: (_r(17, 300, dtype=torch.bfloat16),)),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (768,), w, b), lambda: (_r(9, 768), _r(768), _r(768))),
    Case("layer_norm, f16", lambda x: F.layer_norm(x, (65,)), lambda: (_r(9, 65, dtype=torch.float16),)),
    Case("rms_norm, residual", rms_norm, lambda: (_r(4, 5, 96), _r(4, 5, 96), _r(96))),
    Case("group_norm", lambda x: F.group_norm(x, 4), lambda: (_r(3, 12, 5, 7),)),
    Case("gelu, bias", gelu_bias, lambda: (_r(31, 65), _r(65))),
    Case("gelu", lambda x, b: F.gelu(x + b), lambda: (_r(31, 65), _r(65))),
    Case("dropout off", lambda x: F.dropout(x, 0.5, training=False) * 2, lambda: (_r(31, 65),)),
    Case("transpose", lambda a, b: a.t() + b, lambda: (_r(35, 67), _r(67, 35))),
    Case("permute", lambda a: a.permute(2, 0, 1).contiguous(), lambda: (_r(5, 6, 7),)),
    Case("views", lambda a: (a.view(3, 8, 5).transpose(0, 1)[1:, ::2] * 2).reshape(-1), lambda: (_r(24, 5),)),
    Case("flip, roll", lambda a: a.flip(0) + a.roll(2, 1), lambda: (_r(9, 11),)),
    Case("cat", lambda a, b: torch.cat([a * 2, b], 1).relu(), lambda: (_r(5, 7), _r(5, 3))),
    Case("stack", lambda a, b: torch.stack([a, b], 1) + 1, lambda: (_r(5, 7), _r(5, 7))),
    Case("pad", lambda a: F.pad(a.exp(), (2, 3)) + 1, lambda: (_r(5, 7),)),
    Case("tril", lambda a: a.tril().softmax(-1), lambda: (_r(9, 9),)),
    Case("gather", lambda a, i: a.gather(1, i) * 2, lambda: (_r(5, 7), torch.randint(0, 7, (5, 4)))),
    Case("index", lambda a, i: a[i] + 1, lambda: (_r(9, 7), torch.tensor([-1, 3, 3, 0]))),
    Case("embedding", lambda w, i: F.embedding(i, w) * 3, lambda: (_r(11, 8), torch.randint(0, 11, (4, 6)))),
    Case("where", lambda a, b: torch.where(a > 0, a, b.exp()), lambda: (_r(5, 7), _r(7))),
    Case("masked_fill", lambda a: a.masked_fill(a < 0, float("-inf")).softmax(-1), lambda: (_r(5, 70),)),
    Case("sum all", lambda a: (a * a).sum(), lambda: (_r(33, 65),)),
    Case("column sum", lambda a: a.sum(0), lambda: (_r(129, 65),)),
    Case("column sum, tall", lambda a: a.sum(0), lambda: (_r(30_011, 9),), kernels=None),
    Case("mean, var", lambda a: (a.mean(-1), a.var(-1)), lambda: (_r(33, 65),)),
    Case("argmax", lambda a: a.argmax(-1), lambda: (_r(33, 65),)),
    Case("amax, two axes", lambda a: a.amax((0, 2)), lambda: (_r(5, 6, 7),)),
    Case("logsumexp", lambda a: torch.logsumexp(a, -1), lambda: (_r(33, 65),)),
    Case("norm", lambda a: a / a.norm(dim=-1, keepdim=True), lambda: (_r(33, 65),)),
    Case("any, all", lambda a: (a > 2).any(-1) | (a > -9).all(-1), lambda: (_r(33, 65),)),
    Case("prod", lambda a: a.prod(1), lambda: (_r(5, 9),)),
    Case("cumsum", lambda a: a.exp().cumsum(-1) * 2, lambda: (_r(33, 65),)),
    Case("cumsum, columns", lambda a: a.cumsum(0), lambda: (_r(129, 65),)),
    Case("cumsum, middle", lambda a: a.relu().cumsum(1) + 1, lambda: (_r(5, 37, 19),)),
    Case("cumsum, bf16", lambda a: a.cumsum(1), lambda: (_r(9, 300, dtype=torch.bfloat16),)),
    Case("cumsum, flipped", lambda a: a.flip(1).cumsum(1).flip(1), lambda: (_r(9, 37),)),
    Case("cumsum, normalised", lambda a: (c := a.exp().cumsum(1)) / c.sum(1, keepdim=True), lambda: (_r(9, 70),)),
    Case("nucleus", lambda a: a.softmax(-1).cumsum(-1) < 0.9, lambda: (_r(5, 1000),)),
    Case("cumprod", lambda a: a.cumprod(1), lambda: (_r(5, 9),)),
    Case("cummax, cummin", lambda a: (*a.cummax(1), *a.cummin(1)), lambda: (_r(9, 37).round(),)),
    Case("logcumsumexp", lambda a: a.logcumsumexp(0), lambda: (_r(70, 9),)),
    Case("positions", lambda a: (a > 0).cumsum(1) - 1, lambda: (_r(5, 37),)),
    Case("cumsum of both", lambda a: a.cumsum(0).cumsum(1), lambda: (_r(9, 37),), kernels=2),
    Case("ints", lambda a, b: (a // b) * b + a % b, lambda: (torch.arange(-20, 20), torch.arange(40) % 7 + 1)),
    Case("bools", lambda a: ~(a > 0) & (a < 1) | (a != a), lambda: (_r(5, 7),)),
    Case("float64", lambda a: torch.exp(a).sum(-1), lambda: (_r(5, 70, dtype=torch.float64),)),
    Case("0-d", lambda a, b: a * b + 1, lambda: (_r(), _r())),
    Case("non-contiguous", lambda a: a[::2, 1::3].exp() + 1, lambda: (_r(10, 20)[1:],)),
    Case("expanded", lambda a: a.expand(4, 5) * 2, lambda: (_r(1, 5),)),
    Case("channels last", lambda a: a.relu() + 1, lambda: (_r(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    Case("reshape across", lambda a: a.exp().t().reshape(-1) + 1, lambda: (_r(6, 10),)),
    Case("sum and part of it", lambda a: (a.sum(0), a[:, :1].sum(0)), lambda: (_r(3, 17, 64),), kernels=None),
    Case("size one", lambda a: a.softmax(-1) + a.sum(0), lambda: (_r(7, 1),), kernels=None),
    Case(
        "cross_entropy",
        lambda x, y: F.cross_entropy(x, y),
        lambda: (_r(37, 211), torch.randint(0, 211, (37,))),
    ),
)
"""Every program is native: no node is an extern."""
