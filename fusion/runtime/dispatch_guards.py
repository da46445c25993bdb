"""Runs a graph's own operations at calls that kernels must not serve (fake tensors, forward mode, vmap).

Inside of a `FakeTensorMode` whatever is allocated has no memory, also by a function that was compiled before: a kernel
would write where there is nothing.  Inside of a level of forward-mode derivatives tensors carry tangents, which kernels
would lose without a word.  Inside of `vmap` (a backward that is asked for many gradients at once) a tensor is many. A
tensor that is negated where it is read (the imaginary part of a conjugate) has other numbers in its memory.  Where a
launch was refused before (`refusals.py`), the next would be.  Input: a compiled graph; output: a callable that looks,
at each call, whether it is so.  A graph that Dynamo captures from fake or negated tensors is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from fusion.lowering.errors import Unsupported
from fusion.runtime import Boxed

FAKE = torch._C._TorchDispatchModeKey.FAKE

NEGATED = "a tensor is negated where it is read, and its memory holds other numbers"
RESOLVE = "tensor.resolve_neg() has them in memory"


def watch_surroundings(
    compiled: Boxed,
    tangents: Sequence[int],
    eagerly: Callable[[Unsupported], Boxed],
    instead: Sequence[Boxed] = (),
) -> Boxed:
    """What to call: `compiled`, or where that must not be, what `eagerly` makes of the reason, once.

    Args:
        tangents: the positions of inputs that are gradients.  These may be many at once, or negated, with no other
            sign of that.
        instead: is empty until a launch is refused; then it holds what to call.
    """
    made: list[Boxed] = []
    fake_mode, level = torch._C._get_dispatch_mode, torch._C._functorch.maybe_current_level
    batched: Callable[[object], bool] = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[assignment]  # a tensor

    def gradients(args: Sequence[object]) -> list[torch.Tensor]:
        return [given for k in tangents if isinstance(given := args[k], torch.Tensor)]

    def run(args: list[object]) -> tuple[object, ...]:
        if instead:
            return instead[0](args)
        plain = fake_mode(FAKE) is None and forward_ad._current_level < 0 and level() is None
        if plain and not (tangents and any(batched(given) or given.is_neg() for given in gradients(args))):
            return compiled(args)
        if not made:
            negated = any(given.is_neg() for given in gradients(args))
            reason, hint = (NEGATED, RESOLVE) if negated else (f"inside of {_within()}", "")
            made.append(eagerly(Unsupported(reason, hint=hint)))
        return made[0](args)

    return run


def _within() -> str:
    if torch._C._get_dispatch_mode(FAKE) is not None:
        return "fake tensors"
    return "forward-mode derivatives" if forward_ad._current_level >= 0 else "vmap"


def refuse_fake_inputs(graph: fx.GraphModule) -> None:
    """Refuse a graph that Dynamo captured from fake tensors.

    Raises:
        Unsupported: an input is a fake tensor.
    """
    if any(isinstance(given, FakeTensor) for given in _examples(graph)):
        raise Unsupported("fake tensors have no memory", hint="called with real tensors, it is compiled")


def refuse_negated_inputs(graph: fx.GraphModule) -> None:
    """Refuse a graph that Dynamo captured from tensors whose numbers are negated where they are read.

    Raises:
        Unsupported: an input is such a tensor.
    """
    if any(isinstance(given, torch.Tensor) and given.is_neg() for given in _examples(graph)):
        raise Unsupported(NEGATED, hint=RESOLVE)


def _examples(graph: fx.GraphModule) -> Iterator[object]:
    """The values of the inputs for which Dynamo captured the graph."""
    for node in graph.graph.find_nodes(op="placeholder"):
        if (given := node.meta.get("grapharg")) is not None:
            yield given.example
