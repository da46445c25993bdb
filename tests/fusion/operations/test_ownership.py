"""Memory that backward owns is distinguished from memory with other readers, in any state of the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from fusion.operations.ownership import take_over


class Taking(torch.autograd.Function):
    """The identity, whose backward takes over a tensor with one reference, and one that a list also references."""

    taken: tuple[bool, bool]

    @staticmethod
    def forward(_, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_, gradient: torch.Tensor) -> torch.Tensor:
        alone, shared = torch.ones(5), torch.ones(5)
        holders = [shared]
        Taking.taken = take_over(alone) is alone, take_over(shared) is holders[0]
        return gradient


@pytest.mark.parametrize("states", [(False, True), (True, False)])
def test_references_are_counted_with_and_without_a_frame_hook(
    states: tuple[bool, bool],
) -> None:
    """Dynamo's frame hook adds a reference to the arguments of calls."""
    for looked_at in states:
        result = Taking.apply(torch.ones(3, requires_grad=True)).sum()
        before = set_eval_frame(False) if looked_at else None
        try:
            result.backward()
        finally:
            if looked_at:
                set_eval_frame(before)
        assert Taking.taken == (True, False)
