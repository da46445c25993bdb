"""The effects of a call of a program, and the differences in form between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.lowering.lowered import layout
from tests.random_programs.program import Function, Program


@dataclass
class Run:
    """The results and effects of a call: tensors by name, and which of them share memory, from which element on."""

    tensors: dict[str, Tensor | None]
    shared: dict[str, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One call of a program on a device, which may run repeatedly."""

    program: Program
    number: int
    device: str = "cpu"

    def run(
        self,
        function: Function | None = None,
        *,
        wide: bool = False,
        shift: float = 0.0,
        apart: bool = False,
        gradient: float = 0.0,
    ) -> Run:
        """Run the program, or another `function` of its arguments, on fresh ones, as `Input.tensor` creates them.

        With `gradient`, the incoming gradients are off by up to that.
        """
        arguments = self.program.arguments(self.number, self.device, wide=wide, shift=shift, apart=apart)
        return run(function or self.program.function(), arguments, self.program.backward, gradient)


def run(function: Callable[..., object], given: Sequence[Tensor | int], backward: bool, shift: float = 0.0) -> Run:
    """Call with fresh arguments; return results, the arguments afterwards, and gradients for `cotangent`s."""
    results = function(*given)
    assert isinstance(results, tuple)
    arguments = [argument for argument in given if isinstance(argument, Tensor)]
    named: dict[str, Tensor | None] = {f"result {k}": result for k, result in enumerate(results)}
    named.update({f"input {k}": argument for k, argument in enumerate(arguments)})
    shared = dict(_shared(named))
    leaves = [argument for argument in arguments if argument.is_leaf and argument.requires_grad]
    ends = [result for result in results if result.requires_grad]
    if backward and leaves and ends:
        weights = [cotangent(end, shift) for end in ends]
        grads = torch.autograd.grad(ends, leaves, weights, allow_unused=True)
        named.update({f"gradient {k}": grad for k, grad in enumerate(grads)})
    return Run(
        {
            name: None if value is None else value.detach().clone() if name.startswith("input") else value.detach()
            for name, value in named.items()
        },
        shared,
    )


def _shared(named: dict[str, Tensor | None]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Return each tensor in the memory of an input or of an earlier result."""
    first: dict[int, str] = {}
    for name in sorted(named):  # inputs before results
        tensor = named[name]
        if tensor is None or not tensor.numel():
            continue
        memory = tensor.untyped_storage()._cdata
        if memory in first:
            other = named[first[memory]]
            assert other is not None
            yield name, (first[memory], int(tensor.storage_offset() - other.storage_offset()))
        else:
            first[memory] = name


def cotangent(end: Tensor, shift: float = 0.0) -> Tensor:
    """A fixed gradient of numbers between 0.5 and 1.5, off by up to `shift` of each."""
    steps = torch.arange(end.numel(), device=end.device, dtype=torch.float64)
    numbers = 0.5 + (steps * 0.6180339887498949) % 1.0
    return (numbers * (1 + shift * (2 * ((steps + 1) * 0.7548776662466927 % 1.0) - 1))).view(end.shape).to(end.dtype)


def unlike(actual: Run, expected: Run) -> list[str]:
    """Describe how a run differs from eager's in form: in names, shapes, dtypes, strides, and shared memory."""
    if actual.tensors.keys() != expected.tensors.keys():
        return [f"gives {sorted(actual.tensors)}, eager {sorted(expected.tensors)}"]
    differences = [_unlike(name, actual.tensors[name], theirs) for name, theirs in expected.tensors.items()]
    if actual.shared != expected.shared:
        differences.append(f"shares memory as {actual.shared}, eager as {expected.shared}")
    return [difference for difference in differences if difference]


def _unlike(name: str, ours: Tensor | None, theirs: Tensor | None) -> str:
    if ours is None or theirs is None:
        zero = ours is not None and not ours.any()  # where eager has no gradient
        return "" if ours is theirs or zero else f"{name} is {'missing' if ours is None else 'too many'}"
    if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return f"{name} is {ours.dtype}{list(ours.shape)}, eager's {theirs.dtype}{list(theirs.shape)}"
    if name.startswith("result") and layout(ours) != layout(theirs):
        return f"{name} of shape {list(ours.shape)} has strides {ours.stride()}, eager's {theirs.stride()}"
    return ""
