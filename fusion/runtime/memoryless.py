"""Tensors without memory: a kernel would write where there is nothing.

Inside of a `FakeTensorMode` whatever is allocated is fake, also by a function that was compiled before; so what enters
is a compiled graph, and what leaves is a callable that runs the graph's own operations there.  A graph that Dynamo
captures from fake tensors is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from lowering.errors import Unsupported

Boxed: TypeAlias = Callable[[list[object]], tuple[object, ...]]

FAKE = torch._C._TorchDispatchModeKey.FAKE


def with_memory(compiled: Boxed, eagerly: Callable[[], Boxed]) -> Boxed:
    """What to call: `compiled`, or inside of a mode of fake tensors what `eagerly` makes, which is called once."""
    made: list[Boxed] = []

    def run(args: list[object]) -> tuple[object, ...]:
        if torch._C._get_dispatch_mode(FAKE) is None:
            return compiled(args)
        if not made:
            made.append(eagerly())
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
