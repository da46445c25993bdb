"""Runs the checkpoints of a captured graph as eager does.

Dynamo's call of a checkpoint is for tracing alone: run directly, its recomputation in backward draws other random
numbers than forward did, and gradients are wrong.  Input: a captured graph; output: one with the same operations whose
checkpoints are eager's, which restore the generators.
"""

from __future__ import annotations

import copy

from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint


def with_checkpoints(graph: fx.GraphModule) -> fx.GraphModule:
    """Return `graph`, ready to be run operation by operation; the same object if it has no checkpoints."""
    parts = (part for part in graph.modules() if isinstance(part, fx.GraphModule))
    if not any(part.graph.find_nodes(op="call_function", target=tag_activation_checkpoint) for part in parts):
        return graph
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    copied.meta = dict(graph.meta)
    for node in copied.graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        node.target = _checkpointed
    copied.recompile()
    for name, part in list(copied.named_children()):
        if isinstance(part, fx.GraphModule):
            setattr(copied, name, with_checkpoints(part))
    return copied


def _checkpointed(part: fx.GraphModule, *args: object, **kwargs: object) -> object:
    """Make eager's call of a checkpointed part, with the user's options, which Dynamo has kept."""
    options, arguments = tag_activation_checkpoint.divide_kwargs(kwargs)  # type: ignore[no-untyped-call]  # PyTorch's own
    if "_checkpoint_context_fn" in part.meta:
        options["context_fn"] = part.meta["_checkpoint_context_fn"]
    return checkpoint(part, *args, **{**options, "use_reentrant": False, "preserve_rng_state": True}, **arguments)
