"""Defines the benchmarked programs as a user would write them, with the sizes of each suite.

Every program is plain PyTorch; it calls no fused operation unless its name says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """The random draw of one input: normal numbers times `scale`, or integers of [low, high)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0
    low: int = 0
    high: int = 8

    def tensor(self, generator: torch.Generator) -> Tensor:
        """Draw a tensor; never zeros, which compress, and hide errors."""
        if self.dtype.is_floating_point:
            return (torch.randn(self.shape, generator=generator) * self.scale).to(self.dtype)
        return torch.randint(self.low, self.high, self.shape, generator=generator).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A program with its inputs, and rivals: other ways to compute the same.

    Attributes:
        name: matched by `--only`.
        program: from the inputs to one tensor, or to several.
        inputs: how each is drawn.
        rivals: by name, programs of the same inputs that run eagerly.
        systems: the systems that run the program.
        gradients: of the one result times random numbers, for every floating input, in the same run.
    """

    name: str
    program: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Draw, ...]
    rivals: tuple[tuple[str, Callable[..., Tensor | tuple[Tensor, ...]]], ...] = ()
    systems: tuple[str, ...] = ("eager", "inductor", "fusion")
    gradients: bool = False

    def make(self, device: str, seed: int = 0) -> list[Tensor]:
        """Return random inputs, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        tensors = [draw.tensor(generator).to(device) for draw in self.inputs]
        for tensor in tensors:
            tensor.requires_grad_(self.gradients and tensor.is_floating_point())
        return tensors

    def prepared(self, device: str) -> Callable[[Callable[..., Callable[..., object]]], object]:
        """Return a function that runs the program once, without gradients, with its argument as the compiler."""
        inputs = self.make(device)

        def once(compiled: Callable[..., Callable[..., object]]) -> object:
            with torch.no_grad():
                return compiled(self.program)(*inputs)

        return once


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
    """Return a case over queries, keys and values of the same length."""
    return Case(f"{program.__name__} {heads}x{length}x{width}", program, (Draw((1, heads, length, width), dtype),) * 3)


def row_case(program: Callable[..., Tensor], rows: int, columns: int, dtype: torch.dtype, vectors: int = 0) -> Case:
    """Return a case over a matrix and `vectors` vectors as long as its rows."""
    inputs = (Draw((rows, columns), dtype), *(Draw((columns,), dtype),) * vectors)
    return Case(f"{program.__name__} {rows}x{columns}", program, inputs)


def cross_entropy_case(rows: int, classes: int, dtype: torch.dtype) -> Case:
    inputs = (Draw((rows, classes), dtype), Draw((rows,), torch.int64, high=classes))
    return Case(f"cross_entropy {rows}x{classes}", cross_entropy, inputs)


def vector_case(length: int, dtype: torch.dtype) -> Case:
    return Case(f"vector_add {length}", vector_add, (Draw((length,), dtype),) * 2)
