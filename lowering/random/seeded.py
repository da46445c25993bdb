"""Repeats random calls with the same numbers, by an explicit seed.

Input: a random ATen overload, an int64 seed, and the arguments of the call; output: its result.  In a graph, `seeded`
replaces the call; its rule then draws from that seed instead of a fresh one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._ops import OpOverload

LIMITS = (-(2**62), 2**62)
"""The range that seeds are drawn from."""


def draws(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a call draws random numbers; attention is tagged as random, but draws only with dropout.

    >>> draws(torch.ops.aten.rand.default, ([4],), {}), draws(torch.ops.aten.sin.default, (torch.ones(4),), {})
    (True, False)
    """
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, declared in enumerate(target._schema.arguments):
        if declared.name == "dropout_p":
            dropout = args[position] if position < len(args) else kwargs.get(declared.name, declared.default_value)
            return dropout != 0
    return True


def seeded(call: OpOverload, seed: torch.Tensor, *args: object, **kwargs: object) -> object:
    """Make a random call under a seed, leaving the generators unchanged.

    >>> seed = torch.tensor(3)
    >>> first = seeded(torch.ops.aten.rand.default, seed, [4])
    >>> torch.equal(first, seeded(torch.ops.aten.rand.default, seed, [4]))
    True
    """
    devices = [] if seed.device.type == "cpu" else [seed.device]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        torch.manual_seed(int(seed))
        return call(*args, **kwargs)
