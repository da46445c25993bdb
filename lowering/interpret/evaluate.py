"""Evaluates expressions, and folds of expressions, by torch operations over whole iteration spaces.

Input: expressions, a box (each axis with the range of it that is evaluated) and the values of the names in them;
output: tensors with one dimension per axis.  Each axis is one dimension of a broadcast, so a value is computed only
over the axes it varies with.  Reading outside a tensor where no mask forbids it, an unknown name and a dtype that is
not as stated are refused with `VerifyError`, a failed check with `CheckFailed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.errors import VerifyError
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.interpret.folds import fold, scan
from fusion.lowering.interpret.strided import strided_view
from fusion.lowering.ir.error_messages import worded
from fusion.lowering.ir.expr import (
    Cast,
    Const,
    Expr,
    Index,
    IndexValue,
    Load,
    Op,
    Random,
    TileRef,
    concrete,
    postorder,
)
from fusion.lowering.ir.requirements import requirement_of
from fusion.lowering.ir.scalar_ops import (
    SCALAR_OPS,
    FoldName,
    ScanName,
    ScatterName,
    accumulator,
    identity,
    keeps_position,
)
from fusion.lowering.ir.sizes import size_value
from fusion.lowering.random import philox

Ranges = dict[sympy.Symbol, range]
"""A box: each axis with the range of it that is evaluated, in the order of the dimensions."""

BOX_POINTS = 1 << 22
"""Points of one box: a temporary of int64 indices is then 32 MiB."""

CPU = torch.device("cpu")


# Expressions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scope:
    """The values of the names in an expression.

    Attributes:
        buffers: tensors by the name that loads use, with as many dimensions as the index of the load.
        sizes: size symbols.
        tiles: results of folds by `tile_name`, one dimension per axis of the box, of size 1 where they do not vary.
        exact: keep float types as they are; otherwise all are float64.
        device: where to compute.
    """

    buffers: Mapping[str, torch.Tensor]
    sizes: Mapping[sympy.Symbol, int]
    tiles: Mapping[str, torch.Tensor]
    exact: bool = True
    device: torch.device = CPU

    def dtype(self, stated: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of dtype `stated` are held."""
        return torch.float64 if stated.is_floating_point and not self.exact else stated


def evaluate(roots: Sequence[Expr], axes: Ranges, scope: Scope, *, fresh: bool = True) -> list[torch.Tensor]:
    """Evaluate `roots` over a box that is not empty.

    Args:
        fresh: return no tensor that shares memory with a buffer: it may be kept while buffers are written to.

    Returns:
        One tensor per root with one dimension per axis, of size 1 where the value does not vary along it.

    Raises:
        VerifyError: an unmasked load reaches outside its buffer, or a name or dtype is not as stated.

    >>> i = sympy.Symbol("i", integer=True)
    >>> x = Load("x", (2 * i,), torch.float32)
    >>> scope = Scope({"x": torch.tensor([1.0, 2.0, 3.0, 4.0])}, {}, {})
    >>> evaluate([Op("neg", (x,), torch.float32)], {i: range(2)}, scope)
    [tensor([-1., -3.])]
    """
    point = _Point(axes, scope)
    order = postorder(*roots)
    users: dict[Expr, int] = dict.fromkeys(roots, 1)  # a root is never freed
    for node in order:
        for child in node.children():
            users[child] = users.get(child, 0) + 1
    values: dict[Expr, torch.Tensor] = {}
    for node in order:
        children = node.children()
        values[node] = point.value(node, [values[child] for child in children])
        for child in children:
            users[child] -= 1
            if not users[child]:
                del values[child]
    results = [values[root] for root in roots]
    if fresh:
        memories = {tensor.untyped_storage()._cdata for tensor in scope.buffers.values()}
        results = [
            each.clone(memory_format=torch.contiguous_format) if each.untyped_storage()._cdata in memories else each
            for each in results
        ]
    return [each.expand([1] * len(axes)) if each.ndim == 0 else each for each in results]


def tile_name(ref: TileRef) -> str:
    """Return the key in `Scope.tiles` of a fold's value, or of its value before the current block."""
    return f"{ref.name}'" if ref.before else ref.name


class _Point:
    """Evaluates single expressions at all points of a box, from the values of their children."""

    def __init__(self, axes: Ranges, scope: Scope) -> None:
        self.scope, self.axes = scope, axes
        self.positions: dict[sympy.Symbol, torch.Tensor] = {}
        for k, (axis, span) in enumerate(axes.items()):
            shape = [len(span) if d == k else 1 for d in range(len(axes))]
            self.positions[axis] = torch.arange(span.start, span.stop, device=scope.device).view(shape)

    def value(self, node: Expr, children: list[torch.Tensor]) -> torch.Tensor:
        """Return the value of `node` at every point, in a shape that broadcasts over the box."""
        scope = self.scope
        match concrete(node):
            case Load() as load:
                return self.load(load, children)
            case Const(value, dtype):
                return torch.tensor(value, dtype=scope.dtype(dtype), device=scope.device)
            case IndexValue(index, dtype):
                return self.index(index).to(scope.dtype(dtype))
            case Cast(dtype=dtype):
                return children[0].to(scope.dtype(dtype))
            case Random(kind, _, offset, dtype):
                draw = philox.uniform if kind == "uniform" else philox.normal
                return draw(children[0], self.index(offset)).to(scope.dtype(dtype))
            case TileRef() as tile:
                return scope.tiles[tile_name(tile)]
            case Op() as op:
                return self._applied(op, children)
            case unknown:
                assert_never(unknown)

    def _applied(self, op: Op, args: list[torch.Tensor]) -> torch.Tensor:
        """Apply a scalar operation to the values of its operands."""
        if op.name == "checked":
            check_range(*args)
        if op.name == "bounded":
            check_bounds(*args)
        result = SCALAR_OPS[op.name].meaning(*args)
        if result.dtype is not self.scope.dtype(op.dtype):
            raise VerifyError(f"{op.name} of {args[-1].dtype} gives {result.dtype}, not {op.dtype}")
        return result

    def index(self, expr: sympy.Expr) -> torch.Tensor:
        """Evaluate an index expression as int64."""
        if isinstance(expr, sympy.Symbol) and expr in self.positions:
            return self.positions[expr]
        if not expr.free_symbols & self.positions.keys():
            return torch.tensor(size_value(expr, self.scope.sizes), device=self.scope.device)
        if expr.is_Add or expr.is_Mul:  # sizes are evaluated together: in s0/2 only the quotient is an integer
            fixed = [arg for arg in expr.args if not arg.free_symbols & self.positions.keys()]
            args = [self.index(arg) for arg in expr.args if arg not in fixed]
            args += [self.index(expr.func(*fixed))] if fixed else []
            return reduce(torch.add if expr.is_Add else torch.mul, args)
        args = [self.index(arg) for arg in expr.args]
        if expr.is_Pow:
            return torch.pow(*args)
        if isinstance(expr, FloorDiv):
            return torch.div(*args, rounding_mode="floor")
        if isinstance(expr, Mod):
            return torch.remainder(*args)
        raise VerifyError(f"an index has no operation {expr.func.__name__}: {expr}")

    def load(self, node: Load, children: list[torch.Tensor]) -> torch.Tensor:
        """Return the elements that a load reads; masked elements are 0, and their positions are not checked."""
        tensor = self.scope.buffers.get(node.buffer)
        if tensor is None:
            raise VerifyError(f"{node.buffer} is read before it is written")
        if tensor.ndim != len(node.index):
            raise VerifyError(f"{node.buffer} has {tensor.ndim} dimensions, its index has {len(node.index)}")
        dtype = self.scope.dtype(node.dtype)
        if tensor.dtype is not dtype:
            raise VerifyError(f"{node.buffer} holds {tensor.dtype}, it is loaded as {node.dtype}")
        rest = iter(children)
        if (view := strided_view(tensor, node.index, self.axes, self.scope.sizes)) is not None:
            view = view.to(self.scope.device)
            return view if node.mask is None else _zeros_outside(view, next(rest))
        where = [next(rest) if isinstance(i, Expr) else self.index(i) for i in node.index]
        mask = None if node.mask is None else next(rest)
        offset = torch.zeros((), dtype=torch.int64, device=self.scope.device)
        for position, size, stride, index in zip(where, tensor.shape, tensor.stride(), node.index, strict=True):
            known = self.axes.get(index) if isinstance(index, sympy.Symbol) else None
            if known is None or known.start < 0 or known.stop > size:
                check_positions(node.buffer, node.index, position, size, mask)
            offset = offset + position * stride
        if mask is not None:
            offset = torch.where(mask, offset, 0)
        if tensor.numel() == 0:  # all points are masked
            return torch.zeros(offset.shape, dtype=dtype, device=self.scope.device)
        elements = _gather(tensor, offset.to(tensor.device)).to(self.scope.device)
        return elements if mask is None else _zeros_outside(elements, mask)


def check_positions(
    name: str, index: Sequence[Index], position: torch.Tensor, size: int, mask: torch.Tensor | None = None
) -> None:
    """Refuse positions outside `[0, size)` where the mask allows them; `name[index]` is the access they belong to."""
    outside = (position < 0) | (position >= size)
    if mask is not None:
        outside = outside & mask
    if bool(outside.any()):
        first = int(position.broadcast_to(outside.shape)[outside][0])
        text = ", ".join("…" if isinstance(i, Expr) else str(i) for i in index)
        raise VerifyError(f"{name}[{text}] reaches {first}, outside [0, {size})")


def check_range(index: torch.Tensor, wrap: torch.Tensor, last: torch.Tensor, dim: torch.Tensor) -> None:
    """Refuse positions that are not in `[-wrap, last]`, and requirements that are not fulfilled, as eager does."""
    outside = (index < -wrap) | (index > last)
    if bool(outside.any()):
        if (requirement := requirement_of(int(dim))) is not None:
            raise requirement.failure()
        first = int(index.broadcast_to(outside.shape)[outside][0])
        wording, along = worded(int(dim))
        raise wording.failure(first, along, int(last) + 1)


def check_bounds(condition: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor) -> None:
    """Refuse bounds of a condition that do not hold: it implies `outer`, and `inner` implies it."""
    if bool((condition & ~outer).any()) or bool((inner & ~condition).any()):
        raise VerifyError("a condition does not keep its bounds")


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by width: elements are moved as integers, because torch does not index tensors of every dtype."""


def _gather(tensor: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    flat = flat_view(tensor)
    return flat.view(_BITS[flat.itemsize])[offset].view(flat.dtype) if flat.itemsize in _BITS else flat[offset]


def _zeros_outside(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` where `mask` is true, else 0; selected as bits, because not every dtype supports `where`."""
    bits = values.view(_BITS[values.itemsize]) if values.itemsize in _BITS else values
    return torch.where(mask, bits, torch.zeros((), dtype=bits.dtype, device=bits.device)).view(values.dtype)


def scatter(flat: torch.Tensor, offset: torch.Tensor, value: torch.Tensor) -> None:
    """Assign `flat[offset] = value`; the value broadcasts to the shape of `offset` and has the dtype of `flat`."""
    value = value.expand(offset.shape).contiguous()
    if flat.itemsize in _BITS:
        flat, value = flat.view(_BITS[flat.itemsize]), value.view(_BITS[flat.itemsize])
    flat[offset] = value


_UPDATES: dict[ScatterName, str] = {"sum": "sum", "prod": "prod", "max": "amax", "min": "amin"}


def update(
    op: ScatterName, flat: torch.Tensor, offset: torch.Tensor, value: torch.Tensor, where: torch.Tensor | None = None
) -> None:
    """Apply `flat[offset] op= value` at every point of `offset` at which `where` holds, one after the other.

    >>> total = torch.zeros(3)
    >>> update("sum", total, torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]))
    >>> total
    tensor([2., 0., 4.])
    """
    value = value.expand(offset.shape)
    if where is not None:
        held = where.expand(offset.shape)
        offset, value = offset[held], value[held]
    if op == "store":
        scatter(flat, offset.reshape(-1), value.reshape(-1))
    else:
        flat.scatter_reduce_(0, offset.reshape(-1), value.reshape(-1), _UPDATES[op])


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, from its first element to its last one, as one dimension."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (reach + 1 if tensor.numel() else 0,), (1,), tensor.storage_offset())


# Folds ----------------------------------------------------------------------------------------------------------------


def fold_over(
    op: FoldName, exprs: Sequence[Expr], over: Sequence[sympy.Symbol], axes: Ranges, scope: Scope, cost: int
) -> torch.Tensor:
    """Fold `exprs` over the axes `over` of a box, which keep size 1, in smaller boxes if `cost` points are too many."""
    dims = [list(axes).index(axis) for axis in over]
    if any(not len(axes[axis]) for axis in over):
        dtype = exprs[0].dtype if op != "dot" else accumulator(op, exprs[0].dtype)
        value = 0 if keeps_position(op) else identity(op, dtype)
        dtype = torch.int64 if keeps_position(op) else scope.dtype(dtype)
        return torch.full([1] * len(axes), value, dtype=dtype, device=scope.device)
    parts: list[list[torch.Tensor]] = []
    for box in boxes({axis: axes[axis] for axis in over}, pieces(cost)):
        tiles = {name: _part(tile, axes, box) for name, tile in scope.tiles.items()}
        args = evaluate(exprs, {**axes, **box}, replace(scope, tiles=tiles), fresh=False)
        whole = [len(box[axis]) if axis in box else -1 for axis in axes]
        args[0] = args[0].expand(whole)  # so that an axis counts even if no operand varies along it
        if op != "dot":
            args = [arg.expand(whole) for arg in args]
        parts.append(fold(op, args, dims))
    if len(parts) == 1:
        return parts[0][-1]
    joined = [torch.cat([part[k] for part in parts], dim=dims[0]) for k in range(len(parts[0]))]
    return fold("sum" if op == "dot" else op, joined, dims)[-1]


def scan_along(op: ScanName, exprs: Sequence[Expr], along: sympy.Symbol, axes: Ranges, scope: Scope) -> torch.Tensor:
    """Scan `exprs` by `op` along an axis that `axes` holds in full."""
    args = torch.broadcast_tensors(*evaluate(exprs, axes, scope))  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    dim = list(axes).index(along)
    whole = [len(axes[along]) if d == dim else -1 for d in range(len(axes))]
    return scan(op, [arg.expand(whole) for arg in args], dim)


def _part(tile: torch.Tensor, axes: Ranges, box: Ranges) -> torch.Tensor:
    """Narrow a tile over `axes` to `box`."""
    for d, axis in enumerate(axes):
        if axis in box and tile.shape[d] != 1:
            tile = tile.narrow(d, box[axis].start - axes[axis].start, len(box[axis]))
    return tile


# Boxes ----------------------------------------------------------------------------------------------------------------


def pieces(cost: int) -> int:
    """Return into how many boxes to cut a space whose evaluation takes `cost` points at once."""
    return -(-cost // BOX_POINTS)


def boxes(axes: Ranges, count: int) -> Iterator[Ranges]:
    """Cut a box into about `count` (or one per point) boxes, along its leading axes.

    >>> i, j = sympy.symbols("i j")
    >>> list(boxes({i: range(2), j: range(6)}, 4))[:2]
    [{i: range(0, 1), j: range(0, 3)}, {i: range(0, 1), j: range(3, 6)}]
    """
    if count <= 1 or not axes:
        yield dict(axes)
        return
    (axis, span), *rest = axes.items()
    step = max(1, len(span) // count)
    for start in range(span.start, span.stop, step):
        part = range(start, min(start + step, span.stop))
        for tail in boxes(dict(rest), -(-count // max(1, len(span)))):
            yield {axis: part, **tail}


def points_of(varies: Sequence[Set[sympy.Symbol]], axes: Ranges) -> int:
    """Return the largest number of points among several values, given the axes that each varies over."""
    return max(math.prod(len(span) for axis, span in axes.items() if axis in used) for used in varies)
