"""Defines the allowed difference to eager, by dtype, operation and device.

The numbers are those of PyTorch's own tests: of `torch.testing`, and for some operations on halves those of the test of
its compiler over the same table, `inductor_override_kwargs` in `test/inductor/test_torchinductor_opinfo.py`.
That test's larger tolerances in float32 (ten times for any operation, more for some) are not needed here.  It compares
some operations with eager in float32, which is replaced by the comparison with eager in float64.
"""

from __future__ import annotations

import torch

OF_DTYPE = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex32: (1e-3, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
"""Relative and absolute; everything else is compared exactly."""

OF_HALVES = {
    "cpu": {
        "nn.functional.multilabel_soft_margin_loss": (2e-3, 3e-4),
        "nn.functional.triplet_margin_with_distance_loss": (3e-3, 3e-4),
        "softmax": (2e-2, 1e-4),
        "_unsafe_masked_index_put_accumulate": (1e-2, 1e-4),
    },
    "cuda": {
        "_softmax_backward_data": (2e-3, 8e-3),
        "_unsafe_masked_index_put_accumulate": (1e-2, 1e-4),
        "baddbmm": (2e-3, 2e-3),
        "cummax": (2e-3, 5e-4),
        "cumprod": (2e-3, 7e-5),
        "masked.softmin": (1e-2, 1e-4),
        "nn.functional.normalize": (5e-2, 1e-3),
        "nn.functional.softmin": (1e-2, 1e-4),
        "nn.functional.tanhshrink": (1e-3, 3e-4),
        "nn.functional.triplet_margin_loss": (2e-2, 1e-4),
        "nn.functional.triplet_margin_with_distance_loss": (2e-2, 1e-4),
        "sinc": (2e-3, 8e-3),
        "softmax": (2e-2, 1e-4),
        "tanh": (1e-2, 1e-4),
        "torch.ops.aten._safe_softmax.default": (2e-2, 5e-4),
    },
}
"""The same of float16, by device and operation."""


def tolerance(operation: str, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Return the relative and absolute tolerance for results and gradients of an operation.

    >>> tolerance("softmax", torch.float16, "cpu"), tolerance("softmax", torch.float32, "cpu")
    ((0.02, 0.0001), (1.3e-06, 1e-05))
    """
    usual = OF_DTYPE.get(dtype, (0.0, 0.0))
    return OF_HALVES[device].get(operation, usual) if dtype is torch.float16 else usual
