"""Decomposes operations on lists of tensors (`_foreach_add` and its kin) into the same operation on each tensor.

Output: decompositions: overload → function.  The scheduler fuses the operation on each tensor with its own producers
and consumers, and packs the tensors into shared launches, so nothing of the list itself is lost.

Operations without an equivalent on one tensor keep their lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch._C import _dispatch_get_all_op_names as all_op_names
from torch._ops import OpOverload

aten = torch.ops.aten

_PREFIX = "_foreach_"
_OTHER_NAMES = {"norm": aten.linalg_vector_norm}
_WITH_NUMBERS = {"maximum": aten.clamp_min, "minimum": aten.clamp_max}
_NUMBERS_IN_A_TENSOR = {("addcmul", "Tensor"), ("addcdiv", "Tensor")}
_LEFT_OUT = frozenset({"max", "zero", "powsum", "mm"})


def foreach_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Return overload → decomposition tensor by tensor.

    >>> add = foreach_decompositions()[torch.ops.aten._foreach_add.Scalar]
    >>> add([torch.zeros(1), torch.ones(2)], 2.0)
    [tensor([2.]), tensor([3., 3.])]
    """
    return {overload: _per_tensor(overload, target) for overload, target in _overloads()}


def _overloads() -> Iterator[tuple[OpOverload, Callable[..., object]]]:
    """Yield the functional overloads on lists, each with its operation on one tensor."""
    for full in sorted(all_op_names()):
        name, _, kind = full.removeprefix("aten::").partition(".")
        stem = name.removeprefix(_PREFIX)
        if not name.startswith(_PREFIX) or stem.endswith("_") or kind.endswith("out") or stem in _LEFT_OUT:
            continue
        target = _WITH_NUMBERS.get(stem) if kind.startswith("Scalar") else None
        target = target or _OTHER_NAMES.get(stem) or getattr(aten, stem, None)
        if target is not None and (stem, kind) not in _NUMBERS_IN_A_TENSOR:
            yield getattr(getattr(aten, name), kind or "default"), target


def _per_tensor(overload: OpOverload, target: Callable[..., object]) -> Callable[..., object]:
    """Return a function that applies `target` to the tensors at each position of the lists."""
    known = overload._schema.arguments
    named = {argument.name for argument in known if argument.kwarg_only or argument.name == "dtype"}
    names = [argument.name for argument in known]
    if target in (aten.addcmul, aten.addcdiv):  # take their factor by name
        named |= {"value", "scalars"}

    def run(*args: object, **kwargs: object) -> list[object]:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        lists = [value for value in arguments.values() if isinstance(value, Sequence)]
        results = []
        for position in range(len(lists[0])):
            here = {
                name: value[position] if isinstance(value, Sequence) else value for name, value in arguments.items()
            }
            keywords = {"value" if name == "scalars" else name: here.pop(name) for name in named & here.keys()}
            results.append(target(*here.values(), **keywords))
        return results

    return run


__all__ = ["foreach_decompositions"]
