"""Quantises the weights of linear layers to integers of 8 or 4 bits, with a scale for each group of a row.

    fusion.quantize_weights(model, bits=4, group=64)

Only weights are quantised: activations keep their dtype, and a product multiplies the numbers that the integers
represent.  Storage and arithmetic are plain PyTorch, so that eager runs it too, `state_dict` holds ordinary tensors,
and the generated kernels read the integers as they are (`codegen/c/skinny`).
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor, nn

from fusion.lowering.errors import Unsupported


class QuantizedLinear(nn.Module):
    """A linear layer whose weights are integers with scales.

    Attributes:
        weight: int8 [out, in], or uint8 [out, in / 2] with two weights to a byte, the first in the low 4 bits, plus 8.
        scale: [out, in / group], the factor of the integers of a group.
        bias: [out], or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @property
    def in_features(self) -> int:
        """The size of a row."""
        return self.weight.shape[1] * (8 // self.bits)

    @property
    def out_features(self) -> int:
        """The size of a result."""
        return self.weight.shape[0]

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the weights as numbers, [out, in]."""
        stored = self.weight
        if self.bits == 4:
            stored = torch.stack((stored & 15, stored >> 4), -1).to(torch.int8) - 8
        groups = stored.reshape(self.out_features, self.scale.shape[1], -1).to(dtype)
        return (groups * self.scale[..., None].to(dtype)).view(self.out_features, -1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        return F.linear(x, self.numbers(x.dtype), self.bias)

    def extra_repr(self) -> str:
        """Describe the layer in `repr`."""
        group = self.in_features // self.scale.shape[1]
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, group={group}, bias={self.bias is not None}"


def quantized(linear: nn.Linear, *, bits: int = 8, group: int | None = None) -> QuantizedLinear:
    """Return a linear layer with the weights of `linear`, rounded to integers of 8 or 4 bits.

    Args:
        group: the number of consecutive weights of a row that share a scale; None: all of a row.

    Raises:
        ValueError: `bits` is neither 8 nor 4, or rows are no multiple of `group`, or of two weights of 4 bits.

    >>> layer = quantized(nn.Linear(64, 8), bits=4, group=32)
    >>> layer.weight.shape, layer.scale.shape
    (torch.Size([8, 32]), torch.Size([8, 2]))
    """
    if bits not in (8, 4):
        raise ValueError(f"weights are quantised to 8 or 4 bits, not {bits}")
    group = linear.in_features if group is None else group
    if group < 1 or linear.in_features % group or (bits == 4 and linear.in_features % 2):
        raise ValueError(f"rows of {linear.in_features} weights are not groups of {group}, or not pairs")
    most = (1 << (bits - 1)) - 1
    rows = linear.weight.detach().float().view(linear.out_features, -1, group)
    scale = (rows.abs().amax(-1, keepdim=True) / most).to(linear.weight.dtype)
    whole = (rows / scale.float().clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-most - 1, most)
    weight = whole.to(torch.int8).view(linear.out_features, -1)
    if bits == 4:
        stored = (weight + 8).to(torch.uint8)
        weight = stored[:, ::2] | stored[:, 1::2] << 4
    bias = None if linear.bias is None else linear.bias.detach()
    return QuantizedLinear(weight, scale.squeeze(-1), bias, bits).train(linear.training)


def quantize_weights(model: nn.Module, *, bits: int = 8, group: int | None = None) -> nn.Module:
    """Replace, in place, the linear layers of `model` by layers with quantised weights; return `model`.

    Layers stay as they are if their weight is used elsewhere too (an embedding), if a subclass of `nn.Linear` computes
    something else, or if their rows are no multiple of `group`.  Quantise before `fuse`: a compiled program is not
    changed.  Gradients reach the activations and not the weights.

    Args:
        bits: 8 or 4.
        group: the number of consecutive weights of a row that share a scale; None: all of a row.

    Raises:
        ValueError: `bits` is neither 8 nor 4.
        Unsupported: no layer could be replaced.

    >>> model = quantize_weights(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), bits=4, group=32)
    >>> model[0]
    QuantizedLinear(64, 32, bits=4, group=32, bias=True)
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    replaced = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear or uses[id(layer.weight)] > 1:
                continue
            if layer.in_features % (group or 1) or (bits == 4 and layer.in_features % 2):
                continue
            setattr(parent, name, quantized(layer, bits=bits, group=group))
            replaced += 1
    if not replaced:
        raise Unsupported(f"no linear layer has rows of whole groups of {group}")
    return model
