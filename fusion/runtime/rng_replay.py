"""Replays the random numbers of a compiled region for derivatives of its gradients.

Input: the joint graph of a region, and later its program, run operation by operation; output: its results with the
numbers that the region's kernels drew.  Each random call takes a seed from the generator of its device, in program
order; so from the same state of the generators, each call, lowered by itself, draws the same numbers.  The caller of a
replay compares results with the earlier ones: a region of which a part ran eagerly drew other numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.lowering.aten.mistraced import traced_as_eager
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import Origin, Unsupported
from fusion.lowering.interpret import run_program
from fusion.lowering.lower import lower
from fusion.lowering.random.seeded import draws


@dataclass(frozen=True, slots=True)
class Draws:
    """The random calls of a region: their devices, and the origin of the first one."""

    devices: tuple[torch.device, ...]
    origin: Origin

    def states(self) -> tuple[Tensor, ...]:
        """Return the states of the generators at a call of the region; none while a CUDA graph is recorded."""
        if any(device.type == "cuda" for device in self.devices) and torch.cuda.is_current_stream_capturing():
            return ()
        return tuple(_state(device) for device in self.devices)

    @contextmanager
    def again(self, states: Sequence[Tensor]) -> Iterator[None]:
        """Run programs with the generators in `states`, and random calls that draw as kernels do.

        Raises:
            Unsupported: the states are unknown, or a call cannot be repeated.
        """
        if not states:
            raise Unsupported(
                "random numbers that were drawn for a CUDA graph cannot be drawn again", origin=self.origin
            )
        with torch.random.fork_rng([device for device in self.devices if device.type != "cpu"]):
            for device, state in zip(self.devices, states, strict=True):
                _set_state(device, state)
            mode = _AsKernels()  # type: ignore[no-untyped-call]  # not annotated in PyTorch
            # The Python dispatcher decomposes composite operations as AOTAutograd does.
            with mode, traced_as_eager(), enable_python_dispatcher():
                yield


def draws_of(joint: fx.GraphModule) -> Draws | None:
    """Return the random calls of a joint graph; None if there are none."""
    calls = [node for node in joint.graph.nodes if draws(node.target, node.args, node.kwargs)]
    values = [value for node in calls for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, Tensor)]
    return Draws(tuple(dict.fromkeys(value.device for value in values)), origin_of(calls[0])) if calls else None


class _AsKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    """Draws the numbers that generated kernels draw."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        declared = func._schema.arguments
        named = {**dict(zip((each.name for each in declared), args, strict=False)), **(kwargs or {})}
        arguments = {each.name: named.get(each.name, each.default_value) for each in declared}
        results = _drawn(_functional(func), arguments)
        changed = [cast("Tensor", arguments[each.name]) for each in declared if each.alias_info is not None]
        own = sum(each.alias_info is None for each in func._schema.returns)
        for tensor, value in zip(changed, results[own:], strict=True):
            tensor.copy_(value)
        outputs = results[:own] or changed[: len(func._schema.returns)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _functional(func: OpOverload) -> OpOverload:
    """Return the overload that does not mutate its arguments and otherwise has the signature of `func`.

    Raises:
        Unsupported: there is none.
    """
    if not func._schema.is_mutable:
        return func
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    signature = [(each.name, str(each.type)) for each in func._schema.arguments]
    for packet in (getattr(torch.ops.aten, wish, None) for wish in (name, f"{name}_functional")):
        for overload in () if packet is None else packet.overloads():
            candidate: OpOverload = getattr(packet, overload)
            if not candidate._schema.is_mutable and signature == [
                (e.name, str(e.type)) for e in candidate._schema.arguments
            ]:
                return candidate
    raise Unsupported(f"random numbers of {func} cannot be drawn again")


def _drawn(func: OpOverload, arguments: Mapping[str, object]) -> list[Tensor]:
    """Return the results of a random call, with arguments by name, as a compiled graph of it alone computes them."""
    args = tuple(arguments[each.name] for each in func._schema.arguments if not each.kwarg_only)
    leaves, spec = pytree.tree_flatten(
        (args, {e.name: arguments[e.name] for e in func._schema.arguments if e.kwarg_only})
    )
    graph, tensors = fx.Graph(), [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, spec)
        fake_results = func(*fake_args, **fake_kwargs)
    for position, fake in enumerate(fakes):
        if isinstance(fake, Tensor):
            leaves[position] = graph.placeholder(f"in{position}")
            leaves[position].meta["val"] = fake
    node = graph.call_function(func, *pytree.tree_unflatten(leaves, spec))
    node.meta["val"] = fake_results
    results = [node]
    if isinstance(fake_results, tuple):
        results = [graph.call_function(operator.getitem, (node, k)) for k in range(len(fake_results))]
        for result, value in zip(results, fake_results, strict=True):
            result.meta["val"] = value
    graph.output(tuple(results))
    values = run_program(lower(fx.GraphModule({}, graph), contractions=()), tensors)
    return [value for value in values if isinstance(value, Tensor)]


def _state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
