"""Windows: what is written through `unfold` leaves alone what lies between the windows and behind them.

    x.unfold(d, size, step)      becomes      x.narrow(d, 0, n·step).unflatten(d, (n, step)).narrow(d + 1, 0, size)

with the last dimension moved to the end.  For the functional graph x is made anew from what was written.  AOTAutograd
does so by the gradient of `unfold`, in which what is part of no window is 0; of each of these views it does it right.

Input: Dynamo's graph, with the graphs that it calls, after writes to windows that overlap were refused; it is changed
in place.  Refused are windows with more between them than lies behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils import _pytree as pytree

from fusion.dynamo.writes import memory_of, written_by
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import Unsupported

UNFOLDS = frozenset({"unfold", torch.Tensor.unfold, torch.ops.aten.unfold, torch.ops.aten.unfold.default})


def separate_written_windows(graph: fx.GraphModule) -> None:
    """Have windows that are written be views that keep what is between them.

    Raises:
        Unsupported: there is too little behind the last window.
    """
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            found = [node for node in module.graph.nodes if node.target in UNFOLDS and _is_written(node)]
            for node in found:
                _separate(node)
            if found:
                module.recompile()


def _is_written(windows: fx.Node) -> bool:
    """Is anything written to these windows, or to a view of them?"""
    memory = memory_of(windows.meta["example_value"])
    views = {windows}
    for node in windows.graph.nodes:
        if written_by(node) in views:
            return True
        if not views.isdisjoint(node.all_input_nodes):
            made = pytree.tree_leaves(node.meta.get("example_value"))
            if any(isinstance(part, FakeTensor) and memory_of(part) == memory for part in made):
                views.add(node)
    return False


def _separate(node: fx.Node) -> None:
    given = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["example_value"])
    args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", given)
    blocks: Callable[..., object] = _blocks
    if blocks(*args, **kwargs) is None:
        message = "windows are written with more between them than lies behind the last one"
        raise Unsupported(message, hint="write to windows of a padded tensor", origin=origin_of(node))
    with node.graph.inserting_before(node):
        separate = node.graph.call_function(windows, node.args, node.kwargs)
    separate.meta = dict(node.meta)
    node.replace_all_uses_with(separate)
    node.graph.erase_node(node)


def windows(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """`x.unfold(dimension, size, step)`, made of other views where there are such."""
    found = _blocks(x, dimension, size, step)
    if found is None:
        return x.unfold(dimension, size, step)
    count, apart = found
    dimension %= x.ndim
    whole = x.narrow(dimension, 0, count * apart)
    blocks: Tensor = whole.unflatten(dimension, (count, apart))  # type: ignore[no-untyped-call]  # torch has none
    return blocks.narrow(dimension + 1, 0, size).movedim(dimension + 1, -1)


def _blocks(x: Tensor, dimension: int, size: int, step: int) -> tuple[int, int] | None:
    """How many blocks begin with a window each, and their size; None where they are not known to be part of x."""
    if not x.ndim:
        return None
    count = (x.shape[dimension] - size) // step + 1
    apart = size if guard_or_false(count == 1) else step
    return (count, apart) if guard_or_false(count * apart <= x.shape[dimension]) else None
