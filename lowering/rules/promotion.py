"""Applies formulas to tensors: the dtype of the computation, the dtype of the result, and the shape.

`compose` follows PyTorch's type promotion; `combine` keeps dtypes, for rules that have converted their operands.
Half-precision operands are computed in float32 and rounded once at the end (`Cast(implicit=True)`), as in eager's
kernels for a single operation; fusion may drop that rounding (`expr.make_cast`).  Complex results are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import sympy
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from fusion.lowering.builder import GENERATED_DTYPES
from fusion.lowering.checks.checked import required
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.expr import make_cast
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.ir.scalar_ops import HALVES, ScalarName
from fusion.lowering.ir.sizes import is_condition
from fusion.lowering.rules.formula import Term, call, literal
from fusion.lowering.value import Shape, Value, broadcast_shapes, broadcast_to

Argument: TypeAlias = "Value | sympy.Expr | bool | int | float"

Kind = ELEMENTWISE_TYPE_PROMOTION_KIND


def pointwise(name: ScalarName, *args: Argument, kind: Kind = Kind.DEFAULT) -> Value:
    """Apply the scalar operation `name` to broadcast operands under promotion `kind`."""
    return compose(lambda *terms: call(name, *terms), *args, kind=kind)


def compose(build: Callable[..., Term], *args: Argument, kind: Kind = Kind.DEFAULT) -> Value:
    """Apply a formula to broadcast operands: `build` maps the promoted operands, a term each, to the result."""
    compute, result = promote(args, kind)
    shape, device = common_place(args)
    terms = [term_of(arg, shape, compute) for arg in args]
    return Value(shape, result, device, build(*terms).to(result, implicit=True).expr)


def combine(build: Callable[..., Term], *values: Value) -> Value:
    """Apply a formula to broadcast values that keep their dtypes; the result has the dtype of the term."""
    shape, device = common_place(values)
    term = build(*(Term(broadcast_to(value, shape).expr) for value in values))
    return Value(shape, term.dtype, device, term.expr)


def requiring(requirement: Requirement, test: Callable[..., Term], x: Value, *others: Value) -> Value:
    """Return x; `test` has to hold for each element of x and the elements of `others` that broadcast against it."""
    return combine(lambda *terms: Term(required(terms[0].expr, test(*terms).expr, requirement)), x, *others)


def convert(value: Value, dtype: torch.dtype) -> Value:
    """Convert `value` to `dtype`, explicitly."""
    return Value(value.shape, dtype, value.device, make_cast(value.expr, dtype))


def rounded(value: Value, dtype: torch.dtype) -> Value:
    """Convert `value` to the dtype eager stores it in; it is rounded only where stored (`make_cast`)."""
    return Value(value.shape, dtype, value.device, make_cast(value.expr, dtype, implicit=True))


def shaped_as(like: Value, term: Term) -> Value:
    """Return `term`, which is over the axes of `like`, as a tensor of its shape."""
    return Value(like.shape, term.dtype, like.device, term.expr)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are computed and summed: float32 for 16-bit floats."""
    return torch.float32 if dtype in HALVES else dtype


def widen(value: Value) -> Value:
    """Convert `value` to the dtype that it is computed in."""
    return convert(value, widened(value.dtype))


def common_place(args: Sequence[Argument]) -> tuple[Shape, torch.device]:
    """Return the broadcast shape and the device of the result; 0-d CPU tensors do not decide the device."""
    tensors = [arg for arg in args if isinstance(arg, Value)]
    shape = broadcast_shapes([tensor.shape for tensor in tensors])
    ranked = sorted(tensors, key=lambda tensor: tensor.rank == 0 and tensor.device.type == "cpu")
    device = ranked[0].device
    if any(tensor.device != device for tensor in tensors):
        raise Unsupported("operands live on different devices")
    return shape, device


def term_of(arg: Argument, shape: Shape, dtype: torch.dtype) -> Term:
    """Return an operand converted to `dtype` and broadcast to `shape`, as a term over the axes of `shape`."""
    if isinstance(arg, Value):
        return Term(make_cast(broadcast_to(arg, shape).expr, dtype))
    return Term(literal(arg, dtype))


def promote(args: Sequence[Argument], kind: Kind) -> tuple[torch.dtype, torch.dtype]:
    """Return (dtype to compute in, dtype of the result) under PyTorch's promotion rules.

    Raises:
        Unsupported: one of them is complex or otherwise not generated.
    """
    keys: list[tuple[torch.dtype, bool] | type] = []
    for arg in args:
        if isinstance(arg, Value):
            keys.append((arg.dtype, arg.rank > 0))
        elif isinstance(arg, sympy.Expr):
            keys.append(bool if is_condition(arg) else int if arg.is_integer else float)
        elif isinstance(arg, (bool, int, float)):
            keys.append(type(arg))
        else:
            raise Unsupported(f"operand {arg!r} is neither a tensor nor a real number")
    compute, result = _promote(tuple(keys), kind, torch.get_default_dtype())
    if compute not in GENERATED_DTYPES or result not in GENERATED_DTYPES:
        raise Unsupported(f"computed in {compute}")
    return compute, result


@lru_cache(maxsize=4096)
def _promote(
    keys: tuple[tuple[torch.dtype, bool] | type, ...], kind: Kind, default: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    """Promote, where `default` is the dtype of floats computed from integers."""
    samples = [
        key(1) if isinstance(key, type) else torch.empty((1,) if key[1] else (), dtype=key[0], device="meta")
        for key in keys
    ]
    compute, result = elementwise_dtypes(*samples, type_promotion_kind=kind)
    return compute, result


def overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    """Return the functional overloads of an operation: no `out=` and nothing mutated."""
    candidates: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    return [o for o in candidates if not o._schema.is_mutable and not any(a.is_out for a in o._schema.arguments)]
