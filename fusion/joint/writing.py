"""Writing: operations that a pass adds to a joint graph, each with its fake tensor and for whose sake it is there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Argument

HOW = frozenset({"val", "tensor_meta", "original_aten", "eager_input_vals", "recompute", "desc"})
"""What says how a node was made, where the rest says what for: lines and modules of the program, forward or not."""


def write(like: fx.Node, target: OpOverload, *args: object, **kwargs: object) -> fx.Node:
    """A call where its graph is being inserted to, which is there for what `like` is there for."""
    given, named = cast("tuple[Argument, ...]", args), cast("dict[str, Argument]", kwargs)
    made = like.graph.create_node("call_function", target, given, named, target.overloadpacket.__name__)
    made.meta = {key: known for key, known in like.meta.items() if key not in HOW}
    values, options = fx.map_arg((made.args, made.kwargs), lambda node: node.meta["val"])
    val = like.meta["val"]
    with torch.no_grad(), val.fake_mode if isinstance(val, FakeTensor) else nullcontext():
        made.meta["val"] = target(*values, **options)
    return made


def convert(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A tensor in another dtype, where its graph is being inserted to."""
    return write(node, torch.ops.aten._to_copy.default, node, dtype=dtype)
