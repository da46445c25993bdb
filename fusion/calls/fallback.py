"""Provides the eager fallback of a region that cannot be compiled, and tells the user.

Input: the graph and the failure; output: a callable that runs the graph in eager, and a warning that names the line of
the call; or, under strict, the error to raise, with a line of the program.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import fx
from torch._dynamo.exc import TorchDynamoException, exceptions_allowed_to_be_fallback
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint

from fusion.inspect.report import ExternReport
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import FusionError, FusionWarning, Origin
from fusion.lowering.interpret import run_program
from fusion.lowering.lower import lower
from fusion.runtime import Boxed


@lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Warn once per message and process, however many regions share the cause (a missing compiler, say).

    The warning names the line of the program that was called, or that called backward: the innermost one outside
    PyTorch and Fusion.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, FusionWarning, stacklevel=level)


def warn_of_some(calls: Sequence[ExternReport]) -> None:
    """Warn about calls that run eagerly within a region whose remainder is compiled."""
    lines: dict[tuple[str, str], dict[str, None]] = {}
    for call in calls:
        lines.setdefault((call.name, call.reason), {})[call.origin.line] = None
    for (name, reason), places in lines.items():
        warn_once(f"running eagerly: {name} ({', '.join(places)}), not what is around it: {reason}")


_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOT_THE_USERS = (_OURS, os.path.dirname(torch.__file__) + os.sep, contextlib.__file__, "<")
"""Prefixes of the names of files that a warning should not point at."""


def as_captured(graph: fx.GraphModule) -> Callable[..., object]:
    """Run Dynamo's graph eagerly.  When an operation raises, the grad mode is restored."""
    whole = with_checkpoints(graph)

    def run(*args: object) -> object:
        enabled = torch.is_grad_enabled()
        try:
            return whole(*args)
        except BaseException:
            torch.set_grad_enabled(enabled)
            raise

    return run


def as_it_is(graph: fx.GraphModule) -> Boxed:
    """Return a function that runs the operations of a graph one by one."""

    def run(args: list[object]) -> tuple[object, ...]:
        inputs = tuple(args)
        args.clear()
        result: tuple[object, ...] = graph(*inputs)
        return result

    return run


def evaluated(graph: fx.GraphModule) -> Boxed:
    """Run the graph in the reference evaluator, with the random numbers of generated kernels (for checkpoints)."""
    program = lower(graph, contractions=())

    def run(args: list[object]) -> tuple[object, ...]:
        inputs = [arg if isinstance(arg, (torch.Tensor, int)) else None for arg in args]
        args.clear()
        return tuple(run_program(program, inputs))

    return run


def for_the_caller(failure: Exception, graph: fx.GraphModule) -> Exception:
    """Add a line to failures of this compiler, and to failures that would be graph breaks for Dynamo; not to others."""
    if isinstance(failure, (FusionError, TorchDynamoException, *exceptions_allowed_to_be_fallback)):
        return located(failure, graph)
    return failure


def located(failure: Exception, graph: fx.GraphModule) -> Exception:
    """Return the failure with a line of the user's program: its own, else the line of the region's first operation."""
    line = first_line(graph)
    if not isinstance(failure, FusionError):
        return FusionError(f"{type(failure).__name__}: {failure}", origin=line)
    if failure.origin is not None or line is None:
        return failure
    return type(failure)(failure.message, hint=failure.hint, origin=line)


def first_line(graph: fx.GraphModule) -> Origin | None:
    """Return the line of the first operation of a graph whose line is known."""
    lines = (origin_of(node) for node in graph.graph.nodes if node.op.startswith("call_"))
    return next((line for line in lines if line.line), None)


def with_checkpoints(graph: fx.GraphModule) -> fx.GraphModule:
    """Return `graph` with eager's checkpoints, which restore the generators; the same object if it has none.

    Dynamo's call of a checkpoint is for tracing alone: run directly, its recomputation in backward draws other random
    numbers than forward did, and gradients are wrong.
    """
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
    """Call a checkpointed part as eager does, with the user's options, which Dynamo has kept."""
    options, arguments = tag_activation_checkpoint.divide_kwargs(kwargs)  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    if "_checkpoint_context_fn" in part.meta:
        options["context_fn"] = part.meta["_checkpoint_context_fn"]
    return checkpoint(part, *args, **{**options, "use_reentrant": False, "preserve_rng_state": True}, **arguments)
