"""Operands of library calls have eager's strides: the library's kernels may silently read wrong numbers otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor

import fusion

LAYOUTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
"""Shapes and strides of the operands of calls, in order; 0 along a single element."""


def note(x: Tensor) -> None:
    LAYOUTS.append((tuple(x.shape), tuple(s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True))))


@torch.library.custom_op("fusion_tests::weighed", mutates_args=())
def weighed(x: Tensor) -> Tensor:
    """2x, laid out as x, whose layout is noted."""
    note(x)
    return torch.empty_like(x).copy_(2 * x)


@torch.library.custom_op("fusion_tests::weighed_backward", mutates_args=())
def weighed_backward(grad: Tensor) -> Tensor:
    note(grad)
    return 2 * grad.contiguous()


@weighed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@weighed_backward.register_fake
def _(grad: Tensor) -> Tensor:
    return torch.empty(grad.shape)


weighed.register_autograd(lambda ctx, grad: weighed_backward(grad))


def bias_in_aligned_rows(x: Tensor) -> Tensor:
    """An additive mask of attention: rows begin at multiples of 8 elements, batches share them."""
    return weighed(F.pad(x * 3, (0, 8 - x.shape[-1] % 8))[..., : x.shape[-1]].expand(2, -1, -1, -1))


def channels_last(x: Tensor) -> Tensor:
    return weighed((x * 3).contiguous(memory_format=torch.channels_last)).relu()


PROGRAMS: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    (bias_in_aligned_rows, (1, 4, 7, 13)),
    (bias_in_aligned_rows, (1, 1, 7, 16)),
    (channels_last, (2, 3, 5, 4)),
    (lambda x: weighed(x.exp().view(2, 7, 4, 8).transpose(1, 2)).transpose(1, 2).flatten(2), (2, 7, 32)),
    (lambda x: weighed((x + 1).mT) @ weighed((x * 2)[..., 1:-1]), (3, 4, 6)),
    (lambda x: weighed(x.permute(2, 0, 1) * 3 + 1), (3, 4, 6)),
    (lambda x: weighed(x.sum(1, keepdim=True).expand(-1, 4, -1)), (3, 5, 6)),
    (lambda x: weighed(F.pad(x.cos(), (1, 2))[:, ::2, 1:]), (3, 5, 6)),
    (lambda x: weighed(torch.cat([x, x * 2], 1).unflatten(1, (2, -1)).select(1, 1)), (3, 5, 6)),
    (lambda x: weighed((x * 2).unfold(1, 4, 3)), (3, 10)),
    (lambda x: weighed(x.softmax(-1)[:, :1]).squeeze(1) * 2, (3, 4, 6)),
]


@pytest.mark.parametrize("within", [True, False], ids=["summed-within", "summed-outside"])
@pytest.mark.parametrize(("program", "shape"), PROGRAMS)
def test_calls_are_given_tensors_as_in_eager(
    program: Callable[[Tensor], Tensor], shape: tuple[int, ...], within: bool
) -> None:
    """Forward and backward, where the gradient of a sum is one number, expanded."""

    def loss(x: Tensor) -> Tensor:
        result = program(x).sin()
        return result.sum() if within else result

    results = []
    for run in (loss, fusion.fuse(loss, options={"strict": True})):
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()
        LAYOUTS.clear()
        run(x).sum().backward()
        results.append((list(LAYOUTS), x.grad))
    (layouts, grad), (ours, fused) = results
    assert len(layouts) > 1 and ours == layouts
    torch.testing.assert_close(fused, grad)
