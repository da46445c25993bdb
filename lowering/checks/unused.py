"""Keeps results that nothing reads, but whose computation checks data: eager computes them, and raises an error.

`KEEP` is an operation without a result that reads a tensor and has, to the passes over a graph, an effect.  A program
keeps it where the tensor is computed for it alone, with a check on the way, or by a library call of data that the
library may refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import fx
from typing_extensions import assert_never

from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Expr, Op, postorder
from fusion.lowering.ir.program import (
    Buffer,
    BufferRef,
    Contract,
    Extern,
    Map,
    Node,
    Program,
    Reduce,
    Scan,
    Scatter,
    reads,
    writes,
)
from fusion.lowering.ir.scalar_ops import CHECKED
from fusion.lowering.value import Value

_LIBRARY: Final = torch.library.Library("fusion", "DEF")  # type: ignore[no-untyped-call]  # not annotated in PyTorch
_LIBRARY.define("keep(Tensor x) -> ()")  # type: ignore[no-untyped-call]  # not annotated in PyTorch
_LIBRARY.impl("keep", lambda x: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # not annotated in PyTorch

KEEP: Final = torch.ops.fusion.keep.default
"""Reads a tensor, of any shape and dtype, and returns nothing."""


def _keep_all(info: object, dims: object, x: torch.Tensor) -> tuple[None, None]:
    """Keep the results of all calls that `torch.vmap` makes at once."""
    KEEP(x)
    return None, None


torch.library.register_vmap(KEEP, _keep_all, lib=_LIBRARY)

fx.node.has_side_effect(KEEP)

CHECKING = frozenset(
    {"bernoulli", "binary_cross_entropy", "histc", "histogram", "histogramdd", "multinomial", "normal", "poisson"}
)
"""Functions that refuse some floats; others may refuse integers, their positions."""


def keep(value: Value) -> Extern:
    """Return a call of `KEEP` for a value in a buffer."""
    name = value.buffer()
    assert name is not None, "what is kept is stored"
    return Extern((), KEEP, (BufferRef(name),), impure=True, reason="keeps the checks of results that nothing reads")


def without_needless_keeps(program: Program) -> Program:
    """Remove the calls of `KEEP` whose tensors need only checks that happen anyway."""
    calls = [node for node in program.nodes if _is_keep(node)]
    if not calls:
        return program
    rest = eliminate_dead_code(program.edited(node for node in program.nodes if not _is_keep(node)))
    live = {name for node in rest.nodes for name in writes(node)}
    writers = {name: node for node in program.nodes for name in writes(node) if name not in live}
    needless = {id(call) for call in calls if not _needs_checks(call, writers, program.buffers)}
    return program.edited(node for node in program.nodes if id(node) not in needless)


def _is_keep(node: Node) -> bool:
    return isinstance(node, Extern) and node.target is KEEP


def _needs_checks(call: Node, writers: Mapping[str, Node], buffers: Mapping[str, Buffer]) -> bool:
    """Return whether one of the dead nodes that a call depends on checks data, or is a call that may refuse them."""
    stack, seen = list(reads(call)), set[str]()
    while stack:
        name = stack.pop()
        node = writers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        match node:
            case Extern():
                needed = _may_refuse(node, buffers)
            case Chunked():
                needed = False
            case Map() | Reduce() | Scan() | Contract() | Scatter():
                needed = _checks(node.exprs)
            case _:
                assert_never(node)
        if needed:
            return True
        stack += reads(node)
    return False


def _may_refuse(call: Extern, buffers: Mapping[str, Buffer]) -> bool:
    """Return whether a library call looks at integers, which may be positions, or at floats that may be refused."""
    if call.is_view:
        return False
    name = getattr(getattr(call.target, "overloadpacket", call.target), "__name__", "")
    return name.rstrip("_") in CHECKING or any(is_integral(buffers[source].dtype) for source in call.reads)


def is_integral(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype hold integers or bools.

    >>> is_integral(torch.bool), is_integral(torch.bfloat16)
    (True, False)
    """
    return not (dtype.is_floating_point or dtype.is_complex)


def _checks(exprs: tuple[Expr, ...]) -> bool:
    return any(isinstance(part, Op) and part.name == CHECKED for part in postorder(*exprs))


__all__ = ["CHECKING", "KEEP", "is_integral", "keep", "without_needless_keeps"]
