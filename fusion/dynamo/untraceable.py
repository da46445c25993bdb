"""Finds the operations of a captured graph that cannot be traced without data.

`y[mask] = v` has a gradient with a data-dependent number of rows, and the backward of a custom operator may read
numbers. AOTAutograd then fails, and if that was in a backward, the failing operation is unknown.  So each operation is
traced alone, with its gradients, as AOTAutograd does: functionally, on tensors without data.

Input: Dynamo's graph; output: the operations whose own trace fails in this way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch._functorch._aot_autograd.functional_utils import to_fun
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map

NEEDS_DATA = exceptions_allowed_to_be_fallback
"""The exceptions that PyTorch raises for operations that cannot run on tensors without data."""


def untraceable(graph: fx.GraphModule) -> dict[fx.Node, Exception]:
    """Return the operations of `graph` that need data, in order, with their exceptions."""
    outcomes: dict[Hashable, Exception | None] = {}
    failures = {}
    with _traced(graph):
        for node in graph.graph.nodes:
            if node.op not in ("call_function", "call_method") or is_number_of_input(node):
                continue
            if not any(isinstance(_value(arg), Tensor) for arg in node.all_input_nodes):  # it may set a mode
                continue
            form = _form(node)
            if form not in outcomes:
                outcomes[form] = _failure(graph, node)
            if (failure := outcomes[form]) is not None:
                failures[node] = failure
    return failures


def is_number_of_input(node: fx.Node) -> bool:
    """Return whether this is a float of the program that Dynamo passes as a tensor."""
    grapharg = node.args[0].meta.get("grapharg") if node.args and isinstance(node.args[0], fx.Node) else None
    return node.target == "item" and grapharg is not None and grapharg.pass_arg_as_tensor


def _value(node: fx.Node) -> object:
    return node.meta.get("example_value")


def _form(node: fx.Node) -> Hashable:
    """Return a key of everything that decides how the trace of an operation ends: equal forms are traced once."""

    def shown(arg: object) -> object:
        if not isinstance(arg, fx.Node):
            return arg
        value = _value(arg)
        return arg.target if arg.op == "get_attr" else tree_map(described, value)

    def described(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return value.dtype, value.device, value.layout, value.shape, value.requires_grad

    return node.op, node.target, repr(map_aggregate((node.args, node.kwargs), shown))  # type: ignore[arg-type]  # `shown` takes any argument


def _failure(graph: fx.GraphModule, node: fx.Node) -> Exception | None:
    """Return how the trace of an operation and its gradients fails for lack of data, or None."""
    sources: list[Tensor] = []

    def given(arg: object) -> object:
        if not isinstance(arg, fx.Node):
            return arg
        return getattr(graph, str(arg.target)) if arg.op == "get_attr" else tree_map(alone, _value(arg))

    def alone(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        source: Tensor = to_fun(value.detach())
        if not value.requires_grad:
            return source
        sources.append(source.requires_grad_())
        return source.clone()  # which may be changed in place

    try:
        args, kwargs = map_aggregate((node.args, node.kwargs), given)  # type: ignore[arg-type]  # the function takes any argument
        call = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        results = [call(*args, **kwargs), args, kwargs]
        differentiable = [each for each in tree_leaves(results) if isinstance(each, Tensor) and each.requires_grad]
        if sources and differentiable:
            torch.autograd.grad(
                differentiable, sources, [torch.ones_like(each) for each in differentiable], allow_unused=True
            )
    except NEEDS_DATA as failure:
        return failure
    except Exception:  # the operation needs something beside its operands, which is missing here
        return None
    return None


@contextmanager
def _traced(graph: fx.GraphModule) -> Iterator[None]:
    """Trace operations as AOTAutograd does, with Dynamo's tensors, without side effects."""
    values = (_value(node) for node in graph.graph.nodes)
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    assert mode.shape_env is not None
    above = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
    here = torch.autograd.set_multithreading_enabled(False)  # a GPU's backward has a thread, of other modes
    with above, here, mode.shape_env.suppress_guards(), mode, FunctionalTensorMode(), torch.enable_grad():
        yield
