"""Keeps the elements between windows and behind them when windows are written through `unfold`.

    x.unfold(d, size, step)      becomes      x.narrow(d, 0, n·step).unflatten(d, (n, step)).narrow(d + 1, 0, size)

with the last dimension moved to the end.  In the functional graph x is recreated from the written view.  AOTAutograd
uses the gradient of `unfold` for that, which is 0 outside of all windows; for each of these views it does it right.

Input: Dynamo's graph, with the graphs that it calls, after writes to overlapping windows were refused; it is changed in
place.  Refused are windows with more elements between them than there are behind the last one.
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
"""The names of the one operation whose writes AOTAutograd gets wrong: the repair has to precede any lowered form."""


def separate_written_windows(graph: fx.GraphModule) -> None:
    """Express written windows by views that keep the elements between them.

    Raises:
        Unsupported: there are too few elements behind the last window.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> def f(x):
    ...     x.unfold(0, 2, 3).mul_(2)
    ...     return x + 1
    >>> show_captured(separate_written_windows, f, empty(12))
    - unfold = unfold(l_x_, 0, 2, 3)
    + windows = windows(l_x_, 0, 2, 3)
    - mul_ = mul_(unfold, 2)
    + mul_ = mul_(windows, 2)
      add = add(l_x_, 1)
      return add
    """
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            windows = [node for node in module.graph.nodes if node.target in UNFOLDS and _is_written(node)]
            for node in windows:
                _separate(node)
            if windows:
                module.recompile()


def _is_written(windows: fx.Node) -> bool:
    """Return whether these windows, or a view of them, are written to."""
    memory = memory_of(windows.meta["example_value"])
    views = {windows}
    for node in windows.graph.nodes:
        if written_by(node) in views:
            return True
        if not views.isdisjoint(node.all_input_nodes):
            results = pytree.tree_leaves(node.meta.get("example_value"))
            if any(isinstance(part, FakeTensor) and memory_of(part) == memory for part in results):
                views.add(node)
    return False


def _separate(node: fx.Node) -> None:
    operands = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["example_value"])
    args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", operands)
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
    """Compute `x.unfold(dimension, size, step)`, by other views where possible."""
    blocks_ = _blocks(x, dimension, size, step)
    if blocks_ is None:
        return x.unfold(dimension, size, step)
    count, stride = blocks_
    dimension %= x.ndim
    blocks_part = x.narrow(dimension, 0, count * stride)
    blocks: Tensor = blocks_part.unflatten(dimension, (count, stride))  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    return blocks.narrow(dimension + 1, 0, size).movedim(dimension + 1, -1)


def _blocks(x: Tensor, dimension: int, size: int, step: int) -> tuple[int, int] | None:
    """Return the number and size of blocks that begin with a window each; None unless they certainly fit into x."""
    if not x.ndim:
        return None
    count = (x.shape[dimension] - size) // step + 1
    stride = size if guard_or_false(count == 1) else step
    return (count, stride) if guard_or_false(count * stride <= x.shape[dimension]) else None
