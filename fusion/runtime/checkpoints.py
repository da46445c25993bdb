"""Checkpoints: how a captured graph that holds some runs operation by operation.

Dynamo's call of a checkpoint is made to be traced: run as it is, what it computes again in backward draws other random
numbers than forward did, and gradients are wrong.  Input: a captured graph; output: one of the same operations whose
checkpoints are those of eager, which restore the generators.
"""

from __future__ import annotations

import copy

from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint


def with_checkpoints(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph`, ready to be run as it is; the same object where it holds no checkpoints."""
    parts = (part for part in graph.modules() if isinstance(part, fx.GraphModule))
    if not any(part.graph.find_nodes(op="call_function", target=tag_activation_checkpoint) for part in parts):
        return graph
    made = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    made.meta = dict(graph.meta)
    for node in made.graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        node.target = _checkpointed
    made.recompile()
    for name, part in list(made.named_children()):
        if isinstance(part, fx.GraphModule):
            setattr(made, name, with_checkpoints(part))
    return made


def _checkpointed(part: fx.GraphModule, *args: object, **kwargs: object) -> object:
    """Eager's call of a part of a graph, of which Dynamo has kept what the user asked for."""
    wished, given = tag_activation_checkpoint.divide_kwargs(kwargs)  # type: ignore[no-untyped-call]  # PyTorch's own
    if "_checkpoint_context_fn" in part.meta:
        wished["context_fn"] = part.meta["_checkpoint_context_fn"]
    return checkpoint(part, *args, **{**wished, "use_reentrant": False, "preserve_rng_state": True}, **given)
