"""Turns one sample into a function of its tensors, and runs it: eagerly, through AOTAutograd, through the compiler.

Dynamo would capture one call here, so it is left out: a sample enters at the backend, like Dynamo's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fusion.backend import Backend
from fusion.inspect.report import Report
from fusion.options import Options

Capture: TypeAlias = Callable[[fx.GraphModule, Sequence[object]], Callable[..., object]]


class Call(nn.Module):
    """An operation on one sample, whose tensors are the arguments and whose results are a flat list of tensors."""

    def __init__(self, op: OpInfo, sample: SampleInput) -> None:
        super().__init__()
        self.op, self.process = op, sample.output_process_fn_grad
        self.leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the sample."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def returns_positions(self) -> bool:
        """Whether the results are values and their positions."""
        input_, args, kwargs = tree_unflatten(list(self.leaves), self.spec)
        result = self.op.op(input_, *args, **kwargs)
        return isinstance(result, tuple) and all(hasattr(result, name) for name in ("values", "indices"))

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors of the result."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        input_, args, kwargs = tree_unflatten(leaves, self.spec)
        result = self.process(self.op.op(input_, *args, **kwargs))
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def graph(self) -> fx.GraphModule:
        """Return a graph of this one call."""
        graph = fx.Graph()
        holders = tuple(graph.placeholder(f"x{k}") for k in range(len(self.tensors)))
        graph.output(graph.call_module("call", holders))
        return fx.GraphModule({"call": self}, graph)


@dataclass
class Run:
    """The result of a run: outputs, then gradients (None for an input without one)."""

    outputs: list[Tensor]
    grads: list[Tensor | None]
    reports: list[Report] = field(default_factory=list)


def run(
    function: Callable[..., object],
    tensors: Sequence[Tensor],
    backward: bool,
    seed: int = 0,
    dtypes: Sequence[torch.dtype] = (),
) -> Run:
    """Run a function, and with `backward` differentiate the product of each result with a fixed tensor.

    Args:
        dtypes: of the results of the run that this one is compared with, so that the fixed tensors are the same.
    """
    torch.manual_seed(seed)
    leaves = [copied(t).requires_grad_(t.requires_grad and backward) for t in tensors]
    with torch.set_grad_enabled(backward):
        outputs = [out for out in function(*leaves) if isinstance(out, Tensor)]  # type: ignore[attr-defined]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    given = zip(outputs, dtypes or [out.dtype for out in outputs], strict=True)
    ends = [(out, cotangent(out, dtype)) for out, dtype in given if out.requires_grad]
    grads: list[Tensor | None] = []
    if backward and inputs and ends:
        differentiated, weights = zip(*ends, strict=True)
        grads = list(torch.autograd.grad(differentiated, inputs, weights, allow_unused=True))
    return Run([out.detach() for out in outputs], grads)


def copied(tensor: Tensor) -> Tensor:
    """Copy numbers and layout to new memory: some operations of the table write to their input."""
    own = tensor.detach()
    if own.is_conj() or own.is_neg():
        return own.clone()
    memory = own.untyped_storage().clone()
    return torch.empty(0, dtype=own.dtype, device=own.device).set_(
        memory, own.storage_offset(), own.size(), own.stride()
    )


def cotangent(end: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fixed gradient of numbers between 0.5 and 1.5 that `dtype` can represent, equal for equal shapes."""
    steps = torch.arange(end.numel(), device=end.device, dtype=torch.float64)
    return (0.5 + (steps * 0.6180339887498949) % 1.0).view(end.shape).to(dtype or end.dtype).to(end.dtype)


def captured(capture: Capture, call: Call, backward: bool) -> Callable[..., object]:
    """Return the call as a compiled function of its tensors."""
    leaves = [t.detach().requires_grad_(t.requires_grad and backward) for t in call.tensors]
    with torch.set_grad_enabled(backward):
        return capture(call.graph(), leaves)


def aot_eager(call: Call, backward: bool) -> tuple[Run, bool]:
    """Run a call through AOTAutograd alone, and return whether its results are random.  Failures are PyTorch's.

    The table sets the seed of random operations in each call, which leaves no trace in a graph.  Randomness is detected
    by the calls of the graph, since two seeds often give the same pooling windows; and without such calls by comparing
    the graph's results under two seeds.
    """
    drawn = False

    def as_it_is(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        nonlocal drawn
        drawn |= any(
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes
        )
        return graph.forward

    capture = aot_autograd(fw_compiler=as_it_is, partition_fn=min_cut_rematerialization_partition)
    function = captured(capture, call, backward)
    first, second = (run(function, call.tensors, backward, seed) for seed in (0, 99))
    pairs = zip(first.outputs, second.outputs, strict=True)
    return first, drawn or not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def compiled(call: Call, backward: bool, target: str | None) -> Run:
    """Run a call through the compiler, with its reports; the compiler's failures are raised."""
    backend = Backend(Options(strict=True, target=target))
    result = run(captured(backend, call, backward), call.tensors, backward)
    result.reports = list(backend.reports)
    return result
