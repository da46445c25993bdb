"""What is measured: programs as a user would write them, with the sizes of each suite.

Every program is plain PyTorch; nothing in it calls an operation that is already fused unless its name says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """A program with its inputs: one (shape, dtype) each.  Integers are drawn below `high`."""

    name: str
    program: Callable[..., Tensor]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    high: int = 8

    def make(self, device: str, seed: int = 0) -> list[Tensor]:
        """Random inputs (never zeros: they compress, and hide errors), the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for shape, dtype in self.inputs:
            if dtype.is_floating_point:
                tensor = torch.randn(shape, generator=generator).to(dtype)
            else:
                tensor = torch.randint(0, self.high, shape, generator=generator).to(dtype)
            made.append(tensor.to(device))
        return made


def vector_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def softmax(x: Tensor) -> Tensor:
    numerator = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return numerator / numerator.sum(dim=-1, keepdim=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def gelu_chain(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(F.gelu(x * scale) + 0.5) * torch.sigmoid(x)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def pointwise_chain(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.relu(x * y + 0.5) - 0.1 * x
    return x


def matmul_relu(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ b)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def attention_case(program: Callable[..., Tensor], heads: int, length: int, width: int, dtype: torch.dtype) -> Case:
    """A case over queries, keys and values of the same length."""
    inputs = (((1, heads, length, width), dtype),) * 3
    return Case(f"{program.__name__} {heads}x{length}x{width}", program, inputs)


def row_case(program: Callable[..., Tensor], rows: int, columns: int, dtype: torch.dtype, vectors: int = 0) -> Case:
    """A case over a matrix and `vectors` vectors as long as its rows."""
    inputs = (((rows, columns), dtype), *(((columns,), dtype),) * vectors)
    return Case(f"{program.__name__} {rows}x{columns}", program, inputs)


def cross_entropy_case(rows: int, classes: int, dtype: torch.dtype) -> Case:
    inputs = (((rows, classes), dtype), ((rows,), torch.int64))
    return Case(f"cross_entropy {rows}x{classes}", cross_entropy, inputs, high=classes)


def vector_case(length: int, dtype: torch.dtype) -> Case:
    return Case(f"vector_add {length}", vector_add, (((length,), dtype),) * 2)
