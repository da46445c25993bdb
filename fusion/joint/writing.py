"""Adds operations to a joint graph, each with its fake tensor and the metadata of the node it is added for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Argument

HOW = frozenset({"val", "tensor_meta", "original_aten", "eager_input_vals", "recompute", "desc"})
"""Metadata about the computation of a node; the rest is about its purpose: lines and modules, forward or backward."""


def write(like: fx.Node, target: OpOverload, *args: object, **kwargs: object) -> fx.Node:
    """Add a call at the graph's insertion point, with the origin of `like`."""
    positional, named = cast("tuple[Argument, ...]", args), cast("dict[str, Argument]", kwargs)
    call = like.graph.create_node("call_function", target, positional, named, target.overloadpacket.__name__)
    call.meta = {key: known for key, known in like.meta.items() if key not in HOW}
    values, options = fx.map_arg((call.args, call.kwargs), lambda node: node.meta["val"])
    val = like.meta["val"]
    with torch.no_grad(), val.fake_mode if isinstance(val, FakeTensor) else nullcontext():
        call.meta["val"] = target(*values, **options)
    return call


def convert(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Convert a tensor to another dtype, at its graph's insertion point."""
    return write(node, torch.ops.aten._to_copy.default, node, dtype=dtype)
