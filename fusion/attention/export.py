"""Ahead of time, where there is no graph of Dynamo's: the choice for calls as they are made over fake tensors.

A program is run twice in the mode of this file.  The first time, outside of any trace, each call is priced; the second
time, while it is traced, those chosen take the way of their parts.  Masks are taken as tensors: what makes them is not
seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fusion.attention.call import TARGETS
from fusion.attention.choose import Chooser
from fusion.lowering.attention import attention


class ChosenAhead(TorchFunctionMode):
    """Chooses while it is entered for the first time, and keeps to it when it is entered again."""

    def __init__(self, chooser: Chooser) -> None:
        super().__init__()
        self._chooser = chooser
        self._orders: list[tuple[int, ...] | None] = []  # of each call that is generated
        self._made: int | None = None  # calls made since the choice was taken

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]  # PyTorch does not say
        self._made = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if func not in TARGETS:
            return func(*args, **given)
        if self._made is None:
            result = func(*args, **given)
            self._orders.append(self._order(func, args, given, result))
            return result
        self._made += 1
        order = self._orders[self._made - 1] if self._made <= len(self._orders) else None
        if order is None:
            return func(*args, **given)
        parts: Callable[..., object] = attention
        return parts(*args, **given, order=order)

    def _order(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], result: object
    ) -> tuple[int, ...] | None:
        """How the result of a call lies in memory if it is generated; None if it is the library's."""
        graph = fx.Graph()

        def named(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            node = graph.placeholder(f"given_{len(graph.nodes)}")
            node.meta["example_value"] = value
            return node

        taken = tuple(map(named, args)), {name: named(value) for name, value in kwargs.items()}
        call = graph.call_function(func, *taken)  # type: ignore[arg-type]  # numbers and nodes
        call.meta["example_value"] = result
        graph.output((call,))
        self._chooser(fx.GraphModule({}, graph))
        order = call.kwargs.get("order")
        return order if isinstance(order, tuple) else None
