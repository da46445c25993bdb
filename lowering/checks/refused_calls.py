"""Recognises calls that eager refuses although PyTorch traces them: for numbers too large, or operands' dtypes.

Input: a call; a call that eager refuses is refused here, too, so that it stays a call and raises eager's own error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps

import sympy
import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from fusion.lowering.errors import Unsupported

aten = torch.ops.aten

CONVERTING: frozenset[OpOverloadPacket] = frozenset(
    (
        aten.addcdiv,
        aten.addcmul,
        aten.clamp,
        aten.clamp_max,
        aten.clamp_min,
        aten.constant_pad_nd,
        aten.fill,
        aten.full,
        aten.full_like,
        aten.hardtanh,
        aten.index_fill,
        aten.masked_fill,
        aten.new_full,
        aten.scalar_tensor,
        aten.scatter,
        aten.threshold,
        aten.where,
    )
)
"""Operations whose number arguments become elements of the result, are compared with them or multiply them.

Eager refuses a number that does not fit into the dtype of the result.  Other operations wrap it around (`x + 300` with
uint8) or promote it.
"""


FLOATS_ONLY: frozenset[OpOverloadPacket] = frozenset(
    (
        aten._cdist_forward,
        aten._log_softmax,
        aten._native_batch_norm_legit,
        aten._pdist_forward,
        aten._prelu_kernel,
        aten._safe_softmax,
        aten._softmax,
        aten.adaptive_max_pool2d,
        aten.adaptive_max_pool3d,
        aten.binary_cross_entropy,
        aten.frac,
        aten.glu,
        aten.huber_loss,
        aten.log_sigmoid_forward,
        aten.logaddexp2,
        aten.max_unpool2d,
        aten.max_unpool3d,
        aten.mse_loss,
        aten.native_batch_norm,
        aten.nll_loss2d_forward,
        aten.nll_loss_forward,
        aten.smooth_l1_loss,
    )
)
"""Operations that eager has for floating-point tensors only, although PyTorch's trace accepts integers."""


OF_ONE_DTYPE: dict[OpOverloadPacket, tuple[int, int]] = {
    aten.addmm: (0, 1),
    aten.heaviside: (0, 1),
    aten.index_add: (0, 3),
    aten.index_put: (0, 2),
    aten.index_reduce: (0, 3),
    aten.linalg_cross: (0, 1),
    aten.nll_loss2d_forward: (0, 2),
    aten.nll_loss_forward: (0, 2),
}
"""Operations that eager refuses where two operands differ in dtype, although PyTorch's trace promotes them."""


def refuse_as_eager(node: fx.Node) -> None:
    """Refuse a call that eager refuses, for the numbers or the dtypes of its arguments.

    Raises:
        Unsupported: a number does not fit into the dtype of the result, there are integers where only floats may be, or
            operands differ in dtype that may not.
    """
    _refuse_overflow(node)
    if isinstance(node.target, OpOverload):
        values = [arg.meta.get("val") if isinstance(arg, fx.Node) else None for arg in node.args]
        _refuse_dtypes(node.target.overloadpacket, values)


def _refuse_overflow(node: fx.Node) -> None:
    target, val = node.target, node.meta.get("val")
    if not (isinstance(target, OpOverload) and target.overloadpacket in CONVERTING and isinstance(val, torch.Tensor)):
        return
    arguments = target._schema.arguments
    arguments_and_values = [*zip(arguments, node.args, strict=False)]
    arguments_and_values += [
        (argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs
    ]
    for argument, number in arguments_and_values:
        if "number" not in str(argument.type) or not isinstance(number, (int, float)):
            continue
        if not fits(number, val.dtype):
            raise Unsupported(f"{number} does not fit into {val.dtype}")


def _refuse_dtypes(packet: OpOverloadPacket, values: Sequence[object]) -> None:
    """Refuse integers where eager has floats only, and two dtypes where it has one."""
    dtypes = [value.dtype if isinstance(value, torch.Tensor) else None for value in values]
    if packet in FLOATS_ONLY and dtypes[0] is not None and not _has_floats(dtypes[0]):
        raise Unsupported(f"{packet.__name__} of {dtypes[0]}")
    one, other = (dtypes[k] if k < len(dtypes) else None for k in OF_ONE_DTYPE.get(packet, (0, 0)))
    if one is not None and other is not None and one is not other:
        raise Unsupported(f"{packet.__name__} of {one} and {other}")


def refuse_wide(number: sympy.Expr) -> None:
    """Refuse a number that is computed with a constant of more than 64 bits: kernels compute in 64.

    Raises:
        Unsupported: there is such a constant.
    """
    if any(not -(1 << 63) <= int(constant) < 1 << 63 for constant in number.atoms(sympy.Integer)):
        raise Unsupported(f"{number} needs more than 64 bits")


def fits(number: int | float, dtype: torch.dtype) -> bool:
    """Return whether eager converts a number to `dtype`; negative ones convert to unsigned integers, too.

    >>> fits(300, torch.uint8), fits(-255, torch.uint8), fits(1e10, torch.float16), fits(-math.inf, torch.float16)
    (False, True, False, True)
    """
    if isinstance(number, bool) or dtype is torch.bool:
        return True
    if dtype.is_floating_point:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    if dtype.is_complex:
        return True
    info = torch.iinfo(dtype)
    return (info.min or -info.max) <= number <= info.max


def leaving_refused(op: OpOverload, parts: Callable[..., object]) -> Callable[..., object]:
    """Return the decomposition `parts` of an operation, which leaves calls as they are whose dtypes eager refuses.

    The decomposition raises `Unsupported` for an operation that may write to its arguments (batch norm), because a
    traced graph has no writes: then the whole region runs eagerly, and eager refuses the call.
    """
    if op.overloadpacket not in FLOATS_ONLY and op.overloadpacket not in OF_ONE_DTYPE:
        return parts

    @wraps(parts)
    def decomposed(*args: object, **kwargs: object) -> object:
        try:
            _refuse_dtypes(op.overloadpacket, args)
        except Unsupported:
            if op._schema.is_mutable:
                raise
            return NotImplemented
        return parts(*args, **kwargs)

    return decomposed


def of_matching_dtypes(parts: Callable[..., object]) -> Callable[..., object]:
    """Return the decomposition `parts` of a batch norm, which raises `Unsupported` for dtypes that eager refuses.

    On a CPU eager has no batch norm of complex numbers, and takes weights, biases and statistics of the input's dtype,
    or of float32 beside 16-bit floats; PyTorch's trace accepts all.  Where in doubt, eager decides.
    """

    @wraps(parts)
    def decomposed(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        accepted = {x.dtype, torch.float32} if x.dtype.itemsize == 2 else {x.dtype}
        others = {arg.dtype for arg in (*args[:4], *kwargs.values()) if isinstance(arg, torch.Tensor)}
        if x.device.type == "cpu" and (x.dtype.is_complex or not others <= accepted):
            raise Unsupported(f"a batch norm of {', '.join(sorted(map(str, {x.dtype, *others})))}")
        return parts(x, *args, **kwargs)

    return decomposed


def _has_floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
