"""Runs a graph's own operations at calls that kernels cannot serve (fake tensors, forward mode, vmap).

Inside a `FakeTensorMode` allocated tensors have no memory, also in functions that were compiled before: a kernel would
write to invalid addresses.  Inside a level of forward-mode derivatives tensors carry tangents, which kernels would
silently drop.  Inside `vmap` (a backward for many gradients at once) a tensor has a hidden batch dimension.  A tensor
with the negative bit (the imaginary part of a conjugate) has other numbers in its memory.  After a refused launch
(`splice.py`), the next one would be refused, too.  Input: a compiled graph; output: a callable that checks this at
each call.  A graph that Dynamo captures from fake or negated tensors is refused.
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


def guard_dispatch(
    compiled: Boxed,
    tangents: Sequence[int],
    eagerly: Callable[[Unsupported], Boxed],
    instead: Sequence[Boxed] = (),
) -> Boxed:
    """Return a callable that runs `compiled`, or, where that is impossible, `eagerly` of the reason, created once.

    Args:
        tangents: the positions of inputs that are gradients.  These may be batched, or negated, without other
            indications.
        instead: empty until a launch is refused; then it holds the callable to use.
    """
    fallback: list[Boxed] = []
    fake_mode, level = torch._C._get_dispatch_mode, torch._C._functorch.maybe_current_level
    batched: Callable[[object], bool] = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[assignment]  # annotated for tensors alone

    def gradients(args: Sequence[object]) -> list[torch.Tensor]:
        return [value for k in tangents if isinstance(value := args[k], torch.Tensor)]

    def run(args: list[object]) -> tuple[object, ...]:
        if instead:
            return instead[0](args)
        supported = fake_mode(FAKE) is None and forward_ad._current_level < 0 and level() is None
        if supported and not (tangents and any(batched(value) or value.is_neg() for value in gradients(args))):
            return compiled(args)
        if not fallback:
            negated = any(value.is_neg() for value in gradients(args))
            reason, hint = (NEGATED, RESOLVE) if negated else (f"inside of {within()}", "")
            fallback.append(eagerly(Unsupported(reason, hint=hint)))
        return fallback[0](args)

    return run


def within() -> str:
    """Return the mode of a call that kernels cannot serve, such as "fake tensors"; empty if they can serve the call."""
    if torch._C._get_dispatch_mode(FAKE) is not None:
        return "fake tensors"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives"
    return "" if torch._C._functorch.maybe_current_level() is None else "vmap"


def refuse_fake_inputs(graph: fx.GraphModule) -> None:
    """Refuse a graph that Dynamo captured from fake tensors.

    Raises:
        Unsupported: an input is a fake tensor.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode():
    ...     x = empty(3)
    ...     show_captured(refuse_fake_inputs, lambda x: x + 1, x)
    refused: fake tensors have no memory
    """
    if any(isinstance(value, FakeTensor) for value in _examples(graph)):
        raise Unsupported("fake tensors have no memory", hint="called with real tensors, it is compiled")


def refuse_negated_inputs(graph: fx.GraphModule) -> None:
    """Refuse a graph that Dynamo captured from tensors with the negative bit.

    Raises:
        Unsupported: an input is such a tensor.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> show_captured(refuse_negated_inputs, lambda x: x + 1, empty(3, dtype=torch.cfloat).conj().imag)
    refused: a tensor is negated where it is read, and its memory holds other numbers
    """
    if any(isinstance(value, torch.Tensor) and value.is_neg() for value in _examples(graph)):
        raise Unsupported(NEGATED, hint=RESOLVE)


def _examples(graph: fx.GraphModule) -> Iterator[object]:
    """Yield the values of the inputs for which Dynamo captured the graph."""
    for node in graph.graph.find_nodes(op="placeholder"):
        if (example := node.meta.get("grapharg")) is not None:
            yield example.example
