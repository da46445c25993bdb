"""Numbers of the host: 0-d tensors on the CPU among tensors of another device, for which eager takes them as numbers.

`torch.tensor(-1e4)` in a program is one, whatever device the rest is on.  What is known when a graph is lowered becomes
a constant of the kernels.  What is not is passed to them by value; floats that are computed of it, as PyTorch does of
the floats among the arguments under `dynamic=True`, are computed by the kernels that read them.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

MAKERS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)
"""Operations that make a number of none."""


def is_number(val: object) -> bool:
    """Is this a 0-d tensor on the CPU?"""
    return isinstance(val, torch.Tensor) and val.ndim == 0 and val.device.type == "cpu"


def is_float_of_numbers(node: fx.Node, device: torch.device) -> bool:
    """Is this a call on the host that makes a float of numbers there, in a graph for another `device`?"""
    val, given = node.meta.get("val"), [source.meta.get("val") for source in node.all_input_nodes]
    makes_float = isinstance(val, torch.Tensor) and val.dtype.is_floating_point and is_number(val)
    return device.type != "cpu" and makes_float and bool(given) and all(map(is_number, given))


def joins(node: fx.Node, device: torch.device) -> bool:
    """Are all results of a call on `device`?"""
    val = node.meta.get("val")
    parts = val if isinstance(val, (tuple, list)) else (val,)
    return all(isinstance(part, torch.Tensor) and part.device == device for part in parts)


class KnownNumbers:
    """The numbers on the host that are known, by the nodes of a graph that give them."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, torch.Tensor] = {}

    def __getitem__(self, node: fx.Node) -> bool | int | float | None:
        """What a node gives, if that is known."""
        found = self._known.get(node)
        return None if found is None else found.item()

    def add(self, node: fx.Node, number: torch.Tensor) -> None:
        """A tensor that the graph holds."""
        if is_number(number) and not isinstance(number, FakeTensor) and not number.is_complex():
            self._known[node] = number

    def compute(self, node: fx.Node) -> None:
        """Know what a call gives, if all that it takes is known: by PyTorch itself, as eager does at each call."""
        target, sources = node.target, node.all_input_nodes
        if not isinstance(target, OpOverload) or not is_number(node.meta.get("val")):
            return
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            return
        if not (sources or target in MAKERS) or any(source not in self._known for source in sources):
            return

        def given(arg: object) -> object:
            return self._known[arg] if isinstance(arg, fx.Node) else arg

        with torch.no_grad():
            self.add(node, target(*tree_map(given, node.args), **tree_map(given, node.kwargs)))
