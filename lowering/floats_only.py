"""Operations that eager has for floating-point tensors only, although PyTorch's trace accepts integers.

Input: a call; a call on integers or bools is refused, so that it stays a call and raises eager's own error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from fusion.lowering.errors import Unsupported

aten = torch.ops.aten

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


def refuse_integers(node: fx.Node) -> None:
    """Refuse a call whose first tensor eager refuses for its dtype.

    Raises:
        Unsupported: the operation is for floats only, and the tensor holds integers or bools.
    """
    target = node.target
    if isinstance(target, OpOverload) and target.overloadpacket in FLOATS_ONLY:
        first = node.args[0]
        assert isinstance(first, fx.Node)
        dtype = first.meta["val"].dtype
        if not _has_floats(dtype):
            raise Unsupported(f"{target.overloadpacket.__name__} of {dtype}")


def leaving_integers(parts: Callable[..., object]) -> Callable[..., object]:
    """Return the decomposition `parts` of such an operation, which leaves calls on integers as they are."""

    @wraps(parts)
    def decomposed(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        return parts(x, *args, **kwargs) if _has_floats(x.dtype) else NotImplemented

    return decomposed


def _has_floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
