"""Computes derivatives that a compiled region does not have: of its gradients, in forward mode, and missing ones.

AOTAutograd separates forward and backward, and its backward is not differentiable.  It raises if a derivative is
requested, but is not always asked: gradients computed under `create_graph=True` are connected to the saved tensors,
which are seldom the region's inputs, and so a gradient penalty seems not to depend on them.  Input: a compiled region,
with the graph that Dynamo captured; output: a callable whose gradients are connected to the inputs.  If a derivative of
them is requested, the captured graph is differentiated twice, in eager.  Inside forward-mode derivatives the captured
graph runs instead.  In addition, inputs without a path to the differentiated results get no gradient, as in eager,
where AOTAutograd makes zeros.

The inputs are kept for that until backward has run.  Under saved-tensor hooks (checkpoints), inputs that are no leaves
are only referenced weakly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Protocol, TypeAlias, cast
from weakref import ref

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad

from fusion.joint.dependence import Dependence
from fusion.lowering.errors import Unsupported
from fusion.runtime.autograd_node import AutogradNode, node_of
from fusion.runtime.rng_replay import Draws

Call: TypeAlias = Callable[..., Sequence[object]]
Grads: TypeAlias = "tuple[Tensor | None, ...]"

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True, slots=True)
class Derivatives:
    """Holds the known facts about the derivatives of a compiled region.

    Attributes:
        autocasts: device type and dtype of the autocasts under which it was captured.
        node: its autograd node.  Earlier values of inputs that it changes are lost, but seldom matter where these have
            no gradients: the running statistics of a batch norm.
        watched: inputs that must not be changed in place before they are used again.
        draws: its random calls, if it has any.
    """

    autocasts: tuple[tuple[str, torch.dtype], ...]
    node: AutogradNode
    watched: tuple[int, ...]
    draws: Draws | None

    @classmethod
    def of(cls, inputs: Sequence[object], dependence: Dependence | None, draws: Draws | None) -> Derivatives | None:
        """Return the derivatives of AOTAutograd's result for `inputs` in the current tracing context, if it has any.

        Args:
            dependence: the dependence of its gradients, if it is known.
            draws: its random calls, if it has any.
        """
        context = TracingContext.try_get()
        known = None if context is None else context.fw_metadata
        differentiable = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
        if known is None or not differentiable or not torch.is_grad_enabled():
            return None
        node = AutogradNode.of(known, len(inputs), dependence)
        counted = [k for k, value in enumerate(inputs) if isinstance(value, Tensor) and not value.is_inference()]
        return cls(_autocasts(), node, tuple(k for k in counted if k not in node.changed), draws)

    def around(
        self, compiled: Callable[..., object], captured: Call, say: Callable[[Unsupported], None]
    ) -> Callable[..., object]:
        """Return `compiled`, with a hook on its gradients.

        Args:
            captured: the same program, run operation by operation.
            say: called once with the reason why the captured graph runs.
        """
        region = _Region(captured, self, say)
        holder, draws = self.node.holder, self.draws

        def run(*args: object) -> object:
            if forward_ad._current_level >= 0:
                region.say_once("inside of forward-mode derivatives")
                return captured(*args)
            states = () if draws is None else draws.states()
            results = compiled(*args)
            own = None if holder is None else node_of(cast("Sequence[Tensor]", results)[holder])
            if own is not None:
                own.register_hook(partial(_untraced(), _Hook(region, args, states)))
            return results

        return run


@dataclass
class _Region:
    """A compiled region, with the facts that its derivatives need.

    Attributes:
        captured: its graph, run operation by operation.
        known: the known facts about its derivatives.
    """

    captured: Call
    known: Derivatives
    say: Callable[[Unsupported], None]
    said: set[str] = field(default_factory=set)

    @property
    def node(self) -> AutogradNode:
        """The autograd node of the region."""
        return self.known.node

    @property
    def draws(self) -> Draws | None:
        """The random calls of the region; None if there are none."""
        return self.known.draws

    def say_once(self, reason: str) -> None:
        """Report once why the captured graph runs."""
        if reason not in self.said:
            self.said.add(reason)
            self.say(Unsupported(reason))

    def versions(self, args: Sequence[object]) -> list[int]:
        """Return how often each watched input was changed in place so far."""
        return [cast("Tensor", args[k])._version for k in self.known.watched]

    def reached(self, grad_inputs: Grads, grad_outputs: Grads) -> Grads:
        """Return `grad_inputs` without gradients of inputs that no result with a gradient depends on."""
        needs = self.node.needs
        if not needs or len(needs) != len(grad_inputs) or all(grad is not None for grad in grad_outputs):
            return grad_inputs
        with_gradient = {k for k, grad in enumerate(grad_outputs) if grad is not None}
        return tuple(
            grad if needed & with_gradient or not needed else None
            for grad, needed in zip(grad_inputs, needs, strict=True)
        )

    def run(self, args: Sequence[object]) -> Sequence[object]:
        """Compute the results of the region in eager."""
        changed = self.node.changed
        with ExitStack() as stack:
            for device, dtype in self.known.autocasts:
                stack.enter_context(torch.autocast(device, dtype))
            own = [arg.clone() if k in changed and isinstance(arg, Tensor) else arg for k, arg in enumerate(args)]
            return self.captured(*own)


@cache
def _untraced() -> Callable[..., Grads | None]:
    """Return the call of hooks, which Dynamo does not trace where a function that it traces calls backward."""
    disable: Callable[..., Callable[..., Grads | None]] = torch.compiler.disable
    return disable(_Hook.__call__, reason="it is called in backward")


class _Hook:
    """Called with the gradients of one call of a region: under `create_graph=True` it connects them to the inputs."""

    def __init__(self, region: _Region, args: Sequence[object], states: Sequence[Tensor]) -> None:
        self.region, self.states = region, states
        self.versions = region.versions(args)
        refused = bool(region.node.refusal)
        if refused:
            args = [arg if isinstance(arg, Tensor) and arg.requires_grad else None for arg in args]
        self.held = [*args]
        # An input that was changed in place is a result of the node that holds this hook.
        if refused or _saved_tensors_hooks(False) is not None:
            self.held = [ref(arg) if isinstance(arg, Tensor) and not arg.is_leaf else arg for arg in args]

    def __call__(self, grad_inputs: Grads, grad_outputs: Grads) -> Grads | None:
        """Return replacements for the gradients that backward computed; None to keep these."""
        reached = self.region.reached(grad_inputs, grad_outputs)
        if torch.is_grad_enabled():
            return self._joined(reached, grad_outputs)
        if not _keeps_graph():
            self.held = []
        return None if reached is grad_inputs else reached

    def _joined(self, grads: Grads, grad_outputs: Grads) -> Grads | None:
        """Return the gradients, differentiable in inputs and in gradients of results; None if there are none."""
        args = self._args()
        refusal = self._refusal(args, grads)
        inputs = [arg for arg in args if isinstance(arg, Tensor)]
        computed = grads if refusal else tuple(g for g, x in zip(grads, inputs, strict=True) if x.requires_grad)
        if all(grad is None for grad in computed):
            return None
        result_numbers = [k for k, grad in enumerate(grad_outputs) if grad is not None]
        again = _Again(self.region, refusal, args, self.states, result_numbers, computed)
        outer = [grad_outputs[k] for k in result_numbers]
        connected = iter(_Joined.apply(again, *again.leaves, *outer))  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        return tuple(None if grad is None else next(connected) for grad in grads)

    def _args(self) -> list[object]:
        """Return the arguments of the region's call.

        Raises:
            Unsupported: an input that was referenced weakly is gone.
        """
        args = [held() if isinstance(held, ref) else held for held in self.held]
        if any(arg is None and isinstance(held, ref) for arg, held in zip(args, self.held, strict=True)):
            raise Unsupported(
                "gradients of gradients of a compiled region need its inputs, and one of them is gone",
                hint="keep what the region is called with until its gradients are computed",
            )
        return args

    def _refusal(self, args: Sequence[object], grads: Grads) -> str:
        """Return why these gradients cannot be recomputed from `args`; empty if they can."""
        if self.region.node.refusal:
            return self.region.node.refusal
        if self.region.versions(args) != self.versions:
            return "an input was changed in place since"
        if sum(isinstance(arg, Tensor) for arg in args) != len(grads):
            return "its inputs are not those of its gradients"
        return ""


@dataclass
class _Again:
    """The gradients of one call, to be recomputed as functions of the inputs and of the gradients of results.

    Attributes:
        args: the arguments of the region's call.
        states: the generators' states at that call.
        given: the results that have a gradient.
        grads: the gradients that the region's backward computed, for each input that requires one.
    """

    region: _Region
    refusal: str
    args: list[object]
    states: Sequence[Tensor]
    given: list[int]
    grads: Grads

    @property
    def drawing(self) -> AbstractContextManager[None]:
        """Replay the random numbers of the call."""
        draws = self.region.draws
        return nullcontext() if draws is None else draws.again(self.states)

    @property
    def leaves(self) -> list[Tensor]:
        """The inputs that require gradients."""
        return [arg for arg in self.args if isinstance(arg, Tensor) and arg.requires_grad]


class _RegionContext(Protocol):
    """The context that PyTorch hands from forward to backward."""

    again: _Again
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Joined(torch.autograd.Function):
    """Gradients as computed, with the derivatives of the captured graph's gradients."""

    @staticmethod
    def forward(ctx: _RegionContext, again: _Again, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.save_for_backward(*tensors)
        return tuple(grad.detach() for grad in again.grads if grad is not None)

    @staticmethod
    def backward(ctx: _RegionContext, *grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        again = ctx.again
        if again.refusal:
            raise Unsupported(f"gradients of gradients of a compiled region: {again.refusal}")
        again.region.say_once("gradients of gradients")
        return None, *_twice(again, ctx.saved_tensors, grad_grads, further=torch.is_grad_enabled())


def _twice(
    again: _Again, tensors: Sequence[Tensor], wanted: Sequence[Tensor | None], *, further: bool
) -> list[Tensor | None]:
    """Return derivatives of the region's gradients, weighted by `wanted`, by inputs and by the gradients of results.

    Each is taken with respect to a separate view, so that an input computed from another one is not counted twice.
    """
    with torch.enable_grad(), again.drawing:  # also in backward, where checkpoints recompute
        views = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        count = len(again.leaves)
        leaves, outer = iter(views[:count]), views[count:]
        args = [next(leaves) if isinstance(a, Tensor) and a.requires_grad else a for a in again.args]
        results = again.region.run(args)
        ends = [cast("Tensor", results[k - again.region.node.first]) for k in again.given]
        first = torch.autograd.grad(ends, views[:count], outer, create_graph=True, allow_unused=True)
        _check_alike(again, first)
        recomputed = [grad for grad, known in zip(first, again.grads, strict=True) if known is not None]
        given = [(g, w) for g, w in zip(recomputed, wanted, strict=True) if g is not None and w is not None]
        pairs = [(grad, weight) for grad, weight in given if grad.requires_grad]
        positions = [k for k, view in enumerate(views) if view.requires_grad]
        derivatives: list[Tensor | None] = [None] * len(views)
        if pairs:
            grads, weights = zip(*pairs, strict=True)
            by = [views[k] for k in positions]
            second = torch.autograd.grad(grads, by, weights, create_graph=further, allow_unused=True)
            for k, grad in zip(positions, second, strict=True):
                derivatives[k] = grad
    return derivatives


def _check_alike(again: _Again, first: Sequence[Tensor | None]) -> None:
    """Refuse gradients recomputed from other values than the region's own gradients."""
    region = again.region
    if (region.node.changed or region.draws is not None) and not _alike(tuple(first), again.grads):
        if region.draws is not None:
            raise Unsupported(
                "gradients of gradients of a compiled region that draws random numbers, which could not be drawn again",
                origin=region.draws.origin,
            )
        raise Unsupported(
            "gradients of gradients of a compiled region need inputs that it changes in place",
            hint="have it return what it changes, rather than write to what it is given",
        )


def _alike(again: Grads, grads: Grads) -> bool:
    """Return whether gradients are equal up to rounding."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(again, grads, strict=True) if a is not None and b is not None]
    pairs = [pair for pair in pairs if pair[0].numel()]
    largest = max((float(b.abs().max()) for _, b in pairs), default=0.0)
    return all(float((a - b).abs().max()) <= 1e-2 * largest for a, b in pairs)


def _autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    devices = ("cpu", "cuda")
    return tuple((name, torch.get_autocast_dtype(name)) for name in devices if torch.is_autocast_enabled(name))
