"""Builds a Program node by node; lowering rules work with a `Builder`.

A rule sees a `Builder`: it turns values into nodes (`map`, `reduce`, `contract`), draws seeds, and knows the fx node
being lowered, whose strides under eager the result takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import sympy
import torch
from torch import fx

from fusion.lowering.algebra.positions import simplify_all
from fusion.lowering.errors import Origin, Unsupported
from fusion.lowering.indexing import axis_symbol, over_symbol
from fusion.lowering.ir.expr import Expr, Index, IndexValue, Load, const, make_cast
from fusion.lowering.ir.program import Axis, Buffer, BufferRef, Contract, Extern, Map, Node, Reduce, Scan, Scatter
from fusion.lowering.ir.scalar_ops import (
    FOLD_OPS,
    FoldName,
    ScanName,
    ScatterName,
    accumulator,
    identity,
    keeps_position,
)
from fusion.lowering.ir.sizes import sizes_of
from fusion.lowering.random.seeded import LIMITS
from fusion.lowering.value import Shape, Value, axes_of, axis_bounds, contiguous_strides

GENERATED_DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    }
)
"""Element types that expressions may have; calls on any other (complex, quantised, float8) stay externs."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Selects the operations that are generated, and the rounding of results.

    Attributes:
        contractions: names of the fx nodes whose matrix products become Contract nodes, others stay library calls;
            None selects all.
        scatters: operations (of `SCATTER_OPS`) that are generated although indices may collide; None selects all.
        rounded: round every result as eager does, also where it is not stored.
        invariant: data outside a row may not change the order in which its floats are combined.
        scans: scans of floats are generated.
        small: bytes of an element → the most multiplications for which matrix products that are not contractions become
            sums of products; none by default.
    """

    contractions: Collection[str] | None = None
    scatters: Collection[str] | None = None
    rounded: bool = False
    small: Mapping[int, int] = field(default_factory=dict)
    scans: bool = True
    invariant: bool = False


Library: TypeAlias = Callable[[Buffer, Value, Value], tuple[Node, ...]]
"""Returns nodes that compute a matrix product into a buffer by a library call; empty where no call computes it."""


class Builder:
    """The buffers and nodes so far, and the fx node being lowered (`current`), with the seed of its call."""

    current: fx.Node

    def __init__(self, wanted: Wanted, library: Library) -> None:
        self.wanted, self.library = wanted, library
        self.buffers: dict[str, Buffer] = {}
        self.nodes: list[Node] = []
        self.calls: dict[str, tuple[Node, ...]] = {}  # library calls that compute the products, by result
        self.origins: dict[str, Origin] = {}
        self.given_seed: Value | None = None

    def map(self, value: Value, strides: Shape | None = None) -> Value:
        """Compute `value` into a buffer of its own, with its conditions simplified; the result loads it."""
        axes = tuple(Axis(s, n) for s, n in zip(axes_of(value.shape), value.shape, strict=True))
        out = self.buffer(value.dtype, value.shape, strides, value.device)
        self.nodes.append(Map(out.name, axes, *simplify_all([value.expr], axis_bounds(value.shape))))
        return load_of(out)

    def reduce(self, op: FoldName, args: Sequence[Value], dims: Sequence[int]) -> Value:
        """Fold dimensions `dims` of `args` (all of one shape) away; the result lacks these dimensions.

        With nothing to fold, the result is the identity of `op`.
        """
        shape = args[0].shape
        assert all(arg.shape == shape for arg in args)
        if any(not 0 <= d < len(shape) for d in dims):
            raise Unsupported(f"reduction over {dims} of a tensor with {len(shape)} dimensions")
        kept = [k for k in range(len(shape)) if k not in dims]
        dtype = torch.int64 if keeps_position(op) else args[0].dtype
        if 0 in [shape[k] for k in dims] and FOLD_OPS[op].arity == 1:
            initial = const(identity(op, dtype), dtype)
            return Value(tuple(shape[k] for k in kept), dtype, args[0].device, initial)
        renamed = {k: axis_symbol(position) for position, k in enumerate(kept)}
        renamed.update({k: over_symbol(position) for position, k in enumerate(sorted(dims))})
        axes = tuple(Axis(renamed[k], shape[k]) for k in kept)
        over = tuple(Axis(renamed[k], shape[k]) for k in sorted(dims))
        sizes = {axis.symbol: axis.size for axis in (*axes, *over)}
        exprs = tuple(arg.at([renamed[k] for k in range(len(shape))], sizes) for arg in args)
        out = self.buffer(dtype, tuple(shape[k] for k in kept), self._kept_strides(shape, kept), args[0].device)
        self.nodes.append(Reduce(out.name, axes, over, op, exprs, dtype))
        return load_of(out)

    def scan(self, op: ScanName, args: Sequence[Value], dim: int) -> Value:
        """Fold `args` (all of one shape) up to each point of dimension `dim`."""
        shape = args[0].shape
        assert all(arg.shape == shape for arg in args)
        if not 0 <= dim < len(shape):
            raise Unsupported(f"scan along {dim} of a tensor with {len(shape)} dimensions")
        axes = tuple(Axis(s, n) for s, n in zip(axes_of(shape), shape, strict=True))
        dtype = torch.int64 if keeps_position(op) else args[0].dtype
        if not self.wanted.scans and dtype.is_floating_point and op not in ("max", "min"):
            raise Unsupported(f"a scan ({op}) whose order of operations would depend on the batch")
        out = self.buffer(dtype, shape, self._meta_strides(shape), args[0].device)
        self.nodes.append(Scan(out.name, axes, axes[dim].symbol, op, tuple(arg.expr for arg in args), dtype))
        return load_of(out)

    def scatter(
        self, op: ScatterName, start: Value, shape: Shape, index: Sequence[Index], value: Expr, where: Expr | None
    ) -> Value:
        """Return `start` updated by `op` with `value` at `index`, for each point of `shape` at which `where` holds."""
        if self.wanted.scatters is not None and op not in self.wanted.scatters:
            raise Unsupported(f"a scatter ({op}) with indices that may collide")
        if 0 in shape:
            return start
        axes = tuple(Axis(s, n) for s, n in zip(axes_of(shape), shape, strict=True))
        strides = self._meta_strides(start.shape)
        has_own_memory = strides is not None and all(
            n == 1 or s != 0 for n, s in zip(start.shape, strides, strict=True)
        )
        initial = self.map(start, strides if has_own_memory else None).buffer()
        assert initial is not None
        out = self.buffer(start.dtype, start.shape, self.buffers[initial].strides, start.device)
        positions = tuple(i if isinstance(i, Expr) else IndexValue(i) for i in index)
        self.nodes.append(Scatter(out.name, axes, initial, op, positions, value, where))
        return load_of(out)

    def contract(self, lhs: Value, rhs: Value, dtype: torch.dtype) -> Value:
        """Multiply lhs [batch…, m, k] and rhs [batch…, k, n], accumulated wide, rounded to `dtype`.

        If an axis is empty, no node is added and the result is zeros (or has no elements).
        """
        *batch, m, k = lhs.shape
        n = rhs.shape[-1]
        if (*rhs.shape[:-2], rhs.shape[-2]) != (*batch, k):
            raise Unsupported(f"shapes {lhs.shape} and {rhs.shape} do not contract")
        if 0 in (*batch, m, n, k):
            return Value((*batch, m, n), dtype, lhs.device, const(0, dtype))
        self.check_contraction()
        names = [axis_symbol(p) for p in range(len(batch) + 2)]
        over = over_symbol(0)
        axes = tuple(Axis(s, size) for s, size in zip(names, (*batch, m, n), strict=True))
        sizes = {**{axis.symbol: axis.size for axis in axes}, over: k}
        out = self.buffer(dtype, (*batch, m, n), self._meta_strides((*batch, m, n)), lhs.device)
        self.nodes.append(
            Contract(
                out.name,
                axes,
                (Axis(over, k),),
                lhs.at([*names[:-2], names[-2], over], sizes),
                rhs.at([*names[:-2], over, names[-1]], sizes),
                (names[-2],),
                (names[-1],),
                accumulator("dot", lhs.dtype),
            )
        )
        self.calls[out.name] = self.library(out, lhs, rhs)
        return load_of(out)

    def multiply_widened(self, out: Buffer, lhs: Value, rhs: Value, reason: str) -> None:
        """Compute a product into `out` by the library's call for its dtype, from copies of the operands in that dtype.

        Args:
            reason: why the library's call computes it.
        """
        widened = (replace(side, dtype=out.dtype, expr=make_cast(side.expr, out.dtype)) for side in (lhs, rhs))
        names = (self.map(side).buffer() for side in widened)
        args = tuple(BufferRef(name) for name in names if name is not None)
        target = torch.ops.aten.mm.default if lhs.rank == 2 else torch.ops.aten.bmm.default
        self.nodes.append(Extern((out.name,), target, args, reason=reason))

    def check_contraction(self) -> None:
        """Refuse a matrix product that was not selected for generation."""
        wanted = self.wanted.contractions
        if wanted is not None and self.current.name not in wanted:
            raise Unsupported("this target leaves matrix products to the library")

    def seed(self, device: torch.device) -> Value:
        """Return a 0-d int64 seed: the call's own, or one drawn from the device's default generator at each run."""
        if self.given_seed is not None:
            return self.given_seed
        out = self.buffer(torch.int64, (), None, device)
        limits: tuple[object, ...] = (*LIMITS, [])
        kwargs = {"dtype": torch.int64, "device": device}
        self.nodes.append(Extern((out.name,), torch.ops.aten.randint.low, limits, kwargs, impure=True))
        return load_of(out)

    def memory(self) -> Value:
        """Allocate uninitialised memory with the shape and layout of the result of the current node."""
        (meta,) = self.results()
        out = self.buffer(meta.dtype, sizes_of(meta.shape), sizes_of(meta.stride()), meta.device)
        kwargs = {"dtype": meta.dtype, "device": meta.device}
        target = torch.ops.aten.empty_strided.default
        self.nodes.append(Extern((out.name,), target, (list(out.shape), list(out.strides)), kwargs))
        return load_of(out)

    @property
    def position(self) -> tuple[int, int]:
        """The numbers of nodes and buffers so far, for `roll_back`."""
        return len(self.nodes), len(self.buffers)

    def roll_back(self, position: tuple[int, int]) -> None:
        """Remove the nodes and buffers that were added since `position`."""
        nodes, buffers = position
        del self.nodes[nodes:]
        for name in list(self.buffers)[buffers:]:  # in the order of a dict
            del self.buffers[name], self.origins[name]

    # Layouts --------------------------------------------------------------------------------------------------------

    def results(self) -> list[torch.Tensor]:
        """Return the fake tensors of the current node's results under eager."""
        val = self.current.meta.get("val")
        parts = val if isinstance(val, (tuple, list)) else (val,)
        return [part for part in parts if isinstance(part, torch.Tensor) and part.layout is torch.strided]

    def _meta_strides(self, shape: Shape) -> Shape | None:
        """Return eager's strides for the current node's result of this shape; None unless exactly one layout exists."""
        layouts = {sizes_of(result.stride()) for result in self.results() if sizes_of(result.shape) == shape}
        return layouts.pop() if len(layouts) == 1 else None

    def _kept_strides(self, shape: Shape, kept: Sequence[int]) -> Shape | None:
        """Return eager's strides for a reduction's result, without the kept dimensions of size 1."""
        without = self._meta_strides(tuple(shape[k] for k in kept))
        if without is not None:
            return without
        strides = self._meta_strides(tuple(shape[k] if k in kept else sympy.Integer(1) for k in range(len(shape))))
        return None if strides is None else tuple(strides[k] for k in kept)  # keepdim

    def buffer(
        self, dtype: torch.dtype, shape: Shape, strides: Shape | None, device: torch.device, name: str = ""
    ) -> Buffer:
        """Add a buffer named for the current fx node, with a number where the name is taken."""
        base = name or self.current.name
        name, count = base, 0
        while name in self.buffers:
            count += 1
            name = f"{base}_{count}"
        buffer = Buffer(name, dtype, shape, contiguous_strides(shape) if strides is None else strides, device)
        self.buffers[name] = buffer
        self.origins[name] = origin_of(self.current)
        return buffer


def load_of(buffer: Buffer) -> Value:
    """Return the value held by a buffer."""
    expr = Load(buffer.name, axes_of(buffer.shape), buffer.dtype)
    return Value(buffer.shape, buffer.dtype, buffer.device, expr)


# Origins ------------------------------------------------------------------------------------------------------------


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_PYTORCH = os.path.dirname(torch.__file__) + os.sep
_COMPILER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The folder of this compiler, whose frames are left out of origins: this module is `fusion.lowering.builder`."""


def origin_of(node: fx.Node) -> Origin:
    """Locate an fx node in the user's program: its module, and the innermost line outside PyTorch, if there is one.

    Nodes of backward have the module of the operation that they are the gradient of.
    """
    matches = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    frames = [frame for frame in matches if not frame[0].startswith(_COMPILER)]
    file, number = ([frame for frame in frames if not frame[0].startswith(_PYTORCH)] or frames or [("", "")])[-1]
    line = f"{_printable(os.path.basename(file))}:{number}" if file else ""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = ""
    if stack:
        path, _ = list(stack.values())[-1]
        # Dynamo writes L['self'].layers[0] or L['fn']._modules['0']: the root goes, indices become names.
        parts = re.sub(r"^(L\['\w+'\]|self)", "", str(path)).replace("._modules", "")
        module = re.sub(r"\['?([^'\]]+)'?\]", r".\1", parts).strip(".")
    return Origin(node.name, module, line, file if _printable(file) == file else "")


def _printable(name: str) -> str:
    """Return the name of a file with escapes for line ends and undecodable bytes, which a comment cannot hold.

    >>> _printable("a\\nb.py")
    'a\\\\nb.py'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in name)
