"""Surroundings in which a graph's own operations are to run, and no kernels.

Inside of a `FakeTensorMode` whatever is allocated has no memory, also by a function that was compiled before: a kernel
would write where there is nothing.  Inside of a level of forward-mode derivatives tensors carry tangents, which kernels
would lose without a word.  What enters is a compiled graph; what leaves is a callable that looks, at each call, whether
it is so.  A graph that Dynamo captures from fake tensors is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from lowering.errors import Unsupported

Boxed: TypeAlias = Callable[[list[object]], tuple[object, ...]]

FAKE = torch._C._TorchDispatchModeKey.FAKE


def watch_surroundings(compiled: Boxed, eagerly: Callable[[Unsupported], Boxed]) -> Boxed:
    """What to call: `compiled`, or where that must not be, what `eagerly` makes of the reason, once."""
    made: list[Boxed] = []
    fake_mode = torch._C._get_dispatch_mode

    def run(args: list[object]) -> tuple[object, ...]:
        if fake_mode(FAKE) is None and forward_ad._current_level < 0:
            return compiled(args)
        if not made:
            fake = fake_mode(FAKE) is not None
            made.append(eagerly(Unsupported(f"inside of {'fake tensors' if fake else 'forward-mode derivatives'}")))
        return made[0](args)

    return run


def refuse_fake_inputs(graph: fx.GraphModule) -> None:
    """Refuse a graph that Dynamo captured from tensors that have no memory themselves.

    Raises:
        Unsupported: an input is a fake tensor.
    """
    for node in graph.graph.find_nodes(op="placeholder"):
        given = node.meta.get("grapharg")
        if given is not None and isinstance(given.example, FakeTensor):
            raise Unsupported("fake tensors have no memory")
