"""Memory that backward owns is distinguished from memory with other readers, in any state of the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from fusion.operations.ownership import take_over


class Taking(torch.autograd.Function):
    """The identity, whose backward takes over a tensor that one variable holds, and one that a list holds as well."""

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
def test_one_holder_is_told_from_two_while_frames_are_looked_at_and_while_they_are_not(
    states: tuple[bool, bool],
) -> None:
    """While Dynamo looks at frames, calls hold their arguments once more."""
    for looked_at in states:
        result = Taking.apply(torch.ones(3, requires_grad=True)).sum()
        before = set_eval_frame(False) if looked_at else None
        try:
            result.backward()
        finally:
            if looked_at:
                set_eval_frame(before)
        assert Taking.taken == (True, False)
