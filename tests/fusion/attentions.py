"""Attention as people write it: programs that share only their axes.

Every program takes (q, k, v, …) and is one kernel: no tensor of queries × keys reaches memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # the name everyone knows it by


@dataclass(frozen=True)
class Attention:
    """A program, the shapes of its q, k and v as (batch, heads, queries, width), (key heads, keys), and more inputs.

    Attributes:
        more: creates the inputs after q, k and v, on a device.
        differentiable: eager has a gradient that is not NaN.
    """

    name: str
    function: Callable[..., object]
    queries: tuple[int, int, int, int] = (1, 2, 517, 40)
    keys: tuple[int, int] = (2, 517)
    more: Callable[[torch.device], tuple[torch.Tensor, ...]] = lambda device: ()
    differentiable: bool = True

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", size: float = 1.0
    ) -> tuple[torch.Tensor, ...]:
        """Normal q, k and v with standard deviation `size`, and the rest."""
        batch, heads, queries, width = self.queries
        key_heads, keys = self.keys
        generator = torch.Generator().manual_seed(0)
        shapes = ((batch, heads, queries, width), (batch, key_heads, keys, width), (batch, key_heads, keys, width))
        results = [torch.randn(shape, generator=generator).mul(size).to(device, dtype) for shape in shapes]
        return (*results, *self.more(torch.device(device)))


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def positions(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i = torch.arange(s.shape[-2], device=s.device)[:, None]
    return i, torch.arange(s.shape[-1], device=s.device)[None, :]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores(q, k), -1) @ v


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = torch.einsum("bhid,bhjd->bhij", q * q.shape[-1] ** -0.5, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return torch.einsum("bhij,bhjd->bhid", e / e.sum(-1, keepdim=True), v)


def normalised_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.max(-1, keepdim=True)[0])
    return (e @ v) / e.sum(-1, keepdim=True)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    return torch.softmax(s.masked_fill(~mask, float("-inf")), -1) @ v


def causal_added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    return torch.softmax(s + torch.full(s.shape[-2:], float("-inf"), dtype=s.dtype, device=s.device).triu(1), -1) @ v


def in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    s = scores(q, k) + mask.to(q.dtype)
    weights = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, 0.1, training=False) @ v


def boolean(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.where(mask, scores(q, k), float("-inf")), -1) @ v


def alibi_softcap(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    i, j = positions(s)
    slopes = torch.exp2(-torch.arange(1, q.shape[1] + 1, device=s.device))[:, None, None]
    s = 20 * torch.tanh(s / 20) - (slopes * (i - j)).to(s.dtype)
    return torch.softmax(s.masked_fill(j > i, float("-inf")), -1) @ v


def sliding_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    i, j = positions(s)
    return torch.softmax(s.masked_fill((j > i) | (i - j >= 100), float("-inf")), -1) @ v


def least_number(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A window, with fully masked first rows: masked with the least number, which times log₂e is infinite."""
    s = scores(q, k)
    i, j = positions(s)
    return torch.softmax(s.masked_fill((j > i) | (i - j >= 40) | (i < 7), torch.finfo(s.dtype).min), -1) @ v


def least_number_added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same as numbers that are added."""
    s = scores(q, k)
    i, j = positions(s)
    mask = torch.zeros_like(s).masked_fill((j > i) | (i - j >= 40) | (i < 7), torch.finfo(s.dtype).min)
    return torch.softmax(torch.tanh(s) + mask, -1) @ v


def prefix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    i, j = positions(s)
    return torch.softmax(s.masked_fill(~((j <= i) | (j < 64)), float("-inf")), -1) @ v


def documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    i, j = positions(s)
    same = (ids[:, None] == ids[None, :]) & (j <= i)
    return torch.softmax(torch.where(same, s, float("-inf")), -1) @ v


def documents_of_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    same = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids[:, None, None, :] >= 0)
    return torch.softmax(scores(q, k).masked_fill(~same, float("-inf")), -1) @ v


def across_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    return torch.softmax(torch.where(queries[:, None] == keys, scores(q, k), float("-inf")), -1) @ v


def key_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    _, j = positions(s)
    return torch.softmax(s.masked_fill(j >= lengths[:, None, None, None], float("-inf")), -1) @ v


def key_flags(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    i, j = positions(s)
    return torch.softmax(s.masked_fill(~(seen[:, None, None, :] & (j <= i)), float("-inf")), -1) @ v


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    repeat = q.shape[1] // k.shape[1]
    return plain(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))


def expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b, h, s, d = k.shape
    repeat = q.shape[1] // h
    k, v = (t[:, :, None].expand(b, h, repeat, s, d).reshape(b, h * repeat, s, d) for t in (k, v))
    return causal(q, k, v)


def padding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    _, j = positions(s)
    return torch.softmax(s.masked_fill(j >= lengths[:, None, None, None], -1e4), -1) @ v


def masked_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    i, _ = positions(s)
    return torch.softmax(s.masked_fill(i % 7 == 3, float("-inf")), -1) @ v


def with_logsumexp(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = scores(q, k)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def other_layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    out = plain(q, k, v)
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def _mask(device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(517, 517, generator=generator).gt(0.3).fill_diagonal_(True).to(device),)


def _ids(documents: int, length: int) -> torch.Tensor:
    """Documents in any order."""
    return torch.randint(0, documents, (length,), generator=torch.Generator().manual_seed(1))


def _lengths(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths)


ATTENTIONS = (
    Attention("plain", plain),
    Attention("by hand", by_hand),
    Attention("normalised last", normalised_last),
    Attention("causal", causal),
    Attention("causal, added", causal_added),
    Attention("in float32", in_float32, more=lambda device: (torch.where(_mask(device)[0], 0.0, -1e4),)),
    Attention("boolean", boolean, more=_mask),
    Attention("alibi, softcap", alibi_softcap),
    Attention("sliding window", sliding_window),
    Attention("least number", least_number),
    Attention("least number, added", least_number_added),
    Attention("prefix", prefix),
    Attention("documents", documents, more=lambda device: (torch.arange(517, device=device) // 90,)),
    Attention("documents, unordered", documents, more=lambda device: (_ids(5, 517).to(device),)),
    Attention("one document", documents, more=lambda device: (torch.zeros(517, dtype=torch.int32, device=device),)),
    Attention(
        *("all distinct", documents_of_batch, (1, 2, 517, 40), (2, 517)),
        more=lambda device: (torch.randperm(517, generator=torch.Generator().manual_seed(2))[None].to(device),),
        differentiable=False,  # a gradient of 0, which only eager's order of summation gives exactly
    ),
    Attention(
        *("documents of batch", documents_of_batch, (2, 1, 517, 40), (1, 517)),
        more=lambda device: ((torch.arange(517) // torch.tensor([[90], [517]])).int().to(device),),
    ),
    Attention(
        *("rows without documents", across_documents, (1, 2, 517, 40), (2, 600)),
        more=lambda device: (torch.arange(517, device=device) // 70, _ids(6, 600).sort()[0].to(device)),
        differentiable=False,
    ),
    Attention("lengths", key_lengths, (3, 1, 517, 40), (1, 517), lambda device: (_lengths(40, 300, 517).to(device),)),
    Attention(
        *("length 0", key_lengths, (2, 1, 517, 40), (1, 517)),
        more=lambda device: (_lengths(0, 517).to(device),),
        differentiable=False,
    ),
    Attention(
        *("key flags", key_flags, (2, 1, 517, 40), (1, 517)),
        more=lambda device: ((torch.arange(517, device=device) // torch.tensor([[99], [7]], device=device)) % 2 == 0,),
    ),
    Attention("grouped", grouped, queries=(1, 4, 517, 32)),
    Attention("expanded", expanded, queries=(1, 4, 517, 32)),
    Attention("cross", plain, queries=(2, 2, 333, 64), keys=(2, 700)),
    Attention("padding", padding, (2, 2, 517, 40), more=lambda device: (torch.tensor([300, 517], device=device),)),
    Attention("masked rows", masked_rows, differentiable=False),
    Attention("with logsumexp", with_logsumexp),
    Attention("other layout", other_layout),
    Attention("width 80", causal, queries=(1, 2, 520, 80), keys=(2, 520)),
    Attention("width 256", plain, queries=(1, 1, 1100, 256), keys=(1, 1100)),
)
