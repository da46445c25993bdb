"""Programs whose gradients fold rows and sum columns of the same matrix, and their comparison with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import fusion

F32 = torch.float32


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


def residual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x + layer_norm(x.sin(), weight, bias)


def gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The bias is added before the norm, so that its gradient sums columns of the gradient of each row."""
    return layer_norm(F.silu(x + bias), weight, bias)


def scaled_softmax(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x * weight + bias).softmax(-1)


PROGRAMS: Mapping[str, Callable[..., Tensor]] = {
    "layer norm": layer_norm,
    "RMS norm": rms_norm,
    "residual": residual,
    "gated": gated,
    "softmax": scaled_softmax,
}


def drawn(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], generator=generator).to(dtype) for _ in range(2))
    return x, weight, bias, upstream


def gradients(run: Callable[..., Tensor], *tensors: Tensor, symbolic: bool = False) -> tuple[Tensor, ...]:
    *leaves, upstream = tensors
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    if symbolic:
        torch._dynamo.mark_dynamic(leaves[0], 0)
    return torch.autograd.grad(run(*leaves), leaves, upstream)


def compare(
    program: Callable[..., Tensor], *tensors: Tensor, target: str, symbolic: bool = False
) -> Callable[..., Tensor]:
    """Return a compiled program whose gradients are as close to the exact ones as eager's."""
    function = fusion.fuse(program, options={"target": target, "strict": True})
    exact = gradients(program, *(each.double() for each in tensors))
    eager = gradients(program, *tensors)
    for mine, wanted, usual in zip(gradients(function, *tensors, symbolic=symbolic), exact, eager, strict=True):
        error, bound = ((each.double() - wanted).norm() for each in (mine, usual))
        assert error <= 2 * bound + 1e-5 * wanted.norm(), (error, bound)
    return function
