"""Linear layers that call PyTorch's own products of narrow weights: what TorchInductor's best users write.

Input: a model with quantised layers (`fusion.quantize_weights`); output: a copy of it that shares every other tensor,
and computes the same numbers by `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu`.  Under `max-autotune`
TorchInductor replaces these calls by templates of its own, where it has one for the processor.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fusion import QuantizedLinear

GROUPS = (32, 64, 128, 256)
"""Numbers of weights of 4 bits to a scale for which PyTorch has a product."""

COLUMNS = 16
"""The number of rows of weights of 4 bits is a multiple of this."""

INNER = 1
"""An argument of the call that packs, which CPUs ignore."""


class PackedLinear(nn.Module):
    """A linear layer without bias whose weights are stored in the order of PyTorch's own product."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.bits, self.group = layer.bits, layer.in_features // layer.scale.shape[1]
        if layer.bits == 8:
            self.register_buffer("weight", layer.weight)
            self.register_buffer("scale", layer.scale.flatten())
            return
        whole = torch.stack((layer.weight & 15, layer.weight >> 4), -1).flatten(1).int()
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, INNER))
        scales = layer.scale.t()
        self.register_buffer("scale", torch.stack((scales, torch.zeros_like(scales)), -1).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ."""
        rows = x.flatten(0, -2)
        result: Tensor
        if self.bits == 8:
            result = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            result = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, self.group, self.scale)
        return result.view(*x.shape[:-1], -1)


def has_product(layer: nn.Module) -> bool:
    """Return whether PyTorch multiplies by the weights of a layer as they are stored."""
    if not isinstance(layer, QuantizedLinear) or layer.bias is not None:
        return False
    if layer.bits == 8:
        return layer.scale.shape[1] == 1
    return layer.out_features % COLUMNS == 0 and layer.in_features // layer.scale.shape[1] in GROUPS


def packed(model: nn.Module) -> nn.Module | None:
    """Return a model with packed layers; None if the model has none that PyTorch multiplies by."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    if not layers or not all(map(has_product, layers)):
        return None
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    shared |= {id(layer): PackedLinear(layer) for layer in layers}
    return copy.deepcopy(model, shared)
