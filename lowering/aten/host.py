"""Passes 0-d tensors on the CPU to kernels of another device as numbers, as eager does.

`torch.tensor(-1e4)` in a program is one, whatever device the rest is on.  A number that is known when the graph is
lowered becomes a constant of the kernels; another one is passed by value.  Floats that are computed from such numbers,
as PyTorch does with float arguments under `dynamic=True`, are computed by the kernels that read them.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

MAKERS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default, torch.ops.aten._to_copy.default)
"""Operations that create a number from constants; `torch.vmap` writes a number of a program as a conversion of it."""


def is_number(val: object) -> bool:
    """Return whether a value is a 0-d tensor on the CPU."""
    return isinstance(val, torch.Tensor) and val.ndim == 0 and val.device.type == "cpu"


def is_float_of_numbers(node: fx.Node, device: torch.device) -> bool:
    """Return whether a call on the host computes a float from host numbers, in a graph for another `device`."""
    val, operands = node.meta.get("val"), [source.meta.get("val") for source in node.all_input_nodes]
    makes_float = isinstance(val, torch.Tensor) and val.dtype.is_floating_point and is_number(val)
    return device.type != "cpu" and makes_float and bool(operands) and all(map(is_number, operands))


def joins(node: fx.Node, device: torch.device) -> bool:
    """Return whether all results of a call are on `device`."""
    val = node.meta.get("val")
    parts = val if isinstance(val, (tuple, list)) else (val,)
    return all(isinstance(part, torch.Tensor) and part.device == device for part in parts)


class KnownNumbers:
    """The host numbers that are known when the graph is lowered, by fx node."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, torch.Tensor] = {}

    def __getitem__(self, node: fx.Node) -> bool | int | float | None:
        """Return a node's number, or None if it is not known."""
        number = self._known.get(node)
        return None if number is None else number.item()

    def add(self, node: fx.Node, number: torch.Tensor) -> None:
        """Record a tensor that the graph holds, if it is a host number."""
        if is_number(number) and not isinstance(number, FakeTensor) and not number.is_complex():
            self._known[node] = number

    def compute(self, node: fx.Node) -> None:
        """Evaluate a call with PyTorch if all its operands are known, and record the result."""
        target, sources = node.target, node.all_input_nodes
        if not isinstance(target, OpOverload) or not is_number(node.meta.get("val")):
            return
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            return
        if not (sources or target in MAKERS) or any(source not in self._known for source in sources):
            return

        def known(arg: object) -> object:
            return self._known[arg] if isinstance(arg, fx.Node) else arg

        with torch.no_grad():
            self.add(node, target(*tree_map(known, node.args), **tree_map(known, node.kwargs)))
