"""Models whose compile time is measured: two whose graphs are long or many, beside those of `benchmarks.price`.

They follow published architectures: one-shot aggregation of convolutions (Lee et al., "An Energy and GPU-Computation
Efficient Backbone Network", 2019), here with a check of its values after each stage, which breaks the graph; and a
vision transformer whose position embeddings are resized to the image (Caron et al., "Emerging Properties in
Self-Supervised Vision Transformers", 2021).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Aggregation(nn.Module):
    """Convolutions in a row, whose results are concatenated and joined."""

    def __init__(self, inputs: int, inner: int, outputs: int, count: int = 5) -> None:
        super().__init__()
        self.steps = nn.ModuleList(_convolution(inputs if k == 0 else inner, inner, 3) for k in range(count))
        self.joined = _convolution(inputs + count * inner, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, inputs, height, width] → [rows, outputs, height, width]"""
        parts = [x]
        for step in self.steps:
            parts.append(step(parts[-1]))
        result: Tensor = self.joined(torch.cat(parts, 1))
        return result


class CheckedNetwork(nn.Module):
    """Stages of aggregations; after each, a number of it is looked at, which breaks the graph."""

    def __init__(self, width: int = 32, count: int = 5, stages: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, width, 3, 2), _convolution(width, width, 3))
        sizes = [width * factor for factor in (1, 2, 3, 4, 4)[: stages + 1]]
        self.stages = nn.ModuleList(Aggregation(inputs, width, outputs, count) for inputs, outputs in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """[rows, 3, height, width] → [rows, 10]"""
        x = self.stem(pixels)
        for stage in self.stages:
            x = stage(F.max_pool2d(x, 3, 2, ceil_mode=True))
            if x.mean().item() > 1e6:
                x = x / x.amax()
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Attention(nn.Module):
    """A block of a transformer: attention written out, and two linear maps around a GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] → the same"""
        rows, tokens, width = x.shape
        each = width // self.heads
        q, k, v = self.qkv(self.first(x)).view(rows, tokens, 3, self.heads, each).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * each**-0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(rows, tokens, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


class ResizedTransformer(nn.Module):
    """A vision transformer of 12 blocks; positions of 14 × 14 patches are resized to those of the image."""

    def __init__(self, width: int = 128, heads: int = 4, blocks: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.whole = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, width, 14, 14))
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, pixels: Tensor) -> Tensor:
        """[rows, 3, height, width] → [rows, width of the model]"""
        x = self.patches(pixels)
        x = x + F.interpolate(self.places, x.shape[-2:], mode="bicubic")
        x = torch.cat((self.whole.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)), 1)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.norm(x)[:, 0]
        return result
